"""Who computes the attentions and recurrences of a packed graph, for one batch: what the report says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treecompile.passes.notes import dtype_text
from treecompile.passes.sites import AttentionCall, RecurrenceCall
from treecompile.runtime.batch import PackedBatch
from treecompile.runtime.ops.attention_router import Problem, Route, choose, device_of
from treecompile.runtime.ops.recurrence import recurrence_executor

__all__ = ["AttentionRoutes", "RecurrenceRoutes", "attention_routes", "recurrence_routes"]


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


@dataclass(frozen=True)
class RecurrenceRoutes:
    """Recurrences that are alike, and who computes them.

    Attributes:
        call: their heads, sizes and form.
        count: how many there are.
        route: executor, forward and backward, and why not the others.
    """

    call: RecurrenceCall
    count: int
    route: Route

    def __str__(self) -> str:
        call = self.call
        sizes, dtypes = (
            "/".join(map(str, dict.fromkeys(pair)))
            for pair in ((call.k_size, call.v_size), (dtype_text(call.k_dtype), dtype_text(call.v_dtype)))
        )
        form = ["delta rule"] if call.delta else []
        form += [f"a decay per {'channel' if call.vector else 'head'}", f"chunks of {call.chunk}"]
        head = f"tree_recurrence of {call.heads} heads over {call.groups}, size {sizes}, {dtypes}, {', '.join(form)}"
        head += f"   x{self.count}" if self.count > 1 else ""
        return "\n".join([head, *_reasons("forward and backward", self.route)])


def _reasons(direction: str, route: Route) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, why in route.why_not.items():
        names.setdefault(why, []).append(name)
    because = [f"    not {', '.join(those)}: {why}" for why, those in names.items()]
    return [f"  {direction} by {route.executor}", *because]


def recurrence_routes(
    recurrences: Sequence[RecurrenceCall], batch: PackedBatch
) -> tuple[RecurrenceRoutes, ...]:
    """Ask who computes each form of recurrence that a packed graph has; arguments as for `attention_routes`."""
    return tuple(
        RecurrenceRoutes(call, count, Route(*_recurrence_executor(call, batch)))
        for call, count in Counter(recurrences).items()
    )


def _recurrence_executor(call: RecurrenceCall, batch: PackedBatch) -> tuple[str, dict[str, str]]:
    def like(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((), dtype=dtype, device=batch.device).expand(1, batch.tree.n, *shape)

    decay = (call.groups, call.k_size) if call.vector else (call.heads,)
    return recurrence_executor(
        like(call.k_dtype, call.groups, call.k_size),
        like(call.v_dtype, call.heads, call.v_size),
        like(torch.float32, *decay),
        like(torch.float32, call.heads) if call.delta else None,
        call.chunk,
    )


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
