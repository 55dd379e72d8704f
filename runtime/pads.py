"""Leaf pads: masked grid positions that see their kept predecessors and that nobody sees.

Legend: R stretches of the grid with one leaf each, P leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from treecompile.runtime.grid import Grid
from treecompile.runtime.segments import Segments, attach_pads
from treecompile.runtime.stretches import Array, Stretches
from treecompile.runtime.trajectories import Pads

__all__ = ["NO_LEAVES", "Leaves", "add_pads"]


@dataclass(frozen=True)
class Leaves:
    """Where the leaves are.

    where: R stretches of grid positions. leaf [R]: the leaf of each.
    token, first, column [P]: packed token, smallest grid position and column of each leaf.
    """

    where: Stretches
    leaf: Array
    token: Array
    first: Array
    column: Array

    def write(self, flat: Array) -> None:
        """Set the packed token of every pad position."""
        values = self.token[self.leaf].astype(flat.dtype)
        self.where.put(flat, np.repeat(values, self.where.length))

    def multiplicity(self) -> Array:
        """[P] grid positions per leaf."""
        count = np.zeros(len(self.token), np.int64)
        np.add.at(count, self.leaf, self.where.length)
        return count


_NONE = np.zeros(0, np.int64)
NO_LEAVES = Leaves(Stretches(_NONE, _NONE), _NONE, _NONE, _NONE, _NONE)


def add_pads(
    grid: Grid,
    pads: Pads,
    table: Segments,
    last: Array,
    column_key: str | None,
    packed: Callable[[Array], Array],
) -> tuple[Segments, Array, Leaves]:
    """Merge the pads with equal (token above, keys) into leaves and attach these.

    Args:
        last: [I] the packed tokens at which trajectories end.
        column_key: None, or "step" or "absolute": the pad's column belongs to its key.
        packed: flat grid positions (-1 for none) -> packed tokens before the pads are added.

    Returns:
        the new segments, the new ``last``, and the leaves.

    Notes:
        O(M) for M pad positions, and a sort of those that differ from the one before them.
    """
    where, run = _stretches_of_one_key(grid, pads, column_key is not None)
    above = packed(pads.before[run])
    row, column = np.divmod(where.start, grid.length)
    if column_key != "absolute":
        column = column - pads.origin[run]
    classes = [key[row, where.start % grid.length] for key in grid.keys]
    classes += [above] if column_key is None else [column, above]
    order = np.lexsort(classes)
    fresh = np.zeros(len(order), np.bool_)
    fresh[:1] = True
    for value in classes:
        fresh[1:] |= value[order][1:] != value[order][:-1]
    leaf = np.empty(len(order), np.int64)
    leaf[order] = np.cumsum(fresh) - 1
    chosen = order[fresh]  # lexsort is stable: the smallest position speaks for the leaf
    first, top = where.start[chosen], above[chosen]
    depth = np.zeros(len(top), np.int64)
    below = top >= 0
    segment = np.searchsorted(table.start, top[below], side="right") - 1
    depth[below] = table.depth[segment] + top[below] - table.start[segment] + 1
    table, last, token = attach_pads(table, last, top, depth, first)
    return table, last, Leaves(where, leaf, token, first, column[chosen])


def _stretches_of_one_key(grid: Grid, pads: Pads, every: bool) -> tuple[Stretches, Array]:
    """Cut the stretches where a key changes (everywhere, if ``every``); also the old stretch of each."""
    if every:
        start = pads.where.index()
        return Stretches(start, np.ones_like(start)), np.repeat(
            np.arange(len(pads.before)), pads.where.length
        )
    cuts = np.zeros(pads.where.total, np.bool_)
    cuts[pads.where.offset] = True
    for key in grid.keys:
        values = pads.where.take(np.ascontiguousarray(key).reshape(-1))
        cuts[1:] |= values[1:] != values[:-1]
    begin = np.flatnonzero(cuts)
    length = np.diff(np.r_[begin, pads.where.total])
    return pads.where.slices(begin, length)[0], _stretch_of(pads.where, begin)


def _stretch_of(where: Stretches, begin: Array) -> Array:
    stretch: Array = np.searchsorted(where.offset, begin, side="right") - 1
    return stretch
