"""Random models on random trees: ``python -m tests.fuzz --cases 200 --seed 0``.

A case is a drawn model (`Program`) on a drawn batch (`Data`). A model is captured once or twice and run on
several batches, so that less of the time goes into Dynamo; half of the packed graphs run as they are written,
the others through AOTAutograd. Every case is compared with the dense eager run, outputs and all gradients; a
failing one is shrunk and saved to a file that ``python -m tests.fuzz --case FILE`` runs again.
"""

# ruff: noqa: T201  (it is a program, too)

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.law import Run, as_written, compare, compiled, counting, run
from treecompile import backend, lowering
from treecompile.runtime import batch
from treecompile.runtime.ops import attention_plan

__all__ = ["Case", "Data", "Inputs", "Outcome", "Policy", "Program", "draw", "inputs", "run_all", "run_cases"]

VOCAB = 11
TOLERANCE = 1e-10
BATCHES = 6  # per model
KEEP = 3  # positions that a tail slice keeps


# ---- what is drawn -------------------------------------------------------------------------------------


def _of(*options: Any) -> Any:
    """A field with its options: the first is the simplest, repeated ones are drawn more often."""
    return field(default=options[0], metadata={"options": options})


@dataclass(frozen=True)
class Program:
    """A model. Combinations that no model would have are repaired by `legal`."""

    layers: int = _of(1, 1, 2)
    heads: int = _of(2, 2, 4)
    size: int = _of(4, 4, 6)
    group: int = _of(1, 1, 2)
    grouping: str = _of("expand", "repeat", "enable")
    place: str = _of("none", "slice", "offset", "lookup", "rotary", "rotary", "interleaved")
    positions: str = _of("none", "none", "arange", "cumsum", "cumsum", "restart")
    documents: str = _of("none", "none", "none", "none", "input", "restarts")
    attend: str = _of("sdpa", "sdpa", "causal", "additive", "where", "add", "fill", "merged")
    level: float = _of(-1e9, torch.finfo(torch.float64).min, -math.inf)
    causal: str = _of("compare", "tril", "triu")
    window: int = _of(0, 0, 0, 1, 2, 4)
    alternate: bool = _of(False, True)
    softcap: float = _of(0.0, 0.0, 1.5)
    sinks: bool = _of(False, False, True)
    qkv: str = _of("apart", "split", "chunk", "stacked")
    joined: str = _of("flatten", "reshape", "view")
    qk_norm: bool = _of(False, False, True)
    norm: str = _of("layer", "rms", "written", "none")
    parallel: bool = _of(False, False, True)
    mlp: str = _of("gelu", "gated", "fused", "square", "mixture", "routed")
    middle: str = _of("none", "none", "none", "none", "none", "none", "none", "mean")
    tied: bool = _of(False, True)
    cut: str = _of("all", "all", "last", "shift", "inner")
    tail: str = _of(
        "logits", "hidden", "both", "ce", "ce_sum", "ce_none", "ce_ignore", "logprob", "logprob_loss",
        "selective", "entropy", "entropy_loss", "mean", "row_mean", "row_plain", "last", "kl", "ppo",
    )  # fmt: skip
    checkpoint: bool = _of(False, False, False, True)
    no_grad: bool = _of(False, False, False, False, False, False, False, True)
    refused: str = _of(*["none"] * 40, "flip", "prefix")
    lowered: str = _of("graph", "graph", "graph", "aot")
    dynamic: bool = _of(False, False, True)


