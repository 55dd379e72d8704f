"""Attention calls: the one place where tokens meet, rewritten to tree attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import treecompile.runtime.ops.leaf_attention  # noqa: F401  (registers treecompile::leaf_attention)
from treecompile.passes.rule import Facts, Infer, Rule
from treecompile.passes.samples import Call, call, tokens

if TYPE_CHECKING:
    from treecompile.passes.emit import Emitter
    from treecompile.passes.kinds import Kinds
    from treecompile.passes.values import Value

aten = torch.ops.aten


def infer_attention(infer: Infer, node: fx.Node) -> Facts:
    """q [B, H, Tq, D], k and v [B, Hkv, Tk, D]; mask broadcasts to [B, H, Tq, Tk]."""
    q, k, v = (infer.dims(arg) for arg in node.args[:3])
    for d in range(len(q) - 2):  # grouped heads: the key's heads become the leading part of the query's
        infer.pair(infer.pair(q[d], k[d]), v[d])
    infer.pair(k[-2], v[-2])
    infer.pair(q[-1], k[-1])
    infer.mix(k[-2])
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if isinstance(mask, fx.Node):
        infer.broadcast((*q[:-1], k[-2]), infer.dims(mask))
    return Facts([(*q[:-1], v[-1])])


def special_attention(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.attentions.call(node)


def emit_attention(emitter: Emitter, node: fx.Node) -> fx.Node:
    return emitter.attention(node)


_HEADS = "B 2 T 2"
SAMPLES: dict[Any, list[Call]] = {
    aten.scaled_dot_product_attention.default: [
        call(tokens(_HEADS), tokens(_HEADS), tokens(_HEADS), None, 0.0, True),
        call(tokens(_HEADS), tokens(_HEADS), tokens(_HEADS), None, 0.0, True, scale=0.3),
        call(tokens("B 4 T 2"), tokens(_HEADS), tokens(_HEADS), None, 0.0, True, enable_gqa=True),
        call(tokens(_HEADS), tokens(_HEADS), tokens("B 2 T 3"), None, 0.0, True),
        call(tokens(_HEADS), tokens(_HEADS), tokens(_HEADS)),
        call(tokens("T 2 B 2"), tokens("T 2 B 2"), tokens("T 2 B 2"), None, 0.0, True),
        call(tokens("B T 2 2"), tokens("B T 2 2"), tokens("B T 2 2"), None, 0.0, True),
    ],
    torch.ops.treecompile.leaf_attention.default: [
        call(tokens(_HEADS), tokens(_HEADS), tokens(_HEADS), None, None, 0.5, 0.0),
    ],
}

RULES = [
    Rule(
        "attention",
        (aten.scaled_dot_product_attention.default, torch.ops.treecompile.leaf_attention.default),
        infer_attention,
        emit_attention,
        special_attention,
        samples=SAMPLES,
    ),
]
