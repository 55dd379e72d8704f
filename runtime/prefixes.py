"""Shared prefixes of many token sequences: the part of tree building that looks at tokens.

Method. All sequences of a group agree so far; one of them is the pivot. Every other one is compared with the
pivot until they part; those that part at the same place with the same token form the next group. A token of a
sequence is compared once (with the pivot's token at that depth) because the next group goes on where it
parted, so the work is O(tokens) whatever the shape of the tree. Pivots are drawn at random (fixed seed),
which halves a sequence's group in expectation: O(log I) rounds, each vectorised over all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treecompile.runtime.stretches import Array

__all__ = ["Prefixes", "shared_prefixes"]

# Widths of the vectorised comparisons; what agrees over all of them is compared sequence by sequence,
# uncopied.
_WIDTHS = (16, 128)
_BLOCK = 1 << 18  # elements copied at a time by a vectorised comparison: stays in cache
_STRIDE = 1 << 14  # elements compared at a time by the sequence-wise comparison


@dataclass(frozen=True)
class Prefixes:
    """Where each sequence leaves the tree built so far.

    pivot [I]: the sequence whose path i follows first, -1 for the first of a root group.
    shared [I]: tokens that i takes from that path. Tokens shared[i] .. length[i] are i's own; other sequences
        may follow them. A sequence without own tokens (shared == length) is never a pivot.
    """

    pivot: Array
    shared: Array


def shared_prefixes(
    keys: Sequence[Array], start: Array, length: Array, root: Array | None = None
) -> Prefixes:
    """Find the pivot and the shared length of every sequence.

    Args:
        keys: flat arrays; sequence i has the keys ``k[start[i] : start[i] + length[i]]`` for every k.
        start, length: [I] int64, length >= 1.
        root: [I] integers; sequences with unequal values share nothing.

    Notes:
        Time O(sum of lengths * len(keys)), memory O(I) plus a constant block.
    """
    count = len(start)
    pivot, shared = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    order = np.random.default_rng(0).permutation(count)
    if root is not None:
        order = order[np.argsort(root[order], kind="stable")]
        heads = np.r_[True, root[order][1:] != root[order][:-1]][:count]
    else:
        heads = np.arange(count) == 0
    rows, against = _followers(order, heads)
    depth = np.zeros(len(rows), np.int64)
    while len(rows):
        agreed = _compare(keys, start, length, rows, against, depth)
        pivot[rows], shared[rows] = against, agreed
        go_on = agreed < length[rows]
        rows, against, agreed = rows[go_on], against[go_on], agreed[go_on]
        rows, heads = _group(keys, start, rows, against, agreed)
        rows, against = _followers(rows, heads)
        depth = shared[rows] + 1  # a group shares the token at which it left the old pivot
    return Prefixes(pivot, shared)


def _followers(order: Array, heads: Array) -> tuple[Array, Array]:
    """(members that are not the head of their group, the head of each)."""
    group = np.cumsum(heads) - 1
    return order[~heads], order[heads][group[~heads]]


def _group(
    keys: Sequence[Array], start: Array, rows: Array, against: Array, agreed: Array
) -> tuple[Array, Array]:
    """Sort rows by (old pivot, depth, token there), keeping their random order within; mark group heads."""
    at = start[rows] + agreed
    columns = [key[at] for key in keys] + [agreed, against]
    order = np.lexsort(columns)
    heads = np.zeros(len(rows), np.bool_)
    heads[:1] = True
    for column in columns:
        heads[1:] |= column[order][1:] != column[order][:-1]
    return rows[order], heads


def _compare(
    keys: Sequence[Array], start: Array, length: Array, rows: Array, against: Array, depth: Array
) -> Array:
    """[R] leading tokens in which rows and their pivots agree, given that they agree up to depth."""
    limit = np.minimum(length[rows], length[against])
    agreed = np.minimum(depth, limit)
    left, right = start[rows], start[against]
    pending = np.flatnonzero(agreed < limit)
    for width in _WIDTHS:
        step = max(1, _BLOCK // width)
        parts = [
            _window(keys, left, right, agreed, limit, pending[i : i + step], width)
            for i in range(0, len(pending), step)
        ]
        pending = np.concatenate(parts) if parts else pending
    for i in pending.tolist():
        done = int(agreed[i])
        agreed[i] = done + _common(keys, int(left[i]) + done, int(right[i]) + done, int(limit[i]) - done)
    return agreed


def _window(
    keys: Sequence[Array], left: Array, right: Array, agreed: Array, limit: Array, pending: Array, width: int
) -> Array:
    """Advance ``agreed`` (in place) by at most width tokens; return those of ``pending`` that still agree."""
    offset = np.arange(width)
    a = (left[pending] + agreed[pending])[:, None] + offset
    b = (right[pending] + agreed[pending])[:, None] + offset
    differs = np.zeros(a.shape, np.bool_)
    for key in keys:
        # Windows may reach past a sequence's end, even past the array's: clipped here, cut at limit below.
        differs |= key.take(a, mode="clip") != key.take(b, mode="clip")
    where = differs.argmax(axis=1)
    found = differs[np.arange(len(pending)), where]
    reached = agreed[pending] + np.where(found, where, width)
    agreed[pending] = np.minimum(reached, limit[pending])
    rest: Array = pending[~found & (reached < limit[pending])]
    return rest


def _common(keys: Sequence[Array], left: int, right: int, limit: int) -> int:
    for key in keys:
        limit = _common_in(key, left, right, limit)
    return limit


def _common_in(key: Array, left: int, right: int, limit: int) -> int:
    begin, step = 0, 1024
    while begin < limit:
        end = min(begin + step, limit)
        differs = key[left + begin : left + end] != key[right + begin : right + end]
        at = int(differs.argmax())
        if differs[at]:
            return begin + at
        begin, step = end, min(4 * step, _STRIDE)
    return limit