@dataclass(frozen=True)
class Data:
    """A batch."""

    tree: str = _of("forks", "forks", "copies", "prefixes", "comb", "apart")
    count: int = _of(2, 1, 3, 4, 5, 6)
    length: int = _of(4, 5, 6, 7, 8, 9, 10)
    pad: str = _of("none", "right", "left", "both")
    holes: str = _of("", "", "columns", "scattered")
    empty: bool = _of(False, False, False, True)
    labelled: str = _of("some", "some", "all")
    tile: int = _of(64, 1, 3)  # of the plan of tree attention: 64 masks a tree of this size as a whole
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One model on one batch."""

    program: Program
    data: Data

    def text(self) -> str:
        """As json: the fields that differ from the simplest."""
        parts = {"program": self.program, "data": self.data}
        return json.dumps({part: changed(v) for part, v in parts.items()}, indent=1)

    @staticmethod
    def read(text: str) -> Case:
        """The case of a saved file."""
        plain = json.loads(text)
        return Case(Program(**plain["program"]), Data(**plain["data"]))


def changed(value: Any) -> dict[str, Any]:
    """The fields that differ from the simplest."""
    fields = dataclasses.fields(value)
    return {f.name: getattr(value, f.name) for f in fields if getattr(value, f.name) != f.default}


def legal(p: Program) -> Program:
    """The nearest model that makes sense."""
    written = p.attend in ("where", "add", "fill")
    change: dict[str, Any] = {}
    if not written:
        change |= {"softcap": 0.0, "sinks": False}
    if p.grouping == "enable" and (written or p.attend == "merged"):
        change["grouping"] = "expand"
    if p.attend in ("causal", "merged"):
        change |= {"window": 0, "documents": "none", "causal": "compare"}
    if p.attend not in ("additive", "where", "add", "fill") or (written and p.level == -math.inf):
        change["level"] = -1e9  # written softmax over -inf alone is NaN in the dense run
    documents = change.get("documents", p.documents)
    if documents == "restarts":
        change["positions"] = "restart"
    if p.group > 1 and p.qkv in ("chunk", "stacked"):
        change["qkv"] = "split"
    if p.attend in ("additive", "where", "add", "fill") and p.checkpoint:
        change["dynamic"] = False  # Dynamo fails at a symbolic float in a checkpoint, whatever the backend
    if p.layers == 1 or not change.get("window", p.window):
        change["alternate"] = False
    if p.middle == "mean" and p.layers == 1:
        change["middle"] = "none"
    if p.refused == "flip" and p.layers == 1:
        change["layers"] = 2
    if p.refused == "prefix" and p.attend in ("causal", "merged"):
        change["attend"] = "sdpa"
    if p.group == 1:
        change["grouping"] = "expand"
    return dataclasses.replace(p, **change)


def _draw(kind: Any, g: random.Random) -> Any:
    return kind(**{f.name: g.choice(f.metadata["options"]) for f in dataclasses.fields(kind) if f.metadata})


def draw(g: random.Random, count: int = BATCHES) -> list[Case]:
    """One model on several batches: two of one shape (captured with literal sizes), then others of any."""
    program = legal(_draw(Program, g))
    if program.refused != "none":
        count = 1  # what is refused is refused for every batch
    batches: list[Data] = []
    for i in range(count):
        data = dataclasses.replace(_draw(Data, g), seed=g.randrange(10**6))
        if i == 1:
            data = dataclasses.replace(data, count=batches[0].count, length=batches[0].length)
        elif data.count == 1 and g.random() < 0.6:
            data = dataclasses.replace(data, count=3)  # one row is one more capture
        if _averages(program, data) and g.random() < 0.9:
            plain = "none" if program.window or program.documents != "none" else "right"
            data = dataclasses.replace(data, pad=plain, holes="", empty=False)
        batches.append(data)
    return [Case(program, data) for data in batches]


def _averages(p: Program, d: Data) -> bool:
    """Whether padded queries may be read where the model averages over all keys (refused)."""
    reads = p.tail in ("mean", "row_plain", "last") or p.middle == "mean" or d.labelled == "all"
    return reads and p.attend in ("additive", "where", "add", "fill")


# ---- batches -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """ids, mask, positions?, documents?, labels: int64 [B, T]; weights, old: fp64 [B, T]."""

    ids: Tensor
    mask: Tensor
    positions: Tensor | None
    documents: Tensor | None
    labels: Tensor
    weights: Tensor
    old: Tensor

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))


def _rows(d: Data, g: random.Random) -> list[list[int]]:
    def fresh(n: int) -> list[int]:
        return [g.randrange(VOCAB) for _ in range(n)]

    rows = [fresh(d.length)]
    for b in range(1, d.count):
        if d.tree == "apart":
            rows.append([b % VOCAB, *fresh(d.length - 1)])
            continue
        source = rows[-1] if d.tree == "comb" else g.choice(rows)
        fork = g.randint(0, len(source))
        if d.tree == "copies" and g.random() < 0.6:
            rows.append(list(source))
        elif d.tree == "prefixes" and g.random() < 0.6:
            rows.append(source[: max(fork, 1)])
        else:
            rows.append(source[:fork] + fresh(d.length - fork))
    g.shuffle(rows)
    return rows


def _place(d: Data, rows: list[list[int]], g: random.Random) -> tuple[Tensor, Tensor]:
    """The padded grid: random tokens where the mask is zero, so that whatever reads them shows."""
    ids = torch.tensor([[g.randrange(VOCAB) for _ in range(d.length)] for _ in range(d.count)])
    mask = torch.zeros(d.count, d.length, dtype=torch.int64)
    for b, row in enumerate(rows):
        if d.holes == "scattered":  # equal tokens at other columns
            row = row[: d.length - g.randint(0, d.length // 2)]
            at = torch.tensor(sorted(g.sample(range(d.length), len(row))))
            ids[b, at], mask[b, at] = torch.tensor(row), 1
            continue
        if d.pad == "none":
            row = row + [g.randrange(VOCAB) for _ in range(d.length - len(row))]
        elif len(row) == d.length:
            row = row[: max(1, d.length - g.choice((0, 0, 1, 2, 4)))]
        free = d.length - len(row)
        start = {"left": free, "both": g.randint(0, free)}.get(d.pad, 0)
        ids[b, start : start + len(row)] = torch.tensor(row)
        mask[b, start : start + len(row)] = 1
    if d.holes == "columns":
        mask[:, g.randrange(d.length)] = 0
        mask[g.randrange(d.count), g.randrange(d.length)] = 0
    if d.empty:
        mask[g.randrange(d.count)] = 0
    return ids, mask


def inputs(p: Program, d: Data) -> Inputs:
    """The arguments of a case."""
    g = random.Random(d.seed)
    ids, mask = _place(d, _rows(d, g), g)
    torch_g = torch.Generator().manual_seed(d.seed)
    columns = torch.arange(d.length).expand(ids.shape)
    # Documents begin at the same columns in most rows, so that rows which share tokens share documents.
    begins = torch.rand(ids.shape, generator=torch_g) < 0.3
    begins = torch.where(torch.rand(d.count, 1, generator=torch_g) < 0.7, begins[:1], begins)
    begins[:, 0] = True
    documents = begins.long().cumsum(1)
    start = torch.where(begins, columns, 0).cummax(1).values
    positions = {
        "none": None,
        "arange": columns.contiguous(),
        "cumsum": (mask.cumsum(1) - 1).clamp(min=0),
        "restart": columns - start,
    }[p.positions]
    labels = torch.randint(0, VOCAB, ids.shape, generator=torch_g)
    if d.labelled == "some":
        labels[torch.rand(ids.shape, generator=torch_g) < 0.3] = -100
        labels[mask == 0] = -100
    weights = torch.randn(ids.shape, generator=torch_g, dtype=torch.float64) * (labels != -100)
    old = torch.randn(ids.shape, generator=torch_g, dtype=torch.float64) * 0.1 - math.log(VOCAB)
    return Inputs(ids, mask, positions, documents if p.documents == "input" else None, labels, weights, old)


# ---- models --------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """One of the usual norms over the last dim."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.width = kind, width
        self.scale = nn.Parameter(torch.ones(width)) if kind != "none" else None
        self.shift = nn.Parameter(torch.zeros(width)) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, (self.width,), self.scale, self.shift, 1e-5)
        if self.kind == "rms":
            return F.rms_norm(x, (self.width,), self.scale, 1e-6)
        if self.kind == "written":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return x


