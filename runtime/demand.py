"""Demand on the grid: boolean helpers that the keys graph calls to find which padded positions are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["everywhere", "nonzero_in", "to_grid"]


def _shape(ids: Tensor, steps: tuple[tuple[Any, ...], ...]) -> tuple[Tensor, int, int]:
    """Flat grid positions of a region and its [batch, length]."""
    batch, length = ids.shape[:-1].numel(), ids.shape[-1]
    grid = torch.arange(batch * length, device=ids.device).reshape(batch, length)
    for kind, *bounds in steps:
        grid = grid[:, slice(*bounds)] if kind == "slice" else grid[bounds[0].reshape(grid.shape)].reshape(1, -1)
    return grid, grid.shape[0], grid.shape[1]


def nonzero_in(value: Tensor, invert: bool, ids: Tensor, *steps: tuple[Any, ...]) -> Tensor:
    """Where a factor is not zero, over a region: bool [batch, length].

    A factor with features counts if any of them is not zero; one whose shape says nothing about the region counts
    everywhere, which is the safe side.
    """
    _, batch, length = _shape(ids, steps)
    bit = (value == 0) if invert else (value != 0)
    if bit.numel() == batch * length:
        return bit.reshape(batch, length)
    if batch * length and bit.numel() % (batch * length) == 0:
        return bit.reshape(batch, length, -1).any(-1)
    if bit.dim() <= 2 and all(a in (1, b) for a, b in zip(reversed(bit.shape), (length, batch), strict=False)):
        return bit.expand(batch, length)
    return torch.ones(batch, length, dtype=torch.bool, device=ids.device)


def everywhere(ids: Tensor, *steps: tuple[Any, ...]) -> Tensor:
    """All positions of a region."""
    _, batch, length = _shape(ids, steps)
    return torch.ones(batch, length, dtype=torch.bool, device=ids.device)


def to_grid(demand: Tensor, ids: Tensor, *steps: tuple[Any, ...]) -> Tensor:
    """Demand over a region as demand over the whole grid: bool [B, T]."""
    grid, _, _ = _shape(ids, steps)
    out = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
    out[grid.reshape(-1)] = demand.reshape(-1)
    return out.reshape(ids.shape[:-1].numel(), ids.shape[-1])
