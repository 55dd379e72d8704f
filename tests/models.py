"""Small language models: families of transformers with random weights, and one written by hand.

Sizes are as small as the structure of a family allows (grouped heads, several experts, windows shorter than a
row). Weights have a standard deviation of about 0.1: with the usual 0.02 a wrong position hardly shows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["FAMILIES", "HYBRIDS", "VOCAB", "WINDOW", "Family", "Handwritten"]

VOCAB = 40
WINDOW = 5

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_ALL = ("sdpa", "eager", "flex", "flash")
_EXPERTS = ("batched_mm", "eager", "grouped_mm")


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: of the family.
        prefix: of its classes in transformers; "" for the model written by hand.
        sizes: of its config, beside the common ones; None for a common one that it does not take.
        attention: implementations that it accepts; the first one is its usual one.
        reference: the implementation that runs dense where `flex` and `flash` cannot (on a CPU).
        experts: implementations of its experts, the usual one first; empty for dense families.
        adapters: linear layers for LoRA.
        frozen: parameters to freeze, by parts of their names.
        config: suffix of the config class.
        tolerance: of the law in fp64.
    """

    name: str
    prefix: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    attention: tuple[str, ...] = _ALL
    reference: str = "sdpa"
    experts: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ("q_proj", "v_proj")
    frozen: tuple[str, ...] = ("mlp", "embed")
    config: str = "Config"
    tolerance: float = 1e-8

    def build(self, *, tied: bool = False, smooth: bool = False, seed: int = 0) -> nn.Module:
        """A model in fp32 and training mode.

        Args:
            tied: one weight for embeddings and head.
            smooth: every token goes to all experts: outputs are a continuous function of all roundings.
        """
        if not self.prefix:
            model: nn.Module = Handwritten(tied=tied)
        else:
            transformers = importlib.import_module("transformers")
            sizes = {**_SIZES, **self.sizes, "tie_word_embeddings": tied}
            sizes = {name: size for name, size in sizes.items() if size is not None}
            if smooth and self.experts:
                sizes |= {"num_experts_per_tok": 4}
            if smooth and "n_group" in sizes:
                sizes |= {"topk_group": sizes["n_group"]}
            config = getattr(transformers, self.prefix + self.config)(**sizes)
            # Some vectors are drawn by the model, and kept.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = getattr(transformers, self.prefix + "ForCausalLM")(config)
        randomise(model, seed)
        return model.train()


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw all parameters anew: matrices around zero, vectors (norms, biases) around their initial value."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=g) * 0.1
            p.copy_(noise if p.dim() > 1 else p.float() + noise)


_FAMILIES = (
    Family("llama", "Llama"),
    Family("qwen2", "Qwen2"),
    Family("qwen3", "Qwen3", {"head_dim": 8}),
    Family("mistral", "Mistral", {"head_dim": 8, "sliding_window": WINDOW}),
    Family(
        "gemma2",
        "Gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        }
        | _ALTERNATING,
        attention=("eager", "sdpa", "flex", "flash"),
        reference="eager",
    ),
    Family("gemma3", "Gemma3", {"head_dim": 8, **_ALTERNATING}, config="TextConfig"),
    Family("phi3", "Phi3", adapters=("qkv_proj",)),
    Family("olmo2", "Olmo2"),
    Family(
        "gpt_oss",
        "GptOss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_ALTERNATING},
        attention=("eager", "flex", "flash"),
        reference="eager",
        experts=_EXPERTS,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        experts=_EXPERTS,
        adapters=("q_b_proj", "kv_b_proj"),
    ),
    Family(
        "mixtral",
        "Mixtral",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        experts=_EXPERTS,
    ),
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        experts=_EXPERTS,
    ),
    Family(
        "glm4_moe",
        "Glm4Moe",
        {
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        experts=_EXPERTS,
    ),
    Family("handwritten", "", attention=("sdpa", "eager"), tolerance=1e-10),
)
FAMILIES = {family.name: family for family in _FAMILIES}

# ---- with recurrences or short convolutions ----------------------------------------------------------------

_LAYERS = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **_LAYERS,
}
_ROUTED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Chunks shorter than a row: states pass between them.
_SCAN = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 5,
}
_OWN = dict.fromkeys(
    ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
)

