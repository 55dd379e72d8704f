"""From a plan to kernel launches: windows and bounded blocks cut in, masked tiles of one shape batched.

Works on the host in integers. Launches are cached by the *content* of plan and segments, so that the layers
of a model share them; nothing is keyed by identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from treecompile.runtime.ops.attention_plan import (
    CAUSAL,
    FULL,
    INFO,
    STEP_ANY,
    STEP_ONE,
    TILE,
    plan_pieces,
    segment_depths,
)

__all__ = ["Launch", "Rectangle", "Request", "TileBatch", "launch_of"]

Int64Array = npt.NDArray[np.int64]

# Queries of one strip where a window or a bounded block cuts a piece.
STRIP = 128
# Largest block (queries, keys) of formulas that materialise their logits.
BLOCK = (256, 1024)
# Tiles over this area (or that of the plan's largest steps) are launched alone, at their exact size: slices
# cost less than gathers.
BATCH_AREA = 128 * 128


@dataclass(frozen=True)
class Request:
    """How pieces are to be run: what changes the launches beside the plan itself.

    Attributes:
        window: in columns, 0 for none.
        bounded: cut every piece to `BLOCK`, for formulas that materialise logits.
        area: most masked pairs (padding included) of one batch of tiles.
    """

    window: int
    bounded: bool
    area: int


@dataclass(frozen=True)
class Rectangle:
    """Queries [q_start, q_end) and keys [k_start, k_end), one call.

    Attributes:
        q_start, q_end, k_start, k_end: token ranges.
        kind: CAUSAL (the lower half of a square), FULL (all pairs) or TILE (masked).
        first: a diagonal piece, which writes its queries instead of merging.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    kind: int
    first: bool

    @property
    def pairs(self) -> int:
        """Pairs computed; a causal square counts its lower half."""
        queries, keys = self.q_end - self.q_start, self.k_end - self.k_start
        return queries * (queries + 1) // 2 if self.kind == CAUSAL else queries * keys


@dataclass(frozen=True)
class TileBatch:
    """Masked tiles that one call computes, padded to `q_size` x `k_size`.

    Attributes:
        q_start, q_length: int64 [n], token ranges of the queries.
        k_start, k_length: int64 [n], token ranges of the keys.
        q_size, k_size: padded tile.
        first: the tiles are diagonal: they write their queries instead of merging.
    """

    q_start: Int64Array
    q_length: Int64Array
    k_start: Int64Array
    k_length: Int64Array
    q_size: int
    k_size: int
    first: bool


@dataclass(frozen=True)
class Launch:
    """Calls of one plan. Those marked `first` partition the tokens and come before all others.

    Attributes:
        tokens: N.
        rectangles: calls on slices, `first` ones in front.
        batches: calls on gathered tiles, `first` ones in front.
        has_pads: some tokens may see nothing.
    """

    tokens: int
    rectangles: tuple[Rectangle, ...]
    batches: tuple[TileBatch, ...]
    has_pads: bool

    @property
    def single(self) -> bool:
        """Whether one causal square is all there is: a tree without sharing."""
        return len(self.rectangles) == 1 and not self.batches and self.rectangles[0].kind == CAUSAL

    @property
    def disjoint(self) -> bool:
        """Whether no token takes part in two calls: squares beside each other, nothing to merge or to add up."""
        return not self.batches and all((r.q_start, r.q_end) == (r.k_start, r.k_end) for r in self.rectangles)

    @property
    def squares(self) -> tuple[Rectangle, ...]:
        """The causal squares."""
        return tuple(r for r in self.rectangles if r.kind == CAUSAL)

    @property
    def calls(self) -> int:
        """Number of attention kernel calls."""
        return len(self.rectangles) + len(self.batches)

    @property
    def pairs(self) -> int:
        """Query-key pairs computed, padding included; causal squares count their lower half."""
        padded = sum(len(b.q_start) * b.q_size * b.k_size for b in self.batches)
        return padded + sum(r.pairs for r in self.rectangles)


def launch_of(pieces: npt.NDArray[np.int32], segments: npt.NDArray[np.int32], request: Request) -> Launch:
    """Return the launches of a plan, from the cache where the same content was asked for before.

    Args:
        pieces: int32 [P, 6] from `plan_pieces`, or its first row alone, from `plan_header`.
        segments: int32 [S, 4] of the same tree.
        request: window and bounds.

    Returns:
        The launches.

    Raises:
        ValueError: `pieces` is not a plan (no INFO row first).
    """
    return _cached_launch(pieces.tobytes(), segments.tobytes(), request)


@lru_cache(maxsize=64)
def _cached_launch(pieces: bytes, segments: bytes, request: Request) -> Launch:
    rows = np.frombuffer(pieces, np.int32).reshape(-1, 6).astype(np.int64)
    table = np.frombuffer(segments, np.int32).reshape(-1, 4).astype(np.int64)
    if not len(rows) or rows[0, 0] != INFO:
        raise ValueError("tree_attention: pieces must come from plan_pieces")
    tokens, span, step, tile = (int(x) for x in rows[0, 1:5])
    # Where other executors are the rule, only the first row is planned beforehand.
    work = rows[1:] if len(rows) > 1 or not tokens else plan_pieces(table, tile=tile)[1:].astype(np.int64)
    if request.window and not 0 <= span <= request.window:
        work = _cut_window(work, _token_depths(table, tokens), request.window, step)
    if request.bounded:
        work = _cut_blocks(work)
    alone, batches = _batches(work[work[:, 0] == TILE], tile, request.area)
    calls = np.concatenate([work[work[:, 0] != TILE], alone])
    calls = calls[np.argsort(1 - calls[:, 5], kind="stable")]
    rectangles = (Rectangle(a, b, c, d, kind, bool(first)) for kind, a, b, c, d, first in calls.tolist())
    return Launch(tokens, tuple(rectangles), tuple(batches), bool((table[:, 3] <= table[:, 0]).any()))


