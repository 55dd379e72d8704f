"""Two pictures: the rollout tree and the graph, as DOT; and the block mask as text.

DOT is written here; an SVG is made where the program ``dot`` of Graphviz is installed.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from treecompile.graph_text import shape_of
from treecompile.passes.notes import KIND
from treecompile.passes.reasons import user_line
from treecompile.runtime.tree import RolloutTree

__all__ = ["graph_dot", "mask_text", "svg", "tree_dot"]

FULL, PART, NONE = "██", "░░", "  "
_MOST_BLOCKS = 48


def mask_text(tree: RolloutTree, blocks: int = _MOST_BLOCKS) -> str:
    """The attention mask by blocks: queries down, keys across.

    Args:
        tree: the rollout tree.
        blocks: at most so many rows and columns. A tree with no more segments than that has one block per
            segment, a larger one blocks of equally many packed tokens.

    Returns:
        A line per query block: ``██`` all pairs attend, ``░░`` some do, blank none does.

    Notes:
        O(N * blocks). Windows of single layers are not drawn.
    """
    if tree.n == 0:
        return "(empty tree)"
    by_segment = len(tree.segments) <= blocks
    edges = (
        np.append(tree.segments[:, 0], tree.n)
        if by_segment
        else np.unique(np.linspace(0, tree.n, blocks + 1).astype(np.int64))
    )
    share = _attended(tree, edges)
    what = "segment" if by_segment else "block"
    width = max(len(str(len(edges) - 2)), len(what))
    lines = [f"{what:>{width}}  packed tokens"]
    spans = [f"{a}..{b - 1}" if b - a > 1 else str(a) for a, b in itertools.pairwise(edges)]
    margin = max(map(len, spans))
    for number, (span, row) in enumerate(zip(spans, share, strict=True)):
        cells = "".join(FULL if x == 1 else PART if x > 0 else NONE for x in row)
        lines.append(f"{number:>{width}}  {span:<{margin}} |{cells}|")
    lines.append(f"{FULL} attends to all, {PART} to some, blank to none of the keys of the block")
    return "\n".join(lines)


def _attended(tree: RolloutTree, edges: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[list[float]]:
    """The share of attended pairs of each (query block, key block)."""
    keys = np.arange(tree.n)[:, None]
    low, high = edges[:-1][None, :], edges[1:][None, :]
    seen = np.clip(np.minimum(tree.subtree_end[:, None], high) - np.maximum(keys, low), 0, None)
    pairs = np.add.reduceat(seen, edges[:-1], axis=0)
    sizes = np.diff(edges)
    return (pairs / (sizes[:, None] * sizes[None, :])).T.tolist()  # type: ignore[no-any-return]


# ---- the tree ----


def tree_dot(tree: RolloutTree, rewards: Sequence[float] | None = None) -> str:
    """The tree as DOT: a box per segment, as wide as its tokens.

    Args:
        tree: the rollout tree.
        rewards: one per row; a leaf takes the mean reward of the rows that end in it as its colour, from
            red (lowest) to green (highest).
    """
    graph = tree.graph
    most = max((data["tokens"] for _, data in graph.nodes(data=True)), default=1)
    lines = [
        "digraph tree {",
        "  rankdir=LR;",
        '  node [shape=box, style=filled, fillcolor="#eeeeee", fontsize=10];',
    ]
    for node, data in graph.nodes(data=True):
        width = 0.5 + 3.0 * data["tokens"] / most
        lines.append(
            f'  s{node} [label="{_quoted(data["label"])}", width={width:.2f}, '
            f'fillcolor="{_reward_colour(data["ends"], rewards)}"];'
        )
    lines += [f"  s{a} -> s{b};" for a, b in graph.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _reward_colour(ends: Iterable[tuple[int, int]], rewards: Sequence[float] | None) -> str:
    rows = [row for row, _ in ends]
    if rewards is None or not rows:
        return "#eeeeee"
    low, high = min(rewards), max(rewards)
    mean = sum(rewards[row] for row in rows) / len(rows)
    share = 0.5 if high == low else (mean - low) / (high - low)
    return f"#{int(255 - 119 * share):02x}{int(136 + 119 * share):02x}88"


# ---- the graph ----

_COLOURS = {"shared": "#dddddd", "pair": "#dddddd", "rewritten": "#9ec5fe", "private": "#f5a3a3"}
_LEGEND = {
    "token-local": "#dddddd",
    "rewritten": "#9ec5fe",
    "on the grid: not shared": "#f5a3a3",
    "no token axis, or made before the tree": "#ffffff",
}


@dataclass
class _Box:
    """Consecutive nodes of one module and colour."""

    module: str
    colour: str
    nodes: list[fx.Node] = field(default_factory=list)


def graph_dot(lowered: fx.GraphModule, depth: int = 3) -> str:
    """The captured graph as DOT: consecutive nodes of one module and colour are one box.

    Args:
        lowered: a graph whose nodes carry their kind (``Draft.lowered``).
        depth: how many names of a module path tell boxes apart: 3 for ``model.layers.0``.
    """
    box_of: dict[fx.Node, int] = {}
    boxes: list[_Box] = []
    for node in lowered.graph.nodes:
        if node.op != "call_function":
            continue
        colour = _COLOURS.get(str(node.meta.get(KIND)), "#ffffff")
        module = _module(node, depth)
        single = colour == _COLOURS["rewritten"]
        if single or not boxes or (boxes[-1].module, boxes[-1].colour) != (module, colour):
            boxes.append(_Box(module, colour))
        boxes[-1].nodes.append(node)
        box_of[node] = len(boxes) - 1
    lines = ["digraph graph_ {", "  node [shape=box, style=filled, fontsize=10];"]
    lines += [f'  b{i} [label="{_label(box)}", fillcolor="{box.colour}"];' for i, box in enumerate(boxes)]
    edges = {
        (box_of[source], box_of[node])
        for node in box_of
        for source in node.all_input_nodes
        if source in box_of and box_of[source] != box_of[node]
    }
    lines += [f"  b{a} -> b{b};" for a, b in sorted(edges)]
    lines.append('  subgraph cluster_legend { label="legend";')
    lines += [f'    l{i} [label="{name}", fillcolor="{c}"];' for i, (name, c) in enumerate(_LEGEND.items())]
    return "\n".join([*lines, "  }", "}"]) + "\n"


def _module(node: fx.Node, depth: int) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(entry[0]) for entry in reversed(list(stack.values()))), "")
    path = re.sub(r"^L\['[^']+'\]|\.?__self__|_modules", "", path)
    names = re.findall(r"[A-Za-z_0-9]+", path)
    return ".".join(names[:depth])


def _label(box: _Box) -> str:
    last = box.nodes[-1]
    if box.colour == _COLOURS["rewritten"]:
        text = [str(last.target), shape_of(last), " ".join(user_line(last))]
    else:
        count = len(box.nodes)
        text = [box.module or str(last.target), f"{count} op{'s' if count != 1 else ''}  {shape_of(last)}"]
    return "\\n".join(_quoted(part) for part in text if part)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def svg(dot: str) -> str | None:
    """The SVG of a DOT text; None where Graphviz is not installed or fails."""
    program = shutil.which("dot")
    if program is None:
        return None
    done = subprocess.run(
        [program, "-Tsvg"], input=dot, capture_output=True, text=True, check=False, timeout=120
    )
    return done.stdout if done.returncode == 0 else None
