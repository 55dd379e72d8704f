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
        grid = (
            grid[:, slice(*bounds)] if kind == "slice" else grid[bounds[0].reshape(grid.shape)].reshape(1, -1)
        )
    return grid, grid.shape[0], grid.shape[1]


def nonzero_in(
    value: Tensor, invert: bool, batched: bool, along: bool, ids: Tensor, *steps: tuple[Any, ...]
) -> Tensor:
    """Where a factor is not zero (with `invert`: is zero), over a region: bool [batch, length].

    Args:
        value: one entry per row (`batched`) and position (`along`), then features: it counts if any of them does.
    """
    _, batch, length = _shape(ids, steps)
    bit = (value == 0) if invert else (value != 0)
    rows, columns = batch if batched else 1, length if along else 1
    features = bit.numel() // max(rows * columns, 1)
    return bit.reshape(rows, columns, features).any(-1).expand(batch, length)


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
