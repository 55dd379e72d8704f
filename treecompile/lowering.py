"""Compile packed and dense graphs.

A packed graph is compiled once for all N. It is traced with its own shape environment, where every length of the tree
(packed tokens, segments, pieces, rows of a region, grid positions) is one symbol; sizes 0 and 1 never reach the trace,
so nothing specialises on them. Whatever the compiler assumed about the symbols is kept and checked at each call: a
batch outside of it gets a compilation of its own.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from treecompile.regions import with_autocast_blocks
from treecompile.runtime.program import CompilationFailed, Input

__all__ = ["PackedCode", "clear", "compile_dense", "dynamic_dims", "inductor_settings"]

# Lengths that vary with the batch, by role: (role or tree field) -> which dims, and the symbol group.
_GROUPS: dict[str, tuple[tuple[int, str], ...]] = {
    "subtree_end": ((0, "N"),),
    "column": ((0, "N"),),
    "segments": ((0, "S"),),
    "segments_host": ((0, "S"),),
    "pieces": ((0, "P"),),
    "blocks": ((0, "K"),),
    "chain_end": ((0, "N"),),
    "chain_segments": ((0, "S"),),
}


_FORM = operator.attrgetter("shape", "dtype", "device", "requires_grad")
_PLUS_ONE = " + 1"  # offsets of a CSR: one more than its rows, and the compiler must know it


def dynamic_dims(spec: Input, shape: Sequence[int] | None) -> tuple[tuple[int, str], ...]:
    """Which dims of a packed input vary, and the symbol group of each."""
    if spec.role == "tree":
        return _GROUPS[spec.name]
    if spec.role == "pack" and shape is not None:
        return tuple((i, "N") for i, size in enumerate(shape) if size == -1)
    region = repr(spec.region)
    where = "N" if not spec.region else f"H{region}"
    return {
        "rows": ((0, where),),
        "multiplicity": ((0, where),),
        "row_index": ((0, f"M{region}"),),
        "index": ((0, f"M{region}"),),
        "positions": ((0, f"K{region}"),),
        "offsets": ((0, f"{where}{_PLUS_ONE}"),),
    }.get(spec.role, ())


@dataclass
class _Variant:
    """One compilation and what it assumed."""

    run: Callable[..., Any]
    env: ShapeEnv
    symbols: dict[str, sympy.Symbol]
    # The sizes served last, and how much had been assumed then: most calls ask the same again.
    last: tuple[dict[str, int], int] | None = None

    def guards(self) -> list[sympy.Expr]:
        """What was assumed so far: a backward pass compiled later adds to it."""
        own = set(self.symbols.values())
        found = [guard.expr for guard in self.env.guards]
        found += [sympy.Eq(symbol, to) for symbol, to in self.env.replacements.items() if symbol in own]
        return [guard for guard in found if guard != sympy.true]

    def serves(self, sizes: dict[str, int]) -> bool:
        asked = (sizes, len(self.env.guards) + len(self.env.replacements))
        if asked == self.last:
            return True
        values = {symbol: sizes[group] for group, symbol in self.symbols.items()}
        served = all(guard.xreplace(values) == sympy.true for guard in self.guards())
        if served:
            self.last = asked
        return served


class PackedCode:
    """A packed graph and its compilations, shared by all programs with the same graph.

    Args:
        gm: the packed graph.
        inputs: of the graph, in order.
        shapes: packed shapes of ``pack`` inputs.
        compiler: "inductor" or "aot_eager".
        mode: of Inductor.
        on_compile: told of each compilation.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Input],
        shapes: dict[str, tuple[int, ...]],
        compiler: str,
        mode: str,
        on_compile: Callable[[], None],
    ) -> None:
        self.gm, self.inputs, self.compiler, self.mode = gm, tuple(inputs), compiler, mode
        self._on_compile = on_compile
        self._dynamic = [dynamic_dims(i, shapes.get(i.name)) for i in self.inputs if i.role != "number"]
        self._measured = [
            (i, dim, group)
            for i, dims in enumerate(self._dynamic)
            for dim, group in dims
            if not group.endswith(_PLUS_ONE)
        ]
        self._fixed = [i for i, dims in enumerate(self._dynamic) if not dims]
        self._varying = [(i, {dim for dim, _ in dims}) for i, dims in enumerate(self._dynamic) if dims]
        self._variants: dict[Any, list[_Variant]] = {}
        self._failed: dict[Any, CompilationFailed] = {}
        self._lock = threading.Lock()

    def __call__(self, numbers: tuple[Any, ...], values: list[Any]) -> Sequence[Any]:
        """Run the packed graph; compiles on first need.

        Args:
            numbers: values of the ``number`` inputs, constants of the compilation.
            values: all other inputs, in order.

        Raises:
            CompilationFailed: the compiler failed on the graph; it is not asked again for such inputs.
        """
        sizes = self._sizes(values)
        if any(size < 2 for group, size in sizes.items() if group[0] in "NHM"):
            small: Sequence[Any] = self.numbered(numbers)(*values)
            return small
        key = (numbers, _modes(), self._forms(values))
        with self._lock:
            found = next((v for v in self._variants.get(key, ()) if v.serves(sizes)), None)
            if found is None:
                if key in self._failed:
                    raise self._failed[key]
                try:
                    found = self._compile(numbers, values, sizes)
                except (
                    Exception
                ) as error:  # whatever it is, nothing has run yet: the caller has the dense graph
                    self._failed[key] = CompilationFailed(self.compiler, error)
                    raise self._failed[key] from error
                self._variants.setdefault(key, []).append(found)
        outputs: Sequence[Any] = found.run(*values)
        return outputs

    def _sizes(self, values: list[Any]) -> dict[str, int]:
        return {group: values[i].shape[dim] for i, dim, group in self._measured}

    def _forms(self, values: list[Any]) -> tuple[Any, ...]:
        """What a compilation bakes in of its inputs: two models with one graph text may differ in their weights.

        Asked for at each call, of every weight: loops in C.
        """
        fixed = [values[i] for i in self._fixed]
        tensors = [value for value in fixed if isinstance(value, Tensor)]
        varying = [(values[i], dims) for i, dims in self._varying]
        return (
            tuple((i, value) for i, value in enumerate(fixed) if not isinstance(value, Tensor)),
            tuple(map(_FORM, tensors)),
            tuple(map(Tensor.stride, tensors)),
            tuple(map(Tensor.is_inference, tensors)),
            # Sizes that vary are -1; strides are whatever they are.
            tuple(
                (
                    value.dtype, value.device, value.requires_grad, value.is_inference(),
                    tuple(-1 if i in dims else size for i, size in enumerate(value.shape)),
                )
                for value, dims in varying
            ),
        )  # fmt: skip

    def numbered(self, numbers: tuple[Any, ...]) -> fx.GraphModule:
        """The packed graph with its numbers written in."""
        if not numbers:
            return self.gm
        graph = fx.Graph()
        given = iter(numbers)
        constants: dict[fx.Node, Any] = {}
        env: dict[fx.Node, fx.Node] = {}
        specs = iter(self.inputs)
        for node in self.gm.graph.nodes:
            if node.op == "placeholder" and next(specs).role == "number":
                constants[node] = next(given)
                continue
            copied = graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, lambda n: constants[n] if n in constants else env[n]),
                fx.map_arg(node.kwargs, lambda n: constants[n] if n in constants else env[n]),
                node.name,
            )
            copied.meta = dict(node.meta)
            env[node] = copied
        return fx.GraphModule(self.gm, graph)

    def _compile(self, numbers: tuple[Any, ...], values: list[Any], sizes: dict[str, int]) -> _Variant:
        self._on_compile()
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        hints = _distinct(sizes)
        symbols: dict[str, Any] = {}
        fakes: list[Any] = []
        for value, dims in zip(values, self._dynamic, strict=True):
            fakes.append(None if _derived(dims) else _fake(value, dims, hints, mode))
            for dim, group in () if _derived(dims) else dims:
                symbols[group] = fakes[-1].shape[dim]
        for i, (value, dims) in enumerate(zip(values, self._dynamic, strict=True)):
            if _derived(dims):
                rows = symbols[dims[0][1].removesuffix(_PLUS_ONE)]
                with mode:
                    fakes[i] = torch.empty(rows + 1, dtype=value.dtype, device=value.device)
        symbols = {group: size.node.expr for group, size in symbols.items()}
        # Tracing patches modules of PyTorch: not while another thread captures a graph.
        with compile_lock:
            run = _compile_graph(self.numbered(numbers), fakes, mode, self.compiler, self.mode)
        return _Variant(run, env, symbols)


