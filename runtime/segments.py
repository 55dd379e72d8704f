"""The segment table: from shared prefixes to a depth-first order.

Legend: I trajectories, S segments, N packed tokens.

Everything per token follows from S rows, so that building a tree touches no per-token array of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treecompile.runtime.prefixes import Prefixes
from treecompile.runtime.stretches import Array

__all__ = ["Segments", "attach_pads", "fork"]


@dataclass(frozen=True)
class Segments:
    """S segments; once arranged, in preorder.

    owner [S]: a trajectory that runs through the whole segment (for a pad: -1).
    depth [S]: trajectory-wise index of the first token.
    length [S]: tokens.
    parent [S]: segment that ends just above, -1 for a root; always smaller than the segment's own number.
    rank [S]: breaks ties among siblings of equal subtree (a grid position).
    pad [S]: True for a leaf pad, which nothing sees (its subtree_end is its own start).
    start, after [S]: first packed token, and one past the last packed token of the subtree.
    """

    owner: Array
    depth: Array
    length: Array
    parent: Array
    rank: Array
    pad: Array
    start: Array
    after: Array


def fork(prefixes: Prefixes, start: Array, length: Array) -> tuple[Segments, Array]:
    """Cut the trajectories' own tokens where others leave them. O(I log I).

    Returns:
        the arranged segments, and the packed token [I] at which each trajectory ends.
    """
    pivot, shared = prefixes.pivot, prefixes.shared
    owners = np.flatnonzero(shared < length)
    # A piece starts where its owner leaves the pivot, and where others leave the owner before its end.
    leaving = owners[(shared[owners] > 0) & (shared[owners] < length[pivot[owners]])]
    span = int(length.max(initial=0)) + 1
    code = np.unique(np.r_[owners * span + shared[owners], pivot[leaving] * span + shared[leaving]])
    owner, depth = np.divmod(code, span)
    last_of_owner = np.r_[owner[1:] != owner[:-1], True][: len(owner)]
    size = np.where(last_of_owner, length[owner], np.r_[depth[1:], 0][: len(depth)]) - depth
    first_of_owner = np.r_[True, last_of_owner[:-1]][: len(owner)]
    above = (
        np.searchsorted(code, pivot[owner] * span + depth) - 1
    )  # the pivot's piece that ends at this depth
    parent = np.where(first_of_owner, np.where(depth > 0, above, -1), np.arange(len(code)) - 1)
    # A trajectory without own tokens ends on those of its pivot.
    holder = np.where(shared < length, np.arange(len(length)), pivot)
    end_piece = np.searchsorted(code, holder * span + length - 1, side="right") - 1
    joined, segment_of = _join(owner, depth, size, parent, start)
    segments, number = arrange(joined)
    end = number[segment_of[end_piece]]
    return segments, segments.start[end] + length - 1 - segments.depth[end]


def _join(owner: Array, depth: Array, size: Array, parent: Array, start: Array) -> tuple[Segments, Array]:
    """Merge an only child into its parent: a trajectory that merely ends above another is no fork.

    Returns:
        the segments, not yet arranged, and the segment of every piece.
    """
    children = np.bincount(parent[parent >= 0], minlength=len(owner))
    only = (parent >= 0) & (children[parent] == 1)
    kept, head = np.flatnonzero(~only), np.arange(len(owner))
    top = depth.copy()
    for s in np.flatnonzero(only)[np.argsort(depth[only], kind="stable")].tolist():
        head[s] = head[parent[s]]
        top[s] = top[parent[s]]
    # The bottom of a chain speaks for it: its owner runs through all of it.
    bottom = np.flatnonzero(children != 1)
    order = np.argsort(head[bottom])
    bottom = bottom[order]
    number = np.full(len(owner), -1, np.int64)
    number[kept] = np.arange(len(kept))
    above = parent[kept]
    joined = Segments(
        owner=owner[bottom],
        depth=top[bottom],
        length=depth[bottom] + size[bottom] - top[bottom],
        parent=np.where(above >= 0, number[head[above]], -1),
        rank=start[owner[bottom]] + top[bottom],
        pad=np.zeros(len(kept), np.bool_),
        start=top[:0],
        after=top[:0],
    )
    return joined, number[head]


def arrange(segments: Segments) -> tuple[Segments, Array]:
    """Depth-first preorder, the largest subtree first among siblings. O(S log S).

    Returns:
        the segments in order, and the new number of each old segment.
    """
    count = len(segments.owner)
    by_depth = np.argsort(segments.depth, kind="stable")
    parents, sizes = segments.parent.tolist(), segments.length.tolist()
    total = list(sizes)
    for s in by_depth[::-1].tolist():
        if parents[s] >= 0:
            total[parents[s]] += total[s]
    totals = np.array(total, np.int64)
    siblings = np.lexsort((segments.rank, segments.pad, -totals, segments.parent))
    behind = np.cumsum(totals[siblings]) - totals[siblings]
    family = segments.parent[siblings]
    heads = np.r_[True, family[1:] != family[:-1]][:count]
    offset = np.empty(count, np.int64)
    offset[siblings] = behind - behind[heads][np.cumsum(heads) - 1]
    start = offset.tolist()
    for s in by_depth.tolist():
        p = parents[s]
        if p >= 0:
            start[s] += start[p] + sizes[p]
    starts = np.array(start, np.int64)
    order = np.argsort(starts)
    number = np.empty(count + 1, np.int64)
    number[order], number[-1] = np.arange(count), -1
    ordered = Segments(
        owner=segments.owner[order],
        depth=segments.depth[order],
        length=segments.length[order],
        parent=number[segments.parent[order]],
        rank=segments.rank[order],
        pad=segments.pad[order],
        start=starts[order],
        after=np.where(segments.pad, starts, starts + totals)[order],
    )
    return ordered, number[:-1]


def attach_pads(
    segments: Segments, last: Array, above: Array, depth: Array, rank: Array
) -> tuple[Segments, Array, Array]:
    """Add leaf pads, splitting segments so that a pad's parent ends one. O((S + P) log (S + P)).

    Args:
        segments: arranged, without pads.
        last: [I] packed tokens to be renumbered along.
        above: [P] packed token above each pad, -1 for none.
        depth: [P] trajectory-wise index of each pad.
        rank: [P] tie breaks.

    Returns:
        the arranged segments, the new ``last`` [I], and the packed token of every pad [P].
    """
    begin = np.union1d(segments.start, above[above >= 0] + 1)
    whole = np.searchsorted(segments.start, begin, side="right") - 1
    inside = begin < (segments.start + segments.length)[whole] if len(whole) else begin > 0
    begin, whole = begin[inside], whole[inside]
    shift = begin - segments.start[whole]
    is_head = shift == 0
    ends = np.where(np.r_[is_head[1:], True][: len(begin)], (segments.start + segments.length)[whole], 0)
    size = np.where(ends > 0, ends, np.r_[begin[1:], 0][: len(begin)]) - begin
    # Pieces of one segment follow each other; the last of them is what hangs above the segment's children.
    last_piece = np.searchsorted(whole, np.arange(len(segments.start)), side="right") - 1
    outer = segments.parent[whole]
    parent = np.where(is_head, np.where(outer >= 0, last_piece[outer], -1), np.arange(len(begin)) - 1)
    pads = len(above)
    holder = np.where(above >= 0, np.searchsorted(begin, above, side="right") - 1, -1)
    combined, number = arrange(
        Segments(
            owner=np.r_[segments.owner[whole], np.full(pads, -1)],
            depth=np.r_[segments.depth[whole] + shift, depth],
            length=np.r_[size, np.ones(pads, np.int64)],
            parent=np.r_[parent, holder],
            rank=np.r_[segments.rank[whole] + shift, rank],
            pad=np.r_[np.zeros(len(begin), np.bool_), np.ones(pads, np.bool_)],
            start=begin[:0],
            after=begin[:0],
        )
    )
    piece = np.searchsorted(begin, last, side="right") - 1
    moved = combined.start[number[piece]] + last - begin[piece] if len(last) else last
    return combined, moved, combined.start[number[len(begin) :]]
