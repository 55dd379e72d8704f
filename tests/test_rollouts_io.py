"""Rollout files: what is read, what is cut, and the text of every mistake."""

from __future__ import annotations

import builtins
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.rollout_files import fit_vocabulary, read_rollouts
from examples.rollouts import SHAPES, Rollout, advantages, batch_of, generate, sharing
from tests.shared_rollouts import load, needs_shared_rollouts, synthetic, write_jsonl, write_parquet
from treecompile import RolloutFileError

GOOD: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "reward": 1, "group": "a"},
    {"input_ids": [5, 6, 9], "loss_mask": [False, False, True], "reward": 0.5, "group": 3},
    {"input_ids": [5]},
    {"input_ids": [5, 6], "loss_mask": None, "reward": None, "group": None, "another field": [1]},
]


def test_reads_json_lines(tmp_path: Path) -> None:
    rollouts, notes = read_rollouts(write_jsonl(GOOD, tmp_path / "a.jsonl"))
    assert notes == []
    assert [r.input_ids.tolist() for r in rollouts] == [[5, 6, 7, 8], [5, 6, 9], [5], [5, 6]]
    assert [r.loss_mask.tolist() for r in rollouts][1:] == [[False, False, True], [True], [True, True]]
    assert [r.reward for r in rollouts] == [1.0, 0.5, 0.0, 0.0]
    assert [r.group for r in rollouts] == ["a", "3", "", ""]


def test_passes_over_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"input_ids": [1]}\n\n  \n{"input_ids": [2]}')
    assert [r.input_ids.tolist() for r in read_rollouts(path)[0]] == [[1], [2]]


def test_all_kinds_of_files_agree(tmp_path: Path) -> None:
    records = [
        {"input_ids": r.input_ids.tolist(), "loss_mask": r.loss_mask.astype(int).tolist(), "reward": r.reward}
        for r in generate("agent", rows=5, scale=0.1)
    ]
    plain = write_jsonl(records, tmp_path / "a.jsonl")
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    paths = plain, packed, write_parquet(records, tmp_path / "a.parquet")
    read = [read_rollouts(path)[0] for path in paths]
    for other in read[1:]:
        for left, right in zip(read[0], other, strict=True):
            assert left.input_ids.tolist() == right.input_ids.tolist()
            assert left.loss_mask.tolist() == right.loss_mask.tolist()
            assert (left.reward, left.group) == (right.reward, right.group)


MISTAKES = [
    pytest.param('{"input_ids": [1, 2', "is not valid JSON: Expecting ',' delimiter at column 20", id="json"),
    pytest.param("[" * 100_000, "is not valid JSON: ", id="deep"),
    pytest.param("1" * 5000, "is not valid JSON: ", id="digits"),
    pytest.param("[1, 2]", "holds a list, not an object", id="not-an-object"),
    pytest.param(
        '{"ids": [1], "mask": [1]}',
        "field 'input_ids': is missing\n  Remedy: the record has the fields: ids, mask",
        id="missing",
    ),
    pytest.param('{"input_ids": "1 2"}', "field 'input_ids': is text, not a list of integers", id="text"),
    pytest.param(
        '{"input_ids": [1, 2.5]}',
        "field 'input_ids': has a number with a point at index 1, not an integer",
        id="float",
    ),
    pytest.param(
        '{"input_ids": [[1]]}', "field 'input_ids': has a list at index 0, not an integer", id="nested"
    ),
    pytest.param('{"input_ids": [true]}', "field 'input_ids': has a boolean at index 0", id="boolean"),
    pytest.param('{"input_ids": []}', "field 'input_ids': is empty", id="no-tokens"),
    pytest.param(
        '{"input_ids": [3, -100]}', "field 'input_ids': has the negative id -100 at index 1", id="negative"
    ),
    pytest.param(
        '{"input_ids": [4294967296]}',
        "field 'input_ids': has the id 4294967296, above 2147483647",
        id="large",
    ),
    pytest.param(
        '{"input_ids": [100000000000000000000]}',
        "field 'input_ids': has an integer beyond 64 bits",
        id="huge",
    ),
    pytest.param(
        '{"input_ids": [1, 2], "loss_mask": [1]}',
        "field 'loss_mask': has 1 entries for 2 tokens\n  Remedy: give one entry per token of input_ids",
        id="mask-length",
    ),
    pytest.param(
        '{"input_ids": [1], "loss_mask": [2]}', "field 'loss_mask': has 2 at index 0", id="mask-value"
    ),
    pytest.param(
        '{"input_ids": [1], "loss_mask": 1}', "field 'loss_mask': is an integer, not a list", id="mask-type"
    ),
    pytest.param(
        '{"input_ids": [1], "reward": "high"}', "field 'reward': is text, not a number", id="reward"
    ),
    pytest.param('{"input_ids": [1], "reward": NaN}', "field 'reward': is nan", id="reward-nan"),
    pytest.param('{"input_ids": [1], "group": 1.5}', "field 'group': is a number with a point", id="group"),
]


