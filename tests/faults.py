"""Planted faults: small wrong changes of the passes and the runtime, each of which some law case must notice.

A *law* here is one or more small models on small batches, forwards first and then one backward, compared with the
dense eager run. Models are captured by Dynamo once; the passes are run again for each fault, so that a fault costs
well under a second.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.fuzz import KEEP, TOLERANCE, Called, Data, Inputs, Policy, Program, inputs, planned, scaled
from tests.law import Run, compare, counting, run
from treecompile import backend, lowering
from treecompile.passes import emit, masks, program, scores
from treecompile.passes.demand import Demand
from treecompile.passes.emit import Emitter
from treecompile.passes.kinds import Kinds
from treecompile.passes.masks import MaskReader, MaskSpec
from treecompile.passes.ops.views import axis_index
from treecompile.passes.sites import Attentions
from treecompile.runtime import batch as batches
from treecompile.runtime import cache
from treecompile.runtime import program as runtime
from treecompile.runtime.batch import PackedBatch, RegionTensors, TreeTensors
from treecompile.runtime.ops import attention, attention_pieces, attention_plan
from treecompile.runtime.program import TreeProgram

__all__ = ["FAULTS", "LAWS", "Fault", "Law", "Prepared"]

aten = torch.ops.aten
expand = importlib.import_module("treecompile.runtime.ops.expand")  # its name in the package is the op
selective = importlib.import_module("treecompile.runtime.ops.selective_log_probs")  # as well
Plant = Callable[[pytest.MonkeyPatch], None]


# ---- laws ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """Models on batches.

    Attributes:
        calls: in order; equal programs are one model.
        expect: how every call runs: "packed", or the slug of a refusal.
    """

    calls: tuple[tuple[Program, Data], ...]
    expect: str = "packed"


def _law(p: Program, *data: Data, expect: str = "packed") -> Law:
    return Law(tuple((p, d) for d in data), expect)


_PLAIN = Program(layers=2, place="rotary", positions="cumsum")
_TREE = Data(count=5, length=8, seed=1)
_RIGHT = dataclasses.replace(_TREE, pad="right")
_LEFT = dataclasses.replace(_TREE, pad="left")
_BOTH = dataclasses.replace(_TREE, pad="both", holes="columns")
_SCATTERED = dataclasses.replace(_TREE, tree="copies", holes="scattered")
_SINKS = Program(place="rotary", attend="where", sinks=True, softcap=1.5)
_WINDOW = Program(place="none", attend="sdpa", window=2)


def _with(p: Program, **changes: Any) -> Program:
    return dataclasses.replace(p, **changes)


LAWS: dict[str, Law] = {
    "logits": _law(_PLAIN, _BOTH),
    "left": _law(Program(place="slice"), _LEFT),
    "offset": _law(Program(place="offset"), _RIGHT),
    "mean": _law(_with(_PLAIN, tail="mean"), _RIGHT),
    "row_mean": _law(_with(_PLAIN, tail="row_plain"), _LEFT),
    "last": _law(_with(_PLAIN, cut="last", tail="mean"), _LEFT),
    "inner": _law(_with(_PLAIN, cut="inner"), _TREE),
    "window": _law(_WINDOW, _SCATTERED),
    "documents": _law(Program(place="rotary", documents="input"), _RIGHT),
    "restart": _law(Program(place="rotary", positions="restart", documents="input"), _RIGHT),
    "positions": _law(Program(place="rotary", positions="restart"), _RIGHT),
    "sinks": _law(_SINKS, _RIGHT),
    "grouped": _law(Program(heads=4, group=2, place="rotary"), _RIGHT),
    "twice": _law(Program(place="rotary"), _RIGHT, dataclasses.replace(_RIGHT, seed=2)),
    "checkpoint": _law(
        Program(place="rotary", checkpoint=True),
        Data(count=2, length=4, tree="apart", seed=1),
        Data(count=2, length=5, tree="copies", seed=4),
    ),
    "loss": _law(Program(place="rotary", tail="ce", cut="shift"), _RIGHT),
    "pads_in_loss": _law(Program(place="rotary", tail="ce"), dataclasses.replace(_RIGHT, labelled="all")),
    "logprob": _law(Program(place="rotary", tail="logprob_loss"), dataclasses.replace(_TREE, tree="copies")),
    "reference": _law(Program(place="rotary", tail="kl"), _RIGHT),
    "scale": _law(Program(place="rotary", attend="additive"), _RIGHT),
    "pieces": _law(_with(_PLAIN, tail="mean"), dataclasses.replace(_RIGHT, tile=1)),
    "two_keys": Law(((Program(place="none"), _LEFT), (Program(place="slice"), _LEFT))),
    "two_windows": Law(((_WINDOW, _TREE), (_with(_WINDOW, window=4), _TREE))),
    "averages": _law(_with(_PLAIN, attend="additive", tail="mean"), _LEFT, expect="masked-query"),
    "weak_mask": _law(Program(attend="additive", level=-3.0), _RIGHT, expect="mask"),
    "prefix": _law(Program(refused="prefix"), _RIGHT, expect="mask"),
    "flip": _law(Program(layers=2, refused="flip"), _TREE, expect="mixes-tokens"),
}


@dataclass
class _Graph:
    """A captured graph and the arguments that Dynamo passes to it."""

    module: fx.GraphModule
    arguments: tuple[Any, ...]


def _capture(model: Policy, given: Inputs) -> _Graph:
    found: list[_Graph] = []

    def keep(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found.append(_Graph(gm, arguments))
            return gm(*arguments)

        return call

    torch._dynamo.reset()
    torch.compile(model, backend=keep)(*given.args)
    assert len(found) == 1, "the model is one graph"
    return found[0]


class Prepared:
    """A law, captured, with its dense run.

    Args:
        law: the law.
    """

    def __init__(self, law: Law) -> None:
        self.law = law
        self.models = {p: Policy(p) for p, _ in law.calls}
        self.given = [inputs(p, d) for p, d in law.calls]
        self.parameters = {
            f"{i}.{name}": x for i, m in enumerate(self.models.values()) for name, x in m.named_parameters()
        }
        models = [self.models[p] for p, _ in law.calls]
        self.graphs = [_capture(m, g) for m, g in zip(models, self.given, strict=True)]
        self.dense = self._run(list(models))

    def _run(self, calls: list[Any]) -> Run:
        """All forwards, then one backward of their sum."""

        def forward() -> Any:
            outputs: list[Tensor] = []
            for call, (p, d), given in zip(calls, self.law.calls, self.given, strict=True):
                with planned(d.tile):
                    outputs += Called(call, self.models[p], given)(*given.args)
            return tuple(outputs)

        return run(forward, (), {}, parameters=self.parameters, kept=None)

    def check(self) -> None:
        """Run the passes and the packed graphs.

        Raises:
            AssertionError: what is not as in the dense run, or ran in another way.
        """
        backend.clear()
        lowering.clear()
        options = {"compiler": "aot_eager", "min_sharing": 0}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lowering, "_compile_graph", lambda gm, *_: gm)
            calls = [self._program(graph, options) for graph in self.graphs]
            with counting() as seen:
                tree = self._run(calls)
        compare(*scaled(self.dense, tree), TOLERANCE)
        how = "packed" if self.law.expect == "packed" else f"dense:{self.law.expect}"
        assert seen[how] == len(calls), f"expected {self.law.expect}, ran {dict(seen)}"

    @staticmethod
    def _program(graph: _Graph, options: dict[str, Any]) -> Callable[..., Any]:
        """A graph on the tree, built when it is first called: order matters to caches."""

        def call(*_: Any) -> Any:
            found = backend.tree(graph.module, graph.arguments, options=options)
            return tuple(found(*graph.arguments))

        return call


# ---- faults ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: of the fault.
        laws: those of which at least one must fail.
        plant: patches the package.
    """

    name: str
    laws: tuple[str, ...]
    plant: Plant


