"""Rounds: in which packed call each chunk block runs, so that every block runs once.

Legend: K blocks of a trie in preorder, R rounds, Q sequences.

A round is one packed call of a chunkwise op. It runs sequences: paths of the trie, each from a root or from a
block whose state an earlier round left. Two models of what a call gives back:

* ``"boundary"``: the state after every chunk. A sequence may run on past a block whose other children follow
  in later rounds.
* ``"final"``: the state after each sequence only, as in foreign functions. A block with several children ends
  its sequence, and so does one whose state is wanted for itself (a *stop*; below, "branches" includes them).

**Rounds.** Let a block's *order* be 1 for a leaf, and otherwise the largest order among its children, plus 1 if
two children have that order (boundary; the Strahler number) or the block itself branches (final).

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
to the largest value that is rounded up to it, which raises no need; so cuts are searched among such values, and
the last one is their maximum. For R <= 2 nothing is left to choose. Beyond, a search adds cut after cut, drops what
cannot beat the best plan known (values beyond the last cut are rounded up to themselves: a lower bound) or has too few
cuts left (an order, as above), and keeps a limited number of choices, in passes of growing width.
`Rounds.proved` says whether a pass dropped nothing else, or a plan reached the height of the trie. Taking the largest
value each time is always a plan: the first one.

**Handoffs.** A branching block hands its state over in any plan. Further ones arise where a chain is cut; a
dynamic program over (chain, start time) finds the fewest for given cuts.

Complexity: O(K) vectorised passes for the orders, at most log2(K) of them (boundary) or as many as there are
rounds (final). The search for cuts and the program for handoffs, which has O(chains * steps) states, work within fixed
budgets (`runtime/round_cuts.py`, `runtime/round_walk.py`): a trie of very many chains runs the plan of orders.

Sources: A. N. Strahler, "Hypsometric (area-altitude) analysis of erosional topology", 1952; the register
allocation of A. P. Ershov, "On programming of arithmetic operations", 1958, is the same recursion.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treecompile.runtime.errors import OptionError
from treecompile.runtime.round_cuts import FIRST, Chains, Shapes, States, search
from treecompile.runtime.round_walk import assign
from treecompile.runtime.stretches import Array

__all__ = ["Rounds", "States", "orders", "plan_rounds"]


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
    if len(heads) * (count + 1) > FIRST:
        return _assemble(parent, branching, count - order, states, count, (False, False))
    chain_of = np.cumsum(is_head) - 1
    above = parent[heads]
    chains = Chains(
        heads.tolist(),
        np.diff(np.r_[heads, len(parent)]).tolist(),
        np.where(above >= 0, chain_of[above], -1).tolist(),
        [[] for _ in heads],
    )
    for c, p in enumerate(chains.parent):
        if p >= 0:
            chains.children[p].append(c)
    shapes = Shapes.find(chains)
    cuts = search(shapes, states == "boundary", count)
    step, fewest = assign(chains, shapes, states == "boundary", cuts)
    return _assemble(parent, branching, step, states, count, (cuts.proved, fewest))


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
