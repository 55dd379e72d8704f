"""The Triton executor of `tree_attention`: block lists by brute force, kernels against the fp64 reference.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before triton is imported: each group of
cases in a process of its own.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import shared_rollouts
from tests.test_attention import (
    Packed,
    Shape,
    by_reference,
    comb,
    gradients,
    packed,
    rows_of,
    search,
)
from treecompile.runtime.ops import attention_lists, attention_router, plan_pieces, tree_attention
from treecompile.runtime.ops.attention_lists import TreeTables, key_lists, query_lists, tree_tables
from treecompile.runtime.ops.attention_math import visible_pairs
from treecompile.runtime.ops.attention_triton import (
    Tiles,
    choice_for,
    column_blocks,
    triton_backward,
    triton_forward,
)
from treecompile.runtime.tree import RolloutTree

SMALL = Tiles(16, 16, 4, 2, 1), Tiles(16, 16, 4, 2, 1), Tiles(16, 16, 4, 2, 1)
MIXED = Tiles(32, 16, 4, 2, 1), Tiles(64, 16, 4, 2, 1), Tiles(32, 16, 4, 2, 1)


def padded_tree() -> RolloutTree:
    """Leaf pads on both sides: some see ancestors, some see nothing."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 3, (8, 24))
    ids[:4, :3] = 0
    ids[4:, 20:] = 0
    ids[2, 10:13] = 0
    return RolloutTree.from_grid([ids], visible=ids != 0, exact=ids == 0)


SOME: dict[str, Callable[[], RolloutTree]] = {
    "one": lambda: RolloutTree.from_rows([[1]]),
    "search": lambda: search(0, 3),
    "pads": padded_tree,
    "comb": lambda: comb(12, 4, 3, 0),
    "tree": lambda: RolloutTree.from_rows(rows_of(3, 2, 10, 30, 0)),
    "chain": lambda: RolloutTree.from_rows([list(range(63))]),
    "500": lambda: RolloutTree.from_rows(rows_of(4, 2, 5, 28, 4)),
}


# -- block lists --


def check_lists(tree: RolloutTree, tokens: int, keys: int, window: int = 0, step: int = 1) -> None:
    """Every visible pair is met once, and what is called full is visible throughout."""
    tensors = packed(tree)
    visible = visible_pairs(tensors.subtree_end, tensors.column, window).numpy()
    tables = _tables(tensors, step)
    assert tables.depth.tolist() == np.asarray(tree.depth).tolist()
    lists = query_lists(tables, tokens, keys, window)
    met = np.zeros_like(visible, dtype=np.int64)
    runs = np.split(lists.runs[:-1].numpy(), lists.run_offsets[1:-1].tolist())
    indices = np.split(lists.index.numpy(), lists.index_offsets[1:-1].tolist())
    assert sorted(lists.order.tolist()) == list(range(len(runs)))
    for block, (mine, index, full) in enumerate(zip(runs, indices, lists.full_tiles.tolist(), strict=True)):
        queries = slice(block * tokens, (block + 1) * tokens)
        assert full == mine[:, 1].sum()
        for start, count in mine.tolist():
            assert visible[queries, start : start + count * keys].all()
            met[queries, start : start + count * keys] += 1
        assert len(index) % keys == 0
        met[queries, index[index >= 0]] += 1
    assert met.max() <= 1
    assert (met[visible] == 1).all()
    check_key_lists(tables, visible, keys, tokens, window)