FAULTS: list[Fault] = []


def fault(*laws: str) -> Callable[[Plant], Plant]:
    """Register a fault under the name of its function."""

    def add(plant: Plant) -> Plant:
        FAULTS.append(Fault(plant.__name__, laws, plant))
        return plant

    return add


def _around(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``change(original, *arguments)``."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def _tensors(patch: pytest.MonkeyPatch, change: Callable[[TreeTensors, PackedBatch], TreeTensors]) -> None:
    original = PackedBatch.__dict__["tensors"].func
    patch.setattr(PackedBatch, "tensors", property(lambda self: change(original(self), self)))


def _regions(patch: pytest.MonkeyPatch, change: Callable[..., RegionTensors]) -> None:
    """`change(region, steps, batch)` on every layout."""
    original = PackedBatch._make
    patch.setattr(PackedBatch, "_make", lambda self, steps: change(original(self, steps), steps, self))


# The tree and its masks.


def _subtree_end(step: int) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        _around(
            patch,
            attention_pieces,
            "visible_pairs",
            lambda real, end, *rest: real(end + step * (end > 0), *rest),
        )

    return plant


FAULTS.append(Fault("subtree_end_short_by_one", ("logits",), _subtree_end(-1)))
FAULTS.append(Fault("subtree_end_long_by_one", ("logits",), _subtree_end(1)))


@fault("logits")
def everything_before_is_visible(patch: pytest.MonkeyPatch) -> None:
    """Causal over the packed order: cousins see each other."""
    _tensors(patch, lambda t, b: dataclasses.replace(t, subtree_end=torch.full_like(t.subtree_end, b.tree.n)))


@fault("logits")
def siblings_swapped(patch: pytest.MonkeyPatch) -> None:
    original = PackedBatch.__dict__["first"].func

    def swapped(self: PackedBatch) -> Tensor:
        first, table = original(self).clone(), self.tree.segments
        for a in range(len(table)):
            for b in range(a + 1, len(table)):
                if table[a, 2] == table[b, 2]:
                    i, j = int(table[a, 0]), int(table[b, 0])
                    first[i], first[j] = first[j].clone(), first[i].clone()
                    return first
        return first

    patch.setattr(PackedBatch, "first", property(swapped))


@fault("logits", "left")
def visible_inverted(patch: pytest.MonkeyPatch) -> None:
    def inverted(real: Any, *args: Any) -> Any:
        visible = real(*args)
        return None if visible is None else ~visible

    _around(patch, TreeProgram, "_visible", inverted)


@fault("documents")
def documents_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TreeProgram, "_documents", lambda *_: None)


