"""From the caller's grid to trajectories: the token sequences that a prefix tree merges.

Legend: B rows, T columns, G = B*T grid positions (flat position = b*T + t), K key columns, I trajectories.

A trajectory is the subsequence of one row's kept positions with one document value. Nearly always it is one
contiguous stretch of the grid, and then nothing is copied: a trajectory is (start, length) in the flat key
arrays. Holes in the mask, or a document that comes back (A B A), need the compact form: ``source`` says which
stretches of the grid follow each other, trajectory by trajectory, and (start, length) count along these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treecompile.runtime.grid import Grid
from treecompile.runtime.stretches import Array, Stretches

__all__ = ["Pads", "Trajectories", "cut"]


@dataclass(frozen=True)
class Trajectories:
    """I non-empty trajectories in ascending order of their start.

    start, length [I]: slice in the grid (``source`` None) or in ``source``.
    first_column [I]: grid column of the first kept token.
    row [I]: the grid row.
    """

    start: Array
    length: Array
    first_column: Array
    row: Array
    source: Stretches | None


@dataclass(frozen=True)
class Pads:
    """Masked positions that are packed as leaves, in R stretches of the grid, ascending.

    before [R]: flat grid position of the last kept token before them in their trajectory, -1 if none.
    origin [R]: first kept column of the trajectory (0 if nothing is kept).
    """

    where: Stretches
    before: Array
    origin: Array


def cut(grid: Grid) -> tuple[Trajectories, Pads | None]:
    """Cut a grid into trajectories and leaf pads.

    Complexity: O(B) without mask and documents; otherwise one or two passes over the masks, and one copy of
    the kept positions if a trajectory is not contiguous.
    """
    want_pads = grid.exact is not None and grid.visible is not None
    if not want_pads and grid.documents is None:
        simple = _cut_by_row(grid)
        if simple is not None:
            return simple, None
    return _cut_by_runs(grid, want_pads)


def _cut_by_row(grid: Grid) -> Trajectories | None:
    """One contiguous stretch per row, or None if a row has holes."""
    batch, length = grid.batch, grid.length
    rows = np.arange(batch, dtype=np.int64)
    if grid.visible is None or length == 0:
        count = np.full(batch, length, np.int64)
        first = np.zeros(batch, np.int64)
    else:
        count = np.array([np.count_nonzero(row) for row in grid.visible], np.int64)
        first = np.array([row.argmax() for row in grid.visible], np.int64)
        last = np.array([length - 1 - row[::-1].argmax() for row in grid.visible], np.int64)
        if np.any((count != last - first + 1) & (count > 0)):
            return None
    some = count > 0
    return Trajectories((rows * length + first)[some], count[some], first[some], rows[some], None)


@dataclass(frozen=True)
class _Runs:
    """Maximal stretches with one (row, document, visible, exact); code [R] numbers the (row, document)."""

    start: Array
    length: Array
    visible: Array
    exact: Array
    code: Array


def _cut_by_runs(grid: Grid, want_pads: bool) -> tuple[Trajectories, Pads | None]:
    runs = _runs(grid)
    shown = runs.visible
    order = np.flatnonzero(shown)[np.argsort(runs.code[shown], kind="stable")]
    code, start, size = runs.code[order], runs.start[order], runs.length[order]
    heads = np.flatnonzero(np.r_[True, code[1:] != code[:-1]][: len(code)])
    first = start[heads]
    row, column = np.divmod(first, grid.length) if len(first) else (first, first)
    pads = _pads(grid, runs) if want_pads else None
    if len(heads) == len(order):  # every trajectory is one stretch
        by_start = np.argsort(first, kind="stable")
        return Trajectories(first[by_start], size[by_start], column[by_start], row[by_start], None), pads
    source = Stretches(start, size)
    total = np.add.reduceat(size, heads)
    return Trajectories(np.cumsum(total) - total, total, column, row, source), pads


def _runs(grid: Grid) -> _Runs:
    batch, length = grid.batch, grid.length
    change = np.zeros((batch, length), np.bool_)
    if length:
        change[:, 0] = True
    for array in (grid.documents, grid.visible, grid.exact):
        if array is not None:
            change[:, 1:] |= array[:, 1:] != array[:, :-1]
    start = np.flatnonzero(change)
    size = np.diff(np.r_[start, grid.size])
    row, column = np.divmod(start, max(length, 1))

    def at(array: Array | None, default: object) -> Array:
        return np.full(len(start), default) if array is None else array[row, column]

    documents = at(grid.documents, 0)
    _, code = np.unique(documents, return_inverse=True)
    _, code = np.unique(row * (int(code.max(initial=0)) + 1) + code, return_inverse=True)
    return _Runs(start, size, at(grid.visible, True), at(grid.exact, False), code.astype(np.int64))


def _pads(grid: Grid, runs: _Runs) -> Pads:
    """Leaf pads with their last kept predecessor, found run by run."""
    order = np.argsort(runs.code, kind="stable")
    code, shown = runs.code[order], runs.visible[order]
    # Per (row, document), scan the runs from left to right: the latest visible run so far, and the first one.
    latest = np.maximum.accumulate(np.where(shown, np.arange(len(order)), -1)) if len(order) else order
    known = (latest >= 0) & (code[latest] == code)
    before = np.empty(len(order), np.int64)
    before[order] = np.where(known, runs.start[order][latest] + runs.length[order][latest] - 1, -1)
    first = np.zeros(int(code.max(initial=-1)) + 1, np.int64)
    seen = order[shown][::-1]  # reversed: the earliest visible run of a code is written last
    first[runs.code[seen]] = runs.start[seen] % max(grid.length, 1)
    chosen = runs.exact & ~runs.visible
    where = Stretches(runs.start[chosen], runs.length[chosen])
    return Pads(where, before[chosen], first[runs.code[chosen]])
