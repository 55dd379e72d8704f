"""Mixture of experts: routing is token-local, and the experts are one leaf call over rows of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import treecompile.runtime.ops.leaf_experts  # noqa: F401  (registers treecompile::leaf_experts)
from treecompile.passes.rule import Facts, Infer, Rule
from treecompile.passes.samples import Call


def infer_experts(infer: Infer, node: fx.Node) -> Facts:
    """hidden [S, H], index [S, k], weights [S, k]: each row meets its own experts and no other row."""
    hidden, index, weights = (infer.dims(arg) for arg in node.args[:3])
    infer.pair(infer.pair(hidden[0], index[0]), weights[0])
    infer.pair(index[1], weights[1])
    infer.mix(hidden[1])
    infer.mix(index[1])
    return Facts([hidden])


SAMPLES: dict[Any, list[Call]] = {torch.ops.treecompile.leaf_experts.default: []}

RULES = [
    Rule("experts", (torch.ops.treecompile.leaf_experts.default,), infer_experts, samples=SAMPLES),
]
