"""The law over a matrix of models and settings (tests/models.py, tests/settings.py).

Every case runs the unmodified model dense and eager, then compiled for the tree, on rows that fork, repeat each other
and are prefixes of one another; compares outputs at kept positions and all gradients; and insists that one graph was
captured and ran packed. `make test` runs a list that has every pair of values of any two axes, `make test-all` every
family with every mask, attention and experts function, and each other setting in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treecompile.lowering
from tests import law, settings
from tests.models import FAMILIES, WINDOW
from tests.settings import Case, Sample
from treecompile import backend

pytest.importorskip("transformers")

FP32 = 1e-5


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No case sees the compilations, trees or counts of another."""
    torch._dynamo.reset()
    treecompile.lowering.clear()
    backend.clear()
    yield
    torch._dynamo.reset()


# ---- a case as a model and its calls -------------------------------------------------------------------------------


def _config(model: nn.Module) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "config", base)


def choose(model: nn.Module, attention: str, experts: str) -> None:
    """Set the attention and experts functions after construction: packages such as flash-attn need not be there."""
    config = _config(model)
    if isinstance(config, nn.Module):
        config.attention = attention
        return
    name = {"flex": "flex_attention", "flash": "flash_attention_2"}.get(attention, attention)
    config._attn_implementation = name
    if experts != "-":
        config._experts_implementation = experts


def build(case: Case) -> nn.Module:
    family = FAMILIES[case.family]
    model = family.build(tied=case.weights == "tied")
    if case.weights == "frozen":
        for name, p in model.named_parameters():
            p.requires_grad_(not any(part in name for part in family.frozen))
    if case.mode == "checkpoint":
        if isinstance(_config(model), nn.Module):
            _config(model).checkpointing = True
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.weights == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=list(family.adapters), r=4, lora_dropout=0.0))
        for name, p in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(p, std=0.1)
    return model.to(dtype(case)).train()


def dtype(case: Case) -> torch.dtype:
    """fp64, but where a kernel or the setting has fp32 weights."""
    single = case.mode == "autocast" or case.experts == "grouped_mm"
    return torch.float32 if single else torch.float64


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


def run(case: Case, model: nn.Module, call: Callable[..., Any], arguments: dict[str, Any], kept: Tensor) -> law.Run:
    """One forward and, where gradients are on, backward pass."""

    def called(**kwargs: Any) -> list[Tensor]:
        with ambient(case):
            out = call(**kwargs)
        return results(out, kept)

    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    backward = case.mode not in ("no_grad", "inference")
    return law.run(called, (), arguments, parameters=parameters, kept=None, backward=backward)


def dense(case: Case, model: nn.Module, sample: Sample) -> law.Run:
    """The unmodified model, dense and eager."""
    attention = case.attention if case.attention in ("sdpa", "eager") else FAMILIES[case.family].reference
    choose(model, attention, case.experts)
    return run(case, model, model, sample.reference, sample.kept)


def tree(case: Case, model: nn.Module, sample: Sample, compiler: str) -> law.Run:
    """The same, compiled for the tree."""
    choose(model, case.attention, case.experts)
    call = law.compiled(model, compiler=compiler)
    with law.counting() as seen:
        found = run(case, model, call, sample.arguments, sample.kept)
    found.counters = seen
    return found


# ---- the law -------------------------------------------------------------------------------------------------------


def expected(case: Case) -> str:
    """How a case must run: packed, or the slug of the reason why this batch cannot."""
    reads_empty = case.mask == "left" and case.ask == "all_labels"
    if reads_empty and case.attention == "eager":
        return "masked-query"  # a query that sees nothing averages over all keys there, causal or not
    return "packed"


def check(case: Case, compiler: str = "aot_eager") -> None:
    model, sample = build(case), settings.sample(case)
    before = dense(case, model, sample)
    after = tree(case, model, sample, compiler)
    assert after.counters["captured"] == 1, f"{after.counters['captured']} graphs"
    law.held(expected(case), after.counters)
    if case.mode == "autocast":
        exact = dense(Case(**{**case.values(), "mode": "-"}), model, sample)
        compare_errors(exact, before, after)
    elif dtype(case) == torch.float32:
        law.compare(before, after, FP32)
    else:
        law.compare(before, after, FAMILIES[case.family].tolerance)


def compare_errors(exact: law.Run, before: law.Run, after: law.Run) -> None:
    """The tree's error against fp32 is at most 1.25 times the dense run's, for outputs and gradients together."""
    assert before.grads.keys() == after.grads.keys() == exact.grads.keys()
    for what in ("outputs", "grads"):
        truth, a, b = (_stacked(getattr(one, what)) for one in (exact, before, after))
        floor = 1e-4 * float(truth.norm())
        error, null = float((b - truth).norm()), float((a - truth).norm())
        assert error <= 1.25 * null + floor, f"{what}: error {error:.2e}, dense {null:.2e}, floor {floor:.2e}"


def _stacked(values: Any) -> Tensor:
    each = values.values() if isinstance(values, dict) else values
    return torch.cat([x.double().flatten() / (x.double().norm() + 1e-12) for x in each])


# ---- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", settings.covering(), ids=str)
def test_pairs(case: Case) -> None:
    check(case)
