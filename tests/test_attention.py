"""`tree_attention`: the reference against single paths, pieces against the reference, bounds of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests import shared_rollouts
from tests.strategies import Case, cases
from treecompile.runtime.ops import (
    PieceCount,
    attention_kernels,
    attention_launch,
    attention_pieces,
    attention_plan,
    attention_router,
    count_pieces,
    plan_header,
    plan_pieces,
    tree_attention,
    tree_attention_backward,
    tree_attention_reference,
)
from treecompile.runtime.ops.attention_kernels import CudnnKernel, Kernel, Tile
from treecompile.runtime.ops.attention_launch import Request, launch_of
from treecompile.runtime.ops.attention_math import tile_backward, tile_forward, visible_pairs
from treecompile.runtime.tree import RolloutTree


@dataclass(frozen=True)
class Packed:
    """The tree tensors of the op."""

    subtree_end: Tensor
    column: Tensor
    segments: Tensor
    pieces: Tensor

    @property
    def tokens(self) -> int:
        return self.subtree_end.shape[0]

    def arguments(self) -> tuple[Tensor, ...]:
        host = self.segments.cpu()
        return self.subtree_end, self.column, self.segments, host, self.pieces, self.segments.new_empty(0)

    def to(self, device: str) -> Packed:
        return replace(
            self,
            subtree_end=self.subtree_end.to(device),
            column=self.column.to(device),
            segments=self.segments.to(device),
        )


def packed(tree: RolloutTree, tile: int = 64, known_columns: bool = True) -> Packed:
    segments = np.ascontiguousarray(tree.segments, np.int32)
    column = np.asarray(tree.column, np.int32)
    return Packed(
        torch.from_numpy(np.array(tree.subtree_end, np.int32)),
        torch.from_numpy(column),
        torch.from_numpy(segments),
        torch.from_numpy(plan_pieces(segments, column if known_columns else None, tile=tile)),
    )


@contextmanager
def every_kind_of_piece() -> Iterator[None]:
    """Calls cost nothing and blocks are tiny: small trees are cut like large ones."""
    with (
        mock.patch.object(attention_plan, "CALL_PAIRS", 0),
        mock.patch.object(attention_launch, "STRIP", 3),
        mock.patch.object(attention_launch, "BLOCK", (3, 4)),
        mock.patch.object(attention_launch, "BATCH_AREA", 40),
        mock.patch.object(attention_pieces, "MASK_PAIRS", 1024),
        mock.patch.object(attention_pieces, "LOGIT_PAIRS", 1024),
    ):
        clear_caches()
        yield
    clear_caches()


def clear_caches() -> None:
    attention_launch._cached_launch.cache_clear()
    attention_pieces._cached_index.cache_clear()


@dataclass(frozen=True)
class Shape:
    """Heads and sizes of one attention, and its options."""

    heads: int = 2
    group: int = 1
    qk_size: int = 4
    v_size: int = 4
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def options(self) -> tuple[Any, ...]:
        return 0.7, self.softcap, self.window

    def inputs(
        self, tokens: int, dtype: torch.dtype = torch.float64, grad: bool = False, device: str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Strided q, k, v as models make them, and sinks."""

        def draw(*size: int) -> Tensor:
            return torch.randn(size).to(device, dtype).requires_grad_(grad)

        q = draw(1, tokens, self.heads * self.group, self.qk_size).transpose(1, 2)
        k = draw(1, tokens, self.heads, self.qk_size).transpose(1, 2)
        v = draw(1, tokens, self.heads, self.v_size).transpose(1, 2)
        sinks = draw(self.heads * self.group) if self.sinks else None
        return q, k, v, sinks


shapes = st.builds(
    Shape,
    heads=st.integers(1, 2),
    group=st.sampled_from([1, 1, 2, 3]),
    qk_size=st.sampled_from([4, 6]),
    v_size=st.sampled_from([4, 3, 8]),
    window=st.sampled_from([0, 0, 1, 2, 4, 9]),
    softcap=st.sampled_from([0.0, 0.0, 1.5]),
    sinks=st.booleans(),
)


def tree_of(case: Case, window: int = 0) -> RolloutTree:
    return RolloutTree.from_grid(
        case.keys,
        visible=case.visible,
        exact=case.exact,
        documents=case.documents,
        column_key="step" if window else None,
    )


