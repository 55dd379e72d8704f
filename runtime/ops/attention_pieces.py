from __future__ import annotations

import torch
from torch import Tensor

from treecompile.runtime.ops.attention_math import (
    accumulation_dtype, tile_backward, tree_attention_reference, visible_pairs,
)


def plan_pieces(segments, column=None):
    import numpy as np
    return np.zeros((0, 6), np.int32)


def pieces_forward(q, k, v, subtree_end, column, segments_host, pieces, sinks, scale, softcap, window):
    return tree_attention_reference(q, k, v, subtree_end, column, sinks, scale, softcap, window)


def pieces_backward(grad, q, k, v, out, lse, subtree_end, column, segments_host, pieces, sinks, scale, softcap, window):
    dt = accumulation_dtype(q.dtype)
    hkv = k.shape[1]; g = q.shape[1] // hkv
    grp = lambda x: x.reshape(hkv, g, *x.shape[2:])
    delta = (grad.to(dt) * out.to(dt)).sum(-1)
    vis = visible_pairs(subtree_end, column, window)
    dq, dk, dv = tile_backward(grp(grad), grp(q), k[0].unsqueeze(1), v[0].unsqueeze(1), grp(delta), grp(lse), vis, scale, softcap)
    ds = q.new_empty((0,))
    if sinks is not None:
        p = torch.exp(sinks.to(dt).view(1, -1, 1) - lse).masked_fill(lse == float("-inf"), 0.0)
        ds = -(p * delta).sum((0, 2)).to(sinks.dtype)
    return dq.reshape(q.shape).to(q.dtype), dk.sum(1).unsqueeze(0).to(k.dtype), dv.sum(1).unsqueeze(0).to(v.dtype), ds
