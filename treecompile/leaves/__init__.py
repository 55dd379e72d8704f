"""Functions that become one node while Dynamo traces for the tree backend, and stay themselves for others.

transformers is never imported here: `install` looks at what the program has imported, once when the backend
is looked up and again at each compilation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch._dynamo.callback import callback_handler

from treecompile.leaves import attention, experts, recurrence, scope

__all__ = ["LEAVES", "Leaf", "install"]

_MASKS = "transformers.masking_utils"
_FLEX = "transformers.integrations.flex_attention"
_FLASH = "transformers.integrations.flash_attention"
_MOE = "transformers.integrations.moe"


@dataclass(frozen=True)
class Leaf:
    """One function, or one family of functions, to substitute.

    Args:
        name: for messages.
        where: yields the functions that exist by now, or classes with a method.
        twin: makes what Dynamo traces instead from a copy of the function.
        method: name of the method; "" for functions.
    """

    name: str
    where: Callable[[], Iterable[Any]]
    twin: Callable[[FunctionType], Callable[..., Any]]
    method: str = ""

    def put(self, found: Any) -> bool:
        """Substitute one of them; False if that was done before."""
        return (
            scope.patch(found, self.method, self.twin) if self.method else scope.substitute(found, self.twin)
        )


def _named(module: str, function: str) -> Callable[[], Iterator[FunctionType]]:
    def where() -> Iterator[FunctionType]:
        # Not getattr: on the lazy modules of transformers that would import more of it.
        found = getattr(sys.modules.get(module), "__dict__", {}).get(function)
        if isinstance(found, FunctionType) and _MASKS in sys.modules:
            yield found

    return where


LEAVES = (
    Leaf("flex mask", _named(_MASKS, "flex_attention_mask"), attention.flex_mask),
    Leaf("flash mask", _named(_MASKS, "flash_attention_mask"), attention.flash_mask),
    Leaf("flex attention", _named(_FLEX, "flex_attention_forward"), attention.flex_forward),
    Leaf("flash attention", _named(_FLASH, "flash_attention_forward"), attention.flash_forward),
    Leaf("grouped experts", _named(_MOE, "grouped_mm_experts_forward"), experts.experts),
    Leaf("batched experts", _named(_MOE, "batched_mm_experts_forward"), experts.experts),
    Leaf("expert loops", experts.loops, experts.experts),
    Leaf(
        "gated delta rule",
        recurrence.named("torch_chunk_gated_delta_rule"),
        recurrence.delta_rule(divides=False),
    ),
    Leaf(
        "Kimi delta attention",
        recurrence.named("chunk_kimi_delta_attention"),
        recurrence.delta_rule(divides=True),
    ),
    Leaf("Mamba 2 scan", recurrence.named("mamba2_chunk_scan"), recurrence.chunk_scan),
    Leaf("Mamba 2 layer", recurrence.named("mamba2_split_conv1d_scan_combined"), recurrence.fused_layer),
    Leaf("lightning attention", recurrence.lightning_classes, recurrence.lightning, "forward"),
    Leaf("convolution kernel", recurrence.kernel_convolutions, recurrence.convolution),
)

_modules_seen = 0


def install() -> list[str]:
    """Substitute what the program has imported by now; cheap where nothing was imported since.

    Returns:
        Names of the leaves of which a function was substituted by this call.

    Notes:
        Dynamo calls this again at the start of every compilation, so that later imports are found.
    """
    global _modules_seen
    if not isinstance(callback_handler.start_callbacks, _Callbacks):
        callback_handler.start_callbacks = _Callbacks([*callback_handler.start_callbacks, _at_compile_start])
    if len(sys.modules) == _modules_seen:
        return []
    _modules_seen = len(sys.modules)
    functions = [(leaf, function) for leaf in LEAVES for function in leaf.where()]
    return [leaf.name for leaf, function in functions if leaf.put(function)]


def _at_compile_start(args: object) -> None:
    install()


class _Callbacks(list[Callable[..., None]]):
    """Dynamo's list of callbacks: `torch._dynamo.reset` empties it, but keeps substitutes, so ours stays."""

    def clear(self) -> None:
        super().clear()
        self.append(_at_compile_start)
