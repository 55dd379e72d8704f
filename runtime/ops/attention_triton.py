"""Tree attention by the Triton kernels: launch parameters, tensor descriptors, and what the kernels do not take.

Algorithm: FlashAttention-2 (Dao 2023), forward and two-pass backward, over the block lists of
`treecompile.runtime.ops.attention_lists`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from treecompile.runtime.ops.attention_lists import (
    KeyLists,
    QueryLists,
    TreeTables,
    key_lists,
    query_lists,
    tree_tables,
)
from treecompile.runtime.ops.attention_math import BLIND

__all__ = ["Choice", "Tiles", "choice_for", "triton_backward", "triton_forward"]

LOG2E = math.log2(math.e)
DELTA_ROWS = 64
# Keys of a program that adds up shares: few, as only a handful of blocks are in shares.
SHARE_ROWS = 8


@dataclass(frozen=True)
class Tiles:
    """Launch parameters of one kernel.

    Attributes:
        rows: query rows (tokens times heads) of a tile.
        keys: keys of a tile.
        warps, stages: as Triton takes them; `masked_stages` for the loop over masked tiles.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    masked_stages: int


@dataclass(frozen=True)
class Choice:
    """Launch parameters of one class of shapes.

    Attributes:
        forward, dq, dkv: of the three kernels.
        short_forward, short_dq: the same where a query meets fewer than `SHORT` keys on average.
    """

    forward: Tiles
    dq: Tiles
    dkv: Tiles
    short_forward: Tiles
    short_dq: Tiles


# Chosen on an H200 (examples/bench/tree_attention.py --sweep): three stages hide the copy engine's latency; tiles of
# 64 rows and four warps fit twice on a multiprocessor and overlap there, of 128 rows read half as much of K and V.
_SMALL = Tiles(64, 64, 4, 3, 1)
_CHOICES: dict[tuple[int, int], Choice] = {
    (64, 64): Choice(Tiles(64, 128, 4, 3, 1), _SMALL, Tiles(64, 64, 4, 3, 2), _SMALL, _SMALL),
    (128, 128): Choice(
        Tiles(128, 128, 8, 3, 1), Tiles(128, 64, 8, 3, 2), Tiles(64, 64, 4, 2, 2), _SMALL, Tiles(64, 64, 4, 2, 1)
    ),
    (256, 128): Choice(
        Tiles(128, 64, 8, 2, 1), Tiles(64, 32, 4, 2, 1), Tiles(32, 64, 4, 2, 2),
        Tiles(128, 64, 8, 2, 1), Tiles(64, 32, 4, 2, 1),
    ),
    (256, 256): Choice(
        Tiles(128, 64, 8, 2, 1), Tiles(64, 64, 4, 2, 1), Tiles(64, 64, 8, 2, 2),
        Tiles(128, 64, 8, 2, 1), Tiles(64, 64, 4, 2, 1),
    ),
}  # fmt: skip
SHORT = 3072
# Devices with less shared memory than Hopper's take small tiles, never tuned.
_LARGE = 232_448
_MODEST = Choice(*(Tiles(32, 32, 4, 1, 1),) * 5)


def choice_for(qk_size: int, v_size: int, shared_memory: int = _LARGE) -> Choice:
    """Return the launch parameters for a pair of head sizes: one choice per class of shapes, whatever N.

    Args:
        qk_size: Dqk, at most 256.
        v_size: Dv, at most 256.
        shared_memory: bytes that a block may use on the device.

    Returns:
        The parameters of the three kernels.

    Example:
        >>> choice_for(96, 64).forward.keys
        128
    """
    need = padded_size(qk_size), padded_size(v_size)
    if shared_memory < _LARGE:
        return _MODEST
    return next(_CHOICES[size] for size in sorted(_CHOICES) if size[0] >= need[0] and size[1] >= need[1])


