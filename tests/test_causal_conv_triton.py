"""The Triton executor of `tree_causal_conv1d` against the fp64 specification.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before triton is imported: each group of
cases in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.test_recurrence import tables
from treecompile.runtime.ops import (
    causal_conv,
    causal_conv_tables,
    tree_causal_conv1d,
    tree_causal_conv1d_backward,
    tree_causal_conv1d_reference,
)
from treecompile.runtime.ops.triton_device import why_no_triton
from treecompile.runtime.tree import RolloutTree

Rows = list[list[int]]


def random_rows(seed: int, rows: int = 12, length: int = 14) -> Rows:
    """Few ids: forks everywhere, many of them closer to each other than a filter is wide."""
    rng = np.random.default_rng(seed)
    found: Rows = [rng.integers(0, 2, rng.integers(1, length)).tolist() for _ in range(rows)]
    return found


TREES: dict[str, Rows] = {
    "empty": [],
    "one": [[1]],
    "chain": [list(range(45))],
    "short roots": [[i, *range(i % 3)] for i in range(10, 21)],
    "close forks": [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7, 8], [1, 9], [7, 7]],
    "long runs": [[*range(30), 40, *range(20)], [*range(30), 41, *range(20)], [*range(11), 42]],
}


@dataclass(frozen=True)
class Case:
    """Inputs of the op, beside the tree."""

    taps: int = 4
    bias: bool = False
    activation: str = "silu"
    dtype: torch.dtype = torch.float32
    channels: int = 5
    channels_first: bool = False

    def inputs(self, tokens: int, device: str) -> tuple[list[Tensor | None], Tensor]:
        """x, weight, bias; and the gradient of the output."""
        g = torch.Generator(device).manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, device=device).to(self.dtype)

        x, grad = (draw(1, tokens, self.channels).transpose(1, 2) for _ in range(2))
        x = x.contiguous() if self.channels_first else x
        weight = draw(self.channels, self.taps) * self.taps**-0.5
        return [x, weight, draw(self.channels) if self.bias else None], grad


@contextmanager
def by_triton() -> Iterator[None]:
    """The kernels run, also in the interpreter; `torch.empty` holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        with mock.patch.object(causal_conv, "why_not_triton", return_value=""):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def results(given: list[Tensor | None], grad: Tensor, tree: RolloutTree, activation: str) -> list[Tensor]:
    """Output, and gradients of x, weight and bias."""
    end, segments = tables(tree)
    arguments = (*given, end.to(grad.device), segments, activation)
    found = [tree_causal_conv1d(*arguments), *tree_causal_conv1d_backward(grad, *arguments)]
    return found[: 4 if given[2] is not None else 3]


def specified(given: list[Tensor | None], grad: Tensor, tree: RolloutTree, activation: str) -> list[Tensor]:
    """The same, token by token in fp64."""
    wide = [None if v is None else v.double().requires_grad_() for v in given]
    x, weight, bias = wide
    assert x is not None
    assert weight is not None
    out = tree_causal_conv1d_reference(x, weight, bias, tree.parent.tolist(), activation)
    leaves = [v for v in wide if v is not None]
    if not tree.n:
        return [out.detach(), *(torch.zeros_like(v) for v in leaves)]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def layout(x: Tensor) -> tuple[Any, ...]:
    """dtype, shape, and the strides that mean something."""
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and x.numel()]
    return x.dtype, x.shape, strides


