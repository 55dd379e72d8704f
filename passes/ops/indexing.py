"""Lookups: embedding tables, gathers, advanced indexing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.axes import AxisConflict, Dim, Dims, alike, fresh, regroup, resolve
from treecompile.passes.ops.views import arg, axis_index
from treecompile.passes.rule import Facts, Infer, Rule, value_of
from treecompile.passes.samples import Call, call, grid, tokens, weight

if TYPE_CHECKING:
    from treecompile.passes.emit import Emitter
    from treecompile.passes.kinds import Kinds
    from treecompile.passes.values import Value

aten = torch.ops.aten


def infer_embedding(infer: Infer, node: fx.Node) -> Facts:
    table, index = infer.dims(node.args[0]), infer.dims(node.args[1])
    return Facts([(*index, table[1])], mixed=[table[0]] if table[0] else [])


def infer_index_select(infer: Infer, node: fx.Node) -> Facts:
    dims, index = infer.dims(node.args[0]), infer.dims(node.args[2])
    at = axis_index(node.args[1], len(dims))
    return Facts(
        [(*dims[:at], index[0] if index else (), *dims[at + 1 :])], mixed=[dims[at]] if dims[at] else []
    )


def infer_gather(infer: Infer, node: fx.Node) -> Facts:
    dims, index = infer.dims(node.args[0]), infer.dims(node.args[2])
    at = axis_index(node.args[1], len(dims))
    out = tuple(index[d] if d == at else infer.pair(index[d], dims[d]) for d in range(len(dims)))
    return Facts([out], mixed=[dims[at]] if dims[at] else [])


def indices_of(node: fx.Node) -> list[Any]:
    """The index list of aten.index, one entry per leading dim (None: the whole dim)."""
    return list(node.args[1])


def infer_index(infer: Infer, node: fx.Node) -> Facts:
    """x[i, j, ...]: a counting index over a whole dim is the identity on it; any other index mixes its dim."""
    dims, indices = infer.dims(node.args[0]), indices_of(node)
    value = value_of(node)
    tensors = [(d, index) for d, index in enumerate(indices) if index is not None]
    if any(value_of(index).dtype in (torch.bool, torch.uint8) for _, index in tensors):
        return Facts([infer.fresh(value)], mixed=[dim for dim in dims if dim], opaque=True)
    block = infer.broadcast(*(infer.dims(index) for _, index in tensors))
    for d, index in tensors:
        iota = infer.facts[index].iota
        if iota is not None and _covers(dims[d], iota):
            infer.pair(dims[d], iota)
        else:
            infer.mix(dims[d])
    where = [d for d, _ in tensors]
    rest: list[Dim] = [dim for d, dim in enumerate(dims) if d not in where]
    adjacent = where == list(range(where[0], where[0] + len(where)))
    at = where[0] if adjacent else 0
    return Facts([(*rest[:at], *block, *rest[at:])])


def _covers(dim: Dim, iota: Dim) -> bool:
    """Whether a counting index runs over the whole dim."""
    ours, theirs = resolve(dim), resolve(iota)
    if len(ours) == len(theirs) == 1:
        return alike(ours[0], theirs[0])
    try:
        regroup((dim,), [_size(iota)])
    except AxisConflict:
        return False
    return True


def _size(dim: Dim) -> Any:
    from treecompile.passes.axes import product

    return product(resolve(dim))


def special_index(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.select_rows(node)


def emit_index(emitter: Emitter, node: fx.Node) -> fx.Node:
    """Packed rows read by a count over all of them are these rows; the packed count itself says columns."""
    indexed = [
        dim
        for dim, index in zip(emitter.dims(node.args[0]), indices_of(node), strict=False)
        if index is not None
    ]
    if any(emitter.is_token_dim(dim) for dim in indexed):
        same: fx.Node = emitter.get(node.args[0])
        return same
    return emitter.copy(node)


def special_gather(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.gather_private(node)


def infer_one_hot(infer: Infer, node: fx.Node) -> Facts:
    dims: Dims = infer.dims(node.args[0])
    return Facts([(*dims, fresh(value_of(node).shape[-1]))])


def infer_scatter(infer: Infer, node: fx.Node) -> Facts:
    """scatter along a feature dim on a fresh tensor (the graph is functional here)."""
    dims, index = infer.dims(node.args[0]), infer.dims(node.args[2])
    at = axis_index(arg(node, 1, "dim"), len(dims))
    out = tuple(dims[d] if d == at else infer.pair(dims[d], index[d]) for d in range(len(dims)))
    infer.mix(dims[at])
    infer.mix(index[at])
    if len(node.args) > 3 and isinstance(node.args[3], fx.Node) and value_of(node.args[3]).dim():
        source = infer.dims(node.args[3])
        for d in range(len(dims)):
            if d != at:
                infer.pair(out[d], source[d])
    return Facts([out])


SAMPLES: dict[Any, list[Call]] = {
    aten.embedding.default: [
        call(weight("V F"), grid("B T", "V")),
        call(weight("F F"), tokens("B T", "int")),
        call(tokens("BT F"), grid("B T", "BT")),
        call(weight("T F"), grid("B T", "T")),
    ],
    aten.index_select.default: [
        call(tokens(), 2, weight("2", "int")),
        call(tokens(), 1, weight("2", "int")),
        call(tokens(), 0, weight("2", "int", "B")),
        call(weight("T F"), 0, weight("T", "int", "T")),
    ],
    aten.gather.default: [
        call(tokens(), 2, tokens("B T 1", "int")),
        call(tokens(), 2, grid("B T 1")),
        call(tokens(), -1, grid("B T F")),
        call(tokens(), 1, tokens("B T F", "int", "T")),
    ],
    aten.index.Tensor: [
        call(tokens(), [None, None, weight("2", "int")]),
        call(tokens(), [None, weight("2", "int", "T")]),
        call(tokens(), [tokens("B T", "bool")]),
        call(weight("F F"), [tokens("B T", "int")]),
    ],
    aten.one_hot.default: [call(tokens("B T", "int"), 5), call(grid("B T"), 5)],
    aten.scatter.value: [
        call(tokens(), 2, tokens("B T 1", "int"), 1.0),
        call(tokens(), 1, tokens("B T F", "int", "T"), 1.0),
    ],
    aten.scatter.src: [
        call(tokens(), 2, tokens("B T 1", "int"), tokens("B T 1")),
        call(tokens(), 1, tokens("B T F", "int", "T"), tokens()),
    ],
    aten.scatter_add.default: [
        call(tokens(), 2, tokens("B T K", "int"), tokens("B T K")),
        call(tokens(), 1, tokens("B T F", "int", "T"), tokens()),
        call(tokens(), 0, tokens("B T F", "int", "B"), tokens()),
    ],
}

RULES = [
    Rule("embedding", (aten.embedding.default,), infer_embedding, samples=SAMPLES),
    Rule("index", (aten.index_select.default,), infer_index_select, samples=SAMPLES),
    Rule("index", (aten.gather.default,), infer_gather, special=special_gather, samples=SAMPLES),
    Rule("index", (aten.index.Tensor,), infer_index, emit_index, special_index, samples=SAMPLES),
    Rule("index", (aten.one_hot.default,), infer_one_hot, samples=SAMPLES),
    Rule(
        "scatter",
        (aten.scatter.value, aten.scatter.src, aten.scatter_add.default),
        infer_scatter,
        samples=SAMPLES,
    ),
]
