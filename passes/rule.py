"""Op rules: what one family of ops does to dims, and how it is written in the packed graph.

A rule is one value in one family file. It states the dims of the outputs, pairs the dims that the op combines element
by element, and names the dims along which it mixes elements. From these three the propagation decides, for every op
alike, whether the op is local to a token; the few families that know more (attention, slices of the sequence, token
reductions, losses) add a `special`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.axes import Axis, AxisConflict, Dim, Dims, fresh, resolve, unify
from treecompile.passes.samples import Call

if TYPE_CHECKING:
    from treecompile.passes.emit import Emitter
    from treecompile.passes.kinds import Kinds
    from treecompile.passes.values import Value

__all__ = ["Facts", "Infer", "Rule", "lookup", "sample_rules", "value_of", "written_in"]


@dataclass
class Facts:
    """What the infer walk knows of one node.

    Attributes:
        outs: dims of each output (one entry for a plain tensor).
        pairs: dims that the op combines element by element; each pair must turn out equal (or of size one).
        mixed: dims along which the op mixes elements (reductions, contractions, sorts).
        iota: for an integer value that counts its own elements, the merged dim it counts along.
        opaque: the op has no rule, or this use of it is beyond the rule.
        split: axes that a view had to cut in two.
    """

    outs: list[Dims]
    pairs: list[tuple[Dim, Dim]] = field(default_factory=list)
    mixed: list[Dim] = field(default_factory=list)
    iota: Dim | None = None
    opaque: bool = False
    split: list[Axis] = field(default_factory=list)

    @property
    def out(self) -> Dims:
        return self.outs[0]


InferRule = Callable[["Infer", fx.Node], Facts]
EmitRule = Callable[["Emitter", fx.Node], Any]
Special = Callable[["Kinds", fx.Node], "Value | None"]


@dataclass(frozen=True)
class Rule:
    """One op family.

    Attributes:
        family: name shown in reports.
        targets: the overloads it serves.
        infer: dims of the outputs; pairs and mixed dims.
        emit: writes the packed node; None copies the node with packed arguments.
        special: decides the kind where the token axes are mixed; None leaves the op to the dense tail.
        random: the op draws random numbers when it is active.
        samples: calls of each target, for the brute-force audit of ``python -m treecompile check``.
    """

    family: str
    targets: tuple[Any, ...]
    infer: InferRule
    emit: EmitRule | None = None
    special: Special | None = None
    random: bool = False
    samples: Mapping[Any, Sequence[Call]] = field(default_factory=dict, compare=False, repr=False)


def value_of(node: Any) -> Any:
    """The fake value of a node (None for a non-node)."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def written_in(node: Any) -> Any:
    """A float of the model as a number: with symbolic sizes it is symbolic, too.

    Its value becomes a guard of the capture: called where the proof depends on it.
    """
    value = value_of(node)
    return value.node.guard_float("", 0) if isinstance(value, torch.SymFloat) else node


class Infer:
    """State of the infer walk: facts per node, and the operations that rules use.

    Args:
        uncut: views that may not cut the axes of their operand (found to be token axes by an earlier walk).
    """

    def __init__(self, uncut: frozenset[fx.Node] = frozenset()) -> None:
        self.facts: dict[fx.Node, Facts] = {}
        self.uncut = uncut
        self.cuts: dict[
            Axis, fx.Node
        ] = {}  # axes that became composite because an op paired them, and the op
        self._node: fx.Node | None = None
        self._pairs: list[tuple[Dim, Dim]] = []
        self._mixed: list[Dim] = []

    def dims(self, node: Any) -> Dims:
        """Dims of a tensor argument; () for numbers and None."""
        if not isinstance(node, fx.Node):
            return ()
        facts = self.facts.get(node)
        return facts.outs[0] if facts is not None and facts.outs else ()

    def fresh(self, value: Any) -> Dims:
        """New axes for every dim of a tensor value."""
        return tuple(fresh(size) for size in value.shape)

    def pair(self, a: Dim, b: Dim) -> Dim:
        """Combine two dims element by element; returns the dim of the result."""
        if not a or not b:
            return a or b
        whole = (*resolve(a), *resolve(b))
        try:
            unify(a, b)
        except AxisConflict:
            pass
        if self._node is not None:
            self.cuts.update({axis: self._node for axis in whole if axis.parts is not None})
        self._pairs.append((a, b))
        return a

    def mix(self, dim: Dim) -> None:
        """Declare that the op mixes elements along a dim."""
        if dim:
            self._mixed.append(dim)

    def broadcast(self, *operands: Dims) -> Dims:
        """Right-aligned broadcasting of several operands."""
        rank = max((len(dims) for dims in operands), default=0)
        out: list[Dim] = []
        for back in range(rank, 0, -1):
            merged: Dim = ()
            for dims in operands:
                if len(dims) >= back:
                    merged = self.pair(merged, dims[-back])
            out.append(merged)
        return tuple(out)

    def run(self, node: fx.Node, rule: Rule | None) -> Facts:
        """Facts of one node, by its rule or, without one, as an opaque op."""
        self._pairs, self._mixed, self._node = [], [], node
        facts = rule.infer(self, node) if rule is not None else opaque(self, node)
        facts.pairs.extend(self._pairs)
        facts.mixed.extend(self._mixed)
        self.facts[node] = facts
        return facts


def outputs_of(node: fx.Node) -> list[Any]:
    """The tensor outputs of a node as a flat list."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def opaque(infer: Infer, node: fx.Node) -> Facts:
    """An op without a rule: nothing is known of its outputs, and it may mix everything."""
    mixed = [dim for arg in node.all_input_nodes for dims in _all_dims(infer, arg) for dim in dims]
    return Facts([infer.fresh(value) for value in outputs_of(node)], mixed=mixed, opaque=True)


def _all_dims(infer: Infer, node: fx.Node) -> list[Dims]:
    facts = infer.facts.get(node)
    return facts.outs if facts is not None else []


@functools.cache
def _table() -> dict[Any, Rule]:
    from treecompile.passes import ops

    table: dict[Any, Rule] = {}
    for rule in ops.RULES:
        for target in rule.targets:
            if target in table:
                raise ValueError(f"two rules for {target}: {table[target].family} and {rule.family}")
            table[target] = rule
    return table


def lookup(target: Any) -> Rule | None:
    """The rule of an op: from the table, or by the pointwise tag."""
    rule = _table().get(target)
    if rule is None and isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        from treecompile.passes.ops.pointwise import TAGGED

        return TAGGED
    return rule


def sample_rules() -> list[Rule]:
    """Every rule once, in table order."""
    return list(dict.fromkeys(_table().values()))


def flat(dims: Dims) -> Dim:
    """All axes of a value as one merged dim."""
    return tuple(axis for dim in dims for axis in resolve(dim))
