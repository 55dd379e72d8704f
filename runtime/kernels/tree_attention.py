"""Triton kernels of tree attention: forward, dQ by query block, dK and dV by key block.

A query block is TOKENS packed tokens of HEADS query heads that share one K/V head: rows ``head * TOKENS + token``.
Its far keys all lie on one path, the ancestors of its first token (`treecompile.runtime.ops.attention_lists`):
tiles of KEYS consecutive ancestors that all its queries see come first, without any mask; what is left, its own
tokens included, comes packed by index and masked.

Columns of queries and keys come in one or two blocks, QK_PAD and QK_REST of them, so that a head size of 192 costs
192 columns and not 256: a tuple of one or two tensors.

Sums are fp32 and in a fixed order, no atomics: results repeat bit for bit. Addresses are 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["delta_kernel", "dkv_kernel", "dq_kernel", "forward_kernel", "share_sum_kernel"]

# Each kernel's logits are base 2: scale carries log2(e). With a softcap, `scale` is 2 log2(e) scale / softcap, what
# tanh wants, and `cap` is softcap log2(e).


@triton.jit
def _gather(base, rows, valid, stride, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Rows of a matrix, zeros where not valid and past SIZE."""
    feature = tl.arange(0, PAD)
    at = base + rows.to(tl.int64)[:, None] * stride + feature[None, :]
    if PAD == SIZE:
        return tl.load(at, mask=valid[:, None], other=0.0)
    return tl.load(at, mask=valid[:, None] & (feature < SIZE)[None, :], other=0.0)


