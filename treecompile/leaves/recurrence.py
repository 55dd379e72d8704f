"""Substitutes for the linear attentions of transformers: one `treecompile::leaf_recurrence` node per layer.

Each twin writes what its function does to the operands before the recurrence proper (normalisation, the step size)
as ordinary ops, so that all families are one recurrence: the gated delta rule, or gated linear attention.

transformers picks, when a model's module is imported, what such a function calls: its own PyTorch code, or a kernel
of another package. The twins are the same for both; the dense run keeps what was picked.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treecompile.leaves.scope import active, at_trace_time, states_are_read
from treecompile.runtime.ops.leaf_recurrence import (
    RECURRENCES,
    Body,
    definition,
    leaf_last_state,
    leaf_recurrence,
    stateful,
)

__all__ = [
    "chunk_scan",
    "convolution",
    "delta_rule",
    "fused_layer",
    "kernel_convolutions",
    "lightning",
    "lightning_classes",
    "named",
]

_MODELS = "transformers.models."
# What makes the result depend on more than the tokens before it in the row.
_STATE = ("initial_state", "initial_states", "cu_seqlens", "cu_seqlens_cpu", "cu_seq_lens_q", "seq_idx")


# ---- finding the functions ----------------------------------------------------------------------------------------


def named(*names: str) -> Callable[[], Iterator[FunctionType]]:
    """The functions of these names in all models that are imported by now."""

    def where() -> Iterator[FunctionType]:
        for name, module in list(sys.modules.items()):
            if name.startswith(_MODELS):
                found = (_function(getattr(module, "__dict__", {}).get(n)) for n in names)
                yield from (f for f in found if f is not None and f.__module__.startswith(_MODELS))

    return where


def _function(value: Any) -> FunctionType | None:
    """A function as transformers wrote it, also where the kernels package made a module of it."""
    if isinstance(value, nn.Module):
        cells = getattr(type(value).forward, "__closure__", None) or ()
        value = next((c.cell_contents for c in cells if isinstance(c.cell_contents, FunctionType)), None)
    return value if isinstance(value, FunctionType) else None


def kernel_convolutions() -> Iterator[FunctionType]:
    """The convolutions for which transformers picked a kernel: its own PyTorch code needs no substitute."""
    for function in named("causal_conv1d_fn")():
        if _kernel(function) is not None:
            yield function


def _kernel(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What a function of transformers calls in place of its own code, None if nothing."""
    reference = getattr(function, "__wrapped__", None)
    if not isinstance(function, FunctionType) or "implementation" not in function.__code__.co_freevars:
        return None
    picked = (function.__closure__ or ())[function.__code__.co_freevars.index("implementation")].cell_contents
    return None if picked is reference else picked


def _reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """The code of transformers, without the wrapper that warns of its speed."""
    found: Callable[..., Any] = getattr(function, "__wrapped__", function)
    return found


# ---- bodies -------------------------------------------------------------------------------------------------------


def _body(
    function: Callable[..., Any],
    names: tuple[str, ...],
    positional: int,
    constants: tuple[tuple[str, Any], ...],
    shape: str,
    dtype: str | None,
    pick: bool,
    state: str,
    value_first: bool = False,
) -> str:
    """The key of a body, alike in every process: it ends up in the keys of compile caches."""
    kernel = _kernel(function)
    name = f"{function.__module__}.{function.__qualname__}"
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    content = repr(
        (version, name, getattr(kernel, "__module__", None), names, positional, constants, shape, dtype)
    )
    key = f"{function.__name__}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if key not in RECURRENCES:
        called = _reference(function) if kernel is None else function
        RECURRENCES[key] = Body(
            called, names, positional, constants, shape, dtype, kernel is None, pick, state, value_first
        )
    return key


def _reaches(function: FunctionType, names: tuple[str, ...]) -> bool:
    """Whether one of further keyword arguments reaches the function and means something to it."""
    kernel = _kernel(function)
    known = inspect.signature(kernel).parameters if kernel is not None else {}
    return any(name in _STATE or name in known for name in names)


