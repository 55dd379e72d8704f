"""The dense runs that the tree run is measured against, and the model that both run.

A trainer's stock run passes a 2-D attention mask, which transformers turns into a [B, 1, T, T] tensor. Rows
padded on the right need no mask at all under causal attention, and attention without a mask is faster: that
is the second baseline. Both are compiled by Inductor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LogProbs = Callable[[Tensor, Tensor], Tensor]


def small_model(
    *, vocab: int = 2048, hidden: int = 256, layers: int = 2, context: int = 4096, seed: int = 0
) -> nn.Module:
    """A Qwen3ForCausalLM of transformers with random weights: nothing is downloaded, no class is changed.

    Args:
        vocab: size of the vocabulary.
        hidden: width, a multiple of 128; heads have 64 channels, two query heads share one key head.
        layers: number of decoder layers.
        context: largest position.
        seed: of the weights.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        # 0.02 leaves attention nearly uniform: wrong positions would go unseen.
        initializer_range=0.05,
        use_cache=False,
    )
    model: nn.Module = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


def log_probs_of(model: nn.Module) -> LogProbs:
    """The function that is compiled: log-probabilities of every next token, [B, T - 1]."""

    def log_probs(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        return torch.log_softmax(logits.float(), dim=-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)

    return log_probs


def without_mask(model: nn.Module) -> nn.Module:
    """A copy of a transformers model whose attention is plainly causal and takes no mask.

    Right for rows padded on the right only: what padding computes is then read by nobody.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("plain_causal", plain_causal)
    AttentionMaskInterface.register("plain_causal", no_mask)
    plain: Any = copy.deepcopy(model)
    plain.set_attn_implementation("plain_causal")
    return plain  # type: ignore[no-any-return]


def plain_causal(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function in transformers' form, [B, H, T, D] to [B, T, H, D]: fused, causal, no mask."""
    shared = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared)
    return out.transpose(1, 2).contiguous(), None


def no_mask(*_: Any, **__: Any) -> None:
    """Mask function in transformers' form that makes none."""
    return None
