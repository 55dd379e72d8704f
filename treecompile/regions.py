"""Autocast regions of a captured graph, written as ``with`` blocks again.

Dynamo records a region as two calls, one that enters autocast and one that leaves it. Traced a second time, as the
dense form of a graph is, they are calls like any other: where Dynamo has to break the graph in between, it finds
another autocast state than it began with, and fails (seen with torch 2.11). A ``with`` block it leaves by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

__all__ = ["with_autocast_blocks"]

_ENTER, _EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


@dataclass
class _Region:
    """Nodes between an enter and its exit.

    Attributes:
        settings: device type, dtype, enabled, cache_enabled.
        items: nodes and inner regions, in order.
    """

    settings: tuple[Any, ...]
    items: list[_Item] = field(default_factory=list)

    def nodes(self) -> list[fx.Node]:
        """All nodes inside, those of inner regions included."""
        found: list[fx.Node] = []
        for item in self.items:
            found += item.nodes() if isinstance(item, _Region) else [item]
        return found


_Item: TypeAlias = "fx.Node | _Region"


def with_autocast_blocks(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with each autocast region as a call of a function that has a ``with`` block.

    Args:
        gm: a captured graph.

    Returns:
        A graph module that computes the same; `gm` itself if it has no region, or regions that do not nest.

    Example:
        >>> g = fx.Graph()
        >>> x = g.placeholder("x")
        >>> mode = g.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
        >>> y = g.call_function(operator.matmul, (x, x))
        >>> _ = g.call_function(torch.amp.autocast_mode._exit_autocast, (mode,))
        >>> _ = g.output(y)
        >>> with_autocast_blocks(fx.GraphModule({}, g))(torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    items = _nested(gm)
    if items is None or not any(isinstance(item, _Region) for item in items):
        return gm
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    _copy(gm, items, graph, known)
    return fx.GraphModule(gm, graph)


def _nested(gm: fx.GraphModule) -> list[_Item] | None:
    """Nodes and regions, None if enters and exits do not pair."""
    open_regions: list[tuple[fx.Node, _Region]] = []
    items: list[_Item] = []
    for node in gm.graph.nodes:
        if node.target is _ENTER:
            region = _Region(tuple(node.args))
            open_regions.append((node, region))
        elif node.target is _EXIT:
            if not open_regions or open_regions[-1][0] is not node.args[0]:
                return None
            _, region = open_regions.pop()
            (open_regions[-1][1].items if open_regions else items).append(region)
        else:
            (open_regions[-1][1].items if open_regions else items).append(node)
    return None if open_regions else items


def _copy(gm: fx.GraphModule, items: Sequence[_Item], graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> None:
    for item in items:
        if isinstance(item, _Region):
            _call(gm, item, graph, known)
        else:
            known[item] = graph.node_copy(item, lambda n: known[n])


def _call(gm: fx.GraphModule, region: _Region, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> None:
    """A region as one call, and what is read of its results outside."""
    inside = set(region.nodes())
    reads: dict[fx.Node, None] = {}
    for node in region.nodes():
        reads.update(dict.fromkeys(n for n in node.all_input_nodes if n not in inside))
    results = [node for node in region.nodes() if any(user not in inside for user in node.users)]
    body = fx.Graph()
    own = {node: body.placeholder(node.name) for node in reads}
    _copy(gm, region.items, body, own)
    body.output(tuple(own[node] for node in results))
    called = graph.call_function(
        _block(fx.GraphModule(gm, body), region.settings), tuple(known[node] for node in reads)
    )
    for i, node in enumerate(results):
        known[node] = graph.call_function(operator.getitem, (called, i))


def _block(body: fx.GraphModule, settings: tuple[Any, ...]) -> Callable[..., Any]:
    device, dtype, enabled, cache = settings

    def autocast_block(*args: Any) -> Any:
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache):
            return body(*args)

    return autocast_block
