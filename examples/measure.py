"""Measures one training step, dense and tree, side by side in one process.

`measure(model, batch, compiled)` runs the unmodified model eagerly as the reference, and the two dense
baselines and the tree run through Inductor. It returns a `Measurement`: times, the law (equal log-probs and
gradients), what the batch shares, and the *ideal* speed-up.

The ideal is T / sum over components c of (T_c / s_c), where T is the time of the fastest dense run, T_c what
component c takes in it and s_c the units it computes over the distinct ones:

    attention    scaled_dot_product_attention alone, forward and backward, at the run's shapes, times the
                 layers; s = pairs its kernel computes (half the square if causal without a mask) over
                 distinct pairs
    head + loss  the output layer, log-softmax and gather alone, compiled, forward and backward;
                 s = grid tokens over distinct positions whose next token is looked up
    token-wise   the rest of T: embedding, projections, norms, MLPs; s = grid tokens over distinct tokens

The rest counts as shared in full, although some of it is not (Python, the sum of weight gradients over
microbatches): that makes the ideal higher, never lower. Beside it stands an ideal that weights the same
ratios by floating-point operations instead of measured time.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.baselines import LogProbs, log_probs_of, without_mask
from examples.rollouts import Batch, Sharing, sharing

Compile = Callable[[LogProbs], LogProbs]
Clock = Callable[[], float]
LOG_PROB_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Run:
    """Times of one way to run the step.

    Args:
        name: what ran.
        rows: rows of one microbatch.
        compile_seconds: the first call, with compilation.
        seconds: forward and backward of all rows, once per repetition.
    """

    name: str
    rows: int
    compile_seconds: float
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Component:
    """A part of the fastest dense run.

    Args:
        name: "token-wise", "attention", "head + loss", or what a benchmark adds.
        seconds: its time in that run.
        flops: its floating-point operations in that run, forward and backward.
        units: tokens, pairs or positions that it computes there.
        distinct: those that differ.
    """

    name: str
    seconds: float
    flops: float
    units: int
    distinct: int

    @property
    def ratio(self) -> float:
        return self.units / self.distinct


@dataclass(frozen=True)
class Law:
    """Largest differences from the dense eager model, and those of dense Inductor (the null) beside them.

    Args:
        log_probs: largest absolute difference at a token.
        log_probs_null: the same, dense Inductor.
        gradient: largest relative L2 difference of a parameter's gradient.
        gradient_name: that parameter.
        gradient_null: the largest of dense Inductor.
        broken: one line for each bound that is passed.
    """

    log_probs: float
    log_probs_null: float
    gradient: float
    gradient_name: str
    gradient_null: float
    broken: tuple[str, ...]


@dataclass(frozen=True)
class Measurement:
    """One step, measured.

    Args:
        grid: B * T, what the dense run computes.
        columns: T.
        sharing: what the rows have in common.
        dense: the baselines.
        tree: the tree run.
        components: of the fastest baseline.
        law: tree against dense eager.
        loss: of the tree run.
    """

    grid: int
    columns: int
    sharing: Sharing
    dense: tuple[Run, ...]
    tree: Run
    components: tuple[Component, ...]
    law: Law
    loss: float

    @property
    def best(self) -> Run:
        """The fastest dense run: the one to quote."""
        return min(self.dense, key=lambda run: run.median)

    @property
    def speedup(self) -> float:
        return self.best.median / self.tree.median

    @property
    def ideal(self) -> float:
        total = sum(c.seconds for c in self.components)
        return total / sum(c.seconds / c.ratio for c in self.components)

    @property
    def ideal_by_flops(self) -> float:
        return sum(c.flops for c in self.components) / sum(c.flops / c.ratio for c in self.components)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the derived ones included."""
        derived = {
            "best": self.best.name,
            "speedup": self.speedup,
            "ideal": self.ideal,
            "ideal_by_flops": self.ideal_by_flops,
            "of_ideal": self.speedup / self.ideal,
        }
        return dataclasses.asdict(self) | derived


