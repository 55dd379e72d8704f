"""The rule and the convolution of a gated delta net alone, as transformers runs them on dense rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CHUNK", "chained_parts", "keep_kernels", "lift_guard"]

# Tokens of a chunk of transformers' rule.
CHUNK = 64


def chained_parts(
    net: Any, rows: int, columns: int, recomputed: bool = False
) -> dict[str, Callable[[], None]]:
    """Forward and backward of what runs along the tokens of a microbatch.

    Args:
        net: a `Qwen3_5GatedDeltaNet`, whose shapes, dtype and device are taken.
        rows, columns: of the microbatch.
        recomputed: run each forward twice, as where activations are recomputed.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    taps = net.conv1d.weight
    like = {"device": taps.device, "dtype": taps.dtype}
    shape = (rows, columns, net.num_v_heads)
    q, k = (torch.randn(*shape, net.head_k_dim, **like).requires_grad_() for _ in range(2))
    v = torch.randn(*shape, net.head_v_dim, **like).requires_grad_()
    beta = torch.rand(shape, **like).requires_grad_()
    gate = (-torch.rand(shape, device=taps.device)).requires_grad_()
    upstream = torch.randn_like(v)
    mixed = torch.randn(rows, columns, net.conv_dim, **like).transpose(1, 2).requires_grad_()

    def ruled() -> Tensor:
        out: Tensor = module.torch_chunk_gated_delta_rule(
            q, k, v, g=gate, beta=beta, use_qk_l2norm_in_kernel=True
        )[0]
        return out

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        return F.silu(F.conv1d(x, weight, padding=weight.shape[-1] - 1, groups=x.shape[1])[..., :columns])

    compiled = torch.compile(convolved, dynamic=False)

    def rule() -> None:
        if recomputed:
            with torch.no_grad():
                ruled()
        torch.autograd.grad(ruled(), (q, k, v, gate, beta), upstream)

    def convolution() -> None:
        if recomputed:
            with torch.no_grad():
                compiled(mixed, taps)
        out = compiled(mixed, taps)
        torch.autograd.grad(out, (mixed, taps), out.detach())

    return {"rule": rule, "convolution": convolution}


def lift_guard() -> None:
    """Let fla run the backward pass that it refuses with Triton 3.4 to 3.7.0 on Hopper."""
    from fla.ops.common import chunk_o

    chunk_o.IS_NVIDIA_HOPPER = False
    print("fla's guard is lifted: its gradients may be wrong, its time is what is measured")


def keep_kernels() -> None:
    """Let a compiled dense run call fla's functions.

    Dynamo of torch 2.11 answers `torch.compiler.is_exporting()` with yes whenever it traces, and transformers then
    takes its reference in PyTorch, whose loop over the tokens of a chunk becomes 50,000 lines of generated code.
    """
    import transformers.integrations.hub_kernels

    kernels: Any = transformers.integrations.hub_kernels
    kernels.is_torchdynamo_exporting = lambda: False
