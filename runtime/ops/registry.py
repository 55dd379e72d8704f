"""The op library `treecompile::` and the registrations that its ops share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LIBRARY", "define", "register_autocast"]

# torch.library.Library has no annotations.
LIBRARY: Any = torch.library.__dict__["Library"]("treecompile", "FRAGMENT")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``treecompile::<schema>`` with one kernel for every device and its fake kernel.

    Args:
        schema: schema without the namespace, e.g. ``"expand(Tensor x) -> Tensor"``.
        kernel: implementation, no autograd of its own; its docstring becomes the op's.
        fake: shapes, dtypes and strides of the outputs.

    Returns:
        The op overload, to call or to compare graph targets with.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _on_their_device(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"treecompile::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.treecompile, name).default
    op.__doc__ = kernel.__doc__
    return op


def _on_their_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Run a kernel with the GPU of its tensors as the current one, which is where Triton launches."""

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        device = next((x.device for x in args if isinstance(x, torch.Tensor) and x.is_cuda), None)
        if device is None:
            return kernel(*args)
        with torch.cuda.device(device):
            return kernel(*args)

    return run


def register_autocast(op: Any, cast: tuple[int, ...]) -> None:
    """Under autocast, cast the tensor arguments at the positions `cast` to the ambient autocast dtype.

    `torch.library.register_autocast` fixes the dtype at registration; here it is read at each call. fp64
    tensors keep their dtype, as in every autocast op of PyTorch. With an empty `cast`, what the kernel calls computes
    in the dtypes that it sees: without a registration autocast would reach into the kernel.
    """
    for device_type, suffix in (("cpu", "CPU"), ("cuda", "CUDA")):
        key = getattr(torch._C.DispatchKey, f"Autocast{suffix}")
        LIBRARY.impl(
            op._schema.name.split("::")[1], _autocast_kernel(op, cast, device_type, key), f"Autocast{suffix}"
        )


def _autocast_kernel(op: Any, cast: tuple[int, ...], device_type: str, key: Any) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        args = tuple(_cast(a, device_type, dtype) if i in cast else a for i, a in enumerate(args))
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return op(*args)

    return kernel


def _cast(x: torch.Tensor | None, device_type: str, dtype: torch.dtype) -> torch.Tensor | None:
    if x is None:
        return None
    eligible = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device_type
    return x.to(dtype) if eligible else x
