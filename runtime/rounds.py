"""Rounds: in which packed call each chunk block runs, so that every block runs once.

Legend: K blocks of a trie in preorder, R rounds, Q sequences.

A round is one packed call of a chunkwise op. It runs sequences: paths of the trie, each from a root or from a
block whose state an earlier round left. Two models of what a call gives back:

* ``"boundary"``: the state after every chunk. A sequence may run on past a block whose other children follow
  in later rounds.
* ``"final"``: the state after each sequence only, as in foreign functions. A block with several children ends
  its sequence, and so does one whose state is wanted for itself (a *stop*; below, "branches" includes them).

**Rounds.** Let a block's *order* be 1 for a leaf, and otherwise the largest order among its children, plus 1 if
two children (boundary; the Strahler number) or the block itself branches (final).

*No fewer.* By induction on the trie, a block of order k needs k rounds counted from its own. Boundary: if two
children have order k - 1, one of them starts after the block's round and needs k - 1 more. Final: all children
of a branching block start after its round, and one of them has order k - 1.
*No more.* Running a block of order k in round R + 1 - k, for R the largest order, is a plan: orders do not grow
downwards, and at most one child (final: the only child) has the order of its parent.

**Longest sequences.** Number the chunk steps of all rounds one behind the other, backwards from the last; a
choice of rounds' lengths is a set of cuts q_1 < ... < q_(R-1) in this time. The time that a subtree needs is its
first chain's length plus ``need``, where need = 0 below a leaf, and below a branching block whose children
need h1 >= h2 >= ... it is max(h1, up(h2)) (boundary) or up(h1) (final), up(x) being the first cut >= x: all
children but the one that continues start at a cut. Blocks are steps of length one, so a chain can be cut
anywhere and no time is lost. The sum of the longest sequences is the largest need of a root. A cut may be lowered
to the largest value that is rounded up to it, which lowers no need; so cuts are searched among such values, and
the last one is their maximum. For R <= 2 nothing is left to choose; beyond, the search is exhaustive within a
budget, and `Rounds.proved` says whether it ended. The choice of maxima comes first in it, and is always a plan.

**Handoffs.** A branching block hands its state over in any plan. Further ones arise where a chain is cut; a
dynamic program over (chain, start time) finds the fewest for given cuts.

Complexity: O(K) vectorised passes for the orders, at most log2(K) of them (boundary) or as many as there are
rounds (final). The search visits at most `BUDGET` chains (a larger trie runs the plan of orders); a program for
handoffs has O(chains * steps) states, at most `STATES` (else a greedy rule).

Sources: A. N. Strahler, "Hypsometric (area-altitude) analysis of erosional topology", 1952; the register
allocation of A. P. Ershov, "On programming of arithmetic operations", 1958, is the same recursion.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from treecompile.runtime.errors import OptionError
from treecompile.runtime.stretches import Array

__all__ = ["BUDGET", "STATES", "Rounds", "States", "orders", "plan_rounds"]

States = Literal["boundary", "final"]

BUDGET = 100_000  # visits of chains by all searches
STATES = 2_000_000  # (chain, time) states of one program for handoffs; a round of a chain counts for 500 more
_EXACT = 50  # visits that one round of one chain with children counts for in that program
_NEVER = 1 << 40


@dataclass(frozen=True, eq=False)
class Rounds:
    """Who runs when. Blocks are numbered in preorder of the trie, sequences by (round, first block).

    Attributes:
        states: "boundary" or "final".
        count: number of rounds R.
        round: [K] int64 round of each block, from 0.
        sequence: [K] int64 sequence of each block.
        head: [Q] int64 first block of each sequence.
        source: [Q] int64 block whose state a sequence starts from, -1 for the zero state.
        size: [Q] int64 blocks of each sequence.
        longest: [R] int64 blocks of the longest sequence of each round.
        handoffs: ascending int64 blocks whose state a later round reads.
        proved: (the sum of ``longest`` is the smallest, the handoffs are the fewest) for this many rounds.

    Example:
        >>> rounds = plan_rounds(np.array([-1, 0, 1, 0]), np.array([4, 3, 3, 4]), "boundary")
        >>> rounds.count, rounds.round.tolist(), rounds.longest.tolist(), rounds.handoffs.tolist()
        (2, [0, 1, 1, 1], [1, 2], [0])
    """

    states: States
    count: int
    round: Array
    sequence: Array
    head: Array
    source: Array
    size: Array
    longest: Array
    handoffs: Array
    proved: tuple[bool, bool]


@dataclass(frozen=True)
class _Chains:
    """Maximal runs of only children: contiguous in preorder. start, length, parent [chains]; children lists."""

    start: list[int]
    length: list[int]
    parent: list[int]
    children: list[list[int]]


def orders(parent: Array, after: Array, states: States, stops: Array | None = None) -> Array:
    """[K] int64 order of each block; the largest one is the least number of rounds. O(K log K), vectorised.

    Args:
        parent: [K] integers, the block above, -1 for roots; blocks in preorder.
        after: [K] integers, one past the last block below.
        states: "boundary" (Strahler numbers) or "final".
        stops: [K] bool, blocks that end their sequence if ``states`` is "final"; None for none.

    Raises:
        OptionError: another ``states``.

    Example:
        >>> parent, after = np.array([-1, 0, 1, 1, 0]), np.array([5, 4, 3, 4, 5])
        >>> orders(parent, after, "boundary").tolist(), orders(parent, after, "final").tolist()
        ([2, 2, 1, 1, 1], [3, 2, 1, 1, 1])
    """
    _check(states)
    count = len(parent)
    order, alive = np.ones(count, np.int64), np.arange(count)
    branching = _branching(parent, states, stops)
    while len(alive):
        # Order > k: some block below has two children of order k (boundary), or branches above one of order k.
        known = np.bincount(parent[alive][parent[alive] >= 0], minlength=count)
        turn = known >= 2 if states == "boundary" else branching & (known >= 1)
        before = np.zeros(count + 1, np.int64)
        np.cumsum(turn, out=before[1:])
        alive = alive[before[after[alive]] > before[alive]]
        order[alive] += 1
    return order


def plan_rounds(parent: Array, after: Array, states: States, stops: Array | None = None) -> Rounds:
    """Fewest rounds; then the smallest sum of longest sequences; then the fewest handoffs.

    Args:
        parent, after, stops: as in `orders`.
        states: what a call gives back: "boundary" or "final".

    Raises:
        OptionError: another ``states``.
    """
    _check(states)
    parent, after = parent.astype(np.int64), after.astype(np.int64)
    order = orders(parent, after, states, stops)
    count = int(order.max(initial=0))
    branching = _branching(parent, states, stops)
    is_head = (parent < 0) | branching[parent]
    heads = np.flatnonzero(is_head)
    if len(heads) * (count + 1) > BUDGET:
        return _assemble(parent, branching, count - order, states, count, (False, False))
    chain_of = np.cumsum(is_head) - 1
    above = parent[heads]
    chains = _Chains(
        heads.tolist(),
        np.diff(np.r_[heads, len(parent)]).tolist(),
        np.where(above >= 0, chain_of[above], -1).tolist(),
        [[] for _ in heads],
    )
    for c, p in enumerate(chains.parent):
        if p >= 0:
            chains.children[p].append(c)
    search = _Search(chains, states, count)
    step, total, proved = search.assign()
    return _assemble(
        parent, branching, step, states, count, (search.complete or total == search.height, proved)
    )


def _check(states: str) -> None:
    if states not in ("boundary", "final"):
        raise OptionError(argument="states", value=states, choices=("boundary", "final"))


def _branching(parent: Array, states: States, stops: Array | None) -> Array:
    """[K] blocks that hand their state to a later round in any plan."""
    children = np.bincount(parent[parent >= 0], minlength=len(parent))
    several: Array = children >= 2
    return several if stops is None or states == "boundary" else several | (stops & (children == 1))


def _assemble(
    parent: Array, branching: Array, step: Array, states: States, count: int, proved: tuple[bool, bool]
) -> Rounds:
    """Sequences of a round per block."""
    up = np.maximum(parent, 0)
    goes_on = (parent >= 0) & (step[up] == step)
    if states == "final":
        goes_on &= ~branching[up]
    head = np.flatnonzero(~goes_on)
    head = head[np.argsort(step[head], kind="stable")]
    # The chain of only one continuing child per block: follow it from every head at once, by pointer doubling.
    top = np.where(goes_on, up, np.arange(len(parent)))
    while not np.array_equal(jumped := top[top], top):
        top = jumped
    number = np.zeros(len(parent), np.int64)
    number[head] = np.arange(len(head))
    sequence = number[top]
    size = np.bincount(sequence, minlength=len(head)).astype(np.int64)
    longest = np.zeros(count, np.int64)
    np.maximum.at(longest, step[head], size)
    source = parent[head]
    handoffs = np.unique(source[source >= 0])
    fewest = proved[1] or (proved[0] and len(handoffs) == int(np.count_nonzero(branching)))
    return Rounds(states, count, step, sequence, head, source, size, longest, handoffs, (proved[0], fewest))


class _Search:
    """Cuts, and the plan for them. Times count from the last step backwards in ``needs``, forwards elsewhere."""

    def __init__(self, chains: _Chains, states: States, count: int) -> None:
        self.chains, self.boundary, self.count = chains, states == "boundary", count
        self.left = BUDGET
        self.complete = True
        self.best = _NEVER
        self.cuts: list[tuple[int, ...]] = []
        self.height = self._needs((), free=True)[0]
        self._descend(())

    # -- cuts --

    def _needs(self, cuts: Sequence[int], *, free: bool = False) -> tuple[int, list[int], list[int]]:
        """(the largest need of a root, the values that were rounded up, the needs below chains).

        ``free``: nothing is rounded.
        """
        chains, boundary = self.chains, self.boundary
        self.left -= len(chains.start)
        first = [0] * len(chains.start)
        second = [0] * len(chains.start)
        pressed, ends, top = [], [], 0
        for c in range(len(chains.start) - 1, -1, -1):
            need = first[c]
            if chains.children[c] and not free:
                value = second[c] if boundary else need
                pressed.append(value)
                need = max(need, next((q for q in cuts if q >= value), _NEVER))
                ends.append(need)
            need += chains.length[c]
            p = chains.parent[c]
            if p < 0:
                top = max(top, need)
            elif need > first[p]:
                first[p], second[p] = need, first[p]
            elif need > second[p]:
                second[p] = need
        return top, pressed, ends

    def _descend(self, cuts: tuple[int, ...]) -> bool:
        """Try all further cuts; False if none of them gives a plan."""
        missing = self.count - 1 - len(cuts)
        if missing <= 0:
            total = self._needs(cuts)[0]
            if total < self.best:
                self.best, self.cuts = total, []
            if total == self.best < _NEVER:
                self.cuts.append(cuts)
            return total < _NEVER
        low = cuts[-1] if cuts else 0
        values = sorted({v for v in self._needs(cuts)[1] if low < v < _NEVER}, reverse=True)
        found = False
        for value in values[:1] if missing == 1 else values:
            if found and (self.best == self.height or self.left < 0):
                self.complete &= self.best == self.height
                break
            # What a cut makes possible, a later one makes too: the first failure is the last trial.
            if not self._descend((*cuts, value)):
                break
            found = True
        return found

    # -- the plan --

    def assign(self) -> tuple[Array, int, bool]:
        """(round of every block, sum of longest sequences, whether the handoffs are the fewest)."""
        total, count = self.best if self.count else 0, len(self.chains.start)
        if count * (total + 500 * self.count) > STATES:
            return _Greedy(self, self.cuts[0]).walk(), total, False
        best: _Exact | None = None
        proved = self.complete or total == self.height
        for cuts in self._all_cuts(total):
            if best is not None and self.left < 0:
                proved = False
                break
            if best is None or self._needs(cuts)[0] <= total:
                self.left -= _EXACT * sum(map(bool, self.chains.children)) * self.count
                made = _Exact(self, cuts)
                if best is None or made.extra < best.extra:
                    best = made
                if best.extra == 0:
                    break
        assert best is not None
        return best.walk(), total, proved

    def _all_cuts(self, total: int) -> Iterator[tuple[int, ...]]:
        """The cuts found; those at which chains end; and then every other choice."""
        yield from self.cuts
        known = set(self.cuts)
        ends = {v for v in self._needs(self.cuts[0])[2] if 0 < v < total}
        for values in (ends, range(1, total)):
            for cuts in itertools.combinations(sorted(values), max(self.count - 1, 0)):
                if cuts not in known:
                    known.add(cuts)
                    yield cuts


class _Walk:
    """Rounds of all blocks, top down, for given cuts. Subclasses choose where there is a choice."""

    def __init__(self, search: _Search, cuts: Sequence[int]) -> None:
        total = search.best if search.count else 0
        self.chains, self.boundary, self.total = search.chains, search.boundary, total
        self.bounds = [0, *(total - q for q in reversed(cuts)), total] if search.count else [0]
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

    def __init__(self, search: _Search, cuts: Sequence[int]) -> None:
        super().__init__(search, cuts)
        chains = self.chains
        # Per chain: cost of starting at each time; cost of starting its last j blocks in round r or later.
        self.start_cost: list[Array] = [np.zeros(0)] * len(chains.start)
        self.later: list[list[Array]] = [[]] * len(chains.start)
        leaves: dict[int, tuple[Array, list[Array]]] = {}
        self.extra = 0
        for c in range(len(chains.start) - 1, -1, -1):
            if chains.children[c]:
                self.start_cost[c], self.later[c] = self._chain(chains.length[c], self._below(c))
            else:
                length = chains.length[c]
                if length not in leaves:
                    leaves[length] = self._chain(length, np.zeros(self.total + 1, np.int64))
                self.start_cost[c], self.later[c] = leaves[length]
            if chains.parent[c] < 0:
                self.extra += int(self.later[c][0][-1])

    def _below(self, c: int) -> Array:
        """Cost of all children if the chain ends at each time."""
        out = np.full(self.total + 1, _NEVER, np.int64)
        children = self.chains.children[c]
        for r in range(self.rounds):
            inside = slice(self.bounds[r] + 1, self.bounds[r + 1] + 1)
            fresh = [int(self.later[child][r + 1][-1]) for child in children]
            gain = np.zeros(inside.stop - inside.start, np.int64)
            if self.boundary:
                for child, cost in zip(children, fresh, strict=True):
                    np.minimum(gain, self.start_cost[child][inside] - cost, out=gain)
            np.minimum(sum(fresh) + gain, _NEVER, out=out[inside])
        return out

    def _chain(self, length: int, below: Array) -> tuple[Array, list[Array]]:
        never = np.full(length + 1, _NEVER, np.int64)
        later = [never] * (self.rounds + 1)
        start = np.full(self.total + 1, _NEVER, np.int64)
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
            row[0] = _NEVER
            later[r] = np.minimum(np.minimum(row, later[r + 1]), _NEVER)
        return np.minimum(start, _NEVER), later

    def next_round(self, c: int, remaining: int, low: int) -> int:
        wanted = self.later[c][low][remaining]
        while low + 1 <= self.rounds and self.later[c][low + 1][remaining] == wanted < _NEVER:
            low += 1
        return low

    def heir(self, c: int, at: int, low: int) -> int:
        best, chosen = 0, -1
        for child in self.chains.children[c]:
            gain = int(self.start_cost[child][at]) - int(self.later[child][low][-1])
            if gain < best:
                best, chosen = gain, child
        return chosen


class _Greedy(_Walk):
    """As early as possible; a child continues only if it must."""

    def __init__(self, search: _Search, cuts: Sequence[int]) -> None:
        super().__init__(search, cuts)
        chains = self.chains
        need = [0] * len(chains.start)
        second = [0] * len(chains.start)
        self.need = need
        for c in range(len(chains.start) - 1, -1, -1):
            if chains.children[c]:
                value = second[c] if self.boundary else need[c]
                need[c] = max(need[c], next(q for q in cuts if q >= value))
            need[c] += chains.length[c]
            p = chains.parent[c]
            if p >= 0:
                low, high = sorted((need[c], need[p]))
                need[p], second[p] = high, max(second[p], low)

    def next_round(self, c: int, remaining: int, low: int) -> int:
        return low

    def heir(self, c: int, at: int, low: int) -> int:
        child = max(self.chains.children[c], key=self.need.__getitem__)
        return child if self.need[child] > self.total - self.bounds[low] else -1


assert math.log2(_NEVER) < 62  # sums over 2**22 children stay in int64