def single_path(
    q: Tensor, k: Tensor, v: Tensor, column: Tensor, sinks: Tensor | None, shape: Shape
) -> Tensor:
    """One trajectory alone: PyTorch attention where it has the formula, else a softmax with a sink column."""
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale, softcap, window = shape.options
    if not (softcap or window or shape.sinks):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    logits = q @ k.mT * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    distance = column[:, None] - column[None, :]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    hidden |= distance >= (window or math.inf)
    logits = logits.masked_fill(hidden, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(1, -1, length, 1)], -1)
    alone: Tensor = logits.softmax(-1)[..., :length] @ v
    return alone


def trajectories(case: Case) -> Iterator[tuple[int, list[int], list[int]]]:
    """Row, columns of the kept positions, and columns of the leaf pads, of every trajectory."""
    batch, length = case.shape
    everything = np.ones((batch, length), bool)
    visible = everything if case.visible is None else case.visible
    exact = ~everything if case.exact is None else case.exact & ~visible
    documents = np.zeros((batch, length), int) if case.documents is None else case.documents
    for row in range(batch):
        for document in sorted(set(documents[row].tolist())):
            here = documents[row] == document
            yield (
                row,
                np.flatnonzero(here & visible[row]).tolist(),
                np.flatnonzero(here & exact[row]).tolist(),
            )


@given(case=cases(), shape=shapes)
def test_reference_is_each_path_alone(case: Case, shape: Shape) -> None:
    tree = tree_of(case, shape.window)
    tensors = packed(tree)
    q, k, v, sinks = shape.inputs(tree.n)
    out, lse = tree_attention_reference(q, k, v, tensors.subtree_end, tensors.column, sinks, *shape.options)
    row_index = torch.as_tensor(np.asarray(tree.row_index, np.int64))
    seen = torch.zeros(tree.n, dtype=torch.bool)
    for row, kept, pads in trajectories(case):
        path = row_index[row, kept]
        columns = torch.tensor(kept)
        if kept:
            alone = single_path(q[:, :, path], k[:, :, path], v[:, :, path], columns, sinks, shape)
            torch.testing.assert_close(out[:, :, path], alone)
            seen[path] = True
        for pad in pads:
            token = int(row_index[row, pad])
            above = path[columns < pad]
            check_pad(q, k, v, sinks, out, lse, token, above, shape, tensors.column)
            seen[token] = True
    assert seen.all()


def check_pad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    token: int,
    above: Tensor,
    shape: Shape,
    column: Tensor,
) -> None:
    """A leaf pad sees its ancestors but not itself; alone it gives 0."""
    scale, softcap, window = shape.options
    near = above[column[token] - column[above] < window] if window else above
    if not len(near):
        assert not out[:, :, token].any()
        assert (lse[:, :, token] == -math.inf).all()
        return
    group = q.shape[1] // k.shape[1]
    logits = (q[:, :, [token]] @ k[:, :, near].repeat_interleave(group, 1).mT) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1)], -1)
    weights = logits.softmax(-1)[..., : len(near)]
    torch.testing.assert_close(out[:, :, [token]], weights @ v[:, :, near].repeat_interleave(group, 1))


