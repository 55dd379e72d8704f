"""Settings of Dynamo that decide whether a model is one graph; none is set unless the user asks for it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["SETTINGS", "Setting", "configure", "hints"]


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: in ``torch._dynamo.config``.
        symptom: what a graph break, or a module's class, says where this setting is the cause.
        cost: what it costs, and when.
        wanted: the value that helps, given the present one.
    """

    name: str
    symptom: re.Pattern[str]
    cost: str
    wanted: Callable[[Any], Any]


def _with_loggers(present: Any) -> Any:
    found = {f for f in (getattr(logging.Logger, "warning_once", None),) if f is not None}
    return set(present) | found


SETTINGS = (
    Setting(
        "optimize_ddp",
        re.compile(r"DistributedDataParallel"),
        "it cuts the graph at every gradient bucket, and only the first piece has token ids",
        lambda present: False,
    ),
    Setting(
        "capture_dynamic_output_shape_ops",
        re.compile(r"[Dd]ynamic (output )?shape operator|nonzero|masked_select|dynamic_output_shape_ops"),
        "hidden[mask] and other selections by a mask break the graph, and the head runs dense",
        lambda present: True,
    ),
    Setting(
        "ignore_logging_functions",
        re.compile(r"warning_once|[Ll]ogging\.?Logger|logger"),
        "logger.warning_once breaks the graph (transformers: checkpointing with use_cache left on)",
        _with_loggers,
    ),
    Setting(
        "recompile_limit",
        re.compile(r"recompile_limit|cache_size_limit"),
        "after so many captures of one function Dynamo runs it eagerly, without any backend",
        lambda present: max(int(present), 64),
    ),
)


def hints(texts: list[str]) -> list[tuple[Setting, Any]]:
    """The settings that these texts point at and that lack the value that helps, with that value."""
    config = torch._dynamo.config
    out = []
    for setting in SETTINGS:
        present = getattr(config, setting.name, None)
        if present is None or not any(setting.symptom.search(text) for text in texts):
            continue
        wanted = setting.wanted(present)
        if wanted != present:
            out.append((setting, wanted))
    return out


def configure() -> dict[str, tuple[Any, Any]]:
    """Set what in Dynamo keeps models in one graph. Importing or using the backend sets none of it.

    In ``torch._dynamo.config``:

    - ``optimize_ddp = False``: DistributedDataParallel no longer cuts the graph at gradient buckets (it then
      reduces gradients after the backward pass of the graph rather than between its pieces);
    - ``capture_dynamic_output_shape_ops = True``: ``hidden[mask]`` stays in the graph;
    - ``ignore_logging_functions``: ``logging.Logger.warning_once`` is skipped while tracing, where some
    package
      has defined it;
    - ``recompile_limit``: at least 64 captures per function.

    They hold for every backend of the process.

    Returns:
        What was changed: ``{name: (before, after)}``; empty if all was set.

    Example:
        >>> import treecompile
        >>> changed = treecompile.configure()
        >>> treecompile.configure()
        {}
    """
    config = torch._dynamo.config
    changed = {}
    for setting in SETTINGS:
        before = getattr(config, setting.name, None)
        if before is None:
            continue
        after = setting.wanted(before)
        if after != before:
            setattr(config, setting.name, after)
            changed[setting.name] = (before, after)
    return changed
