"""Where rounds end: the search for cuts that `treecompile.runtime.rounds` explains.

Suffixes: u shapes of subtrees, v choices of cuts that are tried at once. Equal subtrees (rollouts of one prompt are
full of them) have equal needs: the search works on the distinct ones.

Times count from the end of the last round backwards, in steps of one block.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from treecompile.runtime.stretches import Array

__all__ = ["FIRST", "NEVER", "VISITS", "Chains", "Cuts", "Shapes", "States", "needs", "search"]

States = Literal["boundary", "final"]

FIRST = 200_000  # chains times rounds; above that there is no search
VISITS = 800_000  # visits of (shape, choice) by the passes of the search
NEVER = 1 << 40
_LEVEL = 1_500  # visits that a level of chains counts for, whatever it holds
_AT_ONCE = 128  # choices


@dataclass(frozen=True)
class Chains:
    """Maximal runs of blocks with one child, contiguous in preorder: start, length, parent, children of each."""

    start: list[int]
    length: list[int]
    parent: list[int]
    children: list[list[int]]


@dataclass(frozen=True)
class Cuts:
    """cuts: ascending, one fewer than rounds. total: sum of the longest sequences. proved: it is the least."""

    cuts: tuple[int, ...]
    total: int
    rounds: int
    proved: bool


@dataclass(frozen=True)
class Shapes:
    """Distinct subtrees of the forest of chains, children before parents.

    of: shape of each chain. length: of the first chain. children: (shape, how many) below it. roots: shapes of roots.
    """

    of: list[int]
    length: list[int]
    children: list[list[tuple[int, int]]]
    roots: list[int]

    @staticmethod
    def find(chains: Chains) -> Shapes:
        """O(chains), but for sorting siblings."""
        known: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
        of = [0] * len(chains.start)
        for c in range(len(of) - 1, -1, -1):
            below: tuple[tuple[int, int], ...] = ()
            if chains.children[c]:
                below = tuple(sorted(Counter(of[child] for child in chains.children[c]).items()))
            of[c] = known.setdefault((chains.length[c], below), len(known))
        roots = sorted({of[c] for c, p in enumerate(chains.parent) if p < 0})
        return Shapes(of, [length for length, _ in known], [list(below) for _, below in known], roots)


def needs(shapes: Shapes, boundary: bool, cuts: Sequence[int]) -> tuple[int, list[int], list[int], list[int]]:
    """(largest need of a root, values that are rounded up, needs below chains, needs of shapes).

    O(shapes * cuts) and the number of distinct children.
    """
    total: list[int] = []
    values, ends = [], []
    for length, children in zip(shapes.length, shapes.children, strict=True):
        first = second = 0
        for child, count in children:
            need = total[child]
            if need > first:
                first, second = need, need if count > 1 else first
            elif need > second:
                second = need
        if children:
            value = second if boundary else first
            values.append(value)
            at = bisect.bisect_left(cuts, value)
            first = max(first, cuts[at] if at < len(cuts) else NEVER)
            ends.append(first)
        total.append(length + first)
    return max((total[root] for root in shapes.roots), default=0), values, ends, total


def search(shapes: Shapes, boundary: bool, rounds: int) -> Cuts:
    """The cuts of the least sum of longest sequences, as far as the budget goes."""
    cuts: tuple[int, ...] = ()
    while len(cuts) < rounds - 1:
        low = cuts[-1] if cuts else 0
        cuts = (*cuts, max(v for v in needs(shapes, boundary, cuts)[1] if low < v < NEVER))
    total = needs(shapes, boundary, cuts)[0]
    proved = rounds <= 2 or total == _height(shapes)
    beam = None if proved else _Beam(shapes, boundary, rounds, cuts, total)
    width = 1
    while beam is not None and beam.left > 0:
        proved = beam.sweep(width) or beam.total == beam.height
        cuts, total = beam.cuts, beam.total
        if proved:
            break
        width *= 4
    return Cuts(cuts, total, rounds, proved)


def _height(shapes: Shapes) -> int:
    total: list[int] = []
    for length, children in zip(shapes.length, shapes.children, strict=True):
        total.append(length + max((total[child] for child, _ in children), default=0))
    return max((total[root] for root in shapes.roots), default=0)


class _Beam:
    """The search, one cut at a time, with the best plan so far."""

    def __init__(
        self, shapes: Shapes, boundary: bool, rounds: int, cuts: tuple[int, ...], total: int
    ) -> None:
        self.boundary, self.rounds, self.cuts, self.total = boundary, rounds, cuts, total
        self.height = _height(shapes)
        self.left = VISITS
        self.length_u1 = np.array(shapes.length, np.int64)[:, None]
        # More than any need: a path has every shape once at most, and cuts round up to less than the total.
        self.span = total + sum(shapes.length) + 2
        self.roots = np.array(shapes.roots, np.int64)
        level: list[int] = []
        for below in shapes.children:
            level.append(1 + max((level[child] for child, _ in below), default=-1))
        # Per level, lowest first: shapes; their children, of equal ones two; where those of a shape begin, how many.
        self.levels: list[tuple[Array, Array, Array, Array]] = []
        order = np.argsort(level, kind="stable")
        for shape in np.split(order, np.cumsum(np.bincount(level))[:-1])[1:]:
            listed = [
                [child for child, count in shapes.children[u] for _ in range(min(count, 2))]
                for u in shape.tolist()
            ]
            size = np.array([len(below) for below in listed], np.int64)
            children = np.array([child for below in listed for child in below], np.int64)
            self.levels.append((shape, children, np.cumsum(size) - size, size))

    def sweep(self, width: int) -> bool:
        """Look for a better plan; True if the best plan is now known to be the best of all."""
        complete = True
        kept = np.zeros((1, 0), np.int64)
        values = self._bound(kept)[2]
        for missing in range(self.rounds - 2, -1, -1):
            tried = [
                self._extended(cuts, column, missing) for cuts, column in zip(kept, values.T, strict=True)
            ]
            choices = np.concatenate(tried)
            kept, bounds = choices[:0], np.zeros(0, np.int64)
            values = np.zeros((len(values), 0), np.int64)
            for at in range(0, len(choices), _AT_ONCE):
                if self.left < 0:
                    return False
                part = choices[at : at + _AT_ONCE]
                bound, order, value = self._bound(part)
                good = (order <= missing) & (bound < self.total)
                if missing == 0 and good.any():
                    best = np.flatnonzero(good)[bound[good].argmin()]
                    self.total, self.cuts = int(bound[best]), tuple(part[best].tolist())
                kept = np.concatenate([kept, part[good]])
                bounds = np.concatenate([bounds, bound[good]])
                values = np.concatenate([values, value[:, good]], axis=1)
                if len(kept) > width and missing:
                    complete = False
                    # Least bound first; then the latest cut, which leaves least to the cuts to come.
                    chosen = np.lexsort((-kept[:, -1], bounds))[:width]
                    kept, bounds, values = kept[chosen], bounds[chosen], values[:, chosen]
            if len(kept) == 0:
                break
        return complete

    def _extended(self, cuts: Array, values: Array, missing: int) -> Array:
        """[v, cuts + 1] the choices for one more cut."""
        fresh = np.unique(values)
        fresh = fresh[(fresh > 0) & (fresh < self.total)]
        fresh = fresh if missing else fresh[-1:]
        return np.concatenate([np.tile(cuts, (len(fresh), 1)), fresh[:, None]], axis=1)

    def _bound(self, cuts_vq: Array) -> tuple[Array, Array, Array]:
        """A lower bound on the total [v], on the cuts still missing [v], and the values beyond the last cut."""
        count, given = cuts_vq.shape
        shapes = len(self.length_u1)
        self.left -= count * shapes + _LEVEL * len(self.levels)
        # All choices in one sorted array, each with a last entry that says: beyond.
        shift = np.arange(count) * self.span
        ends = np.concatenate([cuts_vq, np.full((count, 1), self.span - 1)], axis=1)
        ends = (ends + shift[:, None]).reshape(-1)
        last = cuts_vq[:, -1] if given else np.zeros(count, np.int64)
        need = np.repeat(self.length_u1, count, axis=1)  # of a shape, its first chain included
        missing = np.zeros((shapes, count), np.int64)
        beyond = [np.zeros((0, count), np.int64)]
        for shape, children, begins, size in self.levels:
            reach = need[children]
            order = np.where(reach > last, missing[children], -1)
            longest = np.maximum.reduceat(reach, begins, axis=0)
            most = np.maximum.reduceat(order, begins, axis=0)
            if self.boundary:
                value = _second(reach, longest, begins, size)
                missing[shape] = np.maximum(0, np.maximum(most, _second(order, most, begins, size) + 1))
            else:
                value = longest
                missing[shape] = most + 1
            up = ends[np.searchsorted(ends, value + shift)] - shift
            out = up == self.span - 1
            need[shape] += np.maximum(longest, np.where(out, value, up))
            beyond.append(np.where(out, value, 0))
        return need[self.roots].max(axis=0), missing[self.roots].max(axis=0), np.concatenate(beyond)


def _second(values: Array, most: Array, begins: Array, size: Array) -> Array:
    """The second largest value of each group of at least two; equal ones count apart."""
    is_most = values == np.repeat(most, size, axis=0)
    several = np.add.reduceat(is_most, begins, axis=0, dtype=np.int64) > 1
    below: Array = np.maximum.reduceat(np.where(is_most, -1, values), begins, axis=0)
    return np.where(several, most, below)