class Mlp(nn.Module):
    """One of the usual token-wise networks."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        inner, experts = 10, 3
        self.up = nn.Linear(width, 2 * inner if kind == "fused" else inner, bias=kind == "gelu")
        self.down = nn.Linear(inner, width, bias=kind == "gelu")
        if kind == "gated":
            self.gate = nn.Linear(width, inner, bias=False)
        if kind in ("mixture", "routed"):
            self.router = nn.Linear(width, experts, bias=False)
            self.experts = nn.Parameter(torch.zeros(experts, width, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gelu":
            return self.down(F.gelu(self.up(x)))
        if self.kind == "gated":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind == "fused":
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        if self.kind == "square":
            return self.down(F.relu(self.up(x)).square())
        share = self.router(x).softmax(-1)
        if self.kind == "routed":
            best, which = share.topk(2, dim=-1)
            share = torch.zeros_like(share).scatter(-1, which, best / best.sum(-1, keepdim=True))
        each = torch.stack([F.tanh(x @ expert) for expert in self.experts.unbind(0)], dim=-1)
        return self.down(F.gelu(self.up(x))) + (each * share.unsqueeze(-2)).sum(-1)


def rotate(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """Rotary positions: x [B, H, T, D], angle [.., T, D / 2]."""
    cos, sin = angle.cos().unsqueeze(-3), angle.sin().unsqueeze(-3)
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)


class Attention(nn.Module):
    """Attention in one of the spellings that models use."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.p = p
        width, self.kv = p.heads * p.size, p.heads // p.group
        sizes = [width, self.kv * p.size, self.kv * p.size]
        self.sizes = sizes
        if p.qkv == "apart":
            self.q, self.k, self.v = (nn.Linear(width, n) for n in sizes)
        else:
            self.qkv = nn.Linear(width, sum(sizes))
        self.out = nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm = (Norm("written" if p.qk_norm else "none", p.size) for _ in range(2))
        if p.sinks:
            self.sinks = nn.Parameter(torch.zeros(p.heads))

    def project(self, x: Tensor) -> list[Tensor]:
        """q, k, v [B, H, T, D]."""
        p, (b, t) = self.p, x.shape[:2]
        if p.qkv == "stacked":
            return [y.transpose(1, 2) for y in self.qkv(x).view(b, t, 3, p.heads, p.size).unbind(2)]
        if p.qkv == "apart":
            parts = [self.q(x), self.k(x), self.v(x)]
        elif p.qkv == "chunk":
            parts = list(self.qkv(x).chunk(3, dim=-1))
        else:
            parts = list(self.qkv(x).split(self.sizes, dim=-1))
        return [y.view(b, t, -1, p.size).transpose(1, 2) for y in parts]

    def repeat(self, x: Tensor) -> Tensor:
        p = self.p
        if p.group == 1 or p.grouping == "enable":
            return x
        if p.grouping == "repeat":
            return x.repeat_interleave(p.group, dim=1)
        b, kv, t, d = x.shape
        return x[:, :, None].expand(b, kv, p.group, t, d).reshape(b, kv * p.group, t, d)

    def forward(self, x: Tensor, seen: Tensor | None, angle: Tensor | None) -> Tensor:
        p = self.p
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if angle is not None:
            q, k = (rotate(y, angle, p.place == "interleaved") for y in (q, k))
        k, v = self.repeat(k), self.repeat(v)
        out = self.attend(q, k, v, seen).transpose(1, 2)
        if p.joined == "flatten":
            joined = out.flatten(2)
        elif p.joined == "reshape":
            joined = out.reshape(x.shape)
        else:
            joined = out.contiguous().view(x.shape[0], x.shape[1], -1)
        return self.out(joined)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        p = self.p
        grouped = p.group > 1 and p.grouping == "enable"
        if p.attend == "causal" or seen is None:
            if p.attend == "merged":
                flat = [y.reshape(-1, *y.shape[-2:]) for y in (q, k, v)]
                return F.scaled_dot_product_attention(*flat, is_causal=True).view(q.shape)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if p.attend == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)
        if p.attend == "additive":
            bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, p.level)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped, scale=0.4)
        return self.written(q, k, v, seen)

    def written(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        p = self.p
        scores = q @ k.transpose(-1, -2) / math.sqrt(p.size)
        if p.softcap:
            scores = torch.tanh(scores / p.softcap) * p.softcap
        if p.attend == "where":
            scores = torch.where(seen, scores, p.level)
        elif p.attend == "fill":
            scores = scores.masked_fill(~seen, p.level)
        else:
            scores = scores + torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, p.level)
        if p.sinks:
            column = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
            scores = torch.cat([scores, column], dim=-1)
            scores = scores - scores.max(dim=-1, keepdim=True).values
            return F.softmax(scores, dim=-1)[..., :-1] @ v
        return F.softmax(scores, dim=-1) @ v


