"""The gated delta rule over trees on one GPU: `python -m examples.bench.tree_recurrence`.

Forward and backward of `tree_recurrence` alone, bf16, by executor:

- depth: combs of 1 to 32 forks on a trunk and complete binary trees of height 1 to 5, all forks within a chunk and as
  many blocks in each tree; milliseconds per level, by least squares;
- short: what a block costs in a tree of thoughts of 1 to 5 tokens (and in the rows of a file), over one of a chain;
- error: distances to fp64 in bf16, of the tree and of the same rows dense, by the same kernels; gradients of tokens
  that rows share are summed in fp64 over the rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.bench.tree_attention import Rows, Table, search, segments_of
from examples.measure import seconds_of
from treecompile.runtime.chunks import chunk_plan
from treecompile.runtime.ops import tree_recurrence, tree_recurrence_backward
from treecompile.runtime.ops.recurrence_choice import VARIABLE
from treecompile.runtime.tree import RolloutTree

CHUNK = 64
NAMES = ("output", "q", "k", "v", "gate", "beta")


def comb(forks: int, size: int, blocks: int, draw: Callable[[int], list[int]]) -> Rows:
    """Half of the blocks on a trunk, from which branches of `size` tokens fork, each within a chunk."""
    trunk = draw(CHUNK * blocks // 2)
    at = [CHUNK * (i + 1) * (blocks // 2) // forks - CHUNK // 2 + 1 for i in range(forks)]
    return [trunk, *(trunk[:fork] + draw(size) for fork in at)]


def binary(height: int, size: int, blocks: int, draw: Callable[[int], list[int]]) -> Rows:
    """A complete binary tree of segments of `size` tokens."""

    def grow(path: list[int], level: int) -> Rows:
        path = path + draw(size)
        return [path] if level == height else [*grow(path, level + 1), *grow(path, level + 1)]

    return grow([], 0)


def fitted(make: Callable[..., Rows], level: int, segments: int, blocks: int) -> Rows:
    """The tree of a level whose blocks are nearest to `blocks`: `segments` equal ones share them."""
    ids = itertools.count()

    def draw(tokens: int) -> list[int]:
        return list(itertools.islice(ids, tokens))

    def off(size: int) -> int:
        rows = make(level, size, blocks, draw)
        return abs(chunk_plan(RolloutTree.from_rows(rows), CHUNK).blocks - blocks)

    near = CHUNK * blocks // segments
    sizes = [size for size in range(near - 2 * CHUNK, near + CHUNK, 8) if size > 0 and size % CHUNK]
    return make(level, min(sizes, key=off), blocks, draw)


@dataclass
class Rule:
    """A tree and inputs of the rule on the GPU: q, k [1, N, G, D], v, grad [1, N, H, D], gate, beta [1, N, H]."""

    table: Table
    inputs: list[Tensor]
    grad: Tensor

    def __post_init__(self) -> None:
        table = np.ascontiguousarray(self.table, np.int32)
        end = torch.from_numpy(np.repeat(table[:, 3], table[:, 1] - table[:, 0])).cuda()
        self.tree = end, torch.from_numpy(table), self.grad.shape[3] ** -0.5, CHUNK

    def __call__(self) -> list[Tensor]:
        """Output and gradients of the inputs."""
        out = tree_recurrence(*self.inputs, *self.tree)
        return [out, *tree_recurrence_backward(self.grad, *self.inputs, *self.tree)]

    @property
    def blocks(self) -> int:
        return chunk_plan(RolloutTree.from_segments(self.table), CHUNK).blocks


def rule(table: Table, options: argparse.Namespace) -> Rule:
    """Random inputs for a tree: keys of length 1, decays of exp(-`decay`) to 1."""
    tokens = int(table[:, 1].max())
    g = torch.Generator("cuda").manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, options.size, device="cuda", generator=g)

    q, k = (F.normalize(normal(options.key_heads), dim=-1).bfloat16() for _ in range(2))
    v, grad = (normal(options.value_heads).bfloat16() for _ in range(2))
    gate, beta = (torch.rand(1, tokens, options.value_heads, device="cuda", generator=g) for _ in range(2))
    return Rule(table, [q, k, v, -options.decay * gate, beta], grad)


def executor(name: str) -> AbstractContextManager[Any]:
    """Have all calls run by an executor."""
    return mock.patch.dict(os.environ, {VARIABLE: name})


def milliseconds(run: Callable[[], Any], repeats: int) -> list[float]:
    """Sorted times of single calls, host included, after two more."""
    run(), run()
    return sorted(1e3 * seconds_of(run, time.perf_counter) for _ in range(repeats))


def depth(options: argparse.Namespace) -> None:
    """Times over levels."""
    shapes: list[tuple[str, Callable[..., Rows], dict[int, int]]] = [
        ("comb", comb, {forks: 2 * forks for forks in (1, 2, 4, 8, 16, 32)}),
        ("binary", binary, {height: 2 ** (height + 1) - 1 for height in (1, 2, 3, 4, 5)}),
    ]
    for shape, make, levels in shapes:
        trees = {n: RolloutTree.from_rows(fitted(make, n, of, options.blocks)) for n, of in levels.items()}
        rules = {n: rule(tree.segments, options) for n, tree in trees.items()}
        for name in options.executors.split(","):
            found = {}
            with executor(name):
                for level, made in rules.items():
                    times = milliseconds(made, options.repeats)
                    found[level] = statistics.median(times)
                    print(
                        f"{shape:6} {level:3} levels, {made.blocks} blocks, {made.grad.shape[1]} tokens   {name:7}"
                        f" {found[level]:8.3f} ms ({times[0]:.3f}-{times[-1]:.3f})",
                        flush=True,
                    )
            slope = np.polyfit(list(found), list(found.values()), 1)[0]
            print(f"{shape:6} {name:7} {slope:.4f} ms a level", flush=True)


def short(options: argparse.Namespace) -> None:
    """Times of a block."""
    trees = {"search": search(20_000), "chain": np.array([[0, 20_000, -1, 20_000]], np.int32)}
    for file in options.rollouts:
        trees[file] = segments_of(file)
    per_block = {}
    for name, table in trees.items():
        made = rule(table, options)
        times = milliseconds(made, options.repeats)
        per_block[name] = 1e3 * statistics.median(times) / made.blocks
        print(
            f"{name}: {made.blocks} blocks, {made.grad.shape[1]} tokens: {statistics.median(times):.3f} ms"
            f" ({times[0]:.3f}-{times[-1]:.3f}), {per_block[name]:.3f} us a block,"
            f" {per_block[name] / per_block.get('chain', per_block[name]):.2f} of a chain's",
            flush=True,
        )


def error(options: argparse.Namespace) -> None:
    """Distances to fp64."""
    rows = fitted(binary, 3, 15, 64)
    tree = RolloutTree.from_rows(rows)
    made = rule(tree.segments, options)
    double = Rule(made.table, [x.double() for x in made.inputs], made.grad.double())
    with executor("pytorch"):
        exact = double()
    index = torch.from_numpy(tree.row_index[tree.row_index >= 0]).long().cuda()
    ends = np.cumsum([len(row) for row in rows])
    dense_table = np.stack([ends - [len(row) for row in rows], ends, np.full(len(rows), -1), ends], 1)
    # The first copy of a token has all of its gradient, so that its sum over copies is exact.
    first = torch.zeros(len(index), dtype=torch.bool, device="cuda")
    first[torch.from_numpy(np.unique(index.cpu().numpy(), return_index=True)[1]).cuda()] = True
    dense = Rule(
        dense_table.astype(np.int32),
        [x[:, index] for x in made.inputs],
        made.grad[:, index] * first[:, None, None],
    )
    ran = made(), dense()
    for at, name in enumerate(NAMES):
        wanted = exact[at]
        far = [(ran[0][at] - wanted).norm() / wanted.norm()]
        if at:
            summed = torch.zeros_like(wanted).index_add_(1, index, ran[1][at].double())
            far.append((summed - wanted).norm() / wanted.norm())
        else:
            copies = wanted[:, index]
            far.append((ran[1][at] - copies).norm() / copies.norm())
        print(f"{name:6} tree {far[0]:.2e}   dense {far[1]:.2e}   {far[0] / far[1]:.2f}", flush=True)


PARTS = {"depth": depth, "short": short, "error": error}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.bench.tree_recurrence", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--executors", default="triton,rounds", help="of the depth part; fla is another")
    parser.add_argument("--rollouts", nargs="*", default=[], metavar="FILE", help="trees of the short part")
    for name, value in (
        ("key-heads", 16), ("value-heads", 32), ("size", 128), ("blocks", 256), ("repeats", 7)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--decay", type=float, default=0.2, help="most that a token's log decay is below 0")
    options = parser.parse_args(arguments)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for name in options.parts.split(","):
        PARTS[name](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
