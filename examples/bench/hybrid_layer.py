"""A layer of linear attention on a GPU, tree and dense rows side by side: `python -m examples.bench.hybrid_layer`.

The gated delta net of transformers' Qwen3.5 in the shape of its 4B sibling (projections, convolution, rule, gated norm,
output), bf16, forward and backward. transformers picks the kernels of the package fla where that is installed: the
dense run takes these (``--lift-guard`` runs the backward pass that fla refuses with this Triton, which is known to give
wrong numbers on Hopper: for its time alone), and beside them our own kernels on the dense rows.

Trees: four rows of 8,192 tokens that share 6,153 (2.29x), the same that share nothing (``min_sharing=0``), and the rows
of a file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import treecompile
from examples.bench.chained import CHUNK, chained_parts, keep_kernels, lift_guard
from examples.bench.large_step import batch_of, peak, reset_peak
from examples.measure import seconds_of
from examples.rollout_files import read_rollouts
from examples.rollouts import Batch, Ids
from treecompile.runtime.chunks import chunk_plan
from treecompile.runtime.tree import RolloutTree


class Layer(nn.Module):
    """Token embeddings and one gated delta net: [B, T] ids and mask to [B, T, hidden]."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

        super().__init__()
        config = Qwen3_5TextConfig(
            hidden_size=options.hidden,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=options.key_heads,
            linear_num_value_heads=options.value_heads,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        )
        self.vocab = 4096
        self.embedding = nn.Embedding(self.vocab, options.hidden)
        self.net: Any = Qwen3_5GatedDeltaNet(config, 0)  # type: ignore[arg-type]

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.net(self.embedding(ids), attention_mask=mask)
        return out