@fault("mean", "row_mean")
def exact_pads_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TreeProgram, "_exact", lambda *_: None)


@fault("pads_in_loss")
def demand_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Demand, "of", lambda *_: "")


@fault("pads_in_loss")
def labels_are_not_demand(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Demand, "_labels", lambda *_: "")


@fault("averages")
def masked_queries_taken_for_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runtime, "_sees", lambda visible, window: torch.ones_like(visible))


# The key.


def _key(patch: pytest.MonkeyPatch, **changes: Callable[[Any], Any]) -> None:
    def change(real: Any, self: Any, keys: Any, **kwargs: Any) -> Any:
        keys = changes["keys"](list(keys)) if "keys" in changes else keys
        return real(self, keys, **{name: changes.get(name, lambda x: x)(x) for name, x in kwargs.items()})

    _around(patch, batches.TreeCache, "get", change)


@fault("positions", "restart")
def key_column_left_out(patch: pytest.MonkeyPatch) -> None:
    _key(patch, keys=lambda keys: keys[:1])


@fault("left")
def column_left_out_of_the_key(patch: pytest.MonkeyPatch) -> None:
    _key(patch, column_key=lambda _: None)


@fault("window")
def steps_left_out_of_the_key(patch: pytest.MonkeyPatch) -> None:
    _key(patch, column_key=lambda _: None)


@fault("positions")
def column_for_position(patch: pytest.MonkeyPatch) -> None:
    def value(real: Any, self: Any, i: Any, grid: Any, batch: Any, layouts: Any) -> Any:
        found = real(self, i, grid, batch, layouts)
        if i.role == "pack" and i.name != self.tree.ids and not found.is_floating_point():
            return batch.tensors.column.to(found.dtype).reshape(found.shape)
        return found

    _around(patch, TreeProgram, "_value", value)


@fault("left", "offset")
def table_read_by_row_number(patch: pytest.MonkeyPatch) -> None:
    def counted(t: TreeTensors, b: PackedBatch) -> TreeTensors:
        return dataclasses.replace(
            t, column=torch.arange(b.tree.n, dtype=torch.int32).clamp(max=b.tree.length - 1)
        )

    _tensors(patch, counted)


@fault("offset")
def offset_of_the_table_lost(patch: pytest.MonkeyPatch) -> None:
    def table(self: Emitter, node: fx.Node) -> fx.Node:
        at = axis_index(node.args[1] if len(node.args) > 1 else 0, len(self.dims(node)))
        return self.call(aten.index_select.default, (self.get(node.args[0]), at, self.tree("column")), node)

    patch.setattr(Emitter, "_write_table", table)


# Caches.


@fault("twice")
def cached_tree_of_another_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache, "_fingerprint", lambda _: 0)
    patch.setattr(cache, "_equal", lambda *_: True)


@fault("two_keys")
def cache_blind_to_the_kind_of_key(patch: pytest.MonkeyPatch) -> None:
    _around(
        patch,
        cache.TreeCache,
        "get",
        lambda real, self, arrays, build, **kw: real(self, arrays, build, device="cpu"),
    )