_HYBRIDS = (
    Family("qwen3_next", "Qwen3Next", {**_DELTA, **_ROUTED}),
    Family("qwen3_5", "Qwen3_5", _DELTA, config="TextConfig"),
    Family(
        "qwen3_5_moe", "Qwen3_5Moe", {**_DELTA, **_ROUTED, "intermediate_size": None}, config="TextConfig"
    ),
    Family("olmo_hybrid", "OlmoHybrid", {**_DELTA, "linear_num_key_heads": 4, "head_dim": None}),
    Family(
        "kimi_linear",
        "KimiLinear",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            **_LOCAL,
            **_LAYERS,
            "head_dim": None,
        },
    ),
    Family("bamba", "Bamba", {"attn_layer_indices": [1], **_SCAN}),
    Family("falcon_h1", "FalconH1", {"mamba_d_ssm": 64, **_SCAN}),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        {
            "shared_intermediate_size": 16,
            "position_embedding_type": "rope",
            **_LOCAL,
            **_SCAN,
            **_LAYERS,
            "head_dim": None,
        },
    ),
    Family(
        "nemotron_h",
        "NemotronH",
        {
            "num_hidden_layers": None,
            "layers_block_type": ["mamba", "attention", "moe"],
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 5,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    Family(
        "mamba2",
        "Mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 5, **_OWN},
        attention=(),
    ),
    Family("minimax", "MiniMax", {"block_size": 5, **_LOCAL, **_LAYERS}),
    Family("lfm2", "Lfm2", {"layer_types": ["conv", "full_attention"]}),
)
HYBRIDS = {family.name: family for family in _HYBRIDS}


# ---- written by hand ---------------------------------------------------------------------------------------


class Handwritten(nn.Module):
    """A decoder as a user might write it: RMS norm, rotary positions, grouped heads, a gated MLP.

    It takes what the families of transformers take, by the same names, and returns a dict.
    """

    def __init__(self, *, tied: bool = False, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.attention = "sdpa"
        self.checkpointing = False
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(_Layer(width, heads=4, kv_heads=2) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
    ) -> dict[str, Any]:
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        seen = (columns[None, :] <= columns[:, None])[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        elif position_ids is not None:
            document = (position_ids == 0).cumsum(-1)
            seen = seen & (document[:, None, :, None] == document[:, None, None, :])
        angles = _angles(columns[None] if position_ids is None else position_ids, 8)
        h = self.embed(input_ids)
        hidden = [h]
        for layer in self.layers:
            if self.checkpointing:
                h = checkpoint(layer, h, seen, angles, self.attention, use_reentrant=False)
            else:
                h = layer(h, seen, angles, self.attention)
            hidden.append(h)
        logits = self.head(self.norm(h)[:, -logits_to_keep:])
        out: dict[str, Any] = {"logits": logits}
        if labels is not None:
            after = F.pad(labels, (0, 1), value=-100)[:, 1:]
            out["loss"] = F.cross_entropy(logits.flatten(0, 1).float(), after.flatten())
        if output_hidden_states:
            out["hidden_states"] = tuple(hidden)
        return out


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.q_proj = nn.Linear(width, heads * size, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, width, bias=False)
        self.mlp_gate, self.mlp_up = nn.Linear(width, 48), nn.Linear(width, 48)
        self.mlp_down = nn.Linear(48, width)

    def forward(self, h: Tensor, seen: Tensor, angles: tuple[Tensor, Tensor], attention: str) -> Tensor:
        x = self.norm1(h)
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        q, k = _rotated(q, angles), _rotated(k, angles)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        out = _ATTENTION[attention](q, k, v, seen).transpose(1, 2).reshape(batch, length, -1)
        h = h + self.o_proj(out)
        x = self.norm2(h)
        return h + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _eager(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


_ATTENTION: dict[str, Callable[..., Tensor]] = {"sdpa": _sdpa, "eager": _eager}


def _angles(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """cos and sin, [B or 1, 1, T, size]."""
    steps = torch.arange(0, size, 2, device=positions.device)
    frequencies = 1.0 / 100.0 ** (steps.double() / size)
    angles = positions[:, None, :, None].double() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (a.to(x.dtype) for a in angles)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
