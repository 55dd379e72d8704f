"""Tree attention by pieces: vendor kernels on contiguous slices, merged by log-sum-exp.

Layout: query heads that share a K/V head are folded into rows, ``[Hkv, N * G, D]`` with row ``n * G + head``,
so that any token range is a contiguous slice for all heads and K/V are never repeated. Squares, and kernels that do
not fold, take the heads as they are.

Suffixes: H K/V heads, G query heads per K/V head, N packed tokens, R = N * G rows, D head size. Where a kernel runs
squares with more rows than they have, inputs have zeros behind the N tokens.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treecompile.runtime.ops.attention_kernels import Kernel, Tile, choose_kernel
from treecompile.runtime.ops.attention_launch import Launch, Rectangle, Request, TileBatch, launch_of
from treecompile.runtime.ops.attention_math import (
    BLIND,
    NEG_INF,
    accumulation_dtype,
    finite_lse,
    visible_pairs,
)
from treecompile.runtime.ops.attention_plan import CAUSAL, FULL, TILE

__all__ = ["pieces_backward", "pieces_forward", "request_for"]

# Most masked pairs of one batch (times query heads where logits are materialised): bounds scratch memory.
MASK_PAIRS = 1 << 20
LOGIT_PAIRS = 1 << 22


@dataclass(frozen=True)
class _Scatter:
    """Where rows of padded tiles go: `source` of the flattened tiles to `target`, no target twice."""

    source: Tensor
    target: Tensor


@dataclass(frozen=True)
class _BatchIndex:
    """Index tensors of one `TileBatch` on the device. int64 unless said."""

    q_tokens: Tensor  # [n, q_size]
    q_valid: Tensor  # bool [n, q_size]
    k_tokens: Tensor  # [n, k_size]
    k_valid: Tensor  # bool [n, k_size]
    q_rows: Tensor  # [n * q_size * G]
    q_scatter: tuple[_Scatter, ...]
    k_scatter: tuple[_Scatter, ...]


@dataclass(frozen=True)
class _Work:
    """One call: launches, kernel and the inputs in the kernel's dtype, padded to its head sizes and rows."""

    launch: Launch
    index: tuple[_BatchIndex, ...]
    kernel: Kernel
    q_HGND: Tensor
    k_HND: Tensor
    v_HND: Tensor
    subtree_end: Tensor
    column: Tensor
    scale: float
    softcap: float
    window: int

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.q_HGND.shape[1]

    @cached_property
    def q_HRD(self) -> Tensor:
        """Queries with their heads folded into rows."""
        return _folded(self.q_HGND)

    def unfolded(self, piece: Rectangle) -> bool:
        """Whether a piece is run on heads as they are."""
        return piece.kind == CAUSAL or (piece.kind == FULL and not self.kernel.folds)

    def ranges(self, piece: Rectangle) -> tuple[slice, slice]:
        """Queries and keys that an unfolded piece is run with: behind a square there may be more than it has."""
        if piece.kind == FULL:
            return slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)
        rows = slice(piece.q_start, piece.q_start + self.kernel.span(piece.q_end - piece.q_start))
        return rows, rows

    def whole(self, causal: bool) -> Tile:
        """Mask of a causal square or a full rectangle."""
        return Tile(causal, None, self.scale, self.softcap)

    def sliced(self, piece: Rectangle) -> tuple[Tile, Tensor]:
        """Mask of a tile on slices, and which of its rows see a key: bool [rows]."""
        device = self.subtree_end.device
        query = torch.arange(piece.q_start, piece.q_end, device=device)
        key = torch.arange(piece.k_start, piece.k_end, device=device)
        visible = visible_pairs(self.subtree_end, self.column, self.window, query, key)
        return self._grouped(visible)

    def _grouped(self, visible: Tensor) -> tuple[Tile, Tensor]:
        if self.group > 1:
            visible = visible.repeat_interleave(self.group, -2)
        # One batch dim for the K/V heads, and for a slice one for its single tile.
        sees = visible.any(-1)
        return Tile(False, visible.view(1, -1, *visible.shape[-2:]), self.scale, self.softcap), sees

    def masked(self, index: _BatchIndex) -> tuple[Tile, Tensor]:
        """Mask of a batch of tiles, and which of its rows see a key: bool [n, q_size * G]."""
        visible = visible_pairs(self.subtree_end, self.column, self.window, index.q_tokens, index.k_tokens)
        visible &= index.q_valid.unsqueeze(-1) & index.k_valid.unsqueeze(-2)
        return self._grouped(visible)


