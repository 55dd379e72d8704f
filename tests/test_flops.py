"""Packed means packed: a compiled run does the arithmetic of the distinct tokens, and nothing B*T times.

Matrix products are counted as they run (`FlopCounterMode` over the packed forward and backward pass) and
compared with a formula in three numbers, taken from the rows in plain Python: distinct prefixes, the pairs
that they attend to, and distinct prefixes that the head reads.

Tree attention is one op to the counter, which does not look inside. It is counted by a formula over the pairs
that its plan has it compute; `tests/test_attention.py` checks the op against its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import treecompile.lowering
from tests.models import FAMILIES, VOCAB, Family
from tests.test_models import choose
from treecompile import backend
from treecompile.passes import heads
from treecompile.runtime.ops.attention_plan import count_pieces

pytest.importorskip("transformers")

KEEP = 96
WIDTH, EXPERTS, TOP = 32, 4, 2


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No case sees the compilations of another."""
    torch._dynamo.reset()
    treecompile.lowering.clear()
    backend.clear()
    yield
    torch._dynamo.reset()


def rows() -> tuple[Tensor, Tensor]:
    """ids and mask, [4, 1024]: forks after 512 and 640 tokens, and a duplicate. Segments are long, so that
    attention computes hardly a pair in vain.
    """
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (4, 1024), generator=g)
    ids[1:, :512] = ids[0, :512]
    ids[2, :640] = ids[1, :640]
    ids[3] = ids[0]
    mask = torch.ones_like(ids)
    mask[2, 900:] = 0
    return ids, mask


@dataclass(frozen=True)
class Size:
    """Distinct prefixes, pairs that they attend to, and distinct prefixes that end in the last columns."""

    tokens: int
    pairs: int
    head: int

    @staticmethod
    def of(ids: Tensor, mask: Tensor, keep: int) -> Size:
        """Walk the rows down a trie."""
        nodes: dict[tuple[int, int], int] = {}
        pairs, head = 0, set()
        for row, seen in zip(ids.tolist(), mask.tolist(), strict=True):
            node, depth = -1, 0
            for column, (token, kept) in enumerate(zip(row, seen, strict=True)):
                if not kept:
                    continue
                depth += 1
                if (node, token) not in nodes:
                    nodes[node, token] = len(nodes)
                    pairs += depth
                node = nodes[node, token]
                if column >= len(row) - keep:
                    head.add(node)
        return Size(len(nodes), pairs, len(head))


class Counted:
    """The tree backend, counting the operations of its programs while `mode` is set."""

    func = staticmethod(backend.tree)  # by which the gate of the leaf functions knows it

    def __init__(self) -> None:
        self.mode: FlopCounterMode | None = None

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        program = backend.tree(gm, inputs, options={"compiler": "aot_eager", "min_sharing": 0})

        def run(*args: Any) -> Any:
            # Dynamo would not run under a dispatch mode: it is entered inside.
            if self.mode is None:
                return program(*args)
            with self.mode:
                return program(*args)

        return run


def counter() -> FlopCounterMode:
    """A counter that knows tree attention."""
    ops = torch.ops.treecompile
    return FlopCounterMode(
        display=False,
        custom_mapping={
            ops.tree_attention: _attention,
            ops.tree_attention_backward: _attention_backward,
            ops.selective_log_probs: _head,
            ops.selective_log_probs_backward: _head_backward,
        },
    )


def _attention(q: Tensor, k: Tensor, v: Tensor, *tree: Any, out_val: Any = None) -> int:
    """Two products for each head and pair that the plan computes."""
    segments, pieces = tree[3], tree[4]
    pairs = count_pieces(segments.numpy(), pieces.numpy()).computed
    return 2 * q.shape[1] * pairs * (q.shape[3] + v.shape[3])


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, out_val: Any = None
) -> int:
    """Five products for two: scores again, and gradients of probabilities, values, queries and keys."""
    segments, pieces = more[5], more[6]
    pairs = count_pieces(segments.numpy(), pieces.numpy()).computed
    return 2 * q.shape[1] * pairs * (3 * q.shape[3] + 2 * v.shape[3])


def _head(hidden: Tensor, weight: Tensor, *more: Any, out_val: Any = None) -> int:
    """The logits; `tests/test_selective_log_probs.py` counts the products of the op itself."""
    return 2 * hidden.shape[0] * weight.numel()


def _head_backward(*args: Any, out_val: Any = None) -> int:
    """Gradients of rows and weight, and the logits again unless they were kept."""
    hidden, weight, kept, needs = args[3], args[4], args[13], args[16]
    products = sum(needs[:2]) + (kept.shape[0] == 0)
    return 2 * products * int(hidden.shape[0] * weight.numel())


