"""The main job, small: its exit status, what it prints, and the sums behind the ideal."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import train_step
from examples.baselines import LogProbs, log_probs_of, small_model, without_mask
from examples.measure import (
    Component,
    Law,
    Measurement,
    Run,
    default_microbatches,
    gradient_differences,
    law_of,
)
from examples.rollouts import Sharing, batch_of, generate, sharing
from tests.shared_rollouts import load, needs_shared_rollouts, write_jsonl

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def threads() -> Any:
    """The demo may set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_demo_keeps_the_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "result.json"
    assert train_step.main(["--fast", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "4 calls packed, 0 dense" in text
    assert "tree_attention                                   1\n" in text
    assert text.endswith("ok: same log-probs, same gradients\n")
    result = json.loads(out.read_text())
    assert result["failed"] == []
    assert result["sharing"]["distinct_tokens"] == 60
    assert result["speedup"] > 0
    assert result["options"]["shape"] == "agent"
    assert set(result["machine"]) == {"device", "threads", "torch", "python"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["grpo", "search", "comb"])
def test_the_demo_keeps_the_law_for_other_shapes(shape: str) -> None:
    assert train_step.main(["--fast", "--shape", shape, "--seed", "1"]) == 0


def test_the_demo_runs_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = list(range(150000, 150020))
    records = [{"input_ids": [*shared, k, 3, k], "reward": k % 2} for k in range(40, 46)]
    path = write_jsonl(records, tmp_path / "a.jsonl")
    assert train_step.main(["--fast", "--rollouts", str(path), "--max-rows", "4"]) == 0
    text = capsys.readouterr().out
    assert "note: kept the first 4 rows (--max-rows); the rest of a.jsonl was not read" in text
    assert "note: mapped 25 distinct ids (largest 150,019) to 1..25" in text
    assert "packed tokens 32" in text


def test_a_bad_file_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [1, -2]}\n')
    assert train_step.main(["--rollouts", str(path)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert f"{path}, line 1, field 'input_ids': has the negative id -2 at index 1" in found.err


def test_a_broken_law_or_a_slow_run_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(model: nn.Module, compiler: str) -> LogProbs:
        right = log_probs_of(model)

        def log_probs(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return right(input_ids, attention_mask) * 1.001

        return log_probs

    monkeypatch.setattr(train_step, "compiled", wrong)
    assert train_step.main(["--fast", "--min-speedup", "1000"]) == 1
    text = capsys.readouterr().out
    assert "FAILED: the law: log-probs differ by" in text
    assert "FAILED: the law: gradient of model.embed_tokens.weight differs by 1.0e-03" in text
    assert "FAILED: speed-up" in text
    assert "0 calls packed" in text


@needs_shared_rollouts
@pytest.mark.slow
def test_the_demo_runs_on_real_rollouts(tmp_path: Path) -> None:
    records = load("game24_tot")[:60]
    path = write_jsonl(records, tmp_path / "a.jsonl")
    assert train_step.main(["--fast", "--rollouts", str(path), "--max-rows", "12"]) == 0


def run(name: str, *seconds: float) -> Run:
    return Run(name, 1, 0.0, seconds)


def measurement(**changed: Any) -> Measurement:
    counted = Sharing(2, 100, 50, 1000, 400, 98, 48)
    parts = (
        Component("token-wise", 6.0, 60.0, 120, 40),
        Component("attention", 3.0, 30.0, 100, 50),
        Component("head + loss", 1.0, 10.0, 120, 30),
    )
    law = Law(0.0, 0.0, 0.0, "w", 0.0, ())
    whole = Measurement(
        120, 60, counted, (run("a", 12, 11, 10), run("b", 10, 10)), run("t", 2.5), parts, law, 0.5
    )
    return dataclasses.replace(whole, **changed)


def test_the_ideal_weights_the_ratios_by_time() -> None:
    found = measurement()
    assert found.best.name == "b"
    assert found.speedup == 4.0
    assert found.ideal == pytest.approx(10 / (6 / 3 + 3 / 2 + 1 / 4))
    assert found.ideal_by_flops == pytest.approx(found.ideal)
    assert found.as_dict()["of_ideal"] == pytest.approx(4.0 / found.ideal)


def options(**given: Any) -> argparse.Namespace:
    made = train_step.parser().parse_args([])
    for name, value in given.items():
        setattr(made, name, value)
    return made


def test_verdict_says_what_is_wrong() -> None:
    assert train_step.verdict(measurement(), True, options()) == []
    slow = measurement(tree=run("t", 5.0))
    assert train_step.verdict(slow, True, options()) == [
        "speed-up 2.00x over the fastest dense run is below 3x",
        "speed-up 2.00x is 0.75 of the ideal, below 0.8",
    ]
    # Other rollouts promise nothing, unless asked to.
    assert train_step.verdict(slow, True, options(rollouts="a.jsonl")) == []
    assert train_step.verdict(slow, True, options(shape="grpo")) == []
    assert len(train_step.verdict(slow, True, options(shape="grpo", min_speedup=2.5))) == 1
    dense = ["the model runs dense, for the reason above"]
    assert train_step.verdict(measurement(), False, options()) == dense
    broken = measurement(law=Law(1.0, 0.0, 0.0, "w", 0.0, ("log-probs differ",)))
    assert train_step.verdict(broken, True, options(rollouts="a.jsonl")) == ["the law: log-probs differ"]


def test_the_law_allows_twice_the_null() -> None:
    assert law_of(1.9e-5, {"w": 0.9e-5}, 0.0, {"w": 0.0}).broken == ()
    assert law_of(3.9e-5, {"w": 3.9e-5}, 2e-5, {"w": 2e-5}).broken == ()
    assert len(law_of(4.1e-5, {"w": 4.1e-5}, 2e-5, {"w": 2e-5}).broken) == 2
    assert len(law_of(float("nan"), {"w": float("nan")}, 0.0, {}).broken) == 2
    # The null of another parameter allows nothing.
    assert len(law_of(0.0, {"w": 2e-5}, 0.0, {"w": 0.0, "v": 1.0}).broken) == 1


def test_missing_gradients_break_the_law() -> None:
    one = torch.ones(2)
    assert gradient_differences({"w": one}, {"w": one, "v": one}) == {"v": float("inf")}
    assert gradient_differences({"w": one}, {"w": one * 1.5})["w"] == pytest.approx(0.5)
    assert gradient_differences({"w": one * 0}, {"w": one * 0})["w"] == 0


def test_microbatches_divide_the_rows() -> None:
    assert default_microbatches(12) == (1, 2, 4, 12)
    assert default_microbatches(7) == (1, 7)
    assert default_microbatches(1) == (1,)


def test_the_baseline_without_a_mask_is_the_model() -> None:
    model = small_model(hidden=128, layers=2, vocab=64)
    batch, _ = batch_of(generate("comb", rows=4, scale=0.03, vocab=64))
    kept = batch.attention_mask[:, 1:].bool()
    wanted = log_probs_of(model)(batch.input_ids, batch.attention_mask)
    found = log_probs_of(without_mask(model))(batch.input_ids, batch.attention_mask)
    torch.testing.assert_close(found[kept], wanted[kept], atol=1e-5, rtol=0)


def test_the_tree_packs_what_sharing_counts() -> None:
    from treecompile import RolloutTree

    for shape in ("agent", "search"):
        rows = [r.input_ids for r in generate(shape, rows=6, scale=0.1)]
        assert RolloutTree.from_rows(rows).n == sharing(rows).distinct_tokens
