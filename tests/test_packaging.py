"""The package as it is installed: the folders, the wheel, the source archive, the entry point."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"treecompile": "treecompile", "passes": "treecompile.passes", "runtime": "treecompile.runtime"}
ENTRY_POINT = "[torch_dynamo_backends]\ntree = treecompile.backend:tree"


def configuration() -> dict[str, Any]:
    """pyproject.toml."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())  # type: ignore[no-any-return]


def modules() -> dict[str, Path]:
    """Path inside the package -> path in the checkout, of all modules; links are not followed."""
    found = {}
    for folder, name in FOLDERS.items():
        links = [path for path in (ROOT / folder).iterdir() if path.is_symlink()]
        for module in sorted((ROOT / folder).rglob("*.py")):
            if not any(link in module.parents for link in links):
                inner = module.relative_to(ROOT / folder).as_posix()
                found[f"{name.replace('.', '/')}/{inner}"] = module.relative_to(ROOT)
    return found


def packages() -> dict[str, Path]:
    """Dotted name -> folder in the checkout of all packages."""
    return {str(Path(name).parent).replace("/", "."): path.parent for name, path in modules().items()}


def test_every_folder_is_in_the_package_list() -> None:
    assert set(configuration()["tool"]["setuptools"]["packages"]) == set(packages())


def test_every_folder_has_an_init() -> None:
    assert not [folder for folder in packages().values() if not (ROOT / folder / "__init__.py").is_file()]


def test_the_links_mirror_the_mapping() -> None:
    for folder in ("passes", "runtime"):
        link = ROOT / "treecompile" / folder
        if not link.is_symlink():
            pytest.skip("the checkout has no links")
        assert link.readlink() == Path("..") / folder


@pytest.mark.parametrize("folder", ["passes", "runtime"])
def test_a_folder_name_is_no_import_name(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"import treecompile.{folder}, not {folder}" in done.stderr


def test_triton_is_no_requirement() -> None:
    assert not [name for name in configuration()["project"]["dependencies"] if name.startswith("triton")]


def test_constraints_cover_what_is_installed_for_the_commands() -> None:
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = configuration()["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += [name for name in extra if not name.startswith("treecompile[")]
    names = {name.split(";")[0].split(">")[0].split("=")[0].strip() for name in wanted}
    assert names <= pinned


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and a source archive, built from a copy of what git would check out."""
    pytest.importorskip("setuptools")
    work = tmp_path_factory.mktemp("build")
    copy = work / "copy"
    copy.mkdir()
    others = [Path(name) for name in ("pyproject.toml", "README.md", "LICENSE", "treecompile/py.typed")]
    for path in (*others, *modules().values()):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes((ROOT / path).read_bytes())
    for folder in ("passes", "runtime"):
        (copy / "treecompile" / folder).symlink_to(Path("..") / folder)
    build = (
        "import sys; out = sys.argv[1]; "  # the builders write to sys.argv
        "from setuptools import build_meta as b; b.build_wheel(out); b.build_sdist(out)"
    )
    done = subprocess.run(
        [sys.executable, "-c", build, str(work)], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,), (source,) = work.glob("*.whl"), work.glob("*.tar.gz")
    return wheel, source


def test_the_wheel_holds_every_module(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[0]) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        assert {name for name in names if name.endswith(".py")} == set(modules())
        assert "treecompile/py.typed" in names
        assert ENTRY_POINT in wheel.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in names


def test_the_source_archive_holds_every_module(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[1]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {path.as_posix() for path in modules().values()} <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_a_fresh_install_offers_the_backend(archives: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(archives[0]) as wheel:
        wheel.extractall(tmp_path / "site")
    # -P and another folder: nothing of the checkout is on the path. User code imports torch alone.
    code = (
        "import sys, importlib.metadata as m; sys.path.insert(0, sys.argv[1]); "
        "(e,) = [e for e in m.entry_points(group='torch_dynamo_backends') if e.name == 'tree']; "
        "import torch; from torch._dynamo.backends.registry import lookup_backend; "
        "tree = lookup_backend('tree'); import treecompile; "
        "print(tree.__module__, treecompile.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "site")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    module, file = done.stdout.split()
    assert module == "treecompile.backend"
    assert Path(file) == tmp_path / "site" / "treecompile" / "__init__.py"
