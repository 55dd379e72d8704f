"""The op `treecompile::tree_causal_conv1d`: a short depthwise convolution along every path of a tree.

Legend: N packed tokens, C channels, W taps, M odd tokens.

In preorder most tokens stand right behind their ancestors, and a shift of the packed row finds these. *Odd* tokens,
at most W - 1 behind a fork, do not; they are computed apart, by index (`treecompile.runtime.ops.causal_conv_tables`).
Tap W - 1 is the token itself, tap W - 1 - j its j-th ancestor.

Two executors of one contract: Triton kernels on a GPU (`treecompile.runtime.kernels.causal_conv`), and plain PyTorch,
here. `why_not_triton` says which and why.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treecompile.runtime.ops.attention_math import accumulation_dtype
from treecompile.runtime.ops.causal_conv_tables import ConvTables, conv_tables
from treecompile.runtime.ops.registry import define, register_autocast
from treecompile.runtime.ops.segment_sum import segment_sum
from treecompile.runtime.ops.triton_device import why_no_triton

__all__ = [
    "ACTIVATIONS",
    "tree_causal_conv1d",
    "tree_causal_conv1d_backward",
    "tree_causal_conv1d_reference",
    "why_not_triton",
]

ACTIVATIONS = ("", "silu")
# Set to "pytorch", the kernels do not run.
VARIABLE = "TREECOMPILE_CONVOLUTION"
# More taps than this do not fit the registers of the kernels.
MOST_TAPS = 8

_ARGUMENTS = (
    'Tensor x, Tensor weight, Tensor? bias, Tensor subtree_end, Tensor segments_host, str activation=""'
)


def why_not_triton(x: Tensor, taps: int) -> str:
    """Say why the Triton kernels cannot run these inputs, or "": then they do.

    Args:
        x: [1, C, N].
        taps: W.

    Raises:
        ValueError: the environment asks for something else.

    Example:
        >>> why_not_triton(torch.zeros(1, 2, 3), 4)
        'not on a CUDA device'
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "pytorch"):
        raise ValueError(f"tree_causal_conv1d: {VARIABLE} is {asked!r}, and may be 'pytorch'")
    if asked:
        return "pytorch was asked for"
    if not x.is_cuda:
        return "not on a CUDA device"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{x.dtype} is not summed in fp32"
    if taps > MOST_TAPS:
        return f"{taps} taps: at most {MOST_TAPS} fit in registers"
    return why_no_triton(x.device)


def _tables(
    x: Tensor, weight: Tensor, bias: Tensor | None, subtree_end: Tensor, segments: Tensor, activation: str
) -> ConvTables:
    channels, taps = weight.shape
    if x.dim() != 3 or x.shape[0] != 1 or x.shape[1] != channels or taps < 1:
        raise ValueError(f"tree_causal_conv1d: x of shape {x.shape} for weights {weight.shape}")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"tree_causal_conv1d: bias of shape {bias.shape} for {channels} channels")
    if activation not in ACTIVATIONS:
        raise ValueError(f"tree_causal_conv1d: no activation {activation!r}, there are {ACTIVATIONS}")
    made = conv_tables(segments, taps, x.device)
    if made.tokens != x.shape[2] or subtree_end.shape != (made.tokens,):
        raise ValueError(f"tree_causal_conv1d: a table of {made.tokens} tokens for x of shape {x.shape}")
    if not subtree_end.is_cuda and not torch.equal(subtree_end.int(), made.subtree_end):
        raise ValueError("tree_causal_conv1d: subtree_end is not that of the segment table")
    return made


def _rows(x: Tensor) -> Tensor:
    """[N, C] with channels adjacent, of a [1, C, N]: a view where that is how it lies in memory."""
    rows = x[0].t()
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _new_columns(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[2], x.shape[1])).t().unsqueeze(0)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    subtree_end: Tensor,
    segments_host: Tensor,
    activation: str = "",
) -> Tensor:
    """Convolve each token with its W - 1 nearest ancestors, channel by channel; absent ones are zero.

    Args:
        x: [1, C, N], floats of any strides; N = 0 and 1 included.
        weight: [C, W] of x's dtype.
        bias: [C] or None.
        subtree_end: int32 [N]; every packed token is an ordinary one, no leaf pad.
        segments_host: int32 [S, 4] on the CPU, rows (start, end, parent row or -1, subtree end of start).
        activation: "" or "silu", of the sum before it is rounded.

    Returns:
        [1, C, N] in x's dtype, channels adjacent in memory, as the layers around it read and write them:
        ``bias + sum over w of weight[w] * x[ancestor W-1-w]``, summed in fp32 (fp64 for fp64). Along a single path what
        ``conv1d`` gives with padding W - 1, cut to N.

    Raises:
        ValueError: shapes that disagree, an unknown activation, a table of another tree, or leaf pads.

    Example:
        >>> table = torch.tensor([[0, 2, -1, 4], [2, 3, 0, 3], [3, 4, 0, 4]], dtype=torch.int32)
        >>> end = torch.tensor([4, 4, 3, 4]).int()  # a fork after two tokens
        >>> x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
        >>> tree_causal_conv1d(x, torch.tensor([[10.0, 1.0]]), None, end, table).tolist()
        [[[1.0, 12.0, 23.0, 24.0]]]

    Notes:
        Under autocast x, weight and bias are cast to the ambient dtype, as for ``conv1d``.
    """
    tables = _tables(x, weight, bias, subtree_end, segments_host, activation)
    if not why_not_triton(x, weight.shape[1]):
        from treecompile.runtime.kernels import causal_conv as kernels

        return kernels.forward(_rows(x), weight, bias, tables, activation).t().unsqueeze(0)
    dtype = accumulation_dtype(x.dtype)
    out = _convolved(_rows(x).to(dtype), _taps(weight, dtype), bias, tables)
    if activation == "silu":
        out = F.silu(out, inplace=True)
    return out.to(x.dtype).t().unsqueeze(0)