def check_kernels(
    rows: Rows,
    case: Case,
    device: str = "cpu",
    exact: Callable[..., list[Tensor]] = specified,
) -> None:
    """At most twice as far from fp64 as PyTorch, which sums in fp32, too; on a GPU bit-equal when run again."""
    tree = RolloutTree.from_rows(rows)
    given, grad = case.inputs(tree.n, device)
    with by_triton():
        found = results(given, grad, tree, case.activation)
        again = results(given, grad, tree, case.activation) if device == "cuda" else found
    with mock.patch.object(causal_conv, "why_not_triton", return_value="not asked for"):
        plain = results(given, grad, tree, case.activation)
        wanted = exact(given, grad, tree, case.activation)
    for mine, repeated, theirs, true in zip(found, again, plain, wanted, strict=True):
        assert layout(mine) == layout(theirs)
        assert not mine.isnan().any()
        assert torch.equal(mine, repeated)
        null = float((theirs.double() - true).norm())
        # The sigmoid of the kernels is off by two units in the last place of fp32; the null of few values may be 0. The
        # interpreter cuts bf16 off, and does not round it.
        floor = 4 * torch.finfo(torch.float32).eps + torch.finfo(case.dtype).eps / (
            16 if device == "cuda" else 2
        )
        assert float((mine.double() - true).norm()) <= 2 * null + floor * float(true.norm())


def interpret(group: str) -> None:
    """One group of cases, in the interpreter, with runs and blocks that small inputs have several of."""
    import tests.interpreter  # noqa: F401
    from treecompile.runtime.kernels import causal_conv as kernels

    patched = {"RUN": 8, "LEAST_RUN": 8, "FORWARD_STEP": 4, "MANY_READS": 4, "CHANNELS": 1, "BLOCK": 32}
    with mock.patch.multiple(kernels, **patched), mock.patch.object(causal_conv_tables, "LONG", 6):
        if group == "trees":
            for name, rows in TREES.items():
                check_kernels(
                    rows, Case(bias=name == "close forks", activation="silu" if "o" in name else "")
                )
            check_kernels(TREES["long runs"], Case(channels=37, taps=3, bias=True))
        elif group == "random":
            for seed in range(3):
                check_kernels(random_rows(seed), Case(taps=2 + seed, bias=seed % 2 == 0))
        elif group == "inputs":
            for taps in (1, 2, 8):
                check_kernels(TREES["close forks"], Case(taps=taps, bias=taps == 2))
            for dtype in (torch.bfloat16, torch.float16):
                check_kernels(TREES["long runs"], Case(dtype=dtype, bias=True))
            check_kernels(TREES["close forks"], Case(channels_first=True))
            check_kernels(TREES["close forks"], Case(channels=1, channels_first=True))
            check_kernels(TREES["one"], Case(channels_first=True))
        elif group == "children":
            check_kernels([[1, 10 + i] for i in range(1000)], Case(channels=2, taps=2))


