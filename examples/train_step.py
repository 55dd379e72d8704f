"""One training step on rollouts that share prefixes, dense and tree: `python -m examples.train_step`.

What a user writes is in `compiled` and `train_step`. The rest makes a small transformers model with random
weights and a batch of rollouts, measures the step against dense Inductor, and checks that log-probs and
gradients are the same. The exit status is 1 if they are not or if the tree run is too slow, 2 if the
rollouts cannot be read.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

import treecompile
from examples.baselines import LogProbs, log_probs_of, small_model
from examples.measure import Measurement, Run, measure
from examples.rollout_files import fit_vocabulary, read_rollouts
from examples.rollouts import SHAPES, Batch, Rollout, batch_of, generate

say = functools.partial(print, flush=True)


def compiled(model: nn.Module, compiler: str = "inductor") -> LogProbs:
    """The only line that a trainer changes."""
    step: LogProbs = torch.compile(log_probs_of(model), backend="tree", options={"compiler": compiler})
    return step


def train_step(step: LogProbs, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    """A policy-gradient step as trainers write it; it knows nothing of trees."""
    optimizer.zero_grad()
    loss = -(batch.weight * step(batch.input_ids, batch.attention_mask)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.fast:
        fast(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        rollouts, notes = rollouts_of(options)
    except treecompile.RolloutFileError as error:
        print(error, file=sys.stderr)
        return 2
    rollouts, vocab, mapped = fit_vocabulary(rollouts, options.vocab)
    batch, guessed = batch_of(rollouts)
    batch = batch.to(options.device)
    context = batch.input_ids.shape[1]
    model = small_model(
        vocab=vocab, hidden=options.hidden, layers=options.layers, context=context, seed=options.seed
    ).to(options.device, getattr(torch, options.dtype))
    source = options.rollouts or f"generated, shape {options.shape}, seed {options.seed}"
    say(describe(model, batch, source))
    for note in (*notes, *mapped, *guessed):
        say(f"note: {note}")

    dense_options = {"backend": options.compiler, "dynamic": False}
    step = compiled(model, options.compiler)
    before = treecompile.counters.copy()
    found = measure(
        model,
        batch,
        step,
        compile_dense=lambda function: torch.compile(function, **dense_options),
        microbatches=options.microbatches,
        repeats=options.repeats,
        clock=time.process_time if options.clock == "cpu" else time.perf_counter,
        say=lambda line: say(f"  ... {line}"),
    )
    loss = train_step(step, batch, torch.optim.AdamW(model.parameters(), lr=1e-4))
    calls = treecompile.counters - before
    say(
        f"\ntrained one step: loss {loss:.6f}; {calls['packed']} calls packed, {calls['dense']} dense{why(calls)}"
    )
    say(table(found))
    say()
    report = treecompile.explain(log_probs_of(model), batch.input_ids, batch.attention_mask)
    say(rewritten(report))
    wrong = verdict(found, report.supported, options)
    if options.json:
        write_json(options, source, found, wrong)
    for line in wrong:
        say(f"FAILED: {line}")
    if not wrong:
        say("ok: same log-probs, same gradients")
    return 1 if wrong else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m examples.train_step", description="One training step, twice."
    )
    data = made.add_argument_group("rollouts")
    data.add_argument("--rollouts", metavar="FILE", help=".jsonl, .jsonl.gz or .parquet; else generated")
    data.add_argument("--max-rows", type=positive, default=64, help="rows to take from FILE")
    data.add_argument("--max-tokens", type=positive, default=16384, help="grid tokens to take from FILE")
    data.add_argument("--shape", choices=tuple(SHAPES), default="agent", help="shape to generate")
    data.add_argument("--rows", type=positive, default=12, help="rows to generate")
    data.add_argument("--scale", type=float, default=1.0, help="multiplies the generated lengths")
    data.add_argument("--seed", type=int, default=0, help="of rollouts and weights")
    size = made.add_argument_group("model")
    size.add_argument("--hidden", type=int, default=256, help="width, a multiple of 128")
    size.add_argument("--layers", type=positive, default=2)
    size.add_argument(
        "--vocab", type=positive, default=2048, help="ids beyond are mapped, equal ids stay equal"
    )
    size.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    size.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    timing = made.add_argument_group("measurement")
    timing.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, for a busy machine"
    )
    timing.add_argument("--threads", type=positive, help="threads of torch")
    timing.add_argument("--repeats", type=positive, default=5, help="timed runs of each")
    timing.add_argument(
        "--microbatches", type=positive, nargs="+", help="rows of a dense microbatch to choose among"
    )
    timing.add_argument("--compiler", choices=("inductor", "aot_eager"), default="inductor")
    timing.add_argument("--min-speedup", type=float, help="3 for the default rollouts, else not checked")
    timing.add_argument("--min-of-ideal", type=float, help="0.8 for the default rollouts, else not checked")
    timing.add_argument("--json", metavar="OUT", help="also write all results to this file")
    timing.add_argument(
        "--fast", action="store_true", help="a few tokens, no code generation: checks the law only"
    )
    return made


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def fast(options: argparse.Namespace) -> None:
    """Shrink everything: for tests of the program itself."""
    options.scale, options.rows, options.repeats = 0.05, 6, 1
    options.hidden, options.layers, options.vocab = 128, 1, 128
    options.max_tokens = min(options.max_tokens, 2048)
    options.compiler = "aot_eager"
    options.min_speedup, options.min_of_ideal = options.min_speedup or 0.0, options.min_of_ideal or 0.0


def rollouts_of(options: argparse.Namespace) -> tuple[list[Rollout], list[str]]:
    """From the file, or generated."""
    if options.rollouts:
        return read_rollouts(options.rollouts, max_rows=options.max_rows, max_tokens=options.max_tokens)
    made = generate(
        options.shape, rows=options.rows, seed=options.seed, vocab=options.vocab, scale=options.scale
    )
    return made, []


def describe(model: nn.Module, batch: Batch, source: str) -> str:
    """Model, batch and machine in four lines."""
    weights = sum(p.numel() for p in model.parameters())
    like = next(model.parameters())
    where = f"{torch.get_num_threads()} threads"
    if like.device.type == "cuda":
        where = torch.cuda.get_device_name()
    rows, columns = batch.input_ids.shape
    return (
        f"rollouts  {source}\n"
        f"batch     {rows} rows of up to {columns:,} tokens\n"
        f"model     {type(model).__name__} of transformers, {weights / 1e6:.1f} M random weights, "
        f"{str(like.dtype).removeprefix('torch.')}\n"
        f"machine   {like.device}, {where}, torch {torch.__version__}, Python {platform.python_version()}"
    )


def table(found: Measurement) -> str:
    """The measurement as text."""
    s, best, law = found.sharing, found.best, found.law
    lines = [
        "",
        f"rows {s.rows:,}    grid tokens {found.grid:,}    row tokens {s.tokens:,}    "
        f"packed tokens {s.distinct_tokens:,}",
        f"sharing without padding: tokens {s.tokens / s.distinct_tokens:.2f}x, attended pairs "
        f"{s.pairs / s.distinct_pairs:.2f}x, head rows {s.heads / max(1, s.distinct_heads):.2f}x",
        "",
        f"{'forward + backward':28}{'median':>9}{'min':>9}{'max':>9}{'rows at once':>14}{'first call':>12}",
        *(run_line(run) for run in (*found.dense, found.tree)),
        "",
        f"{'parts of the fastest dense':28}{'time':>9}{'share':>9}{'units':>13}{'distinct':>11}{'ratio':>8}",
        *part_lines(found),
        "",
        f"speed-up  {found.speedup:.2f}x over the fastest dense run ({best.name}), "
        f"{found.dense[0].median / found.tree.median:.2f}x over stock ({found.dense[0].name})",
        f"ideal     {found.ideal:.2f}x by measured parts, {found.ideal_by_flops:.2f}x by FLOPs; "
        f"reached {found.speedup / found.ideal:.2f} of the former",
        f"law       log-probs within {law.log_probs:.1e} of dense eager (dense Inductor: "
        f"{law.log_probs_null:.1e})",
        f"          gradients within {law.gradient:.1e} relative L2 per parameter (dense Inductor: "
        f"{law.gradient_null:.1e}; largest: {law.gradient_name})",
    ]
    return "\n".join(lines)


def why(calls: Mapping[str, int]) -> str:
    """Reasons of dense calls, from the counters."""
    reasons = [name.removeprefix("dense:") for name in calls if name.startswith("dense:")]
    return f" ({', '.join(sorted(reasons))})" if reasons else ""


def run_line(run: Run) -> str:
    """One way to run the step."""
    return (
        f"{run.name:28}{run.median:>7.3f} s{min(run.seconds):>7.3f} s{max(run.seconds):>7.3f} s"
        f"{run.rows:>14}{run.compile_seconds:>10.1f} s"
    )


def part_lines(found: Measurement) -> list[str]:
    """The components of the fastest dense run."""
    total = sum(c.seconds for c in found.components)
    return [
        f"{c.name:28}{c.seconds:>7.3f} s{c.seconds / total:>9.0%}"
        f"{c.units:>13,}{c.distinct:>11,}{c.ratio:>7.2f}x"
        for c in found.components
    ]


def rewritten(report: treecompile.Report) -> str:
    """What the compiler put on the tree."""
    if not report.supported:
        return "runs dense:\n" + "\n".join(str(reason) for reason in report.reasons)
    lines = [f"{'on the tree':44}{'nodes':>6}"]
    lines += [f"{name:44}{count:>6}" for name, count in sorted(report.rewritten.items())]
    return "\n".join(lines)


def verdict(found: Measurement, packed: bool, options: argparse.Namespace) -> list[str]:
    """What is wrong: broken law first, then speed."""
    wrong = [f"the law: {line}" for line in found.law.broken]
    if not packed:
        wrong.append("the model runs dense, for the reason above")
    default = options.rollouts is None and options.shape == "agent"
    speedup = options.min_speedup if options.min_speedup is not None else (3.0 if default else 0.0)
    share = options.min_of_ideal if options.min_of_ideal is not None else (0.8 if default else 0.0)
    if found.speedup < speedup:
        wrong.append(f"speed-up {found.speedup:.2f}x over the fastest dense run is below {speedup:g}x")
    if found.speedup < share * found.ideal:
        reached = found.speedup / found.ideal
        wrong.append(f"speed-up {found.speedup:.2f}x is {reached:.2f} of the ideal, below {share:g}")
    return wrong


def write_json(options: argparse.Namespace, source: str, found: Measurement, wrong: list[str]) -> None:
    """All results, with what they were measured on."""
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    where = {
        "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    result = {"rollouts": source, "machine": where, "options": vars(options), "failed": wrong}
    path.write_text(json.dumps(result | found.as_dict(), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
