"""Triton kernels for the adjoints of `expand` and `gather_expand`: one program per packed row, no atomics.

Each program reads the grid positions of its row in order, so results repeat bit for bit. Sums are fp32 (fp64
for fp64 inputs), addresses 64 bits wide.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["label_sum", "segment_sum"]

# Rows that one step loads at once, for memory parallelism; labels are compared in squares of LABELS.
ROWS = 8
LABELS = 32


@triton.jit
def _segment_sum_kernel(
    grad,
    offsets,
    positions,
    out,
    features,
    accumulator: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    total = tl.zeros([BLOCK], dtype=accumulator)
    while at < end:
        step = at + tl.arange(0, ROWS)
        position = tl.load(positions + step, mask=step < end, other=0)
        mask = (step < end)[:, None] & (feature < features)[None, :]
        values = tl.load(grad + position[:, None] * features + feature[None, :], mask=mask, other=0.0)
        total += tl.sum(values.to(accumulator), axis=0)
        at += ROWS
    tl.store(out + row * features + feature, total.to(out.dtype.element_ty), mask=feature < features)


@triton.jit
def _label_sum_kernel(
    grad, index, offsets, positions, out, columns, accumulator: tl.constexpr, LABELS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    at = begin
    while at < end:
        mine = at + tl.arange(0, LABELS)
        label = tl.load(
            index + tl.load(positions + mine, mask=mine < end, other=0), mask=mine < end, other=-1
        )
        total = tl.zeros([LABELS], dtype=accumulator)
        other = begin
        while other < end:
            theirs = other + tl.arange(0, LABELS)
            position = tl.load(positions + theirs, mask=theirs < end, other=0)
            their_label = tl.load(index + position, mask=theirs < end, other=-2)
            value = tl.load(grad + position, mask=theirs < end, other=0.0).to(accumulator)
            equal = label[:, None] == their_label[None, :]
            total += tl.sum(tl.where(equal, value[None, :], 0.0), axis=1)
            other += LABELS
        # Positions with one label store the same bits: they sum the same values in the same order.
        tl.store(out + row * columns + label, total.to(out.dtype.element_ty), mask=mine < end)
        at += LABELS


def segment_sum(grad: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    """Sum the rows of `grad` that belong to each packed row.

    Args:
        grad: [M, F] contiguous, float.
        offsets: int64 [H + 1], CSR offsets into `positions`.
        positions: int64 [K], grid positions by packed row, ascending.

    Returns:
        [H, F] in grad's dtype; zeros where a row has no position.

    Example:
        >>> segment_sum(torch.ones(3, 2).cuda(), offsets, positions)            # doctest: +SKIP
    """
    rows, features = offsets.shape[0] - 1, grad.shape[1]
    out = torch.empty((rows, features), dtype=grad.dtype, device=grad.device)
    block = min(1024, triton.next_power_of_2(max(features, 16)))
    grid = (rows, triton.cdiv(features, block))
    _segment_sum_kernel[grid](
        grad, offsets, positions, out, features, accumulator=_accumulator(grad), ROWS=ROWS, BLOCK=block
    )
    return out


def label_sum(grad: Tensor, index: Tensor, offsets: Tensor, positions: Tensor, columns: int) -> Tensor:
    """Add each grid position's value to one column of its packed row; equal labels of one row add up.

    Args:
        grad: [M] contiguous, float.
        index: int64 [M], column of each position, read at kept positions only.
        offsets: int64 [H + 1], CSR offsets into `positions`.
        positions: int64 [K], grid positions by packed row, ascending.
        columns: V.

    Returns:
        [H, V] in grad's dtype.

    Example:
        >>> label_sum(torch.ones(3).cuda(), index, offsets, positions, 8)       # doctest: +SKIP

    Notes:
        A row of multiplicity m costs m^2 comparisons in squares, no sort and no host synchronisation.
    """
    rows = offsets.shape[0] - 1
    out = torch.zeros((rows, columns), dtype=grad.dtype, device=grad.device)
    _label_sum_kernel[(rows,)](
        grad, index, offsets, positions, out, columns, accumulator=_accumulator(grad), LABELS=LABELS
    )
    return out


def _accumulator(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
