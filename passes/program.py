"""The pipeline: captured graph in, tree program out.

    lower -> infer -> kinds -> demand -> emit -> cut

Each step is a function of the last one's result; :func:`build` runs them in this order, timed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from treecompile.passes.axes import resolve
from treecompile.passes.demand import Demand
from treecompile.passes.emit import (
    MODES,
    Emitter,
    Extract,
    Finish,
    expand_spec,
    extract,
    outline_regions,
    pack_spec,
)
from treecompile.passes.heads import find_heads
from treecompile.passes.kinds import Kinds
from treecompile.passes.lower import checkpoint_kwargs, lower
from treecompile.passes.masks import MaskSpec
from treecompile.passes.notes import Clock, Exit, Rewrite, Step, exits, mark, rewrites
from treecompile.passes.ops.views import arg
from treecompile.passes.reasons import ARGUMENT, source_text
from treecompile.passes.rule import Facts, Infer, lookup, outputs_of, value_of
from treecompile.passes.sites import AttentionCall, RecurrenceCall
from treecompile.passes.values import Kind
from treecompile.runtime.chunks import Alignment
from treecompile.runtime.losses import nll_from_log_probs
from treecompile.runtime.program import Frontier, Input, PackSpec, TreeSpec

__all__ = ["Draft", "Rewrite", "build"]

aten = torch.ops.aten


@dataclass
class Draft:
    """A tree program before it is compiled.

    Attributes:
        lowered: the flat captured graph.
        packed: the packed graph; its inputs are described by `inputs`.
        keys, tail: the captured pieces around it.
        rewrites: what was rewritten.
        exits: where values leave the packed graph, and why.
        steps: the steps of the pipeline, timed.
        attentions, recurrences: those of the packed graph.
    """

    lowered: fx.GraphModule
    packed: fx.GraphModule
    inputs: tuple[Input, ...]
    packs: dict[str, PackSpec]
    constants: dict[str, torch.Tensor]
    keys: Extract
    key_outputs: tuple[str, ...]
    tree: TreeSpec
    tail: Extract
    frontier: tuple[Frontier, ...]
    rewrites: list[Rewrite] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    attentions: list[AttentionCall] = field(default_factory=list)
    recurrences: list[RecurrenceCall] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        return Counter(rewrite.kind for rewrite in self.rewrites)

    @property
    def repeats(self) -> bool:
        """Whether the keys graph is a function of its arguments and constants: its values may be kept."""
        return all(_repeats(node) for node in self.keys.module.graph.nodes)

    @property
    def key_constants(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the keys graph holds."""
        nodes = self.keys.module.graph.nodes
        return tuple(getattr(self.keys.module, str(n.target)) for n in nodes if n.op == "get_attr")


# Functions of these modules depend on what they are given, and on nothing else.
_PLAIN = {"_operator", "operator", "builtins", "math", "treecompile"}


def _repeats(node: fx.Node) -> bool:
    """Ops of other libraries may read anything, such as a counter, or talk to other processes at every call."""
    target = node.target
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr", "output")
    if isinstance(target, torch._ops.OpOverload):
        own = target.namespace in ("aten", "prims", "treecompile") and not target._schema.is_mutable
        return own and torch.Tag.nondeterministic_seeded not in target.tags
    module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    symbolic = module == "torch" and name.startswith("sym_")
    return symbolic or target in MODES or module.split(".")[0] in _PLAIN


def build(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    is_parameter: Callable[[fx.Node], bool],
    alignment: Alignment = "trajectory",
) -> Draft:
    """Prove and rewrite a captured graph.

    Args:
        gm: the Dynamo graph.
        fakes: example values of its placeholders.
        is_parameter: whether a placeholder of `gm` is a parameter of the model.
        alignment: where the chunks of recurrences start.

    Raises:
        Refusal: what cannot be proved, and why.
    """
    clock = Clock()
    with clock.step("lower") as told:
        lowered, regions = lower(gm, fakes)
        told["changed"] = len(lowered.graph.nodes)
        told["note"] = ", ".join(["flat ATen", *([f"{len(regions)} checkpoints"] if regions else [])])
    placeholders = [n for n in lowered.graph.nodes if n.op == "placeholder"]
    originals = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for new, old in zip(placeholders, originals, strict=True):
        new.meta[ARGUMENT] = source_text(old)
    parameters = {new for new, old in zip(placeholders, originals, strict=True) if is_parameter(old)}
    with clock.step("classify") as told:
        kinds = classify(lowered, parameters)
        count = Counter(value.kind for value in kinds.values.values())
        told["changed"] = len(kinds.values)
        told["note"] = ", ".join(
            f"{count[kind]} {kind.value}" for kind in Kind if count[kind] and kind is not Kind.OTHER
        )
    return _assemble(lowered, kinds, regions, clock, alignment)