def pieces_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    column: Tensor,
    segments_host: Tensor,
    pieces: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    vendor: str = "",
) -> tuple[Tensor, Tensor]:
    """Attend over a packed tree by pieces; arguments and results as in `tree_attention_reference`.

    Args:
        q: [1, Hq, N, Dqk].
        k: [1, Hkv, N, Dqk].
        v: [1, Hkv, N, Dv].
        subtree_end: int32 [N].
        column: int32 [N].
        segments_host: int32 [S, 4] on the CPU.
        pieces: int32 [P, 6] on the CPU, from `plan_pieces`.
        sinks: [Hq] or None.
        scale: factor on the logits.
        softcap: 0 for none.
        window: in columns, 0 for none.
        vendor: whose kernel, as for `choose_kernel`.

    Returns:
        out [1, Hq, N, Dv] contiguous, in q's dtype; lse fp32 (fp64) [1, Hq, N].

    Raises:
        ValueError: the plan is not one of this many tokens.

    Example:
        >>> from treecompile.runtime.ops.attention_plan import plan_pieces
        >>> q = torch.randn(1, 2, 3, 4); table = np.array([[0, 3, -1, 3]], np.int32)
        >>> end, col = torch.tensor([3, 3, 3]), torch.arange(3)
        >>> plan = torch.from_numpy(plan_pieces(table))
        >>> pieces_forward(q, q, q, end, col, torch.from_numpy(table), plan, None, 0.5, 0.0, 0)[0].shape
        torch.Size([1, 2, 3, 4])

    Notes:
        Merging two pieces of one query with log-sum-exps a, b: lse = logaddexp(a, b), out moves towards the
        second by exp(b - lse) (FlashAttention-2, Dao 2023, section 2.3.1; flash decoding). Scratch memory is
        O(N), no N x N tensor. The order of the pieces is fixed, so results repeat bit for bit.
    """
    if q.numel() == 0 or v.shape[3] == 0:
        return _empty(q, v)
    work = _work(q, k, v, subtree_end, column, segments_host, pieces, scale, softcap, window, vendor)
    if work.launch.single:
        out, lse = work.kernel.forward(
            work.q_HGND, work.k_HND.unsqueeze(1), work.v_HND.unsqueeze(1), work.whole(causal=True)
        )
        out, lse = (x[:, :, : q.shape[2]] for x in (out, lse))
        out, lse = out[..., : v.shape[3]], lse.reshape(q.shape[:3])
    else:
        out_HRD, lse_HR = _attend(work, v.shape[3])
        out = _split(out_HRD, 1, work.group).transpose(1, 2)
        lse = _split(lse_HR, 1, work.group).transpose(1, 2).reshape(q.shape[:3])
    out, lse = out.reshape(1, *q.shape[1:3], v.shape[3]), lse.contiguous()
    if sinks is not None:
        joined = _join_sinks(lse, sinks)
        out = out * torch.exp(lse - finite_lse(joined)).unsqueeze(-1)
        lse = joined
    return out.to(q.dtype).contiguous(), lse


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse = q.new_full(q.shape[:3], NEG_INF, dtype=accumulation_dtype(q.dtype))
    return q.new_zeros((1, q.shape[1], q.shape[2], v.shape[3])), lse


def _join_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """logaddexp(lse, sink), but -inf stays: a query that sees nothing but a sink gives 0."""
    joined = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    return joined.masked_fill(lse == NEG_INF, NEG_INF)


def request_for(kernel: Kernel, heads: int, kv_heads: int, window: int) -> Request:
    """Return how a kernel's pieces are launched, for these numbers of query and of K/V heads."""
    area = LOGIT_PAIRS // heads if kernel.bounded else MASK_PAIRS * kv_heads // heads
    return Request(window, kernel.bounded, area)


