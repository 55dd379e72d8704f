"""The op `treecompile::tree_recurrence`: linear attention with decays, with or without the delta rule, on a tree.

Legend: N packed tokens, G key heads, H value heads (H a multiple of G), D key width, V value width; K blocks of a
slice, C rows of a block.

Per token, from the state S [D, V] that its parent left (zero above a root), a = exp(gate) a number or a vector over D:

    S <- a * S;   S <- S + beta k (v - S' k)'   (beta None: S <- S + k v');   out = scale S' q

Two executors of one contract are chosen from: Triton kernels for the delta rule on a GPU (`recurrence_triton`), and the
plain PyTorch below for the rest, their specification. Others run if the environment asks for them
(`recurrence_choice`): chunkwise functions, ours or those of flash-linear-attention, in packed calls
(`recurrence_rounds`).

In PyTorch, every path keeps its own grid of chunks (`treecompile.runtime.chunks`). What is local to a chunk is computed
for many blocks at once (`recurrence_chunks`); states pass from level to level of the chunk trie, all blocks of a level
at once: as many steps as the longest path has chunks, however many forks there are. Nothing is saved for the backward
pass but the inputs; sums are taken in fixed order, results repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treecompile.runtime.chunks import Alignment
from treecompile.runtime.ops.attention_math import accumulation_dtype
from treecompile.runtime.ops.chunk_rounds import RoundTables
from treecompile.runtime.ops.recurrence_choice import EXECUTORS, VARIABLE, asked_executor
from treecompile.runtime.ops.recurrence_chunks import (
    Delta,
    Local,
    Reads,
    ScalarDecay,
    VectorDecay,
    add_product,
    decay_of,
)
from treecompile.runtime.ops.recurrence_paths import PathTables, path_tables
from treecompile.runtime.ops.recurrence_plan import RecurrenceTables, Slice, recurrence_tables
from treecompile.runtime.ops.recurrence_rounds import (
    STATES,
    recurrence_rounds,
    refuse_fla,
    rounds_backward,
    rounds_forward,
)
from treecompile.runtime.ops.recurrence_triton import (
    MOST_CHUNK,
    Inputs,
    attempt,
    kernels_backward,
    kernels_forward,
    why_not,
)
from treecompile.runtime.ops.registry import define, register_autocast
from treecompile.runtime.ops.segment_sum import segment_sum

__all__ = ["recurrence_executor", "tree_recurrence", "tree_recurrence_backward", "tree_recurrence_reference"]

# What the blocks that are computed at once may hold.
SLICE_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? beta, Tensor subtree_end, Tensor segments_host,"
    " float scale, int chunk, str alignment='trajectory'"
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor | None,
    subtree_end: Tensor,
    segments_host: Tensor,
    scale: float,
    chunk: int,
    alignment: Alignment = "trajectory",
) -> Tensor:
    """Run a recurrence from each token's parent on, over all paths of the tree at once.

    Args:
        q, k: [1, N, G, D], floats of any strides; N = 0 and 1 included. Value head h reads key head h // (H / G).
        v: [1, N, H, V].
        gate: [1, N, H] logarithm of the decay, <= 0; [1, N, H, D] for a decay per channel.
        beta: [1, N, H] for the (gated) delta rule; None for plain (gated) linear attention.
        subtree_end: int32 [N]; n reads what k wrote iff ``k <= n < subtree_end[k]``. Every packed token is an
            ordinary one: leaf pads have no place in a recurrence.
        segments_host: int32 [S, 4] on the CPU, rows (start, end, parent row or -1, subtree end of start).
        scale: factor of the queries.
        chunk: C, the dense op's own for equal rounding.
        alignment: where chunks are counted from: "trajectory", the root of each path, as on dense rows; "branch", the
            last fork, so that no token is computed twice; "auto", whichever has fewer chunks.

    Returns:
        [1, N, H, V] contiguous in v's dtype. PyTorch and "rounds" compute in fp32, fp64 for fp64 v. The kernels
        multiply operands of the widest dtype of q, k and v, fp32 ones as `torch.get_float32_matmul_precision` says, and
        keep states, decays and sums in fp32; flash-linear-attention gets operands, states and decays in the same.

    Raises:
        ValueError: shapes that disagree, a table of another tree, leaf pads, a chunk below 1, another alignment; an
            executor that `TREECOMPILE_RECURRENCE` asks for and that does not exist or cannot run these inputs.

    Example:
        >>> table = torch.tensor([[0, 2, -1, 4], [2, 3, 0, 3], [3, 4, 0, 4]], dtype=torch.int32)
        >>> end = torch.tensor([4, 4, 3, 4]).int()  # a fork after two tokens
        >>> one = torch.ones(1, 4, 1, 1)
        >>> tree_recurrence(one, one, one, 0 * one[..., 0], None, end, table, 1.0, 64).flatten().tolist()
        [1.0, 2.0, 3.0, 3.0]
        >>> tree_recurrence(one, one, one, 0 * one[..., 0], one[..., 0] / 2, end, table, 1.0, 2).flatten().tolist()
        [0.5, 0.75, 0.875, 0.875]

    Notes:
        `tree_recurrence_reference` is the specification. What models put in:

        - gated delta rule (Qwen3-Next; Yang et al., "Gated Delta Networks", 2024): as named, scale D ** -0.5;
        - Kimi delta attention (Kimi Team, "Kimi Linear", 2025): the same with a gate per channel;
        - SSD (Mamba2; Dao and Gu, "Transformers are SSMs", 2024): q = C, k = B, v = dt x, gate = dt A, scale 1;
        - lightning attention (MiniMax, 2025): gate = -slope of the head, scale 1.

        `TREECOMPILE_RECURRENCE` asks for an executor, of all calls: "triton"; "pytorch"; "rounds", our
        `recurrence_in_chunks` with a packed call per round; "fla", the functions of flash-linear-attention likewise.

        Blocks are computed in slices of at most `SLICE_BYTES`, by the kernels in heads of at most
        `recurrence_triton.SCRATCH_BYTES`; rounds are computed whole. Autocast casts nothing: the models say what they
        compute in.
    """
    _check(q, k, v, gate, beta)
    executor = recurrence_executor(k, v, gate, beta, chunk)[0] if v.numel() else ""
    if executor in STATES:
        tables = recurrence_rounds(segments_host, chunk, v.device, alignment, executor)
        _check_tree(tables, subtree_end)
        return rounds_forward(_given(q, k, v, gate, beta), tables, scale, chunk, executor)
    if executor == "triton":
        inputs = _inputs(q, k, v, gate, beta, subtree_end, segments_host, scale, chunk, alignment)
        made = attempt(lambda: kernels_forward(inputs), k, v)
        if made is not None:
            return made.to(v.dtype).unsqueeze(0)
    run = _Run(q, k, v, gate, beta, subtree_end, segments_host, scale, chunk, alignment, backward=False)
    out = v.new_empty(v.shape)
    if v.numel() == 0:
        return out
    above: Tensor | None = None
    parts: list[Tensor] = []
    for piece in run.slices:
        block = run.load(piece)
        above = block.pass_states(above, parts)
        run.store(out[0], piece, block.outputs(run.queries(piece)).to(v.dtype))
    return out


@dataclass
class _Solve:
    """The delta rule in a slice.

    beta: [K, H, C, 1]. inverse: [K, H, C, C] `(I + L)^-1`. seen: [K, H, C, D] `inverse (beta k * e)`.
    """

    beta: Tensor
    inverse: Tensor
    seen: Tensor


@dataclass
class _Block:
    """A slice at work.

    v, u: [K, H, C, V] values and updates. states: [K, H, D, V], what each block starts from.
    """

    piece: Slice
    decay: ScalarDecay | VectorDecay
    v: Tensor
    u: Tensor
    solve: _Solve | None
    states: Tensor

    def pass_states(self, above: Tensor | None, parts: list[Tensor]) -> Tensor | None:
        """Fill `states` and finish `u`.

        Args:
            above: end states of the level above the slice's first.
            parts: end states of the blocks of that first level that earlier slices hold; changed.

        Returns:
            `above` of the next slice.
        """
        local, steps = self.decay.local, self.piece.steps
        passed = False
        for i, step in enumerate(steps):
            at = slice(step.begin, step.end)
            states, u = self.states[at], self.u[at]
            if step.root or above is None:
                states.zero_()
            else:
                if step.up is not None:
                    torch.index_select(above, 0, step.up, out=states)
                elif not passed:
                    states.copy_(above[step.place : step.place + step.end - step.begin])
                if self.solve is not None:
                    add_product(u, self.solve.seen[at], states, -1)
            if step.below:
                # Where each block has one child, its end state is written to where the child begins.
                passed = i + 1 < len(steps) and step.opens and step.closes and steps[i + 1].up is None
                ends = torch.empty_like(states) if not passed else self.states[step.end : steps[i + 1].end]
                torch.mul(local.keep[at], states, out=ends)
                parts.append(add_product(ends, local.write[at].transpose(-1, -2), u))
            if step.closes:
                above = None if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)
                parts.clear()
        return above

    def outputs(self, q: Tensor) -> Tensor:
        """[K, H, C, V] for the scaled queries [K, G, C, D]."""
        reads = self.decay.reads(q)
        return add_product(reads.outer @ self.states, reads.inner, self.u)

    def gradients(
        self, q: Tensor, grad: Tensor, below: Tensor | None, parts: list[Tensor]
    ) -> tuple[_Grads, Tensor | None]:
        """Gradients of a slice's inputs.

        Args:
            q: [K, G, C, D] scaled queries.
            grad: [K, H, C, V] of the outputs.
            below: gradients of the end states of the slice's last level.
            parts: gradients of the initial states of the blocks of that level that later slices hold; changed.

        Returns:
            the gradients, and `below` of the slice before.
        """
        local = self.decay.local
        reads = self.decay.reads(q)
        du = reads.inner.transpose(-1, -2) @ grad
        from_states = reads.outer.transpose(-1, -2) @ grad
        to_states = torch.zeros_like(self.states)
        for step in reversed(self.piece.steps):
            at = slice(step.begin, step.end)
            if below is not None:
                ends = below[step.place : step.place + step.end - step.begin]
                to_states[at] = ends
                add_product(du[at], local.write[at], ends)
                from_states[at].addcmul_(local.keep[at], ends)
            if step.root:
                continue
            if self.solve is not None:
                add_product(from_states[at], self.solve.seen[at].transpose(-1, -2), du[at], -1)
            parts.insert(0, from_states[at])
            if step.opens:
                level = parts[0] if len(parts) == 1 else torch.cat(parts)
                parts.clear()
                below = level if step.children is None else _sum_children(level, step.children)
        out = Reads(grad @ self.states.transpose(-1, -2), grad @ self.u.transpose(-1, -2))
        write = self.u @ to_states.transpose(-1, -2)
        keep = (self.states * to_states).sum(-1, keepdim=True)
        if local.keep.shape[-2] == 1:
            keep = keep.sum(-2, keepdim=True)
        if self.solve is None or local.delta is None:
            found = self.decay.backward(Local(write, keep, None), out, q, reads)
            return _Grads(*found, du, None), below
        dy = self.solve.inverse.transpose(-1, -2) @ du
        lower = (dy @ self.u.transpose(-1, -2)).neg_().tril_(-1)
        erase = (dy @ self.states.transpose(-1, -2)).neg_()
        beta = (dy * self.v).sum(-1)
        beta += (erase * local.delta.erase).sum(-1) + (lower * local.delta.lower).sum(-1)
        delta = Delta(erase.mul_(self.solve.beta), lower.mul_(self.solve.beta))
        found = self.decay.backward(Local(write, keep, delta), out, q, reads)
        return _Grads(*found, dy.mul_(self.solve.beta), beta), below


@dataclass
class _Grads:
    """[K, heads, C, ...] gradients of a slice's inputs, scaled queries."""

    q: Tensor
    k: Tensor
    gate: Tensor
    v: Tensor
    beta: Tensor | None


