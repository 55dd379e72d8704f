"""Dynamo graph -> flat pre-dispatch ATen graph.

One spelling per op, attention and linear whole, autograd still ahead. Activation-checkpoint regions are inlined and
their nodes tagged with the region, so that analysis sees one flat graph; the emitter folds them back. In-place ops on
fresh tensors become functional; any other mutation is refused, because the packed graph would lose it.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from treecompile.passes.convolution import name_convolutions
from treecompile.passes.reasons import Refusal, no_tokens, reason_at
from treecompile.passes.states import made_of_states
from treecompile.runtime.ops.leaf_recurrence import leaf_last_state, stateful

__all__ = ["checkpoint_kwargs", "lower", "region_of"]

aten = torch.ops.aten
REGION = "treecompile_region"

# In-place ops whose functional twin has the same arguments.
_FUNCTIONAL: dict[Any, Any] = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.add_.Scalar: aten.add.Scalar,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.clamp_.default: aten.clamp.default,
    aten.relu_.default: aten.relu.default,
    aten.silu_.default: aten.silu.default,
    aten.exp_.default: aten.exp.default,
    aten.neg_.default: aten.neg.default,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
    aten.scatter_.value: aten.scatter.value,
    aten.scatter_.src: aten.scatter.src,
    aten.scatter_add_.default: aten.scatter_add.default,
    aten.detach_.default: aten.detach.default,
    aten.bitwise_and_.Tensor: aten.bitwise_and.Tensor,
    aten.sigmoid_.default: aten.sigmoid.default,
    aten.tanh_.default: aten.tanh.default,
    aten.tril_.default: aten.tril.default,
    aten.triu_.default: aten.triu.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
}


class _Inliner(fx.Interpreter):  # type: ignore[misc]
    """Runs a Dynamo graph under tracing; checkpoint regions are run inline with their nodes tagged."""

    def __init__(
        self, gm: fx.GraphModule, regions: dict[int, dict[str, Any]], tag: int | None = None
    ) -> None:
        super().__init__(gm)
        self._regions, self._tag = regions, tag
        self._node: fx.Node | None = None
        self._outside: list[tuple[str, torch.dtype, bool]] = []
        if tag is not None:
            for node in gm.graph.nodes:
                node.meta["custom"] = {**node.meta.get("custom", {}), REGION: tag}

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            tag = self._tag
            if tag is None:
                tag = len(self._regions)
                self._regions[tag] = dict(kwargs)
            return _Inliner(args[0], self._regions, tag).run(*args[1:])
        # Tracing notes where an autocast begins and ends, and leaves it at that: dtypes would be those outside of it.
        if target is torch.amp.autocast_mode._enter_autocast:
            self._outside.append(_autocast(args[0]))
            _set_autocast(*args)
        elif target is torch.amp.autocast_mode._exit_autocast:
            _set_autocast(*self._outside.pop())
        if isinstance(target, torch._ops.HigherOrderOperator) and str(target) == "autograd_function_apply":
            raise Refusal(
                reason_at(
                    self._node,
                    "autograd-function",
                    "a custom torch.autograd.Function",
                    "its backward pass is code of its own, which may mix tokens, and which a retrace would lose",
                    "write it with ordinary ops (a detach for a straight-through estimator), or move it out of the "
                    "compiled region",
                )
            )
        return super().call_function(target, args, kwargs)


def _autocast(device: str) -> tuple[str, torch.dtype, bool]:
    """The autocast of a type of device, as `_set_autocast` takes it."""
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


def _set_autocast(
    device: str, dtype: torch.dtype | None = None, enabled: bool = True, _cached: bool | None = None
) -> None:
    """Arguments as of `torch.autocast`."""
    torch.set_autocast_enabled(device, enabled)
    if dtype is not None:
        torch.set_autocast_dtype(device, dtype)


@contextlib.contextmanager
def _autocasts_kept() -> Iterator[None]:
    """Leave the autocasts as they were, also where a trace ends within one; casts of fake weights are not kept."""
    before, cached = [_autocast(device) for device in ("cpu", "cuda")], torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for state in before:
            _set_autocast(*state)


def region_of(node: fx.Node) -> int | None:
    """The checkpoint region a lowered node belongs to."""
    found = node.meta.get("custom", {}).get(REGION)
    return found if isinstance(found, int) else None


def lower(gm: fx.GraphModule, fakes: Sequence[Any]) -> tuple[fx.GraphModule, dict[int, dict[str, Any]]]:
    """Retrace a Dynamo graph.

    Args:
        gm: the graph as a backend receives it.
        fakes: example values of its placeholders (``meta["example_value"]``).

    Returns:
        The lowered graph, placeholders in the same order, and the keyword arguments of each checkpoint region.

    Raises:
        Refusal: a mutation that cannot be made functional, or a graph that is given no tensor.
    """
    mode = next((fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")), None)
    if mode is None:  # a graph that makes its tensors itself
        raise Refusal(no_tokens())
    regions: dict[int, dict[str, Any]] = {}
    with preserve_node_meta(), mode, enable_python_dispatcher(), _autocasts_kept():
        lowered = make_fx(
            lambda *args: _Inliner(gm, regions).run(*args), pre_dispatch=True, _allow_non_fake_inputs=True
        )(*fakes)
    for node in lowered.graph.nodes:
        if node.op == "call_function" and REGION not in node.meta.get("custom", {}):
            node.meta["custom"] = {k: v for k, v in node.meta.get("custom", {}).items() if k != REGION}
    _refuse_states(lowered, stateful)
    _drop_states(lowered)
    _refuse_assertions(lowered)
    _functionalize(lowered)
    _drop_identities(lowered)
    name_convolutions(lowered)
    return lowered, regions


def _refuse_states(gm: fx.GraphModule, target: Any) -> None:
    for node in gm.graph.nodes:
        if node.target is target:
            raise Refusal(
                reason_at(
                    node,
                    "recurrent-state",
                    "a recurrence that is given a state, hands its last one out, or is told of documents",
                    "the state of a row is that of its last token alone, and a packed graph starts every row from zero",
                    "pass use_cache=False (a model in training needs no cache), and no cu_seq_lens",
                )
            )


def _refuse_assertions(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.target in (aten._assert_async.default, aten._assert_async.msg):
            raise Refusal(
                reason_at(
                    node,
                    "assertion",
                    "an assertion about values of tensors",
                    "nothing reads its outcome, and of a packed graph it would see each shared token once",
                    "assert outside of the compiled region",
                )
            )


def _drop_states(gm: fx.GraphModule) -> None:
    """Erase last states of recurrences with what is made of them: a cache that nobody reads."""
    made = made_of_states(gm) or set()
    for node in reversed(list(gm.graph.nodes)):
        if node in made and not node.users:
            gm.graph.erase_node(node)
    _refuse_states(gm, leaf_last_state)


def checkpoint_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the checkpoint call that the emitter writes."""
    return {name: value for name, value in kwargs.items() if name in ("use_reentrant", "preserve_rng_state")}


