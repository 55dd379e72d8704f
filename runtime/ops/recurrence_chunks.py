"""Chunk-local work of the tree recurrence, forward and backward: everything between the states of blocks.

Legend: K blocks, C rows of a block, G key heads, H value heads (H a multiple of G, R = H / G), D key width, V value
width. Tensors are [K, heads, C, width], contiguous, fp32 or fp64; an empty row has zeros and does nothing.

Within a block, with sums of gates g and the decays exp of them, all <= 1:

    e_i = exp(g_1 + ... + g_i),   w_i = exp(g_(i+1) + ... + g_C),   d_ij = exp(g_(j+1) + ... + g_i) for j <= i

    A_ij = scale q_i' (d_ij * k_j)  for j <= i,      L_ij = beta_i k_i' (d_ij * k_j)  for j < i
    (I + L) u = beta (v - S' (e * k)),               without beta: u = v
    out = scale S' (e * q) + A u,                    S <- e_C * S + (w * k)' u

Decays are numbers per head or vectors over D. As vectors they do not leave the products of rows. They are then split
at a row between i and j, q_i' (d_ij * k_j) = (q_i * d_im)' (d_mj * k_j) with j <= m < i, so that no exponent is above
zero: halves of the block against each other, halves of the halves, and so on: log2(C) products.

Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024, section 3.3; Kimi Team, "Kimi Linear", 2025,
section 3 (decays per channel); T. Dao, A. Gu, "Transformers are SSMs", 2024, section 6 (without beta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Delta", "Local", "Reads", "ScalarDecay", "VectorDecay", "add_product", "decay_of", "lowest_gate"]


@dataclass
class Delta:
    """What the delta rule adds: of keys and decays, or the gradients of it.

    Attributes:
        erase: [K, H, C, D] `k * e`.
        lower: [K, H, C, C] `k_i' (d_ij * k_j)`, below the diagonal; what stands on it is not read.
    """

    erase: Tensor
    lower: Tensor


@dataclass
class Reads:
    """What outputs are read with, or the gradients of it.

    Attributes:
        outer: [K, H, C, D] `scale q * e`, for the state.
        inner: [K, H, C, C] A, for the block's own updates.
    """

    outer: Tensor
    inner: Tensor


@dataclass
class Local:
    """Local quantities of a slice of blocks, or their gradients.

    Attributes:
        write: [K, H, C, D] `k * w`.
        keep: [K, H, D or 1, 1] `e_C`.
        delta: None without beta.
    """

    write: Tensor
    keep: Tensor
    delta: Delta | None


def lowest_gate(dtype: torch.dtype) -> float:
    """A gate whose decay is zero: below it nothing changes, and sums stay exact and finite."""
    return -104.0 if dtype == torch.float32 else -746.0


def _heads(x: Tensor, groups: int) -> Tensor:
    """[K, H, ...] as [K, G, R, ...]."""
    return x.view(x.shape[0], groups, -1, *x.shape[2:])


def add_product(x: Tensor, a: Tensor, b: Tensor, factor: int = 1) -> Tensor:
    """``x += factor * a @ b`` in place, blocks and heads in front."""
    x.view(-1, *x.shape[2:]).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=factor)
    return x


def _after(x: Tensor, dim: int) -> Tensor:
    """Sums over the rows from each one on: the adjoint of `cumsum`."""
    return x.flip(dim).cumsum(dim).flip(dim)


class ScalarDecay:
    """Decays that are numbers per head. k: [K, G, C, D], as the scaled q of `reads`; gate: [K, H, C]."""

    def __init__(self, k: Tensor, gate: Tensor, delta: bool) -> None:
        self.k, self.groups = k, k.shape[1]
        # Differences of sums lose what the sums have in common: these are in fp64, as a number and the rest of it.
        sums = gate.clamp(min=lowest_gate(gate.dtype)).double().cumsum(-1)
        near = sums.to(gate.dtype)
        rest = (sums - near).to(gate.dtype)
        self.e, self.w = near.exp(), (sums[..., -1:] - sums).to(gate.dtype).exp_()
        steps = (near.unsqueeze(-1) - near.unsqueeze(-2)).add_(rest.unsqueeze(-1)).sub_(rest.unsqueeze(-2))
        self.decay = steps.exp_().tril_()  # what may overflow is above the diagonal
        self.local = Local(
            write=self._times(k, self.w),
            keep=self.e[..., -1, None, None],
            delta=Delta(self._times(k, self.e), self._product(k, k)) if delta else None,
        )

    def reads(self, q: Tensor) -> Reads:
        """What outputs are read with."""
        return Reads(self._times(q, self.e), self._product(q, self.k))

    def _times(self, x: Tensor, factor: Tensor) -> Tensor:
        return (x.unsqueeze(2) * _heads(factor, self.groups).unsqueeze(-1)).flatten(1, 2)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        products = a @ b.transpose(-1, -2)
        return (products.unsqueeze(2) * _heads(self.decay, self.groups)).flatten(1, 2)

    def _sum(self, x: Tensor, factor: Tensor) -> Tensor:
        """The adjoint of `_times` and `_product`: over the value heads of a key head."""
        shaped = factor.unsqueeze(-1) if factor.dim() == 3 else factor
        if self.groups == x.shape[1]:
            return x * shaped
        return _heads(x * shaped, self.groups).sum(2)

    def backward(self, grad: Local, out: Reads, q: Tensor, reads: Reads) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q (scaled), k [K, G, C, D] and the gate [K, H, C].

        Args:
            grad, out: gradients of `local` and of `reads`.
            q, reads: as of `reads(q)`.
        """
        local = self.local
        inner = self._sum(out.inner, self.decay)
        dq = add_product(self._sum(out.outer, self.e), inner, self.k)
        dk = add_product(self._sum(grad.write, self.w), inner.transpose(-1, -2), q)
        through = out.inner * reads.inner
        to_here = (out.outer * reads.outer).sum(-1)
        if grad.delta is not None and local.delta is not None:
            lower = self._sum(grad.delta.lower, self.decay)
            add_product(dk, lower + lower.transpose(-1, -2), self.k)
            dk += self._sum(grad.delta.erase, self.e)
            through = through.addcmul_(grad.delta.lower, local.delta.lower)
            to_here += (grad.delta.erase * local.delta.erase).sum(-1)
        to_here[..., -1] += (grad.keep * local.keep).flatten(2).sum(-1)
        behind = (grad.write * local.write).sum(-1)
        # A gate is in every decay from a row above it to its own or one below: sums of equal signs, no differences.
        dgate = _after(to_here, -1).add_(_after(through, -2).tril_(-1).sum(-1))
        dgate[..., 1:] += behind.cumsum(-1)[..., :-1]
        return dq, dk, dgate


