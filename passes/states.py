"""Whether a graph reads the last states of its recurrences.

A model that keeps a cache writes them there. Where the cache is dropped, as in a step of training, nothing reads them,
and a packed graph, which has no such states, is still right.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from treecompile.runtime.ops.leaf_recurrence import leaf_last_state

__all__ = ["made_of_states", "reads_states"]

# Their results hold no value of what they are given, and share no memory with it.
_FRESH = frozenset(
    {
        "zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones",
        "new_empty", "new_full", "empty_strided", "new_empty_strided",
    }
)  # fmt: skip
# Checks of a dtype or a device, which a trace writes before casts.
_HARMLESS = frozenset({torch.ops.aten._assert_tensor_metadata.default})


def reads_states(gm: fx.GraphModule) -> bool:
    """Whether a last state may be read. Errs towards yes.

    Args:
        gm: as Dynamo gives it to a backend, or lowered.
    """
    inner = [m for name, m in gm.named_modules() if name and isinstance(m, fx.GraphModule)]
    within = any(node.target is leaf_last_state for m in inner for node in m.graph.nodes)
    return within or made_of_states(gm) is None


def made_of_states(gm: fx.GraphModule) -> set[fx.Node] | None:
    """The nodes that last states flow into, by use or by being written to; None if one of them may be read.

    Read are outputs of the graph, its inputs and constants if they are written to, what has other effects (assertions,
    prints), and whatever an inner graph is given. O(nodes).
    """
    reached: set[fx.Node] = set()
    waiting = [node for node in gm.graph.nodes if node.target is leaf_last_state]
    while waiting:
        node = waiting.pop()
        if node in reached:
            continue
        if node.op in ("output", "placeholder", "get_attr", "call_module"):
            return None
        if isinstance(node.target, HigherOrderOperator):
            return None
        written = _written(node)
        if not written and node.is_impure() and node.target not in _HARMLESS:
            return None
        reached.add(node)
        waiting += [*written, *(user for user in node.users if not _is_fresh(user) or _written(user))]
    return reached


def _written(node: fx.Node) -> list[fx.Node]:
    """What a call writes to: its targets and what these may be views of."""
    targets = list(_targets(node))
    found: list[fx.Node] = []
    while targets:
        target = targets.pop()
        found.append(target)
        if target.op in ("call_function", "call_method") and (
            not _is_fresh(target) or "out" in target.kwargs
        ):
            targets += target.all_input_nodes if target.target is not leaf_last_state else []
    return found


def _targets(node: fx.Node) -> Iterator[fx.Node]:
    given: list[Any] = [node.kwargs.get("out")]
    if isinstance(node.target, torch._ops.OpOverload):
        for at, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given.append(node.args[at] if at < len(node.args) else node.kwargs.get(argument.name))
    elif _writes(node):
        given += [node.args[:1], node.kwargs.get("input"), node.kwargs.get("self")]
    seen: list[fx.Node] = []
    fx.map_arg(given, seen.append)
    yield from seen


def _writes(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if node.kwargs.get("inplace") or node.target in (operator.setitem, operator.delitem):
        return True
    name = _name(node)
    # x.copy_(y), torch.relu_(x), operator.iadd(x, y)
    return name.endswith("_") or (name.startswith("i") and getattr(operator, name, None) is node.target)


def _name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_fresh(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and _name(node) in _FRESH and "out" not in node.kwargs