def _drop_identities(gm: fx.GraphModule) -> None:
    """Erase aliases and slices of everything: static and symbolic captures differ in them, and in nothing else."""
    for node in list(gm.graph.nodes):
        whole = node.target is aten.alias.default or (
            node.target is aten.slice.Tensor
            and isinstance(node.meta.get("val"), torch.Tensor)
            and _sizes(node) == _sizes(node.args[0])
            and (len(node.args) < 5 or node.args[4] == 1)
        )
        if whole:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()


def _sizes(node: fx.Node) -> list[Any]:
    return [s.node.expr if isinstance(s, torch.SymInt) else s for s in node.meta["val"].shape]


def _functionalize(gm: fx.GraphModule) -> None:
    """Rewrite ``x.op_(...)`` on fresh tensors as ``y = x.op(...)`` with later uses of x reading y."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not node.target._schema.is_mutable:
            continue
        if _write_slice(gm, node, order):
            continue
        base = node.args[0]
        twin = _FUNCTIONAL.get(node.target)
        if node.target is aten.copy_.default and _is_fresh(base, node, order):
            twin = aten.expand_as.default
            node.args = (_cast_like(gm, node, base), base)
        elif twin is None or not _is_fresh(base, node, order):
            raise Refusal(
                reason_at(
                    node,
                    "in-place",
                    f"{node.target} changes a tensor in place",
                    "the tensor has other names (it is an input, a view or has views), and the packed graph would not "
                    "see the change through them",
                    "write the out-of-place form (y = x.op(...)) or move it out of the compiled region",
                )
            )
        node.target = twin
        if node is not base:
            later = [user for user in base.users if order.get(user, 0) > order[node] and user is not node]
            for user in later:
                user.replace_input_with(base, node)
    gm.recompile()


def _write_slice(gm: fx.GraphModule, node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """``x[..., a:b].copy_(y)`` on a fresh x becomes ``slice_scatter(x, y, ...)``, read by all later uses of x."""
    view = node.args[0]
    if node.target is not aten.copy_.default or not isinstance(view, fx.Node):
        return False
    if view.target is not aten.slice.Tensor or set(view.users) != {node} or node.users:
        return False
    base = view.args[0]
    if not isinstance(base, fx.Node) or not (_is_fresh(base, view, order) or _is_own_part(base, view, order)):
        return False
    with gm.graph.inserting_before(node):
        source = _cast_like(gm, node, base)
        if source.meta["val"].shape != view.meta["val"].shape:
            source = gm.graph.call_function(aten.expand_as.default, (source, view))
            source.meta = {**node.meta, "val": view.meta["val"]}
        new = gm.graph.call_function(aten.slice_scatter.default, (base, source, *view.args[1:]))
    new.meta = {**node.meta, "val": base.meta["val"]}
    order[new] = order[node]
    for user in [u for u in base.users if order.get(u, 0) > order[node] and u is not new]:
        user.replace_input_with(base, new)
    gm.graph.erase_node(node)
    if not view.users:
        gm.graph.erase_node(view)
    return True


def _is_own_part(part: fx.Node, node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether nothing else reads, from `node` on, the entry of a fresh tensor that `part` selects from it."""
    whole = part.args[0] if part.target is aten.select.int else None
    if not isinstance(whole, fx.Node) or _may_alias(whole):
        return False
    dim, index = part.args[1:3]

    def elsewhere(user: fx.Node) -> bool:
        size = whole.meta["val"].dim()
        other = user.target is aten.select.int and user.args[1] % size == dim % size
        return other and user.args[2] != index and min(user.args[2], index) >= 0

    return all(
        user is part or elsewhere(user) or (order[user] < order[node] and not _may_alias(user))
        for user in whole.users
    ) and not any(user is not node and order[user] < order[node] and _may_alias(user) for user in part.users)


