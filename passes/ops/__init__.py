"""The op table: one file per family, one value per rule.

Adding an op is adding a value to a family's RULES (or a family file to the tuple below); the propagation, the audit of
``python -m treecompile check``, the tests and the list of supported ops iterate over RULES.
"""

from __future__ import annotations

from treecompile.passes.ops import (
    attention,
    contraction,
    creation,
    indexing,
    loss,
    mixture,
    pointwise,
    recurrence,
    reductions,
    views,
)
from treecompile.passes.rule import Rule

FAMILIES = (
    pointwise, views, indexing, contraction, reductions, creation, attention, recurrence, mixture, loss,
)  # fmt: skip
RULES: tuple[Rule, ...] = tuple(rule for family in FAMILIES for rule in family.RULES)

__all__ = ["FAMILIES", "RULES"]