def classify(lowered: fx.GraphModule, parameters: set[fx.Node]) -> Kinds:
    """Infer every dim, then decide every kind.

    A view is free to cut a feature axis. That it cut a token axis is known only once the token axes are, so the infer
    walk is repeated with such views held off (they then belong to the dense tail) until none is left: a view that is
    held off cuts nothing.
    """
    uncut: frozenset[fx.Node] = frozenset()
    while True:
        infer, constants = _infer(lowered, uncut)
        kinds = Kinds(lowered.graph, infer, parameters, constants)
        cut = kinds.views_that_cut_tokens()
        if not cut:
            kinds.run()
            return kinds
        uncut |= cut


def _infer(lowered: fx.GraphModule, uncut: frozenset[fx.Node]) -> tuple[Infer, dict[fx.Node, Any]]:
    infer = Infer(uncut)
    constants: dict[fx.Node, Any] = {}
    for node in lowered.graph.nodes:
        if node.op == "output":
            continue
        if node.op in ("placeholder", "get_attr"):
            if node.op == "get_attr":
                _note_constant(lowered, node, constants)
            infer.facts[node] = Facts([infer.fresh(value) for value in outputs_of(node)])
        else:
            infer.run(node, lookup(node.target))
    return infer, constants


def _note_constant(gm: fx.GraphModule, node: fx.Node, constants: dict[fx.Node, Any]) -> None:
    tensor = getattr(gm, str(node.target))
    node.meta.setdefault("val", tensor)
    if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and type(tensor) is torch.Tensor:
        constants[node] = tensor.item()


def _assemble(
    lowered: fx.GraphModule,
    kinds: Kinds,
    regions: dict[int, dict[str, Any]],
    clock: Clock,
    alignment: Alignment,
) -> Draft:
    output = next(n for n in lowered.graph.nodes if n.op == "output")
    results = list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    with clock.step("demand") as told:
        cut = _Cut(kinds, results)
        padded = _has_padding(kinds)
        demands = Demand(kinds)
        demand = demands.of([*cut.frontier, *cut.weighted()]) if padded else ""
        told["note"] = f"masked positions are read {_where_read(demand)}" if padded else "no padding"
    with clock.step("emit") as told:
        heads = find_heads(kinds)
        emitter = Emitter(kinds, lowered.graph, heads, alignment)
        emitter.run(cut.frontier)
        emitter.graph.output(tuple(emitter.get(node) for node in cut.frontier))
        mark(kinds, emitter.env)
        rewritten = rewrites(kinds, emitter.env, heads)
        packed = fx.GraphModule(lowered, emitter.graph)
        _drop_dead(packed)
        told["changed"] = len(rewritten)
        told["note"] = ", ".join(f"{kind} x{n}" for kind, n in Counter(r.kind for r in rewritten).items())
        outline_regions(packed, {tag: checkpoint_kwargs(kw) for tag, kw in regions.items()})
    with clock.step("cut") as told:
        inputs = tuple(emitter.inputs)
        tree, key_nodes = _tree_spec(kinds, inputs, demand, demands.shown, lowered)
        keys = extract(lowered, list(key_nodes.values()), set())
        tail = extract(lowered, results, set(cut.frontier), cut.finish())
        sizes = {"keys": keys.module, "packed": packed, "tail": tail.module}
        told["changed"] = len(cut.frontier)
        told["note"] = ", ".join(f"{name} {_calls(module)}" for name, module in sizes.items()) + " nodes"
    by_name = {n.name: n for n in lowered.graph.nodes}
    packs = {i.name: pack_spec(kinds, by_name[i.name]) for i in inputs if i.role == "pack"}
    constants = {i.name: getattr(lowered, i.name) for i in inputs if i.role == "constant"}
    frontier = tuple(_frontier(kinds, node) for node in cut.frontier)
    return Draft(
        lowered, packed, inputs, packs, constants, keys, tuple(key_nodes), tree, tail, frontier,
        rewritten, exits(kinds, cut.frontier, cut.seen), clock.steps, emitter.attentions,
        emitter.recurrences,
    )  # fmt: skip


def _where_read(demand: Any) -> str:
    words = {"": "nowhere", "*": "everywhere"}
    return words[demand] if isinstance(demand, str) else "where the graph says"


def _calls(gm: fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in gm.graph.nodes)


