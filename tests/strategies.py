"""Hypothesis strategies: batches of rows with the shapes that break tree code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

__all__ = ["Case", "cases", "row_sets", "rows_with_prefixes"]


@dataclass(frozen=True)
class Case:
    """Arguments of RolloutTree.from_grid."""

    keys: tuple[NDArray[Any], ...]
    visible: NDArray[np.bool_] | None = None
    exact: NDArray[np.bool_] | None = None
    documents: NDArray[Any] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        batch, length = self.keys[0].shape
        return batch, length


@st.composite
def row_sets(draw: st.DrawFn, max_rows: int = 7, max_length: int = 12, vocab: int = 3) -> list[list[int]]:
    """Token rows that share prefixes: free, duplicates, prefixes and branches of earlier ones, empty."""
    token = st.integers(0, vocab - 1)
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(0, max_rows))):
        kind = draw(st.sampled_from(["free", "branch", "prefix", "duplicate", "empty"]))
        old = draw(st.sampled_from(rows)) if rows else []
        at = draw(st.integers(0, len(old)))
        if kind == "free":
            rows.append(draw(st.lists(token, max_size=max_length)))
        elif kind == "branch":
            rows.append(old[:at] + draw(st.lists(token, max_size=max_length - at)))
        else:
            rows.append({"prefix": old[:at], "duplicate": old, "empty": []}[kind])
    return rows


@st.composite
def rows_with_prefixes(draw: st.DrawFn, max_rows: int = 7, max_length: int = 12, vocab: int = 3) -> Case:
    """A padded grid of such rows: left, right or mixed padding, or none at all (rows cut to one length)."""
    rows = draw(row_sets(max_rows, max_length, vocab))
    length = max(map(len, rows), default=0) + draw(st.integers(0, 2))
    side = draw(st.sampled_from(["left", "right", "mixed"]))
    ids = np.full(
        (len(rows), length), draw(st.integers(0, vocab)), draw(st.sampled_from([np.int32, np.int64]))
    )
    visible = np.zeros(ids.shape, np.bool_)
    for b, row in enumerate(rows):
        free = length - len(row)
        begin = {"left": free, "right": 0, "mixed": draw(st.integers(0, free))}[side]
        ids[b, begin : begin + len(row)] = row
        visible[b, begin : begin + len(row)] = True
    return Case((ids,), visible)


@st.composite
def cases(draw: st.DrawFn, max_rows: int = 7, max_length: int = 12, vocab: int = 3) -> Case:
    """Everything at once: padding, holes, fully masked rows, documents (A B A too), extra keys, leaf pads."""
    case = draw(rows_with_prefixes(max_rows, max_length, vocab))
    seed = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    visible = case.visible
    if visible is not None and draw(st.booleans()):
        visible = visible & (seed.random(case.shape) < 0.8)
    if visible is not None and draw(st.booleans()):
        visible = visible & (seed.random((case.shape[0], 1)) < 0.8)
    if draw(st.integers(0, 3)) == 0:
        visible = None
    case = replace(case, visible=visible)
    extra = draw(st.sampled_from([None, "row", "token", "column", "bool"]))
    column: NDArray[Any]
    if extra == "row":
        column = np.broadcast_to(seed.integers(0, 2, (case.shape[0], 1)), case.shape)
    elif extra == "column":
        column = np.broadcast_to(np.arange(case.shape[1]), case.shape)
    else:
        column = seed.random(case.shape) < 0.1
        column = column if extra == "bool" else column.astype(np.int64)
    if extra is not None:
        case = replace(case, keys=(*case.keys, column))
    if draw(st.booleans()):
        case = replace(case, exact=seed.random(case.shape) < draw(st.sampled_from([0.5, 1.0])))
    documents = draw(st.sampled_from([None, "blocks", "scattered"]))
    if documents == "blocks":
        case = replace(case, documents=np.cumsum(seed.random(case.shape) < 0.3, axis=1))
    elif documents == "scattered":
        case = replace(case, documents=seed.integers(-1, 2, case.shape))
    return case
