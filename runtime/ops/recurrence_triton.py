"""The Triton executor of `tree_recurrence`: the (gated) delta rule with a decay per head, on a GPU.

Takes what `why_not` finds nothing against; `treecompile.runtime.ops.recurrence` runs the rest, and is the
specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from treecompile.runtime.ops.recurrence_choice import VARIABLE, asked_executor
from treecompile.runtime.ops.recurrence_chunks import lowest_gate
from treecompile.runtime.ops.recurrence_paths import PathTables
from treecompile.runtime.ops.triton_device import why_no_triton

__all__ = ["Inputs", "attempt", "kernels_backward", "kernels_forward", "why_not"]

Result = TypeVar("Result")

MOST_CHUNK, MOST_SIZE = 64, 256


def why_not(k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None, chunk: int) -> str:
    """Say why the kernels cannot run these inputs, or "".

    Args:
        k, v, gate, beta, chunk: as for `tree_recurrence`.

    Raises:
        ValueError: the environment asks for them nevertheless, or for something unknown.

    Example:
        >>> x = torch.zeros(1, 4, 1, 16)
        >>> why_not(x, x, x[..., 0], x[..., 0], 64)
        'not on a CUDA device'
    """
    asked = asked_executor()
    if asked not in ("", "triton"):
        return f"{asked} was asked for"
    found = _why_not(k, v, gate, beta, chunk)
    if asked and found:
        raise ValueError(f"{VARIABLE}=triton: {found}")
    return found


def _why_not(k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None, chunk: int) -> str:
    if not v.is_cuda:
        return "not on a CUDA device"
    if v.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{v.dtype} has no matrix units"
    if gate.dim() == 4:
        return "a decay per channel"
    if chunk > MOST_CHUNK and beta is not None:
        return f"chunks of {chunk}: the longest are of {MOST_CHUNK}"
    most = MOST_SIZE if max(k.element_size(), v.element_size()) == 2 else MOST_SIZE // 2
    if max(k.shape[3], v.shape[3]) > most:
        wide = torch.promote_types(k.dtype, v.dtype)
        return f"head sizes {k.shape[3]} and {v.shape[3]}: the largest of {wide} is {most}"
    return _unfit.get(_shape_class(k, v), "") or why_no_triton(v.device)


# Shapes whose kernels a device could not hold, and why.
_unfit: dict[tuple[object, ...], str] = {}


def _shape_class(k: Tensor, v: Tensor) -> tuple[object, ...]:
    return v.device, k.dtype, v.dtype, k.shape[-1], v.shape[-1]


def attempt(run: Callable[[], Result], k: Tensor, v: Tensor) -> Result | None:
    """Run kernels; None where the device has too little shared memory for them, which `why_not` then says.

    Example:
        >>> attempt(lambda: 1, torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 1, 16))
        1
    """
    from triton.runtime.errors import OutOfResources

    try:
        return run()
    except OutOfResources as error:
        _unfit[_shape_class(k, v)] = str(error)
        return None


@dataclass(frozen=True)
class Launch:
    """Launch parameters of one kernel.

    Attributes:
        columns: most columns of the values in a tile, for 16-bit inputs; half of it for fp32.
        warps, stages: as Triton takes them.
    """

    columns: int
    warps: int
    stages: int


# What the heads that are computed at once may take beside inputs and results. Heads do not meet, so that many blocks
# and paths cost launches, not memory.
SCRATCH_BYTES = 8 << 30
# Chosen on an H200 for keys and values of 128 in bf16.
LAUNCHES = {
    "prepare": Launch(64, 4, 1),
    "state": Launch(64, 4, 3),
    "output": Launch(64, 4, 1),
    "update_grads": Launch(64, 4, 1),
    "state_grads": Launch(64, 4, 3),
    "value_grads": Launch(64, 4, 1),
    "query_grads": Launch(64, 4, 2),
    "key_grads": Launch(64, 8, 2),
    "rule_grads": Launch(64, 8, 2),
}
# Where the keys of a token take more than this, registers and shared memory ask for 8 warps and one stage.
NARROW_BYTES = 256
# The least bytes of a tile's row. With 64, Triton 3.6 made an `output_kernel` that read beyond its shared memory.
ROW_BYTES = 128


@dataclass(frozen=True)
class Inputs:
    """The inputs of a call as rows of tokens, of one dtype but for the gate.

    Attributes:
        q, k: [N, G, D].
        v: [N, H, V].
        gate: [N, H].
        beta: [N, H] of the delta rule; None without.
        tables: of the tree.
        scale: factor of the queries.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor | None
    tables: PathTables
    scale: float

    @property
    def heads(self) -> int:
        """H."""
        return self.v.shape[1]

    @property
    def groups(self) -> int:
        """G."""
        return self.k.shape[1]

    def sizes(self, kernel: str) -> dict[str, Any]:
        """Constants of a kernel."""
        launch, keys, size = LAUNCHES[kernel], self.k.shape[2], self.v.shape[2]
        item = self.k.element_size()
        least = ROW_BYTES // item
        narrow = keys * item <= NARROW_BYTES
        return {
            "H": self.heads,
            "G": self.groups,
            "D": keys,
            "V": size,
            "C": self.tables.width,
            "D_TILE": _padded(keys, least),
            "V_TILE": min(max(launch.columns * 2 // item, least), _padded(size, least)),
            "PRECISION": self.precision,
            "num_warps": launch.warps if narrow else 8,
            "num_stages": launch.stages if narrow else 1,
        } | {
            name: value
            for name, value, kernels in (
                ("SUMS", self.sums, ("prepare", "query_grads", "rule_grads")),
                ("DELTA", self.beta is not None, ("prepare", "state", "state_grads")),
            )
            if kernel in kernels
        }

    @property
    def precision(self) -> str:
        """Of products of fp32 operands: what PyTorch's own would have, or close to it."""
        return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"

    @property
    def sums(self) -> str:
        """Of products of fp32 intermediates."""
        return "tf32" if self.k.dtype == torch.bfloat16 else self.precision

    def rows(self, heads: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """[K * C, heads, size] to be written."""
        shape = (self.tables.rows.shape[0], heads, size)
        return self.k.new_empty(shape, dtype=dtype or self.k.dtype)

    def states(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count, H, D, V] to be written."""
        return self.k.new_empty((count, self.heads, self.k.shape[2], self.v.shape[2]), dtype=dtype)

    def flags(self, count: int, columns: int) -> tuple[Tensor, Tensor]:
        """Flags of `count` states by head and tile of columns, and a ticket: zeros."""
        tiles = -(-self.v.shape[2] // columns)
        made = self.k.new_zeros((count * self.heads * tiles + 1,), dtype=torch.int32)
        return made[1:], made[:1]

    def parts(self) -> list[slice]:
        """Key heads that run at once, as many as `SCRATCH_BYTES` hold, at least one."""
        tables, item, width = self.tables, self.k.element_size(), self.tables.width
        keys, values = self.k.shape[2], self.v.shape[2]
        states = keys * values * (2 * item * tables.blocks + 4 * (tables.paths + tables.forks))
        rows = tables.blocks * width * (item * (keys + 3 * values + width) + 4 * keys)
        count = max(SCRATCH_BYTES // max((states + rows) * self.heads // self.groups, 1), 1)
        return [slice(at, min(at + count, self.groups)) for at in range(0, self.groups, count)]

    def part(self, groups: slice) -> Inputs:
        """The inputs of some key heads, and of their value heads."""
        q, k = (x[:, groups].contiguous() for x in (self.q, self.k))
        members = self.members(groups)
        v, gate = (x[:, members].contiguous() for x in (self.v, self.gate))
        beta = None if self.beta is None else self.beta[:, members].contiguous()
        return replace(self, q=q, k=k, v=v, gate=gate, beta=beta)

    def members(self, groups: slice) -> slice:
        """Value heads of some key heads."""
        each = self.heads // self.groups
        return slice(groups.start * each, groups.stop * each)

    def per_head(self) -> tuple[int]:
        """Grid of the kernels that run once for each block and value head."""
        return (self.tables.blocks * self.heads,)

    def per_group(self) -> tuple[int]:
        """Grid of the kernels that run once for each block and key head."""
        return (self.tables.blocks * self.groups,)


def _padded(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class States:
    """What both directions begin with; shapes in `treecompile.runtime.kernels.tree_recurrence`."""

    near: Tensor
    rest: Tensor
    solve: Tensor | None
    erase: Tensor | None
    u: Tensor
    starts: Tensor


def _states(x: Inputs) -> States:
    from treecompile.runtime.kernels import tree_recurrence as kernels

    tables, width = x.tables, x.tables.width
    near = x.gate.new_empty((tables.blocks, x.heads, width), dtype=torch.float32)
    rest = torch.empty_like(near)
    u = x.rows(x.heads, x.v.shape[2])
    solve = erase = None
    if x.beta is not None:
        solve = x.k.new_empty((tables.blocks, x.heads, width, width))
        erase = x.rows(x.heads, x.k.shape[2])
    kernels.prepare_kernel[x.per_head()](
        x.k, x.v, x.gate, x.beta, tables.rows, near, rest, solve, erase, u, lowest_gate(torch.float32),
        **x.sizes("prepare"),
    )  # fmt: skip
    starts, forks = x.states(tables.blocks, x.k.dtype), x.states(tables.forks, torch.float32)
    sizes = x.sizes("state")
    flags, ticket = x.flags(tables.forks, sizes["V_TILE"])
    kernels.state_kernel[_per_path(x, sizes["V_TILE"])](
        x.k, near, rest, erase, u, tables.rows, starts, forks, flags, ticket, tables.order, tables.path_runs,
        tables.run_begin, tables.run_slot, tables.path_slot, **sizes,
    )  # fmt: skip
    return States(near, rest, solve, erase, u, starts)


def _per_path(x: Inputs, columns: int) -> tuple[int]:
    return (x.tables.paths * x.heads * -(-x.v.shape[2] // columns),)


def kernels_forward(x: Inputs) -> Tensor:
    """Run the rule over all paths of the tree.

    Returns:
        [N, H, V] in v's dtype.
    """
    parts = x.parts()
    return torch.cat([_forward(x.part(part)) for part in parts], 1) if len(parts) > 1 else _forward(x)


def _forward(x: Inputs) -> Tensor:
    from treecompile.runtime.kernels import tree_recurrence as kernels

    out = torch.empty_like(x.v)
    made = _states(x)
    kernels.output_kernel[x.per_head()](
        x.q, x.k, made.near, made.rest, made.u, made.starts, x.tables.rows, x.tables.own, out, x.scale,
        **x.sizes("output"),
    )  # fmt: skip
    return out


def kernels_backward(grad: Tensor, x: Inputs) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, gate and, of the delta rule, beta, shaped as these in `Inputs`.

    Args:
        grad: [N, H, V], of v's dtype.
        x: as for `kernels_forward`; states are computed again.
    """
    parts = x.parts()
    if len(parts) == 1:
        return _backward(grad, x)
    found = [_backward(grad[:, x.members(part)].contiguous(), x.part(part)) for part in parts]
    return tuple(torch.cat(each, 1) for each in zip(*found, strict=True))


def _backward(grad: Tensor, x: Inputs) -> tuple[Tensor, ...]:
    from treecompile.runtime.kernels import tree_recurrence as kernels

    tables, heads, groups = x.tables, x.heads, x.groups
    made = _states(x)
    near, rest, u, starts = made.near, made.rest, made.u, made.starts
    du = x.rows(heads, x.v.shape[2])
    kernels.update_grads_kernel[x.per_head()](
        grad, x.q, x.k, near, rest, tables.rows, tables.own, du, x.scale, **x.sizes("update_grads")
    )
    ends, tops = x.states(tables.blocks, x.k.dtype), x.states(tables.paths, torch.float32)
    sizes = x.sizes("state_grads")
    flags, ticket = x.flags(tables.paths, sizes["V_TILE"])
    kernels.state_grads_kernel[_per_path(x, sizes["V_TILE"])](
        grad, x.q, x.k, near, rest, made.erase, du, tables.rows, tables.own, ends, tops, flags, ticket,
        tables.order_up, tables.path_runs, tables.run_begin, tables.run_slot, tables.child_offsets, tables.children,
        tables.path_slot, x.scale, **sizes,
    )  # fmt: skip
    dq, slopes = torch.empty_like(x.q), x.rows(heads, 1, torch.float32)
    kernels.query_grads_kernel[x.per_group()](
        grad,
        x.q,
        x.k,
        near,
        rest,
        u,
        starts,
        tables.rows,
        tables.own,
        dq,
        slopes,
        x.scale,
        **x.sizes("query_grads"),
    )
    keys = x.rows(groups, x.k.shape[2], torch.float32)
    kernels.key_grads_kernel[x.per_group()](
        grad, x.q, x.k, near, rest, u, starts, ends, tables.rows, tables.own, keys, slopes, x.scale,
        **x.sizes("key_grads"),
    )  # fmt: skip
    if x.beta is None:
        return dq, *(_token_sums(*pair, None, tables) for pair in ((keys, x.k), (du, x.v), (slopes, x.gate)))
    dy, rates = x.rows(heads, x.v.shape[2]), x.rows(heads, 1, torch.float32)
    sizes = {
        name: value for name, value in x.sizes("value_grads").items() if name not in ("G", "D", "D_TILE")
    }
    kernels.value_grads_kernel[x.per_head()](made.solve, du, dy, **sizes)
    kernels.rule_grads_kernel[x.per_group()](
        x.k, x.v, x.beta, near, rest, u, starts, dy, tables.rows, keys, rates, slopes, **x.sizes("rule_grads")
    )
    dk, dv = _token_sums(keys, x.k, None, tables), _token_sums(dy, x.v, x.beta, tables)
    dgate, dbeta = _token_sums(slopes, x.gate, None, tables), _token_sums(rates, x.beta, None, tables)
    return dq, dk, dv, dgate, dbeta


def _token_sums(rows: Tensor, like: Tensor, factor: Tensor | None, tables: PathTables) -> Tensor:
    """Sum over the rows that hold each token, in fixed order, shaped as ``like`` [N, heads, ...], in its dtype."""
    from treecompile.runtime.kernels import tree_recurrence as kernels

    out = torch.empty_like(like)
    _, heads, size = rows.shape
    tile = min(1 << (heads - 1).bit_length(), max(1, 2048 // _padded(size, 1)))
    kernels.token_sums_kernel[(tables.tokens, -(-heads // tile))](
        rows,
        factor,
        tables.offsets,
        tables.held,
        out,
        HEADS=heads,
        SIZE=size,
        TILE=tile,
        FACTOR=factor is not None,
    )
    return out