@fault("two_windows")
def code_shared_whatever_its_numbers(patch: pytest.MonkeyPatch) -> None:
    _around(
        patch,
        backend,
        "canonical_text",
        lambda real, *args: re.sub(r"(?<![\w.])\d+(\.\d+)?", "0", real(*args)),
    )


@fault("checkpoint")
def checkpoint_with_the_latest_tree(patch: pytest.MonkeyPatch) -> None:
    """The tree as ambient state: a recomputation takes that of the forward that ran last."""
    latest: list[TreeTensors] = []

    def forward(real: Any, self: Any, given: Any, grid: Any, batch: PackedBatch) -> Any:
        latest[:] = [batch.tensors]
        return real(self, given, grid, batch)

    def attend(real: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        t = latest[0]
        return real(q, k, v, t.subtree_end, t.column, t.segments_host, t.pieces, *rest[4:])

    _around(patch, TreeProgram, "run", forward)
    _around(patch, attention, "pieces_forward", attend)


# Layouts, sums and their adjoints.


@fault("mean")
def unweighted_sum(patch: pytest.MonkeyPatch) -> None:
    _regions(patch, lambda r, *_: dataclasses.replace(r, multiplicity=torch.ones_like(r.multiplicity)))


@fault("last")
def multiplicity_of_the_whole_grid(patch: pytest.MonkeyPatch) -> None:
    def whole(r: RegionTensors, steps: Any, batch: PackedBatch) -> RegionTensors:
        counts = torch.from_numpy(batch.tree.multiplicity[r.packed].astype("int64"))
        return dataclasses.replace(r, multiplicity=counts)

    _regions(patch, whole)


@fault("inner")
def layout_shifted(patch: pytest.MonkeyPatch) -> None:
    _regions(patch, lambda r, *_: dataclasses.replace(r, row_index=r.row_index.roll(1)))


@fault("inner")
def rows_of_a_slice_counted_from_the_whole(patch: pytest.MonkeyPatch) -> None:
    def whole(r: RegionTensors, steps: Any, batch: PackedBatch) -> RegionTensors:
        return (
            r if len(steps) < 2 else dataclasses.replace(r, rows=torch.from_numpy(r.packed.astype("int64")))
        )

    _regions(patch, whole)


@fault("inner")
def slice_bounds_moved(patch: pytest.MonkeyPatch) -> None:
    original = PackedBatch._make

    def moved(self: PackedBatch, steps: Any) -> RegionTensors:
        return original(self, tuple(_moved(step) for step in steps))

    patch.setattr(PackedBatch, "_make", moved)


def _moved(step: tuple[Any, ...]) -> tuple[Any, ...]:
    """x[:, -KEEP:] read one position too early."""
    return ("slice", -KEEP - 1, -1) if step == ("slice", -KEEP, None) else step


def _segment_sum(patch: pytest.MonkeyPatch, change: Callable[..., Tensor]) -> None:
    _around(patch, expand, "segment_sum", change)


@fault("logits")
def gradient_of_one_branch_only(patch: pytest.MonkeyPatch) -> None:
    _segment_sum(patch, lambda real, grad, offsets, positions: grad.index_select(0, positions[offsets[:-1]]))


@fault("logits")
def adjoint_of_expand_in_bf16(patch: pytest.MonkeyPatch) -> None:
    _segment_sum(patch, lambda real, grad, *csr: real(grad.bfloat16(), *csr).to(grad.dtype))


@fault("logprob")
def equal_labels_overwrite_each_other(patch: pytest.MonkeyPatch) -> None:
    def last(
        real: Any, grad: Tensor, row: Tensor, index: Tensor, offsets: Tensor, positions: Tensor, columns: int
    ) -> Tensor:
        out = grad.new_zeros(offsets.shape[0] - 1, columns)
        for m in positions.tolist():
            out[row[m], index[m]] = grad[m]
        return out

    _around(patch, expand, "label_sum", last)
    _around(patch, selective, "label_sum", last)


@fault("logprob")
def probabilities_weighted_by_one_branch(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a log-sum-exp, where a row has several labels."""

    def first(real: Any, grad: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
        return grad.index_select(0, positions[offsets[:-1]])

    _around(patch, selective, "segment_sum", first)


@fault("last", "inner")
def gradient_of_taken_rows_lost(patch: pytest.MonkeyPatch) -> None:
    _around(patch, expand, "take_backward", lambda real, *args: torch.zeros_like(real(*args)))


# Losses.


@fault("loss")
def label_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def shifted(real: Any, labels: Tensor, classes: int, ignore: int | None) -> Tensor:
        return (real(labels, classes, ignore) + 1) % classes

    _around(patch, emit, "label_index", shifted)


@fault("loss")
def ignored_labels_counted_in_the_mean(patch: pytest.MonkeyPatch) -> None:
    def mean(real: Any, log_probs: Tensor, target: Tensor, reduction: int, ignore: int) -> Tensor:
        found: Tensor = real(log_probs, target, 2 if reduction == 1 else reduction, ignore)
        return found / target.numel() if reduction == 1 else found

    _around(patch, program, "nll_from_log_probs", mean)


@fault("reference")
def gradients_through_no_grad(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(emit, "MODES", ())


# Attention.


def _attention(patch: pytest.MonkeyPatch, name: str, change: Callable[..., Any]) -> None:
    _around(patch, attention, name, change)


@fault("window", "two_windows")
def window_wider_by_one(patch: pytest.MonkeyPatch) -> None:
    def wider(real: Any, *args: Any) -> MaskSpec | None:
        spec: MaskSpec | None = real(*args)
        return dataclasses.replace(spec, window=spec.window + 1) if spec is not None and spec.window else spec

    _around(patch, MaskReader, "_relation", wider)


@fault("sinks")
def gradient_of_sinks_dropped(patch: pytest.MonkeyPatch) -> None:
    def without(real: Any, *args: Any) -> Tensor:
        found: Tensor = real(*args)
        return torch.zeros_like(found)

    _around(patch, attention_pieces, "_sinks_backward", without)


@fault("sinks")
def sinks_left_out(patch: pytest.MonkeyPatch) -> None:
    _attention(patch, "pieces_forward", lambda real, *args: real(*args[:7], None, *args[8:]))


@fault("sinks")
def scale_after_the_softcap(patch: pytest.MonkeyPatch) -> None:
    """softcap(q @ k) * scale for softcap(q @ k * scale), in both directions."""

    def late(real: Any, *args: Any) -> Any:
        *first, scale, softcap, window, vendor = args
        return real(*first, scale, softcap * scale, window, vendor)

    _attention(patch, "pieces_forward", late)
    _attention(patch, "pieces_backward", late)


@fault("grouped")
def query_heads_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Head h reads key head h % count for h // group."""

    def other(real: Any, q: Tensor, k: Tensor, *rest: Any) -> Any:
        mixed = q.unflatten(1, (-1, k.shape[1])).transpose(1, 2).flatten(1, 2)
        return real(mixed, k, *rest)

    _attention(patch, "pieces_forward", other)


@fault("scale")
def scale_of_the_call_ignored(patch: pytest.MonkeyPatch) -> None:
    _around(
        patch,
        Attentions,
        "add",
        lambda real, self, node, site: real(self, node, dataclasses.replace(site, scale=None)),
    )


@fault("pieces")
def pieces_not_weighted_when_merged(patch: pytest.MonkeyPatch) -> None:
    def mean(real: Any, out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
        before = out.clone()
        real(out, lse, new_out, new_lse)
        out.copy_((before + new_out) / 2)

    _around(patch, attention_pieces, "_merge", mean)


@fault("pieces")
def ancestors_left_out_of_the_plan(patch: pytest.MonkeyPatch) -> None:
    """Only the diagonal pieces: what a subtree sees of its ancestors is lost."""

    def diagonal(real: Any, *args: Any, **kwargs: Any) -> Any:
        rows = real(*args, **kwargs)
        return rows[(rows[:, 0] == attention_plan.INFO) | (rows[:, 5] == 1)]

    _around(patch, batches, "plan_pieces", diagonal)


# Proofs.


@fault("weak_mask")
def weak_bias_taken_for_hidden(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(masks, "MASKED", -1.0)
    patch.setattr(scores, "MASKED", -1.0)


@fault("prefix")
def unknown_terms_of_a_mask_ignored(patch: pytest.MonkeyPatch) -> None:
    def trusting(real: Any, self: Any, term: Any, whole: Any) -> MaskSpec:
        try:
            found: MaskSpec = real(self, term, whole)
        except masks.Unproved:
            return MaskSpec(causal=True)
        return found

    _around(patch, MaskReader, "_term", trusting)


@fault("flip")
def mixing_ops_taken_for_local(patch: pytest.MonkeyPatch) -> None:
    def local(real: Any, self: Any, node: fx.Node, *rest: Any) -> Any:
        return None if node.target is aten.flip.default else real(self, node, *rest)

    _around(patch, Kinds, "_blocked", local)


def needed(faults: list[Fault]) -> Iterator[str]:
    """Names of the laws that these faults name, once each."""
    yield from dict.fromkeys(name for each in faults for name in each.laws)
