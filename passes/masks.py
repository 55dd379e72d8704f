"""Masks read from their own subgraph: which (query, key) pairs an attention may use.

A mask is turned into a sympy expression over *dims*, counted from the right so that broadcasting is free: ``col2`` is
"the column of dim -2", ``g3_b4_t1`` "grid value 3 at batch dim -4, sequence dim -1". Only where the mask meets an
attention do dims become query and key, and only conjunctions of four terms are accepted:

    k <= q                  causal
    q - k < W               sliding window
    visible[k]              padding: any boolean grid value, read at the key
    document[q] == document[k]

Anything else is refused with the expression printed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx

from treecompile.passes.axes import Axis, Dims, axes_of, resolve
from treecompile.passes.rule import Facts, value_of, written_in

__all__ = ["MaskReader", "MaskSpec", "Unproved"]

aten = torch.ops.aten
MASKED = -1e4  # an additive mask at or below this hides the pair: softmax of it is zero in every dtype


class Unproved(Exception):
    """The mask is not a conjunction that the tree can honour; the text names the expression."""


@dataclass(frozen=True)
class MaskSpec:
    """What one attention may see.

    Attributes:
        window: W of ``q - k < W`` in columns; 0 for none.
        visible: boolean grid nodes, and whether each is inverted: all must hold at the key.
        documents: integer grid nodes that must agree at query and key.
        additive: the mask was added to the scores (finite minimum) rather than applied by the kernel.
    """

    causal: bool = False
    window: int = 0
    visible: frozenset[tuple[fx.Node, bool]] = frozenset()
    documents: frozenset[fx.Node] = frozenset()
    additive: bool = False

    def merge(self, other: MaskSpec) -> MaskSpec:
        windows = [w for w in (self.window, other.window) if w]
        return MaskSpec(
            self.causal or other.causal,
            min(windows, default=0),
            self.visible | other.visible,
            self.documents | other.documents,
            self.additive or other.additive,
        )


@dataclass(frozen=True)
class Atom:
    """A symbol of a mask expression: the column or row of a dim, or a grid value at given dims."""

    kind: str
    node: fx.Node | None = None
    batch: int | None = None
    seq: int | None = None


def boolean(expr: Any) -> Any:
    """An expression as a truth value."""
    if isinstance(expr, bool):
        return sympy.true if expr else sympy.false
    return expr if _is_truth(expr) else sympy.Ne(expr, 0)


def number(expr: Any) -> Any:
    """An expression as a number: a truth value counts 1 or 0."""
    if isinstance(expr, bool) or expr is sympy.true or expr is sympy.false:
        return sympy.Integer(bool(expr))
    return sympy.Piecewise((1, expr), (0, True)) if _is_truth(expr) else expr


def _is_truth(expr: Any) -> bool:
    if isinstance(expr, sympy.Symbol):
        return bool(expr.name.startswith("p"))
    return isinstance(expr, Boolean)


def _flip(expr: Any) -> Any:
    return sympy.Not(boolean(expr))


_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.neg.default: operator.neg,
    aten.rsub.Scalar: lambda a, b: b - a,
    aten.add.Scalar: operator.add,
    aten.sub.Scalar: operator.sub,
    aten.mul.Scalar: operator.mul,
}
_COMPARE: dict[str, Callable[..., Any]] = {
    "le": sympy.Le, "lt": sympy.Lt, "ge": sympy.Ge, "gt": sympy.Gt, "eq": sympy.Eq, "ne": sympy.Ne,
}  # fmt: skip
_LOGIC: dict[Any, Callable[..., Any]] = {
    aten.bitwise_and.Tensor: sympy.And,
    aten.logical_and.default: sympy.And,
    aten.__and__.Tensor: sympy.And,
    aten.bitwise_or.Tensor: sympy.Or,
    aten.logical_or.default: sympy.Or,
    aten.__or__.Tensor: sympy.Or,
    aten.bitwise_not.default: _flip,
    aten.logical_not.default: _flip,
}
_SAME = {
    aten.alias.default, aten.contiguous.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default,
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.expand.default,
    aten.type_as.default, aten.slice.Tensor, aten.expand_as.default,
}  # fmt: skip
# Bits of integers are not truth values: 1 & 2 is zero.
_BITWISE = {
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default, aten.__and__.Tensor, aten.__or__.Tensor,
}  # fmt: skip
# Types that hold every column exactly: a count in another type may round or wrap.
_EXACT = {torch.int32, torch.int64, torch.float32, torch.float64}
_RESHAPES = {
    aten.unsqueeze.default, aten.select.int, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.view.default, aten.reshape.default, aten._unsafe_view.default,
}  # fmt: skip
_FULL = {
    aten.ones.default: True, aten.new_ones.default: True, aten.ones_like.default: True,
    aten.zeros.default: False, aten.new_zeros.default: False, aten.zeros_like.default: False,
}  # fmt: skip
_FILLED = {aten.full.default, aten.new_full.default, aten.full_like.default}


@dataclass
class MaskReader:
    """Reads mask expressions of one graph.

    Args:
        facts: infer facts per node.
        batch, seq: the batch axis (None for one row) and the sequence axis.
        is_grid: whether a node is computed from per-batch inputs before the packed graph runs.
        constant: the value of a scalar tensor constant of the graph, or None.
    """

    facts: dict[fx.Node, Facts]
    batch: Axis | None
    seq: Axis
    is_grid: Callable[[fx.Node], bool]
    constant: Callable[[fx.Node], Any]
    atoms: dict[sympy.Symbol, Atom] = field(default_factory=dict)
    _memo: dict[fx.Node, Any] = field(default_factory=dict)
    _forms: dict[fx.Node, str] = field(default_factory=dict)
    _first: dict[str, fx.Node] = field(default_factory=dict)

    # ---- expressions ----------------------------------------------------------------------------------------------

    def express(self, node: Any) -> Any:
        """The expression of a value over its dims, or None where the algebra does not reach."""
        node = written_in(node)
        if not isinstance(node, fx.Node):
            return None if node is None else sympy.sympify(node)
        if node not in self._memo:
            self._memo[node] = self._collapse(node, self._build(node))
        return self._memo[node]

    def _collapse(self, node: fx.Node, expr: Any) -> Any:
        """Anything computed from grid values alone is itself a grid value, whatever its formula."""
        if expr is not None and not any(self.atoms[s].kind == "grid" for s in _symbols(expr)):
            return expr
        placed = self._place(self.facts[node].out) if node in self.facts and self.facts[node].outs else None
        if placed is None or not self.is_grid(node):
            return expr
        if expr is not None and isinstance(expr, sympy.Symbol):
            return expr
        if (
            expr is not None
            and value_of(node).is_floating_point()
            and all(_is_truth(s) for s in _symbols(expr))
        ):
            return expr  # an additive mask made from a padding mask: the levels matter
        return self._atom(
            Atom("grid", self.canonical(node), *placed), truth=value_of(node).dtype is torch.bool
        )

    def canonical(self, node: fx.Node) -> fx.Node:
        """The first node that computes the same value: models build one mask per kind of layer, from scratch."""
        return self._first.setdefault(self._form(node), node)

    def _form(self, node: fx.Node) -> str:
        if node not in self._forms:
            if node.target in _RESHAPES and self._same_axes(node, node.args[0]):
                self._forms[node] = self._form(node.args[0])  # dims of size one do not change the value
            elif (
                node.op == "call_function"
                and self.facts[node].iota is not None
                and self._count(node) is not None
            ):
                self._forms[node] = f"count {value_of(node).dtype}"
            elif node.op == "call_function":
                args = fx.map_arg((node.args, node.kwargs), lambda n: self.canonical(n))
                self._forms[node] = f"{node.target}{args}"
            else:
                self._forms[node] = node.name
        return self._forms[node]

    def _same_axes(self, a: fx.Node, b: fx.Node) -> bool:
        one, other = ([axis.key() for axis in axes_of(self.facts[n].out)] for n in (a, b))
        return one == other

    def _place(self, dims: Dims) -> tuple[int | None, int | None] | None:
        """Batch and sequence dims (from the right) of a value that has at most one of each and nothing else."""
        batch = seq = None
        for back in range(1, len(dims) + 1):
            axes = resolve(dims[-back])
            if not axes:
                continue
            if len(axes) != 1:
                return None
            if axes[0].key() == self.seq.key() and seq is None:
                seq = back
            elif self.batch is not None and axes[0].key() == self.batch.key() and batch is None:
                batch = back
            else:
                return None
        return (batch, seq) if seq is not None else None

    def _atom(self, atom: Atom, truth: bool = False) -> sympy.Symbol:
        for symbol, known in self.atoms.items():
            if known == atom:
                return symbol
        prefix = {"column": "col", "row": "row", "grid": "p" if truth else "g"}[atom.kind]
        serial = sum(known.kind == "grid" for known in self.atoms.values())
        name = (
            f"{prefix}{serial}_b{atom.batch}_t{atom.seq}"
            if atom.kind == "grid"
            else f"{prefix}{atom.seq or atom.batch}"
        )
        symbol = sympy.Symbol(name) if truth else sympy.Symbol(name, integer=True)
        self.atoms[symbol] = atom
        return symbol

    def _build(self, node: fx.Node) -> Any:
        target = node.target
        if node.op == "placeholder" or node.op == "get_attr":
            return self._leaf(node)
        if node.op != "call_function":
            return None
        if target in _SAME:
            return self._same(node)
        if target in _RESHAPES:
            return self._reshape(node)
        if target in (aten.permute.default, aten.transpose.int):
            return self._permute(node)
        if target in _FULL or target in _FILLED:
            fill = (
                node.args[2 if target is aten.new_full.default else 1] if target in _FILLED else _FULL[target]
            )
            dtype = value_of(node).dtype
            if isinstance(fill, fx.Node):
                return None
            if dtype is torch.bool:
                return sympy.sympify(bool(fill))
            return sympy.sympify(
                float(fill) if dtype.is_floating_point and not isinstance(fill, bool) else int(fill)
            )
        if self.facts[node].iota is not None and target in (aten.arange.default, aten.arange.start):
            return self._count(node)
        if target is aten.arange.default and value_of(node).numel() == 1:
            return sympy.Integer(0)
        if target in (aten.tril.default, aten.triu.default):
            return self._triangle(node)
        if target is aten.index.Tensor:
            return self._index(node)
        return self._compute(node)

    def _leaf(self, node: fx.Node) -> Any:
        scalar = self.constant(node)
        if scalar is not None:
            return sympy.sympify(scalar)
        return None  # _collapse makes it an atom if it is a grid value

    def _count(self, node: fx.Node) -> Any:
        axes = resolve(self.facts[node].out[0])
        if len(axes) != 1 or value_of(node).dtype not in _EXACT:
            return None
        if axes[0].key() == self.seq.key():
            return self._atom(Atom("column", seq=1))
        if self.batch is not None and axes[0].key() == self.batch.key():
            return self._atom(Atom("row", batch=1))
        return None

    def _same(self, node: fx.Node) -> Any:
        if node.target is aten.slice.Tensor and self.facts[node].out is not self.facts[node.args[0]].out:
            return None
        expr = self.express(node.args[0])
        if expr is None:
            return None
        before, after = value_of(node.args[0]).dtype, value_of(node).dtype
        if after is torch.bool:
            return boolean(expr)
        return expr if before is after or self._survives(expr, before, after) else None

    def _survives(self, expr: Any, before: torch.dtype, after: torch.dtype) -> bool:
        """Whether a cast keeps the value of an expression: it may cut fractions, round or wrap."""
        if before is torch.bool or not _symbols(expr):
            return after.is_floating_point or before is torch.bool
        counts = any(self.atoms[symbol].kind != "grid" or not _is_truth(symbol) for symbol in _symbols(expr))
        if after.is_floating_point:
            return not counts or after in _EXACT
        return after in _EXACT and (not before.is_floating_point or bool(expr.is_integer))

    def _move(self, expr: Any, moves: dict[int, int]) -> Any:
        """Rename dims (counted from the right) in an expression."""
        renamed: dict[Any, Any] = {}
        for symbol in _symbols(expr):
            atom = self.atoms[symbol]
            batch = moves.get(atom.batch) if atom.batch else None
            seq = moves.get(atom.seq) if atom.seq else None
            if (atom.batch and batch is None) or (atom.seq and seq is None):
                return None
            renamed[symbol] = self._atom(
                Atom(atom.kind, atom.node, batch, seq), truth=symbol.name.startswith("p")
            )
        return expr.xreplace(renamed) if renamed else expr

    def _reshape(self, node: fx.Node) -> Any:
        """Views that only add or drop dims of size one keep the order of the others."""
        expr = self.express(node.args[0])
        if expr is None or not _symbols(expr):
            return expr
        before, after = self.facts[node.args[0]].out, self.facts[node].out
        old = [len(before) - i for i, dim in enumerate(before) if resolve(dim)]
        new = [len(after) - i for i, dim in enumerate(after) if resolve(dim)]
        return self._move(expr, dict(zip(old, new, strict=True))) if len(old) == len(new) else None

    def _permute(self, node: fx.Node) -> Any:
        expr = self.express(node.args[0])
        rank = len(self.facts[node].out)
        if expr is None or not _symbols(expr):
            return expr
        order = list(range(rank))
        if node.target is aten.transpose.int:
            a, b = (d % rank for d in node.args[1:3])
            order[a], order[b] = order[b], order[a]
        else:
            order = [d % rank for d in node.args[1]]
        return self._move(expr, {rank - old: rank - new for new, old in enumerate(order)})

    def _triangle(self, node: fx.Node) -> Any:
        expr = self.express(node.args[0])
        dims = self.facts[node].out
        diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
        if expr is None or isinstance(diagonal, fx.Node) or any(not self._is_seq(dim) for dim in dims[-2:]):
            return None
        row, col = self._atom(Atom("column", seq=2)), self._atom(Atom("column", seq=1))
        keep = (
            sympy.Le(col, row + diagonal)
            if node.target is aten.tril.default
            else sympy.Ge(col, row + diagonal)
        )
        if value_of(node).dtype is torch.bool:
            return sympy.And(boolean(expr), keep)
        return sympy.Piecewise((number(expr), keep), (0, True))

    def _is_seq(self, dim: Any) -> bool:
        axes = resolve(dim)
        return len(axes) == 1 and axes[0].key() == self.seq.key()

    def _index(self, node: fx.Node) -> Any:
        """mask[rows, columns] with counting indices is the mask, read at other dims."""
        source = self.express(node.args[0])
        indices = list(node.args[1])
        dims = self.facts[node.args[0]].out
        if source is None or len(indices) != len(dims) or any(index is None for index in indices):
            return None
        moves: dict[int, int] = {}
        for d, index in enumerate(indices):
            if not resolve(dims[d]):
                continue
            expr = self.express(index)
            atom = self.atoms.get(expr) if isinstance(expr, sympy.Symbol) else None
            wanted = "column" if self._is_seq(dims[d]) else "row"
            if atom is None or atom.kind != wanted:
                return None
            moves[len(dims) - d] = (atom.seq if wanted == "column" else atom.batch) or 0
        return self._move(source, moves)

    def _compute(self, node: fx.Node) -> Any:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return None
        name = target._schema.name.removeprefix("aten::")
        if target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar):
            cond, a, b = (self.express(arg) for arg in node.args)
            return None if cond is None or a is None or b is None else choose(cond, a, b)
        if name == "masked_fill":
            x, cond, fill = (self.express(arg) for arg in node.args)
            return None if x is None or cond is None or fill is None else choose(cond, fill, x)
        operands = [self.express(arg) for arg in node.args if not isinstance(arg, (list, tuple))]
        if any(op is None for op in operands):
            return None
        if target in _BITWISE and value_of(node).dtype is not torch.bool:
            return None
        if target in _LOGIC:
            return _LOGIC[target](*(boolean(op) for op in operands))
        if name in _COMPARE:
            return _COMPARE[name](*(number(op) for op in operands[:2]))
        if target in _ARITHMETIC and node.kwargs.get("alpha", 1) == 1:
            if value_of(node).dtype not in _EXACT or len(operands) > 2:
                return None
            if name in ("mul", "div") and any(self._counts(op) for op in operands):
                if not all(self._counts(op) or _is_exact_factor(op, name) for op in operands):
                    return None  # products round: q / 3 * 3 may fall short of q
            return _ARITHMETIC[target](*(number(op) for op in operands))
        return None

    def _counts(self, expr: Any) -> bool:
        return any(self.atoms[symbol].kind != "grid" for symbol in _symbols(expr))

    # ---- classification -------------------------------------------------------------------------------------------

    def classify(self, expr: Any, kernel: bool = False) -> MaskSpec:
        """The terms of a mask as it meets the scores: dim -2 is the query, dim -1 the key.

        Args:
            kernel: the attention is one op, which gives zero where a query adds -inf to all keys.

        Raises:
            Unproved: with the expression.
        """
        if expr is None:
            raise Unproved("the mask is built by ops that the mask algebra cannot read")
        additive = not _is_truth(expr) and expr not in (sympy.true, sympy.false)
        truth = self._visible_where_zero(expr) if additive else expr
        spec = MaskSpec(additive=additive and not (kernel and self._adds_only_infinity(expr)))
        for term in sympy.And.make_args(
            sympy.to_nnf(truth) if truth not in (sympy.true, sympy.false) else truth
        ):
            spec = spec.merge(self._term(term, truth))
        return spec

    def _visible_where_zero(self, expr: Any) -> Any:
        """The condition under which an additive mask is zero, if it hides the pair everywhere else."""
        terms = []
        for part in sympy.Add.make_args(expr):
            folded = sympy.piecewise_fold(part)
            pieces = folded.args if isinstance(folded, sympy.Piecewise) else ((folded, sympy.true),)
            visible, taken = sympy.false, sympy.false
            for value, cond in pieces:
                level = float(value) if value.is_number else 1.0
                if level != 0.0 and not level <= MASKED:
                    raise Unproved(f"an additive mask with the value {value}: {self.show(expr)}")
                if level == 0.0:
                    visible = sympy.Or(visible, sympy.And(cond, sympy.Not(taken)))
                taken = sympy.Or(taken, cond)
            terms.append(visible)
        return sympy.And(*terms)

    def _adds_only_infinity(self, expr: Any) -> bool:
        """Whether an additive mask is zero or -inf."""
        parts = (sympy.piecewise_fold(part) for part in sympy.Add.make_args(expr))
        pieces = (part.args if isinstance(part, sympy.Piecewise) else ((part, sympy.true),) for part in parts)
        values = [value for options in pieces for value, _ in options]
        return all(value.is_number and float(value) in (0.0, -math.inf) for value in values)

    def _term(self, term: Any, whole: Any) -> MaskSpec:
        if term is sympy.true:
            return MaskSpec()
        inverted = isinstance(term, sympy.Not)
        symbol = term.args[0] if inverted else term
        atom = self.atoms.get(symbol) if isinstance(symbol, sympy.Symbol) else None
        if atom is not None and atom.kind == "grid" and atom.seq == 1 and atom.node is not None:
            return MaskSpec(visible=frozenset({(self.canonical(atom.node), inverted)}))
        if isinstance(term, sympy.core.relational.Relational):
            spec = self._relation(term)
            if spec is not None:
                return spec
        raise Unproved(
            f"the term {self.show(term)} of the mask {self.show(whole)} is not causal, window, padding or document"
        )

    def _relation(self, term: Any) -> MaskSpec | None:
        sides = [self.atoms.get(side) for side in (term.lhs, term.rhs)]
        if isinstance(term, sympy.Eq) and all(side is not None and side.kind == "grid" for side in sides):
            a, b = sides
            if a is None or b is None or a.node is None or b.node is None or {a.seq, b.seq} != {1, 2}:
                return None
            alike = self.canonical(a.node) is self.canonical(b.node)
            return MaskSpec(documents=frozenset({self.canonical(a.node)})) if alike else None
        q, k = (
            next((s for s, a in self.atoms.items() if a.kind == "column" and a.seq == d), None)
            for d in (2, 1)
        )
        if q is None or k is None or not term.free_symbols <= {q, k}:
            return None
        found = _at_most(term)
        if found is None:
            return None
        distance, strict = found
        slope = sympy.Poly(distance, q, k)
        if slope.total_degree() != 1:
            return None
        cq, ck, c = (float(slope.coeff_monomial(m)) for m in (q, k, 1))
        most = math.ceil(-c) - 1 if strict else math.floor(-c)  # of the difference of two integers
        if (cq, ck, most) == (-1, 1, 0):
            return MaskSpec(causal=True)
        if (cq, ck) == (1, -1) and most >= 0:
            return MaskSpec(window=most + 1)
        return None

    def show(self, expr: Any) -> str:
        """An expression with query and key written as such."""
        names: dict[Any, Any] = {}
        for symbol in _symbols(expr) if not isinstance(expr, bool) else ():
            atom = self.atoms[symbol]
            side = {1: "k", 2: "q"}.get(atom.seq or 0, "?")
            label = atom.node.name if atom.node is not None else "row"
            names[symbol] = sympy.Symbol(side if atom.kind == "column" else f"{label}[{side}]")
        return str(expr.xreplace(names) if names else expr)


def _symbols(expr: Any) -> Sequence[sympy.Symbol]:
    return sorted(getattr(expr, "free_symbols", ()), key=lambda s: s.name)


def choose(cond: Any, a: Any, b: Any) -> Any:
    cond = boolean(cond)
    if cond is sympy.true or cond is sympy.false:
        return a if cond is sympy.true else b
    if _is_truth(a) or _is_truth(b) or {a, b} <= {sympy.true, sympy.false}:
        return sympy.Or(sympy.And(cond, boolean(a)), sympy.And(sympy.Not(cond), boolean(b)))
    return sympy.Piecewise((a, cond), (b, True))


def _is_exact_factor(factor: Any, name: str) -> bool:
    """Whether a column times (or over) this number is exact: a whole number times, a power of two both ways."""
    if _symbols(factor):
        return False
    value = abs(float(factor))
    return (name == "mul" and value.is_integer()) or math.frexp(value)[0] == 0.5


def _at_most(term: Any) -> tuple[Any, bool] | None:
    """A relation as ``expr <= 0`` or, strictly, ``expr < 0``."""
    if isinstance(term, (sympy.Le, sympy.Lt)):
        return term.lhs - term.rhs, isinstance(term, sympy.Lt)
    if isinstance(term, (sympy.Ge, sympy.Gt)):
        return term.rhs - term.lhs, isinstance(term, sympy.Gt)
    return None
