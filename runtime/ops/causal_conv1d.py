"""`treecompile::causal_conv1d`: a depthwise causal convolution along the tokens, as passes read it from a graph.

Shapes: B rows, C channels, T tokens, W taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treecompile.runtime.ops.registry import LIBRARY

__all__ = ["causal_conv1d"]


def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "") -> Tensor:
    """Each token reads itself and the W - 1 tokens before it; zeros before the first.

    Args:
        x: ``[B, C, T]``.
        weight: ``[C, 1, W]``, the last tap for the token itself.
        bias: ``[C]`` or None.
        activation: "" or "silu", of the result.

    Returns:
        ``[B, C, T]``.
    """
    out = F.conv1d(x, weight, bias, padding=weight.shape[-1] - 1, groups=weight.shape[0])
    out = out[..., : x.shape[-1]]
    return F.silu(out) if activation == "silu" else out


LIBRARY.define(
    'causal_conv1d(Tensor x, Tensor weight, Tensor? bias, str activation="") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("causal_conv1d", _causal_conv1d, "CompositeImplicitAutograd")
causal_conv1d = torch.ops.treecompile.causal_conv1d.default
