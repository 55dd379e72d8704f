"""Attentions of a graph: what each may see, and whether its operands run over the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from treecompile.passes.axes import axes_of, resolve
from treecompile.passes.masks import MaskSpec, Unproved
from treecompile.passes.ops.views import arg
from treecompile.passes.reasons import Refusal, reason_at
from treecompile.passes.values import Kind, Value
from treecompile.runtime.program import WHOLE

if TYPE_CHECKING:
    from treecompile.passes.kinds import Kinds

__all__ = ["AttentionCall", "AttentionSite", "Attentions", "RecurrenceCall"]


@dataclass(frozen=True)
class AttentionSite:
    """One attention to rewrite: operands as graph nodes, and what it may see."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    spec: MaskSpec
    scale: Any
    softcap: float = 0.0
    sinks: fx.Node | None = None
    transposed_k: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """What a tree attention of the packed graph is called with, but for the tree.

    Attributes:
        heads, kv_heads: numbers of query and of K/V heads.
        qk_size, v_size: head sizes.
        dtype: of its operands, as the graph computes them.
        autocast: dtype of the autocast that the graph runs it under, False where the graph switches autocast off, None
            where it says nothing.
        scale, softcap, window: as for the op.
    """

    heads: int
    kv_heads: int
    qk_size: int
    v_size: int
    dtype: torch.dtype
    autocast: torch.dtype | bool | None
    scale: float
    softcap: float
    window: int


@dataclass(frozen=True)
class RecurrenceCall:
    """What a tree recurrence of the packed graph is called with, but for the tree.

    Attributes:
        groups, heads: numbers of key and of value heads.
        k_size, v_size: head sizes.
        k_dtype, v_dtype: of keys and values.
        vector: a decay per channel, and not per head.
        delta: the delta rule.
        chunk: tokens.
    """

    groups: int
    heads: int
    k_size: int
    v_size: int
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    vector: bool
    delta: bool
    chunk: int


class Attentions:
    """The attentions of one graph that is being classified.

    Args:
        kinds: of the graph; what is proved goes to `Kinds.sites`.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds

    def call(self, node: fx.Node) -> Value:
        """A call of scaled_dot_product_attention, or of the leaf."""
        q, k, v = node.args[:3]
        leaf = node.target is torch.ops.treecompile.leaf_attention.default
        mask = arg(node, 3, "attn_mask")
        spec = MaskSpec()
        if leaf:
            names = ("q", "k", "v", "mask", "sinks", "scale", "softcap")
            given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
            mask, scale = given.get("mask"), given.get("scale")
            site = AttentionSite(q, k, v, spec, scale, float(given.get("softcap") or 0.0), given.get("sinks"))
        else:
            if arg(node, 4, "dropout_p", 0.0) != 0.0:
                raise Refusal(
                    reason_at(
                        node,
                        "dropout",
                        f"attention dropout with p={arg(node, 4, 'dropout_p')}",
                        "each row draws its own noise, so rows with a common prefix no longer agree on it",
                        "set attention_dropout to 0 or call model.eval()",
                    )
                )
            scale = arg(node, 6, "scale")
            if arg(node, 5, "is_causal", False):
                spec = MaskSpec(causal=True)
            site = AttentionSite(q, k, v, spec, scale)
        if mask is not None:
            site = replace(
                site, spec=spec.merge(self.classify(node, [self.kinds.masks.express(mask)], kernel=True))
            )
        return self.add(node, site)

    def classify(self, node: fx.Node, exprs: Iterable[Any], kernel: bool = False) -> MaskSpec:
        spec = MaskSpec()
        try:
            for expr in exprs:
                spec = spec.merge(self.kinds.masks.classify(expr, kernel))
        except Unproved as unproved:
            raise Refusal(
                reason_at(
                    node,
                    "mask",
                    "an attention mask that is not proved causal",
                    str(unproved),
                    "use a causal mask, padding, a sliding window or restarting position_ids; "
                    "pass a [batch, sequence] attention_mask rather than a 4-D one",
                )
            ) from None
        return spec

    def add(self, node: fx.Node, site: AttentionSite) -> Value:
        if not site.spec.causal:
            raise Refusal(
                reason_at(
                    node,
                    "not-causal",
                    "an attention that is not causal",
                    f"every query sees later tokens, so nothing depends on the prefix alone "
                    f"(mask: {self._describe(site.spec)})",
                    "only causal models can share prefixes",
                )
            )
        for operand, role in ((site.q, "query"), (site.k, "key"), (site.v, "value")):
            value = self.kinds.values[operand]
            dims = self.kinds.dims(operand)
            at = -1 if role == "key" and site.transposed_k else -2
            along = resolve(dims[at]) if len(dims) >= 2 else ()
            lead = dims[:-2]
            fine = (
                value.kind is Kind.SHARED
                and len(along) == 1
                and self.kinds.region_of_axis(along[0]) == WHOLE
                and not self.kinds.seq_axes(lead)
                and len(dims) >= 3
            )
            if not fine:
                raise Refusal(
                    value.reason
                    or reason_at(
                        node,
                        "attention-operand",
                        f"the {role} of an attention does not run over the tokens",
                        "one row of it must belong to one token (cross-attention, KV caches and sliced queries do not)",
                        "run generation and cached steps uncompiled; nothing is lost but the sharing",
                    )
                )
        self._check_heads(node, site)
        self.kinds.sites[node] = site
        return Value(Kind.SHARED, form="attention")

    def _check_heads(self, node: fx.Node, site: AttentionSite) -> None:
        """Query heads are consecutive copies of key heads: the key's leading axes begin the query's."""
        q, k, v = (
            [axis.key() for axis in axes_of(self.kinds.dims(x)[:-2]) if not self.kinds.is_batch(axis)]
            for x in (site.q, site.k, site.v)
        )
        if k != v or q[: len(k)] != k:
            raise Refusal(
                reason_at(
                    node,
                    "attention-heads",
                    "query and key heads of an attention are not grouped in order",
                    "head h of a query must read head h // group of the keys and the same head of the values",
                    "give keys and values the same heads, and repeat them by repeat_interleave(group, 1)",
                )
            )

    def _describe(self, spec: MaskSpec) -> str:
        parts = ["causal"] if spec.causal else []
        parts += [f"window {spec.window}"] if spec.window else []
        parts += [f"visible[{n.name}]" for n, _ in spec.visible] + [
            f"document[{n.name}]" for n in spec.documents
        ]
        return " and ".join(parts) or "none"

    # ---- attention written out ------------------------------------------------------------------------------------
