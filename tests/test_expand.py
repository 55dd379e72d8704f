"""`expand`, `gather_expand`, `take`: maps between packed rows and the grid, and their adjoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treecompile.runtime.ops import (
    expand,
    expand_backward,
    gather_expand,
    gather_expand_backward,
    take,
    take_backward,
)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Maps:
    """The four tensors of a layout."""

    row_index: Tensor
    offsets: Tensor
    positions: Tensor

    @property
    def rows(self) -> int:
        return self.offsets.shape[0] - 1

    def to(self, device: str) -> Maps:
        return Maps(self.row_index.to(device), self.offsets.to(device), self.positions.to(device))


def maps(row_index: list[int], rows: int) -> Maps:
    """CSR of a row index, the slow way."""
    of_row = [[m for m, r in enumerate(row_index) if r == row] for row in range(rows)]
    offsets = np.cumsum([0, *(len(members) for members in of_row)])
    positions = [m for members in of_row for m in members]
    return Maps(
        torch.tensor(row_index, dtype=torch.int64),
        torch.from_numpy(offsets),
        torch.tensor(positions, dtype=torch.int64),
    )


def random_maps(rows: int, size: int, dropped: float, seed: int = 0) -> Maps:
    rng = np.random.default_rng(seed)
    index = np.where(rng.random(size) < dropped, -1, rng.integers(0, max(rows, 1), size))
    return maps(index.tolist(), rows)


@st.composite
def layouts(draw: st.DrawFn) -> Maps:
    rows = draw(st.integers(1, 6))
    index = draw(st.lists(st.integers(-1, rows - 1), max_size=20))
    return maps(index, rows)


@given(layout=layouts(), trailing=st.sampled_from([(), (3,), (2, 5), (0,)]))
def test_expand_is_a_gather_with_zeros(layout: Maps, trailing: tuple[int, ...]) -> None:
    x = torch.randn(layout.rows, *trailing)
    found = expand(x, layout.row_index, layout.offsets, layout.positions)
    rows = [x[r] if r >= 0 else torch.zeros(trailing) for r in layout.row_index.tolist()]
    assert torch.equal(found, torch.stack(rows) if rows else x.new_zeros((0, *trailing)))
    assert found.is_contiguous()


@given(layout=layouts(), trailing=st.sampled_from([(), (3,), (2, 5), (0,)]))
def test_expand_adjoint(layout: Maps, trailing: tuple[int, ...]) -> None:
    x = torch.randn(layout.rows, *trailing, dtype=torch.float64)
    grad = torch.randn(layout.row_index.shape[0], *trailing, dtype=torch.float64)
    found = expand_backward(grad, layout.row_index, layout.offsets, layout.positions)
    forward = expand(x, layout.row_index, layout.offsets, layout.positions)
    torch.testing.assert_close((forward * grad).sum(), (x * found).sum())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8])
def test_expand_of_integers(dtype: torch.dtype) -> None:
    layout = maps([1, -1, 0, 1], 2)
    x = torch.tensor([0, 1]).to(dtype)
    assert expand(x, layout.row_index, layout.offsets, layout.positions).tolist() == x[[1, 0, 0, 1]].tolist()


def test_no_rows_and_no_positions() -> None:
    nothing = maps([-1, -1], 0)
    assert torch.equal(
        expand(torch.empty(0, 3), nothing.row_index, nothing.offsets, nothing.positions), torch.zeros(2, 3)
    )
    empty = maps([], 2)
    found = expand_backward(torch.empty(0, 3), empty.row_index, empty.offsets, empty.positions)
    assert torch.equal(found, torch.zeros(2, 3))
    x = torch.empty(0, 3)
    assert torch.equal(
        gather_expand(x, nothing.row_index, torch.zeros(2).long(), nothing.offsets, nothing.positions),
        torch.zeros(2),
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_adjoint_sums_in_fp32(dtype: torch.dtype) -> None:
    """One row of multiplicity 1,024 among rows of one: as exact as a rounding of the fp64 sum."""
    index = [0] * 1024 + list(range(1, 200)) + [-1] * 7
    layout = maps(np.random.default_rng(0).permutation(index).tolist(), 200)
    grad = (torch.randn(len(index), 24) + 1).to(dtype)
    found = expand_backward(grad, layout.row_index, layout.offsets, layout.positions)
    kept = layout.row_index >= 0
    exact = torch.zeros(200, 24, dtype=torch.float64).index_add_(
        0, layout.row_index[kept], grad[kept].double()
    )
    accumulated = 1024 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert ((found.double() - exact) / exact.abs().clamp(min=1)).abs().max() <= (
        torch.finfo(dtype).eps / 2 + accumulated
    )
    again = expand_backward(grad, layout.row_index, layout.offsets, layout.positions)
    assert torch.equal(found, again)


def test_python_overhead_does_not_follow_multiplicity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of calls is the same for multiplicity 2 and 1,024."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for multiplicity in (2, 1024):
        layout = maps([0] * multiplicity + list(range(1, 9)), 9)
        Count.calls = 0
        with Count():  # type: ignore[no-untyped-call]
            expand_backward(
                torch.randn(multiplicity + 8, 4), layout.row_index, layout.offsets, layout.positions
            )
        counts.append(Count.calls)
    assert counts[0] == counts[1] < 20


@given(layout=layouts(), columns=st.integers(1, 4), seed=st.integers(0, 99))
def test_gather_expand(layout: Maps, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(layout.rows, columns, dtype=torch.float64, requires_grad=True)
    label = torch.randint(0, columns, layout.row_index.shape)
    label = torch.where(layout.row_index >= 0, label, -100)
    found = gather_expand(x, layout.row_index, label, layout.offsets, layout.positions)
    whole = expand(x, layout.row_index, layout.offsets, layout.positions)
    expected = whole.gather(1, label.clamp(min=0).unsqueeze(1)).squeeze(1)
    assert torch.equal(found, expected)
    grad = torch.randn_like(found)
    first = torch.autograd.grad(found, x, grad, allow_unused=True)[0]
    second = torch.autograd.grad(expected, x, grad, allow_unused=True)[0]
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gather_expand_adjoint_sums_in_fp32(dtype: torch.dtype) -> None:
    """1,024 positions share one packed row and two labels."""
    layout = maps([0] * 1024 + [1, 2], 3)
    label = torch.arange(1026) % 2
    grad = (torch.randn(1026) + 1).to(dtype)
    arguments = (grad, layout.row_index, label, layout.offsets, layout.positions, 5)
    found = gather_expand_backward(*arguments)
    exact = torch.zeros(3, 5, dtype=torch.float64).index_put_(
        (layout.row_index, label), grad.double(), accumulate=True
    )
    tolerance = torch.finfo(dtype).eps if dtype != torch.float32 else 512 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=max(tolerance, 1e-12), atol=0)
    assert torch.equal(found, gather_expand_backward(*arguments))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_take(dim: int) -> None:
    x = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([3, 0, 2])
    assert torch.equal(take(x, rows, dim), x.index_select(dim, rows))
    assert torch.autograd.gradcheck(lambda t: take(t, rows, dim), (x,))
    assert torch.autograd.gradgradcheck(lambda t: take(t, rows, dim), (x,))
    torch.library.opcheck(take, (x, rows, dim))
    torch.library.opcheck(take_backward, (x.detach().index_select(dim, rows), rows, dim, x.shape[dim]))


def test_gradients_of_gradients() -> None:
    layout = maps([0, 2, -1, 2, 2, 1], 4)
    label = torch.tensor([0, 1, -100, 1, 2, 0])
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for function in (
        lambda t: expand(t, layout.row_index, layout.offsets, layout.positions),
        lambda t: gather_expand(t, layout.row_index, label, layout.offsets, layout.positions),
    ):
        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,))


def test_opcheck() -> None:
    layout = maps([0, 2, -1, 2, 2, 1], 4)
    tree = (layout.row_index, layout.offsets, layout.positions)
    label = torch.tensor([0, 1, -100, 1, 2, 0])
    x, grad = torch.randn(4, 3, requires_grad=True), torch.randn(6, 3, requires_grad=True)
    flat = torch.randn(6, requires_grad=True)
    torch.library.opcheck(expand, (x, *tree))
    torch.library.opcheck(expand_backward, (grad, *tree))
    torch.library.opcheck(gather_expand, (x, layout.row_index, label, *tree[1:]))
    torch.library.opcheck(gather_expand_backward, (flat, layout.row_index, label, *tree[1:], 3))


def test_strided_gradient() -> None:
    layout = maps([0, 1, 1], 2)
    x = torch.randn(2, 3, requires_grad=True)
    expand(x, layout.row_index, layout.offsets, layout.positions).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0] * 3, [2.0] * 3]


# Inductor imports torch.utils.mkldnn, which warns of its own decorator.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_once_for_all_sizes(backend: str, fresh_dynamo: None) -> None:
    def loss(x: Tensor, label: Tensor, row_index: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
        wide = expand(x * 2, row_index, offsets, positions)
        picked: Tensor = gather_expand(x.sin(), row_index, label, offsets, positions)
        total: Tensor = wide.square().sum() + picked.sum()
        return total

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled: Callable[..., Tensor] = torch.compile(loss, backend=counter, dynamic=True, fullgraph=True)
    for rows, size in ((5, 17), (9, 40), (3, 4)):
        layout = random_maps(rows, size, 0.2)
        label = torch.randint(0, 4, (size,))
        grads = []
        for function in (loss, compiled):
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows), requires_grad=True)
            loss_value = function(x, label, layout.row_index, layout.offsets, layout.positions)
            grads.append(torch.autograd.grad(loss_value, x))
        torch.testing.assert_close(grads[0], grads[1])
    assert counter.frame_count == 1


INTERPRETED = """
import torch
from tests.test_expand import check_kernels, random_maps
check_kernels("cpu", torch.float32, random_maps(7, 60, 0.2), 20)
check_kernels("cpu", torch.float64, random_maps(3, 90, 0.0), 5)
"""


def check_kernels(device: str, dtype: torch.dtype, layout: Maps, features: int) -> None:
    """Compare the Triton kernels with fp64 sums; bit-equal when run again."""
    from treecompile.runtime.kernels.segment_sum import label_sum, segment_sum

    size, rows = layout.row_index.shape[0], layout.rows
    grad = (torch.randn(size, features) + 1).to(dtype)
    label = torch.randint(0, features, (size,))
    kept = layout.row_index >= 0
    sums = torch.zeros(rows, features, dtype=torch.float64)
    sums.index_add_(0, layout.row_index[kept], grad[kept].double())
    cells = torch.zeros(rows, features, dtype=torch.float64)
    cells.index_put_((layout.row_index[kept], label[kept]), grad[kept, 0].double(), accumulate=True)
    moved, grad, label = layout.to(device), grad.to(device), label.to(device)
    first = grad[:, 0].contiguous()
    for _ in range(2):
        found = segment_sum(grad, moved.offsets, moved.positions)
        found_cells = label_sum(first, label, moved.offsets, moved.positions, features)
        rtol = max(torch.finfo(dtype).eps, 1e-5)
        torch.testing.assert_close(found.cpu().double(), sums, rtol=rtol, atol=1e-5)
        torch.testing.assert_close(found_cells.cpu().double(), cells, rtol=rtol, atol=1e-5)
        assert torch.equal(found, segment_sum(grad, moved.offsets, moved.positions))
        assert torch.equal(found_cells, label_sum(first, label, moved.offsets, moved.positions, features))


def test_kernels_in_the_interpreter() -> None:
    """The interpreter must be chosen before triton is imported: a process of its own."""
    pytest.importorskip("triton")
    subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=300,
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernels_on_the_gpu(dtype: torch.dtype) -> None:
    check_kernels("cuda", dtype, random_maps(301, 3000, 0.1), 600)
    check_kernels("cuda", dtype, maps([0] * 1024 + list(range(1, 40)), 40), 96)


@pytest.mark.gpu
def test_expand_on_the_gpu() -> None:
    layout = random_maps(50, 400, 0.2).to("cuda")
    label = torch.randint(0, 8, (400,), device="cuda")
    x = torch.randn(50, 8, device="cuda", dtype=torch.float64, requires_grad=True)
    tree = (layout.row_index, layout.offsets, layout.positions)
    assert torch.autograd.gradcheck(lambda t: expand(t, *tree), (x,))
    assert torch.autograd.gradcheck(lambda t: gather_expand(t, tree[0], label, *tree[1:]), (x,))
