"""The rounds executors of `tree_recurrence`, against the PyTorch one and the reference.

flash-linear-attention runs on a GPU alone: elsewhere a stand-in with its signatures says whether it is called rightly.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.strategies import row_sets
from tests.test_chunks import NAMED
from tests.test_recurrence import FORMS, SCALE, Form, each_form, run, tables
from tests.test_recurrence_triton import draw, error
from treecompile.runtime.chunks import Alignment, ChunkPlan
from treecompile.runtime.errors import OptionError
from treecompile.runtime.ops import (
    recurrence_rounds,
    tree_recurrence,
    tree_recurrence_backward,
    tree_recurrence_reference,
)
from treecompile.runtime.ops.chunk_reference import recurrence_in_chunks
from treecompile.runtime.ops.recurrence_choice import VARIABLE
from treecompile.runtime.ops.recurrence_plan import block_plan
from treecompile.runtime.tree import RolloutTree

RTOL = 1e-10
ALIGNMENTS: tuple[Alignment, ...] = ("trajectory", "branch", "auto")
FORKS = [[*range(1, 71), 1000 + i, *range(10)] for i in range(3)] + [[*range(1, 30), 7]]
each_executor = pytest.mark.parametrize("executor", ["rounds", "fla"])


# ---- a stand-in for fla -----------------------------------------------------------------------------------------


class StandIn:
    """The functions of flash-linear-attention, with what they ask of their arguments, in PyTorch.

    Attributes:
        calls: per call, the name of the function, and the tokens of each sequence: what `v[..., 0]` of the first
            value head says.
        kept: how many calls were recorded by autograd.
        backward: an error that the backward pass raises.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.calls: list[tuple[str, list[list[int]]]] = []
        self.kept = 0
        self.backward: Exception | None = None

    def modules(self) -> dict[str, ModuleType]:
        found = {}
        for (delta, vector), (module, name, grouped) in recurrence_rounds.FLA.items():
            found[module] = ModuleType(module)
            setattr(found[module], name, self.function(name, delta, vector, grouped))
        return found

    def function(self, name: str, delta: bool, vector: bool, grouped: bool) -> Callable[..., Any]:
        def common(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            beta: Tensor | None,
            scale: float | None,
            initial: Tensor | None,
            final: bool,
            offsets: Tensor | None,
        ) -> tuple[Tensor, Tensor | None]:
            assert initial is not None
            assert offsets is not None
            batch, tokens, heads, size = k.shape
            assert batch == 1
            assert q.shape == k.shape
            assert v.shape[:2] == (1, tokens)
            assert v.shape[2] == heads or (grouped and v.shape[2] % heads == 0)
            assert q.dtype == k.dtype == v.dtype
            wide = torch.float64 if v.dtype == torch.float64 else torch.float32
            assert g.dtype == initial.dtype == wide
            assert g.shape == (1, tokens, v.shape[2], *([size] if vector else []))
            assert offsets.dtype == torch.int64
            assert initial.shape == (len(offsets) - 1, v.shape[2], size, v.shape[3])
            if beta is not None:
                assert beta.shape == v.shape[:3]
            bounds = offsets.tolist()
            ids = v[0, :, 0, 0].long().tolist()
            self.calls.append((name, [ids[a:b] for a, b in itertools.pairwise(bounds)]))
            out, state = _Function.apply(self, scale, offsets, q, k, v, g, beta, initial)
            self.kept += out.requires_grad
            return out, state if final else None

        if delta:

            def with_beta(
                q: Tensor,
                k: Tensor,
                v: Tensor,
                g: Tensor,
                beta: Tensor,
                scale: float | None = None,
                initial_state: Tensor | None = None,
                output_final_state: bool = False,
                cu_seqlens: Tensor | None = None,
            ) -> tuple[Tensor, Tensor | None]:
                return common(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)

            return with_beta

        def without_beta(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            scale: float | None = None,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            cu_seqlens: Tensor | None = None,
        ) -> tuple[Tensor, Tensor | None]:
            return common(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens)

        return without_beta


