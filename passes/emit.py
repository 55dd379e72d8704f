"""Write the packed graph, and cut the rest of the captured graph around it.

One call of a packed program is a walk through three graphs:

    keys    captured nodes on the grid, no gradients: key columns, visible bits, documents, label indices, numbers
    packed  one row of N packed tokens: weights, packed columns and tree tensors in; packed values out
    tail    captured nodes on the grid: what is private, on expanded values

The packed graph refers to N only through its tensor inputs, so that one compilation serves every batch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

import treecompile.runtime.ops  # noqa: F401  (registers treecompile::*)
from treecompile.passes.axes import Dim, Dims, resolve
from treecompile.passes.heads import Head, modes
from treecompile.passes.kinds import Kinds
from treecompile.passes.lower import REGION, region_of
from treecompile.passes.ops.reductions import reduced
from treecompile.passes.ops.views import arg, axis_index
from treecompile.passes.reasons import Refusal, reason_at
from treecompile.passes.rule import lookup, value_of
from treecompile.passes.sites import AttentionCall, AttentionSite, RecurrenceCall
from treecompile.passes.values import Kind
from treecompile.runtime.chunks import Alignment
from treecompile.runtime.losses import label_index, weighted_reduction
from treecompile.runtime.ops import kept_rows
from treecompile.runtime.program import WHOLE, ExpandSpec, Input, PackSpec, Region

__all__ = ["MODES", "Emitter", "Extract", "Finish", "extract"]

aten = torch.ops.aten
ops = torch.ops.treecompile
# Ops that take a number or a tensor of one element alike.
_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
TREE_FIELDS = ("subtree_end", "column", "segments", "segments_host", "pieces", "blocks")

# Nodes that set a mode for those after them: copied in order into every graph that copies code.
MODES = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)


@dataclass
class Emitter:
    """Builds the packed graph from classified nodes."""

    kinds: Kinds
    source: fx.Graph
    heads: dict[fx.Node, Head] = field(default_factory=dict)
    alignment: Alignment = "trajectory"
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[Input] = field(default_factory=list)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    emitted: dict[fx.Node, fx.Node] = field(default_factory=dict)
    attentions: list[AttentionCall] = field(default_factory=list)
    recurrences: list[RecurrenceCall] = field(default_factory=list)
    _inputs: dict[Input, fx.Node] = field(default_factory=dict)
    _now: fx.Node | None = None
    _fused: dict[Head, fx.Node] = field(default_factory=dict)

    # ---- inputs ---------------------------------------------------------------------------------------------------

    def input(self, spec: Input, value: Any = None) -> fx.Node:
        """The placeholder of an input, made on first use."""
        if spec not in self._inputs:
            first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
            with (
                self.graph.inserting_before(first) if first is not None else self.graph.inserting_after(None)
            ):
                node = self.graph.placeholder(f"{spec.role}_{len(self.inputs)}")
            node.meta["note"] = spec.text()
            self._inputs[spec] = node
            self.inputs.append(spec)
        return self._inputs[spec]

    def tree(self, name: str) -> fx.Node:
        return self.input(Input("tree", name))

    def rows(self, region: Region) -> fx.Node:
        """A tensor as long as the packed rows of a region."""
        return self.tree("column") if region == WHOLE else self.input(Input("rows", "", region))

    def length(self, region: Region) -> fx.Node:
        return self.graph.call_function(aten.sym_size.int, (self.rows(region), 0))

    # ---- sizes ----------------------------------------------------------------------------------------------------

    def dims(self, node: fx.Node) -> Dims:
        return self.kinds.dims(node)

    def is_token_dim(self, dim: Dim) -> bool:
        return bool(self.kinds.seq_axes((dim,)))

    def is_batch_only(self, dim: Dim) -> bool:
        return bool(self.kinds.token_axes((dim,))) and not self.is_token_dim(dim)

    def size(self, dim: Dim, node: fx.Node) -> Any:
        """Packed size of a dim: the batch counts one, the sequence counts the packed rows of its region."""
        rows: fx.Node | None = None
        factor = 1
        for axis in resolve(dim):
            if self.kinds.is_batch(axis):
                continue
            region = self.kinds.region_of_axis(axis)
            if region is not None:
                rows = self.length(region)
                continue
            size = axis.find().size
            if not isinstance(size, sympy.Integer):
                raise Refusal(
                    reason_at(
                        node,
                        "symbolic-size",
                        "a feature dim whose size varies between calls",
                        "the packed graph is compiled once, with only the number of tokens left open",
                        "keep feature sizes constant, or compile with dynamic=False",
                    )
                )
            factor *= int(size)
        if rows is None:
            return factor
        return rows if factor == 1 else self.graph.call_function(operator.mul, (rows, factor))

    def sizes(self, node: fx.Node) -> list[Any]:
        """Packed sizes of an output; a single token dim is written -1 where a view can infer it."""
        dims = self.dims(node)
        views = lookup(node.target)
        spelled = (aten.expand.default, aten.expand_as.default, aten.repeat.default)
        infer_one = views is not None and views.family == "view" and node.target not in spelled
        out: list[Any] = []
        for dim in dims:
            out.append(-1 if infer_one and self.is_token_dim(dim) else self.size(dim, node))
        if node.target in (aten.expand.default, aten.expand_as.default):
            before = self.dims(node.args[0])
            lead = len(dims) - len(before)
            out = [-1 if i >= lead and before[i - lead] and self.is_token_dim(before[i - lead]) else s
                   for i, s in enumerate(out)]  # fmt: skip
        return out

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def call(
        self, target: Any, args: tuple[Any, ...], source: fx.Node, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A call in the packed graph that keeps the user's line and checkpoint region of its source."""
        node = self.graph.call_function(target, args, kwargs or {})
        for name in ("stack_trace", "custom", "nn_module_stack"):
            if name in source.meta:
                node.meta[name] = source.meta[name]
        return node

    def get(self, arg: Any) -> Any:
        """The packed form of an argument."""
        if isinstance(arg, fx.Node):
            if arg not in self.env:
                self.env[arg] = self._lazy(arg)
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return type(arg)(self.get(item) for item in arg) if not isinstance(arg, torch.Size) else arg
        if isinstance(arg, slice):
            return slice(self.get(arg.start), self.get(arg.stop), self.get(arg.step))
        return arg

    def _lazy(self, node: fx.Node) -> Any:
        value = self.kinds.values[node]
        if node.op == "get_attr" and value.kind is Kind.UNIFORM:
            return self.input(Input("constant", str(node.target)))
        if node.op == "placeholder" and value.kind is Kind.UNIFORM:
            return self.input(Input("argument", node.name))
        if value.kind is Kind.OTHER:
            return self.input(Input("number", node.name))
        if value.kind is Kind.GRID:
            return self._grid(node)
        if value.kind is Kind.SHARED and node.op in ("placeholder", "get_attr"):
            return self._table(node)
        raise AssertionError(f"{node} ({value.kind}) was not emitted before its use")

    def _grid(self, node: fx.Node) -> Any:
        if not self.kinds.token_axes(self.dims(node)):
            return self.input(Input("scalar", node.name))
        if self.kinds.packs_itself(node):
            return self.input(Input("pack", node.name))
        return self._by_rule(node)

    def _by_rule(self, node: fx.Node) -> fx.Node:
        rule = lookup(node.target)
        return self._copy(node) if rule is None or rule.emit is None else rule.emit(self, node)

    def _table(self, node: fx.Node) -> fx.Node:
        """A weight with the sequence among its dims is a table by column."""
        constant = node.op == "get_attr"
        raw = self.input(Input("constant", str(node.target)) if constant else Input("argument", node.name))
        at = next(i for i, dim in enumerate(self.dims(node)) if self.is_token_dim(dim))
        return self.call(aten.index_select.default, (raw, at, self.tree("column")), node)

    # ---- the walk -------------------------------------------------------------------------------------------------

    def run(self, wanted: Iterable[fx.Node]) -> None:
        """Emit everything that `wanted` values (and gathers) need, in the order of the captured graph."""
        for (
            name
        ) in TREE_FIELDS:  # first and in one order, so that captures of one model have one packed graph
            self.tree(name)
        needed = self._needed(wanted)
        for node in self.source.nodes:
            if node.target in MODES:
                self._mode(node)
            elif node in needed and node.op == "call_function":
                self._emit(node)

    def _needed(self, wanted: Iterable[fx.Node]) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        stack = list(wanted)
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            stack.extend(self._dependencies(node))
        return needed

    def _dependencies(self, node: fx.Node) -> list[fx.Node]:
        value = self.kinds.values[node]
        if value.kind is Kind.OTHER:
            return []
        if node in self.heads:
            return self.heads[node].needs
        if value.kind is Kind.GRID and (
            not self.kinds.token_axes(self.dims(node)) or self.kinds.packs_itself(node)
        ):
            return []
        if value.form == "attention":
            site = self.grouped(self.kinds.sites[node])
            return [x for x in (site.q, site.k, site.v, site.sinks) if x is not None]
        if value.form == "recurrence":
            return [x for x in node.args[:6] if x is not None]
        if value.form in ("gather", "cross_entropy"):
            return [value.data[0]]
        return list(node.all_input_nodes)

    def _mode(self, node: fx.Node) -> None:
        args = tuple(self.emitted.get(a, a) if isinstance(a, fx.Node) else a for a in node.args)
        self.emitted[node] = self.call(node.target, args, node, dict(node.kwargs))

    def _emit(self, node: fx.Node) -> None:
        value = self.kinds.values[node]
        if value.kind is Kind.GRID:
            self.get(node)
            return
        if value.kind is Kind.OTHER:
            return
        if node in self.heads:
            self.env[node] = self._read_head(node, self.heads[node])
            return
        if value.kind is Kind.PRIVATE:
            self.env[node] = self._picked(node)
            return
        writer = getattr(self, f"_write_{value.form}", None)
        rule = lookup(node.target)
        if value.kind is Kind.UNIFORM and rule is not None and rule.family == "attention":
            self.env[node] = self._copy(node)  # over something other than tokens
        elif writer is not None:
            self.env[node] = writer(node)
        else:
            self.env[node] = self._by_rule(node)
        self.emitted[node] = self.env[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        read = self._quantity if node.target in _ARITHMETIC else self.get
        args = tuple(read(a) for a in node.args)
        kwargs = {name: self.get(a) for name, a in node.kwargs.items()}
        return self.call(node.target, args, node, kwargs)

    def _quantity(self, arg: Any) -> Any:
        """A number that varies with the batch (``h / h.shape[1]``), as a tensor: one compilation serves all values."""
        if isinstance(arg, fx.Node) and arg not in self.env and self.kinds.values[arg].kind is Kind.OTHER:
            return self.input(Input("quantity", arg.name))
        return self.get(arg)

    def copy(self, node: fx.Node) -> fx.Node:
        """The node as captured, on packed arguments."""
        return self._copy(node)

    # ---- forms ----------------------------------------------------------------------------------------------------

    def _write_table(self, node: fx.Node) -> fx.Node:
        """A slice of a weight along the sequence: read it by column."""
        at = axis_index(node.args[1] if len(node.args) > 1 else 0, len(self.dims(node)))
        start = node.args[2] if len(node.args) > 2 else 0
        if not isinstance(start, int) or start < 0:
            raise Refusal(
                reason_at(
                    node,
                    "table-offset",
                    "a weight is sliced along the sequence from its end, or from a computed start",
                    "a token reads its row by column, counted from a start that is the same for every batch",
                    "slice it from a constant start (table[:length]), or read it by position (table[position_ids])",
                )
            )
        column = self.tree("column")
        index = self.call(aten.add.Tensor, (column, start), node) if start else column
        return self.call(aten.index_select.default, (self.get(node.args[0]), at, index), node)

    def _write_take(self, node: fx.Node) -> fx.Node:
        """A slice of the sequence, or a boolean selection: the packed rows that the region uses."""
        x = node.args[0]
        region = self.kinds.region(node)
        packed = self.get(x)
        dims = self.dims(x)
        if node.target is aten.index.Tensor:
            count = value_of(node.args[1][0]).dim()
            rest = [self.size(dim, node) for dim in dims[count:]]
            packed = self.call(aten.reshape.default, (packed, [-1, *rest]), node)
            at = 0
        else:
            at = next(i for i, dim in enumerate(dims) if self.is_token_dim(dim))
        return self.call(ops.take.default, (packed, self.rows(region or WHOLE), at), node)

    def _write_weighted(self, node: fx.Node) -> fx.Node:
        """sum or mean over batch and sequence: rows weighted by how many grid positions they stand for."""
        x = node.args[0]
        dims = self.dims(x)
        gone = (
            list(range(len(dims)))
            if node.target in (aten.sum.default, aten.mean.default)
            else reduced(node, len(dims))
        )
        at = next(i for i, dim in enumerate(dims) if self.is_token_dim(dim))
        region = self.kinds.region(x) or WHOLE
        packed = self.get(x)
        weight = self.input(Input("multiplicity", "", region))
        minor = [axis for axis in resolve(dims[at]) if not self.kinds.token_axes(((axis,),))]
        if minor:  # (batch, sequence, k) merged: each row stands k times in a row
            repeat = 1
            for axis in minor:
                repeat *= int(axis.find().size)
            weight = self.call(aten.repeat_interleave.self_int, (weight, repeat), node)
        keepdim = value_of(node).dim() == len(dims)
        mean = node.target in (aten.mean.default, aten.mean.dim)
        args = (packed, weight, at, gone, keepdim, mean, node.kwargs.get("dtype"))
        return self.call(weighted_reduction, args, node)

    def _picked(self, node: fx.Node) -> fx.Node:
        """One entry per grid position from packed rows: gather(logits, label), or log-softmax of it for a loss."""
        x = self.kinds.values[node].data[0]
        packed = self.get(x)
        width = int(value_of(x).shape[-1])
        flat = self.call(aten.reshape.default, (packed, [-1, width]), node)
        if self.kinds.values[node].form == "cross_entropy":
            flat = self.call(aten.log_softmax.int, (flat, -1), node)
        return self.call(ops.gather_expand.default, (flat, *self._labels(node)), node)

    def _labels(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Where a pick reads: row_index, labels, offsets, positions."""
        x, index = self.kinds.values[node].data
        region = self.kinds.region(x) or WHOLE
        row_index, offsets, positions = (
            self.input(Input(name, "", region)) for name in ("row_index", "offsets", "positions")
        )
        chosen = self.input(Input("index", index.name, region))
        ignored = self.kinds.values[node].form == "cross_entropy"
        ignore = arg(node, 4, "ignore_index", -100) if ignored else None
        chosen = self.call(label_index, (chosen, int(value_of(x).shape[-1]), ignore), node)
        return row_index, chosen, offsets, positions

    def _read_head(self, node: fx.Node, head: Head) -> fx.Node:
        """What the captured graph computes from the logits, from the op that does not keep them."""
        if head not in self._fused:
            self._fused[head] = self._write_head(node, head)
        at = 0 if node is head.picked else 1 if node in head.lse else 2
        found = self.call(operator.getitem, (self._fused[head], at), node)
        if at == 0:
            return found
        if at == 2:  # the captured sum is that of p log p
            found = self.call(aten.neg.default, (found,), node)
        found = self.call(aten.to.dtype, (found, head.dtype), node)
        sizes = [-1 if self.is_token_dim(dim) else self.size(dim, node) for dim in self.dims(node)]
        return self.call(aten.reshape.default, (found, sizes), node)

    def _write_head(self, node: fx.Node, head: Head) -> fx.Node:
        hidden, weight, *bias = (a for a in head.linear.args if isinstance(a, fx.Node))
        given = [self.get(x) for x in (hidden, weight, *bias)]
        for i, x in enumerate(
            (hidden, weight, *bias)
        ):  # under autocast; there the trace does not know all dtypes
            if value_of(x).dtype != head.computed or value_of(head.linear).dtype != head.computed:
                given[i] = self.call(aten.to.dtype, (given[i], head.computed), head.linear)
        rows = self.call(aten.reshape.default, (given[0], [-1, int(value_of(weight).shape[1])]), head.linear)
        for take in head.takes:
            rows = self.call(ops.take.default, (rows, self.rows(self.kinds.region(take) or WHOLE), 0), take)
        factor = None if head.factor is None else self._quantity(head.factor)
        row_index, labels, offsets, positions = self._labels(head.picked)
        keep = self.call(kept_rows, (rows, head.chunk), node)
        args = (
            rows, given[1], given[2] if bias else None, row_index, labels, offsets, positions, factor,
            head.chain, head.normalized, bool(head.spread), keep, head.chunk,
        )  # fmt: skip
        return self.call(ops.selective_log_probs.default, args, node)

    # ---- attention ------------------------------------------------------------------------------------------------

    def grouped(self, site: AttentionSite) -> AttentionSite:
        """The site with K and V as they were before they were repeated for grouped-query attention."""
        k, v = site.k, site.v
        if site.transposed_k and k.target is aten.transpose.int:
            inner = _unrepeated(k.args[0])
            source_v = _unrepeated(v)
            if inner is not None and source_v is not None and {d % value_of(k).dim() for d in k.args[1:3]} == {
                value_of(k).dim() - 1, value_of(k).dim() - 2
            }:  # fmt: skip
                return _replace(site, k=inner, v=source_v, transposed_k=False)
            return site
        source_k, source_v = _unrepeated(k), _unrepeated(v)
        if source_k is not None and source_v is not None:
            return _replace(site, k=source_k, v=source_v)
        return site

    def attention(self, node: fx.Node) -> fx.Node:
        """tree_attention(q, k, v, <tree>, sinks, scale, softcap, window) in place of the captured attention."""
        site = self.grouped(self.kinds.sites[node])
        q, k, v = (self._heads_first(self.get(x), x, node) for x in (site.q, site.k, site.v))
        if site.transposed_k:
            k = self.call(aten.transpose.int, (k, -1, -2), node)
        scale = 1.0
        factors = site.scale if isinstance(site.scale, tuple) else (("mul", site.scale),)
        for name, factor in factors:
            if factor is None:
                scale = float(value_of(site.q).shape[-1]) ** -0.5
            elif isinstance(factor, (int, float)):
                scale = scale * factor if name == "mul" else scale / factor
            else:
                scaling = aten.mul.Tensor if name == "mul" else aten.div.Tensor
                q = self.call(scaling, (q, self._quantity(factor)), node)
        sinks = self.get(site.sinks) if site.sinks is not None else None
        tree = tuple(self.tree(name) for name in TREE_FIELDS)
        args = (q, k, v, *tree, sinks, float(scale), float(site.softcap), int(site.spec.window))
        self.attentions.append(self._attention_call(node, site, float(scale)))
        pair = self.call(ops.tree_attention.default, args, node)
        out = self.call(operator.getitem, (pair, 0), node)
        want = value_of(node)
        if want.dim() != 4:
            out = self.call(
                aten.reshape.default,
                (
                    out,
                    [*self._sizes_of(self.dims(node)[:-2], node), -1, self.size(self.dims(node)[-1], node)],
                ),
                node,
            )
        return out

    def _attention_call(self, node: fx.Node, site: AttentionSite, scale: float) -> AttentionCall:
        heads, kv_heads = (
            math.prod(int(self.size(dim, node)) for dim in self.dims(x)[:-2]) for x in (site.q, site.k)
        )
        q, v = value_of(site.q), value_of(site.v)
        return AttentionCall(
            heads, kv_heads, int(q.shape[-1]), int(v.shape[-1]), q.dtype,
            self._autocast[node].get(q.device.type), scale, float(site.softcap), int(site.spec.window),
        )  # fmt: skip

    @functools.cached_property
    def _autocast(self) -> dict[fx.Node, dict[str, Any]]:
        """The autocasts that the captured graph has entered at its nodes; see `modes`."""
        return {node: autocast for node, _, autocast in modes(self.source)}

    def _sizes_of(self, dims: Dims, node: fx.Node) -> list[Any]:
        return [self.size(dim, node) for dim in dims]

    def _heads_first(self, packed: fx.Node, source: fx.Node, node: fx.Node) -> fx.Node:
        """[1, heads, N, D] whatever the leading dims were."""
        value = value_of(source)
        if value.dim() == 4:
            return packed
        dims = self.dims(source)
        last = [-1 if self.is_token_dim(dim) else self.size(dim, node) for dim in dims[-2:]]
        heads = 1
        for dim in dims[:-2]:
            heads *= int(self.size(dim, node))
        return self.call(aten.reshape.default, (packed, [1, heads, *last]), node)

    _write_attention = attention

    # ---- chains ---------------------------------------------------------------------------------------------------

    def _write_recurrence(self, node: fx.Node) -> fx.Node:
        """tree_recurrence in place of a model's own, on the prepared operands; the skip is added beside it."""
        q, k, v, gate, beta, skip = (None if a is None else self.get(a) for a in node.args[:6])
        scale, chunk = node.args[6:8]
        tree = (self.tree("chain_end"), self.tree("chain_segments"))
        key, value, decay = (value_of(x) for x in node.args[1:4])
        self.recurrences.append(
            RecurrenceCall(
                int(key.shape[2]), int(value.shape[2]), int(key.shape[3]), int(value.shape[3]),
                key.dtype, value.dtype, decay.dim() == 4, beta is not None, int(chunk),
            )
        )  # fmt: skip
        out = self.call(
            ops.tree_recurrence.default,
            (q, k, v, gate, beta, *tree, float(scale), int(chunk), self.alignment),
            node,
        )
        if skip is not None:
            out = self.call(aten.add.Tensor, (out, skip), node)
        return self.call(aten.to.dtype, (out, value_of(node).dtype), node)

    def _write_convolution(self, node: fx.Node) -> fx.Node:
        """tree_causal_conv1d in the dtype of the captured one: under autocast that is not the dtype of its input."""
        dtype = value_of(node).dtype
        x, weight, bias = (
            None if a is None else self.call(aten.to.dtype, (self.get(a), dtype), node) for a in node.args[:3]
        )
        weight = self.call(aten.squeeze.dim, (weight, 1), node)
        tree = (self.tree("chain_end"), self.tree("chain_segments"))
        args = (x, weight, bias, *tree, arg(node, 3, "activation", ""))
        return self.call(ops.tree_causal_conv1d.default, args, node)


def _replace(site: AttentionSite, **changes: Any) -> AttentionSite:
    import dataclasses

    return dataclasses.replace(site, **changes)


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """x of ``x[:, :, None].expand(b, kv, n, t, d).reshape(b, kv * n, t, d)`` or ``x.repeat_interleave(n, 1)``."""
    if node.target is aten.repeat_interleave.self_int:
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        return node.args[0] if dim is not None and value_of(node).dim() == 4 and dim % 4 == 1 else None
    if node.target not in (aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return None
    wide = node.args[0]
    if wide.target is aten.clone.default:
        wide = wide.args[0]
    if wide.target is not aten.expand.default or wide.args[0].target is not aten.unsqueeze.default:
        return None
    narrow = wide.args[0]
    if narrow.args[1] != 2 or value_of(wide).dim() != 5 or value_of(node).dim() != 4:
        return None
    source: fx.Node = narrow.args[0]
    before, after = value_of(source).shape, value_of(node).shape
    return source if (before[0], before[2], before[3]) == (after[0], after[2], after[3]) else None


# ---- cutting captured graphs --------------------------------------------------------------------------------------


@dataclass
class Extract:
    """A piece of the captured graph: its module, and the captured nodes that are its inputs, in order."""

    module: fx.GraphModule
    inputs: list[fx.Node]


@dataclass(frozen=True)
class Finish:
    """How the tail completes a value of the packed graph: other captured nodes it needs, and the code to write."""

    needs: tuple[fx.Node, ...]
    write: Callable[[fx.Graph, fx.Node, list[fx.Node]], fx.Node]


def extract(
    owner: fx.GraphModule,
    outputs: Sequence[Any],
    cut: set[fx.Node],
    finish: dict[fx.Node, Finish] | None = None,
) -> Extract:
    """Copy what `outputs` need, as captured; nodes of `cut` become inputs, completed by `finish` where it has them."""
    finish = finish or {}
    needed: set[fx.Node] = set()
    stack = [n for n in outputs if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        if node in finish:
            stack.extend(finish[node].needs)
        elif node not in cut:
            stack.extend(node.all_input_nodes)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs = [n for n in owner.graph.nodes if n in needed and (n.op == "placeholder" or n in cut)]
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)

    def look(arg: Any) -> Any:
        return fx.map_arg(arg, lambda n: env[n])

    for node in owner.graph.nodes:
        if node.target in MODES:
            env[node] = graph.node_copy(node, lambda n: env[n])
        elif node in finish and node in needed:
            env[node] = finish[node].write(graph, env[node], [env[n] for n in finish[node].needs])
        elif node in needed and node not in env and node.op != "output":
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(look(n) for n in outputs))
    _drop_idle_modes(graph)
    return Extract(fx.GraphModule(owner, graph), inputs)


def _drop_idle_modes(graph: fx.Graph) -> None:
    """A graph that computes nothing needs no grad or autocast switches."""
    if not any(n.op == "call_function" and n.target not in MODES for n in graph.nodes):
        for node in reversed(list(graph.nodes)):
            if node.target in MODES:
                graph.erase_node(node)


def pack_spec(kinds: Kinds, node: fx.Node) -> PackSpec:
    """How a grid value [.. B .. T ..] becomes a packed column."""
    dims = kinds.dims(node)
    shape = tuple(-1 if kinds.seq_axes((dim,)) else 1 for dim in dims)
    return PackSpec(kinds.has_batch(node), shape)


def expand_spec(kinds: Kinds, node: fx.Node) -> ExpandSpec:
    """How a packed value becomes the grid value that the caller sees."""
    axes: list[Any] = []
    groups: list[int] = []
    for dim in kinds.dims(node):
        parts = resolve(dim)
        groups.append(len(parts))
        for axis in parts:
            if kinds.is_batch(axis):
                axes.append("batch")
            elif kinds.region_of_axis(axis) is not None:
                axes.append("sequence")
            else:
                axes.append(int(axis.find().size))
    return ExpandSpec(tuple(axes), tuple(groups))


def outline_regions(gm: fx.GraphModule, regions: dict[int, dict[str, Any]]) -> None:
    """Fold the nodes of each activation-checkpoint region back into one checkpoint call."""
    for tag, kwargs in regions.items():
        inside = [n for n in gm.graph.nodes if n.op == "call_function" and region_of(n) == tag]
        if inside:
            _outline(gm, tag, inside, kwargs)
    gm.graph.lint()
    gm.recompile()


def _outline(gm: fx.GraphModule, tag: int, inside: list[fx.Node], kwargs: dict[str, Any]) -> None:
    members = set(inside)
    feeds = list(dict.fromkeys(a for n in inside for a in n.all_input_nodes if a not in members))
    results = [n for n in inside if any(user not in members for user in n.users)]
    body = fx.Graph()
    env: dict[fx.Node, fx.Node] = {feed: body.placeholder(feed.name) for feed in feeds}
    for node in inside:
        env[node] = body.node_copy(node, lambda n: env[n])
    body.output(tuple(env[n] for n in results))
    name = f"checkpoint_{tag}"
    gm.add_submodule(name, fx.GraphModule(gm, body))
    with gm.graph.inserting_before(_after(gm, inside, feeds)):
        sub = gm.graph.get_attr(name)
        call = gm.graph.call_function(
            torch.ops.higher_order.tag_activation_checkpoint, (sub, *feeds), dict(kwargs)
        )
        call.meta["custom"] = {REGION: tag}
        picks = [gm.graph.call_function(operator.getitem, (call, i)) for i in range(len(results))]
    for node, pick in zip(results, picks, strict=True):
        node.replace_all_uses_with(pick, delete_user_cb=lambda user: user not in members)
    for node in reversed(inside):
        gm.graph.erase_node(node)


def _after(gm: fx.GraphModule, inside: list[fx.Node], feeds: list[fx.Node]) -> fx.Node:
    """The first place where every input of the region is known."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    last = max((n for n in feeds), key=order.__getitem__, default=inside[0])
    return inside[0] if order[last] < order[inside[0]] else last.next
