"""Which executor computes a tree attention, forward and backward each.

There are two: the Triton kernels, and pieces on a vendor's kernel, cuDNN's or FlashAttention-2. Where several can run,
the least predicted time decides (`attention_costs`), once per tree by content. All follow one contract, so a forward of
one may precede a backward of another.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treecompile.runtime.ops.attention_costs import Problem, pieces_microseconds, triton_microseconds
from treecompile.runtime.ops.attention_kernels import Kernel, choose_kernel
from treecompile.runtime.ops.attention_launch import Launch, launch_of
from treecompile.runtime.ops.attention_pieces import request_for

__all__ = ["Device", "Problem", "Route", "choose", "device_of", "force", "last_route", "problem_of", "route"]

# "pieces" is whichever kernel is best for them, and all there is where no vendor has one for whole pieces.
VENDORS = ("pieces-cudnn", "pieces-flash")
EXECUTORS = ("triton", *VENDORS, "pieces")
# Overrides by direction; the variable holds one name, or one each for forward and backward: "triton,pieces".
VARIABLE = "TREECOMPILE_ATTENTION"
MOST_HEAD_SIZE = 256
# A tree of more has segments too short for pieces, and its table is not read by the host at every call.
MOST_SEGMENTS = 1024
# Predictions are off by a few percent. The Triton kernels' results repeat bit for bit, which the vendors' gradients do
# not, and they need no plan: others must promise this much less time.
MARGIN = 0.05
# Other devices' kernels compare in other ways.
CALIBRATED = (9, 0)

_forced: dict[str, str] = {}
_last: dict[str, Route] = {}


@dataclass(frozen=True)
class Device:
    """What a device and its software offer.

    Attributes:
        capability: compute capability; (0, 0) where there is no CUDA.
        triton: whether Triton is installed.
        cudnn_head_size: the largest that cuDNN's attention takes.
        cudnn_missing: why it takes none, or "".
        deterministic: whether only deterministic algorithms are allowed.
    """

    capability: tuple[int, int]
    triton: bool = True
    cudnn_head_size: int = 256
    cudnn_missing: str = ""
    deterministic: bool = False


@dataclass(frozen=True)
class Route:
    """Who computes one direction.

    Attributes:
        executor: one of `EXECUTORS`.
        why_not: reason by executor that does not.
        predicted: microseconds by executor, of those that were compared.
    """

    executor: str
    why_not: dict[str, str] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def vendor(self) -> str:
        """Whose kernel runs the pieces, for `choose_kernel`."""
        return self.executor.partition("-")[2]


def problem_of(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, window: int) -> Problem:
    """Describe a call; arguments as for `tree_attention`."""
    return Problem(
        q.shape[1], k.shape[1], q.shape[2], q.shape[3], v.shape[3], q.dtype, scale, softcap, window
    )


def route(direction: str, problem: Problem, device: Device, segments: Tensor, pieces: Tensor) -> Route:
    """Choose the executor of a call that is about to run; `last_route` gives the route again.

    Arguments, result and errors are those of `choose`.
    """
    found = _last[direction] = choose(direction, problem, device, segments, pieces)
    return found


def choose(direction: str, problem: Problem, device: Device, segments: Tensor, pieces: Tensor) -> Route:
    """Choose the executor of one call.

    Args:
        direction: "forward" or "backward".
        problem: from `problem_of`.
        device: from `device_of`.
        segments: int32 [S, 4] on the CPU.
        pieces: int32 [P, 6] on the CPU, from `plan_pieces` or `plan_header`.

    Returns:
        The route. It depends on the arguments and on what is asked for, on nothing else.

    Raises:
        ValueError: the executor asked for by `force` or the environment cannot run these inputs.

    Example:
        >>> from treecompile.runtime.ops.attention_plan import plan_pieces
        >>> table = np.array([[0, 2, -1, 2]], np.int32)
        >>> host, plan = torch.from_numpy(table), torch.from_numpy(plan_pieces(table))
        >>> q = torch.zeros(1, 1, 2, 64)
        >>> found = choose("forward", problem_of(q, q, q, 1.0, 0.0, 0), device_of(q.device), host, plan)
        >>> found.executor, found.why_not["triton"]
        ('pieces', 'not on a CUDA device')
    """
    asked = _forced.get(direction) or _environment().get(direction, "")
    if asked not in ("", *EXECUTORS):
        raise ValueError(f"tree_attention: no executor {asked!r}, there are {', '.join(EXECUTORS)}")
    tree: tuple[bytes, bytes] | None = None
    if device.capability == CALIBRATED and len(segments) <= MOST_SEGMENTS:
        tree = segments.numpy().tobytes(), pieces.numpy().tobytes()
    return _chosen(direction, problem, device, tree, asked)


@lru_cache(maxsize=256)
def _chosen(
    direction: str, problem: Problem, device: Device, tree: tuple[bytes, bytes] | None, asked: str
) -> Route:
    """The route. `tree` is the content of segments and plan, where times are predicted from it."""
    refused = refusals(direction, problem, device)
    if asked in refused:
        raise ValueError(f"tree_attention: {asked} was asked for, but: {refused[asked]}")
    able = [name for name in (*VENDORS, "triton") if name not in refused]
    incomparable = _incomparable(problem, device, tree)
    predicted = {}
    if tree is not None and not incomparable:
        predicted = {name: _microseconds(name, direction, problem, *tree) for name in able}
    executor = asked
    if asked in ("", "pieces"):
        among = [name for name in able if not asked or name in VENDORS]
        executor = _best(among, predicted) if among else "pieces"
    why_not = {}
    for name in EXECUTORS:
        # Plain pieces are what the vendors' are too, where these can run.
        if name == executor or (name == "pieces" and set(VENDORS) & set(able)):
            continue
        if asked:
            why_not[name] = f"{asked} was asked for"
        elif name == "pieces":
            why_not[name] = "no vendor has a kernel for whole pieces here"
        elif name in predicted:
            why_not[name] = _slower(name, executor, predicted)
        else:
            why_not[name] = refused.get(name) or incomparable
    return Route(executor, why_not, predicted)


def _incomparable(problem: Problem, device: Device, tree: tuple[bytes, bytes] | None) -> str:
    """Why times are not predicted, or "": then the Triton kernels run wherever they can."""
    if device.capability != CALIBRATED:
        return "times are not known for compute capability {}.{}".format(*device.capability)
    if tree is None:
        return f"pieces are not planned for more than {MOST_SEGMENTS:,} segments"
    span = int(np.frombuffer(tree[1], np.int32)[2])
    if problem.window and not 0 <= span <= problem.window:
        return "a window cuts pieces into strips"
    return ""


def _microseconds(executor: str, direction: str, problem: Problem, segments: bytes, pieces: bytes) -> float:
    if executor == "triton":
        return triton_microseconds(direction, problem, segments)
    launch, kernel = launched(executor, problem, segments, pieces)
    return pieces_microseconds(executor, direction, problem, launch, kernel)


def launched(executor: str, problem: Problem, segments: bytes, pieces: bytes) -> tuple[Launch, Kernel]:
    """Return what a vendor's pieces launch for a tree, from the cache where they run it, and their kernel.

    Args:
        executor: one of `VENDORS`.
        problem: the call.
        segments, pieces: content of these tensors.
    """
    kernel = choose_kernel(torch.device("cuda"), problem.dtype, 0.0, executor.partition("-")[2])
    request = request_for(kernel, problem.heads, problem.kv_heads, problem.window)
    plan, table = (np.frombuffer(x, np.int32) for x in (pieces, segments))
    return launch_of(plan.reshape(-1, 6), table.reshape(-1, 4), request), kernel


def _best(able: list[str], predicted: dict[str, float]) -> str:
    if not predicted:
        return able[-1]
    best = min(able, key=lambda name: predicted[name])
    if "triton" in able and predicted[best] > (1 - MARGIN) * predicted["triton"]:
        return "triton"
    return best


def _slower(name: str, executor: str, predicted: dict[str, float]) -> str:
    text = f"predicted {predicted[name] / 1e3:.3f} ms, {executor} {predicted[executor] / 1e3:.3f} ms"
    return text if predicted[name] >= predicted[executor] else f"{text}: less than {MARGIN:.0%} apart"


def refusals(direction: str, problem: Problem, device: Device) -> dict[str, str]:
    """Say which executors cannot run a call, and why; arguments as for `route`."""
    both = _refused_by_all(problem, device)
    found = {
        "triton": both or _refused_by_triton(problem, device),
        "pieces-cudnn": both or _refused_by_vendors(problem) or _refused_by_cudnn(direction, problem, device),
        "pieces-flash": both or _refused_by_vendors(problem),
    }
    return {name: why for name, why in found.items() if why}


def _refused_by_all(problem: Problem, device: Device) -> str:
    """Why no kernel for half precision on CUDA takes a call, or ""."""
    if device.capability == (0, 0):
        return "not on a CUDA device"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"{problem.dtype} has no matrix units of its own precision"
    if max(problem.qk_size, problem.v_size) > MOST_HEAD_SIZE:
        return f"head sizes {problem.qk_size} and {problem.v_size}: the largest is {MOST_HEAD_SIZE}"
    return _below(8, device)


def _below(major: int, device: Device) -> str:
    have = device.capability
    return f"compute capability {have[0]}.{have[1]} is below {major}.0" if have[0] < major else ""


def _refused_by_triton(problem: Problem, device: Device) -> str:
    if problem.scale <= 0:
        return "the scale is not positive"
    return "" if device.triton else "triton is not installed"


def _refused_by_vendors(problem: Problem) -> str:
    return "vendors' kernels have no softcap" if problem.softcap > 0 else ""


def _refused_by_cudnn(direction: str, problem: Problem, device: Device) -> str:
    if why := _below(9, device) or device.cudnn_missing:
        return why
    if max(problem.qk_size, problem.v_size) > device.cudnn_head_size:
        return (
            f"head sizes {problem.qk_size} and {problem.v_size}: cuDNN's largest is {device.cudnn_head_size}"
        )
    if direction == "backward" and device.deterministic:
        return "deterministic algorithms are asked for"
    return ""


def device_of(device: torch.device) -> Device:
    """Describe a device."""
    if device.type != "cuda":
        return Device((0, 0))
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    backend: Any = torch.backends.cuda
    return _described(device, backend.cudnn_sdp_enabled(), deterministic and not warns)


@lru_cache(maxsize=64)
def _described(device: torch.device, cudnn_enabled: bool, deterministic: bool) -> Device:
    capability = torch.cuda.get_device_capability(device)
    cudnn: Any = torch.backends.cudnn
    version = cudnn.version() or 0
    missing = ""
    if version < 90000:
        missing = "there is no cuDNN 9"
    elif not cudnn_enabled:
        missing = "torch.backends.cuda.enable_cudnn_sdp(False) was called"
    elif os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "") not in ("", "0"):
        missing = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE changes the layout of its log-sum-exp"
    # As PyTorch's own check of shapes says.
    size = 256 if capability == (9, 0) and version >= 91000 else 128
    triton = importlib.util.find_spec("triton") is not None
    return Device(capability, triton, size, missing, deterministic)


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
        ...     _forced["forward"]
        'pieces'
    """
    before = dict(_forced)
    _forced.update(forward=forward, backward=backward)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
