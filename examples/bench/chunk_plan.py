"""Time to plan the chunks of a packed tree: budget 0.5 s for 1,000,000 packed tokens on one core.

    OMP_NUM_THREADS=1 python -m examples.bench.chunk_plan [--tokens 1000000] [--chunk 64] [--repeats 3]
    [--only NAME]

The tree is built beforehand. *plan*: blocks, parents, replay. *index*: the packed tokens of all blocks and the
owner of every token. *boundary*, *final*: the rounds of either model, and what each of them gathers; an op needs
one of the two. *all*: plan, index and the slower model, the best of the repeats; the ratio to the budget is that
of *all*. *proved*: whether the longest sequences / the handoffs are the least possible, of either model.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator

# One core, as the budget says; before numpy and torch read it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from treecompile.runtime.chunks import ChunkPlan, chunk_plan
from treecompile.runtime.tree import RolloutTree

BUDGET = 0.5
Forks = list[tuple[int, int, int]]


def rows_of(forks: Forks) -> RolloutTree:
    """The tree of rows of fresh tokens: (row copied from, tokens copied, length of the row)."""
    longest = max(length for _, _, length in forks)
    ids: NDArray[np.int32] = np.zeros((len(forks), longest), np.int32)
    fresh = 1
    for b, (source, shared, length) in enumerate(forks):
        ids[b, :shared] = ids[source, :shared]
        ids[b, shared:length] = np.arange(fresh, fresh + length - shared)
        fresh += length - shared
    used = np.array([length for _, _, length in forks])
    return RolloutTree.from_grid([ids], visible=np.arange(longest) < used[:, None])


def groups(tokens: int) -> Forks:
    """Prompts of 1,000 tokens with 16 answers of about 2,000 each."""
    random, total = np.random.default_rng(0), 0
    out: Forks = []
    while total < tokens:
        first = len(out)
        for i in range(16):
            own = int(random.integers(1_000, 3_000))
            out.append((first, 1_000 * (i > 0), 1_000 + own))
            total += own + 1_000 * (i == 0)
    return out


def turns(tokens: int) -> Forks:
    """Agents: each of 8 rows in a group leaves the one before at a later turn."""
    random, total = np.random.default_rng(1), 0
    out: Forks = []
    while total < tokens:
        for i in range(8):
            shared = 0 if i == 0 else int(out[-1][2] * i / 9)
            own = int(random.integers(500, 4_000))
            out.append((len(out) - 1 if i else len(out), shared, shared + own))
            total += own
    return out


def random_tree(tokens: int, own: int) -> Forks:
    """Rows that leave a random earlier row at a random place with ``own`` fresh tokens on average."""
    random, total = np.random.default_rng(2), 2 * own
    out = [(0, 0, 2 * own)]
    while total < tokens:
        source = int(random.integers(len(out)))
        shared, fresh = int(random.integers(out[source][2])), int(random.integers(1, 2 * own))
        out.append((source, shared, shared + fresh))
        total += fresh
    return out


def comb(tokens: int) -> Forks:
    """A long row, and short ones that leave it every 2,000 tokens."""
    teeth = tokens // 4_000
    return [
        (0, 0, tokens // 2),
        *((0, 2_000 * k + 7, 4_000 * (k + 1) - 2_000 * k) for k in range(teeth // 8)),
    ]


def binary(tokens: int) -> Forks:
    """A complete binary tree of 4,096 leaves."""
    levels = 12
    segment = max(1, tokens // (2 << levels))
    length = segment * (levels + 1)
    out = [(0, 0, length)]
    for row in range(1, 1 << levels):
        low = row & -row
        out.append((row - low, segment * (levels + 1 - low.bit_length()), length))
    return out


def short(tokens: int) -> Forks:
    """As many rows of one token of their own as tokens, up to 20,000, from a trunk of 200 tokens."""
    return [(0, 0, 200), *((0, 150, 151) for _ in range(min(tokens, 20_000)))]


def trees(tokens: int) -> Iterator[tuple[str, Forks]]:
    yield "one row", [(0, 0, tokens)]
    yield "groups of 16", groups(tokens)
    yield "agent turns", turns(tokens)
    yield "random tree, 2,000 a branch", random_tree(tokens, 2_000)
    yield "random tree, 200 a branch", random_tree(tokens, 200)
    yield "comb", comb(tokens)
    yield "binary, 4,096 leaves", binary(tokens)
    yield "star of one-token branches", short(tokens)


def run(tree: RolloutTree, chunk: int) -> tuple[ChunkPlan, list[float]]:
    """A plan with everything that an executor reads, and the seconds of its four parts."""
    times = [time.perf_counter()]
    plan = chunk_plan(tree, chunk)
    times.append(time.perf_counter())
    _ = plan.index, plan.owner
    times.append(time.perf_counter())
    plan.calls("boundary")
    times.append(time.perf_counter())
    plan.calls("final")
    times.append(time.perf_counter())
    return plan, np.diff(times).tolist()


def everything(parts: list[float]) -> float:
    """Seconds of what one op needs."""
    return parts[0] + parts[1] + max(parts[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="run the trees whose name contains this")
    options = parser.parse_args()
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    print(f"about {options.tokens:,} packed tokens, chunks of {options.chunk}, budget {BUDGET:.2f} s")
    print(f"numpy {np.__version__}, load average {load}")
    print(
        f"{'tree':30} {'N':>10} {'rows':>6} {'blocks':>7} {'dense':>9} {'replay':>9} {'rounds':>7} "
        f"{'plan s':>7} {'index s':>7} {'boundary s':>10} {'final s':>7} {'all s':>6} {'/ budget':>8}  proved"
    )
    for name, forks in trees(options.tokens):
        if options.only not in name:
            continue
        tree = rows_of(forks)
        timed = [run(tree, options.chunk) for _ in range(options.repeats)]
        plan, parts = min(timed, key=lambda one: everything(one[1]))
        total = everything(parts)
        both = plan.rounds("boundary"), plan.rounds("final")
        print(
            f"{name:30} {tree.n:10,} {tree.batch:6,} {plan.blocks:7,} {plan.dense_chunks:9,} "
            f"{plan.replayed:9,} {both[0].count:3}/{both[1].count:3} {parts[0]:7.3f} {parts[1]:7.3f} "
            f"{parts[2]:10.3f} {parts[3]:7.3f} {total:6.3f} {total / BUDGET:8.2f}  "
            + " ".join("/".join("yes" if p else "no" for p in r.proved) for r in both),
            flush=True,
        )


if __name__ == "__main__":
    main()
