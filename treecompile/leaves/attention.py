"""Twins of the masks and attention functions of transformers that Dynamo cannot capture in one graph.

transformers builds sdpa masks from plain tensor ops. FlexAttention and FlashAttention get such masks here,
and one `treecompile::leaf_attention` node per layer. What a twin does not cover goes to the original.

A graph break may part the mask from the layers, and a part may run outside of our gate. So a mask twin
returns what the original attention function understands too: additive for flex, two-dimensional for flash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from treecompile.runtime.ops.leaf_attention import leaf_attention

__all__ = ["flash_forward", "flash_mask", "flex_forward", "flex_mask"]


def flex_mask(original: FunctionType) -> Callable[..., Tensor]:
    """Twin of `flex_attention_mask`: ``[B, 1, Q, T]`` with 0 where a query sees a key, -inf elsewhere."""
    sdpa_mask = _masking().sdpa_mask

    def traced(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
        kwargs["allow_is_causal_skip"] = False
        kwargs["allow_is_bidirectional_skip"] = False
        mask: Tensor = sdpa_mask(*args, **kwargs)
        return torch.where(mask, 0.0, float("-inf")).to(dtype)

    return traced


def flex_forward(original: FunctionType) -> Callable[..., Any]:
    """Twin of `flex_attention_forward`: the output as ``[B, Q, H, D]``, and no log-sum-exp."""

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
        mask = attention_mask
        # The original adds a mask of any dtype, bool as well, to the scores.
        known = mask is None or (isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype != torch.bool)
        if not known or kwargs.get("dropout", 0.0) > 0 or kwargs.get("position_bias") is not None:
            settings = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
            return original(module, query, key, value, mask, **settings, **kwargs)
        if mask is not None and mask.shape[-1] != key.shape[-2]:
            mask = mask[..., : key.shape[-2]]
        return _attention(query, key, value, mask, s_aux, scaling, softcap), None

    return traced


def flash_mask(original: FunctionType) -> Callable[..., Tensor | None]:
    """Twin of `flash_attention_mask`: the padding mask ``[B, T]``, also where it hides nothing."""

    def traced(
        batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor | None:
        return None if attention_mask is None else attention_mask[:, -kv_length:]

    return traced


def flash_forward(original: FunctionType) -> Callable[..., Any]:
    """Twin of `flash_attention_forward`: the output as ``[B, Q, H, D]``, in the dtype of the original.

    Covers what a decoder asks for: causal, with or without window and padding, or one row of documents.
    """
    masking = _masking()
    sdpa_mask, causal_mask = masking.sdpa_mask, masking.causal_mask_function
    windowed, both, document = (
        masking.sliding_window_causal_mask_function,
        masking.and_masks,
        masking.packed_sequence_mask_function,
    )
    target_dtype: Callable[[Tensor, Any], Any] = original.__globals__["get_target_dtype"]

    def traced(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        causal = module.is_causal if is_causal is None else is_causal
        batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
        padding = attention_mask
        covered = padding is None or (padding.ndim == 2 and (batch > 1 or position_ids is None))
        if not (covered and causal) or dropout > 0 or kwargs.get("cu_seq_lens_q") is not None:
            settings = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
            more = {"is_causal": is_causal, "s_aux": s_aux, "position_ids": position_ids}
            return original(module, query, key, value, padding, dropout, **settings, **more, **kwargs)
        sees = causal_mask if sliding_window is None else windowed(sliding_window)
        if padding is None and batch == 1 and position_ids is not None:
            sees = both(sees, document((position_ids == 0).cumsum(-1)))
        mask = sdpa_mask(
            batch_size=batch,
            q_length=queries,
            kv_length=keys,
            q_offset=keys - queries,
            mask_function=sees,
            attention_mask=padding,
            allow_is_causal_skip=False,
            device=query.device,
        )
        dtype = target_dtype(query, module)
        if dtype is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        return _attention(query, key, value, mask, s_aux, scaling, softcap), None

    return traced


def _masking() -> Any:
    return sys.modules["transformers.masking_utils"]


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
