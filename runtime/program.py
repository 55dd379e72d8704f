"""A tree program: what runs when a packed graph is called.

The passes cut a captured graph in three (`keys`, `packed`, `tail`) and describe the inputs of the packed graph as
values of this module; :class:`TreeProgram` evaluates them in one fixed order, with the tree of the batch at hand:

    arguments -> keys -> tree -> pack -> packed graph -> expand -> tail -> outputs

Nothing here keeps state between calls except bounded caches keyed by content.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treecompile.runtime.batch import PackedBatch, RegionTensors, TreeCache
from treecompile.runtime.ops import expand

__all__ = [
    "WHOLE",
    "CompilationFailed",
    "ExpandSpec",
    "Frontier",
    "Input",
    "PackSpec",
    "Plan",
    "Region",
    "TreeProgram",
    "TreeSpec",
]

# A grid region, as steps from the whole grid: ("slice", start, stop) along the sequence, ("mask", name) of positions.
# Bounds are integers, None, or the name of a value that the keys graph computes.
Region = tuple[tuple[Any, ...], ...]
WHOLE: Region = ()
# Roles of inputs that are arrays of the layout of a region, or go by one.
_LAYOUT = {"rows", "row_index", "offsets", "positions", "multiplicity", "index"}


class CompilationFailed(Exception):
    """The compiler failed on a packed graph: nothing has run yet, the dense graph still can.

    Args:
        compiler: its name.
        error: what it raised.
    """

    def __init__(self, compiler: str, error: Exception) -> None:
        while isinstance(getattr(error, "inner_exception", None), Exception):
            error = error.inner_exception  # type: ignore[attr-defined]
        super().__init__(f"{compiler} failed on the packed graph: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Input:
    """One input of the packed graph.

    Attributes:
        role: where it comes from: ``argument`` or ``constant`` of the captured graph, a ``number`` (written into the
            compilation), ``quantity`` (a number as a tensor) or ``scalar`` computed from them, a
            ``pack``-ed grid value, a ``tree`` tensor, an array of the layout of a region
            (``rows``, ``row_index``, ``offsets``, ``positions``, ``multiplicity``), or the label ``index`` over one.
        name: of the argument, value or tree tensor.
        region: for layout arrays and indices.
    """

    role: str
    name: str
    region: Region = WHOLE

    def text(self) -> str:
        where = "" if self.region == WHOLE else f" of {_region_text(self.region)}"
        return f"{self.role} {self.name}{where}".strip()


def _region_text(region: Region) -> str:
    parts = []
    for step in region:
        parts.append(f"[:, {step[1]}:{step[2]}]" if step[0] == "slice" else f"[{step[1]}]")
    return "grid" + "".join(parts)


@dataclass(frozen=True)
class PackSpec:
    """How a grid value becomes a packed column: whether it varies by row, and the packed shape (-1: N)."""

    batched: bool
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExpandSpec:
    """How packed values become grid values.

    Attributes:
        axes: in order: ``"batch"``, ``"sequence"`` or the size of a feature axis.
        groups: how many consecutive axes each dim of the value merges.
    """

    axes: tuple[Any, ...]
    groups: tuple[int, ...]

    def apply(self, packed: Tensor, layout: Sequence[Tensor], batch: int) -> Tensor:
        """packed: rows in place of (batch, sequence); layout: row_index [M], offsets, positions."""
        row_index, offsets, positions = layout
        features = [axis for axis in self.axes if isinstance(axis, int)]
        at = self.axes.index("sequence")
        major = int(np.prod([axis for axis in self.axes[:at] if isinstance(axis, int)], dtype=np.int64))
        x = packed.reshape(major, -1, *[a for a in self.axes[at + 1 :] if isinstance(a, int)]).movedim(1, 0)
        width = int(np.prod(x.shape[1:], dtype=np.int64))  # -1 is ambiguous where no row is kept
        out = expand(x.reshape(x.shape[0], width), row_index, offsets, positions)
        grid = [batch, -1] if "batch" in self.axes else [row_index.shape[0]]
        lead = [a for a in self.axes[:at] if isinstance(a, int)]
        out = out.reshape(row_index.shape[0], *lead, *features[len(lead) :]).reshape(*grid, *features)
        source = ["batch", "sequence"] if "batch" in self.axes else ["sequence"]
        order = _positions(source, self.axes)
        out = out.permute(order)
        shape, i = [], 0
        for count in self.groups:
            shape.append(int(np.prod(out.shape[i : i + count], dtype=np.int64)))
            i += count
        expanded: Tensor = out.reshape(shape)
        return expanded


def _positions(source: list[str], axes: tuple[Any, ...]) -> list[int]:
    """The permutation that brings (grid axes, features) into the order of `axes`."""
    order, feature = [], len(source)
    for axis in axes:
        if isinstance(axis, int):
            order.append(feature)
            feature += 1
        else:
            order.append(source.index(axis))
    return order


@dataclass(frozen=True)
class TreeSpec:
    """How the tree of a batch is keyed; all names are outputs of the keys graph.

    Attributes:
        ids: the grid value that gives the shape [batch, sequence].
        keys: grid values that vary by row: two positions merge only where all agree along their prefixes.
        visible: boolean grid values (name, inverted) that must hold for a position to be kept.
        documents: integer grid values; positions of different documents never see each other.
        column: "absolute" where values are read by column, "step" where column differences matter, else None.
        demand: boolean grid value: masked positions that something downstream reads; "" for none, "*" for all.
        shown: values by position leave the graph. Whoever reads them may shift them by one, as a loss does: a masked
            position before a kept one predicts its token.
        additive: a masked query still averages over all keys in the captured graph (finite minimum).
        window: the smallest window, in columns, of an attention with such a mask; 0 for none.
        chained: a recurrence or a convolution reads all tokens before each in the row, masked ones too.
        silent: masked positions before the first kept one leave the state of each of those at zero.
        shapes: (argument, dim, 0 or 1): dims taken to be the batch (0) or the sequence (1) of the ids. Dynamo guards
            symbolic sizes one by one, so that they agree is checked at each call.
    """

    ids: str
    keys: tuple[str, ...]
    visible: tuple[tuple[str, bool], ...] = ()
    documents: tuple[str, ...] = ()
    column: str | None = None
    demand: str = ""
    shown: bool = False
    additive: bool = False
    window: int = 0
    chained: bool = False
    silent: bool = False
    shapes: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Frontier:
    """One output of the packed graph that the tail reads: by expansion, as it is (a global), or per position."""

    name: str
    region: Region | None
    spec: ExpandSpec | None


@dataclass(frozen=True)
class Plan:
    """How a program runs on some arguments: all that depends on those of the keys graph alone.

    Attributes:
        batch: the tree; None where the call runs dense.
        why: why it does.
        numbers: values of ``number`` inputs of the packed graph.
        values: of its other inputs, in order; None for those that come with each call.
        layouts: by region of the grid.
    """

    batch: PackedBatch | None
    why: str
    numbers: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()
    layouts: dict[Region, RegionTensors] = field(default_factory=dict)


@dataclass
class TreeProgram:
    """A captured graph that runs on the tree.

    Args:
        arguments: names of the graph's flat arguments, in order.
        keys: function of the arguments named in `key_arguments`, giving the values named in `key_outputs`.
        inputs: of the packed graph, in order.
        packs: how each packed grid value is shaped.
        constants: tensors of the captured graph.
        packed: ``packed(numbers, values)`` runs the packed graph: `numbers` are the values of ``number`` inputs.
        frontier: of the packed graph's outputs.
        tail: function of the values named in `tail_inputs`.
        dense: the captured graph as stock Inductor compiles it.
        observe: told how each call ran: ``observe("packed" | "dense", reason)``.
        repeats: the keys graph gives equal values for equal arguments and constants, and need not be run for them.
        key_constants: tensors that the keys graph holds.
        number: of this program among all of the process.
    """

    arguments: tuple[str, ...]
    keys: Callable[..., tuple[Any, ...]]
    key_arguments: tuple[str, ...]
    key_outputs: tuple[str, ...]
    tree: TreeSpec
    inputs: tuple[Input, ...]
    packs: dict[str, PackSpec]
    constants: dict[str, Tensor]
    packed: Callable[[tuple[Any, ...], list[Any]], Sequence[Any]]
    frontier: tuple[Frontier, ...]
    tail: Callable[..., tuple[Any, ...]]
    tail_inputs: tuple[str, ...]
    dense: Callable[..., Any]
    observe: Callable[[str, str], None]
    failed: Callable[[CompilationFailed], None]
    min_sharing: float
    cache: TreeCache
    repeats: bool = False
    key_constants: tuple[Tensor, ...] = ()
    number: int = field(default_factory=itertools.count().__next__)

    def __call__(self, *args: Any) -> Any:
        given = dict(zip(self.arguments, args, strict=True))
        if not self._agree(given):
            self.observe("dense", "shapes")
            return self.dense(*args)
        plan = self.plan(given)
        if plan.batch is None:
            self.observe("dense", plan.why)
            return self.dense(*args)
        try:
            outputs = self.run(given, plan, plan.batch)
        except CompilationFailed as error:
            self.failed(error)
            self.observe("dense", "compiler")
            return self.dense(*args)
        self.observe("packed", "")
        return outputs

    def _agree(self, given: dict[str, Any]) -> bool:
        """Whether every argument has the batch and sequence sizes of the others."""
        sizes: tuple[set[int], set[int]] = (set(), set())
        for name, dim, axis in self.tree.shapes:
            sizes[axis].add(given[name].shape[dim])
        return all(len(found) <= 1 for found in sizes)

    def plan(self, given: dict[str, Any]) -> Plan:
        """How the program runs on these arguments, from the cache where their contents were planned before."""
        taken = [given[name] for name in self.key_arguments]

        def build() -> Plan:
            # A plan serves later calls in other modes.
            with torch.inference_mode(False), torch.no_grad():
                return self._plan(dict(zip(self.key_outputs, self.keys(*taken), strict=True)))

        return self.cache.plan(self.number, [*taken, *self.key_constants], build) if self.repeats else build()

    def _plan(self, grid: dict[str, Any]) -> Plan:
        batch, why = self._tree(grid)
        if batch is None:
            return Plan(None, why)
        bounds = _bounds(grid)
        read = [i.region for i in self.inputs if i.role in _LAYOUT]
        read += [item.region for item in self.frontier if item.region is not None and item.spec is not None]
        layouts = {region: batch.layout(region, bounds) for region in dict.fromkeys(read)}
        # There is a label for each position: a gather may read fewer than there are, from the first.
        labels = [i for i in self.inputs if i.role == "index"]
        if any(len(layouts[i.region].row_index) != grid[i.name].numel() for i in labels):
            return Plan(None, "shapes")
        numbers = tuple(grid[i.name] for i in self.inputs if i.role == "number")
        values = tuple(self._value(i, grid, batch, layouts) for i in self.inputs if i.role != "number")
        return Plan(batch, "", numbers, values, layouts)

    def _tree(self, grid: dict[str, Any]) -> tuple[PackedBatch | None, str]:
        """The tree of this batch, or why it runs dense."""
        shape = _grid_shape(grid[self.tree.ids])
        visible = self._visible(grid, shape)
        exact = self._exact(grid, visible, shape)
        if self.tree.additive and exact is not None and visible is not None:
            if self.tree.documents or not bool(_sees(visible, self.tree.window)[exact].all()):
                return None, "masked-query"
        exact = self._either(exact, self._shown(visible))
        documents = self._documents(grid, shape)
        if self.tree.chained:
            why = _breaks_chains(visible, exact, documents, self.tree.silent)
            if why:
                return None, why
            documents = None
        batch = self.cache.get(
            [_as_grid(grid[name], shape) for name in self.tree.keys],
            visible=visible,
            exact=exact,
            documents=documents,
            column_key=self.tree.column,
            device=grid[self.tree.ids].device,
        )
        if batch.tree.n == 0:
            return None, "empty"
        if batch.sharing < self.min_sharing:
            return None, "min_sharing"
        return batch, ""

    def run(self, given: dict[str, Any], plan: Plan, batch: PackedBatch) -> Any:
        """Run the packed graph, expand, tail."""
        inputs = (i for i in self.inputs if i.role != "number")
        values = [self._now(i, value, given) for i, value in zip(inputs, plan.values, strict=True)]
        outputs = self.packed(plan.numbers, values)
        known = dict(given)
        for item, value in zip(self.frontier, outputs, strict=True):
            if item.region is not None and item.spec is not None:
                layout = plan.layouts[item.region]
                value = item.spec.apply(
                    value, (layout.row_index, layout.offsets, layout.positions), batch.tree.batch
                )
            known[item.name] = value
        return self.tail(*(known[name] for name in self.tail_inputs))

    def _value(
        self, i: Input, grid: dict[str, Any], batch: PackedBatch, layouts: dict[Region, RegionTensors]
    ) -> Any:
        """An input of the packed graph as the plan keeps it: nothing that a caller could write to."""
        if i.role in ("argument", "constant"):
            return None
        if i.role in ("scalar", "quantity"):
            return _own(grid[i.name])
        if i.role == "pack":
            return batch.pack(grid[i.name], self.packs[i.name].batched, self.packs[i.name].shape)
        if i.role == "tree":
            return getattr(batch.tensors, i.name)
        if i.role == "index":
            return _own(grid[i.name].reshape(-1))
        return getattr(layouts[i.region], i.role)

    def _now(self, i: Input, planned: Any, given: dict[str, Any]) -> Any:
        """The input of this call. Numbers may leave the packed graph as they are: each call has its own."""
        if i.role == "argument":
            return given[i.name]
        if i.role == "constant":
            return self.constants[i.name]
        if i.role == "scalar":
            return _own(planned)
        if i.role == "quantity":
            return torch.tensor(planned, dtype=torch.int64 if isinstance(planned, int) else torch.float64)
        return planned

    # ---- masks of the grid ----------------------------------------------------------------------------------------

    def _visible(self, grid: dict[str, Any], shape: tuple[int, int]) -> Tensor | None:
        visible: Tensor | None = None
        for name, inverted in self.tree.visible:
            bit = _as_grid(grid[name], shape) != 0
            bit = ~bit if inverted else bit
            visible = bit if visible is None else visible & bit
        return visible

    def _exact(self, grid: dict[str, Any], visible: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
        if visible is None or not self.tree.demand:
            return None
        hidden = ~visible
        if self.tree.demand != "*":
            hidden = hidden & _as_grid(grid[self.tree.demand], shape)
        return hidden if bool(hidden.any()) else None

    def _shown(self, visible: Tensor | None) -> Tensor | None:
        """Masked positions before a kept one; without those where the model averages over what the tree lacks."""
        if visible is None or not self.tree.shown:
            return None
        before = torch.zeros_like(visible)
        before[:, :-1] = ~visible[:, :-1] & visible[:, 1:]
        if self.tree.additive:
            before = before & _sees(visible, self.tree.window) if not self.tree.documents else before & False
        return before if bool(before.any()) else None

    @staticmethod
    def _either(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return b if a is None else a if b is None else a | b

    def _documents(self, grid: dict[str, Any], shape: tuple[int, int]) -> Tensor | None:
        documents: Tensor | None = None
        for name in self.tree.documents:
            ids = _as_grid(grid[name], shape).to(torch.int64)
            documents = ids if documents is None else _paired(documents, ids)
        return documents


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _bounds(grid: dict[str, Any]) -> dict[str, Any]:
    """The values of the keys graph that may bound a region: numbers, and tensors that are no number."""
    return {name: value for name, value in grid.items() if not isinstance(value, Tensor) or value.dim() > 0}


def _paired(a: Tensor, b: Tensor) -> Tensor:
    """One id per pair of ids."""
    both = torch.stack([a.flatten(), b.flatten()])
    paired: Tensor = torch.unique(both, dim=1, return_inverse=True)[1].reshape(a.shape)
    return paired


def _grid_shape(ids: Tensor) -> tuple[int, int]:
    sizes = list(ids.shape)
    return (int(np.prod(sizes[:-1], dtype=np.int64)), int(sizes[-1]))


def _as_grid(value: Tensor, shape: tuple[int, int]) -> Tensor:
    """A grid value with dims of size one anywhere as [batch, sequence]."""
    if value.numel() == shape[0] * shape[1]:
        return value.reshape(shape)
    return value.reshape(1, -1).expand(shape)


def _breaks_chains(
    visible: Tensor | None, exact: Tensor | None, documents: Tensor | None, silent: bool
) -> str:
    """Why a recurrence or convolution of packed tokens would differ from that of the grid; "" if it would not."""
    if documents is not None:
        kept = torch.ones_like(documents, dtype=torch.bool) if visible is None else visible
        first = documents.gather(1, kept.to(torch.int64).argmax(1, keepdim=True))
        if bool(((documents != first) & kept).any()):
            return "chained-documents"
    if visible is None:
        return ""
    seen = visible.cumsum(1)
    before, after = seen == 0, (seen == seen[:, -1:]) & ~visible
    if bool((~visible & ~before & ~after).any()):
        return "masked-between"
    if exact is not None and bool((exact & ~before).any()):
        return "masked-after"
    moved = before & (seen[:, -1:] > 0) if exact is None else before & ((seen[:, -1:] > 0) | exact)
    return "masked-before" if not silent and bool(moved.any()) else ""


def _sees(visible: Tensor, window: int) -> Tensor:
    """bool [B, T]: positions with a visible one before them, within the window."""
    column = torch.arange(visible.shape[1], device=visible.device).expand(visible.shape)
    last = torch.where(visible, column, -1).cummax(1).values
    return (last >= 0) & (column - last < window) if window else last >= 0
