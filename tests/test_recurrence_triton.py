"""The Triton executor of `tree_recurrence`: path tables by brute force, kernels against fp64 in plain PyTorch.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before triton is imported: in a process of
its own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies import row_sets
from tests.test_recurrence import Form, tables
from treecompile.runtime.chunks import Alignment, chunk_plan
from treecompile.runtime.ops import (
    recurrence,
    recurrence_triton,
    tree_recurrence,
    tree_recurrence_backward,
    tree_recurrence_reference,
)
from treecompile.runtime.ops.recurrence_choice import VARIABLE
from treecompile.runtime.ops.recurrence_paths import path_tables
from treecompile.runtime.tree import RolloutTree

CPU = torch.device("cpu")
SCALE = 0.3


# ---- tables -----------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(row_sets(), st.integers(1, 5), st.sampled_from(["trajectory", "branch"]))
def test_path_tables(rows: list[list[int]], chunk: int, alignment: Alignment) -> None:
    tree = RolloutTree.from_rows(rows)
    plan = chunk_plan(tree, chunk, alignment=alignment)
    made = path_tables(tables(tree)[1], chunk, CPU, alignment)
    assert (made.tokens, made.blocks) == (tree.n, plan.blocks)
    assert made.order.sort().values.tolist() == list(range(made.paths))
    rows_of = made.rows.view(made.blocks, made.width).tolist()
    for block in range(plan.blocks):
        tokens = plan.tokens(block).tolist()
        assert rows_of[block] == tokens + [-1] * (made.width - len(tokens))
    for token in range(tree.n):
        held = made.held[made.offsets[token] : made.offsets[token + 1]].tolist()
        assert held == [i for i, t in enumerate(made.rows.tolist()) if t == token]
    # Blocks in order of the kernels: what each starts from, by following the tables.
    runs, slots = made.run_begin.tolist(), made.run_slot.tolist()
    kept: dict[int, int] = {}
    above = [-2] * plan.blocks
    place = {path: i for i, path in enumerate(made.order.tolist())}
    assert made.order_up.tolist() == made.order.tolist()[::-1]
    for path in made.order.tolist():
        slot = int(made.path_slot[path])
        last = kept[slot] if slot >= 0 else -1  # a fork behind its path would not be there yet
        for run in range(int(made.path_runs[path]), int(made.path_runs[path + 1])):
            for block in range(runs[run], runs[run + 1]):
                above[block], last = last, block
            if slots[run] >= 0:
                kept[slots[run]] = last
                offsets = made.child_offsets[slots[run] : slots[run] + 2].tolist()
                started = made.children[offsets[0] : offsets[1]].tolist()
                assert started
                assert started == [p for p in range(made.paths) if made.path_slot[p] == slots[run]]
                assert all(place[p] > place[path] for p in started)
    assert above == plan.parent.tolist()
    assert len(kept) == made.forks


# ---- kernels ----------------------------------------------------------------------------------------------------


def comb(teeth: int, step: int, tooth: int) -> list[list[int]]:
    """Rows that leave a trunk every `step` tokens."""
    trunk = list(range(1, teeth * step + 1))
    return [trunk, *([*trunk[: i * step], *range(1000 * i, 1000 * i + tooth)] for i in range(1, teeth))]


def draw(seed: int, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Rows of few different tokens, so that many share a beginning; the first two share one of 30."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(1, 3, rng.integers(shortest, longest)).tolist() for _ in range(count)]
    return [*rows, [*rows[0][:30], *range(5, 50)], [*rows[0][:30], *range(60, 150)]]


ROWS: dict[str, Callable[[], list[list[int]]]] = {
    "one": lambda: [[1]],
    "short": lambda: [[1, 2, 3], [1, 2, 4], [1, 5]],
    "forest": lambda: draw(0, 1, 30, 40),
    "comb": lambda: comb(5, 23, 30),
    "63": lambda: [list(range(63))],
    "4097": lambda: [list(range(4097)), [*range(4000), 1, 2, 3], [*range(7), 0]],
    "many": lambda: comb(40, 90, 70) + draw(1, 200, 1, 60),
    "short segments": lambda: draw(2, 500, 1, 30),
}
WIDE = Form(groups=2, heads=4, d=128, v=128)
INTERPRETED = {
    "forest": Form(groups=1, heads=2, d=12, v=20),
    "comb": Form(groups=2, heads=2, d=16, v=72),
    "short": Form(groups=1, heads=1, d=80, v=16),
    "one": Form(groups=1, heads=1, d=8, v=8),
}
# Gated linear attention, in the head sizes of Mamba 2.
SCAN = Form(groups=2, heads=8, d=128, v=64, delta=False)


@contextmanager
def by_kernels(ask: str = "triton") -> Iterator[None]:
    with mock.patch.dict(os.environ, {VARIABLE: ask}):
        yield


def outcome(x: list[Tensor], grad: Tensor, tree: RolloutTree, chunk: int) -> list[Tensor]:
    """Outputs and gradients, without autograd."""
    end, table = (y if i else y.to(grad.device) for i, y in enumerate(tables(tree)))
    q, k, v, gate, *rate = (y.detach() for y in x)
    beta = rate[0] if rate else None
    out = tree_recurrence(q, k, v, gate, beta, end, table, SCALE, chunk)
    return [out, *tree_recurrence_backward(grad, q, k, v, gate, beta, end, table, SCALE, chunk)]


def error(found: Tensor, exact: Tensor) -> float:
    norm = exact.double().norm()
    return float((found.double() - exact.double()).norm() / norm) if norm else float(found.double().norm())


def check(
    name: str,
    form: Form,
    dtype: torch.dtype,
    device: str,
    low: float = -1.0,
    high: float = 0.0,
    chunk: int = 64,
) -> None:
    """Errors against fp64 of at most twice those of plain PyTorch, whose operands are rounded as the kernels' are."""
    tree = RolloutTree.from_rows(ROWS[name]())
    x = [y.to(device, dtype) for y in form.inputs(tree.n, low, high)]
    x[3] = x[3].float()  # gates are fp32 in models
    grad = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    with by_kernels():
        found = outcome(x, grad, tree, chunk)
        again = outcome(x, grad, tree, chunk)
    with by_kernels("pytorch"):
        plain = outcome(x, grad, tree, chunk)
        exact = outcome([y.double() for y in x], grad.double(), tree, chunk)
    rounding = torch.finfo(dtype).eps
    for what, a, b, c, d in zip(
        ["out", "q", "k", "v", "gate", "beta"], found, again, plain, exact, strict=True
    ):
        assert torch.equal(a, b), what
        assert (a.dtype, a.shape) == (c.dtype, c.shape), what
        # fp16 and bf16: operands of products are rounded between the kernels, up to four times in a row. Of few
        # numbers the norm may be what little is left of large ones.
        slack = 2e-6 if dtype == torch.float32 else 2 * rounding
        bound = 2 * error(c, d) + slack * (1 if d.numel() >= 1000 else 16)
        assert error(a, d) <= bound, (name, form, dtype, what, error(a, d), error(c, d))


