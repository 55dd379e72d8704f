"""The rollout tree: distinct prefix tokens of a batch in depth-first preorder.

Legend: B rows, T columns, N packed tokens, S segments, I trajectories, M pads; flat position = b*T + t.

``n`` attends to ``k``  <=>  ``k <= n < subtree_end[k]``: preorder makes every subtree one range of packed
tokens, so one integer per token says who is whose ancestor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from treecompile.runtime.errors import OptionError
from treecompile.runtime.grid import Grid, read_grid, rectangles
from treecompile.runtime.layout import Layout, any_layout, column_layout, columns_of
from treecompile.runtime.pads import NO_LEAVES, Leaves, add_pads
from treecompile.runtime.paths import Ranges, path_ranges
from treecompile.runtime.prefixes import shared_prefixes
from treecompile.runtime.segments import Segments, fork
from treecompile.runtime.sharing import Sharing
from treecompile.runtime.stretches import Array, Stretches, index_dtype, ramps
from treecompile.runtime.trajectories import Trajectories, cut

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["ColumnKey", "RolloutTree", "Sharing"]

ColumnKey = Literal["step", "absolute"]


@dataclass(frozen=True, eq=False)
class RolloutTree:
    """The prefix tree of a batch of rows, as arrays. Build it with `from_rows` or `from_grid`.

    Per-token arrays are computed from the segment table when first asked for, in the *index dtype* (int32
    while B*T < 2**31, else int64); treat them as read-only. `tensor` gives int64 tensors.

    Attributes:
        batch, length: B and T of the grid.
        n: number of packed tokens N.
        segments: [S, 4] int64 (start, end, parent segment or -1, subtree_end of its first token), in
            preorder. A leaf pad is a segment of one token with subtree_end == start.
        keys: the key columns at packed tokens ([N] each), if the builder was told to keep them; else empty.
        row_index: [B, T] packed token of every grid position, -1 where dropped.
        subtree_end: [N] one past the last packed token below n; n itself for a leaf pad.
        column: [N] grid column minus the trajectory's first kept column (or the grid column, "absolute").
        position: [N] the caller's positions, or None if none were given.
        parent: [N] packed token above, -1 for roots.
        depth: [N] number of ancestors.
        multiplicity: [N] how many grid positions map to n.
        first: [N] flat grid position of one representative of n.

    Example:
        >>> tree = RolloutTree.from_rows([[5, 6, 7], [5, 6, 8, 9], [5, 6]])
        >>> tree
        RolloutTree(B=3, T=4, N=5, S=3)
        >>> tree.row_index.tolist()
        [[0, 1, 4, -1], [0, 1, 2, 3], [0, 1, -1, -1]]
        >>> tree.subtree_end.tolist(), tree.parent.tolist(), tree.multiplicity.tolist()
        ([5, 5, 4, 4, 5], [-1, 0, 1, 2, 1], [3, 3, 1, 1, 1])
        >>> tree.segments.tolist()
        [[0, 2, -1, 5], [2, 4, 0, 4], [4, 5, 0, 5]]

    Notes:
        Building costs O(kept tokens * key columns) comparisons of memory-bound speed plus O(S log S),
        whatever the tree's shape; memory O(B + S) beyond the input. Each per-token array costs O(N),
        row_index O(B*T).
    """

    batch: int
    length: int
    n: int
    segments: Array
    keys: tuple[Array, ...]
    position: Array | None
    _table: Segments
    _trajectories: Trajectories
    _last: Array
    _pads: Leaves
    _absolute: bool

    # -- builders --

    @staticmethod
    def from_grid(
        keys: Sequence[object],
        *,
        visible: object = None,
        exact: object = None,
        documents: object = None,
        column_key: ColumnKey | None = None,
        positions: object = None,
        keep_keys: bool = False,
    ) -> RolloutTree:
        """Build the tree of a padded grid.

        Two grid positions merge iff their trajectories agree in every key column at every kept position so
        far. A trajectory is the subsequence of one row's kept positions with one document value, in column
        order.

        Args:
            keys: key columns, each [B, T] integer or bool, numpy or torch, any device. Token ids first.
            visible: [B, T] bool, the kept positions; None keeps all.
            exact: [B, T] bool. A masked position where it is True is packed as a *leaf pad*: below the last
                kept token before it in its trajectory, merged with equal (parent, keys), seen by nobody.
                Masked positions without it are dropped (row_index -1).
            documents: [B, T] integers; each value in a row is a trajectory of its own.
            column_key: "step" adds the column, counted from the trajectory's first kept one, to the key;
                "absolute" adds the grid column.
            positions: [B, T] integers, one more key column, kept as ``tree.position``.
            keep_keys: keep the key columns at packed tokens in ``tree.keys`` (needed by `to_rows` and
                `graph`'s token ids).

        Returns:
            the tree, independent of the input arrays.

        Raises:
            TreeError: unequal shapes, or values that are not integers.
            OptionError: an unknown column_key.

        Example:
            >>> ids = np.array([[0, 0, 5, 6], [5, 6, 7, 0]])
            >>> tree = RolloutTree.from_grid([ids], visible=ids != 0)
            >>> tree.row_index.tolist()
            [[-1, -1, 0, 1], [0, 1, 2, -1]]
            >>> RolloutTree.from_grid([ids], visible=ids != 0, exact=ids == 0).segments.tolist()
            [[0, 3, -1, 4], [3, 4, 0, 3], [4, 5, -1, 4]]
        """
        if column_key not in (None, "step", "absolute"):
            raise OptionError(argument="column_key", value=column_key, choices=(None, "step", "absolute"))
        columns = list(keys) if positions is None else [*keys, positions]
        grid = read_grid(columns, visible, exact, documents)
        return _build(grid, column_key, len(columns) - 1 if positions is not None else None, keep_keys)

    @staticmethod
    def from_rows(
        rows: object,
        *,
        mask: object = None,
        positions: object = None,
        keys: Sequence[object] = (),
        documents: object = None,
        column_key: ColumnKey | None = None,
        pads: Literal["drop", "exact"] = "drop",
    ) -> RolloutTree:
        """Build the tree of token rows: the door for users, which keeps the token ids.

        Args:
            rows: token ids: a [B, T] integer array or tensor, or a list of B 1-D ones (ragged, left-aligned).
            mask: in the form of ``rows``; zero or False marks padding.
            positions: in the form of ``rows``; position ids, part of the key.
            keys: further key columns, each in the form of ``rows``; rows merge only where these agree too.
            documents: in the form of ``rows``; each value within a row is a trajectory of its own.
            column_key: as in `from_grid`.
            pads: "drop" leaves masked tokens out, "exact" packs them as leaves (see `from_grid`).

        Returns:
            the tree; ``row_index`` has the shape of the rows, right-padded to the longest if ragged.

        Raises:
            TreeError: rows that are not integers, or arguments of different shape.
            OptionError: an unknown pads or column_key.

        Example:
            >>> RolloutTree.from_rows(torch.tensor([[1, 2, 3], [1, 2, 4]])).n
            4
            >>> print(RolloutTree.from_rows([[1, 2, 3], [1, 2, 4]]).text())
            ╙── 0  2 tok  col 0..1  x2
                ├─╼ 1  1 tok  col 2  x1
                └─╼ 2  1 tok  col 2  x1
        """
        if pads not in ("drop", "exact"):
            raise OptionError(argument="pads", value=pads, choices=("drop", "exact"))
        named = [("rows", rows), *((f"keys[{i}]", key) for i, key in enumerate(keys))]
        named += [
            (name, v)
            for name, v in (("positions", positions), ("documents", documents), ("mask", mask))
            if v is not None
        ]
        grids, inside = rectangles(named)
        ids, extra = grids["rows"], [grids[f"keys[{i}]"] for i in range(len(keys))]
        shown = grids["mask"] != 0 if mask is not None else None
        visible = inside if shown is None else shown if inside is None else shown & inside
        exact = None
        if pads == "exact" and shown is not None:
            exact = ~shown if inside is None else ~shown & inside
        return RolloutTree.from_grid(
            [ids, *extra],
            visible=visible,
            exact=exact,
            documents=grids.get("documents"),
            column_key=column_key,
            positions=grids.get("positions"),
            keep_keys=True,
        )

    @staticmethod
    def from_graph(graph: nx.DiGraph) -> RolloutTree:
        """Build the tree of a `networkx.DiGraph` of segments; see `tree_graph.from_graph`.

        Example:
            >>> import networkx
            >>> graph = networkx.DiGraph([("prompt", "a"), ("prompt", "b")])
            >>> ids = {"prompt": [1, 2], "a": [3], "b": [4, 5]}
            >>> networkx.set_node_attributes(graph, ids, "ids")
            >>> [row.tolist() for row in RolloutTree.from_graph(graph).to_rows()]
            [[1, 2, 3], [1, 2, 4, 5]]
        """
        from treecompile.runtime.tree_graph import from_graph

        return from_graph(graph)

    @staticmethod
    def from_segments(segments: object) -> RolloutTree:
        """Build the tree of a segment table alone: one row per leaf, without token ids.

        Args:
            segments: [S, 4] integers, rows (start, end, parent row or -1, subtree end of start) in preorder, as
                ``tree.segments`` gives them.

        Returns:
            the tree; its rows are the paths to the leaves, in preorder.

        Raises:
            TreeError: a table that is none of a tree in preorder, or that has leaf pads.

        Example:
            >>> tree = RolloutTree.from_segments([[0, 2, -1, 5], [2, 4, 0, 4], [4, 5, 0, 5]])
            >>> tree.row_index.tolist()
            [[0, 1, 2, 3], [0, 1, 4, -1]]

        Notes:
            O(S log S).
        """
        from treecompile.runtime.segment_table import read_segments

        table, rows, last = read_segments(segments)
        return RolloutTree(
            batch=len(last),
            length=int(rows.length.max(initial=0)),
            n=int(table.length.sum()),
            segments=np.stack([table.start, table.start + table.length, table.parent, table.after], axis=1),
            keys=(),
            position=None,
            _table=table,
            _trajectories=rows,
            _last=last,
            _pads=NO_LEAVES,
            _absolute=False,
        )

    # -- per token --

    @property
    def dtype(self) -> np.dtype[Any]:
        """Index dtype of the per-token arrays."""
        return index_dtype(max(self.batch * self.length, self.n + 1))

    @functools.cached_property
    def row_index(self) -> Array:
        """[B, T] packed token of every grid position, -1 where dropped. O(B*T)."""
        flat = self._ranges.write(self.batch * self.length, self.dtype)
        self._pads.write(flat)
        return flat.reshape(self.batch, self.length)

    @functools.cached_property
    def _ranges(self) -> Ranges:
        return path_ranges(self._table, self._trajectories, self._last)

    @functools.cached_property
    def subtree_end(self) -> Array:
        """[N] one past the last packed token below n; n itself for a leaf pad. O(N)."""
        return np.repeat(self._table.after.astype(self.dtype), self._table.length)

    @functools.cached_property
    def column(self) -> Array:
        """[N] column of n, from the trajectory's first kept one on, or of the grid ("absolute"). O(N)."""
        table, rows = self._table, self._trajectories
        origin = np.r_[rows.first_column, 0][table.owner]
        if rows.source is None:
            out = ramps(table.depth + origin * self._absolute, table.length, self.dtype)
        else:
            where, segment = self._representatives
            shift = 0 if self._absolute else origin[segment]
            out = ramps(where.start % self.length - shift, where.length, self.dtype)
        out[self._pads.token] = self._pads.column
        return out

    @functools.cached_property
    def first(self) -> Array:
        """[N] flat grid position b*T + t of one representative of n. O(N)."""
        where = self._representatives[0]
        out = ramps(where.start, where.length, self.dtype)
        out[self._pads.token] = self._pads.first
        return out

    def _pack(self, values: Array) -> Array:
        """[N] values of a grid at the representatives."""
        flat = np.ascontiguousarray(values).reshape(-1)
        out = self._representatives[0].take(flat)
        out[self._pads.token] = flat[self._pads.first]
        return out

    @functools.cached_property
    def _representatives(self) -> tuple[Stretches, Array]:
        """Grid stretches of the packed tokens in order (anything for pads), and the segment of each."""
        table, rows = self._table, self._trajectories
        begin = np.where(table.pad, 0, np.r_[rows.start, 0][table.owner] + table.depth)
        if rows.source is None:
            return Stretches(begin, table.length), np.arange(len(begin))
        return rows.source.slices(begin, table.length)

    @functools.cached_property
    def depth(self) -> Array:
        """[N] number of ancestors of n. O(N)."""
        return ramps(self._table.depth, self._table.length, self.dtype)

    @functools.cached_property
    def parent(self) -> Array:
        """[N] packed token above n, -1 for a root. O(N)."""
        out = np.arange(-1, self.n - 1, dtype=self.dtype)
        ends = np.r_[self._table.start + self._table.length - 1, -1]
        out[self._table.start] = ends[self._table.parent]
        return out

    @functools.cached_property
    def multiplicity(self) -> Array:
        """[N] number of grid positions that map to n. O(N)."""
        # A trajectory passes through n iff it ends in n's subtree.
        before = np.zeros(self.n + 1, self.dtype)
        np.cumsum(np.bincount(self._last, minlength=self.n), out=before[1:])
        out = before[self.subtree_end] - before[:-1]
        out[self._pads.token] = self._pads.multiplicity()
        return out

    def tensor(
        self, name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        """One of the arrays (by attribute name) as a tensor. Not cached.

        Example:
            >>> RolloutTree.from_rows([[1, 2], [1, 3]]).tensor("row_index")
            tensor([[0, 1],
                    [0, 2]])
        """
        value = getattr(self, name, None)
        if not isinstance(value, np.ndarray):
            raise OptionError(argument="name", value=name, choices=_ARRAYS)
        return torch.from_numpy(value).to(device).to(dtype)

    # -- regions, figures, text --

    def layout(self, region: Array | None = None) -> Layout:
        """The packed rows that a region of the grid uses, and the maps both ways.

        O(N + M) for a range of columns of all rows (also if given as positions), else O(N + M log M).

        Args:
            region: [M] flat grid positions; None is the whole grid.

        Returns:
            the layout; see `Layout`.

        Example:
            >>> tree = RolloutTree.from_rows([[1, 2], [1, 3]])
            >>> last = tree.layout(np.array([1, 3]))
            >>> last.rows.tolist(), last.row_index.tolist(), last.offsets.tolist(), last.positions.tolist()
            ([1, 2], [0, 1], [0, 1, 2], [0, 1])
        """
        columns = columns_of(region, self.batch, self.length)
        if columns is not None:
            found = column_layout(self._ranges, self._pads, self.n, self.batch, self.length, columns)
            if found is not None:
                return found
        flat = self.row_index.reshape(-1)
        return any_layout(flat if region is None else flat[region], self.n)

    @functools.cached_property
    def sharing(self) -> Sharing:
        """Token and pair counts, dense and packed. O(S + I).

        Example:
            >>> print(RolloutTree.from_rows([[1, 2, 3], [1, 2, 4]]).sharing)
            4 packed of 6 kept and 6 grid tokens (1.50x tokens, 1.33x pairs)
        """
        size, depth = self._table.length[~self._table.pad], self._table.depth[~self._table.pad]
        kept = self._trajectories.length
        return Sharing(
            grid=self.batch * self.length,
            kept=int(kept.sum()),
            packed=self.n,
            grid_pairs=self.batch * (self.length * (self.length + 1) // 2),
            kept_pairs=int((kept * (kept + 1) // 2).sum()),
            packed_pairs=int((size * depth + size * (size + 1) // 2).sum()),
        )

    def to_rows(self, key: int = 0) -> list[Array]:
        """The trajectories' values of one key column: one array per row (per trajectory, with documents).

        Raises:
            TreeError: the tree was built without keep_keys.

        Example:
            >>> [row.tolist() for row in RolloutTree.from_rows([[1, 2], [], [1]]).to_rows()]
            [[1, 2], [], [1]]
        """
        from treecompile.runtime.tree_graph import to_rows

        return to_rows(self, key)

    @property
    def graph(self) -> nx.DiGraph:
        """The segments as a `networkx.DiGraph`; see `treecompile.runtime.tree_graph.to_graph`.

        Example:
            >>> graph = RolloutTree.from_rows([[1, 2, 3], [1, 2, 4]]).graph
            >>> list(graph.edges), graph.nodes[0]["tokens"], graph.nodes[0]["multiplicity"]
            ([(0, 1), (0, 2)], 2, 2)
        """
        from treecompile.runtime.tree_graph import to_graph

        return to_graph(self)

    def text(self, max_depth: int | None = None) -> str:
        """The segments as a drawing: number, tokens, columns, positions, and how many grid rows pass.

        Args:
            max_depth: levels of segments to draw; None draws all.
        """
        from treecompile.runtime.tree_graph import to_text

        return to_text(self, max_depth)

    def __repr__(self) -> str:
        return f"RolloutTree(B={self.batch}, T={self.length}, N={self.n}, S={len(self.segments)})"


_ARRAYS = (
    "row_index",
    "subtree_end",
    "column",
    "position",
    "parent",
    "depth",
    "multiplicity",
    "first",
    "segments",
)


# -- building --


def _build(
    grid: Grid, column_key: ColumnKey | None, position_key: int | None, keep_keys: bool
) -> RolloutTree:
    rows, pads = cut(grid)
    keys = [flat for key in grid.keys if (flat := _key_along(key, rows)) is not None]
    root = None
    if column_key is not None and rows.source is not None:
        keys.append(_columns(grid, rows, column_key))
    elif column_key == "absolute":
        # Without holes the column says no more than where the trajectory starts.
        root = rows.first_column
    prefixes = shared_prefixes(keys, rows.start, rows.length, root)
    table, last = fork(prefixes, rows.start, rows.length)
    leaves = NO_LEAVES
    if pads is not None and len(pads.before):
        packed = path_ranges(table, rows, last).packed
        table, last, leaves = add_pads(grid, pads, table, last, column_key, packed)
    tree = RolloutTree(
        batch=grid.batch,
        length=grid.length,
        n=int(table.length.sum()),
        segments=np.stack([table.start, table.start + table.length, table.parent, table.after], axis=1),
        keys=(),
        position=None,
        _table=table,
        _trajectories=rows,
        _last=last,
        _pads=leaves,
        _absolute=column_key == "absolute",
    )
    wanted = range(len(grid.keys)) if keep_keys else () if position_key is None else (position_key,)
    columns = {i: tree._pack(grid.keys[i]) for i in wanted}
    position = None if position_key is None else columns[position_key]
    return replace(tree, keys=tuple(columns[i] for i in wanted if i != position_key), position=position)


def _key_along(key: Array, rows: Trajectories) -> Array | None:
    """The key as a flat array in which trajectories are slices; None if it cannot tell trajectories apart."""
    if rows.source is not None:
        return rows.source.take(np.ascontiguousarray(key).reshape(-1))
    if key.strides[0] == 0 and bool(np.all(rows.first_column == rows.first_column[:1])):
        return None  # expanded over the batch: the same in all rows
    return np.ascontiguousarray(key).reshape(-1)


def _columns(grid: Grid, rows: Trajectories, column_key: ColumnKey) -> Array:
    """The column of every token in compact form."""
    assert rows.source is not None
    column = rows.source.start % grid.length
    if column_key == "step":
        column = column - rows.first_column[np.searchsorted(rows.start, rows.source.offset, side="right") - 1]
    return ramps(column, rows.source.length, index_dtype(grid.size))