@dataclass(frozen=True)
class Call:
    """One call's inputs, ready for the kernels."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: TreeTables
    column: Tensor
    scale: float
    softcap: float
    window: int

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def tokens(self) -> int:
        return self.q.shape[2]

    def heads(self, rows: int) -> int:
        """Query heads that share a tile."""
        return shared_heads(self.group, rows)

    def tokens_of(self, tiles: Tiles) -> int:
        """Query tokens of a tile, each with the heads that share it."""
        return tiles.rows // self.heads(tiles.rows)

    def logits(self) -> tuple[float, float]:
        """`scale` and `cap` as the kernels take them."""
        if self.softcap > 0:
            return 2 * LOG2E * self.scale / self.softcap, self.softcap * LOG2E
        return self.scale * LOG2E, 0.0

    def lists(self, tiles: Tiles) -> QueryLists:
        """Key lists of the query blocks."""
        return query_lists(self.tables, self.tokens_of(tiles), tiles.keys, self.window)

    def pairs(self, tiles: Tiles) -> int:
        """Query-key pairs that the query blocks compute, masked ones with them."""
        return self.lists(tiles).tiles * tiles.keys * self.tokens_of(tiles)

    def key_lists(self, tiles: Tiles) -> KeyLists:
        """Query lists of the key blocks."""
        return key_lists(self.tables, tiles.keys, tiles.rows, self.tokens_of(tiles), self.window)

    def strides(self, *more: Tensor) -> list[int]:
        """Head and token strides of q, k, v and `more`."""
        return [stride for x in (self.q, self.k, self.v, *more) for stride in x.stride()[1:3]]

    def sizes(self, tiles: Tiles, tma: bool) -> dict[str, Any]:
        """Constants of a kernel; `tma`: the copy engine can read its tiles."""
        return {
            "GROUP": self.group,
            "HEADS": self.heads(tiles.rows),
            "TOKENS": self.tokens_of(tiles),
            "KEYS": tiles.keys,
            "QK": self.q.shape[3],
            "QK_PAD": column_blocks(self.q.shape[3])[0],
            "QK_REST": column_blocks(self.q.shape[3])[1],
            "V": self.v.shape[3],
            "V_PAD": padded_size(self.v.shape[3]),
            "SOFTCAP": self.softcap > 0,
            "WINDOW": self.window > 0,
            "TMA": tma,
            "MASKED_STAGES": tiles.masked_stages,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }

    def launch(self, kernel: str, tiles: Tiles | None, *read: Tensor) -> Launch:
        """How a kernel is launched, made once per tree and form of the inputs.

        Args:
            kernel: "forward", "dq" or "dkv".
            tiles: launch parameters; None for those of `choice_for`.
            read: what the copy engine reads if it can.
        """
        tma = all(map(_has_descriptor, read))
        key = (
            kernel, tiles, tma, self.q.device, self.q.shape, self.k.shape, self.v.shape, self.softcap > 0, self.window
        )  # fmt: skip
        made: Launch | None = self.tables.cache.get(key)
        if made is None:
            made = self.tables.cache[key] = self._launch(kernel, tiles or self.chosen(kernel), tma)
        return made

    def chosen(self, kernel: str) -> Tiles:
        """The launch parameters of a kernel; others where a query meets few keys."""
        choice = choice_for(self.q.shape[3], self.v.shape[3], shared_memory(self.q.device))
        if kernel == "dkv":
            return choice.dkv
        tiles, short = (
            (choice.forward, choice.short_forward) if kernel == "forward" else (choice.dq, choice.short_dq)
        )
        return short if self.pairs(short) < SHORT * self.tokens else tiles

    def _launch(self, kernel: str, tiles: Tiles, tma: bool) -> Launch:
        sizes = self.sizes(tiles, tma)
        if kernel == "dkv":
            by_key = self.key_lists(tiles)
            return Launch((by_key.items.shape[0], self.k.shape[1]), tiles, sizes, by_key)
        by_query = self.lists(tiles)
        return Launch((by_query.order.shape[0], self.q.shape[1] // sizes["HEADS"]), tiles, sizes, by_query)


@dataclass(frozen=True)
class Launch:
    """What a kernel is launched with, but for the tensors of one call.

    Attributes:
        grid: programs.
        tiles: launch parameters.
        sizes: constants, not to be modified.
        lists: of the tree's blocks: `QueryLists`, for dkv `KeyLists`.
    """

    grid: tuple[int, int]
    tiles: Tiles
    sizes: dict[str, Any]
    lists: Any


@lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Bytes that a block may use on a device; without a GPU, for the interpreter, as many as Hopper has."""
    if device.type != "cuda":
        return _LARGE
    found: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return found


