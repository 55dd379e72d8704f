"""The recurrence of a tree against that of transformers (`torch_chunk_gated_delta_rule`), side by side on the CPU.

    python -m examples.bench.recurrence [--threads 1] [--rows 4] [--length 2048] [--shared 0] [--heads 8]
    [--width 128] [--repeats 3]

Both run the same rows, fp32; with ``--shared`` their first tokens are the same, and the tree holds them once. Times
are the best of the repeats, forward and backward apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from treecompile.runtime.ops import tree_recurrence
from treecompile.runtime.tree import RolloutTree


def timed(forward: Callable[[], Tensor], leaves: list[Tensor], weight: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of its backward pass."""
    begin = time.perf_counter()
    out = forward()
    middle = time.perf_counter()
    out.backward(weight)  # type: ignore[no-untyped-call]
    end = time.perf_counter()
    for leaf in leaves:
        leaf.grad = None
    return middle - begin, end - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in {
        "threads": 1, "rows": 4, "length": 2048, "shared": 0, "heads": 8, "width": 128, "repeats": 3
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ids = np.arange(args.rows * args.length).reshape(args.rows, args.length)
    ids[:, : args.shared] = ids[0, : args.shared]
    tree = RolloutTree.from_rows(ids)
    ends = torch.from_numpy(tree.subtree_end.astype(np.int32))
    segments = torch.from_numpy(tree.segments.astype(np.int32))
    shape = (1, tree.n, args.heads, args.width)
    q, v = torch.randn(shape), torch.randn(shape)
    k = torch.nn.functional.normalize(torch.randn(shape), dim=-1)
    gate, beta = -torch.rand(shape[:3]), torch.rand(shape[:3])
    packed = [x.requires_grad_() for x in (q, k, v, gate, beta)]
    row_index = torch.from_numpy(tree.row_index.astype(np.int64))
    dense = [x.detach()[0, row_index].requires_grad_() for x in packed]
    weight = torch.randn(args.rows, args.length, args.heads, args.width)
    times = {"transformers": [], "tree": []}  # type: dict[str, list[tuple[float, float]]]
    for _ in range(args.repeats + 1):  # alternately; the first of each is a warm-up
        times["transformers"].append(timed(lambda: torch_chunk_gated_delta_rule(*dense)[0], dense, weight))
        times["tree"].append(
            timed(
                lambda: tree_recurrence(*packed, ends, segments, args.width**-0.5, 64),
                packed,
                torch.randn(shape),
            )
        )
    best = {name: np.array(runs[1:]).min(0) for name, runs in times.items()}
    print(
        f"{args.threads} threads, {args.rows} rows of {args.length}, {tree.n} packed tokens, {args.heads} heads"
    )
    print(f"keys and values of {args.width}; {ids.size / tree.n:.2f}x tokens shared")
    for i, name in enumerate(("forward", "backward")):
        theirs, ours = best["transformers"][i], best["tree"][i]
        print(
            f"{name:9} transformers {theirs * 1e3:7.0f} ms  tree {ours * 1e3:7.0f} ms  {theirs / ours:.2f}x"
        )


if __name__ == "__main__":
    main()
