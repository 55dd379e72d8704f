"""Where tokens meet along a chain: linear recurrences and short causal convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import treecompile.runtime.ops.causal_conv1d
import treecompile.runtime.ops.leaf_recurrence  # noqa: F401  (both register their ops)
from treecompile.passes.rule import Facts, Infer, Rule
from treecompile.passes.samples import Call, call, tokens, weight

if TYPE_CHECKING:
    from treecompile.passes.emit import Emitter
    from treecompile.passes.kinds import Kinds
    from treecompile.passes.values import Value

ops = torch.ops.treecompile


def infer_recurrence(infer: Infer, node: fx.Node) -> Facts:
    """q, k [B, T, G, D]; v, skip [B, T, H, V]; gate [B, T, H] or [B, T, H, D]; beta [B, T, H]."""
    q, k, v, gate, beta, skip = (infer.dims(arg) for arg in node.args[:6])
    for other in (q, k, gate, beta, skip):
        if other:
            infer.pair(v[0], other[0])
            infer.pair(v[1], other[1])
    infer.pair(q[2], k[2])
    infer.pair(q[3], k[3])
    for other in (gate, beta, skip):
        if other:
            infer.pair(v[2], other[2])
    if len(gate) == 4:
        infer.pair(k[3], gate[3])
    if skip:
        infer.pair(v[3], skip[3])
    infer.mix(v[1])
    infer.mix(k[3])
    return Facts([v])


def infer_convolution(infer: Infer, node: fx.Node) -> Facts:
    """x [B, C, T], weight [C, 1, W]."""
    x, taps, bias = (infer.dims(arg) for arg in node.args[:3])
    infer.pair(x[1], taps[0])
    if bias:
        infer.pair(x[1], bias[0])
    infer.mix(x[2])
    infer.mix(taps[2])
    return Facts([x])


def special_recurrence(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.chains.recurrence(node)


def special_convolution(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.chains.convolution(node)


def emit_chain(emitter: Emitter, node: fx.Node) -> fx.Node:
    return emitter.copy(node)


_CONVOLVED = [
    call(tokens("B F T"), weight("F 1 2"), weight("F")),
    call(tokens("B F T"), weight("F 1 3"), None),
    call(tokens("B F T"), weight("F 1 1"), None),
    call(tokens("B F T"), weight("F 1 2"), weight("F"), "silu"),
    call(tokens("B T F"), weight("T 1 2"), None),
    call(tokens("T F B"), weight("F 1 2"), None),
]
_KEYS, _VALUES, _HEADS = tokens("B T 2 K"), tokens("B T F 2"), tokens("B T F")
_DEFINITION: tuple[Any, ...] = (0.5, 3, [], "")
_RECURRENCES = [
    call(_KEYS, _KEYS, _VALUES, _HEADS, None, None, *_DEFINITION),
    call(_KEYS, _KEYS, _VALUES, _HEADS, _HEADS, _VALUES, *_DEFINITION),
    call(_KEYS, _KEYS, _VALUES, tokens("B T F K"), _HEADS, None, *_DEFINITION),
    call(tokens("T B 2 K"), tokens("T B 2 K"), tokens("T B F 2"), tokens("T B F"), None, None, *_DEFINITION),
    call(_KEYS, _KEYS, _VALUES, weight("B T F"), None, None, *_DEFINITION),
    call(tokens("B 2 T K"), tokens("B 2 T K"), tokens("B 2 T 2"), tokens("B 2 T"), None, None, *_DEFINITION),
]
SAMPLES: dict[Any, list[Call]] = {
    ops.leaf_recurrence.default: _RECURRENCES,
    ops.causal_conv1d.default: _CONVOLVED,
}

RULES = [
    Rule(
        "recurrence",
        (ops.leaf_recurrence.default,),
        infer_recurrence,
        special=special_recurrence,
        samples=SAMPLES,
    ),
    Rule(
        "convolution",
        (ops.causal_conv1d.default,),
        infer_convolution,
        special=special_convolution,
        samples=SAMPLES,
    ),
]
