"""Vendor attention kernels behind one signature: a tile's output with its log-sum-exp, and its backward.

Layout: q [B, H, Q, Dqk], k [B, H or 1, K, Dqk], v [B, H or 1, K, Dv]; the kernels take strides, so heads that share
K/V cost no copy. Callers pad head sizes to `Kernel.sizes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treecompile.runtime.ops.attention_math import accumulation_dtype, tile_backward, tile_forward

__all__ = ["Kernel", "Tile", "choose_kernel"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Tile:
    """What pairs of a tile attend.

    Attributes:
        causal: lower half of a square.
        visible: bool, broadcast to [B, H, Q, K], or None for all.
        scale: factor on the logits.
        softcap: 0 for none.
    """

    causal: bool
    visible: Tensor | None
    scale: float
    softcap: float

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Additive mask. Finite, so that a row without keys stays finite: its caller drops it."""
        if self.visible is None:
            return None
        low = torch.finfo(dtype).min / 2
        return torch.zeros_like(self.visible, dtype=dtype).masked_fill_(~self.visible, low)


class Kernel:
    """Formulas in PyTorch, logits materialised: fp64 on CUDA, softcap anywhere. The base of the others."""

    # Whether pieces must be cut to bound the logits, and what head sizes must be a multiple of.
    bounded = True
    alignment = 1
    # Whether query heads that share a K/V head are better rows of one head, where the mask allows it.
    folds = True

    def sizes(self, qk_size: int, v_size: int) -> tuple[int, int]:
        """Return the head sizes that the kernel wants for q and k, and for v."""
        size = -(-max(qk_size, v_size) // self.alignment) * self.alignment
        return size, size

    def span(self, length: int) -> int:
        """Return how many rows a causal square of `length` rows is run with."""
        return length

    def work_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the kernel wants its inputs."""
        return accumulation_dtype(dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return the tile's output [B, H, Q, D] and log-sum-exp [B, H, Q]."""
        return tile_forward(q, k, v, tile.visible, tile.scale, tile.softcap)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv of the tile, given the merged output and the finite global log-sum-exp."""
        delta = (grad * out).sum(-1)
        dq, dk, dv = tile_backward(grad, q, k, v, delta, lse, tile.visible, tile.scale, tile.softcap)
        return dq, _over_group(dk, k), _over_group(dv, v)


class CpuKernel(Kernel):
    """The CPU flash kernel."""

    bounded = False

    def __init__(self, low_precision: bool) -> None:
        self.low_precision = low_precision

    def work_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Without bf16 matrix units the kernel's backward is several times slower than in fp32.
        return dtype if self.low_precision else accumulation_dtype(dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        bias = tile.bias(accumulation_dtype(q.dtype))
        k, v = _expand_heads(k, q), _expand_heads(v, q)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.causal, attn_mask=bias, scale=tile.scale
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        bias = tile.bias(accumulation_dtype(q.dtype))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            q,
            _expand_heads(k, q),
            _expand_heads(v, q),
            out,
            lse,
            0.0,
            tile.causal,
            attn_mask=bias,
            scale=tile.scale,
        )
        return dq, _over_group(dk, k), _over_group(dv, v)


class CudaKernel(Kernel):
    """FlashAttention-2 for whole pieces in half precision, the memory-efficient kernel for masks and fp32."""

    bounded = False
    alignment = 8

    def work_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        if self._flash(q, tile):
            found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, tile.causal, scale=tile.scale)
            return found[0], found[1]
        k, v = _expand_heads(k, q), _expand_heads(v, q)
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            q, k, v, self._bias(q, k, tile), True, 0.0, tile.causal, scale=tile.scale
        )
        return out, lse[..., : q.shape[2]]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self._flash(q, tile):
            # Without dropout the random state is not read. Cumulative lengths would mean the ragged form.
            state = torch.empty(2, dtype=torch.uint64, device=q.device)
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, tile.causal,
                state, state, scale=tile.scale,
            )  # fmt: skip
            return dq, dk, dv
        # In half precision the kernel sums grad * out itself, and it takes the rows of `out` to be heads * size
        # apart: any other layout gives wrong dq and dk (seen on an H200 with torch 2.11).
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        state = torch.empty((), dtype=torch.int64, device=q.device)
        k_full, v_full = _expand_heads(k, q), _expand_heads(v, q)
        # The kernel reads rows of 32 log-sum-exps.
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k_full, v_full, self._bias(q, k, tile), out, padded, state, state, 0.0,
            [True, True, True, False], tile.causal, scale=tile.scale,
        )  # fmt: skip
        return dq, _over_group(dk, k), _over_group(dv, v)

    @staticmethod
    def _flash(q: Tensor, tile: Tile) -> bool:
        return tile.visible is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256

    @staticmethod
    def _bias(q: Tensor, k: Tensor, tile: Tile) -> Tensor | None:
        bias = tile.bias(q.dtype)
        if bias is None:
            return None
        # Rows must start on 16 bytes: pad the storage, not the shape.
        keys = k.shape[2]
        bias = torch.nn.functional.pad(bias, (0, -keys % 16))[..., :keys]
        return bias.expand(q.shape[0], q.shape[1], -1, -1)


class CudnnKernel(CudaKernel):
    """cuDNN's kernels for whole pieces in half precision; masked pieces as `CudaKernel`.

    cuDNN makes an execution plan for every new shape and layout, which takes far longer than a call, and PyTorch finds
    it again by the sizes and strides of q, k and v alone (torch 2.11; later versions look at all operands). So every
    operand goes in with the heads of a token side by side: then strides follow from the number of heads and their
    size, whatever the packed row's length. Causal squares are run with one of 16 lengths an octave.
    """

    folds = False

    def sizes(self, qk_size: int, v_size: int) -> tuple[int, int]:
        aligned = (-(-size // self.alignment) * self.alignment for size in (qk_size, v_size))
        return next(aligned), next(aligned)

    def span(self, length: int) -> int:
        step = 1 << max((length - 1).bit_length() - 5, 6)
        return -(-length // step) * step

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        if tile.visible is not None:
            return super().forward(q, k, v, tile)
        found = aten._scaled_dot_product_cudnn_attention(
            _by_token(q), _by_token(k), _by_token(v), None, True, 0.0, tile.causal, scale=tile.scale
        )
        return found[0][0].unflatten(0, q.shape[:2]), found[1].view(q.shape[:3])

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        if tile.visible is not None:
            return super().backward(grad, q, k, v, out, lse, tile)
        # Without dropout the random state is not read. Cumulative lengths would mean the ragged form.
        state = torch.empty((), dtype=torch.int64, device=q.device)
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            _by_token(grad), _by_token(q), _by_token(k), _by_token(v), _by_token(out),
            lse.contiguous().view(1, -1, q.shape[2], 1), state, state, None, None, None, q.shape[2], k.shape[2],
            0.0, tile.causal, scale=tile.scale,
        )  # fmt: skip
        dq, dk, dv = (grad[0].unflatten(0, x.shape[:2]) for grad, x in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv


def _by_token(x: Tensor) -> Tensor:
    """[B, H, L, D] as [1, B * H, L, D], the heads of a token side by side: a view where they are so already."""
    heads, length, size = x.shape[0] * x.shape[1], *x.shape[2:]
    rows = x.flatten(0, 1).transpose(0, 1).contiguous()
    # Not a transposition: the stride of a dim of size 1 would be anything.
    return rows.as_strided((1, heads, length, size), (length * heads * size, size, heads * size, 1))


_MATH, _CPU, _CPU_LOW, _CUDA = Kernel(), CpuKernel(False), CpuKernel(True), CudaKernel()
_CUDNN = CudnnKernel()


def choose_kernel(device: torch.device, dtype: torch.dtype, softcap: float, vendor: str = "") -> Kernel:
    """Return the kernel for pieces on a device: the vendor's where it has the formula, else PyTorch's.

    Args:
        device: of the inputs.
        dtype: of the inputs.
        softcap: 0 for none.
        vendor: "cudnn" for cuDNN on CUDA, in half precision; the router says whether it takes the inputs.
    """
    if softcap > 0:
        return _MATH
    if device.type == "cpu":
        half = dtype in (torch.float16, torch.bfloat16)
        return _CPU_LOW if half and _has_matrix_units() else _CPU
    if device.type == "cuda" and dtype != torch.float64:
        return _CUDNN if vendor == "cudnn" else _CUDA
    return _MATH


def _has_matrix_units() -> bool:
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported()) if supported is not None else False


def _expand_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.expand(-1, q.shape[1], -1, -1) if x.shape[1] != q.shape[1] else x


def _over_group(grad: Tensor, x: Tensor) -> Tensor:
    """Sum a gradient over the heads that share one K/V head, in the accumulation dtype."""
    if grad.shape[1] == x.shape[1]:
        return grad
    return grad.sum(1, keepdim=True, dtype=accumulation_dtype(grad.dtype))