def check_parts(device: str) -> None:
    """Heads that run one after the other give the bits of those that run at once."""
    tree = RolloutTree.from_rows(ROWS["short"]())
    form = Form(groups=3, heads=6, d=8, v=8)
    x = [y.detach().to(device).float() for y in form.inputs(tree.n)]
    grad = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1)).to(device)
    with by_kernels():
        whole = outcome(x, grad, tree, 64)
        with mock.patch.object(recurrence_triton, "SCRATCH_BYTES", 1), count_parts() as counted:
            parts = outcome(x, grad, tree, 64)
    assert counted == [3, 3]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@contextmanager
def count_parts() -> Iterator[list[int]]:
    """How many parts each call had."""
    counted: list[int] = []
    parts = recurrence_triton.Inputs.parts

    def spy(self: recurrence_triton.Inputs) -> list[slice]:
        found = parts(self)
        counted.append(len(found))
        return found

    with mock.patch.object(recurrence_triton.Inputs, "parts", spy):
        yield counted


def check_long_chunks(device: str) -> None:
    """Without the delta rule the kernels run shorter chunks than those asked for; with it they decline."""
    tree = RolloutTree.from_rows(ROWS["63"]() + ROWS["comb"]())
    form = Form(groups=1, heads=1, d=8, v=8, delta=False)
    x = [y.detach().to(device).float() for y in form.inputs(tree.n)]
    grad = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1)).to(device)
    with by_kernels():
        long, short = (outcome(x, grad, tree, chunk) for chunk in (256, 64))
    with by_kernels("pytorch"):
        exact = outcome([y.double() for y in x], grad.double(), tree, 256)
    for a, b, c in zip(long, short, exact, strict=True):
        assert torch.equal(a, b)
        assert error(a, c) <= 1e-5


