"""Tensors made in the graph: their sizes are rewritten, and counting ones become columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.axes import size_of
from treecompile.passes.rule import Facts, Infer, Rule, value_of

if TYPE_CHECKING:
    from treecompile.passes.emit import Emitter

aten = torch.ops.aten


def infer_arange(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.fresh(value_of(node))
    counts = node.target is aten.arange.default or (
        node.target is aten.arange.start and node.args[0] == 0 and not isinstance(node.args[0], fx.Node)
    )
    if node.target is aten.arange.start_step:
        counts = node.args[0] == 0 and (len(node.args) < 3 or node.args[2] == 1)
    return Facts([dims], iota=dims[0] if counts else None)


def infer_full(infer: Infer, node: fx.Node) -> Facts:
    return Facts([infer.fresh(value_of(node))])


def infer_like(infer: Infer, node: fx.Node) -> Facts:
    return Facts([infer.dims(node.args[0])])


def emit_full(emitter: Emitter, node: fx.Node) -> fx.Node:
    """zeros, ones, full, new_*: the size argument is the first one that is a list."""
    sizes = emitter.sizes(node)
    args = [sizes if isinstance(a, (list, tuple)) else emitter.get(a) for a in node.args]
    return emitter.call(node.target, tuple(args), node, dict(node.kwargs))


def infer_tri(infer: Infer, node: fx.Node) -> Facts:
    return Facts([infer.dims(node.args[0])])


def counts_from_zero(node: fx.Node) -> bool:
    value: Any = value_of(node)
    return isinstance(value, torch.Tensor) and value.dim() == 1 and bool(size_of(value.shape[0]) != 1)


RULES = [
    Rule("arange", (aten.arange.default, aten.arange.start, aten.arange.start_step), infer_arange),
    Rule(
        "full",
        (
            aten.zeros.default,
            aten.ones.default,
            aten.full.default,
            aten.empty.memory_format,
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
            aten.new_empty.default,
        ),
        infer_full,
        emit_full,
    ),
    Rule(
        "full",
        (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
        infer_like,
    ),
    Rule("triangle", (aten.tril.default, aten.triu.default), infer_tri),
]
