"""Heads that are written as one op: which are, which must not be, that they give what they gave, and what they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import treecompile
from tests.law import VOCAB, Toy, batch, check, compiled, counting
from tests.zoo import Loss
from treecompile.passes import heads
from treecompile.runtime.ops import selective_log_probs, selective_log_probs_backward
from treecompile.runtime.ops.selective_log_probs import _backward, _forward
from treecompile.runtime.program import TreeProgram

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Tail = Callable[..., Any]
# Rows of a chunk of [rows, VOCAB] in fp64: a few of the rows that a batch has.
FEW = 4 * VOCAB * 8


def picked(x: Tensor, labels: Tensor) -> Tensor:
    return x.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)


def log_probs(x: Tensor, labels: Tensor) -> Tensor:
    return picked(x.log_softmax(-1), labels)


def flat(x: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(x[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), **settings)


def entropy(x: Tensor) -> Tensor:
    logs = x.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def entropy_by_softmax(x: Tensor) -> Tensor:
    return -(x.softmax(-1) * x.log_softmax(-1)).sum(-1, keepdim=True).squeeze(-1)


def softcap(x: Tensor) -> Tensor:
    return torch.tanh(x / 2.0) * 2.0


# What reads the logits x, with ids i, mask m, labels y and weights w.
FUSED: dict[str, Tail] = {
    "log-softmax and gather": lambda x, i, m, y, w: (log_probs(x, y) * w).sum(),
    "labels of the next token": lambda x, i, m, y, w: (log_probs(x[:, :-1], i[:, 1:]) * w[:, 1:]).sum(),
    "log-probs returned": lambda x, i, m, y, w: log_probs(x[:, :-1], i[:, 1:]),
    "sliced twice": lambda x, i, m, y, w: log_probs(x[:, :-1][:, -4:], y[:, -4:]).sum(),
    "gather minus log-sum-exp": lambda x, i, m, y, w: ((picked(x, y) - x.logsumexp(-1)) * w).sum(),
    "log-sum-exp alone beside it": lambda x, i, m, y, w: (
        log_probs(x, y) * w + x.logsumexp(-1).square()
    ).mean(),
    "cross-entropy mean": lambda x, i, m, y, w: flat(x, y),
    "cross-entropy sum": lambda x, i, m, y, w: flat(x, y, reduction="sum"),
    "cross-entropy none": lambda x, i, m, y, w: (flat(x, y, reduction="none") * w[:, 1:].flatten()).sum(),
    "cross-entropy ignoring 3": lambda x, i, m, y, w: flat(x, y.clamp(min=0), ignore_index=3),
    "temperature": lambda x, i, m, y, w: (log_probs(x[:, :-1] / 0.7, y[:, 1:]) * w[:, 1:]).sum(),
    "temperature in place": lambda x, i, m, y, w: (log_probs(x.div_(0.7), y) * w).sum(),
    "factor": lambda x, i, m, y, w: (log_probs(1.3 * x, y) * w).sum(),
    "temperature tensor": lambda x, i, m, y, w: (log_probs(x / torch.tensor(0.7), y) * w).sum(),
    "softcap": lambda x, i, m, y, w: (log_probs(softcap(x), y) * w).sum(),
    "softcap and temperature": lambda x, i, m, y, w: flat(softcap(x) * (1 / 0.7), y),
    "entropy beside it": lambda x, i, m, y, w: ((log_probs(x, y) + 0.1 * entropy(x)) * w).sum(),
    "entropy by softmax": lambda x, i, m, y, w: ((log_probs(x, y) + 0.1 * entropy_by_softmax(x)) * m).sum(),
    "entropy of the batch": lambda x, i, m, y, w: (log_probs(x, y) * w).sum() + entropy(x).mean(),
}


def _without_gradient_between(x: Tensor, i: Tensor, m: Tensor, y: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        old = x.logsumexp(-1)
    return ((picked(x, y) - old) * w).sum()


# Something else reads the logits, or what stands between them and the pick.
PLAIN: dict[str, Tail] = {
    "logits returned": lambda x, i, m, y, w: ((log_probs(x, y) * w).sum(), x),
    "log-softmax returned": lambda x, i, m, y, w: (picked(logs := x.log_softmax(-1), y).sum(), logs),
    "scaled logits returned": lambda x, i, m, y, w: (log_probs(warm := x / 0.7, y).sum(), warm),
    "arg-max beside it": lambda x, i, m, y, w: (log_probs(x, y) * w).sum() + (x.argmax(-1) == y).sum(),
    "two labels": lambda x, i, m, y, w: (log_probs(x, y) * w).sum() + (log_probs(x, (y + 1) % 5) * w).sum(),
    "two temperatures": lambda x, i, m, y, w: (log_probs(x, y) * w + x.div(2.0).logsumexp(-1)).sum(),
    "detached logits": lambda x, i, m, y, w: (log_probs(x.detach(), y) * w).sum() + x.sum(),
    "temperature by row": lambda x, i, m, y, w: (log_probs(x / (1.0 + i[:, :1, None]), y) * w).sum(),
    "masked columns": lambda x, i, m, y, w: (
        log_probs(x.masked_fill(torch.arange(VOCAB) == 2, -9.0), y) * w
    ).sum(),
    "fewer columns": lambda x, i, m, y, w: (log_probs(x[..., :9], y % 9) * w).sum(),
    "smoothed": lambda x, i, m, y, w: flat(x, y, label_smoothing=0.1),
    "another function of the probabilities": lambda x, i, m, y, w: (
        (log_probs(x, y) * w).sum() + x.log_softmax(-1).exp().square().sum(-1).sum()
    ),
    "entropy of other logits": lambda x, i, m, y, w: (
        (log_probs(x, y) * w).sum() + (x.softmax(-1) * x.flip(-1).log_softmax(-1)).sum(-1).sum()
    ),
    "entropy over another dim": lambda x, i, m, y, w: (
        (log_probs(x, y) * w).sum() + (x.softmax(-1) * x.log_softmax(-1)).sum()
    ),
    "log-sum-exp over the grid": lambda x, i, m, y, w: (log_probs(x, y) * w).sum() + x.logsumexp(1).sum(),
    "log-sum-exp without a gradient": _without_gradient_between,
}
# Those that a wrong match would change: the numbers are compared, too.
EXACT = [PLAIN[name] for name in ("detached logits", "temperature by row", "log-sum-exp without a gradient")]


def fused(model: nn.Module, *args: Any) -> int:
    """How many heads of a model are fused."""
    report = treecompile.explain(model, *args)
    assert report.supported
    found = report.rewritten
    assert not (found["selective_log_probs"] and found["gather_expand"])
    return int(found["selective_log_probs"])


def inputs(pad: str = "mixed", **settings: Any) -> tuple[Tensor, ...]:
    b = batch(pad=pad, **settings)
    return b.ids, b.mask, b.labels, b.weights


@pytest.fixture(autouse=True)
def few_rows_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "CHUNK_BYTES", FEW)


@pytest.mark.parametrize("tail", FUSED.values(), ids=FUSED.keys())
def test_fires_and_the_law_holds(tail: Tail) -> None:
    model, args = Loss(tail, layers=1), inputs("none" if tail is FUSED["log-probs returned"] else "mixed")
    assert fused(model, *args) == 1
    check(model, *args)


@pytest.mark.parametrize("tail", PLAIN.values(), ids=PLAIN.keys())
def test_does_not_fire(tail: Tail) -> None:
    """Where the op would compute the head again, or not what the model computes: as before, and exact."""
    model, args = Loss(tail, layers=1), inputs("none")
    assert fused(model, *args) == 0
    if tail in EXACT:
        check(model, *args)


def test_a_trained_temperature_stays_outside() -> None:
    model = Loss(lambda x, i, m, y, w: (log_probs(x / model.warmth, y) * w).sum(), layers=1)
    model.warmth = nn.Parameter(torch.tensor(0.8, dtype=torch.float64))
    assert fused(model, *inputs()) == 0
    check(model, *inputs())


# ---- models -------------------------------------------------------------------------------------------------------


class Kept(nn.Module):
    """A head of the last positions, as of ``logits_to_keep``."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.inner = head

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.inner(h[:, -4:])
        return out


