"""What remains of a loss once the log-probability of every label has been read from packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["nll_from_log_probs"]


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
