"""A fault of the pass itself: training goes on as captured, and no test takes it for success or for a refusal."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch

import treecompile
from tests import law
from tests.law import Toy, batch, check, compiled, counting
from tests.test_reasons import IDS, Model
from treecompile import api, backend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _fails(*_: Any) -> Any:
    raise KeyError("planted")


@pytest.fixture
def broken_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "build", _fails)
    monkeypatch.setattr(api, "build", _fails)
    treecompile.clear_caches()


@pytest.mark.usefixtures("broken_pass")
def test_training_goes_on_as_captured(
    internal_faults: list[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    toy, b = Toy(), batch(pad="mixed")
    expected = toy(b.ids, b.mask)
    with counting() as seen, caplog.at_level(logging.WARNING, "treecompile"):
        found = compiled(toy)(b.ids, b.mask)
    assert seen == {"captured": 1, "dense": 1, "dense:internal": 1}
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (text,) = (record.getMessage() for record in caplog.records if record.name == "treecompile")
    assert "the pass failed: KeyError: 'planted'" in text
    assert "a fault of treecompile and not of the model" in text
    internal_faults.clear()


@pytest.mark.usefixtures("broken_pass")
def test_explain_says_so(internal_faults: list[Exception]) -> None:
    report = treecompile.explain(Model(), IDS)
    assert not report.supported
    assert [reason.slug for reason in report.reasons] == ["internal"]
    assert "runs dense: the pass failed" in str(report)
    internal_faults.clear()


@pytest.mark.usefixtures("broken_pass")
@pytest.mark.parametrize("expect", ["packed", "mask", "internal", {"packed": 1}, {"internal": 1}])
def test_no_expectation_holds(expect: law.Expect, internal_faults: list[Exception]) -> None:
    b = batch()
    with pytest.raises(AssertionError, match="the pass failed"):
        check(Toy(), b.ids, b.mask, expect=expect)
    internal_faults.clear()


@pytest.mark.parametrize("expect", ["packed", "mask", "internal", {"packed": 1}, {"mask": 1, "internal": 1}])
def test_no_expectation_holds_where_one_graph_of_several_failed(expect: law.Expect) -> None:
    fine = Counter({"captured": 1, "dense": 1, "dense:mask": 1}) if "mask" in expect else Counter(packed=1)
    with pytest.raises(AssertionError, match="the pass failed"):
        law.held(expect, fine + Counter({"captured": 1, "dense": 1, "dense:internal": 1}))


def test_every_other_test_notices(internal_faults: list[Exception]) -> None:
    """What watches all tests fails one that looks at nothing."""
    with (
        pytest.raises(AssertionError, match=r"the pass failed: \[KeyError\('planted'\)\]"),
        law.no_internal_faults(),
    ):
        backend._internal(KeyError("planted"))
    assert len(internal_faults) == 1
    internal_faults.clear()
