"""The caller's arrays, converted and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treecompile.runtime.errors import TreeError
from treecompile.runtime.stretches import Array

__all__ = ["Grid", "host_array", "read_grid", "rectangles"]


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
