"""Tables of the Triton executor of the tree recurrence: rows of blocks, paths of the chunk trie, forks.

Legend: N packed tokens, K blocks, C rows of a block, P paths, F forks.

Blocks are in preorder. A *path* starts at a block whose parent is not the block before it, and goes on from first child
to first child: a range of blocks. A *fork* is a block whose end state another path starts from; paths are cut behind
forks into *runs*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treecompile.runtime.cache import TreeCache
from treecompile.runtime.chunks import Alignment, ChunkPlan
from treecompile.runtime.ops.recurrence_plan import block_plan

__all__ = ["PathTables", "path_tables"]

KEPT = 16
# Tiles of fewer rows are not worth a class of shapes of their own.
LEAST_WIDTH = 64


@dataclass(frozen=True)
class PathTables:
    """On a device, int32 unless said.

    Attributes:
        tokens: N.
        blocks, paths, forks: K, P, F.
        width: C.
        subtree_end: [N] on the host, what the segment table says.
        rows: [K * C] packed token of each row, -1 where there is none.
        own: [K] first row of each block whose token the block owns; those before are replayed.
        offsets, held: int64 [N + 1], [L]: rows that hold each token, ascending.
        order: [P] every path behind the one that it starts from; `order_up`: before it.
        path_runs: [P + 1] runs of each path.
        run_begin: [runs + 1] blocks of each run.
        run_slot: [runs] slot of the fork that ends a run, -1 for none.
        path_slot: [P] slot of the fork that a path starts from, -1 for none.
        child_offsets, children: [F + 1], [.] paths that start from each slot, ascending.
    """

    tokens: int
    blocks: int
    paths: int
    forks: int
    width: int
    subtree_end: Tensor
    rows: Tensor
    own: Tensor
    offsets: Tensor
    held: Tensor
    order: Tensor
    order_up: Tensor
    path_runs: Tensor
    run_begin: Tensor
    run_slot: Tensor
    path_slot: Tensor
    child_offsets: Tensor
    children: Tensor


def _build(plan: ChunkPlan, width: int, device: torch.device) -> PathTables:
    def put(values: npt.ArrayLike) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)

    tree, blocks = plan.tree, plan.blocks
    number = np.arange(blocks)
    inside = np.arange(width) < plan.length[:, None]
    rows = np.full((blocks, width), -1, np.int32)
    rows[inside] = plan.index
    first = np.flatnonzero((plan.parent < 0) | (plan.parent != number - 1))
    above = plan.parent[first]
    fork = np.unique(above[above >= 0])
    slot_of = np.full(blocks + 1, -1)  # the last entry serves the parent -1
    slot_of[fork] = np.arange(len(fork))
    # Runs end behind forks and behind the last blocks of paths.
    run_begin = np.union1d(np.r_[first, blocks], fork + 1)
    path_slot = slot_of[above]
    started = np.argsort(path_slot, kind="stable")[(path_slot < 0).sum() :]
    level = number - np.searchsorted(np.sort(plan.after), number, side="right")
    size = np.diff(np.r_[first, blocks])
    order = np.lexsort((-size, level[first]))
    flat = put(rows.reshape(-1))
    empty = rows.size - len(plan.index)
    token, held = (x[empty:] for x in flat.sort(stable=True))
    return PathTables(
        tokens=tree.n,
        blocks=blocks,
        paths=len(first),
        forks=len(fork),
        width=width,
        subtree_end=torch.from_numpy(tree.subtree_end.astype(np.int32)),
        rows=flat,
        own=put(plan.replay),
        offsets=torch.searchsorted(token, torch.arange(tree.n + 1, dtype=torch.int32, device=device)),
        held=held,
        order=put(order),
        order_up=put(order[::-1]),
        path_runs=put(np.searchsorted(run_begin, np.r_[first, blocks])),
        run_begin=put(run_begin),
        run_slot=put(slot_of[run_begin[1:] - 1]),
        path_slot=put(path_slot),
        child_offsets=put(np.r_[0, np.cumsum(np.bincount(path_slot[started], minlength=len(fork)))]),
        children=put(started),
    )


_kept: TreeCache[PathTables] = TreeCache(capacity=KEPT)


def path_tables(
    segments_host: Tensor, chunk: int, device: torch.device, alignment: Alignment = "trajectory"
) -> PathTables:
    """Return the tables of a tree, from the cache where the same table was seen before (contents are compared).

    Args:
        segments_host: int32 [S, 4] on the CPU, rows (start, end, parent row or -1, subtree end of start).
        chunk: most tokens of a block; C is the next power of two, at least `LEAST_WIDTH`.
        device: where the tables go.
        alignment: of the chunks.

    Raises:
        TreeError: no table of a tree without leaf pads.
        OptionError: a chunk below 1, or an unknown alignment.

    Example:
        >>> table = torch.tensor([[0, 3, -1, 5], [3, 4, 0, 4], [4, 5, 0, 5]], dtype=torch.int32)
        >>> tables = path_tables(table, 2, torch.device("cpu"))
        >>> tables.rows.view(-1, 64)[:, :2].tolist(), tables.path_slot.tolist()
        ([[0, 1], [2, 3], [2, 4]], [-1, 0])
        >>> tables.run_begin.tolist(), tables.run_slot.tolist(), tables.own.tolist()
        ([0, 1, 2, 3], [0, -1, -1], [0, 0, 1])
    """

    def build() -> PathTables:
        width = max(LEAST_WIDTH, 1 << (chunk - 1).bit_length())
        return _build(block_plan(segments_host, chunk, alignment), width, device)

    return _kept.get([segments_host], build, device=device, options=(chunk, alignment))
