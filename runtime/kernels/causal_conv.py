"""Triton kernels of `tree_causal_conv1d`, on rows of channels, one row a packed token.

Legend: N packed tokens, C channels, W taps, M odd tokens, F tokens that an odd token reads; tables of
`treecompile.runtime.ops.causal_conv_tables`. Taps are counted upwards here: 0 is the token itself.

A *walk* takes the packed tokens for a single row. Each program walks a run of tokens for a block of channels and keeps
the last W - 1 that it read in registers, so that values are read once, and W - 1 of them again where runs meet. That is
right for all but the odd tokens, which kernels with an index compute: in the forward pass over what the walk wrote
there; in the backward pass beforehand, and the walk leaves them out of its sums and adds their shares, ready-made.

Sums are fp32 and in a fixed order, no atomics: results repeat bit for bit. Addresses are 64 bits wide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from treecompile.runtime.ops.causal_conv_tables import ConvTables

__all__ = ["backward", "forward"]

# Channels of one program and of one thread. With four a thread, 16-bit and fp32 rows have one layout in registers.
BLOCK, CHANNELS = 512, 4
# Tokens of a run. It is halved while there are fewer programs: what is read twice, against an idle chip.
RUN, LEAST_RUN, PROGRAMS = 128, 16, 2048
# Tokens that a program loads before it computes, for memory parallelism.
FORWARD_STEP, BACKWARD_STEP, ODD_STEP = 8, 4, 2
# Reads of one token by odd ones that are loaded at once; for long lists, also the warps and channels of a program.
READS = 4
MANY_READS, MANY_WARPS, MANY_BLOCK = 256, 8, 32
# Arguments that differ from batch to batch: one compilation serves all of their values.
VARYING = ("tokens", "count", "run", "number")


@triton.jit
def _program(channels, BLOCK: tl.constexpr):
    """Number of the run, and channels, of this program."""
    blocks = tl.cdiv(channels, BLOCK)
    block = tl.program_id(0) % blocks
    return tl.program_id(0) // blocks, block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _row(base, i, stride, channel, mask):
    """The channels of the i-th token from `base` on, zeros where masked."""
    return tl.load(base + i * stride + channel, mask=mask, other=0.0)


@triton.jit
def _weights(weight, channel, inside, channel_stride, tap_stride, W: tl.constexpr):
    """The weight of each tap, fp32."""
    taps = ()
    for j in tl.static_range(W):
        at = weight + channel * channel_stride + (W - 1 - j) * tap_stride
        taps = taps + (tl.load(at, mask=inside, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _bias(bias, channel, inside, BIAS: tl.constexpr):
    if BIAS:
        return tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros_like(channel).to(tl.float32)


@triton.jit
def _convolved(values, taps, start, W: tl.constexpr):
    """`start` and the products of all taps, added in turn."""
    for j in tl.static_range(W):
        start += taps[j] * values[j]
    return start


@triton.jit
def _sigmoid(x):
    """Two units in the last place of fp32, without the scaling that a division brings."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * _sigmoid(x)
    else:
        return x


@triton.jit
def _through_activation(grad, x, ACTIVATION: tl.constexpr):
    """The gradient of x from that of the activated x."""
    if ACTIVATION == "silu":
        s = _sigmoid(x)
        return grad * (s * (1.0 + x * (1.0 - s)))
    else:
        return grad


@triton.jit
def _before(base, first, stride, channel, inside, W: tl.constexpr):
    """The W - 1 tokens before a run that begins at `base`, the nearest one first, fp32."""
    window = ()
    for j in tl.static_range(1, W):
        window = window + (_row(base, -j, stride, channel, inside & (first >= j)).to(tl.float32),)
    return window


# ---- forward ----


