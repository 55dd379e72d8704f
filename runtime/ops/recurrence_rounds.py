"""The rounds executors of `tree_recurrence`: a chunkwise function with states, one packed call per round.

"rounds" runs our own `recurrence_in_chunks`, "fla" the functions of the package flash-linear-attention. Nobody gets
either without asking for it (`treecompile.runtime.ops.recurrence_choice`): they are for comparing, and for forms whose
kernels are others' alone.

Legend: N packed tokens, T tokens of a call, Q sequences of a call, G key heads, H value heads, D key width, V value
width.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treecompile.runtime.cache import TreeCache
from treecompile.runtime.chunks import Alignment
from treecompile.runtime.ops.attention_math import accumulation_dtype
from treecompile.runtime.ops.chunk_reference import ChunkResult, recurrence_in_chunks
from treecompile.runtime.ops.chunk_rounds import ChunkOp, RoundTables, round_tables, run_rounds
from treecompile.runtime.ops.opaque import gradients
from treecompile.runtime.ops.recurrence_choice import VARIABLE
from treecompile.runtime.ops.recurrence_chunks import lowest_gate
from treecompile.runtime.ops.recurrence_plan import block_plan
from treecompile.runtime.rounds import States

__all__ = [
    "FLA",
    "STATES",
    "FlaFunction",
    "fla_function",
    "recurrence_rounds",
    "rounds_backward",
    "rounds_forward",
    "why_no_fla",
]

KEPT = 16
# The executors, and which states their functions give.
STATES: dict[str, States] = {"rounds": "boundary", "fla": "final"}


class FlaFunction(NamedTuple):
    """A chunkwise function of flash-linear-attention.

    Attributes:
        module, name: where it is.
        grouped: whether it takes fewer key heads than value heads.
    """

    module: str
    name: str
    grouped: bool


# By (delta rule, decay per channel); as of flash-linear-attention 0.6.
FLA = {
    (True, False): FlaFunction("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", True),
    (True, True): FlaFunction("fla.ops.kda", "chunk_kda", True),
    (False, False): FlaFunction("fla.ops.simple_gla", "chunk_simple_gla", False),
    (False, True): FlaFunction("fla.ops.gla", "chunk_gla", False),
}


def why_no_fla(v: Tensor) -> str:
    """Say why flash-linear-attention cannot run these values, or "".

    Args:
        v: as for `tree_recurrence`.

    Example:
        >>> why_no_fla(torch.zeros(1, 4, 1, 16))
        'it runs on CUDA devices, and the values are on cpu'
    """
    if not v.is_cuda:
        return f"it runs on CUDA devices, and the values are on {v.device}"
    if v.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes in bf16, fp16 and fp32, and the values are {v.dtype}"
    return ""


def refuse_fla(v: Tensor) -> None:
    """Raise what `why_no_fla` says.

    Raises:
        ValueError: if it says anything.
    """
    if reason := why_no_fla(v):
        raise ValueError(
            f"{VARIABLE}=fla: {reason}; move the model, or ask for another executor or none (unset {VARIABLE})"
        )


def fla_function(delta: bool, vector: bool) -> Callable[..., Any]:
    """Import the function of a form.

    Args:
        delta: with the delta rule.
        vector: with a decay per channel.

    Raises:
        ValueError: flash-linear-attention, this function of it or what it needs is not installed.

    Example:
        >>> fla_function(True, False).__name__  # doctest: +SKIP
        'chunk_gated_delta_rule'
    """
    module, name, _ = FLA[delta, vector]
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"{VARIABLE}=fla: {error}; install flash-linear-attention 0.6 or later"
            f" (pip install flash-linear-attention), or unset {VARIABLE}"
        ) from error
    return found


_kept: TreeCache[RoundTables] = TreeCache(capacity=KEPT)


def recurrence_rounds(
    segments_host: Tensor, chunk: int, device: torch.device, alignment: Alignment, executor: str
) -> RoundTables:
    """Return the tables of a tree, from the cache where the same table was seen before (contents are compared).

    Args:
        segments_host: int32 [S, 4] on the CPU, rows (start, end, parent row or -1, subtree end of start); a token at
            least.
        chunk: C.
        device: where the tables go.
        alignment: of the chunks.
        executor: a key of `STATES`.

    Raises:
        TreeError: no table of a tree without leaf pads.
        OptionError: a chunk below 1, an unknown alignment, or no tokens.

    Example:
        >>> table = torch.tensor([[0, 3, -1, 5], [3, 4, 0, 4], [4, 5, 0, 5]], dtype=torch.int32)
        >>> tables = recurrence_rounds(table, 2, torch.device("cpu"), "trajectory", "fla")
        >>> [step.offsets.tolist() for step in tables.steps], tables.index.rows.tolist()
        ([[0, 2], [0, 2, 4]], [0, 1, 2, 3, 2, 4])
    """

    def build() -> RoundTables:
        return round_tables(block_plan(segments_host, chunk, alignment), device, STATES[executor])

    return _kept.get([segments_host], build, device=device, options=(chunk, alignment, STATES[executor]))


def rounds_forward(
    inputs: Sequence[Tensor], tables: RoundTables, scale: float, chunk: int, executor: str
) -> Tensor:
    """The outputs of `tree_recurrence`.

    Args:
        inputs: q, k, v, gate and, for the delta rule, beta, as for `tree_recurrence`; V and H at least 1.
        tables: of the tree, the chunk and the executor.
        scale: factor of the queries.
        chunk: C.
        executor: a key of `STATES`.

    Returns:
        [1, N, H, V] in v's dtype.

    Raises:
        ValueError: "fla" cannot run here, or not these inputs; and whatever its functions raise.

    Example:
        >>> table = torch.tensor([[0, 2, -1, 4], [2, 3, 0, 3], [3, 4, 0, 4]], dtype=torch.int32)
        >>> tables = recurrence_rounds(table, 2, torch.device("cpu"), "trajectory", "rounds")
        >>> one = torch.ones(1, 4, 1, 1)
        >>> rounds_forward([one, one, one, 0 * one[..., 0]], tables, 1.0, 2, "rounds").flatten().tolist()
        [1.0, 2.0, 3.0, 3.0]
    """
    # The functions of fla are autograd functions, which keep things for a backward pass that would never come.
    with torch.no_grad():
        return _run(inputs, tables, scale, chunk, executor)


def rounds_backward(
    grad: Tensor, inputs: Sequence[Tensor], tables: RoundTables, scale: float, chunk: int, executor: str
) -> list[Tensor]:
    """The gradients of the inputs: the rounds run again, with autograd.

    Args:
        grad: [1, N, H, V].
        inputs, tables, scale, chunk, executor: as for `rounds_forward`.

    Returns:
        contiguous tensors of the inputs' shapes and dtypes.

    Raises:
        ValueError: as `rounds_forward`.

    Example:
        >>> table = torch.tensor([[0, 2, -1, 4], [2, 3, 0, 3], [3, 4, 0, 4]], dtype=torch.int32)
        >>> tables = recurrence_rounds(table, 2, torch.device("cpu"), "trajectory", "rounds")
        >>> one = torch.ones(1, 4, 1, 1)
        >>> grads = rounds_backward(one, [one, one, one, 0 * one[..., 0]], tables, 1.0, 2, "rounds")
        >>> grads[2].flatten().tolist()  # a value is read by its own token and those below
        [4.0, 3.0, 1.0, 1.0]
    """
    run = functools.partial(_run, tables=tables, scale=scale, chunk=chunk, executor=executor)
    return gradients(run, inputs, [True] * len(inputs), grad, None)


def _run(inputs: Sequence[Tensor], tables: RoundTables, scale: float, chunk: int, executor: str) -> Tensor:
    k, v = inputs[1:3]
    op = _fla(inputs, scale) if executor == "fla" else _ours(scale, chunk)
    zero = v.new_zeros((v.shape[2], k.shape[3], v.shape[3]), dtype=accumulation_dtype(v.dtype))
    out, _ = run_rounds(tables, op, [x[0] for x in inputs], zero)
    return out.to(v.dtype).unsqueeze(0)


def _ours(scale: float, chunk: int) -> ChunkOp:
    def run(packed: Sequence[Tensor], offsets: Tensor, initial: Tensor) -> ChunkResult:
        q, k, v, gate, *beta = packed
        return recurrence_in_chunks(
            q, k, v, gate, beta[0] if beta else None, offsets, initial, chunk=chunk, scale=scale
        )

    return run


def _fla(inputs: Sequence[Tensor], scale: float) -> ChunkOp:
    """The function of the inputs' form.

    Its chunks are its own, of 64 tokens from the start of each sequence: it is right for any chunk of ours, which says
    where sequences may start, and rounds as on dense rows where that is a multiple of 64.
    """
    v, gate = inputs[2:4]
    delta, vector = len(inputs) > 4, gate.dim() == 4
    refuse_fla(v)
    function = fla_function(delta, vector)
    # Operands of one dtype; states, decays and steps in that of the states.
    wide = accumulation_dtype(v.dtype)
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in inputs[:3]))
    dtype = wide if dtype == torch.float64 else dtype

    def run(packed: Sequence[Tensor], offsets: Tensor, initial: Tensor) -> ChunkResult:
        q, k, v = (x.to(dtype).unsqueeze(0) for x in packed[:3])
        if q.shape[2] != v.shape[2] and not FLA[delta, vector].grouped:
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        # Infinite decays would leave differences of infinities between the sums of a chunk.
        named = {"g": packed[3].to(wide).clamp(min=lowest_gate(wide)).unsqueeze(0)}
        if delta:
            named["beta"] = packed[4].to(wide).unsqueeze(0)
        out, final = function(
            q=q,
            k=k,
            v=v,
            **named,
            scale=scale,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=offsets,
        )
        return ChunkResult(out[0], final, final)

    return run
