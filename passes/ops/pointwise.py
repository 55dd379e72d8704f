"""Pointwise ops: served by torch's tag, plus the overloads that are pointwise without carrying it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from treecompile.passes.rule import Facts, Infer, Rule, outputs_of
from treecompile.passes.samples import Call, Operand, call, pointwise_calls, tokens, weight

aten = torch.ops.aten

# The value of these is the value of their first argument: a counting index stays one through them.
_IDENTITY = {
    aten.alias.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.detach.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.lift_fresh_copy.default,
}

EXCEPTIONS = (
    aten.alias.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
    aten.lift_fresh_copy.default,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten.__xor__.Tensor,
    aten.floor_divide.default,
    aten.log_sigmoid.default,
    aten.isfinite.default,
    aten.square.default,
    aten.polar.default,
    aten.complex.default,
)


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """Tensor operands of a node, in order."""
    return [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]


def infer(infer: Infer, node: fx.Node) -> Facts:
    args = tensor_args(node)
    if node.target is aten.type_as.default or node.target is aten.to.other:
        args = args[:1]
    out = infer.broadcast(*(infer.dims(arg) for arg in args))
    return Facts([out] * len(outputs_of(node)), iota=_iota(infer, node, args))


def _iota(infer: Infer, node: fx.Node, args: list[fx.Node]) -> Any:
    first = infer.facts.get(args[0]) if args else None
    if first is None or first.iota is None:
        return None
    plus_zero = node.target is aten.add.Tensor and node.args[1] == 0 and isinstance(node.args[1], int)
    return first.iota if node.target in _IDENTITY or plus_zero else None


def infer_dropout(infer: Infer, node: fx.Node) -> Facts:
    return Facts([infer.dims(node.args[0])])


TAGGED = Rule("pointwise", (), infer)


def _mask() -> Operand:
    return tokens("B T F", "bool")


SAMPLES: dict[Any, list[Call]] = {
    **{op: list(pointwise_calls(op)) for op in EXCEPTIONS},
    aten.dropout.default: [call(tokens(), 0.0, True), call(tokens(), 0.5, False), call(tokens(), 0.5, True)],
    aten.feature_dropout.default: [call(tokens(), 0.0, True), call(tokens(), 0.5, True)],
    **{
        op: [call(_mask(), _mask()), call(_mask(), tokens("B T 1", "bool"))]
        for op in (aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor)
    },
    aten.where.ScalarOther: [call(_mask(), tokens(), 0.5), call(tokens("B T 1", "bool"), weight("F"), 0.5)],
    aten.where.ScalarSelf: [call(_mask(), 0.5, tokens())],
    aten.where.Scalar: [call(_mask(), 0.5, 1.5)],
}

RULES = [
    Rule("pointwise", EXCEPTIONS, infer, samples=SAMPLES),
    Rule(
        "dropout",
        (aten.dropout.default, aten.feature_dropout.default),
        infer_dropout,
        random=True,
        samples=SAMPLES,
    ),
]
