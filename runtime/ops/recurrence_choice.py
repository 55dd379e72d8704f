"""Which executor of `tree_recurrence` the environment asks for."""

from __future__ import annotations

import os

__all__ = ["EXECUTORS", "VARIABLE", "asked_executor"]

VARIABLE = "TREECOMPILE_RECURRENCE"
EXECUTORS = ("triton", "pytorch", "rounds", "fla")


def asked_executor() -> str:
    """One of `EXECUTORS`, or "" where the choice is ours.

    Raises:
        ValueError: the environment asks for something unknown.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict(os.environ, {VARIABLE: "rounds"}):
        ...     asked_executor()
        'rounds'
    """
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in EXECUTORS:
        raise ValueError(f"{VARIABLE}={asked!r}: there are {', '.join(EXECUTORS[:-1])} and {EXECUTORS[-1]}")
    return asked
