"""Sample calls of ops: what `python -m treecompile check` runs to audit a rule.

A rule carries samples as a function of the target. A sample is a list of arguments in which tensors are
written as :class:`Operand` and sizes as words of letters, so that one sample serves many sizes, among them
those where every
letter is the same number:

    B rows, T tokens of a row, F = 4 features, K = 2 = F / 2, U = T / 2, V token ids

``tokens("B T F")`` is a value per token, ``tokens("BT 2 K")`` the same with rows and tokens merged and
features split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Call", "Operand", "Size", "by_row", "call", "grid", "pointwise_calls", "size", "tokens", "weight"]


@dataclass(frozen=True)
class Operand:
    """A tensor argument.

    Attributes:
        place: "tokens" (computed from hidden states), "grid" (an integer input per position), "row" (a float
        input
            that belongs to the row) or "weight".
        dims: words of letters, one per dim.
        dtype: "float", "int", "bool" or "complex".
        high: integers are below this word's size.
    """

    place: str
    dims: tuple[str, ...]
    dtype: str = "float"
    high: str = "F"

    def text(self) -> str:
        kind = "" if self.dtype == "float" else f" {self.dtype}"
        return f"{self.place}{kind}[{' '.join(self.dims)}]"


@dataclass(frozen=True)
class Size:
    """An integer argument, as a word of letters."""

    word: str

    def text(self) -> str:
        return self.word


@dataclass(frozen=True)
class Call:
    """Arguments of one sample call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """As it would be written."""
        return ", ".join([_text(a) for a in self.args] + [f"{k}={_text(v)}" for k, v in self.kwargs.items()])


def _text(arg: Any) -> str:
    if isinstance(arg, (Operand, Size)):
        return arg.text()
    if isinstance(arg, list):
        return f"[{', '.join(_text(item) for item in arg)}]"
    return repr(arg)


def tokens(dims: str = "B T F", dtype: str = "float", high: str = "F") -> Operand:
    """A value per token."""
    return Operand("tokens", tuple(dims.split()), dtype, high)


def grid(dims: str = "B T", high: str = "F") -> Operand:
    """An integer input per position."""
    return Operand("grid", tuple(dims.split()), "int", high)


def by_row(dims: str = "B T") -> Operand:
    """A float input that differs between rows that share tokens."""
    return Operand("row", tuple(dims.split()))


def weight(dims: str, dtype: str = "float", high: str = "F") -> Operand:
    """A parameter or, with another dtype, a constant."""
    return Operand("weight", tuple(dims.split()), dtype, high)


def size(word: str) -> Size:
    return Size(word)


def sizes(words: str) -> list[Size]:
    """A shape argument."""
    return [Size(word) for word in words.split()]


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


# ---- pointwise ops, from their schema ----

_SCALARS: dict[str, Any] = {
    "number": 0.5, "Scalar": 0.5, "float": 0.5, "int": 1, "bool": False, "ScalarType": torch.float64,
    "Device": torch.device("cpu"), "Layout": torch.strided,
}  # fmt: skip


def pointwise_calls(target: Any) -> Iterator[Call]:
    """Calls of a pointwise op with operands in every place: alone, broadcast, by column, by row, crossed."""
    places = [_required(argument) for argument in target._schema.arguments]
    count = places.count("tensor")
    whole = tokens()
    sets: list[tuple[Operand, ...]] = [(whole,) * count]
    if count == 1:
        sets += [(tokens("B T"),), (tokens("B F T"),), (grid("B T"),)]
    else:
        rest = (whole,) * (count - 2)
        sets += [
            (*rest, whole, weight("F")),
            (*rest, whole, tokens("B T 1")),
            (*rest, whole, grid("B T 1")),
            (*rest, whole, by_row("B T 1")),
            (*rest, weight("T F"), whole),
            (*rest, tokens("B 1 T F"), tokens("B T 1 F")),
            (*rest, whole, tokens("T B F")),
        ]
    for operands in sets:
        given = iter(operands)
        args = [next(given) if place == "tensor" else place for place in places if place is not None]
        kwargs = {
            argument.name: place
            for argument, place in zip(target._schema.arguments, places, strict=True)
            if argument.kwarg_only and place is not None
        }
        yield Call(tuple(args[: len(args) - len(kwargs)]), kwargs)


def _required(argument: Any) -> Any:
    """What stands for an argument of a schema: "tensor", a value, or None to leave it at its default."""
    kind = str(argument.type)
    if kind == "Tensor":
        return "tensor"
    if argument.has_default_value():
        return None
    return _SCALARS.get(kind)


def each(calls: Iterable[Call]) -> Iterator[Call]:
    """The same calls for every target of a rule."""
    yield from calls
