"""Substitutes for the masks and attention functions of transformers that Dynamo cannot capture in one graph.

transformers builds sdpa masks from plain tensor ops; FlexAttention and FlashAttention get the same mask here,
and one `treecompile::leaf_attention` node per layer. A case that the substitute does not cover goes to the
original function.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from treecompile.runtime.ops.leaf_attention import leaf_attention

__all__ = ["flash_forward", "flex_forward", "mask"]


def mask(original: FunctionType) -> Callable[..., Tensor]:
    """Twin of `flex_attention_mask` and `flash_attention_mask`: a bool ``[B, 1, Q, T]`` mask in any case."""
    sdpa_mask: Callable[..., Tensor] = original.__globals__["sdpa_mask"]

    def traced(*args: Any, **kwargs: Any) -> Tensor:
        kwargs["allow_is_causal_skip"] = False
        kwargs["allow_is_bidirectional_skip"] = False
        return sdpa_mask(*args, **kwargs)

    return traced


def flex_forward(original: FunctionType) -> Callable[..., Any]:
    """Twin of `flex_attention_forward`: the output as ``[B, T, H, D]``, and no log-sum-exp."""

    def traced(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        given = attention_mask is not None
        if (
            kwargs.get("dropout", 0.0) > 0
            or kwargs.get("position_bias") is not None
            or (given and not isinstance(attention_mask, Tensor))
        ):
            settings = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
            return original(module, query, key, value, attention_mask, **settings, **kwargs)
        mask = attention_mask[..., : key.shape[-2]] if given else None
        return _attention(query, key, value, mask, s_aux, scaling, softcap), None

    return traced


def flash_forward(original: FunctionType) -> Callable[..., Any]:
    """Twin of `flash_attention_forward`: the output as ``[B, T, H, D]``, in the dtype of the original."""
    target_dtype: Callable[[Tensor, Any], Any] = original.__globals__["get_target_dtype"]

    def traced(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        causal = module.is_causal if is_causal is None else is_causal
        # Where there is a mask, it holds the causal part and the window as well.
        if dropout > 0 or (attention_mask is None and causal) or kwargs.get("cu_seq_lens_q") is not None:
            settings = {"scaling": scaling, "softcap": softcap, "is_causal": is_causal, "s_aux": s_aux}
            return original(module, query, key, value, attention_mask, dropout, **settings, **kwargs)
        dtype = target_dtype(query, module)
        if dtype is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        return _attention(query, key, value, attention_mask, s_aux, scaling, softcap), None

    return traced


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = leaf_attention(query, key, value, mask, sinks, scale, 0.0 if softcap is None else softcap)
    return out.transpose(1, 2).contiguous()
