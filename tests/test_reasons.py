"""Every reason for which a graph runs dense, from the smallest model of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import treecompile
from tests.golden import assert_golden

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

VOCAB, WIDTH, LENGTH = 20, 8, 8
Attend = Callable[[Tensor, Tensor, Tensor], Any]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    """Embedding, something, an attention with two heads."""

    def __init__(self, inside: Callable[..., Any] = lambda x: x, attend: Attend = causal) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.memory = nn.Parameter(torch.ones(1, 2, 3, WIDTH // 2))
        self.inside, self.attend = inside, attend

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        x = self.inside(self.embed(ids), *more)
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return self.attend(q, q, q)


class WithoutIds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return causal(x, x, x)


class WithoutAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).relu()


class Memory(nn.Module):
    """Attends to a table, not to tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.memory = nn.Parameter(torch.ones(1, 1, 3, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        q = self.embed(ids).unsqueeze(1)
        return F.scaled_dot_product_attention(q, self.memory, self.memory, is_causal=True)


class Scaled(Model):
    """Embeddings whose gradient counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, scale_grad_by_freq=True)


class Table(Model):
    """Adds a weight by column."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda x: x + read(self.table))
        self.table = nn.Parameter(torch.ones(2 * LENGTH, WIDTH))


class Tail(Model):
    """Something after the attention."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        self.after = after

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        return self.after(super().forward(ids), *more)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


def scores(q: Tensor, k: Tensor) -> Tensor:
    ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return (q @ k.transpose(-1, -2)).masked_fill(~ones, -1e9)


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = scores(q, k).softmax(-1)
    return weights @ v, weights


def checkerboard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(LENGTH)
    mask = (place[:, None] >= place) & ((place[:, None] + place) % 2 == 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def padded(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    place = torch.arange(LENGTH)
    for mask in (first, second):
        seen = (place[:, None] >= place) & mask[:, None, None, :]
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=seen)[:, 0]
    return x


def flipped_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v.flip(-2)


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, k[:, :1].expand(-1, 2, -1, -1), v)


def halves(x: Tensor) -> Tensor:
    means = x.view(2, 2, LENGTH // 2, WIDTH).mean(2, keepdim=True)
    return x + means.expand(2, 2, LENGTH // 2, WIDTH).reshape(x.shape)


def looked_up(x: Tensor, ids: Tensor) -> Tensor:
    entry = x[:, :-1].gather(-1, ids[:, 1:, None] % WIDTH)
    return torch.cat([x[:, :1], x[:, 1:] + entry], 1)


def beyond_the_first(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([x[:, :1], x[:, 1:] * mask[:, 1:, None]], 1)


def through_a_codebook(x: Tensor, codes: Tensor) -> Tensor:
    weights = x @ codes.t()
    return weights.reshape(*x.shape[:-1], 1, len(codes)).squeeze(-2) @ codes


def finite(x: Tensor) -> Tensor:
    """What Dynamo makes of an assert statement; pytest rewrites those of its modules."""
    torch._assert_async(x.isfinite().all(), "no number")
    return x


def remembering(x: Tensor) -> Tensor:
    """A recurrence of which the last state is wanted, as its leaf marks it."""
    marked: Tensor = torch.ops.treecompile.stateful(x)
    return marked


def without_the_last(x: Tensor) -> Tensor:
    part = x[:, :-1, None]
    out = torch.ops.treecompile.leaf_recurrence(part, part, part, part[..., 0], None, None, 1.0, 4, [], "")
    return torch.cat([out[:, :, 0], x[:, -1:]], 1)


def varying(x: Tensor) -> Tensor:
    """The same, with a first dim that Dynamo leaves open."""
    torch._dynamo.mark_dynamic(x, 0)
    return x


def written_in_place(x: Tensor) -> Tensor:
    halves = x.view(*x.shape[:-1], 2, -1)
    halves.mul_(2)
    return x


IDS = torch.arange(1, LENGTH + 1).repeat(2, 1)
ONES = torch.ones(2, LENGTH, dtype=torch.bool)

CASES: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
    "dropout": ("dropout", lambda: (Model(lambda x: F.dropout(x, 0.1)), IDS)),
    "dropout-attention": (
        "dropout",
        lambda: (Model(attend=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.1, True)), IDS),
    ),
    "random": ("random", lambda: (Model(lambda x: x + torch.rand_like(x)), IDS)),
    "mixes-tokens": ("mixes-tokens", lambda: (Model(lambda x: x.flip(1)), IDS)),
    "mixes-batch": ("mixes-tokens", lambda: (Model(lambda x: x - x.mean(0)), IDS)),
    "no-rule": ("no-rule", lambda: (Model(lambda x: torch.cummax(x, -1)[0]), IDS)),
    "mask": ("mask", lambda: (Model(attend=checkerboard), IDS)),
    "not-causal": ("not-causal", lambda: (Model(attend=F.scaled_dot_product_attention), IDS)),
    "attention-weights": (
        "attention-weights",
        lambda: (Model(attend=with_weights), IDS),
    ),
    "autograd-function": ("autograd-function", lambda: (Model(Doubled.apply), IDS)),
    "attention-form": (
        "attention-form",
        lambda: (Model(attend=lambda q, k, v: scores(q, k).exp().softmax(-1) @ v), IDS),
    ),
    "attention-operand": ("attention-operand", lambda: (Memory(), IDS)),
    "no-token-ids": ("no-token-ids", lambda: (WithoutIds(), torch.ones(2, 2, LENGTH, 4))),
    "one-token": ("no-token-ids", lambda: (Model(), IDS[:, :1])),
    "no-attention": ("no-attention", lambda: (WithoutAttention(), IDS)),
    "in-place": ("in-place", lambda: (Model(written_in_place), IDS)),
    "dense-input": (
        "dense-input",
        lambda: (Model(lambda x, soft: x + soft), IDS, torch.ones(2, LENGTH, WIDTH, requires_grad=True)),
    ),
    "mixed-masks": ("mixed-masks", lambda: (Model(padded), IDS, ONES, ONES.clone())),
    "misaligned": (
        "misaligned",
        lambda: (Model(lambda x: torch.cat([x[:, 1:] - x[:, :-1], x[:, :1]], 1)), IDS),
    ),
    "attention-values": ("mixes-tokens", lambda: (Model(attend=flipped_values), IDS)),
    "attention-heads": ("attention-heads", lambda: (Model(attend=one_key_head), IDS)),
    "private-attention": ("private-attention", lambda: (Model(looked_up), IDS, IDS.clone())),
    "sliced-input": ("sliced-input", lambda: (Model(beyond_the_first), IDS, ONES)),
    "scalar": ("scalar", lambda: (Model(lambda x: x / x.sum().item()), IDS)),
    "table-offset": ("table-offset", lambda: (Table(lambda table: table[-LENGTH:]), IDS)),
    "sequence-sized": ("sequence-sized", lambda: (Table(lambda table: table[::2]), IDS)),
    "cut-sequence": ("cut-sequence", lambda: (Model(halves), IDS)),
    "cut-sequence-view": (
        "cut-sequence",
        lambda: (Model(lambda x: x.view(2, 2, -1).relu().view(x.shape)), IDS),
    ),
    "symbolic-size": (
        "symbolic-size",
        lambda: (Model(through_a_codebook), IDS, varying(torch.ones(6, WIDTH))),
    ),
    "embedding": ("embedding", lambda: (Scaled(), IDS)),
    "recurrent-state": ("recurrent-state", lambda: (Model(remembering), IDS)),
    "assertion": ("assertion", lambda: (Model(finite), IDS)),
    "recurrence-operand": ("recurrence-operand", lambda: (Model(without_the_last), IDS)),
    "dense-input-by-batch": (
        "dense-input",
        lambda: (Model(lambda x, soft: x + soft), IDS, torch.ones(2, LENGTH, WIDTH)),
    ),
    "row-value": (
        "row-value",
        lambda: (Model(lambda x, by_row: x * by_row[:, None, None]), IDS, torch.ones(2)),
    ),
}


# The attention is packed; what comes after it is not.
IN_THE_TAIL: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
    "row-input": (
        "row-input",
        lambda: (Tail(lambda x, w: x * w[:, None, :, None]), IDS, torch.ones(2, LENGTH)),
    ),
    "sliced-input-tail": (
        "sliced-input",
        lambda: (Tail(lambda x, mask: x[:, :, 1:] * mask[:, None, 1:, None]), IDS, ONES),
    ),
    "row-value-tail": (
        "row-value",
        lambda: (Tail(lambda x, w: x * w[:, None, None, None]), IDS, torch.ones(2)),
    ),
    "misaligned-tail": ("misaligned", lambda: (Tail(lambda x: x[:, :, 1:] - x[:, :, :-1]), IDS)),
    "dense-input-tail": (
        "dense-input",
        lambda: (Tail(lambda x, w: x[:, :, :-1] * w[:, None, 1:, None]), IDS, torch.ones(2, LENGTH)),
    ),
    "scalar-tail": ("scalar", lambda: (Tail(lambda x: x / x.sum().item()), IDS)),
}


def _explained(make: Callable[[], tuple[Any, ...]]) -> treecompile.Report:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return treecompile.explain(*make())


@pytest.mark.parametrize("name", IN_THE_TAIL)
def test_golden_reason_of_an_exit(name: str) -> None:
    slug, make = IN_THE_TAIL[name]
    report = _explained(make)
    assert report.supported
    assert report.rewritten["tree_attention"] == 1
    assert [reason.slug for reason in report.reasons] == [slug]
    assert_golden(f"reason-{name}", str(report.reasons[0]))


@pytest.mark.parametrize("name", CASES)
def test_golden_reason(name: str) -> None:
    slug, make = CASES[name]
    report = _explained(make)
    assert not report.supported
    assert [reason.slug for reason in report.reasons] == [slug]
    (reason,) = report.reasons
    assert reason.why
    assert reason.hint
    assert_golden(f"reason-{name}", str(reason))


def test_every_slug_of_the_passes_is_known() -> None:
    import re
    from pathlib import Path

    import treecompile.passes.kinds as kinds

    folder = Path(kinds.__file__).parent
    call = re.compile(r"reason_at\(\s*[\w.]+,\s*\"([a-z-]+)\"")
    found = {slug for path in folder.rglob("*.py") for slug in call.findall(path.read_text())}
    assert found == {slug for slug, _ in (CASES | IN_THE_TAIL).values()}
