"""Models with linear attention or short convolutions: the law, what padding may be dropped, and traps.

These functions compute in fp32 whatever the model's dtype: models are compared in fp32, by log-probs and gradients.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import treecompile
from tests import law
from tests.models import HYBRIDS, VOCAB, randomise
from tests.test_leaves import Recorder, run_fresh
from treecompile import lowering
from treecompile.executors import RecurrenceRoutes
from treecompile.leaves import install, recurrence, scope
from treecompile.passes.states import reads_states
from treecompile.runtime.chunks import Alignment, ChunkPlan
from treecompile.runtime.ops import chunk_rounds, recurrence_choice, recurrence_plan, recurrence_rounds
from treecompile.runtime.ops import recurrence as op
from treecompile.runtime.ops.leaf_recurrence import leaf_last_state, leaf_recurrence

pytest.importorskip("transformers")
# Dynamo of torch 2.11 breaks a graph at an import within it.
qwen3_next = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
hub_kernels = importlib.import_module("transformers.integrations.hub_kernels")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
SLOW = pytest.mark.slow

MASKS = ("none", "right", "left", "ragged")
T = 16
LENGTHS = (16, 14, 16, 9, 14, 13)


def rows() -> Tensor:
    """int64 [6, 16]: a row, a late fork, the first row again, its prefix, a fork of the fork, an early fork."""
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (6, T), generator=g)
    for row, source, fork in ((1, 0, 11), (2, 0, 16), (3, 0, 9), (4, 1, 12), (5, 0, 2)):
        ids[row, :fork] = ids[source, :fork]
    return ids


def batch(side: str) -> dict[str, Tensor]:
    """ids and mask. Padding is random tokens, so that whatever reads it shows."""
    ids = rows()
    if side == "none":
        return {"input_ids": ids}
    g = torch.Generator().manual_seed(6)
    out, mask = torch.randint(3, VOCAB, ids.shape, generator=g), torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        free = T - length
        start = {"left": free, "ragged": free // 2 if row % 2 else free}.get(side, 0)
        out[row, start : start + length] = ids[row, :length]
        mask[row, start : start + length] = 1
    if side == "holes":
        mask[1, 7:9] = 0
    return {"input_ids": out, "attention_mask": mask}


Outcome = tuple[Tensor, dict[str, Tensor]]


def outcome(model: nn.Module, call: Callable[..., Any], inputs: dict[str, Any]) -> Outcome:
    """Log-probs of some tokens where they are kept, and the gradients of a random sum of them."""
    model.zero_grad()
    ids = inputs["input_ids"]
    logits = call(**{"use_cache": False, **inputs}).logits
    picked = ids.roll(1, 1)[:, -logits.shape[1] :, None]
    found = logits.float().log_softmax(-1).gather(-1, picked)[..., 0]
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    weight = (weight.to(ids.device) * inputs.get("attention_mask", torch.ones_like(ids)))[
        :, -logits.shape[1] :
    ]
    (found * weight).sum().backward()
    kept = torch.where(weight != 0, found, 0.0)
    return kept.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_law(
    model: nn.Module, inputs: dict[str, Any], expect: law.Expect = "packed", **options: Any
) -> None:
    """One graph, run as expected, and equal to the unmodified model."""
    expected, grads = outcome(model, model, inputs)
    call = law.compiled(model, **options)
    with law.counting() as seen:
        actual, found = outcome(model, call, inputs)
    law.held(expect, seen)
    if expect == "packed":
        assert seen["captured"] == 1
    assert (actual - expected).abs().max() <= 2e-5
    assert_gradients(found, grads)


def assert_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], budget: float = 1e-5, decays: float = 1e-4
) -> None:
    """Of the same parameters, and within a budget of their norm; `decays` is that of decays.

    The sums behind the gradient of a decay cancel: it is small, and the dense run's own rounding shows.
    """
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        allowed = decays if name.endswith(("A_log", "dt_bias")) else budget
        assert (found[name] - g).norm() <= allowed * g.norm().clamp_min(1e-3), name


# ---- every family ----


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_family_packs(name: str) -> None:
    with law.as_written():
        assert_law(HYBRIDS[name].build(), batch("ragged"))


@pytest.mark.parametrize("alignment", ["branch", pytest.param("auto", marks=SLOW)])
@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("mamba2", marks=SLOW)])
def test_alignments(name: str, alignment: str) -> None:
    """Chunks that start at forks: the same function, and the choice reaches the op."""
    asked = []
    plan = recurrence_plan.block_plan

    def spy(table: Tensor, chunk: int, alignment: Alignment) -> ChunkPlan:
        asked.append(alignment)
        return plan(table, chunk, alignment)

    with law.as_written(), mock.patch.object(recurrence_plan, "block_plan", spy):
        assert_law(HYBRIDS[name].build(), batch("ragged"), alignment=alignment)
    assert set(asked) == {alignment}


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a model in the executor that the environment asks for, forward and backward."""
    recorded = []

    def spy(*args: Any) -> Any:
        recorded.append(torch.is_grad_enabled())
        return chunk_rounds.run_rounds(*args)

    monkeypatch.setenv(recurrence_choice.VARIABLE, "rounds")
    monkeypatch.setattr(recurrence_rounds, "run_rounds", spy)
    with law.as_written():
        assert_law(HYBRIDS["qwen3_5"].build(), batch("ragged"))
    assert set(recorded) == {False, True}