@triton.jit(do_not_specialize=VARYING)
def _walk_kernel(
    x, weight, bias, out, tokens, channels, run, x_stride, channel_stride, tap_stride,
    W: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number, channel = _program(channels, BLOCK)
    inside = channel < channels
    first = number * run
    count = tl.minimum(run, tokens - first)
    x += first.to(tl.int64) * x_stride
    out += first.to(tl.int64) * channels
    taps = _weights(weight, channel, inside, channel_stride, tap_stride, W)
    start = _bias(bias, channel, inside, BIAS)
    window = _before(x, first, x_stride, channel, inside, W)
    for at in range(0, count, STEP):
        fresh = ()
        for i in tl.static_range(STEP):
            fresh = fresh + (_row(x, i, x_stride, channel, inside & (at + i < count)),)
        for i in tl.static_range(STEP):
            values = (fresh[i].to(tl.float32),) + window
            result = _activated(_convolved(values, taps, start, W), ACTIVATION)
            tl.store(
                out + i * channels + channel, result.to(out.dtype.element_ty), mask=inside & (at + i < count)
            )
            window = values[: W - 1]
        x += STEP * x_stride
        out += STEP * channels


@triton.jit
def _gathered(x, ancestors, row, count, stride, channel, inside, W: tl.constexpr):
    """What the odd token `row` reads, by tap, as it is stored; zeros where there is no such ancestor or token."""
    values = ()
    for j in tl.static_range(W):
        n = tl.load(ancestors + j * count + row, mask=row < count, other=-1)
        values = values + (_row(x, n, stride, channel, inside & (n >= 0)),)
    return values


@triton.jit
def _widened(values, W: tl.constexpr):
    wide = ()
    for j in tl.static_range(W):
        wide = wide + (values[j].to(tl.float32),)
    return wide


@triton.jit(do_not_specialize=VARYING)
def _odd_kernel(
    x, weight, bias, odd, ancestors, out, count, channels, run, x_stride, channel_stride, tap_stride,
    W: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number, channel = _program(channels, BLOCK)
    inside = channel < channels
    taps = _weights(weight, channel, inside, channel_stride, tap_stride, W)
    start = _bias(bias, channel, inside, BIAS)
    first = number.to(tl.int64) * run
    for at in range(first, tl.minimum(first + run, count), STEP):
        read = ()
        tokens = ()
        for i in tl.static_range(STEP):
            read = read + (_gathered(x, ancestors, at + i, count, x_stride, channel, inside, W),)
            tokens = tokens + (tl.load(odd + at + i, mask=at + i < count, other=0),)
        for i in tl.static_range(STEP):
            result = _activated(_convolved(_widened(read[i], W), taps, start, W), ACTIVATION)
            live = inside & (at + i < count)
            tl.store(out + tokens[i] * channels + channel, result.to(out.dtype.element_ty), mask=live)


# ---- backward ----


@triton.jit
def _zeros(W: tl.constexpr, BLOCK: tl.constexpr):
    """Sums for the gradients of the taps and the bias."""
    nothing = tl.zeros([BLOCK], tl.float32)
    dtaps = ()
    for _ in tl.static_range(W):
        dtaps = dtaps + (nothing,)
    return dtaps, nothing


@triton.jit
def _add_to_sums(dtaps, dbias, d, values, W: tl.constexpr, BIAS: tl.constexpr):
    sums = ()
    for j in tl.static_range(W):
        sums = sums + (dtaps[j] + d * values[j],)
    if BIAS:
        dbias += d
    return sums, dbias


@triton.jit
def _store_sums(partial, number, channel, inside, channels, dtaps, dbias, W: tl.constexpr):
    """Gradients of the weights of a run in the order that weights are stored in, and of the bias: [W + 1, C]."""
    base = partial + number.to(tl.int64) * (W + 1) * channels + channel
    for j in tl.static_range(W):
        tl.store(base + (W - 1 - j) * channels, dtaps[j], mask=inside)
    tl.store(base + W * channels, dbias, mask=inside)


@triton.jit(do_not_specialize=VARYING)
def _odd_grads_kernel(
    grad, x, weight, bias, odd, ancestors, pre_grads, partial, count, channels, run, grad_stride, x_stride,
    channel_stride, tap_stride,
    W: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the odd tokens' pre-activations [M, C], and the share of a run in those of weights and bias."""
    number, channel = _program(channels, BLOCK)
    inside = channel < channels
    taps = _weights(weight, channel, inside, channel_stride, tap_stride, W)
    start = _bias(bias, channel, inside, BIAS)
    dtaps, dbias = _zeros(W, BLOCK)
    first = number.to(tl.int64) * run
    for at in range(first, tl.minimum(first + run, count), STEP):
        read = ()
        grads = ()
        for i in tl.static_range(STEP):
            read = read + (_gathered(x, ancestors, at + i, count, x_stride, channel, inside, W),)
            n = tl.load(odd + at + i, mask=at + i < count, other=0)
            grads = grads + (_row(grad, n, grad_stride, channel, inside & (at + i < count)),)
        for i in tl.static_range(STEP):
            values = _widened(read[i], W)
            pre = _convolved(values, taps, start, W)
            d = _through_activation(grads[i].to(tl.float32), pre, ACTIVATION)
            dtaps, dbias = _add_to_sums(dtaps, dbias, d, values, W, BIAS)
            tl.store(pre_grads + (at + i) * channels + channel, d, mask=inside & (at + i < count))
    _store_sums(partial, number, channel, inside, channels, dtaps, dbias, W)


@triton.jit(do_not_specialize=VARYING)
def _shares_kernel(
    pre_grads, weight, offsets, readers, distances, shares, number, channels, channel_stride, tap_stride,
    W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What odd tokens add to the gradient of the tokens that they read, from the `number`-th on: [F, C]."""
    row, channel = _program(channels, BLOCK)
    number += row
    inside = channel < channels
    taps = _weights(weight, channel, inside, channel_stride, tap_stride, W)
    at = tl.load(offsets + number)
    end = tl.load(offsets + number + 1)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    while at < end:
        read = at + tl.arange(0, ROWS)
        reader = tl.load(readers + read, mask=read < end, other=0).to(tl.int64)
        distance = tl.load(distances + read, mask=read < end, other=0)
        live = (read < end)[:, None] & inside[None, :]
        d = tl.load(pre_grads + reader[:, None] * channels + channel[None, :], mask=live, other=0.0)
        factor = tl.zeros([ROWS, BLOCK], tl.float32)
        for j in tl.static_range(W):
            factor = tl.where((distance == j)[:, None], taps[j][None, :], factor)
        total += d * factor
        at += ROWS
    tl.store(shares + number.to(tl.int64) * channels + channel, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _loaded(
    x, grad, notes, left, x_stride, grad_stride, channel, inside, FORKS: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """What a walk reads of the next COUNT tokens, of which `left` are there: x, grad and note, as they are stored."""
    values = ()
    grads = ()
    marks = ()
    for i in tl.static_range(COUNT):
        values = values + (_row(x, i, x_stride, channel, inside & (i < left)),)
        grads = grads + (_row(grad, i, grad_stride, channel, inside & (i < left)),)
        if FORKS:
            marks = marks + (tl.load(notes + i, mask=i < left, other=1),)
        else:
            marks = marks + (0,)
    return values, grads, marks


@triton.jit
def _pre_grad(
    grad, mark, values, taps, start, W: tl.constexpr, FORKS: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """The gradient of a token's pre-activation, zero for odd tokens."""
    d = _through_activation(grad.to(tl.float32), _convolved(values, taps, start, W), ACTIVATION)
    if FORKS:
        d = tl.where(mark % 2 == 0, d, 0.0)
    return d


@triton.jit
def _give(d, taps, sums, dx, mask, W: tl.constexpr):
    """Add what a token gives to those that it reads. The farthest of them is complete then, and written."""
    given = ()
    for j in tl.static_range(W):
        given = given + (sums[j] + taps[j] * d,)
    tl.store(dx, given[W - 1].to(dx.dtype.element_ty), mask=mask)
    return given[: W - 1]


@triton.jit
def _walk_grads(
    grad, x, notes, shares, dx, window, taps, start, left, channels, run, grad_stride, x_stride, channel, inside,
    W: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, FORKS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk one run, whose first token the pointers are at; return the gradients of the taps and the bias."""
    dtaps, dbias = _zeros(W, BLOCK)
    pending, nothing = _zeros(W - 1, BLOCK)  # the gradients of the W - 1 tokens before, so far
    count = tl.minimum(run, left)
    for at in range(0, count, STEP):
        fresh, grads, marks = _loaded(
            x, grad, notes, count - at, x_stride, grad_stride, channel, inside, FORKS, STEP
        )
        for i in tl.static_range(STEP):
            values = (fresh[i].to(tl.float32),) + window
            d = _pre_grad(grads[i], marks[i], values, taps, start, W, FORKS, ACTIVATION)
            dtaps, dbias = _add_to_sums(dtaps, dbias, d, values, W, BIAS)
            share = nothing
            if FORKS:
                row = (marks[i] // 2 - 1).to(tl.int64)
                share = _row(shares, row, channels, channel, inside & (marks[i] > 1))
            done = at + i - (W - 1)
            complete = inside & (done >= 0) & (done < count)
            pending = _give(d, taps, (share,) + pending, dx + (i - (W - 1)) * channels + channel, complete, W)
            window = values[: W - 1]
        x += STEP * x_stride
        grad += STEP * grad_stride
        dx += STEP * channels
        notes += STEP
    # What the first tokens of the next run give to the last ones of this one.
    at = tl.cdiv(count, STEP) * STEP
    fresh, grads, marks = _loaded(
        x, grad, notes, left - at, x_stride, grad_stride, channel, inside, FORKS, W - 1
    )
    for i in tl.static_range(W - 1):
        values = (fresh[i].to(tl.float32),) + window
        d = _pre_grad(grads[i], marks[i], values, taps, start, W, FORKS, ACTIVATION)
        done = at + i - (W - 1)
        complete = inside & (done >= 0) & (done < count)
        pending = _give(d, taps, (nothing,) + pending, dx + (i - (W - 1)) * channels + channel, complete, W)
        window = values[: W - 1]
    return dtaps, dbias


@triton.jit(do_not_specialize=VARYING)
def _walk_grads_kernel(
    grad, x, weight, bias, notes, shares, dx, partial, tokens, channels, run, grad_stride, x_stride,
    channel_stride, tap_stride,
    W: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, FORKS: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and the share of a run in those of weights and bias. FORKS: there are odd tokens."""
    number, channel = _program(channels, BLOCK)
    inside = channel < channels
    first = number * run
    left = tokens - first
    x += first.to(tl.int64) * x_stride
    grad += first.to(tl.int64) * grad_stride
    notes += first
    dx += first.to(tl.int64) * channels
    taps = _weights(weight, channel, inside, channel_stride, tap_stride, W)
    start = _bias(bias, channel, inside, BIAS)
    window = _before(x, first, x_stride, channel, inside, W)
    forks = False
    if FORKS:
        near = tl.arange(0, SPAN)
        forks = tl.max(tl.load(notes + near, mask=near < tl.minimum(run + W - 1, left), other=0), axis=0) > 0
    if forks:
        dtaps, dbias = _walk_grads(
            grad, x, notes, shares, dx, window, taps, start, left, channels, run, grad_stride, x_stride, channel,
            inside, W, BIAS, ACTIVATION, True, STEP, BLOCK,
        )  # fmt: skip
    else:
        dtaps, dbias = _walk_grads(
            grad, x, notes, shares, dx, window, taps, start, left, channels, run, grad_stride, x_stride, channel,
            inside, W, BIAS, ACTIVATION, False, STEP, BLOCK,
        )  # fmt: skip
    _store_sums(partial, number, channel, inside, channels, dtaps, dbias, W)


# ---- launches ----


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, tables: ConvTables, activation: str) -> Tensor:
    """Convolve the tokens of a tree with their ancestors.

    Args:
        x: [N, C], fp32, bf16 or fp16, channels adjacent.
        weight: [C, W] of x's dtype, W at most 8: what a walk keeps for each tap must fit in registers.
        bias: [C] or None.
        tables: of the tree and W.
        activation: "" or "silu".

    Returns:
        [N, C] contiguous, in x's dtype.

    Example:
        >>> forward(x, weight, None, tables, "silu")                            # doctest: +SKIP
    """
    (tokens, channels), taps = x.shape, weight.shape[1]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    given = (x, weight, weight if bias is None else bias.contiguous())
    strides = (x.stride(0), *weight.stride())
    options, blocks = _options(channels, taps, bias is not None, activation)
    run = _run(tokens, blocks, LEAST_RUN)
    grid = (triton.cdiv(tokens, run) * blocks,)
    _walk_kernel[grid](*given, out, tokens, channels, run, *strides, STEP=FORWARD_STEP, **options)
    odd = tables.odd.shape[0]
    if odd:
        run = _run(odd, blocks, ODD_STEP)
        grid = (triton.cdiv(odd, run) * blocks,)
        where = (tables.odd, tables.ancestors, out, odd)
        _odd_kernel[grid](*given, *where, channels, run, *strides, STEP=ODD_STEP, **options)
    return out


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tables: ConvTables, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward` by x, weight and bias.

    Args:
        grad: [N, C] of x's dtype, channels adjacent.
        x, weight, bias, tables, activation: as there.

    Returns:
        dx [N, C] contiguous in x's dtype; dweight [C, W] and dbias [C] in fp32, dbias zero where there is no bias.

    Example:
        >>> backward(grad, x, weight, None, tables, "silu")                     # doctest: +SKIP

    Notes:
        Weights and bias are summed over the tokens of a run by the program that walks it, then over the runs.
    """
    (tokens, channels), taps = x.shape, weight.shape[1]

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    dx = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if not dx.numel():
        return dx, empty(channels, taps).zero_(), empty(channels).zero_()
    given = (grad, x, weight, weight if bias is None else bias.contiguous())
    strides = (grad.stride(0), x.stride(0), *weight.stride())
    options, blocks = _options(channels, taps, bias is not None, activation)
    odd, reads = tables.odd.shape[0], tables.shares
    run, odd_run = _run(tokens, blocks, LEAST_RUN), _run(odd, blocks, ODD_STEP)
    runs, odd_runs = triton.cdiv(tokens, run), triton.cdiv(odd, odd_run)
    partial = empty(runs + odd_runs, taps + 1, channels)
    shares = empty(reads.offsets.shape[0] - 1, channels)
    if odd:
        pre_grads = empty(odd, channels)
        where = (tables.odd, tables.ancestors, pre_grads, partial[runs:], odd)
        _odd_grads_kernel[(odd_runs * blocks,)](
            *given, *where, channels, odd_run, *strides, STEP=ODD_STEP, **options
        )
        rows, given_reads = shares.shape[0], (reads.offsets, reads.readers, reads.distances)
        narrow = min(options["BLOCK"], MANY_BLOCK)
        for first, last, at_once, block, warps in (
            (0, reads.long, MANY_READS, narrow, MANY_WARPS),
            (reads.long, rows, READS, options["BLOCK"], options["num_warps"]),
        ):
            if last > first:
                _shares_kernel[((last - first) * triton.cdiv(channels, block),)](
                    pre_grads, weight, *given_reads, shares, first, channels, *weight.stride(),
                    W=taps, ROWS=at_once, BLOCK=block, num_warps=warps,
                )  # fmt: skip
    _walk_grads_kernel[(runs * blocks,)](
        *given, reads.notes, shares, dx, partial, tokens, channels, run, *strides,
        FORKS=odd > 0, STEP=BACKWARD_STEP, SPAN=triton.next_power_of_2(RUN + taps), **options,
    )  # fmt: skip
    sums = partial.sum(0)
    return dx, sums[:taps].t(), sums[taps]


def _options(channels: int, taps: int, bias: bool, activation: str) -> tuple[dict[str, Any], int]:
    """Constants of all kernels that work on blocks of channels, and how many blocks there are."""
    block = min(BLOCK, triton.next_power_of_2(max(channels, 32 * CHANNELS)))
    warps = block // (32 * CHANNELS)
    options = {"W": taps, "BIAS": bias, "ACTIVATION": activation, "BLOCK": block, "num_warps": warps}
    return options, triton.cdiv(channels, block)


def _run(tokens: int, blocks: int, least: int) -> int:
    """Tokens of one program, at least so many."""
    run = RUN
    while run > least and triton.cdiv(tokens, run) * blocks < PROGRAMS:
        run //= 2
    return run
