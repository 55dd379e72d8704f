"""Threads, seeds, devices and hypothesis profiles for all tests."""

from __future__ import annotations

import os

# Before torch: one thread per test process, and no pool of compile workers beside it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import logging
import random
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

from tests.law import no_internal_faults

# Dynamo's structured trace: pytest's log capture would have it written for every test, at half the time. It listens
# to every logger that it finds, also to those that do not propagate.
logging.getLogger("torch.__trace").propagate = False
logging.Logger.manager.loggerDict.pop("torch.__trace")

hypothesis.settings.register_profile("fast", deadline=None, derandomize=True, max_examples=25, database=None)
hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "500")),
    suppress_health_check=list(hypothesis.HealthCheck),
    print_blob=True,
)
hypothesis.settings.load_profile("fast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Same random numbers in every test, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def internal_faults() -> Iterator[list[Exception]]:
    """Exceptions of the passes that ended in a dense run: a test that plants some clears the list."""
    with no_internal_faults() as found:
        yield found


@pytest.fixture(autouse=True)
def released(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test on the GPU gives back what its allocator kept: several processes share the card's memory."""
    yield
    if "gpu" in request.keywords and torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def device() -> torch.device:
    """The device under test: CUDA where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Empty compile caches before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """`torch.empty` returns NaN, so that a value no kernel wrote shows up in the result."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
