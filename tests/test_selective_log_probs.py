"""The head in one op: equal to the head written out, at any chunk size; and what it holds and computes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.test_expand import Maps, maps, random_maps
from treecompile.runtime.ops import (
    kept_rows,
    selective_log_probs,
    selective_log_probs_backward,
    selective_log_probs_reference,
)
from treecompile.runtime.ops.selective_log_probs import _backward, _forward

WIDTH, COLUMNS = 4, 11
SOFTCAP = "div:3.0 tanh mul:3.0"
CHAINS = ("", "div:0.7", "mul:factor", f"{SOFTCAP} div:factor", "to:float64 div:1.5", f"to:float64 {SOFTCAP}")
# Rows of a chunk: everything at once, several, one.
CHUNKS = (100, 3, 1)
# Several labels of one row, equal ones, dropped positions, a row without a position; one row; nothing kept; nothing.
LAYOUTS = {
    "fork": maps([0, 0, 0, 2, -1, 3, 3, 1, -1, 0], 5),
    "random": random_maps(7, 40, 0.2),
    "one": maps([0, 0, -1], 1),
    "dropped": maps([-1, -1], 2),
    "no positions": maps([], 3),
    "no rows": maps([-1, -1], 0),
}
SIZES: dict[str, dict[str, Any]] = {
    "large": {},
    "two rows a tile": {"_TILE_ROWS": 2},
    "few entries on the CPU": {"_CPU_ENTRIES": 2 * COLUMNS},
    "as on a device": {"_on_device": lambda x: True},
}


class Case:
    """Arguments of one call."""

    def __init__(
        self, layout: Maps, dtype: torch.dtype = torch.float64, bias: bool = True, columns: int = COLUMNS
    ) -> None:
        g = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

        self.layout = layout
        self.hidden, self.weight = draw(layout.rows, WIDTH), draw(columns, WIDTH)
        self.bias = draw(columns) if bias else None
        drawn = torch.randint(0, columns, layout.row_index.shape, generator=g)
        repeated = torch.where(torch.rand(drawn.shape, generator=g) < 0.3, 1, drawn)
        self.labels = torch.where(layout.row_index >= 0, repeated, -100)
        self.factor = torch.tensor(1.3, dtype=dtype)

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]

    def args(self, chain: str, normalized: bool = True, chunk: int = 3) -> tuple[Any, ...]:
        layout = self.layout
        tree = (layout.row_index, self.labels, layout.offsets, layout.positions)
        keep = kept_rows(self.hidden, chunk)
        return (self.hidden, self.weight, self.bias, *tree, self.factor, chain, normalized, True, keep, chunk)

    def call(self, chain: str, normalized: bool = True, chunk: int = 3) -> tuple[Tensor, ...]:
        return tuple(selective_log_probs(*self.args(chain, normalized, chunk))[:3])

    def reference(self, chain: str, normalized: bool = True) -> tuple[Tensor, ...]:
        return selective_log_probs_reference(
            self.hidden,
            self.weight,
            self.bias,
            self.layout.row_index,
            self.labels,
            self.factor,
            chain,
            normalized,
        )

    def grads(self, outputs: tuple[Tensor, ...], which: tuple[int, ...] = (0, 1, 2)) -> list[Tensor]:
        g = torch.Generator().manual_seed(6)
        drawn = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o) for o in outputs]
        total = torch.stack([(outputs[i] * drawn[i]).sum() for i in which]).sum()
        found = torch.autograd.grad(total, self.leaves, allow_unused=True)
        return [torch.zeros_like(x) if y is None else y for x, y in zip(self.leaves, found, strict=True)]


@pytest.fixture(params=SIZES.values(), ids=SIZES.keys())
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the backward pass that hold all rows, and tiles that do not; logits that are read block by block."""
    for name, value in request.param.items():
        monkeypatch.setattr(sys.modules[_forward.__module__], name, value)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("normalized", [True, False], ids=["log-probs", "logits"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_head_written_out(name: str, chain: str, normalized: bool) -> None:
    for chunk, bias in itertools.product(CHUNKS, (True, False)):
        case = Case(LAYOUTS[name], bias=bias)
        found, expected = case.call(chain, normalized, chunk), case.reference(chain, normalized)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for which in ((0, 1, 2), *(((0,), (1,), (2,), (0, 2)) if chunk == 3 and bias else ())):
            first = case.grads(case.call(chain, normalized, chunk), which)
            second = case.grads(case.reference(chain, normalized), which)
            torch.testing.assert_close(first, second, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("chain", [CHAINS[0], CHAINS[3]])
def test_gradcheck(chain: str, chunk: int) -> None:
    case = Case(LAYOUTS["fork"])
    rest = case.args(chain, True, chunk)[3:]
    assert case.bias is not None

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(selective_log_probs(*leaves, *rest)[:3])

    assert torch.autograd.gradcheck(function, (case.hidden, case.weight, case.bias))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_frozen_parts(chunk: int) -> None:
    for frozen in (0, 1, 2):
        case, whole = Case(LAYOUTS["fork"]), Case(LAYOUTS["fork"])
        case.leaves[frozen].requires_grad_(False)
        leaves = [x for x in case.leaves if x.requires_grad]
        grads = torch.autograd.grad(case.call("", chunk=chunk)[0].sum(), leaves)
        expected = torch.autograd.grad(whole.reference("")[0].sum(), whole.leaves)
        torch.testing.assert_close(grads, tuple(e for i, e in enumerate(expected) if i != frozen))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chain", ["", "div:0.7", "to:float32 div:0.7", SOFTCAP])
def test_low_precision_errs_no_more_than_the_head_written_out(chain: str, dtype: torch.dtype) -> None:
    layout = random_maps(64, 300, 0.1)
    exact = Case(layout, dtype, columns=97)
    for x in exact.leaves:
        x.data = x.data.double()
    exact.factor = exact.factor.double()
    chain64 = chain.replace("to:float32", "to:float64")
    true = [*(o := exact.reference(chain64)), *exact.grads(o)]
    case = Case(layout, dtype, columns=97)
    plain = [*(o := case.reference(chain)), *case.grads(o)]
    for chunk in (100, 5):
        ours = [*(o := case.call(chain, chunk=chunk)), *case.grads(o)]
        assert o[0].dtype == plain[0].dtype
        assert [x.dtype for x in ours[3:]] == [x.dtype for x in plain[3:]]
        for a, b, c in zip(ours, plain, true, strict=True):
            scale = float(c.detach().abs().max())
            error, null = ((x.detach().double() - c.detach()).abs().max() for x in (a, b))
            assert float(error) <= 1.5 * float(null) + 4 * torch.finfo(dtype).eps * scale


def test_the_weight_is_summed_in_fp32_over_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 tiles of rows, whose shares bfloat16 cannot add up."""
    monkeypatch.setattr(sys.modules[_forward.__module__], "_TILE_ROWS", 1)
    layout = maps(list(range(512)), 512)
    case = Case(layout, torch.bfloat16)
    case.hidden.data.fill_(1.0)
    case.labels = torch.zeros_like(case.labels)
    found = torch.autograd.grad(case.call("to:float32", chunk=1)[0].sum(), case.weight)[0]
    expected = torch.autograd.grad(case.reference("to:float32")[0].sum(), case.weight)[0]
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_repeat(dtype: torch.dtype) -> None:
    first, second = (
        [*(o := (case := Case(random_maps(40, 300, 0.1), dtype)).call("", chunk=7)), *case.grads(o)]
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_does_not_reach_inside() -> None:
    case = Case(LAYOUTS["fork"], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = case.call("")
    torch.testing.assert_close(found, case.reference(""))


def test_rows_of_minus_infinity_and_masked_columns() -> None:
    case = Case(LAYOUTS["fork"])
    assert case.bias is not None
    with torch.no_grad():
        case.bias[5:] = -torch.inf
    found, expected = case.call("", chunk=2)[:2], case.reference("")[:2]
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        case.bias.fill_(-torch.inf)
    torch.testing.assert_close(case.call("", chunk=2)[:2], case.reference("")[:2], equal_nan=True)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", ["fork", "one"])
def test_opcheck(name: str, chunk: int) -> None:
    case = Case(LAYOUTS[name], torch.float32)
    args = case.args("to:float64 div:factor", chunk=chunk)
    torch.library.opcheck(selective_log_probs, args)
    picked, lse, spread, kept = (x.detach() for x in selective_log_probs(*args))
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in args[:8]]
    grads = (torch.ones_like(picked), None, torch.ones_like(spread))
    settings = ("to:float64 div:factor", True, [True, True, True], chunk)
    torch.library.opcheck(selective_log_probs_backward, (*grads, *inputs, lse, spread, kept, *settings))


def test_matrix_products() -> None:
    """Three of them when the logits fit a chunk, four when they are computed again; fewer for what is frozen."""
    case = Case(random_maps(16, 40, 0.0))
    every, some = [True] * 3, [True, False, False]
    for chunk, needs, expected in ((16, every, 3), (5, every, 4), (1, every, 4), (16, some, 2), (5, some, 3)):
        args = tuple(x.detach() if isinstance(x, Tensor) else x for x in case.args("", chunk=chunk))
        with FlopCounterMode(display=False) as counter:
            picked, lse, spread, kept = _forward(*args)
            grads = (torch.ones_like(picked), None, None)
            _backward(*grads, *args[:8], lse, spread, kept, "", True, needs, chunk)
        assert counter.get_total_flops() == expected * 2 * 16 * WIDTH * COLUMNS


def check_kernels(device: str, dtype: torch.dtype, out: torch.dtype, layout: Maps, columns: int) -> None:
    """Statistics and gradients of a tile in the middle of wider rows, against formulas in fp64."""
    from treecompile.runtime.kernels.log_probs import logit_grads, pick, row_statistics

    g = torch.Generator().manual_seed(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows, left, width = layout.rows, columns // 3, columns - columns // 3
    whole = (3 * torch.randn(rows, columns, generator=g)).to(dtype)
    whole[0, 1:] = -torch.inf
    exact = whole.double()
    p, lse = exact.softmax(-1), exact.logsumexp(-1)
    logs = torch.where(p > 0, exact - lse[:, None], 0)
    spread = -(p * logs).sum(-1)
    near = {
        "rtol": 1e-5 if wide == torch.float32 else 1e-12,
        "atol": 1e-5 if wide == torch.float32 else 1e-12,
    }
    top, total, found = (v.cpu() for v in row_statistics(whole.to(device), True, wide))
    assert torch.equal(top, whole.amax(-1).to(wide))
    torch.testing.assert_close((top + total).double(), lse, **near)
    torch.testing.assert_close(found.double(), spread, **near)
    assert torch.equal(row_statistics(whole.to(device), False, wide)[1].cpu(), total)

    whole[0, 1:] = 0  # the slope of an entropy is no number where a probability is 0
    exact = whole.double()
    p, lse = exact.softmax(-1), exact.logsumexp(-1)
    logs = exact - lse[:, None]
    spread = -(p * logs).sum(-1)
    share, weight = (torch.randn(rows, generator=g, dtype=torch.float64) for _ in range(2))
    grad = torch.randn(layout.row_index.shape, generator=g, dtype=torch.float64)
    labels = torch.randint(0, columns, layout.row_index.shape, generator=g)
    labels[::3] = left
    kept = layout.row_index >= 0
    cells = torch.zeros(rows, columns, dtype=torch.float64)
    cells.index_put_((layout.row_index[kept], labels[kept]), grad[kept], accumulate=True)
    moved = layout.to(device)

    def there(x: Tensor) -> Tensor:
        return x.to(device, wide)

    for normalized, values in ((True, logs), (False, exact)):
        picked = torch.zeros(labels.shape, dtype=out, device=device)
        where = labels.to(device), moved.offsets, moved.positions
        pick(whole.to(device), *row_statistics(whole.to(device), False, wide)[:2], where, normalized, picked)
        expected = torch.zeros(labels.shape, dtype=torch.float64)
        expected[kept] = values[layout.row_index[kept], labels[kept]]
        torch.testing.assert_close(
            picked.cpu().double(), expected, rtol=1e-2 if out.itemsize == 2 else 1e-5, atol=1e-5
        )
        wild = torch.where(torch.arange(len(labels)) % 2 > 0, labels, columns).to(device)
        pick(
            whole.to(device),
            *row_statistics(whole.to(device), False, wide)[:2],
            (wild, *where[1:]),
            True,
            picked,
        )
        assert torch.equal(picked.isnan().cpu(), kept & (wild.cpu() == columns))

    picks = (there(grad), labels.to(device), moved.offsets, moved.positions)
    for some, more, picked in itertools.product((share, None), (weight, None), (picks, None)):
        expected = torch.zeros_like(exact) if picked is None else cells.clone()
        if some is not None:
            expected += some[:, None] * p
        if more is not None:
            expected -= more[:, None] * p * (logs + spread[:, None])
        given = tuple(None if v is None else there(v) for v in (some, more))
        tile = whole.to(device)[:, left:]
        for _ in range(2):
            ours = logit_grads(tile, there(lse), *given, there(spread), picked, left, out)
            assert (ours.dtype, tuple(ours.shape)) == (out, (rows, width))
            bound = max(torch.finfo(out).eps, 1e-6 if wide == torch.float32 else 1e-13)
            torch.testing.assert_close(ours.cpu().double(), expected[:, left:], rtol=bound, atol=16 * bound)
        assert torch.equal(ours, logit_grads(tile, there(lse), *given, there(spread), picked, left, out))
    assert row_statistics(whole[:0].to(device), True, wide)[2].shape == (0,)


INTERPRETED = """
import torch
import tests.interpreter
import treecompile.runtime.kernels.log_probs as kernels
from tests.test_expand import maps, random_maps
from tests.test_selective_log_probs import check_kernels
kernels.BLOCK, kernels.LABELS = 16, 4
check_kernels("cpu", torch.float32, torch.float32, random_maps(5, 40, 0.2), 40)
check_kernels("cpu", torch.float64, torch.float64, maps([0] * 9 + [1, 2, -1, 4], 5), 17)
check_kernels("cpu", torch.float16, torch.float32, random_maps(3, 9, 0.2), 70)
"""


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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_on_the_gpu(dtype: torch.dtype) -> None:
    check_kernels("cuda", dtype, dtype, random_maps(301, 3000, 0.1), 600)
    check_kernels("cuda", dtype, dtype, maps([0] * 1024 + list(range(1, 40)), 40), 10007)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chain", CHAINS)
def test_on_the_gpu(chain: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = random_maps(300, 2000, 0.1)
    host, device = Case(layout, dtype, columns=500), Case(layout, dtype, columns=500)
    device.layout, device.labels = layout.to("cuda"), device.labels.to("cuda")
    for name in ("hidden", "weight", "bias"):
        setattr(device, name, getattr(device, name).detach().cuda().requires_grad_())
    expected = [*(o := host.reference(chain)), *host.grads(o)]
    for rows, chunk in ((16384, 300), (16384, 64), (100, 64)):
        monkeypatch.setattr(sys.modules[_forward.__module__], "_TILE_ROWS", rows)
        found = [*(o := device.call(chain, chunk=chunk)), *device.grads(o)]
        for a, b in zip(found, expected, strict=True):
            scale = float(b.detach().abs().max())
            bound = 64 * torch.finfo(dtype).eps * scale
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=bound, check_dtype=dtype != torch.bfloat16)
