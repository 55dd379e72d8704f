"""Dense means stock: what is not packed gives bit for bit what ``backend="inductor"`` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treecompile.lowering
from tests.law import counting
from tests.models import FAMILIES, VOCAB
from tests.test_models import choose
from treecompile import backend

pytest.importorskip("transformers")

NAMES = ("qwen3", "mixtral", "llama", "gemma3", "deepseek_v3", "gpt_oss")
FEW = NAMES[:2]
BATCH, LENGTH = 4, 12

each = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in NAMES]
)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No case sees the compilations of another."""
    torch._dynamo.reset()
    treecompile.lowering.clear()
    backend.clear()
    yield
    torch._dynamo.reset()


def build(name: str) -> nn.Module:
    """One layer is enough here, and Inductor is slow. (Some families want two kinds of layers.)"""
    family = FAMILIES[name]
    layers = {} if "layer_types" in family.sizes or name == "deepseek_v3" else {"num_hidden_layers": 1}
    model = replace(family, sizes={**family.sizes, **layers}).build()
    choose(model, family.attention[0], family.experts[0] if family.experts else "-")
    return model


def unrelated() -> Tensor:
    """int64 [4, 12]: rows that differ in their first token."""
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = torch.arange(3, 3 + BATCH)
    return ids


def without_sharing() -> dict[str, Any]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, 9:] = 0
    return {"input_ids": unrelated(), "attention_mask": mask, "use_cache": False}


def with_foreign_mask() -> dict[str, Any]:
    """A mask of numbers, of which nothing can be proved; rows that would share all."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, LENGTH, LENGTH)
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH).masked_fill(~seen, torch.finfo(torch.float32).min)
    return {"input_ids": unrelated()[:1].repeat(BATCH, 1), "attention_mask": mask, "use_cache": False}


def step(model: nn.Module, call: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Logits and gradients of one training step."""
    model.zero_grad(set_to_none=True)
    logits = call(**arguments)["logits"]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def same_as_stock(name: str, arguments: dict[str, Any], slug: str) -> None:
    model = build(name)
    stock = step(model, torch.compile(model, backend="inductor"), arguments)
    torch._dynamo.reset()
    with counting() as seen:
        ours = step(model, torch.compile(model, backend=backend.tree), arguments)
    assert seen[f"dense:{slug}"] == 1, dict(seen)
    assert not seen["packed"]
    assert not seen["eager"]
    assert ours.keys() == stock.keys()
    differ = [key for key in stock if not torch.equal(ours[key], stock[key])]
    assert not differ, f"not bit-equal: {differ}"


@each
def test_unshared_rows_run_as_stock(name: str) -> None:
    same_as_stock(name, without_sharing(), "min_sharing")


@each
def test_refused_graphs_run_as_stock(name: str) -> None:
    same_as_stock(name, with_foreign_mask(), "dense-input")


@pytest.mark.parametrize("arguments", [without_sharing(), with_foreign_mask()], ids=["unshared", "refused"])
def test_a_compiler_that_fails_leaves_eager(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no code for this op")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    model = build("qwen3")
    eager = step(model, model, arguments)
    with counting() as seen:
        ours = step(model, torch.compile(model, backend=backend.tree), arguments)
    assert seen["dense"] == 1
    assert seen["eager:NotImplementedError"] == 1
    for key, value in eager.items():
        torch.testing.assert_close(ours[key], value)