class Layer(nn.Module):
    """Attention and a token-wise network, one after the other or side by side."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        width = p.heads * p.size
        self.p, self.attention, self.mlp = p, Attention(p), Mlp(p.mlp, width)
        self.norm1, self.norm2 = Norm(p.norm, width), Norm(p.norm, width)

    def forward(self, h: Tensor, seen: Tensor | None, angle: Tensor | None) -> Tensor:
        x = self.norm1(h)
        if self.p.parallel:
            return h + self.attention(x, seen, angle) + self.mlp(x)
        h = h + self.attention(x, seen, angle)
        return h + self.mlp(self.norm2(h))


class Tower(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        width = p.heads * p.size
        self.p = p
        self.tokens = nn.Embedding(VOCAB, width)
        if p.place in ("slice", "offset", "lookup"):
            self.places = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(p) for _ in range(p.layers))
        self.norm = Norm(p.norm, width)
        self.register_buffer("speed", 0.7 ** torch.arange(p.size // 2, dtype=torch.float64))

    def masks(self, ids: Tensor, mask: Tensor, documents: Tensor | None) -> list[Tensor | None]:
        """bool [B, 1, T, T] for every layer."""
        p = self.p
        if p.attend in ("causal", "merged"):
            return [None] * p.layers
        q, k = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])[None, :]
        if p.causal == "compare":
            seen = k <= q
        else:
            seen = _ones(ids).tril() if p.causal == "tril" else ~_ones(ids).triu(1)
        if p.refused == "prefix":
            seen = seen | (k < 2)
        seen = seen[None, None] & mask.bool()[:, None, None, :]
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
        near = seen & (q - k < p.window)[None, None] if p.window else seen
        return [seen if p.alternate and i % 2 else near for i in range(p.layers)]

    def forward(self, ids: Tensor, mask: Tensor, positions: Any, documents: Any) -> Tensor:
        p = self.p
        if p.documents == "restarts":
            assert positions is not None
            documents = (positions == 0).long().cumsum(-1)
        place = torch.arange(ids.shape[1]) if positions is None else positions
        h = self.tokens(ids)
        if p.place == "slice":
            h = h + self.places.weight[: ids.shape[1]]
        elif p.place == "offset":
            h = h + self.places.weight[2 : ids.shape[1] + 2]
        elif p.place == "lookup":
            h = h + self.places(place)
        angle = place[..., None].to(h.dtype) * self.speed if p.place in ("rotary", "interleaved") else None
        seen = self.masks(ids, mask, documents)
        for i, layer in enumerate(self.layers):
            if p.checkpoint:
                h = checkpoint(layer, h, seen[i], angle, use_reentrant=False)
            else:
                h = layer(h, seen[i], angle)
            if i == 0 and p.middle == "mean":
                h = h - h.mean((0, 1))
            if i == 0 and p.refused == "flip":
                h = h + h.flip(1)
        return self.norm(h)


def _ones(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)


class Policy(nn.Module):
    """A tower, a head and what is asked of them."""

    PER_TOKEN = frozenset({"logits", "hidden", "both", "logprob", "selective", "entropy"})

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.p, self.tower = p, Tower(p)
        self.reference = Tower(p) if p.tail == "kl" else None
        if not p.tied:
            self.head = nn.Linear(p.heads * p.size, VOCAB)
        self.double()
        g = torch.Generator().manual_seed(5)
        size = (
            0.4 if p.norm != "none" else 0.15
        )  # larger ones grow from layer to layer, and rounding with them
        with torch.no_grad():
            for x in self.parameters():
                x.add_(torch.randn(x.shape, generator=g, dtype=torch.float64) * size)

    def part(self, x: Tensor, ahead: bool = False) -> Tensor:
        """The part of the sequence that the tail reads; `ahead` for values that say what comes next."""
        if self.p.cut == "last":
            return x[:, -KEEP:]
        if self.p.cut == "shift":
            return x[:, 1:] if ahead else x[:, :-1]
        if self.p.cut == "inner":
            return x[:, 1:][:, -KEEP:] if ahead else x[:, :-1][:, -KEEP:]
        return x

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.tower.tokens.weight) if self.p.tied else self.head(h)

    def forward(self, ids: Tensor, mask: Tensor, positions: Any, documents: Any, *rest: Tensor) -> Any:
        h = self.part(self.tower(ids, mask, positions, documents))
        kept, labels, weights, old = self.part(mask), *(self.part(x, True) for x in rest)
        name = self.p.tail
        if name == "hidden":
            return h
        x = self.logits(h)
        if name == "both":
            return x, h
        if name.startswith("ce"):
            return self.cross_entropy(x, labels, weights)
        if name in ("logprob", "logprob_loss", "selective", "ppo"):
            return self.chosen(x, labels.clamp(min=0), weights, old)
        if name == "kl":
            with torch.no_grad():
                other = self.part(self.reference(ids, mask, positions, documents))
            a, b = x.log_softmax(-1), self.logits(other).log_softmax(-1)
            return ((a.exp() * (a - b)).sum(-1) * weights).sum()
        if name.startswith("entropy"):
            a = x.log_softmax(-1)
            entropy = -(a.exp() * a).sum(-1)
            return entropy if name == "entropy" else (entropy * kept).sum() / kept.sum().clamp(min=1)
        if name == "row_mean":
            return (x * kept.unsqueeze(-1)).sum(1) / kept.sum(1, keepdim=True).clamp(min=1)
        if name == "mean":
            return x.mean()
        if name == "row_plain":
            return x.mean(1)
        return x[:, -1] if name == "last" else x

    def cross_entropy(self, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        flat, target, name = x.reshape(-1, VOCAB), labels.reshape(-1), self.p.tail
        if name == "ce_none":
            return (F.cross_entropy(flat, target, reduction="none") * weights.reshape(-1)).sum()
        if name == "ce_ignore":
            return F.cross_entropy(flat, target.clamp(min=0), ignore_index=0)
        return F.cross_entropy(flat, target, reduction="sum" if name == "ce_sum" else "mean")

    def chosen(self, x: Tensor, labels: Tensor, weights: Tensor, old: Tensor) -> Tensor:
        index, name = labels.unsqueeze(-1), self.p.tail
        if name == "selective":
            return x.gather(-1, index).squeeze(-1) - x.logsumexp(-1)
        picked = x.log_softmax(-1).gather(-1, index).squeeze(-1)
        if name == "logprob":
            return picked
        if name == "logprob_loss":
            return -(picked * weights).sum()
        ratio = (picked - old).exp()
        worst = torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights)
        return -worst.sum() / (weights != 0).sum().clamp(min=1)


# ---- running -------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How a case went: "packed" or the slug of a refusal, and what was wrong ("" if nothing)."""

    case: Case
    how: str
    wrong: str = ""

    @property
    def kind(self) -> tuple[str, str]:
        """What a shrunk case must share with this one: how it ran, and the class of the error."""
        return self.how, self.wrong.partition(":")[0]


