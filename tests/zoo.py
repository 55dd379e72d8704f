"""Models that a compiler which guesses gets wrong: each is one trap, with what must become of it.

A trap says ``packed`` or the slug of the refusal; either way its numbers are compared with the dense eager
run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.law import VOCAB, Batch, Toy, batch, causal_and_padding, sdpa

__all__ = ["TRAPS", "Case", "Trap"]

WIDTH = 12
BAD = int(batch().ids[0, 2])  # a token that the first row keeps


@dataclass(frozen=True)
class Case:
    """A model, its arguments, and keyword arguments of ``law.check``."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trap:
    """One trap.

    Attributes:
        name: of the trap.
        expect: "packed", or the slug of the refusal.
        build: makes the case.
    """

    name: str
    expect: str
    build: Callable[[], Case]


TRAPS: list[Trap] = []


def trap(expect: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a trap under the name of its function."""

    def add(build: Callable[[], Case]) -> Callable[[], Case]:
        TRAPS.append(Trap(build.__name__, expect, build))
        return build

    return add


def many(*cases: tuple[str, str, Callable[[], Case]]) -> None:
    """Register traps that differ by one expression."""
    TRAPS.extend(Trap(name, expect, build) for name, expect, build in cases)


def on(model: Callable[..., Any], b: Batch, *rest: Any, exact: bool = False, **settings: Any) -> Case:
    """A model on ids, mask and more."""
    return Case(model, (b.ids, b.mask, *rest), {"kept": None if exact else b.kept, **settings})


def tokens_only(model: Toy, ids: Tensor, *_: Any) -> Tensor:
    """Hidden states that say nothing of the column."""
    return model.tokens(ids)


def middle(function: Callable[..., Tensor], pad: str = "mixed", **settings: Any) -> Callable[[], Case]:
    """`function` between two layers: what it does reaches an attention."""
    return lambda: on(Toy(middle=function), batch(pad=pad), **settings)


def tail(
    function: Callable[..., Any], pad: str = "mixed", exact: bool = True, **settings: Any
) -> Callable[[], Case]:
    """`function` on the logits: every position that it reads counts."""
    return lambda: on(Toy(tail=function), batch(pad=pad), exact=exact, **settings)


# ---- noise ---------------------------------------------------------------------------------------------


def _noisy_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.5)


@trap("dropout")
def dropout_in_attention() -> Case:
    return on(Toy(attend=_noisy_sdpa), batch(), numbers=False)


@trap("dropout")
def dropout_functional() -> Case:
    return on(Toy(middle=lambda h, *_: F.dropout(h, 0.5)), batch(), numbers=False)


@trap("dropout")
def dropout_lora() -> Case:
    class Adapted(Toy):
        def __init__(self) -> None:
            super().__init__(
                middle=lambda h, *_: h + F.dropout(h, 0.05) @ self.a @ self.b,
                extra={"a": (12, 2), "b": (2, 12)},
            )

    return on(Adapted(), batch(), numbers=False)


many(
    ("dropout_of_zero", "packed", middle(lambda h, *_: F.dropout(h, 0.0))),
    ("dropout_in_eval", "packed", middle(lambda h, *_: F.dropout(h, 0.5, training=False))),
    ("noise", "random", middle(lambda h, *_: h + torch.rand_like(h), numbers=False)),
    ("noise_per_batch", "random", middle(lambda h, *_: h * torch.rand((), dtype=h.dtype), numbers=False)),
)


# ---- tokens that meet outside of attention -------------------------------------------------------------


def _shift(h: Tensor, *_: Any) -> Tensor:
    return torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)


def _shift_by_zeros(h: Tensor, *_: Any) -> Tensor:
    return torch.cat([h.new_zeros(h.shape[0], 1, h.shape[2]), h[:, :-1]], dim=1)


def _assign_first(h: Tensor, *_: Any) -> Tensor:
    h = h * 1
    h[:, 0] = 0
    return h


def _merged_mean(h: Tensor, *_: Any) -> Tensor:
    return h + h.reshape(-1, h.shape[-1]).mean(0)


many(
    ("first_token_before_attention", "misaligned", middle(lambda h, *_: h - h[:, :1])),
    ("flip_before_attention", "mixes-tokens", middle(lambda h, *_: h + h.flip(1))),
    ("roll_before_attention", "mixes-tokens", middle(lambda h, *_: h + h.roll(1, 1))),
    ("shift_before_attention", "mixes-tokens", middle(_shift)),
    ("shift_by_zeros_before_attention", "mixes-tokens", middle(_shift_by_zeros)),
    ("cumsum_before_attention", "mixes-tokens", middle(lambda h, *_: h + h.cumsum(1))),
    ("sort_before_attention", "mixes-tokens", middle(lambda h, *_: h + h.sort(1).values)),
    ("softmax_over_the_row", "mixes-tokens", middle(lambda h, *_: h + h.softmax(1))),
    ("row_mean_before_attention", "mixes-tokens", middle(lambda h, *_: h - h.mean(1, keepdim=True))),
    ("batch_mean_before_attention", "mixes-tokens", middle(lambda h, *_: h - h.mean(0))),
    ("transposed_product", "mixes-tokens", middle(lambda h, *_: h + h @ (h.mT @ h).tanh())),
    ("assign_first_token", "in-place", middle(_assign_first)),
    ("mean_over_all_tokens", "packed", middle(lambda h, *_: h - h.mean((0, 1)))),
    ("mean_over_merged_tokens", "packed", middle(_merged_mean)),
    ("sum_over_everything", "packed", middle(lambda h, *_: h + h.sum() * 1e-2)),
    ("feature_sort", "packed", middle(lambda h, *_: h + h.sort(-1).values)),
    ("feature_cumsum", "packed", middle(lambda h, *_: h + h.cumsum(-1))),
    ("feature_flip", "packed", middle(lambda h, *_: h + h.flip(-1))),
    ("feature_slices", "packed", middle(lambda h, *_: torch.cat([-h[..., 6:], h[..., :6]], dim=-1))),
    ("feature_roll", "packed", middle(lambda h, *_: h + h.roll(1, -1))),
    # In the tail the same ops run as captured, on values restored at every position, padding included.
    ("flip_logits", "packed", tail(lambda x, *_: x.flip(1))),
    ("roll_logits", "packed", tail(lambda x, *_: x.roll(1, 1))),
    ("shift_logits", "packed", tail(_shift)),
    ("shift_logits_by_zeros", "packed", tail(_shift_by_zeros)),
    ("cumsum_logits", "packed", tail(lambda x, *_: x.cumsum(1))),
    ("sort_logits", "packed", tail(lambda x, *_: x.sort(1).values)),
    ("first_token_logits", "packed", tail(lambda x, *_: x - x[:, :1], exact=False)),
    ("last_token_logits", "packed", tail(lambda x, *_: x[:, -1])),
    ("row_mean_of_logits", "packed", tail(lambda x, *_: x.mean(1))),
    ("batch_mean_of_logits", "packed", tail(lambda x, *_: x.mean(0))),
    ("mean_of_all_logits", "packed", tail(lambda x, *_: x.mean())),
    ("mean_over_tokens_of_logits", "packed", tail(lambda x, *_: x.mean((0, 1)))),
    ("largest_of_all_logits", "packed", tail(lambda x, *_: x.max())),
    ("spread_of_all_logits", "packed", tail(lambda x, *_: x.var((0, 1)))),
    ("norm_of_all_logits", "packed", tail(lambda x, *_: torch.linalg.vector_norm(x))),
    ("count_of_positive_logits", "packed", tail(lambda x, *_: (x.sum(), (x > 0).sum()))),
    ("share_of_positive_logits", "packed", tail(lambda x, *_: (x.sum(), (x > 0).double().mean()))),
    ("transposed_output", "packed", tail(lambda x, *_: x.transpose(0, 1) * 2, pad="none")),
    ("zeros_beside_logits", "packed", tail(lambda x, *_: (x, x.new_zeros(x.shape[0], 3) + x[:, -1, :3]))),
    ("zeros_alone", "packed", tail(lambda x, *_: (x.flip(1), x.new_zeros(x.shape[0], x.shape[1], 2)))),
)


@trap("packed")
def last_kept_token() -> Case:
    def last(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return x[torch.arange(x.shape[0]), mask.sum(1) - 1]

    return on(Toy(tail=last), batch(pad="right"), exact=True)


@trap("in-place")
def batch_norm_in_training() -> Case:
    class Normed(Toy):
        def __init__(self) -> None:
            super().__init__(middle=lambda h, *_: self.bn(h.flatten(0, 1)).view_as(h))
            self.bn = nn.BatchNorm1d(WIDTH).double()

    return on(Normed(), batch())


@trap("no-rule")
def batch_norm_without_statistics() -> Case:
    class Normed(Toy):
        def __init__(self) -> None:
            super().__init__(middle=lambda h, *_: self.bn(h.flatten(0, 1)).view_as(h))
            self.bn = nn.BatchNorm1d(WIDTH, track_running_stats=False).double()

    return on(Normed(), batch())


# ---- masks ---------------------------------------------------------------------------------------------


def at(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key columns [T, 1], [1, T]."""
    columns = torch.arange(ids.shape[1])
    return columns[:, None], columns[None, :]


def masked(
    function: Callable[[Tensor, Tensor], Any], pad: str = "mixed", **settings: Any
) -> Callable[[], Case]:
    """A model with a mask of its own, without learned columns, so that left-padded rows share."""
    return lambda: on(Toy(mask=function, embed=tokens_only), batch(pad=pad), **settings)


def pad_k(mask: Tensor) -> Tensor:
    return mask.bool()[:, None, None, :]


def _causal(ids: Tensor) -> Tensor:
    q, k = at(ids)
    return (k <= q)[None, None]


def additive(level: float, form: str = "where") -> Callable[[Tensor, Tensor], Tensor]:
    """A float mask: zero where visible, `level` elsewhere."""

    def make(ids: Tensor, mask: Tensor) -> Tensor:
        seen = _causal(ids) & pad_k(mask)
        zero = torch.zeros((), dtype=torch.float64)
        if form == "where":
            return torch.where(seen, zero, torch.full_like(zero, level))
        if form == "masked_fill":
            return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, level)
        if form == "product":
            return (~seen).double() * level
        length = ids.shape[1]
        future = torch.full((length, length), level, dtype=torch.float64).triu(1)
        return future[None, None] + torch.where(pad_k(mask), 0.0, level).double()

    return make