def _derived(dims: Sequence[tuple[int, str]]) -> bool:
    return any(group.endswith(_PLUS_ONE) for _, group in dims)


def _distinct(sizes: dict[str, int]) -> dict[str, int]:
    """A sample size for each group: its own where possible, never 0 or 1, never that of another group."""
    taken: set[int] = set()
    out: dict[str, int] = {}
    for group in sorted(sizes, key=lambda g: (g != "N", g)):
        size = max(sizes[group], 5)
        while size in taken:
            size += 1
        taken.add(size)
        out[group] = size
    return out


def _fake(value: Any, dims: Sequence[tuple[int, str]], hints: dict[str, int], mode: FakeTensorMode) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = list(value.shape)
    sample = value
    if dims:
        for dim, group in dims:
            shape[dim] = hints[group]
        sample = torch.empty(shape, dtype=value.dtype, device=value.device)
    dynamic = {dim for dim, _ in dims}
    policy = [DimDynamic.DUCK if i in dynamic else DimDynamic.STATIC for i in range(len(shape))]
    return mode.from_tensor(sample, static_shapes=False, symbolic_context=StatelessSymbolicContext(policy))


def _modes() -> tuple[Any, ...]:
    """State around a call that a compilation bakes in."""
    autocast = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def _compile_graph(
    gm: fx.GraphModule, fakes: list[Any], fake_mode: FakeTensorMode, compiler: str, mode: str
) -> Callable[..., Any]:
    """AOTAutograd plus the compiler, without a second Dynamo pass."""
    with tracing(TracingContext(fake_mode)):
        if compiler == "aot_eager":
            from torch._dynamo.backends.registry import lookup_backend

            return lookup_backend("aot_eager")(gm, fakes)
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(gm, fakes, **inductor_settings(mode))  # type: ignore[return-value]