def _convolved(values: Tensor, taps: Tensor, bias: Tensor | None, tables: ConvTables) -> Tensor:
    """[N, C]: the sums before the activation, of values [N, C] and taps [W, C]."""
    start = torch.zeros_like(taps[0]) if bias is None else bias.to(taps.dtype)
    out = torch.addcmul(start, values, taps[-1])
    for j in _shifts(taps, tables):
        out[j:].addcmul_(values[: tables.tokens - j], taps[-1 - j])
    if tables.odd.shape[0]:
        apart = start.repeat(tables.odd.shape[0], 1)
        for j, ancestors in enumerate(tables.ancestors):
            apart.addcmul_(_read(values, ancestors), taps[-1 - j])
        out.index_copy_(0, tables.odd, apart)
    return out


def _taps(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[W, C]: channels adjacent, or each product with a row would read them one by one."""
    return weight.to(dtype).t().contiguous()


def _shifts(taps: Tensor, tables: ConvTables) -> range:
    """Distances of the taps above a token itself, as far as there are tokens."""
    return range(1, min(taps.shape[0], tables.tokens))


def _read(values: Tensor, ancestors: Tensor) -> Tensor:
    """[M, C] at the ancestors, zero where there is none."""
    return values.index_select(0, ancestors.clamp(min=0)).masked_fill_((ancestors < 0)[:, None], 0)


def _forward_fake(x: Tensor, *others: Any) -> Tensor:
    return _new_columns(x)


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    subtree_end: Tensor,
    segments_host: Tensor,
    activation: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias (empty without bias) of `tree_causal_conv1d`.

    Args:
        grad: [1, C, N].
        x, weight, bias, subtree_end, segments_host, activation: as there.

    Returns:
        tensors of the arguments' shapes and dtypes, that of x with channels adjacent, the others contiguous; summed in
        fp32 (fp64) and in fixed order.
    """
    tables = _tables(x, weight, bias, subtree_end, segments_host, activation)
    if not why_not_triton(x, weight.shape[1]):
        from treecompile.runtime.kernels import causal_conv as kernels

        given = (_rows(grad), _rows(x), weight, bias)
        rows, by_weight, by_bias = kernels.backward(*given, tables, activation)
        dbias = x.new_empty((0,)) if bias is None else by_bias.to(bias.dtype)
        return rows.t().unsqueeze(0), by_weight.to(weight.dtype).contiguous(), dbias
    # In rows [N, C], where channels are adjacent: a sum over tokens then runs along the channels.
    dtype = accumulation_dtype(x.dtype)
    g, values, taps = _rows(grad).to(dtype), _rows(x).to(dtype), _taps(weight, dtype)
    if activation == "silu":
        g = torch.ops.aten.silu_backward(g, _convolved(values, taps, bias, tables))
    dbias = x.new_empty((0,)) if bias is None else g.sum(0).to(bias.dtype)
    even = g.index_fill(0, tables.odd, 0) if tables.odd.shape[0] else g
    dx, dtaps = even * taps[-1], torch.zeros_like(taps)
    dtaps[-1] = (even * values).sum(0)
    for j in _shifts(taps, tables):
        below, above = even[j:], slice(0, tables.tokens - j)
        dx[above].addcmul_(below, taps[-1 - j])
        dtaps[-1 - j] = (below * values[above]).sum(0)
    if tables.odd.shape[0]:
        apart = g.index_select(0, tables.odd)
        for j, (ancestors, reads) in enumerate(zip(tables.ancestors, tables.reads, strict=True)):
            dtaps[-1 - j] += (apart * _read(values, ancestors)).sum(0)
            summed = segment_sum(apart, reads.offsets, reads.readers)
            dx.index_add_(0, reads.tokens, summed * taps[-1 - j])
    dweight = dtaps.t().contiguous().to(weight.dtype)
    return dx.to(x.dtype).t().unsqueeze(0), dweight, dbias


def _backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = x.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    return _new_columns(x), weight.new_empty(weight.shape), dbias


tree_causal_conv1d = define(f"tree_causal_conv1d({_ARGUMENTS}) -> Tensor", _forward, _forward_fake)
tree_causal_conv1d_backward = define(
    f"tree_causal_conv1d_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register_autocast(tree_causal_conv1d, cast=(0, 1, 2))
register_autocast(tree_causal_conv1d_backward, cast=())


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.activation = inputs[5]


def _grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = tree_causal_conv1d_backward(grad, *ctx.saved_tensors, ctx.activation)
    return dx, dweight, dbias if ctx.needs_input_grad[2] else None, None, None, None


torch.library.register_autograd("treecompile::tree_causal_conv1d", _grads, setup_context=_save)


def tree_causal_conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, parent: list[int], activation: str = ""
) -> Tensor:
    """The convolution token by token, in plain PyTorch: the specification; differentiable.

    Args:
        x, weight, bias, activation: as for `tree_causal_conv1d`.
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
        outs.append(F.silu(total) if activation == "silu" else total)
    return torch.stack(outs, 1).to(x.dtype).unsqueeze(0) if outs else x[:, :, :0]