def _expected(case: Case, how: str) -> bool:
    """Whether a case may run as it did."""
    p = case.program
    if p.refused != "none":
        return how == {"flip": "mixes-tokens", "prefix": "mask"}[p.refused]
    if how == "masked-query":  # padded queries that see nothing are read, and the model averages there
        # Under symbolic sizes a slice of the labels is not known to cover the slice of the logits: padding then
        # counts as read, and a finite additive mask averages there.
        sliced = p.cut != "all" and p.attend in ("additive", "where", "add", "fill")
        return (sliced or _averages(p, case.data)) and bool((inputs(p, case.data).mask == 0).any())
    if how == "empty":
        return not inputs(p, case.data).mask.any()
    return how == "packed"


class Called:
    """A model whose outputs are compared at kept positions only."""

    def __init__(self, call: Any, model: Policy, given: Inputs) -> None:
        self.call, self.model, self.given = call, model, given
        exact = model.p.attend in ("causal", "merged")  # no mask: padding is text like any other
        self.kept = None if exact or model.p.tail not in Policy.PER_TOKEN else model.part(given.mask.bool())

    def __call__(self, *args: Any) -> Any:
        found = self.call(*args)
        parts = found if isinstance(found, tuple) else (found,)
        return tuple(x if self.kept is None else self._masked(x, self.kept) for x in parts)

    @staticmethod
    def _masked(x: Tensor, kept: Tensor) -> Tensor:
        wide = kept.reshape(*kept.shape, *[1] * (x.dim() - 2))
        return torch.where(wide, x, torch.zeros((), dtype=x.dtype))


