"""Who computes the attentions of a packed graph, for one batch: what the report says of the router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treecompile.passes.notes import dtype_text
from treecompile.passes.sites import AttentionCall
from treecompile.runtime.batch import PackedBatch
from treecompile.runtime.ops.attention_router import Problem, Route, choose, device_of

__all__ = ["AttentionRoutes", "attention_routes"]


@dataclass(frozen=True)
class AttentionRoutes:
    """Attentions that are alike, and who computes them.

    Attributes:
        problem: their heads, sizes and options.
        count: how many there are.
        forward, backward: executors, and why not the others.
    """

    problem: Problem
    count: int
    forward: Route
    backward: Route

    def __str__(self) -> str:
        problem = self.problem
        sizes = dict.fromkeys((problem.qk_size, problem.v_size))
        head = f"tree_attention of {problem.heads} heads over {problem.kv_heads}, size {'/'.join(map(str, sizes))}"
        head += f", window {problem.window}" if problem.window else ""
        head += f", softcap {problem.softcap:g}" if problem.softcap else ""
        lines = [f"{head}, {dtype_text(problem.dtype)}" + (f"   x{self.count}" if self.count > 1 else "")]
        if self.forward == self.backward:
            return "\n".join([*lines, *_reasons("forward and backward", self.forward)])
        return "\n".join([*lines, *_reasons("forward", self.forward), *_reasons("backward", self.backward)])


def _reasons(direction: str, route: Route) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, why in route.why_not.items():
        names.setdefault(why, []).append(name)
    because = [f"    not {', '.join(those)}: {why}" for why, those in names.items()]
    return [f"  {direction} by {route.executor}", *because]


def attention_routes(attentions: Sequence[AttentionCall], batch: PackedBatch) -> tuple[AttentionRoutes, ...]:
    """Ask the router about each form of attention that a packed graph has.

    Args:
        attentions: of the packed graph.
        batch: whose tree they run on.

    Returns:
        One entry per form, in the order of the graph.
    """
    device, tensors = device_of(batch.device), batch.tensors
    counts = Counter(_problem(attention, batch) for attention in attentions)
    return tuple(
        AttentionRoutes(
            problem,
            count,
            choose("forward", problem, device, tensors.segments_host, tensors.pieces),
            choose("backward", problem, device, tensors.segments_host, tensors.pieces),
        )
        for problem, count in counts.items()
    )


def _problem(attention: AttentionCall, batch: PackedBatch) -> Problem:
    kind, dtype = batch.device.type, attention.dtype
    autocast = attention.autocast
    if autocast is None and torch.is_autocast_enabled(kind):
        autocast = torch.get_autocast_dtype(kind)
    if isinstance(autocast, torch.dtype) and dtype != torch.float64:
        dtype = autocast
    return Problem(
        attention.heads,
        attention.kv_heads,
        batch.tree.n,
        attention.qk_size,
        attention.v_size,
        dtype,
        attention.scale,
        attention.softcap,
        attention.window,
    )
