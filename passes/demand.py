"""Which masked positions does anything downstream read?

A padded position may be dropped from the tree only where nothing reads what the captured graph would have computed
there. This pass walks the dense tail from each value that leaves the packed graph and writes, as a boolean grid value,
the positions that are read: a product with a loss mask reads where the mask is not zero, a cross-entropy where the
label is not ignored, anything unknown everywhere. A graph output is zero at padding, but for the positions that a loss
outside of the graph would read: `Demand.shown`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from treecompile.passes.axes import Axis, axes_of, resolve, size_of
from treecompile.passes.kinds import Kinds
from treecompile.passes.ops.pointwise import tensor_args
from treecompile.passes.ops.views import arg
from treecompile.passes.rule import lookup, value_of
from treecompile.passes.values import Kind
from treecompile.runtime import demand as runtime
from treecompile.runtime.program import WHOLE, Region

__all__ = ["EVERYWHERE", "NOWHERE", "Demand"]

aten = torch.ops.aten
EVERYWHERE = "*"
NOWHERE = ""
# What the axes of a value count.
_ROW, _POSITION, _FEATURE = range(3)
_LOCAL = ("pointwise", "view", "slice", "reduction", "softmax", "norm", "linear", "rearrange")
_CHEAP = ("pointwise", "view", "slice", "reduction", "full", "arange", "scan", "join")
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.default, aten.squeeze.dims, aten.flatten.using_ints, aten.contiguous.default, aten.clone.default,
}  # fmt: skip


class Demand:
    """Demand of one classified graph.

    Args:
        kinds: the graph; the nodes that compute the demand are appended to it, before its output.

    Attributes:
        shown: whether values by position leave the graph, seen by `of`.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self._output = next(n for n in kinds.graph.nodes if n.op == "output")
        self.shown = False
        self._early: dict[fx.Node, bool] = {}
        self._places: dict[tuple[object, ...], int] = {}
        self._begun: list[int] = []

    def of(self, frontier: Iterable[fx.Node]) -> Any:
        """Grid positions at which any of these values is read: NOWHERE, EVERYWHERE or a boolean [B, T] node."""
        total: Any = NOWHERE
        for node in frontier:
            value = self.kinds.values[node]
            if value.form == "weighted":
                return EVERYWHERE
            source = value.data[0] if value.form in ("gather", "cross_entropy") else node
            region = self.kinds.region(source)
            if region is None:
                continue
            places = map(self._place, axes_of(self.kinds.dims(source)))
            self._begun = [place for place in places if place != _FEATURE]
            if value.form == "gather":
                self._note_picked(source, node)
            read = self._labels(node, region) if value.form == "cross_entropy" else self._read(node, region)
            if read == EVERYWHERE and region == WHOLE:
                return EVERYWHERE
            if read == EVERYWHERE:
                read = self._call(runtime.everywhere, region)
            if read != NOWHERE:
                total = self._either(total, self._call(runtime.to_grid, region, read))
        return total

    # ---- walking the tail -----------------------------------------------------------------------------------------

    def _read(self, node: fx.Node, region: Region) -> Any:
        total: Any = NOWHERE
        for user in node.users:
            if user.op == "output":
                self.shown = True
                continue
            if self.kinds.values.get(user) is None:
                continue
            if self.kinds.values[user].kind is not Kind.PRIVATE:
                continue
            total = self._either(total, self._through(node, user, region))
        return total

    def _through(self, node: fx.Node, user: fx.Node, region: Region) -> Any:
        """What `user` reads of `node`."""
        form = self.kinds.values[user].form
        if form == "cross_entropy":
            return NOWHERE  # counted at the loss itself
        if form == "gather":
            return NOWHERE
        if user.target in _RESHAPES:
            return self._read(user, region)
        if not self._local(node, user):
            return EVERYWHERE
        return self._both(self._read(user, region), self._factor(node, user, region))

    def _local(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether each position of `user` reads one position of `node`, its own."""
        rule, facts = lookup(user.target), self.kinds.infer.facts[user]
        if rule is None or facts.opaque or rule.family not in _LOCAL:
            return False
        axes = axes_of(self.kinds.dims(node))
        if not self._complete(map(self._place, axes)):
            return False
        tokens = {a.key() for a in axes if self._place(a) != _FEATURE}
        kept = {a.key() for a in axes_of(dim for out in facts.outs for dim in out)}
        return tokens <= kept and tokens.isdisjoint(a.key() for a in axes_of(facts.mixed))

    def _factor(self, node: fx.Node, user: fx.Node, region: Region) -> Any:
        """Where a pointwise op can pass its operand on at all."""
        values = value_of(node), value_of(user)
        if not all(isinstance(x, torch.Tensor) for x in values) or values[0].shape != values[1].shape:
            return EVERYWHERE
        name = (
            user.target._schema.name.removeprefix("aten::")
            if isinstance(user.target, torch._ops.OpOverload)
            else ""
        )
        if name == "mul":
            others = [a for a in user.args if isinstance(a, fx.Node) and a is not node]
            if len(others) == 1:
                return self._nonzero(others[0], node, region, False)
        if name == "where" and user.args[0] is not node:
            chosen = user.args[1] is node and user.args[2] is not node
            rejected = user.args[2] is node and user.args[1] is not node
            if chosen or rejected:
                return self._nonzero(user.args[0], node, region, rejected)
        if name == "masked_fill" and user.args[0] is node:
            return self._nonzero(user.args[1], node, region, True)
        return EVERYWHERE

    def _nonzero(self, factor: Any, node: fx.Node, region: Region, invert: bool) -> Any:
        """Where a factor of `node` is not zero. The op broadcasts: the dims of both pair from the right."""
        if not self._known(factor):
            return EVERYWHERE
        dims = [[self._place(axis) for axis in resolve(dim)] for dim in self.kinds.dims(node)]
        order = [place for places in dims for place in places]
        if order != sorted(order) or not self._complete(order):
            return EVERYWHERE
        shape = value_of(factor).shape
        paired = zip(reversed(dims), reversed(shape), strict=False)
        read = {place for places, size in paired if size_of(size) != 1 for place in places}
        if read <= {_FEATURE}:
            return EVERYWHERE
        return self._call(runtime.nonzero_in, region, factor, invert, _ROW in read, _POSITION in read)

    def _complete(self, places: Iterable[int]) -> bool:
        """Whether a value has the rows and positions of where the walk began, in that order: a view may hide them."""
        return [place for place in places if place != _FEATURE] == self._begun

    def _note_picked(self, source: fx.Node, picked: fx.Node) -> None:
        """A gather by labels has their axes: positions of another slice, one for one those of its source."""
        dims = [
            (resolve(a), resolve(b))
            for a, b in zip(self.kinds.dims(source), self.kinds.dims(picked), strict=True)
        ]
        if all(len(ours) == len(theirs) for ours, theirs in dims[:-1]):
            for ours, theirs in dims[:-1]:
                for x, y in zip(ours, theirs, strict=True):
                    self._places.setdefault(y.key(), self._place(x))

    def _place(self, axis: Axis) -> int:
        if axis.key() in self._places:
            return self._places[axis.key()]
        if self.kinds.is_batch(axis):
            return _ROW
        return _FEATURE if self.kinds.region_of_axis(axis) is None else _POSITION

    def _labels(self, node: fx.Node, region: Region) -> Any:
        """A cross-entropy reads where its label is not ignored; with reduction none, only what is read of it."""
        target = self.kinds.values[node].data[1]
        ignore = arg(node, 4, "ignore_index", -100)
        with self.kinds.graph.inserting_before(self._output):
            kept = self.kinds.graph.call_function(aten.ne.Scalar, (target, ignore))
        return self._call(runtime.nonzero_in, region, kept, False, True, True)

    # ---- algebra --------------------------------------------------------------------------------------------------

    def _known(self, node: Any) -> bool:
        """Whether a value can be had before the tree is: from inputs without a gradient, by cheap ops."""
        if not isinstance(node, fx.Node):
            return False
        if node not in self._early:
            self._early[node] = self._is_early(node)
        return self._early[node]

    def _is_early(self, node: fx.Node) -> bool:
        value, tensor = self.kinds.values[node], value_of(node)
        if value.kind is Kind.GRID or (value.kind is Kind.UNIFORM and value.pure):
            return True
        if value.kind not in (Kind.PRIVATE, Kind.UNIFORM) or getattr(tensor, "requires_grad", True):
            return False
        if node.op != "call_function":
            return node not in self.kinds.parameters
        rule = lookup(node.target)
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        cheap = rule is not None and rule.family in _CHEAP and not seeded
        return cheap and all(self._known(a) for a in tensor_args(node))

    def _call(self, function: Callable[..., Any], region: Region, *args: Any) -> fx.Node:
        steps = tuple(
            (kind, *(self.kinds.named[b] if isinstance(b, str) else b for b in bounds))
            for kind, *bounds in region
        )
        with self.kinds.graph.inserting_before(self._output):
            return self.kinds.graph.call_function(function, (*args, self.kinds.ids, *steps))

    def _either(self, a: Any, b: Any) -> Any:
        if isinstance(a, str) and isinstance(b, str):
            return EVERYWHERE if EVERYWHERE in (a, b) else NOWHERE
        if isinstance(a, str) or isinstance(b, str):
            word, node = (a, b) if isinstance(a, str) else (b, a)
            return EVERYWHERE if word == EVERYWHERE else node
        return self._join(aten.logical_or.default, a, b)

    def _both(self, a: Any, b: Any) -> Any:
        if NOWHERE in (a, b):
            return NOWHERE
        if isinstance(a, str) or isinstance(b, str):
            return b if isinstance(a, str) else a
        return self._join(aten.logical_and.default, a, b)

    def _join(self, target: Any, a: fx.Node, b: fx.Node) -> fx.Node:
        with self.kinds.graph.inserting_before(self._output):
            return self.kinds.graph.call_function(target, (a, b))
