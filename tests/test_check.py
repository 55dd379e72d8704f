"""The audit of op rules: it passes our rules, and catches rules that say more than is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from treecompile import check
from treecompile.__main__ import main
from treecompile.passes import rule as rules
from treecompile.passes.ops import RULES, pointwise, views
from treecompile.passes.rule import Facts, Infer, Rule
from treecompile.passes.samples import Call, call, size, tokens, weight

aten = torch.ops.aten
SQUARE = check.Sizes(B=4, T=4)  # rows, tokens and features are four each
# Ops that cannot be called with sample arguments: their memory is unwritten, or they name a registered layer.
WITHOUT_SAMPLES = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    torch.ops.treecompile.leaf_experts.default,  # tests/test_leaves.py
}


def outcomes(verdicts: Iterator[check.Verdict]) -> list[check.Verdict]:
    return [verdict for verdict in verdicts if verdict.bad]


# ---- our rules ----


def test_every_rule_has_samples() -> None:
    bare = [str(op) for op, calls in check.audited_ops("", RULES) if not calls and op not in WITHOUT_SAMPLES]
    assert not bare, "add samples to the SAMPLES of their family"


def family(name: str) -> list[tuple[Any, Any]]:
    return [
        (target, rule.samples.get(target, ()))
        for rule in RULES
        if rule.family == name
        for target in rule.targets
        if isinstance(target, torch._ops.OpOverload)
    ]


@pytest.mark.parametrize("name", sorted({rule.family for rule in RULES}))
def test_rules_are_true(name: str) -> None:
    assert not outcomes(check.audit(family(name), sizes=(SQUARE,), wheres=("before",)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({rule.family for rule in RULES}))
def test_rules_are_true_at_all_sizes_and_places(name: str) -> None:
    assert not outcomes(check.audit(family(name)))


@pytest.mark.slow
def test_pointwise_by_tag_is_pointwise() -> None:
    ops = [(op, calls) for op, calls in check.audited_ops() if op in set(check.tagged_ops())]
    assert len(ops) > 150
    assert not outcomes(check.audit(ops, sizes=(SQUARE,), wheres=("before",)))


# ---- wrong rules ----


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Rule], None]:
    """Replace the rule of one op."""

    def planted(target: Any, rule: Rule) -> None:
        table = {**rules._table(), target: rule}
        monkeypatch.setattr(rules, "_table", lambda: table)

    return planted


def whole(infer: Infer, node: fx.Node) -> Facts:
    """As if the op left every element where it is."""
    return Facts([infer.dims(node.args[0])])


WRONG: dict[str, tuple[Any, Rule, list[Call]]] = {
    "flip is pointwise": (aten.flip.default, pointwise.TAGGED, [call(tokens(), [1])]),
    "cumsum mixes nothing": (aten.cumsum.default, Rule("scan", (), whole), [call(tokens(), 1)]),
    "softmax mixes nothing": (aten.softmax.int, Rule("softmax", (), whole), [call(tokens(), 1)]),
    "roll keeps the rows": (aten.roll.default, Rule("rearrange", (), whole), [call(tokens(), [1], [0])]),
    "a view keeps rows before tokens": (
        aten.reshape.default,
        Rule("view", (), whole, views.emit_view),
        [call(tokens("T B F"), [size("B"), size("T"), size("F")])],
    ),
    "a gather reads its own token": (
        aten.gather.default,
        Rule("index", (), whole),
        [call(tokens(), 1, tokens("B T F", "int", "T"))],
    ),
    "flip keeps the rows": (
        aten.flip.default,
        Rule("rearrange", (), whole),
        [call(tokens(), [0])],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught(name: str, plant: Callable[[Any, Rule], None]) -> None:
    target, rule, calls = WRONG[name]
    plant(target, rule)
    verdicts = list(check.audit([(target, calls)]))
    assert any(verdict.outcome in ("incorrect", "failed") for verdict in verdicts), verdicts
    assert "incorrect" in check.summary(verdicts) or "failed" in check.summary(verdicts)


@pytest.mark.parametrize("name", WRONG)
def test_the_same_calls_pass_with_our_rules(name: str) -> None:
    target, _, calls = WRONG[name]
    assert not outcomes(check.audit([(target, calls)]))


# ---- verdicts ----


def verdict(target: Any, sample: Call, where: str = "before") -> str:
    return check.check_call(target, sample, check.SIZES[0], where).outcome


def test_outcomes() -> None:
    assert verdict(aten.add.Tensor, call(tokens(), weight("F"))) == "packed"
    assert verdict(aten.flip.default, call(tokens(), [1]), "after") == "private"
    assert verdict(aten.flip.default, call(tokens(), [1])) == "refused"
    assert verdict(aten.dropout.default, call(tokens(), 0.5, True)) == "refused"
    assert verdict(aten.add.Tensor, call(tokens(), weight("3"))) == "idle"


def test_missing_names_ops_without_a_rule() -> None:
    assert check.missing(["add.Tensor", "aten.flip.default", "cummax.default", "no_such_op.default"]) == [
        "cummax.default",
        "no_such_op.default",
    ]


def test_tagged_ops_are_functional_and_have_no_rule_of_their_own() -> None:
    ops = check.tagged_ops()
    assert aten.add.Tensor in ops
    assert aten.add_.Tensor not in ops
    assert aten.add.out not in ops
    assert aten.where.ScalarOther not in ops


# ---- the command ----


def test_command_audits_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--op", "aten.one_hot", "--verbose"]) == 0
    assert "packed    aten.one_hot.default(tokens int[B T], 5) before" in capsys.readouterr().out


def test_command_fails_on_a_wrong_rule(
    plant: Callable[[Any, Rule], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plant(aten.diff.default, Rule("rearrange", (), whole))
    assert main(["check", "--op", "aten.diff"]) == 1
    out = capsys.readouterr().out
    assert "failed: aten.diff.default" in out or "incorrect: aten.diff.default" in out


def test_command_lists_missing_ops(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "ops.txt"
    listed.write_text("add.Tensor\naten.cummax.default\n")
    assert main(["check", "--missing", str(listed)]) == 1
    assert capsys.readouterr().out == "1 of 2 ops have no rule\n  aten.cummax.default\n"
    assert main(["check", "--op", "no such op"]) == 1


def example() -> tuple[Any, ...]:
    """For the command line: a model and a batch."""
    from tests.test_reasons import IDS, Model

    return Model(), (IDS,)


def test_command_explains(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "tests.test_check:example", "--save", str(tmp_path / "out")]) == 0
    assert "treecompile: 1 graph" in capsys.readouterr().out
    assert (tmp_path / "out" / "index.html").exists()
