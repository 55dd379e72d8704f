"""The round of every block, for given cuts, with as few handoffs as possible: see `treecompile.runtime.rounds`.

Here times count forwards, in steps of one block, through all rounds; ``bounds`` are the ends of the rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from treecompile.runtime.round_cuts import NEVER, Chains, Cuts, Shapes, needs
from treecompile.runtime.stretches import Array

__all__ = ["STATES", "TRIALS", "assign"]

STATES = 1_500_000  # (chain, time) states of one program; a round of a chain counts for 500 more
TRIALS = 50_000  # visits of chains by all trials of further cuts
_EXACT = 50  # visits that one round of one chain with children counts for in the program


def assign(chains: Chains, shapes: Shapes, boundary: bool, found: Cuts) -> tuple[Array, bool]:
    """(round of every block, whether the handoffs are the fewest)."""
    total, count = found.total, len(shapes.length)
    inner = sum(map(bool, shapes.children))
    if count * (total + 500 * found.rounds) > STATES:
        return _Greedy(chains, shapes, boundary, found.cuts, total).walk(), False
    best = _Exact(chains, shapes, boundary, found.cuts, total)
    left, proved = TRIALS - _EXACT * inner * found.rounds, found.proved
    for cuts in _other_cuts(shapes, boundary, found):
        if best.extra == 0:
            break
        if left < 0:
            proved = False
            break
        left -= count
        if needs(shapes, boundary, cuts)[0] <= total:
            left -= _EXACT * inner * found.rounds
            made = _Exact(chains, shapes, boundary, cuts, total)
            best = made if made.extra < best.extra else best
    return best.walk(), proved


def _other_cuts(shapes: Shapes, boundary: bool, found: Cuts) -> Iterator[tuple[int, ...]]:
    """Those at which chains end, and then every other choice."""
    known = {found.cuts}
    ends = {v for v in needs(shapes, boundary, found.cuts)[2] if 0 < v < found.total}
    for values in (ends, range(1, found.total)):
        for cuts in itertools.combinations(sorted(values), len(found.cuts)):
            if cuts not in known:
                known.add(cuts)
                yield cuts


class _Walk:
    """Rounds of all blocks, top down, for given cuts. Subclasses choose where there is a choice."""

    def __init__(
        self, chains: Chains, shapes: Shapes, boundary: bool, cuts: Sequence[int], total: int
    ) -> None:
        self.chains, self.shapes, self.boundary, self.total = chains, shapes, boundary, total
        self.bounds = [0, *(total - q for q in reversed(cuts)), total] if total else [0]
        self.rounds = len(self.bounds) - 1

    def next_round(self, c: int, remaining: int, low: int) -> int:
        """The round in which the last ``remaining`` blocks of a chain start, at least ``low``."""
        raise NotImplementedError

    def heir(self, c: int, at: int, low: int) -> int:
        """The child of c that continues at time ``at`` in the same round, or -1."""
        raise NotImplementedError

    def walk(self) -> Array:
        chains, bounds = self.chains, self.bounds
        begins: list[tuple[int, int] | None] = [None] * len(chains.start)
        counts, rounds = [], []
        for c, length in enumerate(chains.length):
            begin = begins[c]
            if begin is None:
                low = self.next_round(c, length, 0)
                begin = (low, bounds[low])
            now, at = begin
            while True:
                ran = min(length, bounds[now + 1] - at)
                counts.append(ran)
                rounds.append(now)
                length, at = length - ran, at + ran
                if length == 0:
                    break
                now = self.next_round(c, length, now + 1)
                at = bounds[now]
            if chains.children[c]:
                heir = self.heir(c, at, now + 1) if self.boundary else -1
                for child in chains.children[c]:
                    if child == heir:
                        begins[child] = (now, at)
                    else:
                        low = self.next_round(child, chains.length[child], now + 1)
                        begins[child] = (low, bounds[low])
        return np.repeat(np.array(rounds, np.int64), np.array(counts, np.int64))


class _Exact(_Walk):
    """Fewest cuts of chains. ``extra``: their number."""

    def __init__(
        self, chains: Chains, shapes: Shapes, boundary: bool, cuts: Sequence[int], total: int
    ) -> None:
        super().__init__(chains, shapes, boundary, cuts, total)
        # Per shape: cost of starting at each time; cost of starting the first chain's last j blocks in round r or
        # later.
        self.start_cost: list[Array] = []
        self.later: list[list[Array]] = []
        for length, children in zip(shapes.length, shapes.children, strict=True):
            below = self._below(children) if children else np.zeros(total + 1, np.int64)
            start, later = self._chain(length, below)
            self.start_cost.append(start)
            self.later.append(later)
        roots = (shapes.of[c] for c, p in enumerate(chains.parent) if p < 0)
        self.extra = sum(int(self.later[root][0][-1]) for root in roots)

    def _below(self, children: list[tuple[int, int]]) -> Array:
        """Cost of all children if the chain above them ends at each time."""
        out = np.full(self.total + 1, NEVER, np.int64)
        for r in range(self.rounds):
            inside = slice(self.bounds[r] + 1, self.bounds[r + 1] + 1)
            fresh = [int(self.later[child][r + 1][-1]) for child, _ in children]
            every = sum(count * cost for (_, count), cost in zip(children, fresh, strict=True))
            gain = np.zeros(inside.stop - inside.start, np.int64)
            if self.boundary:
                for (child, _), cost in zip(children, fresh, strict=True):
                    np.minimum(gain, self.start_cost[child][inside] - cost, out=gain)
            np.minimum(every + gain, NEVER, out=out[inside])
        return out

    def _chain(self, length: int, below: Array) -> tuple[Array, list[Array]]:
        never = np.full(length + 1, NEVER, np.int64)
        later = [never] * (self.rounds + 1)
        start = np.full(self.total + 1, NEVER, np.int64)
        for r in range(self.rounds - 1, -1, -1):
            begin, end = self.bounds[r], self.bounds[r + 1]
            room = end - begin
            # The last j blocks from the start of the round; what does not fit is cut off, as late as possible.
            row = never.copy()
            fits = min(room, length)
            row[: fits + 1] = below[begin : begin + fits + 1]
            row[fits + 1 :] = 1 + later[r + 1][1 : length - fits + 1]
            # The whole chain from each time of the round.
            whole = max(0, room - length + 1)  # start times from which it fits
            start[begin : begin + whole] = below[begin + length : begin + length + whole]
            over = np.arange(max(begin, begin + whole), end) + length - end
            start[end - len(over) : end] = 1 + later[r + 1][over]
            row[0] = NEVER
            later[r] = np.minimum(np.minimum(row, later[r + 1]), NEVER)
        return np.minimum(start, NEVER), later

    def next_round(self, c: int, remaining: int, low: int) -> int:
        later = self.later[self.shapes.of[c]]
        wanted = later[low][remaining]
        while low < self.rounds and later[low + 1][remaining] == wanted < NEVER:
            low += 1
        return low

    def heir(self, c: int, at: int, low: int) -> int:
        best, chosen = 0, -1
        for child in self.chains.children[c]:
            shape = self.shapes.of[child]
            gain = int(self.start_cost[shape][at]) - int(self.later[shape][low][-1])
            if gain < best:
                best, chosen = gain, child
        return chosen


class _Greedy(_Walk):
    """As early as possible; a child continues only if it must."""

    def __init__(
        self, chains: Chains, shapes: Shapes, boundary: bool, cuts: Sequence[int], total: int
    ) -> None:
        super().__init__(chains, shapes, boundary, cuts, total)
        self.need = needs(shapes, boundary, cuts)[3]

    def next_round(self, c: int, remaining: int, low: int) -> int:
        return low

    def heir(self, c: int, at: int, low: int) -> int:
        need = {child: self.need[self.shapes.of[child]] for child in self.chains.children[c]}
        child = max(need, key=need.__getitem__)
        return child if need[child] > self.total - self.bounds[low] else -1
