"""Reductions, normalisations and sorts: local when along features; over all tokens they are weighted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.axes import Dim, Dims, fresh
from treecompile.passes.ops.views import arg, axis_index
from treecompile.passes.rule import Facts, Infer, Rule, outputs_of, value_of

if TYPE_CHECKING:
    from treecompile.passes.kinds import Kinds, Value

aten = torch.ops.aten


def reduced(node: fx.Node, rank: int) -> list[int]:
    """The dims that a reduction removes."""
    which = arg(node, 1, "dim")
    if isinstance(which, (bool, torch.dtype)):
        which = None
    if which is None or (isinstance(which, (list, tuple)) and not which):
        return list(range(rank))
    return [axis_index(d, rank) for d in ([which] if isinstance(which, int) else which)]


def _reduce(dims: Dims, gone: list[int], rank_out: int) -> Dims:
    if rank_out == len(dims):
        return tuple(() if d in gone else dim for d, dim in enumerate(dims))
    return tuple(dim for d, dim in enumerate(dims) if d not in gone)


def infer_reduction(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    full = node.target in FULL
    gone = list(range(len(dims))) if full else reduced(node, len(dims))
    for d in gone:
        infer.mix(dims[d])
    return Facts([_reduce(dims, gone, value.dim()) for value in outputs_of(node)])


def infer_norm(infer: Infer, node: fx.Node) -> Facts:
    """linalg_vector_norm(x, ord, dim, keepdim)."""
    dims = infer.dims(node.args[0])
    which = arg(node, 2, "dim")
    gone = list(range(len(dims))) if which is None else [axis_index(d, len(dims)) for d in which]
    for d in gone:
        infer.mix(dims[d])
    return Facts([_reduce(dims, gone, value_of(node).dim())])


def infer_along(infer: Infer, node: fx.Node) -> Facts:
    """softmax, log_softmax, cumsum: same shape, mixed along one dim."""
    dims = infer.dims(node.args[0])
    at = axis_index(arg(node, 1, "dim"), len(dims))
    infer.mix(dims[at])
    return Facts([dims])


def infer_sort(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    at = axis_index(_sort_dim(node), len(dims))
    infer.mix(dims[at])
    values = outputs_of(node)
    same = value_of(node.args[0]).shape[at] == values[0].shape[at]
    dim: Dim = dims[at] if same else fresh(values[0].shape[at])
    return Facts([(*dims[:at], dim, *dims[at + 1 :]) for _ in values])


def _sort_dim(node: fx.Node) -> int:
    if node.target is aten.topk.default:
        return int(arg(node, 2, "dim", -1))
    if node.target is aten.sort.stable:
        return int(arg(node, 2, "dim", -1))
    return int(arg(node, 1, "dim", -1))


def infer_layer_norm(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    count = len(node.args[1])
    for d in range(len(dims) - count, len(dims)):
        infer.mix(dims[d])
    for extra in node.args[2:4]:
        if isinstance(extra, fx.Node):
            infer.broadcast(dims, infer.dims(extra))
    return Facts([dims])


def special_reduction(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.weighted_reduction(node)


def special_softmax(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.attention_softmax(node)


def special_max(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.attention_max(node)


FULL: tuple[Any, ...] = (aten.sum.default, aten.mean.default, aten.max.default, aten.min.default)

RULES = [
    Rule(
        "reduction",
        (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
        infer_reduction,
        special=special_reduction,
    ),
    Rule(
        "reduction",
        (
            aten.amax.default,
            aten.amin.default,
            aten.max.default,
            aten.min.default,
            aten.logsumexp.default,
            aten.var.correction,
            aten.std.correction,
            aten.var_mean.correction,
            aten.prod.dim_int,
            aten.any.dim,
            aten.all.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.min.dim,
        ),
        infer_reduction,
    ),
    Rule("reduction", (aten.max.dim,), infer_reduction, special=special_max),
    Rule("reduction", (aten.linalg_vector_norm.default,), infer_norm),
    Rule("softmax", (aten.softmax.int, aten._softmax.default), infer_along, special=special_softmax),
    Rule("softmax", (aten.log_softmax.int, aten._log_softmax.default), infer_along),
    Rule("scan", (aten.cumsum.default, aten.cumprod.default), infer_along),
    Rule("sort", (aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default), infer_sort),
    Rule("norm", (aten.layer_norm.default, aten.rms_norm.default), infer_layer_norm),
]
