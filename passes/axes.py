"""Axis variables: what every dimension of every value is made of.

A *dim* is a tuple of axes, major first: ``(batch, sequence)`` is a merged ``B*T`` dim, ``()`` a dim of size one.
Axes start as fresh variables and are unified by the ops that pair them element by element (Hindley-Milner style
union-find), so that "this is the token axis" is deduced from the program and never guessed from a size: a capture
with ``B == T == hidden`` is as clear as any other.

An axis may turn out to be composite (``view`` split it): it then has ``parts``. An axis may be a *slice* of another
(``logits[:, :-1]``): it then remembers its base and bounds, and is equal to another slice only if both agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

__all__ = [
    "Axis",
    "AxisConflict",
    "Dim",
    "Dims",
    "Span",
    "axes_of",
    "hint_of",
    "resolve",
    "same_dim",
    "size_of",
    "unify",
]

_counter = itertools.count()


class AxisConflict(Exception):
    """Two dims that an op pairs cannot be the same."""


@dataclass(frozen=True)
class Span:
    """Bounds of a slice along its base axis, as written in the graph (ints, or FX nodes of symbolic integers)."""

    base: Axis
    start: Any
    stop: Any


@dataclass(eq=False)
class Axis:
    """One axis variable. Compare through :func:`resolve`, never by ``==`` on sizes."""

    size: sympy.Expr
    span: Span | None = None
    parts: tuple[Axis, ...] | None = None
    hint: int | None = None
    _parent: Axis | None = None
    serial: int = field(default_factory=lambda: next(_counter))

    def find(self) -> Axis:
        root = self
        while root._parent is not None:
            root = root._parent
        node = self
        while node._parent is not None:
            node._parent, node = root, node._parent
        return root

    def key(self) -> tuple[object, ...]:
        """Hashable identity: equal for unified axes and for equal slices of unified bases."""
        root = self.find()
        if root.span is not None:
            return ("span", root.span.base.key(), root.span.start, root.span.stop)
        return ("axis", root.serial)

    def __repr__(self) -> str:
        root = self.find()
        return f"a{root.serial}[{root.size}]"


Dim = tuple[Axis, ...]
Dims = tuple[Dim, ...]


def size_of(value: Any) -> sympy.Expr:
    """The sympy size of an int or SymInt."""
    if isinstance(value, torch.SymInt):
        # s**2 // s is s: sizes are whole, so a quotient without remainder is the quotient.
        return value.node.expr.replace(FloorDiv, _exact_quotient)
    return sympy.Integer(int(value))


def _exact_quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    ratio = sympy.cancel(a / b)
    return ratio if _is_integral(ratio) else FloorDiv(a, b)


def fresh(size: Any) -> Dim:
    """A dim of one new axis, or () for size one."""
    expr = size if isinstance(size, sympy.Expr) else size_of(size)
    return () if expr == 1 else (Axis(expr, hint=hint_of(size)),)


def hint_of(size: Any) -> int | None:
    """The size seen at capture, for a symbolic one."""
    if not isinstance(size, torch.SymInt):
        return int(size) if isinstance(size, (int, sympy.Integer)) else None
    hint = size.node.hint
    return None if hint is None else int(hint)


def alike(x: Axis, y: Axis) -> bool:
    """Whether two axes that an op pairs may be one: equal sizes, or symbols that had one value at capture.

    Dynamo gives ids and mask symbols of their own. That they agree in later batches is checked at each call.
    """
    x, y = x.find(), y.find()
    symbolic = not (isinstance(x.size, sympy.Integer) and isinstance(y.size, sympy.Integer))
    return bool(x.size == y.size) or (symbolic and x.hint is not None and x.hint == y.hint)


def resolve(dim: Dim) -> Dim:
    """A dim as unsplit root axes."""
    out: list[Axis] = []
    for axis in dim:
        root = axis.find()
        out.extend(resolve(root.parts) if root.parts is not None else (root,))
    return tuple(out)


def axes_of(dims: Iterable[Dim]) -> list[Axis]:
    return [axis for dim in dims for axis in resolve(dim)]


def product(dim: Sequence[Axis]) -> sympy.Expr:
    return sympy.Mul(*(axis.find().size for axis in dim))


def same_dim(a: Dim, b: Dim) -> bool:
    """Whether two dims are made of the same axes in the same order."""
    ra, rb = resolve(a), resolve(b)
    return len(ra) == len(rb) and all(x is y or x.key() == y.key() for x, y in zip(ra, rb, strict=True))


def unify(a: Dim, b: Dim) -> Dim:
    """Make two paired dims the same; returns the result.

    Raises:
        AxisConflict: if their factorisations cannot agree. The caller then keeps them apart, which is safe: the
            emitter refuses to pair dims that are not proved equal.
    """
    left, right = list(resolve(a)), list(resolve(b))
    while left and right:
        x, y = left.pop(0), right.pop(0)
        if x is y or x.key() == y.key():
            continue
        if alike(x, y):
            _union(x, y)
            continue
        if 1 in (x.size, y.size):  # broadcast: a slice of one column is not a factor of the sequence
            raise AxisConflict(f"{x} and {y} broadcast")
        x_rest, y_rest = _split_pair(x, y)
        if x_rest is not None:
            left.insert(0, x_rest)
        if y_rest is not None:
            right.insert(0, y_rest)
    if left or right:
        raise AxisConflict(f"{a} and {b} differ in size")
    return a


def _union(x: Axis, y: Axis) -> None:
    x, y = x.find(), y.find()
    if x is y:
        return
    if x.span is not None and y.span is not None:
        # Slices with other bounds meet on the grid only: never one axis (logits[:, :-1] against labels[:, 1:]).
        # With the same bounds what they are cut from is aligned, too (ids[:, :-1] and mask[:, :-1]).
        a, b = x.span.base.find(), y.span.base.find()
        same = (x.span.start, x.span.stop) == (y.span.start, y.span.stop)
        if same and a is not b and alike(a, b) and a.parts is None and b.parts is None:
            _union(a, b)
        if x.key() != y.key():
            raise AxisConflict(f"{x} and {y} are different slices")
    if y.span is not None:
        x, y = y, x
    if _within(y, x) or _within(x, y):
        raise AxisConflict(f"{x} is a slice of {y}")
    x.hint = y.hint if x.hint is None else x.hint
    y._parent = x


def _within(inner: Axis, outer: Axis) -> bool:
    """Whether `outer` is among the bases that `inner` is sliced from."""
    span = inner.find().span
    while span is not None:
        base = span.base.find()
        if base is outer.find():
            return True
        span = base.span
    return False


def _split_pair(x: Axis, y: Axis) -> tuple[Axis | None, Axis | None]:
    """Pair a longer with a shorter axis: the longer one becomes composite and its remainder is returned."""
    ratio = sympy.cancel(x.size / y.size)
    if _is_integral(ratio):
        rest = split(x, y)
        return rest, None
    ratio = sympy.cancel(y.size / x.size)
    if _is_integral(ratio):
        rest = split(y, x)
        return None, rest
    raise AxisConflict(f"{x} does not divide {y}")


def _quotient(a: int | None, b: int | None) -> int | None:
    """The hint of a size divided by another."""
    return a // b if a is not None and b else None


def _is_integral(ratio: sympy.Expr) -> bool:
    return bool(sympy.denom(ratio) == 1)


def split(axis: Axis, major: Axis) -> Axis:
    """Make `axis` the composite (major, rest); returns the rest."""
    axis = axis.find()
    rest = Axis(sympy.cancel(axis.size / major.size), hint=_quotient(axis.hint, major.hint))
    axis.parts = (major, rest)
    return rest


def regroup(dims: Dims, sizes: Sequence[Any]) -> Dims:
    """The dims of a view: `dims` read row-major, regrouped to `sizes`.

    Raises:
        AxisConflict: if a boundary of the new shape falls inside an axis that cannot be split there.
    """
    queue = axes_of(dims)
    wants = [size if isinstance(size, sympy.Expr) else size_of(size) for size in sizes]
    out: list[Dim] = []
    for index, want in enumerate(wants):
        taken: list[Axis] = []
        hint = hint_of(sizes[index])
        if want == 1 and queue and queue[0].find().size == 1:
            taken.append(queue.pop(0))
        while want != 1:
            if not queue:
                raise AxisConflict("a view of another size")
            axis = queue.pop(0).find()
            if axis.parts is not None:
                queue[:0] = list(resolve((axis,)))
                continue
            if axis.size == want:
                taken.append(axis)
                want = sympy.Integer(1)
            elif _is_integral(sympy.cancel(want / axis.size)):
                taken.append(axis)
                want, hint = sympy.cancel(want / axis.size), _quotient(hint, axis.hint)
            elif _is_integral(sympy.cancel(axis.size / want)):
                major = Axis(want, hint=hint)
                queue.insert(0, split(axis, major))
                taken.append(major)
                want = sympy.Integer(1)
            else:
                raise AxisConflict(f"a view cuts {axis} at {want}")
        # A slice that keeps one column has size one: it goes to a dim of size one if there is one, else it merges.
        if index + 1 == len(wants) or wants[index + 1] != 1:
            while queue and queue[0].find().parts is None and queue[0].find().size == 1:
                taken.append(queue.pop(0))
        out.append(tuple(taken))
    if queue:
        raise AxisConflict("a view of another size")
    return tuple(out)
