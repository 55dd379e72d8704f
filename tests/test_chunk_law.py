"""The law for recurrences: rows run alone, against the packed tree in rounds. And the chunk reference itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import chunk_twin, shared_rollouts
from tests.strategies import Case, cases
from tests.test_chunks import NAMED, build, from_rows
from treecompile.runtime.chunks import chunk_plan
from treecompile.runtime.errors import OptionError
from treecompile.runtime.ops.chunk_reference import ChunkResult, recurrence_in_chunks
from treecompile.runtime.ops.chunk_rounds import round_tables, run_rounds
from treecompile.runtime.rounds import States
from treecompile.runtime.tree import RolloutTree

H, G, D, V = 2, 1, 4, 3
ATOL = 1e-10


# What the linear attentions of models are: a decay per channel, the delta rule.
FORMS = {"gated delta rule": (False, True), "KDA": (True, True), "SSD": (False, False), "GLA": (True, False)}
each_form = pytest.mark.parametrize("form", FORMS)


def inputs(tokens: int, form: str = "gated delta rule", seed: int = 0) -> list[Tensor]:
    """Random q, k, v, gate and, for the delta rule, beta in fp64, keys of unit length."""
    vector, delta = FORMS[form]
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, G, D, generator=g, dtype=torch.float64) for _ in range(2))
    v = torch.randn(tokens, H, V, generator=g, dtype=torch.float64)
    gate = -torch.rand(tokens, H, *([D] if vector else []), generator=g, dtype=torch.float64)
    beta = [torch.rand(tokens, H, generator=g, dtype=torch.float64)] if delta else []
    return [x.requires_grad_() for x in (q, k / k.norm(dim=-1, keepdim=True), v, gate, *beta)]


def chunks(x: Sequence[Tensor], *args: Tensor, chunk: int) -> ChunkResult:
    """`recurrence_in_chunks` of inputs with or without beta."""
    return recurrence_in_chunks(*x[:4], x[4] if len(x) > 4 else None, *args, chunk=chunk)


def slow(x: Sequence[Tensor], initial: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The recurrence token by token: outputs, and the state after every token."""
    q, k, v, gate = x[:4]
    state, outs, states = initial, [], []
    for t in range(len(v)):
        key, query = (y[t].repeat_interleave(H // G, dim=0) for y in (k, q))
        state = state * gate[t].exp().view(H, -1, 1)
        update = v[t]
        if len(x) > 4:
            update = x[4][t][:, None] * (update - torch.einsum("hdv,hd->hv", state, key))
        state = state + torch.einsum("hd,hv->hdv", key, update)
        outs.append(torch.einsum("hdv,hd->hv", state, query) * D**-0.5)
        states.append(state)
    return torch.stack(outs), states


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=ATOL, atol=ATOL)


# ---- the reference -----------------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_the_reference_equals_the_recurrence(chunk: int, form: str) -> None:
    sizes = [5, 1, 8, 3]
    x = inputs(sum(sizes), form)
    g = torch.Generator().manual_seed(1)
    initial = torch.randn(len(sizes), H, D, V, generator=g, dtype=torch.float64).requires_grad_()
    offsets = torch.tensor([0, *np.cumsum(sizes).tolist()])
    result = chunks(x, offsets, initial, chunk=chunk)
    outs, finals, boundaries = [], [], []
    for i, size in enumerate(sizes):
        begin = int(offsets[i])
        out, states = slow([y[begin : begin + size] for y in x], initial[i])
        outs.append(out)
        finals.append(states[-1])
        boundaries += [states[min(end, size) - 1] for end in range(chunk, size + chunk, chunk)]
    expected = ChunkResult(torch.cat(outs), torch.stack(finals), torch.stack(boundaries))
    weights = [torch.randn(y.shape, generator=g, dtype=torch.float64) for y in expected]
    gradients = []
    for found in (result, expected):
        loss = sum((y * w).sum() for y, w in zip(found, weights, strict=True))
        assert isinstance(loss, Tensor)
        gradients.append(torch.autograd.grad(loss, [*x, initial]))
    for a, b in zip((*result, *gradients[0]), (*expected, *gradients[1]), strict=True):
        close(a, b)


def test_the_reference_in_other_dtypes_and_without_tokens() -> None:
    x = [y.detach() for y in inputs(10)]
    exact = recurrence_in_chunks(*x, chunk=4)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        result = recurrence_in_chunks(*(y.to(dtype) for y in x), chunk=4)
        assert result.out.dtype == dtype
        assert result.final.dtype == result.boundary.dtype == torch.float32
        torch.testing.assert_close(result.out.double(), exact.out, rtol=tolerance, atol=tolerance)
    none = recurrence_in_chunks(*(y[:0] for y in x))
    assert [tuple(y.shape) for y in none] == [(0, H, V), (0, H, D, V), (0, H, D, V)]


def test_wrong_offsets() -> None:
    x = inputs(4)
    for wrong in ([0, 3], [1, 4], [0, 2, 2, 4], [0, 3, 2, 4]):
        with pytest.raises(OptionError, match="offsets"):
            recurrence_in_chunks(*x, torch.tensor(wrong))
    with pytest.raises(OptionError, match="chunk"):
        recurrence_in_chunks(*x, chunk=0)


# ---- the law -----------------------------------------------------------------------------------------------


def law(
    case: Case,
    tree: RolloutTree,
    chunk: int,
    states: States,
    alignment: Literal["trajectory", "branch"],
    form: str = "gated delta rule",
) -> None:
    """Outputs, final states and gradients of rows run alone and of the tree."""
    rows = chunk_twin.trajectories(case, tree.row_index)
    if not rows:
        return
    # Trajectories of the tree are in the order of their start, those of the twin by row and document.
    plan = chunk_plan(tree, chunk, alignment=alignment, row_states=True)
    ends = [row[-1] for row in rows]
    place = {end: i for i, end in enumerate(tree._last.tolist())}
    x = inputs(tree.n, form)
    zero = torch.zeros(H, D, V, dtype=torch.float64)

    def op(packed: Sequence[Tensor], offsets: Tensor, initial: Tensor) -> ChunkResult:
        result = chunks(packed, offsets, initial, chunk=chunk)
        return result if states == "boundary" else result._replace(boundary=torch.full_like(zero, torch.nan))

    out, final = run_rounds(round_tables(plan, zero.device, states), op, x, zero)
    assert final is not None
    pads = torch.from_numpy(plan.owner < 0)
    assert bool((out[pads] == 0).all())
    tree_out = [out[torch.tensor(row)] for row in rows]
    tree_final = [final[place[end]] for end in ends]
    dense = [chunks([y[torch.tensor(row)] for y in x], chunk=chunk) for row in rows]
    g = torch.Generator().manual_seed(2)
    weights = [torch.randn(len(row), H, V, generator=g, dtype=torch.float64) for row in rows]
    others = [torch.randn(H, D, V, generator=g, dtype=torch.float64) for _ in rows]

    def gradients(outs: list[Tensor], finals: list[Tensor]) -> tuple[Tensor, ...]:
        terms = [(y * w).sum() for y, w in zip([*outs, *finals], [*weights, *others], strict=True)]
        return torch.autograd.grad(torch.stack(terms).sum(), x, materialize_grads=True)

    for a, b in zip(tree_out, dense, strict=True):
        close(a, b.out)
    for a, b in zip(tree_final, dense, strict=True):
        close(a, b.final[0])
    mine, theirs = (
        gradients(tree_out, tree_final),
        gradients([y.out for y in dense], [y.final[0] for y in dense]),
    )
    for found, expected in zip(mine, theirs, strict=True):
        close(found, expected)


@settings(max_examples=60, deadline=None)
@given(
    cases(max_rows=6, max_length=14),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(["boundary", "final"]),
    st.sampled_from(["trajectory", "branch"]),
    st.sampled_from(sorted(FORMS)),
)
def test_random_trees_obey_the_law(
    case: Case, chunk: int, states: States, alignment: Literal["trajectory", "branch"], form: str
) -> None:
    law(case, build(case), chunk, states, alignment, form)


@pytest.mark.parametrize("states", ["boundary", "final"])
@pytest.mark.parametrize(
    "name", ["one token", "two roots", "comb", "fork at 63", "fork at 64", "fork at 129"]
)
def test_named_trees_obey_the_law(name: str, states: States) -> None:
    case, tree = from_rows(NAMED[name])
    law(case, tree, 64, states, "trajectory")


@shared_rollouts.needs_shared_rollouts
@pytest.mark.parametrize("states", ["boundary", "final"])
def test_generated_edge_cases_obey_the_law(states: States) -> None:
    case, tree = from_rows([record["input_ids"] for record in shared_rollouts.synthetic("edge")])
    law(case, tree, 64, states, "trajectory")


def test_an_empty_tree_is_refused() -> None:
    plan = chunk_plan(RolloutTree.from_rows([]))
    with pytest.raises(OptionError, match="needs no recurrence"):
        round_tables(plan, torch.device("cpu"))


@settings(max_examples=40, deadline=None)
@given(
    cases(), st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 2, 4]), st.sampled_from(["boundary", "final"])
)
def test_tails_continue_a_convolution(case: Case, chunk: int, width: int, states: States) -> None:
    """A causal convolution over each sequence and the tail before it gives what rows run alone give."""
    tree = build(case)
    plan = chunk_plan(tree, chunk)
    rng = np.random.default_rng(0)
    taps, x = rng.integers(1, 100, width), rng.integers(1, 1000, tree.n + 1)
    x[-1] = 0  # what a token before the first one reads
    tails, found = plan.tails(width), np.zeros(tree.n, np.int64)
    for call in plan.calls(states):
        for begin, end in itertools.pairwise(call.offsets.tolist()):
            head = call.block[np.searchsorted(call.block_offsets, begin)]
            tokens = np.concatenate([tails[head], call.index[begin:end]])
            out = np.convolve(x[tokens], taps)[width - 1 : len(tokens)]
            own = call.owned[begin:end]
            found[call.index[begin:end][own]] = out[own]
    for row in chunk_twin.trajectories(case, tree.row_index):
        np.testing.assert_array_equal(found[row], np.convolve(x[row], taps)[: len(row)])
