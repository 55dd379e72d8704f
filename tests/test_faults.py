"""The law notices every planted fault."""

from __future__ import annotations

import functools

import pytest

from tests.faults import FAULTS, LAWS, Fault, Prepared, needed


@functools.cache
def prepared(name: str) -> Prepared:
    """A law, captured once for all faults."""
    return Prepared(LAWS[name])


@pytest.mark.parametrize("name", LAWS)
def test_law_holds_without_faults(name: str) -> None:
    prepared(name).check()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_noticed(fault: Fault, internal_faults: list[Exception]) -> None:
    for name in fault.laws:
        law = prepared(name)
        with pytest.MonkeyPatch.context() as patch:
            fault.plant(patch)
            try:
                law.check()
            except (AssertionError, RuntimeError, ValueError, IndexError):
                assert not internal_faults, "this fault stops the pass: it does not make it wrong"
                return
    pytest.fail(f"no law of {fault.laws} noticed {fault.name}")


def test_faults_are_many_and_their_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 20
    assert set(needed(FAULTS)) == set(LAWS)
