"""Losses and means over tokens, from packed rows: labels read per position, rows weighted by multiplicity."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["label_index", "nll_from_log_probs", "weighted_reduction"]


def label_index(labels: Tensor, classes: int, ignore_index: int | None) -> Tensor:
    """Labels as columns to read: an ignored one reads column 0, a negative one is out of range.

    Args:
        labels: int64 [M].
        classes: how many columns there are.
        ignore_index: label without a loss, whatever its value; None if there is none.

    Returns:
        int64 [M]; a label that the captured model would have refused is refused here, too.

    Example:
        >>> import torch
        >>> label_index(torch.tensor([3, -100, 99]), 5, 99)
        tensor([3, 5, 0])
    """
    index = torch.where(labels < 0, classes, labels)
    return index if ignore_index is None else torch.where(labels == ignore_index, 0, index)


def weighted_reduction(
    x: Tensor, weight: Tensor, at: int, dims: list[int], keepdim: bool, mean: bool, dtype: torch.dtype | None
) -> Tensor:
    """Sum or mean over tokens, where each packed row counts as often as it occurs on the grid.

    Args:
        x: values with packed rows along dim `at`.
        weight: int64 [rows], how many grid positions a row stands for.
        at: dim of the rows.
        dims: dims to reduce, `at` among them.
        keepdim: keep them with size one.
        mean: divide by the count.
        dtype: of the result, as for ``torch.sum``.

    Returns:
        what ``x.sum(dims)`` or ``x.mean(dims)`` gives over the whole grid. Counts stay exact: integers are counted
        in int64, half precision is summed in float32.

    Example:
        >>> import torch
        >>> weighted_reduction(torch.tensor([1.0, 3.0]), torch.tensor([3, 1]), 0, [0], False, True, None)
        tensor(1.5000)
    """
    like = (torch.mean if mean else torch.sum)(x, dims, keepdim, dtype=dtype)
    wide = like.dtype if like.dtype not in (torch.float16, torch.bfloat16) else torch.float32
    shape = [-1 if i == at else 1 for i in range(x.dim())]
    total = (x.to(wide) * weight.to(wide).reshape(shape)).sum(dims, keepdim)
    if mean:
        others = [x.shape[i] for i in dims if i != at]
        count = weight.sum().to(wide)
        for size in others:
            count = count * size
        total = total / count
    return total.to(like.dtype)


def nll_from_log_probs(log_probs: Tensor, target: Tensor, reduction: int, ignore_index: int) -> Tensor:
    """Negative log-likelihood from log-probabilities that were already picked at the labels.

    Args:
        log_probs: [M] log-probability of each label, zero where the position was dropped.
        target: [M] labels; `ignore_index` marks positions without a loss.
        reduction: 0 none, 1 mean over the labels that count, 2 sum.
        ignore_index: label without a loss.

    Returns:
        [M] or a scalar, as ``torch.nn.functional.cross_entropy`` returns.

    Example:
        >>> import torch
        >>> nll_from_log_probs(torch.tensor([-1.0, -3.0]), torch.tensor([4, -100]), 1, -100)
        tensor(1.)
    """
    kept = target != ignore_index
    loss = torch.where(kept, -log_probs, torch.zeros_like(log_probs))
    if reduction == 0:
        return loss
    return loss.sum() / kept.sum() if reduction == 1 else loss.sum()
