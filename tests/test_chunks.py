"""The chunk plan against its slow twins, its rounds against a search, edge cases, texts and errors."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import chunk_twin, shared_rollouts
from tests.strategies import Case, cases, rows_with_prefixes
from treecompile.runtime import round_cuts, round_walk
from treecompile.runtime import rounds as rounds_module
from treecompile.runtime.chunks import ChunkCost, ChunkPlan, chunk_plan
from treecompile.runtime.dag import unroll
from treecompile.runtime.errors import OptionError, TreeError
from treecompile.runtime.rounds import Rounds, States, orders, plan_rounds
from treecompile.runtime.tree import RolloutTree

Aligned = Literal["trajectory", "branch"]
MODELS: tuple[States, ...] = ("boundary", "final")
aligned: st.SearchStrategy[Aligned] = st.sampled_from(["trajectory", "branch"])
chunks = st.sampled_from([1, 2, 3, 4, 5, 16])


def check(
    case: Case, tree: RolloutTree, chunk: int, alignment: Aligned, row_states: bool = False
) -> ChunkPlan:
    """Everything that the class documents, against the twin."""
    plan = chunk_plan(tree, chunk, alignment=alignment, row_states=row_states)
    rows = chunk_twin.trajectories(case, tree.row_index)
    twin = chunk_twin.build(rows, chunk, alignment == "branch", row_states)
    blocks = [tuple(plan.tokens(k).tolist()) for k in range(plan.blocks)]
    assert blocks == twin.blocks
    number = {block: k for k, block in enumerate(blocks)} | {None: -1}
    assert plan.parent.tolist() == [number[twin.parent[block]] for block in blocks]
    assert plan.owner.tolist() == [number[twin.owner.get(n)] for n in range(tree.n)]
    assert plan.replay.tolist() == [sum(twin.owner[n] != block for n in block) for block in blocks]
    assert plan.length.tolist() == [len(block) for block in blocks]
    assert plan.dense_chunks == twin.dense
    assert plan.replayed == twin.replayed
    assert plan.replayed_before == twin.replayed_before
    assert plan.after.tolist() == chunk_twin.after(plan.parent.tolist())
    if alignment == "trajectory":
        assert plan.blocks <= plan.dense_chunks
        assert all(r < chunk for r in plan.replay.tolist())
    elif not row_states:
        assert plan.replayed == 0
    assert plan.first.dtype == plan.end.dtype == plan.index.dtype == plan.owner.dtype == tree.dtype
    assert plan.parent.dtype == plan.replay.dtype == plan.offsets.dtype == plan.after.dtype == np.int64
    lasts = {block[-1]: k for k, block in enumerate(blocks)}
    assert sorted(plan.row_block.tolist()) == sorted(lasts.get(row[-1], -1) for row in rows)
    assert not row_states or -1 not in plan.row_block
    check_tails(plan, blocks)
    for states in MODELS:
        check_rounds(plan.parent, plan.rounds(states), plan.row_block.tolist() if row_states else None)
        check_calls(plan, states)
    return plan


def check_tails(plan: ChunkPlan, blocks: list[tuple[int, ...]]) -> None:
    parent = plan.tree.parent.tolist()
    for width in (1, 2, 4, 7):
        tails = plan.tails(width)
        assert tails.shape == (plan.blocks, width - 1)
        for block, tail in zip(blocks, tails.tolist(), strict=True):
            n = block[0]
            for token in tail[::-1]:
                n = parent[n] if n >= 0 else -1
                assert token == n


def check_rounds(parent: np.ndarray, rounds: Rounds, stops: list[int] | None = None) -> None:
    """A valid plan, with the figures that it gives."""
    turn, children = rounds.round.tolist(), np.bincount(parent[parent >= 0], minlength=len(parent))
    paths: dict[int, list[int]] = {}
    for k, sequence in enumerate(rounds.sequence.tolist()):
        paths.setdefault(sequence, []).append(k)
    assert sorted(paths) == list(range(len(rounds.head)))
    longest, read = [0] * rounds.count, set()
    for sequence, path in paths.items():
        assert rounds.head[sequence] == path[0]
        assert rounds.size[sequence] == len(path)
        assert rounds.source[sequence] == parent[path[0]]
        assert len({turn[k] for k in path}) == 1
        longest[turn[path[0]]] = max(longest[turn[path[0]]], len(path))
        for above, k in itertools.pairwise(path):
            assert parent[k] == above
            assert rounds.states == "boundary" or (children[above] == 1 and above not in (stops or ()))
        if parent[path[0]] >= 0:
            assert turn[parent[path[0]]] < turn[path[0]]
            read.add(int(parent[path[0]]))
    assert set(turn) == set(range(rounds.count))
    assert rounds.longest.tolist() == longest
    assert rounds.handoffs.tolist() == sorted(read)
    order = [(turn[h], h) for h in rounds.head.tolist()]
    assert order == sorted(order)


def check_calls(plan: ChunkPlan, states: States) -> None:
    rounds, written, known = plan.rounds(states), [], set()
    calls = plan.calls(states)
    assert len(calls) == rounds.count
    for call in calls:
        assert all(source < 0 or source in known for source in call.source.tolist())
        at = np.searchsorted(call.block_offsets, call.offsets)
        np.testing.assert_array_equal(call.block_offsets[at], call.offsets)
        for i, k in enumerate(call.block.tolist()):
            inside = slice(call.block_offsets[i], call.block_offsets[i + 1])
            np.testing.assert_array_equal(call.index[inside], plan.tokens(k))
            # A call counts its chunks from the start of a sequence: only the last one is partial.
            assert plan.length[k] == plan.chunk or call.block_offsets[i + 1] in call.offsets
        written += call.index[call.owned].tolist()
        known |= set(call.handoffs.tolist())
    assert sorted(written) == np.flatnonzero(plan.owner >= 0).tolist()


def build(case: Case) -> RolloutTree:
    return RolloutTree.from_grid(
        case.keys, visible=case.visible, exact=case.exact, documents=case.documents, keep_keys=True
    )


@settings(max_examples=150)
@given(cases(), chunks, aligned, st.booleans())
def test_random_grids_equal_the_twin(case: Case, chunk: int, alignment: Aligned, row_states: bool) -> None:
    check(case, build(case), chunk, alignment, row_states)


@settings(max_examples=60)
@given(rows_with_prefixes(max_rows=16, max_length=20, vocab=2), chunks, aligned, st.booleans())
def test_many_rows_equal_the_twin(case: Case, chunk: int, alignment: Aligned, row_states: bool) -> None:
    check(case, build(case), chunk, alignment, row_states)


# ---- rounds ------------------------------------------------------------------------------------------------


def solve(parent: list[int], states: States) -> Rounds:
    above = np.array(parent, np.int64)
    rounds = plan_rounds(above, np.array(chunk_twin.after(parent), np.int64), states)
    check_rounds(above, rounds)
    return rounds


def figures(rounds: Rounds) -> chunk_twin.Cost:
    return rounds.count, int(rounds.longest.sum()), len(rounds.handoffs)


@pytest.mark.parametrize("states", MODELS)
def test_all_forests_of_seven_blocks_are_optimal(states: States) -> None:
    shapes = [parent for count in range(1, 8) for parent in chunk_twin.forests(count)]
    assert len(shapes) == 199
    for parent in shapes:
        rounds = solve(parent, states)
        assert figures(rounds) == chunk_twin.best(parent, states == "boundary"), parent
        assert rounds.proved == (True, True), parent


@st.composite
def preorders(draw: st.DrawFn, least: int, most: int) -> list[int]:
    """Parents in preorder."""
    parent: list[int] = []
    for n in range(draw(st.integers(least, most))):
        above = n - 1
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))):
            above = parent[above] if above >= 0 else -1
        parent.append(above)
    return parent


@settings(max_examples=25, deadline=None)
@given(preorders(8, 10), st.sampled_from(MODELS))
def test_larger_forests_are_optimal(parent: list[int], states: States) -> None:
    rounds = solve(parent, states)
    assert figures(rounds) == chunk_twin.best(parent, states == "boundary")
    assert rounds.proved == (True, True)


def test_all_small_forests_with_stops_are_optimal() -> None:
    for parent in [parent for count in range(1, 6) for parent in chunk_twin.forests(count)]:
        above, after = np.array(parent), np.array(chunk_twin.after(parent))
        for stops in itertools.product([False, True], repeat=len(parent)):
            rounds = plan_rounds(above, after, "final", np.array(stops))
            check_rounds(above, rounds, np.flatnonzero(stops).tolist())
            assert figures(rounds) == chunk_twin.best(parent, False, stops), (parent, stops)
            assert rounds.proved == (True, True)
    with_stops = plan_rounds(above, after, "boundary", np.ones(len(parent), bool))
    assert figures(with_stops) == chunk_twin.best(parent, True)


def slow_orders(parent: list[int], states: States) -> list[int]:
    out = [1] * len(parent)
    for n in range(len(parent) - 1, -1, -1):
        below = sorted((out[c] for c in range(len(parent)) if parent[c] == n), reverse=True)
        if states == "final":
            out[n] = below[0] + (len(below) > 1) if below else 1
        else:
            out[n] = below[0] + (len(below) > 1 and below[0] == below[1]) if below else 1
    return out


@settings(max_examples=150)
@given(preorders(0, 60), st.sampled_from(MODELS))
def test_orders_and_least_rounds(parent: list[int], states: States) -> None:
    above, after = np.array(parent, np.int64), np.array(chunk_twin.after(parent), np.int64)
    expected = slow_orders(parent, states)
    assert orders(above, after, states).tolist() == expected
    assert solve(parent, states).count == max(expected, default=0)


@settings(max_examples=60)
@given(preorders(0, 40), st.sampled_from(MODELS))
def test_small_budgets_give_valid_plans(parent: list[int], states: States) -> None:
    full = solve(parent, states)
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_walk, "STATES", -1)
        plans.append(solve(parent, states))
        patch.setattr(round_cuts, "VISITS", 0)
        plans.append(solve(parent, states))
        patch.setattr(rounds_module, "FIRST", -1)
        plans.append(solve(parent, states))
    assert not parent or plans[-1].proved == (False, False)
    assert figures(plans[0])[:2] == figures(full)[:2]
    for plan in plans:
        assert plan.count == full.count
        assert not full.proved[0] or figures(plan)[1] >= figures(full)[1]
        assert not plan.proved[0] or figures(plan)[1] == figures(full)[1]
        assert not (full.proved[1] and plan.proved[1]) or figures(plan) == figures(full)


@settings(max_examples=40, deadline=None)
@given(preorders(12, 30), st.sampled_from(MODELS))
def test_the_search_finds_what_trying_all_cuts_finds(parent: list[int], states: States) -> None:
    rounds = solve(parent, states)
    total = int(rounds.longest.sum())
    if math.comb(total - 1, rounds.count - 1) > 2_000:
        return
    assert rounds.proved[0]
    children = [[c for c in range(len(parent)) if parent[c] == n] for n in range(len(parent))]
    # Single blocks as chains: a chain may be cut anywhere, so nothing but branching rounds up.
    for cuts in itertools.combinations(range(1, total - 1), rounds.count - 1):
        assert _need(parent, children, cuts, states) >= total, cuts
    assert total >= max(_depths(parent))


def _depths(parent: list[int]) -> list[int]:
    out: list[int] = []
    for above in parent:
        out.append(1 + (out[above] if above >= 0 else 0))
    return out


def _need(parent: list[int], children: list[list[int]], cuts: tuple[int, ...], states: States) -> float:
    """Steps that the forest needs if rounds end at these cuts, counted from the last step backwards."""
    need = [1.0] * len(parent)
    for n in range(len(parent) - 1, -1, -1):
        below = sorted((need[c] for c in children[n]), reverse=True)
        if len(below) > 1:
            value = below[states == "boundary"]
            need[n] += max(below[0], next((q for q in cuts if q >= value), math.inf))
        elif below:
            need[n] += below[0]
    return max(need[n] for n, above in enumerate(parent) if above < 0)


def test_a_trie_of_high_order_needs_a_search() -> None:
    # Four rounds: the first choice of cuts is not always the best; the plan says what is proved.
    def binary(depth: int, length: int) -> list[int]:
        parent: list[int] = []

        def grow(above: int, left: int) -> None:
            for _ in range(length + left % 2):
                parent.append(above)
                above = len(parent) - 1
            for _ in range(2 if left else 0):
                grow(above, left - 1)

        grow(-1, depth)
        return parent

    for states in MODELS:
        rounds = solve(binary(3, 2), states)
        assert rounds.count == 4
        assert rounds.proved[0]
        again = solve(binary(3, 2), states)
        np.testing.assert_array_equal(rounds.round, again.round)


# ---- named trees -------------------------------------------------------------------------------------------


def from_rows(rows: list[list[int]]) -> tuple[Case, RolloutTree]:
    length = max(map(len, rows), default=0)
    ids = np.zeros((len(rows), length), np.int64)
    visible = np.zeros(ids.shape, bool)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
        visible[b, : len(row)] = True
    case = Case((ids,), visible)
    return case, build(case)


def forked(at: int, lengths: tuple[int, ...] = (70, 30)) -> list[list[int]]:
    return [[*range(1, at + 1), *range(1000 * i, 1000 * i + size)] for i, size in enumerate(lengths, 1)]


NAMED: dict[str, list[list[int]]] = {
    "empty": [],
    "empty rows": [[], []],
    "one token": [[1]],
    "one row": [list(range(1, 200))],
    "chain of prefixes": [list(range(1, k)) for k in range(2, 201, 13)],
    "duplicates": [list(range(1, 100))] * 3,
    "star": [[1, *range(1000 * i, 1000 * i + 50 + i)] for i in range(1, 34)],
    "two roots": [list(range(1, 80)), list(range(500, 700))],
    "fork at the last token": [[*range(1, 78), 1000], [*range(1, 78), 1001]],
    "comb": [[*range(1, 3 * k + 1), *range(1000 * k, 1000 * k + 5)] for k in range(1, 41)],
    **{f"fork at {at}": forked(at) for at in (1, 63, 64, 65, 127, 128, 129)},
}


@pytest.mark.parametrize("alignment", ["trajectory", "branch"])
@pytest.mark.parametrize("name", NAMED)
def test_named_trees(name: str, alignment: Aligned) -> None:
    case, tree = from_rows(NAMED[name])
    for row_states in (False, True):
        plan = check(case, tree, 64, alignment, row_states)
        assert str(plan)
        assert plan.text(3)


@pytest.mark.parametrize(
    ("at", "blocks", "replayed"),
    [(63, 5, 63), (64, 4, 0), (65, 4, 1), (127, 6, 63), (128, 5, 0), (129, 5, 1)],
)
def test_forks_beside_a_boundary(at: int, blocks: int, replayed: int) -> None:
    plan = chunk_plan(from_rows(forked(at))[1])
    assert (plan.blocks, plan.replayed) == (blocks, replayed)
    assert plan.rounds("boundary").count == (1 if at < 64 else 2)


def test_forks_in_one_window_share_a_handoff() -> None:
    rows = [[*range(1, 70 + k), *range(1000 * k, 1000 * k + 60)] for k in range(1, 9)]
    plan = chunk_plan(from_rows(rows)[1])
    for states in MODELS:
        assert plan.rounds(states).handoffs.tolist() == [0]
        assert plan.rounds(states).count == 2
    assert "1 state for 7 forks inside a chunk" in str(plan)


def test_each_row_has_its_own_grid() -> None:
    """Left pads move no boundary, dropped or exact, and neither do holes that are dropped."""
    ids = np.array([[0, 0, 0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0, 0, 0], [1, 2, 0, 3, 4, 0, 6, 0]])
    for exact in (None, ids == 0):
        case = Case((ids,), ids != 0, exact)
        tree = build(case)
        plan = check(case, tree, 2, "trajectory")
        lengths = plan.length.tolist()
        assert lengths == [2, 2, 1, 1]
        pads = tree.subtree_end == np.arange(tree.n)
        np.testing.assert_array_equal(plan.owner < 0, pads)


def test_a_mask_in_the_key_makes_holes_tokens() -> None:
    ids = np.array([[1, 2, 0, 3, 4], [1, 2, 7, 3, 4]])
    mask = np.array([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
    tree = RolloutTree.from_grid([ids, mask])
    assert chunk_plan(tree, 3).length.tolist() == [3, 2, 3, 2]


def test_auto_takes_the_cheaper_alignment() -> None:
    tree = from_rows(forked(65, (60,) * 8))[1]
    both = {name: chunk_plan(tree, alignment=name) for name in ("trajectory", "branch")}
    for states in MODELS:
        costs = {name: ChunkCost().of(plan, states) for name, plan in both.items()}
        chosen = chunk_plan(tree, alignment="auto", states=states)
        assert chosen.alignment == min(costs, key=lambda name: costs[name])
    assert chunk_plan(tree, alignment="auto", cost=ChunkCost(0, 0, 0)).alignment == "trajectory"


def test_int64_indices() -> None:
    ids = np.broadcast_to(np.array([[1, 2, 3]]), (1 << 4, 3))
    tree = RolloutTree.from_grid([ids])
    assert chunk_plan(tree, 2).index.dtype == np.int32
    wide = RolloutTree.from_grid([ids])
    object.__setattr__(wide, "batch", 1 << 31)
    assert chunk_plan(wide, 2).index.dtype == np.int64


@shared_rollouts.needs_shared_rollouts
@pytest.mark.parametrize("chunk", [16, 64])
def test_generated_edge_cases_equal_the_twin(chunk: int) -> None:
    case, tree = from_rows([record["input_ids"] for record in shared_rollouts.synthetic("edge")])
    for alignment in ("trajectory", "branch"):
        for row_states in (False, True):
            check(case, tree, chunk, alignment, row_states)


# ---- graphs, texts, errors ---------------------------------------------------------------------------------


def test_the_plan_is_a_graph() -> None:
    plan = chunk_plan(from_rows(NAMED["comb"])[1], 16)
    graph = plan.graph
    assert networkx.is_forest(graph.to_undirected())
    assert len(graph) == plan.blocks
    assert [(p, k) for k, p in enumerate(plan.parent.tolist()) if p >= 0] == sorted(
        graph.edges, key=lambda e: e[1]
    )
    rounds = plan.rounds()
    handed = {parent for parent, _, crosses in graph.edges.data("handoff") if crosses}
    assert sorted(handed) == rounds.handoffs.tolist()
    assert [graph.nodes[k]["round"] for k in graph] == rounds.round.tolist()
    assert [graph.nodes[k]["strahler"] for k in graph] == plan.strahler.tolist()


def test_text() -> None:
    assert chunk_plan(from_rows(forked(65))[1]).text() == (
        "chunk plan: C=64, aligned to trajectories, 165 packed tokens\n"
        "  blocks   4 of 5 dense chunks (1.25x)\n"
        "  replay   1 token before absorbing prefixes, 1 after; 1 state for 1 fork inside a chunk\n"
        "  rounds   2 with boundary states (Strahler number 2): longest sequences 1 + 2 = 3, 1 handoff\n"
        "  rounds   2 with final states: longest sequences 1 + 2 = 3, 1 handoff\n"
        "╙── 0  64 tok  round 0\n"
        "    ├─╼ 1  64 tok  round 1\n"
        "    │   └─╼ 2  7 tok  round 1\n"
        "    └─╼ 3  30 tok + 1 replayed  round 1"
    )


def test_a_dag_is_unrolled_to_its_paths() -> None:
    graph = networkx.DiGraph([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("d", "e"), ("d", "f")])
    networkx.set_node_attributes(graph, {n: [ord(n), ord(n) + 100] for n in graph}, "ids")
    plan = chunk_plan(graph, 2)
    paths = [list(map(ord, path)) for path in ("abde", "acde", "abdf", "acdf")]
    assert [row[::2].tolist() for row in plan.tree.to_rows()] == paths
    assert plan.blocks == 9
    forest = unroll(graph)
    assert unroll(forest) is forest


def test_dags_that_are_refused() -> None:
    merge = networkx.DiGraph([("a", "c"), ("b", "c")])
    merge.nodes["c"]["ends"] = [(0, 1)]
    with pytest.raises(TreeError, match="one path to every segment in which a row ends"):
        unroll(merge)
    with pytest.raises(TreeError, match="no cycles"):
        unroll(networkx.DiGraph([(0, 1), (1, 2), (2, 1)]))
    with pytest.raises(TreeError, match=r"networkx\.DiGraph"):
        unroll(networkx.Graph())
    layers = [[(i, j) for j in range(2)] for i in range(40)]
    wide = networkx.DiGraph((a, b) for up, down in itertools.pairwise(layers) for a in up for b in down)
    with pytest.raises(TreeError, match="paths"):
        unroll(wide)


def test_wrong_options() -> None:
    tree = RolloutTree.from_rows([[1, 2]])
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(OptionError, match="chunk"):
            chunk_plan(tree, wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="Did you mean 'branch'"):
        chunk_plan(tree, alignment="branches")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="states"):
        chunk_plan(tree, states="all")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="states"):
        chunk_plan(tree).rounds("all")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="states"):
        orders(np.zeros(0, int), np.zeros(0, int), "all")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="width"):
        chunk_plan(tree).tails(0)
