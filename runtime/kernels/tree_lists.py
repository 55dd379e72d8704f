"""Triton kernels that write the block lists of `tree_attention`: one program per block, counted first, then filled.

See `treecompile.runtime.ops.attention_lists` for what the lists say.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["key_tiles_kernel", "query_lists_kernel"]


@triton.jit
def _first_below(subtree_end, low, high, bound):
    """First token of [low, high) whose subtree ends before `bound`, or high: ends fall along a path."""
    if low < high:
        if tl.load(subtree_end + high - 1) >= bound:
            low = high
    while low < high:
        middle = (low + high) // 2
        if tl.load(subtree_end + middle) >= bound:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["tokens", "blocks", "window"])
def query_lists_kernel(
    segments,
    heavy,
    segment_of,
    subtree_end,
    depth,
    counts,
    run_offsets,
    runs,
    index_offsets,
    index,
    tokens,
    blocks,
    window,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    STEP: tl.constexpr,
    FILL: tl.constexpr,
    STORE: tl.constexpr,
):
    """Climb from a query block's first token to its root, one run of consecutive ancestors at a time."""
    block = tl.program_id(0)
    begin = block * TOKENS
    stop = tl.minimum(begin + TOKENS, tokens)
    if WINDOW:
        n = begin + tl.arange(0, TOKENS)
        deep = tl.load(depth + n, mask=n < stop, other=0)
        # Keys above `near` are out of every query's window, those from `far` on inside of every one's.
        near = tl.min(tl.where(n < stop, deep, 2147483647)) - window + 1
        far = tl.max(deep) - window + 1
    run = 0
    tiles = 0
    packed = 0
    if FILL:
        run = tl.load(run_offsets + block)
        packed = tl.load(index_offsets + block)
    lane = tl.arange(0, STORE)
    end = stop
    segment = tl.load(segment_of + block)
    while segment >= 0:
        top = tl.load(heavy + segment)
        start = tl.load(segments + 4 * top)
        parent = tl.load(segments + 4 * top + 2)
        path_end = tl.minimum(end, begin)
        low = start
        full = start
        if WINDOW:
            above = tl.load(depth + start)
            if STEP >= 0:
                low = tl.minimum(tl.maximum(start, start + near - above), path_end)
            full = path_end
            if STEP == 1:
                full = tl.minimum(tl.maximum(low, start + far - above), path_end)
            if (STEP >= 0) & (low > start):
                parent = -1
        last = _first_below(subtree_end, full, path_end, stop)
        count = (last - full) // KEYS
        after = full + count * KEYS
        if FILL:
            if count > 0:
                tl.store(runs + 2 * run, full)
                tl.store(runs + 2 * run + 1, count)
            for at in range(low, full, STORE):
                tl.store(index + packed + at - low + lane, at + lane, mask=at + lane < full)
            packed += full - low
            for at in range(after, end, STORE):
                tl.store(index + packed + at - after + lane, at + lane, mask=at + lane < end)
            packed += end - after
        else:
            packed += full - low + end - after
        run += (count > 0).to(tl.int32)
        tiles += count
        if parent >= 0:
            end = tl.load(segments + 4 * parent + 1)
        segment = parent
    if FILL:
        limit = tl.load(index_offsets + block + 1)
        for at in range(packed, limit, STORE):
            tl.store(index + at + lane, tl.full([STORE], -1, tl.int32), mask=at + lane < limit)
    else:
        tl.store(counts + block, run)
        tl.store(counts + blocks + block, tiles)
        tl.store(counts + 2 * blocks + block, (packed + KEYS - 1) // KEYS)


@triton.jit
def _inside(tile, begin, stop, row_depth, deepest, ROWS: tl.constexpr):
    """Whether all keys of a block see the queries of tiles of ROWS tokens: in range, and none of them too deep."""
    here = (tile * ROWS >= begin) & (tile * ROWS + ROWS <= stop)
    return here & (tl.load(row_depth + tile, mask=here, other=0) < deepest)


@triton.jit(do_not_specialize=["blocks", "tokens", "window"])
def key_tiles_kernel(
    every,
    high,
    key_near,
    key_far,
    row_depth,
    tile_depth,
    counts,
    full_offsets,
    offsets,
    tiles,
    blocks,
    tokens,
    window,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FULL: tl.constexpr,
    FILL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """List the query tiles of a key block: those of ROWS tokens that all its keys see, and those of TOKENS tokens that
    its window may reach beside them, in range and not all too deep."""
    block = tl.program_id(0)
    begin = tl.minimum(block * KEYS + KEYS, tokens)
    stop = tl.load(every + block)
    limit = tl.load(high + block)
    near = tl.load(key_near + block) + window
    far = tl.load(key_far + block) + window
    lane = tl.arange(0, WIDE)
    found = 0
    if FULL:
        if FILL:
            found = tl.load(full_offsets + block)
        for at in range(begin // ROWS, stop // ROWS, WIDE):
            tile = at + lane
            taken = _inside(tile, begin, stop, row_depth, near, ROWS)
            if FILL:
                tl.store(tiles + found + tl.cumsum(taken.to(tl.int32), 0) - 1, tile, mask=taken)
            found += tl.sum(taken.to(tl.int32))
    if not FILL:
        tl.store(counts + block, found)
    found = 0
    if FILL:
        found = tl.load(offsets + block)
    for at in range(block * KEYS // TOKENS, tl.cdiv(limit, TOKENS), WIDE):
        tile = at + lane
        taken = tl.load(tile_depth + tile, mask=tile * TOKENS < limit, other=2147483647) < far
        if FULL:
            taken = taken & ~_inside(tile * TOKENS // ROWS, begin, stop, row_depth, near, ROWS)
        if FILL:
            tl.store(tiles + found + tl.cumsum(taken.to(tl.int32), 0) - 1, tile, mask=taken)
        found += tl.sum(taken.to(tl.int32))
    if not FILL:
        tl.store(counts + blocks + block, found)
