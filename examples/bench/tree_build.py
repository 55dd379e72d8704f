"""Time to build the rollout tree of a padded batch: budget 0.1 s for 512 rows of 32k tokens on one core.

    OMP_NUM_THREADS=1 python -m examples.bench.tree_build [--rows 512] [--length 32768] [--repeats 5]
    [--only NAME]

Times per batch, the best of the repeats. *build*: the call of RolloutTree.from_grid (segments known). *all*:
that, and the arrays a packed call reads (row_index, subtree_end, column, first); *cpu* is its CPU time, which
a busy machine disturbs less. The ratio to the budget is that of *all*.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# One core, as the budget says; before numpy and torch read it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from treecompile.runtime.tree import RolloutTree

BUDGET = 0.1
VOCAB = 151_643
Ids = NDArray[Any]


@dataclass(frozen=True)
class Batch:
    name: str
    ids: Ids
    visible: Ids | None = None
    keys: tuple[Ids, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def grow(random: np.random.Generator, rows: int, length: int, fork: Callable[[int], tuple[int, int]]) -> Ids:
    """Rows of random ids; row b copies the first fork(b)[1] tokens of row fork(b)[0] < b."""
    ids = random.integers(0, VOCAB, (rows, length), dtype=np.int32)
    for b in range(1, rows):
        source, shared = fork(b)
        ids[b, :shared] = ids[source, :shared]
    return ids


def shapes(random: np.random.Generator, rows: int, length: int) -> Iterator[tuple[str, Ids]]:
    """Token grids by the shape of their tree."""
    group, prompt = 16, length // 8
    yield "groups of 16", grow(random, rows, length, lambda b: (b - b % group, prompt * (b % group > 0)))
    turns = 16
    step = length // turns
    yield (
        "agent turns",
        grow(random, rows, length, lambda b: (b - 1, (b % turns) * step - 7 if b % turns else 40)),
    )
    yield (
        "random tree",
        grow(random, rows, length, lambda b: (int(random.integers(b)), int(random.integers(length)))),
    )
    yield "nothing shared", random.integers(0, VOCAB, (rows, length), dtype=np.int32)
    yield "all equal", np.tile(random.integers(0, VOCAB, length, dtype=np.int32), (rows, 1))
    yield "comb", grow(random, rows, length, lambda b: (b - 1, b * (length // rows)))
    yield "comb reversed", grow(random, rows, length, lambda b: (b - 1, length - b * (length // rows)))
    yield "differ in the last token", grow(random, rows, length, lambda b: (0, length - 1))


def batches(rows: int, length: int) -> Iterator[Batch]:
    random = np.random.default_rng(0)
    grids = dict(shapes(random, rows, length))
    for name, ids in grids.items():
        yield Batch(f"{name}, int32", ids)
    for name, ids in grids.items():
        yield Batch(f"{name}, int64", ids.astype(np.int64))
    base = grids["groups of 16"].astype(np.int64)
    used = random.integers(length // 2, length + 1, (rows, 1))
    columns = np.arange(length)
    right, left = columns < used, columns >= length - used
    yield Batch("right-padded, int64", base, right)
    yield Batch("right-padded, int64, mask as key", base, right, (right.astype(np.int64),))
    shifted = np.zeros_like(base)
    for b in range(rows):
        shifted[b, left[b]] = base[b, : int(used[b, 0])]
    yield Batch("left-padded, int64", shifted, left)
    expanded = np.broadcast_to(columns, base.shape)
    yield Batch("positions expanded, int64", base, None, (expanded,))
    yield Batch("positions stored, int64", base, None, (np.ascontiguousarray(expanded),))
    left_positions = np.where(left, np.cumsum(left, axis=1) - 1, 1)
    yield Batch(
        "left-padded, positions, step, int64", shifted, left, (left_positions,), {"column_key": "step"}
    )
    yield Batch("exact pads, int64", shifted, left, (), {"exact": ~left})
    holes = right.copy()
    holes[:, length // 16 : length // 16 + 100] = False
    yield Batch("right-padded with a hole, int64", base, holes)
    yield Batch("scattered holes, int32", grids["groups of 16"], random.random(base.shape) < 0.95)
    documents = np.broadcast_to(columns // (length // 8), base.shape)
    yield Batch("8 documents a row, int64", base, None, (), {"documents": np.ascontiguousarray(documents)})


@dataclass(frozen=True)
class Timing:
    """Wall seconds of the tree alone and with its arrays, CPU seconds of the latter, and the tree."""

    built: float
    everything: float
    cpu: float
    tree: RolloutTree


def build(batch: Batch) -> Timing:
    begin, cpu = time.perf_counter(), time.process_time()
    tree = RolloutTree.from_grid([batch.ids, *batch.keys], visible=batch.visible, **batch.options)
    built = time.perf_counter() - begin
    for name in ("row_index", "subtree_end", "column", "first"):
        getattr(tree, name)
    return Timing(built, time.perf_counter() - begin, time.process_time() - cpu, tree)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="run the batches whose name contains this")
    options = parser.parse_args()
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    print(f"{options.rows} rows x {options.length:,} tokens, budget {BUDGET:.2f} s")
    print(f"numpy {np.__version__}, load average {load}")
    print(
        f"{'batch':38} {'N':>11} {'segments':>8} {'tokens x':>8} {'build s':>8} {'all s':>7} {'cpu s':>7} "
        f"{'/ budget':>8}"
    )
    for batch in batches(options.rows, options.length):
        if options.only not in batch.name:
            continue
        build(batch)  # the first call warms caches and pages
        times = [build(batch) for _ in range(options.repeats)]
        tree = times[0].tree
        everything = min(timing.everything for timing in times)
        print(
            f"{batch.name:38} {tree.n:11,} {len(tree.segments):8,} {tree.sharing.tokens:8.2f} "
            f"{min(timing.built for timing in times):8.3f} {everything:7.3f} "
            f"{min(timing.cpu for timing in times):7.3f} {everything / BUDGET:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
