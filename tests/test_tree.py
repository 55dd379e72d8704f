"""The rollout tree against its slow twin, on real rollouts, and its errors."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tree_twin
from tests.strategies import Case, cases
from treecompile.runtime.tree import RolloutTree

Mode = Literal["step", "absolute"] | None
modes = st.sampled_from([None, "step", "absolute"])


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


@settings(max_examples=300, deadline=None)
@given(cases(), modes)
def test_random_grids_equal_the_twin(case: Case, mode: Mode) -> None:
    check(build(case, mode), case, mode)
