"""Views and rearrangements: dim maps; sizes in the packed graph are always rewritten from the dims."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from treecompile.passes.axes import (
    Axis,
    AxisConflict,
    Dim,
    Dims,
    Span,
    axes_of,
    fresh,
    hint_of,
    regroup,
    resolve,
    size_of,
)
from treecompile.passes.rule import Facts, Infer, Rule, flat, outputs_of, value_of
from treecompile.passes.samples import Call, call, grid, size, sizes, tokens, weight

if TYPE_CHECKING:
    from treecompile.passes.emit import Emitter

aten = torch.ops.aten
END = 9223372036854775807


def arg(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """A positional-or-keyword argument."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def axis_index(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


# ---- regrouping ----------------------------------------------------------------------------------------------------


def infer_view(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    value = value_of(node)
    before = axes_of(dims)
    try:
        if node in infer.uncut:
            raise AxisConflict("a view cuts a token axis")
        out = regroup(dims, tuple(value.shape))
    except AxisConflict:
        return Facts([infer.fresh(value)], mixed=list(dims))
    cut = [axis for axis in before if axis.find().parts is not None]
    return Facts([out], iota=infer.facts[node.args[0]].iota, split=cut)


def emit_view(emitter: Emitter, node: fx.Node) -> fx.Node:
    """A view may meet the contiguous outputs of our ops where the original met strided ones: reshape serves both."""
    source = emitter.get(node.args[0])
    return emitter.call(aten.reshape.default, (source, emitter.sizes(node)), node)


def infer_unsqueeze(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    at = axis_index(node.args[1], len(dims) + 1)
    return Facts([(*dims[:at], (), *dims[at:])], iota=infer.facts[node.args[0]].iota)


def infer_squeeze(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    value = value_of(node.args[0])
    which = arg(node, 1, "dim")
    chosen = range(len(dims)) if which is None else [which] if isinstance(which, int) else list(which)
    gone = {axis_index(d, len(dims)) for d in chosen if _is_one(value.shape[axis_index(d, len(dims))])}
    mixed = [dims[d] for d in gone if dims[d]]
    return Facts([tuple(dim for d, dim in enumerate(dims) if d not in gone)], mixed=mixed)


def _is_one(size: Any) -> bool:
    return bool(size_of(size) == 1)


def emit_squeeze(emitter: Emitter, node: fx.Node) -> fx.Node:
    return emit_view(emitter, node)


def infer_permute(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    order = [axis_index(d, len(dims)) for d in node.args[1]]
    return Facts([tuple(dims[d] for d in order)])


def infer_transpose(infer: Infer, node: fx.Node) -> Facts:
    dims = list(infer.dims(node.args[0]))
    a, b = (axis_index(d, len(dims)) for d in node.args[1:3])
    dims[a], dims[b] = dims[b], dims[a]
    return Facts([tuple(dims)])


def infer_t(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    if len(dims) < 2:
        return Facts([dims])
    return Facts([(*dims[:-2], dims[-1], dims[-2])])


def infer_complex(infer: Infer, node: fx.Node) -> Facts:
    """view_as_complex reads the last dim as real and imaginary part, view_as_real writes them."""
    dims = infer.dims(node.args[0])
    if node.target is aten.view_as_real.default:
        return Facts([(*dims, fresh(2))])
    return Facts([dims[:-1]], mixed=[dims[-1]])


def infer_expand(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    shape = tuple(value_of(node).shape)
    lead = len(shape) - len(dims)
    out = tuple(
        dims[i - lead] if i >= lead and dims[i - lead] else fresh(size) for i, size in enumerate(shape)
    )
    other = node.args[1] if isinstance(node.args[1], fx.Node) else None
    if other is not None:  # expand_as
        out = tuple(infer.pair(a, b) for a, b in zip(out, infer.dims(other), strict=True))
    return Facts([out], iota=infer.facts[node.args[0]].iota)


def emit_expand(emitter: Emitter, node: fx.Node) -> fx.Node:
    return emitter.call(aten.expand.default, (emitter.get(node.args[0]), emitter.sizes(node)), node)


def infer_repeat(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    repeats = list(node.args[1])
    shape = tuple(value_of(node).shape)
    lead = len(repeats) - len(dims)
    out: list[Dim] = []
    mixed: list[Dim] = []
    for i, count in enumerate(repeats):
        dim = dims[i - lead] if i >= lead else ()
        if dim and not _is_one(count):
            mixed.append(dim)
        out.append(dim if dim and _is_one(count) else fresh(shape[i]))
    return Facts([tuple(out)], mixed=mixed)


def emit_repeat(emitter: Emitter, node: fx.Node) -> fx.Node:
    dims, out = emitter.dims(node.args[0]), emitter.dims(node)
    repeats = list(node.args[1])
    lead = len(out) - len(dims)
    sizes = emitter.sizes(node)
    new = [
        count if not emitter.is_token_dim(out[i]) else (1 if i >= lead and dims[i - lead] else sizes[i])
        for i, count in enumerate(repeats)
    ]
    new = [1 if emitter.is_batch_only(out[i]) else count for i, count in enumerate(new)]
    return emitter.call(aten.repeat.default, (emitter.get(node.args[0]), new), node)


def infer_repeat_interleave(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    repeats, dim = node.args[1], arg(node, 2, "dim")
    if dim is None or not isinstance(repeats, int):
        return Facts([infer.fresh(value_of(node))], mixed=list(dims))
    at = axis_index(dim, len(dims))
    # Minor part: the copies. The merged dim keeps the major axes, so that a later view can take them apart again.
    return Facts([(*dims[:at], (*dims[at], *fresh(repeats)), *dims[at + 1 :])])


# ---- cutting and joining ------------------------------------------------------------------------------------------


def _bound(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else value


def infer_slice(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    dim, start, stop, step = (
        arg(node, 1, "dim", 0),
        arg(node, 2, "start"),
        arg(node, 3, "end"),
        arg(node, 4, "step", 1),
    )
    at = axis_index(dim, len(dims))
    out = list(dims)
    size, before = value_of(node).shape[at], value_of(node.args[0]).shape[at]
    iota = infer.facts[node.args[0]].iota
    if size_of(size) == size_of(before) and step == 1:
        return Facts([dims], iota=iota)
    axes = resolve(dims[at])
    if len(axes) == 1 and step == 1:
        axis = axes[0]
        out[at] = (Axis(size_of(size), Span(axis, *_bounds(axis, start, stop)), hint=hint_of(size)),)
        # Counting from zero, a leading piece of a count counts itself.
        keeps = iota is not None and _starts_at_zero(start) and resolve(iota) == axes
        return Facts([tuple(out)], iota=out[at] if keeps else None)
    out[at] = fresh(size)
    return Facts([tuple(out)], mixed=[dims[at]])


def _starts_at_zero(start: Any) -> bool:
    return start is None or start == 0


def _bounds(axis: Axis, start: Any, stop: Any) -> tuple[Any, Any]:
    """Slice bounds in one spelling: start >= 0 or a node; stop < 0, None or a node (literals of static captures
    count from the end, since the end is what varies with the batch)."""
    size = axis.find().size
    if isinstance(start, fx.Node) or isinstance(stop, fx.Node):
        return start or 0, None if stop == END else stop
    start = 0 if start is None else int(start)
    stop = None if stop is None or stop == END else int(stop)
    if isinstance(size, sympy.Integer):
        total = int(size)
        low, high, _ = slice(start, stop).indices(total)
        written_from_end = start < 0
        first = low - total if written_from_end else low
        last = None if high == total else high if stop is not None and stop > 0 else high - total
        return first, last
    return start, stop


def infer_select(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    at = axis_index(node.args[1], len(dims))
    return Facts([(*dims[:at], *dims[at + 1 :])], mixed=[dims[at]] if dims[at] else [])


def infer_pieces(infer: Infer, node: fx.Node) -> Facts:
    """split, chunk, unbind of one dim."""
    dims = infer.dims(node.args[0])
    unbind = node.target is aten.unbind.int
    at = axis_index(arg(node, 1 if unbind else 2, "dim", 0), len(dims))
    outs: list[Dims] = []
    for value in outputs_of(node):
        if unbind:
            outs.append((*dims[:at], *dims[at + 1 :]))
        else:
            same = len(outputs_of(node)) == 1
            outs.append((*dims[:at], dims[at] if same else fresh(value.shape[at]), *dims[at + 1 :]))
    return Facts(outs, mixed=[dims[at]] if len(outs) > 1 and dims[at] else [])


def infer_getitem(infer: Infer, node: fx.Node) -> Facts:
    facts = infer.facts.get(node.args[0])
    value = value_of(node.args[0])
    if facts is None or not isinstance(value, (tuple, list)):
        return Facts([infer.fresh(item) for item in outputs_of(node)])
    tensors = [i for i, item in enumerate(value) if isinstance(item, torch.Tensor)]
    return Facts([facts.outs[tensors.index(node.args[1])]] if node.args[1] in tensors else [])


def joined(node: fx.Node) -> list[fx.Node]:
    """Operands of a cat that are not empty."""
    return [x for x in node.args[0] if value_of(x).dim() != 1 or size_of(value_of(x).shape[0]) != 0]


def infer_cat(infer: Infer, node: fx.Node) -> Facts:
    parts = [x for x in joined(node) if size_of(value_of(x).numel()) != 0] or list(node.args[0])[:1]
    rank = len(infer.dims(parts[0]))
    at = axis_index(arg(node, 1, "dim", 0), rank)
    if len(parts) == 1:
        return Facts([infer.dims(parts[0])])
    out: list[Dim] = []
    for d in range(rank):
        if d == at:
            out.append(fresh(value_of(node).shape[d]))
            continue
        merged: Dim = ()
        for part in parts:
            merged = infer.pair(merged, infer.dims(part)[d])
        out.append(merged)
    return Facts([tuple(out)], mixed=[infer.dims(part)[at] for part in parts if infer.dims(part)[at]])


def emit_cat(emitter: Emitter, node: fx.Node) -> fx.Node:
    parts = [x for x in joined(node) if size_of(value_of(x).numel()) != 0]
    if len(parts) == 1:
        return _as_dtype_of(emitter, node, parts, emitter.get(parts[0]))
    out = emitter.dims(node)
    rank = len(out)
    at = axis_index(arg(node, 1, "dim", 0), rank)
    # cat does not broadcast: an operand without the batch or token axis cannot join one that has it.
    pieces = []
    for part in parts:
        packed = emitter.get(part)
        dims = emitter.dims(part)
        if any(emitter.is_token_dim(out[d]) and not dims[d] for d in range(rank) if d != at):
            sizes = [-1 if d == at else size for d, size in enumerate(emitter.sizes(node))]
            packed = emitter.call(aten.expand.default, (packed, sizes), node)
        pieces.append(packed)
    return _as_dtype_of(emitter, node, parts, emitter.call(aten.cat.default, (pieces, at), node))


def _as_dtype_of(emitter: Emitter, node: fx.Node, parts: list[fx.Node], packed: fx.Node) -> fx.Node:
    """Operands that are empty and left out take part in the promotion of dtypes."""
    dtype = value_of(node).dtype
    if functools.reduce(torch.promote_types, (value_of(part).dtype for part in parts)) == dtype:
        return packed
    return emitter.call(aten.to.dtype, (packed, dtype), node)


def infer_stack(infer: Infer, node: fx.Node) -> Facts:
    parts = list(node.args[0])
    dims = infer.broadcast(*(infer.dims(part) for part in parts))
    at = axis_index(arg(node, 1, "dim", 0), len(dims) + 1)
    return Facts([(*dims[:at], fresh(len(parts)), *dims[at:])])


def infer_pad(infer: Infer, node: fx.Node) -> Facts:
    dims = list(infer.dims(node.args[0]))
    amounts: Sequence[Any] = node.args[1]
    mixed = []
    for i in range(len(amounts) // 2):
        at = len(dims) - 1 - i
        if amounts[2 * i] != 0 or amounts[2 * i + 1] != 0:
            if dims[at]:
                mixed.append(dims[at])
            dims[at] = fresh(value_of(node).shape[at])
    return Facts([tuple(dims)], mixed=mixed)


def infer_mixing(infer: Infer, node: fx.Node) -> Facts:
    """flip, roll: same shape, elements move along the given dims."""
    dims = infer.dims(node.args[0])
    which = node.args[2] if node.target is aten.roll.default and len(node.args) > 2 else node.args[1]
    if node.target is aten.roll.default and len(node.args) < 3:
        return Facts([dims], mixed=[flat(dims)])
    return Facts([dims], mixed=[dims[axis_index(d, len(dims))] for d in which])


def infer_slice_scatter(infer: Infer, node: fx.Node) -> Facts:
    """x with x[..., start:end] replaced: what a copy into a slice of a fresh tensor becomes."""
    dims, source = infer.dims(node.args[0]), infer.dims(node.args[1])
    at = axis_index(arg(node, 2, "dim", 0), len(dims))
    for d in range(len(dims)):
        if d != at:
            infer.pair(dims[d], source[d])
    infer.mix(dims[at])
    return Facts([dims])


def infer_diff(infer: Infer, node: fx.Node) -> Facts:
    dims = infer.dims(node.args[0])
    value = value_of(node)
    at = axis_index(arg(node, 2, "dim", -1), len(dims))
    same = size_of(value.shape[at]) == size_of(value_of(node.args[0]).shape[at])
    out = (*dims[:at], dims[at] if same else fresh(value.shape[at]), *dims[at + 1 :])
    return Facts([out], mixed=[dims[at]])


SAMPLES: dict[Any, list[Call]] = {
    aten.view.default: [
        call(tokens(), sizes("B T K 2")),
        call(tokens(), sizes("BT F")),
        call(tokens(), sizes("B TF")),
        call(tokens(), sizes("T B F")),
        call(tokens(), sizes("B F T")),
        call(tokens(), sizes("B 2 U F")),
        call(tokens("BT F"), sizes("B T F")),
        call(tokens("BT F"), sizes("T B F")),
        call(tokens("B F T"), sizes("B K 2 T")),
        call(grid("B T"), sizes("B 1 T")),
        call(weight("F F"), sizes("F K 2")),
    ],
    aten.reshape.default: [
        call(tokens("B K T 2"), sizes("B K 2T")),
        call(tokens("T B F"), sizes("TB F")),
        call(tokens(), [size("BT"), -1]),
    ],
    aten._unsafe_view.default: [call(tokens("BT F"), sizes("B T K 2"))],
    aten.view_as.default: [call(tokens("BT F"), tokens()), call(tokens(), tokens("T B F"))],
    aten.reshape_as.default: [call(tokens("B T K 2"), tokens())],
    aten.flatten.using_ints: [
        call(tokens(), 0, 1),
        call(tokens(), 1, 2),
        call(tokens("B T K 2"), 2, 3),
        call(tokens("T B F"), 0, 1),
    ],
    aten.unflatten.int: [
        call(tokens(), 2, sizes("K 2")),
        call(tokens("BT F"), 0, sizes("B T")),
        call(tokens("BT F"), 0, sizes("T B")),
        call(tokens(), 1, sizes("U 2")),
    ],
    aten.view_as_complex.default: [call(tokens("B T F 2"))],
    aten.view_as_real.default: [call(tokens("B T F", "complex"))],
    aten.squeeze.default: [call(tokens("B T 1 F"))],
    aten.squeeze.dim: [call(tokens("B T 1"), -1), call(tokens(), 1)],
    aten.squeeze.dims: [call(tokens("B 1 T 1"), [1, 3])],
    aten.unsqueeze.default: [call(tokens(), d) for d in (0, 1, 2, -1)],
    aten.permute.default: [
        call(tokens(), [0, 2, 1]),
        call(tokens(), [1, 0, 2]),
        call(tokens("B T K 2"), [0, 2, 1, 3]),
    ],
    aten.transpose.int: [call(tokens(), 1, 2), call(tokens(), 0, 1), call(tokens("B T K 2"), 1, 2)],
    aten.t.default: [call(tokens("BT F")), call(weight("F F"))],
    aten.mT.default: [call(tokens())],
    aten.numpy_T.default: [call(tokens("BT F"))],
    aten.expand.default: [
        call(tokens("B T 1"), sizes("B T F")),
        call(tokens("B 1 T F"), sizes("B 2 T F")),
        call(weight("F"), sizes("B T F")),
        call(weight("T 1"), sizes("B T F")),
        call(tokens("B T 1"), [-1, -1, size("T")]),
    ],
    aten.expand_as.default: [call(tokens("B T 1"), tokens()), call(weight("F"), tokens())],
    aten.repeat.default: [
        call(tokens(), [1, 1, 2]),
        call(tokens(), [1, 2, 1]),
        call(tokens(), [2, 1, 1]),
        call(tokens(), [2, 1, 1, 1]),
        call(weight("F"), [size("B"), size("T"), 1]),
    ],
    aten.repeat_interleave.self_int: [call(tokens(), 2, d) for d in (0, 1, 2)] + [call(tokens(), 2)],
    aten.slice.Tensor: [
        call(tokens(), 1, 0, -1),
        call(tokens(), 1, 1, END),
        call(tokens(), 1, 1, 3),
        call(tokens(), 1, -2, END),
        call(tokens(), 1, 0, END, 2),
        call(tokens(), 0, 0, 2),
        call(tokens(), 2, 0, 2),
        call(tokens(), 2, 1, END, 2),
        call(tokens("BT F"), 0, 0, -1),
        call(weight("T F"), 0, 0, size("T")),
        call(grid("B T"), 1, 1, END),
    ],
    aten.slice_scatter.default: [
        call(tokens(), tokens("B T 2"), 2, 0, 2),
        call(tokens(), weight("B 2 F"), 1, 0, 2),
        call(tokens(), weight("B 2 F"), 1, 1, 3),
    ],
    aten.select.int: [
        call(tokens(), 2, 0),
        call(tokens(), 1, 0),
        call(tokens(), 1, -1),
        call(tokens(), 0, 0),
    ],
    aten.split.Tensor: [call(tokens(), 2, 2), call(tokens(), 2, 1), call(tokens(), 2, 0)],
    aten.split.sizes: [call(tokens(), [1, 3], 2)],
    aten.split_with_sizes.default: [call(tokens(), [1, 3], 2), call(tokens("B F T"), [1, 3], 1)],
    aten.chunk.default: [call(tokens(), 2, 2), call(tokens(), 2, 1)],
    aten.unbind.int: [call(tokens(), 2), call(tokens(), 1), call(tokens(), 0)],
    aten.cat.default: [
        call([tokens(), tokens()], 2),
        call([tokens(), tokens()], 1),
        call([tokens(), tokens()], 0),
        call([tokens(), tokens("B T 1")], -1),
        call([tokens(), weight("B T F")], 2),
        call([tokens("BT F"), tokens("BT F")], 1),
    ],
    aten.stack.default: [call([tokens(), tokens()], d) for d in (0, 1, 2, -1)],
    aten.pad.default: [call(tokens(), [1, 1]), call(tokens(), [0, 0, 1, 0]), call(tokens(), [0, 0, 0, 0])],
    aten.constant_pad_nd.default: [call(tokens(), [0, 2], 1.5), call(tokens(), [0, 0, 0, 1])],
    aten.flip.default: [
        call(tokens(), [2]),
        call(tokens(), [1]),
        call(tokens(), [0]),
        call(tokens(), [1, 2]),
    ],
    aten.roll.default: [call(tokens(), [1], [2]), call(tokens(), [1], [1]), call(tokens(), [1])],
    aten.diff.default: [call(tokens(), 1, 2), call(tokens(), 1, 1), call(grid("B T"), 1, -1)],
}

RULES = [
    Rule(
        "view",
        (
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.view_as.default,
            aten.reshape_as.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
        ),
        infer_view,
        emit_view,
        samples=SAMPLES,
    ),
    Rule(
        "view",
        (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
        infer_squeeze,
        emit_squeeze,
        samples=SAMPLES,
    ),
    Rule("view", (aten.unsqueeze.default,), infer_unsqueeze, samples=SAMPLES),
    Rule("view", (aten.permute.default,), infer_permute, samples=SAMPLES),
    Rule("view", (aten.transpose.int,), infer_transpose, samples=SAMPLES),
    Rule("view", (aten.t.default, aten.mT.default, aten.numpy_T.default), infer_t, samples=SAMPLES),
    Rule(
        "complex", (aten.view_as_complex.default, aten.view_as_real.default), infer_complex, samples=SAMPLES
    ),
    Rule("view", (aten.expand.default, aten.expand_as.default), infer_expand, emit_expand, samples=SAMPLES),
    Rule("view", (aten.repeat.default,), infer_repeat, emit_repeat, samples=SAMPLES),
    Rule("view", (aten.repeat_interleave.self_int,), infer_repeat_interleave, samples=SAMPLES),
    Rule("slice", (aten.slice.Tensor,), infer_slice, samples=SAMPLES),
    Rule("slice", (aten.select.int,), infer_select, samples=SAMPLES),
    Rule(
        "slice",
        (
            aten.split.Tensor,
            aten.split.sizes,
            aten.split_with_sizes.default,
            aten.chunk.default,
            aten.unbind.int,
        ),
        infer_pieces,
        samples=SAMPLES,
    ),
    Rule("slice", (operator.getitem,), infer_getitem, samples=SAMPLES),
    Rule("join", (aten.cat.default,), infer_cat, emit_cat, samples=SAMPLES),
    Rule("join", (aten.stack.default,), infer_stack, samples=SAMPLES),
    Rule("join", (aten.pad.default, aten.constant_pad_nd.default), infer_pad, samples=SAMPLES),
    Rule("join", (aten.slice_scatter.default,), infer_slice_scatter, samples=SAMPLES),
    Rule("rearrange", (aten.flip.default, aten.roll.default), infer_mixing, samples=SAMPLES),
    Rule("rearrange", (aten.diff.default,), infer_diff, samples=SAMPLES),
]
