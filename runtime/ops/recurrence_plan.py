"""Host tables of the tree recurrence: blocks of the chunk trie by levels, cut into slices that fit a budget.

Legend: N packed tokens, K blocks, C rows of a block (its tokens, padded), L tokens of all blocks.

Blocks of one *level* have equally many blocks above them: no state passes between them, and all of them read states
of the level before. Within a level blocks are in preorder, so the children of a block follow each other, in the order
of their parents. A *slice* is a run of whole levels, or a part of one level that does not fit the budget alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treecompile.runtime.cache import TreeCache
from treecompile.runtime.chunks import Alignment, ChunkPlan, chunk_plan
from treecompile.runtime.stretches import Array
from treecompile.runtime.tree import RolloutTree

__all__ = ["RecurrenceTables", "Slice", "Step", "block_plan", "recurrence_tables"]

# Trees whose tables are kept, and ways to slice each.
KEPT, KEPT_SLICES = 16, 8


@dataclass(frozen=True)
class Step:
    """Consecutive blocks of one level.

    Attributes:
        begin, end: the blocks, counted in their slice.
        place: the first one, counted in its level.
        root: whether this is the first level.
        up: int64 [end - begin], the parents, counted in their level; None on the first level, and where every block
            of the level above has one child.
        opens, closes: whether these are the first and the last blocks of the level.
        below: whether there is a next level.
        children: int64 [parents + 1], CSR offsets of the whole level's blocks by parent; None where every block of
            the level above has one child, and on the first level.
    """

    begin: int
    end: int
    place: int
    root: bool
    up: Tensor | None
    opens: bool
    closes: bool
    below: bool
    children: Tensor | None


@dataclass(frozen=True)
class Slice:
    """Blocks that are computed at once.

    Attributes:
        steps: by level.
        rows: int64 [K, C], the packed token in each row of a block; any where there is none.
        empty: int64, which of the K * C rows have none; None where all do.
        foreign: int64, the rows without a token or with one that another block owns; None where there are none.
        own_token, own_row: int64, the tokens that the slice owns, and the row of each, in order of the rows; `own_row`
            is None where all rows are owned.
        tokens, offsets, held: the tokens of the slice, ascending, and the CSR of rows that hold each; ``offsets`` is
            None where each token is in one row.
    """

    steps: tuple[Step, ...]
    rows: Tensor
    empty: Tensor | None
    foreign: Tensor | None
    own_token: Tensor
    own_row: Tensor | None
    tokens: Tensor
    offsets: Tensor | None
    held: Tensor


class RecurrenceTables:
    """Blocks of a tree in order of levels.

    Attributes:
        tokens: N.
        blocks: K.
        width: C, the length of the longest block.
        levels: number of levels.
        subtree_end: int32 [N] on the host, what the segment table says.
    """

    def __init__(self, plan: ChunkPlan, device: torch.device) -> None:
        tree = plan.tree
        self.device, self.tokens, self.blocks = device, tree.n, plan.blocks
        self.width = int(plan.length.max(initial=0))
        self.subtree_end = torch.from_numpy(tree.subtree_end.astype(np.int32))
        number = np.arange(plan.blocks)
        # Blocks above one: those before it whose subtree goes on.
        level = number - np.searchsorted(np.sort(plan.after), number, side="right")
        order = np.argsort(level, kind="stable")
        self.levels = int(level.max(initial=-1)) + 1
        self._bounds = np.searchsorted(level[order], np.arange(self.levels + 1))
        place = np.empty(plan.blocks, np.int64)
        place[order] = number - self._bounds[level[order]]
        parent = plan.parent[order]
        self._up = np.where(parent >= 0, place[parent], -1) if len(place) else parent
        self._rows = np.full((plan.blocks, self.width), self.tokens, np.int64)
        self._owned = self._rows.copy()
        length = plan.length[order]
        inside = np.arange(self.width) < length[:, None]
        at = plan.offsets[order][:, None] + np.arange(self.width)
        self._rows[inside] = plan.index[at[inside]]
        mine = inside & (np.arange(self.width) >= plan.replay[order][:, None])
        self._owned[mine] = self._rows[mine]
        self._made: dict[tuple[int, int], tuple[Slice, ...]] = {}

    def slices(self, most: int, width: int) -> tuple[Slice, ...]:
        """Cut into slices; kept.

        Args:
            most: blocks of a slice, at least 1.
            width: C, at least that of the blocks; the rows beyond are empty.
        """
        most = self.blocks if most >= self.blocks else most
        key = most, width
        made = self._made.get(key)
        if made is None:
            made = tuple(self._slice(steps, width) for steps in self._cut(most))
            if len(self._made) >= KEPT_SLICES:
                self._made.clear()
            self._made[key] = made
        return made

    def _cut(self, most: int) -> list[list[tuple[int, int, int]]]:
        """Slices as lists of (level, first block, last block + 1)."""
        out: list[list[tuple[int, int, int]]] = []
        room = 0
        for level in range(self.levels):
            begin, end = int(self._bounds[level]), int(self._bounds[level + 1])
            if end - begin <= room:
                out[-1].append((level, begin, end))
                room -= end - begin
                continue
            out += [[(level, at, min(at + most, end))] for at in range(begin, end, most)]
            room = most - (end - begin)  # nothing joins a part of a level: then this is below zero
        return out

    def _slice(self, parts: list[tuple[int, int, int]], width: int) -> Slice:
        begin, end = parts[0][1], parts[-1][2]
        rows, owned = (self._padded(x[begin:end], width).reshape(-1) for x in (self._rows, self._owned))
        own_row = np.flatnonzero(owned < self.tokens)
        filled = np.flatnonzero(rows < self.tokens)
        held = filled[np.argsort(rows[filled], kind="stable")]
        tokens, counts = np.unique(rows[held], return_counts=True)
        offsets = None if len(tokens) == len(held) else np.r_[0, np.cumsum(counts)]
        return Slice(
            steps=tuple(self._step(*part, begin) for part in parts),
            rows=self._tensor(np.minimum(rows, self.tokens - 1)).view(-1, width),
            empty=self._some(np.flatnonzero(rows == self.tokens)),
            foreign=self._some(np.flatnonzero(owned == self.tokens)),
            own_token=self._tensor(owned[own_row]),
            own_row=None if len(own_row) == len(rows) else self._tensor(own_row),
            tokens=self._tensor(tokens),
            offsets=None if offsets is None else self._tensor(offsets),
            held=self._tensor(held),
        )

    def _step(self, level: int, begin: int, end: int, base: int) -> Step:
        first, last = int(self._bounds[level]), int(self._bounds[level + 1])
        up = children = None
        if level:
            family = np.bincount(self._up[first:last], minlength=first - int(self._bounds[level - 1]))
            if not (family == 1).all():
                up, children = self._tensor(self._up[begin:end]), self._tensor(np.r_[0, np.cumsum(family)])
        return Step(
            begin=begin - base,
            end=end - base,
            place=begin - first,
            root=level == 0,
            up=up,
            opens=begin == first,
            closes=end == last,
            below=level + 1 < self.levels,
            children=children,
        )

    def _padded(self, rows: Array, width: int) -> Array:
        return np.pad(rows, ((0, 0), (0, width - self.width)), constant_values=self.tokens)

    def _some(self, values: Array) -> Tensor | None:
        return self._tensor(values) if len(values) else None

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self.device)


_kept: TreeCache[RecurrenceTables] = TreeCache(capacity=KEPT)


def block_plan(segments_host: Tensor, chunk: int, alignment: Alignment) -> ChunkPlan:
    """The blocks of a tree; "auto" takes the alignment with fewer of them, "trajectory" of equally many.

    Example:
        >>> table = torch.tensor([[0, 3, -1, 5], [3, 4, 0, 4], [4, 5, 0, 5]], dtype=torch.int32)
        >>> block_plan(table, 2, "trajectory"), block_plan(table, 2, "branch").blocks
        (ChunkPlan(C=2, alignment='trajectory', N=5, K=3), 4)
    """
    tree = RolloutTree.from_segments(segments_host.numpy())
    if alignment != "auto":
        return chunk_plan(tree, chunk, alignment=alignment)
    return min((chunk_plan(tree, chunk, alignment=each) for each in ("trajectory", "branch")), key=_blocks)


def _blocks(plan: ChunkPlan) -> int:
    return plan.blocks


def recurrence_tables(
    segments_host: Tensor, chunk: int, device: torch.device, alignment: Alignment = "trajectory"
) -> RecurrenceTables:
    """Return the tables of a tree, from the cache where the same table was seen before (contents are compared).

    Args:
        segments_host: int32 [S, 4] on the CPU, rows (start, end, parent row or -1, subtree end of start).
        chunk: C.
        device: where the index tensors go.
        alignment: of the chunks.

    Raises:
        TreeError: no table of a tree without leaf pads.
        OptionError: a chunk below 1, or an unknown alignment.

    Example:
        >>> table = torch.tensor([[0, 3, -1, 5], [3, 4, 0, 4], [4, 5, 0, 5]], dtype=torch.int32)
        >>> tables = recurrence_tables(table, 2, torch.device("cpu"))
        >>> tables.blocks, tables.levels, tables.slices(9, 2)[0].rows.tolist()
        (3, 2, [[0, 1], [2, 3], [2, 4]])
    """

    def build() -> RecurrenceTables:
        return RecurrenceTables(block_plan(segments_host, chunk, alignment), device)

    return _kept.get([segments_host], build, device=device, options=(chunk, alignment))