def check_key_lists(tables: TreeTables, visible: Any, keys: int, tokens: int, window: int) -> None:
    rows = 2 * tokens
    lists = key_lists(tables, keys, rows, tokens, window)
    items, blocks = lists.items.tolist(), -(-tables.tokens // keys)
    assert sorted((b, i) for b, i, _, _ in items) == sorted(
        (b, i) for b in range(blocks) for i in range(next(n for c, _, n, _ in items if c == b))
    )
    slots = [slot for _, _, _, slot in items if slot >= 0]
    assert sorted(slots) == list(range(lists.slots))
    for block, first, shares in lists.split.tolist():
        assert {(block, i, shares, first + i) for i in range(shares)} <= {tuple(item) for item in items}
    for block, (full, count, high) in enumerate(lists.ranges.tolist()):
        mine = slice(block * keys, (block + 1) * keys)
        met = np.zeros(visible.shape[0], bool)
        if window:
            listed = lists.tiles.tolist()
            for tile in listed[full : full + count]:
                queries = slice(tile * rows, (tile + 1) * rows)
                assert visible[queries, mine].all()
                assert queries.stop <= visible.shape[0]
                met[queries] = True
            for tile in listed[lists.offsets[block] : lists.offsets[block + 1]]:
                assert not met[tile * tokens : (tile + 1) * tokens].any()
                met[tile * tokens : (tile + 1) * tokens] = True
        else:
            assert visible[full : full + count * rows, mine].all()
            met[block * keys : high] = True
        assert not visible[~met, mine].any()


def _tables(tensors: Packed, step: int) -> TreeTables:
    return tree_tables(tensors.segments, tensors.segments.cpu(), tensors.subtree_end, step)


def lists_of_all_trees() -> None:
    for make in SOME.values():
        for tokens, keys in ((4, 4), (16, 8)):
            check_lists(make(), tokens, keys)
    for step in (1, 0, -1):
        check_lists(SOME["tree"](), 8, 4, window=9, step=step)
        check_lists(SOME["tree"](), 4, 4, window=40, step=step)
        check_lists(SOME["chain"](), 4, 8, window=30, step=step)
        check_lists(SOME["pads"](), 4, 4, window=3, step=step)
        # Masked positions leave gaps in its columns.
        check_lists(SOME["pads"](), 2, 2, window=7, step=min(step, 0))


# -- kernels --


@contextmanager
def poisoned() -> Iterator[None]:
    """`torch.empty` holds NaN and huge integers, and blocks are split early."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with (
        mock.patch.object(attention_lists, "SPAN", 32),
        mock.patch.object(attention_lists, "MOST_SHARES", 16),
    ):
        attention_lists._kept.clear()
        yield
    attention_lists._kept.clear()
    torch.use_deterministic_algorithms(False)


def by_triton(
    tensors: Packed, shape: Shape, tiles: tuple[Tiles, Tiles, Tiles] | None
) -> Callable[..., tuple[Tensor, Tensor, list[Tensor]]]:
    """Output, log-sum-exp and gradients by the kernels alone."""

    def run(inputs: tuple[Tensor | None, ...], grad: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        q, k, v, sinks = inputs
        assert q is not None
        assert k is not None
        assert v is not None
        tree = tensors.arguments()[:5]
        forward, backward = (tiles[0], tiles[1:]) if tiles else (None, None)
        out, lse = triton_forward(q, k, v, *tree, sinks, *shape.options, tiles=forward)
        grads = triton_backward(grad, q, k, v, out, lse, *tree, sinks, *shape.options, tiles=backward)
        return out, lse, list(grads if sinks is not None else grads[:3])

    return run


def check_kernels(
    tensors: Packed,
    shape: Shape,
    dtype: torch.dtype,
    tiles: tuple[Tiles, Tiles, Tiles] | None,
    device: str = "cpu",
) -> None:
    """Against fp64: at most twice as far off as plain PyTorch in the same dtype; bit-equal when run again."""
    tensors = tensors.to(device)
    inputs = shape.inputs(tensors.tokens, dtype, device=device)
    heads = shape.heads * shape.group
    grad = torch.randn(1, tensors.tokens, heads, shape.v_size).to(device, dtype).transpose(1, 2)
    with poisoned():
        out, lse, grads = by_triton(tensors, shape, tiles)(inputs, grad)
        again = by_triton(tensors, shape, tiles)(inputs, grad)
    double = tuple(None if x is None else x.double() for x in inputs)
    exact = gradients(by_reference(tensors, shape), double, grad)
    assert out.is_contiguous()
    assert torch.equal(lse == -math.inf, exact[1] == -math.inf)
    seen = exact[1] > -math.inf
    torch.testing.assert_close(
        lse[seen].double(), exact[1][seen], rtol=1e-5, atol=4e-3 if dtype.itemsize == 2 else 1e-5
    )
    assert torch.equal(lse, again[1])
    wanted = (exact[0], *exact[2])
    if dtype.itemsize == 2:
        plain = gradients(in_its_dtype(tensors, shape), inputs, grad)
        null = [(x.double() - true).norm() for x, true in zip((plain[0], *plain[2]), wanted, strict=True)]
    else:
        null = [5e-6 * true.norm() for true in wanted]
    # Where all gradients cancel (one key) the null is 0: a fraction of a rounding is left.
    floor = torch.finfo(dtype).eps / 4
    # dq and dk take sum(dO * O) from the output as it was rounded. With one key nothing else is as large.
    lost = torch.finfo(dtype).eps / 2 * (grad.double() * exact[0]).norm()
    reach = max(float(x.double().norm(dim=-1).max()) for x in inputs[:2] if x is not None and x.numel())
    cancelled = float(lost) * reach * shape.options[0] if tensors.tokens == 1 else 0.0
    for found, repeated, true, allowed in zip(
        (out, *grads), (again[0], *again[2]), wanted, null, strict=True
    ):
        assert found.dtype == dtype
        assert not found.isnan().any()
        assert torch.equal(found, repeated)
        assert (found.double() - true).norm() <= 2 * allowed + cancelled + floor * (1 + true.norm())


def in_its_dtype(tensors: Packed, shape: Shape) -> Callable[..., tuple[Tensor, Tensor]]:
    """The formulas in plain PyTorch, every step in the dtype of its inputs."""
    visible = visible_pairs(tensors.subtree_end, tensors.column, shape.window)
    scale, softcap, _ = shape.options

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        k, v = k.repeat_interleave(shape.group, 1), v.repeat_interleave(shape.group, 1)
        logits = (q @ k.mT) * scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        logits = logits.masked_fill(~visible, torch.finfo(q.dtype).min)
        if sinks is not None:
            logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)], -1)
        weights = logits.softmax(-1)[..., : k.shape[2]]
        return weights.masked_fill(~visible, 0.0) @ v, q.detach()

    return run


SHAPES: dict[str, Shape] = {
    "plain": Shape(qk_size=16, v_size=16),
    "group": Shape(heads=1, group=4, qk_size=16, v_size=16, sinks=True),
    "three": Shape(heads=1, group=3, qk_size=24, v_size=8, softcap=1.5),
    "window": Shape(heads=1, group=2, qk_size=16, v_size=32, window=9),
    "wide": Shape(heads=1, group=2, qk_size=16, v_size=16, window=60),
    "all": Shape(heads=1, group=2, qk_size=16, v_size=16, window=7, softcap=2.0, sinks=True),
    "mla": Shape(heads=1, qk_size=192, v_size=128),
    "blocks": Shape(heads=1, group=2, qk_size=150, v_size=16),
}


def interpret(group: str) -> None:
    """One group of cases, in the interpreter."""
    import tests.interpreter  # noqa: F401

    torch.manual_seed(0)
    if group == "lists":
        with mock.patch.object(attention_lists, "SPAN", 16):
            lists_of_all_trees()
    elif group == "trees":
        for name in ("one", "search", "pads", "comb", "chain"):
            check_kernels(packed(SOME[name]()), SHAPES["group"], torch.float32, SMALL)
    elif group == "shares":
        with mock.patch.object(attention_lists, "SPAN", 16):
            check_kernels(packed(SOME["search"]()), SHAPES["group"], torch.float32, SMALL)
    elif group == "500":
        check_kernels(packed(SOME["500"]()), Shape(heads=1, qk_size=16, v_size=16), torch.float32, MIXED)
    elif group == "shapes":
        for shape in SHAPES.values():
            large = shape.qk_size > 128
            tree, tiles = ("search", SMALL) if large else ("tree", MIXED)
            check_kernels(packed(SOME[tree]()), shape, torch.float32, tiles)
        check_kernels(packed(SOME["pads"]()), SHAPES["all"], torch.float32, MIXED)
    elif group == "dtypes":
        # The interpreter multiplies the bits of bf16 numbers.
        check_kernels(packed(SOME["comb"]()), SHAPES["group"], torch.float16, SMALL)
        check_kernels(packed(SOME["comb"]()), SHAPES["plain"], torch.float16, MIXED)
    elif group == "columns":
        check_columns("cpu", SHAPES["window"], torch.float32, MIXED)


def check_columns(device: str, shape: Shape, dtype: torch.dtype, tiles: Any) -> None:
    """Columns with gaps, and columns that go backwards along a path: only the masks decide."""
    tensors = packed(SOME["tree"]())
    rng = np.random.default_rng(0)
    for column in (
        tensors.column.numpy() * 3 + rng.integers(0, 2, tensors.tokens),
        rng.integers(0, 40, tensors.tokens),
    ):
        column = np.ascontiguousarray(column, np.int32)
        plan = torch.from_numpy(plan_pieces(tensors.segments.numpy(), column))
        assert plan[0, 3] != 1
        changed = replace(tensors, column=torch.from_numpy(column), pieces=plan)
        check_kernels(changed, shape, dtype, tiles, device)


@pytest.mark.parametrize(
    "group",
    [
        "lists",
        "trees",
        "shares",
        "dtypes",
        *(pytest.param(g, marks=pytest.mark.slow) for g in ("shapes", "500", "columns")),
    ],
)
def test_kernels_in_the_interpreter(group: str) -> None:
    pytest.importorskip("triton")
    subprocess.run(
        [sys.executable, "-c", f"from tests.test_attention_triton import interpret; interpret({group!r})"],
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=600,
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )


# -- on the GPU --


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=2, group=4, qk_size=128, v_size=128),
        Shape(heads=2, group=1, qk_size=64, v_size=64, sinks=True),
        Shape(heads=1, group=2, qk_size=96, v_size=96, softcap=5.0),
        Shape(heads=2, group=1, qk_size=192, v_size=128),
        Shape(heads=1, group=2, qk_size=150, v_size=128),
        Shape(heads=1, group=2, qk_size=256, v_size=256),
        Shape(heads=1, group=8, qk_size=64, v_size=64, window=100, sinks=True),
        Shape(heads=1, group=2, qk_size=128, v_size=128, window=1000),
        Shape(heads=1, group=3, qk_size=60, v_size=60),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["one", "pads", "4097", "search", "comb", "deep"])
def test_kernels_on_the_gpu(name: str, dtype: torch.dtype, shape: Shape) -> None:
    torch.manual_seed(0)
    check_kernels(packed(large(name)), shape, dtype, None, "cuda")


def large(name: str) -> RolloutTree:
    """Trees of thousands of tokens."""
    made: dict[str, Callable[[], RolloutTree]] = {
        "4097": lambda: RolloutTree.from_rows([*rows_of(3, 2, 200, 330, 1), list(range(900))]),
        "search": lambda: search(0, 12),
        "comb": lambda: comb(300, 3, 5, 0),
        "deep": lambda: RolloutTree.from_rows([list(range(4097)), [*range(4000), 1, 2, 3], [*range(7), 0]]),
    }
    return {**SOME, **made}[name]()


@pytest.mark.gpu
def test_ten_thousand_segments() -> None:
    """Too many tokens for the reference: the kernels against pieces, which are checked with it elsewhere."""
    tree = RolloutTree.from_rows(
        [[puzzle, *row] for puzzle in range(40) for row in rows_of(9, 4, 1, 5, puzzle)]
    )
    assert len(tree.segments) > 10_000
    shape = Shape(heads=2, group=4, qk_size=64, v_size=64)
    tensors = packed(tree).to("cuda")
    inputs = shape.inputs(tree.n, torch.bfloat16, device="cuda")
    grad = torch.randn(1, 8, tree.n, 64, device="cuda", dtype=torch.bfloat16)
    found = gradients(by_op(tensors, shape, "triton"), inputs, grad)
    other = gradients(by_op(tensors, shape, "pieces"), inputs, grad)
    for mine, theirs in zip((found[0], *found[2]), (other[0], *other[2]), strict=True):
        assert (mine.double() - theirs.double()).norm() <= 0.01 * theirs.double().norm()


def by_op(tensors: Packed, shape: Shape, executor: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        with attention_router.force(forward=executor):
            found: tuple[Tensor, Tensor] = tree_attention(
                q, k, v, *tensors.arguments(), sinks, *shape.options
            )
        return found

    return run


def test_every_head_size_has_tiles() -> None:
    for qk_size, v_size in ((1, 1), (64, 64), (96, 96), (128, 64), (192, 128), (64, 256), (256, 256)):
        assert choice_for(qk_size, v_size).forward.keys in (64, 128)
    assert choice_for(128, 128, 100_000).forward.rows == 32


def test_columns_of_queries_and_keys_are_few() -> None:
    sizes = 7, 96, 128, 129, 150, 192, 193
    assert [column_blocks(size) for size in sizes] == [
        (16, 0), (128, 0), (128, 0), (128, 16), (128, 32), (128, 64), (256, 0),
    ]  # fmt: skip
    assert all(sum(column_blocks(size)) >= size for size in range(1, 257))


# -- tiny segments --


@shared_rollouts.needs_shared_rollouts
def test_waste_on_tree_search() -> None:
    """All paths of a tree search, segments of a few tokens: computed pairs are at most 1.6 times the useful ones."""
    pytest.importorskip("triton")
    rows = shared_rollouts.load("game24_tot")
    puzzles = list(dict.fromkeys(row["group"] for row in rows))[:20]
    tree = RolloutTree.from_rows([row["input_ids"] for row in rows if row["group"] in puzzles])
    tensors = packed(tree)
    useful = int((np.asarray(tree.depth, np.int64) + 1).sum())
    by_key = key_lists(_tables(tensors, 1), 64, 64, 16, 0)
    assert by_key.pairs.item() <= 1.6 * useful
