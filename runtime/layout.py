"""Layouts: a region of the grid and its map to the packed rows that it uses.

Legend: B rows, T columns, N packed tokens; M region positions, H distinct packed rows used, K region
positions that are not dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treecompile.runtime.pads import Leaves
from treecompile.runtime.paths import Ranges
from treecompile.runtime.stretches import Array, fragmented

__all__ = ["Layout", "any_layout", "column_layout", "columns_of"]


@dataclass(frozen=True, eq=False)
class Layout:
    """The map of a region to packed rows, both ways; all arrays int64.

    rows: [H] packed tokens used, ascending.
    row_index: [M] index into rows, -1 where the position is dropped.
    offsets: [H + 1], positions: [K]: CSR of the expand adjoint. The region positions that map to local row h
        are ``positions[offsets[h] : offsets[h + 1]]``, ascending.
    """

    rows: Array
    row_index: Array
    offsets: Array
    positions: Array


def any_layout(packed: Array, n: int) -> Layout:
    """Layout of a region whose positions map to packed tokens [M] (-1 dropped). O(n + M log M)."""
    kept = packed >= 0
    used = np.zeros(n, np.bool_)
    used[packed[kept]] = True
    rows, row_index = np.flatnonzero(used), np.full(len(packed), -1, np.int64)
    row_index[kept] = (np.cumsum(used) - 1)[packed[kept]]
    offsets = _offsets(np.bincount(row_index[kept], minlength=len(rows)))
    # Dropped positions (-1) sort first and fall away.
    positions = np.argsort(row_index, kind="stable")[len(packed) - int(kept.sum()) :]
    return Layout(rows, row_index, offsets, positions)


def _offsets(counts: Array) -> Array:
    offsets: Array = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def columns_of(region: Array | None, batch: int, length: int) -> tuple[int, int] | None:
    """(first, last + 1) if the region is a range of columns in all rows, row-major; else None. O(M)."""
    if region is None:
        return 0, length
    if batch == 0 or len(region) == 0 or len(region) % batch:
        return None
    first, width = int(region[0]), len(region) // batch
    if first + width > length or np.any(region[:width] != np.arange(first, first + width)):
        return None
    shifted = region.reshape(batch, width) - length * np.arange(batch).reshape(-1, 1)
    return (first, first + width) if bool((shifted == region[:width]).all()) else None


def column_layout(
    ranges: Ranges, leaves: Leaves, n: int, batch: int, length: int, columns: tuple[int, int]
) -> Layout | None:
    """Layout of the columns ``first <= t < end`` of all rows, written range by range. O(n + M), no sort.

    Returns:
        None if the ranges are too short for that to pay.
    """
    first, end = columns
    starts = np.r_[ranges.where.start, leaves.where.start]
    sizes = np.r_[ranges.where.length, leaves.where.length]
    if fragmented(sizes):
        return None
    tokens = np.r_[ranges.token, leaves.token[leaves.leaf]]
    rising = np.arange(len(starts)) < len(ranges.token)  # a pad's positions all map to one token
    row, column = np.divmod(starts, max(length, 1))
    skip = np.maximum(first - column, 0)
    count = np.minimum(column + sizes, end) - column - skip
    some = count > 0
    place = row * (end - first) + column + skip - first
    tokens = tokens + skip * rising
    # Both kinds in order of place, so that the positions of each packed row come out ascending.
    order = np.flatnonzero(some)[np.argsort(place[some], kind="stable")]
    spans = list(
        zip(
            place[order].tolist(),
            tokens[order].tolist(),
            count[order].tolist(),
            rising[order].tolist(),
            strict=True,
        )
    )
    counts = np.zeros(n, np.int32)
    for _, token, size, rises in spans:
        if rises:
            counts[token : token + size] += 1
        else:
            counts[token] += size
    rows = np.flatnonzero(counts)
    local: Array = np.cumsum(counts > 0)
    local -= 1
    offsets = _offsets(counts[rows])
    cursor = np.zeros(n, np.int64)
    cursor[rows] = offsets[:-1]
    row_index = np.full(batch * (end - first), -1, np.int64)
    positions = np.empty(int(offsets[-1]), np.int64)
    ramp = np.arange(end - first)
    for at, token, size, rises in spans:
        if rises:
            row_index[at : at + size] = local[token : token + size]
            positions[cursor[token : token + size]] = ramp[:size] + at
            cursor[token : token + size] += 1
        else:
            row_index[at : at + size] = local[token]
            positions[cursor[token] : cursor[token] + size] = ramp[:size] + at
            cursor[token] += size
    return Layout(rows, row_index, offsets, positions)
