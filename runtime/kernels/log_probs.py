"""Triton kernels of `selective_log_probs`: statistics of rows of logits, what is picked of them, and gradients of
logits, in one pass each.

Sums run in fp32 (fp64 for fp64), in a fixed order: results repeat bit for bit. Addresses are 64 bits wide.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["logit_grads", "pick", "row_statistics"]

# Columns of one step, and positions of one row whose labels are compared in squares.
BLOCK = 4096
LABELS = 64


@triton.jit
def _row_statistics_kernel(
    x,
    top,
    total,
    spread,
    columns,
    stride,
    ENTROPY: tl.constexpr,
    accumulator: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    infinite = float("inf")
    # Each lane keeps the maximum m of its columns, the sum of exp(x - m) and that of exp(x - m) (x - m).
    high = tl.full([BLOCK], -infinite, dtype=accumulator)
    mass = tl.zeros([BLOCK], dtype=accumulator)
    slope = tl.zeros([BLOCK], dtype=accumulator)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + column, mask=column < columns, other=-infinite).to(accumulator)
        before = tl.where(tl.abs(high) == infinite, 0.0, high)
        high = tl.maximum(high, value)
        now = tl.where(tl.abs(high) == infinite, 0.0, high)
        grown = tl.exp(before - now)
        shifted = value - now
        p = tl.exp(shifted)
        if ENTROPY:
            slope = (slope + mass * (before - now)) * grown + tl.where(p > 0, p * shifted, 0.0)
        # Before a lane's first finite value its mass is zero, whatever it grows by.
        mass = tl.where(mass > 0, mass * grown, 0.0) + p
    best = tl.max(high, axis=0)
    best = tl.where(tl.abs(best) == infinite, 0.0, best)
    now = tl.where(tl.abs(high) == infinite, 0.0, high)
    lift = tl.where(mass > 0, tl.exp(now - best), 0.0)
    sums = tl.sum(mass * lift, axis=0)
    logs = tl.log(sums)
    tl.store(top + row, best)
    tl.store(total + row, logs)
    if ENTROPY:
        # A lane without a value has no mass, and no part in the sum.
        part = tl.where(mass > 0, (slope + mass * (now - best)) * lift, 0.0)
        tl.store(spread + row, logs - tl.sum(part, axis=0) / sums)


@triton.jit
def _pick_kernel(
    x, top, total, labels, offsets, positions, picked, columns, stride,
    NORMALIZED: tl.constexpr, accumulator: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    high = tl.load(top + row)
    rest = tl.load(total + row)
    while at < end:
        mine = at + tl.arange(0, LABELS)
        position = tl.load(positions + mine, mask=mine < end, other=0)
        label = tl.load(labels + position, mask=mine < end, other=0)
        inside = (label >= 0) & (label < columns)
        value = tl.load(x + row * stride + label, mask=inside, other=float("nan")).to(accumulator)
        if NORMALIZED:
            value = (value - high) - rest
        tl.store(picked + position, value.to(picked.dtype.element_ty), mask=mine < end)
        at += LABELS


@triton.jit
def _entry(x, lse, share, weight, spread, ENTROPY: tl.constexpr):
    """The gradient of logits but for what is picked of them."""
    logs = x - lse
    slope = share
    if ENTROPY:
        slope = share - weight * (logs + spread)
    return slope * tl.exp(logs)


@triton.jit
def _logit_grads_kernel(
    x, lse, share, weight, spread, out, columns, stride, SHARE: tl.constexpr, ENTROPY: tl.constexpr,
    accumulator: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(accumulator)
    s = tl.load(share + row) if SHARE else 0.0
    w = tl.load(weight + row) if ENTROPY else 0.0
    e = tl.load(spread + row) if ENTROPY else 0.0
    value = _entry(value, tl.load(lse + row), s, w, e, ENTROPY)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _picked_grads_kernel(
    x, lse, share, weight, spread, grad, labels, offsets, positions, out, left, columns, stride,
    DENSE: tl.constexpr, SHARE: tl.constexpr, ENTROPY: tl.constexpr, accumulator: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    s = tl.load(share + row) if SHARE else 0.0
    w = tl.load(weight + row) if ENTROPY else 0.0
    e = tl.load(spread + row) if ENTROPY else 0.0
    at = begin
    while at < end:
        mine = at + tl.arange(0, LABELS)
        label = tl.load(
            labels + tl.load(positions + mine, mask=mine < end, other=0), mask=mine < end, other=-1
        )
        total = tl.zeros([LABELS], dtype=accumulator)
        other = begin
        while other < end:
            theirs = other + tl.arange(0, LABELS)
            position = tl.load(positions + theirs, mask=theirs < end, other=0)
            their_label = tl.load(labels + position, mask=theirs < end, other=-2)
            value = tl.load(grad + position, mask=theirs < end, other=0.0).to(accumulator)
            equal = label[:, None] == their_label[None, :]
            total += tl.sum(tl.where(equal, value[None, :], 0.0), axis=1)
            other += LABELS
        column = label - left
        inside = (mine < end) & (column >= 0) & (column < columns)
        if DENSE:
            value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(accumulator)
            total += _entry(value, tl.load(lse + row), s, w, e, ENTROPY)
        # Positions with one label store the same bits: they sum the same values in the same order.
        tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)
        at += LABELS


def row_statistics(x: Tensor, entropy: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp of rows, in two parts, and their entropies.

    Args:
        x: [R, V] float, columns adjacent.
        entropy: compute it.
        dtype: of the results and the sums, float32 or float64.

    Returns:
        top [R], the largest entry, 0 where that is infinite; total [R], with top + total the log-sum-exp; entropy of
        the softmax [R], or [0].

    Example:
        >>> row_statistics(torch.zeros(1, 2).cuda(), True, torch.float32)      # doctest: +SKIP
    """
    rows, columns = x.shape
    top, total = (torch.empty(rows, dtype=dtype, device=x.device) for _ in range(2))
    spread = torch.empty(rows if entropy else 0, dtype=dtype, device=x.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(max(columns, 16)))
        _row_statistics_kernel[(rows,)](
            x, top, total, spread, columns, x.stride(0), entropy, _accumulator(dtype), block, num_warps=8
        )
    return top, total, spread


