"""What all ops of the library share: the device that they run on."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.test_recurrence import Form, tables
from treecompile.runtime.ops import tree_causal_conv1d, tree_recurrence
from treecompile.runtime.ops.registry import _on_their_device
from treecompile.runtime.tree import RolloutTree


def test_the_device_of_the_tensors_is_the_current_one() -> None:
    """Triton launches on the current device, wherever the tensors are: a model may live on another one."""
    with FakeTensorMode():
        there = torch.empty(2, device="cuda:1")
    here = torch.empty(2)
    run = _on_their_device(lambda *args: len(args))
    with mock.patch.object(torch.cuda, "device") as entered:
        assert run(here, None, 1.0) == 3
        entered.assert_not_called()
        assert run(None, here, there) == 3
        entered.assert_called_once_with(torch.device("cuda", 1))


@pytest.mark.gpu
def test_ops_on_the_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    tree = RolloutTree.from_rows([[1, 2, 3], [1, 2, 4], [1, 5]])
    end, segments = tables(tree)
    x = [y.detach().float() for y in Form(d=16, v=16).inputs(tree.n)]
    row, weight = torch.randn(1, 4, tree.n), torch.randn(4, 3)
    found, wanted = (
        (
            tree_recurrence(*(y.to(device) for y in (*x, end)), segments, 0.3, 64),
            tree_causal_conv1d(row.to(device), weight.to(device), None, end.to(device), segments, "silu"),
        )
        for device in ("cuda:1", "cpu")
    )
    assert torch.cuda.current_device() == 0
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
