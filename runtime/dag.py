"""Rollout DAGs: segments that several paths enter, unrolled to a forest.

After a merge, tokens have one text and several prefixes. Attention and recurrences read the prefix, so each path
needs tokens of its own; what the paths share before the merge stays shared.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from treecompile.runtime.errors import TreeError
from treecompile.runtime.tree_graph import check_digraph

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["unroll"]


def unroll(graph: nx.DiGraph, limit: int = 1 << 16) -> nx.DiGraph:
    """Repeat every segment once per path that leads to it.

    Args:
        graph: a `networkx.DiGraph` without cycles; node attributes as in `RolloutTree.from_graph`.
        limit: how many segments the forest may have.

    Returns:
        a forest with nodes (segment, number), numbers from 0 for each segment, attributes shared with the
        graph's; the graph itself if nothing merges. Every leaf is a row, unless ``ends`` say which rows there are.

    Raises:
        TreeError: no DiGraph; a cycle; more than ``limit`` segments; or ``ends`` in a segment that several paths
            reach, which do not say along which of them the row came.

    Example:
        >>> import networkx
        >>> graph = networkx.DiGraph([("a", "c"), ("b", "c"), ("c", "d")])
        >>> sorted(unroll(graph).edges)
        [(('a', 0), ('c', 0)), (('b', 0), ('c', 1)), (('c', 0), ('d', 0)), (('c', 1), ('d', 1))]

    Notes:
        O(size of the result). Paths are counted before anything is built: their number can be exponential.
    """
    import networkx as nx

    check_digraph(graph)
    if all(count <= 1 for _, count in graph.in_degree()):
        return graph
    if not nx.is_directed_acyclic_graph(graph):
        raise TreeError(
            argument="graph",
            problem="needs to have no cycles",
            value=f"the cycle {[edge[0] for edge in nx.find_cycle(graph)]!r}",
            remedy="remove an edge of the cycle",
        )
    order = list(nx.topological_sort(graph))
    paths: dict[Hashable, int] = {}
    for node in order:
        above = list(graph.predecessors(node))
        paths[node] = sum(paths[p] for p in above) if above else 1
        if paths[node] > 1 and graph.nodes[node].get("ends"):
            raise TreeError(
                argument="graph",
                problem="needs one path to every segment in which a row ends",
                value=f"{paths[node]:,} paths to node {node!r}, and rows {graph.nodes[node]['ends']!r} that end there",
                remedy="repeat the segment under each parent and set 'ends' on the copies",
            )
    total = sum(paths.values())
    if total > limit:
        raise TreeError(
            argument="graph",
            problem=f"needs at most {limit:,} segments after merges are unrolled to paths",
            value=f"{total:,} of {len(order):,} nodes",
            remedy="pass only the paths that were rolled out, or raise the limit of treecompile.runtime.dag.unroll",
        )
    forest = nx.DiGraph(**graph.graph)
    made: dict[Hashable, int] = dict.fromkeys(order, 0)
    for node in order:
        above = list(graph.predecessors(node))
        for parent in above or [None]:
            for copy in range(made[parent] if above else 1):
                fresh = (node, made[node])
                made[node] += 1
                forest.add_node(fresh, **graph.nodes[node])
                if above:
                    forest.add_edge((parent, copy), fresh)
    return forest
