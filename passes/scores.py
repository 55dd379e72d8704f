"""Attention written out: matmul, scale, softcap, mask, sinks, softmax and matmul, recognised op by op."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.masks import MASKED, choose
from treecompile.passes.ops.views import arg, axis_index
from treecompile.passes.reasons import Refusal, op_name, reason_at
from treecompile.passes.rule import value_of, written_in
from treecompile.passes.sites import AttentionSite
from treecompile.passes.values import Kind, Value

if TYPE_CHECKING:
    from treecompile.passes.kinds import Kinds

__all__ = ["Scores", "WrittenAttention"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Scores:
    """Scores or probabilities under construction: matmul, scale, softcap, mask, sinks, softmax, in model order."""

    q: fx.Node
    k: fx.Node
    stage: str
    scale: tuple[tuple[str, Any], ...] = ()
    softcap: float = 0.0
    bias: tuple[Any, ...] = ()
    sinks: fx.Node | None = None


class WrittenAttention:
    """Attentions of one graph that is being classified, on their way from scores to an output.

    Args:
        kinds: of the graph.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds

    def product(self, node: fx.Node) -> Value | None:
        """``q @ k.T``: the result has the sequence axis twice."""
        out = self.kinds.dims(node)
        q, k = node.args[:2]
        is_scores = (
            len(self.kinds.seq_axes(out[-2:-1])) == 1
            and len(self.kinds.seq_axes(out[-1:])) == 1
            and all(isinstance(x, fx.Node) and self.kinds.values[x].kind is Kind.SHARED for x in (q, k))
            and not any(self.kinds.token_axes((dim,)) for dim in self.kinds.infer.facts[node].mixed)
        )
        return Value(Kind.PAIR, data=Scores(q, k, "scores")) if is_scores else None

    def step(self, node: fx.Node) -> Value:
        """One step of an attention written out: each recognised op refines the scores."""
        found = self._step(node)
        if found is None:
            raise Refusal(
                reason_at(
                    node,
                    "attention-form",
                    f"{op_name(node)} on attention scores",
                    "between q @ k.T and @ v only scale, softcap, masks, sinks, softmax and casts are understood",
                    "use scaled_dot_product_attention, or output_attentions=False",
                )
            )
        return found

    def _step(self, node: fx.Node) -> Value | None:
        target = node.target
        args = list(node.args)
        if target is operator.getitem:
            inner = self.kinds.values[args[0]].data
            if isinstance(inner, tuple) and inner[0] == "max" and args[1] == 0:
                return Value(Kind.PAIR, data=("rowmax", inner[1]))
            return (
                Value(Kind.PAIR, data=("unused", None))
                if isinstance(inner, tuple) and inner[0] == "max"
                else None
            )
        pairs = [a for a in args if isinstance(a, fx.Node) and self.kinds.values[a].kind is Kind.PAIR]
        if target is aten.cat.default:
            return self._sink_column(node)
        first = self.kinds.values[pairs[0]].data if pairs else None
        if not isinstance(first, Scores):
            return None
        name = target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else ""
        if target in (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.alias.default, aten._to_copy.default,
                      aten.contiguous.default, aten.type_as.default, aten.clone.default):  # fmt: skip
            return Value(Kind.PAIR, data=first)
        if target is aten.dropout.default and first.stage == "probs":
            return Value(Kind.PAIR, data=first)
        if first.stage == "capping":
            capped = name == "mul" and len(pairs) == 1 and first.softcap in map(written_in, args)
            return Value(Kind.PAIR, data=replace(first, stage="scores")) if capped else None
        if first.stage == "scores":
            return self._scores_step(node, name, first, pairs)
        if first.stage == "sunk" and target is aten.slice.Tensor:
            cut = (
                axis_index(arg(node, 1, "dim", 0), len(self.kinds.dims(node)))
                == len(self.kinds.dims(node)) - 1
            )
            drops_sink = arg(node, 2, "start", 0) in (0, None) and arg(node, 3, "end") == -1
            return Value(Kind.PAIR, data=replace(first, stage="probs")) if cut and drops_sink else None
        if first.stage == "probs" and name in ("matmul", "bmm") and args[0] is pairs[0]:
            return self._finish(node, first, args[1])
        return None

    def _scores_step(self, node: fx.Node, name: str, scores: Scores, pairs: list[fx.Node]) -> Value | None:
        args = list(node.args)
        other = next((a for a in args if a is not pairs[0]), None)
        raw = (
            not scores.bias and not scores.softcap and scores.sinks is None
        )  # a later factor scales those, too
        if raw and name in ("mul", "div") and self._is_number(other) and args[0] is pairs[0]:
            return Value(Kind.PAIR, data=self._scaled(scores, name, other))
        if raw and name == "mul" and self._is_number(args[0]):
            return Value(Kind.PAIR, data=self._scaled(scores, name, args[0]))
        if name == "tanh":
            cap = self._pending_cap(scores)
            return Value(Kind.PAIR, data=replace(cap, stage="capping")) if cap is not None else None
        if (
            name == "add"
            and len(pairs) == 1
            and node.kwargs.get("alpha", 1) == 1
            and isinstance(other, fx.Node)
        ):
            if self.kinds.values[other].kind is Kind.GRID:
                return Value(
                    Kind.PAIR, data=replace(scores, bias=(*scores.bias, self.kinds.masks.express(other)))
                )
            return None
        if name in ("where", "masked_fill"):
            return self._filled(node, name, scores, pairs[0])
        if (
            name in ("softmax", "_softmax")
            and axis_index(args[1], len(self.kinds.dims(node))) == len(self.kinds.dims(node)) - 1
        ):
            return Value(
                Kind.PAIR, data=replace(scores, stage="sunk" if scores.sinks is not None else "probs")
            )
        if node.target is aten.max.dim or node.target is aten.amax.default:
            dim = args[1] if isinstance(args[1], int) else args[1][0]
            if axis_index(dim, len(self.kinds.dims(pairs[0]))) != len(self.kinds.dims(pairs[0])) - 1:
                return None
            kind = "max" if node.target is aten.max.dim else "rowmax"
            return Value(Kind.PAIR, data=(kind, pairs[0]))
        if name == "sub" and len(pairs) == 2 and self.kinds.values[pairs[1]].data == ("rowmax", pairs[0]):
            return Value(Kind.PAIR, data=scores)  # softmax does not see a shift of the row
        return None

    def _filled(self, node: fx.Node, name: str, scores: Scores, pair: fx.Node) -> Value | None:
        """where(mask, scores, minimum) and scores.masked_fill(~mask, minimum)."""
        cond, fill = (node.args[0], node.args[2]) if name == "where" else (node.args[1], node.args[2])
        keep = node.args[1] is pair if name == "where" else False
        low = self.kinds.masks.express(fill)
        cond_expr = self.kinds.masks.express(cond) if isinstance(cond, fx.Node) else None
        if (
            cond_expr is None
            or low is None
            or not getattr(low, "is_number", False)
            or not float(low) <= MASKED
        ):
            return None
        bias = choose(cond_expr, 0, low) if keep else choose(cond_expr, low, 0)
        return Value(Kind.PAIR, data=replace(scores, bias=(*scores.bias, bias)))

    def _is_number(self, x: Any) -> bool:
        if isinstance(x, (int, float)):
            return True
        if not isinstance(x, fx.Node):
            return False
        if not is_tensor(x):
            return True
        return self.kinds.values[x].kind is Kind.UNIFORM and value_of(x).dim() == 0

    def _scaled(self, scores: Scores, name: str, factor: Any) -> Scores:
        return replace(scores, scale=(*scores.scale, (name, factor)))

    def _pending_cap(self, scores: Scores) -> Scores | None:
        """tanh after a division by c: softcap c, confirmed by the multiplication that follows."""
        if scores.bias or not scores.scale or scores.softcap:
            return None
        name, factor = scores.scale[-1][0], written_in(scores.scale[-1][1])
        if name != "div" or not isinstance(factor, (int, float)):
            return None
        return replace(scores, scale=scores.scale[:-1], softcap=float(factor))

    def _sink_column(self, node: fx.Node) -> Value | None:
        """cat([scores, sinks expanded to one column], -1)."""
        parts = list(node.args[0])
        if (
            len(parts) != 2
            or axis_index(arg(node, 1, "dim", 0), len(self.kinds.dims(node)))
            != len(self.kinds.dims(node)) - 1
        ):
            return None
        scores = self.kinds.values[parts[0]].data
        sinks = self._sink_vector(parts[1])
        if not isinstance(scores, Scores) or scores.stage != "scores" or sinks is None:
            return None
        return Value(Kind.PAIR, data=replace(scores, sinks=sinks))

    def _sink_vector(self, node: Any) -> fx.Node | None:
        """The [heads] weight behind reshape(1, heads, 1, 1).expand(...)."""
        while isinstance(node, fx.Node) and node.target in (
            aten.expand.default,
            aten.reshape.default,
            aten.view.default,
        ):
            if self.kinds.values[node.args[0]].kind is Kind.UNIFORM and value_of(node.args[0]).dim() == 1:
                return node.args[0]
            node = node.args[0]
        return None

    def _finish(self, node: fx.Node, scores: Scores, v: fx.Node) -> Value:
        spec = self.kinds.attentions.classify(node, scores.bias)
        site = AttentionSite(
            scores.q, scores.k, v, spec, scores.scale, scores.softcap, scores.sinks, transposed_k=True
        )
        return self.kinds.attentions.add(node, site)


def is_tensor(node: fx.Node) -> bool:
    """Whether a node holds a tensor, or several."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)
