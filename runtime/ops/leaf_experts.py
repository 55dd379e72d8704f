"""`treecompile::leaf_experts`: the experts of one layer as one node, run by the model's own function.

An experts function reads its weights and settings from a module. The op takes the weights as tensors, so
that autograd reaches them, and a string: the key of a `Body`, which holds the function and a module without
weights.

The op is composite. Eager calls run the model's function as it stands; a trace does so as well where the
function can be traced, and else records `leaf_experts_opaque`, which calls it on real tensors at run time.

Shapes: S tokens, H hidden size, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from treecompile.runtime.ops.opaque import ambient, autocast_of, gradients
from treecompile.runtime.ops.registry import LIBRARY, define

__all__ = ["BODIES", "Body", "leaf_experts", "leaf_experts_opaque", "skeleton"]

Forward = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Body:
    """What an experts layer computes, apart from its weights.

    Args:
        forward: the model's function: (module, hidden ``[S, H]``, experts ``[S, k]``, weights ``[S, k]``)
            to ``[S, H]``, each row a function of the same rows of its inputs.
        module: the layer as `skeleton` leaves it.
        paths: dotted name of every parameter and buffer, in the order of the op's `tensors`.
        traced: dtypes of the layer's weights with which `forward` can be traced.
        forward_fp64: stands in for `forward` where the weights are fp64.
    """

    forward: Forward
    module: nn.Module
    paths: tuple[str, ...]
    traced: frozenset[torch.dtype]
    forward_fp64: Forward

    def run(self, hidden: Tensor, index: Tensor, weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Call the model's function on a module that holds `tensors`."""
        module = skeleton(self.module)
        for path, tensor in zip(self.paths, tensors, strict=True):
            owner, _, name = path.rpartition(".")
            holder = module.get_submodule(owner)
            (holder._parameters if name in holder._parameters else holder._buffers)[name] = tensor  # type: ignore[assignment]
        forward = self.forward_fp64 if self.dtype(tensors) == torch.float64 else self.forward
        return forward(module, hidden, index, weights)

    @staticmethod
    def dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
        """The one floating dtype among `tensors`, None if there are several."""
        found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return found.pop() if len(found) == 1 else None


BODIES: dict[str, Body] = {}


def skeleton(module: nn.Module) -> nn.Module:
    """Copy `module` and its submodules without parameters and buffers, sharing every other attribute."""
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_parameters"] = dict.fromkeys(module._parameters)
    copy.__dict__["_buffers"] = dict.fromkeys(module._buffers)
    copy.__dict__["_modules"] = {
        name: None if child is None else skeleton(child) for name, child in module._modules.items()
    }
    return copy


def _leaf_experts(hidden: Tensor, index: Tensor, weights: Tensor, tensors: list[Tensor], body: str) -> Tensor:
    """Run the experts `body` on S tokens.

    Args:
        hidden: ``[S, H]``.
        index: int64 ``[S, k]`` experts of each token.
        weights: ``[S, k]`` weight of each of them.
        tensors: the layer's weights, ordered as `Body.paths`.
        body: key into `BODIES`.

    Returns:
        ``[S, H]`` in the dtype of `hidden`.
    """
    this = BODIES[body]
    if not _tracing(hidden) or this.dtype(tensors) in this.traced:
        return this.run(hidden, index, weights, tensors)
    result: Tensor = leaf_experts_opaque(hidden, index, weights, tensors, body, ambient(hidden))
    return result


def _tracing(hidden: Tensor) -> bool:
    return type(hidden) not in (Tensor, nn.Parameter) or bool(_get_current_dispatch_mode_stack())


def _opaque(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    tensors: list[Tensor],
    body: str,
    autocast: torch.dtype | None,
) -> Tensor:
    with autocast_of(hidden, autocast):
        out = BODIES[body].run(hidden, index, weights, tensors)
    # The fake kernel promises fresh contiguous memory; a body may return its input when there is no token.
    return out.clone() if out is hidden else out.contiguous()


def _opaque_fake(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    tensors: list[Tensor],
    body: str,
    autocast: torch.dtype | None,
) -> Tensor:
    return hidden.new_empty(hidden.shape)


def _opaque_backward(
    grad: Tensor,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    tensors: list[Tensor],
    body: str,
    autocast: torch.dtype | None,
    wanted: list[bool],
) -> list[Tensor]:
    def run(inputs: list[Tensor]) -> Tensor:
        return BODIES[body].run(inputs[0], index, inputs[1], inputs[2:])

    return gradients(run, (hidden, weights, *tensors), wanted, grad, autocast)


def _opaque_backward_fake(
    grad: Tensor,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    tensors: list[Tensor],
    body: str,
    autocast: torch.dtype | None,
    wanted: list[bool],
) -> list[Tensor]:
    candidates = zip((hidden, weights, *tensors), wanted, strict=True)
    return [x.new_empty(x.shape) for x, want in candidates if want]


LIBRARY.define(
    "leaf_experts(Tensor hidden, Tensor index, Tensor weights, Tensor[] tensors, str body) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("leaf_experts", _leaf_experts, "CompositeImplicitAutograd")
leaf_experts = torch.ops.treecompile.leaf_experts.default

_ARGUMENTS = "Tensor hidden, Tensor index, Tensor weights, Tensor[] tensors, str body, ScalarType? autocast"
leaf_experts_opaque = define(f"leaf_experts_opaque({_ARGUMENTS}) -> Tensor", _opaque, _opaque_fake)
leaf_experts_opaque_backward = define(
    f"leaf_experts_opaque_backward(Tensor grad, {_ARGUMENTS}, bool[] wanted) -> Tensor[]",
    _opaque_backward,
    _opaque_backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, index, weights, tensors, ctx.body, ctx.autocast = inputs
    ctx.save_for_backward(hidden, index, weights, *tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    hidden, index, weights, *tensors = ctx.saved_tensors
    need_hidden, _, need_weights, need_tensors = ctx.needs_input_grad[:4]
    wanted = [need_hidden, need_weights, *need_tensors]
    found = iter(
        leaf_experts_opaque_backward(grad, hidden, index, weights, tensors, ctx.body, ctx.autocast, wanted)
    )
    grads = [next(found) if want else None for want in wanted]
    return grads[0], None, grads[1], grads[2:], None, None


torch.library.register_autograd(
    "treecompile::leaf_experts_opaque", _backward, setup_context=_setup, lib=LIBRARY
)
