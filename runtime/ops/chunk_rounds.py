"""The rounds executor: a chunkwise op over the packed tree, one packed call per round.

Suffixes: N packed tokens, L tokens of all blocks, K blocks, Q sequences of a call, I trajectories; state is the shape
of one state, such as [H, D, V].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from treecompile.runtime.chunks import ChunkPlan
from treecompile.runtime.errors import OptionError
from treecompile.runtime.ops.chunk_reference import ChunkResult
from treecompile.runtime.ops.expand import expand
from treecompile.runtime.rounds import States
from treecompile.runtime.stretches import Array

__all__ = ["ChunkOp", "Copies", "RoundStep", "RoundTables", "round_tables", "run_rounds"]

# (inputs at the tokens of a call, offsets, initial states) -> outputs and states
ChunkOp: TypeAlias = Callable[[Sequence[Tensor], Tensor, Tensor], ChunkResult]


@dataclass(frozen=True)
class Copies:
    """Rows to copy, as `expand` takes them: its adjoint adds up the copies of a row in fixed order.

    Attributes:
        rows: int64 [M], the row to copy, -1 for zeros.
        offsets, positions: int64 [H + 1], [.], CSR of the copies of each row.
    """

    rows: Tensor
    offsets: Tensor
    positions: Tensor

    @staticmethod
    def of(rows: Array, height: int, device: torch.device) -> Copies:
        """Copies of `rows` out of `height` many."""
        order = np.argsort(rows, kind="stable")
        positions = order[np.count_nonzero(rows < 0) :]
        offsets = np.searchsorted(rows[positions], np.arange(height + 1))
        return Copies(*(torch.from_numpy(x.astype(np.int64)).to(device) for x in (rows, offsets, positions)))

    def __call__(self, x: Tensor) -> Tensor:
        """[H, ...] as [M, ...]."""
        found: Tensor = expand(x, self.rows, self.offsets, self.positions)
        return found


@dataclass(frozen=True)
class RoundStep:
    """One packed call.

    Attributes:
        offsets: int64 [Q + 1], where sequences begin.
        above: whose states the sequences start from: 0 the zero state, r + 1 what round r keeps.
        source: the state of each sequence among those, one behind the other.
        kept: the states to keep, among those that the op gives.
    """

    offsets: Tensor
    above: tuple[int, ...]
    source: Copies
    kept: Copies


@dataclass(frozen=True)
class RoundTables:
    """What `run_rounds` reads, on a device.

    Attributes:
        tokens: N.
        states: what is read of the op's states: "boundary" or "final".
        subtree_end: int32 [N] on the host, what the segment table says.
        sizes: tokens of each round, in sum L.
        index: the packed token in each of the L rows.
        place: the row that holds each packed token's output.
        steps: by round.
        final: [I] final states of the trajectories among all that are kept; None if the plan has none.
    """

    tokens: int
    states: States
    subtree_end: Tensor
    sizes: list[int]
    index: Copies
    place: Copies
    steps: tuple[RoundStep, ...]
    final: Copies | None


def round_tables(plan: ChunkPlan, device: torch.device, states: States = "boundary") -> RoundTables:
    """Lay out the rounds of a plan.

    Args:
        plan: the chunk plan; its chunk size is the op's.
        device: where the tables go.
        states: which states the op gives: "boundary", after all chunks, or "final", after sequences.

    Raises:
        OptionError: an unknown ``states``, or a tree without blocks (nothing says the shape of its outputs).

    Example:
        >>> from treecompile.runtime.chunks import chunk_plan
        >>> from treecompile.runtime.tree import RolloutTree
        >>> plan = chunk_plan(RolloutTree.from_rows([[1, 2, 3], [1, 2, 4]]), 2)
        >>> tables = round_tables(plan, torch.device("cpu"), "final")
        >>> tables.index.rows.tolist(), tables.sizes, [step.source.rows.tolist() for step in tables.steps]
        ([0, 1, 2, 3], [2, 2], [[0], [0, 0]])
    """
    calls, rounds = plan.calls(states), plan.rounds(states)
    if not calls:
        raise OptionError(argument="plan", value=repr(plan), remedy="an empty tree needs no recurrence")
    wanted = np.zeros(plan.blocks, np.bool_)
    wanted[rounds.handoffs] = True
    if plan.row_states:
        wanted[plan.row_block] = True
    # Who keeps each block's state, and in which row; the last entry serves the parent -1, the zero state.
    keeper, row = np.zeros((2, plan.blocks + 1), np.int64)
    counts = np.ones(len(calls) + 1, np.int64)

    def find(blocks: Array) -> tuple[tuple[int, ...], Copies]:
        above = np.unique(keeper[blocks])
        begins = np.r_[0, np.cumsum(counts[above])]
        rows = begins[np.searchsorted(above, keeper[blocks])] + row[blocks]
        return tuple(above.tolist()), Copies.of(rows, int(begins[-1]), device)

    steps = []
    for r, call in enumerate(calls):
        above, source = find(call.source)
        given = call.block
        if rounds.states == "final":
            given = call.block[np.searchsorted(call.block_offsets, call.offsets[1:]) - 1]
        kept = np.flatnonzero(wanted[given])
        keeper[given[kept]], row[given[kept]] = r + 1, np.arange(len(kept))
        counts[r + 1] = len(kept)
        offsets = torch.from_numpy(call.offsets.astype(np.int64)).to(device)
        steps.append(RoundStep(offsets, above, source, Copies.of(kept, len(given), device)))
    index = np.concatenate([call.index for call in calls]).astype(np.int64)
    owned = np.flatnonzero(np.concatenate([call.owned for call in calls]))
    place = np.full(plan.tree.n, -1, np.int64)
    place[index[owned]] = owned
    begins = np.r_[0, np.cumsum(counts)]
    final = begins[keeper[plan.row_block]] + row[plan.row_block] if plan.row_states else None
    return RoundTables(
        tokens=plan.tree.n,
        states=rounds.states,
        subtree_end=torch.from_numpy(plan.tree.subtree_end.astype(np.int32)),
        sizes=[len(call.index) for call in calls],
        index=Copies.of(index, plan.tree.n, device),
        place=Copies.of(place, len(index), device),
        steps=tuple(steps),
        final=None if final is None else Copies.of(final, int(begins[-1]), device),
    )


def run_rounds(
    tables: RoundTables, op: ChunkOp, inputs: Sequence[Tensor], zero: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Run every block once, replayed tokens included; differentiable as far as the op is.

    Args:
        tables: of the plan's rounds.
        op: a chunkwise op with initial and final states. Of "boundary" its states after all chunks are read, of
            "final" those after sequences, and not the others.
        inputs: float tensors [N, ...], one row per packed token.
        zero: a state, what sequences without a parent start from.

    Returns:
        [N, ...] outputs, zero at leaf pads; and [I, state] final states of the trajectories, in the order of rows,
        or None if the plan was made without ``row_states``.

    Example:
        >>> from treecompile.runtime.chunks import chunk_plan
        >>> from treecompile.runtime.tree import RolloutTree
        >>> plan = chunk_plan(RolloutTree.from_rows([[1, 2, 3], [1, 2, 4]]), 2, row_states=True)
        >>> def total(inputs, offsets, initial):  # a recurrence: the sum so far
        ...     parts = zip(torch.tensor_split(inputs[0], offsets[1:-1]), initial, strict=True)
        ...     sums = [start + part.cumsum(0) for part, start in parts]
        ...     final = torch.stack([x[-1] for x in sums])
        ...     return ChunkResult(torch.cat(sums), final, final)
        >>> tables = round_tables(plan, torch.device("cpu"), "final")
        >>> run_rounds(tables, total, [torch.tensor([1.0, 2.0, 3.0, 4.0])], torch.tensor(0.0))
        (tensor([1., 3., 6., 7.]), tensor([6., 7.]))

    Notes:
        Gradients of a token that several blocks hold, and of a state that several sequences start from, are added
        up in fixed order: results repeat bit for bit if those of the op do.
    """
    parts = zip(*(torch.split(tables.index(x), tables.sizes) for x in inputs), strict=True)
    states = [zero.unsqueeze(0)]
    outs = []
    for step, packed in zip(tables.steps, parts, strict=True):
        initial = step.source(torch.cat([states[r] for r in step.above]))
        result = op(packed, step.offsets, initial)
        outs.append(result.out)
        given = result.boundary if tables.states == "boundary" else result.final
        states.append(step.kept(given.to(zero.dtype)))
    final = None if tables.final is None else tables.final(torch.cat(states))
    return tables.place(torch.cat(outs)), final
