"""A model compiled in place generates and trains by turns, as the uncompiled one does."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.law import counting, held
from tests.models import FAMILIES, VOCAB

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STEPS = 6


def prompts() -> tuple[Tensor, Tensor]:
    """int64 [4, 9] ids and mask: prompts that share prefixes, padded on the left."""
    ids = torch.randint(3, VOCAB, (4, 9))
    ids[1:, :6] = ids[0, :6]
    ids[3] = ids[2]
    mask = torch.ones_like(ids)
    for row, pads in ((1, 2), (3, 3)):
        ids[row] = torch.cat([ids.new_zeros(pads), ids[row, :-pads]])
        mask[row, :pads] = 0
    return ids, mask


def generate(model: Any, ids: Tensor, mask: Tensor, **settings: Any) -> tuple[Tensor, Tensor, Counter[str]]:
    """Sequences, logits of each step, and how the calls ran."""
    with counting() as seen:
        found = model.eval().generate(
            ids, attention_mask=mask, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False,
            return_dict_in_generate=True, output_logits=True, **settings,
        )  # fmt: skip
    return found.sequences, torch.stack(found.logits), seen


def train(model: nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor], Counter[str]]:
    """Loss, gradients, and how the call ran; then the parameters take a step."""
    model.train().zero_grad()
    with counting() as seen:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        picked = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = -(picked * mask[:, 1:] * mask[:, :-1]).sum() / 20
        loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss.detach(), grads, seen


STEPWISE = {"packed": 1, "no-token-ids": STEPS - 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "qwen3-cache": ({}, STEPWISE),
    "llama-nocache": ({"use_cache": False}, {"packed": STEPS}),
    "llama-cache": ({}, STEPWISE),
    "qwen3-nocache": ({"use_cache": False}, {"packed": STEPS}),
    "qwen3-static": ({"cache_implementation": "static"}, {"in-place": STEPS}),
}
QUICK = ("qwen3-cache", "llama-nocache")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_generation_and_training_by_turns(name: str) -> None:
    """The prompt is packed, and so are whole rows without a cache; steps of one token run as captured."""
    settings, expect = CASES[name]
    dense = FAMILIES[name.partition("-")[0]].build().double()
    tree = copy.deepcopy(dense)
    tree.compile(backend="tree", options={"compiler": "aot_eager", "min_sharing": 0})
    ids, mask = prompts()
    for _ in range(2):
        sequences, logits, _ = generate(dense, ids, mask, **settings)
        found, found_logits, seen = generate(tree, ids, mask, **settings)
        assert torch.equal(found, sequences)
        torch.testing.assert_close(found_logits, logits, rtol=0, atol=1e-5)  # generate gives fp32
        held(expect, seen)
        mask_all = torch.cat([mask, mask.new_ones(len(ids), STEPS)], dim=1)
        loss, grads, _ = train(dense, sequences, mask_all)
        found_loss, found_grads, seen = train(tree, sequences, mask_all)
        held("packed", seen)
        torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
        assert found_grads.keys() == grads.keys()
        for key, grad in grads.items():
            # rotary angles and norms are computed in fp32
            assert float((found_grads[key] - grad).norm() / grad.norm()) < 1e-6, key
