"""Train on rollouts that share prefixes: ``torch.compile(model, backend="tree")``.

explain         what the backend makes of a model: report of graphs, tree, rewrites, refusals
configure       settings of Dynamo that keep models in one graph
counters        how calls went: packed, dense, dense:<reason>, captured, compiled
clear_caches    forget compiled graphs and trees
RolloutTree     the prefix tree of a batch
Report, Reason  what `explain` returns
errors          TreecompileError and its kinds
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treecompile.runtime.errors import (
    OptionError,
    RolloutFileError,
    TreecompileError,
    TreeError,
    UnsupportedError,
)
from treecompile.runtime.tree import RolloutTree

if TYPE_CHECKING:
    from treecompile.api import clear_caches, explain
    from treecompile.backend import counters
    from treecompile.passes.reasons import Reason
    from treecompile.report import Report
    from treecompile.settings import configure

__all__ = [
    "OptionError",
    "Reason",
    "Report",
    "RolloutFileError",
    "RolloutTree",
    "TreeError",
    "TreecompileError",
    "UnsupportedError",
    "clear_caches",
    "configure",
    "counters",
    "explain",
]

# Loaded on first use: importing the package must be cheap, and possible while torch itself is being imported
# (TORCH_LOGS names it).
_LATER = {
    "Reason": "treecompile.passes.reasons",
    "Report": "treecompile.report",
    "clear_caches": "treecompile.api",
    "configure": "treecompile.settings",
    "counters": "treecompile.backend",
    "explain": "treecompile.api",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