class VectorDecay:
    """Decays that are vectors over D. k, gate and the scaled q of `reads`: [K, H, C, D], C a power of two."""

    def __init__(self, k: Tensor, gate: Tensor, delta: bool) -> None:
        self.k = k
        gate = self.gate = gate.clamp(min=lowest_gate(gate.dtype))
        self.e = gate.cumsum(-2).exp_()
        self.w = self._behind(gate).exp_()
        self.local = Local(
            write=k * self.w,
            keep=self.e[..., -1, :].unsqueeze(-1),
            delta=Delta(k * self.e, self._products(k)) if delta else None,
        )

    def reads(self, q: Tensor) -> Reads:
        """What outputs are read with."""
        inner = self._products(q)
        inner.diagonal(dim1=-2, dim2=-1).copy_((q * self.k).sum(-1))
        return Reads(q * self.e, inner)

    def _products(self, x: Tensor) -> Tensor:
        """[K, H, C, C] `x_i' (d_ij * k_j)` below the diagonal, else zero."""
        out = x.new_zeros((*x.shape[:3], x.shape[2]))
        for size in self._sizes(x.shape[2]):
            right, left = self._decays(size)
            upper = self._split(x, size)[:, :, :, 1] * right
            lower = self._split(self.k, size)[:, :, :, 0] * left
            self._corners(out, size).copy_(upper @ lower.transpose(-1, -2))
        return out

    @staticmethod
    def _behind(gate: Tensor) -> Tensor:
        """Sums over the rows behind each one."""
        return _after(torch.nn.functional.pad(gate[..., 1:, :], (0, 0, 0, 1)), -2)

    @staticmethod
    def _split(x: Tensor, size: int) -> Tensor:
        """[K, H, C, D] as [K, H, pairs, halves, size, D]."""
        return x.view(*x.shape[:2], -1, 2, size, x.shape[-1])

    @staticmethod
    def _sizes(rows: int) -> list[int]:
        return [1 << i for i in range(int(math.log2(rows)))]

    @staticmethod
    def _corners(x: Tensor, size: int) -> Tensor:
        """[K, H, pairs, size, size] view: rows of right halves, columns of the left halves beside them."""
        pairs = x.shape[-1] // (2 * size)
        cut = x.view(*x.shape[:2], pairs, 2, size, pairs, 2, size)[:, :, :, 1, :, :, 0, :]
        return cut.diagonal(dim1=2, dim2=4).movedim(-1, 2)

    def _decays(self, size: int) -> tuple[Tensor, Tensor]:
        """Decays from the cut between two halves to each row of the right one, and from the left one to the cut."""
        gate = self._split(self.gate, size)
        return gate[:, :, :, 1].cumsum(-2).exp_(), self._behind(gate[:, :, :, 0]).exp_()

    def backward(self, grad: Local, out: Reads, q: Tensor, reads: Reads) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q (scaled), k and the gate, [K, H, C, D].

        Args:
            grad, out: gradients of `local` and of `reads`.
            q, reads: as of `reads(q)`.
        """
        local = self.local
        diagonal = out.inner.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        dq = (out.outer * self.e).addcmul_(diagonal, self.k)
        dk = (grad.write * self.w).addcmul_(diagonal, q)
        to_here = out.outer * reads.outer
        if grad.delta is not None and local.delta is not None:
            dk.addcmul_(grad.delta.erase, self.e)
            to_here.addcmul_(grad.delta.erase, local.delta.erase)
        to_here[..., -1, :] += (grad.keep * local.keep).squeeze(-1)
        behind = grad.write * local.write
        dgate = _after(to_here, -2)
        dgate[..., 1:, :] += behind.cumsum(-2)[..., :-1, :]
        pairs = [(q, dq, out.inner)]
        if grad.delta is not None:
            pairs.append((self.k, dk, grad.delta.lower))
        for size in self._sizes(q.shape[-2]):
            right, left = self._decays(size)
            lower = self._split(self.k, size)[:, :, :, 0] * left
            to_lower, to_right = torch.zeros_like(lower), torch.zeros_like(lower)
            for x, dx, products in pairs:
                corner = self._corners(products, size)
                upper = self._split(x, size)[:, :, :, 1] * right
                to_upper = corner @ lower
                to_lower += corner.transpose(-1, -2) @ upper
                to_right.addcmul_(to_upper, upper)
                self._split(dx, size)[:, :, :, 1].addcmul_(to_upper, right)
            self._split(dk, size)[:, :, :, 0].addcmul_(to_lower, left)
            split = self._split(dgate, size)
            split[:, :, :, 1] += _after(to_right, -2)
            if size > 1:
                split[:, :, :, 0, 1:] += (to_lower * lower).cumsum(-2)[..., :-1, :]
        return dq, dk, dgate


def decay_of(k: Tensor, gate: Tensor, delta: bool) -> ScalarDecay | VectorDecay:
    """The local work of a slice; ``gate`` [K, H, C], or [K, H, C, D] for a vector."""
    return (VectorDecay if gate.dim() == 4 else ScalarDecay)(k, gate, delta)
