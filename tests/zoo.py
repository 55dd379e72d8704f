"""Models that a compiler which guesses gets wrong: each is one trap, with what must become of it.

A trap says ``packed`` or the slug of the refusal; either way its numbers are compared with the dense eager run.
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

from tests.law import VOCAB, Batch, Block, Toy, batch, causal_and_padding, sdpa

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


@trap("masked-query")
def additive_window_read_at_padding() -> Case:
    """A padded query that is read sees nothing inside its window: dense averages, a tree gives zero."""

    def make(ids: Tensor, mask: Tensor) -> Tensor:
        q, k = at(ids)
        seen = ((k <= q) & (q - k < 2))[None, None] & pad_k(mask)
        return torch.where(seen, 0.0, -1e9).double()

    b = batch(length=12, pad="right")
    b.mask[2, 4:] = 0
    return Case(Toy(mask=make, tail=lambda x, *_: x.sum(1)), (b.ids, b.mask), {})


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
