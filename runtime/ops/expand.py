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
    """Copy packed rows to the grid positions of a region; zeros where a position is dropped.

    Args:
        x: [H, ...], any dtype; gradients for floats.
        row_index: int64 [M], row of each grid position, -1 where dropped.
        offsets: int64 [H + 1], CSR offsets into `positions`.
        positions: int64 [K], kept grid positions by row, ascending.

    Returns:
        [M, ...] contiguous.

    Example:
        >>> row, kept = torch.tensor([0, 1, 0, -1]), torch.tensor([0, 2, 1])
        >>> offsets = torch.tensor([0, 2, 3])
        >>> expand(torch.tensor([5.0, 7.0]), row, offsets, kept)
        tensor([5., 7., 5., 0.])

    Notes:
        The adjoint, `expand_backward`, adds up the branches in fp32 (fp64) in the order of `positions`.
    """
    m = row_index.shape[0]
    if x.shape[0] == 0 or m == 0:
        return x.new_zeros((m, *x.shape[1:]))
    if positions.shape[0] == m:
        return x.index_select(0, row_index)
    out = x.index_select(0, row_index.clamp(min=0))
    dropped = row_index < 0
    if x.is_cuda:
        # Counting the dropped rows would wait for the device.
        return out.masked_fill_(dropped.view(-1, *(1,) * (x.dim() - 1)), 0)
    return out.index_fill_(0, dropped.nonzero().squeeze(1), 0)


def _expand_fake(x: Tensor, row_index: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    return x.new_empty((row_index.shape[0], *x.shape[1:]))


def _expand_backward(grad: Tensor, row_index: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
    """Add up the grid positions of each packed row: the adjoint of `expand`, arguments as there.

    Args:
        grad: [M, ...], float.
        row_index: int64 [M].
        offsets: int64 [H + 1].
        positions: int64 [K].

    Returns:
        [H, ...] in grad's dtype; see `treecompile.runtime.ops.segment_sum.segment_sum`.

    Example:
        >>> row, kept = torch.tensor([0, 1, 0, -1]), torch.tensor([0, 2, 1])
        >>> offsets = torch.tensor([0, 2, 3])
        >>> expand_backward(torch.tensor([1.0, 2.0, 4.0, 8.0]), row, offsets, kept)
        tensor([5., 2.])
    """
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
    """Pick one column of a packed row per grid position: ``x[row_index[m], index[m]]``, 0 where dropped.

    Args:
        x: [H, V], e.g. log-probabilities of the packed rows.
        row_index: int64 [M], row of each grid position, -1 where dropped.
        index: int64 [M], column (a label); anything where dropped.
        offsets: int64 [H + 1], CSR offsets into `positions`.
        positions: int64 [K], kept grid positions by row, ascending.

    Returns:
        [M]: no [M, V] tensor appears.

    Example:
        >>> row, label = torch.tensor([0, 0, -1]), torch.tensor([2, 1, -100])
        >>> offsets, kept = torch.tensor([0, 2]), torch.tensor([0, 1])
        >>> gather_expand(torch.tensor([[1.0, 2.0, 3.0]]), row, label, offsets, kept)
        tensor([3., 2., 0.])

    Notes:
        In the adjoint equal labels of one row add up, in fp32 (fp64) and in fixed order.
    """
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
    """Add each grid position's value to its packed row and column: the adjoint of `gather_expand`.

    Args:
        grad: [M], float.
        row_index: int64 [M].
        index: int64 [M].
        offsets: int64 [H + 1].
        positions: int64 [K].
        columns: V.

    Returns:
        [H, V] in grad's dtype; see `treecompile.runtime.ops.segment_sum.label_sum`.

    Example:
        >>> row, label = torch.tensor([0, 0, -1]), torch.tensor([2, 2, -100])
        >>> offsets, kept = torch.tensor([0, 2]), torch.tensor([0, 1])
        >>> gather_expand_backward(torch.tensor([1.0, 2.0, 4.0]), row, label, offsets, kept, 3)
        tensor([[0., 0., 3.]])
    """
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
    """Select distinct rows along one dim: `index_select` whose adjoint writes each row once.

    Args:
        x: any shape.
        rows: int64 [H], distinct.
        dim: dim of x to select along.

    Returns:
        x with dim `dim` of size H, contiguous.

    Example:
        >>> take(torch.tensor([[1, 2, 3]]), torch.tensor([2, 0]), 1)
        tensor([[3, 1]])
    """
    return x.index_select(dim, rows).contiguous()


def _take_shape(x: Tensor, dim: int, size: Any) -> tuple[Any, ...]:
    dim = dim % x.dim()
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _take_fake(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    return x.new_empty(_take_shape(x, dim, rows.shape[0]))


def _take_backward(grad: Tensor, rows: Tensor, dim: int, size: int) -> Tensor:
    """Write rows back to where `take` read them, zeros elsewhere.

    Args:
        grad: any shape, dim `dim` of size H.
        rows: int64 [H], distinct.
        dim: dim of grad.
        size: size of that dim in the result.

    Returns:
        grad with dim `dim` of size `size`.

    Example:
        >>> take_backward(torch.tensor([[3.0, 1.0]]), torch.tensor([2, 0]), 1, 3)
        tensor([[1., 0., 3.]])
    """
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
