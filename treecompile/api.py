"""Functions for people: what happens to my model, and what Dynamo settings stand in its way."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from treecompile import backend, lowering, settings
from treecompile.executors import AttentionRoutes, RecurrenceRoutes, attention_routes, recurrence_routes
from treecompile.leaves import scope
from treecompile.options import Options
from treecompile.passes.program import Draft, build
from treecompile.passes.reasons import Refusal
from treecompile.passes.states import reads_states
from treecompile.programs import plain_program
from treecompile.report import Break, GraphReport, Report
from treecompile.runtime.batch import PackedBatch, TreeCache

__all__ = ["clear_caches", "explain"]

_serial = itertools.count()


def explain(
    model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Report:
    """What ``torch.compile(model, backend="tree")`` would make of a model, for one batch.

    The model is captured, and its graphs run forward once as plain PyTorch, without gradients; nothing is
    compiled. Parameters, gradients, compiled state, random number generators and what Dynamo knows of the
    model are left as they were (what a forward pass itself changes, such as the statistics of a BatchNorm,
    changes).

    Args:
        model: a module, a bound method or a function; a compiled one is explained as it was before.
        *args: of its forward pass.
        options: as for the backend; see :class:`treecompile.options.Options`.
        **kwargs: of its forward pass.

    Returns:
        the report: ``print(report)``, ``report.supported``, ``report.reasons``, ``report["packed"]``, ...

    Raises:
        OptionError: an unknown option or value.

    Example:
        >>> import treecompile
        >>> report = treecompile.explain(model, input_ids, attention_mask=mask)  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
    """
    probe = _Probe(Options.parse(options))
    call = _plain(model)
    names = _positional(call, args)
    frame = _frame(call, names)
    with _undisturbed():
        try:
            torch.compile(frame, backend=functools.partial(_captured, probe=probe), dynamic=False)(
                *args, **kwargs
            )
        finally:
            for code in probe.codes:
                _forget(code, probe)
    texts = [graph.ended_by.reason for graph in probe.graphs if graph.ended_by is not None]
    texts += [type(model).__name__]
    return Report(tuple(probe.graphs), probe.options, tuple(settings.hints(texts)))


def clear_caches() -> None:
    """Forget all compiled packed graphs, trees of past batches, `counters`, and which warnings were given.

    Call ``torch._dynamo.reset()`` as well to have models captured anew.
    """
    lowering.clear()
    backend.clear()


# ---- capturing without a trace ----


class _Probe:
    """What one call of `explain` sees."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.graphs: list[GraphReport] = []
        self.codes: dict[CodeType, None] = {}
        self.trees = TreeCache(1)


def _captured(gm: fx.GraphModule, inputs: Sequence[Any], *, probe: _Probe) -> Callable[..., Any]:
    """A backend that only looks: graphs run as they were captured."""
    if reads_states(gm):
        scope.recapture_with_states()
    code = _traced_code()
    if code is not None:
        probe.codes[code] = None
    fakes = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
    number = len(probe.graphs)
    try:
        draft = build(gm, fakes, backend._is_parameter, probe.options.alignment)
    except Exception as error:
        reason = error.reason if isinstance(error, Refusal) else backend._internal(error)
        probe.graphs.append(GraphReport(gm, None, reason, ended_by=_break(gm)))
        return _without_gradients(gm)
    probe.graphs.append(GraphReport(gm, draft, None, ended_by=_break(gm)))

    plain = _without_gradients(gm)

    def run(*args: Any) -> Any:
        if probe.graphs[number].batch is None:
            with torch.no_grad():
                batch, dense = _planned(gm, draft, args, probe)
            routes: tuple[AttentionRoutes | RecurrenceRoutes, ...] = ()
            if batch is not None and not dense:
                routes = attention_routes(draft.attentions, batch)
                routes += recurrence_routes(draft.recurrences, batch)
            probe.graphs[number] = GraphReport(gm, draft, None, batch, dense, _break(gm), routes)
        return plain(*args)

    return run


