"""Graphs as Python text: the same text for the same program, whatever the process called its nodes.

Values are named by their op and numbered in order, and keep that name in every stage, so that two stages can
be compared line by line.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from treecompile.passes.notes import SHAPE, SOURCE, dtype_text
from treecompile.passes.reasons import user_line

__all__ = ["Argument", "Names", "graph_text", "shape_of"]


@dataclass(frozen=True)
class Argument:
    """What a placeholder is: the value it names, a word to call it by, and a note."""

    key: str
    word: str
    note: str = ""

    @staticmethod
    def of(key: str, source: str) -> Argument:
        """An argument of the model, called by the last names of where it comes from."""
        words = [part for part in source.split(".") if not part.isdigit()]
        return Argument(key, "_".join(words[-2:]), source)


@dataclass
class Names:
    """Names of values: the op and a number, given once and shared by the stages of one program."""

    known: dict[str, str] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)

    def of(self, key: str, base: str) -> str:
        """The name of the value `key`; a new one is made of `base`."""
        if key not in self.known:
            self.known[key] = self._fresh(base)
        return self.known[key]

    def _fresh(self, base: str) -> str:
        base = re.sub(r"\W", "_", base).strip("_") or "value"
        base = f"{base}_" if keyword.iskeyword(base) else base
        number = self._counts[base]
        self._counts[base] += 1
        return f"{base}_{number}" if number else base


def _base(node: fx.Node) -> str:
    target = node.target
    if node.op == "call_method":
        return str(target)
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return str(getattr(target, "__name__", target))


def _callee(target: Any) -> str:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    module = (getattr(target, "__module__", "") or "").removeprefix("_")
    return f"{module}.{name}" if module not in ("operator", "builtins", "") else str(name or target)


def shape_of(node: fx.Node) -> str:
    """``f32[4, 24, 32]``, or what an earlier pass noted; "" for what is not a tensor."""
    if SHAPE in node.meta:
        return str(node.meta[SHAPE])
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, torch.Tensor):
        return f"{dtype_text(value.dtype)}[{', '.join(str(size) for size in value.shape)}]"
    return ""


def graph_text(
    gm: fx.GraphModule,
    title: str,
    names: Names | None = None,
    arguments: Callable[[int, fx.Node], Argument] | None = None,
    name: str = "forward",
) -> str:
    """A graph as a Python function.

    Args:
        gm: the graph; graphs that it calls follow below it.
        title: a comment above it.
        names: shared with other stages of the same program, whose values keep their names.
        arguments: says what the i-th placeholder is.
        name: of the function.

    Returns:
        the text, ending in a newline.
    """
    writer = _Writer(gm, names or Names(), arguments or _plain)
    parts = [f"# {title}", *writer.function(name)]
    for attribute in writer.called:
        inner = _Writer(getattr(gm, attribute), Names(), _plain)
        parts += ["", "", *inner.function(attribute)]
    return "\n".join(parts) + "\n"


def _plain(index: int, node: fx.Node) -> Argument:
    return Argument(node.name, f"arg_{index}")


@dataclass
class _Writer:
    gm: fx.GraphModule
    names: Names
    arguments: Callable[[int, fx.Node], Argument]
    called: list[str] = field(default_factory=list)
    _local: dict[fx.Node, str] = field(default_factory=dict)
    _line: tuple[str, str] = ("", "")

    def function(self, name: str) -> list[str]:
        head, body = [f"def {name}("], list[str]()
        placeholders = 0
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                head.append(self._argument(placeholders, node))
                placeholders += 1
            elif node.op == "output":
                body.append(f"    return {self._value(node.args[0])}")
            else:
                body += [f"    {line}" if line else line for line in self._statement(node)]
        return [*head, "):", *body]

    def _argument(self, index: int, node: fx.Node) -> str:
        what = self.arguments(index, node)
        self._local[node] = self.names.of(what.key, what.word or f"arg_{index}")
        comment = "  ".join(part for part in (shape_of(node), what.note) if part)
        return f"    {self._local[node]}," + (f"  # {comment}" if comment else "")

    def _statement(self, node: fx.Node) -> list[str]:
        key = node.meta.get(SOURCE, node.name)
        if key in self.names.known and self.names.known[key] in self._local.values():
            key = f"{node.name} in {id(self)}"
        self._local[node] = self.names.of(key, _base(node))
        shape = shape_of(node)
        text = f"{self._local[node]} = {self._call(node)}" + (f"  # {shape}" if shape else "")
        line = user_line(node)
        if line == self._line or not line[0]:
            return [text]
        self._line = line
        return ["", f"# {line[0]}: {line[1]}", text]

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            target = str(node.target)
            if isinstance(getattr(self.gm, target, None), fx.GraphModule):
                self.called.append(target)
                return target
            return f"self.{target}"
        args = [self._value(a) for a in node.args]
        args += [f"{name}={self._value(a)}" for name, a in node.kwargs.items()]
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:])})"
        if node.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        return f"{_callee(node.target)}({', '.join(args)})"

    def _value(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self._local[arg]
        if isinstance(arg, (list, tuple)):
            inner = ", ".join(self._value(item) for item in arg)
            if isinstance(arg, list):
                return f"[{inner}]"
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        if isinstance(arg, slice):
            bounds = (arg.start, arg.stop, arg.step) if arg.step is not None else (arg.start, arg.stop)
            return f"slice({', '.join(self._value(bound) for bound in bounds)})"
        if isinstance(arg, Mapping):
            return "{" + ", ".join(f"{k!r}: {self._value(v)}" for k, v in arg.items()) + "}"
        if isinstance(arg, torch.device):
            return repr(str(arg))
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return str(arg)
        if callable(arg) and not isinstance(arg, type):
            return _callee(arg)
        return repr(arg)
