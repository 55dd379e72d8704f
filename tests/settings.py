"""The matrix of models and settings: its axes, what is left out and why, and the lists generated from it.

A case picks one value on each axis. Two lists are made of all valid cases:

- `covering`: few cases such that every possible pair of values of any two axes occurs in one of them;
- `product`: every family with every attention, experts function and mask, with each other setting in turn.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.models import FAMILIES, VOCAB

__all__ = [
    "AXES",
    "EXCLUSIONS",
    "Case",
    "Exclusion",
    "Sample",
    "covering",
    "excluded",
    "pairs",
    "product",
    "sample",
]

AXES: dict[str, tuple[str, ...]] = {
    "family": tuple(FAMILIES),
    # attention_mask: not given, or padded on one side, or right-padded with masked positions in between.
    "mask": ("right", "left", "none", "holes"),
    "attention": ("sdpa", "eager", "flex", "flash"),
    "experts": ("-", "batched_mm", "eager", "grouped_mm"),
    # position_ids: not given, columns, counted along the mask, or restarting with every document.
    "positions": ("-", "arange", "cumsum", "packed_row", "packed_batch"),
    # What the call asks for: logits of all tokens, of the last ones, a loss (with padding ignored, or with
    # labels=input_ids as they are), or all hidden states too.
    "ask": ("-", "keep", "labels", "all_labels", "hidden"),
    "mode": ("-", "checkpoint", "no_grad", "inference", "autocast"),
    "weights": ("-", "frozen", "lora", "tied"),
    # use_cache=False, or left at its default.
    "cache": ("-", "cache"),
}
FORWARD_ONLY = ("no_grad", "inference")
_SINGLE = ("positions", "ask", "mode", "weights", "cache")


@dataclass(frozen=True)
class Case:
    """One value of each axis; "-" is the plain setting."""

    family: str
    mask: str = "right"
    attention: str = "sdpa"
    experts: str = "-"
    positions: str = "-"
    ask: str = "-"
    mode: str = "-"
    weights: str = "-"
    cache: str = "-"

    def __str__(self) -> str:
        return "-".join(value for value in self.values().values() if value != "-")

    def values(self) -> dict[str, str]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Exclusion:
    """Combinations that are left out: all axes in `where`, two or more, have one of the named values."""

    why: str
    where: Mapping[str, tuple[str, ...]]

    def holds(self, values: Mapping[str, str]) -> bool:
        return all(values.get(axis) in named for axis, named in self.where.items())


def _by_family() -> Iterator[Exclusion]:
    for family in FAMILIES.values():
        other = tuple(a for a in AXES["attention"] if a not in family.attention)
        if other:
            where = {"family": (family.name,), "attention": other}
            yield Exclusion("the family does not accept this attention implementation", where)
        experts = family.experts or ("-",)
        other = tuple(e for e in AXES["experts"] if e not in experts)
        yield Exclusion(
            "dense families have no experts, the others have some",
            {"family": (family.name,), "experts": other},
        )


def _eager_reference() -> tuple[str, ...]:
    flexible = [family for family in FAMILIES.values() if "flex" in family.attention]
    return tuple(family.name for family in flexible if family.reference == "eager")


EXCLUSIONS: tuple[Exclusion, ...] = (
    *_by_family(),
    Exclusion(
        "packed documents come without a mask",
        {"positions": ("packed_row", "packed_batch"), "mask": ("right", "left", "holes")},
    ),
    Exclusion("there is no mask to count along", {"positions": ("cumsum",), "mask": ("none",)}),
    Exclusion(
        "without a mask no label is ignored in either case", {"ask": ("all_labels",), "mask": ("none",)}
    ),
    Exclusion("the model written by hand has no cache", {"family": ("handwritten",), "cache": ("cache",)}),
    Exclusion(
        "transformers turns the cache off and logs it, and the call of the logger breaks the graph",
        {"mode": ("checkpoint",), "cache": ("cache",)},
    ),
    Exclusion(
        "transformers collects hidden states in a list, from inside of checkpoints: Dynamo breaks the graph",
        {"mode": ("checkpoint",), "ask": ("hidden",)},
    ),
    Exclusion(
        "FlashAttention gives zeros at padding, and nothing else does: no dense run on a CPU to compare with",
        {"attention": ("flash",), "ask": ("all_labels",)},
    ),
    Exclusion(
        "FlexAttention gives zeros to queries that see nothing, and the eager run that these families are compared"
        " with gives them an average over all keys: no dense run",
        {"family": _eager_reference(), "attention": ("flex",), "ask": ("all_labels",)},
    ),
    Exclusion(
        "likewise for the last pad before a row, which predicts its first token",
        {"family": _eager_reference(), "attention": ("flex", "flash"), "ask": ("labels",), "mask": ("left",)},
    ),
    Exclusion(
        "with a cache the masks of transformers forget documents, and FlashAttention does not: no dense run",
        {"attention": ("flash",), "positions": ("packed_row",), "cache": ("cache",)},
    ),
    Exclusion(
        "the masks of this family never know documents, and FlashAttention does: no dense run",
        {"family": ("gpt_oss",), "attention": ("flash",), "positions": ("packed_row",)},
    ),
)


def excluded(values: Mapping[str, str]) -> Exclusion | None:
    """The first exclusion that holds for values of some or all axes."""
    return next((e for e in EXCLUSIONS if e.holds(values)), None)


# ---- lists -------------------------------------------------------------------------------------------------


def plain(family: str) -> Case:
    """The usual setting of a family."""
    this = FAMILIES[family]
    return Case(family, attention=this.attention[0], experts=(this.experts or ("-",))[0])


def product() -> list[Case]:
    """Every family, attention, experts function and mask; every other setting alone.

    Experts functions other than the usual one run with the usual attention only: neither sees the other.
    """
    cases: dict[Case, None] = {}
    for name, family in FAMILIES.items():
        base = plain(name)
        inner = [replace(base, attention=a) for a in family.attention]
        inner += [replace(base, experts=e) for e in family.experts[1:]]
        for case, mask in itertools.product(inner, AXES["mask"]):
            for axis in _SINGLE:
                for value in AXES[axis]:
                    made = replace(case, mask=mask, **{axis: value})
                    if excluded(made.values()) is None:
                        cases[made] = None
    return list(cases)


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(values: Mapping[str, str]) -> set[Pair]:
    """All pairs of (axis, value) that a case, or a part of one, tests; axes in the order of AXES.

    A case without a backward pass tests what its mode meets, and nothing else.
    """
    chosen = [(axis, values[axis]) for axis in AXES if axis in values]
    found = set(itertools.combinations(chosen, 2))
    if values.get("mode") in FORWARD_ONLY:
        found = {pair for pair in found if "mode" in (pair[0][0], pair[1][0])}
    return found


def _each(axis: str, values: Iterable[str]) -> list[tuple[str, str]]:
    return [(axis, value) for value in values]


@functools.cache
def _conflicts() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """For each (axis, value), all others that an exclusion of two names with it."""
    found: dict[tuple[str, str], set[tuple[str, str]]] = {
        x: set() for axis in AXES for x in _each(axis, AXES[axis])
    }
    for exclusion in EXCLUSIONS:
        if len(exclusion.where) != 2:
            continue
        first, second = (_each(axis, named) for axis, named in exclusion.where.items())
        for x, y in itertools.product(first, second):
            found[x].add(y)
            found[y].add(x)
    return found


def _complete(values: dict[str, str]) -> dict[str, str] | None:
    """A valid case with these values, by backtracking over the other axes."""
    taken = values.items()
    if any(not _conflicts()[x].isdisjoint(taken) for x in taken):
        return None
    free = next((axis for axis in AXES if axis not in values), None)
    if free is None:
        return values if excluded(values) is None else None
    return next((found for value in AXES[free] if (found := _complete({**values, free: value}))), None)


def wanted() -> list[Pair]:
    """Every pair that some valid case tests, in order.

    Left out: modes without a backward pass with each family and each kind of weights. The graph of a family
    does not depend on them, and `product` runs them all.
    """
    found = []
    for a, b in itertools.combinations(AXES, 2):
        for pair in itertools.product(_each(a, AXES[a]), _each(b, AXES[b])):
            (_, x), (_, y) = pair
            forward = a in ("family", "weights", "mode") and b in ("mode", "weights")
            if forward and (x in FORWARD_ONLY or y in FORWARD_ONLY):
                continue
            if _complete(dict(pair)) is not None:
                found.append(pair)
    return found


@functools.cache
def covering(seed: int = 17) -> tuple[Case, ...]:
    """Few cases that have every wanted pair. The seed is one that gives few."""
    rng = random.Random(seed)
    missing = dict.fromkeys(wanted())
    cases = []
    while missing:
        drawn = [_greedy(missing, rng) for _ in range(4)]
        values = max(drawn, key=lambda one: len(pairs(one) & missing.keys()))
        for pair in pairs(values):
            missing.pop(pair, None)
        cases.append(Case(**values))
    return tuple(cases)


def _greedy(missing: Mapping[Pair, None], rng: random.Random) -> dict[str, str]:
    """A case that takes, axis after axis in random order, the value that adds most of the missing pairs."""
    values = dict(rng.choice(list(missing)))
    axes = [axis for axis in AXES if axis not in values]
    rng.shuffle(axes)
    for axis in axes:
        steps = [{**values, axis: value} for value in AXES[axis]]
        steps = [step for step in steps if _complete(step) is not None]
        rng.shuffle(steps)
        values = max(steps, key=lambda step: len(pairs(step) & missing.keys()))
    return values


def through_inductor(*, few: bool) -> list[Case]:
    """Three cases; or one setting of every family, and every setting of one family."""
    some = [
        replace(plain("qwen3"), mask="left", ask="labels"),
        replace(plain("gemma3"), positions="arange", mode="checkpoint"),
        replace(plain("mixtral"), mask="holes", ask="keep"),
    ]
    if few:
        return some
    cases = [plain(name) for name in FAMILIES]
    cases += [case for case in product() if case.family == "qwen3" and _usual(case)]
    return [case for case in dict.fromkeys(cases) if case not in some]


def _usual(case: Case) -> bool:
    """Plain calls, and other calls with one attention and one mask."""
    if all(case.values()[axis] == "-" for axis in _SINGLE):
        return True
    mask = "none" if case.positions.startswith("packed") else "left"
    return case.mask == mask and case.attention == "sdpa"


# ---- batches -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Arguments of a call.

    Attributes:
        arguments: keyword arguments.
        kept: bool [B, T]: positions that are no padding.
        reference: arguments of the dense run, where they differ.
    """

    arguments: dict[str, Any]
    kept: Tensor
    reference: dict[str, Any]