@dataclass
class Step:
    """Forward and backward of a batch in microbatches; gradients add up in the parameters."""

    name: str
    model: nn.Module
    log_probs: LogProbs
    batch: Batch
    rows: int

    def __post_init__(self) -> None:
        # Found once, as an optimizer does: to walk the modules of a small model takes as long as one of its layers.
        self._parameters = list(self.model.parameters())

    def __call__(self) -> tuple[Tensor, float]:
        """Run once from empty gradients: log-probs [B, T - 1] and the loss."""
        for parameter in self._parameters:
            parameter.grad = None
        parts, loss = [], 0.0
        for first in range(0, len(self.batch.lengths), self.rows):
            part = slice(first, first + self.rows)
            found = self.log_probs(self.batch.input_ids[part], self.batch.attention_mask[part])
            partial = -(self.batch.weight[part] * found).sum()
            partial.backward()  # type: ignore[no-untyped-call]
            parts.append(found.detach())
            loss += float(partial.detach())
        return torch.cat(parts), loss


def measure(
    model: nn.Module,
    batch: Batch,
    compiled: LogProbs,
    *,
    compile_dense: Compile = lambda function: torch.compile(function, backend="inductor", dynamic=False),
    microbatches: Sequence[int] | None = None,
    repeats: int = 5,
    clock: Clock = time.perf_counter,
    say: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure one training step of `model` on `batch`.

    Args:
        model: transformers causal language model with attributes `config` and `lm_head`.
        batch: right-padded rows on the model's device.
        compiled: the function of log-probs (`log_probs_of(model)`), compiled for the tree run.
        compile_dense: how the baselines are compiled.
        microbatches: rows of a microbatch to try for the baselines; None: one row, a sixth, a third, all. The
            eager model tells the fastest. The tree run takes all rows at once.
        repeats: timed runs of each; they take turns, so that noise meets all of them.
        clock: what tells the time; `time.process_time` counts the processor time of all threads, for a
            machine whose cores are shared with other programs.
        say: called with a line about progress.
    """
    rows = len(batch.lengths)
    plain = without_mask(model)
    reference = Step("eager", model, log_probs_of(model), batch, rows)
    say("dense eager, the reference")
    wanted, _ = reference()
    gradients = gradients_of(model)

    size = best_microbatch(plain, batch, microbatches or default_microbatches(rows), clock, say)
    stock = Step("dense, 2-D mask", model, compile_dense(log_probs_of(model)), batch, size)
    causal = Step("dense, causal, no mask", plain, compile_dense(log_probs_of(plain)), batch, size)
    tree = Step("tree", model, compiled, batch, rows)

    first: dict[str, float] = {}
    kept = batch.attention_mask[:, 1:].bool()
    say(f"compiles {stock.name}")
    found, first[stock.name] = timed(stock)
    null = difference(wanted, found, kept), gradient_differences(gradients, gradients_of(model))
    say(f"compiles {causal.name}")
    found, first[causal.name] = timed(causal)
    check_baseline(causal.name, difference(wanted, found, kept), gradients, gradients_of(plain))
    say("compiles tree")
    (found, loss), first[tree.name] = timed_with_loss(tree)
    law = law_of(difference(wanted, found, kept), gradient_differences(gradients, gradients_of(model)), *null)

    say(f"times all of them, {repeats} times in turn")
    steps = (stock, causal, tree)
    times: dict[str, list[float]] = {step.name: [] for step in steps}
    for step in steps:
        step()
    for _ in range(repeats):
        for step in steps:
            times[step.name].append(seconds_of(step, clock))
    runs = [Run(s.name, s.rows, first[s.name], tuple(times[s.name])) for s in steps]

    say("times the parts of the dense run")
    counted = sharing(batch.rows())
    dense = tuple(runs[:2])
    masked = dense[0].median < dense[1].median
    quoted = dense[0] if masked else dense[1]
    components = components_of(
        model, batch, counted, quoted, masked, compile_dense, lambda f: median_seconds(f, repeats, clock)
    )
    return Measurement(
        batch.input_ids.numel(),
        batch.input_ids.shape[1],
        counted,
        dense,
        runs[2],
        components,
        law,
        loss,
    )


def default_microbatches(rows: int) -> tuple[int, ...]:
    """One row, a sixth, a third and all of them; sizes that leave a smaller rest are passed over."""
    return tuple(sorted({size for size in (1, rows // 6, rows // 3, rows) if size and rows % size == 0}))


def best_microbatch(
    model: nn.Module, batch: Batch, sizes: Sequence[int], clock: Clock, say: Callable[[str], None]
) -> int:
    """The fastest microbatch of the eager model: to compile every size would take minutes."""
    if len(sizes) == 1:
        return sizes[0]
    found = {
        size: seconds_of(Step("eager", model, log_probs_of(model), batch, size), clock) for size in sizes
    }
    model.zero_grad(set_to_none=True)
    best = min(found, key=lambda size: found[size])
    listed = ", ".join(f"{size} rows {seconds:.2f} s" for size, seconds in found.items())
    say(f"microbatch of the dense runs: {best} rows (eager: {listed})")
    return best


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients by parameter name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(wanted: Tensor, found: Tensor, kept: Tensor) -> float:
    """Largest absolute difference where `kept`."""
    return float((wanted - found)[kept].abs().max())


def gradient_differences(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 difference of every parameter's gradient; infinite where one is missing."""
    if wanted.keys() != found.keys():
        return {name: float("inf") for name in wanted.keys() ^ found.keys()}
    tiny = torch.finfo(torch.float32).tiny
    return {name: float((found[name] - g).norm() / g.norm().clamp_min(tiny)) for name, g in wanted.items()}


def law_of(
    log_probs: float, gradients: dict[str, float], log_probs_null: float, nulls: dict[str, float]
) -> Law:
    """Tree against dense eager; a bound is twice the null of dense Inductor where that is larger."""
    broken = []
    allowed = max(LOG_PROB_TOLERANCE, 2 * log_probs_null)
    # "not <=" so that NaN breaks the law.
    if not log_probs <= allowed:
        broken.append(f"log-probs differ by {log_probs:.1e}, more than {allowed:.1e}")
    for name, found in gradients.items():
        allowed = max(GRADIENT_TOLERANCE, 2 * nulls.get(name, 0.0))
        if not found <= allowed:
            broken.append(f"gradient of {name} differs by {found:.1e} (relative L2), more than {allowed:.1e}")
    worst = max(gradients, key=lambda name: gradients[name])
    return Law(
        log_probs, log_probs_null, gradients[worst], worst, max(nulls.values(), default=0.0), tuple(broken)
    )


def check_baseline(name: str, log_probs: float, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """A baseline that computes something else must not be quoted."""
    worst = max(gradient_differences(wanted, found).values())
    if not (log_probs <= 1e-3 and worst <= 1e-3):
        raise RuntimeError(
            f"{name} differs from the model: log-probs {log_probs:.1e}, gradients {worst:.1e} relative L2"
        )


def components_of(
    model: nn.Module,
    batch: Batch,
    counted: Sharing,
    run: Run,
    masked: bool,
    compile_dense: Compile,
    seconds: Callable[[Callable[[], object]], float],
    recomputed: bool = False,
) -> tuple[Component, ...]:
    """Where the time of a dense run goes; ``recomputed`` where it runs its layers forward twice."""
    config: Any = model.config
    columns, grid = batch.input_ids.shape[1], batch.input_ids.numel()
    calls = len(batch.lengths) / run.rows
    pairs = grid * columns if masked else grid * (columns + 1) // 2
    heads, channels = config.num_attention_heads, config.head_dim
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum(kind != "linear_attention" for kind in types)
    attention = calls * layers * seconds(attention_of(model, batch, run.rows, masked, recomputed))
    head = calls * seconds(head_of(model, batch, run.rows, compile_dense))
    # Parts that were timed alone can add up to more than the whole; then nothing is left for the rest.
    rest = max(0.0, run.median - attention - head)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    vocabulary = config.vocab_size * config.hidden_size
    # Without the embedding, which is looked up, and the head, which is counted by itself.
    token_weights = weights - (1 if config.tie_word_embeddings else 2) * vocabulary
    return (
        Component("token-wise", rest, 6.0 * token_weights * grid, grid, counted.distinct_tokens),
        # Two products forward, five backward: the fused kernel computes the scores again.
        Component(
            "attention", attention, 14.0 * heads * channels * layers * pairs, pairs, counted.distinct_pairs
        ),
        Component("head + loss", head, 6.0 * vocabulary * grid, grid, max(1, counted.distinct_heads)),
    )


def attention_of(
    model: nn.Module, batch: Batch, rows: int, masked: bool, recomputed: bool = False
) -> Callable[[], None]:
    """Attention of one layer and one microbatch, forward (twice if ``recomputed``) and backward."""
    config: Any = model.config
    columns, like = batch.input_ids.shape[1], next(model.parameters())

    def projected(heads: int) -> Tensor:
        # [B, T, H, D] seen as [B, H, T, D], as the projections leave it.
        drawn = torch.randn(rows, columns, heads, config.head_dim, device=like.device, dtype=like.dtype)
        return drawn.transpose(1, 2).requires_grad_()

    query = projected(config.num_attention_heads)
    key, value = projected(config.num_key_value_heads), projected(config.num_key_value_heads)
    mask = None
    if masked:
        causal = torch.ones(columns, columns, dtype=torch.bool, device=like.device).tril()
        mask = causal & batch.attention_mask[:rows, None, None, :].bool()
    upstream = torch.randn_like(query)

    def attended() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not masked, enable_gqa=True
        )

    def once() -> None:
        if recomputed:
            with torch.no_grad():
                attended()
        torch.autograd.grad(attended(), (query, key, value), upstream)

    return once


def head_of(model: nn.Module, batch: Batch, rows: int, compile_dense: Compile) -> Callable[[], None]:
    """Output layer, log-softmax and gather of one microbatch, forward and backward, compiled."""
    head: Any = model.lm_head
    hidden = torch.randn(*batch.input_ids[:rows].shape, head.in_features, device=head.weight.device)
    hidden = hidden.to(head.weight.dtype).requires_grad_()

    def log_probs(hidden: Tensor, input_ids: Tensor) -> Tensor:
        logits = head(hidden)[:, :-1]
        return torch.log_softmax(logits.float(), dim=-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)

    compiled = compile_dense(log_probs)

    def once() -> None:
        out = compiled(hidden, batch.input_ids[:rows])
        torch.autograd.grad(out, (hidden, head.weight), batch.weight[:rows])

    return once


def timed(step: Step) -> tuple[Tensor, float]:
    """Log-probs of the first call and its time."""
    (found, _), seconds = timed_with_loss(step)
    return found, seconds


def timed_with_loss(step: Step) -> tuple[tuple[Tensor, float], float]:
    """What the first call gives, and its time."""
    synchronize()
    start = time.perf_counter()
    found = step()
    synchronize()
    return found, time.perf_counter() - start


def seconds_of(function: Callable[[], object], clock: Clock) -> float:
    """Time of one call."""
    synchronize()
    start = clock()
    function()
    synchronize()
    return clock() - start


def median_seconds(function: Callable[[], object], repeats: int, clock: Clock) -> float:
    """Median time of a call after the first."""
    function()
    return statistics.median(seconds_of(function, clock) for _ in range(repeats))


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
