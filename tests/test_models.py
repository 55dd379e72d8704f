"""The law over a matrix of models and settings (tests/models.py, tests/settings.py).

Every case runs the unmodified model dense and eager, then compiled for the tree, on rows that fork, repeat
each other and are prefixes of one another; compares outputs at kept positions and all gradients; and insists
that one graph was captured and ran packed. `make test` runs a list that has every pair of values of any two
axes, `make test-all` every family with every mask, attention and experts function, and each other setting in
turn.

Tolerances. Models compute in fp64, but transformers casts norms, rotary angles, eager softmax and losses to
fp32 inside. The tree sums gradients of branches before such a cast, where the dense run sums behind it: they
differ by rounding errors of fp32. How large these are is measured where they exceed the tolerance: the dense run
again, with its loss scaled by other factors than powers of two, would give the same gradients without rounding.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treecompile
import treecompile.lowering
from tests import law, settings
from tests.models import FAMILIES, Handwritten
from tests.settings import Case, Sample
from treecompile import backend

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No case sees the compilations, trees or counts of another."""
    torch._dynamo.reset()
    treecompile.lowering.clear()
    backend.clear()
    yield
    torch._dynamo.reset()


# ---- a case as a model and its calls -----------------------------------------------------------------------


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def choose(model: nn.Module, attention: str, experts: str) -> None:
    """Set attention and experts functions after construction: flash-attn and the like need not be there."""
    base = _base(model)
    if isinstance(base, Handwritten):
        base.attention = attention
        return
    name = {"flex": "flex_attention", "flash": "flash_attention_2"}.get(attention, attention)
    base.config._attn_implementation = name
    if experts != "-":
        base.config._experts_implementation = experts


def build(case: Case) -> nn.Module:
    family = FAMILIES[case.family]
    # In bf16 a token now and then goes to other experts than in fp32, in the dense run or in the other.
    model = family.build(tied=case.weights == "tied", smooth=case.mode == "autocast")
    if case.weights == "frozen":
        for name, p in model.named_parameters():
            p.requires_grad_(not any(part in name for part in family.frozen))
    if case.weights == "lora":
        model = _adapted(model, list(family.adapters))
    if case.mode == "checkpoint":
        _checkpoint(_base(model))
    return model.to(dtype(case)).train()


def _checkpoint(model: Any) -> None:
    """Checkpoint every layer."""
    if isinstance(model, Handwritten):
        model.checkpointing = True
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Its hook that calls requires_grad_ on embeddings is of no use without reentrant checkpoints, and Dynamo
    # breaks the graph at it where they are frozen.
    model.disable_input_require_grads()


def _adapted(model: nn.Module, targets: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted: nn.Module = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=targets, r=4, lora_dropout=0.0)
    )
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora" in name:
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    return adapted


def dense_attention(case: Case) -> str:
    """The attention implementation of the dense run."""
    return case.attention if case.attention in ("sdpa", "eager") else FAMILIES[case.family].reference


def softmax_in_fp32(case: Case) -> bool:
    """Whether the dense run casts its attention scores to fp32."""
    return dense_attention(case) == "eager" and bool(FAMILIES[case.family].prefix)


def dtype(case: Case) -> torch.dtype:
    """fp64, except where a kernel or the setting has fp32 weights.

    The fp64 minimum that eager attention adds is -inf in fp32: queries that see nothing would give NaN.
    """
    single = case.mode == "autocast" or case.experts == "grouped_mm"
    single |= softmax_in_fp32(case) and bool(blind(case).any())
    return torch.float32 if single else torch.float64


def blind(case: Case) -> Tensor:
    """bool [B, T]: positions that see no token in some layer."""
    kept = settings.sample(case).kept
    column = torch.arange(kept.shape[1]).expand_as(kept)
    last = torch.where(kept, column, -1).cummax(1).values
    window = FAMILIES[case.family].sizes.get("sliding_window")
    return (last < 0) | (column - last >= (window or kept.shape[1]))


