"""The op `treecompile::tree_attention`: attention of N packed tokens over their ancestors.

The tree comes as tensor arguments, never as ambient state: two forwards before a backward, recomputation and
autograd threads each see their own tree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treecompile.runtime.ops.attention_math import accumulation_dtype
from treecompile.runtime.ops.attention_pieces import pieces_backward, pieces_forward
from treecompile.runtime.ops.attention_router import device_of, problem_of, route
from treecompile.runtime.ops.attention_triton import triton_backward, triton_forward
from treecompile.runtime.ops.registry import define, register_autocast

__all__ = ["tree_attention", "tree_attention_backward"]

_TREE = (
    "Tensor subtree_end, Tensor column, Tensor segments, Tensor segments_host, Tensor pieces, Tensor blocks,"
    " Tensor? sinks, float scale, float softcap, int window"
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    column: Tensor,
    segments: Tensor,
    segments_host: Tensor,
    pieces: Tensor,
    blocks: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attend over the ancestors of each packed token.

    Args:
        q: [1, Hq, N, Dqk], fp64, fp32, bf16 or fp16, any strides; N = 0 and 1 included.
        k: [1, Hkv, N, Dqk], Hq a multiple of Hkv.
        v: [1, Hkv, N, Dv].
        subtree_end: int32 [N]; n attends to k iff ``k <= n < subtree_end[k]``.
        column: int32 [N], grid columns; a window compares them.
        segments: int32 [S, 4] on q's device, rows (start, end, parent row or -1, subtree end of start).
        segments_host: the same on the CPU.
        pieces: int32 [P, 6] on the CPU, from `plan_pieces`, or its first row, from `plan_header`.
        blocks: int32 [K] on q's device; reserved, may be empty.
        sinks: [Hq], one extra logit per head without a value, or None.
        scale: factor on the logits.
        softcap: s becomes softcap * tanh(s / softcap); 0 for none.
        window: key visible iff column[q] - column[k] < window; 0 for none.

    Returns:
        out [1, Hq, N, Dv] contiguous in q's dtype, and the log-sum-exp [1, Hq, N] (sinks included) in fp32,
        fp64 for fp64, not differentiable. A query that sees no key (a leaf pad without ancestors) gives 0 and
        -inf.

    Raises:
        ValueError: shapes that disagree, or a plan of another tree.

    Example:
        >>> import numpy as np
        >>> from treecompile.runtime.ops import plan_pieces
        >>> table = np.array([[0, 2, -1, 4], [2, 3, 0, 3], [3, 4, 0, 4]], np.int32)  # a fork after two tokens
        >>> end, column = torch.tensor([4, 4, 3, 4]).int(), torch.tensor([0, 1, 2, 2]).int()
        >>> host, plan = torch.from_numpy(table), torch.from_numpy(plan_pieces(table, column))
        >>> q = torch.randn(1, 2, 4, 8)
        >>> out, lse = tree_attention(q, q, q, end, column, host, host, plan, host[:0, 0], None, 0.5, 0.0, 0)
        >>> out.shape, lse.shape
        (torch.Size([1, 2, 4, 8]), torch.Size([1, 2, 4]))

    Notes:
        Runs `triton_forward` or `pieces_forward`, as `route` chooses; `tree_attention_reference` is the
        specification. Under autocast q, k and v are cast to the ambient dtype, as for PyTorch's attention.
    """
    _check(q, k, v)
    problem = problem_of(q, k, v, scale, softcap, window)
    found = route("forward", problem, device_of(q.device), segments_host, pieces)
    if found.executor == "triton":
        return triton_forward(
            q, k, v, subtree_end, column, segments, segments_host, pieces, sinks, scale, softcap, window
        )
    return pieces_forward(
        q, k, v, subtree_end, column, segments_host, pieces, sinks, scale, softcap, window, found.vendor
    )


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[0] != 1 or k.shape[0] != 1 or v.shape[0] != 1:
        raise ValueError(f"tree_attention takes one packed batch row, got {q.shape}, {k.shape}, {v.shape}")
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise ValueError(f"tree_attention: {q.shape[1]} query heads over {k.shape[1]} / {v.shape[1]} heads")
    if not q.shape[2] == k.shape[2] == v.shape[2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"tree_attention: q, k, v disagree: {q.shape}, {k.shape}, {v.shape}")


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *tree: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((1, q.shape[1], q.shape[2], v.shape[3]))
    return out, q.new_empty((1, q.shape[1], q.shape[2]), dtype=accumulation_dtype(q.dtype))


def _backward(
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
    blocks: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and d_sinks (empty without sinks) of `tree_attention`.

    See `triton_backward` and `pieces_backward`: either takes what either forward gave.
    """
    problem = problem_of(q, k, v, scale, softcap, window)
    found = route("backward", problem, device_of(q.device), segments_host, pieces)
    if found.executor == "triton":
        return triton_backward(
            grad, q, k, v, out, lse,
            subtree_end, column, segments, segments_host, pieces, sinks, scale, softcap, window,
        )  # fmt: skip
    return pieces_backward(
        grad, q, k, v, out, lse,
        subtree_end, column, segments_host, pieces, sinks, scale, softcap, window, found.vendor,
    )  # fmt: skip


def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *tree: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = tree[6]
    grad_sinks = q.new_empty((0,)) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_sinks


tree_attention = define(
    f"tree_attention(Tensor q, Tensor k, Tensor v, {_TREE}) -> (Tensor, Tensor)", _forward, _forward_fake
)
tree_attention_backward = define(
    "tree_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_TREE}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register_autocast(tree_attention, cast=(0, 1, 2))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:10])
    ctx.scalars = inputs[10:]
    ctx.mark_non_differentiable(output[1])


def _grads(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dsinks = tree_attention_backward(grad, *ctx.saved_tensors, *ctx.scalars)
    return dq, dk, dv, *(None,) * 6, dsinks if ctx.needs_input_grad[9] else None, *(None,) * 3


torch.library.register_autograd("treecompile::tree_attention", _grads, setup_context=_save)
