"""Tree attention by pieces, against one masked N x N call and plain causal attention of as many tokens.

    OMP_NUM_THREADS=1 python -m examples.bench.attention_pieces [--heads 8] [--kv-heads 8] [--head-size 64]
    [--rows 16] [--scale 1.0] [--tile 64] [--repeats 5] [--device cpu] [--dtype float32]

Per tree: N packed tokens, S segments; *pairs* = visible pairs over those of causal attention of N tokens,
which is what the ratio to causal can reach; *waste* = computed over visible pairs; *calls* = attention kernel
calls of one forward; *plan* = host time of `plan_pieces`. Times are forward + backward, the best of the
repeats: on the CPU in process time, which a busy machine disturbs less than wall time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from examples.rollouts import SHAPES, generate
from treecompile.runtime.ops import count_pieces, plan_pieces, tree_attention
from treecompile.runtime.ops.attention_launch import Request, launch_of
from treecompile.runtime.ops.attention_math import visible_pairs
from treecompile.runtime.ops.attention_router import force
from treecompile.runtime.tree import RolloutTree

# The masked call is left out above this: its mask alone is N^2.
MOST_MASKED = 6000


def thoughts(rows: int, seed: int = 0) -> RolloutTree:
    """Tree search over short thoughts: thousands of segments of 1-5 tokens below one prompt."""
    random = np.random.default_rng(seed)
    paths = [random.integers(1, 2048, 200).tolist()]
    done = []
    for _ in range(12):
        grown = [
            [*path, child, *random.integers(1, 2048, random.integers(0, 5)).tolist()]
            for path in paths
            for child in range(4)
        ]
        random.shuffle(grown)
        paths, rest = grown[: rows * 4], grown[rows * 4 :]
        done += rest
    return RolloutTree.from_rows(done + paths)


def trees(rows: int, scale: float) -> dict[str, RolloutTree]:
    """The trees to measure, by name."""
    found = {
        shape: RolloutTree.from_rows([r.input_ids for r in generate(shape, rows=rows, scale=scale)])
        for shape in SHAPES
    }
    found["thoughts"] = thoughts(rows)
    found["chain"] = RolloutTree.from_rows([list(range(int(1000 * scale)))])
    return found


def best(function: Callable[[], None], repeats: int, device: str) -> float:
    """Milliseconds of the fastest of `repeats` runs, after one to warm up."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    times = []
    for _ in range(repeats + 1):
        start = clock()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return 1e3 * min(times[1:])


def step(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Callable[[], None]:
    """Forward and backward as one call."""

    def run() -> None:
        out = attend(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return run


def measure(name: str, tree: RolloutTree, options: argparse.Namespace) -> None:
    """Print one line of the table."""
    device, dtype = options.device, getattr(torch, options.dtype)
    segments, column = tree.segments.astype(np.int32), np.asarray(tree.column, np.int32)
    start = time.process_time()
    pieces = plan_pieces(segments, column, tile=options.tile)
    planned = 1e3 * (time.process_time() - start)
    host, plan = torch.from_numpy(segments), torch.from_numpy(pieces)
    end = tree.tensor("subtree_end", device, torch.int32)
    tensors = (end, torch.from_numpy(column).to(device), host.to(device), host, plan, end[:0])
    group, scale = options.heads // options.kv_heads, options.head_size**-0.5

    def draw(heads: int) -> Tensor:
        x = torch.randn(1, tree.n, heads, options.head_size, device=device, dtype=dtype)
        return x.transpose(1, 2).requires_grad_()

    q, k, v = draw(options.heads), draw(options.kv_heads), draw(options.kv_heads)

    def by_tree(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = tree_attention(q, k, v, *tensors, None, scale, 0.0, 0)[0]
        return out

    def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    ours = best(step(by_tree, q, k, v), options.repeats, device)
    causal = best(step(lambda q, k, v: dense(q, k, v, None), q, k, v), options.repeats, device)
    masked = float("nan")
    if tree.n <= MOST_MASKED:
        mask = visible_pairs(end, tensors[1], 0)
        masked = best(step(lambda q, k, v: dense(q, k, v, mask), q, k, v), options.repeats, device)
    count = count_pieces(segments, pieces)
    calls = launch_of(pieces, segments, Request(0, False, 1 << 20)).calls
    print(
        f"{name:9s} {tree.n:7d} {len(segments):6d} {count.useful / (tree.n * (tree.n + 1) / 2):6.2f}"
        f" {count.computed / count.useful:6.2f} {calls:6d} {planned:8.1f} {ours:10.1f}"
        f" {causal:10.1f} {ours / causal:6.2f} {masked:10.1f} {ours / masked:6.2f}"
    )


def main() -> None:
    """Measure every tree and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    for name, default in (("heads", 8), ("kv-heads", 8), ("head-size", 64), ("rows", 16), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tile", type=int, default=64)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options}")
    print(
        f"{'tree':9s} {'N':>7s} {'S':>6s} {'pairs':>6s} {'waste':>6s} {'calls':>6s} {'plan ms':>8s}"
        f" {'pieces ms':>10s} {'causal ms':>10s} {'ratio':>6s} {'masked ms':>10s} {'ratio':>6s}"
    )
    with force("pieces", "pieces"):
        for name, tree in trees(options.rows, options.scale).items():
            measure(name, tree, options)


if __name__ == "__main__":
    main()
