"""Host plan of tree attention: which rectangles of the query-key square a packed tree needs.

Depth-first preorder makes every descendant range and every chain of first children contiguous. The plan
follows these chains ("heavy paths", since the largest child comes first):

- a path ``[s, e)`` attends to itself by one causal square;
- the subtrees that leave it stand behind it, ``[e, end)``, deepest fork first. Those that fork at token p see
  the keys ``[s, p]``: a staircase. Consecutive subtrees share one full rectangle up to the highest fork among
  them, and one masked tile for the steps below it;
- subtrees of at most `tile` tokens are not opened: neighbours fill one masked square.

A token lies below at most log2(N) paths, so cost follows tokens and depth, never the number of segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["CAUSAL", "FULL", "INFO", "TILE", "PieceCount", "count_pieces", "plan_header", "plan_pieces"]

IntArray = npt.NDArray[np.int32]

INFO, CAUSAL, FULL, TILE = 0, 1, 2, 3
# What is known of the columns along a path: they grow by one, by at least one, or anyhow.
STEP_ONE, STEP_UP, STEP_ANY = 1, 0, -1

# Query-key pairs that cost as much as one more kernel call (measured: 60 us at 8 heads of 64, one core).
CALL_PAIRS = 2048
# The largest square that may be masked as a whole, in tokens.
SMALL_TREE = 256

Row = tuple[int, int, int, int, int, int]


def plan_pieces(segments: npt.ArrayLike, column: npt.ArrayLike | None = None, *, tile: int = 64) -> IntArray:
    """Cover the visible pairs of a packed tree with causal squares, rectangles and masked tiles.

    Args:
        segments: int [S, 4], rows (start, end, parent row or -1, subtree end of the start token) by start. A
            leaf pad is a row of one token whose subtree end is its start.
        column: int [N], grid columns, or None. Known columns make sliding windows exact on the host. If None,
            columns are taken to grow by at least one along every path.
        tile: largest subtree in tokens that is masked as a whole; larger on devices where a call is dear.

    Returns:
        int32 [P, 6], rows (kind, q start, q end, k start, k end, first). The first row is
        (INFO, N, column span or -1, column step, tile, 0). `first` marks the diagonal pieces:
        these partition the tokens, in order.

    Raises:
        ValueError: rows are not ordered by start, or `tile` is not positive.

    Example:
        >>> plan_pieces([[0, 500, -1, 500]])[1:].tolist()                      # a chain: one causal square
        [[1, 0, 500, 0, 500, 1]]
        >>> plan_pieces([[0, 600, -1, 1000], [600, 800, 0, 800], [800, 1000, 0, 1000]])[1:].tolist()
        [[1, 0, 800, 0, 800, 1], [1, 800, 1000, 800, 1000, 1], [2, 800, 1000, 0, 600, 0]]

    Notes:
        O(S log S) time on the host. At most ``(2 + log2 N) N / tile`` rows apart from tiles; the pairs that
        are computed in vain are at most a constant times ``N tile log2 N``.
    """
    header = plan_header(segments, column, tile=tile)
    table = np.asarray(segments, np.int64).reshape(-1, 4)
    tokens = int(header[0, 1])
    if not tokens:
        return header
    part = _Planner(table, tokens, tile).plan()
    rows = sorted(part.diagonal, key=lambda row: row[1]) + part.rest
    return np.concatenate([header, np.array(rows, np.int32).reshape(-1, 6)])


def plan_header(segments: npt.ArrayLike, column: npt.ArrayLike | None = None, *, tile: int = 64) -> IntArray:
    """Return the first row of a plan alone: where pieces are the exception, they are planned when they run.

    Args:
        segments: int [S, 4] as for `plan_pieces`.
        column: int [N] or None, as there.
        tile: as there.

    Returns:
        int32 [1, 6], the INFO row.

    Raises:
        ValueError: rows are not ordered by start, or `tile` is not positive.

    Example:
        >>> plan_header([[0, 500, -1, 500]], range(500)).tolist()
        [[0, 500, 500, 1, 64, 0]]
    """
    table = np.asarray(segments, np.int64).reshape(-1, 4)
    if tile < 1:
        raise ValueError(f"plan_pieces: tile must be positive, got {tile}")
    if len(table) > 1 and not (np.diff(table[:, 0]) > 0).all():
        raise ValueError("plan_pieces: segments must be ordered by start")
    tokens = int(table[:, 1].max()) if len(table) else 0
    return np.array([_info(table, tokens, column, tile)], np.int32)


def _info(table: npt.NDArray[np.int64], tokens: int, column: npt.ArrayLike | None, tile: int) -> Row:
    if column is None or tokens == 0:
        return (INFO, tokens, -1, STEP_UP, tile, 0)
    col = np.asarray(column, np.int64)
    before = np.arange(-1, tokens - 1)
    parent = table[:, 2]
    before[table[:, 0]] = np.where(parent >= 0, table[parent, 1] - 1, -1)
    inner = before >= 0
    steps = col[inner] - col[before[inner]]
    step = STEP_ONE if (steps == 1).all() else STEP_UP if (steps >= 1).all() else STEP_ANY
    return (INFO, tokens, int(col.max() - col.min()) + 1, step, tile, 0)


@dataclass(frozen=True)
class _Light:
    """A subtree beside a path: tokens [start, end), last path token it sees (-1 for none), segment."""

    start: int
    end: int
    anchor: int
    segment: int


@dataclass(frozen=True)
class _Part:
    """Rows of a token range, diagonal ones apart, and their estimated cost in pairs."""

    diagonal: list[Row]
    rest: list[Row]

    @property
    def cost(self) -> int:
        return sum(_row_cost(row) for row in self.diagonal) + sum(_row_cost(row) for row in self.rest)


def _row_cost(row: Row) -> int:
    kind, q_start, q_end, k_start, k_end, _ = row
    queries, keys = q_end - q_start, k_end - k_start
    if kind == CAUSAL:
        # The CPU kernel skips key blocks of 512: below that it computes the whole square.
        return queries * max(queries // 2, min(queries, 512)) + CALL_PAIRS
    return queries * keys + (CALL_PAIRS if kind == FULL else CALL_PAIRS // 8)


class _Planner:
    def __init__(self, table: npt.NDArray[np.int64], tokens: int, tile: int) -> None:
        start, end, parent, subtree = table.T
        extent = np.maximum(subtree, end)
        follows = np.zeros(len(table), bool)
        follows[1:] = (parent[1:] == np.arange(len(table) - 1)) & (subtree[1:] > start[1:])
        self.start, self.end, self.extent = start.tolist(), end.tolist(), extent.tolist()
        self.anchor = np.where(parent >= 0, end[parent] - 1, -1).tolist()
        self.after = np.searchsorted(start, extent).tolist()
        self.follows, self.is_pad = follows.tolist(), (subtree <= start).tolist()
        self.tokens, self.tile, self.count = tokens, tile, len(table)

    def plan(self) -> _Part:
        last = self._path_end(0)
        if self.end[last] == self.tokens and not self.is_pad[0]:
            return _Part([(CAUSAL, 0, self.tokens, 0, self.tokens, 1)], [])
        return self._cheapest(0, self.tokens, self._beside(self._lights(0, self.tokens)))

    def _path_end(self, segment: int) -> int:
        """Return the last segment of the chain of first children that starts at `segment`."""
        while segment + 1 < self.count and self.follows[segment + 1]:
            segment += 1
        return segment

    def _lights(self, segment: int, stop: int) -> list[_Light]:
        """List the subtrees that stand one after another from `segment` on, before token `stop`."""
        lights = []
        while segment < self.count and self.start[segment] < stop:
            lights.append(_Light(self.start[segment], self.extent[segment], self.anchor[segment], segment))
            segment = self.after[segment]
        return lights

    def _cheapest(self, start: int, end: int, part: _Part) -> _Part:
        """Return `part`, or one masked square over its tokens if they are few and the square costs less."""
        square = (TILE, start, end, start, end, 1)
        single = len(part.diagonal) + len(part.rest) == 1
        if end - start > SMALL_TREE or single or _row_cost(square) > part.cost:
            return part
        return _Part([square], [])

    def _beside(self, lights: list[_Light]) -> _Part:
        """Plan what subtrees see within themselves: small neighbours share one masked square."""
        diagonal: list[Row] = []
        rest: list[Row] = []
        open_start = open_end = lights[0].start if lights else 0
        for light in lights:
            if light.end - open_start > self.tile:
                if open_end > open_start:
                    diagonal.append((TILE, open_start, open_end, open_start, open_end, 1))
                open_start = light.start
            if light.end - light.start > self.tile:
                part = self._cheapest(light.start, light.end, self._path(light))
                diagonal += part.diagonal
                rest += part.rest
                open_start = light.end
            open_end = light.end
        if open_end > open_start:
            diagonal.append((TILE, open_start, open_end, open_start, open_end, 1))
        return _Part(diagonal, rest)

    def _path(self, light: _Light) -> _Part:
        """Plan a large subtree: the square of its heavy path, the staircase beside it, and its subtrees."""
        last = self._path_end(light.segment)
        start, end = light.start, self.end[last]
        lights = self._lights(last + 1, light.end)
        kind = CAUSAL if end - start > self.tile else TILE
        beside = self._beside(lights)
        square: Row = (kind, start, end, start, end, 1)
        return _Part([square, *beside.diagonal], self._staircase(start, lights) + beside.rest)

    def _staircase(self, path: int, lights: list[_Light]) -> list[Row]:
        """Cover what the subtrees beside a path see of it, grouped so that little is computed in vain."""
        rows: list[Row] = []
        group: list[_Light] = []
        waste = 0
        for light in lights:
            if group:
                drop = group[0].anchor - light.anchor
                waste += drop * (light.end - light.start)
                area = drop * (light.end - group[0].start)
                if waste > self.tile**2 // 2 or area > 4 * self.tile**2:
                    rows += self._group(path, group)
                    group, waste = [], 0
            group.append(light)
        return rows + (self._group(path, group) if group else [])

    def _group(self, path: int, group: list[_Light]) -> list[Row]:
        start, end = group[0].start, group[-1].end
        top, low = group[0].anchor + 1, group[-1].anchor + 1
        if (end - start) * (top - path) <= self.tile**2:
            return [(TILE, start, end, path, top, 0)]
        full: list[Row] = [(FULL, start, end, path, low, 0)]
        return full + ([(TILE, start, end, low, top, 0)] if top > low else [])


@dataclass(frozen=True)
class PieceCount:
    """What a plan costs: kernel rows by kind, and query-key pairs.

    Attributes:
        causal: number of causal squares, one call each.
        full: number of full rectangles, one call each.
        tile: number of masked tiles; equal shapes share a call.
        computed: pairs that the pieces cover (a causal square counts its lower half).
        useful: pairs that attend.
    """

    causal: int
    full: int
    tile: int
    computed: int
    useful: int


def count_pieces(segments: npt.ArrayLike, pieces: npt.ArrayLike) -> PieceCount:
    """Count calls and pairs of a plan.

    Args:
        segments: int [S, 4] as for `plan_pieces`.
        pieces: int [P, 6] from `plan_pieces`.

    Returns:
        The counts; `useful` is the sum of the tokens' depths (a leaf pad does not see itself).

    Example:
        >>> table = [[0, 600, -1, 1000], [600, 800, 0, 800], [800, 1000, 0, 1000]]
        >>> count_pieces(table, plan_pieces(table))
        PieceCount(causal=2, full=1, tile=0, computed=460500, useful=460500)
    """
    rows = np.asarray(pieces, np.int64)
    kind, queries, keys = rows[:, 0], rows[:, 2] - rows[:, 1], rows[:, 4] - rows[:, 3]
    causal, full, tile = (kind == k for k in (CAUSAL, FULL, TILE))
    half = (queries * (queries + 1) // 2)[causal].sum()
    computed = half + (queries * keys)[full | tile].sum()
    return PieceCount(
        int(causal.sum()), int(full.sum()), int(tile.sum()), int(computed), useful_pairs(segments)
    )


def useful_pairs(segments: npt.ArrayLike) -> int:
    """Return how many pairs of a tree attend, from its segment table [S, 4]. O(S)."""
    table = np.asarray(segments, np.int64).reshape(-1, 4)
    depth = segment_depths(table)
    length = table[:, 1] - table[:, 0]
    pads = table[:, 3] <= table[:, 0]
    return int((length * depth + length * (length + 1) // 2 - pads).sum())


def segment_depths(table: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return int64 [S]: how many ancestors the first token of each segment has. O(S)."""
    length = (table[:, 1] - table[:, 0]).tolist()
    depth: list[int] = []
    for parent in table[:, 2].tolist():
        depth.append(depth[parent] + length[parent] if parent >= 0 else 0)
    return np.array(depth, np.int64)
