"""Audit of the op rules by brute force: packed against dense, on small trees, in fp64.

    python -m treecompile check                  every rule with its samples, and every pointwise op
    python -m treecompile check --op slice       ops whose name contains "slice"
    python -m treecompile check --missing        ops of known models that have no rule

For each sample call two programs are made: ids -> op -> attention, and ids -> attention -> op. Each runs
packed and dense on trees with forks, duplicates and rows that share nothing; outputs and all gradients must
agree. Sizes are chosen so that rows, tokens and features differ, and once so that all are four: a rule that
takes one axis for another is caught by one of them.

A rule may say less than is true (then the op runs on the grid), never more.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from treecompile.passes.notes import KIND
from treecompile.passes.ops import RULES
from treecompile.passes.program import Draft, build
from treecompile.passes.reasons import Refusal
from treecompile.passes.rule import Rule, lookup
from treecompile.passes.samples import Call, Operand, Size, pointwise_calls
from treecompile.programs import plain_program
from treecompile.runtime.batch import TreeCache

__all__ = ["MODEL_OPS", "Sizes", "Verdict", "audit", "audited_ops", "missing", "summary", "tagged_ops"]

aten = torch.ops.aten
_MARK = "treecompile_audited"

# What 21 small models of transformers lower to: labels, router losses, eager and sdpa attention (torch 2.11,
# 2.13).
_MODEL_OPS = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default pow.Tensor_Scalar square.default rsqrt.default
    exp.default log.default cos.default sin.default sigmoid.default silu.default gelu.default relu.default
    softplus.default clamp.default where.self bitwise_not.default ge.Scalar gt.Scalar floor_divide.default
    masked_fill.Scalar alias.default contiguous.default to.device to.dtype to.dtype_layout type_as.default
    dropout.default lift_fresh_copy.default mean.dim softmax.int topk.default sum.dim_IntList sum.default
    mean.default cumsum.default gather.default scatter.value max.dim view.default reshape.default
    unsqueeze.default squeeze.dim expand.default transpose.int slice.Tensor select.int split.Tensor
    split_with_sizes.default chunk.default cat.default pad.default repeat_interleave.self_int linear.default
    matmul.default _grouped_mm.default embedding.default arange.default zeros.default zeros_like.default
    empty_like.default new_empty.default sort.default index.Tensor index_put.default histc.default
    scatter_add.default cross_entropy_loss.default scaled_dot_product_attention.default __and__.Tensor
    le.Tensor gt.Tensor new_ones.default ones.default triu.default
    tril.default permute.default clone.default sqrt.default
"""
MODEL_OPS: tuple[str, ...] = tuple(_MODEL_OPS.split())