@contextlib.contextmanager
def planned(tile: int) -> Iterator[None]:
    """Plan tree attention with this tile: small trees are cut in pieces as large ones are."""
    plan, few = batch.plan_pieces, attention_plan.SMALL_TREE
    try:
        if tile != 64:
            batch.plan_pieces = functools.partial(plan, tile=tile)
            attention_plan.SMALL_TREE = 0
        yield
    finally:
        batch.plan_pieces, attention_plan.SMALL_TREE = plan, few


def run_cases(cases: Sequence[Case]) -> list[Outcome]:
    """Run cases of one model."""
    torch._dynamo.reset()
    lowering.clear()
    with as_written(cases[0].program.lowered == "graph"):
        return list(_run_cases(cases))


def _run_cases(cases: Sequence[Case]) -> Iterator[Outcome]:
    program = cases[0].program
    model = Policy(program)
    tree = compiled(model, dynamic=program.dynamic or None)
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    for case in cases:
        given = inputs(program, case.data)
        around = torch.no_grad() if program.no_grad else contextlib.nullcontext()
        wrong, seen = "", Counter[str]()
        try:
            with around:
                dense = _one(Called(model, model, given), parameters)
                backend.clear()  # trees of another plan
                with counting() as seen, planned(case.data.tile):
                    found = _one(Called(tree, model, given), parameters)
            compare(*scaled(dense, found), TOLERANCE)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        slugs = [key.removeprefix("dense:") for key in seen if key.startswith("dense:")]
        how = slugs[0] if slugs else "packed" if seen["packed"] == 1 else "not run"
        if not wrong and not _expected(case, how):
            wrong = f"ran {dict(seen)}"
        yield Outcome(case, how, wrong)


