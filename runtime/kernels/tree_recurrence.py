"""Triton kernels of `tree_recurrence` with a decay per head, forward and backward: with DELTA the (gated) delta rule,
otherwise gated linear attention, whose updates are the values.

Legend: K blocks of the chunk trie in preorder, C rows of a block (a power of two, empty rows included), G key heads,
H value heads (R = H / G), D key width, V value width. A *row* is a token in a block: replayed tokens have several.

What the kernels pass to each other:

- near, rest: fp32 [K, H, C], sums of gates from the block's first row, as a number and the rest of it;
- solve: [K, H, C, C], `(I + L)^-1`, and erase: [K * C, H, D], `solve (beta k * e)`, of the delta rule alone;
- u: [K * C, H, V], updates;
- starts, ends: [K, H, D, V], the state before each block, and the gradient of the one after it.

e_i, w_i, d_ij, A and L are those of `treecompile.runtime.ops.recurrence_chunks`, which is the specification. Work
local to a chunk runs over all blocks at once and loads tokens by index: a replay copies nothing. States pass in one
launch over the *paths* of the trie (a block and its first child stay on one path, so a path is a range of blocks): a
program draws the next path from a ticket, in an order that has every path behind the one that it starts from, and
waits for a flag. All programs that hold a smaller ticket are running or done, so the one with the smallest never
waits: no deadlock, however few programs are resident. Every state has one writer, sums over children run in the order
of the table.

Products take operands of the inputs' dtype, or fp32 as PRECISION says; states and decays are fp32, and so are the
operands of the solve and of sums over gates, as SUMS says. On Hopper Triton miscompiles the product of a *transposed*
accumulator: what is needed both ways is computed both ways, or read back from memory.

Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024, section 3.3; without the rule, T. Dao, A. Gu,
"Transformers are SSMs", 2024, section 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "key_grads_kernel",
    "output_kernel",
    "prepare_kernel",
    "query_grads_kernel",
    "rule_grads_kernel",
    "state_grads_kernel",
    "state_kernel",
    "token_sums_kernel",
    "update_grads_kernel",
    "value_grads_kernel",
]


@triton.jit
def _cell(HEADS: tl.constexpr):
    """Block and head of a program; heads of one block are neighbours."""
    program = tl.program_id(0).to(tl.int64)
    return program // HEADS, program % HEADS


@triton.jit
def _tokens(rows, block, C: tl.constexpr):
    """Packed tokens of a block, and which rows have one."""
    token = tl.load(rows + block * C + tl.arange(0, C)).to(tl.int64)
    return tl.maximum(token, 0), token >= 0


@triton.jit
def _rows_of(rows, block, C: tl.constexpr):
    """Rows of a block: numbers, places among all rows, packed tokens, which have one, and a mask of all."""
    token, live = _tokens(rows, block, C)
    row = tl.arange(0, C)
    return row, block * C + row, token, live, row >= 0


@triton.jit
def _owned(own, block, row, live):
    """Which rows hold a token that the block owns."""
    return live & (row >= tl.load(own + block))


@triton.jit
def _tile(x, row, live, head, begin, HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr):
    """[rows, TILE] of x [*, HEADS, SIZE] from column `begin` on; zeros where there is nothing."""
    column = begin + tl.arange(0, TILE)
    at = x + (row * HEADS + head)[:, None] * SIZE + column[None, :]
    if SIZE % TILE == 0:
        return tl.load(at, mask=live[:, None], other=0.0)
    return tl.load(at, mask=live[:, None] & (column < SIZE)[None, :], other=0.0)


@triton.jit
def _put(x, value, row, live, head, begin, HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Store what `_tile` loads."""
    column = begin + tl.arange(0, TILE)
    at = x + (row * HEADS + head)[:, None] * SIZE + column[None, :]
    mask = live[:, None] & (column < SIZE)[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _state_at(x, index, begin, D: tl.constexpr, V: tl.constexpr, D_TILE: tl.constexpr, V_TILE: tl.constexpr):
    """Addresses and mask of [D_TILE, V_TILE] of the state `index` of x [*, D, V] from column `begin` on."""
    row = tl.arange(0, D_TILE)
    column = begin + tl.arange(0, V_TILE)
    at = x + index * (D * V) + row[:, None] * V + column[None, :]
    return at, (row < D)[:, None] & (column < V)[None, :]


@triton.jit
def _sums(near, rest, cell, C: tl.constexpr):
    """Sums of gates of a block and head, and the last of them."""
    at = cell * C + tl.arange(0, C)
    last = cell * C + C - 1
    return tl.load(near + at), tl.load(rest + at), tl.load(near + last), tl.load(rest + last)


@triton.jit
def _decay(high, low, C: tl.constexpr):
    """d_ij [C, C] for j <= i, else zero."""
    row = tl.arange(0, C)
    lower = row[:, None] >= row[None, :]
    step = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(lower, tl.exp(tl.where(lower, step, 0.0)), 0.0)


@triton.jit
def _decay_back(high, low, C: tl.constexpr):
    """d_ij as [C (j), C (i)]: the transpose of `_decay`."""
    row = tl.arange(0, C)
    upper = row[:, None] <= row[None, :]
    step = (high[None, :] - high[:, None]) + (low[None, :] - low[:, None])
    return tl.where(upper, tl.exp(tl.where(upper, step, 0.0)), 0.0)


@triton.jit
def _crossing(pairs, C: tl.constexpr, SUMS: tl.constexpr):
    """[C]: for each row t, what pairs [C (i), C (j)] with j < t <= i add up to: those whose decay has the gate of t."""
    row = tl.arange(0, C)
    behind = tl.where(row[:, None] <= row[None, :], 1.0, 0.0)
    sums = tl.dot(behind, pairs, input_precision=SUMS)
    return tl.sum(tl.where(row[:, None] > row[None, :], sums, 0.0), axis=1)


@triton.jit
def prepare_kernel(
    k, v, gate, beta, rows, near, rest, solve, erase, u, lowest,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    D_TILE: tl.constexpr, V_TILE: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Everything of a block and head that needs no state: near, rest, solve, erase, and u as `solve (beta v)`, or v."""
    block, head = _cell(H)
    cell = block * H + head
    row, place, token, live, all_rows = _rows_of(rows, block, C)
    g = tl.load(gate + token * H + head, mask=live, other=0.0).to(tl.float32)
    g = tl.maximum(g, lowest, propagate_nan=tl.PropagateNan.ALL)  # a gate that is no number must show
    # Differences of sums lose what the sums have in common: these are fp64, kept as a number and the rest of it.
    total = tl.cumsum(g.to(tl.float64), axis=0)
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    tl.store(near + cell * C + row, high)
    tl.store(rest + cell * C + row, low)
    if DELTA:
        rate = tl.load(beta + token * H + head, mask=live, other=0.0).to(tl.float32)
        keys = _tile(k, token, live, head // (H // G), 0, G, D, D_TILE)
        products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        lower = tl.where(row[:, None] > row[None, :], products * _decay(high, low, C) * rate[:, None], 0.0)
        # Inverses of blocks on the diagonal, twice as large at each step: [[A, 0], [B, D]] has -D^-1 B A^-1 below.
        odd = (row % 2 == 1)[:, None] & (row[:, None] == row[None, :] + 1)
        inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0) - tl.where(odd, lower, 0.0)
        size = 2
        while size < C:
            below = row // size
            corner = (below % 2 == 1)[:, None] & (below[:, None] == below[None, :] + 1)
            part = tl.dot(tl.where(corner, lower, 0.0), inverse, input_precision=SUMS)
            inverse -= tl.dot(inverse, part, input_precision=SUMS)
            size *= 2
        solved = inverse.to(keys.dtype)
        tl.store(solve + cell * (C * C) + row[:, None] * C + row[None, :], solved)
        for begin in range(0, V, V_TILE):
            values = _tile(v, token, live, head, begin, H, V, V_TILE)
            scaled = (values * rate[:, None]).to(keys.dtype)
            update = tl.dot(solved, scaled, input_precision=PRECISION)
            _put(u, update, place, all_rows, head, begin, H, V, V_TILE)
        scaled = (keys * (rate * tl.exp(high))[:, None]).to(keys.dtype)
        _put(erase, tl.dot(solved, scaled, input_precision=PRECISION), place, all_rows, head, 0, H, D, D_TILE)
    else:
        for begin in range(0, V, V_TILE):
            values = _tile(v, token, live, head, begin, H, V, V_TILE)
            _put(u, values, place, all_rows, head, begin, H, V, V_TILE)


@triton.jit
def _wait(flag):
    while tl.atomic_add(flag, 0, sem="acquire") == 0:
        pass


@triton.jit
def _raise(flag):
    tl.debug_barrier()  # all threads have stored
    tl.atomic_xchg(flag, 1, sem="release")


@triton.jit
def state_kernel(
    k, near, rest, erase, u, rows, starts, forks, flags, ticket, order, path_runs, run_begin, run_slot, path_slot,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    D_TILE: tl.constexpr, V_TILE: tl.constexpr, PRECISION: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """States along a path, for a head and V_TILE columns: starts, and u finished.

    forks: fp32 [F, H, D, V], end states that other paths start from. flags: int32 [F * H * columns], zeros.
    order: [P] paths by ticket. path_runs [P + 1], run_begin [runs + 1]: the blocks of a path are cut into runs where
    a fork state is kept, in slot run_slot (-1: in none). path_slot [P]: what a path starts from, -1 for zero.
    """
    TILES: tl.constexpr = (V + V_TILE - 1) // V_TILE
    drawn = tl.atomic_add(ticket, 1)
    path = tl.load(order + drawn // (H * TILES))
    part = drawn % (H * TILES)
    head = (part // TILES).to(tl.int64)
    begin = (part % TILES) * V_TILE
    row = tl.arange(0, C)
    all_rows = row >= 0
    state = tl.zeros([D_TILE, V_TILE], dtype=tl.float32)
    slot = tl.load(path_slot + path).to(tl.int64)
    if slot >= 0:
        _wait(flags + slot * (H * TILES) + part)
        at, mask = _state_at(forks, slot * H + head, begin, D, V, D_TILE, V_TILE)
        state = tl.load(at, mask=mask, other=0.0)
    for run in range(tl.load(path_runs + path), tl.load(path_runs + path + 1)):
        top = tl.load(run_begin + run).to(tl.int64)
        for step in range(tl.load(run_begin + run + 1) - top):
            block = top + step
            token, live = _tokens(rows, block, C)
            place = block * C + row
            at, mask = _state_at(starts, block * H + head, begin, D, V, D_TILE, V_TILE)
            tl.store(at, state.to(starts.dtype.element_ty), mask=mask)
            update = _tile(u, place, all_rows, head, begin, H, V, V_TILE).to(tl.float32)
            if DELTA:
                seen = _tile(erase, place, all_rows, head, 0, H, D, D_TILE)
                update -= tl.dot(seen, state.to(seen.dtype), input_precision=PRECISION)
                _put(u, update, place, all_rows, head, begin, H, V, V_TILE)
            high, low, last_high, last_low = _sums(near, rest, block * H + head, C)
            late = tl.exp((last_high - high) + (last_low - low))
            keys = _tile(k, token, live, head // (H // G), 0, G, D, D_TILE)
            written = (update * late[:, None]).to(keys.dtype)
            state = state * tl.exp(last_high) + tl.dot(tl.trans(keys), written, input_precision=PRECISION)
        slot = tl.load(run_slot + run).to(tl.int64)
        if slot >= 0:
            at, mask = _state_at(forks, slot * H + head, begin, D, V, D_TILE, V_TILE)
            tl.store(at, state, mask=mask)
            _raise(flags + slot * (H * TILES) + part)


@triton.jit
def output_kernel(
    q, k, near, rest, u, starts, rows, own, out, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    D_TILE: tl.constexpr, V_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of the tokens that a block owns, for a head: out [N, H, V]."""
    block, head = _cell(H)
    cell = block * H + head
    row, place, token, live, all_rows = _rows_of(rows, block, C)
    mine = _owned(own, block, row, live)
    group = head // (H // G)
    high, low, _, _ = _sums(near, rest, cell, C)
    queries = _tile(q, token, mine, group, 0, G, D, D_TILE)
    keys = _tile(k, token, live, group, 0, G, D, D_TILE)
    inner = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * _decay(high, low, C)
    inner = inner.to(keys.dtype)
    early = tl.exp(high)
    for begin in range(0, V, V_TILE):
        at, mask = _state_at(starts, cell, begin, D, V, D_TILE, V_TILE)
        state = tl.load(at, mask=mask, other=0.0)
        update = _tile(u, place, all_rows, head, begin, H, V, V_TILE)
        value = tl.dot(queries, state, input_precision=PRECISION) * early[:, None]
        value += tl.dot(inner, update, input_precision=PRECISION)
        _put(out, value * scale, token, mine, head, begin, H, V, V_TILE)


@triton.jit
def update_grads_kernel(
    grad, q, k, near, rest, rows, own, du, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    D_TILE: tl.constexpr, V_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a block's own outputs ask of its updates: du [K * C, H, V] as `A' grad`."""
    block, head = _cell(H)
    row, place, token, live, all_rows = _rows_of(rows, block, C)
    mine = _owned(own, block, row, live)
    group = head // (H // G)
    high, low, _, _ = _sums(near, rest, block * H + head, C)
    queries = _tile(q, token, mine, group, 0, G, D, D_TILE)
    keys = _tile(k, token, live, group, 0, G, D, D_TILE)
    inner = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * (_decay_back(high, low, C) * scale)
    inner = inner.to(keys.dtype)
    for begin in range(0, V, V_TILE):
        above = _tile(grad, token, mine, head, begin, H, V, V_TILE)
        value = tl.dot(inner, above, input_precision=PRECISION)
        _put(du, value, place, all_rows, head, begin, H, V, V_TILE)


@triton.jit
def state_grads_kernel(
    grad, q, k, near, rest, erase, du, rows, own, ends, tops, flags, ticket, order, path_runs, run_begin, run_slot,
    child_offsets, children, path_slot, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    D_TILE: tl.constexpr, V_TILE: tl.constexpr, PRECISION: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Gradients of states along a path, upwards, for a head and V_TILE columns: ends, and du finished.

    tops: fp32 [P, H, D, V], the gradient of what a path starts from. flags: int32 [P * H * columns], zeros.
    child_offsets [F + 1], children: the paths that start from a slot, in the order of the sum.
    """
    TILES: tl.constexpr = (V + V_TILE - 1) // V_TILE
    drawn = tl.atomic_add(ticket, 1)
    path = tl.load(order + drawn // (H * TILES)).to(tl.int64)
    part = drawn % (H * TILES)
    head = (part // TILES).to(tl.int64)
    begin = (part % TILES) * V_TILE
    row = tl.arange(0, C)
    all_rows = row >= 0
    state = tl.zeros([D_TILE, V_TILE], dtype=tl.float32)
    first = tl.load(path_runs + path)
    last = tl.load(path_runs + path + 1)
    for turn in range(last - first):
        run = last - 1 - turn
        slot = tl.load(run_slot + run).to(tl.int64)
        if slot >= 0:
            for i in range(tl.load(child_offsets + slot), tl.load(child_offsets + slot + 1)):
                child = tl.load(children + i).to(tl.int64)
                _wait(flags + child * (H * TILES) + part)
                at, mask = _state_at(tops, child * H + head, begin, D, V, D_TILE, V_TILE)
                state += tl.load(at, mask=mask, other=0.0)
        bottom = tl.load(run_begin + run + 1).to(tl.int64)
        for step in range(bottom - tl.load(run_begin + run)):
            block = bottom - 1 - step
            token, live = _tokens(rows, block, C)
            place = block * C + row
            mine = _owned(own, block, row, live)
            group = head // (H // G)
            at, mask = _state_at(ends, block * H + head, begin, D, V, D_TILE, V_TILE)
            tl.store(at, state.to(ends.dtype.element_ty), mask=mask)
            high, low, last_high, last_low = _sums(near, rest, block * H + head, C)
            late = tl.exp((last_high - high) + (last_low - low))
            keys = _tile(k, token, live, group, 0, G, D, D_TILE)
            update = tl.dot(keys, state.to(keys.dtype), input_precision=PRECISION) * late[:, None]
            update += _tile(du, place, all_rows, head, begin, H, V, V_TILE).to(tl.float32)
            _put(du, update, place, all_rows, head, begin, H, V, V_TILE)
            queries = _tile(q, token, mine, group, 0, G, D, D_TILE)
            above = _tile(grad, token, mine, head, begin, H, V, V_TILE)
            above = (above * (tl.exp(high) * scale)[:, None]).to(keys.dtype)
            state = state * tl.exp(last_high) + tl.dot(tl.trans(queries), above, input_precision=PRECISION)
            if DELTA:
                seen = _tile(erase, place, all_rows, head, 0, H, D, D_TILE)
                state -= tl.dot(tl.trans(seen), update.to(seen.dtype), input_precision=PRECISION)
    if tl.load(path_slot + path) >= 0:
        at, mask = _state_at(tops, path * H + head, begin, D, V, D_TILE, V_TILE)
        tl.store(at, state, mask=mask)
        _raise(flags + path * (H * TILES) + part)


@triton.jit
def value_grads_kernel(
    solve, du, dy,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, V_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of `beta (v - S' (e * k))`: dy [K * C, H, V] as `solve' du`."""
    block, head = _cell(H)
    row = tl.arange(0, C)
    place = block * C + row
    all_rows = row >= 0
    solved = tl.load(solve + (block * H + head) * (C * C) + row[:, None] + row[None, :] * C)
    for begin in range(0, V, V_TILE):
        update = _tile(du, place, all_rows, head, begin, H, V, V_TILE)
        _put(
            dy, tl.dot(solved, update, input_precision=PRECISION), place, all_rows, head, begin, H, V, V_TILE
        )


@triton.jit
def query_grads_kernel(
    grad, q, k, near, rest, u, starts, rows, own, dq, dgate, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    D_TILE: tl.constexpr, V_TILE: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries that a block owns, dq [N, G, D], and what outputs ask of gates: dgate [K * C, H]."""
    block, group = _cell(G)
    row, place, token, live, all_rows = _rows_of(rows, block, C)
    mine = _owned(own, block, row, live)
    queries = _tile(q, token, mine, group, 0, G, D, D_TILE)
    keys = _tile(k, token, live, group, 0, G, D, D_TILE)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    total = tl.zeros([C, D_TILE], dtype=tl.float32)
    for member in range(H // G):
        head = group * (H // G) + member
        cell = block * H + head
        high, low, _, _ = _sums(near, rest, cell, C)
        decay = _decay(high, low, C) * scale
        early = tl.exp(high) * scale
        outer = tl.zeros([C, D_TILE], dtype=tl.float32)
        inner = tl.zeros([C, C], dtype=tl.float32)
        for begin in range(0, V, V_TILE):
            above = _tile(grad, token, mine, head, begin, H, V, V_TILE).to(keys.dtype)
            update = _tile(u, place, all_rows, head, begin, H, V, V_TILE)
            at, mask = _state_at(starts, cell, begin, D, V, D_TILE, V_TILE)
            state = tl.load(at, mask=mask, other=0.0)
            outer += tl.dot(above, tl.trans(state), input_precision=PRECISION)
            inner += tl.dot(above, tl.trans(update), input_precision=PRECISION)
        inner *= decay
        outer *= early[:, None]
        through = _crossing(inner * products, C, SUMS)
        here = tl.sum(outer * queries, axis=1)
        tl.store(dgate + place * H + head, through + tl.cumsum(here, axis=0, reverse=True))
        total += outer + tl.dot(inner.to(keys.dtype), keys, input_precision=PRECISION)
    _put(dq, total, token, mine, group, 0, G, D, D_TILE)


@triton.jit
def key_grads_kernel(
    grad, q, k, near, rest, u, starts, ends, rows, own, dk, dgate, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    D_TILE: tl.constexpr, V_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys as they are written and read: dk fp32 [K * C, G, D]; adds to dgate [K * C, H]."""
    block, group = _cell(G)
    row, place, token, live, all_rows = _rows_of(rows, block, C)
    mine = _owned(own, block, row, live)
    keys = _tile(k, token, live, group, 0, G, D, D_TILE)
    queries = _tile(q, token, mine, group, 0, G, D, D_TILE)
    total = tl.zeros([C, D_TILE], dtype=tl.float32)
    for member in range(H // G):
        head = group * (H // G) + member
        cell = block * H + head
        high, low, last_high, last_low = _sums(near, rest, cell, C)
        write = tl.zeros([C, D_TILE], dtype=tl.float32)
        inner = tl.zeros([C, C], dtype=tl.float32)
        kept = 0.0
        for begin in range(0, V, V_TILE):
            update = _tile(u, place, all_rows, head, begin, H, V, V_TILE)
            above = _tile(grad, token, mine, head, begin, H, V, V_TILE).to(keys.dtype)
            at, mask = _state_at(ends, cell, begin, D, V, D_TILE, V_TILE)
            end = tl.load(at, mask=mask, other=0.0)
            at, mask = _state_at(starts, cell, begin, D, V, D_TILE, V_TILE)
            start = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            kept += tl.sum(tl.sum(start * end, axis=1), axis=0)
            write += tl.dot(update, tl.trans(end), input_precision=PRECISION)
            inner += tl.dot(update, tl.trans(above), input_precision=PRECISION)
        write *= tl.exp((last_high - high) + (last_low - low))[:, None]
        inner *= _decay_back(high, low, C) * scale
        total += write + tl.dot(inner.to(keys.dtype), queries, input_precision=PRECISION)
        behind = tl.sum(write * keys, axis=1)
        at = dgate + place * H + head
        # The gate of every row is in the decay of the state, and in that of what rows before it write.
        tl.store(at, tl.load(at) + kept * tl.exp(last_high) + (tl.cumsum(behind, axis=0) - behind))
    _put(dk, total, place, all_rows, group, 0, G, D, D_TILE)


@triton.jit
def rule_grads_kernel(
    k, v, beta, near, rest, u, starts, dy, rows, dk, dbeta, dgate,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    D_TILE: tl.constexpr, V_TILE: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """What the delta rule, erasing and L, adds to dk fp32 [K * C, G, D] and dgate [K * C, H]; dbeta [K * C, H]."""
    block, group = _cell(G)
    row, place, token, live, all_rows = _rows_of(rows, block, C)
    keys = _tile(k, token, live, group, 0, G, D, D_TILE)
    products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    total = tl.zeros([C, D_TILE], dtype=tl.float32)
    for member in range(H // G):
        head = group * (H // G) + member
        cell = block * H + head
        high, low, _, _ = _sums(near, rest, cell, C)
        rate = tl.load(beta + token * H + head, mask=live, other=0.0).to(tl.float32)
        erase = tl.zeros([C, D_TILE], dtype=tl.float32)
        lower = tl.zeros([C, C], dtype=tl.float32)
        upper = tl.zeros([C, C], dtype=tl.float32)
        slope = tl.zeros([C], dtype=tl.float32)
        for begin in range(0, V, V_TILE):
            update = _tile(u, place, all_rows, head, begin, H, V, V_TILE)
            asked = _tile(dy, place, all_rows, head, begin, H, V, V_TILE)
            values = _tile(v, token, live, head, begin, H, V, V_TILE).to(tl.float32)
            at, mask = _state_at(starts, cell, begin, D, V, D_TILE, V_TILE)
            state = tl.load(at, mask=mask, other=0.0)
            slope += tl.sum(asked.to(tl.float32) * values, axis=1)
            erase -= tl.dot(asked, tl.trans(state), input_precision=PRECISION)
            lower -= tl.dot(asked, tl.trans(update), input_precision=PRECISION)
            upper -= tl.dot(update, tl.trans(asked), input_precision=PRECISION)
        erase *= tl.exp(high)[:, None]
        lower = tl.where(row[:, None] > row[None, :], lower * _decay(high, low, C), 0.0)
        upper = tl.where(row[:, None] < row[None, :], upper * _decay_back(high, low, C), 0.0)
        seen = tl.sum(erase * keys, axis=1)
        pairs = lower * products
        tl.store(dbeta + place * H + head, slope + seen + tl.sum(pairs, axis=1))
        total += erase * rate[:, None]
        total += tl.dot((lower * rate[:, None]).to(keys.dtype), keys, input_precision=PRECISION)
        total += tl.dot((upper * rate[None, :]).to(keys.dtype), keys, input_precision=PRECISION)
        at = dgate + place * H + head
        here = tl.cumsum(seen * rate, axis=0, reverse=True)
        tl.store(at, tl.load(at) + here + _crossing(pairs * rate[:, None], C, SUMS))
    total += _tile(dk, place, all_rows, group, 0, G, D, D_TILE)
    _put(dk, total, place, all_rows, group, 0, G, D, D_TILE)


@triton.jit
def token_sums_kernel(
    x, factor, offsets, held, out,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Per token and head, the sum over the rows that hold it, times a factor [N, HEADS]: out [N, HEADS, SIZE]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, triton.next_power_of_2(SIZE))
    inside = (head < HEADS)[:, None] & (column < SIZE)[None, :]
    cell = head[:, None] * SIZE + column[None, :]
    total = tl.zeros([TILE, triton.next_power_of_2(SIZE)], dtype=tl.float32)
    for i in range(tl.load(offsets + token), tl.load(offsets + token + 1)):
        row = tl.load(held + i)
        total += tl.load(x + row * (HEADS * SIZE) + cell, mask=inside, other=0.0).to(tl.float32)
    if FACTOR:
        scale = tl.load(factor + token * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32)
        total *= scale[:, None]
    tl.store(out + token * (HEADS * SIZE) + cell, total.to(out.dtype.element_ty), mask=inside)