_T = 16
_LENGTHS = (16, 14, 16, 9, 14, 13)


def rows() -> Tensor:
    """int64 [6, 16]: a row, a late fork, the first row again, its prefix, a fork of the fork, an early fork.

    Rows are as long as `_LENGTHS` says where they are padded, and go on with tokens of their own elsewhere.
    """
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (6, _T), generator=g)
    for row, source, fork in ((1, 0, 11), (2, 0, 16), (3, 0, 9), (4, 1, 12), (5, 0, 2)):
        ids[row, :fork] = ids[source, :fork]
    return ids


def _padded(side: str) -> tuple[Tensor, Tensor]:
    """ids and mask; padding is random tokens, so that whatever reads it shows."""
    ids = rows()
    if side == "none":
        return ids, torch.ones_like(ids)
    g = torch.Generator().manual_seed(6)
    out, mask = torch.randint(3, VOCAB, ids.shape, generator=g), torch.zeros_like(ids)
    for row, length in enumerate(_LENGTHS):
        start = _T - length if side == "left" else 0
        out[row, start : start + length] = ids[row, :length]
        mask[row, start : start + length] = 1
    if side == "holes":
        mask[:, 4] = 0
        mask[1, 7:9] = 0
        mask[4, 12] = 0
    return out, mask