@dataclass(frozen=True)
class Sizes:
    """Letters of sample words."""

    B: int
    T: int
    F: int = 4
    V: int = 5

    def of(self, word: str) -> int:
        """The product of a word's letters and digits."""
        letters = {"B": self.B, "T": self.T, "F": self.F, "K": self.F // 2, "U": self.T // 2, "V": self.V}
        product = 1
        for letter in word:
            product *= int(letter) if letter.isdigit() else letters[letter]
        return product


SIZES = (Sizes(B=3, T=8), Sizes(B=4, T=4))


@dataclass(frozen=True)
class Verdict:
    """What became of one sample.

    Attributes:
        op: the overload.
        call: its arguments, as text.
        where: "before" or "after" the attention.
        outcome: "packed", "private" (it ran on the grid), "refused" (the graph runs dense), "incorrect"
        (packed and
            dense differ), "failed" (an error of ours), or "idle" (the call itself is no valid call).
        detail: the reason or the difference.
    """

    op: str
    call: str
    where: str
    outcome: str
    detail: str = ""

    @property
    def bad(self) -> bool:
        return self.outcome in ("incorrect", "failed")


# ---- programs
# -----------------------------------------------------------------------------------------------------


class _Inputs:
    """Arguments of one audit program: ids first, then what its operands need."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self.sizes = sizes
        self.random = torch.Generator().manual_seed(seed)
        self.values: list[Tensor] = [_ids(sizes, self.random)]
        self.parameters: set[int] = set()

    def add(self, value: Tensor, parameter: bool = False) -> int:
        self.values.append(value.requires_grad_(parameter))
        if parameter:
            self.parameters.add(len(self.values) - 1)
        return len(self.values) - 1

    def normal(self, *shape: int) -> int:
        return self.add(torch.randn(shape, generator=self.random, dtype=torch.float64), parameter=True)

    def integers(self, high: int, *shape: int) -> int:
        return self.add(torch.randint(0, max(high, 1), shape, generator=self.random))


def _ids(sizes: Sizes, random: torch.Generator) -> Tensor:
    """Rows that fork from the first at places of their own."""
    ids = torch.randint(0, sizes.V, (1, sizes.T), generator=random).repeat(sizes.B, 1)
    for row in range(1, sizes.B):
        fork = int(torch.randint(1, sizes.T, (1,), generator=random))
        ids[row, fork:] = torch.randint(0, sizes.V, (sizes.T - fork,), generator=random)
    return ids


Make = Callable[[Sequence[Any], Any], Any]


def _operand(inputs: _Inputs, operand: Operand) -> Make:
    """How a program computes an operand from its inputs and the hidden states [B, T, F]."""
    sizes = inputs.sizes
    shape = [sizes.of(word) for word in operand.dims]
    if operand.place == "weight":
        at = (
            inputs.normal(*shape)
            if operand.dtype == "float"
            else inputs.integers(sizes.of(operand.high), *shape)
        )
        return lambda given, hidden: given[at]
    plan = _Arrangement.of(operand, sizes)
    if operand.place in ("grid", "row"):
        full = (sizes.B, sizes.T, *plan.features)
        if operand.place == "row":
            at = inputs.add(torch.rand(full, generator=inputs.random, dtype=torch.float64))
        else:
            at = inputs.integers(sizes.of(operand.high), *full)
        inputs.values[at] = plan.apply(inputs.values[at]).contiguous()
        return lambda given, hidden: given[at]
    at = inputs.normal(plan.count, sizes.F)

    def compute(given: Sequence[Any], hidden: Any) -> Any:
        x = torch.sigmoid(torch.nn.functional.linear(hidden, given[at]))
        if operand.dtype == "bool":
            x = x > 0.5
        elif operand.dtype == "int":
            x = (x * sizes.of(operand.high)).to(torch.int64)
        elif operand.dtype == "complex":
            x = torch.complex(x, 1 - x)
        return plan.apply(x)

    return compute


@dataclass(frozen=True)
class _Arrangement:
    """How values [B, T, features] become an operand: view to single letters, permute, merge to words."""

    inner: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    features: tuple[int, ...]

    @staticmethod
    def of(operand: Operand, sizes: Sizes) -> _Arrangement:
        letters = [letter for word in operand.dims for letter in word]
        if "B" not in letters or "T" not in letters:
            raise _Idle(f"a value per token needs B and T among its dims, not {' '.join(operand.dims)}")
        first = [letters.index("B"), letters.index("T")]
        rest = [i for i in range(len(letters)) if i not in first]
        places = first + rest
        return _Arrangement(
            tuple(sizes.of(letters[i]) for i in places),
            tuple(places.index(i) for i in range(len(letters))),
            tuple(sizes.of(word) for word in operand.dims),
            tuple(sizes.of(letters[i]) for i in rest),
        )

    @property
    def count(self) -> int:
        """Features per token."""
        count = 1
        for n in self.features:
            count *= n
        return count

    def apply(self, x: Any) -> Any:
        return x.reshape(self.inner).permute(self.order).reshape(self.shape)


class _Idle(Exception):
    """The sample is no valid call at these sizes."""


def _argument(inputs: _Inputs, arg: Any) -> Make:
    if isinstance(arg, Operand):
        return _operand(inputs, arg)
    if isinstance(arg, Size):
        number = inputs.sizes.of(arg.word)
        return lambda given, hidden: number
    if isinstance(arg, list):
        items = [_argument(inputs, item) for item in arg]
        return lambda given, hidden: [item(given, hidden) for item in items]
    return lambda given, hidden: arg


@dataclass
class _Program:
    """A traced audit program and its inputs."""

    gm: fx.GraphModule
    values: list[Tensor]
    parameters: set[int]


def _program(target: Any, sample: Call, sizes: Sizes, where: str, seed: int) -> _Program:
    inputs = _Inputs(sizes, seed)
    table, mixer = inputs.normal(sizes.V, sizes.F), inputs.normal(sizes.F, sizes.F)
    args = [_argument(inputs, arg) for arg in sample.args]
    kwargs = {name: _argument(inputs, arg) for name, arg in sample.kwargs.items()}
    shapes = _output_shapes(target, args, kwargs, inputs)
    feed = _feed(shapes[0] if shapes else (), sizes)
    weight = inputs.normal(sizes.F, feed) if feed else 0

    def run(tracer: fx.Tracer, given: Sequence[Any]) -> Any:
        hidden = torch.nn.functional.embedding(given[0], given[table])
        if where == "after":
            hidden = hidden + _attend(hidden, given[mixer])
        values = tuple(make(given, hidden) for make in args)
        named = {name: make(given, hidden) for name, make in kwargs.items()}
        result: Any = tracer.create_proxy("call_function", target, values, named)
        result.node.meta["custom"] = {_MARK: True}
        outs = [result[i] for i in range(len(shapes))] if len(shapes) > 1 or several else [result]
        if where == "before":
            x = hidden
            if feed:
                fed = outs[0].reshape(sizes.B, sizes.T, feed).to(torch.float64)
                fed = torch.nan_to_num(fed, 0.0, 1.0, -1.0)  # an attention makes NaN of more than it must
                x = x + torch.nn.functional.linear(fed, given[weight])
            return (_attend(x, given[mixer]), *outs)
        return (hidden, *outs)

    several = _is_several(target)
    return _Program(_traced(run, len(inputs.values)), inputs.values, inputs.parameters)


def _traced(run: Callable[[fx.Tracer, Sequence[Any]], Any], count: int) -> fx.GraphModule:
    tracer = fx.Tracer()
    tracer.root = torch.nn.Module()
    tracer.graph = fx.Graph(tracer_cls=fx.Tracer)
    tracer.tensor_attrs = {}
    out = run(tracer, [tracer.create_proxy("placeholder", f"x{i}", (), {}) for i in range(count)])
    tracer.create_node("output", "output", (tracer.create_arg(out),), {})
    return fx.GraphModule(tracer.root, tracer.graph)


def _attend(x: Any, mixer: Any) -> Any:
    heads = torch.nn.functional.linear(x, mixer).unsqueeze(1)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)


def _is_several(target: Any) -> bool:
    return len(target._schema.returns) > 1 or "[]" in str(target._schema.returns[0].type)


def _output_shapes(
    target: Any, args: Sequence[Make], kwargs: dict[str, Make], inputs: _Inputs
) -> list[tuple[int, ...]]:
    """Shapes of the call's tensor outputs; raises _Idle where torch rejects the call."""
    hidden = torch.randn(inputs.sizes.B, inputs.sizes.T, inputs.sizes.F, dtype=torch.float64)
    given = [value.detach() for value in inputs.values]
    try:
        with torch.no_grad():
            out = target(
                *(a(given, hidden) for a in args), **{n: a(given, hidden) for n, a in kwargs.items()}
            )
    except _Idle:
        raise
    except Exception as error:
        raise _Idle(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    outs = out if isinstance(out, (list, tuple)) else [out]
    if not all(isinstance(x, Tensor) for x in outs):
        raise _Idle("not a tensor")
    return [tuple(x.shape) for x in outs]


def _feed(shape: tuple[int, ...], sizes: Sizes) -> int:
    """How many features per token an output has, if its leading dims are rows and tokens (0: it has none)."""
    count = 1
    for n in shape:
        count *= n
    leads = shape[:2] == (sizes.B, sizes.T) or shape[:1] == (sizes.B * sizes.T,)
    return count // (sizes.B * sizes.T) if leads else 0


# ---- the audit
# ----------------------------------------------------------------------------------------------------


def check_call(target: Any, sample: Call, sizes: Sizes, where: str, seeds: Iterable[int] = (0, 1)) -> Verdict:
    """Audit one sample call: prove, run packed and dense, compare.

    Args:
        target: the overload.
        sample: its arguments.
        sizes: what its letters stand for.
        where: the op stands "before" or "after" the attention.
        seeds: a tree and values for each.
    """

    def verdict(outcome: str, detail: str = "") -> Verdict:
        return Verdict(str(target), sample.text(), where, outcome, detail)

    programs = []
    for seed in seeds:
        try:
            programs.append(_program(target, sample, sizes, where, seed))
        except _Idle as idle:
            return verdict("idle", str(idle))
    try:
        draft = _draft(programs[0])
    except Refusal as refusal:
        return verdict("refused", refusal.reason.slug)
    except Exception as error:
        return verdict("failed", f"{type(error).__name__}: {error}")
    outcome = _kind(draft)
    run = plain_program(programs[0].gm, draft, TreeCache(1))
    for program in programs:
        try:
            dense = _run(program, program.gm)
        except Exception as error:
            return verdict("idle", f"{type(error).__name__}: {error}")
        try:
            packed = _run(program, run)
        except Exception as error:
            return verdict("failed", f"{type(error).__name__}: {error}")
        difference = _difference(packed, dense, exact=outcome == "packed")
        if difference:
            return verdict("incorrect", f"{outcome} at B={sizes.B}, T={sizes.T}, F={sizes.F}: {difference}")
    return verdict(outcome)


def _draft(program: _Program) -> Draft:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(value, static_shapes=True) for value in program.values]
    nodes = [n for n in program.gm.graph.nodes if n.op == "placeholder"]
    for node, fake in zip(nodes, fakes, strict=True):
        node.meta["example_value"] = fake
    parameters = {nodes[i] for i in program.parameters}
    return build(program.gm, fakes, lambda node: node in parameters)


def _kind(draft: Draft) -> str:
    """Whether the audited node was packed."""
    kinds = {n.meta.get(KIND) for n in draft.lowered.graph.nodes if n.meta.get("custom", {}).get(_MARK)}
    return "private" if "private" in kinds else "packed"


@dataclass(frozen=True)
class _Results:
    outs: list[Tensor]
    grads: list[Tensor | None]


def _run(program: _Program, function: Callable[..., Any]) -> _Results:
    given = [v.detach().clone().requires_grad_(v.requires_grad) for v in program.values]
    outs = list(function(*given))
    return _Results(outs, _gradients(outs, [given[i] for i in sorted(program.parameters)]))


def _gradients(outs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    random = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for out in outs:
        if out.is_floating_point():
            cotangent = torch.randn(out.shape, generator=random, dtype=torch.float64)
            total = total + (torch.nan_to_num(out, 0.0, 0.0, 0.0).double() * cotangent).sum()
    if not total.requires_grad:
        return [None] * len(parameters)
    try:
        return list(torch.autograd.grad(total, list(parameters), allow_unused=True))
    except RuntimeError as error:
        if "derivative" not in str(error):
            raise
        return [None] * len(parameters)  # torch has none for this op: outputs are compared alone


def _difference(packed: _Results, dense: _Results, exact: bool) -> str:
    """The first output or gradient that differs, or "" if none does.

    Integers are compared where the op itself was packed (`exact`): an index found on the grid among equal
    values depends on the last bit of each.
    """
    pairs = [
        (f"output {i}", a.detach(), b.detach())
        for i, (a, b) in enumerate(zip(packed.outs, dense.outs, strict=True))
    ]
    for i, (a, b) in enumerate(zip(packed.grads, dense.grads, strict=True)):
        if a is not None or b is not None:
            pairs.append((f"gradient {i}", _or_zero(a, b), _or_zero(b, a)))
    # Integers become fp32 in many ops, whose last bit depends on how many are computed at once.
    low = any(x.is_floating_point() and x.dtype != torch.float64 for x in dense.outs)
    near = 1e-5 if low else 1e-8
    for name, a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
        if not exact and not a.is_floating_point():
            continue
        if not torch.allclose(a.double(), b.double(), rtol=near, atol=near, equal_nan=True):
            return f"{name} differs by {(a.double() - b.double()).abs().max().item():.1e}"
    return ""


def _or_zero(grad: Tensor | None, other: Tensor | None) -> Tensor:
    """No gradient and a zero one are the same."""
    if grad is not None:
        return grad
    assert other is not None
    return torch.zeros_like(other)


# ---- what to audit
# ------------------------------------------------------------------------------------------------


@functools.cache
def tagged_ops() -> tuple[Any, ...]:
    """Every functional aten overload that is pointwise by its tag and has no rule of its own."""
    own = {target for rule in RULES for target in rule.targets}
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or base.startswith("_"):
            continue
        with contextlib.suppress(AttributeError, RuntimeError):
            op = getattr(getattr(aten, base), overload or "default")
            fresh = not op._schema.is_mutable and "out" not in (a.name for a in op._schema.arguments)
            if torch.Tag.pointwise in op.tags and fresh and op not in own:
                found.append(op)
    return tuple(found)


def audited_ops(name: str = "", rules: Iterable[Rule] = RULES) -> Iterator[tuple[Any, Sequence[Call]]]:
    """(overload, samples) of the ops whose name contains `name`."""
    for rule in rules:
        for target in rule.targets:
            if name in str(target) and isinstance(target, torch._ops.OpOverload):
                yield target, rule.samples.get(target, ())
    for target in tagged_ops():
        if name in str(target):
            yield target, list(pointwise_calls(target))


def audit(
    ops: Iterable[tuple[Any, Sequence[Call]]],
    sizes: Sequence[Sizes] = SIZES,
    wheres: Sequence[str] = ("before", "after"),
) -> Iterator[Verdict]:
    """Audit sample calls one by one, at all sizes, before and after the attention.

    Args:
        ops: (overload, samples) as :func:`audited_ops` gives them.
        sizes: what letters stand for.
        wheres: where the op stands.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for target, samples in ops:
            for sample in samples:
                for size in sizes:
                    for where in wheres:
                        yield check_call(target, sample, size, where)


def missing(names: Iterable[str] = MODEL_OPS) -> list[str]:
    """Those of some ops, named as ``add.Tensor`` or ``aten.add.Tensor``, that have no rule."""
    out = []
    for name in names:
        base, _, overload = name.removeprefix("aten.").partition(".")
        op = getattr(getattr(aten, base, None), overload or "default", None)
        if op is None or lookup(op) is None:
            out.append(name)
    return out


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts by outcome, and every incorrect or failed sample."""
    counts = Counter(v.outcome for v in verdicts)
    order = ("packed", "private", "refused", "incorrect", "failed", "idle")
    lines = [", ".join(f"{counts[name]} {name}" for name in order if counts[name]) or "nothing to audit"]
    for v in dict.fromkeys(v for v in verdicts if v.bad):
        lines.append(f"{v.outcome}: {v.op}({v.call}) {v.where} the attention: {v.detail}")
    return "\n".join(lines)