class _Cut:
    """Where the packed graph ends: shared values that private nodes or outputs read."""

    def __init__(self, kinds: Kinds, results: Sequence[Any]) -> None:
        self.kinds = kinds
        self.frontier: list[fx.Node] = []
        self.seen: set[fx.Node] = set()
        for result in results:
            if isinstance(result, fx.Node):
                self._visit(result)

    def _visit(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            node = stack.pop()
            if node in self.seen:
                continue
            self.seen.add(node)
            value = self.kinds.values[node]
            if self._leaves_packed(node):
                self.frontier.append(node)
                if value.form in ("gather", "cross_entropy"):
                    stack.extend(a for a in node.all_input_nodes if a is not value.data[0])
            else:
                stack.extend(node.all_input_nodes)

    def _leaves_packed(self, node: fx.Node) -> bool:
        value = self.kinds.values[node]
        if value.form in ("gather", "cross_entropy"):
            return True
        if value.kind is not Kind.SHARED or node.op in ("placeholder", "get_attr"):
            return False
        if isinstance(node.meta.get("val"), (tuple, list)):
            return False
        # A value by column alone is the same in every row, one by row alone is the same at every position (zeros of
        # [batch, 1, features]): the tail computes both as captured.
        batched, along = self.kinds.has_batch(node), self.kinds.seq_axes(self.kinds.dims(node))
        by_column = (
            self.kinds.batch is not None
            and along
            and not (batched or any(step[0] == "mask" for step in self.kinds.region(node) or ()))
        )
        return not by_column and (bool(along) or not batched)

    def weighted(self) -> list[fx.Node]:
        """Weighted reductions read every position of their operand."""
        return [n for n, v in self.kinds.values.items() if v.form == "weighted"]

    def finish(self) -> dict[fx.Node, Finish]:
        """What the tail does with values picked per grid position: shape them, or finish the loss."""
        out: dict[fx.Node, Finish] = {}
        for node in self.frontier:
            value = self.kinds.values[node]
            if value.form == "gather":
                out[node] = Finish((value.data[1],), _shaped)
            elif value.form == "cross_entropy":
                out[node] = Finish((value.data[1],), _loss(node))
        return out


def _shaped(graph: fx.Graph, picked: fx.Node, needs: list[fx.Node]) -> fx.Node:
    return graph.call_function(aten.reshape_as.default, (picked, needs[0]))


def _loss(node: fx.Node) -> Callable[[fx.Graph, fx.Node, list[fx.Node]], fx.Node]:
    reduction, ignore = arg(node, 3, "reduction", 1), arg(node, 4, "ignore_index", -100)

    def write(graph: fx.Graph, picked: fx.Node, needs: list[fx.Node]) -> fx.Node:
        return graph.call_function(nll_from_log_probs, (picked, needs[0], reduction, ignore))

    return write


def _frontier(kinds: Kinds, node: fx.Node) -> Frontier:
    value = kinds.values[node]
    if value.form in ("gather", "cross_entropy"):
        return Frontier(node.name, None, None)
    region = kinds.region(node)
    return Frontier(node.name, region, expand_spec(kinds, node) if region is not None else None)


def _has_padding(kinds: Kinds) -> bool:
    return bool(kinds.visible)


def _drop_dead(gm: fx.GraphModule) -> None:
    """Remove packed nodes without users, placeholders apart (their list is the calling convention)."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            gm.graph.erase_node(node)
    gm.recompile()


def _shapes(kinds: Kinds) -> tuple[tuple[str, int, int], ...]:
    """Dims of graph inputs that the proof takes to be the batch or the sequence."""
    out = []
    for node in kinds.graph.nodes:
        if node.op == "placeholder" and isinstance(value_of(node), torch.Tensor):
            for i, dim in enumerate(kinds.dims(node)):
                keys = [axis.key() for axis in resolve(dim)]
                for which, axis in ((0, kinds.batch), (1, kinds.seq)):
                    if axis is not None and keys == [axis.key()]:
                        out.append((node.name, i, which))
    return tuple(out)


def _tree_spec(
    kinds: Kinds, inputs: Sequence[Input], demand: Any, shown: bool, lowered: fx.GraphModule
) -> tuple[TreeSpec, dict[str, fx.Node]]:
    """The key of the tree, and everything that the keys graph must compute, by name."""
    masks = next((s.spec for s in kinds.sites.values()), MaskSpec())
    windows = any(s.spec.window for s in kinds.sites.values())
    by_name = {n.name: n for n in lowered.graph.nodes}
    assert kinds.ids is not None
    nodes: dict[str, fx.Node] = {kinds.ids.name: kinds.ids}
    batched = [n for n in kinds.keys if kinds.has_batch(n) or kinds.batch is None]
    if kinds.ids not in batched:
        batched.insert(0, kinds.ids)
    visible = tuple(sorted((n.name, inverted) for n, inverted in kinds.visible))
    documents = tuple(sorted(n.name for n in masks.documents))
    for name in itertools.chain((n.name for n in batched), (n for n, _ in visible), documents, kinds.named):
        nodes[name] = by_name[name]
    for i in inputs:
        if i.role in ("number", "quantity", "scalar", "pack", "index"):
            nodes[i.name] = by_name[i.name]
    name = demand
    if isinstance(demand, fx.Node):
        nodes[demand.name], name = demand, demand.name
    column = "absolute" if kinds.uses_column else "step" if windows else None
    additive = [s.spec for s in kinds.sites.values() if s.spec.additive]
    spec = TreeSpec(
        kinds.ids.name, tuple(n.name for n in batched), visible, documents, column, name,
        shown, bool(additive), min((s.window for s in additive if s.window), default=0),
        bool(kinds.chains.nodes), kinds.chains.silent_at_start(kinds.visible), _shapes(kinds),
    )  # fmt: skip
    return spec, nodes
