"""`treecompile::leaf_recurrence`: a chunkwise linear recurrence of a model as one node.

A node says twice what is computed. Its first arguments are operands in one form for all families of models, the
*prepared* ones: a packed graph runs its own recurrence on them. The others are the arguments of the model's own
function, and the key of a `Body`, which holds that function: the dense run calls it, and what prepares operands is dead
code there.

The op is composite. Eager calls run the model's function as it stands, and so does a trace of AOTAutograd where
the function can be traced. Any other trace records `leaf_recurrence_opaque`, which has a shape and a gradient without
running anything.

Shapes: B rows, T tokens, H heads, G groups of them (head h reads group ``h // (H // G)``), D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from treecompile.runtime.ops.opaque import ambient, autocast_of, gradients
from treecompile.runtime.ops.registry import LIBRARY, define

__all__ = [
    "RECURRENCES",
    "Body",
    "definition",
    "leaf_last_state",
    "leaf_recurrence",
    "leaf_recurrence_opaque",
    "stateful",
]


@dataclass(frozen=True)
class Body:
    """A model's own recurrence.

    Args:
        function: what transformers calls.
        names: of its tensor arguments, in the order of the op's `originals`.
        positional: how many of them come without their name, as some kernels have other names.
        constants: its other arguments.
        shape: which tensor has the shape of the result.
        dtype: which tensor has the dtype of the result; None for fp32.
        traced: whether AOTAutograd can trace the function: a kernel in Triton cannot run on fake tensors.
        pick: the result is the first of a tuple.
        state: the argument that has the function give its last state too; "" for a function that always does.
        value_first: whether that state is [B, H, V, D], and not [B, H, D, V].
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    positional: int
    constants: tuple[tuple[str, Any], ...]
    shape: str
    dtype: str | None
    traced: bool
    pick: bool
    state: str = ""
    value_first: bool = False

    def _call(self, originals: Sequence[Tensor], **more: Any) -> Any:
        first = self.positional
        named = dict(zip(self.names[first:], originals[first:], strict=True))
        return self.function(*originals[:first], **named, **{**dict(self.constants), **more})

    def run(self, originals: Sequence[Tensor]) -> Tensor:
        """Call the model's function."""
        found = self._call(originals)
        out: Tensor = found[0] if self.pick else found
        return out

    def last_state(self, originals: Sequence[Tensor]) -> Tensor:
        """Call it for its last state."""
        found: Tensor = self._call(originals, **({self.state: True} if self.state else {}))[1]
        return found

    def empty(self, originals: Sequence[Tensor]) -> Tensor:
        """A result without contents."""
        given = dict(zip(self.names, originals, strict=True))
        dtype = torch.float32 if self.dtype is None else given[self.dtype].dtype
        return given[self.shape].new_empty(given[self.shape].shape, dtype=dtype)


RECURRENCES: dict[str, Body] = {}


def _last_state(k: Tensor, v: Tensor, originals: list[Tensor], body: str) -> Tensor:
    """The state after the last token of each row, in fp32; for graphs in which nothing reads it.

    Args:
        k, v: prepared operands, for their shapes.
        originals, body: as for `leaf_recurrence`.

    Returns:
        [B, H, D, V], or [B, H, V, D] where the body says so.

    Raises:
        RuntimeError: in a backward pass. A graph that reads states is captured without substitutes.
    """
    return RECURRENCES[body].last_state(originals).float().clone()


def _last_state_fake(k: Tensor, v: Tensor, originals: list[Tensor], body: str) -> Tensor:
    sizes = (v.shape[3], k.shape[3]) if RECURRENCES[body].value_first else (k.shape[3], v.shape[3])
    return v.new_empty((v.shape[0], v.shape[2], *sizes), dtype=torch.float32)


def _no_gradient(ctx: Any, grad: Tensor) -> Any:
    raise RuntimeError("leaf_last_state has no gradient: this is a fault of treecompile, please report it")


