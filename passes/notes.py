"""What a report says of a program: timed steps, rewritten nodes, values that leave the packed graph."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treecompile.passes.axes import Dim, resolve
from treecompile.passes.heads import Head
from treecompile.passes.kinds import Kinds
from treecompile.passes.ops.views import arg
from treecompile.passes.reasons import Reason, name_of, user_line
from treecompile.passes.rule import value_of
from treecompile.passes.values import Kind
from treecompile.runtime.program import WHOLE, Region

__all__ = [
    "Clock",
    "Exit",
    "Rewrite",
    "Step",
    "dtype_text",
    "exits",
    "mark",
    "region_text",
    "rewrites",
    "shape_text",
]

# Keys of node.meta: the kind of a captured node; shape and captured node of a packed one.
KIND = "treecompile_kind"
SHAPE = "treecompile_shape"
SOURCE = "treecompile_source"

_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.bool: "b8", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One step of the pipeline: how many nodes it changed or decided, its time, and what it found."""

    name: str
    changed: int
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Rewrite:
    """One rewritten node: what it was, what it became, where in the user's code."""

    kind: str
    before: str
    after: str
    where: str
    source: str


@dataclass(frozen=True)
class Exit:
    """A value that leaves the packed graph: expanded to the grid, or read per position.

    Attributes:
        name: of the captured node.
        shape, packed: its shape on the grid, and packed.
        where, source: the user's line that computes it.
        output: whether it is an output of the graph.
        reason: why a reader of it cannot be packed; None for outputs and what is known to belong to rows.
    """

    name: str
    shape: str
    packed: str
    where: str
    source: str
    output: bool
    reason: Reason | None


class Clock:
    """Collects steps."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """Times the block; it may set ``changed`` and ``note`` in the dict."""
        told: dict[str, Any] = {"changed": 0, "note": ""}
        start = time.perf_counter()
        yield told
        self.steps.append(Step(name, told["changed"], time.perf_counter() - start, told["note"]))


# ---- texts ----


def dtype_text(dtype: torch.dtype) -> str:
    """``f32`` for torch.float32."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def region_text(region: Region) -> str:
    """A grid region as it would be written: ``[:, -5:]``."""
    parts = []
    for step in region:
        low, high = (("" if b in (None, 0) else str(b)) for b in (*step[1:], None)[:2])
        parts.append(f"[:, {low}:{high}]" if step[0] == "slice" else "[mask]")
    return "".join(parts)


