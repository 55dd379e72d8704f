"""The op `treecompile::tree_causal_conv1d`: a short depthwise convolution along every path of a tree.

Legend: N packed tokens, C channels, W taps, M odd tokens.

In preorder most tokens stand right behind their ancestors, and a shift of the packed row finds these. *Odd* tokens,
at most W - 1 behind a fork, do not; they are computed apart, by index. Tap W - 1 is the token itself, tap W - 1 - j its
j-th ancestor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treecompile.runtime.cache import TreeCache
from treecompile.runtime.ops.attention_math import accumulation_dtype
from treecompile.runtime.ops.registry import define, register_autocast
from treecompile.runtime.ops.segment_sum import segment_sum
from treecompile.runtime.stretches import Array
from treecompile.runtime.tree import RolloutTree

__all__ = ["tree_causal_conv1d", "tree_causal_conv1d_backward", "tree_causal_conv1d_reference"]

_ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias, Tensor subtree_end, Tensor segments_host"


@dataclass(frozen=True)
class _Reads:
    """Who reads a tap of odd tokens: int64 tokens that are read, CSR offsets, and the readers among the odd ones."""

    tokens: Tensor
    offsets: Tensor
    readers: Tensor


@dataclass(frozen=True)
class _Tables:
    """What a tree and W give.

    tokens: N. subtree_end: int32 [N] on the host. odd: int64 [M]. ancestors: int64 [W, M], from the token itself
    upwards, -1 where there is none. reads: in the same order, W of them.
    """

    tokens: int
    subtree_end: Tensor
    odd: Tensor
    ancestors: Tensor
    reads: tuple[_Reads, ...]


_kept: TreeCache[_Tables] = TreeCache(capacity=16)


def _tables(x: Tensor, weight: Tensor, bias: Tensor | None, subtree_end: Tensor, segments: Tensor) -> _Tables:
    channels, taps = weight.shape
    if x.dim() != 3 or x.shape[0] != 1 or x.shape[1] != channels or taps < 1:
        raise ValueError(f"tree_causal_conv1d: x of shape {x.shape} for weights {weight.shape}")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"tree_causal_conv1d: bias of shape {bias.shape} for {channels} channels")
    made = _kept.get(
        [segments], lambda: _build(segments.numpy(), taps, x.device), device=x.device, options=taps
    )
    if made.tokens != x.shape[2] or subtree_end.shape != (made.tokens,):
        raise ValueError(f"tree_causal_conv1d: a table of {made.tokens} tokens for x of shape {x.shape}")
    if not subtree_end.is_cuda and not torch.equal(subtree_end.int(), made.subtree_end):
        raise ValueError("tree_causal_conv1d: subtree_end is not that of the segment table")
    return made


def _build(segments: Array, taps: int, device: torch.device) -> _Tables:
    tree = RolloutTree.from_segments(segments)
    number = np.arange(tree.n)
    above = np.r_[tree.parent.astype(np.int64), -1]  # the last one: nothing is above nothing
    ancestors, odd = [number], np.zeros(tree.n, np.bool_)
    for j in range(1, taps):
        ancestors.append(above[ancestors[-1]])
        odd |= ancestors[-1] != np.maximum(number - j, -1)
    where = np.flatnonzero(odd)
    found = np.stack(ancestors)[:, where]

    def tensor(values: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

    reads = []
    for tap in found:
        order = np.argsort(tap, kind="stable")
        readers = order[np.searchsorted(tap[order], 0) :]
        tokens, counts = np.unique(tap[readers], return_counts=True)
        reads.append(_Reads(tensor(tokens), tensor(np.r_[0, np.cumsum(counts)]), tensor(readers)))
    ends = torch.from_numpy(tree.subtree_end.astype(np.int32))
    return _Tables(tree.n, ends, tensor(where), tensor(found), tuple(reads))


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, subtree_end: Tensor, segments_host: Tensor
) -> Tensor:
    """Convolve each token with its W - 1 nearest ancestors, channel by channel; absent ones are zero.

    Args:
        x: [1, C, N], floats of any strides; N = 0 and 1 included.
        weight: [C, W] of x's dtype.
        bias: [C] or None.
        subtree_end: int32 [N]; every packed token is an ordinary one, no leaf pad.
        segments_host: int32 [S, 4] on the CPU, rows (start, end, parent row or -1, subtree end of start).

    Returns:
        [1, C, N] contiguous in x's dtype: ``bias + sum over w of weight[w] * x[ancestor W-1-w]``, summed in fp32
        (fp64 for fp64). Along a single path what ``conv1d`` gives with padding W - 1, cut to N.

    Raises:
        ValueError: shapes that disagree, a table of another tree, or leaf pads.

    Example:
        >>> table = torch.tensor([[0, 2, -1, 4], [2, 3, 0, 3], [3, 4, 0, 4]], dtype=torch.int32)
        >>> end = torch.tensor([4, 4, 3, 4]).int()  # a fork after two tokens
        >>> x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
        >>> tree_causal_conv1d(x, torch.tensor([[10.0, 1.0]]), None, end, table).tolist()
        [[[1.0, 12.0, 23.0, 24.0]]]

    Notes:
        Under autocast x, weight and bias are cast to the ambient dtype, as for ``conv1d``.
    """
    tables = _tables(x, weight, bias, subtree_end, segments_host)
    dtype = accumulation_dtype(x.dtype)
    values, weights = x[0].to(dtype), weight.to(dtype)
    start = torch.zeros_like(weights[:, :1]) if bias is None else bias.to(dtype).unsqueeze(1)
    out = torch.addcmul(start, values, weights[:, -1:])
    for j, tap in _taps(weights, tables.tokens):
        out[:, j:].addcmul_(values[:, : tables.tokens - j], tap)
    if tables.odd.shape[0]:
        apart = start.repeat(1, tables.odd.shape[0])
        for j, ancestors in enumerate(tables.ancestors):
            apart.addcmul_(_read(values, ancestors), weights[:, -1 - j, None])
        out.index_copy_(1, tables.odd, apart)
    return out.to(x.dtype).contiguous().unsqueeze(0)


def _taps(weights: Tensor, tokens: int) -> list[tuple[int, Tensor]]:
    """(distance, weight [C, 1]) of the taps above a token itself, as far as there are tokens."""
    return [(j, weights[:, -1 - j, None]) for j in range(1, min(weights.shape[1], tokens))]


def _read(values: Tensor, ancestors: Tensor) -> Tensor:
    """[C, M] at the ancestors, zero where there is none."""
    return values.index_select(1, ancestors.clamp(min=0)).masked_fill_(ancestors < 0, 0)


def _forward_fake(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    subtree_end: Tensor,
    segments_host: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias (empty without bias) of `tree_causal_conv1d`.

    Args:
        grad: [1, C, N].
        x, weight, bias, subtree_end, segments_host: as there.

    Returns:
        contiguous tensors of the arguments' shapes and dtypes, summed in fp32 (fp64) and in fixed order.
    """
    tables = _tables(x, weight, bias, subtree_end, segments_host)
    dtype = accumulation_dtype(x.dtype)
    g, values, weights = grad[0].to(dtype), x[0].to(dtype), weight.to(dtype)
    dbias = x.new_zeros((0,)) if bias is None else g.sum(1).to(bias.dtype)
    even = g.index_fill(1, tables.odd, 0) if tables.odd.shape[0] else g
    dx, dweight = even * weights[:, -1:], torch.zeros_like(weights)
    dweight[:, -1] = torch.einsum("cn,cn->c", even, values)
    for j, tap in _taps(weights, tables.tokens):
        above = slice(0, tables.tokens - j)
        dx[:, above].addcmul_(even[:, j:], tap)
        dweight[:, -1 - j] = torch.einsum("cn,cn->c", even[:, j:], values[:, above])
    if tables.odd.shape[0]:
        apart = g.index_select(1, tables.odd)
        rows = apart.t().contiguous()
        for j, (ancestors, reads) in enumerate(zip(tables.ancestors, tables.reads, strict=True)):
            dweight[:, -1 - j] += torch.einsum("cn,cn->c", apart, _read(values, ancestors))
            summed = segment_sum(rows, reads.offsets, reads.readers)
            dx.index_add_(1, reads.tokens, summed.t() * weights[:, -1 - j, None])
    return dx.to(x.dtype).contiguous().unsqueeze(0), dweight.to(weight.dtype), dbias


