"""The head and its log-probabilities in one op: logits of packed rows exist only a chunk at a time.

Suffixes: H packed rows of a layout, M grid positions of its region, K positions that are kept, D features, V columns.

*Chain*: what the model does to the logits before it takes the log-softmax, as text: steps apart by blanks, in order.
``to:float32`` casts, ``div:0.7`` and ``mul:30.0`` scale (``div:factor`` by the scalar tensor that comes along),
``tanh`` is itself. Each step runs as captured, in the dtype it has there, so that the values are those of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treecompile.runtime.ops.attention_math import accumulation_dtype
from treecompile.runtime.ops.registry import define
from treecompile.runtime.ops.segment_sum import label_sum, segment_sum

__all__ = [
    "chain_dtype",
    "kept_rows",
    "selective_log_probs",
    "selective_log_probs_backward",
    "selective_log_probs_reference",
]

# Rows of one tile of the backward pass: enough for a matrix product, few enough to leave a tile its columns, which
# are a multiple of _TILE_COLUMNS.
_TILE_ROWS, _TILE_COLUMNS = 16384, 128
# Entries that are worked on at a time on the CPU, chunk or not: they stay in its cache.
_CPU_ENTRIES, _CPU_ROWS = 1 << 19, 2048

_HEAD = (
    "Tensor hidden, Tensor weight, Tensor? bias, "
    "Tensor row_index, Tensor labels, Tensor offsets, Tensor positions, Tensor? factor, "
)
_SETTINGS = "str chain, bool normalized, bool entropy"


def _on_device(x: Tensor) -> bool:
    """Whether to read a value on the host would wait for a device."""
    return x.is_cuda


# ---- the chain ----------------------------------------------------------------------------------------------------


def _steps(chain: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (step.partition(":") for step in chain.split())]


def _quantity(value: str, factor: Tensor | None) -> Any:
    return factor if value == "factor" else float(value)


def chain_dtype(chain: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype after a chain that starts in `dtype`.

    Example:
        >>> chain_dtype("div:0.7 to:float32", torch.bfloat16)
        torch.float32
    """
    for name, value in _steps(chain):
        if name == "to":
            dtype = getattr(torch, value)
    return dtype


