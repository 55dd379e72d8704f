"""The Dynamo backend ``tree``: found through the entry point ``torch_dynamo_backends``, no import needed.

model = torch.compile(model, backend="tree")
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed, RestartAnalysis

from treecompile import leaves, logs, raised
from treecompile.leaves import scope
from treecompile.lowering import PackedCode, compile_dense, inductor_settings, shared_code
from treecompile.options import Options
from treecompile.passes.program import Draft, build
from treecompile.passes.reasons import Reason, Refusal
from treecompile.passes.states import reads_states
from treecompile.recorder import current
from treecompile.runtime.batch import TreeCache
from treecompile.runtime.errors import OptionError, UnsupportedError
from treecompile.runtime.ops.leaf_recurrence import leaf_last_state
from treecompile.runtime.program import CompilationFailed, TreeProgram

__all__ = ["counters", "tree"]

# How calls and compilations went: "packed", "dense", "dense:<reason>", "compiled", "captured"; "eager" and
# "eager:<exception>" where the compiler failed on a dense graph.
counters: Counter[str] = Counter()

_trees = TreeCache()


def tree(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile a captured graph for rollouts that share prefixes.

    Args:
        gm: graph captured by Dynamo.
        example_inputs: its flat inputs.
        **kwargs: ``options={...}``, see :class:`treecompile.options.Options`, or ``mode``.

    Returns:
        a function of the flat inputs: the tree program, or the dense graph where packing is not proved.

    Raises:
        OptionError: invalid options.
        UnsupportedError: with ``on_unsupported="error"``, what cannot be packed.
    """
    try:
        options = Options.parse(kwargs.get("options"), kwargs.get("mode"))
    except OptionError as error:
        raised.raise_option(inspect.currentframe(), error)
    counters["captured"] += 1
    fakes = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
    if reads_states(gm):
        scope.recapture_with_states()
    try:
        with _own_saved_tensors():
            draft = build(gm, fakes, _is_parameter, options.alignment)
    except Refusal as refusal:
        return _refused(gm, example_inputs, refusal.reason, options)
    except Exception as error:
        logs.log.debug("internal error", exc_info=error)
        return _refused(gm, example_inputs, _internal(error), options)
    program = _program(gm, draft, options)
    current().captured(gm, draft, program)
    logs.captured(gm, draft)
    return program


@contextlib.contextmanager
def _own_saved_tensors() -> Iterator[None]:
    """Tracing saves tensors, too: hooks of the caller, as those of a checkpoint that counts them, are not told."""

    def same(x: Tensor) -> Tensor:
        return x

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # where hooks are not allowed there are none
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(same, same))
        yield


def _internal(error: Exception) -> Reason:
    """A fault of the pass does not stop a training run."""
    return Reason(
        "internal", f"the pass failed: {type(error).__name__}: {error}",
        "this is a fault of treecompile and not of the model; the graph runs as captured",
        'set TORCH_LOGS="+treecompile" for the traceback, and report it',
    )  # fmt: skip


def _is_parameter(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.nn.Parameter) or (isinstance(value, Tensor) and value.requires_grad)


def _refused(
    gm: fx.GraphModule, inputs: Sequence[Any], reason: Reason, options: Options
) -> Callable[..., Any]:
    """The graph as stock Inductor would have run it."""
    # Without substitutes the graph is another, and what is wrong with it is not what was wrong at first.
    reason = scope.given_up() or reason
    current().refused(gm, reason)
    logs.captured(gm, None, reason)
    if scope.can_recapture() and options.on_unsupported != "error":
        _log_once(reason)
        scope.recapture_dense(reason.what, reason)
    if options.on_unsupported == "error":
        where = "\n".join(part for part in (reason.where, reason.source) if part)
        raised.raise_unsupported(
            inspect.currentframe(), what=reason.what, why=reason.why, where=where or None, hint=reason.hint
        )
    if any(node.target is leaf_last_state for part in _parts(gm) for node in part.graph.nodes):
        scope.recapture_with_states(reason)  # a dense graph gets the model's own states, which have gradients
    _log_once(reason)
    dense = _stock(gm, inputs, options)

    def run(*args: Any) -> Any:
        counters["dense"] += 1
        counters[f"dense:{reason.slug}"] += 1
        return dense(*args)

    return run


