"""Segment sums over a CSR of grid positions: the adjoints of `expand` and `gather_expand`.

Sums are kept in fp32 (fp64 for fp64) and taken in a fixed order: results repeat bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from treecompile.runtime.ops.attention_math import accumulation_dtype

__all__ = ["label_sum", "segment_sum"]


def segment_sum(grad: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    """Add up the grid positions of each packed row.

    Args:
        grad: [M, ...], float.
        offsets: int64 [H + 1], CSR offsets into `positions`.
        positions: int64 [K], grid positions by packed row, ascending.

    Returns:
        [H, ...] in grad's dtype, contiguous; zeros for a row without positions.

    Example:
        >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]))
        tensor([5., 2.])

    Notes:
        CPU: one pass of `embedding_bag` (each bag summed in order, fp32 inside for bf16 and fp16). CUDA: a
        Triton kernel, `treecompile.runtime.kernels.segment_sum`.
    """
    shape = (offsets.shape[0] - 1, *grad.shape[1:])
    if positions.shape[0] == 0 or math.prod(shape) == 0:
        return grad.new_zeros(shape)
    rows = grad.reshape(grad.shape[0], -1).contiguous()
    if grad.is_cuda:
        from treecompile.runtime.kernels import segment_sum as kernels

        return kernels.segment_sum(rows, offsets, positions).view(shape)
    summed = embedding_bag(positions, rows, offsets, mode="sum", include_last_offset=True)
    return summed.view(shape)


def label_sum(
    grad: Tensor, row_index: Tensor, index: Tensor, offsets: Tensor, positions: Tensor, columns: int
) -> Tensor:
    """Add each kept grid position's value to the column `index` of its packed row.

    Args:
        grad: [M], float.
        row_index: int64 [M], packed row, -1 where dropped.
        index: int64 [M], column, anything where dropped.
        offsets: int64 [H + 1], CSR offsets into `positions`.
        positions: int64 [K], grid positions by packed row, ascending.
        columns: V.

    Returns:
        [H, V] in grad's dtype, contiguous; equal labels of one row add up.

    Example:
        >>> row, label, kept = torch.tensor([0, -1, 0]), torch.tensor([1, 0, 1]), torch.tensor([0, 2])
        >>> label_sum(torch.tensor([1.0, 2.0, 4.0]), row, label, torch.tensor([0, 2]), kept, 3)
        tensor([[0., 5., 0.]])

    Notes:
        CPU: the K cells are sorted (stable), runs of equal cells summed in order: O(K log K), and zeros.
    """
    shape = (offsets.shape[0] - 1, columns)
    if positions.shape[0] == 0 or math.prod(shape) == 0:
        return grad.new_zeros(shape)
    if grad.is_cuda:
        from treecompile.runtime.kernels import segment_sum as kernels

        return kernels.label_sum(grad.contiguous(), index, offsets, positions, columns)
    cell, order = torch.sort(row_index[positions] * columns + index[positions], stable=True)
    cells, run = torch.unique_consecutive(cell, return_inverse=True)
    sums = torch.zeros(cells.shape[0], dtype=accumulation_dtype(grad.dtype))
    sums.index_add_(0, run, grad[positions[order]].to(sums.dtype))
    out = grad.new_zeros((math.prod(shape),))
    return out.index_copy_(0, cells, sums.to(grad.dtype)).view(shape)
