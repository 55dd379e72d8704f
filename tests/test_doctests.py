"""Every example in a docstring of the packages runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import treecompile


def modules() -> Iterator[str]:
    """Names of all modules but the kernels, which need Triton, and the program."""
    for found in pkgutil.walk_packages(treecompile.__path__, "treecompile."):
        if ".kernels" not in found.name and not found.name.endswith("__main__"):
            yield found.name


@pytest.mark.parametrize("name", sorted(modules()))
def test_doctests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(importlib.import_module(name)):
        # In a module of their own, as a user's are: Dynamo looks up the globals of a function in its module.
        module = ModuleType("example")
        vars(module).update({k: v for k, v in test.globs.items() if not k.startswith("__")})
        monkeypatch.setitem(sys.modules, "example", module)
        test.globs = vars(module)
        runner.run(test, clear_globs=False)
    found = runner.summarize(verbose=False)
    assert found.failed == 0
    assert found.attempted or name not in EXEMPLARY


# Modules that lose their meaning without an example.
EXEMPLARY = {
    f"treecompile.runtime.{name}"
    for name in (
        "chunks", "rounds", "dag", "segment_table", "ops.chunk_reference", "ops.chunk_rounds", "ops.recurrence",
        "ops.recurrence_choice", "ops.recurrence_plan", "ops.recurrence_paths", "ops.recurrence_rounds",
        "ops.causal_conv", "ops.causal_conv_tables",
    )
}  # fmt: skip
