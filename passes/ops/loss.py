"""Losses over private labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from treecompile.passes.rule import Facts, Infer, Rule, value_of

if TYPE_CHECKING:
    from treecompile.passes.kinds import Kinds, Value

aten = torch.ops.aten


def infer_cross_entropy(infer: Infer, node: fx.Node) -> Facts:
    """logits [M, V], target [M]: one label per position; the class dim is reduced, and so is M unless kept."""
    dims = infer.dims(node.args[0])
    out = value_of(node)
    for dim in dims if out.dim() == 0 else dims[1:2]:
        infer.mix(dim)
    return Facts([tuple(dims[:1]) if out.dim() == 1 else infer.fresh(out)])


def special_cross_entropy(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.cross_entropy(node)


RULES = [
    Rule("cross_entropy", (aten.cross_entropy_loss.default,), infer_cross_entropy, special=special_cross_entropy),
]