def check_mixed_dtypes(device: str) -> None:
    """Queries or keys may be wider than the values, in whose precision the kernels compute."""
    tree = RolloutTree.from_rows(ROWS["short"]())
    exact = [y.detach().to(device).half().double() for y in INTERPRETED["one"].inputs(tree.n)]
    grad = torch.ones_like(exact[2])
    with by_kernels("pytorch"):
        wanted = outcome(exact, grad, tree, 64)
    for dtypes in itertools.product([torch.float16, torch.float64], [torch.float32, torch.float64]):
        x = [y.to(dtype) for y, dtype in zip(exact, (*dtypes, *[torch.float32] * 3), strict=True)]
        with by_kernels():
            found = outcome(x, grad.float(), tree, 64)
        for a, b, like in zip(found, wanted, [x[2], *x], strict=True):
            assert a.dtype == like.dtype
            assert error(a, b) <= 2 * torch.finfo(a.dtype).eps + 16 * 2e-6


def check_a_gate_that_is_no_number(device: str) -> None:
    """NaN is no decay of zero: a run that has gone wrong must not look well."""
    tree = RolloutTree.from_rows(ROWS["short"]())
    x = [y.detach().to(device).float() for y in INTERPRETED["one"].inputs(tree.n)]
    x[3][0, 1] = torch.nan
    with by_kernels():
        found = outcome(x, torch.ones_like(x[2]), tree, 64)
    assert bool(found[0][0, 1:3].isnan().all())
    assert all(bool(y.isnan().any()) for y in found)


def interpret(group: str) -> None:
    """One group of cases, in the interpreter: it runs on the CPU what the device would be asked about."""
    import tests.interpreter  # noqa: F401

    with mock.patch.object(recurrence_triton, "_why_not", return_value=""):
        if group == "trees":
            check("forest", INTERPRETED["forest"], torch.float32, "cpu", low=-3.0, chunk=16)
            check("short", INTERPRETED["one"], torch.float16, "cpu")
            check("forest", Form(groups=1, heads=2, d=12, v=20, delta=False), torch.float32, "cpu", low=-3.0)
            check("comb", Form(groups=1, heads=2, d=8, v=8, delta=False), torch.float16, "cpu", chunk=16)
            check_long_chunks("cpu")
            check("short", INTERPRETED["one"], torch.float32, "cpu", low=-90.0, high=-80.0, chunk=2)
            check_parts("cpu")
            check_mixed_dtypes("cpu")
            check_a_gate_that_is_no_number("cpu")
        else:
            for name, form in INTERPRETED.items():
                check(name, form, torch.float32, "cpu", low=-3.0)


