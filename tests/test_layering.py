"""Imports point one way: treecompile -> passes -> runtime, and runtime knows no FX graphs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("treecompile", "passes", "runtime")
HEAVY = ("triton", "transformers", "peft", "pyarrow", "fla")


def sources(layer: str) -> list[Path]:
    """All modules of a layer; the links in treecompile/ point at the other two and are left out."""
    links = [path for path in (ROOT / layer).iterdir() if path.is_symlink()]
    return [p for p in sorted((ROOT / layer).rglob("*.py")) if not any(link in p.parents for link in links)]


def imported(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted name) of every import below a node; `from a import b` counts as a and as a.b."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            module = node.module or ""
            found += [
                (node.lineno, module),
                *((node.lineno, f"{module}.{alias.name}") for alias in node.names),
            ]
    return found


def layer_of(name: str) -> str | None:
    """The layer that an imported name belongs to, None for a foreign one."""
    parts = name.split(".")
    if parts[0] != "treecompile":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS[1:] else "treecompile"


def at_import(tree: ast.Module) -> ast.Module:
    """The statements that run when a module is imported: no function bodies, no TYPE_CHECKING blocks."""

    class Prune(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    pruned = Prune().visit(tree)
    assert isinstance(pruned, ast.Module)
    return pruned


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer: str) -> None:
    allowed = LAYERS[LAYERS.index(layer) :]
    wrong = []
    for path in sources(layer):
        for line, name in imported(ast.parse(path.read_text())):
            target = layer_of(name)
            # `from treecompile import runtime` names the door on the way to a layer it may use.
            if target is not None and target not in allowed and name != "treecompile":
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
            if name.split(".")[0] in LAYERS[1:]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} uses the folder name {name}")
    assert not wrong, "\n".join(wrong)


def test_a_lower_layer_takes_nothing_from_the_door() -> None:
    wrong = []
    for path in (*sources("passes"), *sources("runtime")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "treecompile":
                names = {alias.name for alias in node.names} - set(LAYERS[1:])
                if names:
                    wrong.append(
                        f"{path.relative_to(ROOT)}:{node.lineno} from treecompile import {', '.join(names)}"
                    )
    assert not wrong, "\n".join(wrong)


def test_runtime_knows_no_fx_graph() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources("runtime")
        for line, name in imported(ast.parse(path.read_text()))
        if name == "torch.fx" or name.startswith("torch.fx.")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layer", LAYERS)
def test_heavy_packages_are_imported_when_needed(layer: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name} at import time"
        for path in sources(layer)
        if "kernels" not in path.parts  # a kernel file is itself imported lazily
        for line, name in imported(at_import(ast.parse(path.read_text())))
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_is_called_utils() -> None:
    assert not [path for layer in LAYERS for path in sources(layer) if path.stem in ("util", "utils")]
