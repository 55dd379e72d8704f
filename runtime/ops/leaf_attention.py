"""`treecompile::leaf_attention`: dense attention as one node, whatever kernel the model had chosen.

The op is composite: Dynamo and a pre-dispatch trace keep it whole, AOTAutograd and eager calls run the lines
below, so that autograd, autocast and Inductor see ordinary PyTorch ops.

Shapes: B rows, H query heads, K key heads (H a multiple of K), Q queries, T keys, D and E head sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from treecompile.runtime.ops.registry import LIBRARY

__all__ = ["leaf_attention"]


def _leaf_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Attention over unexpanded key and value heads.

    Args:
        q: ``[B, H, Q, D]``.
        k: ``[B, K, T, D]``.
        v: ``[B, K, T, E]``.
        mask: ``[B or 1, H or 1, Q, T]``; bool: True where q may see k; floating: added to the scores.
        sinks: ``[H]`` logit of a key without a value, per head.
        scale: factor of the scores.
        softcap: c in ``c * tanh(scores / c)``; 0 for none.

    Returns:
        ``[B, H, Q, E]``; a query that sees no key gives 0.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = _repeat_heads(k, groups), _repeat_heads(v, groups)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    if sinks is None and softcap == 0:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap != 0:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
    # Safe: 0 where every score is -inf.
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(v.dtype), v)


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return x
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, groups, length, size).reshape(batch, -1, length, size)


LIBRARY.define(
    "leaf_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, float softcap)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("leaf_attention", _leaf_attention, "CompositeImplicitAutograd")
leaf_attention = torch.ops.treecompile.leaf_attention.default
