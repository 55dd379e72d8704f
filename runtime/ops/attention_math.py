"""Tree attention written out: the specification, and the tile formulas that softcap and CUDA tiles use.

Suffixes: N packed tokens, Q query rows of a tile, K key rows of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["tile_backward", "tile_forward", "tree_attention_reference", "visible_pairs"]

NEG_INF = float("-inf")
# The log-sum-exp of a row that weighs nothing, in a backward pass: exp(s - lse) is 0 and never NaN.
BLIND = 1e30


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over `dtype` values are kept: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def visible_pairs(
    subtree_end: Tensor, column: Tensor, window: int, query: Tensor | None = None, key: Tensor | None = None
) -> Tensor:
    """Return which query-key pairs attend: ``k <= q < subtree_end[k]`` and, with a window, near in column.

    Args:
        subtree_end: int [N], one past the last packed token below each token; `n` itself for a leaf pad.
        column: int [N], grid column of each token.
        window: width in columns; 0 for none.
        query: int64 [..., Q], packed indices; all tokens if None.
        key: int64 [..., K], packed indices; all tokens if None.

    Returns:
        bool [..., Q, K].

    Example:
        >>> end = torch.tensor([3, 2, 3], dtype=torch.int32)      # a root with two children
        >>> visible_pairs(end, torch.tensor([0, 1, 1]), 0).int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    every = torch.arange(subtree_end.shape[0], device=subtree_end.device)
    query = every if query is None else query
    key = every if key is None else key
    q, k = query.unsqueeze(-1), key.unsqueeze(-2)
    visible = (k <= q) & (q < subtree_end[key].unsqueeze(-2))
    if window > 0:
        visible &= column[query].unsqueeze(-1) - column[key].unsqueeze(-2) < window
    return visible


def tree_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    column: Tensor,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend over a packed tree with a materialised N x N mask: slow, differentiable, the specification.

    Args:
        q: [1, Hq, N, Dqk], any float dtype; computed in fp32 (fp64 for fp64).
        k: [1, Hkv, N, Dqk], Hq a multiple of Hkv.
        v: [1, Hkv, N, Dv].
        subtree_end: int [N]; n attends to k iff ``k <= n < subtree_end[k]``.
        column: int [N], grid columns (read with a window only).
        sinks: [Hq], one extra logit per head without a value, or None.
        scale: factor on the logits; Dqk ** -0.5 if None.
        softcap: s becomes softcap * tanh(s / softcap); 0 for none.
        window: key visible iff column[q] - column[k] < window; 0 for none.

    Returns:
        out [1, Hq, N, Dv] in q's dtype and lse [1, Hq, N] in fp32 (fp64). A query that sees no key gives
        0 and -inf, with or without a sink.

    Example:
        >>> q = torch.randn(1, 2, 3, 4); end = torch.tensor([3, 2, 3]); col = torch.tensor([0, 1, 1])
        >>> out, lse = tree_attention_reference(q, q, q, end, col)
        >>> torch.allclose(out[:, :, 0], q[:, :, 0])
        True

    Notes:
        O(N^2) memory and time. Gradients by autograd, NaN-free for rows that see nothing.
    """
    dtype = accumulation_dtype(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q_hgNd = _grouped(q.to(dtype), k.shape[1])
    k_h1Nd, v_h1Nd = k[0].unsqueeze(1).to(dtype), v[0].unsqueeze(1).to(dtype)
    logits = (q_hgNd @ k_h1Nd.transpose(-1, -2)) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    visible = visible_pairs(subtree_end, column, window)
    logits = logits.masked_fill(~visible, NEG_INF)
    shift = (
        logits.detach().amax(-1, keepdim=True) if q.shape[2] else logits.new_zeros((*q_hgNd.shape[:-1], 1))
    )
    sees = visible.any(-1)
    sink = None if sinks is None else sinks.to(dtype).view(k.shape[1], -1, 1, 1)
    if sink is not None:
        shift = torch.maximum(shift, sink.detach())
    shift = shift.masked_fill(shift == NEG_INF, 0.0)
    weight = torch.exp(logits - shift)
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - shift)
    total = total.masked_fill(~sees.unsqueeze(-1), 1.0)
    out = (weight / total) @ v_h1Nd
    lse = (torch.log(total) + shift).squeeze(-1).masked_fill(~sees, NEG_INF)
    return out.reshape(1, q.shape[1], q.shape[2], v.shape[3]).to(q.dtype), lse.reshape(q.shape[:3])


def _grouped(x: Tensor, heads_kv: int) -> Tensor:
    """View [1, Hq, N, D] as [Hkv, Hq / Hkv, N, D]."""
    return x.reshape(heads_kv, x.shape[1] // heads_kv, x.shape[2], x.shape[3])


def tile_forward(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attend within one tile, in the accumulation dtype.

    Args:
        q: [..., Q, Dqk].
        k: [..., K, Dqk], batch dims broadcast against q's.
        v: [..., K, Dv].
        visible: bool, broadcast to [..., Q, K]; None if all pairs attend.
        scale: factor on the logits.
        softcap: 0 for none.

    Returns:
        out [..., Q, Dv] and lse [..., Q], both in the accumulation dtype: 0 and -inf for rows without a key.
    """
    dtype = accumulation_dtype(q.dtype)
    logits = _tile_logits(q.to(dtype), k.to(dtype), visible, scale, softcap)
    lse = torch.logsumexp(logits, -1)
    weight = torch.exp(logits - finite_lse(lse).unsqueeze(-1))
    return weight @ v.to(dtype), lse


def tile_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tile's share of dq, dk, dv from the global log-sum-exp.

    Args:
        grad: [..., Q, Dv], gradient of the merged output.
        q: [..., Q, Dqk].
        k: [..., K, Dqk].
        v: [..., K, Dv].
        delta: [..., Q], rowsum(grad * merged output), accumulation dtype.
        lse: [..., Q], global log-sum-exp, accumulation dtype.
        visible: bool, broadcast to [..., Q, K]; None if all pairs attend.
        scale: factor on the logits.
        softcap: 0 for none.

    Returns:
        dq [..., Q, Dqk], dk [..., K, Dqk], dv [..., K, Dv] in the accumulation dtype; dk and dv keep the
        query's batch dims (not summed over a broadcast head group).

    Notes:
        FlashAttention-2 (Dao 2023, algorithm 2): P = exp(S - lse), dS = P * (dO V^T - delta).
    """
    dtype = accumulation_dtype(q.dtype)
    q, k, v, grad = q.to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype)
    logits = _tile_logits(q, k, visible, scale, softcap)
    weight = torch.exp(logits - finite_lse(lse).unsqueeze(-1))
    grad_logits = weight * (grad @ v.transpose(-1, -2) - delta.unsqueeze(-1))
    if softcap > 0:
        slope = 1 - (logits / softcap).square()
        if visible is not None:
            slope = slope.masked_fill(~visible, 0.0)
        grad_logits = grad_logits * slope
    grad_logits = grad_logits * scale
    return grad_logits @ k, grad_logits.transpose(-1, -2) @ q, weight.transpose(-1, -2) @ grad


def finite_lse(lse: Tensor) -> Tensor:
    """Replace -inf (a row without keys) by `BLIND`."""
    return lse.masked_fill(lse == NEG_INF, BLIND)


def _tile_logits(q: Tensor, k: Tensor, visible: Tensor | None, scale: float, softcap: float) -> Tensor:
    logits = (q @ k.transpose(-1, -2)) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if visible is None else logits.masked_fill(~visible, NEG_INF)
