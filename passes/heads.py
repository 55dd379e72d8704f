"""Heads whose logits nothing reads but a pick by label: they are written as one op that holds a chunk of them.

A *head* is a linear layer over the vocabulary, a chain of casts, scales and views, and what is read of the result:
one pick by private labels (a gather, from the logits or from their log-softmax, or a cross-entropy), log-sum-exps and
entropies. If the logits, or any value between, have another reader, all of it stays as it was captured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from treecompile.passes.axes import same_dim
from treecompile.passes.kinds import Kinds
from treecompile.passes.lower import region_of
from treecompile.passes.ops.reductions import reduced
from treecompile.passes.ops.views import arg, axis_index
from treecompile.passes.rule import value_of
from treecompile.passes.values import Kind

__all__ = ["Head", "find_heads", "modes"]

aten = torch.ops.aten

# What a chunk of logits may take, counted in the dtype of sums. At 150,000 columns in fp32: 447 rows, enough for a
# matrix product to run at its speed. A head that fits one chunk is not computed again in the backward pass, which is
# one of its four products: a GPU gives a part of its memory for it, if that is more.
CHUNK_BYTES = 256 << 20
DEVICE_PART = 64

_SIZES = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default}
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten._to_copy.default, aten.type_as.default}
_VIEWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.contiguous.default, aten.clone.default, aten.unsqueeze.default, aten.squeeze.dim,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Head:
    """One head to write as `selective_log_probs`; all values are captured nodes.

    Attributes:
        linear: the linear layer.
        takes: selections of rows between it and the picks, in order.
        chain: what happens to the logits; see `treecompile.runtime.ops.selective_log_probs`.
        factor: the scalar tensor in the chain.
        end: what the picks read.
        picked: the gather or cross-entropy.
        normalized: it reads log-probabilities.
        dtype: of what it picks.
        computed: the dtype that the linear layer computes in.
        lse, spread: log-sum-exps, and the sums that are entropies but for their sign.
    """

    linear: fx.Node
    takes: tuple[fx.Node, ...]
    chain: str
    factor: Any
    end: fx.Node
    picked: fx.Node
    normalized: bool
    dtype: torch.dtype
    computed: torch.dtype
    lse: tuple[fx.Node, ...]
    spread: tuple[fx.Node, ...]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return (self.picked, *self.lse, *self.spread)

    @property
    def needs(self) -> list[fx.Node]:
        """The captured nodes that the op reads, apart from labels."""
        given = (*self.linear.args[:3], self.factor)
        return [node for node in given if isinstance(node, fx.Node)]

    @property
    def width(self) -> int:
        return int(value_of(self.linear).shape[-1])

    @property
    def bytes(self) -> int:
        """What a chunk may take where the head runs."""
        return chunk_bytes(value_of(self.linear).device)

    @property
    def chunk(self) -> int:
        """Rows of logits in a chunk."""
        size = 8 if torch.float64 in (self.dtype, self.computed) else 4
        return max(1, self.bytes // (self.width * size))


def chunk_bytes(device: torch.device) -> int:
    """What a chunk of logits may take on a device."""
    if device.type != "cuda":
        return CHUNK_BYTES
    return max(CHUNK_BYTES, torch.cuda.get_device_properties(device).total_memory // DEVICE_PART)


def find_heads(kinds: Kinds) -> dict[fx.Node, Head]:
    """The heads of a classified graph, by each node that the op takes the place of."""
    finder = _Finder(kinds)
    found: dict[fx.Node, Head] = {}
    for node in kinds.graph.nodes:
        if node in finder.live and kinds.values.get(node) is not None:
            head = finder.head(node) if kinds.values[node].form in ("gather", "cross_entropy") else None
            found.update(dict.fromkeys(head.results, head) if head is not None else {})
    return found


class _Finder:
    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        output = next(n for n in kinds.graph.nodes if n.op == "output")
        self.live: set[fx.Node] = set()
        stack = [output]
        while stack:
            node = stack.pop()
            if node not in self.live:
                self.live.add(node)
                stack.extend(node.all_input_nodes)
        self._grad_modes: dict[fx.Node, Any] = {}
        self._autocast: dict[fx.Node, dict[str, Any]] = {}
        for node, grad, autocast in modes(kinds.graph):
            self._grad_modes[node], self._autocast[node] = grad, autocast

    # ---- dtypes ---------------------------------------------------------------------------------------------------

    def dtype(self, node: fx.Node) -> torch.dtype | None:
        """The dtype of a value, None where that is not known.

        Below an autocast that the graph enters, it is found step by step, and None where a step is not understood.
        """
        written: torch.dtype = value_of(node).dtype
        if not any(self._autocast[n] for n in self._path(node)):
            return written
        return self._dtype_below(node, written)

    def _path(self, node: fx.Node) -> list[fx.Node]:
        """A value and what it was computed from, up to the linear layer."""
        path = [node]
        while path[-1].target is not aten.linear.default and path[-1].all_input_nodes:
            path.append(self._main(path[-1]))
        return path

    def _main(self, node: fx.Node) -> fx.Node:
        """The operand that a value is the next step of."""
        shared = [a for a in node.all_input_nodes if self._is_shared(a)]
        return shared[0] if shared else node.all_input_nodes[0]

    def _dtype_below(self, node: fx.Node, written: torch.dtype) -> torch.dtype | None:
        mode: torch.dtype | bool | None = self._autocast[node].get(value_of(node).device.type)
        if node.target is aten.linear.default:
            weight = node.args[1]
            if mode is None or written == torch.float64:
                return written
            if isinstance(mode, torch.dtype):
                return mode
            return value_of(weight).dtype if weight.op in ("placeholder", "get_attr") else None
        if node.target in _CASTS and node.target is not aten.type_as.default:
            return written
        if not node.all_input_nodes or node.target is aten.type_as.default:
            return None
        before = self.dtype(self._main(node))
        if node.target not in _PROBES or before is None:
            return before
        wanted = arg(node, 2, "dtype") if node.target in _WITH_DTYPE else None
        return wanted or _probe(node.target, value_of(node).device.type, mode or None, before)

    def head(self, picked: fx.Node) -> Head | None:
        """The head that a pick belongs to."""
        source = self.kinds.values[picked].data[0]
        logs = self._is(source, aten.log_softmax.int) and self.kinds.values[picked].form == "gather"
        end = source.args[0] if logs else source
        normalized = logs or self.kinds.values[picked].form == "cross_entropy"
        read = _Readers(self, end, picked)
        dtype = self.dtype(picked)
        if not read.understood or dtype is None or any(self.dtype(n) != dtype for n in read.passed):
            return None
        chain = self._chain(end)
        if chain is None:
            return None
        linear, takes, steps, factor, passed = chain
        computed = self.dtype(linear)
        if computed is None:
            return None
        if self.dtype(end) != dtype:
            steps = [*steps, _cast(dtype)]
        results = (picked, *read.lse, *read.spread)
        modes = {self._grad_modes[n] for n in (*passed, *read.passed, *results)}
        if len(modes) != 1 or len({region_of(n) for n in results}) != 1 or not dtype.is_floating_point:
            return None
        return Head(
            linear, takes, " ".join(steps), factor, end, picked, normalized, dtype, computed,
            tuple(read.lse), tuple(read.spread),
        )  # fmt: skip

    # ---- from the logits down -------------------------------------------------------------------------------------

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Who reads the values of a node."""
        return [user for user in node.users if user in self.live and user.target not in _SIZES]

    def _is(self, node: fx.Node, *targets: Any) -> bool:
        """Whether a node is a softmax or reduction over the last dim, of shared values."""
        if node.target not in targets or self.kinds.values[node].kind is not Kind.SHARED:
            return False
        rank = len(self.kinds.dims(node.args[0]))
        if node.target in (aten.softmax.int, aten.log_softmax.int):
            return axis_index(arg(node, 1, "dim"), rank) == rank - 1
        return reduced(node, rank) == [rank - 1]

    # ---- from the logits up ---------------------------------------------------------------------------------------

    def _chain(
        self, end: fx.Node
    ) -> tuple[fx.Node, tuple[fx.Node, ...], list[str], Any, list[fx.Node]] | None:
        """From what is read up to the linear layer, through values without another reader."""
        takes: list[fx.Node] = []
        steps: list[str] = []
        passed: list[fx.Node] = []
        factor: Any = None
        node = end
        while node.target is not aten.linear.default:
            if not self._rows_by_columns(node, end):
                return None
            source, step, used = self._step(node)
            if source is None or self.readers(source) != [node] or (used is not None and factor is not None):
                return None
            if self.kinds.values[node].form == "take":
                takes.insert(0, node)
            if step:
                steps.insert(0, step)
            factor = used if used is not None else factor
            passed.append(node)
            node = source
        return (node, tuple(takes), steps, factor, [*passed, node]) if self._is_head(node, end) else None

    def _is_head(self, linear: fx.Node, end: fx.Node) -> bool:
        hidden, *weights = (a for a in linear.args if isinstance(a, fx.Node))
        plain = all(self.kinds.values[w].kind is Kind.UNIFORM for w in weights)
        shared = self.kinds.values[hidden].kind is Kind.SHARED and self._is_rows(hidden)
        return plain and shared and self._rows_by_columns(linear, end) and value_of(weights[0]).dim() == 2

    def _is_rows(self, node: fx.Node) -> bool:
        """Batch and sequence, in grid order, then features."""
        dims = self.kinds.dims(node)
        return self.kinds.is_region(dims[:-1]) and not self.kinds.token_axes(dims[-1:])

    def _rows_by_columns(self, node: fx.Node, end: fx.Node) -> bool:
        shared = self.kinds.values[node].kind is Kind.SHARED and self._is_rows(node)
        return shared and same_dim(self.kinds.dims(node)[-1], self.kinds.dims(end)[-1])

    def _step(self, node: fx.Node) -> tuple[fx.Node | None, str, Any]:
        """What a node of the chain reads, the step that it is, and the scalar tensor that it uses."""
        nothing = (None, "", None)
        if not node.args or not isinstance(value_of(node), torch.Tensor):
            return nothing
        source, dtype = node.args[0], self.dtype(node)
        if dtype is None:
            return nothing
        if (
            node.target is aten.slice.Tensor and self.kinds.values[node].form == "take"
        ) or node.target in _VIEWS:
            return source, "", None
        if node.target in _CASTS:
            same = self.dtype(source) == dtype
            return (source, "" if same else _cast(dtype), None) if dtype.is_floating_point else nothing
        if node.target is aten.tanh.default and self.dtype(source) == dtype:
            return source, "tanh", None
        if node.target not in (aten.mul.Tensor, aten.div.Tensor):
            return nothing
        other = node.args[1]
        if node.target is aten.mul.Tensor and not self._is_shared(source):
            source, other = other, source
        name = "mul" if node.target is aten.mul.Tensor else "div"
        if not self._is_shared(source) or self.dtype(source) != dtype:
            return nothing
        if isinstance(other, (int, float)):
            return source, f"{name}:{float(other)!r}", None
        return (source, f"{name}:factor", other) if self._is_factor(other) else nothing

    def _is_shared(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and self.kinds.values[node].kind is Kind.SHARED

    def _is_factor(self, node: Any) -> bool:
        """A number that varies, or a scalar tensor that no gradient reaches."""
        if not isinstance(node, fx.Node):
            return False
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return isinstance(value, (torch.SymFloat, torch.SymInt))
        kind = self.kinds.values[node].kind
        return value.dim() == 0 and kind in (Kind.UNIFORM, Kind.GRID) and not self._trained(node)

    def _trained(self, node: fx.Node) -> bool:
        seen: set[fx.Node] = set()
        stack = [node]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            leaf = node.op in ("placeholder", "get_attr")
            if node in self.kinds.parameters or (leaf and getattr(value_of(node), "requires_grad", False)):
                return True
            stack.extend(node.all_input_nodes)
        return False


class _Readers:
    """What reads the end of a chain, if all of it is understood.

    Attributes:
        lse, spread: log-sum-exps, and sums of p log p.
        passed: nodes between the end and the results, and results: all in the dtype of the pick.
    """

    def __init__(self, finder: _Finder, end: fx.Node, picked: fx.Node) -> None:
        self.finder, self.end, self.picked = finder, end, picked
        self.lse: list[fx.Node] = []
        self.spread: list[fx.Node] = []
        self.passed: list[fx.Node] = []
        self.understood = all(self._reader(user) for user in finder.readers(end))

    def _reader(self, user: fx.Node) -> bool:
        if user is self.picked:
            # The labels are no logits.
            return bool(user.args.count(self.end) == 1)
        if self.finder._is(user, aten.logsumexp.default):
            self.lse.append(user)
        elif not self.finder._is(user, aten.log_softmax.int, aten.softmax.int):
            return False
        self.passed.append(user)
        return user in self.lse or all(
            self._reader_of_softmax(user, next_) for next_ in self.finder.readers(user)
        )

    def _reader_of_softmax(self, softmax: fx.Node, user: fx.Node) -> bool:
        logs = softmax.target is aten.log_softmax.int
        if user is self.picked:
            return logs and bool(user.args.count(softmax) == 1)
        if logs and user.target is aten.exp.default:
            self.passed.append(user)
            return all(self._is_spread(product) for product in self.finder.readers(user))
        return self._is_spread(user)

    def _is_spread(self, product: fx.Node) -> bool:
        """Whether a product of probabilities and log-probabilities is summed over the columns."""
        if product.target is not aten.mul.Tensor or len(set(product.args)) != 2:
            return False
        probabilities = [a for a in product.args if self._is_probability(a)]
        logs = [a for a in product.args if self._is_softmax(a, aten.log_softmax.int)]
        sums = self.finder.readers(product)
        if len(probabilities) != 1 or len(logs) != 1 or not sums:
            return False
        if not all(self.finder._is(s, aten.sum.dim_IntList) for s in sums):
            return False
        self.passed.append(product)
        self.spread.extend(s for s in sums if s not in self.spread)
        self.passed.extend(sums)
        return True

    def _is_softmax(self, node: Any, target: Any) -> bool:
        return isinstance(node, fx.Node) and self.finder._is(node, target) and node.args[0] is self.end

    def _is_probability(self, node: Any) -> bool:
        if not isinstance(node, fx.Node):
            return False
        exponential = node.target is aten.exp.default and self._is_softmax(node.args[0], aten.log_softmax.int)
        return exponential or self._is_softmax(node, aten.softmax.int)


def _cast(dtype: torch.dtype) -> str:
    return "to:" + str(dtype).removeprefix("torch.")


def modes(graph: fx.Graph) -> Iterator[tuple[fx.Node, Any, dict[str, Any]]]:
    """Each node; whether gradients are recorded there, None until the graph says; and by device the dtype of an
    autocast that the graph has entered, False where it has switched autocast off.
    """
    grad = None
    autocast: dict[str, Any] = {}
    outside: dict[fx.Node, dict[str, Any]] = {}
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            grad = node.args[0]
        elif node.target is torch.amp.autocast_mode._enter_autocast:
            outside[node] = autocast
            device, *rest = node.args
            dtype = rest[0] if rest and rest[0] is not None else torch.get_autocast_dtype(device)
            enabled = rest[1] if len(rest) > 1 else True
            autocast = {**autocast, device: dtype if enabled else False}
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            autocast = outside[node.args[0]]
        yield node, grad, autocast


# Ops that an autocast may run in another dtype: arguments after the first, for a try.
_PROBES: dict[Any, tuple[Any, ...]] = {
    aten.log_softmax.int: (-1,),
    aten.softmax.int: (-1,),
    aten.logsumexp.default: ([-1],),
    aten.exp.default: (),
    aten.tanh.default: (),
    aten.sum.dim_IntList: ([-1],),
    aten.cross_entropy_loss.default: (),
}
_WITH_DTYPE = {aten.log_softmax.int, aten.softmax.int}


@functools.cache
def _probe(target: Any, device: str, autocast: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype that an op gives under an autocast: what PyTorch says."""
    with FakeTensorMode(), torch.autocast(device, autocast, enabled=autocast is not None):
        x = torch.zeros(2, 2, dtype=dtype, device=device)
        rest = _PROBES[target]
        if target is aten.cross_entropy_loss.default:
            rest = (torch.zeros(2, dtype=torch.int64, device=device),)
        found: torch.dtype = target(x, *rest).dtype
    return found