@pytest.mark.parametrize(("line", "text"), MISTAKES)
def test_a_mistake_is_named_with_its_line_and_field(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"input_ids": [1]}}\n\n{line}\n')
    with pytest.raises(RolloutFileError) as caught:
        read_rollouts(path)
    assert str(caught.value).startswith(f"{path}, line 3")
    assert text in str(caught.value)
    assert caught.value.line == 3
    assert caught.value.field == (text.split("'")[1] if text.startswith("field") else None)


def test_empty_files(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", b""), ("b.jsonl", b"\n\n"), ("c.jsonl.gz", gzip.compress(b""))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RolloutFileError, match="holds no rollouts"):
            read_rollouts(tmp_path / name)
    with pytest.raises(RolloutFileError, match="holds no rollouts"):
        read_rollouts(write_parquet([], tmp_path / "d.parquet"))


def test_broken_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    rng = np.random.default_rng(0)
    lines = "".join(json.dumps({"input_ids": rng.integers(0, 9999, 50).tolist()}) + "\n" for _ in range(200))
    whole = gzip.compress(lines.encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        RolloutFileError, match=r"a\.jsonl\.gz, line \d+: broken gzip data .*end-of-stream"
    ) as caught:
        read_rollouts(path, max_rows=1000)
    assert caught.value.line is not None
    assert caught.value.line > 50
    path.write_text('{"input_ids": [1]}\n')
    with pytest.raises(RolloutFileError, match="line 1: broken gzip data"):
        read_rollouts(path)


def test_wrong_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input_ids": [1], "group": "\xff"}\n')
    with pytest.raises(RolloutFileError, match="is not UTF-8"):
        read_rollouts(path)


def test_names_that_are_no_rollout_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2\n")
    with pytest.raises(
        RolloutFileError, match=r"unknown suffix\n  Remedy: use one of .jsonl, .jsonl.gz, .parquet"
    ):
        read_rollouts(tmp_path / "a.csv")
    with pytest.raises(RolloutFileError, match="no such file"):
        read_rollouts(tmp_path / "absent.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(RolloutFileError, match="no such file"):
        read_rollouts(tmp_path / "folder.jsonl")


def test_mistakes_in_parquet(tmp_path: Path) -> None:
    cases = [
        ([{"ids": [1]}], "line 1, field 'input_ids': is missing"),
        ([{"input_ids": [1]}, {"input_ids": [1, -1]}], "line 2, field 'input_ids': has the negative id -1"),
        ([{"input_ids": [1]}, {"input_ids": None}], "line 2, field 'input_ids': is missing"),
        ([{"input_ids": [1.5]}], "has a number with a point at index 0"),
        ([{"input_ids": [1, 2], "loss_mask": [1]}], "has 1 entries for 2 tokens"),
    ]
    for number, (records, text) in enumerate(cases):
        with pytest.raises(RolloutFileError) as caught:
            read_rollouts(write_parquet(records, tmp_path / f"{number}.parquet"))
        assert text in str(caught.value)
    path = tmp_path / "text.parquet"
    path.write_text("not Parquet at all")
    with pytest.raises(RolloutFileError, match="cannot be read as Parquet"):
        read_rollouts(path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(RolloutFileError, match=r'pip install "treecompile\[parquet\]"'):
        read_rollouts(path)


def test_what_is_cut_is_said(tmp_path: Path) -> None:
    records = [{"input_ids": list(range(1, 11))} for _ in range(10)]
    path = write_jsonl(records, tmp_path / "a.jsonl")
    rollouts, notes = read_rollouts(path, max_rows=4)
    assert len(rollouts) == 4
    assert notes == ["kept the first 4 rows (--max-rows); the rest of a.jsonl was not read"]
    rollouts, notes = read_rollouts(path, max_tokens=35)
    assert len(rollouts) == 3
    assert notes == [
        "kept the first 3 rows: another one makes more than 35 grid tokens (--max-tokens); "
        "the rest of a.jsonl was not read"
    ]
    rollouts, notes = read_rollouts(path, max_tokens=7)
    assert [len(r.input_ids) for r in rollouts] == [7]
    assert notes[0] == "row 1 has 10 tokens: cut to its first 7 (--max-tokens)"
    assert len(notes) == 2
    assert read_rollouts(path, max_rows=10, max_tokens=100)[1] == []


def rollout(ids: list[int]) -> Rollout:
    return Rollout(np.array(ids), np.ones(len(ids), bool), 0.0, "")


def test_foreign_ids_are_mapped_and_forks_stay() -> None:
    rows = [rollout([151643, 7, 90000]), rollout([151643, 7, 5]), rollout([151643, 8])]
    mapped, vocab, notes = fit_vocabulary(rows, 64)
    assert vocab == 64
    assert [r.input_ids.tolist() for r in mapped] == [[5, 2, 4], [5, 2, 1], [5, 3]]
    assert notes == ["mapped 5 distinct ids (largest 151,643) to 1..5"]
    assert fit_vocabulary(rows, 151644) == (rows, 151644, [])
    many, vocab, notes = fit_vocabulary([rollout(list(range(1000, 1100)))], 64)
    assert vocab == 128
    assert many[0].input_ids.max() == 100
    assert notes[0].endswith("the demo model's vocabulary grows from 64 to 128")


def distinct_prefixes(rows: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[: n + 1]) for row in rows for n in range(len(row))}


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8))
def test_sharing_counts_prefixes(rows: list[list[int]]) -> None:
    found = sharing([np.array(row) for row in rows])
    nodes = distinct_prefixes(rows)
    assert (found.rows, found.tokens) == (len(rows), sum(map(len, rows)))
    assert found.distinct_tokens == len(nodes)
    assert found.distinct_pairs == sum(map(len, nodes))
    assert found.pairs == sum(len(row) * (len(row) + 1) // 2 for row in rows)
    assert found.heads == found.tokens - len(rows)
    assert found.distinct_heads == len({node[:-1] for node in nodes if len(node) > 1})


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_the_same_for_one_seed(shape: str) -> None:
    rows = [r.input_ids.tolist() for r in generate(shape, rows=9, seed=3)]
    assert len(rows) == 9
    assert rows == [r.input_ids.tolist() for r in generate(shape, rows=9, seed=3)]
    assert rows != [r.input_ids.tolist() for r in generate(shape, rows=9, seed=4)]
    assert all(r.loss_mask.any() for r in generate(shape, rows=9, seed=3))


def test_the_agent_shape_shares_as_agents_do() -> None:
    for seed in range(3):
        counted = sharing([r.input_ids for r in generate("agent", rows=12, seed=seed)])
        assert 6 < counted.tokens / counted.distinct_tokens < 10


def test_advantages() -> None:
    rows = [
        Rollout(np.array([1]), np.array([True]), reward, group)
        for reward, group in ((1, "a"), (0, "a"), (5, "b"))
    ]
    values, note = advantages(rows)
    assert note is None
    np.testing.assert_allclose(values, [1, -1, 0], atol=1e-5)
    values, note = advantages(rows[2:])
    assert values.tolist() == [1]
    assert note is not None


def test_batch() -> None:
    rows = [
        Rollout(np.array([4, 5, 6]), np.array([False, True, True]), 1.0, "a"),
        Rollout(np.array([4, 5]), np.array([True, True]), 0.0, "a"),
    ]
    batch, notes = batch_of(rows)
    assert notes == []
    assert batch.input_ids.tolist() == [[4, 5, 6], [4, 5, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    # Three tokens carry loss and have a predecessor.
    np.testing.assert_allclose(batch.weight, [[1 / 3, 1 / 3], [-1 / 3, 0]], atol=1e-5)
    assert [row.tolist() for row in batch.rows()] == [[4, 5, 6], [4, 5]]
    _, notes = batch_of([Rollout(np.array([4, 5]), np.zeros(2, bool), 1.0, "a")])
    assert notes[1] == "no token carries loss: the loss is taken over all tokens"


@needs_shared_rollouts
@pytest.mark.parametrize("name", ["tau_airline_small", "game24_tot"])
def test_real_rollouts_keep_their_forks(tmp_path: Path, name: str) -> None:
    records = load(name)[:40]
    read, _ = read_rollouts(write_jsonl(records, tmp_path / "a.jsonl"), max_rows=40, max_tokens=10**9)
    wanted = sharing([np.array(record["input_ids"]) for record in records])
    assert sharing([r.input_ids for r in read]) == wanted
    mapped, vocab, _ = fit_vocabulary(read, 2048)
    assert sharing([r.input_ids for r in mapped]) == wanted
    assert max(int(r.input_ids.max()) for r in mapped) < vocab


@needs_shared_rollouts
def test_shapes_that_break_tree_code_are_read(tmp_path: Path) -> None:
    records = synthetic("edge")
    plain, notes = read_rollouts(write_jsonl(records, tmp_path / "a.jsonl"), max_rows=999, max_tokens=10**9)
    assert (len(plain), notes) == (len(records), [])
    packed, _ = read_rollouts(write_parquet(records, tmp_path / "a.parquet"), max_rows=999, max_tokens=10**9)
    assert [r.input_ids.tolist() for r in plain] == [r.input_ids.tolist() for r in packed]