@dataclass
class Case:
    """Rows and how the dense run takes them."""

    name: str
    rows: list[Ids]
    microbatch: int

    def shared(self) -> tuple[float, float]:
        """Grid tokens over packed ones, and dense chunks over blocks, with the padding that the dense run computes."""
        tree = RolloutTree.from_rows([row.tolist() for row in self.rows])
        columns = max(len(row) for row in self.rows)
        blocks = len(self.rows) * -(-columns // CHUNK)
        return len(self.rows) * columns / tree.n, blocks / chunk_plan(tree, CHUNK).blocks


def cases(options: argparse.Namespace) -> list[Case]:
    """The trees of the docstring."""
    draw = np.random.default_rng(0)

    def rows(shared: int) -> list[Ids]:
        root = draw.integers(3, 4096, shared)
        return [np.concatenate([root, draw.integers(3, 4096, 8192 - shared)]) for _ in range(4)]

    made = [Case("2.29x", rows(6153), 4)]
    if options.rollouts:
        read, _ = read_rollouts(options.rollouts, max_rows=1024, max_tokens=1 << 20)
        made.append(Case("file", [np.asarray(r.input_ids) % 4096 for r in read], options.microbatch))
    made.append(Case("1.00x", rows(0), 4))
    return [case for case in made if case.name in options.cases]


Run = Callable[[], None]


def memory(layer: Layer, case: Case, tree: Run) -> None:
    """What the tree run adds to the memory at its peak, and a dense run of one row of N and the replayed tokens."""
    held = RolloutTree.from_rows([row.tolist() for row in case.rows])
    tokens = held.n + chunk_plan(held, CHUNK).replayed
    device = layer.embedding.weight.device
    row = batch_of([np.arange(tokens) % layer.vocab]).to(device)
    upstream = torch.randn(1, tokens, layer.embedding.embedding_dim, device=device, dtype=torch.bfloat16)
    dense = step(layer, torch.compile(layer, dynamic=False), row, 1, upstream)
    for name, run in (("tree", tree), (f"dense, {tokens} tokens", dense)):
        run()
        layer.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        reset_peak()
        run()
        print(f"  {name:22} peak {peak() - before / 2**30:.2f} GiB more")


def step(layer: Layer, compiled: Callable[..., Tensor], batch: Batch, rows: int, upstream: Tensor) -> Run:
    """Forward and backward of all rows, `rows` at a time."""

    def once() -> None:
        layer.zero_grad(set_to_none=True)
        for at in range(0, len(batch.input_ids), rows):
            taken = slice(at, at + rows)
            out = compiled(batch.input_ids[taken], batch.attention_mask[taken])
            out.backward(upstream[: out.shape[0]])  # type: ignore[no-untyped-call]

    return once


def medians(runs: dict[str, Run], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each, in turn; the first calls compile."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        begin = time.perf_counter()
        run()
        run()
        print(f"  {name}: first calls {time.perf_counter() - begin:.0f} s", flush=True)
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(1e3 * seconds_of(run, time.perf_counter))
    return times


def kernels_of(run: Run, most: int = 16) -> str:
    """The GPU kernels that take longest, in ms."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    found = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)[:most]
    return ", ".join(
        f"{event.key[:44]} {event.self_device_time_total / 1e3:.2f} x{event.count}" for event in found
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser().parse_args(arguments)
    keep_kernels()
    if options.lift_guard:
        lift_guard()
    torch.manual_seed(0)
    layer = Layer(options).to(options.device, torch.bfloat16)
    failed = 0
    for case in cases(options):
        batch = batch_of(case.rows).to(options.device)
        rows, columns = batch.input_ids.shape
        upstream = torch.randn(rows, columns, options.hidden, device=options.device, dtype=torch.bfloat16)
        upstream *= batch.attention_mask[..., None]
        apart = batch_of(case.rows).to(options.device)
        # Rows that begin with different tokens share nothing.
        apart.input_ids[:, 0] = torch.arange(rows, device=options.device)
        torch._dynamo.reset()
        tree = torch.compile(layer, backend="tree", options=dict[str, Any](min_sharing=0.0))
        runs = {
            "tree": step(layer, tree, batch, rows, upstream),
            "dense": step(layer, torch.compile(layer, dynamic=False), batch, case.microbatch, upstream),
            "tree on unshared rows": step(layer, tree, apart, case.microbatch, upstream),
        }
        before = treecompile.counters["packed"]
        tokens, blocks = case.shared()
        print(f"{case.name}: {rows} rows of {columns}, tokens {tokens:.2f}x, blocks {blocks:.2f}x")
        times = medians(runs, options.repeats)
        alone = medians(chained_parts(layer.net, case.microbatch, columns), options.repeats)
        for name, taken in {**times, **alone}.items():
            print(f"  {name:22} {statistics.median(taken):8.2f} ms  ({min(taken):.2f}-{max(taken):.2f})")
        if options.profile:
            for name in ("tree", "dense"):
                print(f"  {name:22} {kernels_of(runs[name])}")
        memory(layer, case, runs["tree"])
        dense = statistics.median(times["dense"])
        calls = -(-rows // case.microbatch)
        # The rule repeats itself by blocks, the rest by tokens. Timed alone it can take longer than the whole.
        rule = min(calls * statistics.median(alone["rule"]), dense)
        ideal = dense / (rule / blocks + (dense - rule) / tokens)
        reached = dense / statistics.median(times["tree"])
        own = statistics.median(times["tree on unshared rows"]) / statistics.median(times["tree"])
        print(
            f"  {reached:.2f}x, ideal {ideal:.2f}x: {reached / ideal:.2f} of it; {own:.2f}x over our kernels on rows"
        )
        failed += treecompile.counters["packed"] == before
    print(dict(treecompile.counters))
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m examples.bench.hybrid_layer", description=__doc__)
    made.add_argument(
        "--rollouts", metavar="FILE", help="rows of a third case; .jsonl, .jsonl.gz or .parquet"
    )
    made.add_argument(
        "--microbatch", type=int, default=4, help="rows of the file that a dense run takes at a time"
    )
    names = ("2.29x", "file", "1.00x")
    made.add_argument("--cases", nargs="+", choices=names, default=names)
    made.add_argument("--hidden", type=int, default=2560)
    made.add_argument("--key-heads", type=int, default=16)
    made.add_argument("--value-heads", type=int, default=32)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument(
        "--lift-guard", action="store_true", help="run fla's backward pass where fla refuses it"
    )
    made.add_argument("--profile", action="store_true", help="print the longest kernels of both runs")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return made


if __name__ == "__main__":
    sys.exit(main())
