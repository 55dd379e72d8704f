"""Why a value cannot be packed: what, why, where in the user's code, and what to do about it."""

from __future__ import annotations

import linecache
import os
import re
import sys
from dataclasses import dataclass

from torch import fx

__all__ = ["ARGUMENT", "Reason", "Refusal", "name_of", "no_tokens", "reason_at", "source_text", "user_line"]

# Key of node.meta: where an argument of the captured graph comes from, as the user would write it.
ARGUMENT = "treecompile_argument"

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_LEAVES = os.path.join("treecompile", "leaves", "")  # stands in for the model's own code
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
    """``("file.py:12 in forward", "y = x.flip(1)")``: the innermost frame outside torch and the leaves."""
    trace = (node.meta.get("stack_trace") or "") if node is not None else ""
    lines = trace.splitlines()
    found = ("", "")
    for i, text in enumerate(lines):
        match = _FRAME.match(text)
        if match is None or match["file"].startswith(_TORCH) or _LEAVES in match["file"]:
            continue
        source = lines[i + 1].strip() if i + 1 < len(lines) and not _FRAME.match(lines[i + 1]) else ""
        source = source or linecache.getline(match["file"], int(match["line"])).strip()
        found = (f"{os.path.basename(match['file'])}:{match['line']} in {match['function']}", source)
    return found


_OUTER = re.compile(r"^L\['(?:call|self|kwargs)'\]")
_MODULE = re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']+)'\]")
_INNER = re.compile(r"\['([^']+)'\]")


def source_text(node: fx.Node) -> str:
    """Where an argument of a captured graph comes from: ``input_ids``, ``layers.0.mlp.up_proj.weight``.

    Args:
        node: the placeholder, as Dynamo made it.
    """
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    name = name() if callable(name) else name
    if not isinstance(name, str) or not name:
        return ""
    text = _MODULE.sub(r".\1", re.sub(r"\.?__self__", "", _OUTER.sub("", name)))
    return _INNER.sub(r".\1", text).removeprefix("L.").lstrip(".") or name


def op_name(node: fx.Node) -> str:
    """What to call an op in a message."""
    return str(node.target)


def name_of(node: fx.Node) -> str:
    """What to call a value in a message."""
    if node.op == "placeholder":
        return str(node.meta.get(ARGUMENT) or node.name)
    return f"the result of {node.target}"


def reason_at(node: fx.Node | None, slug: str, what: str, why: str, hint: str) -> Reason:
    """A reason with the user's line of a node; an argument of the graph has that of its first reader."""
    if node is not None and node.op == "placeholder":
        node = next(iter(node.users), node)
    where, source = user_line(node)
    return Reason(slug, what, why, hint, where, source)


def no_tokens() -> Reason:
    """Nothing in the graph is an embedding of token ids."""
    return reason_at(
        None,
        "no-token-ids",
        "no embedding of token ids in this graph",
        "the prefix tree is built from token ids, and this graph receives hidden states or no tokens at all",
        "compile the whole model, so that the embedding and the layers are captured together",
    )
