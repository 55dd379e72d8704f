"""Whether a device runs Triton kernels."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch

__all__ = ["why_no_triton"]


@lru_cache(maxsize=64)
def why_no_triton(device: torch.device) -> str:
    """Say why a CUDA device runs no Triton kernel of ours, or "".

    Example:
        >>> why_no_triton(torch.device("cuda"))  # doctest: +SKIP
        ''
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor} is below 8.0" if major < 8 else ""