def _token_depths(table: Int64Array, tokens: int) -> Int64Array:
    """int64 [N]: number of ancestors of each token."""
    length = table[:, 1] - table[:, 0]
    return np.repeat(segment_depths(table) - table[:, 0], length) + np.arange(tokens)


def _as_rows(rows: list[tuple[int, ...]]) -> Int64Array:
    return np.array(rows, np.int64).reshape(-1, 6)


def _cut_window(rows: Int64Array, depth: Int64Array, window: int, step: int) -> Int64Array:
    """Keep of each piece what a window of `window` columns can reach.

    Columns grow by at least one along a path, so a distance in depth bounds the distance in columns from
    below: keys further away in depth are never visible. Where all steps are one the two are equal, and strips
    wholly inside the window need no mask. Where columns do not grow (`step` is STEP_ANY), only masks decide.
    """
    unit, reaches = step == STEP_ONE, step != STEP_ANY
    cut: list[tuple[int, ...]] = []
    for kind, q_start, q_end, k_start, k_end, first in rows.tolist():
        if kind == TILE:
            cut.append((kind, q_start, q_end, k_start, k_end, first))
            continue
        if kind == CAUSAL and unit and q_end - q_start <= window:
            cut.append((kind, q_start, q_end, k_start, k_end, first))
            continue
        for low in range(q_start, q_end, STRIP):
            high = min(low + STRIP, q_end)
            near, far = int(depth[low:high].min()), int(depth[low:high].max())
            reach = max(k_start, k_start + near - window + 1 - int(depth[k_start])) if reaches else k_start
            stop = high if kind == CAUSAL else k_end
            if reach >= stop:
                continue
            inside = kind == FULL and unit and far - int(depth[reach]) < window
            cut.append((FULL if inside else TILE, low, high, reach, stop, first))
    return _as_rows(cut)


def _cut_blocks(rows: Int64Array) -> Int64Array:
    """Cut every piece to at most `BLOCK`; of a diagonal piece only the last key block stays `first`."""
    most_q, most_k = BLOCK
    cut: list[tuple[int, ...]] = []
    for kind, q_start, q_end, k_start, k_end, first in rows.tolist():
        for low in range(q_start, q_end, most_q):
            high = min(low + most_q, q_end)
            stop = high if kind == CAUSAL else k_end
            inner = FULL if kind == CAUSAL else kind
            begin = low if kind == CAUSAL else max(k_start, stop - most_k)
            cut.append((TILE if kind == CAUSAL else kind, low, high, begin, stop, first))
            while begin > k_start:
                stop, begin = begin, max(k_start, begin - most_k)
                cut.append((inner, low, high, begin, stop, 0))
    return _as_rows(cut)


def _padded(size: Int64Array) -> Int64Array:
    """Round sizes up to 16, 32, 48, 64, 96, 128, 192, 256: at most half a step is padding."""
    steps = np.array([16, 32, 48, 64, 96, 128, 192, 256], np.int64)
    rounded = steps[np.minimum(np.searchsorted(steps, size), len(steps) - 1)]
    return np.maximum(rounded, (size + 63) // 64 * 64 * (size > 256))


def _batches(rows: Int64Array, tile: int, most_area: int) -> tuple[Int64Array, list[TileBatch]]:
    """Group TILE rows by padded shape, diagonal ones first. Rows that stay alone are returned as they are."""
    if not len(rows):
        return rows, []
    q_length, k_length, later = rows[:, 2] - rows[:, 1], rows[:, 4] - rows[:, 3], 1 - rows[:, 5]
    small = q_length * k_length <= max(BATCH_AREA, 4 * tile**2)
    q_padded, k_padded = (np.where(small, _padded(x), x) for x in (q_length, k_length))
    shape = np.stack([later, q_padded, k_padded], 1)
    shapes, member, count = np.unique(shape, axis=0, return_inverse=True, return_counts=True)
    member = _merge_shapes(shapes, count, tile**2 // 2)[member.reshape(-1)]
    alone: list[Int64Array] = []
    batches: list[TileBatch] = []
    for which in np.unique(member).tolist():
        q_size, k_size = shapes[which, 1:].tolist()
        index = np.flatnonzero(member == which)
        step = max(1, most_area // (q_size * k_size))
        for begin in range(0, len(index), step):
            part = index[begin : begin + step]
            if len(part) == 1:
                alone.append(rows[part])
                continue
            q_start, k_start, first = rows[part, 1], rows[part, 3], bool(rows[part[0], 5])
            batches.append(TileBatch(q_start, q_length[part], k_start, k_length[part], q_size, k_size, first))
    return np.concatenate([rows[:0], *alone]), batches


def _merge_shapes(shapes: Int64Array, count: Int64Array, call_pairs: int) -> Int64Array:
    """Map each shape to the one it joins: where padding it further costs less than a call of its own."""
    target = np.arange(len(shapes))
    total = count.copy()
    area = shapes[:, 1] * shapes[:, 2]
    for i in np.argsort(area, kind="stable").tolist():
        fits = (shapes[:, 0] == shapes[i, 0]) & (shapes[:, 1:] >= shapes[i, 1:]).all(1) & (total > 0)
        fits[i] = False
        extra = np.where(fits, total[i] * (area - area[i]), np.iinfo(np.int64).max)
        best = int(extra.argmin()) if len(extra) else i
        if fits[best] and extra[best] <= call_pairs:
            target[target == i] = best
            total[best] += total[i]
            total[i] = 0
    return target