def shape_text(kinds: Kinds, node: fx.Node, packed: bool) -> str:
    """``f32[B, T, 64]`` on the grid, ``f32[1, N, 64]`` packed; H counts the packed rows of a region."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{dtype_text(value.dtype)}[{', '.join(_dim_text(kinds, d, packed) for d in kinds.dims(node))}]"


def _packed_shape(kinds: Kinds, node: fx.Node) -> str:
    """The shape of what stands for a captured node: M positions where entries are read per position."""
    if kinds.values[node].form in ("gather", "cross_entropy"):
        return f"{dtype_text(value_of(kinds.values[node].data[0]).dtype)}[M]"
    return shape_text(kinds, node, packed=True)


def _dim_text(kinds: Kinds, dim: Dim, packed: bool) -> str:
    parts: list[str] = []
    size = 1
    for axis in resolve(dim):
        region = kinds.region_of_axis(axis)
        if kinds.is_batch(axis):
            parts += [] if packed else ["B"]
        elif region is not None:
            cut = region_text(region).replace("[:, ", "[")
            whole, part = ("N", "H") if packed else ("T", f"T{cut}")
            parts.append(whole if region == WHOLE else part)
        elif axis.find().size.is_number:
            size *= int(axis.find().size)
        else:
            parts.append(str(axis.find().size))
    return "*".join([*parts, *([str(size)] if size != 1 or not parts else [])])


# ---- what was rewritten ----

_LABELS = {
    "attention": "tree_attention", "gather": "gather_expand", "cross_entropy": "gather_expand",
    "recurrence": "tree_recurrence", "convolution": "tree_causal_conv1d",
    "weighted": "weighted_reduction", "take": "sub_layout", "table": "column_table",
}  # fmt: skip


def rewrites(kinds: Kinds, env: dict[fx.Node, Any], heads: dict[fx.Node, Head]) -> list[Rewrite]:
    """Every captured node that the packed graph writes in another form, in graph order."""
    out = []
    for node, value in kinds.values.items():
        form = "pack" if _is_packed_input(kinds, node) else value.form
        if node in env and node in heads:
            if node is heads[node].picked:
                out.append(_head(kinds, heads[node]))
        elif node in env and (form == "pack" or form in _LABELS):
            where, source = user_line(node)
            before = f"{_name(node)}  {shape_text(kinds, node, packed=False)}{_detail(kinds, node)}"
            after = _after(kinds, node, form)
            out.append(Rewrite(_LABELS.get(form, form), before, after, where, source))
    return out


def _head(kinds: Kinds, head: Head) -> Rewrite:
    where, source = user_line(head.picked)
    before = f"{_name(head.picked)}  {shape_text(kinds, head.picked, packed=False)}"
    packed, grid = (shape_text(kinds, head.end, packed=p) for p in (True, False))
    read = ["entropy"] * bool(head.spread) + ["log-sum-exp"] * bool(head.lse)
    also = f", with {' and '.join(read)}" if read else ""
    text = f"one entry per position{also}; {packed} in chunks of {head.bytes >> 20} MiB, no {grid}"
    return Rewrite("selective_log_probs", before, f"selective_log_probs  {text}", where, source)


def _is_packed_input(kinds: Kinds, node: fx.Node) -> bool:
    """A value of the grid that enters the packed graph as a column of the tree."""
    if kinds.values[node].kind is not Kind.GRID or not kinds.token_axes(kinds.dims(node)):
        return False
    return kinds.packs_itself(node)


def _name(node: fx.Node) -> str:
    return name_of(node) if node.op == "placeholder" else str(node.target)


def _detail(kinds: Kinds, node: fx.Node) -> str:
    """What an attention may see."""
    site = kinds.sites.get(node)
    if site is None:
        return ""
    spec = site.spec
    terms = ["causal"] if spec.causal else []
    terms += [f"window {spec.window}"] if spec.window else []
    terms += ["visible"] if spec.visible else []
    terms += ["same document"] if spec.documents else []
    written = "  scores, softmax and product written out" if site.transposed_k else ""
    return f"{written}  mask: {' and '.join(terms)}"


def _after(kinds: Kinds, node: fx.Node, form: str) -> str:
    shape = shape_text(kinds, node, packed=True)
    if form == "attention":
        site = kinds.sites[node]
        extra = f"  window={site.spec.window}" if site.spec.window else ""
        extra += f"  softcap={site.softcap:g}" if site.softcap else ""
        extra += "  sinks" if site.sinks is not None else ""
        return f"tree_attention  {shape}{extra}"
    if form == "pack":
        place = "a row and column" if kinds.has_batch(node) else "the column"
        return f"{shape}  read at {place} of the token"
    if form in ("gather", "cross_entropy"):
        x = kinds.values[node].data[0]
        packed, grid = (shape_text(kinds, x, packed=p) for p in (True, False))
        return f"gather_expand  one entry per position from {packed}, no {grid}"
    if form in ("recurrence", "convolution"):
        activation = arg(node, 3, "activation", "") if form == "convolution" else ""
        return f"{_LABELS[form]}  {shape}" + (f"  and {activation}" if activation else "")
    if form == "weighted":
        return f"sum weighted by multiplicity  {shape}"
    if form == "take":
        return f"take  {shape}  the packed rows of grid{region_text(kinds.region(node) or WHOLE)}"
    return f"index_select by column  {shape}"


def exits(kinds: Kinds, frontier: Iterable[fx.Node], used: Container[fx.Node]) -> list[Exit]:
    """The values that leave the packed graph.

    Args:
        kinds: the classified graph.
        frontier: the captured nodes of those values.
        used: nodes that the outputs need.
    """
    out = []
    for node in frontier:
        where, source = user_line(node)
        readers = [kinds.values[user].reason for user in node.users if user in used]
        reasons: list[Reason | None] = list(dict.fromkeys(r for r in readers if r is not None))
        output = any(user.op == "output" for user in node.users)
        shapes = shape_text(kinds, node, packed=False), _packed_shape(kinds, node)
        for reason in reasons or [None]:
            out.append(Exit(node.name, *shapes, where, source, output, reason))
    return out


def mark(kinds: Kinds, env: dict[fx.Node, Any]) -> None:
    """Leave the kind on captured nodes, shape and source on packed ones: texts and drawings show them."""
    for node, value in kinds.values.items():
        rewritten = value.form in _LABELS or _is_packed_input(kinds, node)
        node.meta[KIND] = "rewritten" if node in env and rewritten else value.kind.value
        packed = env.get(node)
        if isinstance(packed, fx.Node) and value.kind is not Kind.OTHER:
            packed.meta.setdefault(SHAPE, _packed_shape(kinds, node))
            packed.meta.setdefault(SOURCE, node.name)
