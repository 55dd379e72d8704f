"""Causal convolutions as models write them, read from the lowered graph and given one name.

    conv1d(x, w, b, padding=W - 1)[..., :T]           zeros on both sides, the end cut off
    conv1d(pad(x, (W - 1, 0)), w, b)                  zeros before the first token

both with stride and dilation one and a filter of its own for each channel, become `treecompile::causal_conv1d`. A SiLU
that is all that reads one becomes its activation.
The captured graph, which the dense run compiles, keeps what was written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import treecompile.runtime.ops.causal_conv1d  # noqa: F401  (registers treecompile::causal_conv1d)
from treecompile.passes.axes import size_of
from treecompile.passes.ops.views import arg, axis_index
from treecompile.passes.rule import value_of

__all__ = ["name_convolutions"]

aten = torch.ops.aten
CONVOLUTION = torch.ops.treecompile.causal_conv1d.default
# What a function of single values may be moved across.
_MOVES = {aten.transpose.int, aten.permute.default}


def name_convolutions(gm: fx.GraphModule) -> None:
    """Rewrite the causal convolutions of a lowered graph, in place."""
    for node in list(gm.graph.nodes):
        if node.target is aten.conv1d.default and _is_depthwise(node):
            taps = int(value_of(node.args[1]).shape[-1])
            padding = _one(arg(node, 4, "padding", 0))
            if padding == 0 and taps == 1:
                _write(gm, node, node.args[0], node)
            elif padding == 0 and _padded_before(node.args[0], taps - 1):
                _write(gm, node, node.args[0].args[0], node)
            elif padding == taps - 1:
                for user in list(node.users):
                    if _cuts_end(user, node):
                        _write(gm, user, node.args[0], node)
    _take_in_activations(gm)
    gm.recompile()


def _is_depthwise(node: fx.Node) -> bool:
    x, weight = (value_of(a) for a in node.args[:2])
    groups = arg(node, 6, "groups", 1)
    return bool(
        _one(arg(node, 3, "stride", 1)) == 1
        and _one(arg(node, 5, "dilation", 1)) == 1
        and x.dim() == 3
        and groups == x.shape[1] == weight.shape[0]
        and weight.shape[1] == 1
    )


def _one(value: Any) -> Any:
    """A number of one dim, which may be written as a list."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _padded_before(node: Any, count: int) -> bool:
    """Whether a value has `count` zeros before its last dim, and is not padded otherwise."""
    if not isinstance(node, fx.Node) or node.target not in (aten.pad.default, aten.constant_pad_nd.default):
        return False
    sizes = list(node.args[1])
    plain = node.target is aten.constant_pad_nd.default or arg(node, 2, "mode", "constant") == "constant"
    fill = arg(node, 2 if node.target is aten.constant_pad_nd.default else 3, "value", 0)
    return bool(plain and fill in (None, 0) and sizes[:2] == [count, 0] and not any(sizes[2:]))


def _cuts_end(user: fx.Node, conv: fx.Node) -> bool:
    """Whether a slice keeps the first T of a convolution's T + W - 1."""
    if user.target is not aten.slice.Tensor or user.args[0] is not conv:
        return False
    dim, start, step = arg(user, 1, "dim", 0), arg(user, 2, "start"), arg(user, 4, "step", 1)
    along = axis_index(dim, 3) == 2 and start in (None, 0) and step == 1
    return along and bool(size_of(value_of(user).shape[2]) == size_of(value_of(conv.args[0]).shape[2]))


def _write(gm: fx.GraphModule, node: fx.Node, x: fx.Node, conv: fx.Node) -> None:
    with gm.graph.inserting_before(node):
        args = (x, conv.args[1], arg(conv, 2, "bias"))
        new = gm.graph.call_function(CONVOLUTION, args)
    new.meta = {**conv.meta, "val": node.meta["val"]}
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    for unused in (conv, *conv.all_input_nodes[:1]):
        if unused is not node and not unused.users and unused.op == "call_function":
            gm.graph.erase_node(unused)


def _take_in_activations(gm: fx.GraphModule) -> None:
    """Make the SiLU of a convolution part of it, where nothing reads the values between.

    Both must be of one checkpoint region (and annotated alike), and gradients recorded for both or for neither.
    """
    recorded: dict[fx.Node, Any] = {}
    mode = None
    for node in gm.graph.nodes:
        mode = node.args[0] if node.target is torch._C._set_grad_enabled else mode
        recorded[node] = mode
    for node in list(gm.graph.nodes):
        reader = _only_reader(node) if node.target is CONVOLUTION else None
        while reader is not None and reader.target in _MOVES:
            reader = _only_reader(reader)
        if (
            reader is not None
            and reader.target is aten.silu.default
            and recorded[reader] == recorded[node]
            and reader.meta.get("custom") == node.meta.get("custom")
        ):
            node.args = (*node.args[:3], "silu")
            reader.replace_all_uses_with(reader.args[0])
            gm.graph.erase_node(reader)


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
