"""README.md tells the truth, and every example runs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from treecompile.options import Options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PINNED = (ROOT / "constraints.txt").read_text()

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def pinned(package: str) -> bool:
    """Whether the installed version is the one of constraints.txt: printed results depend on it."""
    module = importlib.import_module(package)
    return f"{package}=={module.__version__.split('+')[0]}" in PINNED.splitlines()


def run(code: str, folder: Path) -> str:
    """What a block prints; it runs as a file, so that Dynamo finds its module and reports show its lines."""
    path = folder / "readme.py"
    path.write_text(code)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(path), run_name="readme")
    return out.getvalue()


def as_pattern(text: str) -> re.Pattern[str]:
    """`...` on a line of its own stands for any lines; how many nodes a graph has may differ."""
    parts = [re.escape(part) for part in re.split(r"^\.\.\.\n", text, flags=re.MULTILINE)]
    return re.compile("(?:.*\n)*".join(re.sub(r"\d+(?=\\ nodes)", r"\\d+", part) for part in parts))


def check(code: str, folder: Path) -> None:
    """Run the first block; compare what it prints with the block below it."""
    printed = run(code, folder)
    if pinned("torch") and pinned("transformers"):
        assert as_pattern(blocks("text")[0]).fullmatch(printed), printed


def test_the_first_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real: Any = torch.compile

    def without_code_generation(function: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "tree":
            kwargs["options"] = {"compiler": "aot_eager"}
        return real(function, **kwargs)

    monkeypatch.setattr(torch, "compile", without_code_generation)
    check(blocks("python")[0], tmp_path)


@pytest.mark.slow
def test_the_first_example_as_it_stands(tmp_path: Path) -> None:
    check(blocks("python")[0], tmp_path)


def test_the_first_screen() -> None:
    first = README.splitlines()[:55]
    assert first[0] == "# treecompile"
    assert first[2].count(". ") == 0
    assert "\n".join(first).count("```") >= 4


def test_every_option_is_listed() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", README, re.MULTILINE))
    assert listed == {f.name: repr(f.default).replace("'", '"') for f in dataclasses.fields(Options)}


def test_every_command_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE)) <= targets


def test_ci_runs_the_test_command() -> None:
    assert "make test      #" in README
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()


def test_every_file_named_exists() -> None:
    for name in re.findall(r"\b(?:examples|tests|treecompile|passes|runtime)/[\w./]+\.py\b", README):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("**/*.py")), ids=lambda path: path.stem)
def test_every_example_can_be_imported(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert importlib.import_module(name).__doc__