def _one(call: Called, parameters: dict[str, Tensor]) -> Run:
    backward = not call.model.p.no_grad
    return run(call, call.given.args, {}, parameters=parameters, kept=None, backward=backward)


def scaled(dense: Run, found: Run) -> tuple[Run, Run]:
    """Gradients over the largest of all: where one cancels to zero, what is left is the rounding of the others."""
    largest = max((float(x.abs().max()) for x in dense.grads.values()), default=1.0)
    by = 1.0 / largest if 0 < largest < math.inf else 1.0
    a, b = (Run(x.outputs, {name: g * by for name, g in x.grads.items()}) for x in (dense, found))
    return a, b


def shrink(case: Case, tries: int = 60) -> Case:
    """The simplest case that still fails in the same way, field by field."""
    kind, simpler = run_cases([case])[0].kind, True
    while simpler and tries > 0:
        simpler = False
        for part in ("data", "program"):
            for f in reversed(dataclasses.fields(getattr(case, part))):  # what makes it slow comes last
                now = getattr(getattr(case, part), f.name)
                options = list(dict.fromkeys(f.metadata.get("options", ())))
                for option in options[: options.index(now)] if now in options else []:
                    less = dataclasses.replace(getattr(case, part), **{f.name: option})
                    smaller = dataclasses.replace(case, **{part: less})
                    smaller = Case(legal(smaller.program), smaller.data)
                    if smaller == case or tries <= 0:
                        continue
                    tries -= 1
                    if run_cases([smaller])[0].kind == kind:
                        case, simpler = smaller, True
                        break
    return case


