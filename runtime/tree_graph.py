"""Trees as networkx graphs, as text, and back as rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from treecompile.runtime.errors import OptionError, TreeError
from treecompile.runtime.stretches import Array

if TYPE_CHECKING:
    import networkx as nx

    from treecompile.runtime.tree import RolloutTree

__all__ = ["check_digraph", "from_graph", "to_graph", "to_rows", "to_text"]


def _row_numbers(tree: RolloutTree) -> tuple[Array, int]:
    """The number of each trajectory in `to_rows`, and how many there are.

    Grid rows where each has at most one trajectory, so that empty rows keep their place; else trajectories.
    """
    rows = tree._trajectories.row
    if len(np.unique(rows)) == len(rows):
        return rows, tree.batch
    return np.arange(len(rows)), len(rows)


def _need_keys(tree: RolloutTree) -> None:
    if not tree.keys:
        raise TreeError(
            argument="tree",
            problem="holds no token ids",
            value="a tree built with keep_keys=False",
            remedy="build it with RolloutTree.from_rows, or with from_grid(..., keep_keys=True)",
        )


def to_rows(tree: RolloutTree, key: int = 0) -> list[Array]:
    """See `RolloutTree.to_rows`. O(kept tokens)."""
    _need_keys(tree)
    if not 0 <= key < len(tree.keys):
        raise OptionError(argument="key", value=key, choices=range(len(tree.keys)))
    values, rows = tree.keys[key], tree._trajectories
    numbers, count = _row_numbers(tree)
    out = [values[:0]] * count
    packed = tree.row_index.reshape(-1)
    packed = packed if rows.source is None else rows.source.take(packed)
    for number, start, size in zip(numbers.tolist(), rows.start.tolist(), rows.length.tolist(), strict=True):
        out[number] = values[packed[start : start + size]]
    return out


def to_graph(tree: RolloutTree) -> nx.DiGraph:
    """A `networkx.DiGraph` with one node per segment, numbered in preorder, edges from parent to child.

    Node attributes:
        start, end, subtree_end: packed tokens.
        tokens: their number.
        multiplicity: grid positions that map to the first token.
        columns, positions: [tokens] arrays (positions only if the tree has any).
        pad: True for a leaf pad.
        ids, keys: [tokens] token ids, and a tuple of the further key columns (only if the tree kept its
            keys).
        ends: list of (row, tokens): rows that end in this segment after so many of its tokens.
        label: the text that `RolloutTree.text` prints.
    Graph attribute ``rows``: the number of rows.

    Notes:
        O(N + S + I).
    """
    import networkx as nx

    numbers, count = _row_numbers(tree)
    graph = nx.DiGraph(rows=count)
    pads = tree._table.pad.tolist()
    for s, (start, end, parent, after) in enumerate(tree.segments.tolist()):
        attributes: dict[str, Any] = {
            "start": start, "end": end, "tokens": end - start, "subtree_end": after, "pad": pads[s],
            "multiplicity": int(tree.multiplicity[start]), "columns": tree.column[start:end], "ends": [],
        }  # fmt: skip
        if tree.position is not None:
            attributes["positions"] = tree.position[start:end]
        if tree.keys:
            attributes["ids"] = tree.keys[0][start:end]
            attributes["keys"] = tuple(key[start:end] for key in tree.keys[1:])
        attributes["label"] = _label(s, attributes)
        graph.add_node(s, **attributes)
        if parent >= 0:
            graph.add_edge(parent, s)
    segment = np.searchsorted(tree.segments[:, 0], tree._last, side="right") - 1
    for number, s, n in zip(numbers.tolist(), segment.tolist(), tree._last.tolist(), strict=True):
        graph.nodes[s]["ends"].append((number, n + 1 - graph.nodes[s]["start"]))
    return graph


def _label(number: int, attributes: dict[str, Any]) -> str:
    parts = [str(number), "pad" if attributes["pad"] else f"{attributes['tokens']:,} tok"]
    parts.append(f"col {_span(attributes['columns'])}")
    if "positions" in attributes:
        parts.append(f"pos {_span(attributes['positions'])}")
    return "  ".join([*parts, f"x{attributes['multiplicity']}"])


def _span(values: Array) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}..{values[-1]}"


def to_text(tree: RolloutTree, max_depth: int | None = None) -> str:
    """See `RolloutTree.text`."""
    import networkx as nx

    if tree.n == 0:
        return "(empty tree)"
    return "\n".join(nx.generate_network_text(tree.graph, max_depth=max_depth, sources=_roots(tree)))


def _roots(tree: RolloutTree) -> list[int]:
    return [int(s) for s in np.flatnonzero(tree.segments[:, 2] < 0)]


def from_graph(graph: nx.DiGraph) -> RolloutTree:
    """Build the tree of a forest of segments.

    Args:
        graph: a `networkx.DiGraph` whose edges lead from a segment to the segments that continue it. Node
            attribute ``ids``: the segment's token ids, at least one. Optional: ``keys`` (tuple of further key
            columns), ``positions``, ``pad`` (True: the node is left out), ``ends`` (list of (row, tokens):
            rows that end inside the segment). Without any ``ends``, every leaf is a row, in the order of the
            nodes.

    Returns:
        the tree of the rows, left-aligned; equal prefixes of siblings are merged. `to_graph` of it gives the
        same segments as the graph of a tree without pads, given that graph.

    Raises:
        TreeError: a cycle, a node with two parents, or a segment without tokens.
    """
    from treecompile.runtime.tree import RolloutTree

    _check_forest(graph)
    ends = dict(_row_ends(graph))
    paths = [_path(graph, *ends[row]) if row in ends else [] for row in range(_row_count(graph, ends))]
    some: dict[str, Any] = next((data for _, data in graph.nodes(data=True) if not data.get("pad")), {})

    def rows_of(name: str, index: int | None = None) -> list[Array]:
        return [_concatenate(graph, path, name, index) for path in paths]

    return RolloutTree.from_rows(
        rows_of("ids"),
        positions=rows_of("positions") if "positions" in some else None,
        keys=[rows_of("keys", index) for index in range(len(some.get("keys", ())))],
    )


def _row_count(graph: nx.DiGraph, ends: dict[int, tuple[Hashable, int]]) -> int:
    return max(int(graph.graph.get("rows", 0)), max(ends, default=-1) + 1)


def check_digraph(graph: object) -> None:
    """Refuse what is no ``networkx.DiGraph``."""
    import networkx as nx

    if not isinstance(graph, nx.DiGraph):
        raise TreeError(
            argument="graph",
            problem="needs to be a networkx.DiGraph",
            value=type(graph).__name__,
            remedy="build one with networkx.DiGraph(edges) and set 'ids' on its nodes",
        )


def _check_forest(graph: nx.DiGraph) -> None:
    import networkx as nx

    check_digraph(graph)
    for node, count in graph.in_degree():
        if count > 1:
            raise TreeError(
                argument="graph",
                problem="needs at most one parent per segment",
                value=f"{count} parents of node {node!r}",
                remedy="repeat the segment under each parent: tokens after a join have other prefixes",
            )
    if not nx.is_directed_acyclic_graph(graph):
        raise TreeError(
            argument="graph",
            problem="needs to be a forest",
            value=f"the cycle {[edge[0] for edge in nx.find_cycle(graph)]!r}",
            remedy="remove an edge of the cycle",
        )
    for node, data in graph.nodes(data=True):
        if not data.get("pad") and len(data.get("ids", ())) == 0:
            raise TreeError(
                argument="graph",
                problem="needs token ids in every segment",
                value=f"node {node!r} without a non-empty 'ids' attribute",
                remedy=f"set graph.nodes[{node!r}]['ids'] to a list of token ids",
            )


def _row_ends(graph: nx.DiGraph) -> Iterator[tuple[int, tuple[Hashable, int]]]:
    listed = [(node, data) for node, data in graph.nodes(data=True) if not data.get("pad")]
    if any(data.get("ends") for _, data in listed):
        for node, data in listed:
            for row, tokens in data.get("ends", ()):
                yield row, (node, tokens)
        return
    leaves = [
        (node, data)
        for node, data in listed
        if all(graph.nodes[c].get("pad") for c in graph.successors(node))
    ]
    for row, (node, data) in enumerate(leaves):
        yield row, (node, len(data["ids"]))


def _path(graph: nx.DiGraph, node: Hashable, tokens: int) -> list[tuple[Hashable, int]]:
    """[(segment, tokens of it)] from the root to a row's end."""
    path = [(node, tokens)]
    while above := list(graph.predecessors(path[-1][0])):
        path.append((above[0], len(graph.nodes[above[0]]["ids"])))
    return path[::-1]


def _concatenate(graph: nx.DiGraph, path: list[tuple[Hashable, int]], name: str, index: int | None) -> Array:
    parts = []
    for node, tokens in path:
        value = graph.nodes[node][name]
        parts.append(np.asarray(value if index is None else value[index])[:tokens])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