def ambient(case: Case) -> contextlib.AbstractContextManager[Any]:
    if case.mode == "no_grad":
        return torch.no_grad()
    if case.mode == "inference":
        return torch.inference_mode()
    if case.mode == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def results(out: Any, kept: Tensor) -> list[Tensor]:
    """All tensors of a model's output as [B, T', ...], zeroed at padding; T' are the last columns."""
    found = []
    for name, value in out.items():
        if name == "past_key_values":
            found += [x.transpose(1, 2) for layer in value.layers for x in (layer.keys, layer.values)]
        elif name == "hidden_states":
            found += list(value)
        else:
            found.append(value)
    return [_at_kept(x, kept) for x in found]


def _at_kept(x: Tensor, kept: Tensor) -> Tensor:
    if x.dim() < 2:
        return x
    seen = kept[:, kept.shape[1] - x.shape[1] :].reshape(x.shape[0], x.shape[1], *[1] * (x.dim() - 2))
    return torch.where(seen, x, torch.zeros((), dtype=x.dtype))


@dataclass(frozen=True)
class Subject:
    """A case with its model and batch."""

    case: Case
    model: nn.Module
    sample: Sample

    @staticmethod
    def of(case: Case) -> Subject:
        return Subject(case, build(case), settings.sample(case))

    def dense(self, factor: float = 1.0, mode: str | None = None) -> law.Run:
        """The unmodified model, dense and eager; gradients of the loss times `factor`, divided by it."""
        case = replace(self.case, mode=mode or self.case.mode)
        choose(self.model, dense_attention(case), case.experts)
        return self._run(case, self.model, self.sample.reference, factor)

    def compiled(self, call: Callable[..., Any], attention: str | None = None) -> law.Run:
        """The model compiled, with what was counted."""
        choose(self.model, attention or self.case.attention, self.case.experts)
        with law.counting() as seen:
            found = self._run(self.case, call, self.sample.arguments)
        found.counters = seen
        return found

    def tree(self, compiler: str = "aot_eager") -> law.Run:
        """The model compiled for the tree."""
        return self.compiled(law.compiled(self.model, compiler=compiler))

    def _run(
        self, case: Case, call: Callable[..., Any], arguments: dict[str, Any], factor: float = 1.0
    ) -> law.Run:
        def called() -> list[Tensor]:
            with ambient(case):
                return results(call(**arguments), self.sample.kept)

        found = law.run(
            called,
            (),
            {},
            parameters={name: p for name, p in self.model.named_parameters() if p.requires_grad},
            kept=None,
            loss=lambda outputs: objective(outputs) * factor,
            backward=case.mode not in settings.FORWARD_ONLY,
        )
        if found.grads:
            found.outputs.pop()  # the objective, a function of the others
        for grad in found.grads.values():
            grad /= factor
        return found


def objective(outputs: list[Tensor]) -> Tensor:
    """A random linear function of all outputs that have a gradient; of a loss, the loss."""
    g = torch.Generator().manual_seed(7)
    drawn = [(x, torch.randn(x.shape, generator=g, dtype=torch.float64)) for x in outputs]
    parts = [(x * weight).sum() if x.dim() else x.double() for x, weight in drawn if x.requires_grad]
    return torch.stack(parts).sum()


# ---- the law -----------------------------------------------------------------------------------------------

# By dtype. Of outputs, relative to the largest entry of each; of gradients, relative L2 norm.
OUTPUTS = {torch.float64: 1e-8, torch.float32: 2e-6}
GRADIENTS = {torch.float64: 1e-8, torch.float32: 1e-5}
# Multiples of the loss whose gradients, divided again, differ by rounding alone.
FACTORS = (3.0, 7.0, 0.6, 11.0, 0.3, 1.7)
# The same where the dense run casts scores to fp32 and the tree does not: of outputs, and twice that of gradients.
ROUNDED_SCORES = 1e-6