@pytest.mark.parametrize("group", ["trees", pytest.param("shapes", marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(group: str) -> None:
    pytest.importorskip("triton")
    subprocess.run(
        [sys.executable, "-c", f"from tests.test_recurrence_triton import interpret; interpret({group!r})"],
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=900,
        cwd=Path(__file__).parent.parent,
    )


def test_why_not() -> None:
    x = torch.zeros(1, 4, 1, 16)
    assert recurrence_triton.why_not(x, x, x[..., 0], x[..., 0], 64) == "not on a CUDA device"
    with (
        mock.patch.object(Tensor, "is_cuda", True),
        mock.patch.object(recurrence_triton, "why_no_triton", return_value=""),
    ):
        assert recurrence_triton.why_not(x, x, x, None, 64) == "a decay per channel"
        assert "chunks of 128" in recurrence_triton.why_not(x, x, x[..., 0], x[..., 0], 128)
        assert recurrence_triton.why_not(x, x, x[..., 0], None, 128) == ""
    with by_kernels("pytorch"):
        assert recurrence_triton.why_not(x, x, x[..., 0], x[..., 0], 64) == "pytorch was asked for"
    with by_kernels(), pytest.raises(ValueError, match="not on a CUDA device"):
        recurrence_triton.why_not(x, x, x[..., 0], x[..., 0], 64)
    with by_kernels("fast"), pytest.raises(ValueError, match="there are triton, pytorch, rounds and fla"):
        recurrence_triton.why_not(x, x, x[..., 0], x[..., 0], 64)


# ---- on the GPU -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one", "63", "4097", "many", "short segments"])
@pytest.mark.parametrize(
    "form",
    [
        WIDE,
        Form(groups=16, heads=32, d=128, v=128),
        Form(groups=1, heads=64, d=64, v=64),
        Form(groups=1, heads=1, d=256, v=256),
        Form(groups=3, heads=6, d=48, v=80),
        Form(groups=1, heads=2, d=192, v=24),
        Form(groups=1, heads=1, d=16, v=16),
        SCAN,
        Form(groups=1, heads=32, d=64, v=64, delta=False),
        Form(groups=4, heads=4, d=80, v=200, delta=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_on_the_gpu(name: str, form: Form, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and max(form.d, form.v) > 128:
        form = replace(form, d=96, v=min(form.v, 128))
    check(name, form, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("gates", [(-1e-4, 0.0), (-30.0, 0.0), (-200.0, -100.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", [WIDE, SCAN], ids=str)
def test_decays_near_zero_and_one(form: Form, gates: tuple[float, float], dtype: torch.dtype) -> None:
    check("many", form, dtype, "cuda", *gates)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 64])
def test_chunk_sizes(chunk: int) -> None:
    check("many" if chunk > 7 else "63", WIDE, torch.bfloat16, "cuda", chunk=chunk)


@pytest.mark.gpu
def test_more_programs_than_are_resident() -> None:
    """Waiting programs never keep out those that they wait for: 20 times as many as fit, forks in series."""
    rows = comb(1500, 64, 70)
    tree = RolloutTree.from_rows(rows)
    made = path_tables(tables(tree)[1], 64, torch.device("cuda"))
    form = Form(groups=8, heads=16, d=64, v=64)
    resident = torch.cuda.get_device_properties("cuda").multi_processor_count * 8
    assert made.paths * form.heads > 20 * resident
    x = [y.cuda().bfloat16() for y in form.inputs(tree.n)]
    grad = torch.randn_like(x[2])
    done = torch.cuda.Event()
    with by_kernels():
        found = outcome(x, grad, tree, 64)
        done.record()
    # The watchdog: a deadlock would never end.
    for _ in range(600):
        if done.query():
            break
        time.sleep(0.1)
    else:
        os._exit(1)
    for y in found:
        assert y.isfinite().all()


@pytest.mark.gpu
def test_inputs_of_other_dtypes_and_values() -> None:
    check_long_chunks("cuda")
    check_mixed_dtypes("cuda")
    check_a_gate_that_is_no_number("cuda")


@pytest.mark.gpu
def test_parts_on_the_gpu() -> None:
    check_parts("cuda")


@pytest.mark.gpu
def test_empty_and_reference() -> None:
    tree = RolloutTree.from_rows([[1, 2, 3], [1, 4]])
    x = [y.cuda().float() for y in Form(d=16, v=16).inputs(tree.n)]
    end, table = tables(tree)
    with by_kernels():
        out = tree_recurrence(*x, end.cuda(), table, SCALE, 64)
    parent = [-1, 0, 1, 0]
    torch.testing.assert_close(out, tree_recurrence_reference(*x, parent, SCALE), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_device_without_room_runs_in_pytorch() -> None:
    """A kernel that does not fit is tried once: the result is the one of plain PyTorch, and the reason is kept."""
    from triton.runtime.errors import OutOfResources

    def full(*_: object) -> Tensor:
        raise OutOfResources(300_000, 200_000, "shared memory")

    tree = RolloutTree.from_rows([[1, 2, 3], [1, 4]])
    x = [y.cuda().float() for y in Form(d=24, v=24).inputs(tree.n)]
    end, table = tables(tree)
    call = (*x, end.cuda(), table, SCALE, 64)
    with mock.patch.object(recurrence, "kernels_forward", full):
        out = tree_recurrence(*call)
    assert "shared memory" in recurrence_triton.why_not(x[1], x[2], x[3], x[4], 64)
    recurrence_triton._unfit.clear()
    torch.testing.assert_close(out, tree_recurrence(*call), rtol=1e-5, atol=1e-5)