def _apply(logits: Tensor, chain: str, factor: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """The chain's result, and what its adjoint needs: the results of ``tanh``, in order."""
    curves = []
    for name, value in _steps(chain):
        if name == "to":
            logits = logits.to(getattr(torch, value))
        elif name == "tanh":
            logits = logits.tanh()
            curves.append(logits)
        elif name == "mul":
            logits = logits * _quantity(value, factor)
        else:
            logits = logits / _quantity(value, factor)
    return logits, curves


def _only_widens(chain: str, dtype: torch.dtype) -> bool:
    """Whether a chain that starts in `dtype` changes no value: all of it casts to dtypes that hold what is cast."""
    for name, value in _steps(chain):
        target = getattr(torch, value, None) if name == "to" else None
        if target is None or torch.promote_types(dtype, target) != target:
            return False
        dtype = target
    return True


def _unapply(
    grad: Tensor, chain: str, factor: Tensor | None, dtype: torch.dtype, curves: list[Tensor]
) -> Tensor:
    """The adjoint of `_apply`: a gradient of the logits, in their dtype."""
    steps = _steps(chain)
    before = [dtype]
    for name, value in steps:
        before.append(getattr(torch, value) if name == "to" else before[-1])
    grad = grad.to(before[-1])
    for (name, value), start in zip(reversed(steps), reversed(before[:-1]), strict=True):
        if name == "to":
            grad = grad.to(start)
        elif name == "tanh":
            curve = curves.pop()
            grad = grad * (1 - curve * curve)
        elif name == "mul":
            grad = grad * _quantity(value, factor)
        else:
            grad = grad / _quantity(value, factor)
    return grad


# ---- forward ------------------------------------------------------------------------------------------------------


def kept_rows(hidden: Tensor, chunk: int) -> Any:
    """How many rows of logits the forward pass keeps for the backward pass: all that there are, if they fit a chunk.

    A graph that is compiled for all H compares H with the chunk when it is traced: it has one form for either case.

    Args:
        hidden: [H, D].
        chunk: rows of one chunk.

    Returns:
        H or 0.

    Example:
        >>> kept_rows(torch.ones(3, 2), 4), kept_rows(torch.ones(5, 2), 4)
        (3, 0)
    """
    return hidden.shape[0] if hidden.shape[0] <= chunk else 0


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_index: Tensor,
    labels: Tensor,
    offsets: Tensor,
    positions: Tensor,
    factor: Tensor | None,
    chain: str,
    normalized: bool,
    entropy: bool,
    keep: int,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities (or logits) of one label per grid position, from the packed rows before the head.

    Args:
        hidden: [H, D] packed rows, float.
        weight: [V, D] of the head, in hidden's dtype.
        bias: [V], or None.
        row_index: int64 [M], row of each grid position, -1 where dropped.
        labels: int64 [M], column to read; anything where dropped. Positions of one row may have different labels,
            or equal ones.
        offsets: int64 [H + 1], CSR offsets into `positions`.
        positions: int64 [K], kept grid positions by row, ascending.
        factor: a scalar without a gradient that the chain divides or multiplies by: a temperature that is a tensor.
        chain: what happens to the logits before the log-softmax; see the module.
        normalized: pick log-probabilities; else what the chain gives.
        entropy: return entropies.
        keep: H to keep the logits for the backward pass, 0 to compute them again there; see `kept_rows`.
        chunk: rows of logits that may exist at a time (the backward pass takes as many entries, in another shape).

    Returns:
        picked [M] in the dtype after the chain, 0 where dropped; the log-sum-exp of each row [H] and its entropy
        ([H], or [0] if not asked for), both in fp32 (fp64 for fp64); the kept logits [keep, V], not differentiable.

    Example:
        >>> row, label = torch.tensor([0, 0, -1]), torch.tensor([1, 0, -100])
        >>> offsets, kept = torch.tensor([0, 2]), torch.tensor([0, 1])
        >>> h, w = torch.ones(1, 2), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
        >>> selective_log_probs(h, w, None, row, label, offsets, kept, None, "", True, False, 0, 8)[0]
        tensor([-0.6931, -0.6931,  0.0000])

    Notes:
        Forward: H in chunks of rows. No tensor exceeds `chunk` x V entries; at most four of that size exist at a
        time. Backward: in tiles of at most as many entries (all of them, if the logits were kept), tall and narrow,
        up to 16,384 rows and all the columns that leaves: one tile then has the whole gradient of its rows of the
        weight, which needs no sum over chunks, and its share of the hidden rows' gradient is added up in fp32
        (fp64). The CPU works on smaller pieces of either, which stay in its cache. Sums have a fixed order: results
        repeat bit for bit.

        The logits are computed twice, one matrix product in four, only where they do not fit a chunk. Where they do,
        to keep them is as good: memory is not the matter, and the captured graph kept them, too.
    """
    rows, width = hidden.shape[0], weight.shape[0]
    dtype = chain_dtype(chain, weight.dtype)
    wide = accumulation_dtype(dtype)
    picked = hidden.new_zeros(row_index.shape, dtype=dtype)
    lse = hidden.new_empty((rows,), dtype=wide)
    spread = hidden.new_empty((rows if entropy else 0,), dtype=wide)
    kept = weight.new_empty((keep, width))
    block = chunk if _on_device(hidden) else max(1, _CPU_ENTRIES // width)
    exact = _only_widens(chain, weight.dtype)
    with torch._C._DisableAutocast():  # dtypes are those of the captured graph, whatever the mode here
        for first in range(0, rows, chunk):
            logits = F.linear(hidden[first : first + chunk], weight, bias)
            if keep and logits.shape[0] == rows:
                kept = logits
            elif keep:
                kept[first : first + chunk] = logits
            for start, part in enumerate(torch.split(logits, block)):
                start = first + start * block
                stop = start + part.shape[0]
                x = part if exact else _apply(part, chain, factor)[0]
                top, total, found_spread = _statistics(x, entropy, wide)
                torch.add(top, total, out=lse[start:stop])
                here = offsets[start : stop + 1]
                _pick(x, top, total, (row_index, labels, here, positions), start, normalized, picked)
                if entropy:
                    spread[start:stop] = found_spread
    return picked, lse, spread, kept


def _statistics(x: Tensor, entropy: bool, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Largest entry of each row (0 where that is infinite), log-sum-exp without it, entropy ([0] if not asked for)."""
    if x.is_cuda:
        from treecompile.runtime.kernels import log_probs as kernels

        return kernels.row_statistics(x, entropy, wide)
    x = x.to(wide)
    top = x.amax(-1)
    top = top.masked_fill_(top.isinf(), 0)
    shifted = x - top.unsqueeze(-1)
    total = shifted.exp().sum(-1).log_()
    if not entropy:
        return top, total, total[:0]
    logs = shifted.sub_(total.unsqueeze(-1))
    return top, total, logs.exp().mul_(logs).sum(-1).neg_()


def _pick(
    x: Tensor,
    top: Tensor,
    total: Tensor,
    picks: tuple[Tensor, ...],
    start: int,
    normalized: bool,
    picked: Tensor,
) -> None:
    """Write what the grid positions of some rows pick; the first of these rows is `start`."""
    row_index, labels, offsets, positions = picks
    if x.is_cuda:
        from treecompile.runtime.kernels import log_probs as kernels

        kernels.pick(x, top, total, (labels, offsets, positions), normalized, picked)
        return
    where = positions[int(offsets[0]) : int(offsets[-1])]
    at, column = row_index[where] - start, labels[where]
    if bool((column < 0).any()):  # indexing would count from the end
        raise IndexError(f"label {int(column.min())} is out of bounds for {x.shape[1]} columns")
    found = x[at, column].to(top.dtype)
    if normalized:
        found = (found - top[at]) - total[at]
    picked[where] = found.to(picked.dtype)


def _forward_fake(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row_index, chain, entropy, keep = rest[1], rest[6], rest[8], rest[9]
    dtype = chain_dtype(chain, weight.dtype)
    wide = accumulation_dtype(dtype)
    return (
        hidden.new_empty((row_index.shape[0],), dtype=dtype),
        hidden.new_empty((hidden.shape[0],), dtype=wide),
        hidden.new_empty((hidden.shape[0] if entropy else 0,), dtype=wide),
        weight.new_empty((keep, weight.shape[0])),
    )


# ---- backward -----------------------------------------------------------------------------------------------------


def _tiles(rows: int, width: int, entries: int, tall: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of [rows, width] of at most `tall` rows and `entries` entries, columns fastest."""
    tall = min(rows, tall, entries)
    narrow = min(width, max(1, entries // max(tall, 1)))
    # Matrix products of a width that is no multiple of 16 bytes run at a third of the rate.
    narrow = max(narrow - narrow % _TILE_COLUMNS, min(narrow, _TILE_COLUMNS)) if narrow < width else width
    for top in range(0, rows, max(tall, 1)):
        for left in range(0, width, narrow):
            yield slice(top, min(top + tall, rows)), slice(left, min(left + narrow, width))


class _Sum:
    """A gradient that tiles add to, in fp32 (fp64) unless each of its rows has one tile."""

    def __init__(
        self, shape: tuple[int, ...], needed: bool, once: bool, like: Tensor, wide: torch.dtype
    ) -> None:
        self.once, self.dtype = once, like.dtype
        make = like.new_empty if once else like.new_zeros
        self.sum = make(shape if needed else (0,), dtype=like.dtype if once else wide)

    def add(self, rows: slice, part: Tensor) -> None:
        if self.once:
            self.sum[rows] = part
        else:
            self.sum[rows] += part

    def total(self) -> Tensor:
        return self.sum.to(self.dtype)


def _labels_in(picks: tuple[Tensor, ...], tile: tuple[slice, slice]) -> Tensor:
    """[rows, columns] of a tile: what each position adds to the entry of its label."""
    grad, row_index, labels, offsets, positions = picks
    rows, columns = tile
    inside = (labels >= columns.start) & (labels < columns.stop)
    width = columns.stop - columns.start
    here = offsets[rows.start : rows.stop + 1]
    positions = positions[int(here[0]) : int(here[-1])]
    positions = positions[inside[positions]]
    index = torch.where(inside, labels - columns.start, 0)
    return label_sum(torch.where(inside, grad, 0), row_index - rows.start, index, here, positions, width)


def _entry_grads(
    x: Tensor,
    lse: Tensor,
    share: Tensor | None,
    grad_entropy: Tensor | None,
    spread: Tensor,
    picks: tuple[Tensor, ...] | None,
    tile: tuple[slice, slice],
    dtype: torch.dtype,
) -> Tensor:
    """[rows, columns] of a tile: the gradient of what the chain gives, `x`.

    Args:
        share: [H] of a row's probabilities in the gradient of its entries.
        picks: grad, row_index, labels, offsets and positions of what is picked.
        dtype: of the result.

    Other arguments as of `_backward`.
    """
    r, c = tile
    if x.is_cuda:
        from treecompile.runtime.kernels import log_probs as kernels

        some = tuple(None if v is None else v[r].contiguous() for v in (share, grad_entropy))
        here = None
        if picks is not None:
            grad, _, labels, offsets, positions = picks
            here = (grad, labels, offsets[r.start : r.stop + 1], positions)
        return kernels.logit_grads(x, lse[r], some[0], some[1], spread[r], here, c.start, dtype)
    logs = x.to(lse.dtype) - lse[r].unsqueeze(-1)
    dx = torch.zeros_like(logs) if picks is None else _labels_in(picks, tile)
    if grad_entropy is not None:
        slope = (logs + spread[r].unsqueeze(-1)).mul_(-grad_entropy[r].unsqueeze(-1))
        slope = slope if share is None else slope.add_(share[r].unsqueeze(-1))
        dx.add_(slope.mul_(logs.exp_()))
    elif share is not None:
        dx.add_(logs.exp_().mul_(share[r].unsqueeze(-1)))
    return dx.to(dtype)


def _backward(
    grad_picked: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_index: Tensor,
    labels: Tensor,
    offsets: Tensor,
    positions: Tensor,
    factor: Tensor | None,
    lse: Tensor,
    spread: Tensor,
    kept: Tensor,
    chain: str,
    normalized: bool,
    needs: list[bool],
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `selective_log_probs` by hidden, weight and bias; [0] for what `needs` leaves out.

    Args:
        grad_picked, grad_lse, grad_entropy: [M], [H], [H], None for what nothing reads.
        lse, spread, kept: what the forward pass gave; without kept logits they are computed again.
        needs: which of the three gradients are wanted.

    Other arguments as in the forward pass.
    """
    (rows, features), width = hidden.shape, weight.shape[0]
    wide = lse.dtype
    entries, tall = rows * width if kept.shape[0] else chunk * width, _TILE_ROWS
    if not _on_device(hidden):
        entries, tall = min(entries, _CPU_ENTRIES), min(tall, _CPU_ROWS)
    whole = list(_tiles(rows, width, entries, tall))
    one_top, one_left = (len({tile[i].start for tile in whole}) == 1 for i in (0, 1))
    by_hidden = _Sum((rows, features), needs[0], one_left, hidden, wide)
    by_weight = _Sum((width, features), needs[1], one_top, weight, wide)
    by_bias = _Sum((width,), needs[2], one_top, weight, wide)
    grad = None if grad_picked is None else grad_picked.to(wide)
    share = grad_lse  # of a row's probabilities in the gradient of its entries
    if grad is not None and normalized:
        total = segment_sum(grad, offsets, positions)
        share = -total if share is None else share - total
    exact = _only_widens(chain, weight.dtype)
    with torch._C._DisableAutocast():
        for tile in whole:
            r, c = tile
            some = None if bias is None else bias[c]
            logits = kept[r, c] if kept.shape[0] else F.linear(hidden[r], weight[c], some)
            x, curves = (logits, []) if exact else _apply(logits, chain, factor)
            del logits
            picks = None if grad is None else (grad, row_index, labels, offsets, positions)
            rest = (share, grad_entropy, spread, picks, tile, weight.dtype if exact else x.dtype)
            dx = _entry_grads(x, lse, *rest)
            del x
            if not exact:
                dx = _unapply(dx, chain, factor, weight.dtype, curves)
            if needs[0]:
                by_hidden.add(r, dx @ weight[c])
            if needs[1]:
                by_weight.add(c, dx.t() @ hidden[r])
            if needs[2]:
                by_bias.add(c, dx.sum(0, dtype=wide))
    return by_hidden.total(), by_weight.total(), by_bias.total()


def _backward_fake(
    grad_picked: Any, grad_lse: Any, grad_entropy: Any, hidden: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needs = rest[-2]
    return (
        hidden.new_empty(hidden.shape if needs[0] else (0,)),
        weight.new_empty(weight.shape if needs[1] else (0,)),
        weight.new_empty((weight.shape[0],) if needs[2] else (0,)),
    )


selective_log_probs = define(
    f"selective_log_probs({_HEAD}{_SETTINGS}, SymInt keep, int chunk) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
)
selective_log_probs_backward = define(
    "selective_log_probs_backward(Tensor? grad_picked, Tensor? grad_lse, Tensor? grad_entropy, "
    f"{_HEAD}Tensor lse, Tensor spread, Tensor kept, str chain, bool normalized, bool[] needs, int chunk) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8], *output[1:])
    ctx.chain, ctx.normalized, ctx.chunk = inputs[8], inputs[9], inputs[12]
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)


def _grads(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    settings = (ctx.chain, ctx.normalized, needs, ctx.chunk)
    found = selective_log_probs_backward(*grads[:3], *ctx.saved_tensors, *settings)
    return *(x if need else None for x, need in zip(found, needs, strict=True)), *(None,) * 10


torch.library.register_autograd("treecompile::selective_log_probs", _grads, setup_context=_save)


def selective_log_probs_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_index: Tensor,
    labels: Tensor,
    factor: Tensor | None,
    chain: str,
    normalized: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification of `selective_log_probs`: plain PyTorch with all logits, differentiable, for tests.

    Args and returns: as of the op, without what serves its chunks; the entropy is always returned.

    Example:
        >>> h, w = torch.zeros(1, 2), torch.ones(4, 2)
        >>> row, label = torch.tensor([0, -1]), torch.tensor([3, -100])
        >>> selective_log_probs_reference(h, w, None, row, label, None, "", True)[0]
        tensor([-1.3863,  0.0000])
    """
    x = _apply(F.linear(hidden, weight, bias), chain, factor)[0]
    logs = x.log_softmax(-1)
    values = logs if normalized else x
    rows = torch.cat([values, values.new_zeros((1, values.shape[1]))])[row_index]  # -1: the zeros
    picked = rows.gather(1, torch.where(row_index >= 0, labels, 0).unsqueeze(1)).squeeze(1)
    return picked, x.logsumexp(-1), -(logs.exp() * logs).sum(-1)