def expected(case: Case) -> str:
    """How a case must run: packed, or the slug of the reason why this batch cannot."""
    arguments = settings.sample(case).arguments
    if case.attention == "eager" and "labels" in arguments:
        # A query that sees nothing averages over all keys there, causal or not. A loss reads it where the next
        # token has a label; so does left padding before the first token.
        if bool((blind(case)[:, :-1] & (arguments["labels"][:, 1:] != -100)).any()):
            return "masked-query"
    return "packed"


def check(case: Case) -> None:
    """The law for one case."""
    subject = Subject.of(case)
    before, after = subject.dense(), subject.tree()
    assert after.counters["captured"] == 1, f"{after.counters['captured']} graphs"
    law.held(expected(case), after.counters)
    if case.mode == "autocast":
        compare_errors(subject.dense(mode="-"), before, after)
        return
    least = ROUNDED_SCORES if softmax_in_fp32(case) else 0.0
    compare_outputs(before.outputs, after.outputs, least)
    compare_gradients(before, after, subject.dense, max(GRADIENTS[dtype(case)], 2 * least))


def compare_outputs(before: list[Tensor], after: list[Tensor], least: float = 0.0) -> None:
    """Each output within the tolerance of its dtype, or within `least`."""
    assert len(before) == len(after)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"output {i}"
        found = float((a - b).abs().max()) / max(float(a.abs().max()), 1e-3)
        assert found <= max(OUTPUTS[a.dtype], least), f"output {i} of {len(before)}: {found:.2e}"


def compare_gradients(
    before: law.Run, after: law.Run, dense: Callable[[float], law.Run], tolerance: float
) -> None:
    """Each gradient within `tolerance`, or within twice what the dense run itself varies by."""
    found = dict(zip(before.grads, gradient_distances(before, after), strict=True))
    if max(found.values(), default=0.0) <= tolerance:
        return
    same = [dense(factor) for factor in FACTORS]
    for name, distance_ in found.items():
        null = max(distance(before.grads[name], other.grads[name]) for other in same)
        assert distance_ <= max(tolerance, 2 * null), (
            f"gradient of {name}: {distance_:.2e}, rounding {null:.2e}"
        )


def distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 norm of the difference."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return float((a - b).norm()) / max(float(a.norm()), 1e-12)


def compare_errors(exact: law.Run, before: law.Run, after: law.Run) -> None:
    """The tree's error against fp32 is at most 1.25 times the dense run's, for outputs and gradients."""
    assert before.grads.keys() == after.grads.keys() == exact.grads.keys()
    outputs = zip(exact.outputs, before.outputs, after.outputs, strict=True)
    grads = ((exact.grads[name], before.grads[name], after.grads[name]) for name in exact.grads)
    for what, triples in (("outputs", outputs), ("gradients", grads)):
        null, error, count = 0.0, 0.0, 0
        for truth, a, b in triples:
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}: {b.dtype}, dense {a.dtype}"
            size = float(truth.norm()) or 1.0
            null += float((a.double() - truth).norm() / size) ** 2
            error += float((b.double() - truth).norm() / size) ** 2
            count += 1
        bound = 1.25 * null**0.5 + 1e-4 * count**0.5
        assert error**0.5 <= bound, f"{what}: error {error**0.5:.2e}, dense {null**0.5:.2e}"


def stock(subject: Subject) -> list[law.Run]:
    """The dense run through Inductor; none where torch itself cannot run it."""
    try:
        compiled = torch.compile(subject.model, backend="inductor")
        return [subject.compiled(compiled, dense_attention(subject.case))]
    except RuntimeError as error:
        # torch 2.11 hands the fp64 attention kernel of the CPU an fp32 log-sum-exp, backward.
        if "expected scalar type Double but found Float" not in str(error):
            raise
        return []