def _parts(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph and those within it."""
    return [part for part in gm.modules() if isinstance(part, fx.GraphModule)]


def _stock(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    from torch._dynamo.backends.registry import lookup_backend

    try:
        settings = inductor_settings(options.mode) if options.compiler == "inductor" else {}
        stock: Callable[..., Any] = lookup_backend(options.compiler)(gm, list(inputs), **settings)
        return stock
    except RestartAnalysis:
        raise  # Dynamo is to capture anew, with a float of the model written in
    except Exception as error:
        return _eager(gm, options.compiler, error)


def _stock_later(gm: fx.GraphModule, options: Options) -> Callable[..., Any]:
    """The same, compiled at its first call."""
    compiled = compile_dense(gm, options.compiler, options.mode)
    chosen: list[Callable[..., Any]] = [compiled]

    def run(*args: Any) -> Any:
        if chosen[0] is not compiled:
            return chosen[0](*args)
        try:
            return compiled(*args)
        except BackendCompilerFailed as error:
            chosen[0] = _eager(gm, options.compiler, error)
            return chosen[0](*args)

    return run


def _eager(gm: fx.GraphModule, compiler: str, error: Exception) -> Callable[..., Any]:
    """The captured graph as it stands, since the compiler failed on it."""
    cause: Any = error
    while isinstance(getattr(cause, "inner_exception", None), Exception):
        cause = cause.inner_exception
    counters["eager"] += 1
    counters[f"eager:{type(cause).__name__}"] += 1
    logs.warn_once(f"runs eager: {compiler} failed on a dense graph: {type(cause).__name__}: {cause}")
    eager: Callable[..., Any] = gm
    return eager


def _log_once(reason: Reason) -> None:
    logs.warn_once(f"runs dense: {reason}")


def clear() -> None:
    """Forget trees, counts and given warnings."""
    _trees.clear()
    counters.clear()
    logs.forget()


def _program(gm: fx.GraphModule, draft: Draft, options: Options) -> TreeProgram:
    shapes = {name: spec.shape for name, spec in draft.packs.items()}

    def make() -> PackedCode:
        return PackedCode(draft.packed, draft.inputs, shapes, options.compiler, options.mode, _compiled)

    key = canonical_text(draft, options)
    return TreeProgram(
        arguments=tuple(n.name for n in draft.lowered.graph.nodes if n.op == "placeholder"),
        keys=draft.keys.module,
        key_arguments=tuple(n.name for n in draft.keys.inputs),
        key_outputs=draft.key_outputs,
        tree=draft.tree,
        inputs=draft.inputs,
        packs=draft.packs,
        constants=draft.constants,
        packed=shared_code(key, make),
        frontier=draft.frontier,
        tail=draft.tail.module,
        tail_inputs=tuple(n.name for n in draft.tail.inputs),
        repeats=draft.repeats,
        key_constants=draft.key_constants,
        dense=_stock_later(gm, options),
        observe=_observe,
        failed=functools.partial(_failed, options),
        min_sharing=options.min_sharing,
        cache=_trees,
    )


def _compiled() -> None:
    counters["compiled"] += 1


def _observe(how: str, why: str) -> None:
    counters[how] += 1
    if why:
        counters[f"{how}:{why}"] += 1


def _failed(options: Options, error: CompilationFailed) -> None:
    """The dense graph runs instead; no silent loss of speed, and an error for whoever asked for it."""
    what, hint = (
        str(error),
        "the message above is the compiler's; options={'compiler': 'aot_eager'} runs without it",
    )
    if options.on_unsupported == "error":
        raise UnsupportedError(what=what, why="the packed graph cannot run uncompiled", hint=hint) from error
    logs.warn_once(f"runs dense: {what}")


def canonical_text(draft: Draft, options: Options) -> str:
    """The packed graph as text that two captures of one model share: nodes renamed by order."""
    names: dict[fx.Node, str] = {}
    lines = [options.compiler, options.mode]
    order = iter(draft.inputs)
    for node in draft.packed.graph.nodes:
        names[node] = f"v{len(names)}"
        if node.op == "placeholder":
            spec = next(order)
            shape = draft.packs[spec.name].shape if spec.role == "pack" else ""
            lines.append(
                f"{names[node]} = {spec.role} {spec.name if spec.role == 'tree' else ''} {spec.region} {shape}"
            )
            continue
        args = fx.map_arg(
            (node.args, node.kwargs), lambda n: fx.immutable_collections.immutable_list([names[n]])
        )
        body = ""
        if node.op == "get_attr":
            body = str(getattr(draft.packed, str(node.target)).code)
        lines.append(f"{names[node]} = {node.op} {node.target if node.op != 'get_attr' else body} {args}")
    return "\n".join(lines)


leaves.install()