def _work(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    column: Tensor,
    segments_host: Tensor,
    pieces: Tensor,
    scale: float,
    softcap: float,
    window: int,
    vendor: str,
) -> _Work:
    kernel = choose_kernel(q.device, q.dtype, softcap, vendor)
    group = q.shape[1] // k.shape[1]
    request = request_for(kernel, q.shape[1], k.shape[1], window)
    launch, index = _prepare(pieces, segments_host, request, group, q.device)
    if launch.tokens != q.shape[2]:
        raise ValueError(f"tree_attention: the plan covers {launch.tokens} tokens, q has {q.shape[2]}")
    dtype = kernel.work_dtype(q.dtype)
    qk_size, v_size = kernel.sizes(q.shape[3], v.shape[3])
    rows = max([launch.tokens, *(r.q_start + kernel.span(r.q_end - r.q_start) for r in launch.squares)])
    # Gathers and folded heads want dense tensors; slices alone take strides.
    dense = bool(launch.batches) and kernel.folds
    return _Work(
        launch,
        index,
        kernel,
        _split(_to_size(q, rows, qk_size, dtype, dense)[0], 0, group),
        _to_size(k, rows, qk_size, dtype, dense)[0],
        _to_size(v, rows, v_size, dtype, dense)[0],
        subtree_end,
        column,
        scale,
        softcap,
        window,
    )


def _split(x: Tensor, dim: int, size: int) -> Tensor:
    """View dim `dim` as [dim / size, size]."""
    return x.view(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])


def _folded(x: Tensor) -> Tensor:
    """[H, G, N, ...] as [H, N * G, ...]."""
    return x[:, 0] if x.shape[1] == 1 else x.transpose(1, 2).flatten(1, 2)


def _to_size(x: Tensor, rows: int, size: int, dtype: torch.dtype, dense: bool) -> Tensor:
    """Cast, and pad [1, H, N, D] with zeros to `rows` and `size`: no logit and no kept output changes."""
    x = x.to(dtype)
    if x.shape[2] < rows or x.shape[3] < size:
        # The heads of a token stay side by side.
        x = pad(x.transpose(1, 2), (0, size - x.shape[3], 0, 0, 0, rows - x.shape[2])).transpose(1, 2)
    return x.contiguous() if dense or x.stride(-1) != 1 else x


def _attend(work: _Work, size: int) -> tuple[Tensor, Tensor]:
    """Run every piece: out [H, R, size] and lse [H, R], in the accumulation dtype where anything is merged."""
    dtype = accumulation_dtype(work.k_HND.dtype)
    heads, rows = work.k_HND.shape[0], work.launch.tokens * work.group
    device = work.k_HND.device
    out = torch.empty(
        (heads, rows, size), dtype=work.k_HND.dtype if work.launch.disjoint else dtype, device=device
    )
    lse = torch.empty((heads, rows), dtype=dtype, device=device)
    batches = list(zip(work.launch.batches, work.index, strict=True))
    for first in (True, False):
        for piece in work.launch.rectangles:
            if piece.first == first:
                _piece_forward(work, piece, out, lse)
        for batch, index in batches:
            if batch.first == first:
                _batch_forward(work, batch, index, out, lse)
    if work.launch.has_pads:
        out.masked_fill_((lse == NEG_INF).unsqueeze(-1), 0.0)
    return out, lse


def _piece_forward(work: _Work, piece: Rectangle, out: Tensor, lse: Tensor) -> None:
    rows = slice(piece.q_start * work.group, piece.q_end * work.group)
    whole_out, whole_lse = out[:, rows], lse[:, rows]
    if work.unfolded(piece):
        queries, keys = work.ranges(piece)
        part_out, part_lse = work.kernel.forward(
            work.q_HGND[:, :, queries],
            work.k_HND[:, None, keys],
            work.v_HND[:, None, keys],
            work.whole(causal=piece.kind == CAUSAL),
        )
        length = piece.q_end - piece.q_start
        part_out, part_lse = (x[:, :, :length].transpose(1, 2) for x in (part_out, part_lse))
        whole_out, whole_lse = (_split(x, 1, work.group) for x in (whole_out, whole_lse))
    else:
        keys = slice(piece.k_start, piece.k_end)
        tile, sees = work.sliced(piece) if piece.kind == TILE else (work.whole(causal=False), None)
        part_out, part_lse = work.kernel.forward(
            work.q_HRD[:, None, rows], work.k_HND[:, None, keys], work.v_HND[:, None, keys], tile
        )
        part_out, part_lse = part_out[:, 0], part_lse[:, 0]
        if sees is not None:
            part_lse = part_lse.masked_fill(~sees, NEG_INF)
    part_out = part_out[..., : out.shape[-1]]
    if piece.first:
        whole_out.copy_(part_out)
        whole_lse.copy_(part_lse)
    else:
        _merge(whole_out, whole_lse, part_out, part_lse)


