"""Train on rollouts that share prefixes: ``torch.compile(model, backend="tree")``."""

from __future__ import annotations

from treecompile.runtime.errors import (
    OptionError,
    RolloutFileError,
    TreecompileError,
    TreeError,
    UnsupportedError,
)
from treecompile.runtime.tree import RolloutTree

__all__ = ["OptionError", "RolloutFileError", "RolloutTree", "TreeError", "TreecompileError", "UnsupportedError"]