def _leaf_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor | None,
    skip: Tensor | None,
    scale: float,
    chunk: int,
    originals: list[Tensor],
    body: str,
) -> Tensor:
    """A gated linear recurrence over the tokens of each row; the delta rule where there is a beta.

    ``S = exp(gate) * S``, then ``S += k (beta (v - k S))`` or, without beta, ``S += k v``; the result is
    ``scale * q S + skip``.

    Args:
        q, k: ``[B, T, G, D]``.
        v: ``[B, T, H, V]``.
        gate: log of the decay, ``[B, T, H]`` or ``[B, T, H, D]``.
        beta: ``[B, T, H]`` or None.
        skip: ``[B, T, H, V]`` or None.
        scale: factor on q.
        chunk: tokens of a chunk of the model's function.
        originals: arguments of the model's function, ordered as `Body.names`.
        body: key into `RECURRENCES`; "" for the definition itself, on the prepared operands.

    Returns:
        ``[B, T, H, V]`` in the dtype of the model's function.
    """
    if not body:
        return definition(q, k, v, gate, beta, skip, scale)
    this = RECURRENCES[body]
    if not _tracing(v) or (this.traced and isinstance(v, FunctionalTensor)):
        return this.run(originals)
    result: Tensor = leaf_recurrence_opaque(originals, body, ambient(v))
    return result


def definition(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None, skip: Tensor | None, scale: float
) -> Tensor:
    """Token by token."""
    copies = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(copies, 2) for x in (q, k))
    decay = gate.exp() if gate.dim() == 4 else gate.exp().unsqueeze(-1)
    state = v.new_zeros((*v[:, 0].shape[:2], k.shape[-1], v.shape[-1]))
    outs = []
    for t in range(v.shape[1]):
        state = state * decay[:, t].unsqueeze(-1)
        update = v[:, t]
        if beta is not None:
            update = (update - (state * k[:, t].unsqueeze(-1)).sum(-2)) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outs.append(scale * (state * q[:, t].unsqueeze(-1)).sum(-2))
    out = torch.stack(outs, 1)
    return out if skip is None else out + skip


def _tracing(x: Tensor) -> bool:
    return type(x) not in (Tensor, torch.nn.Parameter) or bool(_get_current_dispatch_mode_stack())


def _opaque(originals: list[Tensor], body: str, autocast: torch.dtype | None) -> Tensor:
    with autocast_of(originals[0], autocast):
        out = RECURRENCES[body].run(originals)
    # The fake kernel promises fresh contiguous memory.
    return out.clone() if any(out is x for x in originals) else out.contiguous()


def _opaque_fake(originals: list[Tensor], body: str, autocast: torch.dtype | None) -> Tensor:
    return RECURRENCES[body].empty(originals)


def _opaque_backward(
    grad: Tensor, originals: list[Tensor], body: str, autocast: torch.dtype | None, wanted: list[bool]
) -> list[Tensor]:
    return gradients(RECURRENCES[body].run, originals, wanted, grad, autocast)


def _opaque_backward_fake(
    grad: Tensor, originals: list[Tensor], body: str, autocast: torch.dtype | None, wanted: list[bool]
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, want in zip(originals, wanted, strict=True) if want]


def _stateful(x: Tensor) -> Tensor:
    """Marks an operand of a recurrence that starts from a given state, hands its last one out, or has documents."""
    return x


LIBRARY.define(
    "leaf_recurrence(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? beta, Tensor? skip, float scale, int chunk,"
    " Tensor[] originals, str body) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("leaf_recurrence", _leaf_recurrence, "CompositeImplicitAutograd")
leaf_recurrence = torch.ops.treecompile.leaf_recurrence.default

_STATE = "leaf_last_state(Tensor k, Tensor v, Tensor[] originals, str body) -> Tensor"
leaf_last_state = define(_STATE, _last_state, _last_state_fake)
torch.library.register_autograd("treecompile::leaf_last_state", _no_gradient, lib=LIBRARY)

LIBRARY.define("stateful(Tensor(a) x) -> Tensor(a)", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("stateful", _stateful, "CompositeImplicitAutograd")
stateful = torch.ops.treecompile.stateful.default

_ARGUMENTS = "Tensor[] originals, str body, ScalarType? autocast"
leaf_recurrence_opaque = define(f"leaf_recurrence_opaque({_ARGUMENTS}) -> Tensor", _opaque, _opaque_fake)
leaf_recurrence_opaque_backward = define(
    f"leaf_recurrence_opaque_backward(Tensor grad, {_ARGUMENTS}, bool[] wanted) -> Tensor[]",
    _opaque_backward,
    _opaque_backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    originals, ctx.body, ctx.autocast = inputs
    ctx.save_for_backward(*originals)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    originals = list(ctx.saved_tensors)
    wanted = list(ctx.needs_input_grad[0])
    found = iter(leaf_recurrence_opaque_backward(grad, originals, ctx.body, ctx.autocast, wanted))
    return [next(found) if want else None for want in wanted], None, None


torch.library.register_autograd(
    "treecompile::leaf_recurrence_opaque", _backward, setup_context=_setup, lib=LIBRARY
)