def _batch_forward(work: _Work, batch: TileBatch, index: _BatchIndex, out: Tensor, lse: Tensor) -> None:
    tile, sees = work.masked(index)
    part_out, part_lse = work.kernel.forward(
        _tiles(work.q_HRD, index.q_rows, index.q_tokens),
        _tiles(work.k_HND, index.k_tokens.flatten(), index.k_tokens),
        _tiles(work.v_HND, index.k_tokens.flatten(), index.k_tokens),
        tile,
    )
    part_lse = part_lse.masked_fill(~sees, NEG_INF).flatten(1, 2)
    part_out = part_out[..., : out.shape[-1]].flatten(1, 2).to(out.dtype)
    for scatter in index.q_scatter:
        new_out, new_lse = part_out.index_select(1, scatter.source), part_lse.index_select(1, scatter.source)
        if not batch.first:
            old_out, old_lse = out.index_select(1, scatter.target), lse.index_select(1, scatter.target)
            _merge(old_out, old_lse, new_out, new_lse)
            new_out, new_lse = old_out, old_lse
        out.index_copy_(1, scatter.target, new_out)
        lse.index_copy_(1, scatter.target, new_lse)


def _tiles(x: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Gather rows of [H, *, D] into tiles [H, n, size, D]."""
    return _split(x.index_select(1, rows), 1, rows.shape[0] // tokens.shape[0])


def _merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge a piece into out and lse in place. Rows without keys on either side stay finite."""
    total = torch.logaddexp(lse, new_lse)
    weight = torch.exp(new_lse - finite_lse(total))
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(total)


def pieces_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    subtree_end: Tensor,
    column: Tensor,
    segments_host: Tensor,
    pieces: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    vendor: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `pieces_forward`: each piece's share from the merged output and log-sum-exp.

    Args:
        grad: [1, Hq, N, Dv], gradient of out.
        q, k, v, subtree_end, column, segments_host, pieces, sinks, scale, softcap, window, vendor: as in the
            forward; its output may come from another kernel.
        out: [1, Hq, N, Dv], merged output.
        lse: fp32 (fp64) [1, Hq, N], merged log-sum-exp, sinks included.

    Returns:
        dq, dk, dv like q, k, v (contiguous) and d_sinks [Hq] (an empty tensor without sinks).

    Notes:
        With P = exp(S - lse) over the merged lse, dS = P * (dO V^T - rowsum(dO * O)) holds piece by piece,
        and d_sink = -sum over queries of exp(sink - lse) * rowsum(dO * O) (FlashAttention-2, Dao 2023).
    """
    grad_sinks = _sinks_backward(grad, out, lse, sinks)
    if q.numel() == 0 or v.shape[3] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), grad_sinks
    work = _work(q, k, v, subtree_end, column, segments_host, pieces, scale, softcap, window, vendor)
    dq_HRD, dk, dv = _Backward(work, grad, out, lse).run()
    dq = dq_HRD if work.launch.single else _split(dq_HRD, 1, work.group).transpose(1, 2)
    dq = dq[..., : q.shape[3]].reshape(q.shape)
    dk, dv = dk[..., : k.shape[3]].unsqueeze(0), dv[..., : v.shape[3]].unsqueeze(0)
    return (
        dq.to(q.dtype).contiguous(),
        dk.to(k.dtype).contiguous(),
        dv.to(v.dtype).contiguous(),
        grad_sinks,
    )


def _sinks_backward(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return grad.new_empty((0,))
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - finite_lse(lse))
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)


class _Backward:
    """Accumulators and per-piece steps of one backward call."""

    def __init__(self, work: _Work, grad: Tensor, out: Tensor, lse: Tensor) -> None:
        group, rows, size = work.group, work.v_HND.shape[1], work.v_HND.shape[2]
        dtype, dense = work.q_HGND.dtype, bool(work.launch.batches) and work.kernel.folds
        self.work = work
        self.grad_HGND = _split(_to_size(grad, rows, size, dtype, dense)[0], 0, group)
        self.out_HGND = _split(_to_size(out, rows, size, dtype, dense)[0], 0, group)
        self.lse_HGN = _split(finite_lse(lse)[0], 0, group)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [H, R, D] (for one square [H, G, N, D]), dk and dv [H, N, D]."""
        work = self.work
        if work.launch.single:
            return self._single()
        dtype = accumulation_dtype(work.k_HND.dtype)
        (heads, _, size), rows = work.k_HND.shape, work.launch.tokens
        make = torch.zeros
        if work.launch.disjoint:
            dtype, make = work.k_HND.dtype, torch.empty
        device = work.k_HND.device
        self.dq = make((heads, rows * work.group, size), dtype=dtype, device=device)
        self.dk = make((heads, rows, size), dtype=dtype, device=device)
        self.dv = make((heads, rows, work.v_HND.shape[2]), dtype=dtype, device=device)
        for piece in work.launch.rectangles:
            if work.unfolded(piece):
                self._unfolded(piece)
            else:
                self._folded(piece)
        for index in work.index:
            self._batch(index)
        return self.dq, self.dk, self.dv

    @cached_property
    def grad_HRD(self) -> Tensor:
        """The gradient with its heads folded into rows."""
        return _folded(self.grad_HGND)

    @cached_property
    def out_HRD(self) -> Tensor:
        """The output with its heads folded into rows."""
        return _folded(self.out_HGND)

    @cached_property
    def lse_HR(self) -> Tensor:
        """The log-sum-exp with its heads folded into rows."""
        return _folded(self.lse_HGN)

    def _lse(self, low: int, high: int, rows: int) -> Tensor:
        """Log-sum-exps of tokens [low, high), and of rows that weigh nothing behind them."""
        lse = self.lse_HGN[:, :, low:high]
        return pad(lse, (0, rows - (high - low)), value=BLIND) if rows > high - low else lse

    def _single(self) -> tuple[Tensor, Tensor, Tensor]:
        work, tokens = self.work, self.work.launch.tokens
        dq, dk, dv = work.kernel.backward(
            self.grad_HGND, work.q_HGND, work.k_HND[:, None], work.v_HND[:, None], self.out_HGND,
            self._lse(0, tokens, work.q_HGND.shape[2]), work.whole(causal=True),
        )  # fmt: skip
        return dq[:, :, :tokens], dk[:, 0, :tokens], dv[:, 0, :tokens]

    def _unfolded(self, piece: Rectangle) -> None:
        work, (queries, keys) = self.work, self.work.ranges(piece)
        dq, dk, dv = work.kernel.backward(
            self.grad_HGND[:, :, queries], work.q_HGND[:, :, queries], work.k_HND[:, None, keys],
            work.v_HND[:, None, keys], self.out_HGND[:, :, queries],
            self._lse(piece.q_start, piece.q_end, queries.stop - queries.start),
            work.whole(causal=piece.kind == CAUSAL),
        )  # fmt: skip
        group, length = work.group, piece.q_end - piece.q_start
        rows = self.dq[:, piece.q_start * group : piece.q_end * group]
        self._add(_split(rows, 1, group), dq[:, :, :length].transpose(1, 2))
        length = piece.k_end - piece.k_start
        self._add(self.dk[:, piece.k_start : piece.k_end], dk[:, 0, :length])
        self._add(self.dv[:, piece.k_start : piece.k_end], dv[:, 0, :length])

    def _folded(self, rectangle: Rectangle) -> None:
        work = self.work
        rows = slice(rectangle.q_start * work.group, rectangle.q_end * work.group)
        keys = slice(rectangle.k_start, rectangle.k_end)
        tile = work.sliced(rectangle)[0] if rectangle.kind == TILE else work.whole(causal=False)
        dq, dk, dv = work.kernel.backward(
            self.grad_HRD[:, None, rows], work.q_HRD[:, None, rows], work.k_HND[:, None, keys],
            work.v_HND[:, None, keys], self.out_HRD[:, None, rows], self.lse_HR[:, None, rows], tile,
        )  # fmt: skip
        self._add(self.dq[:, rows], dq[:, 0])
        self._add(self.dk[:, keys], dk[:, 0])
        self._add(self.dv[:, keys], dv[:, 0])

    def _add(self, total: Tensor, part: Tensor) -> None:
        if self.work.launch.disjoint:
            total.copy_(part)
        else:
            total.add_(part)

    def _batch(self, index: _BatchIndex) -> None:
        work, keys = self.work, index.k_tokens.flatten()
        tile, _ = work.masked(index)
        dq, dk, dv = work.kernel.backward(
            _tiles(self.grad_HRD, index.q_rows, index.q_tokens),
            _tiles(work.q_HRD, index.q_rows, index.q_tokens),
            _tiles(work.k_HND, keys, index.k_tokens),
            _tiles(work.v_HND, keys, index.k_tokens),
            _tiles(self.out_HRD, index.q_rows, index.q_tokens),
            _tiles(self.lse_HR, index.q_rows, index.q_tokens),
            tile,
        )
        _add_rows(self.dq, dq, index.q_scatter)
        _add_rows(self.dk, dk, index.k_scatter)
        _add_rows(self.dv, dv, index.k_scatter)


def _add_rows(total: Tensor, part: Tensor, scatters: tuple[_Scatter, ...]) -> None:
    """Add tiles [H, n, size, D] to rows of [H, *, D], one collision-free round after another."""
    flat = part.flatten(1, 2)
    for scatter in scatters:
        rows = total.index_select(1, scatter.target)
        rows += flat.index_select(1, scatter.source)
        total.index_copy_(1, scatter.target, rows)


def _prepare(
    pieces: Tensor, segments: Tensor, request: Request, group: int, device: torch.device
) -> tuple[Launch, tuple[_BatchIndex, ...]]:
    content = pieces.numpy().tobytes(), segments.numpy().tobytes()
    return _cached_index(*content, request, group, device)


# Few entries: index tensors of large trees are not small. Layers and recomputation of a step share them.
@lru_cache(maxsize=4)
def _cached_index(
    pieces: bytes, segments: bytes, request: Request, group: int, device: torch.device
) -> tuple[Launch, tuple[_BatchIndex, ...]]:
    launch = launch_of(
        np.frombuffer(pieces, np.int32).reshape(-1, 6),
        np.frombuffer(segments, np.int32).reshape(-1, 4),
        request,
    )
    # An index made under inference mode would serve a later training step.
    with torch.inference_mode(False):
        return launch, tuple(_batch_index(batch, group, device) for batch in launch.batches)


def _batch_index(batch: TileBatch, group: int, device: torch.device) -> _BatchIndex:
    q_tokens, q_valid = _padded_range(batch.q_start, batch.q_length, batch.q_size)
    k_tokens, k_valid = _padded_range(batch.k_start, batch.k_length, batch.k_size)
    q_rows = (q_tokens[..., None] * group + np.arange(group)).reshape(-1)

    def put(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    def scatters(
        start: np.ndarray, length: np.ndarray, rows: np.ndarray, valid: np.ndarray
    ) -> tuple[_Scatter, ...]:
        found = []
        for members in _rounds(start, length):
            chosen = np.zeros(len(start), bool)
            chosen[members] = True
            keep = (valid & chosen[:, None]).reshape(-1)
            source = np.flatnonzero(np.repeat(keep, len(rows) // len(keep)))
            found.append(_Scatter(put(source), put(rows[source])))
        return tuple(found)

    return _BatchIndex(
        put(q_tokens),
        put(q_valid),
        put(k_tokens),
        put(k_valid),
        put(q_rows),
        scatters(batch.q_start, batch.q_length, q_rows, q_valid),
        scatters(batch.k_start, batch.k_length, k_tokens.reshape(-1), k_valid),
    )


def _padded_range(start: np.ndarray, length: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ranges as int64 [n, size], the last token repeated as padding, and which entries are real."""
    step = np.arange(size)
    return start[:, None] + np.minimum(step, length[:, None] - 1), step < length[:, None]


def _rounds(start: np.ndarray, length: np.ndarray) -> list[list[int]]:
    """Split ranges into the fewest rounds of disjoint ones (greedy colouring of an interval graph)."""
    rounds: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (end of its last range, round)
    for member in np.argsort(start, kind="stable").tolist():
        low, high = int(start[member]), int(start[member] + length[member])
        if free and free[0][0] <= low:
            which = heapq.heappop(free)[1]
        else:
            which = len(rounds)
            rounds.append([])
        rounds[which].append(member)
        heapq.heappush(free, (high, which))
    return rounds
