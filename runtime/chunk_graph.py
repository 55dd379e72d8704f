"""Chunk plans as networkx graphs and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import networkx as nx

    from treecompile.runtime.chunks import ChunkPlan
    from treecompile.runtime.rounds import Rounds

__all__ = ["figures", "to_graph", "to_text"]


def to_graph(plan: ChunkPlan) -> nx.DiGraph:
    """A `networkx.DiGraph` with one node per block, numbered in preorder, edges from parent to child.

    Node attributes:
        first, end: packed range of the owned tokens. tokens, replay: all tokens of the block, replayed ones.
        strahler: Strahler number.
        round, sequence: where the block runs, with boundary states.
        label: the text that `ChunkPlan.text` prints.
    Edge attribute ``handoff``: the child starts a sequence, in a later round, from the parent's state.

    Notes:
        O(K).
    """
    import networkx as nx

    rounds = plan.rounds()
    starts = np.zeros(plan.blocks, np.bool_)
    starts[rounds.head] = True
    columns = (
        plan.first, plan.end, plan.replay, plan.parent, plan.strahler, rounds.round, rounds.sequence, starts,
    )  # fmt: skip
    graph = nx.DiGraph(chunk=plan.chunk, alignment=plan.alignment)
    for block, (first, end, replay, parent, strahler, turn, sequence, start) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        label = (
            f"{block}  {end - first} tok" + (f" + {replay} replayed" if replay else "") + f"  round {turn}"
        )
        graph.add_node(
            block, first=first, end=end, tokens=end - first + replay, replay=replay, strahler=strahler,
            round=turn, sequence=sequence, label=label,
        )  # fmt: skip
        if parent >= 0:
            graph.add_edge(parent, block, handoff=start)
    return graph


def to_text(plan: ChunkPlan, max_depth: int | None = None) -> str:
    """See `ChunkPlan.text`."""
    import networkx as nx

    if plan.blocks == 0:
        return "(no blocks)"
    roots = np.flatnonzero(plan.parent < 0).tolist()
    return "\n".join(nx.generate_network_text(plan.graph, max_depth=max_depth, sources=roots))


def figures(plan: ChunkPlan) -> str:
    """See `ChunkPlan`: blocks, replay, rounds under both models."""
    dense, blocks = plan.dense_chunks, plan.blocks
    forked = plan._above[plan.replay > 0]
    states = len(np.unique(plan.parent[plan.replay > 0]))
    forks = len(np.unique(forked))
    where = "trajectories" if plan.alignment == "trajectory" else "branches"
    ratio = f" ({dense / blocks:.2f}x)" if blocks else ""
    lines = [
        f"chunk plan: C={plan.chunk}, aligned to {where}, {plan.tree.n:,} packed tokens",
        f"  blocks   {blocks:,} of {dense:,} dense chunks{ratio}",
        f"  replay   {_count(plan.replayed_before, 'token')} before absorbing prefixes, {plan.replayed:,} after; "
        f"{_count(states, 'state')} for {_count(forks, 'fork')} inside a chunk",
    ]
    if plan.alignment == "trajectory":
        order = int(plan.strahler.max(initial=0))
        lines.append(_rounds_line(plan.rounds("boundary"), f"boundary states (Strahler number {order})"))
    lines.append(_rounds_line(plan.rounds("final"), "final states"))
    return "\n".join(lines)


def _rounds_line(rounds: Rounds, name: str) -> str:
    shown = [f"{size:,}" for size in rounds.longest.tolist()]
    if len(shown) > 8:
        shown = [*shown[:4], "...", *shown[-3:]]
    parts = " + ".join(shown) if shown else "0"
    total = f" = {int(rounds.longest.sum()):,}" if len(shown) > 1 else ""
    bound = "" if rounds.proved[0] else " (perhaps not the smallest)"
    handoffs = _count(len(rounds.handoffs), "handoff") + (
        "" if rounds.proved[1] else " (perhaps not the fewest)"
    )
    return f"  rounds   {rounds.count} with {name}: longest sequences {parts}{total}{bound}, {handoffs}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
