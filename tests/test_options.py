"""Options and how their mistakes reach the user; warnings, logs, counters, public names."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import treecompile
from tests.test_reasons import IDS, Model
from treecompile import raised
from treecompile.backend import tree as tree_backend
from treecompile.options import Options

EAGER = {"compiler": "aot_eager", "min_sharing": 0}


def run(model: nn.Module, **settings: Any) -> Any:
    with torch.no_grad():
        return torch.compile(model, backend=tree_backend, **settings)(IDS)


def dropped() -> Model:
    return Model(lambda x: F.dropout(x, 0.1))


# ---- values ----


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_unsuported": "error"}, "Did you mean 'on_unsupported'?"),
        ({"on_unsupported": "denze"}, "Did you mean 'dense'?"),
        ({"compiler": "inductr"}, "Did you mean 'inductor'?"),
        ({"alignment": "branches"}, "Did you mean 'branch'?"),
        ({"mode": "reduce-overhead"}, "CUDA graphs need fixed sizes"),
        ({"mode": "defualt"}, "Did you mean 'default'?"),
        ({"min_sharing": -1}, "pass a ratio of at least 0"),
        ({"min_sharing": True}, "pass a ratio of at least 0"),
        ({"min_sharing": "2"}, "pass a ratio of at least 0"),
        ({"min_sharing": float("nan")}, "pass a ratio of at least 0"),
    ],
)
def test_mistakes_name_the_remedy(options: dict[str, Any], text: str) -> None:
    with pytest.raises(treecompile.OptionError) as caught:
        Options.parse(options)
    assert text in str(caught.value)


def test_defaults() -> None:
    assert Options.parse(None) == Options.parse({}) == Options()
    assert (Options().on_unsupported, Options().compiler) == ("dense", "inductor")


# ---- through Dynamo ----


@pytest.mark.usefixtures("fresh_dynamo")
def test_option_errors_reach_the_caller() -> None:
    with pytest.raises(treecompile.OptionError, match="Did you mean 'min_sharing'") as caught:
        run(Model(), options={"min_shairng": 1.5})
    assert isinstance(caught.value, ValueError)
    assert caught.value.suggestion == "min_sharing"


@pytest.mark.usefixtures("fresh_dynamo")
def test_unsupported_errors_reach_the_caller() -> None:
    with pytest.raises(treecompile.UnsupportedError) as caught:
        run(dropped(), options={**EAGER, "on_unsupported": "error"})
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert error.what == "dropout with p=0.1 in training"
    assert error.where is not None
    assert "test_options.py" in error.where
    assert "F.dropout(x, 0.1)" in error.where
    lines = str(error).splitlines()
    assert lines[0] == "dropout with p=0.1 in training"
    assert lines[1].startswith("  Explanation: each row draws its own noise")
    assert lines[2].startswith("  Hint: set the dropout to 0")
    assert lines[3].startswith("  At: test_options.py:")


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_traceback_begins_in_the_users_code() -> None:
    with pytest.raises(treecompile.UnsupportedError) as caught:
        run(dropped(), options={**EAGER, "on_unsupported": "error"})
    files = [str(entry.path) for entry in caught.traceback]
    assert files[0] == __file__
    assert not [name for name in files if "symbolic_convert" in name or "output_graph" in name]


def test_errors_of_the_backend_travel_between_processes() -> None:
    error = raised.UnsupportedError(what="a", why="b", where=None, hint="c")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.hint) == (type(error), str(error), "c")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_modes_of_torch_compile_are_accepted(mode: str) -> None:
    treecompile.clear_caches()
    with torch.no_grad():
        model = torch.compile(WithoutIds(), backend=tree_backend, mode=mode, options=None)
        model(torch.ones(2, 3))
    assert treecompile.counters["captured"] == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_mode_reaches_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    seen: list[Any] = []

    def plain(gm: Any, inputs: Any, config_patches: Any = None, **_: Any) -> Any:
        seen.append(config_patches)
        return gm

    monkeypatch.setattr(compile_fx, "compile_fx", plain)
    treecompile.clear_caches()
    for mode in ("default", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        run(Model(), options={"min_sharing": 0, "mode": mode})
    torch._dynamo.reset()
    assert len(seen) == 2
    assert not seen[0]
    assert seen[1]["max_autotune"]
    treecompile.clear_caches()


@pytest.mark.usefixtures("fresh_dynamo")
def test_modes_with_cuda_graphs_are_refused() -> None:
    with pytest.raises(treecompile.OptionError, match="CUDA graphs"):
        torch.compile(Model(), backend=tree_backend, mode="reduce-overhead")(IDS)


# ---- failures of the compiler ----


def _fails(*_: Any) -> Any:
    raise RuntimeError("no such instruction")


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_packed_graph_that_does_not_compile_runs_dense(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from treecompile import lowering

    monkeypatch.setattr(lowering, "_compile_graph", _fails)
    treecompile.clear_caches()
    model = Model()
    compiled = torch.compile(model, backend=tree_backend, options=EAGER)
    with caplog.at_level(logging.WARNING, "treecompile"):
        for _ in range(2):
            compiled(IDS).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for _ in range(2):
        model(IDS).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad)
    assert treecompile.counters == {"captured": 1, "compiled": 1, "dense": 2, "dense:compiler": 2}
    texts = [record.getMessage() for record in caplog.records if record.name == "treecompile"]
    assert texts == ["runs dense: aot_eager failed on the packed graph: RuntimeError: no such instruction"]
    torch._dynamo.reset()
    treecompile.clear_caches()
    strict = torch.compile(model, backend=tree_backend, options={**EAGER, "on_unsupported": "error"})
    with pytest.raises(treecompile.UnsupportedError, match="no such instruction"):
        strict(IDS)
    treecompile.clear_caches()


def test_graphs_of_other_captures_are_kept_up_to_a_number() -> None:
    from treecompile import lowering

    lowering.clear()
    last = 2 * lowering._KEPT - 1
    for i in range(last + 1):
        lowering.shared_code(str(i), functools.partial(int, i))  # type: ignore[arg-type]
    assert len(lowering._codes) == lowering._KEPT
    assert lowering.shared_code(str(last), _fails) == last
    lowering.clear()


class WithoutIds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


# ---- dense ----


@pytest.mark.usefixtures("fresh_dynamo")
def test_dense_runs_warn_once_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    treecompile.clear_caches()
    with caplog.at_level(logging.WARNING, "treecompile"):
        for _ in range(2):
            model = torch.compile(dropped(), backend=tree_backend, options=EAGER)
            with torch.no_grad():
                model(IDS)
                model(IDS)
            torch._dynamo.reset()
    texts = [record.getMessage() for record in caplog.records if record.name == "treecompile"]
    assert len(texts) == 1
    assert texts[0].startswith("runs dense: dropout with p=0.1 in training\n  Explanation: ")
    assert treecompile.counters == {"captured": 2, "dense": 4, "dense:dropout": 4}
    treecompile.clear_caches()
    assert not treecompile.counters


@pytest.mark.usefixtures("fresh_dynamo")
def test_packed_runs_are_counted() -> None:
    treecompile.clear_caches()
    run(Model(), options=EAGER)
    assert treecompile.counters == {"captured": 1, "packed": 1, "compiled": 1}
    torch._dynamo.reset()
    run(Model(), options=EAGER)
    assert treecompile.counters == {"captured": 2, "packed": 2, "compiled": 1}
    torch._dynamo.reset()
    treecompile.clear_caches()
    run(Model(), options=EAGER)
    assert treecompile.counters == {"captured": 1, "packed": 1, "compiled": 1}


# ---- logs ----

_SCRIPT = """
import torch, treecompile.backend
from tests.test_reasons import IDS, Model
options = {"compiler": "aot_eager", "min_sharing": 0}
with torch.no_grad():
    torch.compile(Model(), backend=treecompile.backend.tree, options=options)(IDS)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "stages"), [("+treecompile", True), ("treecompile", False), ("", False)])
def test_torch_logs(setting: str, stages: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    if setting:
        environment["TORCH_LOGS"] = setting
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert ("treecompile: 1 graph" in done.stderr) == bool(setting)
    assert ("def packed(" in done.stderr) == stages


# ---- names ----


def test_public_names_exist_and_are_documented() -> None:
    for name in treecompile.__all__:
        value = getattr(treecompile, name)
        assert name in dir(treecompile)
        assert value.__doc__
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        _ = treecompile.explian


def test_importing_the_package_loads_no_compiler() -> None:
    code = "import sys, treecompile; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = set(done.stdout.split())
    assert "treecompile" in loaded
    assert not {"treecompile.backend", "torch._dynamo", "torch._inductor", "networkx"} & loaded