def pick(
    x: Tensor,
    top: Tensor,
    total: Tensor,
    picks: tuple[Tensor, Tensor, Tensor],
    normalized: bool,
    picked: Tensor,
) -> None:
    """Write the entries of rows that grid positions pick, one each, or their log-probabilities.

    Args:
        x: [R, V], columns adjacent.
        top, total: [R], of `row_statistics`.
        picks: labels int64 [M], CSR offsets int64 [R + 1] of these rows and positions int64 [K].
        normalized: write log-probabilities.
        picked: [M], written at the positions of these rows; not a number for a label that there is not.

    Example:
        >>> pick(x, top, total, (labels, offsets, positions), True, picked)     # doctest: +SKIP
    """
    if x.shape[0] and picks[2].shape[0]:
        _pick_kernel[(x.shape[0],)](
            x,
            top,
            total,
            *picks,
            picked,
            x.shape[1],
            x.stride(0),
            normalized,
            _accumulator(top.dtype),
            LABELS,
        )


def logit_grads(
    x: Tensor,
    lse: Tensor,
    share: Tensor | None,
    weight: Tensor | None,
    spread: Tensor,
    picks: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    left: int,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of a tile of logits: that of the log-sum-exp, of the entropy and of what is picked.

    Args:
        x: [R, C] a tile of logits, columns adjacent.
        lse: [R] log-sum-exp of the whole rows, float32 or float64: what sums are kept in.
        share: [R] gradient of the log-sum-exp, or None.
        weight: [R] gradient of the entropy, or None.
        spread: [R] entropies, read with a weight only.
        picks: grad [M], labels int64 [M], CSR offsets int64 [R + 1] of these rows and positions int64 [K]; or None.
        left: the column of the whole that the tile begins with.
        dtype: of the result.

    Returns:
        [R, C], contiguous.

    Example:
        >>> logit_grads(x, lse, share, None, lse[:0], None, 0, torch.bfloat16)  # doctest: +SKIP

    Notes:
        A row of multiplicity m costs m^2 comparisons of labels, in squares.
    """
    rows, columns = x.shape
    dense = share is not None or weight is not None
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    if not dense:
        out.zero_()
    if not rows or not columns:
        return out
    given = (x, lse, *(lse if value is None else value for value in (share, weight)), spread)
    flags = {
        "SHARE": share is not None,
        "ENTROPY": weight is not None,
        "accumulator": _accumulator(lse.dtype),
    }
    if dense:
        block = min(BLOCK, triton.next_power_of_2(max(columns, 16)))
        grid = (rows, triton.cdiv(columns, block))
        _logit_grads_kernel[grid](*given, out, columns, x.stride(0), **flags, BLOCK=block, num_warps=8)
    if picks is not None and picks[3].shape[0]:
        _picked_grads_kernel[(rows,)](
            *given, *picks, out, left, columns, x.stride(0), DENSE=dense, **flags, LABELS=LABELS
        )
    return out


def _accumulator(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32
