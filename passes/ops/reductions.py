"""Reductions, normalisations and sorts: local when along features; over all tokens they are weighted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.axes import Dim, Dims, fresh
from treecompile.passes.ops.views import arg, axis_index
from treecompile.passes.rule import Facts, Infer, Rule, outputs_of, value_of
from treecompile.passes.samples import Call, call, grid, sizes, tokens, weight

if TYPE_CHECKING:
    from treecompile.passes.kinds import Kinds
    from treecompile.passes.values import Value

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


FULL: tuple[Any, ...] = (aten.sum.default, aten.mean.default, aten.max.default, aten.min.default)


_ALONG = ([2], [1], [0], [0, 1], [1, 2])
SAMPLES: dict[Any, list[Call]] = {
    **{
        op: [call(tokens(), dims) for dims in _ALONG]
        + [call(tokens(), [0, 1], True), call(tokens("BT F"), [0]), call(tokens("B T K 2"), [0, 1, 3])]
        for op in (aten.sum.dim_IntList, aten.mean.dim)
    },
    **{
        op: [call(tokens()), call(tokens("BT F"))]
        for op in (aten.sum.default, aten.mean.default, aten.max.default, aten.min.default)
    },
    **{op: [call(tokens(), dims) for dims in _ALONG] for op in (aten.amax.default, aten.amin.default)},
    aten.logsumexp.default: [call(tokens(), dims) for dims in _ALONG],
    **{
        op: [call(tokens(), dims, correction=1) for dims in _ALONG]
        for op in (aten.var.correction, aten.std.correction, aten.var_mean.correction)
    },
    **{
        op: [call(tokens(), d) for d in (2, 1, 0)]
        for op in (aten.prod.dim_int, aten.argmax.default, aten.argmin.default, aten.min.dim, aten.max.dim)
    },
    **{op: [call(tokens("B T F", "bool"), d) for d in (2, 1, 0)] for op in (aten.any.dim, aten.all.dim)},
    aten.linalg_vector_norm.default: [call(tokens(), 2.0, dims) for dims in _ALONG],
    aten.softmax.int: [call(tokens(), d) for d in (2, 1, 0)],
    aten._softmax.default: [call(tokens(), d, False) for d in (2, 1)],
    aten.log_softmax.int: [call(tokens(), d) for d in (2, 1, 0)],
    aten._log_softmax.default: [call(tokens(), d, False) for d in (2, 1)],
    **{
        op: [*(call(tokens(), d) for d in (2, 1, 0)), call(grid("B T"), 1)]
        for op in (aten.cumsum.default, aten.cumprod.default)
    },
    aten.topk.default: [call(tokens(), 2, d) for d in (2, 1, 0)],
    aten.sort.default: [call(tokens(), d) for d in (2, 1, 0)],
    aten.sort.stable: [call(tokens(), stable=True, dim=d) for d in (2, 1)],
    aten.argsort.default: [call(tokens(), d) for d in (2, 1)],
    aten.layer_norm.default: [
        call(tokens(), sizes("F"), weight("F"), weight("F")),
        call(tokens(), sizes("T F"), weight("T F")),
        call(tokens("B F T"), sizes("T")),
    ],
    aten.rms_norm.default: [call(tokens(), sizes("F"), weight("F")), call(tokens(), sizes("T F"))],
}

RULES = [
    Rule(
        "reduction",
        (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
        infer_reduction,
        special=special_reduction,
        samples=SAMPLES,
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
        samples=SAMPLES,
    ),
    Rule("reduction", (aten.max.dim,), infer_reduction, samples=SAMPLES),
    Rule("reduction", (aten.linalg_vector_norm.default,), infer_norm, samples=SAMPLES),
    Rule(
        "softmax",
        (aten.softmax.int, aten._softmax.default),
        infer_along,
        samples=SAMPLES,
    ),
    Rule("softmax", (aten.log_softmax.int, aten._log_softmax.default), infer_along, samples=SAMPLES),
    Rule("scan", (aten.cumsum.default, aten.cumprod.default), infer_along, samples=SAMPLES),
    Rule(
        "sort",
        (aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default),
        infer_sort,
        samples=SAMPLES,
    ),
    Rule("norm", (aten.layer_norm.default, aten.rms_norm.default), infer_layer_norm, samples=SAMPLES),
]