def inductor_settings(mode: str) -> dict[str, Any]:
    """Keyword arguments of ``compile_fx`` for a mode of ``torch.compile``."""
    from torch._inductor import list_mode_options

    patches = list_mode_options(mode)
    return {"config_patches": patches} if patches else {}


def compile_dense(gm: fx.GraphModule, compiler: str, mode: str) -> Callable[..., Any]:
    """The captured graph through the stock compiler, compiled at its first call."""

    blocks = with_autocast_blocks(gm)

    # Dynamo skips graph modules made inside of a backend; a plain function around one it compiles.
    def captured(*args: Any) -> Any:
        return blocks(*args)

    return torch.compile(captured, backend=compiler, mode=mode if compiler == "inductor" else None)


# Graphs that are kept for other captures; a program holds on to its own.
_KEPT = 64
_codes: OrderedDict[str, PackedCode] = OrderedDict()
_codes_lock = threading.Lock()


def shared_code(key: str, make: Callable[[], PackedCode]) -> PackedCode:
    """One PackedCode per canonical graph text."""
    with _codes_lock:
        if key not in _codes:
            _codes[key] = make()
        _codes.move_to_end(key)
        while len(_codes) > _KEPT:
            _codes.popitem(last=False)
        return _codes[key]


def clear() -> None:
    """Forget all compilations."""
    with _codes_lock:
        _codes.clear()
