"""From the caller's grid to trajectories: the token sequences that a prefix tree merges.

Legend: B rows, T columns, G = B*T grid positions (flat position = b*T + t), K key columns, I trajectories.

A trajectory is the subsequence of one row's kept positions with one document value. Nearly always it is one
contiguous stretch of the grid, and then nothing is copied: a trajectory is (start, length) in the flat key
arrays. Holes in the mask, or a document that comes back (A B A), need the compact form: ``source`` says which
stretches of the grid follow each other, trajectory by trajectory, and (start, length) count along these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from treecompile.runtime.errors import TreeError

__all__ = [
    "Array",
    "Grid",
    "Pads",
    "Stretches",
    "Trajectories",
    "cut",
    "fragmented",
    "host_array",
    "index_dtype",
    "ramps",
    "read_grid",
    "rectangles",
]

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Grid:
    """Validated host arrays of one call, [B, T] each: keys, masks (bool or None), documents (or None)."""

    keys: tuple[Array, ...]
    visible: Array | None
    exact: Array | None
    documents: Array | None
    batch: int
    length: int

    @property
    def size(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True)
class Stretches:
    """A sequence of flat grid positions in run-length form: R stretches, one behind the other."""

    start: Array
    length: Array

    @functools.cached_property
    def offset(self) -> Array:
        """[R] where each stretch begins in the sequence."""
        offset: Array = np.cumsum(self.length) - self.length
        return offset

    @property
    def total(self) -> int:
        return int(self.length.sum())

    def index(self) -> Array:
        """The sequence itself, int64."""
        return ramps(self.start, self.length, np.dtype(np.int64))

    def _pairs(self) -> Iterator[tuple[slice, slice]]:
        """(slice of the grid, slice of the sequence)."""
        for start, size, at in zip(
            self.start.tolist(), self.length.tolist(), self.offset.tolist(), strict=True
        ):
            yield slice(start, start + size), slice(at, at + size)

    def take(self, flat: Array) -> Array:
        """``flat[index()]``."""
        if fragmented(self.length):
            return flat[self.index()]
        out: Array = np.empty(self.total, flat.dtype)
        for grid, own in self._pairs():
            out[own] = flat[grid]
        return out

    def put(self, flat: Array, values: Array) -> None:
        """``flat[index()] = values``."""
        if fragmented(self.length):
            flat[self.index()] = values
            return
        for grid, own in self._pairs():
            flat[grid] = values[own]

    def slices(self, begin: Array, length: Array) -> tuple[Stretches, Array]:
        """The stretches of the concatenated slices ``[begin, begin + length)`` of the sequence, length >= 1.

        Returns:
            the stretches, and the number of the slice that each belongs to.
        """
        low = np.searchsorted(self.offset, begin, side="right") - 1
        count = np.searchsorted(self.offset, begin + length - 1, side="right") - low
        run = ramps(low, count, np.dtype(np.int64))
        piece = np.repeat(np.arange(len(begin)), count)
        head = np.maximum(self.offset[run], begin[piece])
        tail = np.minimum(self.offset[run] + self.length[run], (begin + length)[piece])
        return Stretches(self.start[run] + head - self.offset[run], tail - head), piece


def fragmented(length: Array) -> bool:
    """True where a Python step per stretch would cost more than an index per token."""
    return int(length.sum()) < 256 * len(length)


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


def host_array(value: object, argument: str) -> Array:
    """A numpy view or copy of an integer or boolean array or tensor (any device), checked."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            raise _not_integers(argument, value.dtype)
        return np.asarray(value.detach().cpu().numpy())
    try:
        array = np.asarray(value)
    except ValueError:
        raise TreeError(
            argument=argument,
            problem="is not a rectangular array",
            value="nested sequences of unequal length",
            remedy="pass a [B, T] array, or a list of 1-D rows to RolloutTree.from_rows",
        ) from None
    if array.dtype == np.float64 and array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iub":
        raise _not_integers(argument, array.dtype)
    return array


def _not_integers(argument: str, dtype: object) -> TreeError:
    return TreeError(
        argument=argument,
        problem="needs integers or booleans, since tokens are merged by equality",
        value=f"dtype {dtype}",
        remedy="pass token ids, positions or masks; convert with .long() if they are whole",
    )


