"""Every error that treecompile raises, usable from the lowest layer.

    TreecompileError
    ├── TreeError         (ValueError)    rows, masks or graphs from which no tree can be built
    ├── OptionError       (ValueError)    an option or argument with a value that is not one of its choices
    ├── RolloutFileError  (ValueError)    a rollout file that cannot be read
    └── UnsupportedError  (RuntimeError)  an operation that cannot run on the tree (the dense graph still can)

Each class takes keyword fields and has one template, so that a text can be tested and a field read by code.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence

__all__ = ["OptionError", "RolloutFileError", "TreeError", "TreecompileError", "UnsupportedError"]


class TreecompileError(Exception):
    """Base class: catches everything that treecompile raises on purpose.

    Example:
        >>> from treecompile.runtime.errors import TreecompileError, TreeError
        >>> issubclass(TreeError, TreecompileError) and issubclass(TreeError, ValueError)
        True
    """

    def __init__(self, **fields: object) -> None:
        self._fields = fields
        super().__init__(self._render())

    def _render(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._fields.items())

    # An exception with keyword-only fields does not pickle by itself; worker processes send ours back.
    def __reduce__(self) -> tuple[Callable[[], TreecompileError], tuple[()]]:
        return functools.partial(type(self), **self._fields), ()


class TreeError(TreecompileError, ValueError):
    """No tree can be built from this input.

    Args:
        argument: name of the offending argument, as in the signature.
        problem: what is wrong, a clause that follows the argument's name.
        value: what was given (a value, dtype or shape).
        remedy: what to do instead.

    Example:
        >>> print(TreeError(argument="mask", problem="needs the shape of the rows, [2, 5]",
        ...                 value="shape [2, 4]", remedy="pass one mask value per token"))
        mask needs the shape of the rows, [2, 5]; got shape [2, 4]
          Remedy: pass one mask value per token
    """

    def __init__(self, *, argument: str, problem: str, value: object, remedy: str) -> None:
        self.argument, self.problem, self.value, self.remedy = argument, problem, value, remedy
        super().__init__(argument=argument, problem=problem, value=value, remedy=remedy)

    def _render(self) -> str:
        return f"{self.argument} {self.problem}; got {self.value}\n  Remedy: {self.remedy}"


class OptionError(TreecompileError, ValueError):
    """An option has a value that it cannot take.

    Args:
        argument: name of the option.
        value: what was given.
        remedy: what to do instead; may be empty when ``choices`` says it all.
        choices: the values (or the option names) that exist; the nearest one is suggested.

    Example:
        >>> print(OptionError(argument="on_unsupported", value="denze", choices=("dense", "error")))
        on_unsupported='denze' is not a valid option: use one of 'dense', 'error'
          Did you mean 'dense'?
    """

    def __init__(
        self, *, argument: str, value: object, remedy: str = "", choices: Sequence[object] = ()
    ) -> None:
        self.argument, self.value, self.remedy, self.choices = argument, value, remedy, tuple(choices)
        near = difflib.get_close_matches(str(value), [str(choice) for choice in self.choices], n=1)
        self.suggestion = near[0] if near else None
        super().__init__(argument=argument, value=value, remedy=remedy, choices=self.choices)

    def _render(self) -> str:
        listed = "use one of " + ", ".join(map(repr, self.choices)) if self.choices else ""
        advice = "; ".join(part for part in (self.remedy, listed) if part)
        text = f"{self.argument}={self.value!r} is not a valid option: {advice}"
        return text if self.suggestion is None else f"{text}\n  Did you mean {self.suggestion!r}?"


class RolloutFileError(TreecompileError, ValueError):
    """A rollout file cannot be read.

    Args:
        file: path of the file.
        problem: what is wrong.
        line: line or record number, counted from 1.
        field: name of the field or column.
        remedy: what to do instead.

    Example:
        >>> print(RolloutFileError(file="run.jsonl", line=7, field="tokens", problem="is missing",
        ...                        remedy="name the column with tokens=..."))
        run.jsonl, line 7, field 'tokens': is missing
          Remedy: name the column with tokens=...
    """

    def __init__(
        self,
        *,
        file: object,
        problem: str,
        line: int | None = None,
        field: str | None = None,
        remedy: str = "",
    ) -> None:
        self.file, self.problem, self.line, self.field, self.remedy = file, problem, line, field, remedy
        super().__init__(file=file, problem=problem, line=line, field=field, remedy=remedy)

    def _render(self) -> str:
        line = "" if self.line is None else f", line {self.line}"
        field = "" if self.field is None else f", field {self.field!r}"
        remedy = f"\n  Remedy: {self.remedy}" if self.remedy else ""
        return f"{self.file}{line}{field}: {self.problem}{remedy}"


class UnsupportedError(TreecompileError, RuntimeError):
    """An operation has no exact form on the packed tree; ``on_unsupported="dense"`` runs it dense.

    Args:
        what: the operation, and what is missing for it.
        why: why it cannot run on the tree.
        where: the user's "file:line in function", with the source line below it; None if unknown.
        hint: what the user can do.

    Example:
        >>> print(UnsupportedError(what="no tree rule for aten.flip.default", hint="move the flip out",
        ...                        why="flip reverses the token axis",
        ...                        where="toy.py:88 in forward\\nx = x.flip(1)"))
        no tree rule for aten.flip.default
          Explanation: flip reverses the token axis
          Hint: move the flip out
          At: toy.py:88 in forward
                x = x.flip(1)
    """

    def __init__(self, *, what: str, why: str, where: str | None = None, hint: str = "") -> None:
        self.what, self.why, self.where, self.hint = what, why, where, hint
        super().__init__(what=what, why=why, where=where, hint=hint)

    def _render(self) -> str:
        parts = [self.what, "  Explanation: " + _indent(self.why, 15)]
        if self.hint:
            parts.append("  Hint: " + _indent(self.hint, 8))
        if self.where:
            parts.append("  At: " + _indent(self.where, 8))
        return "\n".join(parts)


def _indent(text: str, width: int) -> str:
    return ("\n" + " " * width).join(line.strip() for line in text.splitlines())
