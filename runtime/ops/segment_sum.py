"""Segment sums over a CSR of grid positions: the adjoints of `expand` and `gather_expand`."""

from __future__ import annotations

import torch
from torch import Tensor

from treecompile.runtime.ops.attention_math import accumulation_dtype


def _owner_rows(offsets: Tensor, total: int) -> Tensor:
    return torch.repeat_interleave(offsets.diff(), output_size=total)


def segment_sum(grad: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    dtype = accumulation_dtype(grad.dtype)
    out = torch.zeros((offsets.shape[0] - 1, *grad.shape[1:]), dtype=dtype, device=grad.device)
    if positions.shape[0] and out.numel():
        out.index_add_(0, _owner_rows(offsets, positions.shape[0]), grad.index_select(0, positions).to(dtype))
    return out.to(grad.dtype)


def label_sum(
    grad: Tensor, row_index: Tensor, index: Tensor, offsets: Tensor, positions: Tensor, columns: int
) -> Tensor:
    dtype = accumulation_dtype(grad.dtype)
    out = torch.zeros(((offsets.shape[0] - 1) * columns,), dtype=dtype, device=grad.device)
    if positions.shape[0] and out.numel():
        cell = row_index[positions] * columns + index[positions]
        out.index_add_(0, cell, grad[positions].to(dtype))
    return out.view(-1, columns).to(grad.dtype)
