"""Compare a text with the one that was reviewed and committed: tests/golden/<name>.txt.

    UPDATE_GOLDEN=1 python -m pytest tests/test_report.py      writes them anew: read the diff

What differs between machines and versions is masked: milliseconds and line numbers (the line itself is there).
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

__all__ = ["assert_golden", "masked"]

_FOLDER = Path(__file__).parent / "golden"
_LINE = re.compile(r"\b(\w+\.py):\d+")
_STEP = re.compile(r"^(\w+ +\d+) +\d+\.\d(?=  |$)", re.MULTILINE)


def masked(text: str) -> str:
    """The text without times and line numbers."""
    return _STEP.sub(r"\1  *", _LINE.sub(r"\1:*", text))


def assert_golden(name: str, text: str) -> None:
    """The masked text equals the committed one.

    Args:
        name: of the file, without ending.
        text: to compare.
    """
    text = masked(text).rstrip() + "\n"
    path = _FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return
    assert path.exists(), f"{path} is missing: run with UPDATE_GOLDEN=1 and review it"
    expected = path.read_text()
    diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), "expected", "now", lineterm="")
    assert text == expected, "\n" + "\n".join(diff)
