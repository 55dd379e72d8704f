"""Substitute for the experts functions of transformers: one `treecompile::leaf_experts` node per layer."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from treecompile.leaves.scope import at_trace_time, traced_local
from treecompile.runtime.ops.leaf_experts import BODIES, Body, leaf_experts, skeleton

__all__ = ["experts", "loops"]

# Weight dtypes with which AOTAutograd can trace each function of transformers, forward and backward.
_TRACED = {
    "batched_mm_experts_forward": frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
    "grouped_mm_experts_forward": frozenset({torch.bfloat16}),
}
_PLAIN = (bool, int, float, str, type(None))


def loops() -> Iterator[FunctionType]:
    """The Python loops over experts: the forward methods that `use_experts_implementation` wrapped."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if "use_experts_implementation" not in names:
            continue
        for value in list(names.values()):
            loop = _loop(value) if isinstance(value, type) and issubclass(value, nn.Module) else None
            if loop is not None:
                yield loop


def _loop(cls: type[nn.Module]) -> FunctionType | None:
    """The undecorated forward method of an experts class, None for other classes."""
    function: Any = cls.forward
    while "original_forward" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
        position = function.__code__.co_freevars.index("original_forward")
        function = function.__closure__[position].cell_contents
    return function if function is not cls.forward and isinstance(function, FunctionType) else None


def experts(original: FunctionType) -> Callable[..., Any]:
    """Twin of an experts function ``(module, hidden [S, H], index [S, k], weights [S, k]) -> [S, H]``."""

    @at_trace_time
    def describe() -> Layer | None:
        return _describe(traced_local("module"), original)

    def traced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer = describe()
        if layer is None or kwargs or len(args) != 3 or args[0].ndim != 2:
            return original(module, *args, **kwargs)
        body, tensors, settings, values = layer
        # Always equal. Dynamo guards on what it compares, so that a changed setting compiles again.
        for value, expected in zip(_read(module, settings), values, strict=True):
            if value != expected:
                return original(module, *args, **kwargs)
        return leaf_experts(args[0], args[1], args[2], _read(module, tensors), body)

    return traced


def _read(module: nn.Module, paths: tuple[str, ...]) -> list[Any]:
    values: list[Any] = []
    for path in paths:
        value: Any = module
        for name in path.split("."):
            value = getattr(value, name)
        values.append(value)
    return values


Layer = tuple[str, tuple[str, ...], tuple[str, ...], tuple[Any, ...]]


def _describe(module: Any, function: FunctionType) -> Layer | None:
    """Key of the `Body` of a layer, paths of its tensors and of its plain settings, and the settings.

    None for a layer whose state is not all in plain tensors. Layers that compute the same function of their
    tensors share one key, in every process: it ends up in the keys of compile caches.
    """
    loop = _loop(type(module)) if isinstance(module, nn.Module) else None
    if loop is None:
        return None
    tensors = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    attributes = dict(_attributes(module))
    if any(type(x) not in (Tensor, nn.Parameter) for x in tensors.values()) or any(
        isinstance(value, Tensor) for value in attributes.values()
    ):
        return None
    settings = {path: value for path, value in attributes.items() if isinstance(value, _PLAIN)}
    types = [(path, _name(type(part))) for path, part in module.named_modules()]
    functions = [(path, _name(value)) for path, value in attributes.items() if callable(value)]
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    content = repr((version, _name(function), types, functions, settings, tuple(tensors)))
    key = f"{type(module).__name__}.{function.__name__}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if key not in BODIES:
        BODIES[key] = Body(
            forward=function,
            module=skeleton(module),
            paths=tuple(tensors),
            traced=_TRACED.get(function.__name__, frozenset()),
            # torch's grouped_mm has no fp64.
            forward_fp64=loop if function.__name__ == "grouped_mm_experts_forward" else function,
        )
    return key, tuple(tensors), tuple(settings), tuple(settings.values())


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_"):
                yield f"{path}.{name}" if path else name, value


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
