"""Matrix products: token-local as long as the contracted dim carries no token axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.axes import Dim, Dims
from treecompile.passes.rule import Facts, Infer, Rule
from treecompile.passes.samples import Call, call, tokens, weight

if TYPE_CHECKING:
    from treecompile.passes.kinds import Kinds
    from treecompile.passes.values import Value

aten = torch.ops.aten


def contract(infer: Infer, a: Dim, b: Dim) -> None:
    """Sum over a dim of both operands: it is mixed on either side, proved equal or not."""
    infer.pair(a, b)
    infer.mix(a)
    infer.mix(b)


def infer_linear(infer: Infer, node: fx.Node) -> Facts:
    x, weight = infer.dims(node.args[0]), infer.dims(node.args[1])
    contract(infer, x[-1], weight[-1])
    out: Dims = (*x[:-1], *weight[:-1])
    if len(node.args) > 2 and node.args[2] is not None:
        infer.pair(out[-1], infer.dims(node.args[2])[-1])
    return Facts([out])


def product(infer: Infer, a: Dims, b: Dims) -> Dims:
    """Dims of ``a @ b``."""
    if len(a) == 1 or len(b) == 1:
        row, col = len(a) > 1, len(b) > 1
        contract(infer, a[-1], b[-2] if col else b[-1])
        return (*(a[:-1] if row else ()), *((*b[:-2], b[-1]) if col else ()))
    batch = infer.broadcast(a[:-2], b[:-2])
    contract(infer, a[-1], b[-2])
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
            if letter not in right:
                infer.mix(dim)
    return Facts([tuple(letters[letter] for letter in right)])


def special_matmul(kinds: Kinds, node: fx.Node) -> Value | None:
    return kinds.written.product(node)


SAMPLES: dict[Any, list[Call]] = {
    aten.linear.default: [
        call(tokens(), weight("F F"), weight("F")),
        call(tokens("BT F"), weight("2 F")),
        call(tokens("B F T"), weight("F T")),
    ],
    aten.matmul.default: [
        call(tokens(), weight("F F")),
        call(tokens(), weight("F")),
        call(weight("2 F"), tokens("B F T")),
        call(tokens(), tokens("B F T")),
        call(tokens("B F T"), tokens()),
        call(tokens("B T K 2"), tokens("B T 2 K")),
    ],
    aten.bmm.default: [
        call(tokens(), tokens("B F T")),
        call(tokens("B F T"), tokens()),
        call(tokens(), weight("B F F")),
    ],
    aten.mm.default: [
        call(tokens("BT F"), weight("F F")),
        call(tokens("F BT"), tokens("BT F")),
        call(weight("2 F"), tokens("F BT")),
        call(tokens("BT F"), tokens("F BT")),
    ],
    aten.addmm.default: [
        call(weight("F"), tokens("BT F"), weight("F F")),
        call(tokens("BT F"), tokens("BT F"), weight("F F")),
        call(weight("F F"), tokens("F BT"), tokens("BT F")),
    ],
    aten.baddbmm.default: [
        call(tokens(), tokens(), weight("B F F")),
        call(weight("B F F"), tokens("B F T"), tokens()),
    ],
    aten.einsum.default: [
        call("btf,fg->btg", [tokens(), weight("F F")]),
        call("btf,bsf->bts", [tokens(), tokens()]),
        call("btf,btg->bfg", [tokens(), tokens()]),
        call("btf,btf->bt", [tokens(), tokens()]),
        call("btf->bf", [tokens()]),
        call("btf->tbf", [tokens()]),
    ],
}

RULES = [
    Rule("linear", (aten.linear.default,), infer_linear, samples=SAMPLES),
    Rule(
        "matmul",
        (aten.matmul.default, aten.bmm.default, aten.mm.default),
        infer_matmul,
        special=special_matmul,
        samples=SAMPLES,
    ),
    Rule("matmul", (aten.addmm.default, aten.baddbmm.default), infer_addmm, samples=SAMPLES),
    Rule("matmul", (aten.einsum.default,), infer_einsum, samples=SAMPLES),
]