def sample(case: Case) -> Sample:
    """The batch of a case."""
    ids, mask = _padded(case.mask)
    positions: Tensor | None = None
    if case.positions == "arange":
        positions = torch.arange(_T).expand_as(ids).contiguous()
    elif case.positions == "cumsum":
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
    elif case.positions == "packed_row":
        parts = [row[:length] for row, length in zip(ids, _LENGTHS, strict=True)]
        ids = torch.cat(parts)[None]
        positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
        mask = torch.ones_like(ids)
    elif case.positions == "packed_batch":
        ids = torch.cat([ids[:, :10], ids.roll(1, 0)[:, :6]], dim=1)
        positions = torch.cat([torch.arange(10), torch.arange(6)]).expand_as(ids).contiguous()
    arguments: dict[str, Any] = {"input_ids": ids}
    if case.mask != "none":
        arguments["attention_mask"] = mask
    if positions is not None:
        arguments["position_ids"] = positions
    if case.family != "handwritten" and case.cache == "-":
        arguments["use_cache"] = False
    if case.ask == "keep":
        arguments["logits_to_keep"] = 5
    elif case.ask == "labels":
        arguments["labels"] = ids.masked_fill(mask == 0, -100)
    elif case.ask == "all_labels":
        arguments["labels"] = ids
    elif case.ask == "hidden":
        arguments["output_hidden_states"] = True
    reference = dict(arguments)
    if case.attention == "flash" and case.positions == "packed_batch":
        # FlashAttention sees documents in a single row only; given a mask, transformers ignores them too.
        reference["attention_mask"] = torch.ones_like(ids)
    return Sample(arguments, mask.bool(), reference)