def read_grid(keys: Sequence[object], visible: object, exact: object, documents: object) -> Grid:
    """Convert and check the arguments of RolloutTree.from_grid."""
    if len(keys) == 0:
        raise TreeError(
            argument="keys",
            problem="needs at least one [B, T] array",
            value="an empty sequence",
            remedy="pass the token ids: keys=[ids]",
        )
    arrays = tuple(host_array(key, f"keys[{i}]") for i, key in enumerate(keys))
    shape = arrays[0].shape
    if len(shape) != 2:
        raise TreeError(
            argument="keys[0]",
            problem="needs two dimensions [B, T]",
            value=f"shape {list(shape)}",
            remedy="use RolloutTree.from_rows for a list of rows, or add a batch dimension",
        )
    for i, array in enumerate(arrays):
        _same_shape(array, shape, f"keys[{i}]")
    masks = [_mask(value, shape, name) for value, name in ((visible, "visible"), (exact, "exact"))]
    document_array = None if documents is None else host_array(documents, "documents")
    if document_array is not None:
        _same_shape(document_array, shape, "documents")
    return Grid(arrays, masks[0], masks[1], document_array, shape[0], shape[1])


def rectangles(named: Sequence[tuple[str, object]]) -> tuple[dict[str, Array], Array | None]:
    """Grids [B, T] from rectangular or ragged arguments, of which the first sets the shape.

    Returns:
        the grids by argument name, and the [B, T] mask of positions inside a row (None if rectangular).
    """
    name, value = named[0]
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.dtype != np.object_:
        grids = {argument: host_array(other, argument) for argument, other in named}
        if grids[name].ndim != 2:
            raise TreeError(
                argument=name,
                problem="needs two dimensions [B, T]",
                value=f"shape {list(grids[name].shape)}",
                remedy="add a batch dimension, or pass a list of 1-D rows",
            )
        for argument, grid in grids.items():
            _same_shape(grid, grids[name].shape, argument)
        return grids, None
    ragged = {argument: _ragged(other, argument) for argument, other in named}
    lengths = [len(row) for row in ragged[name]]
    grids = {}
    for argument, rows in ragged.items():
        if [len(row) for row in rows] != lengths:
            raise TreeError(
                argument=argument,
                problem=f"needs rows of the lengths of {name}, {_brief(lengths)}",
                value=f"lengths {_brief([len(row) for row in rows])}",
                remedy=f"pass one value per token of {name}",
            )
        dtype = (
            np.result_type(*(row.dtype for row in rows if len(row))) if any(lengths) else np.dtype(np.int64)
        )
        if dtype.kind not in "iub":
            raise _not_integers(argument, dtype)
        grids[argument] = np.zeros((len(lengths), max(lengths, default=0)), dtype)
        for out, row in zip(grids[argument], rows, strict=True):
            out[: len(row)] = row
    inside = np.arange(max(lengths, default=0)) < np.array(lengths, np.int64).reshape(-1, 1)
    return grids, inside


def _ragged(value: object, argument: str) -> list[Array]:
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, str):
        raise TreeError(
            argument=argument,
            problem="needs a [B, T] array or a list of 1-D rows",
            value=type(value).__name__,
            remedy="pass a list, an array or a tensor of token ids",
        )
    rows = [host_array(row, f"{argument}[{i}]") for i, row in enumerate(value)]
    for i, row in enumerate(rows):
        if row.ndim != 1:
            raise TreeError(
                argument=f"{argument}[{i}]",
                problem="needs one dimension, a row of tokens",
                value=f"shape {list(row.shape)}",
                remedy="pass a list of 1-D rows, or one [B, T] array",
            )
    return rows


def _brief(lengths: list[int]) -> str:
    return str(lengths) if len(lengths) <= 6 else f"[{', '.join(map(str, lengths[:6]))}, ...]"


def _mask(value: object, shape: tuple[int, ...], argument: str) -> Array | None:
    if value is None:
        return None
    mask = host_array(value, argument)
    _same_shape(mask, shape, argument)
    return np.ascontiguousarray(mask) if mask.dtype == np.bool_ else mask != 0


def _same_shape(array: Array, shape: tuple[int, ...], argument: str) -> None:
    if array.shape != shape:
        raise TreeError(
            argument=argument,
            problem=f"needs the shape of the rows, {list(shape)}",
            value=f"shape {list(array.shape)}",
            remedy="pass one value per grid position [B, T]",
        )


def index_dtype(limit: int) -> np.dtype[Any]:
    """int32 while every index fits (half the memory traffic), else int64."""
    return np.dtype(np.int32 if limit < 2**31 else np.int64)


def ramps(offset: Array, length: Array, dtype: np.dtype[Any]) -> Array:
    """Concatenation of ``offset[s] + arange(length[s])`` over s. O(total length)."""
    total = int(length.sum())
    out: Array = np.empty(total, dtype)
    if not fragmented(length):
        ramp, begin = np.arange(int(length.max(initial=0)), dtype=dtype), 0
        for first, size in zip(offset.tolist(), length.tolist(), strict=True):
            np.add(ramp[:size], first, out=out[begin : begin + size])
            begin += size
        return out
    ends = np.cumsum(length)
    np.add(np.repeat((offset - ends + length).astype(dtype), length), np.arange(total, dtype=dtype), out=out)
    return out


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
