"""What every value of the graph is: the walk that proves which values depend on a token's prefix only.

After the infer walk every dim is known as a tuple of axes. This walk names each value's kind:

    UNIFORM   no token axis: weights, constants
    GRID      computed from per-batch integer inputs before any weight is touched: ids, masks, positions, labels
    SHARED    per token, a function of the token's prefix: lives on packed rows
    PAIR      over (query, key): attention scores and probabilities on their way to an attention
    PRIVATE   per grid position: runs as captured, on expanded values, in the dense tail

The soundness argument is one sentence: a SHARED value is computed by token-local ops and tree attention from key
columns, and two grid positions share a packed row only if all key columns agree along their whole prefix.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from treecompile.passes.axes import Axis, Dim, Dims, hint_of, resolve, same_dim
from treecompile.passes.chains import Chains
from treecompile.passes.masks import MaskReader
from treecompile.passes.ops.pointwise import tensor_args
from treecompile.passes.ops.views import arg, axis_index
from treecompile.passes.reasons import Reason, Refusal, name_of, no_tokens, op_name, reason_at
from treecompile.passes.rule import Facts, Infer, Rule, lookup, value_of
from treecompile.passes.scores import WrittenAttention, is_tensor
from treecompile.passes.sites import Attentions, AttentionSite
from treecompile.passes.values import Kind, Value
from treecompile.runtime.program import WHOLE, Region

__all__ = ["Kinds", "Region"]

aten = torch.ops.aten


# Reading a size is not reading a value: sizes are rewritten from the dims.
_SIZES = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}


@dataclass
class Kinds:
    """The walk. Results: `values`, `keys`, `sites`, `regions` (per token axis), `uses_column`."""

    graph: fx.Graph
    infer: Infer
    parameters: set[fx.Node]
    constants: dict[fx.Node, Any] = field(default_factory=dict)
    values: dict[fx.Node, Value] = field(default_factory=dict)
    keys: dict[fx.Node, None] = field(default_factory=dict)
    sites: dict[fx.Node, AttentionSite] = field(default_factory=dict)
    batch: Axis | None = None
    seq: Axis | None = None
    uses_column: bool = False
    named: dict[str, fx.Node] = field(default_factory=dict)
    ids: fx.Node | None = None

    def __post_init__(self) -> None:
        self.attentions, self.written, self.chains = Attentions(self), WrittenAttention(self), Chains(self)

    # ---- entry ----------------------------------------------------------------------------------------------------

    def views_that_cut_tokens(self) -> frozenset[fx.Node]:
        """Views that cut the batch or sequence axis (or a slice of it) in two.

        Raises:
            Refusal: the graph has no token ids, or something other than a view cut its axes.
        """
        self._selected: dict[tuple[object, ...], Region] = {}
        self._seed()
        cut = frozenset(
            n
            for n, facts in self.infer.facts.items()
            if self.token_axes([(a,) for a in facts.split], raw=True)
        )
        for axis in (self.batch, self.seq):
            if not cut and axis is not None and axis.find().parts is not None:
                assert self.ids is not None
                cutter = self.infer.cuts.get(axis.find(), self.ids)
                raise Refusal(self._cut_reason(cutter, "pairs something with a part of"))
        return cut

    def run(self) -> None:
        """Classify every node.

        Raises:
            Refusal: the graph cannot be packed.
        """
        self._selected = {}
        self._seed()
        self.masks = MaskReader(
            self.infer.facts,
            self.batch,
            self._seq,
            lambda n: self.values[n].kind is Kind.GRID,
            self._constant,
        )
        cone = self._cone()
        self._in_cone = True
        # The cone is closed under ancestors, so that the key set is complete before anything below it is judged.
        for wanted in (True, False):
            self._in_cone = wanted
            for node in self.graph.nodes:
                if node.op != "output" and (node in cone) is wanted:
                    self.values[node] = self._decide(node)
        self._check()

    @property
    def _seq(self) -> Axis:
        assert self.seq is not None
        return self.seq

    def _seed(self) -> None:
        """The batch and sequence axes are those of the ids of the first embedding that reads a graph input."""
        lookups = [
            node.args[1]
            for node in self.graph.nodes
            if node.target is aten.embedding.default and _from_input(node.args[1])
        ]
        for ids in lookups:  # a [1, T] table of positions may come before the [B, T] ids
            axes = _unsplit(self.infer.dims(ids))
            if len(axes) == 2 and axes[0].key() != axes[1].key():
                self.ids, (self.batch, self.seq) = ids, axes
                return
        for ids in lookups:
            axes = _unsplit(self.infer.dims(ids))
            if (
                len(axes) == 1
                and value_of(ids).dim() >= 1
                and axes[0].key() == _last_axis(self.infer.dims(ids))
            ):
                # One row: the batch has no axis.
                self.ids, self.batch, self.seq = ids, None, axes[0]
                return
        for ids in lookups:
            if value_of(ids).dim() >= 1 and value_of(ids).shape[-1] == 1:
                raise Refusal(self._decoding_reason(ids))
        raise Refusal(no_tokens())

    def _cone(self) -> set[fx.Node]:
        """Everything that can reach an op that mixes tokens: its inputs are the tree key."""
        stack = [n for n in self.graph.nodes if n.op == "call_function" and self._mixes(n)]
        cone: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in cone:
                continue
            cone.add(node)
            stack.extend(node.all_input_nodes)
        return cone

    def _mixes(self, node: fx.Node) -> bool:
        rule = lookup(node.target)
        if rule is None or node not in self.infer.facts:
            return False
        if rule.family in ("attention", "recurrence"):
            return True
        return rule.family in ("matmul", "convolution") and any(
            self.token_axes((dim,)) for dim in self.infer.facts[node].mixed
        )

    # ---- axes -----------------------------------------------------------------------------------------------------

    def dims(self, node: fx.Node) -> Dims:
        return self.infer.dims(node)

    def region_of_axis(self, axis: Axis) -> Region | None:
        """The region along which a token axis runs; None for an axis that carries no tokens."""
        root = axis.find()
        if root.key() in self._selected:
            return self._selected[root.key()]
        if root.key() == self._seq.key():
            return WHOLE
        if root.span is not None:
            base = self.region_of_axis(root.span.base)
            if base is not None:
                return (*base, ("slice", self._named(root.span.start), self._named(root.span.stop)))
        return None

    def _named(self, bound: Any) -> Any:
        """A slice bound; one computed in the graph goes by the name of its node."""
        if isinstance(bound, fx.Node):
            self.named[bound.name] = bound
            return bound.name
        return bound

    def is_batch(self, axis: Axis) -> bool:
        """The batch axis, or a slice of it."""
        root = axis.find()
        while root.span is not None:
            root = root.span.base.find()
        return self.batch is not None and root.key() == self.batch.key()

    def token_axes(self, dims: Iterable[Dim], raw: bool = False) -> list[Axis]:
        """Batch and sequence axes (and slices, and selections) among dims; raw: as written, not as later cut."""
        return [
            axis
            for dim in dims
            for axis in (dim if raw else resolve(dim))
            if self.is_batch(axis) or self.region_of_axis(axis) is not None
        ]

    def seq_axes(self, dims: Iterable[Dim]) -> list[Axis]:
        return [axis for axis in self.token_axes(dims) if not self.is_batch(axis)]

    def region(self, node: fx.Node) -> Region | None:
        """The region of a SHARED value; None if it has no sequence axis."""
        axes = self.seq_axes(self.dims(node))
        return self.region_of_axis(axes[0]) if axes else None

    def fits_grid(self, dims: Dims) -> bool:
        """At most one batch and one sequence axis, in dims of their own, and nothing else."""
        axes = [resolve(dim) for dim in dims if resolve(dim)]
        flat = [axis for dim in axes for axis in dim]
        return (
            all(len(dim) == 1 for dim in axes)
            and len(self.token_axes(dims)) == len(flat)
            and sum(self.is_batch(a) for a in flat) <= 1
            and len(self.seq_axes(dims)) <= 1
        )

    def has_batch(self, node: fx.Node) -> bool:
        return any(self.is_batch(axis) for axis in self.token_axes(self.dims(node)))

    # ---- deciding -------------------------------------------------------------------------------------------------

    def _constant(self, node: fx.Node) -> Any:
        return self.constants.get(node)

    def _decide(self, node: fx.Node) -> Value:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            return self._constant_tensor(node)
        args = [a for a in node.all_input_nodes if self.values[a].kind is not Kind.OTHER]
        if not is_tensor(node):
            tensors = [] if node.target in _SIZES else [a for a in args if is_tensor(a)]
            if any(self.values[a].kind in (Kind.SHARED, Kind.PAIR, Kind.PRIVATE) for a in tensors):
                return Value(Kind.PRIVATE, reason=self._scalar_reason(node))
            return Value(Kind.OTHER)
        rule = lookup(node.target)
        self._refuse_random(node, rule)
        for a in args:
            if self.values[a].kind is Kind.PRIVATE:
                return self._private(node, self.values[a].reason)
        if any(self.values[a].kind is Kind.PAIR for a in args):
            return self.written.step(node)
        facts = self.infer.facts[node]
        tokens = self.token_axes(dim for out in facts.outs for dim in out)
        if all(self.values[a].kind is Kind.UNIFORM for a in args) and not tokens:
            return Value(Kind.UNIFORM, pure=all(self.values[a].pure for a in args))
        features = self._has_features(facts)
        if not features and all(self._pre_evaluable(a) or self.values[a].pure for a in args):
            return Value(Kind.GRID)
        if (
            features
            and args
            and all(self._pre_evaluable(a) for a in args)
            and not self._local(node, rule, args)
        ):
            return Value(Kind.GRID)
        if rule is not None and rule.special is not None:
            found = rule.special(self, node)
            if found is not None:
                return found
        blocked = self._blocked(node, rule, args)
        if blocked is None:
            return self._shared(node, rule, args)
        return self._private(node, blocked)

    def _placeholder(self, node: fx.Node) -> Value:
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return Value(Kind.OTHER)
        dims = self.dims(node)
        tokens = self.token_axes(dims)
        integral = not (value.is_floating_point() or value.is_complex())
        if not tokens:
            return Value(Kind.UNIFORM, pure=integral and node not in self.parameters)
        batched = any(self.is_batch(axis) for axis in tokens)
        if node in self.parameters or value.requires_grad or not self.fits_grid(dims):
            if batched or len(self.seq_axes(dims)) != 1:
                if integral and not value.requires_grad:
                    return Value(Kind.GRID)
                return Value(Kind.PRIVATE, reason=self._input_reason(node))
            return self._as_table(node)
        return Value(Kind.GRID)

    def _as_table(self, node: fx.Node) -> Value:
        """A weight along the whole sequence: its rows are read by column."""
        along = [dim for dim in self.dims(node) if self.seq_axes((dim,))]
        if self.region(node) != WHOLE or len(resolve(along[0])) != 1:
            return Value(Kind.PRIVATE, reason=self._sliced_table(node))
        self.uses_column = True
        return Value(Kind.SHARED, form="table")

    def _sliced_table(self, node: fx.Node) -> Reason:
        return reason_at(
            node, "misaligned", f"{name_of(node)} runs over a part of the sequence, or merged with other dims",
            "a table by column has one row for each column", "give the table a dim of its own for the column",
        )  # fmt: skip

    def _constant_tensor(self, node: fx.Node) -> Value:
        """A tensor written in the model; one along the sequence is a grid value, or a table by column."""
        value, dims = value_of(node), self.dims(node)
        if not isinstance(value, torch.Tensor) or not self.token_axes(dims):
            return Value(Kind.UNIFORM, pure=True)
        if self.fits_grid(dims):
            return Value(Kind.GRID)
        if len(self.token_axes(dims)) == 1 and len(self.seq_axes(dims)) == 1:
            return self._as_table(node)
        return Value(Kind.PRIVATE, reason=self._input_reason(node))

    def _pre_evaluable(self, node: fx.Node) -> bool:
        value = self.values[node]
        return value.kind is Kind.GRID or (value.kind is Kind.UNIFORM and value.pure)

    def _has_features(self, facts: Facts) -> bool:
        """Whether an output has an axis that is neither batch nor sequence."""
        return any(
            self.region_of_axis(axis) is None and not self.is_batch(axis)
            for out in facts.outs
            for dim in out
            for axis in resolve(dim)
        )

    def _local(self, node: fx.Node, rule: Rule | None, args: list[fx.Node]) -> bool:
        return self._blocked(node, rule, args) is None

    def _blocked(self, node: fx.Node, rule: Rule | None, args: list[fx.Node]) -> Reason | None:
        """Why the op is not local to a token; None if it is."""
        facts = self.infer.facts[node]
        name = op_name(node)
        if rule is None or facts.opaque:
            read = (dim for a in args for dim in self.dims(a))
            if self.token_axes([*read, *(dim for out in facts.outs for dim in out)]):
                return reason_at(
                    node,
                    "no-rule",
                    f"no tree rule for {name}",
                    "it reads values that carry tokens, and without a rule it may mix them",
                    "move it after the model or out of the compiled region; the ops before it stay packed",
                )
        for dim in facts.mixed:
            if self.token_axes((dim,)):
                return self.mixing_reason(node, dim)
        if self._makes_tokens(node, rule, args):
            return reason_at(
                node, "sequence-sized", f"{name} makes a value along the sequence out of values that are not",
                "its length is written in the graph, and packed rows are not the columns of the batch",
                "read a table by column (table[:length], or an embedding of positions)",
            )  # fmt: skip
        if node.target is aten.index.Tensor and self._reads_grid(node):
            return self.mixing_reason(node, self.dims(node.args[0])[0])
        for a, b in facts.pairs:
            if self.token_axes((a, b)) and resolve(a) and resolve(b) and not same_dim(a, b):
                return reason_at(
                    node,
                    "misaligned",
                    f"{name} combines different positions",
                    "its operands run over different slices of the sequence, or over axes not proved to be the same",
                    self._hint_in_tail("combine a position with itself only, or move the op after the model"),
                )
        for out in facts.outs:
            if len(self.seq_axes(out)) > 1 or sum(self.is_batch(x) for x in self.token_axes(out)) > 1:
                stored = all(
                    self.values[a].kind is Kind.UNIFORM or self.values[a].form == "table" for a in args
                )
                return self._stored_pairs(node) if stored else self.mixing_reason(node, out[-1])
            if any(self.is_batch(x) and x.find().span is not None for x in self.token_axes(out)):
                return self.mixing_reason(node, out[0])
        return self._crossing(node, args)

    def _stored_pairs(self, node: fx.Node) -> Reason:
        return reason_at(
            node, "mask", f"{op_name(node)} reads a stored table of (query, key) pairs",
            "what a table holds is data: that it is causal is not written in the graph",
            "compare torch.arange(length) with itself, or pass is_causal=True",
        )  # fmt: skip

    def _makes_tokens(self, node: fx.Node, rule: Rule | None, args: list[fx.Node]) -> bool:
        """Whether a token axis of the result comes from nowhere: not from an operand, nor from a size we rewrite."""
        known = {axis.key() for a in args for axis in self.token_axes(self.dims(a))}
        made = [
            axis
            for out in self.infer.facts[node].outs
            for axis in self.token_axes(out)
            if axis.key() not in known
        ]
        if not made or rule is None or rule.family in ("full", "arange"):
            return False
        if node.target is aten.slice.Tensor:
            return bool(arg(node, 4, "step", 1) != 1)
        return node.target not in (aten.expand.default, aten.expand_as.default, aten.repeat.default)

    def _reads_grid(self, node: fx.Node) -> bool:
        """Whether packed rows are read by several indices: ``h[rows, columns]``."""
        indexed = [
            dim for dim, i in zip(self.dims(node.args[0]), node.args[1], strict=False) if i is not None
        ]
        shared = self.values[node.args[0]].kind is Kind.SHARED
        return shared and len(indexed) > 1 and bool(self.token_axes(indexed))

    def _crossing(self, node: fx.Node, args: list[fx.Node]) -> Reason | None:
        """Whether the grid operands of a shared op may become columns of the key."""
        for a in args:
            if self.values[a].kind is not Kind.GRID or self._scalar(a):
                continue
            dims = self.dims(a)
            if not self.fits_grid(dims) or not self.seq_axes(dims):
                return reason_at(
                    node,
                    "row-value",
                    f"{op_name(node)} reads {name_of(a)}, which is not one value per position",
                    "only values with one entry per position of the grid can become part of the tree key",
                    self._hint_in_tail(
                        "expand it to [batch, sequence] first, or move the op after the model"
                    ),
                )
            if any(self.region_of_axis(axis) != WHOLE for axis in self.seq_axes(dims)):
                return reason_at(
                    node, "sliced-input", f"{op_name(node)} reads a slice of an input with one value per position",
                    "the slice is not aligned with the tokens of the tree",
                    self._hint_in_tail("apply the op to the whole sequence and slice the result"),
                )  # fmt: skip
            if not self._in_cone and a not in self.keys and not self._leaves(a) <= self.keys.keys():
                return reason_at(
                    node, "row-input", f"{op_name(node)} reads {name_of(a)}, which belongs to the row",
                    "labels, advantages, masks of the loss and old log-probs differ between rows that share a token",
                    "nothing to do: it runs on the expanded values",
                )  # fmt: skip
        return None

    def _hint_in_tail(self, inside: str) -> str:
        """What to do about an op of the tail, or about one that an attention reads."""
        return inside if self._in_cone else "nothing to do: it runs on the expanded values"

    def _scalar(self, node: fx.Node) -> bool:
        return not self.token_axes(self.dims(node))

    def _leaves(self, node: fx.Node) -> set[fx.Node]:
        """Integer grid values that a floating grid value is computed from, token by token."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or node.op == "placeholder":
            return {node}
        args = tensor_args(node)
        rule = lookup(node.target)
        if rule is None or self._blocked_form(node, rule):
            return {node}
        out: set[fx.Node] = set()
        for a in args:
            out |= self._leaves(a) if self.values[a].kind is Kind.GRID and not self._scalar(a) else set()
        return out or {node}

    def _blocked_form(self, node: fx.Node, rule: Rule) -> bool:
        """Whether a floating grid value must be packed itself rather than recomputed on packed rows."""
        facts = self.infer.facts[node]
        return (
            rule.special is not None
            or any(self.token_axes((dim,)) for dim in facts.mixed)
            or any(not self.fits_grid(self.dims(a)) for a in tensor_args(node))
            or rule.family in ("arange",)
        )

    def packs_itself(self, node: fx.Node) -> bool:
        """Whether a GRID value enters the packed graph as an input of its own."""
        return self._leaves(node) == {node}

    def _shared(self, node: fx.Node, rule: Rule | None, args: list[fx.Node]) -> Value:
        for a in args:
            if self.values[a].kind is Kind.GRID and not self._scalar(a):
                for leaf in self._leaves(a):
                    self.keys.setdefault(leaf)
                    if not self.has_batch(leaf):
                        self.uses_column = True
        facts = self.infer.facts[node]
        if node.target is aten.slice.Tensor and self._cuts_tokens(node):
            if self.values[node.args[0]].kind is Kind.UNIFORM:
                found = self._as_table(node)
                return found if found.kind is Kind.SHARED else self._private(node, found.reason)
            return Value(Kind.SHARED, form="take")
        if rule is not None and rule.family == "embedding" and self.token_axes(facts.mixed):
            return self._private(node, self.mixing_reason(node, facts.mixed[0]))
        # Made of ids and positions alone: what drops its features again can be had before any weight is touched.
        return Value(Kind.SHARED, pure=all(self._pre_evaluable(a) or self.values[a].pure for a in args))

    def _cuts_tokens(self, node: fx.Node) -> bool:
        out, before = self.dims(node), self.dims(node.args[0])
        return any(self.token_axes((o,)) and not same_dim(o, b) for o, b in zip(out, before, strict=True))

    def _private(self, node: fx.Node, reason: Reason | None) -> Value:
        rule = lookup(node.target)
        chained = rule is not None and rule.family in ("attention", "recurrence")
        if chained or self._is_written_attention(node):
            raise Refusal(reason or self._row_reason(node))
        return Value(Kind.PRIVATE, reason=reason)

    def _is_written_attention(self, node: fx.Node) -> bool:
        """A softmax along the sequence of scores that run over it twice: the tail would form them for the grid."""
        if node.target not in (aten.softmax.int, aten._softmax.default):
            return False
        dims = self.dims(node)
        over = dims[axis_index(node.args[1], len(dims))]
        return bool(self.seq_axes((over,))) and len(self.seq_axes(dims)) > 1

    def _row_reason(self, node: fx.Node) -> Reason:
        """Points at the op whose result belongs to the row by nature: it has no reason of its own."""
        while self.values.get(node, Value(Kind.PRIVATE)).form == "copy":
            node = next(a for a in node.all_input_nodes if self.values[a].kind is Kind.PRIVATE)
        return reason_at(
            node, "private-attention", f"an attention reads the result of {op_name(node)}, which belongs to the row",
            "rows that share a prefix may differ in it, and an attention of packed tokens needs what they share",
            "move the op after the model, or out of the compiled region",
        )  # fmt: skip

    # ---- refusals -------------------------------------------------------------------------------------------------

    def _refuse_random(self, node: fx.Node, rule: Rule | None) -> None:
        target = node.target
        if target is aten.embedding.default and arg(node, 3, "scale_grad_by_freq", False):
            raise Refusal(
                reason_at(
                    node,
                    "embedding",
                    "an embedding whose gradient is scaled by frequency",
                    "a token counts once in the tree and once a row in the batch",
                    "drop scale_grad_by_freq",
                )
            )
        if rule is not None and rule.random:
            p, train = arg(node, 1, "p", 0.5), arg(node, 2, "train", True)
            if train and p != 0:
                raise Refusal(
                    reason_at(
                        node,
                        "dropout",
                        f"dropout with p={p} in training",
                        "each row draws its own noise, so rows with a common prefix no longer agree on it",
                        "set the dropout to 0 (attention_dropout, hidden_dropout, lora_dropout) or call model.eval()",
                    )
                )
            return
        drawn = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
        if drawn and (rule is None or rule.family != "attention"):
            raise Refusal(
                reason_at(
                    node,
                    "random",
                    f"{op_name(node)} draws random numbers",
                    "each row draws its own, so rows with a common prefix no longer agree",
                    "draw them outside of the compiled region",
                )
            )

    def _cut_reason(self, node: fx.Node, how: str) -> Reason:
        return reason_at(
            node, "cut-sequence", f"{op_name(node)} {how} the batch or sequence axis",
            "positions would be regrouped by column, and columns of packed tokens are not regular",
            "keep [batch, sequence] whole inside the model, or move the op after the model",
        )  # fmt: skip

    def _decoding_reason(self, ids: fx.Node) -> Reason:
        return reason_at(
            ids, "no-token-ids", "one token a row, as in a step of generation",
            "the prefix tree is built from token ids, and the prefixes of these rows are in a cache or nowhere",
            "nothing to do: a step runs as captured; training steps and prompts are packed",
        )  # fmt: skip

    def mixing_reason(self, node: fx.Node, dim: Dim) -> Reason:
        if node in self.infer.uncut:
            return self._cut_reason(node, "cuts")
        tokens = self.token_axes((dim,))
        along = "batch" if tokens and all(self.is_batch(a) for a in tokens) else "sequence"
        if len(resolve(dim)) > 1:
            along = "batch and sequence"
        return reason_at(
            node,
            "mixes-tokens",
            f"{op_name(node)} mixes positions along the {along} axis",
            "a packed token would meet tokens that are not its ancestors",
            "move it after the model or out of the compiled region; the ops before it stay packed",
        )

    def _scalar_reason(self, node: fx.Node) -> Reason:
        return reason_at(
            node, "scalar", f"{op_name(node)} turns a tensor into a number",
            "the number would be that of the packed tokens and not that of the batch",
            "keep it a tensor, or read it outside of the compiled region",
        )  # fmt: skip

    def _input_reason(self, node: fx.Node) -> Reason:
        what = "has an axis that is not proved to be the batch or the sequence"
        if node in self.parameters or value_of(node).requires_grad:
            what = "has a batch axis, and is a weight or needs a gradient"
        elif len(self.seq_axes(self.dims(node))) > 1:
            what = "runs over the sequence twice"
        name = "a constant tensor" if node.op == "get_attr" else f"the input {name_of(node)}"
        return reason_at(
            node, "dense-input", f"{name} {what}",
            "only what has one entry per position, and no gradient, can become part of the tree key",
            self._hint_in_tail("pass token ids instead of embeddings, or use it after the model"),
        )  # fmt: skip

    def _refuse_weights(self) -> None:
        output = next(n for n in self.graph.nodes if n.op == "output")
        for node in self.graph.nodes:
            if node.op == "call_function" and self.values[node].kind is Kind.PAIR:
                for user in node.users:
                    if user is output or self.values[user].kind is Kind.PRIVATE:
                        raise Refusal(
                            self._value_reason(node, user)
                            or reason_at(
                                node,
                                "attention-weights",
                                "attention weights are read outside of an attention",
                                "the tree never forms the [T, T] matrix",
                                "call without output_attentions, or compute them outside of the compiled region",
                            )
                        )

    def _value_reason(self, weights: fx.Node, user: fx.Node) -> Reason | None:
        """Why the values of an attention written out are private, or what its scores meet, if that explains more."""
        if user.op == "output":
            return None
        rule = lookup(user.target)
        if rule is not None and rule.family == "matmul" and user.args[0] is weights:
            return self.values[user].reason
        # A mask that no rule reads makes the scores private: the mask is what to name.
        others = (self.values[x] for x in user.all_input_nodes if x is not weights)
        return next((value.reason for value in others if value.kind is Kind.PRIVATE and value.reason), None)

    def _check(self) -> None:
        self._refuse_weights()
        if not self.sites and not self.chains.nodes:
            meets = any(n.op == "call_function" and self._mixes(n) for n in self.graph.nodes)
            private = next(
                (v.reason for v in self.values.values() if v.kind is Kind.PRIVATE and v.reason), None
            )
            raise Refusal(
                (private if meets else None)
                or reason_at(
                    None,
                    "no-attention",
                    "no attention in this graph",
                    "without attention there is little to share beyond a table lookup",
                    "compile the whole model, so that the embedding and the layers are captured together",
                )
            )
        first = next(iter(self.sites.values()), None)
        for node, site in self.sites.items():
            assert first is not None
            same = (site.spec.visible, site.spec.documents) == (first.spec.visible, first.spec.documents)
            if not same:
                raise Refusal(
                    reason_at(
                        node,
                        "mixed-masks",
                        "attentions with different padding or document masks",
                        "a padded token is dropped or kept for all attentions alike",
                        "use the same attention mask in every layer (windows may differ)",
                    )
                )

    @functools.cached_property
    def visible(self) -> frozenset[tuple[fx.Node, bool]]:
        """The padding: boolean grid values, and whether each is inverted, that hold at every token that counts."""
        site = next(iter(self.sites.values()), None)
        return self.chains.visible() if site is None else site.spec.visible

    # ---- reductions, selections and private indices --------------------------------------------------------------

    def weighted_reduction(self, node: fx.Node) -> Value | None:
        """sum and mean over batch and sequence together: every packed row counts as often as it occurs."""
        x = node.args[0]
        facts = self.infer.facts[node]
        if self.values[x].kind is not Kind.SHARED:
            return None
        tokens = self.token_axes(dim for dim in facts.mixed)
        if not tokens or self.token_axes(facts.out):
            return None
        if self.batch is not None and not self.has_batch(x):
            return None  # by column alone: it counts once, not once a row
        return Value(Kind.SHARED, form="weighted")

    def select_rows(self, node: fx.Node) -> Value | None:
        """``x[mask]`` with a boolean [B, T] mask: a region of the grid given by data."""
        x, indices = node.args[0], list(node.args[1])
        value = self.values[x]
        if value.kind is not Kind.SHARED or len(indices) != 1 or indices[0] is None:
            return None
        mask = indices[0]
        if value_of(mask).dtype is not torch.bool or not self._pre_evaluable(mask):
            return None
        dims, mask_dims = self.dims(x), self.dims(mask)
        lead = dims[: value_of(mask).dim()]
        axes = [axis for dim in lead for axis in resolve(dim)]
        expected = [a for a in axes if self.is_batch(a)] + [a for a in axes if not self.is_batch(a)]
        if axes != expected or len(self.token_axes(lead)) != len(axes) or self.token_axes(dims[len(lead) :]):
            return None
        base = self.region(x)
        if base is None or len(lead) != len(mask_dims):
            return None
        out = self.dims(node)
        axis = resolve(out[0])[0]
        self._selected[axis.key()] = (*base, ("mask", self._named(mask)))
        return Value(Kind.SHARED, form="take")

    def gather_private(self, node: fx.Node) -> Value | None:
        """``x.gather(-1, labels[..., None])``: read (row, label) from packed rows, one per grid position."""
        x, index = node.args[0], node.args[2]
        dims = self.dims(x)
        at = axis_index(node.args[1], len(dims))
        if self.values[x].kind is not Kind.SHARED or not self._pre_evaluable(index):
            return None
        if at != len(dims) - 1 or value_of(index).shape[-1] != 1 or self.token_axes((dims[-1],)):
            return None
        if self._aligned_key(node, index):
            return None
        if any(
            hint_of(a) != hint_of(b)
            for a, b in zip(value_of(x).shape[:-1], value_of(index).shape, strict=False)
        ):
            return None
        if not self.is_region(dims[:-1]):
            return None
        return Value(Kind.PRIVATE, form="gather", data=(x, index))

    def _aligned_key(self, node: fx.Node, index: fx.Node) -> bool:
        """An index that is part of the key is local: the plain gather serves."""
        return (
            self.values[index].kind is Kind.GRID and self._blocked(node, lookup(node.target), [index]) is None
        )

    def is_region(self, dims: Dims) -> bool:
        """Batch and sequence (or a selection), in grid order, and nothing else."""
        axes = [axis for dim in dims for axis in resolve(dim)]
        if len(self.token_axes(dims)) != len(axes) or len(self.seq_axes(dims)) != 1:
            return False
        return len(axes) == 1 or (len(axes) == 2 and self.is_batch(axes[0]))

    def cross_entropy(self, node: fx.Node) -> Value | None:
        """Cross-entropy of shared logits with private labels: log-softmax on packed rows, labels on the grid."""
        x, target = node.args[:2]
        weight, smoothing = arg(node, 2, "weight"), arg(node, 5, "label_smoothing", 0.0)
        dims = self.dims(x)
        integral = not value_of(target).is_floating_point()
        plain = weight is None and smoothing == 0.0 and integral and len(dims) == 2
        if self.values[x].kind is not Kind.SHARED or not plain or not self._pre_evaluable(target):
            return None
        if not self.is_region(dims[:1]) or self.token_axes(dims[1:]):
            return None
        return Value(Kind.PRIVATE, form="cross_entropy", data=(x, target))


def _unsplit(dims: Dims) -> list[Axis]:
    """Root axes of dims, as they are before a view cuts them."""
    out: list[Axis] = []
    for dim in dims:
        for axis in dim:
            root = axis.find()
            inner = list(root.parts or ())
            # A flat [B * T] input paired with (batch, sequence) is those two.
            flat = root.parts is not None and all(a.find() is not a or a.find().parts is None for a in inner)
            out.extend(resolve((root,)) if flat and len(dims) == 1 else [root])
    return out


def _last_axis(dims: Dims) -> tuple[object, ...] | None:
    axes = resolve(dims[-1])
    return axes[0].key() if len(axes) == 1 else None


def _from_input(node: Any) -> bool:
    """Whether an index is computed from an integer graph input."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if not isinstance(current, fx.Node) or current in seen:
            continue
        seen.add(current)
        value = value_of(current)
        if current.op == "placeholder" and isinstance(value, torch.Tensor) and value.dim() >= 1:
            if not (value.is_floating_point() or value.is_complex()):
                return True
        stack.extend(current.all_input_nodes)
    return False
