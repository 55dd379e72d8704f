"""What the classifying walk says of one value."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from treecompile.passes.reasons import Reason

__all__ = ["Kind", "Value"]


class Kind(enum.Enum):
    OTHER = "other"
    UNIFORM = "uniform"
    GRID = "grid"
    SHARED = "shared"
    PAIR = "pair"
    PRIVATE = "private"


@dataclass
class Value:
    """Kind of one node and, where it is not the plain copy, how it is written."""

    kind: Kind
    form: str = "copy"
    reason: Reason | None = None
    data: Any = None
    pure: bool = False
