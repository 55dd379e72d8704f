"""Matrix products: token-local as long as the contracted dim carries no token axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from treecompile.passes.axes import Dim, Dims
from treecompile.passes.rule import Facts, Infer, Rule

if TYPE_CHECKING:
    from treecompile.passes.kinds import Kinds, Value

aten = torch.ops.aten


def infer_linear(infer: Infer, node: fx.Node) -> Facts:
    x, weight = infer.dims(node.args[0]), infer.dims(node.args[1])
    infer.mix(infer.pair(x[-1], weight[-1]))
    out: Dims = (*x[:-1], *weight[:-1])
    if len(node.args) > 2 and node.args[2] is not None:
        infer.pair(out[-1], infer.dims(node.args[2])[-1])
    return Facts([out])


def product(infer: Infer, a: Dims, b: Dims) -> Dims:
    """Dims of ``a @ b``."""
    if len(a) == 1 or len(b) == 1:
        row, col = len(a) > 1, len(b) > 1
        infer.mix(infer.pair(a[-1], b[-2] if col else b[-1]))
        return (*(a[:-1] if row else ()), *((*b[:-2], b[-1]) if col else ()))
    batch = infer.broadcast(a[:-2], b[:-2])
    infer.mix(infer.pair(a[-1], b[-2]))
    return (*batch, a[-2], b[-1])


def infer_matmul(infer: Infer, node: fx.Node) -> Facts:
    return Facts([product(infer, infer.dims(node.args[0]), infer.dims(node.args[1]))])


def infer_addmm(infer: Infer, node: fx.Node) -> Facts:
    out = product(infer, infer.dims(node.args[1]), infer.dims(node.args[2]))
    return Facts([infer.broadcast(out, infer.dims(node.args[0]))])


def infer_einsum(infer: Infer, node: fx.Node) -> Facts:
    equation = str(node.args[0]).replace(" ", "")
    operands = list(node.args[1])
    left, _, right = equation.partition("->")
    if "." in equation or not right:
        return Facts([], opaque=True)
    letters: dict[str, Dim] = {}
    for term, operand in zip(left.split(","), operands, strict=True):
        for letter, dim in zip(term, infer.dims(operand), strict=True):
            letters[letter] = infer.pair(letters[letter], dim) if letter in letters else dim
    for letter, dim in letters.items():
        if letter not in right:
            infer.mix(dim)
    return Facts([tuple(letters[letter] for letter in right)])


def special_matmul(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.attention_product(node)


RULES = [
    Rule("linear", (aten.linear.default,), infer_linear),
    Rule("matmul", (aten.matmul.default, aten.bmm.default, aten.mm.default), infer_matmul, special=special_matmul),
    Rule("matmul", (aten.addmm.default, aten.baddbmm.default), infer_addmm),
    Rule("matmul", (aten.einsum.default,), infer_einsum),
]