# ---- the delta rule -----------------------------------------------------------------------------------------------


def delta_rule(divides: bool) -> Callable[[FunctionType], Callable[..., Any]]:
    """Twins of the gated delta rule; with a gate per head, or one per channel.

    Args:
        divides: the norm of queries and keys divides, and is not a factor.
    """

    def twin(original: FunctionType) -> Callable[..., Any]:
        @at_trace_time
        def describe(chunk: int, normalized: bool) -> str | None:
            if not _is_delta_rule(_reference(original), divides):
                return None
            names = ("query", "key", "value", "g", "beta")
            constants = (("chunk_size", chunk), ("use_qk_l2norm_in_kernel", normalized))
            return _body(original, names, 3, constants, "value", "query", True, "output_final_state")

        @at_trace_time
        def reaches(names: tuple[str, ...]) -> bool:
            return _reaches(original, names)

        @at_trace_time
        def picked() -> bool:
            return _kernel(original) is not None

        def traced(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            chunk_size: int = 64,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> Any:
            names = tuple([name for name, given in kwargs.items() if given is not None])
            stated = output_final_state and states_are_read()
            if initial_state is not None or stated or reaches(names):
                return original(
                    stateful(query), key, value, g, beta, chunk_size, initial_state, output_final_state,
                    use_qk_l2norm_in_kernel, **kwargs,
                )  # fmt: skip
            body = describe(chunk_size, use_qk_l2norm_in_kernel)
            if body is None:
                return original(
                    query, key, value, g, beta, chunk_size, None, output_final_state, use_qk_l2norm_in_kernel
                )
            operands = _delta_operands(query, key, value, g, beta, use_qk_l2norm_in_kernel, divides)
            # Kernels multiply in the dtype that they are given, and transformers' own code in fp32.
            if picked():
                q, k, v = (x.to(query.dtype) for x in operands[:3])
                operands = (q, k, v, *operands[3:])
            given = [query, key, value, g, beta]
            out = leaf_recurrence(*operands, query.shape[-1] ** -0.5, chunk_size, given, body)
            state = leaf_last_state(operands[1], operands[2], given, body) if output_final_state else None
            return out, state

        return traced

    return twin


Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _delta_operands(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, normalized: bool, divides: bool
) -> Operands:
    q, k, v, gate, rate = (x.to(torch.float32) for x in (query, key, value, g, beta))
    if normalized:
        q, k = _normalized(q, divides), _normalized(k, divides)
    return q, k, v, gate, rate, None


@functools.cache
def _is_delta_rule(function: Callable[..., Any], per_channel: bool) -> bool:
    """Whether a function computes what its twin takes it for: tried once, as versions of transformers may differ."""

    def compare(draw: Draw) -> tuple[Tensor, Tensor]:
        q, k, v = draw(1, 7, 2, 3), draw(1, 7, 2, 3), draw(1, 7, 2, 4)
        gate, beta = -draw(1, 7, 2, 3).square(), draw(1, 7, 2).sigmoid()
        gate = gate if per_channel else gate[..., 0]
        operands = _delta_operands(q, k, v, gate, beta, True, per_channel)
        found = function(q, k, v, g=gate, beta=beta, chunk_size=4, use_qk_l2norm_in_kernel=True)[0]
        return definition(*operands, 3**-0.5), found

    return _agree(compare)


Draw = Callable[..., Tensor]


def _agree(compare: Callable[[Draw], tuple[Tensor, Tensor]]) -> bool:
    """Whether two functions of random numbers give the same."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            ours, theirs = compare(draw)
    except Exception:  # whatever a function of another version raises
        return False
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() < 1e-4)


def _normalized(x: Tensor, divides: bool) -> Tensor:
    square = (x * x).sum(dim=-1, keepdim=True) + 1e-6
    return x / torch.sqrt(square) if divides else x * torch.rsqrt(square)


# ---- gated linear attention: Mamba 2 ------------------------------------------------------------------------------


def chunk_scan(original: FunctionType) -> Callable[..., Any]:
    """Twin of the scan of Mamba 2: ``[B, T, H, V]`` in the dtype of what was picked."""

    @at_trace_time
    def describe(
        given: tuple[str, ...], chunk: int, softplus: bool, limit: tuple[float, float]
    ) -> str | None:
        if not _is_scan(_reference(original)):
            return None
        constants = (("chunk_size", chunk), ("dt_softplus", softplus), ("dt_limit", limit))
        dtype = None if _kernel(original) is None else "hidden_states"
        return _body(
            original,
            given,
            5,
            constants,
            "hidden_states",
            dtype,
            False,
            "return_final_states",
            value_first=True,
        )

    @at_trace_time
    def reaches(names: tuple[str, ...]) -> bool:
        return _reaches(original, names)

    def traced(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        names = tuple([name for name, given in kwargs.items() if given is not None])
        stated = return_final_states and states_are_read()
        if initial_states is not None or stated or reaches(names):
            return original(
                stateful(hidden_states), dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias,
                initial_states=initial_states, dt_softplus=dt_softplus, dt_limit=dt_limit,
                return_final_states=return_final_states, **kwargs,
            )  # fmt: skip
        given = {"hidden_states": hidden_states, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias}
        given = {name: x for name, x in given.items() if x is not None}
        limit = (dt_limit[0], dt_limit[1])
        body = describe(tuple(given), chunk_size, dt_softplus, limit)
        if body is None:
            return original(
                hidden_states, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus,
                dt_limit=dt_limit, return_final_states=return_final_states, **kwargs,
            )  # fmt: skip
        operands = _scan_operands(hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, limit)
        originals = list(given.values())
        out = leaf_recurrence(*operands, 1.0, chunk_size, originals, body)
        return (
            (out, leaf_last_state(operands[1], operands[2], originals, body)) if return_final_states else out
        )

    return traced


def _scan_operands(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    limit: tuple[float, float],
) -> Operands:
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = F.softplus(step) if softplus else step
    step = torch.clamp(step, min=limit[0], max=limit[1]).float()
    x = x.float()
    skip = None if D is None else D[..., None] * x
    return C.float(), B.float(), x * step[..., None], A.to(x.dtype) * step, None, skip


@functools.cache
def _is_scan(function: Callable[..., Any]) -> bool:
    def compare(draw: Draw) -> tuple[Tensor, Tensor]:
        x, dt, A = draw(1, 7, 4, 3), draw(1, 7, 4), -draw(4).square()
        B, C, D, bias, limit = draw(1, 7, 2, 3), draw(1, 7, 2, 3), draw(4), draw(4), (0.1, 1.0)
        settings = {"D": D, "dt_bias": bias, "dt_softplus": True, "dt_limit": limit}
        operands = _scan_operands(x, dt, A, B, C, D, bias, True, limit)
        return definition(*operands, 1.0), function(x, dt, A, B, C, 4, **settings)

    return _agree(compare)


def fused_layer(original: FunctionType) -> Callable[..., Any]:
    """Twin of the kernel for a whole layer of Mamba 2: absent, so that the layer runs step by step."""

    def traced(*args: Any, **kwargs: Any) -> None:
        return None

    return traced


# ---- gated linear attention: MiniMax ------------------------------------------------------------------------------


def lightning_classes() -> Iterator[type[nn.Module]]:
    """The lightning attention of MiniMax, whose recurrence is written into its forward method."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_MODELS):
            found = getattr(module, "__dict__", {}).get("MiniMaxLightningAttention")
            if isinstance(found, type) and found.__module__ == name:
                yield found


def _lightning(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slope: Tensor,
    query_decay: Tensor,
    key_decay: Tensor,
    diagonal_decay: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:
    """The blocks of the forward method: ``[B, T, H, D]`` in and out, and the last state ``[B, H, D, D]``."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    rows, heads, length, size = q.shape
    state = torch.zeros(rows, heads, size, size).to(v)
    outputs = []
    for start in range(0, length, block):
        count = min(block, length - start)
        a, b, c = (x[:, :, start : start + count] for x in (q, k, v))
        weights = torch.matmul(a, b.transpose(-1, -2)) * diagonal_decay[:, :, :count, :count]
        inner = torch.matmul(weights, c)
        outputs.append(torch.matmul(a * query_decay[:, :count], state) + inner)
        update = torch.matmul((b * key_decay[:, -count:]).transpose(-1, -2), c)
        state = state * torch.exp(-slope * count) + update
    return torch.cat(outputs, dim=-2).transpose(1, 2), state


def lightning(original: FunctionType) -> Callable[..., Any]:
    """The forward method of MiniMax' lightning attention: the original wherever our backend does not trace."""
    masked = original.__globals__["apply_mask_to_padding_states"]

    @at_trace_time
    def describe(block: int) -> str:
        names = ("query", "key", "value", "slope", "query_decay", "key_decay", "diagonal_decay")
        return _body(_lightning, names, 7, (("block", block),), "value", "value", True, "")

    @at_trace_time
    def trusted() -> bool:
        return _is_lightning(original, computed)

    def computed(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None, body: str | None
    ) -> tuple[Tensor, Tensor | None]:
        rows, length, _ = hidden_states.shape
        heads, size = self.num_attention_heads, self.head_dim
        mixed = masked(self.act_fn(self.qkv_proj(hidden_states)), attention_mask)
        query, key, value = torch.split(mixed.reshape(rows, length, heads, 3 * size), size, dim=3)
        slope = self.slope_rate
        gate = (-slope.reshape(1, 1, heads)).expand(rows, length, heads)
        state = None
        if body is None:
            out = definition(query, key, value, gate, None, None, 1.0)
        else:
            given = [query, key, value, slope, self.query_decay, self.key_decay, self.diagonal_decay]
            out = leaf_recurrence(query, key, value, gate, None, None, 1.0, self.block_size, given, body)
            state = leaf_last_state(key, value, given, body).to(value.dtype)
        out = self.norm(out.reshape(rows, length, heads * size))
        found: Tensor = self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * out)
        return found, state

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not active() or not trusted():
            return original(
                self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
            )
        cached = past_key_values is not None
        starts = cached and past_key_values.get_linear_cache(self.layer_idx) is not None
        if starts or states_are_read():
            return original(
                self, stateful(hidden_states), position_embeddings, attention_mask, past_key_values, **kwargs
            )
        out, state = computed(self, hidden_states, attention_mask, describe(self.block_size))
        if cached:
            past_key_values.set_linear_cache(self.layer_idx, state)
        return out, state

    return forward


@functools.cache
def _is_lightning(forward: FunctionType, computed: Callable[..., tuple[Tensor, Any]]) -> bool:
    def compare(draw: Draw) -> tuple[Tensor, Tensor]:
        config = SimpleNamespace(
            head_dim=4, hidden_size=6, num_attention_heads=2, num_hidden_layers=2, block_size=3, hidden_act="silu",
            layer_types=["linear_attention"],
        )  # fmt: skip
        layer = next(cls for cls in lightning_classes() if cls.__module__ == forward.__module__)(config, 0)
        x, mask = draw(2, 7, 6), torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])
        layer.load_state_dict({name: draw(*p.shape) for name, p in layer.named_parameters()}, strict=False)
        theirs = forward(layer, x, None, mask)[0]
        return computed(layer, x, mask, None)[0], theirs

    return _agree(compare)


# ---- convolutions -------------------------------------------------------------------------------------------------


def convolution(original: FunctionType) -> Callable[..., Any]:
    """Twin of a convolution kernel: the PyTorch code of transformers, which passes read from the graph."""
    reference = _reference(original)

    @at_trace_time
    def reaches(names: tuple[str, ...]) -> bool:
        return _reaches(original, names)

    def traced(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        names = tuple([name for name, given in kwargs.items() if given is not None])
        if reaches(names):
            return original(stateful(hidden_states), weight, bias, activation=activation, **kwargs)
        return reference(hidden_states, weight, bias, activation=activation)

    return traced
