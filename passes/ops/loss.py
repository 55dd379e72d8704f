"""Losses over private labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.rule import Facts, Infer, Rule, value_of
from treecompile.passes.samples import Call, call, grid, tokens

if TYPE_CHECKING:
    from treecompile.passes.kinds import Kinds
    from treecompile.passes.values import Value

aten = torch.ops.aten


def infer_cross_entropy(infer: Infer, node: fx.Node) -> Facts:
    """logits [M, V] or [M, V, ...], target [M, ...]: the classes are reduced, and so are the others unless kept."""
    dims, target = infer.dims(node.args[0]), infer.dims(node.args[1])
    at = 1 if len(dims) > 1 else 0
    rest = [*dims[:at], *dims[at + 1 :]]
    if value_of(node.args[1]).is_floating_point():  # probabilities of the classes
        wide = [infer.pair(a, b) for a, b in zip(dims, target, strict=True)]
        rest = [*wide[:at], *wide[at + 1 :]]
    else:
        rest = [infer.pair(a, b) for a, b in zip(rest, target, strict=True)]
    infer.mix(dims[at])
    if value_of(node).dim() == len(rest):
        return Facts([tuple(rest)])
    for dim in rest:
        infer.mix(dim)
    return Facts([()])


def special_cross_entropy(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.cross_entropy(node)


SAMPLES: dict[Any, list[Call]] = {
    aten.cross_entropy_loss.default: [
        *(call(tokens("BT F"), grid("BT"), None, reduction) for reduction in (0, 1, 2)),
        call(tokens("BT F"), grid("BT"), None, 1, 2),
        call(tokens("B F T"), grid("B T")),
        call(tokens("BT F"), tokens("BT", "int")),
    ],
}

RULES = [
    Rule(
        "cross_entropy",
        (aten.cross_entropy_loss.default,),
        infer_cross_entropy,
        special=special_cross_entropy,
        samples=SAMPLES,
    ),
]
