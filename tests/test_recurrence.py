"""`tree_recurrence` and `tree_causal_conv1d`: rows run alone token by token, against the tree; and the dense ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.strategies import row_sets
from tests.test_chunks import NAMED
from treecompile.runtime.chunks import Alignment, chunk_plan
from treecompile.runtime.errors import OptionError, TreeError
from treecompile.runtime.ops import (
    recurrence,
    tree_causal_conv1d,
    tree_causal_conv1d_backward,
    tree_causal_conv1d_reference,
    tree_recurrence,
    tree_recurrence_backward,
    tree_recurrence_reference,
)
from treecompile.runtime.ops.causal_conv import ACTIVATIONS
from treecompile.runtime.ops.recurrence_plan import recurrence_tables
from treecompile.runtime.tree import RolloutTree

ATOL = 1e-10
SCALE = 0.7


@dataclass(frozen=True)
class Form:
    """Heads, widths, and which recurrence."""

    groups: int = 1
    heads: int = 2
    d: int = 4
    v: int = 3
    vector: bool = False
    delta: bool = True

    def inputs(
        self, n: int, low: float = -1.0, high: float = 0.0, dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> list[Tensor]:
        """q, k, v, gate and, for the delta rule, beta; keys of unit length, gates between `low` and `high`."""
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(1, n, *shape, generator=g, dtype=torch.float64)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(1, n, *shape, generator=g, dtype=torch.float64)

        q, k = draw(self.groups, self.d), F.normalize(draw(self.groups, self.d), dim=-1)
        v = draw(self.heads, self.v)
        gate = low + (high - low) * uniform(self.heads, *([self.d] if self.vector else []))
        made = [q, k, v, gate, *([uniform(self.heads)] if self.delta else [])]
        return [x.to(dtype).requires_grad_() for x in made]


FORMS = {
    "gated delta": Form(),
    "gated delta, several value heads": Form(groups=2, heads=6),
    "kda": Form(groups=2, vector=True),
    "kda, several value heads": Form(vector=True),
    "ssd": Form(heads=3, d=5, delta=False),
    "channels without beta": Form(groups=2, vector=True, delta=False),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def tables(tree: RolloutTree) -> tuple[Tensor, Tensor]:
    """subtree_end and the segment table, as a packed graph has them."""
    return (
        torch.from_numpy(tree.subtree_end.astype(np.int32)),
        torch.from_numpy(tree.segments.astype(np.int32)),
    )


def run(x: list[Tensor], tree: RolloutTree, chunk: int, alignment: Alignment = "trajectory") -> Tensor:
    out = tree_recurrence(*x[:4], x[4] if len(x) > 4 else None, *tables(tree), SCALE, chunk, alignment)
    assert isinstance(out, Tensor)
    return out


def alone(x: list[Tensor], row: list[int]) -> Tensor:
    """One row, token by token: [T, H, V]."""
    q, k, v, gate = (y[0, row] for y in x[:4])
    heads, groups = v.shape[1], k.shape[1]
    q, k = (y[:, [h // (heads // groups) for h in range(heads)]] for y in (q, k))
    state = v.new_zeros(heads, k.shape[2], v.shape[2])
    outs = []
    for t in range(len(row)):
        decay = gate[t].exp()
        state = torch.einsum("hdv,hd->hdv", state, decay.view(heads, -1).expand(-1, k.shape[2]))
        update = v[t]
        if len(x) > 4:
            update = x[4][0, row[t], :, None] * (v[t] - torch.einsum("hdv,hd->hv", state, k[t]))
        state = state + torch.einsum("hd,hv->hdv", k[t], update)
        outs.append(SCALE * torch.einsum("hdv,hd->hv", state, q[t]))
    return torch.stack(outs)


def rows_of(tree: RolloutTree) -> list[list[int]]:
    kept = [[int(n) for n in row if n >= 0] for row in tree.row_index]
    return [row for row in kept if row]


def law(
    form: Form,
    rows: list[list[int]],
    chunk: int,
    low: float = -1.0,
    high: float = 0.0,
    alignment: Alignment = "trajectory",
) -> None:
    """Outputs and all gradients, each row with a loss of its own."""
    tree = RolloutTree.from_rows(rows)
    x = form.inputs(tree.n, low, high)
    paths = rows_of(tree)
    out = run(x, tree, chunk, alignment)
    assert out.shape == (1, tree.n, form.heads, form.v)
    if not paths:
        return
    mine, theirs = [out[0, path] for path in paths], [alone(x, path) for path in paths]
    g = torch.Generator().manual_seed(2)
    weights = [torch.randn(y.shape, generator=g, dtype=torch.float64) for y in mine]
    found, expected = (
        torch.autograd.grad(torch.stack([(y * w).sum() for y, w in zip(ys, weights, strict=True)]).sum(), x)
        for ys in (mine, theirs)
    )
    for a, b in zip([*mine, *found], [*theirs, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=ATOL, atol=ATOL)


# ---- the law ----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(row_sets(max_rows=6, max_length=14), st.integers(1, 8), st.sampled_from(sorted(FORMS)))
def test_random_trees_obey_the_law(rows: list[list[int]], chunk: int, name: str) -> None:
    law(FORMS[name], rows, chunk)


@settings(max_examples=30)
@given(
    row_sets(max_rows=6, max_length=14),
    st.integers(1, 8),
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(["branch", "auto"]),
)
def test_other_alignments_obey_the_law(
    rows: list[list[int]], chunk: int, name: str, alignment: Alignment
) -> None:
    law(FORMS[name], rows, chunk, alignment=alignment)


def test_automatic_alignment_takes_the_fewer_blocks() -> None:
    def blocks(rows: list[list[int]], alignment: Alignment) -> int:
        tree = RolloutTree.from_rows(rows)
        table = tables(tree)[1]
        found = recurrence_tables(table, 4, torch.device("cpu"), alignment).blocks
        expected = chunk_plan(tree, 4, alignment=alignment).blocks if alignment != "auto" else found
        assert found == expected
        return found

    whole = [
        [*range(5), *range(100 * i, 100 * i + 8)] for i in range(1, 9)
    ]  # branches of whole chunks off a boundary
    assert blocks(whole, "auto") == blocks(whole, "branch") < blocks(whole, "trajectory")
    short = [[*range(5), 100 * i] for i in range(1, 9)]
    assert blocks(short, "auto") == blocks(short, "trajectory") < blocks(short, "branch")


def test_an_unknown_alignment() -> None:
    tree = RolloutTree.from_rows([[1, 2], [1, 3]])
    with pytest.raises(OptionError, match="alignment"):
        run(FORMS["gated delta"].inputs(tree.n), tree, 4, "rows")  # type: ignore[arg-type]


@settings(max_examples=25)
@given(row_sets(max_rows=6, max_length=14), st.integers(1, 8), st.sampled_from(sorted(FORMS)))
def test_slices_obey_the_law(rows: list[list[int]], chunk: int, name: str) -> None:
    """A budget of one block, and of a few: slices of levels, and levels in parts."""
    with pytest.MonkeyPatch.context() as patch:
        for budget in (1, 30_000):
            patch.setitem(recurrence.SLICE_BYTES, "cpu", budget)
            law(FORMS[name], rows, chunk)


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("form", ["gated delta, several value heads", "kda", "ssd"])
def test_forks_off_boundaries_obey_the_law(form: str, chunk: int) -> None:
    law(FORMS[form], [[*range(1, 71), 1000 + i, *range(10)] for i in range(3)] + [[*range(1, 30), 7]], chunk)


@pytest.mark.parametrize("name", ["one token", "empty", "empty rows", "duplicates", "fork at 63"])
def test_named_trees_obey_the_law(name: str) -> None:
    law(FORMS["gated delta"], NAMED[name], 64)


@pytest.mark.parametrize(("low", "high"), [(-60.0, -40.0), (-60.0, 0.0), (-1e-6, 0.0), (0.0, 0.0)])
@each_form
def test_decays_near_zero_and_one(form: Form, low: float, high: float) -> None:
    law(form, [[1, 2, 3, 4, 5, 6, *range(20)], [1, 2, 3, 9, 8, 7]], 16, low, high)


@each_form
def test_an_infinite_gate_forgets(form: Form) -> None:
    tree = RolloutTree.from_rows([list(range(12))])
    x = form.inputs(tree.n)
    with torch.no_grad():
        x[3][0, 5] = -torch.inf
    out = run(x, tree, 8)
    gradients = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(out[0, 5:], alone([y[:, 5:] for y in x], list(range(7))), rtol=ATOL, atol=ATOL)
    assert all(bool(y.isfinite().all()) for y in gradients)


@each_form
def test_the_reference_is_the_law(form: Form) -> None:
    tree = RolloutTree.from_rows([[1, 2, 3, 4], [1, 2, 5], [6]])
    x = form.inputs(tree.n)
    reference = tree_recurrence_reference(*x[:4], x[4] if form.delta else None, tree.parent.tolist(), SCALE)
    for path in rows_of(tree):
        torch.testing.assert_close(reference[0, path], alone(x, path), rtol=ATOL, atol=ATOL)


@pytest.mark.parametrize("form", ["gated delta", "kda, several value heads", "ssd"])
def test_gradcheck(form: str) -> None:
    tree = RolloutTree.from_rows([[1, 2, 3, 4, 5], [1, 2, 3, 6]])
    assert torch.autograd.gradcheck(lambda *x: run(list(x), tree, 2), FORMS[form].inputs(tree.n))


# ---- numbers ----------------------------------------------------------------------------------------------------


def error(x: Tensor, exact: Tensor) -> float:
    return float(((x.double() - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("low", [-0.1, -20.0])
@each_form
def test_fp32_is_close_to_fp64(form: Form, low: float) -> None:
    tree = RolloutTree.from_rows([[*range(150), i, *range(70)] for i in range(3)])
    exact = form.inputs(tree.n, low)
    x = [y.detach().float().requires_grad_() for y in exact]
    exact = [y.detach().double().requires_grad_() for y in x]
    out, expected = run(x, tree, 64), run(exact, tree, 64)
    assert out.dtype == torch.float32
    weight = torch.randn(out.shape)
    found = torch.autograd.grad((out * weight).sum(), x)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    for a, b in zip([out, *found], [expected, *wanted], strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_form
def test_half_precision_is_computed_in_fp32(form: Form, dtype: torch.dtype) -> None:
    tree = RolloutTree.from_rows([[*range(40), i, 1, 2] for i in range(3)])
    x = form.inputs(tree.n, dtype=dtype)
    wide = [y.detach().float().requires_grad_() for y in x]
    out, expected = run(x, tree, 8), run(wide, tree, 8)
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype))
    weight = torch.randn(out.shape).to(dtype)
    for a, b in zip(
        torch.autograd.grad((out * weight).sum(), x),
        torch.autograd.grad((expected * weight.float()).sum(), wide),
        strict=True,
    ):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b.to(dtype))


def test_autocast_leaves_the_recurrence_alone() -> None:
    tree = RolloutTree.from_rows([[*range(40), i, 1, 2] for i in range(3)])
    x = FORMS["gated delta"].inputs(tree.n, dtype=torch.float32)
    expected = run(x, tree, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(x, tree, 8)
        found = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, expected)
    for a, b in zip(found, torch.autograd.grad(expected.sum(), x), strict=True):
        assert torch.equal(a, b)


@each_form
def test_results_repeat_bit_for_bit(form: Form) -> None:
    tree = RolloutTree.from_rows([[*range(90), i, *range(30)] for i in range(4)])
    x = form.inputs(tree.n, dtype=torch.float32)
    results = []
    for _ in range(2):
        out = run(x, tree, 32)
        results.append((out, *torch.autograd.grad((out * out).sum(), x)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("poisoned_empty")
@each_form
def test_strides_and_unwritten_memory(form: Form) -> None:
    tree = RolloutTree.from_rows([[*range(9), i, *range(5)] for i in range(3)])
    x = form.inputs(tree.n)
    strided = [y.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for y in x]
    results = []
    for y in (x, strided):
        out = run(y, tree, 4)
        assert out.is_contiguous()
        results.append((out, *torch.autograd.grad((out * out).sum(), y)))
    for a, b in zip(*results, strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a, b, rtol=ATOL, atol=ATOL)


@each_form
def test_no_tokens_and_one(form: Form) -> None:
    for rows in ([], [[3]]):
        tree = RolloutTree.from_rows(rows)
        x = form.inputs(tree.n)
        out = run(x, tree, 64)
        gradients = torch.autograd.grad(out.sum(), x)
        assert [y.shape for y in (out, *gradients)] == [y.shape for y in (x[2], *x)]


class _Largest(TorchDispatchMode):
    """The most entries of any tensor that an op gives."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.entries = max(self.entries, x.numel())
        return out


