"""Every trap of the zoo runs as it says, and gives what the dense model gives."""

from __future__ import annotations

import pytest

from tests.law import as_written, check
from tests.zoo import TRAPS, Trap
from treecompile import lowering


def run(trap: Trap) -> None:
    case = trap.build()
    check(case.model, *case.args, expect=trap.expect, **case.settings)


# `make test` runs every third trap, `make test-all` the others, too.
QUICK = {trap.name for trap in TRAPS[::3]}


@pytest.mark.parametrize(
    "trap",
    [
        pytest.param(trap, id=trap.name, marks=() if trap.name in QUICK else pytest.mark.slow)
        for trap in TRAPS
    ],
)
def test_trap(trap: Trap) -> None:
    lowering.clear()
    with as_written():
        run(trap)
    lowering.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "trap", [trap for trap in TRAPS if trap.expect == "packed"], ids=lambda trap: trap.name
)
def test_trap_through_autograd(trap: Trap) -> None:
    """The packed graph through AOTAutograd."""
    run(trap)


def test_zoo_is_large_and_names_are_unique() -> None:
    names = [trap.name for trap in TRAPS]
    assert len(names) == len(set(names))
    assert sum(trap.expect == "packed" for trap in TRAPS) >= 30
    assert sum(trap.expect != "packed" for trap in TRAPS) >= 20