@triton.jit
def _query(base, head, n, live, head_stride, token_stride, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Rows (head, token) of a [heads, tokens, SIZE] tensor; zeros where not live and past SIZE."""
    feature = tl.arange(0, PAD)
    at = base + (head * head_stride + n.to(tl.int64) * token_stride)[:, None] + feature[None, :]
    return tl.load(at, mask=live[:, None] & (feature < SIZE)[None, :], other=0.0)


@triton.jit
def _tile(
    descriptor,
    base,
    head,
    start,
    tokens,
    stride,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
):
    """ROWS consecutive tokens of one head, columns from FIRST on: by the copy engine, or from the head's `base`."""
    if TMA:
        return descriptor.load([head, start, FIRST]).reshape(ROWS, PAD)
    rows = start + tl.arange(0, ROWS)
    return _gather(base + FIRST, rows, rows < tokens, stride, SIZE - FIRST, PAD)


# -- column blocks --


@triton.jit
def _gather_blocks(base, rows, valid, stride, SIZE: tl.constexpr, PAD: tl.constexpr, REST: tl.constexpr):
    """`_gather` by column blocks."""
    if REST:
        first = _gather(base, rows, valid, stride, PAD, PAD)
        return first, _gather(base + PAD, rows, valid, stride, SIZE - PAD, REST)
    else:
        return (_gather(base, rows, valid, stride, SIZE, PAD),)


@triton.jit
def _query_blocks(
    base,
    head,
    n,
    live,
    head_stride,
    token_stride,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    REST: tl.constexpr,
):
    """`_query` by column blocks."""
    if REST:
        first = _query(base, head, n, live, head_stride, token_stride, PAD, PAD)
        return first, _query(base + PAD, head, n, live, head_stride, token_stride, SIZE - PAD, REST)
    else:
        return (_query(base, head, n, live, head_stride, token_stride, SIZE, PAD),)


@triton.jit
def _tile_blocks(
    descriptor,
    rest,
    base,
    head,
    start,
    tokens,
    stride,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
):
    """`_tile` by column blocks, each with a descriptor of its own."""
    if REST:
        first = _tile(descriptor, base, head, start, tokens, stride, 0, PAD, PAD, ROWS, TMA)
        return first, _tile(rest, base, head, start, tokens, stride, PAD, SIZE, REST, ROWS, TMA)
    else:
        return (_tile(descriptor, base, head, start, tokens, stride, 0, SIZE, PAD, ROWS, TMA),)


@triton.jit
def _boxes(descriptor, rest, head, start, PAD: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr):
    """Consecutive tokens of consecutive heads by the copy engine, as rows (head, token)."""
    first = descriptor.load([head, start, 0]).reshape(ROWS, PAD)
    if REST:
        return first, rest.load([head, start, PAD]).reshape(ROWS, REST)
    else:
        return (first,)


@triton.jit
def _zero_blocks(ROWS: tl.constexpr, PAD: tl.constexpr, REST: tl.constexpr):
    if REST:
        return tl.zeros([ROWS, PAD], tl.float32), tl.zeros([ROWS, REST], tl.float32)
    else:
        return (tl.zeros([ROWS, PAD], tl.float32),)


@triton.jit
def _dot_blocks(a, b):
    """a b^T, summed over the columns of both."""
    s = _dot(a[0], b[0].T)
    if len(a) > 1:
        s = _add_dot(a[1], b[1].T, s)
    return s


@triton.jit
def _add_dot_blocks(a, b, total):
    """total + a b, by columns of b."""
    if len(b) > 1:
        return _add_dot(a, b[0], total[0]), _add_dot(a, b[1], total[1])
    else:
        return (_add_dot(a, b[0], total[0]),)


@triton.jit
def _store_blocks(
    base, offset, blocks, factor, live, SIZE: tl.constexpr, PAD: tl.constexpr, REST: tl.constexpr
):
    """Store rows [*, SIZE] times a factor; `offset` is where each starts."""
    feature = tl.arange(0, PAD)
    where = base + offset[:, None] + feature[None, :]
    mask = live[:, None] & (feature < SIZE)[None, :]
    tl.store(where, (blocks[0] * factor).to(base.dtype.element_ty), mask=mask)
    if REST:
        feature = PAD + tl.arange(0, REST)
        where = base + offset[:, None] + feature[None, :]
        mask = live[:, None] & (feature < SIZE)[None, :]
        tl.store(where, (blocks[1] * factor).to(base.dtype.element_ty), mask=mask)


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _add_dot(a, b, total):
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _tanh(x):
    """tanh(x / (2 log2(e))): never overflows to NaN, absolute error one rounding of 1."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x))


@triton.jit
def _sees(n, key, end):
    """Whether key <= n < end, for n >= 0; end 0 where there is no key.

    One comparison, of unsigned numbers: worth it where a thread has few keys and many queries.
    """
    return (n - key).to(tl.uint32, bitcast=True) < tl.maximum(end - key, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _softmax(top, total, s, visible, scale, cap, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """One step of the running softmax: weights, the factor on what was summed before, new maximum and total."""
    if SOFTCAP:
        s = cap * _tanh(s * scale)
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    if SOFTCAP:
        new = tl.maximum(top, tl.max(s, 1))
    else:
        new = tl.maximum(top, tl.max(s, 1) * scale)
    shift = new
    if MASKED:
        # A row that has seen nothing yet: exp2(-inf - 0) = 0.
        shift = tl.where(new == float("-inf"), 0.0, new)
    if SOFTCAP:
        p = tl.exp2(s - shift[:, None])
    else:
        p = tl.exp2(s * scale - shift[:, None])
    fade = tl.exp2(top - shift)
    return p, fade, new, total * fade + tl.sum(p, 1)


@triton.jit
def _weights(s, lse, visible, scale, cap, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """Softmax weights from logits and the final log-sum-exp, and the slope of the softcap (1 without)."""
    slope = 1.0
    if SOFTCAP:
        bend = _tanh(s * scale)
        slope = 1.0 - bend * bend
        p = tl.exp2(cap * bend - lse)
    else:
        p = tl.exp2(s * scale - lse)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    return p, slope


@triton.jit
def _next_tile(start, left, run, runs, KEYS: tl.constexpr):
    """Step to the next full tile: further along the run, or to the first tile of the next one."""
    left -= 1
    run += (left == 0).to(tl.int32)
    ahead = tl.load(runs + 2 * run)
    count = tl.load(runs + 2 * run + 1)
    start = tl.where(left == 0, ahead, start + KEYS)
    left = tl.where(left == 0, count, left)
    return start, left, run


@triton.jit(do_not_specialize=["tokens", "window"])
def forward_kernel(
    q,
    k,
    v,
    k_descriptor,
    k_rest,
    v_descriptor,
    out,
    lse,
    sinks,
    subtree_end,
    column,
    order,
    run_offsets,
    runs,
    full_tiles,
    index_offsets,
    index,
    tokens,
    q_head,
    q_token,
    k_head,
    k_token,
    v_head,
    v_token,
    scale,
    cap,
    window,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    QK: tl.constexpr,
    QK_PAD: tl.constexpr,
    QK_REST: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    TMA: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    ROWS: tl.constexpr = HEADS * TOKENS
    block = tl.load(order + tl.program_id(0))
    part = tl.program_id(1)
    kv = part // (GROUP // HEADS)
    row = tl.arange(0, ROWS)
    head = (part * HEADS + row // TOKENS).to(tl.int64)
    n = block * TOKENS + row % TOKENS
    live = n < tokens
    k += kv.to(tl.int64) * k_head
    v += kv.to(tl.int64) * v_head
    qs = _query_blocks(q, head, n, live, q_head, q_token, QK, QK_PAD, QK_REST)
    acc = tl.zeros([ROWS, V_PAD], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    run = tl.load(run_offsets + block)
    start = tl.load(runs + 2 * run)
    left = tl.load(runs + 2 * run + 1)
    for _ in range(tl.load(full_tiles + block)):
        ks = _tile_blocks(k_descriptor, k_rest, k, kv, start, tokens, k_token, QK, QK_PAD, QK_REST, KEYS, TMA)
        s = _dot_blocks(qs, ks)
        p, fade, top, total = _softmax(top, total, s, live, scale, cap, SOFTCAP, False)
        vs = _tile(v_descriptor, v, kv, start, tokens, v_token, 0, V, V_PAD, KEYS, TMA)
        acc = _add_dot(p.to(vs.dtype), vs, acc * fade[:, None])
        # The next step is known one iteration early: a load that waits for one of its own iteration is not fetched
        # ahead.
        start, left, run = _next_tile(start, left, run, runs, KEYS)

    if WINDOW:
        at = tl.load(column + n, mask=live, other=0)
    for begin in tl.range(
        tl.load(index_offsets + block), tl.load(index_offsets + block + 1), KEYS, num_stages=MASKED_STAGES
    ):
        key = tl.load(index + begin + tl.arange(0, KEYS))
        real = key >= 0
        end = tl.load(subtree_end + key, mask=real, other=0)
        ks = _gather_blocks(k, key, real, k_token, QK, QK_PAD, QK_REST)
        s = _dot_blocks(qs, ks)
        visible = (key[None, :] <= n[:, None]) & (n[:, None] < end[None, :])
        if WINDOW:
            key_at = tl.load(column + key, mask=real, other=0)
            visible = visible & (at[:, None] - key_at[None, :] < window)
        vs = _gather(v, key, real, v_token, V, V_PAD)
        p, fade, top, total = _softmax(top, total, s, visible, scale, cap, SOFTCAP, True)
        acc = _add_dot(p.to(vs.dtype), vs, acc * fade[:, None])

    blind = top == float("-inf")
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        shift = tl.where(blind, 0.0, tl.maximum(top, sink))
        fade = tl.exp2(top - shift)
        total = total * fade + tl.exp2(sink - shift)
        acc = acc * fade[:, None]
        top = shift
    total = tl.where(blind, 1.0, total)
    acc = acc / total[:, None]
    natural = tl.where(blind, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse + head * tokens + n, natural, mask=live)
    feature = tl.arange(0, V_PAD)
    where = out + (head * tokens + n)[:, None] * V + feature[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=live[:, None] & (feature < V)[None, :])


@triton.jit(do_not_specialize=["tokens", "span"])
def delta_kernel(
    grad,
    out,
    lse,
    delta,
    lse2,
    tokens,
    span,
    grad_head,
    grad_token,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """rowsum(grad * out), and the log-sum-exp in base 2, huge where a query sees nothing; zeros behind the tokens."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    live = n < tokens
    d_out = _gather(grad + head * grad_head, n, live, grad_token, V, V_PAD).to(tl.float32)
    o = _gather(out + head * tokens * V, n, live, V, V, V_PAD).to(tl.float32)
    tl.store(delta + head * span + n, tl.sum(d_out * o, 1), mask=n < span)
    natural = tl.load(lse + head * tokens + n, mask=live, other=0.0)
    base2 = tl.where(natural == float("-inf"), 1e30, natural * 1.4426950408889634)
    tl.store(lse2 + head * span + n, base2, mask=n < span)


@triton.jit(do_not_specialize=["tokens", "span", "window"])
def dq_kernel(
    q,
    k,
    v,
    grad,
    k_descriptor,
    k_rest,
    v_descriptor,
    dq,
    lse2,
    delta,
    subtree_end,
    column,
    order,
    run_offsets,
    runs,
    full_tiles,
    index_offsets,
    index,
    tokens,
    span,
    q_head,
    q_token,
    k_head,
    k_token,
    v_head,
    v_token,
    grad_head,
    grad_token,
    scale,
    cap,
    window,
    factor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    QK: tl.constexpr,
    QK_PAD: tl.constexpr,
    QK_REST: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    TMA: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    ROWS: tl.constexpr = HEADS * TOKENS
    block = tl.load(order + tl.program_id(0))
    part = tl.program_id(1)
    kv = part // (GROUP // HEADS)
    row = tl.arange(0, ROWS)
    head = (part * HEADS + row // TOKENS).to(tl.int64)
    n = block * TOKENS + row % TOKENS
    live = n < tokens
    k += kv.to(tl.int64) * k_head
    v += kv.to(tl.int64) * v_head
    qs = _query_blocks(q, head, n, live, q_head, q_token, QK, QK_PAD, QK_REST)
    d_out = _query(grad, head, n, live, grad_head, grad_token, V, V_PAD)
    log_sum = tl.load(lse2 + head * span + n)
    mean = tl.load(delta + head * span + n)
    acc = _zero_blocks(ROWS, QK_PAD, QK_REST)

    run = tl.load(run_offsets + block)
    start = tl.load(runs + 2 * run)
    left = tl.load(runs + 2 * run + 1)
    for _ in range(tl.load(full_tiles + block)):
        ks = _tile_blocks(k_descriptor, k_rest, k, kv, start, tokens, k_token, QK, QK_PAD, QK_REST, KEYS, TMA)
        s = _dot_blocks(qs, ks)
        vs = _tile(v_descriptor, v, kv, start, tokens, v_token, 0, V, V_PAD, KEYS, TMA)
        dp = _dot(d_out, vs.T)
        p, slope = _weights(s, log_sum[:, None], live, scale, cap, SOFTCAP, False)
        ds = p * (dp - mean[:, None]) * slope
        acc = _add_dot_blocks(ds.to(ks[0].dtype), ks, acc)
        start, left, run = _next_tile(start, left, run, runs, KEYS)

    if WINDOW:
        at = tl.load(column + n, mask=live, other=0)
    for begin in tl.range(
        tl.load(index_offsets + block), tl.load(index_offsets + block + 1), KEYS, num_stages=MASKED_STAGES
    ):
        key = tl.load(index + begin + tl.arange(0, KEYS))
        real = key >= 0
        end = tl.load(subtree_end + key, mask=real, other=0)
        ks = _gather_blocks(k, key, real, k_token, QK, QK_PAD, QK_REST)
        s = _dot_blocks(qs, ks)
        visible = (key[None, :] <= n[:, None]) & (n[:, None] < end[None, :])
        if WINDOW:
            key_at = tl.load(column + key, mask=real, other=0)
            visible = visible & (at[:, None] - key_at[None, :] < window)
        vs = _gather(v, key, real, v_token, V, V_PAD)
        dp = _dot(d_out, vs.T)
        p, slope = _weights(s, log_sum[:, None], visible, scale, cap, SOFTCAP, True)
        ds = p * (dp - mean[:, None]) * slope
        acc = _add_dot_blocks(ds.to(ks[0].dtype), ks, acc)

    _store_blocks(dq, (head * tokens + n) * QK, acc, factor, live, QK, QK_PAD, QK_REST)


@triton.jit
def _statistic(descriptor, base, head, start, span, ROWS: tl.constexpr, TMA: tl.constexpr):
    """One number for each of ROWS consecutive tokens of a head, of a [heads, span] tensor.

    By the copy engine: each thread would load those of all its columns by itself.
    """
    if TMA:
        return descriptor.load([head, start]).reshape(ROWS)
    return tl.load(base + head.to(tl.int64) * span + start + tl.arange(0, ROWS))


@triton.jit
def _key_step(
    dk,
    dv,
    ks,
    vs,
    qs,
    d_out,
    log_sum,
    mean,
    visible,
    scale,
    cap,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One query tile's share of dK and dV.

    Scores are computed transposed: on Hopper, Triton up to 3.7.0 miscompiles products with a transposed accumulator.
    The second product comes before the softmax, so that dV's runs beside what follows it.
    """
    s = _dot_blocks(ks, qs)
    dp = _dot(vs, d_out.T)
    p, slope = _weights(s, log_sum[None, :], visible, scale, cap, SOFTCAP, MASKED)
    dv = _add_dot(p.to(d_out.dtype), d_out, dv)
    ds = p * (dp - mean[None, :]) * slope
    dk = _add_dot_blocks(ds.to(qs[0].dtype), qs, dk)
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "span", "window"])
def dkv_kernel(
    q,
    k,
    v,
    grad,
    q_descriptor,
    q_rest,
    grad_descriptor,
    lse2_descriptor,
    delta_descriptor,
    q_box,
    q_rest_box,
    grad_box,
    lse2_box,
    delta_box,
    dk,
    dv,
    part_dk,
    part_dv,
    lse2,
    delta,
    subtree_end,
    column,
    items,
    ranges,
    tile_offsets,
    tile_list,
    tokens,
    span,
    q_head,
    q_token,
    k_head,
    k_token,
    v_head,
    v_token,
    grad_head,
    grad_token,
    scale,
    cap,
    window,
    factor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    QK: tl.constexpr,
    QK_PAD: tl.constexpr,
    QK_REST: tl.constexpr,
    V: tl.constexpr,
    V_PAD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    TMA: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    """Query tiles of ROWS consecutive tokens of one head where all pairs attend, masked ones of TOKENS tokens
    of HEADS heads elsewhere."""
    ROWS: tl.constexpr = HEADS * TOKENS
    item = items + 4 * tl.program_id(0)
    block = tl.load(item)
    share = tl.load(item + 1)
    shares = tl.load(item + 2)
    slot = tl.load(item + 3)
    kv = tl.program_id(1)
    key = block * KEYS + tl.arange(0, KEYS)
    real = key < tokens
    end = tl.load(subtree_end + key, mask=real, other=0)
    ks = _gather_blocks(k + kv.to(tl.int64) * k_head, key, real, k_token, QK, QK_PAD, QK_REST)
    vs = _gather(v + kv.to(tl.int64) * v_head, key, real, v_token, V, V_PAD)
    dk_acc = _zero_blocks(KEYS, QK_PAD, QK_REST)
    dv_acc = tl.zeros([KEYS, V_PAD], tl.float32)

    # Masked tokens are [low, full) and [after, high), of which the second starts behind the full tiles. With a window
    # both kinds of tiles are listed, and `full` says where the first are.
    low = block * KEYS
    full = tl.load(ranges + 3 * block)
    count = tl.load(ranges + 3 * block + 1)
    high = tl.load(ranges + 3 * block + 2)
    after = full + count * ROWS
    begin = share * (count * GROUP) // shares
    which = kv * GROUP + begin // tl.maximum(count, 1)
    tile = begin % tl.maximum(count, 1)
    if WINDOW:
        start = tl.load(tile_list + full + tile) * ROWS
    else:
        start = full + tile * ROWS
    for _ in range(begin, (share + 1) * (count * GROUP) // shares):
        head = which.to(tl.int64)
        qs = _tile_blocks(
            q_descriptor,
            q_rest,
            q + head * q_head,
            which,
            start,
            tokens,
            q_token,
            QK,
            QK_PAD,
            QK_REST,
            ROWS,
            TMA,
        )
        d_out = _tile(
            grad_descriptor,
            grad + head * grad_head,
            which,
            start,
            tokens,
            grad_token,
            0,
            V,
            V_PAD,
            ROWS,
            TMA,
        )
        log_sum = _statistic(lse2_descriptor, lse2, which, start, span, ROWS, TMA)
        mean = _statistic(delta_descriptor, delta, which, start, span, ROWS, TMA)
        dk_acc, dv_acc = _key_step(
            dk_acc, dv_acc, ks, vs, qs, d_out, log_sum, mean, real, scale, cap, SOFTCAP, False
        )
        # The next tile, or the first one of the next head: without a division. Known one iteration early, as in the
        # forward.
        if WINDOW:
            last = tile + 1 == count
            tile = tl.where(last, 0, tile + 1)
            start = tl.load(tile_list + full + tile) * ROWS
        else:
            last = start + ROWS == after
            start = tl.where(last, full, start + ROWS)
        which += last.to(tl.int32)

    if WINDOW:
        key_at = tl.load(column + key, mask=real, other=0)
        first = tl.load(tile_offsets + block)
        tiles = tl.load(tile_offsets + block + 1) - first
    else:
        first = tl.cdiv(full - low, TOKENS)
        tiles = first + tl.cdiv(high - after, TOKENS)
    row = tl.arange(0, ROWS)
    masked = tiles * (GROUP // HEADS)
    # With a window, stages would make Triton 3.6's assembler serialise the products (tests/test_kernel_code.py).
    stages: tl.constexpr = 1 if WINDOW else MASKED_STAGES
    for i in tl.range(share * masked // shares, (share + 1) * masked // shares, num_stages=stages):
        part = i // tiles
        tile = i - part * tiles
        if WINDOW:
            start = tl.load(tile_list + first + tile) * TOKENS
            limit = tokens
        else:
            start = tl.where(tile < first, low + tile * TOKENS, after + (tile - first) * TOKENS)
            limit = tl.where(tile < first, full, high)
        lead = kv * GROUP + part * HEADS
        head = (lead + row // TOKENS).to(tl.int64)
        n = start + row % TOKENS
        live = n < limit
        if TMA:
            qs = _boxes(q_box, q_rest_box, lead, start, QK_PAD, QK_REST, ROWS)
            d_out = grad_box.load([lead, start, 0]).reshape(ROWS, V_PAD)
            log_sum = lse2_box.load([lead, start]).reshape(ROWS)
            mean = delta_box.load([lead, start]).reshape(ROWS)
        else:
            qs = _query_blocks(q, head, n, live, q_head, q_token, QK, QK_PAD, QK_REST)
            d_out = _query(grad, head, n, live, grad_head, grad_token, V, V_PAD)
            log_sum = tl.load(lse2 + head * span + n)
            mean = tl.load(delta + head * span + n)
        visible = _sees(tl.where(live, n, 2147483647)[None, :], key[:, None], end[:, None])
        if WINDOW:
            at = tl.load(column + n, mask=live, other=0)
            visible = visible & (at[None, :] - key_at[:, None] < window)
        dk_acc, dv_acc = _key_step(
            dk_acc, dv_acc, ks, vs, qs, d_out, log_sum, mean, visible, scale, cap, SOFTCAP, True
        )

    if slot < 0:
        rows = kv.to(tl.int64) * tokens + key
        _store_blocks(dk, rows * QK, dk_acc, factor, real, QK, QK_PAD, QK_REST)
        _store_blocks(dv, rows * V, (dv_acc,), 1.0, real, V, V_PAD, 0)
    else:
        rows = (slot.to(tl.int64) * tl.num_programs(1) + kv) * KEYS + tl.arange(0, KEYS)
        _store_blocks(part_dk, rows * QK, dk_acc, factor, real, QK, QK_PAD, QK_REST)
        _store_blocks(part_dv, rows * V, (dv_acc,), 1.0, real, V, V_PAD, 0)


@triton.jit(do_not_specialize=["tokens"])
def share_sum_kernel(
    parts,
    out,
    split,
    tokens,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add up the shares of key blocks whose queries were split, in order: ROWS keys of a block and K/V head."""
    row = split + 3 * tl.program_id(0)
    block = tl.load(row)
    slot = tl.load(row + 1)
    shares = tl.load(row + 2)
    kv = tl.program_id(1)
    lane = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    key = block * KEYS + lane
    feature = tl.arange(0, PAD)
    mask = (key < tokens)[:, None] & (feature < SIZE)[None, :]
    total = tl.zeros([ROWS, PAD], tl.float32)
    for i in range(shares):
        rows = (((slot + i).to(tl.int64) * tl.num_programs(1) + kv) * KEYS + lane)[:, None]
        total += tl.load(parts + rows * SIZE + feature[None, :], mask=mask, other=0.0)
    rows = (kv.to(tl.int64) * tokens + key)[:, None]
    tl.store(out + rows * SIZE + feature[None, :], total.to(out.dtype.element_ty), mask=mask)
