"""The error classes: hierarchy, templates, fields, pickling."""

from __future__ import annotations

import pickle

import pytest

from treecompile.runtime.errors import (
    OptionError,
    RolloutFileError,
    TreecompileError,
    TreeError,
    UnsupportedError,
)

SAMPLES: list[tuple[TreecompileError, type[Exception], str]] = [
    (
        TreeError(argument="rows", problem="needs integers", value="dtype float32", remedy="convert"),
        ValueError,
        "rows needs integers; got dtype float32\n  Remedy: convert",
    ),
    (
        OptionError(argument="slots", value=-1, remedy="pass a positive number of tokens"),
        ValueError,
        "slots=-1 is not a valid option: pass a positive number of tokens",
    ),
    (
        OptionError(argument="handoffs", value="pth", choices=("path", "interior", "host")),
        ValueError,
        "handoffs='pth' is not a valid option: use one of 'path', 'interior', 'host'\n  Did you mean 'path'?",
    ),
    (
        RolloutFileError(file="a.jsonl", line=3, field="ids", problem="is not a list", remedy="write a list"),
        ValueError,
        "a.jsonl, line 3, field 'ids': is not a list\n  Remedy: write a list",
    ),
    (RolloutFileError(file="a.txt", problem="has no known ending"), ValueError, "a.txt: has no known ending"),
    (
        UnsupportedError(
            what="no tree rule for aten.flip.default",
            why="flip reverses the token axis;\na token would see its descendants",
            where="toy.py:88 in forward\n    x = x.flip(1)",
            hint="move the flip out of the model",
        ),
        RuntimeError,
        "no tree rule for aten.flip.default\n"
        "  Explanation: flip reverses the token axis;\n"
        "               a token would see its descendants\n"
        "  Hint: move the flip out of the model\n"
        "  At: toy.py:88 in forward\n"
        "        x = x.flip(1)",
    ),
    (UnsupportedError(what="a", why="b"), RuntimeError, "a\n  Explanation: b"),
]


@pytest.mark.parametrize(("error", "builtin", "text"), SAMPLES)
def test_templates(error: TreecompileError, builtin: type[Exception], text: str) -> None:
    assert str(error) == text
    assert isinstance(error, TreecompileError)
    assert isinstance(error, builtin)


@pytest.mark.parametrize("error", [error for error, _, _ in SAMPLES])
def test_errors_travel_between_processes(error: TreecompileError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert (str(back), vars(back)) == (str(error), vars(error))