for _count in (_attention, _attention_backward, _head, _head_backward):
    _count._get_raw = True  # type: ignore[attr-defined]


def matrices(model: nn.Module) -> tuple[int, int]:
    """Weights that multiply one token, in the layers (of experts, those it goes to) and in the head."""
    layers = head = 0
    for name, p in model.named_parameters():
        if "embed" in name or "bias" in name or p.dim() < 2:
            continue
        if "head" in name:
            head += p.numel()
        else:
            layers += p.numel() * TOP // EXPERTS if p.dim() == 3 else p.numel()
    return layers, head


def attention_sizes(model: nn.Module, family: Family) -> tuple[int, int, int, int]:
    """Layers, query heads, and head sizes of queries and values."""
    config = getattr(model, "config", None)
    if config is None:
        return 2, 4, 8, 8
    query = family.sizes.get("qk_rope_head_dim", 0) + family.sizes.get("qk_nope_head_dim", 0)
    return config.num_hidden_layers, config.num_attention_heads, query or 8, family.sizes.get("v_head_dim", 8)


LONG = {"max_position_embeddings": 2048}
FEW = ("handwritten", "deepseek_v3", "qwen3_moe")


@pytest.mark.parametrize(
    "name", [pytest.param(f, marks=() if f in FEW else pytest.mark.slow) for f in FAMILIES]
)
def test_arithmetic_is_that_of_distinct_tokens(name: str) -> None:
    family = FAMILIES[name]
    # Windows longer than a row: what a window cuts off the plan is not known to the counter.
    window = {"sliding_window": 2048} if "sliding_window" in family.sizes else {}
    family = replace(family, sizes={**family.sizes, **LONG, **window})
    model = family.build()
    choose(model, family.attention[0], family.experts[0] if family.experts else "-")
    ids, mask = rows()
    counted = Counted()
    call = torch.compile(model, backend=counted)
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": KEEP}
    if family.prefix:
        arguments["use_cache"] = False

    call(**arguments)["logits"].sum().backward()  # compiles
    forward = counted.mode = counter()
    logits = call(**arguments)["logits"]
    with counter() as backward:
        logits.sum().backward()
    assert backend.counters["packed"] == 2
    assert not backend.counters["dense"]

    size = Size.of(ids, mask, KEEP)
    layers, head = matrices(model)
    depth, heads, query, value = attention_sizes(model, family)
    linear = 2 * size.tokens * layers + 2 * size.head * head
    attention = 2 * depth * heads * size.pairs * (query + value)
    again = 2 * depth * heads * size.pairs * (3 * query + 2 * value)
    assert size.tokens < 0.6 * ids.numel()
    assert forward.get_total_flops() == pytest.approx(linear + attention, rel=0.01)
    assert backward.get_total_flops() == pytest.approx(2 * linear + again, rel=0.01)


@pytest.mark.parametrize("again", [False, True], ids=["logits fit a chunk", "logits in chunks"])
def test_arithmetic_of_log_probs(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is computed for its packed rows: three products, or four where its logits are not kept."""
    monkeypatch.setattr(heads, "CHUNK_BYTES", 8 * VOCAB * 4 if again else 1 << 30)
    family = FAMILIES["handwritten"]
    model = family.build()
    ids, mask = rows()
    counted = Counted()

    def log_probs(ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, attention_mask=mask, logits_to_keep=KEEP)["logits"][:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1 - KEEP :, None]).squeeze(-1)

    call = torch.compile(log_probs, backend=counted)
    call(ids, mask).sum().backward()  # compiles
    forward = counted.mode = counter()
    picked = call(ids, mask)
    with counter() as backward:
        picked.sum().backward()
    assert backend.counters["packed"] == 2
    assert not backend.counters["dense"]

    size = Size.of(ids, mask, KEEP)
    before = size.head - len(
        {tuple(row[seen.bool()].tolist()) for row, seen in zip(ids, mask, strict=True) if seen[-1]}
    )
    layers, head = matrices(model)
    depth, count, query, value = attention_sizes(model, family)
    tokens, product = 2 * size.tokens * layers, 2 * before * head
    pairs = 2 * depth * count * size.pairs
    assert forward.get_total_flops() == pytest.approx(tokens + product + pairs * (query + value), rel=0.01)
    expected = 2 * tokens + (3 if again else 2) * product + pairs * (3 * query + 2 * value)
    assert backward.get_total_flops() == pytest.approx(expected, rel=0.01)
    (of_head,) = (
        n for op, n in forward.get_flop_counts()["Global"].items() if "selective_log_probs" in str(op)
    )
    assert of_head == product
    again_of_head = sum(
        n for op, n in backward.get_flop_counts()["Global"].items() if "selective_log_probs" in str(op)
    )
    assert again_of_head == (3 if again else 2) * product