def save(case: Case, wrong: str, folder: Path) -> Path:
    """Write a case to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"case-{abs(hash(case)) % 10**8:08d}.json"
    plain = {**json.loads(case.text()), "wrong": wrong.splitlines()[0] if wrong else ""}
    path.write_text(json.dumps(plain, indent=1) + "")
    return path


@dataclass
class Total:
    """What a fuzz run found."""

    how: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def packed(self) -> float:
        """Share of packed cases."""
        return self.how["packed"] / max(self.how.total(), 1)


def run_all(
    cases: int, seed: int, folder: Path = Path("out/fuzz"), tries: int = 60, verbose: bool = False
) -> Total:
    """Draw and run cases; failures are shrunk and saved."""
    g, total = random.Random(seed), Total()
    while total.how.total() < cases:
        start = time.perf_counter()
        drawn = draw(g, min(BATCHES, cases - total.how.total()))
        failed: list[Outcome] = []
        for outcome in run_cases(drawn):
            total.how[outcome.how] += 1
            if outcome.wrong:
                failed.append(outcome)
        if failed:
            case = _alone(failed[0].case)
            case = shrink(case, tries) if run_cases([case])[0].wrong else case
            total.failures += failed
            total.files.append(save(case, failed[0].wrong, folder))
        if verbose:
            took = time.perf_counter() - start
            print(f"{total.how.total():4d} {took:5.1f} s {_short(drawn[0].program)}", flush=True)
            for outcome in failed:
                print(f"     FAILED, {outcome.how}: {outcome.wrong[:300]}", flush=True)
    return total


def _alone(case: Case) -> Case:
    """A case that failed after others of its model: if it holds alone, it may fail on a capture with symbolic sizes."""
    if run_cases([case])[0].wrong:
        return case
    return dataclasses.replace(case, program=dataclasses.replace(case.program, dynamic=True))


def _short(p: Program) -> str:
    return " ".join(f"{name}={value}" for name, value in changed(p).items())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random models on random trees."
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="drawn if not given")
    parser.add_argument("--case", type=Path, default=None, help="run one saved case again")
    parser.add_argument("--tries", type=int, default=60, help="runs spent on shrinking a failure")
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if given.case is not None:
        outcome = run_cases([Case.read(given.case.read_text())])[0]
        print(f"{outcome.how}: {outcome.wrong or 'as dense'}")
        return int(bool(outcome.wrong))
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}")
    total = run_all(given.cases, seed, tries=given.tries, verbose=not given.quiet)
    print(f"seed {seed}: {total.how.total()} cases, {total.packed:.1%} packed, {dict(total.how)}")
    for path in total.files:
        print(f"failed: python -m tests.fuzz --case {path}")
    return int(bool(total.failures))


if __name__ == "__main__":
    sys.exit(main())
