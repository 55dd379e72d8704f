"""Whether a captured graph reads the last states of its recurrences.

A model that keeps a cache writes them there. Where the cache is dropped, as in a step of training, nothing reads them,
and a packed graph, which has no such states, is still right.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from treecompile.runtime.ops.leaf_recurrence import leaf_last_state

__all__ = ["reads_states"]

# Results of these share no memory with what they are made of.
_FRESH = frozenset(
    {torch.zeros, torch.zeros_like, torch.empty, torch.empty_like, torch.full, torch.full_like}
)


def reads_states(gm: fx.GraphModule) -> bool:
    """Whether a last state may reach an output of the graph, or be written to an input. Errs towards yes.

    Args:
        gm: as Dynamo gives it to a backend.

    Notes:
        Reached is what uses a reached value; and what is written to with one, with all that it may be a view of.
        O(nodes).
    """
    inner = [m for name, m in gm.named_modules() if name and isinstance(m, fx.GraphModule)]
    if any(node.target is leaf_last_state for m in inner for node in m.graph.nodes):
        return True
    reached: set[fx.Node] = set()
    waiting = [node for node in gm.graph.nodes if node.target is leaf_last_state]
    while waiting:
        node = waiting.pop()
        if node in reached:
            continue
        if node.op in ("output", "placeholder", "get_attr"):
            return True
        reached.add(node)
        for user in node.users:
            waiting += [user, *_written(user)]
    return False


def _written(node: fx.Node) -> list[fx.Node]:
    """What a call writes to: its target and what that may be a view of."""
    if not _writes(node):
        return []
    targets = [x for x in (node.kwargs.get("out"), *node.args[:1]) if isinstance(x, fx.Node)]
    found: list[fx.Node] = []
    while targets:
        target = targets.pop()
        found.append(target)
        if target.op in ("call_function", "call_method") and target.target not in _FRESH:
            targets += target.all_input_nodes
    return found


def _writes(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    if (
        node.kwargs.get("inplace")
        or "out" in node.kwargs
        or node.target in (operator.setitem, operator.delitem)
    ):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    # x.copy_(y), torch.relu_(x), operator.iadd(x, y)
    return name.endswith("_") or (name.startswith("i") and getattr(operator, name, None) is node.target)