class Autocast(Loss):
    """Logits under an autocast that the graph enters, and the loss there, too, or in float32."""

    def __init__(self, whole: bool) -> None:
        super().__init__(FUSED["temperature"] if whole else self.in_float32, layers=1)
        self.whole = whole

    @staticmethod
    def in_float32(x: Tensor, i: Tensor, m: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (log_probs(x.float() / 0.7, y) * w).sum()

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = Toy.forward(self, ids, mask)
            if self.whole:
                found: Tensor = self.loss(logits, ids, mask, labels, weights)
        return found if self.whole else self.loss(logits, ids, mask, labels, weights)


class CheckpointedLoss(Loss):
    """Head and loss under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__(FUSED["log-softmax and gather"], layers=1)
        self.inner, self.head = self.head, nn.Identity()

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        def rest(h: Tensor) -> Tensor:
            found: Tensor = self.loss(self.inner(h), ids, mask, labels, weights)
            return found

        found: Tensor = checkpoint(rest, Toy.forward(self, ids, mask), use_reentrant=False)
        return found


def without_bias(model: Loss) -> None:
    model.head = nn.Linear(12, VOCAB, bias=False).double()


def tied(model: Loss) -> None:
    without_bias(model)
    model.head.weight = model.tokens.weight


def frozen(model: Loss) -> None:
    model.head.requires_grad_(False)


def frozen_below(model: Loss) -> None:
    model.requires_grad_(False)
    model.head.requires_grad_(True)


def kept(model: Loss) -> None:
    model.head = Kept(model.head)
    model.loss = lambda x, i, m, y, w: (log_probs(x, y[:, -4:]) * w[:, -4:]).sum()


@pytest.mark.parametrize("change", [without_bias, tied, frozen, frozen_below, kept])
def test_models(change: Callable[[Loss], None]) -> None:
    model = Loss(FUSED["temperature"], layers=1)
    change(model)
    assert fused(model, *inputs()) == 1
    check(model, *inputs())


def test_without_gradients() -> None:
    model = Loss(FUSED["log-probs returned"], layers=1)
    check(model, *inputs("none"), around=torch.no_grad, backward=False)


def test_policy_and_reference() -> None:
    policy, reference = Toy(layers=1), Toy(layers=1)

    def step(ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            old = log_probs(reference(ids) / 0.7, labels)
        return ((log_probs(policy(ids) / 0.7, labels) - old).exp() * weights).sum()

    ids, _, labels, weights = inputs("none")
    assert fused(step, ids, labels, weights) == 2  # type: ignore[arg-type]
    check(step, ids, labels, weights, modules=[policy, reference])


def test_checkpointed() -> None:
    model = CheckpointedLoss()
    assert fused(model, *inputs()) == 1
    check(model, *inputs())


@pytest.mark.parametrize(("whole", "chain"), [(False, "'to:float32 div:0.7'"), (True, "'div:0.7'")])
def test_autocast_in_the_graph(whole: bool, chain: str) -> None:
    """What the captured graph casts is cast here, and nothing else is."""
    model = Autocast(whole).float()
    report = treecompile.explain(model, *inputs())
    assert report.rewritten["selective_log_probs"] == 1
    assert chain in report["packed"]
    assert "aten.to.dtype(head_weight, torch.bfloat16)" in report["packed"]
    check(model, *inputs(), tolerance=3e-2, floor=1.0)


def test_autocast_around_the_graph() -> None:
    model = Loss(FUSED["log-softmax and gather"], layers=1).float()
    check(model, *inputs(), around=lambda: torch.autocast("cpu", torch.bfloat16), tolerance=3e-2, floor=1.0)


@pytest.mark.parametrize("last", [1, 2])
def test_one_row_and_none(last: int) -> None:
    """Positions before the last one, or two: one for all rows, or none."""
    b = batch(count=3, length=2, pad="none")
    b.ids[:, 0] = 1
    model = Loss(lambda x, i, m, y, w: log_probs(x[:, :-last], y[:, last:].clamp(min=0)).sum(), layers=1)
    check(model, b.ids, b.mask, b.labels, b.weights)


def test_compiled_once_for_heads_that_fit_a_chunk_and_once_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heads, "CHUNK_BYTES", 20 * VOCAB * 8)
    model = Loss(FUSED["entropy beside it"], layers=1)
    call = compiled(model, dynamic=True)
    with counting() as seen:
        for count, length in ((2, 5), (6, 9), (8, 16), (3, 6)):
            args = inputs("none", count=count, length=length)
            torch.testing.assert_close(call(*args), model(*args))
    assert seen["packed"] == 4
    assert seen["compiled"] == 2


def test_the_report_names_the_line() -> None:
    report = treecompile.explain(Loss(FUSED["cross-entropy mean"], layers=1), *inputs())
    (rewrite,) = [r for r in report.graphs[0].draft.rewrites if r.kind == "selective_log_probs"]
    assert "F.cross_entropy" in rewrite.source
    assert "in chunks of" in rewrite.after


# ---- what exists --------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest float tensor that any op gives, those inside of the fused one included."""

    numel = 0
    kernels: ClassVar[dict[Any, Any]] = {
        selective_log_probs: _forward,
        selective_log_probs_backward: _backward,
    }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self if func in self.kernels else contextlib.nullcontext():
            out = self.kernels.get(func, func)(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.is_floating_point():
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("name", ["next", "loss", "entropy"])
def test_no_more_than_a_chunk_of_logits_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tails: dict[str, Tail] = {
        "next": lambda x, i, m, y, w: (log_probs(x[:, :-1] / 0.7, y[:, 1:]) * w[:, 1:]).sum(),
        "loss": lambda x, i, m, y, w: F.cross_entropy(x.flatten(0, 1), y.flatten()),
        "entropy": lambda x, i, m, y, w: ((log_probs(x, y) + entropy(x)) * w).sum(),
    }
    columns = 200
    weight = columns * 12  # the largest tensor that there has to be
    monkeypatch.setattr(heads, "CHUNK_BYTES", weight * 8)
    model = Loss(tails[name], layers=1, vocab=columns)
    args = inputs("none", vocab=columns, count=12, length=24)
    assert fused(model, *args) == 1
    largest, original = Largest(), TreeProgram.__call__  # type: ignore[no-untyped-call]

    def watched(program: TreeProgram, *flat: Any) -> Any:
        with largest:
            return original(program, *flat)

    call = compiled(model)
    call(*args).backward()  # compiles
    monkeypatch.setattr(TreeProgram, "__call__", watched)
    loss = call(*args)
    forward = largest.numel
    with largest:
        loss.backward()
    rows = len({(tuple(row[:n])) for row in args[0].tolist() for n in range(1, len(row) + (name != "next"))})
    assert rows * columns > 2.5 * weight
    assert 0 < forward <= weight
    assert largest.numel == weight