def _bad_token(ids: Tensor, mask: Tensor) -> Tensor:
    return _causal(ids) & pad_k(mask) & (ids != BAD)[:, None, None, :]


@trap("packed")
def hidden_token_id() -> Case:
    b = batch()
    assert bool(((b.ids == BAD) & b.kept).any())
    return Case(Toy(mask=_bad_token), (b.ids, b.mask), {"kept": b.kept & (b.ids != BAD)})


@trap("packed")
def hidden_token_id_exact() -> Case:
    b = batch()
    return Case(Toy(mask=_bad_token, tail=lambda x, *_: x.cumsum(1)), (b.ids, b.mask), {})


def _window(spell: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda ids, mask: (spell(*at(ids)) & _causal(ids)[0, 0])[None, None] & pad_k(mask)


def _documents(ids: Tensor, mask: Tensor) -> Tensor:
    q, k = at(ids)
    return ((q // 4 == k // 4) & (k <= q))[None, None] & pad_k(mask)


def _rounded(ids: Tensor, mask: Tensor) -> Tensor:
    q, k = at(ids)
    return ((k / 2).long() * 2 <= (q / 2).long() * 2)[None, None] & pad_k(mask)


def _prefix_lm(ids: Tensor, mask: Tensor) -> Tensor:
    q, k = at(ids)
    return ((k <= q) | (k < 3))[None, None] & pad_k(mask)


def _low_precision(ids: Tensor, mask: Tensor) -> Tensor:
    columns = torch.arange(ids.shape[1]).to(torch.uint8) * 100
    return (columns[None, :] <= columns[:, None])[None, None] & pad_k(mask)


def _alibi(ids: Tensor, mask: Tensor) -> Tensor:
    q, k = at(ids)
    seen = _causal(ids) & pad_k(mask)
    return torch.where(seen, (k - q).double() * 0.5, -1e9)


def _q_and_k(ids: Tensor, mask: Tensor) -> Tensor:
    return _causal(ids) & pad_k(mask) & mask.bool()[:, None, :, None]


def _strict(ids: Tensor, mask: Tensor) -> Tensor:
    q, k = at(ids)
    return (k < q)[None, None] & pad_k(mask)


def _extended(ids: Tensor, mask: Tensor) -> Tensor:
    """(1 - mask) * min, as BERT and GPT-2 wrote it."""
    pads = (1.0 - mask[:, None, None, :].double()) * -1e9
    return pads + torch.where(_causal(ids), 0.0, -1e9).double()


many(
    ("pad_on_queries", "mask", masked(lambda ids, mask: _causal(ids) & mask.bool()[:, None, :, None])),
    ("pad_on_both", "mask", masked(_q_and_k)),
    ("strictly_before", "mask", masked(_strict)),
    ("bidirectional", "not-causal", masked(lambda ids, mask: pad_k(mask))),
    ("anticausal", "mask", masked(lambda ids, mask: _causal(ids).mT & pad_k(mask))),
    ("prefix_lm", "mask", masked(_prefix_lm)),
    ("rounded_columns", "mask", masked(_rounded)),
    ("columns_that_wrap", "mask", masked(_low_precision)),
    ("alibi", "mask", masked(_alibi)),
    ("causal_alone", "packed", masked(lambda ids, mask: _causal(ids), exact=True)),
    ("is_causal", "packed", masked(lambda ids, mask: None, exact=True)),
    (
        "tril_of_ones",
        "packed",
        masked(lambda ids, mask: torch.ones(9, 9, dtype=torch.bool).tril()[None, None] & pad_k(mask)),
    ),
    (
        "not_triu",
        "packed",
        masked(lambda ids, mask: ~torch.ones(9, 9, dtype=torch.bool).triu(1) & pad_k(mask)),
    ),
    ("window_difference", "packed", masked(_window(lambda q, k: q - k < 3))),
    ("window_difference_or_equal", "packed", masked(_window(lambda q, k: q - k <= 3))),
    ("window_key_side", "packed", masked(_window(lambda q, k: k > q - 3))),
    ("window_query_side", "packed", masked(_window(lambda q, k: k + 3 >= q))),
    ("window_of_one", "packed", masked(_window(lambda q, k: q - k < 1))),
    ("window_fraction", "packed", masked(_window(lambda q, k: q - k < 2.5))),
    ("window_negated", "packed", masked(_window(lambda q, k: ~(q - k >= 3)))),
    ("window_both_sides", "mask", masked(_window(lambda q, k: (q - k).abs() < 3))),
    ("window_absolute_position", "mask", masked(_window(lambda q, k: k < 3))),
    ("dilated", "mask", masked(_window(lambda q, k: (q - k) % 2 == 0))),
    ("chunked", "packed", masked(_documents)),
    ("extended_mask", "mask", masked(_extended)),
    ("additive_min", "packed", masked(additive(torch.finfo(torch.float64).min))),
    ("additive_inf", "packed", masked(additive(-math.inf))),
    ("additive_1e9", "packed", masked(additive(-1e9, "masked_fill"))),
    ("additive_product", "packed", masked(additive(-1e9, "product"))),
    ("additive_sum", "packed", masked(additive(-1e9, "sum"))),
    ("additive_1e3", "mask", masked(additive(-1e3))),
)


def _additive_window(ids: Tensor, mask: Tensor) -> Tensor:
    q, k = at(ids)
    seen = ((k <= q) & (q - k < 2))[None, None] & pad_k(mask)
    return torch.where(seen, 0.0, -1e9).double()


@trap("masked-query")
def additive_window_read_at_padding() -> Case:
    """A padded query that is read sees nothing inside its window: dense averages, a tree gives zero."""

    b = batch(length=12, pad="right")
    b.mask[2, 4:] = 0
    return Case(Toy(mask=_additive_window, tail=lambda x, *_: x.sum(1)), (b.ids, b.mask), {})


@trap("masked-query")
def additive_documents_read_at_padding() -> Case:
    def make(ids: Tensor, mask: Tensor) -> Tensor:
        q, k = at(ids)
        seen = ((k <= q) & (q // 4 == k // 4))[None, None] & pad_k(mask)
        return torch.where(seen, 0.0, -1e9).double()

    b = batch(length=12, pad="right")
    b.mask[2, 4:] = 0
    return Case(Toy(mask=make, tail=lambda x, *_: x.sum(1)), (b.ids, b.mask), {})


@trap("mask")
def tril_buffer() -> Case:
    """A buffer is data: that it holds a triangle is not in the graph."""
    table = torch.ones(32, 32, dtype=torch.bool).tril()

    class Buffered(Toy):
        def __init__(self) -> None:
            super().__init__(
                mask=lambda ids, mask: self.tril[: ids.shape[1], : ids.shape[1]], buffers={"tril": table}
            )

    return on(Buffered(), batch(pad="none"))


def _given(ids: Tensor, mask: Tensor) -> Tensor:
    return mask


@trap("dense-input")
def float_mask_of_the_caller() -> Case:
    b = batch()
    four = torch.where(_causal(b.ids) & pad_k(b.mask), 0.0, -1e9).double()
    return Case(Toy(mask=_given), (b.ids, four), {"kept": b.kept})


@trap("mask")
def bool_mask_of_the_caller() -> Case:
    b = batch()
    return Case(
        Toy(mask=lambda ids, mask: mask[:, None]),
        (b.ids, causal_and_padding(b.ids, b.mask)[:, 0]),
        {"kept": b.kept},
    )


@trap("mixes-tokens")
def mask_of_rows_meets_heads() -> Case:
    """[B, T, T] against [B, H, T, T] with B = H: row b's mask reaches head b of every row."""
    b = batch(count=2, pad="mixed")
    return Case(
        Toy(mask=lambda ids, mask: causal_and_padding(ids, mask)[:, 0]), (b.ids, b.mask), {"kept": b.kept}
    )


# ---- sizes that collide --------------------------------------------------------------------------------


def _collide() -> Case:
    b = batch(count=24, length=24, pad="mixed", vocab=24)
    return on(Toy(width=24, heads=24, inner=24, vocab=24, positions=24), b)


many(
    ("all_sizes_24", "packed", _collide),
    (
        "all_sizes_24_dynamic",
        "packed",
        lambda: Case(_collide().model, _collide().args, {**_collide().settings, "dynamic": True}),
    ),
    ("one_row", "packed", lambda: on(Toy(), batch(count=1))),
    ("one_row_dynamic", "packed", lambda: on(Toy(), batch(count=1), dynamic=True)),
    ("one_column", "no-token-ids", lambda: on(Toy(), batch(count=4, length=1, pad="none"))),
    ("one_token", "no-token-ids", lambda: on(Toy(), batch(count=1, length=1, pad="none"))),
    ("nothing_kept", "empty", lambda: on(Toy(), batch(pad="all"))),
    (
        "nothing_kept_but_read",
        "packed",
        lambda: on(Toy(tail=lambda x, *_: x.mean()), batch(pad="all"), exact=True),
    ),
    ("two_rows_alike", "packed", lambda: _alike()),
    ("one_packed_token", "packed", lambda: _one_packed()),
    ("inner_equals_length", "packed", lambda: on(Toy(width=18, inner=9, heads=9), batch(count=18))),
)


def _alike() -> Case:
    b = batch(count=2, pad="none")
    b.ids[1] = b.ids[0]
    return on(Toy(), b)


def _one_packed() -> Case:
    b = batch(count=4, length=5, pad="none")
    b.mask[:, 1:] = 0
    b.ids[:, 0] = 3
    return on(Toy(), b)


# ---- attention in other spellings ------------------------------------------------------------------------


def low(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1]) + low(mask)).softmax(-1) @ v


def _filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.3).masked_fill(~mask, -math.inf).softmax(-1) @ v


def _filled_with_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Padding is filled with score 0, which is no mask at all."""
    at = torch.arange(q.shape[2])
    scores = ((q @ k.mT) * 0.3).masked_fill(at[None, :] > at[:, None], -math.inf)
    return scores.masked_fill(~mask[:, :, -1:], 0.0).softmax(-1) @ v


def _scaled_after_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.mT + low(mask)) * 1e-9).softmax(-1) @ v


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT * 0.3 / 2.0) * 2.0 + low(mask)).softmax(-1) @ v


def _scaled_after_cap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT / 2.0) * 2.0 * 0.3 + low(mask)).softmax(-1) @ v


def _cap_with_another_factor(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT / 2.0) * 3.0 + low(mask)).softmax(-1) @ v


def _einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.3 + low(mask)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def _bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, h, t, t) * 0.3 + low(mask)
    return torch.bmm(scores.softmax(-1).view(b * h, t, t), v).view(b, h, t, d)


def _merged_causal(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    b, h, t, d = q.shape
    q, k, v = (x.reshape(b * h, t, d) for x in (q, k, v))
    at = torch.arange(t)
    seen = torch.zeros(t, t, dtype=torch.float64).masked_fill(at[None, :] > at[:, None], -math.inf)
    return (torch.bmm(q, k.transpose(1, 2)) * 0.3 + seen).softmax(-1).bmm(v).view(b, h, t, d)


def _interleaved(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    n = q.shape[1] // k.shape[1]
    return sdpa(q, k.repeat_interleave(n, 1), v.repeat_interleave(n, 1), mask)


def _tiled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Query head h reads key head h % kv: not the grouping of repeat_interleave."""
    n = q.shape[1] // k.shape[1]
    return sdpa(q, k.repeat(1, n, 1, 1), v.repeat(1, n, 1, 1), mask)


def _group_major(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[B, group, kv, T, D] against [B, 1, kv, T, D]."""
    b, h, t, d = q.shape
    q = q.view(b, -1, k.shape[1], t, d)
    scores = q @ k[:, None].mT * 0.3 + low(mask)[:, None]
    return (scores.softmax(-1) @ v[:, None]).reshape(b, h, t, d)


def _key_major(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[B, kv, group, T, D] against [B, kv, 1, T, D]."""
    b, h, t, d = q.shape
    q = q.view(b, k.shape[1], -1, t, d)
    scores = q @ k[:, :, None].mT * 0.3 + low(mask)[:, None]
    return (scores.softmax(-1) @ v[:, :, None]).reshape(b, h, t, d)


def _one_key_many_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k[:, :1].mT * 0.3 + low(mask)).softmax(-1) @ v


def _weights_too(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = (q @ k.mT * 0.3 + low(mask)).softmax(-1)
    return weights @ v + weights.mean()


def _over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + low(mask)).softmax(-2) @ v


def _swapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """k and q change places: the mask is read over the same dims."""
    return (k @ q.mT * 0.3 + low(mask)).softmax(-1) @ v


def _no_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~mask, 0.0) @ v


def _shifted_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3 + low(mask)
    return (scores - scores.max(-1, keepdim=True).values).softmax(-1) @ v


def _nowhere_left(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Keys one step back: query t never sees itself."""
    k, v = (F.pad(x, (0, 0, 1, 0))[:, :, :-1] for x in (k, v))
    return sdpa(q, k, v, mask)


def attending(function: Callable[..., Tensor], pad: str = "mixed", **settings: Any) -> Callable[[], Case]:
    return lambda: on(Toy(attend=function, **settings), batch(pad=pad))


class Sinks(Toy):
    """Attention sinks, one logit a head."""

    def __init__(self) -> None:
        super().__init__(attend=self.sunk, extra={"sinks": (2,)})

    def sunk(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3 + low(mask)
        column = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        joined = torch.cat([scores, column], dim=-1)
        return joined.softmax(-1)[..., :-1] @ v


GROUPED = {"heads": 4, "kv_heads": 2}
many(
    ("scores_written_out", "packed", attending(written_out)),
    ("scores_filled", "packed", attending(_filled, pad="right")),
    ("scores_filled_with_zero", "attention-form", attending(_filled_with_zero)),
    ("scores_scaled_after_mask", "attention-form", attending(_scaled_after_mask)),
    ("softcap", "packed", attending(_capped)),
    ("scaled_after_softcap", "attention-form", attending(_scaled_after_cap)),
    ("softcap_with_another_factor", "attention-form", attending(_cap_with_another_factor)),
    ("einsum", "mixes-tokens", attending(_einsum)),
    ("bmm_with_padding", "attention-form", attending(_bmm)),
    ("bmm_causal", "packed", attending(_merged_causal, pad="none")),
    ("grouped_heads", "packed", attending(sdpa, **GROUPED)),
    ("one_key_head", "packed", attending(sdpa, heads=4, kv_heads=1)),
    ("repeat_interleave", "packed", attending(_interleaved, **GROUPED)),
    ("tiled_heads", "packed", attending(_tiled, **GROUPED)),
    ("groups_before_key_heads", "attention-heads", attending(_group_major, **GROUPED)),
    ("key_heads_before_groups", "packed", attending(_key_major, **GROUPED)),
    ("one_key_head_many_values", "attention-heads", attending(_one_key_many_values)),
    ("attention_weights_used", "attention-form", attending(_weights_too)),
    ("softmax_over_queries", "attention-form", attending(_over_queries)),
    ("keys_and_queries_swapped", "packed", attending(_swapped)),
    ("attention_without_softmax", "attention-form", attending(_no_softmax)),
    ("scores_shifted", "packed", attending(_shifted_scores)),
    ("keys_one_step_back", "mixes-tokens", attending(_nowhere_left)),
    ("sinks", "packed", lambda: on(Sinks(), batch(pad="mixed"))),
)


@trap("attention-weights")
def attention_weights_returned() -> Case:
    class Telling(Toy):
        def forward(self, ids: Tensor, mask: Tensor) -> Any:
            told = []

            def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
                told.append((q @ k.mT * 0.3 + low(seen)).softmax(-1))
                return told[-1] @ v

            h, seen = self.tokens(ids), causal_and_padding(ids, mask)
            for layer in self.layers:
                h = layer(h, seen, attend)
            return self.head(h), told

    b = batch(pad="none")
    return Case(Telling(), (b.ids, b.mask), {})


@trap("packed")
def features_of_ids_in_another_shape() -> Case:
    """Real numbers made of ids, with a dim of their own: packed where they are made, sizes and all."""

    def shifted(h: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return h + torch.sin(ids).double().reshape(ids.shape[0], ids.shape[1], 1) * torch.cos(ids)[..., None]

    return on(Toy(middle=shifted), batch(pad="mixed"))


@trap("packed")
def mask_built_in_every_layer() -> Case:
    def attend(q: Tensor, k: Tensor, v: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
        return sdpa(q, k, v, causal_and_padding(*given))

    return on(Toy(mask=lambda ids, mask: (ids, mask), attend=attend), batch(pad="mixed"))


@trap("mixed-masks")
def padding_in_one_layer_only() -> Case:
    class Uneven(Toy):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            h = self.tokens(ids)
            h = self.layers[0](h, None, sdpa)
            return self.head(self.layers[1](h, causal_and_padding(ids, mask), sdpa))

    return on(Uneven(), batch())


@trap("packed")
def window_in_one_layer_only() -> Case:
    class Uneven(Toy):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            h, seen = self.tokens(ids), causal_and_padding(ids, mask)
            q, k = at(ids)
            h = self.layers[0](h, seen, sdpa)
            return self.head(self.layers[1](h, seen & (q - k < 3), sdpa))

    return on(Uneven(), batch(pad="mixed", holes=True))


@trap("dense-input")
def cross_attention() -> Case:
    class Crossed(Toy):
        def forward(self, ids: Tensor, mask: Tensor, memory: Tensor) -> Tensor:
            h = self.layers[0](self.tokens(ids), causal_and_padding(ids, mask), sdpa)
            k = self.layers[1].split(memory, 2)
            return self.head(h + sdpa(self.layers[1].split(h, 2), k, k, None).transpose(1, 2).flatten(2))

    return on(Crossed(), batch(), torch.randn(6, 9, 12, dtype=torch.float64))


@trap("dense-input")
def cached_keys() -> Case:
    class Cached(Toy):
        def forward(self, ids: Tensor, mask: Tensor, past: Tensor) -> Tensor:
            def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
                k, v = torch.cat([past, k], dim=2), torch.cat([past, v], dim=2)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

            length = ids.shape[1]
            seen = torch.ones(length, length + 3, dtype=torch.bool).tril(3)
            return self.head(self.layers[0](self.tokens(ids), seen, attend))

    return on(Cached(), batch(pad="none"), torch.randn(6, 2, 3, 6, dtype=torch.float64))


# ---- positions, tables, constants ------------------------------------------------------------------------


class Placed(Toy):
    """Positions given by the caller."""

    def __init__(self, first: bool = False) -> None:
        def embed(model: Toy, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
            if first:
                return model.places(positions) + model.tokens(ids)
            return model.tokens(ids) + model.places(positions)

        super().__init__(embed=embed, middle=lambda h, *_: h, tail=lambda x, *_: x)


def _counted(b: Batch) -> Tensor:
    return (b.mask.cumsum(1) - 1).clamp(min=0)


class Tabled(Toy):
    """A learned table by column in several spellings."""

    def __init__(self, read: Callable[[Tensor, int], Tensor], rows: int = 32) -> None:
        def embed(model: Toy, ids: Tensor, *_: Any) -> Tensor:
            return model.tokens(ids) + read(model.table, ids.shape[1])

        super().__init__(embed=embed, extra={"table": (rows, WIDTH)})


class TwoTables(Toy):
    """cos[:T] and sin[:T], as rotary embeddings cache them."""

    def __init__(self, rows: tuple[int, int]) -> None:
        def embed(model: Toy, ids: Tensor, *_: Any) -> Tensor:
            length = ids.shape[1]
            return model.tokens(ids) * model.one[:length] + model.two[:length]

        super().__init__(embed=embed, extra={"one": (rows[0], WIDTH), "two": (rows[1], WIDTH)})


class Literal(Toy):
    """A tensor written in the model."""

    def __init__(self, values: list[float]) -> None:
        def embed(model: Toy, ids: Tensor, *_: Any) -> Tensor:
            return model.tokens(ids) * torch.tensor(values, dtype=torch.float64)[:, None]

        super().__init__(embed=embed)


def table(read: Callable[[Tensor, int], Tensor], rows: int = 32, pad: str = "mixed") -> Callable[[], Case]:
    return lambda: on(Tabled(read, rows), batch(pad=pad))


many(
    ("positions_by_row", "packed", lambda: on(Placed(), batch(pad="left"), _counted(batch(pad="left")))),
    ("positions_one_row", "packed", lambda: on(Placed(), batch(pad="mixed"), torch.arange(9)[None])),
    (
        "positions_looked_up_first",
        "packed",
        lambda: on(Placed(first=True), batch(pad="mixed"), torch.arange(9)[None]),
    ),
    ("positions_flat", "packed", lambda: on(Placed(first=True), batch(pad="mixed"), torch.arange(9))),
    ("table_slice", "packed", table(lambda p, t: p[:t])),
    ("table_of_this_length", "packed", table(lambda p, t: p, rows=9)),
    ("table_by_arange", "packed", table(lambda p, t: p[torch.arange(t)])),
    ("table_of_this_length_by_arange", "packed", table(lambda p, t: p[torch.arange(t)], rows=9)),
    ("table_with_offset", "packed", table(lambda p, t: p[2 : t + 2])),
    ("table_by_arange_with_offset", "packed", table(lambda p, t: p[torch.arange(t) + 2])),
    ("table_reversed", "packed", table(lambda p, t: p[t - 1 - torch.arange(t)])),
    ("table_from_the_end", "table-offset", table(lambda p, t: p[-t:])),
    ("table_summed", "packed", table(lambda p, t: p[:t].sum(0))),
    ("table_centred", "mixes-tokens", table(lambda p, t: p[:t] - p[:t].mean(0))),
    ("two_tables", "packed", lambda: on(TwoTables((32, 32)), batch(pad="mixed"))),
    ("two_tables_of_other_sizes", "misaligned", lambda: on(TwoTables((32, 40)), batch(pad="mixed"))),
    ("literal_by_column", "packed", lambda: on(Literal([0.1 * i for i in range(9)]), batch(pad="mixed"))),
    (
        "literal_by_column_one_row",
        "packed",
        lambda: on(Literal([0.1 * i for i in range(9)]), batch(count=1, pad="none")),
    ),
)


@trap("packed")
def rotary_by_batch_maximum() -> Case:
    """Angles scaled by the longest row of the batch (dynamic NTK)."""

    def embed(model: Toy, ids: Tensor, mask: Tensor) -> Tensor:
        longest = mask.sum(1).max()
        angle = torch.arange(ids.shape[1])[:, None] * 0.5 ** torch.arange(WIDTH) / longest
        return model.tokens(ids) * angle.cos() + model.tokens(ids).roll(1, -1) * angle.sin()

    return on(Toy(embed=embed), batch(pad="mixed"))


@trap("row-value")
def row_length_inside_the_model() -> Case:
    return on(Toy(middle=lambda h, ids, mask: h / mask.sum(1)[:, None, None]), batch())


@trap("row-value")
def adapter_by_row() -> Case:
    class Adapted(Toy):
        def __init__(self) -> None:
            super().__init__(extra={"a": (3, 12, 12)})

        def forward(self, ids: Tensor, mask: Tensor, which: Tensor) -> Tensor:
            seen = causal_and_padding(ids, mask)
            h = self.layers[0](self.tokens(ids), seen, sdpa)
            return self.head(self.layers[1](h + h @ self.a[which], seen, sdpa))

    return on(Adapted(), batch(), torch.tensor([0, 1, 2, 0, 1, 2]))


@trap("packed")
def adapter_by_position() -> Case:
    """The same index given for every position is part of the key: rows with other adapters share nothing."""

    class Adapted(Toy):
        def __init__(self) -> None:
            super().__init__(extra={"a": (3, 12)})

        def forward(self, ids: Tensor, mask: Tensor, which: Tensor) -> Tensor:
            seen = causal_and_padding(ids, mask)
            h = self.layers[0](self.tokens(ids), seen, sdpa)
            return self.head(self.layers[1](h + F.embedding(which, self.a), seen, sdpa))

    return on(Adapted(), batch(), torch.tensor([0, 1, 0, 0, 0, 2])[:, None].expand(6, 9).contiguous())


@trap("packed")
def weight_by_position() -> Case:
    """A float input that reaches attention is a key, by its bits."""

    class Weighted(Toy):
        def forward(self, ids: Tensor, mask: Tensor, w: Tensor) -> Tensor:
            h = self.tokens(ids) * w[..., None]
            for layer in self.layers:
                h = layer(h, causal_and_padding(ids, mask), sdpa)
            return self.head(h)

    b = batch()
    return on(Weighted(), b, (b.ids % 3).double() + (torch.arange(6) == 4).double()[:, None])


@trap("packed")
def length_in_the_formula() -> Case:
    return on(Toy(middle=lambda h, ids, mask: h / h.shape[1]), batch())


# ---- more keys -------------------------------------------------------------------------------------------


class Documents(Toy):
    """Attention inside of a document only, by restarting positions or ids."""

    def forward(self, ids: Tensor, documents: Tensor) -> Tensor:
        q, k = at(ids)
        seen = ((k <= q) & (documents[:, :, None] == documents[:, None, :]))[:, None]
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h, seen, sdpa)
        return self.head(h)


def _restarting(b: Batch) -> Tensor:
    starts = torch.tensor([[0, 4, 7], [0, 4, 7], [0, 3, 8], [0, 4, 7], [0, 5, 6], [0, 2, 7]])
    position = torch.arange(9).expand(6, 9)
    begin = torch.zeros(6, 9, dtype=torch.int64)
    for row, cuts in enumerate(starts.tolist()):
        for cut in cuts:
            begin[row, cut:] = cut
    return position - begin


@trap("packed")
def document_ids() -> Case:
    b = batch(pad="none")
    return Case(Documents(), (b.ids, (_restarting(b) == 0).long().cumsum(1)), {})


@trap("packed")
def document_ids_a_b_a() -> Case:
    b = batch(pad="none")
    return Case(Documents(), (b.ids, torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 0]).expand(6, 9).contiguous()), {})


@trap("packed")
def restarting_positions() -> Case:
    class Restarting(Documents):
        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            return super().forward(ids, (positions == 0).long().cumsum(1))

    b = batch(pad="none")
    return Case(Restarting(), (b.ids, _restarting(b)), {})


@trap("packed")
def restarting_positions_one_row() -> Case:
    class Restarting(Documents):
        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            return super().forward(ids, (positions == 0).long().cumsum(1))

    b = batch(pad="none")
    return Case(Restarting(), (b.ids, _restarting(b)[:1]), {})


@trap("packed")
def ids_without_the_last() -> Case:
    class Trained(Toy):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            logits = super().forward(ids[:, :-1], mask[:, :-1])
            picked = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            return picked * mask[:, 1:]

    b = batch(pad="right")
    return Case(Trained(), (b.ids, b.mask), {})


@trap("packed")
def chosen_and_rejected_as_one_batch() -> Case:
    class Paired(Toy):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            logits = super().forward(ids, mask)
            picked = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) * mask[:, 1:]
            good, bad = picked.sum(1).chunk(2)
            return F.logsigmoid(good - bad).mean()

    b = batch(pad="right")
    return Case(Paired(), (b.ids, b.mask), {})


@trap("packed")
def two_grids_in_one_graph() -> Case:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.toy = Toy()

        def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
            return self.toy(a, b).sum() - self.toy(c, d).sum()

    a, b = batch(pad="right"), batch(count=4, length=7, pad="right", seed=3)
    return Case(Two(), (a.ids, a.mask, b.ids, b.mask), {})


@trap("row-value")
def two_grids_with_one_batch() -> Case:
    """Chosen and rejected rows as two grids: the batch is one axis, the sequences are two."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.toy = Toy()

        def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
            return F.logsigmoid(self.toy(a, b).sum((1, 2)) - self.toy(c, d).sum((1, 2))).mean()

    a, b = batch(pad="right"), batch(length=7, pad="right", seed=3)
    return Case(Two(), (a.ids, a.mask, b.ids, b.mask), {})


@trap("packed")
def policy_and_reference_in_one_graph() -> Case:
    policy, reference = Toy(), Toy(heads=3)
    for p in reference.parameters():
        p.requires_grad_(False)

    def step(ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        index = labels.clamp(min=0)[..., None]
        with torch.no_grad():
            old = reference(ids, mask).log_softmax(-1).gather(-1, index).squeeze(-1)
        new = policy(ids, mask).log_softmax(-1).gather(-1, index).squeeze(-1)
        ratio = (new - old).exp()
        return (ratio * (labels != -100)).sum()

    b = batch(pad="mixed")
    return Case(step, (b.ids, b.mask, b.labels), {"modules": (policy, reference)})


@trap("no-token-ids")
def embeddings_with_gradients() -> Case:
    class Embedded(Toy):
        def forward(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(h, None, sdpa)
            return self.head(h)

    return Case(Embedded(), (torch.randn(4, 6, WIDTH, dtype=torch.float64, requires_grad=True),), {})


@trap("no-rule")
def image_features_scattered() -> Case:
    class Seeing(Toy):
        def __init__(self) -> None:
            def embed(model: Toy, ids: Tensor, mask: Tensor, image: Tensor) -> Tensor:
                h = model.tokens(ids)
                return h.masked_scatter((ids == BAD)[..., None].expand_as(h), image)

            super().__init__(embed=embed, middle=lambda h, *_: h, tail=lambda x, *_: x)

    b = batch()
    return on(
        Seeing(), b, torch.randn(int((b.ids == BAD).sum()), WIDTH, dtype=torch.float64, requires_grad=True)
    )


# ---- in place --------------------------------------------------------------------------------------------


def _fresh(h: Tensor, *_: Any) -> Tensor:
    h = h.clone()
    h.mul_(2.0).add_(1.0)
    return h


def _through_dropout(h: Tensor, *_: Any) -> Tensor:
    """Idle dropout returns its operand: both names change."""
    h = h * 1
    y = F.dropout(h, 0.0)
    y.add_(1.0)
    return h + y


def _through_view(h: Tensor, *_: Any) -> Tensor:
    h = h * 1
    h.view(-1).mul_(2.0)
    return h


def _through_type_as(h: Tensor, *_: Any) -> Tensor:
    h = h * 1
    h.type_as(h).add_(1.0)
    return h


def _features_assigned(h: Tensor, *_: Any) -> Tensor:
    new = h.clone()
    new[..., :3] = h[..., 3:6] * 2
    return new


def _row_assigned(h: Tensor, *_: Any) -> Tensor:
    h = h.clone()
    h[1] = 0
    return h


many(
    ("in_place_on_a_clone", "packed", middle(_fresh)),
    ("in_place_through_dropout", "in-place", middle(_through_dropout, numbers=False)),
    ("in_place_through_a_view", "in-place", middle(_through_view)),
    ("in_place_through_type_as", "in-place", middle(_through_type_as)),
    ("features_assigned", "packed", middle(_features_assigned)),
    ("row_assigned", "in-place", middle(_row_assigned)),
)


# ---- layouts of the hidden states ------------------------------------------------------------------------


def _unbound(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return sdpa(*torch.stack([q, k, v]).unbind(0), mask)


class Fused(Toy):
    """One projection for q, k and v, over flattened tokens."""

    def __init__(self) -> None:
        super().__init__(extra={"qkv": (WIDTH, 3 * WIDTH)})

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        b, t = ids.shape
        h = self.tokens(ids)
        q, k, v = (h.view(-1, WIDTH) @ self.qkv).view(b, t, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4).unbind(0)
        h = h + sdpa(q, k, v, causal_and_padding(ids, mask)).transpose(1, 2).reshape(b, t, WIDTH)
        return self.head(h.view(b * t, WIDTH)).view(b, t, -1)


class TimeFirst(Toy):
    """Hidden states as [T, B, H]."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.tokens(ids).transpose(0, 1).contiguous()
        seen = causal_and_padding(ids, mask)
        for layer in self.layers:
            h = layer(h.transpose(0, 1), seen, sdpa).transpose(0, 1)
        return self.head(h).transpose(0, 1)


class Experts(Toy):
    """Top-k routing, written densely."""

    def __init__(self) -> None:
        def route(h: Tensor, *_: Any) -> Tensor:
            flat = h.view(-1, WIDTH)
            weight, index = (flat @ self.router).softmax(-1).topk(2, -1)
            gate = torch.zeros(flat.shape[0], 4, dtype=h.dtype).scatter(1, index, weight)
            out = F.gelu((flat[:, None, None, :] @ self.experts).squeeze(2))
            return h + (out * gate[..., None]).sum(1).view_as(h)

        super().__init__(middle=route, extra={"router": (WIDTH, 4), "experts": (4, WIDTH, WIDTH)})


class BalancedExperts(Experts):
    """With the load-balancing loss over all tokens."""

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        logits = super().forward(ids, mask)
        probs = (self.tokens(ids).view(-1, WIDTH) @ self.router).softmax(-1)
        load = F.one_hot(probs.topk(2, -1).indices, 4).double().mean((0, 1))
        return logits, (load * probs.mean(0)).sum()


@trap("cut-sequence")
def chunks_of_the_sequence() -> Case:
    def chunked(h: Tensor, *_: Any) -> Tensor:
        b, t, w = h.shape
        return h + h.view(b, t // 3, 3, w).mean(2, keepdim=True).expand(b, t // 3, 3, w).reshape(b, t, w)

    return on(Toy(middle=chunked), batch(pad="none"))


many(
    ("stacked_and_unbound", "packed", attending(_unbound)),
    ("fused_projection", "packed", lambda: on(Fused(), batch(pad="mixed"))),
    ("time_first", "packed", lambda: on(TimeFirst(), batch(pad="mixed"))),
    ("experts", "packed", lambda: on(Experts(), batch(pad="mixed"))),
    ("experts_with_balancing_loss", "packed", lambda: on(BalancedExperts(), batch(pad="right"))),
)


# ---- gradients -------------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """Gradient reversal: forward the identity, backward minus two times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -2 * grad


class RowScaled(torch.autograd.Function):
    """A gradient that mixes tokens though the forward does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (1 + grad.abs().amax(1, keepdim=True))


def _straight_through(h: Tensor, *_: Any) -> Tensor:
    return h + (h.round() - h).detach()


class Checkpointed(Toy):
    """Every layer under activation checkpointing; nested once."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.nested = nested

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        seen = causal_and_padding(ids, mask)
        h = self.tokens(ids)
        if self.nested:

            def both(h: Tensor) -> Tensor:
                h = checkpoint(self.layers[0], h, seen, sdpa, use_reentrant=False)
                return self.layers[1](h, seen, sdpa)

            return self.head(checkpoint(both, h, use_reentrant=False))
        for layer in self.layers:
            h = checkpoint(layer, h, seen, sdpa, use_reentrant=False)
        return self.head(h)


class Autocast(Toy):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, mask)


def single(model: Toy) -> Toy:
    return model.float()


BF16 = {"tolerance": 3e-2, "floor": 1.0}
many(
    ("detached", "packed", middle(lambda h, *_: h + h.detach() * 0.5)),
    ("straight_through", "packed", middle(_straight_through)),
    ("gradient_reversal", "autograd-function", middle(lambda h, *_: Reversed.apply(h))),
    ("gradient_that_mixes_tokens", "autograd-function", middle(lambda h, *_: RowScaled.apply(h))),
    ("checkpointed", "packed", lambda: on(Checkpointed(), batch(pad="mixed"))),
    ("checkpointed_nested", "packed", lambda: on(Checkpointed(nested=True), batch(pad="mixed"))),
    ("autocast_inside", "packed", lambda: on(single(Autocast(mask=causal_and_padding)), batch(), **BF16)),
    (
        "autocast_outside",
        "packed",
        lambda: on(single(Toy()), batch(), around=lambda: torch.autocast("cpu", torch.bfloat16), **BF16),
    ),
)


@trap("packed")
def frozen_layers() -> Case:
    model = Toy()
    model.layers[0].requires_grad_(False)
    return on(model, batch())


# ---- losses in the graph ---------------------------------------------------------------------------------


class Loss(Toy):
    """A loss of (logits, ids, mask, labels, weights)."""

    def __init__(self, loss: Callable[..., Any], **settings: Any) -> None:
        super().__init__(tail=lambda x, *_: x, **settings)
        self.loss = loss

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, weights: Tensor) -> Any:
        return self.loss(super().forward(ids, mask), ids, mask, labels, weights)


def loss(function: Callable[..., Any], pad: str = "mixed", **settings: Any) -> Callable[[], Case]:
    """Losses are exact wherever they read, padding included."""

    def build() -> Case:
        b = batch(pad=pad)
        return Case(Loss(function), (b.ids, b.mask, b.labels, b.weights), settings)

    return build


def _flat(x: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(x[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), **settings)


def _far(labels: Tensor) -> Tensor:
    return torch.where(labels == -100, 999, labels)


def _selected(x: Tensor, labels: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)


def _logsumexp(x: Tensor, labels: Tensor) -> Tensor:
    return x.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) - x.logsumexp(-1)


def _warm(x: Tensor, labels: Tensor) -> Tensor:
    """Temperature per row, then a vocabulary mask: V divides by B * T."""
    temperature = 1.0 + torch.arange(x.shape[0], dtype=torch.float64)[:, None, None]
    return (x / temperature) * (torch.arange(VOCAB) != 2)


def _entropy(x: Tensor) -> Tensor:
    logs = x.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


many(
    ("cross_entropy_mean", "packed", loss(lambda x, i, m, y, w: _flat(x, y))),
    ("cross_entropy_sum", "packed", loss(lambda x, i, m, y, w: _flat(x, y, reduction="sum"))),
    ("cross_entropy_none", "packed", loss(lambda x, i, m, y, w: _flat(x, y, reduction="none"))),
    ("cross_entropy_far_ignored", "packed", loss(lambda x, i, m, y, w: _flat(x, _far(y), ignore_index=999))),
    ("cross_entropy_smoothed", "packed", loss(lambda x, i, m, y, w: _flat(x, y, label_smoothing=0.1))),
    ("cross_entropy_of_ids", "packed", loss(lambda x, i, m, y, w: _flat(x, i))),
    ("cross_entropy_of_ids_left", "packed", loss(lambda x, i, m, y, w: _flat(x, i), pad="left")),
    ("cross_entropy_of_ids_here", "packed", loss(lambda x, i, m, y, w: F.cross_entropy(x.mT, i))),
    (
        "cross_entropy_of_ids_here_none",
        "packed",
        loss(lambda x, i, m, y, w: F.cross_entropy(x.mT, i, reduction="none") * m),
    ),
    ("cross_entropy_classes_second", "packed", loss(lambda x, i, m, y, w: F.cross_entropy(x.mT, y))),
    (
        "cross_entropy_classes_second_none",
        "packed",
        loss(lambda x, i, m, y, w: F.cross_entropy(x.mT, y, reduction="none") * w),
    ),
    (
        "cross_entropy_probabilities",
        "packed",
        loss(lambda x, i, m, y, w: F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).softmax(-1))),
    ),
    ("selected_log_probs", "packed", loss(lambda x, i, m, y, w: (_selected(x, y) * w).sum())),
    ("selected_by_logsumexp", "packed", loss(lambda x, i, m, y, w: (_logsumexp(x, y) * w).sum())),
    (
        "loss_mask_by_where",
        "packed",
        loss(lambda x, i, m, y, w: torch.where(y != -100, _selected(x, y), 0.0).sum()),
    ),
    (
        "loss_mask_by_fill",
        "packed",
        loss(lambda x, i, m, y, w: _selected(x, y).masked_fill(y == -100, 0.0).mean()),
    ),
    ("loss_without_mask", "packed", loss(lambda x, i, m, y, w: _selected(x, y).mean())),
    ("loss_time_first", "packed", loss(lambda x, i, m, y, w: (x.transpose(0, 1) * w.t()[..., None]).sum())),
    (
        "loss_time_first_other_mask",
        "packed",
        loss(lambda x, i, m, y, w: ((x * 2).transpose(0, 1) * (1 - m).t()[..., None]).sum()),
    ),
    ("loss_with_entropy", "packed", loss(lambda x, i, m, y, w: (_entropy(x) * m).sum() / m.sum())),
    ("temperature_by_row", "packed", loss(lambda x, i, m, y, w: _selected(_warm(x, y), y).sum())),
    (
        "loss_by_row_mean",
        "packed",
        loss(lambda x, i, m, y, w: ((_selected(x, y) * m).sum(1) / m.sum(1)).mean()),
    ),
    ("advantage_by_row", "packed", loss(lambda x, i, m, y, w: (_selected(x, y) * m * w[:, :1]).sum())),
    (
        "top_one",
        "packed",
        loss(lambda x, i, m, y, w: ((x.argmax(-1) == y) & (y != -100)).sum() + (x * w[..., None]).sum()),
    ),
)


# ---- rows and columns rearranged ------------------------------------------------------------------------------------


def _scatter_along(h: Tensor, *_: Any) -> Tensor:
    index = (torch.arange(h.shape[1]) // 2)[None, :, None].expand_as(h)
    return h + torch.zeros_like(h).scatter_add(1, index, h)


def _convolved(h: Tensor, *_: Any) -> Tensor:
    return h + F.conv1d(F.pad(h.mT, (2, 0)), h.new_ones(h.shape[2], 1, 3), groups=h.shape[2]).mT


def _identity_index(h: Tensor, *_: Any) -> Tensor:
    return h[torch.arange(h.shape[0])[:, None], torch.arange(h.shape[1])] * 2


def _masked_mean(h: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    return h - (h * mask[..., None]).sum((0, 1)) / mask.sum()


def scrambled(length: int, count: int = 3) -> Callable[[], Case]:
    """A view that reads [B, T] as [T, B]."""
    return lambda: on(
        Toy(middle=lambda h, *_: h + h.flatten(0, 1).view(length, count, WIDTH).transpose(0, 1)),
        batch(count=count, length=length, pad="none"),
    )


def reshaped(length: int) -> Callable[[], Case]:
    """A view that reads [T, H] as [H, T]."""
    return lambda: on(
        Toy(middle=lambda h, *_: h + h.reshape(h.shape[0], WIDTH, length).mT),
        batch(length=length, pad="none"),
    )


many(
    ("row_added_to_all", "mixes-tokens", middle(lambda h, *_: h + h[:1])),
    ("rows_rolled", "mixes-tokens", middle(lambda h, *_: h + h.roll(1, 0))),
    ("rows_flipped", "mixes-tokens", middle(lambda h, *_: h + h.flip(0))),
    ("rows_joined", "mixes-tokens", middle(lambda h, *_: torch.cat([h, h], 0)[: h.shape[0]])),
    ("columns_joined", "mixes-tokens", middle(lambda h, *_: torch.cat([h, h], 1)[:, : h.shape[1]])),
    ("halves_swapped", "mixes-tokens", middle(lambda h, *_: torch.cat(h.chunk(2, 0)[::-1], 0))),
    ("columns_by_arange", "packed", middle(lambda h, *_: h[:, torch.arange(h.shape[1])] * 2)),
    ("grid_by_arange", "mixes-tokens", middle(_identity_index)),
    (
        "columns_by_reversed_arange",
        "mixes-tokens",
        middle(lambda h, *_: h[:, torch.arange(h.shape[1]).flip(0)]),
    ),
    ("columns_by_shifted_arange", "mixes-tokens", middle(lambda h, *_: h[:, (torch.arange(9) + 1) % 9])),
    ("scatter_along_the_row", "mixes-tokens", middle(_scatter_along)),
    ("convolution", "mixes-tokens", middle(_convolved)),
    ("norm_over_tokens", "mixes-tokens", middle(lambda h, *_: F.layer_norm(h, h.shape[1:]))),
    ("difference", "mixes-tokens", middle(lambda h, *_: torch.diff(h, dim=1, prepend=h[:, :1]))),
    ("masked_mean_over_tokens", "packed", middle(_masked_mean)),
    ("zero_at_padding", "packed", middle(lambda h, ids, mask: h * mask[..., None])),
    (
        "zero_at_padding_by_where",
        "packed",
        middle(lambda h, ids, mask: torch.where(mask[..., None] > 0, h, 0.0)),
    ),
    ("scrambled_view", "cut-sequence", scrambled(9)),
    ("scrambled_view_uneven", "mixes-tokens", scrambled(10)),
    ("reshaped_view", "mixes-tokens", reshaped(9)),
    ("reshaped_view_multiple", "cut-sequence", reshaped(24)),
)


# ---- inputs in other types -----------------------------------------------------------------------------------------


def typed(change: Callable[[Batch], tuple[Tensor, Tensor]], pad: str = "mixed") -> Callable[[], Case]:
    def build() -> Case:
        b = batch(pad=pad)
        return Case(Toy(), change(b), {"kept": b.kept})

    return build


many(
    ("ids_int32", "packed", typed(lambda b: (b.ids.int(), b.mask.int()))),
    ("mask_bool", "packed", typed(lambda b: (b.ids, b.mask.bool()))),
    ("mask_float", "packed", typed(lambda b: (b.ids, b.mask.float()))),
    ("mask_of_other_numbers", "packed", typed(lambda b: (b.ids, b.mask * 7))),
    (
        "ids_not_contiguous",
        "packed",
        typed(lambda b: (b.ids.t().contiguous().t(), b.mask.repeat(1, 2)[:, :9])),
    ),
    ("mask_of_one_row", "packed", typed(lambda b: (b.ids, torch.ones(1, 9, dtype=torch.int64)), pad="none")),
)


class Looked(Toy):
    """Token embeddings with options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(embed=lambda model, ids, *_: F.embedding(ids, model.tokens.weight, **settings))


@trap("in-place")
def embedding_with_max_norm() -> Case:
    return on(Looked(max_norm=1.0), batch(), backward=False)


many(
    ("embedding_with_padding_id", "packed", lambda: on(Looked(padding_idx=BAD), batch())),
    ("embedding_scaled_by_frequency", "embedding", lambda: on(Looked(scale_grad_by_freq=True), batch())),
)


@trap("no-token-ids")
def ids_by_one_hot() -> Case:
    def embed(model: Toy, ids: Tensor, *_: Any) -> Tensor:
        return F.one_hot(ids, VOCAB).double() @ model.tokens.weight

    return on(Toy(embed=embed), batch())


@trap("packed")
def complex_rotary() -> Case:
    """Llama's own rotary embedding: pairs of features as complex numbers."""

    def turn(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * 0.5 ** torch.arange(x.shape[3] // 2)
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.view_as_real(turned).flatten(3)

    return on(
        Toy(embed=tokens_only, attend=lambda q, k, v, m: sdpa(turn(q), turn(k), v, m)), batch(pad="mixed")
    )


class Encoder(nn.Module):
    """torch.nn's own encoder layer, with its causal mask and its key padding mask."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.padded = padded
        self.double()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        pads = (
            torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask == 0, -math.inf)
            if self.padded
            else None
        )
        return self.layer(
            self.tokens(ids), src_mask=causal, src_key_padding_mask=pads, is_causal=not self.padded
        )


many(
    ("torch_encoder_layer", "packed", lambda: on(Encoder(False), batch(pad="none"))),
    ("torch_encoder_layer_padded", "mixes-tokens", lambda: on(Encoder(True), batch(pad="right"))),
)


# ---- values along the sequence that come from nowhere -----------------------------------------------------


class Assembled(Toy):
    """A table by column put together in the model."""

    def __init__(self, make: Callable[[Toy, int], Tensor], **extra: tuple[int, ...]) -> None:
        super().__init__(
            embed=lambda model, ids, *_: model.tokens(ids) + make(model, ids.shape[1]), extra=extra
        )


def assembled(make: Callable[[Any, int], Tensor], **extra: tuple[int, ...]) -> Callable[[], Case]:
    return lambda: on(Assembled(make, **extra), batch(pad="mixed"))


many(
    (
        "table_joined",
        "sequence-sized",
        assembled(lambda m, t: torch.cat([m.a, m.b]), a=(4, WIDTH), b=(5, WIDTH)),
    ),
    (
        "table_stacked",
        "sequence-sized",
        assembled(lambda m, t: torch.stack([m.a * i for i in range(9)]), a=(WIDTH,)),
    ),
    ("table_flat", "misaligned", assembled(lambda m, t: m.a.view(t, WIDTH), a=(9 * WIDTH,))),
    ("table_split", "sequence-sized", assembled(lambda m, t: m.a.split(9)[1], a=(18, WIDTH))),
    ("table_strided", "sequence-sized", assembled(lambda m, t: m.a[::2], a=(18, WIDTH))),
    ("table_expanded", "packed", assembled(lambda m, t: m.a.expand(t, WIDTH), a=(WIDTH,))),
    ("table_repeated", "packed", assembled(lambda m, t: m.a.repeat(t, 1), a=(WIDTH,))),
    ("table_transposed", "packed", assembled(lambda m, t: m.a.t(), a=(WIDTH, 9))),
    ("table_projected", "packed", assembled(lambda m, t: m.a[:t] @ m.b, a=(32, 3), b=(3, WIDTH))),
    (
        "columns_by_linspace",
        "packed",
        assembled(lambda m, t: torch.linspace(0, 1, t, dtype=torch.float64)[:, None] * m.a, a=(WIDTH,)),
    ),
)


# ---- padding that only factors of other slices leave unread -----------------------------------------------


def weighted(function: Callable[..., Tensor], *, last: int, whole: bool = False) -> Callable[[], Case]:
    """Log-probabilities times weights of their own grid; padding is read if they are not, and then averages."""

    class Weighted(Toy):
        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            logits = super().forward(ids, mask)[:, :-1][:, -last:]
            logs = logits.log_softmax(-1)
            picked = logs.gather(-1, labels.clamp(min=0)[..., None])
            return function(logs if whole else picked.squeeze(-1), weights)

    b = batch(length=12, pad="right")
    b.mask[2, 4:] = 0
    weights = b.weights * b.mask
    labels = b.labels[:, -last:].contiguous()
    return lambda: Case(
        Weighted(mask=_additive_window), (b.ids, b.mask, labels, weights[:, -last:].contiguous()), {}
    )


def _clipped(picked: Tensor, weights: Tensor) -> Tensor:
    ratio = (picked - picked.detach() + 0.3).exp()
    worst = torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights)
    return -worst.sum() / (weights != 0).sum()


many(
    ("weights_of_the_last_tokens", "packed", weighted(lambda p, w: -(p * w).sum(), last=5)),
    ("weights_of_all_but_the_first", "packed", weighted(lambda p, w: -(p * w).sum(), last=11)),
    ("weights_normalised", "packed", weighted(lambda p, w: -(p * (w / w.abs().sum())).sum(), last=5)),
    ("weights_by_comparison", "packed", weighted(lambda p, w: torch.where(w != 0, p, 0.0).sum(), last=5)),
    ("weights_in_a_clipped_loss", "packed", weighted(_clipped, last=5)),
    (
        "weights_after_a_view_and_a_sum",
        "masked-query",
        weighted(lambda p, w: (p.view(p.shape[0], 2, -1).sum(-1) * w[:, :2]).sum(), last=6),
    ),
    (
        "weights_after_a_mean_over_groups",
        "masked-query",
        weighted(lambda p, w: (p.view(2, 3, -1).mean(1) * w.view(2, 3, -1)[:, 0]).sum(), last=6),
    ),
    (
        "weights_after_a_view_and_a_plain_sum",
        "masked-query",
        weighted(lambda p, w: p.view(-1, 3).sum(-1), last=6),
    ),
    (
        "weights_of_rows_alone",
        "masked-query",
        weighted(lambda p, w: -(p * (w.sum(1, True) + 9.0)).sum(), last=5),
    ),
    ("weights_beside_a_plain_sum", "masked-query", weighted(lambda p, w: (p * w + p).sum(), last=5)),
)


@trap("packed")
def labels_of_the_first_columns() -> Case:
    """A gather may read fewer rows than there are: the first."""

    class First(Toy):
        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            picked: Tensor = super().forward(ids, mask).gather(-1, labels[..., None])
            return picked

    b = batch(pad="none")
    return Case(First(), (b.ids, b.mask, b.ids[:, :4].contiguous()), {})
