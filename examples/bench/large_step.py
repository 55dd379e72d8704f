"""One step of a model of a real size on a GPU, tree and dense side by side: `python -m examples.bench.large_step`.

An 8-layer Qwen3 of the shape of its 1.7B sibling, bf16, random weights; or, with ``--family qwen3_5``, a hybrid of as
many layers, three linear attentions for each full one. ``--checkpoint`` recomputes activations. Without a file of
rollouts: 16 rows of 8,192 tokens that share 6,144 tokens, then 4 branches of 1,024, then 4 leaves of 1,024 each. The
dense runs take `--microbatch` rows at a time, the tree run all rows. bf16 runs differ by rounding: what they differ by
from the first one is printed, the law is tested elsewhere (`examples.train_step`, the tests).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

import treecompile
from examples.baselines import log_probs_of, without_mask
from examples.bench.chained import CHUNK, chained_parts, keep_kernels, lift_guard
from examples.measure import Component, Run, Step, components_of, median_seconds, seconds_of, timed
from examples.rollout_files import read_rollouts
from examples.rollouts import Batch, Ids, sharing
from treecompile.runtime.chunks import chunk_plan
from treecompile.runtime.tree import RolloutTree

# Runs by the tree backend: chunks of linear attentions start at the first token of each trajectory, or of each branch.
TREES = {"tree", "branch"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    batch = batch_of(rows_of(options)).to(options.device)
    model = MODELS[options.family](options, batch.input_ids.shape[1])
    model.to(options.device, getattr(torch, options.dtype))
    if options.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    keep_kernels()
    if options.lift_guard:
        lift_guard()
    plain: Any = without_mask(model)
    by_layer = bool(nets_of(model)) and find_spec("fla") is not None

    def dense(function: Any) -> Any:
        return torch.compile(function, dynamic=False, fullgraph=not by_layer)

    def causal() -> Any:
        # The kernels of fla break a graph, and a layer whose activations are recomputed runs uncompiled if one breaks
        # in it: layers are compiled by themselves then.
        if by_layer:
            torch._dynamo.config.recompile_limit = 64
            for layer in plain.model.layers:
                layer.forward = torch.compile(layer.forward, dynamic=False)
        return dense(log_probs_of(plain))

    rows, size = len(batch.lengths), options.microbatch

    def tree(alignment: str) -> Step:
        run = torch.compile(log_probs_of(model), backend="tree", options=dict[str, Any](alignment=alignment))
        return Step("tree", model, run, batch, rows)

    steps = {
        "tree": tree("trajectory"),
        "branch": tree("branch"),
        "causal": Step("dense, causal, no mask", plain, causal(), batch, size),
        "stock": Step("dense, 2-D mask", model, dense(log_probs_of(model)), batch, size),
    }
    steps = {name: step for name, step in steps.items() if name in options.runs}
    wanted: Outcome | None = None
    for name, step in steps.items():
        found, first = timed(step)
        reset_peak()
        step()
        print(f"{name:8} first call {first:6.1f} s   peak {peak():6.1f} GiB", flush=True)
        outcome = Outcome(
            found, {key: p.grad.cpu() for key, p in step.model.named_parameters() if p.grad is not None}
        )
        if wanted is not None:
            print(f"{'':8} {outcome.differs(wanted, batch.attention_mask[:, 1:].bool())}")
        wanted = wanted or outcome
    times, after = in_turn(steps, options.repeats)
    for name, taken in times.items():
        print(
            f"{name:8} {statistics.median(taken):9.1f} ms   min {min(taken):.1f}   max {max(taken):.1f}   "
            f"right after another run {statistics.median(after[name]):.1f}"
        )
    if "tree" in steps and set(steps) - TREES:
        compare(options, model, batch, times, dense)
    print(dict(treecompile.counters))
    return 0 if treecompile.counters["packed"] else 1


def in_turn(steps: Mapping[str, Step], repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds of the steps, in turns of about equal length, and of the first step of each turn.

    A GPU at its power limit lowers its clock within a second. A step of 50 ms between steps of a second would be timed
    at the clock that these leave: a turn lasts as long as the longest step, as a trainer runs one kind of step.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    first: dict[str, list[float]] = {name: [] for name in steps}
    once = {name: 1e3 * seconds_of(step, time.perf_counter) for name, step in steps.items()}
    for _ in range(repeats):
        for name, step in steps.items():
            taken = [
                1e3 * seconds_of(step, time.perf_counter)
                for _ in range(max(1, round(max(once.values()) / once[name])))
            ]
            times[name] += taken
            first[name].append(taken[0])
    return times, first


@dataclass(frozen=True)
class Outcome:
    """Log-probs [B, T - 1] and gradients by name of parameter."""

    log_probs: Tensor
    grads: dict[str, Tensor]

    def differs(self, other: Outcome, kept: Tensor) -> str:
        """By how much from another run at the `kept` tokens, for a reader."""
        rms = float((self.log_probs - other.log_probs)[kept].square().mean().sqrt())
        apart = whole = 0.0
        for key, grad in self.grads.items():
            mine, theirs = (x.to(kept.device).float() for x in (grad, other.grads[key]))
            apart += float((mine - theirs).square().sum())
            whole += float(theirs.square().sum())
        far = (apart / whole) ** 0.5
        return f"differs from the first run: log-probs {rms:.1e} rms, gradients {far:.1e} of their norm"


def compare(
    options: argparse.Namespace, model: Any, batch: Batch, times: dict[str, list[float]], dense: Any
) -> None:
    """The parts of the fastest dense run, the ideal, and what was reached."""
    middle = {name: statistics.median(taken) / 1e3 for name, taken in times.items()}
    best = min((name for name in middle if name not in TREES), key=lambda name: middle[name])
    quoted = Run(best, options.microbatch, 0.0, (middle[best],))
    model.zero_grad(set_to_none=True)
    parts = list(components_of(
        model, batch, sharing(batch.rows()), quoted, best == "stock", dense,
        lambda function: median_seconds(function, options.repeats, time.perf_counter), options.checkpoint,
    ))  # fmt: skip
    parts += chained_of(options, model, batch)
    # What was timed alone, and forward twice where activations are recomputed, is not in the rest.
    token_wise = parts[0]
    rest = max(0.0, quoted.median - sum(part.seconds for part in parts[1:]))
    parts[0] = replace(token_wise, seconds=rest)
    for part in parts:
        print(f"{part.name:12} {1e3 * part.seconds:9.1f} ms of {best}   shared {part.ratio:.2f}x")
    total = sum(part.seconds for part in parts)
    ideal = total / sum(part.seconds / part.ratio for part in parts)
    for name in sorted(middle.keys() & TREES):
        reached = middle[best] / middle[name]
        print(f"{name}: {reached:.2f}x over {best}, ideal {ideal:.2f}x: {reached / ideal:.2f} of it")


def nets_of(model: Any) -> list[Any]:
    """The linear attentions of a model."""
    return [module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")]


def chained_of(options: argparse.Namespace, model: Any, batch: Batch) -> list[Component]:
    """The recurrences and convolutions of a dense run, if there are any."""
    nets = nets_of(model)
    if not nets:
        return []
    columns = batch.input_ids.shape[1]
    tree = RolloutTree.from_rows(batch.rows())
    blocks, chunks = chunk_plan(tree, CHUNK).blocks, len(batch.lengths) * -(-columns // CHUNK)
    found = []
    for name, run in chained_parts(nets[0], options.microbatch, columns, options.checkpoint).items():
        taken = median_seconds(run, options.repeats, time.perf_counter)
        seconds = len(nets) * taken * len(batch.lengths) / options.microbatch
        units = (chunks, blocks) if name == "rule" else (batch.input_ids.numel(), tree.n)
        found.append(Component(name, seconds, 0.0, *units))
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m examples.bench.large_step", description=__doc__)
    made.add_argument("--family", choices=MODELS, default="qwen3")
    made.add_argument("--checkpoint", action="store_true", help="recompute activations in the backward pass")
    made.add_argument(
        "--lift-guard", action="store_true", help="run fla's backward pass where fla refuses it"
    )
    made.add_argument("--rollouts", metavar="FILE", help="rows to run; .jsonl, .jsonl.gz or .parquet")
    made.add_argument("--max-rows", type=int, default=1024)
    made.add_argument("--max-tokens", type=int, default=1 << 20)
    made.add_argument("--scale", type=int, default=1024, help="tokens of a branch without a file")
    made.add_argument("--microbatch", type=int, default=4, help="rows of a dense run at a time")
    made.add_argument(
        "--runs",
        nargs="+",
        choices=("tree", "branch", "causal", "stock"),
        default=("tree", "causal", "stock"),
    )
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--hidden", type=int, default=2048, help="a multiple of 256")
    made.add_argument("--vocab", type=int, default=32768, help="ids are taken modulo this")
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--threads", type=int, help="of the CPU")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return made


def rows_of(options: argparse.Namespace) -> list[Ids]:
    """From the file, or a tree of three generations."""
    if options.rollouts:
        read, notes = read_rollouts(
            options.rollouts, max_rows=options.max_rows, max_tokens=options.max_tokens
        )
        for note in notes:
            print(f"note: {note}")
        return [np.asarray(rollout.input_ids) % options.vocab for rollout in read]
    draw = np.random.default_rng(0)

    def segment(tokens: int) -> Ids:
        return draw.integers(3, options.vocab, tokens)

    root = segment(6 * options.scale)
    branches = [np.concatenate([root, segment(options.scale)]) for _ in range(4)]
    return [np.concatenate([branch, segment(options.scale)]) for branch in branches for _ in range(4)]


def batch_of(rows: Sequence[Ids]) -> Batch:
    """Right-padded, with a random weight for each token."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.from_numpy(row.astype(np.int64))
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    weight = torch.randn(ids.shape[0], ids.shape[1] - 1, generator=torch.Generator().manual_seed(1))
    return Batch(ids, mask, weight * mask[:, 1:], lengths)


def shape_of(options: argparse.Namespace, context: int) -> dict[str, Any]:
    """What the configurations have in common."""
    torch.manual_seed(0)
    return {
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 128,
        "num_key_value_heads": options.hidden // 256,
        "head_dim": 128,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "use_cache": False,
    }


def qwen3(options: argparse.Namespace, context: int) -> Any:
    """Qwen3ForCausalLM with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**shape_of(options, context)))  # type: ignore[no-untyped-call]


def qwen3_5(options: argparse.Namespace, context: int) -> Any:
    """Qwen3_5ForCausalLM with random weights: three gated delta nets for each full attention."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    config = Qwen3_5TextConfig(
        **shape_of(options, context),
        linear_num_key_heads=options.hidden // 128,
        linear_num_value_heads=options.hidden // 64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    return Qwen3_5ForCausalLM(config)  # type: ignore[no-untyped-call]


MODELS = {"qwen3": qwen3, "qwen3_5": qwen3_5}


def reset_peak() -> None:
    """Forget the most memory that was held."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak() -> float:
    """The most memory held since, in GiB; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    sys.exit(main())
