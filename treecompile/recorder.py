"""What `explain` listens to while a model is captured: a recorder per thread, silent unless one is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import fx

from treecompile.passes.program import Draft
from treecompile.passes.reasons import Reason
from treecompile.runtime.program import TreeProgram

__all__ = ["Recorder", "current", "recording"]


@dataclass
class Recorder:
    """Captures in order."""

    drafts: list[tuple[fx.GraphModule, Draft, TreeProgram]] = field(default_factory=list)
    refusals: list[tuple[fx.GraphModule, Reason]] = field(default_factory=list)

    def captured(self, gm: fx.GraphModule, draft: Draft, program: TreeProgram) -> None:
        self.drafts.append((gm, draft, program))

    def refused(self, gm: fx.GraphModule, reason: Reason) -> None:
        self.refusals.append((gm, reason))


class _Silent(Recorder):
    def captured(self, gm: fx.GraphModule, draft: Draft, program: TreeProgram) -> None:
        pass

    def refused(self, gm: fx.GraphModule, reason: Reason) -> None:
        pass


_SILENT: Recorder = _Silent()
_recorder: ContextVar[Recorder] = ContextVar("treecompile_recorder", default=_SILENT)


def current() -> Recorder:
    """The recorder of this context."""
    return _recorder.get()


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Collect what is captured inside the block."""
    recorder = Recorder()
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)
