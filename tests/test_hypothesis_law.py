"""The law over hypothesis trees: each model is compiled once, with symbolic sizes, and meets every batch.

Hypothesis shrinks a batch that breaks the law; tests/fuzz.py draws the models, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.law import VOCAB, Toy, causal_and_padding, compare, compiled, counting, held, run
from tests.strategies import Case, rows_with_prefixes
from treecompile import backend


def _window(ids: Tensor, mask: Tensor) -> Tensor:
    at = torch.arange(ids.shape[1])
    seen = causal_and_padding(ids, mask) & (at[:, None] - at[None, :] < 3)
    return torch.where(seen, 0.0, -1e9).double()


def _tokens(model: Toy, ids: Tensor, *_: Any) -> Tensor:
    return model.tokens(ids)


class Trained(Toy):
    """Log-probabilities of the next token, a clipped objective and an entropy, weighted by row."""

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        logits = super().forward(ids, mask)
        logs = logits[:, :-1].log_softmax(-1)
        picked = logs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        weight = (mask[:, 1:] * mask[:, :-1]).double() * torch.linspace(0.5, 2, ids.shape[0]).double()[
            :, None
        ]
        ratio = (picked - picked.detach()).exp()
        loss = torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).sum()
        return loss, ((logs.exp() * logs).sum(-1) * weight).sum()


class Labelled(Toy):
    """A mean cross-entropy with ignored labels."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = super().forward(ids, mask)[:, :-1]
        labels = torch.where(mask == 0, -100, ids)[:, 1:]
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="sum")


@dataclass
class Model:
    """A model and its compilation.

    Attributes:
        build: makes it.
        masked: it reads the attention mask: padding is dropped.
        columns: its values depend on the grid column of a token.
        scalar: its outputs are losses, not values over the grid.
        before: it reads, or gives away, the position before a row's first token.
    """

    build: Callable[[], Toy]
    masked: bool = True
    columns: bool = True
    scalar: bool = False
    before: bool = True
    calls: dict[float, tuple[Toy, Callable[..., Any]]] = field(default_factory=dict)

    def pair(self, min_sharing: float) -> tuple[Toy, Callable[..., Any]]:
        """The eager model and its compilation."""
        if min_sharing not in self.calls:
            model = self.build()
            self.calls[min_sharing] = model, compiled(model, dynamic=True, min_sharing=min_sharing)
        return self.calls[min_sharing]


MODELS = {
    "padded": Model(Toy),
    "grouped": Model(functools.partial(Toy, heads=4, kv_heads=2)),
    "tokens": Model(functools.partial(Toy, embed=_tokens), columns=False),
    "causal": Model(functools.partial(Toy, mask=lambda ids, mask: None), masked=False),
    "window": Model(functools.partial(Toy, mask=_window), before=False),
    "trained": Model(functools.partial(Trained, mask=_window), scalar=True, before=False),
    "labelled": Model(Labelled, scalar=True),
}


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Each model is compiled once for all batches of this file, and for none after it."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(cache_size_limit=64):
        yield
    torch._dynamo.reset()
    for model in MODELS.values():
        model.calls.clear()


def _general(case: Case) -> bool:
    """Sizes that symbols stand for: for 0 and 1 Dynamo captures anew (tests/test_lowering.py has these)."""
    batch, length = case.shape
    return batch >= 2 and length >= 3


def sharing(model: Model, ids: Tensor, kept: Tensor) -> float:
    """Positions for one prefix, by brute force. Where a masked position before a token is read, it counts."""
    found, count = set(), 0
    for row, some in zip(ids.tolist(), kept.tolist(), strict=True):
        prefix: tuple[Any, ...] = ()
        for column, (token, here) in enumerate(zip(row, some, strict=True)):
            node = (*prefix, (token, column) if model.columns else token)
            before = model.before and not here and some[column + 1 : column + 2] == [True]
            count += here or before
            if here:
                prefix = node
                found.add(node)
            elif before:
                found.add((*node, "masked"))
    return count / len(found)


def expected(model: Model, ids: Tensor, kept: Tensor, min_sharing: float) -> str:
    """How a batch must run."""
    if not kept.any():
        return "empty"
    return "packed" if sharing(model, ids, kept) >= min_sharing else "min_sharing"


@pytest.mark.parametrize("name", MODELS)
@given(case=rows_with_prefixes(max_rows=6, max_length=9), min_sharing=st.sampled_from([0.0, 0.0, 1.5]))
@settings(max_examples=30)
def test_law(name: str, case: Case, min_sharing: float) -> None:
    model = MODELS[name]
    ids, visible = torch.from_numpy(case.keys[0]).long(), case.visible
    assert visible is not None
    assume(_general(case))
    mask = torch.from_numpy(visible).long()
    kept = mask.bool() if model.masked else torch.ones_like(mask, dtype=torch.bool)
    eager, call = model.pair(min_sharing)
    parameters = dict(eager.named_parameters())
    shown = None if model.scalar else kept
    dense = run(eager, (ids, mask), {}, parameters=parameters, kept=shown)
    with counting() as seen:
        tree = run(call, (ids, mask), {}, parameters=parameters, kept=shown)
    held(expected(model, ids, kept, min_sharing), seen)
    compare(dense, tree, 1e-10)


@pytest.mark.parametrize("name", ["padded", "trained"])
@given(
    cases=st.lists(rows_with_prefixes(max_rows=4, max_length=7), min_size=2, max_size=3),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=15)
def test_law_over_several_trees_at_once(name: str, cases: list[Case], order: Any) -> None:
    """All forwards first, then the backwards in any order: each has its own tree."""
    model = MODELS[name]
    eager, call = model.pair(0.0)
    batches = [
        (torch.from_numpy(c.keys[0]).long(), torch.from_numpy(c.visible).long())
        for c in cases
        if c.visible is not None and c.visible.any() and _general(c)
    ]
    assume(batches)

    def gradients(function: Callable[..., Any], turns: list[int]) -> dict[str, Tensor]:
        eager.zero_grad(set_to_none=True)
        losses = []
        for ids, mask in batches:
            out = function(ids, mask)
            seen = mask.bool()[..., None]
            losses.append(sum(out) if model.scalar else (torch.where(seen, out, 0.0) ** 2).sum())
        for turn in turns:
            losses[turn].backward()
        return {name: p.grad.clone() for name, p in eager.named_parameters() if p.grad is not None}

    turns = list(range(len(batches)))
    wanted = gradients(eager, turns)
    order.shuffle(turns)
    backend.clear()
    found = gradients(call, turns)
    assert backend.counters["packed"] == len(batches)
    for key, grad in wanted.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-9, atol=1e-10)
