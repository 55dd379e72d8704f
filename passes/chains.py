"""Recurrences and causal convolutions of a graph: what their operands run over, and what padding does to them.

Both read every token before them in the row, so a masked position between kept ones changes what comes after it, and
one after the last kept token changes nothing. One before the first kept token may be missing from the tree only where
it leaves every state at zero: `Chains.silent_at_start` proves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.axes import resolve
from treecompile.passes.ops.views import arg
from treecompile.passes.reasons import Refusal, reason_at
from treecompile.passes.rule import value_of
from treecompile.passes.values import Kind, Value
from treecompile.runtime.program import WHOLE

if TYPE_CHECKING:
    from treecompile.passes.kinds import Kinds

__all__ = ["Chains"]

aten = torch.ops.aten
ops = torch.ops.treecompile

Masked = tuple[fx.Node, bool]

# Functions of one value with f(0) = 0 and a slope there, by name.
_FIXED = {
    "silu", "gelu", "relu", "tanh", "neg", "abs", "sin", "square", "erf", "expm1", "sign", "leaky_relu", "mish",
    "elu", "hardswish", "relu6", "alias", "contiguous", "clone", "detach", "to", "_to_copy", "type_as",
    "lift_fresh_copy", "dropout", "feature_dropout",
}  # fmt: skip
# Views and reductions of one value: zero where all of it is.
_SPREAD = {
    "view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze",
    "permute", "transpose", "t", "mT", "expand", "expand_as", "repeat", "repeat_interleave", "slice", "select", "split",
    "split_with_sizes", "chunk", "unbind", "sum", "mean", "cumsum", "getitem",
}  # fmt: skip
# Views that leave a truth value what it is, where they keep its axes.
_SAME = {
    "alias", "contiguous", "clone", "detach", "lift_fresh_copy", "view", "reshape", "_unsafe_view", "unsqueeze",
    "squeeze",
}  # fmt: skip

# Arguments that say which entry is read.
_INDEX = {
    aten.embedding.default: (1,),
    aten.gather.default: (2,),
    aten.index_select.default: (2,),
    aten.index.Tensor: (1,),
    aten.one_hot.default: (0,),
    aten.cross_entropy_loss.default: (1,),
}


class Chains:
    """The recurrences and convolutions of one graph that is being classified.

    Args:
        kinds: of the graph.

    Attributes:
        nodes: those that run over the tokens, in graph order.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.nodes: list[fx.Node] = []

    # ---- deciding -------------------------------------------------------------------------------------------------

    def recurrence(self, node: fx.Node) -> Value:
        """A call of the leaf.

        Raises:
            Refusal: an operand that does not run over the tokens, or is broadcast over the heads.
        """
        if not _fits(*(None if x is None else value_of(x).shape for x in node.args[:6])):
            raise Refusal(
                reason_at(
                    node,
                    "recurrence-operand",
                    "the operands of a recurrence differ in their heads or channels",
                    "packed tokens are given one decay and one step size for each head of the values",
                    "expand them to the heads of the values",
                )
            )
        for operand in node.args[:6]:
            if operand is not None and not self._runs(operand, 1):
                raise Refusal(
                    self.kinds.values[operand].reason
                    or reason_at(
                        node,
                        "recurrence-operand",
                        "an operand of a recurrence does not run over the tokens",
                        "one row of it must belong to one token, and its state starts from zero at the first",
                        "run it over the whole sequence, and cut its result",
                    )
                )
        self.nodes.append(node)
        return Value(Kind.SHARED, form="recurrence")

    def convolution(self, node: fx.Node) -> Value | None:
        """A causal convolution; None where it does not run along the tokens."""
        x, *weights = node.args[:3]
        dims = self.kinds.dims(x)
        if self.kinds.token_axes(dims[1:2]):
            return Value(Kind.PRIVATE, reason=self.kinds.mixing_reason(node, dims[1]))
        if not self.kinds.token_axes(dims[2:]):
            return None
        uniform = all(w is None or self.kinds.values[w].kind is Kind.UNIFORM for w in weights)
        if not self._runs(x, 2) or not uniform:
            return None
        self.nodes.append(node)
        return Value(Kind.SHARED, form="convolution")

    def _runs(self, x: fx.Node, at: int) -> bool:
        """Whether a value has the batch as its first dim, the whole sequence at `at`, and no tokens elsewhere."""
        dims = self.kinds.dims(x)
        along = resolve(dims[at])
        return (
            self.kinds.values[x].kind is Kind.SHARED
            and len(along) == 1
            and self.kinds.region_of_axis(along[0]) == WHOLE
            and not self.kinds.is_batch(along[0])
            and all(self.kinds.is_batch(axis) for axis in resolve(dims[0]))
            and len(resolve(dims[0])) <= 1
            and not self.kinds.token_axes(dim for i, dim in enumerate(dims) if i not in (0, at))
        )

    # ---- padding --------------------------------------------------------------------------------------------------

    def visible(self) -> frozenset[Masked]:
        """The padding of a graph without an attention: a mask that silences every chain wherever it is zero.

        A mask is an argument, one integer or truth value for each position, and no index: ids and labels say more
        than whether they are zero, and weights of tokens are numbers.
        """
        indices = self._indices()
        for node in self.kinds.graph.nodes:
            found = self._mask(node) if node in self.kinds.values else None
            if (
                found is not None
                and found[0].op == "placeholder"
                and found[0] not in indices
                and not value_of(found[0]).is_floating_point()
                and self.silent_at_start(frozenset({found}))
            ):
                return frozenset({found})
        return frozenset()

    def _indices(self) -> set[fx.Node]:
        """Integers that some op looks something up by, and what they are cast, cut or shifted from."""
        stack = [
            found
            for node in self.kinds.graph.nodes
            for arg in (node.args[at] for at in _INDEX.get(node.target, ()))
            for found in (arg if isinstance(arg, (list, tuple)) else [arg])
        ]
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            value = value_of(node) if isinstance(node, fx.Node) else None
            if node in seen or not isinstance(value, torch.Tensor) or value.dtype is torch.bool:
                continue
            seen.add(node)
            if _name(node) not in ("cumsum", "eq", "ne"):  # counts of a mask are positions
                stack += node.args[:1]
        return seen

    def silent_at_start(self, visible: frozenset[Masked]) -> bool:
        """Whether positions before the first visible one leave the state of every chain at zero."""
        if len(visible) != 1:
            return False
        root = self._root(*next(iter(visible)))
        zeros = _Zeros(self, root)
        return all(zeros.silent(node) for node in self.nodes)

    def _mask(self, node: fx.Node) -> Masked | None:
        """A value of the grid as (argument or op, inverted) of which it says whether it is zero."""
        kinds = self.kinds
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or kinds.values[node].kind is not Kind.GRID:
            return None
        dims = kinds.dims(node)
        axes = [axis for dim in dims for axis in resolve(dim)]
        sound = kinds.fits_grid(dims) and len(kinds.seq_axes(dims)) == 1 and kinds.region(node) == WHOLE
        if not sound or len(axes) != (1 if kinds.batch is None else 2):
            return None
        return self._root(node, False)

    def _root(self, node: fx.Node, inverted: bool) -> Masked:
        """What a truth value is computed from by casts, views that keep its axes, and negations."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            source, name = node.all_input_nodes[0], _name(node)
            if not isinstance(value_of(source), torch.Tensor) or not self._same_axes(node, source):
                break
            before, after = value_of(source).dtype, value_of(node).dtype
            if name in ("bitwise_not", "logical_not") and before is torch.bool:
                inverted = not inverted
            elif name in ("eq", "ne") and _is_zero(node.args[1]):
                inverted = inverted != (name == "eq")
            elif name not in _SAME and not (name in ("to", "_to_copy") and _keeps_truth(before, after)):
                break
            node = source
        return node, inverted

    def _same_axes(self, a: fx.Node, b: fx.Node) -> bool:
        one, other = ([axis.key() for dim in self.kinds.dims(n) for axis in resolve(dim)] for n in (a, b))
        return one == other

    def masks(self, node: Any, root: Masked) -> bool:
        """Whether a factor is zero wherever the mask `root` is false."""
        return isinstance(node, fx.Node) and self._mask(node) == root


class _Zeros:
    """Which values are zero at the positions before the first visible one.

    Args:
        chains: of the graph.
        mask: root of the visible bit.
    """

    def __init__(self, chains: Chains, mask: Masked) -> None:
        self.chains, self.kinds, self.mask = chains, chains.kinds, mask
        self._memo: dict[fx.Node, bool] = {}

    def silent(self, node: fx.Node) -> bool:
        """Whether what a chain adds to its state is zero there."""
        if node.target is ops.causal_conv1d.default:
            return self.at(node.args[0])
        _, k, v, _, beta = node.args[:5]
        return any(x is not None and self.at(x) for x in (k, v, beta))

    def at(self, node: Any) -> bool:
        """Whether a value is zero there."""
        if not isinstance(node, fx.Node) or node not in self.kinds.values:
            return False
        if node not in self._memo:
            self._memo[node] = False  # graphs have no cycles; said for the reader
            self._memo[node] = self._decide(node)
        return self._memo[node]

    def _decide(self, node: fx.Node) -> bool:
        if node.op != "call_function" or self.kinds.values[node].kind is not Kind.SHARED:
            return False
        tensor = isinstance(value_of(node), torch.Tensor)
        if tensor and self.kinds.region(node) != WHOLE:
            return False
        name, args = _name(node), node.args
        if name in _FIXED or name in _SPREAD:
            return self.at(args[0])
        if name == "mul":
            return any(self.at(x) or self.chains.masks(x, self.mask) for x in args[:2])
        if name == "div":
            return self.at(args[0])
        if name in ("add", "sub"):
            return all(self.at(x) or _is_zero(x) for x in args[:2])
        if name == "pow":
            return self.at(args[0]) and isinstance(args[1], (int, float)) and args[1] >= 1
        if name in ("cat", "stack"):
            return all(self.at(x) for x in args[0])
        if name == "where":
            kept, other = args[1:3]
            inverse = (self.mask[0], not self.mask[1])
            return (self.chains.masks(args[0], self.mask) and self._zero(other)) or (
                self.chains.masks(args[0], inverse) and self._zero(kept)
            ) or (self._zero(kept) and self._zero(other))  # fmt: skip
        if name == "masked_fill":
            inverse = (self.mask[0], not self.mask[1])
            return _is_zero(args[2]) and (self.at(args[0]) or self.chains.masks(args[1], inverse))
        if name in ("linear", "matmul", "mm"):
            return self._product(node)
        if name == "rms_norm":
            return self.at(args[0])
        if name == "layer_norm":
            return self.at(args[0]) and arg(node, 3, "bias") is None
        if node.target is ops.causal_conv1d.default:
            return self.at(args[0]) and args[2] is None
        if node.target is ops.leaf_recurrence.default:
            return self.silent(node) and (args[5] is None or self.at(args[5]))
        return False

    def _zero(self, x: Any) -> bool:
        if isinstance(x, fx.Node) and self.kinds.constants.get(x) == 0:
            return True
        return _is_zero(x) or self.at(x)

    def _product(self, node: fx.Node) -> bool:
        """A product of tokens with a weight, without a bias."""
        x, weight = node.args[:2]
        bias = arg(node, 2, "bias") if _name(node) == "linear" else None
        uniform = self.kinds.values[weight].kind is Kind.UNIFORM
        return bias is None and uniform and self.at(x)


def _fits(q: Any, k: Any, v: Any, gate: Any, beta: Any, skip: Any) -> bool:
    """Whether the features of the operands' shapes are those that `tree_recurrence` takes."""
    heads = v[2:3]
    return bool(
        q[2:] == k[2:]
        and v[2] % q[2] == 0
        and gate[2:] in (heads, (*heads, q[3]))
        and (beta is None or beta[2:] == heads)
        and (skip is None or skip[2:] == v[2:])
    )


def _keeps_truth(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast keeps apart zero and what is not zero: int64 may wrap in fewer bits, floats may vanish."""
    if before is after or torch.bool in (before, after):
        return True
    return not before.is_floating_point and (after.is_floating_point or after is torch.int64)


def _is_zero(x: Any) -> bool:
    return isinstance(x, (bool, int, float)) and x == 0


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name.split("::")[1])
    return getattr(target, "__name__", "")
