"""Logs and traces of captures, for people.

    TORCH_LOGS="treecompile"           the report of every capture
    TORCH_LOGS="+treecompile"          its stages as Python text too
    TREECOMPILE_TRACE=out              both, and the pictures, as files: out/000/index.html, out/001/...

torch takes the name of any importable package in TORCH_LOGS, so nothing is registered. Without it, the logger
is an ordinary one: warnings are shown, once for each reason.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from pathlib import Path

from torch import fx

from treecompile.passes.program import Draft
from treecompile.passes.reasons import Reason

__all__ = ["TRACE", "captured", "forget", "log", "warn_once"]

TRACE = "TREECOMPILE_TRACE"

log = logging.getLogger("treecompile")

_lock = threading.Lock()
_warned: set[str] = set()


def warn_once(text: str) -> None:
    """A warning, unless the same text was given before."""
    with _lock:
        if text in _warned:
            return
        _warned.add(text)
    log.warning("%s", text)


def forget() -> None:
    """Give every warning again."""
    with _lock:
        _warned.clear()


def captured(gm: fx.GraphModule, draft: Draft | None, reason: Reason | None = None) -> None:
    """Log and save one capture, where either is asked for.

    Args:
        gm: as Dynamo captured it.
        draft: its tree program; None if it was refused.
        reason: why it was refused.
    """
    folder = os.environ.get(TRACE)
    if not folder and not log.isEnabledFor(logging.INFO):
        return
    from treecompile.report import STAGES, GraphReport, Report

    graph = GraphReport(gm, draft, reason)
    report = Report((graph,))
    log.info("captured\n%s", report)
    if log.isEnabledFor(logging.DEBUG):
        for stage in STAGES:
            if text := graph.stage(stage):
                log.debug("%s", text)
    if folder:
        report.save(_free(Path(folder)))


def _free(folder: Path) -> Path:
    """The first folder with a number that no process has taken."""
    for number in itertools.count():
        path = folder / f"{number:03d}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError
