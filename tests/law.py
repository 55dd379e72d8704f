"""The law: a tree run equals the unmodified model, dense and eager, on the same batch; with small models.

``check(model, *args, expect="packed", ...)`` runs both, compares outputs and every gradient, and insists on
*how* the compiled run went: a case that says ``packed`` fails on a silent dense fallback, a case that names
the slug of a refusal (``"dropout"``, ``"mask"``, ...) fails if anything was packed.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from treecompile import backend, lowering

__all__ = [
    "Batch",
    "Run",
    "Toy",
    "batch",
    "check",
    "compare",
    "compiled",
    "counting",
    "held",
    "no_internal_faults",
    "rows",
    "run",
]

Expect = str | Mapping[str, int]
VOCAB = 13


# ---- batches -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One training batch.

    Attributes:
        ids: int64 [B, T]; mask: int64 [B, T], 1 where a token counts.
        labels: int64 [B, T], -100 where there is no loss: they differ between rows that share tokens.
        weights: float64 [B, T], as advantages times loss mask: zero outside of the mask.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor
    weights: Tensor

    @property
    def kept(self) -> Tensor:
        return self.mask.bool()


def rows(count: int, length: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    """int64 [count, length]: forks late and early, a duplicate, an unrelated row, forks of earlier rows."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (count, length), generator=g)
    for b in range(1, count):
        source = int(torch.randint(0, b, (1,), generator=g))
        drawn = int(torch.randint(0, length + 1, (1,), generator=g))
        fork = (length // 2 + 1, length, 0, length - 1)[b - 1] if b < 5 else drawn
        ids[b, :fork] = ids[source, :fork]
    return ids


def batch(
    count: int = 6,
    length: int = 9,
    pad: str = "right",
    *,
    holes: bool = False,
    vocab: int = VOCAB,
    seed: int = 0,
) -> Batch:
    """Rows that share prefixes, padded.

    Args:
        pad: "none", "right", "left", "mixed" (row by row, some on both sides) or "all" (nothing is kept).
            Padding carries random tokens, so that whatever reads it shows.
        holes: mask one column in all rows, and two positions of single rows.
    """
    g = torch.Generator().manual_seed(seed + 1)
    ids = rows(count, length, vocab, seed)
    mask = torch.ones(count, length, dtype=torch.int64)
    lengths = [length if b % 3 == 0 else max(1, length - 1 - b % 4) for b in range(count)]
    for b, kept in enumerate(lengths):
        free = length - kept
        side = {"mixed": ("left", "right", "both")[b % 3]}.get(pad, pad)
        start = {"left": free, "both": free // 2}.get(side, 0)
        if pad == "none":
            continue
        row = ids[b, :kept].clone()
        ids[b] = torch.randint(0, vocab, (length,), generator=g)
        ids[b, start : start + kept] = row
        mask[b] = 0
        mask[b, start : start + kept] = 1
    if holes:
        mask[:, length // 3] = 0
        mask[0, length // 2] = 0
        mask[count - 1, length - 2] = 0
    if pad == "all":
        mask.zero_()
    labels = torch.randint(0, vocab, ids.shape, generator=g)
    labels[torch.rand(ids.shape, generator=g) < 0.3] = -100
    labels[mask == 0] = -100
    weights = torch.randn(ids.shape, generator=g, dtype=torch.float64) * (labels != -100)
    return Batch(ids, mask, labels, weights)


# ---- the comparison ------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_internal_faults() -> Iterator[list[Exception]]:
    """No pass fails in the block, unless the list of their exceptions is cleared."""
    found: list[Exception] = []
    reason = backend._internal

    def noted(error: Exception) -> Any:
        found.append(error)
        return reason(error)

    backend._internal = noted
    try:
        yield found
    finally:
        backend._internal = reason
    if found:
        raise AssertionError(f"the pass failed: {found}") from found[0]


@dataclass
class Run:
    """What one run gave: comparable outputs, and gradients by name."""

    outputs: list[Tensor]
    grads: dict[str, Tensor]
    counters: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """The backend's counters of the block alone."""
    before = Counter(backend.counters)
    seen: Counter[str] = Counter()
    try:
        yield seen
    finally:
        seen.update({k: v - before[k] for k, v in backend.counters.items() if v != before[k]})


@contextlib.contextmanager
def as_written(active: bool = True) -> Iterator[None]:
    """Run packed and dense graphs as they are, without AOTAutograd: that is most of the time of a capture."""

    def plain(gm: Any, *_: Any) -> Any:
        return gm

    with contextlib.ExitStack() as stack:
        if active:
            stack.enter_context(mock.patch.object(lowering, "_compile_graph", plain))
            stack.enter_context(mock.patch.object(backend, "_stock", plain))
            stack.enter_context(mock.patch.object(backend, "compile_dense", plain))
        yield


def compiled(
    model: Callable[..., Any], *, compiler: str = "aot_eager", dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    """``torch.compile(model, backend=tree)`` in the setting of these tests: every batch is packed."""
    given = {"compiler": compiler, "min_sharing": 0, **options}
    found: Callable[..., Any] = torch.compile(model, backend=backend.tree, options=given, dynamic=dynamic)
    return found


def _tensors(value: Any) -> list[Tensor]:
    if hasattr(value, "items"):
        value = dict(value.items())
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _visible(out: Tensor, kept: Tensor | None) -> Tensor:
    """Outputs over the grid, zeroed at padding; anything else as it is."""
    if kept is None or out.dim() < 2 or tuple(out.shape[:2]) != tuple(kept.shape):
        return out
    wide = kept.reshape(*kept.shape, *[1] * (out.dim() - 2))
    return torch.where(wide, out, torch.zeros((), dtype=out.dtype))


def _parameters(call: Any, modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    found = list(modules) or ([call] if isinstance(call, nn.Module) else [])
    named = ((f"{i}.{name}", p) for i, m in enumerate(found) for name, p in m.named_parameters())
    return {name: p for name, p in named if p.requires_grad}


def run(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    parameters: Mapping[str, Tensor],
    kept: Tensor | None,
    loss: Callable[[Any], Tensor] | None = None,
    backward: bool = True,
) -> Run:
    """One forward and backward pass. The default loss is a random linear function of all kept outputs."""
    inputs = {f"input{i}": x for i, x in enumerate(_tensors([args, dict(kwargs)])) if x.requires_grad}
    leaves = {**parameters, **inputs}
    for leaf in leaves.values():
        leaf.grad = None
    result = call(*args, **kwargs)
    outputs = [_visible(out, kept) for out in _tensors(result)]
    grads: dict[str, Tensor] = {}
    if backward:
        if loss is not None:
            total = loss(result)
        else:
            total = _random_loss(outputs)
        total.backward()
        grads = {name: leaf.grad.detach().clone() for name, leaf in leaves.items() if leaf.grad is not None}
        outputs.append(total)
    return Run([o.detach().clone() for o in outputs], grads)


def _random_loss(outputs: Sequence[Tensor]) -> Tensor:
    g = torch.Generator().manual_seed(7)
    drawn = [(o, torch.randn(o.shape, generator=g, dtype=torch.float64)) for o in outputs]
    return torch.stack([(o * weight).sum() for o, weight in drawn if o.requires_grad]).sum()


def compare(dense: Run, tree: Run, tolerance: float, floor: float = 1e-3) -> None:
    """Outputs and gradients agree to `tolerance`, relative to the largest entry of each tensor (at least `floor`)."""
    assert len(dense.outputs) == len(tree.outputs)
    for i, (a, b) in enumerate(zip(dense.outputs, tree.outputs, strict=True)):
        _close(f"output {i}", a, b, tolerance, floor)
    assert dense.grads.keys() == tree.grads.keys(), f"gradients of {dense.grads.keys() ^ tree.grads.keys()}"
    for name, a in dense.grads.items():
        _close(f"gradient of {name}", a, tree.grads[name], tolerance, floor)


def _close(what: str, a: Tensor, b: Tensor, tolerance: float, floor: float) -> None:
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)} against {tuple(b.shape)}"
    assert a.dtype == b.dtype, f"{what}: {a.dtype} against {b.dtype}"
    if a.is_floating_point():
        scale = float(a.nan_to_num().abs().max()) if a.numel() else 0.0
        bound = tolerance * max(scale, floor)
        torch.testing.assert_close(
            b, a, rtol=0, atol=bound, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )
    else:
        assert torch.equal(a, b), f"{what} differs"


def held(expect: Expect, seen: Counter[str]) -> None:
    """How the run went is how it was expected to go. A fault of the pass itself is never expected."""
    assert not seen["dense:internal"], f"the pass failed: ran {dict(seen)}"
    dense = {key.removeprefix("dense:"): n for key, n in seen.items() if key.startswith("dense:")}
    if isinstance(expect, str):
        if expect == "packed":
            fine = seen["packed"] > 0 and not seen["dense"]
        else:
            fine = dense.get(expect, 0) > 0 and not seen["packed"]
        assert fine, f"expected {expect}, ran {dict(seen)}"
        return
    found = Counter({"packed": seen["packed"], **dense})
    assert +found == +Counter(expect), f"ran {dict(seen)}"


def check(
    model: Callable[..., Any],
    *args: Any,
    expect: Expect = "packed",
    kept: Tensor | None = None,
    modules: Sequence[nn.Module] = (),
    loss: Callable[[Any], Tensor] | None = None,
    backward: bool = True,
    tolerance: float = 1e-10,
    floor: float = 1e-3,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    reset: bool = True,
    numbers: bool = True,
    around: Callable[[], Any] = contextlib.nullcontext,
    **kwargs: Any,
) -> Run:
    """Compare a compiled run with the dense eager one.

    Args:
        model: an ``nn.Module`` or a function (then `modules` own the parameters).
        expect: "packed", the slug of a refusal, or ``{"packed": 1, "<slug>": 2}`` for several graphs.
        kept: bool [B, T]; outputs whose first two dims are [B, T] are compared, and take part in the loss,
            there only. None compares every position (exact mode).
        loss: a scalar of the result; default: a random linear function of all outputs.
        tolerance, floor: see `compare`.
        numbers: compare values; False where the model draws noise.
        around: context manager in which both runs happen, forward and backward.

    Returns:
        the compiled run.
    """
    if reset:
        torch._dynamo.reset()
    parameters = _parameters(model, modules)
    buffers = [b for m in (modules or ([model] if isinstance(model, nn.Module) else [])) for b in m.buffers()]
    before = [b.clone() for b in buffers]
    with around():
        dense = run(model, args, kwargs, parameters=parameters, kept=kept, loss=loss, backward=backward)
    dense.outputs += [b.clone() for b in buffers]
    for b, old in zip(buffers, before, strict=True):
        b.data.copy_(old)
    call = compiled(model, dynamic=dynamic, **dict(options or {}))
    with counting() as seen, around():
        tree = run(call, args, kwargs, parameters=parameters, kept=kept, loss=loss, backward=backward)
    tree.outputs += [b.clone() for b in buffers]
    tree.counters = seen
    held(expect, seen)
    if numbers:
        compare(dense, tree, tolerance, floor)
    return tree


# ---- small models --------------------------------------------------------------------------------------


def _same(x: Any, *_: Any) -> Any:
    return x


def causal_and_padding(ids: Tensor, mask: Tensor | None) -> Tensor:
    """bool [B or 1, 1, T, T], as most models build it."""
    at = torch.arange(ids.shape[1])
    seen = at[None, :] <= at[:, None]
    return seen[None, None] if mask is None else seen[None, None] & mask.bool()[:, None, None, :]


class Block(nn.Module):
    """Norm, attention by a given function of (q, k, v, mask), and a small MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, heads * size)
        self.k = nn.Linear(width, kv_heads * size)
        self.v = nn.Linear(width, kv_heads * size)
        self.o = nn.Linear(heads * size, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)

    def forward(self, h: Tensor, mask: Any, attend: Callable[..., Tensor]) -> Tensor:
        x = self.norm1(h)
        q = self.split(self.q(x), self.heads)
        k, v = self.split(self.k(x), self.kv_heads), self.split(self.v(x), self.kv_heads)
        out = attend(q, k, v, mask)
        h = h + self.o(out.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """``mask`` is a tensor, or None for ``is_causal``."""
    grouped = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


class Toy(nn.Module):
    """A transformer of two layers in float64 with a place for every trap.

    Args:
        mask: function of (ids, mask) giving what `attend` receives.
        attend: attention function of (q, k, v, mask).
        embed: function of (model, ids, mask) giving hidden states; default: token plus column embedding.
        middle: function of (h, ids, mask) between the two layers.
        tail: function of (logits, ids, mask).
        extra: parameters by name, initialised at random.
        buffers: buffers by name.
    """

    def __init__(
        self,
        *,
        mask: Callable[[Tensor, Any], Any] = causal_and_padding,
        attend: Callable[..., Tensor] = sdpa,
        embed: Callable[..., Tensor] | None = None,
        middle: Callable[..., Tensor] = _same,
        tail: Callable[..., Any] = _same,
        width: int = 12,
        heads: int = 2,
        kv_heads: int | None = None,
        inner: int = 16,
        layers: int = 2,
        vocab: int = VOCAB,
        positions: int = 32,
        extra: Mapping[str, Sequence[int]] | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.make_mask, self.attend, self.embed, self.middle, self.tail = mask, attend, embed, middle, tail
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads or heads, inner) for _ in range(layers))
        self.head = nn.Linear(width, vocab)
        for name, shape in (extra or {}).items():
            self.register_parameter(name, nn.Parameter(torch.empty(*shape)))
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.3)
        for name, value in (buffers or {}).items():
            self.register_buffer(name, copy.copy(value))

    def forward(self, ids: Tensor, mask: Tensor | None = None, *rest: Any) -> Any:
        if self.embed is not None:
            h = self.embed(self, ids, mask, *rest)
        else:
            h = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        seen = self.make_mask(ids, mask)
        for i, layer in enumerate(self.layers):
            h = layer(h, seen, self.attend)
            if i == 0:
                h = self.middle(h, ids, mask, *rest) if rest else self.middle(h, ids, mask)
        logits = self.head(h)
        return self.tail(logits, ids, mask, *rest) if rest else self.tail(logits, ids, mask)