def check_inductor(case: Case) -> None:
    """The law through Inductor, which alone rounds unlike eager runs: at most five times that much."""
    subject = Subject.of(case)
    before, after = subject.dense(), subject.tree("inductor")
    assert after.counters["captured"] == 1, f"{after.counters['captured']} graphs"
    law.held(expected(case), after.counters)
    if case.mode == "autocast":
        compare_errors(subject.dense(mode="-"), before, after)
        return
    torch._dynamo.reset()
    same = [*stock(subject), *(subject.dense(factor) for factor in FACTORS[:2])]
    ceiling = 5e-6 if dtype(case) == torch.float64 else 2e-5
    least = ROUNDED_SCORES if softmax_in_fp32(case) else 1e-7
    for what, distances in (("outputs", output_distances), ("gradients", gradient_distances)):
        found = max(distances(before, after), default=0.0)
        null = max((max(distances(before, other), default=0.0) for other in same), default=0.0)
        assert found <= min(max(5 * null, least), ceiling), f"{what}: {found:.2e}, Inductor alone {null:.2e}"


def output_distances(before: law.Run, after: law.Run) -> list[float]:
    return [distance(a, b) for a, b in zip(before.outputs, after.outputs, strict=True)]


def gradient_distances(before: law.Run, after: law.Run) -> list[float]:
    assert before.grads.keys() == after.grads.keys()
    return [distance(grad, after.grads[name]) for name, grad in before.grads.items()]


# ---- tests -------------------------------------------------------------------------------------------------


# `make test` runs a stretch of the covering list that fits its time; `make test-all` runs the whole list.
STRETCH = slice(7, 31)


def covering_cases() -> list[Any]:
    """The covering list, what lies outside of the stretch marked slow."""
    cases = settings.covering()
    quick = {str(case) for case in cases[STRETCH]}
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(case, id=str(case), marks=marks[str(case) in quick]) for case in cases]


@pytest.mark.parametrize("case", covering_cases())
def test_pairs(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in settings.product() if c not in settings.covering()], ids=str)
def test_product(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", settings.through_inductor(few=True), ids=str)
def test_inductor(case: Case) -> None:
    check_inductor(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", settings.through_inductor(few=False), ids=str)
def test_inductor_in_all_settings(case: Case) -> None:
    check_inductor(case)


def test_configure_keeps_checkpoints_with_the_cache_left_on_in_one_graph() -> None:
    """transformers logs that it turns the cache off: by default Dynamo breaks the graph at the call."""
    changed = treecompile.configure()
    try:
        check(Case("qwen3", mode="checkpoint", cache="cache"))
    finally:
        for name, (before, _) in changed.items():
            setattr(torch._dynamo.config, name, before)


def test_lists_are_complete() -> None:
    """The lists have what they say, and all exclusions are of use."""
    few, all_ = settings.covering(), settings.product()
    assert len(few) == len(set(few)) <= 100
    assert len(all_) == len(set(all_)) >= 3500
    assert not [case for case in {*few, *all_} if settings.excluded(case.values())]
    assert set(settings.wanted()) <= {pair for case in few for pair in settings.pairs(case.values())}
    names = [str(case) for case in {*few, *all_}]
    assert len(names) == len(set(names))
    for axis, values in settings.AXES.items():
        for family in FAMILIES:
            seen = {case.values()[axis] for case in all_ if case.family == family}
            impossible = {
                value for value in values if settings.excluded({"family": family, axis: value}) is not None
            }
            assert seen == ({family} if axis == "family" else set(values) - impossible)
    for exclusion in settings.EXCLUSIONS:
        axes, values = zip(*exclusion.where.items(), strict=True)
        assert all(value in settings.AXES[axis] for axis, named in exclusion.where.items() for value in named)
        assert all(settings.excluded(dict(zip(axes, one, strict=True))) for one in itertools.product(*values))
