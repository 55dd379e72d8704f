"""Mixture of experts: routing is token-local, and the experts are one leaf call over rows of tokens."""

from __future__ import annotations

from treecompile.passes.rule import Rule

RULES: list[Rule] = []
