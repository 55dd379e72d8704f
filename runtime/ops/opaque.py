"""What ops share that run a function on real tensors, beyond the reach of a trace: a model's own, or a chunkwise one.

Such an op records nothing for autograd: its backward runs the function again, with autograd, and differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["ambient", "autocast_of", "gradients"]


def ambient(x: Tensor) -> torch.dtype | None:
    """The autocast dtype of the caller on the device of `x`; compiled code has no autocast of its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast_of(x: Tensor, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """The autocast state that `ambient` saw."""
    device = x.device.type
    if dtype is None:
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
    return torch.autocast(device, dtype=dtype)


def gradients(
    run: Callable[[list[Tensor]], Tensor],
    inputs: Sequence[Tensor],
    wanted: Sequence[bool],
    grad: Tensor,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    """Run a function again, and differentiate it.

    Args:
        run: of the inputs.
        wanted: whether the gradient of each input is asked for.
        grad: of the result.
        autocast: of the first run.

    Returns:
        the gradients that are wanted, each in memory of its own.
    """
    fresh = [x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
    targets = [x for x, want in zip(fresh, wanted, strict=True) if want]
    with torch.enable_grad(), _with_autograd(), autocast_of(grad, autocast):
        out = run(fresh)
    grads: tuple[Tensor | None, ...] = (None,) * len(targets)
    if out.requires_grad:  # without tokens a function may leave its inputs alone
        with _with_autograd():
            grads = torch.autograd.grad(out, targets, grad, allow_unused=True)
    # An op may not return memory of its inputs, nor the same memory twice.
    taken = {_address(x) for x in (grad, *fresh)}
    owned: list[Tensor] = []
    for x, g in zip(targets, grads, strict=True):
        if g is None:
            g = torch.zeros_like(x, memory_format=torch.contiguous_format)
        elif not g.is_contiguous() or _address(g) in taken:
            g = g.clone(memory_format=torch.contiguous_format)
        taken.add(_address(g))
        owned.append(g)
    return owned


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _with_autograd() -> AbstractContextManager[Any]:
    """Inside the kernel of an op the dispatcher skips autograd; this brings it back."""
    keys = torch._C.DispatchKey
    autograd = torch._C.DispatchKeySet(keys.AutogradFunctionality)
    for key in (keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        autograd = autograd | torch._C.DispatchKeySet(key)
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set() - autograd
    )
