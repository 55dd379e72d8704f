"""What a program of a batch does: no tensor over the grid where rows suffice, one tree for many passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from examples.baselines import log_probs_of
from tests import models
from tests.law import VOCAB, Toy, as_written, batch, check, compiled, counting
from treecompile import backend
from treecompile.runtime.losses import label_index, nll_from_log_probs, weighted_reduction
from treecompile.runtime.program import TreeProgram

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Largest(TorchDispatchMode):
    """The largest float tensor that any op gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.is_floating_point():
                self.numel = max(self.numel, x.numel())
        return out


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)


class Selected(Toy):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return (_log_probs(super().forward(ids, mask), labels) * weights).sum()


class Entropy(Toy):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(ids, mask).flatten(0, 1), labels.flatten())


class Shifted(Toy):
    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = super().forward(ids, mask)[:, :-1]
        return (_log_probs(logits, labels[:, 1:]) * weights[:, 1:]).sum()


@pytest.mark.parametrize("model", [Selected, Entropy, Shifted])
def test_no_logits_over_the_grid(model: type[Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen equal rows of large vocabulary: forward and backward stay at the size of one row's logits."""
    toy = model(vocab=200)
    b = batch(count=16, length=9, pad="none", vocab=200)
    b.ids[1:] = b.ids[:1]
    args = (b.ids, b.mask, b.labels, b.weights)
    check(toy, *args)
    largest, original = Largest(), TreeProgram.__call__

    def watched(
        program: TreeProgram, *flat: Any
    ) -> Any:  # a mode around a compiled function would run it eagerly
        with largest:
            return original(program, *flat)

    monkeypatch.setattr(TreeProgram, "__call__", watched)
    loss = compiled(toy)(*args)
    with largest:
        loss.backward()
    assert 0 < largest.numel <= 2 * 9 * 200


def test_policy_and_reference_share_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    original = backend._trees._cache.get

    def get(arrays: Any, build: Any, **settings: Any) -> Any:
        return original(arrays, lambda: built.append(1) or build(), **settings)

    monkeypatch.setattr(backend._trees._cache, "get", get)
    backend._trees.clear()
    b = batch(pad="mixed", seed=21)
    policy, reference = compiled(Toy()), compiled(Toy())
    with counting() as seen:
        policy(b.ids, b.mask)
        with torch.no_grad():
            reference(b.ids, b.mask)
        policy(b.ids, b.mask)
    assert seen["packed"] == 3
    assert len(built) == 1


def planning(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one for each plan that is made."""
    made: list[int] = []
    original = TreeProgram._plan

    def plan(*given: Any) -> Any:
        made.append(1)
        return original(*given)

    monkeypatch.setattr(TreeProgram, "_plan", plan)
    return made


def test_equal_arguments_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans go by content: of every argument, whoever wrote into it and wherever it lies."""
    made = planning(monkeypatch)
    # A number computed from the mask is an input of the packed graph.
    toy, b = Toy(middle=lambda h, ids, mask: h / (1 + mask.sum())), batch(pad="mixed", seed=5)
    call, ids, mask = compiled(toy), b.ids, b.mask

    def same(plans: int) -> None:
        with counting() as seen:
            found = call(ids, mask)
        kept = mask.bool()
        torch.testing.assert_close(found[kept], toy(ids, mask)[kept], rtol=1e-10, atol=1e-10)
        assert (seen["packed"], len(made)) == (1, plans)

    backend._trees.clear()
    same(1)
    same(1)
    ids, mask = ids.clone(), mask.clone()
    same(1)
    old, at = int(ids[0, 3]), int(mask[0].nonzero()[-1])
    ids[0, 3] = (old + 1) % VOCAB
    same(2)
    mask[0, at] = 0
    same(3)
    ids[0, 3], mask[0, at] = old, 1
    same(3)
    ids[0, 3], mask[0, at] = (old + 1) % VOCAB, 0
    same(3)
    backend._trees.clear()
    same(4)


def test_a_plan_serves_any_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors made in inference mode cannot be saved for a backward pass."""
    made = planning(monkeypatch)
    toy, b = Selected(), batch(pad="mixed", seed=6)
    toy(b.ids, b.mask, b.labels, b.weights).backward()
    expected = {name: p.grad for name, p in toy.named_parameters()}
    toy.zero_grad()
    call = compiled(toy)
    with torch.inference_mode():
        call(b.ids, b.mask, b.labels, b.weights)
    call(b.ids, b.mask, b.labels, b.weights).backward()
    assert len(made) <= 2  # of one capture for each mode
    for name, p in toy.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseek_v3", "qwen3_5", "mamba2"])
def test_models_are_planned_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planning(monkeypatch)
    model = (models.FAMILIES | models.HYBRIDS)[family].build()
    b = batch(count=4, length=20, pad="right", seed=7)
    call = compiled(log_probs_of(model))
    with as_written(), counting() as seen, torch.no_grad():
        call(b.ids, b.mask)
        call(b.ids, b.mask)
    assert (seen["packed"], len(made)) == (2, 1)


STEPS = [1]


@torch.library.custom_op("treetests::schedule", mutates_args=())
def schedule(x: Tensor) -> Tensor:
    """A number that changes from step to step, whatever it is given."""
    return torch.tensor(float(STEPS[0]), dtype=torch.float64)


@schedule.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float64)


def test_an_op_that_reads_more_than_its_arguments_runs_at_every_call() -> None:
    """So does one that talks to other processes: these would wait for the call."""
    toy, b = Toy(middle=lambda h, ids, mask: h * schedule(mask.sum())), batch(pad="mixed", seed=5)
    call = compiled(toy)
    for STEPS[0] in (1, 2, 3):
        with counting() as seen:
            found = call(b.ids, b.mask)
        assert seen["packed"] == 1
        torch.testing.assert_close(found[b.kept], toy(b.ids, b.mask)[b.kept], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("row", [None, 0, 3])
def test_zeros_of_either_sign_differ(row: int | None) -> None:
    """In the same call and from one to the next."""
    toy = Toy(middle=lambda h, ids, mask, sign: h + torch.copysign(torch.ones_like(sign), sign)[..., None])
    b = batch(pad="none", seed=5)
    zeros = torch.zeros(b.ids.shape, dtype=torch.float64)
    other = zeros.clone()
    other[slice(None) if row is None else row] = -0.0
    call = compiled(toy)
    for sign in (zeros, other, zeros):
        with counting() as seen:
            found = call(b.ids, b.mask, sign)
        assert seen["packed"] == 1
        torch.testing.assert_close(found, toy(b.ids, b.mask, sign), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_grid_values_of_any_dtype(dtype: torch.dtype) -> None:
    toy = Toy(middle=lambda h, ids, mask, kind: h + kind.double()[..., None])
    b = batch(pad="none", seed=5)
    kind = (b.ids % 3).to(dtype)
    call = compiled(toy)
    for _ in range(2):
        with counting() as seen:
            found = call(b.ids, b.mask, kind)
        assert seen["packed"] == 1
        torch.testing.assert_close(found, toy(b.ids, b.mask, kind), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_checkpoint_around_the_first_call(compiler: str) -> None:
    """A checkpoint counts what is saved, and compares with what is saved when it runs again."""
    toy, b = Toy(), batch(pad="mixed", seed=5)
    toy(b.ids, b.mask)[b.kept].sum().backward()
    expected = {name: p.grad for name, p in toy.named_parameters()}
    call = compiled(toy, compiler=compiler)
    for _ in range(2):
        toy.zero_grad()
        with counting() as seen:
            out = checkpoint(lambda ids, mask: call(ids, mask), b.ids, b.mask, use_reentrant=False)
            out[b.kept].sum().backward()
        assert seen["packed"] >= 1  # when it runs again it stops at the last tensor that was saved
        assert not seen["dense"]
        for name, p in toy.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "mamba2"])
def test_nothing_waits_for_the_device_after_planning(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead of the device from the packed graph to the end of the backward pass."""
    model = (models.FAMILIES | models.HYBRIDS)[family].build().cuda()
    b = batch(count=6, length=40, pad="right", seed=7)
    ids, mask = b.ids.cuda(), b.mask.cuda()
    call = compiled(log_probs_of(model))
    call(ids, mask).sum().backward()
    original = TreeProgram.run

    def watched(*given: Any) -> Any:
        with waiting_is_an_error():
            return original(*given)

    monkeypatch.setattr(TreeProgram, "run", watched)
    with counting() as seen:
        loss = call(ids, mask).sum()
    with waiting_is_an_error():
        loss.backward()
    assert seen["packed"] == 1


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """An op that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_batch_without_sharing_runs_dense() -> None:
    b = batch(pad="none", vocab=13)
    b.ids[:, 0] = torch.arange(6)
    toy = Toy()
    with counting() as seen:
        out = compiled(toy, min_sharing=1.05)(b.ids, b.mask)
    assert seen["dense:min_sharing"] == 1
    torch.testing.assert_close(out, toy(b.ids, b.mask), rtol=1e-10, atol=1e-10)


def test_loss_in_the_graph_with_nothing_kept() -> None:
    b = batch(pad="all")
    check(Selected(), b.ids, b.mask, b.labels, b.weights, expect="empty")


@pytest.mark.parametrize("label", [-100, -1, VOCAB])
def test_a_label_that_dense_refuses_is_refused(label: int) -> None:
    class Unmasked(Toy):
        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            return super().forward(ids, mask).log_softmax(-1).gather(-1, labels[..., None]).sum()

    b = batch(pad="none")
    labels = b.labels.clamp(0, VOCAB - 1)
    check(Unmasked(), b.ids, b.mask, labels)
    labels[1, 2] = label
    with pytest.raises((IndexError, RuntimeError)):
        compiled(Unmasked())(b.ids, b.mask, labels)


def test_half_precision_means_count_exactly() -> None:
    """1,000 equal rows in bfloat16, where counts above 256 are not all representable."""
    x = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    weight = torch.tensor([999, 1])
    grid = x.repeat_interleave(weight)
    for mean in (False, True):
        expected = grid.mean() if mean else grid.sum()
        assert weighted_reduction(x, weight, 0, [0], False, mean, None) == expected
    bits = torch.tensor([True, False])
    assert weighted_reduction(bits, weight, 0, [0], False, False, None) == 999
    assert weighted_reduction(bits, weight, 0, [0], False, False, None).dtype is torch.int64


@pytest.mark.parametrize("ignore", [-100, 999, 3])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_from_picked_log_probs(ignore: int, reduction: str) -> None:
    logits = torch.randn(8, 5, dtype=torch.float64)
    labels = torch.tensor([0, 1, ignore, 3, 4, ignore, 2, 0])
    index = label_index(labels, 5, ignore)
    picked = logits.log_softmax(-1).gather(-1, index[:, None]).squeeze(-1)
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    expected = F.cross_entropy(logits, labels, ignore_index=ignore, reduction=reduction)
    torch.testing.assert_close(nll_from_log_probs(picked, labels, number, ignore), expected)


def test_factors_over_the_vocabulary_are_not_factors_over_positions() -> None:
    """V = B * T: a mask of the vocabulary has as many entries as the grid has positions."""

    class Warm(Toy):
        def forward(self, ids: Tensor, mask: Tensor, allowed: Tensor) -> Tensor:
            logits = super().forward(ids, mask)
            heat = 1.0 + torch.arange(ids.shape[0], dtype=torch.float64)[:, None, None]
            return (logits / heat * allowed).sum(-1).square().sum()

    b = batch(count=2, length=6, pad="left", vocab=12)
    allowed = torch.ones(12, dtype=torch.int64)
    allowed[6:] = 0
    assert VOCAB != 12
    check(Warm(vocab=12), b.ids, b.mask, allowed)