def _backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = x.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


tree_causal_conv1d = define(f"tree_causal_conv1d({_ARGUMENTS}) -> Tensor", _forward, _forward_fake)
tree_causal_conv1d_backward = define(
    f"tree_causal_conv1d_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register_autocast(tree_causal_conv1d, cast=(0, 1, 2))
register_autocast(tree_causal_conv1d_backward, cast=())


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = tree_causal_conv1d_backward(grad, *ctx.saved_tensors)
    return dx, dweight, dbias if ctx.needs_input_grad[2] else None, None, None


torch.library.register_autograd("treecompile::tree_causal_conv1d", _grads, setup_context=_save)


def tree_causal_conv1d_reference(x: Tensor, weight: Tensor, bias: Tensor | None, parent: list[int]) -> Tensor:
    """The convolution token by token, in plain PyTorch: the specification; differentiable.

    Args:
        x, weight, bias: as for `tree_causal_conv1d`.
        parent: [N] packed token above each, -1 for roots.

    Returns:
        [1, C, N] in x's dtype.

    Example:
        >>> x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
        >>> tree_causal_conv1d_reference(x, torch.tensor([[10.0, 1.0]]), None, [-1, 0, 1, 1]).tolist()
        [[[1.0, 12.0, 23.0, 24.0]]]
    """
    dtype = accumulation_dtype(x.dtype)
    values, weights = x[0].to(dtype), weight.to(dtype)
    outs = []
    for n in range(len(parent)):
        total = torch.zeros_like(weights[:, 0]) if bias is None else bias.to(dtype)
        at = n
        for w in range(weight.shape[1] - 1, -1, -1):
            if at >= 0:
                total = total + weights[:, w] * values[:, at]
                at = parent[at]
        outs.append(total)
    return torch.stack(outs, 1).to(x.dtype).unsqueeze(0) if outs else x[:, :, :0]
