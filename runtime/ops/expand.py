"""Between packed rows and the grid: `expand`, `gather_expand`, `take` and their adjoints.

Suffixes: H packed rows of a layout, M grid positions of its region, K positions that are kept, V columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treecompile.runtime.ops.registry import define
from treecompile.runtime.ops.segment_sum import label_sum, segment_sum

__all__ = ["expand", "expand_backward", "gather_expand", "gather_expand_backward", "take", "take_backward"]


def _expand(x: Tensor, row_index: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    m = row_index.shape[0]
    if x.shape[0] == 0 or m == 0:
        return x.new_zeros((m, *x.shape[1:]))
    if positions.shape[0] == m:
        return x.index_select(0, row_index)
    out = x.index_select(0, row_index.clamp(min=0))
    return out.masked_fill_((row_index < 0).view(-1, *(1,) * (x.dim() - 1)), 0)


def _expand_fake(x: Tensor, row_index: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    return x.new_empty((row_index.shape[0], *x.shape[1:]))


def _expand_backward(grad: Tensor, row_index: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    return segment_sum(grad, offsets, positions)


def _expand_backward_fake(grad: Tensor, row_index: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    return grad.new_empty((offsets.shape[0] - 1, *grad.shape[1:]))


expand = define(
    "expand(Tensor x, Tensor row_index, Tensor offsets, Tensor positions) -> Tensor", _expand, _expand_fake
)
expand_backward = define(
    "expand_backward(Tensor grad, Tensor row_index, Tensor offsets, Tensor positions) -> Tensor",
    _expand_backward,
    _expand_backward_fake,
)


def _save_layout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


torch.library.register_autograd(
    "treecompile::expand",
    lambda ctx, grad: (expand_backward(grad, *ctx.saved_tensors), None, None, None),
    setup_context=_save_layout,
)
torch.library.register_autograd(
    "treecompile::expand_backward",
    lambda ctx, grad: (expand(grad, *ctx.saved_tensors), None, None, None),
    setup_context=_save_layout,
)


def _gather_expand(x: Tensor, row_index: Tensor, index: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    m = row_index.shape[0]
    if x.numel() == 0 or m == 0:
        return x.new_zeros((m,))
    kept = row_index >= 0
    out = x[row_index.clamp(min=0), torch.where(kept, index, 0)]
    return out if positions.shape[0] == m else out.masked_fill_(~kept, 0)


def _gather_expand_fake(
    x: Tensor, row_index: Tensor, index: Tensor, offsets: Tensor, positions: Tensor
) -> Tensor:
    return x.new_empty((row_index.shape[0],))


def _gather_expand_backward(
    grad: Tensor, row_index: Tensor, index: Tensor, offsets: Tensor, positions: Tensor, columns: int
) -> Tensor:
    return label_sum(grad, row_index, index, offsets, positions, columns)


def _gather_expand_backward_fake(
    grad: Tensor, row_index: Tensor, index: Tensor, offsets: Tensor, positions: Tensor, columns: int
) -> Tensor:
    return grad.new_empty((offsets.shape[0] - 1, columns))


gather_expand = define(
    "gather_expand(Tensor x, Tensor row_index, Tensor index, Tensor offsets, Tensor positions) -> Tensor",
    _gather_expand,
    _gather_expand_fake,
)
gather_expand_backward = define(
    "gather_expand_backward(Tensor grad, Tensor row_index, Tensor index, Tensor offsets, Tensor positions, "
    "SymInt columns) -> Tensor",
    _gather_expand_backward,
    _gather_expand_backward_fake,
)


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.columns = inputs[0].shape[1]


torch.library.register_autograd(
    "treecompile::gather_expand",
    lambda ctx, grad: (gather_expand_backward(grad, *ctx.saved_tensors, ctx.columns), *(None,) * 4),
    setup_context=_save_gather,
)
torch.library.register_autograd(
    "treecompile::gather_expand_backward",
    lambda ctx, grad: (gather_expand(grad, *ctx.saved_tensors), *(None,) * 5),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:5]),
)


def _take(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    return x.index_select(dim, rows).contiguous()


def _take_shape(x: Tensor, dim: int, size: Any) -> tuple[Any, ...]:
    dim = dim % x.dim()
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _take_fake(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    return x.new_empty(_take_shape(x, dim, rows.shape[0]))


def _take_backward(grad: Tensor, rows: Tensor, dim: int, size: int) -> Tensor:
    return grad.new_zeros(_take_shape(grad, dim, size)).index_copy_(dim, rows, grad)


def _take_backward_fake(grad: Tensor, rows: Tensor, dim: int, size: int) -> Tensor:
    return grad.new_empty(_take_shape(grad, dim, size))


take = define("take(Tensor x, Tensor rows, int dim) -> Tensor", _take, _take_fake)
take_backward = define(
    "take_backward(Tensor grad, Tensor rows, int dim, SymInt size) -> Tensor",
    _take_backward,
    _take_backward_fake,
)


def _save_take(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, rows, dim = inputs
    ctx.save_for_backward(rows)
    ctx.dim, ctx.size = dim, x.shape[dim]


def _save_take_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.dim = inputs[2]


torch.library.register_autograd(
    "treecompile::take",
    lambda ctx, grad: (take_backward(grad, ctx.saved_tensors[0], ctx.dim, ctx.size), None, None),
    setup_context=_save_take,
)
torch.library.register_autograd(
    "treecompile::take_backward",
    lambda ctx, grad: (take(grad, ctx.saved_tensors[0], ctx.dim), None, None, None),
    setup_context=_save_take_backward,
)
