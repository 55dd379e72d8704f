"""The router of `tree_attention`: a pure function of call, tree and device, tried on the CPU with described devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.test_attention import comb, packed, search
from treecompile.runtime.ops import (
    attention_costs,
    attention_router,
    plan_header,
    plan_pieces,
    tree_attention,
)
from treecompile.runtime.ops.attention_router import (
    EXECUTORS,
    MOST_SEGMENTS,
    VARIABLE,
    Device,
    Problem,
    Route,
    device_of,
    force,
    last_route,
    problem_of,
    route,
)

HOPPER = Device((9, 0))
CPU = Device((0, 0))
PROBLEM = Problem(32, 8, 0, 128, 128, torch.bfloat16, 0.1, 0.0, 0)


def routed(
    table: Any, direction: str = "forward", device: Device = HOPPER, plan: Any = None, **changes: Any
) -> Route:
    """The route for a segment table, its plan by the first row."""
    table = np.ascontiguousarray(table, np.int32)
    plan = plan_header(table) if plan is None else plan
    problem = replace(PROBLEM, tokens=int(table[:, 1].max()), **changes)
    return route(direction, problem, device, torch.from_numpy(table), torch.from_numpy(plan))


def chain(tokens: int) -> list[list[int]]:
    return [[0, tokens, -1, tokens]]


def chains(count: int, tokens: int) -> list[list[int]]:
    return [[i * tokens, (i + 1) * tokens, -1, (i + 1) * tokens] for i in range(count)]


TREES: dict[str, Callable[[], Any]] = {
    "chain": lambda: chain(16384),
    "chains": lambda: chains(4, 8192),
    "comb": lambda: comb(60, 3, 5, 0).segments,
    "search": lambda: search(0, 8).segments,
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("name", "executor"),
    [("chain", "pieces-cudnn"), ("chains", "pieces-cudnn"), ("comb", "triton"), ("search", "triton")],
)
def test_long_chains_take_the_vendor_and_short_segments_triton(
    name: str, executor: str, direction: str
) -> None:
    table = TREES[name]()
    assert len(table) <= MOST_SEGMENTS
    found = routed(table, direction)
    assert found.executor == executor
    others = {other for other in EXECUTORS if other not in (executor, "pieces")}
    assert set(found.why_not) == others
    assert set(found.predicted) == {executor, *others}
    for other, text in found.why_not.items():
        for name_ in (other, executor):
            assert f"{found.predicted[name_] / 1e3:.3f} ms" in text
    assert found == routed(table, direction)


def test_a_whole_plan_and_its_first_row_are_routed_alike() -> None:
    table = np.ascontiguousarray(TREES["comb"](), np.int32)
    assert routed(table) == routed(table, plan=plan_pieces(table))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_predictions_grow_with_the_tree(direction: str) -> None:
    sizes = [2**k for k in range(6, 17)] + [5000, 5100, 12345]
    found = [routed(chain(n), direction) for n in sorted(sizes)]
    for name in found[0].predicted:
        times = [one.predicted[name] for one in found]
        assert times == sorted(times)
    # Once it is worth it, it stays so.
    by_vendor = [one.executor == "pieces-cudnn" for one in found]
    assert by_vendor == sorted(by_vendor)
    assert by_vendor[-1]
    more = [routed(chains(n, 500), direction).predicted for n in (1, 2, 4, 8)]
    for name in more[0]:
        assert [one[name] for one in more] == sorted(one[name] for one in more)


def test_a_rectangle_has_its_plan_to_itself() -> None:
    """Squares of rounded lengths come back from step to step; what a fork adds is of one tree."""
    fork = [[0, 8192, -1, 16384], [8192, 12288, 0, 12288], [12288, 16384, 0, 16384]]
    apart = routed(fork).predicted["pieces-cudnn"] - routed(chain(16384)).predicted["pieces-cudnn"]
    assert apart > attention_costs.PLANNING["forward"] / attention_costs.SHAPE_CALLS / 2


@pytest.mark.parametrize(
    ("device", "changes", "refused", "word", "executor"),
    [
        (CPU, {}, ("triton", "pieces-cudnn", "pieces-flash"), "not on a CUDA device", "pieces"),
        (HOPPER, {"dtype": torch.float32}, ("triton", "pieces-cudnn", "pieces-flash"), "float32", "pieces"),
        (HOPPER, {"qk_size": 300}, ("triton", "pieces-cudnn", "pieces-flash"), "300", "pieces"),
        (Device((7, 5)), {}, ("triton", "pieces-cudnn", "pieces-flash"), "below 8.0", "pieces"),
        (Device((8, 0)), {}, ("pieces-cudnn",), "below 9.0", "triton"),
        (Device((9, 0), cudnn_missing="there is no cuDNN"), {}, ("pieces-cudnn",), "no cuDNN", None),
        (Device((9, 0), cudnn_head_size=128), {"v_size": 192}, ("pieces-cudnn",), "128", None),
        (HOPPER, {"softcap": 30.0}, ("pieces-cudnn", "pieces-flash"), "softcap", "triton"),
        (HOPPER, {"scale": -1.0}, ("triton",), "scale", "pieces-cudnn"),
        (Device((9, 0), triton=False), {}, ("triton",), "not installed", "pieces-cudnn"),
    ],
)
def test_every_reason(
    device: Device, changes: dict[str, Any], refused: tuple[str, ...], word: str, executor: str | None
) -> None:
    found = routed(chain(16384), "forward", device, **changes)
    assert executor in (None, found.executor)
    for name in refused:
        assert word in found.why_not[name]
        assert name not in found.predicted
        with force(forward=name), pytest.raises(ValueError, match=f"{name} was asked for, but: .*{word}"):
            routed(chain(16384), "forward", device, **changes)
    assert all(found.why_not.values())


def test_deterministic_gradients_are_not_cudnns() -> None:
    device = Device((9, 0), deterministic=True)
    assert routed(chain(16384), "forward", device).executor == "pieces-cudnn"
    assert "deterministic" in routed(chain(16384), "backward", device).why_not["pieces-cudnn"]


def test_what_is_not_predicted_runs_on_triton() -> None:
    assert "8.0" in routed(chain(16384), device=Device((8, 0))).why_not["pieces-flash"]
    window = routed(chain(16384), window=100)
    assert (window.executor, "window" in window.why_not["pieces-cudnn"]) == ("triton", True)
    many = routed(chains(MOST_SEGMENTS + 1, 64))
    assert (many.executor, "segments" in many.why_not["pieces-flash"]) == ("triton", True)
    # All columns inside the window: there is none.
    plan = plan_header(chain(16384), range(16384))
    assert routed(chain(16384), plan=plan, window=16384).executor == "pieces-cudnn"


def test_close_calls_are_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_router, "MARGIN", 0.5)
    found = routed(chain(20_001))
    assert found.predicted["pieces-cudnn"] < found.predicted["triton"]
    assert found.executor == "triton"
    assert "less than 50% apart" in found.why_not["pieces-cudnn"]
    assert "apart" not in found.why_not["pieces-flash"]


# -- overrides --


def test_what_is_asked_for_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton, pieces-flash")
    assert routed(chain(16384)).executor == "triton"
    assert routed(chain(16384), "backward").executor == "pieces-flash"
    with force(forward="pieces"):
        found = routed(chain(16384))
        assert (found.executor, found.vendor) == ("pieces-cudnn", "cudnn")
        assert found.why_not["triton"] == "pieces was asked for"
        assert routed(chain(16384), "backward").executor == "pieces-flash"
        with force(forward="pieces-flash"):
            assert routed(chain(16384)).vendor == "flash"
    with force(forward="pieces"):
        assert routed(chain(16384), device=CPU).executor == "pieces"
        assert routed(chain(16384), window=100).executor == "pieces-flash"
    monkeypatch.setenv(VARIABLE, "flash")
    with pytest.raises(ValueError, match="no executor 'flash'"):
        routed(chain(16384))


def test_the_op_says_who_ran() -> None:
    tensors = packed(comb(10, 3, 5, 0))
    q = torch.randn(1, 2, tensors.tokens, 8, requires_grad=True)
    torch.autograd.backward(tree_attention(q, q, q, *tensors.arguments(), None, 1.0, 0.0, 0)[0].sum())
    for direction in ("forward", "backward"):
        found = last_route(direction)
        assert found is not None
        assert found.executor == "pieces"
        assert found.why_not == dict.fromkeys(
            ("triton", "pieces-cudnn", "pieces-flash"), "not on a CUDA device"
        )


def test_descriptions_of_calls() -> None:
    q: Tensor = torch.zeros(1, 4, 3, 8)
    problem = problem_of(q, q[:, :2], q[:, :2, :, :6], 0.5, 1.5, 7)
    assert problem == Problem(4, 2, 3, 8, 6, torch.float32, 0.5, 1.5, 7)
    assert device_of(q.device) == CPU