def padded_size(size: int) -> int:
    """The least power of two that a dimension of a product may have and that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())


def column_blocks(size: int) -> tuple[int, int]:
    """The columns that the kernels compute with for queries and keys: in one block, or 128 and some in two."""
    pad = padded_size(size)
    return (128, padded_size(size - 128)) if 128 < size <= 192 else (pad, 0)


def shared_heads(group: int, rows: int) -> int:
    """Query heads that share a tile of `rows`: the largest power of two in the group that leaves 16 tokens."""
    return min(group & -group, max(1, rows // 16))


def _dense(x: Tensor) -> Tensor:
    """The last dim must be contiguous; other strides are taken as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache(maxsize=64)
def _has_copy_engine(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _has_descriptor(x: Tensor) -> bool:
    """Whether the copy engine can read [1, H, N, D]: compute capability 9, everything on 16 bytes."""
    if not _has_copy_engine(x.device):
        return False
    size, strides = x.element_size(), x.stride()[1:3]
    return x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 and stride > 0 for stride in strides)


def _descriptor(x: Tensor, block: tuple[int, ...], tma: bool) -> Any:
    """For the copy engine: blocks of a [heads, tokens] or [1, heads, tokens, columns] tensor."""
    if not (tma and block[-1]):
        return None
    rank = len(block)
    form = _descriptor_form(x.dtype, x.shape[-rank:], x.stride()[-rank:], block)
    # Descriptors of one form differ in where they begin, which `_has_descriptor` looks at. To check the rest again
    # takes longer than a launch.
    made = object.__new__(type(form))
    made.__dict__.update(form.__dict__, base=x)
    return made


