"""Where rounds end: the search for cuts that `treecompile.runtime.rounds` explains.

Suffixes: c chains, v choices of cuts that are tried at once.

Times count from the end of the last round backwards, in steps of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from treecompile.runtime.stretches import Array

__all__ = ["FIRST", "NEVER", "VISITS", "Chains", "Cuts", "States", "needs", "search"]

States = Literal["boundary", "final"]

FIRST = 200_000  # visits of chains for the first plan; above that there is no search
VISITS = 2_000_000  # visits of (chain, choice) by the passes of the search
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


def needs(chains: Chains, boundary: bool, cuts: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """(the largest need of a root, the values that are rounded up, the needs below chains). O(chains * cuts)."""
    first = [0] * len(chains.start)
    second = [0] * len(chains.start)
    values, ends, top = [], [], 0
    for c in range(len(chains.start) - 1, -1, -1):
        need = first[c]
        if chains.children[c]:
            value = second[c] if boundary else need
            values.append(value)
            need = max(need, next((q for q in cuts if q >= value), NEVER))
            ends.append(need)
        need += chains.length[c]
        p = chains.parent[c]
        if p < 0:
            top = max(top, need)
        elif need > first[p]:
            first[p], second[p] = need, first[p]
        elif need > second[p]:
            second[p] = need
    return top, values, ends


def search(chains: Chains, boundary: bool, rounds: int) -> Cuts:
    """The cuts of the least sum of longest sequences, as far as the budget goes."""
    cuts: tuple[int, ...] = ()
    while len(cuts) < rounds - 1:
        low = cuts[-1] if cuts else 0
        cuts = (*cuts, max(v for v in needs(chains, boundary, cuts)[1] if low < v < NEVER))
    total = needs(chains, boundary, cuts)[0]
    proved = rounds <= 2 or total == _height(chains)
    beam = None if proved else _Beam(chains, boundary, rounds, cuts, total)
    width = 1
    while beam is not None and beam.left > 0:
        proved = beam.sweep(width) or beam.total == beam.height
        cuts, total = beam.cuts, beam.total
        if proved:
            break
        width *= 4
    return Cuts(cuts, total, rounds, proved)


def _height(chains: Chains) -> int:
    bottom = [0] * len(chains.start)
    for c, p in enumerate(chains.parent):
        bottom[c] = chains.length[c] + (bottom[p] if p >= 0 else 0)
    return max(bottom, default=0)


class _Beam:
    """The search, one cut at a time, with the best plan so far."""

    def __init__(
        self, chains: Chains, boundary: bool, rounds: int, cuts: tuple[int, ...], total: int
    ) -> None:
        self.boundary, self.rounds, self.cuts, self.total = boundary, rounds, cuts, total
        self.height = _height(chains)
        self.left = VISITS
        self.length_c1 = np.array(chains.length, np.int64)[:, None]
        parent = np.array(chains.parent, np.int64)
        level = [0] * len(parent)
        for c, p in enumerate(chains.parent):
            level[c] = level[p] + 1 if p >= 0 else 0
        order = np.argsort(level, kind="stable")
        # Per level: chains, where the children of a chain begin among them, that chain, how many they are.
        self.levels: list[tuple[Array, Array, Array, Array]] = []
        for chain in np.split(order, np.cumsum(np.bincount(level))[:-1]):
            above = parent[chain]
            begins = np.flatnonzero(np.r_[True, above[1:] != above[:-1]])
            self.levels.append((chain, begins, above[begins], np.diff(np.r_[begins, len(chain)])))

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
        chains = len(self.length_c1)
        self.left -= count * chains + _LEVEL * len(self.levels)
        # All choices in one sorted array, each with a last entry that says: beyond.
        span = 2 * int(self.length_c1.sum()) + 2
        shift = np.arange(count) * span
        ends = (np.concatenate([cuts_vq, np.full((count, 1), span - 1)], axis=1) + shift[:, None]).reshape(-1)
        last = cuts_vq[:, -1] if given else np.zeros(count, np.int64)
        need, missing = np.zeros((chains, count), np.int64), np.zeros((chains, count), np.int64)
        beyond = [np.zeros((0, count), np.int64)]
        for chain, begins, above, size in self.levels[:0:-1]:
            reach = need[chain] + self.length_c1[chain]
            order = np.where(reach > last, missing[chain], -1)
            longest = np.maximum.reduceat(reach, begins, axis=0)
            if self.boundary:
                value = _second(reach, longest, begins, size)
                most = np.maximum.reduceat(order, begins, axis=0)
                missing[above] = np.maximum(0, np.maximum(most, _second(order, most, begins, size) + 1))
            else:
                value = longest
                missing[above] = np.maximum.reduceat(order, begins, axis=0) + 1
            up = ends[np.searchsorted(ends, value + shift)] - shift
            out = up == span - 1
            need[above] = np.maximum(longest, np.where(out, value, up))
            beyond.append(np.where(out, value, 0))
        root = self.levels[0][0]
        top = (need[root] + self.length_c1[root]).max(axis=0)
        return top, missing[root].max(axis=0), np.concatenate(beyond)


def _second(values: Array, most: Array, begins: Array, size: Array) -> Array:
    """The second largest value of each group of at least two; equal ones count apart."""
    is_most = values == np.repeat(most, size, axis=0)
    several = np.add.reduceat(is_most, begins, axis=0, dtype=np.int64) > 1
    below: Array = np.maximum.reduceat(np.where(is_most, -1, values), begins, axis=0)
    return np.where(several, most, below)