@each_form
def test_nothing_grows_with_the_square_of_the_tokens(form: Form) -> None:
    largest = []
    for length in (600, 1200):
        tree = RolloutTree.from_rows([[*range(length), i, *range(20)] for i in range(2)])
        x = [y.detach() for y in form.inputs(tree.n, dtype=torch.float32)]
        arguments = (*x[:4], x[4] if form.delta else None, *tables(tree), SCALE, 16)
        with _Largest() as seen:
            out = recurrence._forward(*arguments)
            recurrence._backward(out, *arguments)
        largest.append(seen.entries)
        assert seen.entries < tree.n**2 // 4
    assert largest[1] < 2.2 * largest[0]


def test_slices_hold_the_budget() -> None:
    tree = RolloutTree.from_rows([[*range(100), 1000 + i, *range(50)] for i in range(8)])
    made = recurrence_tables(tables(tree)[1], 8, torch.device("cpu"))
    slices = made.slices(5, 8)
    assert max(piece.rows.shape[0] for piece in slices) <= 5
    assert sum(piece.rows.shape[0] for piece in slices) == made.blocks
    own = torch.cat([piece.own_token for piece in slices])
    assert sorted(own.tolist()) == list(range(tree.n))
    # A step per level, or per part of one: as many as the longest path has chunks.
    whole = made.slices(1000, 8)
    assert [len(piece.steps) for piece in whole] == [made.levels] == [-(-151 // 8)]
    assert recurrence_tables(tables(tree)[1], 8, torch.device("cpu")) is made


# ---- contracts --------------------------------------------------------------------------------------------------


@each_form
def test_opcheck(form: Form) -> None:
    tree = RolloutTree.from_rows([[1, 2, 3, 4, 5], [1, 2, 3, 6]])
    x = form.inputs(tree.n)
    others = (None,) * (1 - form.delta)
    torch.library.opcheck(tree_recurrence, (*x, *others, *tables(tree), SCALE, 2))
    plain = [y.detach() for y in x]
    torch.library.opcheck(tree_recurrence_backward, (plain[2], *plain, *others, *tables(tree), SCALE, 2))
    strided = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in plain]
    arguments = (*strided, *others, *tables(tree), SCALE, 2)
    torch.library.opcheck(tree_recurrence_backward, (strided[2], *arguments), test_utils="test_faketensor")


def test_mistakes() -> None:
    tree = RolloutTree.from_rows([[1, 2, 3, 4, 5], [1, 2, 3, 6]])
    end, segments = tables(tree)
    q, k, v, gate, beta = (x.detach() for x in Form(groups=2).inputs(tree.n))
    for wrong, message in [
        ((q[:, :-1], k, v, gate, beta, end, segments), "one packed row"),
        ((q, k, v[:, :, :1], gate, beta, end, segments), "value heads over 2"),
        ((q, k, v, gate[..., :1], beta, end, segments), "gate of shape"),
        ((q, k, v, gate, beta[..., :1], end, segments), "beta of shape"),
        ((q, k, v, gate, beta, end[:-1], segments), "a table of 6 tokens for 5"),
        ((q, k, v, gate, beta, end.flip(0), segments), "not that of the segment table"),
    ]:
        with pytest.raises(ValueError, match=message):
            tree_recurrence(*wrong, SCALE, 4)
    with pytest.raises(ValueError, match="chunk"):
        tree_recurrence(q, k, v, gate, beta, end, segments, SCALE, 0)
    pad = RolloutTree.from_rows([[1, 2, 0]], mask=[[1, 1, 0]], pads="exact")
    with pytest.raises(TreeError, match="without leaf pads"):
        tree_recurrence(q[:, :3], k[:, :3], v[:, :3], gate[:, :3], None, *tables(pad), SCALE, 4)
    for table in (
        [[0, 2, -1, 1]],
        [[1, 2, -1, 2]],
        [[0, 2, 0, 2]],
        [[0, 2, -1, 2], [2, 3, 0, 3]],
        [[0, 0, -1, 0]],
    ):
        with pytest.raises(TreeError, match="segments"):
            RolloutTree.from_segments(table)


@settings(max_examples=60)
@given(row_sets())
def test_a_tree_from_its_segments(rows: list[list[int]]) -> None:
    tree = RolloutTree.from_rows(rows)
    again = RolloutTree.from_segments(tree.segments)
    for name in ("segments", "parent", "depth", "subtree_end", "column"):
        np.testing.assert_array_equal(getattr(again, name), getattr(tree, name))
    assert [path[-1] for path in rows_of(again)] == sorted(
        {path[-1] for path in rows_of(tree) if tree.subtree_end[path[-1]] == path[-1] + 1}
    )


# ---- the dense op -----------------------------------------------------------------------------------------------


def test_dense_rows_equal_transformers() -> None:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    batch, length, form = 3, 150, Form(groups=2, heads=2, d=16, v=8)
    tree = RolloutTree.from_rows(np.arange(batch * length).reshape(batch, length))
    x = form.inputs(tree.n, dtype=torch.float32)
    order = torch.from_numpy(tree.row_index.astype(np.int64))
    dense = [y.detach()[0, order].requires_grad_() for y in x]
    expected = module.torch_chunk_gated_delta_rule(*dense)[0]
    out = tree_recurrence(*x, *tables(tree), form.d**-0.5, 64)
    weight = torch.randn(expected.shape)
    found = torch.autograd.grad((out[0, order] * weight).sum(), x)
    wanted = torch.autograd.grad((expected * weight).sum(), dense)
    torch.testing.assert_close(out[0, order], expected, rtol=2e-5, atol=2e-6)
    for a, b in zip(found, wanted, strict=True):
        assert error(a[0, order], b.double()) < 1e-5


# ---- the convolution --------------------------------------------------------------------------------------------


def conv_inputs(n: int, taps: int, bias: bool, dtype: torch.dtype = torch.float64) -> list[Any]:
    g = torch.Generator().manual_seed(3)
    shapes = [(1, 3, n), (3, taps), (3,)]
    made = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    return made if bias else [*made[:2], None]


@settings(max_examples=60)
@given(row_sets(), st.integers(1, 5), st.booleans(), st.sampled_from(ACTIVATIONS))
def test_convolution_of_rows_alone(rows: list[list[int]], taps: int, bias: bool, activation: str) -> None:
    tree = RolloutTree.from_rows(rows)
    x, weight, b = conv_inputs(tree.n, taps, bias)
    out = tree_causal_conv1d(x, weight, b, *tables(tree), activation)
    assert out.shape == x.shape
    paths = rows_of(tree)
    if not paths:
        return
    theirs = [F.conv1d(F.pad(x[:, :, p], (taps - 1, 0)), weight[:, None], b, groups=3) for p in paths]
    theirs = [F.silu(y) for y in theirs] if activation else theirs
    mine = [out[:, :, p] for p in paths]
    leaves = [y for y in (x, weight, b) if y is not None]
    weights = [torch.randn(y.shape, dtype=torch.float64) for y in mine]
    found, expected = (
        torch.autograd.grad(
            torch.stack([(y * w).sum() for y, w in zip(ys, weights, strict=True)]).sum(), leaves
        )
        for ys in (mine, theirs)
    )
    for a, c in zip([*mine, *found], [*theirs, *expected], strict=True):
        torch.testing.assert_close(a, c, rtol=ATOL, atol=ATOL)
    reference = tree_causal_conv1d_reference(x, weight, b, tree.parent.tolist(), activation)
    torch.testing.assert_close(out, reference)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_contracts(bias: bool, activation: str) -> None:
    tree = RolloutTree.from_rows([[1, 2, 3, 4, 5], [1, 2, 3, 6]])
    x = conv_inputs(tree.n, 4, bias)
    plain = [y if y is None else y.detach() for y in x]
    torch.library.opcheck(tree_causal_conv1d, (*x, *tables(tree), activation))
    torch.library.opcheck(tree_causal_conv1d_backward, (plain[0], *plain, *tables(tree), activation))
    assert torch.autograd.gradcheck(lambda *y: tree_causal_conv1d(*y, *tables(tree), activation), x)
    strided = plain[0].transpose(1, 2).contiguous().transpose(1, 2)
    arguments = (strided, *plain[1:], *tables(tree))
    torch.library.opcheck(tree_causal_conv1d, arguments, test_utils="test_faketensor")
    torch.library.opcheck(tree_causal_conv1d_backward, (strided, *arguments), test_utils="test_faketensor")
    # A weight that is a transposed view: its gradient is contiguous nevertheless, as compilers are told.
    transposed = (strided, strided, plain[1].t().contiguous().t(), plain[2], *tables(tree), activation)
    torch.library.opcheck(tree_causal_conv1d_backward, transposed, test_utils="test_faketensor")
    out = tree_causal_conv1d(strided, *plain[1:], *tables(tree))
    assert out.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(out, tree_causal_conv1d(*plain, *tables(tree)), rtol=ATOL, atol=ATOL)
    assert torch.equal(out, tree_causal_conv1d(strided, *plain[1:], *tables(tree)))
    with pytest.raises(ValueError, match="no activation 'gelu'"):
        tree_causal_conv1d(*plain, *tables(tree), "gelu")
    with pytest.raises(ValueError, match="for weights"):
        tree_causal_conv1d(plain[0][:, :2], *plain[1:], *tables(tree))
    with pytest.raises(ValueError, match="a table of 6"):
        tree_causal_conv1d(plain[0][:, :, :5], *plain[1:], *tables(tree))
    with pytest.raises(ValueError, match="not that of"):
        tree_causal_conv1d(*plain, tables(tree)[0].flip(0), tables(tree)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_convolution_dtypes(dtype: torch.dtype) -> None:
    tree = RolloutTree.from_rows([list(range(50))])
    x, weight, b = conv_inputs(tree.n, 4, True, dtype)
    out = tree_causal_conv1d(x, weight, b, *tables(tree))
    expected = F.conv1d(F.pad(x, (3, 0)), weight[:, None], b, groups=3)
    assert out.dtype == expected.dtype == dtype
    torch.testing.assert_close(out, expected)
    wide = tree_causal_conv1d(*(y.float() for y in (x, weight, b)), *tables(tree), "silu")
    torch.testing.assert_close(tree_causal_conv1d(x, weight, b, *tables(tree), "silu"), wide.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert tree_causal_conv1d(x, weight, b, *tables(tree), "silu").dtype == torch.bfloat16


@pytest.mark.gpu
@each_form
def test_the_gpu_gives_what_the_cpu_gives(form: Form) -> None:
    tree = RolloutTree.from_rows([[*range(90), i, *range(30)] for i in range(4)])
    end, segments = tables(tree)
    x = form.inputs(tree.n, -5.0)
    there = [y.detach().cuda().requires_grad_() for y in x]
    results = []
    for y, ends in ((x, end), (there, end.cuda()), (there, end.cuda())):
        out = tree_recurrence(*y[:4], y[4] if form.delta else None, ends, segments, SCALE, 32)
        results.append([z.cpu() for z in (out, *torch.autograd.grad((out * out).sum(), y))])
    for a, b, c in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=ATOL, atol=ATOL)
        assert torch.equal(b, c)


@pytest.mark.gpu
def test_the_convolution_on_the_gpu() -> None:
    tree = RolloutTree.from_rows([[*range(90), i, *range(30)] for i in range(4)])
    end, segments = tables(tree)
    x = conv_inputs(tree.n, 4, True)
    there = [y.detach().cuda().requires_grad_() for y in x]
    results = []
    for y, ends in ((x, end), (there, end.cuda()), (there, end.cuda())):
        out = tree_causal_conv1d(*y, ends, segments)
        results.append([z.cpu() for z in (out, *torch.autograd.grad((out * out).sum(), y))])
    for a, b, c in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=ATOL, atol=ATOL)
        assert torch.equal(b, c)