@pytest.mark.parametrize("mask", [m for m in MASKS if m != "ragged"])
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_every_padding(name: str, mask: str) -> None:
    with law.as_written():
        assert_law(HYBRIDS[name].build(), batch(mask))


@SLOW
@pytest.mark.parametrize(("name", "mask"), list(itertools.product(HYBRIDS, MASKS)))
def test_every_family_with_every_padding(name: str, mask: str) -> None:
    assert_law(HYBRIDS[name].build(), batch(mask), on_unsupported="error")


@pytest.mark.parametrize(
    "name", ["qwen3_next", *(pytest.param(n, marks=SLOW) for n in HYBRIDS if n != "qwen3_next")]
)
def test_gradient_checkpointing(name: str) -> None:
    model = HYBRIDS[name].build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_law(model, batch("left"))


@SLOW
@pytest.mark.parametrize("name", ["qwen3_5", "bamba"])
def test_through_inductor(name: str) -> None:
    assert_law(HYBRIDS[name].build(), batch("ragged"), compiler="inductor")


@pytest.mark.parametrize(
    "name", ["qwen3_5", *(pytest.param(n, marks=SLOW) for n in HYBRIDS if n != "qwen3_5")]
)
def test_autocast(name: str) -> None:
    """No further from fp32 than the dense run in bf16 is."""
    model, inputs = HYBRIDS[name].build(smooth=True), batch("ragged")
    call = law.compiled(model, on_unsupported="error")
    errors, weights = Errors(), copy.deepcopy(model.state_dict())
    for seed in range(DRAWS):
        model.load_state_dict(weights)
        randomise(model, seed)
        exact = outcome(model, model, inputs)
        with law.as_written(), torch.autocast("cpu", torch.bfloat16):
            errors.add(exact, outcome(model, model, inputs), outcome(model, call, inputs))
    errors.check()


DRAWS = 5


class Errors:
    """Distances of dense and tree runs to fp32, over several draws of weights.

    Medians are compared, of tokens and of parameters: of one draw, a single rounding can decide the norm.
    """

    def __init__(self) -> None:
        self.tokens: list[list[Tensor]] = [[], []]
        self.parameters: list[Tensor] = []

    def add(self, exact: Outcome, *runs: Outcome) -> None:
        """Add those of one draw, dense and tree."""
        for far, (found, _) in zip(self.tokens, runs, strict=True):
            far.append((found - exact[0])[exact[0] != 0].abs())
        dense, tree = (
            torch.stack([(grads[n].float() - g).norm() for n, g in exact[1].items()]) for _, grads in runs
        )
        self.parameters.append(tree / dense.clamp_min(1e-12))

    def check(self) -> None:
        """The tree's are at most 1.25 times as far."""
        dense, tree = (torch.cat(far).median() for far in self.tokens)
        assert tree <= 1.25 * dense
        assert torch.cat(self.parameters).median() <= 1.25


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "compiler"), [("qwen3_5", "inductor"), *((name, "aot_eager") for name in HYBRIDS)]
)
def test_bf16_on_the_gpu(name: str, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No further from fp32 than the dense run in bf16, and close to it in fp32; by kernels where they can.

    The dense runs take transformers' functions in PyTorch, as it does for an export, where fla is installed too: fla
    refuses gradients with some versions of Triton, and rounds operands of fp32.
    """

    def dense(model: nn.Module, inputs: dict[str, Any]) -> Outcome:
        with mock.patch.object(hub_kernels, "is_torchdynamo_exporting", return_value=True):
            return outcome(model, model, inputs)

    model = HYBRIDS[name].build(smooth=True).cuda()
    low = copy.deepcopy(model).bfloat16()
    inputs = {key: x.cuda() for key, x in batch("ragged").items()}
    ran = mock.Mock(wraps=op.kernels_backward)
    monkeypatch.setattr(op, "kernels_backward", ran)
    call, low_call = (law.compiled(m, on_unsupported="error", compiler=compiler) for m in (model, low))
    errors, weights = Errors(), copy.deepcopy(model.state_dict())
    for seed in range(DRAWS):
        model.load_state_dict(weights)
        model.cpu()
        randomise(model, seed)
        model.cuda()
        exact, exact_grads = dense(model, inputs)
        close, close_grads = outcome(model, call, inputs)
        assert (close - exact).abs().max() <= 5e-5
        assert_gradients(close_grads, exact_grads, 1e-4, 1e-3)
        low.load_state_dict(model.state_dict())
        with law.counting() as seen:
            errors.add((exact, exact_grads), dense(low, inputs), outcome(low, low_call, inputs))
        law.held("packed", seen)
    errors.check()
    # A decay per channel, and no recurrence at all.
    assert bool(ran.call_count) == (name not in ("kimi_linear", "lfm2"))


class Step(nn.Module):
    """Log-probs of a model that keeps a cache, as its configuration says, which the step drops or hands out."""

    def __init__(self, model: nn.Module, hands_out: int | None = None) -> None:
        super().__init__()
        self.model, self.hands_out = model, hands_out

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True)
        log_probs = found.logits.float().log_softmax(-1).gather(-1, input_ids.roll(1, 1)[..., None])[..., 0]
        if self.hands_out is None:
            return log_probs
        return log_probs, found.past_key_values.layers[self.hands_out].recurrent_states[0]


def gradients_of(
    step: nn.Module, call: Callable[..., Any], inputs: dict[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What a step returns, and the gradients of a random sum of it where tokens are kept."""
    step.zero_grad()
    found = call(**inputs)
    outs = list(found) if isinstance(found, tuple) else [found]
    g = torch.Generator().manual_seed(3)
    weights = [torch.randn(out.shape, generator=g) for out in outs]
    weights[0] = weights[0] * inputs["attention_mask"]
    torch.stack([(out * w).sum() for out, w in zip(outs, weights, strict=True)]).sum().backward()
    kept = [outs[0] * inputs["attention_mask"], *outs[1:]]
    grads = {n: p.grad.clone() for n, p in step.named_parameters() if p.grad is not None}
    return [out.detach() for out in kept], grads


QUICK = ("qwen3_next", "bamba", "minimax")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=SLOW) for n in HYBRIDS if n not in QUICK)])
def test_a_cache_that_is_dropped(name: str) -> None:
    """A step of training with the cache left on: nobody reads the last states."""
    step = Step(HYBRIDS[name].build())
    inputs = batch("ragged")
    (expected,), grads = gradients_of(step, step, inputs)
    with law.as_written(), law.counting() as seen:
        (found,), others = gradients_of(step, law.compiled(step, on_unsupported="error"), inputs)
    law.held("packed", seen)
    assert seen["captured"] == 1
    assert (found - expected).abs().max() <= 2e-5
    assert_gradients(others, grads)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("kimi_linear", marks=SLOW)])