def gradients(
    function: Callable[..., tuple[Tensor, Tensor]], inputs: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    wanted = [x for x in leaves if x is not None]
    return out.detach(), lse.detach(), list(torch.autograd.grad(out, wanted, grad.to(out.dtype)))


def by_pieces(tensors: Packed, shape: Shape) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = tree_attention(q, k, v, *tensors.arguments(), sinks, *shape.options)
        return found

    return run


def by_reference(tensors: Packed, shape: Shape) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        tree = tensors.subtree_end, tensors.column
        return tree_attention_reference(q, k, v, *tree, sinks, *shape.options)

    return run


def assert_same_as_reference(tensors: Packed, shape: Shape) -> None:
    inputs = shape.inputs(tensors.tokens)
    grad = torch.randn(1, shape.heads * shape.group, tensors.tokens, shape.v_size, dtype=torch.float64)
    out, lse, grads = gradients(by_pieces(tensors, shape), inputs, grad)
    again = gradients(by_pieces(tensors, shape), inputs, grad)
    expected = gradients(by_reference(tensors, shape), inputs, grad)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    for found, wanted, repeated in zip(
        (out, lse, *grads), (*expected[:2], *expected[2]), (*again[:2], *again[2]), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(found, repeated)


@given(
    case=cases(max_rows=9, max_length=16), shape=shapes, tile=st.sampled_from([1, 2, 5]), known=st.booleans()
)
@settings(max_examples=60)
def test_pieces_are_the_reference(case: Case, shape: Shape, tile: int, known: bool) -> None:
    with every_kind_of_piece():
        assert_same_as_reference(packed(tree_of(case, shape.window), tile, known), shape)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(group=2, v_size=3, sinks=True),
        Shape(window=40),
        Shape(window=40, softcap=2.0, sinks=True),
        Shape(softcap=2.0, group=2, v_size=6),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["search", "comb", "agent", "chain", "star"])
def test_pieces_on_larger_trees(name: str, shape: Shape) -> None:
    assert_same_as_reference(packed(TREES[name](0)), shape)


class StandIn(CudnnKernel):
    """cuDNN's kernels on the CPU: its ops by formulas, masked pieces too, and squares of few lengths."""

    def work_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def span(self, length: int) -> int:
        return -(-length // 7) * 7

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        if tile.visible is not None:
            return Kernel.forward(self, q, k, v, tile)
        return super().forward(q, k, v, tile)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        if tile.visible is not None:
            return Kernel.backward(self, grad, q, k, v, out, lse, tile)
        return super().backward(grad, q, k, v, out, lse, tile)


class StandInOps:
    """The two ops of cuDNN's attention. Its plans are found by q, k and v alone: layouts must follow from shapes."""

    def check(self, *operands: Tensor) -> None:
        for x in operands:
            _, heads, length, size = x.shape
            assert x.stride() == (length * heads * size, size, heads * size, 1)
            assert size % 8 == 0

    def mask(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        everything = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        return everything.tril() if causal else everything

    def _scaled_dot_product_cudnn_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: None,
        with_lse: bool,
        dropout: float,
        causal: bool,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, None]:
        self.check(q, k, v)
        assert with_lse
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out, lse = tile_forward(q, k, v, self.mask(q, k, causal), scale, 0.0)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse.unsqueeze(-1), None

    def _scaled_dot_product_cudnn_attention_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *rest: Any,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        *_, queries, keys, dropout, causal = rest
        self.check(grad, q, k, v, out)
        assert (queries, keys, dropout) == (q.shape[2], k.shape[2], 0.0)
        assert lse.shape == (*q.shape[:3], 1)
        assert lse.is_contiguous()
        group, heads = q.shape[1] // k.shape[1], k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        delta, mask = (grad * out).sum(-1), self.mask(q, k, causal)
        dq, dk, dv = tile_backward(grad, q, k, v, delta, lse[..., 0], mask, scale, 0.0)
        return dq, dk.unflatten(1, (heads, group)).sum(2), dv.unflatten(1, (heads, group)).sum(2)


@contextmanager
def stand_in() -> Iterator[None]:
    """Pieces run on `StandIn`."""
    with (
        mock.patch.object(attention_kernels, "aten", StandInOps()),
        mock.patch.object(attention_pieces, "choose_kernel", return_value=StandIn()),
    ):
        yield


@given(
    case=cases(max_rows=9, max_length=16), shape=shapes, tile=st.sampled_from([1, 2, 5]), known=st.booleans()
)
@settings(max_examples=60)
def test_cudnn_pieces_are_the_reference(case: Case, shape: Shape, tile: int, known: bool) -> None:
    with every_kind_of_piece(), stand_in():
        assert_same_as_reference(
            packed(tree_of(case, shape.window), tile, known), replace(shape, softcap=0.0)
        )


@pytest.mark.parametrize("shape", [Shape(), Shape(heads=1, group=2, v_size=12, sinks=True)], ids=str)
@pytest.mark.parametrize("name", ["comb", "agent", "chain", "apart"])
def test_cudnn_pieces_on_larger_trees(name: str, shape: Shape) -> None:
    """Few lengths: squares reach into what comes behind them, and behind the last token."""
    rows = [list(range(first, first + length)) for first, length in ((0, 83), (100, 101), (300, 97))]
    tree = RolloutTree.from_rows(rows) if name == "apart" else TREES[name](0)
    with stand_in():
        assert_same_as_reference(packed(tree), shape)


def test_cudnn_lengths_are_few() -> None:
    kernel = CudnnKernel()
    spans = [kernel.span(length) for length in range(1, 40_000)]
    assert all(
        length <= span <= max(length * 17 / 16, 64 * -(-length // 64)) for length, span in enumerate(spans, 1)
    )
    assert len({span for span in spans if 8192 < span <= 16384}) == 16
    assert spans == sorted(spans)
    assert kernel.sizes(60, 192) == (64, 192)


def test_columns_that_do_not_grow() -> None:
    """A window over columns that go backwards along a path: only the masks decide."""
    tree = TREES["comb"](0)
    tensors = packed(tree)
    column = torch.from_numpy(np.random.default_rng(0).integers(0, 50, tree.n).astype(np.int32))
    tensors = replace(
        tensors,
        column=column,
        pieces=torch.from_numpy(plan_pieces(tensors.segments.numpy(), column.numpy(), tile=16)),
    )
    assert_same_as_reference(tensors, Shape(window=20))


# -- trees --


def rows_of(depth: int, fan: int, low: int, high: int, seed: int, keep: float = 1.0) -> list[list[int]]:
    """Root-to-leaf rows of a random tree with segments of low..high tokens."""
    rng = np.random.default_rng(seed)
    open_paths = [rng.integers(0, 99, 40).tolist()]
    rows = []
    for _ in range(depth):
        grown = [
            [*path, child, *rng.integers(0, 99, rng.integers(low, high + 1) - 1).tolist()]
            for path in open_paths
            for child in range(fan)
        ]
        going = rng.random(len(grown)) < keep
        rows += [path for path, on in zip(grown, going, strict=True) if not on]
        open_paths = [path for path, on in zip(grown, going, strict=True) if on][:200]
    return rows + open_paths


def search(seed: int, size: int = 5) -> RolloutTree:
    """Segments of 1-5 tokens, as in tree search over short thoughts."""
    return RolloutTree.from_rows(rows_of(size, 4, 1, 5, seed, keep=0.8))


def comb(levels: int, trunk: int, tooth: int, seed: int) -> RolloutTree:
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    path: list[int] = []
    for _ in range(levels):
        rows.append(path + rng.integers(0, 10**6, tooth).tolist())
        path = path + rng.integers(0, 10**6, trunk).tolist()
    return RolloutTree.from_rows(rows)


def agent(seed: int) -> RolloutTree:
    """Few large segments, off every boundary."""
    return RolloutTree.from_rows(rows_of(3, 2, 50, 130, seed))


def star(seed: int) -> RolloutTree:
    rng = np.random.default_rng(seed)
    return RolloutTree.from_rows([[7] * 9 + [i, *rng.integers(0, 99, i % 40).tolist()] for i in range(40)])


TREES: dict[str, Callable[[int], RolloutTree]] = {
    "search": search,
    "comb": lambda seed: comb(60, 3, 5, seed),
    "agent": agent,
    "chain": lambda seed: RolloutTree.from_rows([list(range(300))]),
    "star": star,
}


# -- the plan --


def assert_bounds(tree: RolloutTree, waste: float, tile: int = 64) -> PieceCount:
    segments = np.asarray(tree.segments)
    pieces = plan_pieces(segments, np.asarray(tree.column), tile=tile)
    count = count_pieces(segments, pieces)
    launch = launch_of(pieces, segments.astype(np.int32), Request(0, False, 1 << 20))
    calls = (2 + math.log2(max(tree.n, 2))) * tree.n / tile + 1
    assert count.causal + count.full <= calls
    assert launch.calls <= count.causal + count.full + 40 + launch.pairs / 2**20
    assert count.computed <= waste * count.useful + tree.n * tile
    assert launch.pairs <= count.computed * 1.3 + 256 * 256
    check_cover(tree, pieces)
    return count


def check_cover(tree: RolloutTree, pieces: NDArray[np.int32]) -> None:
    """Diagonal pieces partition the tokens; on small trees, every visible pair is covered exactly once."""
    diagonal = pieces[1:][pieces[1:, 5] == 1]
    assert (
        diagonal[:, 1:3].reshape(-1).tolist()
        == [
            0,
            *np.repeat(diagonal[1:, 1], 2).tolist(),
            tree.n,
        ][: 2 * len(diagonal)]
    )
    if tree.n > 2500:
        return
    q, k = np.arange(tree.n)[:, None], np.arange(tree.n)[None, :]
    visible = (k <= q) & (q < np.asarray(tree.subtree_end)[None, :])
    covered = np.zeros((tree.n, tree.n), np.int8)
    for kind, q_start, q_end, k_start, k_end, _ in pieces[1:].tolist():
        block = np.ones((q_end - q_start, k_end - k_start), bool)
        if kind == attention_plan.CAUSAL:
            block = np.tril(block)
        if kind == attention_plan.TILE:
            block = visible[q_start:q_end, k_start:k_end]
        covered[q_start:q_end, k_start:k_end] += block
    assert np.array_equal(covered, visible)


@pytest.mark.parametrize("tile", [16, 64, 256])
@pytest.mark.parametrize("name", sorted(TREES))
def test_plan_bounds(name: str, tile: int) -> None:
    assert_bounds(TREES[name](1), 1.3, tile)


@given(case=cases(max_rows=9, max_length=16), tile=st.sampled_from([1, 3, 64]))
def test_plan_covers_any_tree(case: Case, tile: int) -> None:
    tree = tree_of(case)
    check_cover(tree, plan_pieces(tree.segments, tile=tile))
    with mock.patch.object(attention_plan, "CALL_PAIRS", 0):
        check_cover(tree, plan_pieces(tree.segments, tile=tile))


@pytest.mark.parametrize("tokens", [1, 5, 64, 1000])
def test_a_chain_is_one_causal_call(tokens: int) -> None:
    tree = RolloutTree.from_rows([list(range(tokens)), list(range(tokens))])
    assert plan_pieces(tree.segments)[1:].tolist() == [[attention_plan.CAUSAL, 0, tokens, 0, tokens, 1]]
    assert count_pieces(tree.segments, plan_pieces(tree.segments)).computed == tokens * (tokens + 1) // 2


@pytest.mark.parametrize("levels", [40, 600])
@pytest.mark.parametrize(("trunk", "tooth"), [(1, 1), (3, 5), (5, 1)])
def test_plan_of_combs(levels: int, trunk: int, tooth: int) -> None:
    count = assert_bounds(comb(levels, trunk, tooth, 0), 1.5)
    assert count.causal + count.full <= 2 + levels * (trunk + tooth) / 60


def test_plan_of_tree_search() -> None:
    """Thousands of segments of 1-5 tokens: about one call per 64 tokens, little waste."""
    tree = search(0, size=12)
    assert len(tree.segments) > 1500
    count = assert_bounds(tree, 2.5)
    assert count.causal + count.full <= 10 + tree.n / 64


@shared_rollouts.needs_shared_rollouts
def test_plan_of_recorded_rollouts() -> None:
    """All root-to-leaf paths of 20 puzzles, agent trials, segment-wise sampling: waste of a few percent."""
    search_rows = shared_rollouts.load("game24_tot")
    puzzles = list(dict.fromkeys(row["group"] for row in search_rows))[:20]
    rows = [row["input_ids"] for row in search_rows if row["group"] in puzzles]
    count = assert_bounds(RolloutTree.from_rows(rows), 1.1)
    assert count.computed <= 1.1 * count.useful
    assert count.causal + count.full <= 250
    agents = RolloutTree.from_rows([row["input_ids"] for row in shared_rollouts.load("tau_airline_small")])
    count = assert_bounds(agents, 1.01)
    assert count.computed <= 1.01 * count.useful
    assert count.causal + count.full <= 2 * len(agents.segments)
    sampled = [row["input_ids"] for row in shared_rollouts.synthetic("treepo") if row["group"] == "0"]
    count = assert_bounds(RolloutTree.from_rows(sampled), 1.01)
    assert count.causal + count.full <= 40


def test_a_plan_by_its_first_row() -> None:
    """Pieces that run although they were not planned for give the same launches."""
    for name in ("agent", "comb"):
        tree = TREES[name](0)
        segments, column = np.asarray(tree.segments, np.int32), np.asarray(tree.column)
        plan, header = plan_pieces(segments, column), plan_header(segments, column)
        assert header.tolist() == plan[:1].tolist()
        for window in (0, 40):
            request = Request(window, False, 1 << 20)
            assert str(launch_of(plan, segments, request)) == str(launch_of(header, segments, request))


def test_plan_refuses_what_is_no_segment_table() -> None:
    with pytest.raises(ValueError, match="ordered by start"):
        plan_pieces([[3, 5, -1, 5], [0, 3, -1, 3]])
    with pytest.raises(ValueError, match="tile"):
        plan_pieces([[0, 3, -1, 3]], tile=0)
    with pytest.raises(ValueError, match="plan_pieces"):
        launch_of(np.zeros((0, 6), np.int32), np.zeros((0, 4), np.int32), Request(0, False, 1))
    tensors = packed(TREES["chain"](0))
    q = torch.randn(1, 1, 7, 4)
    with pytest.raises(ValueError, match="300 tokens"):
        tree_attention(q, q, q, *tensors.arguments(), None, 1.0, 0.0, 0)


# -- memory --


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that any op returns, in elements."""

    elements = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                # Storage, not shape: expanded views take no memory.
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("shape", [Shape(), Shape(window=300), Shape(softcap=2.0)], ids=str)
@pytest.mark.parametrize("name", ["comb", "search", "chain"])
def test_no_square_of_tokens(name: str, shape: Shape) -> None:
    trees = {
        "comb": lambda: comb(340, 3, 5, 0),
        "search": lambda: search(0, size=11),
        "chain": lambda: RolloutTree.from_rows([list(range(2600))]),
    }
    tensors = packed(trees[name]())
    assert tensors.tokens > 2400
    q, k, v, sinks = shape.inputs(tensors.tokens, torch.float32)
    tree = (*tensors.arguments(), sinks, *shape.options)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        out, lse = tree_attention(q, k, v, *tree)
        tree_attention_backward(torch.randn_like(out), q, k, v, out, lse, *tree)
    assert largest.elements < tensors.tokens**2 / 4


# -- numbers --


def dense_bf16(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)


@pytest.mark.parametrize("units", [False, True], ids=["fp32 kernel", "bf16 kernel"])
@pytest.mark.parametrize("name", ["agent", "search"])
def test_bf16_is_as_exact_as_pytorch(name: str, units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_has_matrix_units", lambda: units)
    tensors, shape = packed(TREES[name](0)), Shape(qk_size=32, v_size=32)
    q, k, v, _ = shape.inputs(tensors.tokens, torch.bfloat16)
    grad = torch.randn(1, 2, tensors.tokens, 32).bfloat16()
    exact = gradients(by_reference(tensors, shape), (q.double(), k.double(), v.double(), None), grad)
    found = gradients(by_pieces(tensors, shape), (q, k, v, None), grad)
    visible = visible_pairs(tensors.subtree_end, tensors.column, 0)
    plain = gradients(
        lambda a, b, c, _: (dense_bf16(a, b, c, visible, shape.options[0]), a.detach()), (q, k, v, None), grad
    )
    assert found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32
    pairs = zip((found[0], *found[2]), (plain[0], *plain[2]), (exact[0], *exact[2]), strict=True)
    for mine, theirs, true in pairs:
        error, null = ((x.double() - true).norm() / true.norm() for x in (mine, theirs))
        assert error <= 2 * null


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    tensors, shape = packed(TREES["star"](0)), Shape(group=2, sinks=True)
    q, k, v, sinks = shape.inputs(tensors.tokens, dtype)
    grad = torch.randn(1, 4, tensors.tokens, 4).to(dtype)
    out, lse, grads = gradients(by_pieces(tensors, shape), (q, k, v, sinks), grad)
    double = tuple(None if x is None else x.double() for x in (q, k, v, sinks))
    exact = gradients(by_reference(tensors, shape), double, grad)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert [g.dtype for g in grads] == [dtype] * 4
    for mine, true in zip((out, *grads), (exact[0], *exact[2]), strict=True):
        assert (mine.double() - true).norm() <= 8 * torch.finfo(dtype).eps * true.norm()


@pytest.mark.parametrize(
    "shape", [Shape(group=2, v_size=3, sinks=True), Shape(window=3, softcap=2.0)], ids=str
)
def test_gradcheck(shape: Shape) -> None:
    tree = RolloutTree.from_rows([[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3, 7], [8, 9]])
    tensors = packed(tree, tile=2)
    inputs = tuple(x.requires_grad_() for x in shape.inputs(tree.n) if x is not None)

    def run(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        return lambda q, k, v, sinks=None: function(q, k, v, sinks)[0]

    assert torch.autograd.gradcheck(run(by_reference(tensors, shape)), inputs)
    assert torch.autograd.gradcheck(run(by_pieces(tensors, shape)), inputs)
    with every_kind_of_piece():
        assert torch.autograd.gradcheck(run(by_pieces(packed(tree, tile=2), shape)), inputs)


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_one(tokens: int) -> None:
    table = np.array([[0, 1, -1, 1]] * tokens, np.int32).reshape(-1, 4)
    tensors = Packed(
        torch.ones(tokens, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int32),
        torch.from_numpy(table),
        torch.from_numpy(plan_pieces(table, np.zeros(tokens))),
    )
    for shape in (Shape(sinks=True), Shape(group=2, softcap=1.0, window=3)):
        assert_same_as_reference(tensors, shape)


@pytest.mark.usefixtures("poisoned_empty")
def test_pads_that_see_nothing() -> None:
    """Left pads have no ancestors: 0, -inf and no gradient, with a sink or without."""
    ids = np.array([[0, 0, 5, 6, 7], [0, 5, 6, 8, 9]])
    tree = RolloutTree.from_grid([ids], visible=ids != 0, exact=ids == 0)
    lonely = np.flatnonzero(
        (np.asarray(tree.parent) < 0) & (np.asarray(tree.subtree_end) <= np.arange(tree.n))
    )
    assert len(lonely)
    for shape in (Shape(), Shape(sinks=True), Shape(softcap=2.0, sinks=True), Shape(window=2)):
        tensors = packed(tree, tile=1)
        inputs = shape.inputs(tree.n)
        grad = torch.randn(1, shape.heads, tree.n, shape.v_size, dtype=torch.float64)
        out, lse, grads = gradients(by_pieces(tensors, shape), inputs, grad)
        assert not out[:, :, lonely].any()
        assert (lse[:, :, lonely] == -math.inf).all()
        assert not grads[0][:, :, lonely].any()
        assert not any(g.isnan().any() for g in grads)
        assert_same_as_reference(tensors, shape)


@pytest.mark.parametrize("name", ["search", "agent"])
@pytest.mark.usefixtures("poisoned_empty")
def test_nothing_is_left_unwritten(name: str) -> None:
    assert_same_as_reference(packed(TREES[name](2)), Shape(group=2))


# -- the op in PyTorch's machinery --


def test_opcheck() -> None:
    tensors = packed(TREES["star"](0))
    for shape in (Shape(group=2, v_size=6, sinks=True), Shape(window=5)):
        q, k, v, sinks = shape.inputs(tensors.tokens, torch.float32, grad=True)
        tree = (*tensors.arguments(), sinks, *shape.options)
        torch.library.opcheck(tree_attention, (*(x.detach().requires_grad_() for x in (q, k, v)), *tree))
        with torch.no_grad():
            out, lse = tree_attention(q, k, v, *tree)
            torch.library.opcheck(
                tree_attention_backward,
                (torch.randn_like(out), q.detach(), k.detach(), v.detach(), out, lse, *tree),
            )


def layer(x: Tensor, weight: Tensor, *tree: Any) -> Tensor:
    """A projection, attention and a residual."""
    heads = (x @ weight).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)
    out, _ = tree_attention(q, k, v, *tree, None, 0.3, 0.0, 0)
    mixed: Tensor = out.transpose(1, 2).reshape(x.shape)
    return x + mixed


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
# Inductor imports torch.utils.mkldnn, which warns of its own decorator.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_compiled_once_for_all_trees(backend: str, remat: bool, fresh_dynamo: None) -> None:
    def loss(x: Tensor, weight: Tensor, *tree: Any) -> Tensor:
        for _ in range(2):
            if remat:
                x = checkpoint(layer, x, weight, *tree, use_reentrant=False)
            else:
                x = layer(x, weight, *tree)
        return x.square().sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(loss, backend=counter, dynamic=True, fullgraph=True)
    weight = torch.randn(16, 48, dtype=torch.float64) / 4
    for name in ("star", "agent", "comb"):
        tensors = packed(TREES[name](0))
        start = torch.randn(tensors.tokens, 16, dtype=torch.float64)
        grads = []
        for function in (loss, compiled):
            leaves = start.clone().requires_grad_(), weight.clone().requires_grad_()
            grads.append(torch.autograd.grad(function(*leaves, *tensors.arguments()), leaves))
        for eager, packed_grad in zip(*grads, strict=True):
            torch.testing.assert_close(eager, packed_grad, rtol=1e-5, atol=1e-8)
    assert counter.frame_count == 1


def test_two_forwards_before_a_backward() -> None:
    """Every call keeps its own tree: nothing ambient."""
    shape, found = Shape(), {}
    for order in ([0, 1], [1, 0]):
        trees = [packed(TREES[name](0)) for name in ("star", "comb")]
        inputs = []
        torch.manual_seed(0)
        for tensors in trees:
            inputs.append([x.requires_grad_() for x in shape.inputs(tensors.tokens) if x is not None])
        outs = [by_pieces(t, shape)(*x, None)[0] for t, x in zip(trees, inputs, strict=True)]
        for i in order:
            torch.autograd.backward(outs[i].sum())
        found[tuple(order)] = [x.grad for group in inputs for x in group]
    for a, b in zip(*found.values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_reads_the_ambient_dtype(dtype: torch.dtype) -> None:
    tensors, shape = packed(TREES["star"](0)), Shape(sinks=True)
    q, k, v, sinks = shape.inputs(tensors.tokens, torch.float32, grad=True)
    tree = (*tensors.arguments(), sinks, *shape.options)
    with torch.autocast("cpu", dtype):
        out, lse = tree_attention(q, k, v, *tree)
        double, _ = tree_attention(q.double(), k.double(), v.double(), *tree)
    by_hand, _ = tree_attention(q.to(dtype), k.to(dtype), v.to(dtype), *tree)
    assert (out.dtype, lse.dtype, double.dtype) == (dtype, torch.float32, torch.float64)
    assert torch.equal(out, by_hand)
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert grad.dtype == torch.float32


def test_gradients_only_where_needed() -> None:
    tensors, shape = packed(TREES["star"](0)), Shape(sinks=True)
    q, k, v, sinks = shape.inputs(tensors.tokens)
    q.requires_grad_()
    out, lse = by_pieces(tensors, shape)(q, k, v, sinks)
    assert out.requires_grad
    assert not lse.requires_grad
    torch.autograd.backward(out.sum())
    assert q.grad is not None
    assert k.grad is None
    with torch.no_grad():
        assert not by_pieces(tensors, shape)(q, k, v, sinks)[0].requires_grad


# -- CUDA --


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=2, group=4, qk_size=64, v_size=64),
        Shape(heads=2, group=1, qk_size=96, v_size=64, sinks=True),
        Shape(heads=2, group=2, qk_size=64, v_size=64, window=100),
        Shape(heads=2, group=2, qk_size=60, v_size=60, softcap=5.0),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "executor"),
    [
        (torch.bfloat16, "pieces"),
        (torch.bfloat16, "pieces-cudnn"),
        (torch.bfloat16, "pieces-flash"),
        (torch.float16, "pieces-cudnn"),
        (torch.float16, "pieces-flash"),
        (torch.float32, "pieces"),
        (torch.float64, "pieces"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["agent", "search", "comb", "chain"])
def test_cuda_pieces(name: str, dtype: torch.dtype, executor: str, shape: Shape) -> None:
    """Against the fp64 reference; half precision may lose two roundings of its dtype."""
    tensors = packed(TREES[name](0)).to("cuda")
    if executor != "pieces" and shape.softcap:
        pytest.skip("vendors' kernels have no softcap")
    device = attention_router.device_of(torch.device("cuda"))
    if executor == "pieces-cudnn" and (device.cudnn_missing or device.capability < (9, 0)):
        pytest.skip("cuDNN's attention does not run here")
    q, k, v, sinks = shape.inputs(tensors.tokens, dtype, device="cuda")
    grad = torch.randn(1, shape.heads * shape.group, tensors.tokens, shape.v_size).to("cuda", dtype)
    with attention_router.force(executor, executor):
        found = gradients(by_pieces(tensors, shape), (q, k, v, sinks), grad)
    double = tuple(None if x is None else x.double() for x in (q, k, v, sinks))
    exact = gradients(by_reference(tensors, shape), double, grad)
    bound = {torch.float32: 5e-5, torch.float64: 1e-11}.get(dtype, 2 * torch.finfo(dtype).eps)
    for mine, true in zip((found[0], *found[2]), (exact[0], *exact[2]), strict=True):
        assert not mine.isnan().any()
        assert (mine.double() - true).norm() <= bound * true.norm()
