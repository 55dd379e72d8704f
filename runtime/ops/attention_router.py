"""Which executor computes a tree attention: the Triton kernels or pieces, forward and backward each.

The Triton kernels run wherever they can. Both executors follow one contract, so a forward of one may precede a backward
of the other.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["Route", "force", "last_route", "route"]

EXECUTORS = ("triton", "pieces")
# Overrides by direction; the variable holds one name, or one each for forward and backward: "triton,pieces".
VARIABLE = "TREECOMPILE_ATTENTION"
MOST_HEAD_SIZE = 256

_forced: dict[str, str] = {}
_last: dict[str, Route] = {}


@dataclass(frozen=True)
class Route:
    """Who computes one direction.

    Attributes:
        executor: "triton" or "pieces".
        why_not: reason by executor that does not.
    """

    executor: str
    why_not: dict[str, str] = field(default_factory=dict)


def route(direction: str, q: Tensor, v: Tensor, scale: float) -> Route:
    """Choose the executor of one call.

    Args:
        direction: "forward" or "backward".
        q: [1, Hq, N, Dqk].
        v: [1, Hkv, N, Dv].
        scale: factor on the logits.

    Returns:
        The route; `last_route` gives it again.

    Raises:
        ValueError: the executor asked for by `force` or the environment cannot run these inputs.

    Example:
        >>> route("forward", torch.zeros(1, 1, 2, 64), torch.zeros(1, 1, 2, 64), 1.0)
        Route(executor='pieces', why_not={'triton': 'not on a CUDA device'})
    """
    missing = why_not_triton(q, v, scale)
    asked = _forced.get(direction) or _environment().get(direction, "")
    if asked not in ("", *EXECUTORS):
        raise ValueError(f"tree_attention: no executor {asked!r}, there are {', '.join(EXECUTORS)}")
    if asked == "triton" and missing:
        raise ValueError(f"tree_attention: triton was asked for, but: {missing}")
    if asked == "pieces":
        found = Route("pieces", {"triton": "pieces was asked for"})
    elif missing:
        found = Route("pieces", {"triton": missing})
    else:
        found = Route(
            "triton", {"pieces": "triton was asked for" if asked else "triton runs wherever it can"}
        )
    _last[direction] = found
    return found


def why_not_triton(q: Tensor, v: Tensor, scale: float) -> str:
    """Say why the Triton kernels cannot run these inputs, or ""; arguments as for `route`."""
    if not q.is_cuda:
        return "not on a CUDA device"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{q.dtype} has no matrix units of its own precision"
    if max(q.shape[3], v.shape[3]) > MOST_HEAD_SIZE:
        return f"head sizes {q.shape[3]} and {v.shape[3]}: the largest is {MOST_HEAD_SIZE}"
    if scale <= 0:
        return "the scale is not positive"
    return _why_not_device(q.device)


@lru_cache(maxsize=64)
def _why_not_device(device: torch.device) -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor} is below 8.0" if major < 8 else ""


def _environment() -> dict[str, str]:
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    return {"forward": names[0], "backward": names[-1]}


def last_route(direction: str) -> Route | None:
    """The route of the last call in a direction, of any thread; None before the first."""
    return _last.get(direction)


@contextmanager
def force(forward: str = "", backward: str = "") -> Iterator[None]:
    """Within the block, in every thread: use these executors ("" leaves the choice).

    Example:
        >>> with force(forward="pieces"):
        ...     route("forward", torch.zeros(1, 1, 2, 64), torch.zeros(1, 1, 2, 64), 1.0).executor
        'pieces'
    """
    before = dict(_forced)
    _forced.update(forward=forward, backward=backward)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