def _sum_children(x: Tensor, offsets: Tensor) -> Tensor:
    """[K, H, D, V] by parents: blocks of one parent follow each other."""
    return segment_sum(x, offsets, torch.arange(x.shape[0], device=x.device))


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor | None,
    subtree_end: Tensor,
    segments_host: Tensor,
    scale: float,
    chunk: int,
    alignment: Alignment,
) -> Inputs:
    """The inputs of a call as the Triton executor takes them.

    Chunks of models without the delta rule are longer than the kernels' tiles. Their results depend on the length of
    chunks by rounding only, and shorter ones replay less.
    """
    tables = path_tables(segments_host, min(chunk, MOST_CHUNK), v.device, alignment)
    _check_tree(tables, subtree_end)
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    # The values say the precision, and those of fp64 are not computed here.
    dtype = torch.float32 if dtype == torch.float64 else dtype
    q, k, v = (_rows(x.to(dtype)) for x in (q, k, v))
    return Inputs(q, k, v, _rows(gate), None if beta is None else _rows(beta), tables, scale)


class _Run:
    """The inputs of a call as rows of tokens, and the slices to run."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor,
        beta: Tensor | None,
        subtree_end: Tensor,
        segments_host: Tensor,
        scale: float,
        chunk: int,
        alignment: Alignment,
        *,
        backward: bool,
    ) -> None:
        self.dtype = accumulation_dtype(v.dtype)
        self.scale, self.tables = scale, recurrence_tables(segments_host, chunk, v.device, alignment)
        _check_tree(self.tables, subtree_end)
        self.heads, vector = v.shape[2], gate.dim() == 4
        repeat = self.heads // k.shape[2] if vector else 1
        self.q, self.k = (_rows(x.repeat_interleave(repeat, 2) if repeat > 1 else x) for x in (q, k))
        self.v, self.gate = _rows(v), _rows(gate)
        self.beta = None if beta is None else _rows(beta)
        width = self.tables.width
        if vector and width:
            width = 1 << (width - 1).bit_length()
        # Key-sized, value-sized, square and state-sized tensors that are alive at once.
        shares = (10, 6, 6, 4) if backward else (5, 4, 4, 3)
        d, values = k.shape[3], v.shape[3]
        sizes = (width * d, width * values, width * width, d * values)
        each = self.heads * self.dtype.itemsize * sum(a * b for a, b in zip(shares, sizes, strict=True))
        budget = SLICE_BYTES.get(v.device.type, SLICE_BYTES["cpu"])
        self.slices = self.tables.slices(max(budget // max(each, 1), 1), width)

    def _gather(self, x: Tensor, piece: Slice, without: Tensor | None) -> Tensor:
        """[N, heads, ...] as [K, heads, C, ...]; zeros in the rows `without`."""
        heads, (blocks, width) = x.shape[1], piece.rows.shape
        index = piece.rows.unsqueeze(1) * heads + torch.arange(heads, device=x.device).view(1, -1, 1)
        found = x.flatten(0, 1).index_select(0, index.view(-1)).to(self.dtype)
        found = found.view(blocks, heads, width, *x.shape[2:])
        if without is not None:
            found[without // width, :, without % width] = 0
        return found

    def load(self, piece: Slice) -> _Block:
        """Gather a slice's keys, values and gates, and do the local work of its states."""
        k, v, gate = (self._gather(x, piece, piece.empty) for x in (self.k, self.v, self.gate))
        decay = decay_of(k, gate, self.beta is not None)
        u, solve = v, None
        if self.beta is not None and decay.local.delta is not None:
            delta = decay.local.delta
            beta = self._gather(self.beta, piece, piece.empty).unsqueeze(-1)
            unit = torch.eye(v.shape[2], dtype=self.dtype, device=v.device).expand_as(delta.lower)
            inverse = torch.linalg.solve_triangular(beta * delta.lower, unit, upper=False, unitriangular=True)
            scaled = inverse * beta.transpose(-1, -2)
            u, solve = scaled @ v, _Solve(beta, inverse, scaled @ delta.erase)
        states = v.new_empty((*v.shape[:2], k.shape[-1], v.shape[-1]))
        return _Block(piece, decay, v, u, solve, states)

    def queries(self, piece: Slice) -> Tensor:
        """The scaled queries of the rows that a slice owns."""
        return self._gather(self.q, piece, piece.foreign).mul_(self.scale)

    def load_grad(self, grad: Tensor, piece: Slice) -> Tensor:
        """Gradients of the outputs that the slice owns."""
        return self._gather(grad, piece, piece.foreign)

    @staticmethod
    def store(out: Tensor, piece: Slice, x: Tensor) -> None:
        """Write the rows of x [K, heads, C, ...] that a slice owns to their tokens in out [N, heads, ...]."""
        heads = x.shape[1]
        if piece.own_row is not None:
            out.index_copy_(0, piece.own_token, _take_rows(x, piece.own_row))
            return
        target = piece.rows.unsqueeze(1) * heads + torch.arange(heads, device=x.device).view(1, -1, 1)
        out.flatten(0, 1).index_copy_(0, target.view(-1), x.flatten(0, 2))


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """[K, heads, C, ...] at rows, each a block times C plus a row of it, as [rows, heads, ...]."""
    heads, width = x.shape[1:3]
    head = torch.arange(heads, device=x.device)
    source = (rows // width).unsqueeze(1) * (heads * width) + (rows % width).unsqueeze(1) + head * width
    return x.flatten(0, 2).index_select(0, source.view(-1)).view(-1, heads, *x.shape[3:])


def _rows(x: Tensor) -> Tensor:
    """[1, N, ...] as contiguous [N, ...]."""
    return x[0].contiguous()


def _given(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None) -> list[Tensor]:
    return [q, k, v, gate] if beta is None else [q, k, v, gate, beta]


def _check(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None) -> None:
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or q.shape[:2] != v.shape[:2] or q.shape[0] != 1:
        raise ValueError(f"tree_recurrence takes one packed row, got {q.shape}, {k.shape}, {v.shape}")
    if v.shape[2] % max(q.shape[2], 1):
        raise ValueError(f"tree_recurrence: {v.shape[2]} value heads over {q.shape[2]} key heads")
    per_head = v.shape[:3]
    if gate.shape != per_head and gate.shape != (*per_head, q.shape[3]):
        raise ValueError(f"tree_recurrence: gate of shape {gate.shape} for q {q.shape} and v {v.shape}")
    if beta is not None and beta.shape != per_head:
        raise ValueError(f"tree_recurrence: beta of shape {beta.shape} for v {v.shape}")


def _check_tree(tables: RecurrenceTables | PathTables | RoundTables, subtree_end: Tensor) -> None:
    """Compare the two descriptions of the tree: on the host all of it, on a device the number of tokens."""
    if tables.tokens != subtree_end.shape[0]:
        raise ValueError(f"tree_recurrence: a table of {tables.tokens} tokens for {subtree_end.shape[0]}")
    if not subtree_end.is_cuda and not torch.equal(subtree_end.int(), tables.subtree_end):
        raise ValueError("tree_recurrence: subtree_end is not that of the segment table")


def recurrence_executor(
    k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None, chunk: int
) -> tuple[str, dict[str, str]]:
    """Choose who computes a recurrence, forward and backward.

    Args:
        k, v, gate, beta, chunk: as for `tree_recurrence`; their values are not read.

    Returns:
        one of `EXECUTORS`, and by each other one why it does not.

    Raises:
        ValueError: `TREECOMPILE_RECURRENCE` asks for something unknown, or for kernels that cannot run these inputs.

    Example:
        >>> x = torch.zeros(1, 4, 1, 16)
        >>> executor, others = recurrence_executor(x, x, x[..., 0], x[..., 0], 64)
        >>> executor, others["triton"]
        ('pytorch', 'not on a CUDA device')
    """
    against, asked = why_not(k, v, gate, beta, chunk), asked_executor()
    if asked == "fla":
        refuse_fla(v)
    executor = asked or ("pytorch" if against else "triton")
    if asked:
        return executor, {name: f"{asked} was asked for" for name in EXECUTORS if name != executor}
    unasked = dict.fromkeys(STATES, f"{VARIABLE} does not ask for it")
    return executor, {
        **({"triton": against} if against else {"pytorch": "the kernels are faster"}),
        **unasked,
    }


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return v.new_empty(v.shape)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor | None,
    subtree_end: Tensor,
    segments_host: Tensor,
    scale: float,
    chunk: int,
    alignment: Alignment = "trajectory",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, gate and beta (empty without beta) of `tree_recurrence`.

    Args:
        grad: [1, N, H, V].
        q, k, v, gate, beta, subtree_end, segments_host, scale, chunk, alignment: as for `tree_recurrence`.

    Returns:
        contiguous tensors of the arguments' shapes and dtypes.

    Notes:
        In PyTorch, states are computed again, level by level, and those at the beginning of each slice kept; then
        slices run in reverse. Rounds run again, with autograd. Gradients of a replayed token are added up over the
        blocks that hold it.
    """
    _check(q, k, v, gate, beta)
    executor = recurrence_executor(k, v, gate, beta, chunk)[0] if grad.numel() else ""
    if executor in STATES:
        tables = recurrence_rounds(segments_host, chunk, v.device, alignment, executor)
        _check_tree(tables, subtree_end)
        made = rounds_backward(grad, _given(q, k, v, gate, beta), tables, scale, chunk, executor)
        if beta is None:
            made.append(q.new_zeros((0,)))
        return made[0], made[1], made[2], made[3], made[4]
    if executor == "triton":
        inputs = _inputs(q, k, v, gate, beta, subtree_end, segments_host, scale, chunk, alignment)
        rows = _rows(grad).to(inputs.v.dtype)
        grads = attempt(lambda: kernels_backward(rows, inputs), k, v)
        if grads is not None:
            given = [x for x in (q, k, v, gate, beta) if x is not None]
            made = [x.to(like.dtype).view(like.shape) for x, like in zip(grads, given, strict=True)]
            if beta is None:
                made.append(q.new_zeros((0,)))
            return made[0], made[1], made[2], made[3], made[4]
    run = _Run(q, k, v, gate, beta, subtree_end, segments_host, scale, chunk, alignment, backward=True)
    made = [x.new_zeros(x.shape) for x in (q, k, v, gate)]
    made.append(q.new_zeros((0,)) if beta is None else beta.new_zeros(beta.shape))
    if grad.numel() == 0:
        return made[0], made[1], made[2], made[3], made[4]
    starts: list[Tensor | None] = []
    above: Tensor | None = None
    parts: list[Tensor] = []
    for i, piece in enumerate(run.slices):
        starts.append(above)
        if i + 1 < len(run.slices):
            above = run.load(piece).pass_states(above, parts)
    upstream = _rows(grad)
    totals = _Totals(run)
    parts, below = [], None
    for piece, start in zip(reversed(run.slices), reversed(starts), strict=True):
        block = run.load(piece)
        block.pass_states(start, [])
        found, below = block.gradients(run.queries(piece), run.load_grad(upstream, piece), below, parts)
        totals.add(piece, found)
    return totals.result(q, k, v, gate, beta)


class _Totals:
    """Gradients of tokens [N, heads, ...], summed over slices in their order."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.sums: dict[str, Tensor] = {}

    def add(self, piece: Slice, grads: _Grads) -> None:
        for name in ("q", "k", "v", "gate", "beta"):
            x: Tensor | None = getattr(grads, name)
            if x is None:
                continue
            shape = (self.run.tables.tokens, x.shape[1], *x.shape[3:])
            if name == "q":  # of owned rows alone, each of which writes its token
                if name not in self.sums:
                    self.sums[name] = x.new_empty(shape)
                self.run.store(self.sums[name], piece, x)
                continue
            rows = _take_rows(x, piece.held)
            if piece.offsets is not None:
                rows = segment_sum(rows, piece.offsets, torch.arange(rows.shape[0], device=rows.device))
            if name not in self.sums:
                self.sums[name] = x.new_zeros(shape)
            self.sums[name].index_add_(0, piece.tokens, rows)

    def result(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        def cast(name: str, like: Tensor) -> Tensor:
            x = self.sums[name]
            if x.shape[1] != like.shape[2]:
                x = x.view(x.shape[0], like.shape[2], -1, *x.shape[2:]).sum(2)
            return x.to(like.dtype).view(like.shape)

        self.sums["q"].mul_(self.run.scale)
        dbeta = q.new_empty((0,)) if beta is None else cast("beta", beta)
        return cast("q", q), cast("k", k), cast("v", v), cast("gate", gate), dbeta


def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dbeta = q.new_empty((0,)) if beta is None else beta.new_empty(beta.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), gate.new_empty(gate.shape), dbeta


tree_recurrence = define(f"tree_recurrence({_ARGUMENTS}) -> Tensor", _forward, _forward_fake)
tree_recurrence_backward = define(
    f"tree_recurrence_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
# HF's recurrences compute in fp32 whatever the ambient dtype: nothing is cast, and autocast stays out of the kernels.
register_autocast(tree_recurrence, cast=())
register_autocast(tree_recurrence_backward, cast=())


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.scalars = inputs[7:]


def _grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *grads, dbeta = tree_recurrence_backward(grad, *ctx.saved_tensors, *ctx.scalars)
    return *grads, dbeta if ctx.needs_input_grad[4] else None, *(None,) * 5


torch.library.register_autograd("treecompile::tree_recurrence", _grads, setup_context=_save)


def tree_recurrence_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor | None,
    parent: list[int],
    scale: float,
) -> Tensor:
    """The recurrence token by token, in plain PyTorch: the specification; differentiable.

    Args:
        q, k, v, gate, beta, scale: as for `tree_recurrence`.
        parent: [N] packed token above each, -1 for roots.

    Returns:
        [1, N, H, V] in v's dtype.

    Example:
        >>> one = torch.ones(1, 4, 1, 1)
        >>> tree_recurrence_reference(one, one, one, 0 * one[..., 0], None, [-1, 0, 1, 1], 1.0).flatten().tolist()
        [1.0, 2.0, 3.0, 3.0]
    """
    dtype = accumulation_dtype(v.dtype)
    repeat = v.shape[2] // max(k.shape[2], 1)
    q, k = (x[0].to(dtype).repeat_interleave(repeat, 1) for x in (q, k))
    values, decay = v[0].to(dtype), gate[0].to(dtype).exp()
    decay = decay if decay.dim() == 3 else decay.unsqueeze(-1)
    states: list[Tensor] = []
    outs = [values[:0]]
    for n, above in enumerate(parent):
        state = values.new_zeros((v.shape[2], k.shape[2], v.shape[3])) if above < 0 else states[above]
        state = decay[n].unsqueeze(-1) * state
        update = values[n]
        if beta is not None:
            error = update - (state * k[n].unsqueeze(-1)).sum(1)
            update = beta[0, n].to(dtype).unsqueeze(-1) * error
        state = state + k[n].unsqueeze(-1) * update.unsqueeze(1)
        states.append(state)
        outs.append(scale * (state * q[n].unsqueeze(-1)).sum(1).unsqueeze(0))
    return torch.cat(outs).to(v.dtype).unsqueeze(0)
