"""Why a value cannot be packed: what, why, where in the user's code, and what to do about it."""

from __future__ import annotations

import linecache
import os
import re
import sys
from dataclasses import dataclass

from torch import fx

__all__ = ["Reason", "Refusal", "reason_at", "user_line"]

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_TORCH = os.path.dirname(sys.modules["torch"].__file__ or "")


@dataclass(frozen=True)
class Reason:
    """One reason, printable.

    Attributes:
        what: the op or construct, in a few words.
        why: what would go wrong if it were packed.
        hint: what the user can do.
        where: ``file:line in function``, or "" when the graph does not know.
        source: the user's line of code, or "".
        slug: short stable name, used in counters (``dense:<slug>``).
    """

    slug: str
    what: str
    why: str
    hint: str
    where: str = ""
    source: str = ""

    def __str__(self) -> str:
        lines = [self.what, f"  Explanation: {self.why}", f"  Hint: {self.hint}"]
        if self.where:
            lines.append(f"  At: {self.where}")
        if self.source:
            lines.append(f"      {self.source}")
        return "\n".join(lines)


class Refusal(Exception):
    """The whole graph runs dense, for this reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def user_line(node: fx.Node | None) -> tuple[str, str]:
    """``("file.py:12 in forward", "y = x.flip(1)")``: the innermost frame of the user's stack outside torch."""
    trace = (node.meta.get("stack_trace") or "") if node is not None else ""
    lines = trace.splitlines()
    found = ("", "")
    for i, text in enumerate(lines):
        match = _FRAME.match(text)
        if match is None or match["file"].startswith(_TORCH):
            continue
        source = lines[i + 1].strip() if i + 1 < len(lines) and not _FRAME.match(lines[i + 1]) else ""
        source = source or linecache.getline(match["file"], int(match["line"])).strip()
        found = (f"{os.path.basename(match['file'])}:{match['line']} in {match['function']}", source)
    return found


def reason_at(node: fx.Node | None, slug: str, what: str, why: str, hint: str) -> Reason:
    """A reason with the user's line of a node."""
    where, source = user_line(node)
    return Reason(slug, what, why, hint, where, source)