def test_a_state_that_is_read(name: str, fullgraph: bool) -> None:
    """One layer's is enough: the graph runs dense, with its states and their gradients."""
    model = HYBRIDS[name].build()
    config: Any = model.config
    step = Step(model, config.layer_types.index("linear_attention"))
    inputs = batch("left")
    expected, grads = gradients_of(step, step, inputs)
    call = torch.compile(
        step, backend=treecompile.backend.tree, fullgraph=fullgraph, options={"compiler": "inductor"}
    )
    with law.as_written(), law.counting() as seen:
        found, others = gradients_of(step, call, inputs)
    assert seen["dense:recurrent-state"] == 1
    assert not seen["packed"]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5
    assert_gradients(others, grads, 1e-4)
    with pytest.raises(treecompile.UnsupportedError, match="hands its last one out"):
        torch._dynamo.reset()
        law.compiled(step, on_unsupported="error")(**inputs)


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=SLOW)])
def test_a_state_whose_reader_is_overlooked(fullgraph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense graph never has the stand-in, which has no gradient."""
    monkeypatch.setattr(treecompile.backend, "reads_states", lambda gm: False)
    step = Step(HYBRIDS["qwen3_next"].build(), 0)
    inputs = batch("left")
    expected, grads = gradients_of(step, step, inputs)
    call = torch.compile(step, backend=treecompile.backend.tree, fullgraph=fullgraph)
    with law.as_written(), law.counting() as seen:
        found, others = gradients_of(step, call, inputs)
    assert seen["dense:recurrent-state"] == 1
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5
    assert_gradients(others, grads, 1e-4)


class Hooked(nn.Module):
    """The last state that MiniMax' attention returns beside its output, with or without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.kept: list[Tensor] = []
        at = model.config.layer_types.index("linear_attention")
        model.model.layers[at].self_attn.register_forward_hook(lambda _, __, out: self.kept.append(out[1]))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        self.kept.clear()
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        log_probs = logits.float().log_softmax(-1).gather(-1, input_ids.roll(1, 1)[..., None])[..., 0]
        return log_probs, self.kept[0]


def test_a_state_that_a_layer_returns() -> None:
    step = Hooked(HYBRIDS["minimax"].build())
    inputs = batch("left")
    expected, grads = gradients_of(step, step, inputs)
    with law.as_written():
        found, others = gradients_of(step, law.compiled(step), inputs)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5
    assert_gradients(others, grads, 1e-4)


def state_graph(use: Callable[[Tensor, Tensor], Any]) -> fx.GraphModule:
    """A graph of an input and of a last state, traced as Dynamo would record it: calls as they are written."""

    class Root(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return use(x, leaf_last_state(x, x, [x], ""))

    return fx.symbolic_trace(Root())


def wrote(x: Tensor, state: Tensor) -> Tensor:
    torch.zeros_like(state).copy_(state.to(torch.float64))
    return x + 1


def wrote_view(x: Tensor, state: Tensor) -> Tensor:
    cache = torch.zeros(4, 4)
    cache[1:].view(-1).copy_(state)
    return x + cache


def wrote_item(x: Tensor, state: Tensor) -> Tensor:
    cache = torch.zeros(4, 4)
    cache[0] = state
    return cache


def wrote_input(x: Tensor, state: Tensor) -> Tensor:
    x[0].add_(state)
    return torch.ones(1)


def wrote_out(x: Tensor, state: Tensor) -> Tensor:
    cache = torch.empty(4)
    torch.add(state, 1, out=cache)
    return cache


def wrote_where_nobody_looks(x: Tensor, state: Tensor) -> Tensor:
    cache = x.new_zeros(2, 4)
    cache[0].copy_(state)
    cache.add_(state)
    return x + torch.zeros_like(state)


def wrote_zeros(x: Tensor, state: Tensor) -> Tensor:
    cache = torch.empty(4)
    torch.zeros(4, out=cache).copy_(state)
    return cache


def wrote_by_name(x: Tensor, state: Tensor) -> Tensor:
    cache = torch.zeros(4)
    torch.index_put_(input=cache, indices=(x,), values=state)
    return cache


def wrote_list(x: Tensor, state: Tensor) -> Tensor:
    cache = torch.zeros(4)
    torch._foreach_copy_([cache], [state])
    return cache


def asserted(x: Tensor, state: Tensor) -> Tensor:
    torch._assert_async((state < 1).all(), "large")
    return x + 1


@pytest.mark.parametrize(
    ("use", "read"),
    [
        (wrote_where_nobody_looks, False),
        (wrote_zeros, True),
        (wrote_by_name, True),
        (wrote_list, True),
        (asserted, True),
        (lambda x, state: x * 2, False),
        (wrote, False),
        (lambda x, state: (x, [state]), True),
        (lambda x, state: x + (state.cumsum(0) * 2)[..., 0], True),
        (wrote_view, True),
        (wrote_item, True),
        (wrote_input, True),
        (wrote_out, True),
    ],
)
def test_what_reads_a_state(use: Callable[[Tensor, Tensor], Any], read: bool) -> None:
    assert reads_states(state_graph(use)) is read


def test_a_state_within_a_region_counts_as_read() -> None:
    inner = state_graph(lambda x, state: x)
    outer = fx.Graph()
    x = outer.placeholder("x")
    outer.output(outer.call_module("inner", (x,)))
    assert reads_states(fx.GraphModule({"inner": inner}, outer))


def test_the_report_names_who_computes_recurrences(monkeypatch: pytest.MonkeyPatch) -> None:
    def routes(name: str) -> list[str]:
        ids = rows()
        report = treecompile.explain(HYBRIDS[name].build(), ids, use_cache=False, options={"min_sharing": 0})
        found = [route for graph in report.graphs for route in graph.routes]
        assert all(str(route) in str(report) for route in found)
        return [str(route) for route in found if isinstance(route, RecurrenceRoutes)]

    (delta,) = routes("qwen3_5")
    assert delta.splitlines() == [
        "tree_recurrence of 4 heads over 4, size 8, f32, delta rule, a decay per head, chunks of 64",
        "  forward and backward by pytorch",
        "    not triton: not on a CUDA device",
        "    not rounds, fla: TREECOMPILE_RECURRENCE does not ask for it",
    ]
    monkeypatch.setenv(recurrence_choice.VARIABLE, "rounds")
    (scan,) = routes("bamba")
    assert "delta rule" not in scan
    assert scan.splitlines()[1:] == [
        "  forward and backward by rounds",
        "    not triton, pytorch, fla: rounds was asked for",
    ]
    (channel,) = routes("kimi_linear")
    assert "a decay per channel" in channel


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_frozen_weights(name: str) -> None:
    model = HYBRIDS[name].build()
    for parameter, p in model.named_parameters():
        p.requires_grad_(not any(part in parameter for part in ("embed", "mlp", "conv", "A_log")))
    with law.as_written():
        assert_law(model, batch("left"))


@pytest.mark.parametrize("name", ["qwen3_5", *(pytest.param(n, marks=SLOW) for n in ("bamba", "minimax"))])
def test_sizes_that_vary(name: str) -> None:
    model, inputs = HYBRIDS[name].build(), batch("right")
    call = law.compiled(model, dynamic=True, on_unsupported="error")
    with law.as_written(), law.counting() as seen, torch.no_grad():
        for length in (T, T - 5):
            given = {key: x[:, :length].contiguous() for key, x in inputs.items()}
            expected, actual = (f(**given, use_cache=False).logits for f in (model, call))
            kept = given["attention_mask"][..., None]
            assert ((actual - expected) * kept).abs().max() <= 2e-5
    assert seen["packed"] == 2
    assert seen["compiled"] == 1


def test_lightning_attention_in_fp64() -> None:
    """Written into the model, it knows no fp32."""
    given, model = batch("ragged"), HYBRIDS["minimax"].build(smooth=True).double()
    model.config._experts_implementation = "batched_mm"  # grouped_mm has no fp64
    law.check(
        model, **given, use_cache=False,
        kept=given["attention_mask"].bool(), tolerance=1e-6, around=law.as_written,
    )  # fmt: skip


class _Rows(TorchDispatchMode):
    """Rows of every product of a matrix with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.add(args[-2].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "lfm2"])
def test_projections_run_once_for_each_packed_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = HYBRIDS[name].build(), batch("right")
    call = law.compiled(model, on_unsupported="error")
    tokens = {
        tuple(row[: n + 1].tolist())
        for row, length in zip(rows(), LENGTHS, strict=True)
        for n in range(length)
    }
    counted = _Rows()

    def written(gm: Any, *_: Any) -> Any:
        def run(*args: Any) -> Any:
            with counted:
                return gm(*args)

        return run

    monkeypatch.setattr(lowering, "_compile_graph", written)
    with torch.no_grad():
        call(**inputs, use_cache=False)
    assert counted.seen == {len(tokens)}


# ---- what is not packed ----


@pytest.mark.parametrize(
    ("side", "labels", "expect"),
    [("left", "all", "packed"), ("right", "all", "masked-after"), ("right", "kept", "packed")],
)
def test_masked_positions_that_a_loss_reads(side: str, labels: str, expect: str) -> None:
    inputs = batch(side)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    inputs["labels"] = ids if labels == "all" else ids.masked_fill(mask == 0, -100)
    with law.as_written():
        law.check(
            HYBRIDS["qwen3_5"].build(), **inputs, use_cache=False, expect=expect, kept=mask.bool(), tolerance=1e-4,
            loss=lambda out: out.loss,
        )  # fmt: skip


def some(*quick: str) -> Any:
    """Every family; those that are not named are slow tests."""
    names = [name if name in quick else pytest.param(name, marks=SLOW) for name in HYBRIDS]
    return pytest.mark.parametrize("name", names)


@some("qwen3_5", "mamba2", "lfm2")
def test_masked_between(name: str) -> None:
    with law.as_written():
        assert_law(HYBRIDS[name].build(), batch("holes"), "masked-between")


@some("qwen3_5", "lfm2")
def test_documents_in_a_row(name: str) -> None:
    """transformers keeps documents apart in attention, and lets states and convolutions pass.

    Where positions reach no attention, nothing is kept apart, and the row is one sequence.
    """
    packed = torch.cat([torch.arange(10), torch.arange(6)]).expand(6, -1).contiguous()
    whole = torch.arange(T).expand(6, -1).contiguous()
    model = HYBRIDS[name].build()
    expect: law.Expect = "packed" if name in ("granitemoehybrid", "mamba2") else "chained-documents"
    with law.as_written():
        assert_law(model, batch("none") | {"position_ids": packed}, expect)
        torch._dynamo.reset()
        assert_law(model, batch("none") | {"position_ids": whole})


@pytest.mark.parametrize(
    "name", ["minimax", *(pytest.param(n, marks=SLOW) for n in ("qwen3_5", "kimi_linear", "bamba"))]
)
def test_a_cache_is_refused_with_a_hint(name: str, caplog: pytest.LogCaptureFixture) -> None:
    treecompile.backend.clear()  # a warning is given once
    with law.as_written():
        assert_law(HYBRIDS[name].build(), batch("left") | {"use_cache": True}, "recurrent-state")
    assert "use_cache=False" in caplog.text


def test_dense_through_the_compiler() -> None:
    """The dense run of a capture with leaves is compiled as other dense runs are."""
    model = HYBRIDS["bamba"].build()
    assert_law(model, batch("left"), "min_sharing", min_sharing=100)


# ---- the gate ----


@pytest.fixture
def tree() -> Iterator[Recorder]:
    recorder = Recorder()
    scope.serve(recorder)
    install()
    yield recorder
    scope._served.remove(recorder)


def leaves_of(recorder: Recorder) -> list[int]:
    return [sum(node.target is leaf_recurrence for node in gm.graph.nodes) for gm in recorder.graphs]


@pytest.mark.parametrize("name", [n for n in HYBRIDS if n != "lfm2"])
def test_a_layer_is_one_node(tree: Recorder, name: str) -> None:
    model = HYBRIDS[name].build()
    torch.compile(model, backend=tree, fullgraph=True)(**batch("left"), use_cache=False)
    assert leaves_of(tree) == [2 if name in ("falcon_h1", "mamba2") else 1]


@SLOW
def test_other_backends_see_the_graphs_they_saw_before() -> None:
    run_fresh(
        """
        from tests.models import HYBRIDS
        inputs = {key: x % 40 for key, x in batch().items()}
        models = [HYBRIDS[name].build() for name in ("qwen3_5", "kimi_linear", "bamba", "minimax")]
        def capture():
            codes = []
            for model in models:
                seen = Recorder()
                torch._dynamo.reset()
                with torch.no_grad():
                    torch.compile(model, backend=seen)(**inputs, use_cache=False)
                codes.append([gm.code for gm in seen.graphs])
            return codes
        from treecompile.leaves import scope
        assert not any("recurrence" in str(f) or "delta" in f.__name__ for f in scope._substituted)
        before = capture()
        assert [len(codes) for codes in before] == [1] * 4
        from treecompile.leaves import install
        assert {"gated delta rule", "Kimi delta attention", "Mamba 2 scan", "lightning attention"} <= set(install())
        assert capture() == before
        """
    )


# ---- kernels of other packages ----


def _pick(function: Any, kernel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Have a function of transformers call a kernel, as it does where the kernel's package is installed."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    reference: Callable[..., Any] = cells["implementation"].cell_contents
    parameters = tuple(inspect.signature(kernel).parameters)
    for name, value in (
        ("implementation", kernel), ("is_new_implementation", True), ("applicable_params", parameters)
    ):  # fmt: skip
        monkeypatch.setattr(cells[name], "cell_contents", value)
    return reference


def test_a_kernel_runs_in_the_dense_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HYBRIDS["qwen3_5"].build()
    qwen = importlib.import_module(type(model).__module__)
    calls: list[type] = []

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, *,
        use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    ) -> Any:  # fmt: skip
        calls.append(type(q))
        return reference(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    kernel = torch.compiler.disable(chunk_gated_delta_rule)
    reference = _pick(qwen.torch_chunk_gated_delta_rule, kernel, monkeypatch)
    inputs = batch("left")
    expected, grads = outcome(model, model, inputs)
    assert len(calls) == 1
    packed, _ = outcome(model, law.compiled(model, on_unsupported="error"), inputs)
    assert len(calls) == 1
    assert (packed - expected).abs().max() <= 2e-5
    torch._dynamo.reset()
    dense, found = outcome(model, law.compiled(model, on_unsupported="error", min_sharing=100), inputs)
    assert set(calls) == {Tensor}  # never a fake one
    assert len(calls) == 3  # forward, and again for the backward pass
    torch.testing.assert_close(dense, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("picked", [False, True])
def test_operands_have_the_dtype_that_the_dense_run_multiplies_in(
    picked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own code casts to fp32, kernels multiply what they are given; gates are fp32 for both."""
    model = HYBRIDS["qwen3_5"].build().bfloat16()
    function = importlib.import_module(type(model).__module__).torch_chunk_gated_delta_rule
    if picked:

        def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
            raise AssertionError("the packed run calls no kernel of the model")

        _pick(function, torch.compiler.disable(chunk_gated_delta_rule), monkeypatch)
    seen: list[list[torch.dtype]] = []
    check = op._check

    def spy(*operands: Any) -> None:
        seen.append([x.dtype for x in operands[:4]])
        check(*operands)

    monkeypatch.setattr(op, "_check", spy)
    with torch.no_grad():
        law.compiled(model, on_unsupported="error")(**batch("left"), use_cache=False)
    expected = torch.bfloat16 if picked else torch.float32
    assert seen == [[expected] * 3 + [torch.float32]]


def test_a_convolution_kernel_gives_way_to_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    lfm2 = importlib.import_module(type(HYBRIDS["lfm2"].build()).__module__)
    assert lfm2.causal_conv1d_fn not in list(recurrence.kernel_convolutions())

    def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None) -> Tensor:
        raise AssertionError("a kernel for CUDA")

    _pick(lfm2.causal_conv1d_fn, causal_conv1d_fn, monkeypatch)
    assert lfm2.causal_conv1d_fn in list(recurrence.kernel_convolutions())
    twin = recurrence.convolution(lfm2.causal_conv1d_fn)
    x, filters = torch.randn(2, 6, 9), torch.randn(6, W)
    expected = F.conv1d(x, filters[:, None], padding=W - 1, groups=6)[..., :9]
    torch.testing.assert_close(twin(x, filters, seq_idx=None), expected)
    with pytest.raises(AssertionError, match="CUDA"):
        twin(x, filters, seq_idx=torch.zeros(2, 9))


def test_a_function_that_computes_something_else_is_no_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(*args: Any, **kwargs: Any) -> Any:
        out, state = qwen.torch_chunk_gated_delta_rule.__wrapped__(*args, **kwargs)
        return 2 * out, state

    HYBRIDS["qwen3_5"].build()
    qwen = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    assert recurrence._is_delta_rule(qwen.torch_chunk_gated_delta_rule.__wrapped__, False)
    assert not recurrence._is_delta_rule(qwen.torch_chunk_gated_delta_rule.__wrapped__, True)
    assert not recurrence._is_delta_rule(doubled, False)


# ---- traps: a small model in fp64 with something between its two layers ----

W = 3
FILTER = {"filter": (12, 1, W), "bias": (12,), "square": (12, 12), "wide": (12, 12, W)}
Middle = Callable[..., Tensor]


def convolved(
    self: nn.Module, x: Tensor, *, left: bool = False, biased: bool = False, keep: int = 0, **settings: Any
) -> Tensor:
    """A depthwise convolution along the tokens of [B, T, 12], kept from column `keep` on."""
    x = x.transpose(1, 2)
    length, bias = x.shape[-1], self.bias if biased else None
    settings = {"padding": 0 if left else W - 1, "groups": 12, **settings}
    x = F.pad(x, (W - 1, 0)) if left else x
    x = F.conv1d(x, self.filter, bias, **settings)[..., keep : keep + length]
    return x.transpose(1, 2)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask[..., None]


def _toy(middle: Callable[..., Tensor]) -> law.Toy:
    toy = law.Toy(extra=FILTER)
    toy.middle = lambda h, ids, mask: h + middle(toy, h, mask)
    return toy


def _delta(h: Tensor, *, heads: Sequence[int] = (2,) * 5, **settings: Any) -> Any:
    """heads: of q, k, v, the gate and beta."""
    q, k, v = (h[..., i : i + 8].unflatten(-1, (2, 4)) for i in (0, 2, 4))
    operands = (q, k, v, -h[..., :2].square(), h[..., 2:4].sigmoid())
    q, k, v, gate, rate = (x[:, :, :count] for x, count in zip(operands, heads, strict=True))
    return qwen3_next.torch_chunk_gated_delta_rule(
        q, k, v, g=gate, beta=rate, chunk_size=4, use_qk_l2norm_in_kernel=True, **settings
    )


def delta(h: Tensor, **settings: Any) -> Tensor:
    out: Tensor = _delta(h, **settings)[0]
    return torch.cat([out.flatten(2), h[..., :4]], -1)


def final_state(self: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    out, state = _delta(h, output_final_state=True)
    return torch.cat([out.flatten(2), h[..., :4]], -1) + state.mean((1, 2, 3))[:, None, None]


def sliced(self: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([delta(h[:, :-1]), h[:, -1:]], 1)


def other_mask(self: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    return convolved(self, h * (mask * mask.roll(1, 1))[..., None])


# name: (what happens, padding, middle)
TRAPS: dict[str, tuple[str, str, Middle]] = {
    "cut": ("packed", "none", lambda s, h, m: convolved(s, h)),
    "padded": ("packed", "none", lambda s, h, m: convolved(s, h, left=True)),
    "bias": ("packed", "left", lambda s, h, m: convolved(s, masked(h, m), biased=True)),
    "after-bias": (
        "masked-before",
        "left",
        lambda s, h, m: convolved(s, convolved(s, masked(h, m), biased=True)),
    ),
    "after-convolution": ("packed", "left", lambda s, h, m: convolved(s, convolved(s, masked(h, m)))),
    "silenced-again": (
        "packed",
        "mixed",
        lambda s, h, m: convolved(s, masked(convolved(s, masked(h, m), biased=True), m)),
    ),
    "not-masked": ("masked-before", "left", lambda s, h, m: convolved(s, h)),
    "not-masked-right": ("packed", "right", lambda s, h, m: convolved(s, h)),
    "masked-too-late": ("masked-before", "left", lambda s, h, m: masked(convolved(s, h), m)),
    "linear": ("packed", "mixed", lambda s, h, m: convolved(s, F.silu(masked(h, m) @ s.square))),
    "linear-bias": (
        "masked-before",
        "left",
        lambda s, h, m: convolved(s, F.linear(masked(h, m), s.square, s.bias)),
    ),
    "sigmoid": ("masked-before", "left", lambda s, h, m: convolved(s, masked(h, m).sigmoid())),
    "where": ("packed", "left", lambda s, h, m: convolved(s, torch.where(m[..., None] != 0, h, 0.0))),
    "where-inverted": (
        "masked-before",
        "left",
        lambda s, h, m: convolved(s, torch.where(m[..., None] == 0, h, 0.0)),
    ),
    "filled": ("packed", "left", lambda s, h, m: convolved(s, h.masked_fill(~m[..., None].bool(), 0.0))),
    "filled-inverted": (
        "masked-before",
        "left",
        lambda s, h, m: convolved(s, h.masked_fill(m[..., None].bool(), 0.0)),
    ),
    "other-mask": ("masked-before", "left", other_mask),
    "shifted-mask": ("masked-before", "left", lambda s, h, m: convolved(s, h * (m.cumsum(1) > 1)[..., None])),
    "holes": ("masked-between", "holes", lambda s, h, m: convolved(s, masked(h, m))),
    "wrong-side": ("no-rule", "none", lambda s, h, m: convolved(s, h, keep=W - 1)),
    "middle": ("no-rule", "none", lambda s, h, m: convolved(s, h, padding=W // 2)),
    "dilation": ("no-rule", "none", lambda s, h, m: convolved(s, h, dilation=2, padding=2 * (W - 1))),
    "not-depthwise": (
        "no-rule",
        "none",
        lambda s, h, m: F.conv1d(h.mT, s.wide, padding=W - 1)[..., : h.shape[1]].mT,
    ),
    "recurrence": ("packed", "none", lambda s, h, m: delta(h)),
    "recurrence-masked": ("packed", "mixed", lambda s, h, m: delta(masked(h, m))),
    "recurrence-not-masked": ("masked-before", "left", lambda s, h, m: delta(h)),
    "reversed": ("mixes-tokens", "none", lambda s, h, m: delta(h.flip(1)).flip(1)),
    "sliced": ("recurrence-operand", "none", sliced),
    "given-state": (
        "recurrent-state",
        "none",
        lambda s, h, m: delta(h, initial_state=torch.ones(len(h), 2, 4, 4)),
    ),
    "final-state": ("recurrent-state", "none", final_state),
    "recurrence-grouped": ("packed", "none", lambda s, h, m: delta(h, heads=(1, 1, 2, 2, 2))),
    "recurrence-one-query": (
        "recurrence-operand",
        "none",
        lambda s, h, m: delta(h, heads=(1, 2, 2, 2, 2)),
    ),
    "recurrence-one-gate": ("recurrence-operand", "none", lambda s, h, m: delta(h, heads=(2, 2, 2, 1, 2))),
    "recurrence-one-beta": ("recurrence-operand", "none", lambda s, h, m: delta(h, heads=(2, 2, 2, 2, 1))),
    "tuple": ("masked-before", "left", lambda s, h, m: convolved(s, h * m.cummax(1).values[..., None])),
    "documents": ("recurrent-state", "none", lambda s, h, m: delta(h, cu_seqlens=torch.tensor([0, 9]))),
}


@pytest.mark.parametrize("name", TRAPS)
def test_trap(name: str) -> None:
    expect, pad, middle = TRAPS[name]
    given = law.batch(pad="right" if pad == "holes" else pad, holes=pad == "holes")
    recurrent = "recurr" in name + expect or name == "reversed"
    with law.as_written():
        law.check(
            _toy(middle), given.ids, None if pad == "none" else given.mask,
            expect=expect, kept=None if pad == "none" else given.kept, tolerance=1e-4 if recurrent else 1e-10,
        )  # fmt: skip


# ---- the activation of a convolution ----


def _activated_before_transposing(self: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    x = F.pad(h.transpose(1, 2), (W - 1, 0))
    return F.silu(F.conv1d(x, self.filter, self.bias, groups=12), inplace=True).transpose(1, 2)


def _read_twice(self: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    x = convolved(self, h)
    return F.silu(x) + x


def _without_gradients(self: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    x = convolved(self, h)
    with torch.no_grad():
        return F.silu(x)


def _outside_of_the_region(self: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    return F.silu(checkpoint(lambda x: convolved(self, x), h, use_reentrant=False))


def _inside_of_the_region(self: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
    x: Tensor = checkpoint(lambda x: F.silu(convolved(self, x)), h, use_reentrant=False)
    return x


# name: (whether the op computes it, what a model writes)
ACTIVATED: dict[str, tuple[bool, Middle]] = {
    "silu": (True, lambda s, h, m: F.silu(convolved(s, h, biased=True))),
    "before it is transposed": (True, _activated_before_transposing),
    "in a checkpoint": (True, _inside_of_the_region),
    "read twice": (False, _read_twice),
    "another function": (False, lambda s, h, m: F.gelu(convolved(s, h))),
    "another step between": (False, lambda s, h, m: F.silu(2 * convolved(s, h))),
    "without gradients": (False, _without_gradients),
    "outside of the checkpoint": (False, _outside_of_the_region),
}


@pytest.mark.parametrize("name", ACTIVATED)
def test_what_a_convolution_takes_in(name: str) -> None:
    taken, middle = ACTIVATED[name]
    toy, ids = _toy(middle), law.batch(pad="none").ids
    with law.as_written():
        law.check(toy, ids, expect="packed", tolerance=1e-10)
    report = treecompile.explain(toy, ids)
    assert report.rewritten["tree_causal_conv1d"] == 1
    assert ("  and silu" in str(report)) == taken
    assert ("'silu')" in report["packed"]) == taken
    written = not taken and name != "another function"
    assert ("aten.silu" in report["packed"]) == written


@pytest.mark.parametrize(("around", "inside", "dtype"), [(True, False, "f32"), (False, True, "bf16")])
def test_a_convolution_has_the_dtype_of_the_autocast_around_it(
    around: bool, inside: bool, dtype: str
) -> None:
    """Also where the graph itself begins one, or turns one off for a part that needs precision."""

    def middle(self: nn.Module, h: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return F.silu(convolved(self, h.float()))

    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        report = treecompile.explain(_toy(middle).float(), law.batch(pad="none").ids)
        assert torch.is_autocast_enabled("cpu") == around
    (line,) = (line for line in report["packed"].splitlines() if "tree_causal_conv1d" in line)
    assert line.endswith(f"# {dtype}[1, 12, N]")


@pytest.mark.parametrize(("name", "layers"), [("qwen3_5", 1), ("mamba2", 2)])
def test_models_whose_convolutions_are_activated(name: str, layers: int) -> None:
    report = treecompile.explain(HYBRIDS[name].build(), **batch("left"), use_cache=False)
    assert report.rewritten["tree_causal_conv1d"] == layers
    assert "  and silu" in str(report)
    assert report["packed"].count("'silu')") == layers


class Convolutions(nn.Module):
    """No attention at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(law.VOCAB, 12), nn.Linear(12, law.VOCAB)
        self.filter = nn.Parameter(torch.randn(12, 1, W))
        self.double()

    def forward(self, ids: Tensor, mask: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
        h = self.embed(ids)
        h = h if mask is None else masked(h, mask)
        h = h if factor is None else h * factor[..., None]
        for _ in range(2):
            h = h + convolved(self, F.silu(h))
        out: Tensor = self.head(h)
        return out


@pytest.mark.parametrize("pad", ["none", "right", "left", "mixed", "all"])
def test_a_graph_without_attention(pad: str) -> None:
    given = law.batch(pad=pad)
    expect = "empty" if pad == "all" else "packed"
    mask = None if pad == "none" else given.mask
    with law.as_written():
        law.check(Convolutions(), given.ids, mask, kept=None if mask is None else given.kept, expect=expect)


NOT_MASKS: dict[str, Callable[..., Tensor]] = {
    "ids": lambda m, ids, other: m(ids, None, (ids != 3).long()),
    "ids that are zero": lambda m, ids, other: m(ids, None, ids != 0),
    "weights": lambda m, ids, other: m(ids, None, other),
    "labels": lambda m, ids, other: m(ids, None, other != 0).log_softmax(-1).gather(-1, other[..., None]),
}


@pytest.mark.parametrize("name", NOT_MASKS)
def test_a_factor_that_is_no_mask_hides_nothing(name: str) -> None:
    """Ids, labels and weights of tokens are no padding: every position is an ordinary token, also at the end."""
    given = law.batch(pad="none")
    ids = given.ids.clamp(min=1)
    ids[1:4, -2:], ids[5] = 0, 0
    other = ids.double() / 2 if name == "weights" else ids.clone()

    def call(ids: Tensor, other: Tensor) -> Any:
        return NOT_MASKS[name](model, ids, other)

    model = Convolutions()
    with law.as_written():
        law.check(call, ids, other, modules=[model])


def test_a_graph_that_is_given_no_tensor() -> None:
    def call() -> Tensor:
        return torch.ones(3) * 2

    law.check(call, expect="no-token-ids", backward=False)
