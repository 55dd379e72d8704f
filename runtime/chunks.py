"""The chunk plan of a rollout tree: what a chunkwise recurrence (linear attention, SSM) runs.

Legend: N packed tokens, I trajectories, C chunk size, K blocks, L = sum of the blocks' lengths, W taps of a
causal convolution.

A chunkwise op cuts a sequence into chunks of C tokens and carries a state from chunk to chunk. A *block* is a chunk
of some trajectory, as packed tokens; equal chunks after equal prefixes are one block. Blocks form the *chunk trie*:
a block's parent is the one that ends just above its first token, and the edge is a state handed over.

**Alignment "trajectory".** Chunk boundaries lie at multiples of C from each trajectory's first kept token, as in a
run of that trajectory alone. A branch that leaves inside a chunk starts at the boundary below the fork: its first
block begins with at most C - 1 *replayed* tokens, whose keys, values and gates enter the recurrence again. One
block *owns* each token and writes its output: the first in preorder that holds it. Its owned tokens are the last
ones of a block and consecutive in packed order. A chunk that is a prefix of another (a trajectory ends there) is
absorbed: the longer block computes the same values. All forks inside one chunk read one state, that of the chunk's
parent.

**Alignment "branch".** Chunks restart at every fork: no replay, other chunk boundaries than the dense run, and
sometimes more blocks than it.

**Pads.** Dropped positions are no tokens and move no boundary. A *leaf pad* (which nobody sees) is in no block: its
owner is -1 and a recurrent layer gives zero there. A recurrence that moves through masked positions (gates decay,
convolutions shift) needs them as ordinary packed tokens, with the mask in the tree's key; then they count in the
grid like any other token between kept ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from treecompile.runtime.errors import OptionError
from treecompile.runtime.rounds import Rounds, States, orders, plan_rounds
from treecompile.runtime.stretches import Array, Stretches, ramps
from treecompile.runtime.tree import RolloutTree

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Alignment", "ChunkCost", "ChunkPlan", "RoundCall", "chunk_plan"]

Alignment = Literal["trajectory", "branch", "auto"]


@dataclass(frozen=True)
class ChunkCost:
    """Integer weights of the predicted cost by which "auto" chooses; the unit is arbitrary.

    The defaults are an estimate for a GPU, not a measurement: work within blocks runs in parallel, steps of the
    state pass one after the other, and a round costs its launches.

    Attributes:
        block: per block.
        step: per chunk step of the longest sequences.
        round: per round.

    Example:
        >>> plan = chunk_plan(RolloutTree.from_rows([[1, 2, 3], [1, 2, 4]]), 2)
        >>> ChunkCost(block=1, step=10, round=100).of(plan, "final")
        223
    """

    block: int = 1
    step: int = 2
    round: int = 100

    def of(self, plan: ChunkPlan, states: States) -> int:
        """Predicted cost of a plan."""
        rounds = plan.rounds(states)
        return self.block * plan.blocks + self.step * int(rounds.longest.sum()) + self.round * rounds.count


@dataclass(frozen=True, eq=False)
class RoundCall:
    """One packed call: the sequences of a round, one behind the other.

    Attributes:
        index: [l] packed tokens to gather, l the tokens of the round; index dtype.
        owned: [l] bool, tokens whose output this call writes. Over all rounds each token of a block once.
        offsets: [q + 1] int64, where sequences begin in ``index`` (a `cu_seqlens`).
        source: [q] int64 block whose end state a sequence starts from, -1 for zero.
        block: [k] int64 blocks of the call in order.
        block_offsets: [k + 1] int64, where blocks begin in ``index``.
        handoffs: ascending int64 blocks of this call whose end state a later round reads. With final states
            only, each is the last block of a sequence.
    """

    index: Array
    owned: Array
    offsets: Array
    source: Array
    block: Array
    block_offsets: Array
    handoffs: Array


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Blocks in preorder of the chunk trie (ascending in their last owned token). Build it with `chunk_plan`.

    Attributes:
        tree: the rollout tree.
        chunk: C.
        alignment: "trajectory" or "branch".
        first, end: [K] first owned packed token of each block, and one past its last token.
        replay: [K] int64 tokens replayed before ``first``.
        parent: [K] int64 block that hands its state to this one, -1 for the zero state.
        after: [K] int64 one past the last block below.
        row_states: whether every row's last chunk is a block.
        row_block: [I] int64 block whose end state is each trajectory's final state, -1 if absorbed.
        owner: [N] block that writes each token, -1 for leaf pads.
        index, offsets: [L] packed tokens of all blocks, and [K + 1] int64 where each begins.
        strahler: [K] int64 Strahler number of each block in the trie.
        graph: the trie as a `networkx.DiGraph`.

    Example:
        >>> plan = chunk_plan(RolloutTree.from_rows([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3]]), chunk=2)
        >>> [plan.tokens(block).tolist() for block in range(plan.blocks)]
        [[0, 1], [2, 3], [4, 5], [2, 6], [7]]
        >>> plan.parent.tolist(), plan.replay.tolist(), plan.owner.tolist()
        ([-1, 0, 1, 0, 3], [0, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2, 3, 4])
        >>> print(plan)
        chunk plan: C=2, aligned to trajectories, 8 packed tokens
          blocks   5 of 8 dense chunks (1.60x)
          replay   2 tokens before absorbing prefixes, 1 after; 1 state for 1 fork inside a chunk
          rounds   2 with boundary states (Strahler number 2): longest sequences 1 + 2 = 3, 1 handoff
          rounds   2 with final states: longest sequences 1 + 2 = 3, 1 handoff
    """

    tree: RolloutTree
    chunk: int
    alignment: Literal["trajectory", "branch"]
    first: Array
    end: Array
    replay: Array
    parent: Array
    after: Array
    row_states: bool
    _above: Array  # [K] packed token above ``first``, -1 for none
    _absorbed: int  # tokens of distinct chunks that other blocks absorb

    # -- blocks --

    @property
    def blocks(self) -> int:
        """K."""
        return len(self.end)

    @functools.cached_property
    def dense_chunks(self) -> int:
        """Chunks of all rows, each run alone."""
        return int((-(-self.tree._trajectories.length // self.chunk)).sum())

    @property
    def replayed(self) -> int:
        """Tokens that blocks run a second time."""
        return int(self.replay.sum())

    @property
    def replayed_before(self) -> int:
        """The same, if every row's distinct last chunk were a block of its own."""
        return self.replayed + self._absorbed

    @property
    def length(self) -> Array:
        """[K] int64 tokens of each block, replayed ones included."""
        size: Array = self.replay + (self.end - self.first)
        return size

    @functools.cached_property
    def offsets(self) -> Array:
        """[K + 1] int64 where each block begins in `index`."""
        out = np.zeros(self.blocks + 1, np.int64)
        np.cumsum(self.length, out=out[1:])
        return out

    @functools.cached_property
    def owner(self) -> Array:
        """[N] block that writes each token, -1 for leaf pads; index dtype. O(N)."""
        out: Array = np.full(self.tree.n, -1, self.tree.dtype)
        out[self._own] = np.repeat(np.arange(self.blocks, dtype=self.tree.dtype), self.end - self.first)
        return out

    @functools.cached_property
    def _own(self) -> Array:
        """Owned tokens of all blocks in order."""
        return ramps(self.first.astype(np.int64), (self.end - self.first).astype(np.int64), self.tree.dtype)

    @functools.cached_property
    def index(self) -> Array:
        """[L] packed tokens of all blocks, one behind the other; index dtype. O(L)."""
        starts, sizes, blocks = [self.first], [self.end - self.first], [np.arange(self.blocks)]
        # Replayed tokens, from the fork upwards: each step takes what one owner holds of them.
        block = np.flatnonzero(self.replay)
        rest, at = self.replay[block], self._above[block]
        while len(block):
            holder = np.searchsorted(self.end, at, side="right")
            size = np.minimum(rest, at - self.first[holder] + 1)
            starts.append(at - size + 1)
            sizes.append(size)
            blocks.append(block)
            rest = rest - size
            more = rest > 0
            block, rest, at = block[more], rest[more], self._above[holder[more]]
        start, size = np.concatenate(starts[::-1]), np.concatenate(sizes[::-1])
        order = np.argsort(np.concatenate(blocks[::-1]), kind="stable")
        return ramps(start[order].astype(np.int64), size[order].astype(np.int64), self.tree.dtype)

    def tokens(self, block: int) -> Array:
        """Packed tokens of one block."""
        return self.index[self.offsets[block] : self.offsets[block + 1]]

    @functools.cached_property
    def row_block(self) -> Array:
        """[I] int64 block that ends where each trajectory does, -1 if a longer block absorbs it. O(I log K)."""
        last = self.tree._last + 1
        block = np.searchsorted(self.end, last)
        return np.where(self.end[block] == last, block, -1) if len(last) else block

    @functools.cached_property
    def strahler(self) -> Array:
        """[K] int64 Strahler number of each block."""
        return orders(self.parent, self.after, "boundary")

    def tails(self, width: int) -> Array:
        """[K, W-1] packed tokens just above each block's first token, oldest first, -1 where there are none.

        What a causal convolution of W taps needs at the start of a sequence: part of the handoff. O(K * W).

        Args:
            width: W, at least 1.

        Raises:
            OptionError: a width below 1.

        Example:
            >>> chunk_plan(RolloutTree.from_rows([[1, 2, 3], [1, 2, 4]]), 2).tails(3).tolist()
            [[-1, -1], [0, 1], [0, 1]]
        """
        if width < 1:
            raise OptionError(argument="width", value=width, remedy="a convolution has at least one tap")
        out = np.full((self.blocks, width - 1), -1, self.tree.dtype)
        above = np.full(self.blocks, -1, np.int64)
        some = np.flatnonzero(self.parent >= 0)
        above[some] = self.end[self.parent[some]] - 1
        for column in range(width - 2, -1, -1):
            out[:, column] = above
            some = np.flatnonzero(above >= 0)
            holder = np.searchsorted(self.end, above[some], side="right")
            head = self.first[holder] == above[some]
            above[some] = np.where(head, self._above[holder], above[some] - 1)
        return out

    # -- rounds --

    def rounds(self, states: States = "boundary") -> Rounds:
        """The packed calls that run every block once; see `treecompile.runtime.rounds`. Cached.

        Blocks of "branch" that end at a fork may be partial, and a call's chunks are counted from the start of a
        sequence; there every fork ends a sequence, as with "final".

        Args:
            states: what a call gives back: "boundary" (states after all chunks) or "final" (after sequences).

        Raises:
            OptionError: another ``states``.
        """
        if states == "boundary" and self.alignment == "branch":
            states = "final"
        if states not in self._rounds:
            stops = np.zeros(self.blocks, np.bool_)
            if self.row_states:
                stops[self.row_block] = True
            self._rounds[states] = plan_rounds(self.parent, self.after, states, stops)
        return self._rounds[states]

    @functools.cached_property
    def _rounds(self) -> dict[States, Rounds]:
        return {}

    def calls(self, states: States = "boundary") -> list[RoundCall]:
        """What each round gathers, runs and hands over. O(L).

        Example:
            >>> plan = chunk_plan(RolloutTree.from_rows([[1, 2, 3], [1, 2, 4]]), 2)
            >>> [(c.index.tolist(), c.offsets.tolist(), c.source.tolist()) for c in plan.calls("final")]
            [([0, 1], [0, 2], [-1]), ([2, 3], [0, 1, 2], [0, 0])]
        """
        rounds = self.rounds(states)
        order = np.argsort(
            rounds.sequence, kind="stable"
        )  # within a sequence: preorder is from top to bottom
        turn = rounds.round[order]
        head_turn = rounds.round[rounds.head]
        out = []
        for r in range(rounds.count):
            block = order[np.searchsorted(turn, r) : np.searchsorted(turn, r, side="right")]
            q = slice(np.searchsorted(head_turn, r), np.searchsorted(head_turn, r, side="right"))
            size = self.length[block]
            begins = np.r_[0, np.cumsum(size)]
            where = Stretches(self.offsets[block], size)
            own = np.stack([self.replay[block], size - self.replay[block]], axis=1).reshape(-1)
            out.append(
                RoundCall(
                    index=self.index[where.index()],
                    owned=np.repeat(np.arange(len(own)) % 2 == 1, own),
                    offsets=begins[np.r_[0, np.cumsum(rounds.size[q])]],
                    source=rounds.source[q],
                    block=block,
                    block_offsets=begins,
                    handoffs=rounds.handoffs[rounds.round[rounds.handoffs] == r],
                )
            )
        return out

    # -- graph, text --

    @property
    def graph(self) -> nx.DiGraph:
        """The chunk trie as a `networkx.DiGraph`; see `treecompile.runtime.chunk_graph.to_graph`."""
        from treecompile.runtime.chunk_graph import to_graph

        return to_graph(self)

    def text(self, max_depth: int | None = None) -> str:
        """The figures, and a drawing of the trie down to ``max_depth`` levels (None: all)."""
        from treecompile.runtime.chunk_graph import to_text

        return f"{self}\n{to_text(self, max_depth)}"

    def __str__(self) -> str:
        from treecompile.runtime.chunk_graph import figures

        return figures(self)

    def __repr__(self) -> str:
        return f"ChunkPlan(C={self.chunk}, alignment={self.alignment!r}, N={self.tree.n}, K={self.blocks})"


def chunk_plan(
    tree: RolloutTree | nx.DiGraph,
    chunk: int = 64,
    *,
    alignment: Alignment = "trajectory",
    row_states: bool = False,
    states: States = "boundary",
    cost: ChunkCost | None = None,
) -> ChunkPlan:
    """Plan the chunks of a tree.

    Args:
        tree: the rollout tree; or a DAG of segments, which `treecompile.runtime.dag.unroll` makes a forest.
        chunk: C, at least 1: the chunk size of the op.
        alignment: where chunks start: "trajectory", "branch", or the cheaper of the two, "auto" (a tie goes to
            "trajectory").
        row_states: every row's last chunk is a block, so that its end state is the row's final state (with final
            states, such blocks end their sequence). Otherwise a row that ends inside another's chunk has its
            outputs, but no state.
        states, cost: for "auto": the model of rounds, and the weights (default `ChunkCost()`).

    Returns:
        the plan; deterministic.

    Raises:
        OptionError: a chunk below 1, or an unknown alignment or states.
        TreeError: a graph from which no tree can be built.

    Example:
        >>> tree = RolloutTree.from_rows([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]])
        >>> chunk_plan(tree, 2)
        ChunkPlan(C=2, alignment='trajectory', N=6, K=4)
        >>> chunk_plan(tree, 2, alignment="branch").replayed, chunk_plan(tree, 2).replayed
        (0, 1)

    Notes:
        O(S log S + K log K) for S segments, vectorised; tokens are touched only by `owner`, `index` and `calls`.
        With "trajectory" every block is a chunk of some row, so K is at most `dense_chunks`.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise OptionError(argument="chunk", value=chunk, remedy="give the op's chunk size, an integer >= 1")
    if alignment not in ("trajectory", "branch", "auto"):
        raise OptionError(argument="alignment", value=alignment, choices=("trajectory", "branch", "auto"))
    if states not in ("boundary", "final"):
        raise OptionError(argument="states", value=states, choices=("boundary", "final"))
    if not isinstance(tree, RolloutTree):
        from treecompile.runtime.dag import unroll

        tree = RolloutTree.from_graph(unroll(tree))
    if alignment != "auto":
        return _plan(tree, chunk, alignment, row_states)
    weights = cost or ChunkCost()
    along = _plan(tree, chunk, "trajectory", row_states)
    restarted = _plan(tree, chunk, "branch", row_states)
    return restarted if weights.of(restarted, states) < weights.of(along, states) else along


@dataclass(frozen=True)
class _Pieces:
    """Segments without leaf pads, in preorder.

    start, length [P]: packed tokens. depth [P]: of the first token. above [P]: packed token above it, or -1.
    after [P]: one past the subtree. children [P]: pieces below. head [P]: the piece at which a run of only
    children begins (leaf pads cut segments).
    """

    start: Array
    length: Array
    depth: Array
    above: Array
    after: Array
    children: Array
    head: Array


def _pieces(tree: RolloutTree) -> _Pieces:
    table = tree._table
    kept = np.flatnonzero(~table.pad)
    number = np.full(len(table.pad) + 1, -1, np.int64)
    number[kept] = np.arange(len(kept))
    parent = number[table.parent[kept]]
    start, length = table.start[kept], table.length[kept]
    below = parent >= 0
    children = np.bincount(parent[below], minlength=len(kept))
    above = np.where(below, (start + length - 1)[parent] if len(kept) else parent, -1)
    only = below & (children[parent] == 1) if len(kept) else below
    head = np.maximum.accumulate(np.where(only, 0, np.arange(len(kept))))
    return _Pieces(start, length, table.depth[kept], above, table.after[kept], children, head)


def _plan(
    tree: RolloutTree, chunk: int, alignment: Literal["trajectory", "branch"], row_states: bool
) -> ChunkPlan:
    pieces = _pieces(tree)
    # Chunk boundaries are multiples of C of the phase.
    phase = pieces.depth - (pieces.depth[pieces.head] if alignment == "branch" else 0)
    stops = pieces.children != 1 if alignment == "branch" else pieces.children == 0
    full = (phase + pieces.length) // chunk - phase // chunk
    count = full + (stops & ((phase + pieces.length) % chunk > 0))
    piece = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
    reached = np.minimum((phase[piece] // chunk + number + 1) * chunk - phase[piece], pieces.length[piece])
    end = pieces.start[piece] + reached
    last_phase = phase[piece] + reached - 1
    if alignment == "trajectory":
        parent = _parents_by_depth(last_phase, chunk)
    else:
        # Blocks of a run follow each other; the first hangs below the block that ends above the run.
        outer = np.searchsorted(end, pieces.above[pieces.head][piece] + 1)
        outer = np.where(pieces.above[pieces.head][piece] >= 0, outer, -1)
        parent = np.where(last_phase < chunk, outer, np.arange(len(end)) - 1)
    after = np.searchsorted(end, pieces.after[piece], side="right")
    inner = np.setdiff1d(tree._last + 1, end)  # ends of rows that another's chunk continues
    absorbed = int((_phase_at(pieces, phase, inner - 1) % chunk + 1).sum())
    if row_states and len(inner):
        old = np.searchsorted(end, inner)  # the block that goes on from each
        moved = np.arange(len(end)) + np.searchsorted(inner, end)
        fresh = old + np.arange(len(inner))
        parents = np.r_[moved, -1][parent]
        afters = after + np.searchsorted(inner, pieces.after[piece], side="right")
        parent, after = np.empty((2, len(end) + len(inner)), np.int64)
        parent[moved], parent[fresh] = parents, parents[old]
        after[moved], after[fresh] = afters, fresh + 1
        end, absorbed = np.union1d(end, inner), 0
    first, above = _owned(pieces, end)
    plan = ChunkPlan(
        tree=tree,
        chunk=chunk,
        alignment=alignment,
        first=first.astype(tree.dtype),
        end=end.astype(tree.dtype),
        replay=_phase_at(pieces, phase, first) % chunk,
        parent=parent,
        after=after,
        row_states=row_states,
        _above=above,
        _absorbed=absorbed,
    )
    if alignment == "trajectory":
        # Every block is a chunk of some row: more blocks than those would be a fault of this module.
        assert plan.blocks <= plan.dense_chunks, (plan.blocks, plan.dense_chunks)
    return plan


def _phase_at(pieces: _Pieces, phase: Array, token: Array) -> Array:
    """Phase of packed tokens that are no pads."""
    piece = np.searchsorted(pieces.start, token, side="right") - 1
    return (phase - pieces.start)[piece] + token


def _parents_by_depth(depth: Array, chunk: int) -> Array:
    """[K] the block above: in preorder, the latest one that ends on the boundary below which a block begins."""
    level, span = depth // chunk, len(depth) + 1
    number = np.arange(len(depth))
    at_boundary = depth % chunk == chunk - 1
    known = np.sort(level[at_boundary] * span + number[at_boundary])
    if len(known) == 0:
        return np.full(len(depth), -1, np.int64)
    found = known[np.searchsorted(known, (level - 1) * span + number) - 1] % span
    return np.where(level > 0, found, -1)


def _owned(pieces: _Pieces, end: Array) -> tuple[Array, Array]:
    """(first owned token of each block, packed token above it): owned ranges follow each other."""
    free = np.r_[0, end[:-1]][: len(end)]
    piece = np.searchsorted(pieces.start + pieces.length, free, side="right")
    first = np.maximum(free, pieces.start[piece])
    return first, np.where(first == pieces.start[piece], pieces.above[piece], first - 1)