@lru_cache(maxsize=1024)
def _descriptor_form(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> Any:
    """A descriptor of nothing, checked by Triton."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    nothing = torch.empty(0, dtype=dtype).as_strided((0,), (1,))
    return TensorDescriptor(nothing, list(shape), list(strides), list(block))


def _descriptors(x: Tensor, y: Tensor, block: tuple[int, int], sizes: dict[str, Any]) -> list[Any]:
    """Descriptors of queries or keys, by column blocks, and of what is weighted with them; `block`: heads, tokens."""
    widths = ((x, sizes["QK_PAD"]), (x, sizes["QK_REST"]), (y, sizes["V_PAD"]))
    return [_descriptor(of, (*block, columns), sizes["TMA"]) for of, columns in widths]


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    column: Tensor,
    segments: Tensor,
    segments_host: Tensor,
    pieces: Tensor,
    scale: float,
    softcap: float,
    window: int,
) -> Call:
    """Check the plan, drop a window that nothing reaches, and find the tree's tables."""
    _, tokens, span, step = pieces.numpy()[0, :4].tolist()
    if tokens != q.shape[2]:
        raise ValueError(f"tree_attention: the plan covers {tokens} tokens, q has {q.shape[2]}")
    if 0 <= span <= window:
        window = 0
    tables = tree_tables(segments, segments_host, subtree_end, step)
    return Call(_dense(q), _dense(k), _dense(v), tables, column.contiguous(), scale, softcap, window)


def triton_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    column: Tensor,
    segments: Tensor,
    segments_host: Tensor,
    pieces: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over a packed tree; arguments and results as in `tree_attention`.

    Args:
        q: [1, Hq, N, Dqk], bf16 or fp16 (fp32 is computed without tf32), head sizes at most 256.
        k: [1, Hkv, N, Dqk].
        v: [1, Hkv, N, Dv].
        subtree_end: int32 [N].
        column: int32 [N].
        segments: int32 [S, 4].
        segments_host: the same on the CPU.
        pieces: int32 [P, 6] on the CPU, from `plan_pieces` or `plan_header`; the first row alone is read.
        sinks: [Hq] or None.
        scale: factor on the logits, positive.
        softcap: 0 for none.
        window: in columns, 0 for none.
        tiles: launch parameters; by default those of `choice_for`.

    Returns:
        out [1, Hq, N, Dv] contiguous, in q's dtype; lse fp32 [1, Hq, N].

    Raises:
        ValueError: the plan is not one of this many tokens.

    Notes:
        FlashAttention-2 (Dao 2023): running softmax in fp32, base 2. Scratch memory is the block lists, kept per
        tree. Results repeat bit for bit.
    """
    from treecompile.runtime.kernels.tree_attention import forward_kernel

    out = torch.empty((1, q.shape[1], q.shape[2], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel() == 0 or v.shape[3] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    call = prepare(q, k, v, subtree_end, column, segments, segments_host, pieces, scale, softcap, window)
    q, k, v = call.q, call.k, call.v
    launch = call.launch("forward", tiles, k, v)
    lists = launch.lists
    forward_kernel[launch.grid](
        q, k, v, *_descriptors(k, v, (1, launch.tiles.keys), launch.sizes),
        out, lse, sinks if sinks is None else sinks.contiguous(), subtree_end, call.column,
        lists.order, lists.run_offsets, lists.runs, lists.full_tiles, lists.index_offsets, lists.index,
        call.tokens, *call.strides(), *call.logits(), call.window, SINKS=sinks is not None, **launch.sizes,
    )  # fmt: skip
    return out, lse


def triton_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    subtree_end: Tensor,
    column: Tensor,
    segments: Tensor,
    segments_host: Tensor,
    pieces: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `triton_forward`.

    Args:
        grad: [1, Hq, N, Dv], gradient of out.
        q, k, v, subtree_end, column, segments, segments_host, pieces, sinks, scale, softcap, window: as in the
            forward.
        out: [1, Hq, N, Dv], its output.
        lse: fp32 [1, Hq, N], its log-sum-exp.
        tiles: launch parameters of dQ and of dK/dV; by default those of `choice_for`.

    Returns:
        dq, dk, dv like q, k, v (contiguous) and d_sinks [Hq] (an empty tensor without sinks).

    Notes:
        Two passes (FlashAttention-2, Dao 2023, algorithm 2, split): dQ by query block, dK and dV by key block;
        each output is summed by one program in a fixed order, so results repeat bit for bit.
    """
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.numel() == 0 or v.shape[3] == 0:
        nothing = grad.new_empty((0,)) if sinks is None else torch.zeros_like(sinks)
        return dq.zero_(), dk.zero_(), dv.zero_(), nothing
    call = prepare(q, k, v, subtree_end, column, segments, segments_host, pieces, scale, softcap, window)
    grad = _dense(grad)
    lse2, delta = statistics(call, grad, out, lse)
    for_dq, for_dkv = tiles or (None, None)
    query_gradient(call, grad, lse2, delta, for_dq, dq)
    key_gradients(call, grad, lse2, delta, for_dkv, dk, dv)
    return dq, dk, dv, _sinks_grad(delta[:, : call.tokens], lse, sinks)


def statistics(call: Call, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What the gradient kernels read of the forward pass.

    Returns:
        the log-sum-exp in base 2 and rowsum(grad * out), fp32 [Hq, span]: N and zeros, read past the end of a tile.
    """
    from treecompile.runtime.kernels.tree_attention import delta_kernel

    span = (-(-call.tokens // DELTA_ROWS) + 2) * DELTA_ROWS  # tiles have at most two of these
    lse2, delta = (lse.new_empty((lse.shape[1], span)) for _ in range(2))
    delta_kernel[(span // DELTA_ROWS, lse.shape[1])](
        grad, out, lse, delta, lse2, call.tokens, span, grad.stride(1), grad.stride(2),
        V=out.shape[3], V_PAD=padded_size(out.shape[3]), ROWS=DELTA_ROWS,
    )  # fmt: skip
    return lse2, delta


def query_gradient(
    call: Call, grad: Tensor, lse2: Tensor, delta: Tensor, tiles: Tiles | None, dq: Tensor
) -> None:
    """Write dq: one program per query block and group of heads."""
    from treecompile.runtime.kernels.tree_attention import dq_kernel

    q, k, v = call.q, call.k, call.v
    launch = call.launch("dq", tiles, k, v)
    lists = launch.lists
    dq_kernel[launch.grid](
        q, k, v, grad, *_descriptors(k, v, (1, launch.tiles.keys), launch.sizes),
        dq, lse2, delta, call.tables.subtree_end, call.column,
        lists.order, lists.run_offsets, lists.runs, lists.full_tiles, lists.index_offsets, lists.index,
        call.tokens, delta.stride(0), *call.strides(grad), *call.logits(), call.window, call.scale, **launch.sizes,
    )  # fmt: skip


def key_gradients(
    call: Call, grad: Tensor, lse2: Tensor, delta: Tensor, tiles: Tiles | None, dk: Tensor, dv: Tensor
) -> None:
    """Write dk and dv: one program per item of key blocks and K/V head, which sums over the heads that share it."""
    from treecompile.runtime.kernels.tree_attention import dkv_kernel, share_sum_kernel

    q, k, v = call.q, call.k, call.v
    launch = call.launch("dkv", tiles, q, grad)
    tiles, sizes, lists = launch.tiles, launch.sizes, launch.lists
    heads = k.shape[1]
    shape = lists.slots, heads, tiles.keys
    part_dk = torch.empty((*shape, k.shape[3]), dtype=torch.float32, device=q.device)
    part_dv = torch.empty((*shape, v.shape[3]), dtype=torch.float32, device=q.device)
    boxes: list[Any] = []
    for block in ((1, tiles.rows), (sizes["HEADS"], sizes["TOKENS"])):
        boxes += _descriptors(q, grad, block, sizes)
        boxes += [_descriptor(x, block, sizes["TMA"]) for x in (lse2, delta)]
    dkv_kernel[launch.grid](
        q, k, v, grad, *boxes,
        dk, dv, part_dk, part_dv, lse2, delta, call.tables.subtree_end, call.column,
        lists.items, lists.ranges, lists.offsets, lists.tiles,
        call.tokens, delta.stride(0), *call.strides(grad), *call.logits(), call.window, call.scale, **sizes,
    )  # fmt: skip
    if lists.slots:
        for parts, total in ((part_dk, dk), (part_dv, dv)):
            share_sum_kernel[(lists.split.shape[0], heads, tiles.keys // SHARE_ROWS)](
                parts, total, lists.split, call.tokens,
                KEYS=tiles.keys, SIZE=total.shape[3], PAD=padded_size(total.shape[3]), ROWS=SHARE_ROWS,
            )  # fmt: skip


def _sinks_grad(delta: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """d_sink = -sum over queries of exp(sink - lse) * rowsum(grad * out); queries that see nothing give none."""
    if sinks is None:
        return delta.new_empty((0,))
    blind = lse == float("-inf")
    weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse.masked_fill(blind, BLIND))
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)