class _Function(torch.autograd.Function):
    """An autograd function, as fla's are: it records whenever gradients are enabled, wherever it is called."""

    @staticmethod
    def forward(ctx: Any, owner: StandIn, scale: float | None, offsets: Tensor, *x: Tensor) -> Any:
        ctx.owner, ctx.scale = owner, scale
        ctx.save_for_backward(offsets, *x)
        return _Function.run(owner, scale, offsets, *x)

    @staticmethod
    def run(owner: StandIn, scale: float | None, offsets: Tensor, *x: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (y if y is None else y[0] for y in x[:5])
        assert q is not None
        assert k is not None
        assert v is not None
        assert g is not None
        made = recurrence_in_chunks(q, k, v, g, beta, offsets, x[5], chunk=owner.chunk, scale=scale)
        return made.out.unsqueeze(0), made.final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.owner.backward is not None:
            raise ctx.owner.backward
        offsets, *x = ctx.saved_tensors
        with torch.enable_grad():
            fresh = [y if y is None else y.detach().requires_grad_() for y in x]
            out = _Function.run(ctx.owner, ctx.scale, offsets, *fresh)
            found = iter(torch.autograd.grad(out, [y for y in fresh if y is not None], grads))
        return None, None, None, *(y if y is None else next(found) for y in fresh)


@contextmanager
def asked(executor: str, chunk: int = 64) -> Iterator[StandIn]:
    """Ask for an executor; flash-linear-attention is a stand-in that runs anywhere."""
    stand_in = StandIn(chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, executor)
        patch.setattr(recurrence_rounds, "why_no_fla", lambda v: "")
        for name, module in stand_in.modules().items():
            patch.setitem(sys.modules, name, module)
        yield stand_in


# ---- the law ----------------------------------------------------------------------------------------------------


def outcome(x: list[Tensor], out: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of a loss in which all tokens differ."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    loss = (out * weight.to(out.dtype)).sum()
    return [out.detach(), *torch.autograd.grad(loss, x, materialize_grads=True)]


def law(executor: str, form: Form, rows: list[list[int]], chunk: int, alignment: Alignment) -> None:
    """Outputs and all gradients are those of the PyTorch executor and of the reference."""
    tree = RolloutTree.from_rows(rows)
    x = form.inputs(tree.n)
    with asked(executor, chunk):
        found = outcome(x, run(x, tree, chunk, alignment))
    with asked("pytorch"):
        plain = outcome(x, run(x, tree, chunk, alignment))
    beta = x[4] if form.delta else None
    exact = outcome(x, tree_recurrence_reference(*x[:4], beta, tree.parent.tolist(), SCALE))
    for a, b, c in zip(found, plain, exact, strict=True):
        assert a.shape == b.shape
        assert error(a, b) <= RTOL
        assert error(a, c) <= RTOL


@settings(max_examples=80)
@given(
    st.sampled_from(["rounds", "fla"]),
    row_sets(max_rows=6, max_length=14),
    st.integers(1, 8),
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(ALIGNMENTS),
)
def test_random_trees_obey_the_law(
    executor: str, rows: list[list[int]], chunk: int, name: str, alignment: Alignment
) -> None:
    law(executor, FORMS[name], rows, chunk, alignment)


@each_executor
@each_form
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_forks_off_boundaries_obey_the_law(executor: str, form: Form, alignment: Alignment) -> None:
    law(executor, form, FORKS, 16, alignment)


@each_executor
@pytest.mark.parametrize("name", ["one token", "empty", "empty rows", "duplicates", "fork at 63"])
def test_named_trees_obey_the_law(executor: str, name: str) -> None:
    law(executor, FORMS["gated delta, several value heads"], NAMED[name], 64, "trajectory")


@each_executor
@each_form
def test_an_infinite_gate_forgets(executor: str, form: Form) -> None:
    tree = RolloutTree.from_rows([list(range(12)), [0, 1, 2, 3, 4, 5, 90]])
    x = form.inputs(tree.n)
    with torch.no_grad():
        x[3][0, 5] = -torch.inf
    with asked("pytorch"):
        expected = outcome(x, run(x, tree, 8))
    with asked(executor, 8):
        found = outcome(x, run(x, tree, 8))
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) <= RTOL


# ---- how they run -----------------------------------------------------------------------------------------------


@each_executor
@each_form
def test_results_repeat_bit_for_bit(executor: str, form: Form) -> None:
    """Also when a layer is computed again in the backward pass."""
    tree = RolloutTree.from_rows(FORKS)
    x = form.inputs(tree.n, dtype=torch.float32)

    def layer(*y: Tensor) -> Tensor:
        return run(list(y), tree, 16)

    with asked(executor, 16):
        results = [
            outcome(x, layer(*x)),
            outcome(x, layer(*x)),
            outcome(x, checkpoint(layer, *x, use_reentrant=False)),
        ]
    for first, *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.usefixtures("poisoned_empty")
@each_executor
@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strides(executor: str, form: Form, dtype: torch.dtype) -> None:
    """States, decays and steps are handed over in fp32; results are contiguous in the inputs' dtypes."""
    tree = RolloutTree.from_rows(FORKS)
    x = [y.detach().to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for y in form.inputs(tree.n)]
    x[3] = x[3].float()
    x = [y.requires_grad_() for y in x]
    with asked("pytorch"):
        expected = outcome(x, run(x, tree, 16))
    with asked(executor, 16):
        found = outcome(x, run(x, tree, 16))
    for a, b in zip(found, expected, strict=True):
        assert a.is_contiguous()
        assert a.dtype == b.dtype
        assert error(a, b) <= 4 * torch.finfo(dtype).eps


def test_queries_wider_than_values() -> None:
    """fla's operands are of one dtype, in the precision that the values say."""
    tree = RolloutTree.from_rows(FORKS)
    x = [y.detach() for y in FORMS["gated delta"].inputs(tree.n)]
    x[2:] = [y.float() for y in x[2:]]
    with asked("pytorch"):
        expected = run(x, tree, 16)
    with asked("fla", 16):
        assert error(run(x, tree, 16), expected) <= 1e-6


def chunks_of(calls: list[tuple[str, list[list[int]]]], chunk: int) -> list[list[int]]:
    """Chunks of all sequences, as tokens."""
    return [row[at : at + chunk] for _, rows in calls for row in rows for at in range(0, len(row), chunk)]


def blocks_of(plan: ChunkPlan) -> list[list[int]]:
    return sorted(plan.tokens(block).tolist() for block in range(plan.blocks))


@each_form
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_fla_runs_every_block_once(form: Form, alignment: Alignment) -> None:
    tree, chunk = RolloutTree.from_rows([*FORKS, *draw(0, 3, 30, 60)]), 16
    plan = block_plan(tables(tree)[1], chunk, alignment)
    x = [y.detach() for y in form.inputs(tree.n)]
    x[2][..., 0] = torch.arange(tree.n).view(1, -1, 1)
    x = [y.requires_grad_() for y in x]
    with asked("fla", chunk) as fla:
        out = run(x, tree, chunk, alignment)
        forward, recorded = list(fla.calls), fla.kept
        fla.calls.clear()
        torch.autograd.grad(out.sum(), x)
    count = plan.rounds("final").count
    assert count > 1
    # The first time nothing is kept for a backward pass; the second time each call is.
    assert (recorded, fla.kept) == (0, count)
    for calls in (forward, fla.calls):
        assert [name for name, _ in calls] == [recurrence_rounds.FLA[form.delta, form.vector].name] * count
        assert sorted(chunks_of(calls, chunk)) == blocks_of(plan)


def test_fewer_rounds_where_states_come_after_chunks() -> None:
    """Our own function gives the state after each chunk: a comb's trunk is one sequence."""
    trunk = list(range(100, 140))
    comb = RolloutTree.from_rows([trunk, *([*trunk[: 4 * i], 1, 2, 3, 4, 5] for i in range(1, 9))])
    made = [
        recurrence_rounds.recurrence_rounds(tables(comb)[1], 4, torch.device("cpu"), "trajectory", executor)
        for executor in ("rounds", "fla")
    ]
    assert [len(each.steps) for each in made] == [2, 9]
    again = recurrence_rounds.recurrence_rounds(tables(comb)[1], 4, torch.device("cpu"), "trajectory", "fla")
    assert again is made[1]


@each_form
def test_contracts(form: Form) -> None:
    tree = RolloutTree.from_rows([[1, 2, 3, 4, 5], [1, 2, 3, 6]])
    x = form.inputs(tree.n)
    others = (None,) * (1 - form.delta)
    plain = [y.detach() for y in x]
    with asked("rounds"):
        torch.library.opcheck(tree_recurrence, (*x, *others, *tables(tree), SCALE, 2))
        torch.library.opcheck(tree_recurrence_backward, (plain[2], *plain, *others, *tables(tree), SCALE, 2))


@each_executor
def test_autocast_stays_out(executor: str) -> None:
    tree = RolloutTree.from_rows(FORKS)
    x = FORMS["gated delta"].inputs(tree.n, dtype=torch.float32)
    with asked(executor, 16):
        expected = outcome(x, run(x, tree, 16))
        with torch.autocast("cpu", torch.bfloat16):
            found = outcome(x, run(x, tree, 16))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---- mistakes ---------------------------------------------------------------------------------------------------


@each_form
def test_unknown_executors(form: Form) -> None:
    tree = RolloutTree.from_rows([[1, 2], [1, 3]])
    x = form.inputs(tree.n)
    with asked("fast"), pytest.raises(ValueError, match=r"'fast': there are triton, pytorch, rounds and fla"):
        run(x, tree, 4)
    with asked("rounds"):
        out = run(x, tree, 4)
    with asked("fast"), pytest.raises(ValueError, match="there are triton"):
        torch.autograd.grad(out.sum(), x)
    with asked("triton"), pytest.raises(ValueError, match="not on a CUDA device"):
        run(x, tree, 4)


@each_executor
def test_mistakes(executor: str) -> None:
    tree = RolloutTree.from_rows([[1, 2, 3, 4, 5], [1, 2, 3, 6]])
    x = [y.detach() for y in FORMS["gated delta"].inputs(tree.n)]
    end, segments = tables(tree)
    with asked(executor):
        with pytest.raises(ValueError, match="not that of the segment table"):
            tree_recurrence(*x, end.flip(0), segments, SCALE, 4)
        with pytest.raises(ValueError, match="a table of 6 tokens for 3"):
            tree_recurrence(*x, end[:3], segments, SCALE, 4)
        with pytest.raises(OptionError, match="chunk"):
            tree_recurrence(*x, end, segments, SCALE, 0)
        with pytest.raises(OptionError, match="alignment"):
            run(x, tree, 4, "rows")  # type: ignore[arg-type]


def test_where_fla_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = RolloutTree.from_rows([[1, 2, 3], [1, 4]])
    x = FORMS["kda"].inputs(tree.n, dtype=torch.float32)
    monkeypatch.setenv(VARIABLE, "fla")
    with pytest.raises(ValueError, match=r"TREECOMPILE_RECURRENCE=fla: it runs on CUDA .* on cpu; move"):
        run(x, tree, 4)
    there = mock.Mock(spec=Tensor, is_cuda=True, dtype=torch.float64)
    assert "values are torch.float64" in recurrence_rounds.why_no_fla(there)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert recurrence_rounds.why_no_fla(mock.Mock(spec=Tensor, is_cuda=True, dtype=dtype)) == ""
    with asked("fla"):
        monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
        with pytest.raises(ValueError, match="pip install flash-linear-attention"):
            run(x, tree, 4)
        monkeypatch.setitem(sys.modules, "fla.ops.kda", ModuleType("fla.ops.kda"))  # an old one
        with pytest.raises(ValueError, match="no attribute 'chunk_kda'; install"):
            run(x, tree, 4)


def test_errors_of_fla_reach_the_user() -> None:
    tree = RolloutTree.from_rows([[1, 2, 3], [1, 4]])
    x = FORMS["gated delta"].inputs(tree.n)
    with asked("fla") as fla:
        fla.backward = RuntimeError("not with this Triton")
        out = run(x, tree, 4)
        with pytest.raises(RuntimeError, match="not with this Triton"):
            out.sum().backward()


# ---- fla on the GPU ---------------------------------------------------------------------------------------------


WIDE = {
    "gated delta rule": Form(groups=2, heads=4, d=64, v=64),
    "kda": Form(groups=2, heads=4, d=64, v=64, vector=True),
    "simple gla": Form(groups=2, heads=4, d=64, v=64, delta=False),
    "gla": Form(groups=2, heads=4, d=64, v=64, vector=True, delta=False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("name", WIDE)
def test_fla_on_the_gpu(
    name: str, alignment: Alignment, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors against fp64 of at most twice those of PyTorch, whose operands are rounded alike, and some rounding."""
    pytest.importorskip("fla.ops", reason="flash-linear-attention is not installed")
    tree = RolloutTree.from_rows([*FORKS, *draw(0, 20, 100, 300)])
    end, table = tables(tree)
    form = WIDE[name]
    x = [y.detach().cuda().bfloat16() for y in form.inputs(tree.n)]
    x[3] = x[3].float()  # gates are fp32 in models
    grad = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()

    def found(executor: str, y: list[Tensor]) -> list[Tensor]:
        monkeypatch.setenv(VARIABLE, executor)
        given = (*y[:4], y[4] if form.delta else None, end.cuda(), table, SCALE, 64, alignment)
        if not backward:
            return [tree_recurrence(*given)]
        return list(tree_recurrence_backward(grad.to(y[2].dtype), *given))[: len(y)]

    try:
        mine = found("fla", x)
    except RuntimeError as error_of_fla:
        if not backward or "Triton" not in str(error_of_fla):
            raise
        pytest.skip(str(error_of_fla))  # the package refuses some devices and versions, in words of its own
    plain, exact = found("pytorch", x), found("pytorch", [y.double() for y in x])
    rounding = torch.finfo(torch.bfloat16).eps
    for a, b, c in zip(mine, plain, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert error(a, c) <= 2 * error(b, c) + 2 * rounding