@pytest.mark.parametrize(
    "group", ["trees", "inputs", *(pytest.param(g, marks=pytest.mark.slow) for g in ("random", "children"))]
)
def test_kernels_in_the_interpreter(group: str) -> None:
    pytest.importorskip("triton")
    subprocess.run(
        [sys.executable, "-c", f"from tests.test_causal_conv_triton import interpret; interpret({group!r})"],
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=600,
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(8))
def test_tables_by_brute_force(seed: int, taps: int) -> None:
    """Reads by shifts and reads by index are all reads, once each; notes say which gradients get shares."""
    tree = RolloutTree.from_rows(random_rows(seed))
    with mock.patch.object(causal_conv_tables, "LONG", 3):
        made = causal_conv_tables._build(tables(tree)[1].numpy(), taps, torch.device("cpu"))
    parent, expected = tree.parent.tolist(), []
    for n in range(tree.n):
        at = n
        for j in range(taps):
            expected += [(n, j, at)] if at >= 0 else []
            at = parent[at] if at >= 0 else -1
    odd = made.odd.tolist()
    found = [(n, j, n - j) for n in range(tree.n) if n not in odd for j in range(taps) if n >= j]
    shares, rows = made.shares, []
    for token, note in enumerate(made.shares.notes.tolist()):
        assert note % 2 == (token in odd)
        rows += [(note // 2 - 1, token)] if note else []
    for f, token in sorted(rows):
        mine = slice(*shares.offsets[f : f + 2].tolist())
        reads = zip(shares.readers[mine].tolist(), shares.distances[mine].tolist(), strict=True)
        found += [(odd[reader], j, token) for reader, j in reads]
    assert sorted(found) == sorted(expected)
    assert sorted(f for f, _ in rows) == list(range(len(shares.offsets) - 1))
    long = (shares.offsets.diff() > 3).tolist()
    assert long == [True] * shares.long + [False] * (len(long) - shares.long)


# ---- who runs ----


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(causal_conv.VARIABLE, "pytorch")
    assert causal_conv.why_not_triton(torch.zeros(1, 2, 3), 4) == "pytorch was asked for"
    monkeypatch.setenv(causal_conv.VARIABLE, "triton")
    with pytest.raises(ValueError, match="'triton', and may be 'pytorch'"):
        causal_conv.why_not_triton(torch.zeros(1, 2, 3), 4)


def test_why_not_by_input() -> None:
    class Cuda:
        is_cuda, dtype, device = True, torch.float64, torch.device("cuda", 0)

    x: Any = Cuda()
    assert causal_conv.why_not_triton(torch.zeros(1, 2, 3), 4) == "not on a CUDA device"
    assert "float64" in causal_conv.why_not_triton(x, 4)
    x.dtype = torch.bfloat16
    assert "9 taps" in causal_conv.why_not_triton(x, 9)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(7, 5)):
        why_no_triton.cache_clear()
        pytest.importorskip("triton")
        assert "7.5" in causal_conv.why_not_triton(x, 4)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        why_no_triton.cache_clear()
        assert causal_conv.why_not_triton(x, 4) == ""
    why_no_triton.cache_clear()


# ---- on the GPU ----


def in_fp64(given: list[Tensor | None], grad: Tensor, tree: RolloutTree, activation: str) -> list[Tensor]:
    """The PyTorch code in fp64, for trees of too many tokens for the specification."""
    wide = [None if v is None else v.double() for v in given]
    return results(wide, grad.double(), tree, activation)


LARGE: dict[str, Callable[[], Rows]] = {
    "random": lambda: random_rows(1, rows=300, length=40),
    "branches": lambda: [[*range(700), 1000 + i, *range(100 + 7 * i)] for i in range(9)],
}
CASES = [
    Case(dtype=torch.bfloat16, channels=1000),
    Case(dtype=torch.float32, channels=77, taps=3, bias=True, activation="", channels_first=True),
    Case(dtype=torch.float16, channels=96, taps=8, bias=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_the_gpu(case: Case) -> None:
    for rows in (*TREES.values(), random_rows(0)):
        check_kernels(rows, case, "cuda")
    for make in LARGE.values():
        check_kernels(make(), case, "cuda", in_fp64)


def branches(tokens: int, prompt: int, count: int) -> Rows:
    """A prompt with `count` answers, of equal length but for the last ones: `tokens` packed tokens."""
    length, longer = divmod(tokens - prompt, count)
    return [[*range(prompt), -1 - i, *range(1, length + (i < longer))] for i in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize(("prompt", "count"), [(5408, 16), (256, 1024), (21792, 0)])
def test_a_real_layer_on_the_gpu(prompt: int, count: int) -> None:
    rows = branches(21792, prompt, count) if count else [list(range(prompt))]
    check_kernels(rows, Case(dtype=torch.bfloat16, channels=8192), "cuda", in_fp64)


@pytest.mark.gpu
def test_the_op_on_the_gpu() -> None:
    """Through autograd and autocast, by the kernels that the op picks itself."""
    tree = RolloutTree.from_rows(branches(3000, 500, 20))
    end, segments = tables(tree)
    given, grad = Case(channels=256).inputs(tree.n, "cuda")
    leaves = [v.requires_grad_() for v in given if v is not None]
    assert causal_conv.why_not_triton(leaves[0], 4) == ""
    with torch.autocast("cuda", torch.bfloat16):
        out = tree_causal_conv1d(*leaves, None, end.cuda(), segments, "silu")
    found = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    assert out.dtype == torch.bfloat16
    assert [v.dtype for v in found] == [torch.float32] * 2
    halves = [*(v.detach().bfloat16() for v in leaves), None]
    expected = results(halves, grad.bfloat16(), tree, "silu")
    for mine, theirs in zip((out, *found), expected, strict=True):
        torch.testing.assert_close(mine, theirs.to(mine.dtype))
