"""Tensors made in the graph: their sizes are rewritten, and counting ones become columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.axes import size_of
from treecompile.passes.rule import Facts, Infer, Rule, value_of
from treecompile.passes.samples import Call, call, grid, size, sizes, tokens, weight

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
    """What is kept depends on the place along both dims: packed tokens have other places."""
    dims = infer.dims(node.args[0])
    return Facts([dims], mixed=[dim for dim in dims[-2:] if dim])


def counts_from_zero(node: fx.Node) -> bool:
    value: Any = value_of(node)
    return isinstance(value, torch.Tensor) and value.dim() == 1 and bool(size_of(value.shape[0]) != 1)


SAMPLES: dict[Any, list[Call]] = {
    aten.arange.default: [call(size("T")), call(size("F"))],
    aten.arange.start: [call(0, size("T")), call(1, size("T"))],
    aten.arange.start_step: [call(0, size("T"), 1), call(0, size("T"), 2)],
    **{op: [call(sizes("B T F")), call(sizes("F"))] for op in (aten.zeros.default, aten.ones.default)},
    aten.full.default: [call(sizes("B T F"), 0.5), call(sizes("B T"), 1)],
    aten.empty.memory_format: [],
    **{
        op: [call(tokens(), sizes("B T F")), call(tokens(), sizes("F"))]
        for op in (aten.new_zeros.default, aten.new_ones.default)
    },
    aten.new_full.default: [call(tokens(), sizes("B T F"), 0.5)],
    aten.new_empty.default: [],
    **{op: [call(tokens()), call(grid("B T"))] for op in (aten.zeros_like.default, aten.ones_like.default)},
    aten.full_like.default: [call(tokens(), 0.5)],
    aten.empty_like.default: [],
    **{
        op: [call(tokens()), call(weight("F F")), call(tokens("B T T"))]
        for op in (aten.tril.default, aten.triu.default)
    },
}

RULES = [
    Rule(
        "arange",
        (aten.arange.default, aten.arange.start, aten.arange.start_step),
        infer_arange,
        samples=SAMPLES,
    ),
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
        samples=SAMPLES,
    ),
    Rule(
        "full",
        (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
        infer_like,
        samples=SAMPLES,
    ),
    Rule("triangle", (aten.tril.default, aten.triu.default), infer_tri, samples=SAMPLES),
]
