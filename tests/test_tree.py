"""The rollout tree against its slow twin, on real rollouts, and its errors."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import networkx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import tree_twin
from tests.strategies import Case, cases, row_sets
from treecompile.runtime import layout, paths, prefixes, stretches
from treecompile.runtime.errors import OptionError, TreecompileError
from treecompile.runtime.tree import RolloutTree

Mode = Literal["step", "absolute"] | None
MODES: tuple[Mode, ...] = (None, "step", "absolute")
modes = st.sampled_from(MODES)


def check(tree: RolloutTree, case: Case, mode: Mode) -> None:
    """Everything that the class documents, against the twin."""
    twin = tree_twin.build(case.keys, case.visible, case.exact, case.documents, mode)
    count = len(twin.parent)
    assert tree.n == count
    assert tree.row_index.shape == case.shape
    np.testing.assert_array_equal(tree.row_index < 0, twin.node < 0)
    # Merge classes: a bijection between packed tokens and trie nodes.
    of_node = np.full(count + 1, -1)
    of_node[twin.node] = tree.row_index
    of_node[-1] = -1
    np.testing.assert_array_equal(of_node[twin.node], tree.row_index)
    assert sorted(of_node[:-1].tolist()) == list(range(count))
    node = np.argsort(of_node[:-1])
    check_order(tree, twin, of_node, node)
    check_tokens(tree, twin, case, of_node, node, mode)
    check_segments(tree, twin, of_node, node)


def check_order(tree: RolloutTree, twin: tree_twin.Twin, of_node: np.ndarray, node: np.ndarray) -> None:
    sees = [{int(of_node[k]) for k in twin.ancestors(int(node[n]))} for n in range(tree.n)]
    ends = tree.subtree_end.tolist()
    assert sees == [{k for k in range(tree.n) if k <= n < ends[k]} for n in range(tree.n)]
    np.testing.assert_array_equal(tree.parent, of_node[np.array(twin.parent, int)[node]])
    # A strict ancestor count, for pads too.
    assert tree.depth.tolist() == [len(s) - (not twin.pad[node[n]]) for n, s in enumerate(sees)]
    # Siblings: largest subtree first.
    size = [sum(n in s for s in sees) + twin.pad[node[n]] for n in range(tree.n)]
    for parent in range(-1, tree.n):
        children = [n for n in range(tree.n) if tree.parent[n] == parent]
        keys = [(-size[n], twin.pad[node[n]]) for n in children]
        assert keys == sorted(keys)


def check_tokens(
    tree: RolloutTree, twin: tree_twin.Twin, case: Case, of_node: np.ndarray, node: np.ndarray, mode: Mode
) -> None:
    flat = tree.row_index.reshape(-1)
    np.testing.assert_array_equal(flat[tree.first], np.arange(tree.n))
    kept = flat[flat >= 0]
    np.testing.assert_array_equal(tree.multiplicity, np.bincount(kept, minlength=tree.n))
    for n in range(tree.n):
        assert int(tree.column[n]) in twin.columns[node[n]]
        assert mode is None or len(twin.columns[node[n]]) == 1
    for key, packed in zip(case.keys, tree.keys, strict=True):
        np.testing.assert_array_equal(packed, key.reshape(-1)[tree.first])
    # The column is that of the representative.
    for n, first in enumerate(tree.first.tolist()):
        b, t = divmod(first, case.shape[1])
        assert tree.column[n] == t - _origin(case, b, t, mode)


def _origin(case: Case, b: int, t: int, mode: Mode) -> int:
    if mode == "absolute":
        return 0
    own = (
        np.ones(case.shape[1], bool) if case.documents is None else case.documents[b] == case.documents[b, t]
    )
    kept = np.flatnonzero(own if case.visible is None else own & case.visible[b])
    return int(kept[0]) if len(kept) else 0


def check_segments(tree: RolloutTree, twin: tree_twin.Twin, of_node: np.ndarray, node: np.ndarray) -> None:
    children: dict[int, int] = {}
    for parent in twin.parent:
        children[parent] = children.get(parent, 0) + 1
    heads = [
        n
        for n in range(tree.n)
        if twin.parent[node[n]] < 0 or twin.pad[node[n]] or children[twin.parent[node[n]]] > 1
    ]
    assert tree.segments.shape == (len(heads), 4)
    assert tree.segments[:, 0].tolist() == heads
    assert tree.segments[:, 1].tolist() == [*heads[1:], tree.n][: len(heads)]
    ends = {end - 1: s for s, end in enumerate(tree.segments[:, 1].tolist())}
    for start, _, parent, after in tree.segments.tolist():
        above = int(tree.parent[start])
        assert parent == (ends[above] if above >= 0 else -1)
        assert after == tree.subtree_end[start]


def build(case: Case, mode: Mode = None) -> RolloutTree:
    return RolloutTree.from_grid(
        case.keys,
        visible=case.visible,
        exact=case.exact,
        documents=case.documents,
        column_key=mode,
        keep_keys=True,
    )


@settings(max_examples=150)
@given(cases(), modes)
def test_random_grids_equal_the_twin(case: Case, mode: Mode) -> None:
    check(build(case, mode), case, mode)


@settings(max_examples=40)
@given(cases(max_rows=16, vocab=2), modes)
def test_many_rows_of_few_tokens_equal_the_twin(case: Case, mode: Mode) -> None:
    check(build(case, mode), case, mode)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), modes)
def test_paths_for_long_rows_equal_the_twin(monkeypatch: pytest.MonkeyPatch, case: Case, mode: Mode) -> None:
    # Short rows take neither the sequence-wise comparison nor the copies run by run; here they must.
    with monkeypatch.context() as patch:
        patch.setattr(prefixes, "_WIDTHS", ())
        for module in (stretches, paths, layout):
            patch.setattr(module, "fragmented", lambda length: False)
        check(build(case, mode), case, mode)


@given(st.integers(2, 12), st.integers(0, 2**32 - 1), modes)
def test_forks_at_any_distance_equal_the_twin(rows: int, seed: int, mode: Mode) -> None:
    # Rows long enough for every width of the vectorised comparison, with one change each.
    random = np.random.default_rng(seed)
    ids = np.tile(random.integers(0, 5, 300), (rows, 1))
    for b in range(rows):
        ids[b, random.choice([0, 15, 16, 17, 143, 144, 145, 299])] += random.integers(0, 3)
    case = Case((ids,))
    tree, twin = build(case, mode), tree_twin.build(case.keys, column_key=mode)
    assert tree.n == len(twin.parent)
    np.testing.assert_array_equal(tree.keys[0][tree.row_index], ids)
    assert len({(int(a), int(b)) for a, b in zip(twin.node.flat, tree.row_index.flat, strict=True)}) == tree.n


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.data(), st.booleans())
def test_layouts_invert_each_other(
    monkeypatch: pytest.MonkeyPatch, case: Case, data: st.DataObject, by_run: bool
) -> None:
    tree = build(case)
    first = data.draw(st.integers(0, case.shape[1]))
    end = data.draw(st.integers(first, case.shape[1]))
    grid = np.arange(tree.batch * tree.length).reshape(case.shape)
    region = data.draw(
        st.sampled_from([None, grid[:, first:end].reshape(-1), grid[::2].reshape(-1), grid.flat[::-3]])
    )
    with monkeypatch.context() as patch:
        if by_run:
            patch.setattr(layout, "fragmented", lambda length: False)
        found = tree.layout(region)
    packed = tree.row_index.reshape(-1)[grid.reshape(-1) if region is None else region]
    assert found.rows.tolist() == sorted({n for n in packed.tolist() if n >= 0})
    assert [found.rows[h] if h >= 0 else -1 for h in found.row_index] == packed.tolist()
    users = [np.flatnonzero(found.row_index == h).tolist() for h in range(len(found.rows))]
    assert [
        found.positions[found.offsets[h] : found.offsets[h + 1]].tolist() for h in range(len(found.rows))
    ] == users
    assert found.offsets[0] == 0
    assert found.offsets[-1] == len(found.positions)
    arrays = (found.rows, found.row_index, found.offsets, found.positions)
    assert all(array.dtype == np.int64 for array in arrays)


NAMED: dict[str, list[list[int]]] = {
    "one row": [[3, 1, 2]],
    "one token": [[7]],
    "duplicates": [[1, 2, 3]] * 4,
    "prefix of another": [[1, 2, 3, 4], [1, 2], [1, 2, 3], [1]],
    "nothing shared": [[1, 1], [2, 2], [3, 3]],
    "empty rows": [[], [1, 2], []],
    "only empty rows": [[], []],
    "no rows": [],
    "chain of prefixes, shortest first": [[1] * n for n in range(1, 9)],
    "star": [[0, n] for n in range(9)],
    "comb": [[0] * n + [1] * (9 - n) for n in range(9)],
    "binary": [[n >> 3 & 1, n >> 2 & 1, n >> 1 & 1, n & 1] for n in range(16)],
    "fork at the last token": [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]],
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("side", ["left", "right"])
def test_named_shapes_equal_the_twin(name: str, side: str) -> None:
    rows = NAMED[name]
    length = max(map(len, rows), default=0)
    ids, visible = np.full((len(rows), length), 9), np.zeros((len(rows), length), np.bool_)
    for b, row in enumerate(rows):
        where = slice(length - len(row), None) if side == "left" else slice(len(row))
        ids[b, where], visible[b, where] = row, True
    for exact in (None, ~visible):
        case = Case((ids,), visible, exact)
        for mode in MODES:
            check(build(case, mode), case, mode)
    assert [row.tolist() for row in RolloutTree.from_rows(rows).to_rows()] == rows


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_empty_grids(shape: tuple[int, int]) -> None:
    ids = np.zeros(shape, np.int64)
    for visible in (None, np.zeros(shape, bool)):
        for documents in (None, ids):
            case = Case((ids,), visible, None if visible is None else ~visible, documents)
            for mode in MODES:
                check(build(case, mode), case, mode)
    tree = RolloutTree.from_grid([ids])
    assert (tree.n, tree.segments.shape, tree.text()) == (0, (0, 4), "(empty tree)")
    assert tree.layout().offsets.tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_tensors_and_arrays_of_any_integer_type_give_one_tree(dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0]])
    want = RolloutTree.from_rows(ids.numpy())
    for given_ids in (
        ids.to(dtype),
        ids.to(dtype).t().contiguous().t(),
        ids.to(dtype).numpy(),
        list(ids.to(dtype)),
    ):
        got = RolloutTree.from_rows(given_ids)
        np.testing.assert_array_equal(got.row_index, want.row_index)
        np.testing.assert_array_equal(got.segments, want.segments)


@pytest.mark.gpu
def test_tensors_on_the_device(device: torch.device) -> None:
    ids = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 1]], device=device)
    tree = RolloutTree.from_rows(ids, mask=torch.ones_like(ids))
    assert tree.tensor("row_index", device).device == ids.device
    assert tree.n == 6


def test_the_tree_does_not_follow_later_writes() -> None:
    ids = np.array([[1, 2, 3], [1, 2, 4]])
    tree = RolloutTree.from_rows(ids)
    ids[:] = 0
    assert [row.tolist() for row in tree.to_rows()] == [[1, 2, 3], [1, 2, 4]]


def test_expanded_keys_count_only_where_rows_are_not_aligned() -> None:
    ids = np.array([[0, 5, 6], [5, 6, 0]])
    column = np.broadcast_to(np.arange(3), (2, 3))
    assert RolloutTree.from_grid([ids, column], visible=ids > 0).n == 4
    assert RolloutTree.from_grid([ids], visible=ids > 0).n == 2
    assert RolloutTree.from_grid([np.array([[5, 6], [5, 7]]), column[:, :2]]).n == 3


def test_indices_are_int64_where_int32_cannot_hold_them() -> None:
    assert stretches.index_dtype(2**31 - 1) == np.int32
    assert stretches.index_dtype(2**31) == np.int64


def test_positions_and_tensors() -> None:
    ids, positions = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[0, 1, 2], [0, 1, 5]])
    tree = RolloutTree.from_rows(ids, positions=positions)
    assert tree.position is not None
    assert (tree.n, tree.position.tolist()) == (4, [0, 1, 2, 5])
    row_index = tree.tensor("row_index")
    assert (row_index.dtype, row_index.tolist()) == (torch.int64, [[0, 1, 2], [0, 1, 3]])
    assert tree.tensor("subtree_end", dtype=torch.int32).dtype == torch.int32
    with pytest.raises(OptionError, match="Did you mean 'row_index'"):
        tree.tensor("row_indices")


def test_a_document_that_comes_back_goes_on_where_it_stopped() -> None:
    ids = np.array([[1, 8, 2, 9, 3]])
    documents = np.array([[0, 1, 0, 1, 0]])
    tree = RolloutTree.from_grid([ids], documents=documents, keep_keys=True)
    assert [row.tolist() for row in tree.to_rows()] == [[1, 2, 3], [8, 9]]
    assert tree.column.tolist() == [0, 2, 4, 0, 2]


def test_leaf_pads_of_a_batch() -> None:
    ids = np.array([[0, 0, 5, 6], [5, 6, 7, 0], [0, 5, 6, 0]])
    shown = ids != 0
    tree = RolloutTree.from_grid([ids], visible=shown, exact=~shown)
    # 5 6 7, its pad, the pad below 6, and one root for all left pads.
    assert tree.row_index.tolist() == [[5, 5, 0, 1], [0, 1, 2, 3], [5, 0, 1, 4]]
    assert tree.subtree_end.tolist() == [5, 5, 4, 3, 4, 5]
    assert tree.segments.tolist() == [[0, 2, -1, 5], [2, 3, 0, 4], [3, 4, 1, 3], [4, 5, 0, 4], [5, 6, -1, 5]]
    assert tree.multiplicity.tolist() == [3, 3, 1, 1, 1, 3]
    assert tree.sharing.packed_pairs == 1 + 2 + 3


# -- real rollouts --

ROLLOUTS = Path(__file__).resolve().parents[1].parent / "shared" / "rollouts"


def load_rollouts(name: str) -> list[np.ndarray]:
    path = ROLLOUTS / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"no rollout file {name}.npz beside the checkout (../shared/rollouts)")
    spec = importlib.util.spec_from_file_location("rollout_io", ROLLOUTS / "rollout_io.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows: list[np.ndarray] = module.load(path)["ids"]
    return rows


@pytest.mark.parametrize(
    ("name", "tokens", "pairs"),
    [("tau_airline", 2.40, 1.46), ("math_cot", 1.56, 1.20), ("game24_tot", 22.7, 11.6)],
)
def test_sharing_of_real_rollouts(name: str, tokens: float, pairs: float) -> None:
    rows = load_rollouts(name)
    tree = RolloutTree.from_rows(rows)
    assert tree.sharing.tokens == pytest.approx(tokens, rel=5e-3)
    assert tree.sharing.pairs == pytest.approx(pairs, rel=5e-3)
    check_real(tree, rows)


def check_real(tree: RolloutTree, rows: list[np.ndarray]) -> None:
    """Invariants that need no twin."""
    for row, back in zip(rows, tree.to_rows(), strict=True):
        np.testing.assert_array_equal(row, back)
    inside = tree.row_index >= 0
    n = np.arange(tree.n)
    # Along every row, each token's parent is the token before it.
    np.testing.assert_array_equal(
        tree.parent[tree.row_index[:, 1:]][inside[:, 1:]], tree.row_index[:, :-1][inside[:, 1:]]
    )
    np.testing.assert_array_equal(tree.depth, tree.column)
    children = tree.parent >= 0
    assert np.all(tree.parent[children] < n[children])
    assert np.all(tree.subtree_end[tree.parent[children]] >= tree.subtree_end[children])
    # No two children of a token carry the same id: nothing is left to merge.
    ids = np.stack([tree.parent.astype(np.int64), tree.keys[0].astype(np.int64)])
    assert np.unique(ids, axis=1).shape[1] == tree.n
    # The intervals are exactly the subtrees: their lengths add up to the pairs.
    assert int((tree.subtree_end - n).sum()) == tree.sharing.packed_pairs
    assert int(tree.multiplicity.sum()) == tree.sharing.kept


# -- graph and text --


@given(row_sets())
def test_graphs_of_rows_come_back(rows: list[list[int]]) -> None:
    tree = RolloutTree.from_rows(rows)
    back = RolloutTree.from_graph(tree.graph)
    assert [row.tolist() for row in back.to_rows()] == rows
    np.testing.assert_array_equal(back.row_index, tree.row_index)
    np.testing.assert_array_equal(back.segments, tree.segments)


@given(cases())
def test_graphs_of_any_grid_keep_the_tree(case: Case) -> None:
    tree = build(replace(case, exact=None))
    back = RolloutTree.from_graph(tree.graph)
    # Equally large siblings may change places.
    assert sorted(np.diff(back.segments[:, :2]).flat) == sorted(np.diff(tree.segments[:, :2]).flat)
    for key in range(len(case.keys) if tree.n else 0):
        for old, new in zip(tree.to_rows(key), back.to_rows(key), strict=True):
            np.testing.assert_array_equal(old, new)


def test_graph_attributes() -> None:
    tree = RolloutTree.from_rows([[1, 2, 3], [1, 2, 4, 5], [1]], positions=[[0, 1, 2], [0, 1, 2, 3], [0]])
    graph = tree.graph
    assert list(graph.edges) == [(0, 1), (0, 2)]
    root = graph.nodes[0]
    assert (root["start"], root["end"], root["tokens"], root["subtree_end"]) == (0, 2, 2, 5)
    assert (root["multiplicity"], root["ends"], root["pad"]) == (3, [(2, 1)], False)
    assert (root["ids"].tolist(), root["positions"].tolist(), root["columns"].tolist()) == (
        [1, 2],
        [0, 1],
        [0, 1],
    )
    assert (graph.nodes[1]["ends"], graph.nodes[2]["ends"]) == ([(1, 2)], [(0, 1)])


def test_text() -> None:
    rows = [[1, 2, 3, 0], [1, 2, 4, 5], [1, 2, 4, 6], [1, 0, 0, 0]]
    mask = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]
    tree = RolloutTree.from_rows(rows, mask=mask, positions=rows)
    assert tree.text() == (
        "╙── 0  2 tok  col 0..1  pos 1..2  x4\n"
        "    ├─╼ 1  1 tok  col 2  pos 4  x2\n"
        "    │   ├─╼ 2  1 tok  col 3  pos 5  x1\n"
        "    │   └─╼ 3  1 tok  col 3  pos 6  x1\n"
        "    └─╼ 4  1 tok  col 2  pos 3  x1"
    )
    assert tree.text(max_depth=1) == "╙── 0  2 tok  col 0..1  pos 1..2  x4\n    └─╼  ..."
    exact = RolloutTree.from_rows(rows, mask=mask, pads="exact")
    assert [line.split("  ")[-3] for line in exact.text().splitlines()].count("pad") == 2
    assert repr(tree) == "RolloutTree(B=4, T=4, N=6, S=5)"


# -- errors --

GOOD = np.array([[1, 2], [1, 3]])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: RolloutTree.from_grid([]),
            "keys needs at least one [B, T] array; got an empty sequence\n"
            "  Remedy: pass the token ids: keys=[ids]",
        ),
        (
            lambda: RolloutTree.from_grid([GOOD[0]]),
            "keys[0] needs two dimensions [B, T]; got shape [2]\n"
            "  Remedy: use RolloutTree.from_rows for a list of rows, or add a batch dimension",
        ),
        (
            lambda: RolloutTree.from_grid([GOOD, GOOD[:, :1]]),
            "keys[1] needs the shape of the rows, [2, 2]; got shape [2, 1]\n"
            "  Remedy: pass one value per grid position [B, T]",
        ),
        (
            lambda: RolloutTree.from_grid([GOOD], visible=GOOD[:1]),
            "visible needs the shape of the rows, [2, 2]; got shape [1, 2]\n"
            "  Remedy: pass one value per grid position [B, T]",
        ),
        (
            lambda: RolloutTree.from_grid([GOOD], documents=GOOD[0]),
            "documents needs the shape of the rows, [2, 2]; got shape [2]\n"
            "  Remedy: pass one value per grid position [B, T]",
        ),
        (
            lambda: RolloutTree.from_grid([GOOD * 0.5]),
            "keys[0] needs integers or booleans, since tokens are merged by equality; got dtype "
            "float64\n"
            "  Remedy: pass token ids, positions or masks; convert with .long() if they are whole",
        ),
        (
            lambda: RolloutTree.from_rows(torch.zeros(2, 2)),
            "rows needs integers or booleans, since tokens are merged by equality; got dtype "
            "torch.float32\n"
            "  Remedy: pass token ids, positions or masks; convert with .long() if they are whole",
        ),
        (
            lambda: RolloutTree.from_rows(GOOD[0]),
            "rows needs two dimensions [B, T]; got shape [2]\n"
            "  Remedy: add a batch dimension, or pass a list of 1-D rows",
        ),
        (
            lambda: RolloutTree.from_rows([[1], [[2]]]),
            "rows[1] needs one dimension, a row of tokens; got shape [1, 1]\n"
            "  Remedy: pass a list of 1-D rows, or one [B, T] array",
        ),
        (
            lambda: RolloutTree.from_rows([[1], [0.5]]),
            "rows[1] needs integers or booleans, since tokens are merged by equality; got dtype "
            "float64\n"
            "  Remedy: pass token ids, positions or masks; convert with .long() if they are whole",
        ),
        (
            lambda: RolloutTree.from_rows("abc"),
            "rows needs a [B, T] array or a list of 1-D rows; got str\n"
            "  Remedy: pass a list, an array or a tensor of token ids",
        ),
        (
            lambda: RolloutTree.from_rows([[1, 2], [3]], mask=[[1, 1]]),
            "mask needs rows of the lengths of rows, [2, 1]; got lengths [2]\n"
            "  Remedy: pass one value per token of rows",
        ),
        (
            lambda: RolloutTree.from_rows(GOOD, positions=GOOD[:, :1]),
            "positions needs the shape of the rows, [2, 2]; got shape [2, 1]\n"
            "  Remedy: pass one value per grid position [B, T]",
        ),
        (
            lambda: RolloutTree.from_rows([[1, [2, 3]]]),
            "rows[0] is not a rectangular array; got nested sequences of unequal length\n"
            "  Remedy: pass a [B, T] array, or a list of 1-D rows to RolloutTree.from_rows",
        ),
        (
            lambda: RolloutTree.from_grid([GOOD], column_key="steps"),  # type: ignore[arg-type]
            "column_key='steps' is not a valid option: use one of None, 'step', 'absolute'\n"
            "  Did you mean 'step'?",
        ),
        (
            lambda: RolloutTree.from_rows(GOOD, pads="exakt"),  # type: ignore[arg-type]
            "pads='exakt' is not a valid option: use one of 'drop', 'exact'\n  Did you mean 'exact'?",
        ),
        (
            lambda: RolloutTree.from_grid([GOOD]).to_rows(),
            "tree holds no token ids; got a tree built with keep_keys=False\n"
            "  Remedy: build it with RolloutTree.from_rows, or with from_grid(..., keep_keys=True)",
        ),
        (lambda: RolloutTree.from_rows(GOOD).to_rows(1), "key=1 is not a valid option: use one of 0"),
        (
            lambda: graph_of([(0, 2), (1, 2)]),
            "graph needs at most one parent per segment; got 2 parents of node 2\n"
            "  Remedy: repeat the segment under each parent: tokens after a join have other prefixes",
        ),
        (
            lambda: graph_of([(0, 1), (1, 0)]),
            "graph needs to be a forest; got the cycle [0, 1]\n  Remedy: remove an edge of the cycle",
        ),
        (
            lambda: graph_of([(0, 1)], empty=True),
            "graph needs token ids in every segment; got node 0 without a non-empty 'ids' attribute\n"
            "  Remedy: set graph.nodes[0]['ids'] to a list of token ids",
        ),
        (
            lambda: RolloutTree.from_graph([1]),
            "graph needs to be a networkx.DiGraph; got list\n"
            "  Remedy: build one with networkx.DiGraph(edges) and set 'ids' on its nodes",
        ),
    ],
)
def test_error_texts(call: Callable[[], object], text: str) -> None:
    with pytest.raises(TreecompileError) as caught:
        call()
    assert str(caught.value) == text
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def graph_of(edges: list[tuple[int, int]], empty: bool = False) -> RolloutTree:
    graph = networkx.DiGraph(edges)
    for node in graph:
        graph.nodes[node]["ids"] = [] if empty else [node]
    return RolloutTree.from_graph(graph)