def _without_gradients(gm: fx.GraphModule) -> Callable[..., Any]:
    """The graph, recording nothing; graphs after it see values that look as in training."""
    follows = _break(gm) is not None and torch.is_grad_enabled()

    def like_training(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.requires_grad or not value.is_floating_point():
            return value
        return value.detach().requires_grad_().view_as(value)

    def run(*args: Any) -> Any:
        with torch.no_grad():
            outs = gm(*args)
        return tuple(like_training(value) for value in outs) if follows else outs

    return run


scope.serve(_captured)


def _traced_code() -> CodeType | None:
    """The code of the frame that Dynamo compiles."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        root = InstructionTranslator.current_tx().output.root_tx
        return root.f_code if root is not None else None
    except (ImportError, AttributeError):
        return None


def _planned(
    gm: fx.GraphModule, draft: Draft, args: Sequence[Any], probe: _Probe
) -> tuple[PackedBatch | None, str]:
    """The tree of the batch, and why it would run dense."""
    program = plain_program(gm, draft, probe.trees)
    given = dict(zip(program.arguments, args, strict=True))
    plan = program.plan(given)
    too_little = plan.batch is not None and plan.batch.sharing < probe.options.min_sharing
    return plan.batch, "min_sharing" if too_little else plan.why


def _break(gm: fx.GraphModule) -> Break | None:
    """Why Dynamo ended the graph here; None at the end of the model."""
    found = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not getattr(found, "graph_break", False):
        return None
    stack = list(getattr(found, "user_stack", ()))
    where = f"{stack[-1].filename.rsplit('/', 1)[-1]}:{stack[-1].lineno} in {stack[-1].name}" if stack else ""
    return Break(str(found.reason).strip(), where)


def _plain(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model without what torch.compile put around it, as one callable."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        model = inner
    if isinstance(model, nn.Module):
        # model.compile() answers in __call__; _call_impl is what it compiled.
        return model._call_impl
    original = getattr(model, "_torchdynamo_orig_callable", None)
    if original is None:
        return model
    owner = getattr(model, "__self__", None)
    unbound = isinstance(model, MethodType) and not isinstance(original, MethodType)
    return MethodType(original, owner) if unbound else original


def _positional(call: Callable[..., Any], args: Sequence[Any]) -> tuple[str, ...]:
    """Names of positional arguments, as far as the signature tells them."""
    owner = getattr(call, "__self__", None)
    named = owner.forward if isinstance(owner, nn.Module) and call == owner._call_impl else call
    try:
        signature = inspect.signature(named)
        parameters = list(signature.parameters.values())
    except (TypeError, ValueError):
        return ()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][
        : len(args)
    ]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    names += [f"{rest}_{i}" for i in range(len(args) - len(names)) if rest is not None]
    return tuple(names) if not {"call", "args", "kwargs"} & set(names) else ()


def _frame(call: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """A function that calls `call`, with code of its own: what Dynamo learns of it dies with it.

    Its positional arguments have the names of the model's, so that the captured graph knows them.
    """
    listed = "".join(f"{name}, " for name in names)
    title = f"explain_{next(_serial)}"
    made: dict[str, Any] = {}
    exec(
        f"def make(call):\n"
        f"    def {title}({listed}*args, **kwargs):\n"
        f"        return call({listed}*args, **kwargs)\n"
        f"    return {title}\n",
        made,
    )
    return made["make"](call)  # type: ignore[no-any-return]


def _forget(code: CodeType, probe: _Probe) -> None:
    """Drop what Dynamo compiled for the probe after a graph break: the model's own entries stay alone."""
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        for entry in _debug_get_cache_entry_list(code):
            state = getattr(entry.guard_manager, "extra_state", None)
            if _is_probe(entry.backend, probe) and state is not None:
                gone = DeletedGuardManagerWrapper("explained")
                # An invalid entry still counts as a recompilation, unless its guards were for other objects.
                gone.id_matched_objs = {"": weakref.ref(explain)}
                state.invalidate(entry, gone)
    except (ImportError, AttributeError):  # internals of Dynamo: at worst an entry too many remains
        return


def _is_probe(function: Any, probe: _Probe) -> bool:
    while function is not None:
        if isinstance(function, functools.partial) and function.keywords.get("probe") is probe:
            return True
        function = getattr(function, "_torchdynamo_orig_backend", None) or getattr(
            function, "compiler_fn", None
        )
    return False


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore the random number generators."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
