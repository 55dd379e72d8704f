"""The rounds executor: a chunkwise op over the packed tree, one packed call per round.

Suffixes: N packed tokens, K blocks, I trajectories; state is the shape of one state, such as [H, D, V].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from treecompile.runtime.chunks import ChunkPlan
from treecompile.runtime.errors import OptionError
from treecompile.runtime.ops.chunk_reference import ChunkResult
from treecompile.runtime.rounds import States

__all__ = ["ChunkOp", "run_rounds"]

# (inputs at the tokens of a call, offsets, initial states) -> outputs and states
ChunkOp: TypeAlias = Callable[[Sequence[Tensor], Tensor, Tensor], ChunkResult]


def run_rounds(
    plan: ChunkPlan, op: ChunkOp, inputs: Sequence[Tensor], zero: Tensor, states: States = "boundary"
) -> tuple[Tensor, Tensor | None]:
    """Run every block once, replayed tokens included; differentiable as far as the op is.

    Args:
        plan: the chunk plan; its chunk size is the op's.
        op: a chunkwise op with initial and final states. With "boundary" it gives the states after all chunks,
            with "final" its ``boundary`` is not read.
        inputs: tensors [N, ...], one row per packed token.
        zero: a state, what sequences without a parent start from.
        states: which states the op gives.

    Returns:
        [N, ...] outputs, zero at leaf pads; and [I, state] final states of the trajectories, in the order of rows,
        or None if the plan was made without ``row_states``.

    Raises:
        OptionError: an unknown ``states``, or a tree without blocks (nothing says the shape of its outputs).

    Example:
        >>> from treecompile.runtime.chunks import chunk_plan
        >>> from treecompile.runtime.tree import RolloutTree
        >>> plan = chunk_plan(RolloutTree.from_rows([[1, 2, 3], [1, 2, 4]]), 2, row_states=True)
        >>> def total(inputs, offsets, initial):  # a recurrence: the sum so far
        ...     parts = zip(torch.tensor_split(inputs[0], offsets[1:-1]), initial, strict=True)
        ...     sums = [start + part.cumsum(0) for part, start in parts]
        ...     final = torch.stack([x[-1] for x in sums])
        ...     return ChunkResult(torch.cat(sums), final, final)
        >>> run_rounds(plan, total, [torch.tensor([1.0, 2.0, 3.0, 4.0])], torch.tensor(0.0), "final")
        (tensor([1., 3., 6., 7.]), tensor([6., 7.]))

    Notes:
        Gathers and scatters are those of PyTorch: a reference, not the fastest executor.
    """
    calls, rounds = plan.calls(states), plan.rounds(states)
    if not calls:
        raise OptionError(argument="plan", value=repr(plan), remedy="an empty tree needs no recurrence")
    device = zero.device

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

    # Row 0 of the states is the zero state; `row` says where each kept block's state lies.
    bank = [zero.unsqueeze(0)]
    row = np.zeros(plan.blocks + 1, np.int64)
    wanted = np.zeros(plan.blocks, np.bool_)
    wanted[rounds.handoffs] = True
    if plan.row_states:
        wanted[plan.row_block] = True
    written, where = [], []
    used = 1
    for call in calls:
        index = tensor(call.index)
        initial = torch.cat(bank)[tensor(row[call.source])]
        result = op([x[index] for x in inputs], tensor(call.offsets), initial)
        own = np.flatnonzero(call.owned)
        written.append(result.out[tensor(own)])
        where.append(call.index[own])
        if rounds.states == "boundary":
            kept = np.flatnonzero(wanted[call.block])
            left = result.boundary
        else:
            ends = call.block[np.searchsorted(call.block_offsets, call.offsets[1:]) - 1]
            kept = np.flatnonzero(wanted[ends])
            left = result.final
        blocks = call.block[kept] if rounds.states == "boundary" else ends[kept]
        bank.append(left[tensor(kept)].to(zero.dtype))
        row[blocks] = used + np.arange(len(kept))
        used += len(kept)
    place = np.concatenate(where)
    back = np.full(plan.tree.n, len(place), np.int64)
    back[place] = np.arange(len(place))
    outs = torch.cat([*written, torch.zeros_like(written[0][:1])])
    final = torch.cat(bank)[tensor(row[plan.row_block])] if plan.row_states else None
    return outs[tensor(back)], final
