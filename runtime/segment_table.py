"""A segment table read back: what a tree is made of, when only the table is at hand.

Legend: S segments, N packed tokens, I leaves.
"""

from __future__ import annotations

import numpy as np

from treecompile.runtime.errors import TreeError
from treecompile.runtime.segments import Segments
from treecompile.runtime.stretches import Array
from treecompile.runtime.trajectories import Trajectories

__all__ = ["read_segments"]


def read_segments(segments: object) -> tuple[Segments, Trajectories, Array]:
    """Segments, one trajectory per leaf, and the last packed token [I] of each. O(S log S).

    Args:
        segments: [S, 4] integers, rows (start, end, parent row or -1, subtree end of start) in preorder.

    Raises:
        TreeError: no such table, or one with leaf pads.

    Example:
        >>> table, rows, last = read_segments([[0, 2, -1, 5], [2, 4, 0, 4], [4, 5, 0, 5]])
        >>> table.depth.tolist(), rows.length.tolist(), last.tolist()
        ([0, 2, 2], [4, 3], [3, 4])
    """
    values = np.asarray(segments, np.int64).reshape(-1, 4)
    start, end, parent, after = np.ascontiguousarray(values.T)
    count, length = len(start), end - start
    number = np.arange(count)
    if (
        (length < 1).any()
        or (start != np.r_[0, end[:-1]][:count]).any()
        or ((parent < -1) | (parent >= number)).any()
        or (after < end).any()
        or (after > np.r_[after, end[-1:]][parent]).any()
    ):
        raise TreeError(
            argument="segments",
            problem="must be rows (start, end, parent, subtree end) of a tree in preorder, without leaf pads",
            value=values.tolist() if count <= 8 else f"{count} rows",
            remedy="pass tree.segments, with every packed token an ordinary one",
        )
    # Above a segment: the tokens before it, without those whose subtree has ended.
    order = np.argsort(after, kind="stable")
    ended = np.r_[0, np.cumsum(length[order])]
    depth = start - ended[np.searchsorted(after[order], start, side="right")]
    leaf = np.flatnonzero(after == end)
    owner = np.searchsorted(leaf, number)
    reached = (depth + length)[leaf]
    table = Segments(
        owner=owner,
        depth=depth,
        length=length,
        parent=parent,
        rank=start,
        pad=np.zeros(count, np.bool_),
        start=start,
        after=after,
    )
    rows = np.arange(len(leaf))
    width = int(reached.max(initial=0))
    paths = Trajectories(
        start=rows * width, length=reached, first_column=np.zeros_like(rows), row=rows, source=None
    )
    return table, paths, end[leaf] - 1