def _cast_like(gm: fx.GraphModule, node: fx.Node, base: fx.Node) -> Any:
    source = node.args[1]
    if source.meta["val"].dtype == base.meta["val"].dtype:
        return source
    with gm.graph.inserting_before(node):
        cast = gm.graph.call_function(aten.to.dtype, (source, base.meta["val"].dtype))
    cast.meta = dict(node.meta)
    cast.meta["val"] = source.meta["val"].to(base.meta["val"].dtype)
    return cast


# Ops whose output may share memory with an input.
def _may_alias(node: fx.Node) -> bool:
    if node.op != "call_function":
        return True
    if node.target is operator.getitem:  # one output of topk or sort is fresh, one of split is a view
        return _may_alias(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    schema = node.target._schema
    if any(ret.alias_info is not None for ret in schema.returns) and not schema.is_mutable:
        return True
    if node.target in (aten.to.dtype, aten.to.device, aten.to.dtype_layout):
        return bool(node.meta["val"].dtype == node.args[0].meta["val"].dtype)
    # type_as and an idle dropout return their operand itself.
    return node.target in (
        aten.contiguous.default, aten.reshape.default, aten.type_as.default, aten.dropout.default,
        aten.feature_dropout.default, aten.alpha_dropout.default, aten.sum_to_size.default,
    )  # fmt: skip


def _is_fresh(base: Any, node: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether nothing but `base` names its memory when `node` changes it."""
    if not isinstance(base, fx.Node) or _may_alias(base):
        return False
    earlier = itertools.takewhile(lambda n: n is not node, base.graph.nodes)
    return not any(base in other.all_input_nodes and _may_alias(other) for other in earlier)
