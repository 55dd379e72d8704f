"""Substitution of Python functions at trace time, only where Dynamo traces for our backend.

`torch.compiler.substitute_in_graph` is process-wide. The substitute therefore asks, while it is traced, which
backend the graph is for, and inlines a copy of the original function for every backend but ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext

__all__ = [
    "active",
    "at_trace_time",
    "can_recapture",
    "given_up",
    "in_use",
    "patch",
    "recapture_dense",
    "recapture_with_states",
    "restart",
    "serve",
    "served",
    "states_are_read",
    "substitute",
    "traced_local",
]

Function = TypeVar("Function", bound=Callable[..., Any])

_OURS = ("treecompile.backend", "tree")
_served: list[Callable[..., Any]] = []
_substituted: dict[FunctionType, Callable[..., Any]] = {}
_patched: set[Callable[..., Any]] = set()

# A frame keeps its CompileContext when Dynamo starts its analysis again, and no two frames share one.
_dense_frames: weakref.WeakSet[CompileContext] = weakref.WeakSet()
_changed_frames: weakref.WeakSet[CompileContext] = weakref.WeakSet()
_stateful_frames: weakref.WeakSet[CompileContext] = weakref.WeakSet()
_given_up: weakref.WeakKeyDictionary[CompileContext, Any] = weakref.WeakKeyDictionary()


def serve(backend: Callable[..., Any]) -> None:
    """Open the gate for one more backend callable (`treecompile.backend.tree` needs no call)."""
    if backend not in _served:
        _served.append(backend)


def served(backend: Any) -> bool:
    """Whether a backend, as Dynamo holds it, calls one of ours.

    Dynamo wraps a backend in objects of its own, and users in `functools.partial`; each names what it wraps.
    """
    for _ in range(16):
        if backend is None:
            return False
        name = getattr(backend, "__module__", None), getattr(backend, "__qualname__", None)
        if name == _OURS or any(backend is one for one in _served):
            return True
        backend = _wrapped(backend)
    return False


def _wrapped(backend: Any) -> Any:
    for name in ("_torchdynamo_orig_backend", "compiler_fn", "func"):
        inner = getattr(backend, name, None)
        if callable(inner):
            return inner
    return None


def _translator() -> Any:
    return InstructionTranslator.current_tx()


def at_trace_time(function: Function) -> Function:
    """Have Dynamo call `function` and take its result as a constant: `assume_constant_result`, with types."""
    return cast(Function, torch._dynamo.assume_constant_result(function))  # type: ignore[no-untyped-call]


@at_trace_time
def active() -> bool:
    """Whether the frame being traced takes the substitutes. Evaluated by Dynamo, at trace time."""
    frame = CompileContext.try_get()
    if frame is None or frame in _dense_frames or not served(_translator().output.compiler_fn):
        return False
    _changed_frames.add(frame)
    return True


def in_use() -> bool:
    """Whether the graph that our backend is being given contains substitutes."""
    return CompileContext.try_get() in _changed_frames


def can_recapture() -> bool:
    """Whether the frame holds substitutes and may go without: with ``fullgraph=True`` a break is an error."""
    return in_use() and not _translator().one_graph


def recapture_dense(reason: str = "treecompile runs this frame dense", why: Any = None) -> NoReturn:
    """Have Dynamo capture the current frame again as it would for any other backend.

    To be called inside the backend. The backend is called again with the graphs of the second capture.

    Args:
        reason: for Dynamo.
        why: kept for `given_up`.

    Raises:
        TensorifyScalarRestartAnalysis: always. Dynamo lets this restart request through from a backend; its
            subject (scalar inputs) plays no role.
    """
    frame = CompileContext.get()
    _changed_frames.discard(frame)
    _dense_frames.add(frame)
    if why is not None:
        _given_up[frame] = why
    restart(reason)


def recapture_with_states(why: Any = None) -> NoReturn:
    """Have Dynamo capture the current frame again, as one whose last states of recurrences are read.

    Args:
        why: kept for `given_up`.

    Raises:
        TensorifyScalarRestartAnalysis: always, as of `recapture_dense`.
    """
    frame = CompileContext.get()
    _stateful_frames.add(frame)
    if why is not None:
        _given_up[frame] = why
    restart("the last state of a recurrence is read")


@at_trace_time
def states_are_read() -> bool:
    """Whether a capture of the frame being traced has shown so. Evaluated by Dynamo, at trace time."""
    return CompileContext.try_get() in _stateful_frames


def given_up() -> Any:
    """Why the current frame was captured again, the first time that this is asked; None for other frames."""
    frame = CompileContext.try_get()
    return None if frame is None else _given_up.pop(frame, None)


def restart(reason: str) -> NoReturn:
    """Have Dynamo capture the current frame again, e.g. because `install` found something new."""
    # The record of graph breaks is tied to the instructions of the first capture.
    _translator().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


def substitute(function: FunctionType, twin: Callable[[FunctionType], Callable[..., Any]]) -> bool:
    """Have Dynamo trace the twin of `function` where the gate is open. Other calls stay as they are.

    Args:
        function: the function to substitute.
        twin: makes the traced function from a copy of `function`, which it may call to decline.

    Returns:
        False if `function` was substituted before.
    """
    if function in _substituted:
        return False
    original = _copy(function)
    traced = twin(original)

    def polyfill(*args: Any, **kwargs: Any) -> Any:
        if active():
            return traced(*args, **kwargs)
        return original(*args, **kwargs)

    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(polyfill)
    _substituted[function] = polyfill
    return True


def patch(cls: type, name: str, twin: Callable[[FunctionType], Callable[..., Any]]) -> bool:
    """Replace a method by one that asks `active` itself: Dynamo knows no substitutes for methods.

    Args:
        cls: the class.
        name: of its method.
        twin: makes the new method from the old one.

    Returns:
        False if the method was replaced before.
    """
    method = cls.__dict__[name]
    if method in _patched:
        return False
    new = twin(method)
    setattr(cls, name, new)
    _patched.add(new)
    return True


def _copy(function: FunctionType) -> FunctionType:
    """A twin with an identity of its own: a call of the function itself would be substituted again."""
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    copy.__dict__.update(function.__dict__)
    return copy


def traced_local(name: str) -> Any:
    """The Python object that a local variable of the innermost traced frame stands for.

    For functions marked `at_trace_time`. Passing an object to such a function instead would have
    Dynamo guard on its identity, and compile again for each instance of a model. No closure may share the
    variable: Dynamo holds such a one in a cell.
    """
    variable = _translator().output.current_tx.symbolic_locals[name].realize()
    return getattr(variable, "value", getattr(variable, "fn", None))
