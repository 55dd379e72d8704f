"""Linear attentions in plain PyTorch, chunk by chunk, between given states: what the rounds executor runs by itself.

Suffixes: T tokens of a call, Q sequences, K chunks, C chunk size, H heads, G key heads (H a multiple of G), D key
width, V value width.

Per token t, with the gate a_t = exp(g_t), a number or a vector over D, and the state S [D, V]:

    S <- a_t * S;  S <- S + beta_t k_t (v_t - S' k_t)' (without beta: S + k_t v_t');  out_t = scale * S' q_t

Within a chunk the updates u are solved at once (the WY or UT transform): with decays d_ij = exp(g_(j+1) + ... + g_i),
(I + L) u = beta (v - S' (exp(g_1 + ... + g_i) * k)), L_ij = beta_i k_i' (d_ij * k_j) for j < i; without beta u = v.

Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024, section 3.3; S. Yang et al., "Parallelizing
Linear Transformers with the Delta Rule over Sequence Length", 2024; Kimi Team, "Kimi Linear", 2025, section 3 (decays
per channel); T. Dao, A. Gu, "Transformers are SSMs", 2024, section 6 (without beta).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from treecompile.runtime.errors import OptionError
from treecompile.runtime.ops.recurrence_chunks import lowest_gate

__all__ = ["ChunkResult", "recurrence_in_chunks"]


class ChunkResult(NamedTuple):
    """What a call gives back.

    Attributes:
        out: [T, H, V], dtype of the values.
        final: [Q, H, D, V] state after each sequence; fp32, or fp64 for fp64 inputs.
        boundary: [K, H, D, V] state after each chunk, sequence after sequence; the same dtype.
    """

    out: Tensor
    final: Tensor
    boundary: Tensor


def recurrence_in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor | None,
    offsets: Tensor | None = None,
    initial: Tensor | None = None,
    *,
    chunk: int = 64,
    scale: float | None = None,
) -> ChunkResult:
    """Run packed sequences, each from its own initial state; differentiable in all tensors, states included.

    Args:
        query, key: [T, G, D] floats; normalised by the caller if the model does so.
        value: [T, H, V].
        gate: [T, H] logarithm of the decay, <= 0; [T, H, D] for a decay per channel.
        beta: [T, H] for the delta rule, else None.
        offsets: int64 [Q + 1], where sequences begin: ascending from 0 to T, none empty. None is one sequence.
        initial: [Q, H, D, V]; None is zero.
        chunk: C; chunks are counted from the start of each sequence, the last one may be partial.
        scale: factor of the queries; None is D ** -0.5.

    Returns:
        outputs, final and boundary states. Computed in fp64 for fp64 values, else in fp32 (sums of gates in fp64).

    Raises:
        OptionError: offsets that do not cut T tokens into non-empty sequences, or a chunk below 1.

    Example:
        >>> one = torch.ones(3, 1, 1, dtype=torch.float64)
        >>> result = recurrence_in_chunks(one, one, one, 0 * one[..., 0], one[..., 0] / 2, chunk=2)
        >>> result.out.flatten().tolist(), result.boundary.flatten().tolist(), result.final.item()
        ([0.5, 0.75, 0.875], [0.75, 0.875], 0.875)

    Notes:
        Work inside of chunks runs over all chunks at once; the states take one step per chunk of the longest
        sequence, for all sequences at once. Decays per channel take [C, C, D] numbers a chunk and head.
    """
    total, heads = value.shape[:2]
    bounds = [0, *([total] if total else [])] if offsets is None else offsets.tolist()
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    if bounds[:1] != [0] or bounds[-1] != total or min(sizes, default=1) < 1:
        raise OptionError(
            argument="offsets", value=bounds, remedy=f"cut {total} tokens into sequences, none of them empty"
        )
    if chunk < 1:
        raise OptionError(argument="chunk", value=chunk, remedy="give the op's chunk size, an integer >= 1")
    device = value.device
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    # Tokens of every chunk, the absent ones of a partial chunk reading a row of zeros: no decay, no update.
    count = [-(-size // chunk) for size in sizes]
    first = list(itertools.accumulate(count, initial=0))
    rows = torch.full((first[-1], chunk), total, dtype=torch.int64)
    for begin, size, at, chunks in zip(bounds, sizes, first, count, strict=False):
        rows[at : at + chunks].view(-1)[:size] = torch.arange(begin, begin + size)
    # Chunks in order of steps, so that a step reads slices: one chunk of each sequence that goes on.
    active, order = list(range(len(sizes))), list[int]()
    kept: list[list[int]] = []
    for step in range(max(count, default=0)):
        kept.append([i for i, sequence in enumerate(active) if count[sequence] > step])
        active = [active[i] for i in kept[-1]]
        order += [first[sequence] + step for sequence in active]
    by_step = torch.tensor(order, dtype=torch.int64)
    read, back = rows[by_step].to(device), by_step.argsort().to(device)

    def chunked(x: Tensor) -> Tensor:
        """[K, H, C, ...]."""
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])]).to(dtype)[read].transpose(1, 2)
        return x.repeat_interleave(heads // x.shape[1], dim=1) if x.shape[1] != heads else x

    q = chunked(query) * (query.shape[-1] ** -0.5 if scale is None else scale)
    k, v = chunked(key), chunked(value)
    # [K, H, C, 1], or D in place of 1. Differences lose what two sums have in common: they are taken in fp64.
    logs = chunked(gate if gate.dim() == 3 else gate.unsqueeze(-1)).clamp(min=lowest_gate(dtype))
    sums = logs.double().cumsum(-2)
    decay = sums.to(dtype).exp()
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril().unsqueeze(-1)
    between = (sums.unsqueeze(-2) - sums.unsqueeze(-3)).to(dtype).masked_fill(~causal, -torch.inf).exp()

    def products(x: Tensor) -> Tensor:
        """[K, H, C, C] `x_i' (d_ij * k_j)`."""
        if between.shape[-1] == 1:
            return x @ k.transpose(-1, -2) * between.squeeze(-1)
        return torch.einsum("...id,...ijd,...jd->...ij", x, between, k)

    own, seen = v, None
    if beta is not None:
        b = chunked(beta).unsqueeze(-1)
        solved = torch.linalg.solve_triangular(
            (b * products(k)).tril(-1) + torch.eye(chunk, dtype=dtype, device=device),
            torch.cat([b * v, b * decay * k], dim=-1),
            upper=False,
            unitriangular=True,
        )
        own, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inner = products(q)
    outer = q * decay
    leaving = k * (sums[..., -1:, :] - sums).to(dtype).exp()
    remains = decay[..., -1, :].unsqueeze(-1)

    shape = (len(sizes), heads, key.shape[-1], value.shape[-1])
    state = value.new_zeros(shape, dtype=dtype) if initial is None else initial.to(dtype)
    if not kept:
        return ChunkResult(torch.zeros_like(value), state, state.new_zeros(0, *shape[1:]))

    def steps(x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, [len(going) for going in kept])

    outs, states = [], []
    known = steps(own) if seen is None else zip(steps(own), steps(seen), strict=True)
    for going, rule, *local in zip(kept, known, *map(steps, (inner, outer, leaving, remains)), strict=True):
        within, above, write, keep = local
        if len(going) < len(state):
            state = state[torch.tensor(going, device=device)]
        update = rule if isinstance(rule, Tensor) else rule[0] - rule[1] @ state
        outs.append(above @ state + within @ update)
        state = keep * state + write.transpose(-1, -2) @ update
        states.append(state)
    boundary = torch.cat(states)[back]
    out = torch.cat(outs)[back].transpose(1, 2).reshape(-1, heads, value.shape[-1])
    last = torch.tensor(first[1:], device=device) - 1
    return ChunkResult(out[(rows.reshape(-1) < total).to(device)].to(value.dtype), boundary[last], boundary)
