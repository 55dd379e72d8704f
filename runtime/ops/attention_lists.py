"""Block lists of the Triton executor: which keys a query block meets, and which queries a key block.

In depth-first preorder, a key before a query block is visible to one of its queries only if it is an ancestor of
the block's *first* token: its subtree reaches into the block. So the far keys of a block are one path, and each
query sees a prefix of it. Chains of first children ("heavy paths") are consecutive tokens and a path crosses at
most log2(N) of them when the largest child comes first, so a path is a few *runs* of consecutive tokens.

- Query block: its path's runs are cut into tiles of KEYS consecutive keys as far as *all* its queries see them
  (ancestors whose subtree reaches past the block). The rest (what is left of runs, keys that only some queries
  see, the block's own tokens) is packed into an index, a multiple of KEYS, padded with -1. A token is in the
  second group once, in the block where its subtree ends: the index has O(N + blocks * runs * KEYS) entries.
- Key block of consecutive tokens: its queries are one range, and those that all keys see are one range in it.
- Windows: columns grow by at least one along a path, so a distance in depth bounds the distance in columns; where
  they grow by one it is that distance, and tiles inside the window need no mask. Where they do not grow, masks alone
  decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treecompile.runtime.cache import TreeCache
from treecompile.runtime.ops.attention_plan import STEP_ANY, STEP_ONE

__all__ = ["KeyLists", "QueryLists", "TreeTables", "key_lists", "query_lists", "tree_tables"]

# Trees whose lists are kept, and entries of an index that one step stores.
KEPT = 16
STORE = 64
WIDE = 128
# A key block is computed in shares where it has more than 1 / MOST_SHARES of all queries. A share has at least SPAN of
# them; less, down to SHORT_SPAN, in a tree so small that FEW_SHARES of SPAN are more than it has: the blocks that all
# see would run alone for most of the time.
SPAN, SHORT_SPAN = 8192, 1024
MOST_SHARES, FEW_SHARES = 256, 64


@dataclass(frozen=True)
class QueryLists:
    """Keys by query block. All int32 on the device; B blocks.

    Attributes:
        order: [B], blocks by falling cost, for launching.
        run_offsets: [B + 1] into `runs`.
        runs: [R + 1, 2], rows (first key, tiles); the last row is padding.
        full_tiles: [B], tiles in the block's runs.
        index_offsets: [B + 1] into `index`, multiples of KEYS.
        index: keys of masked tiles, -1 for none.
        tiles: masked and full tiles, on the host.
    """

    order: Tensor
    run_offsets: Tensor
    runs: Tensor
    full_tiles: Tensor
    index_offsets: Tensor
    index: Tensor
    tiles: int

    @property
    def bytes(self) -> int:
        """Memory of the lists."""
        held = (self.order, self.run_offsets, self.runs, self.full_tiles, self.index_offsets, self.index)
        return sum(x.numel() * x.element_size() for x in held)


@dataclass(frozen=True)
class KeyLists:
    """Queries by key block. All int32 on the device unless said; B blocks.

    Attributes:
        items: [I, 4], rows (block, share, shares, slot) by falling cost: a block with many queries is computed in
            shares, whose sums go to slots and are added up in order. Slot -1: the block is one item.
        split: [J, 3], rows (block, first slot, shares) of the blocks in shares.
        slots: number of slots, on the host.
        ranges: [B, 3], rows (first query that all keys see, full tiles from there, end of the queries). With a
            window the first is where the block's full tiles are listed in `tiles`.
        offsets: [B + 1] into `tiles`, masked ones, with a window only.
        tiles: query tiles, with a window only: full ones, an entry of padding, masked ones.
        pairs: query-key pairs that are computed, int64 on the device.
    """

    items: Tensor
    split: Tensor
    slots: int
    ranges: Tensor
    offsets: Tensor
    tiles: Tensor
    pairs: Tensor


@dataclass(frozen=True)
class TreeTables:
    """What the lists are made from. int32 on the device.

    Attributes:
        segments: [S, 4].
        heavy: [S], first segment of each segment's chain of first children.
        subtree_end: [N].
        depth: [N], number of ancestors.
        step: how columns grow along a path, from `plan_pieces`.
        cache: lists made so far.
    """

    segments: Tensor
    heavy: Tensor
    subtree_end: Tensor
    depth: Tensor
    step: int
    cache: dict[Any, Any]

    @property
    def tokens(self) -> int:
        """N."""
        return self.subtree_end.shape[0]


_kept: TreeCache[TreeTables] = TreeCache(capacity=KEPT)


def tree_tables(segments: Tensor, segments_host: Tensor, subtree_end: Tensor, step: int) -> TreeTables:
    """Return the tables of a tree, from the cache where the same tree was asked for before.

    Args:
        segments: int32 [S, 4] on the device.
        segments_host: the same on the host: the cache goes by its content.
        subtree_end: int32 [N] on the device, of the same tree.
        step: how columns grow along a path: 1, 0 (by at least one) or -1 (anyhow).

    Returns:
        The tables.
    """
    device = subtree_end.device
    return _kept.get(
        [segments_host],
        lambda: _make_tables(segments.to(device), subtree_end, step),
        device=device,
        options=(subtree_end.shape[0], step),
    )


def _make_tables(segments: Tensor, subtree_end: Tensor, step: int) -> TreeTables:
    start, _, parent, extent = segments.unbind(1)
    row = torch.arange(segments.shape[0], dtype=torch.int32, device=segments.device)
    # A leaf pad continues no chain: nobody sees it.
    follows = (parent == row - 1) & (extent > start) & (row > 0)
    heavy = torch.where(follows, 0, row).cummax(0).values
    n = torch.arange(subtree_end.shape[0], dtype=torch.int32, device=subtree_end.device)
    # Ancestors of n: tokens before it whose subtree has not ended. A pad ends at itself: count it out.
    closed = torch.zeros(subtree_end.shape[0] + 1, dtype=torch.int32, device=subtree_end.device)
    closed.scatter_add_(0, subtree_end.long(), torch.ones_like(subtree_end))
    depth = n - closed[:-1].cumsum(0, dtype=torch.int32) + (subtree_end == n)
    return TreeTables(segments.contiguous(), heavy.int(), subtree_end.contiguous(), depth.int(), step, {})


def _offsets(counts: Tensor) -> Tensor:
    """Counts [..., B] to offsets [..., B + 1]."""
    return torch.nn.functional.pad(counts.cumsum(-1, dtype=torch.int32), (1, 0))


def _falling(cost: Tensor) -> Tensor:
    """Indices by falling cost, equal ones in order."""
    return torch.sort(cost, descending=True, stable=True).indices.int()


def query_lists(tables: TreeTables, tokens: int, keys: int, window: int) -> QueryLists:
    """Return the key lists of query blocks of `tokens` tokens, with tiles of `keys` keys.

    Args:
        tables: the tree.
        tokens: tokens of a query block, a power of two.
        keys: keys of a tile.
        window: in columns, 0 for none.

    Returns:
        The lists, made on first need: two launches, and one read of their size by the host.
    """
    key = "query", tokens, keys, window
    if key not in tables.cache:
        tables.cache[key] = _query_lists(tables, tokens, keys, window)
    made: QueryLists = tables.cache[key]
    return made


def _query_lists(tables: TreeTables, tokens: int, keys: int, window: int) -> QueryLists:
    from treecompile.runtime.kernels.tree_lists import query_lists_kernel

    blocks = -(-tables.tokens // tokens)
    first = torch.arange(blocks, dtype=torch.int32, device=tables.heavy.device) * tokens
    segment = torch.searchsorted(tables.segments[:, 0].contiguous(), first, right=True, out_int32=True) - 1
    counts = torch.empty((3, blocks), dtype=torch.int32, device=first.device)

    def launch(fill: bool, *lists: Tensor) -> None:
        query_lists_kernel[(blocks,)](
            tables.segments, tables.heavy, segment, tables.subtree_end, tables.depth, counts, *lists,
            tables.tokens, blocks, window,
            TOKENS=tokens, KEYS=keys, WINDOW=window > 0, STEP=tables.step, FILL=fill, STORE=STORE, num_warps=1,
        )  # fmt: skip

    launch(False, counts, counts, counts, counts)
    offsets = _offsets(counts)
    runs, _, masked = (int(x) for x in offsets[:, -1].tolist())
    run_list = torch.zeros((runs + 1, 2), dtype=torch.int32, device=first.device)
    index = torch.empty((masked * keys,), dtype=torch.int32, device=first.device)
    index_offsets = offsets[2] * keys
    launch(True, offsets[0], run_list, index_offsets, index)
    order = _falling(counts[1] + counts[2])
    _settle(order)
    full = counts[1].contiguous()
    return QueryLists(
        order, offsets[0].contiguous(), run_list, full, index_offsets, index, int(offsets[1, -1]) + masked
    )


def _settle(made: Tensor) -> None:
    """Lists outlive the stream that made them: wait once, and any stream may read them."""
    if made.is_cuda:
        torch.cuda.current_stream(made.device).synchronize()


def key_lists(tables: TreeTables, keys: int, rows: int, tokens: int, window: int) -> KeyLists:
    """Return the query lists of key blocks of `keys` tokens.

    Args:
        tables: the tree.
        keys: tokens of a key block.
        rows: tokens of a full query tile.
        tokens: tokens of a masked query tile.
        window: in columns, 0 for none.

    Returns:
        The lists, made on first need; the host reads their size.
    """
    key = "key", keys, rows, tokens, window
    if key not in tables.cache:
        tables.cache[key] = _key_lists(tables, keys, rows, tokens, window)
    made: KeyLists = tables.cache[key]
    return made


def _blocked(x: Tensor, size: int, fill: int) -> Tensor:
    """[N] as [B, size], padded with `fill`."""
    return torch.nn.functional.pad(x, (0, -x.shape[0] % size), value=fill).view(-1, size)


def _key_lists(tables: TreeTables, keys: int, rows: int, tokens: int, window: int) -> KeyLists:
    blocks = -(-tables.tokens // keys)
    begin = torch.arange(blocks, dtype=torch.int32, device=tables.heavy.device) * keys
    behind = (begin + keys).clamp(max=tables.tokens)
    every = _blocked(tables.subtree_end, keys, 2**31 - 1).amin(1)
    high = torch.maximum(_blocked(tables.subtree_end, keys, 0).amax(1), begin)
    empty = begin[:0]
    if window:
        return _windowed(tables, every, high, keys, rows, tokens, window)
    count = (every.clamp(max=tables.tokens) - behind).clamp(min=0) // rows
    full = torch.where(count > 0, behind, high)
    ranges = torch.stack([full, count, high], 1).contiguous()
    before = full - begin
    after = high - full - count * rows
    masked = -(-before // tokens) * tokens + -(-after // tokens) * tokens
    cost = count * rows + masked
    return KeyLists(*_shares(cost), ranges, empty, empty, cost.sum(dtype=torch.int64) * keys)


def _shares(cost: Tensor) -> tuple[Tensor, Tensor, int]:
    """Cut blocks that cost more than a fair share: items, split blocks and the number of slots."""
    total = cost.sum(dtype=torch.int64)
    span = (total // FEW_SHARES).clamp(min=min(SHORT_SPAN, SPAN), max=SPAN)
    fair = torch.maximum(total // MOST_SHARES, span)
    shares = (-(-cost // fair)).clamp(min=1).int()
    several = shares > 1
    first = torch.where(several, shares, 0)
    slot = _offsets(first)
    items, blocks, slots = torch.stack([shares.sum(), several.sum(), slot[-1]]).tolist()
    row = torch.arange(cost.shape[0], dtype=torch.int32, device=cost.device)
    block = torch.repeat_interleave(row, shares, output_size=items)
    part = torch.arange(items, dtype=torch.int32, device=cost.device) - _offsets(shares)[block]
    slot_of = torch.where(several[block], slot[block] + part, -1)
    order = _falling((cost / shares)[block])
    table = torch.stack([block, part, shares[block], slot_of], 1).int()[order]
    chosen = _falling(several.int())[:blocks]
    split = torch.stack([chosen, slot[chosen], shares[chosen]], 1).int()
    _settle(table)
    return table.contiguous(), split.contiguous(), slots


def _windowed(
    tables: TreeTables, every: Tensor, high: Tensor, keys: int, rows: int, tokens: int, window: int
) -> KeyLists:
    from treecompile.runtime.kernels.tree_lists import key_tiles_kernel

    blocks = high.shape[0]
    key_near = _blocked(tables.depth, keys, 2**31 - 1).amin(1)
    key_far = _blocked(tables.depth, keys, 0).amax(1)
    row_depth = _blocked(tables.depth, rows, 0).amax(1)
    tile_depth = _blocked(tables.depth, tokens, 2**31 - 1).amin(1)
    if tables.step == STEP_ANY:
        tile_depth = torch.zeros_like(tile_depth)
    every = every.clamp(max=tables.tokens)
    counts = torch.empty((2, blocks), dtype=torch.int32, device=high.device)

    def launch(fill: bool, full_offsets: Tensor, offsets: Tensor, tiles: Tensor) -> None:
        key_tiles_kernel[(blocks,)](
            every, high, key_near, key_far, row_depth, tile_depth, counts, full_offsets, offsets, tiles,
            blocks, tables.tokens, window,
            KEYS=keys, ROWS=rows, TOKENS=tokens, FULL=tables.step == STEP_ONE, FILL=fill, WIDE=WIDE, num_warps=1,
        )  # fmt: skip

    launch(False, counts, counts, counts)
    full, masked = _offsets(counts).unbind(0)
    # Blocks without full tiles read one all the same.
    masked = masked + full[-1] + 1
    tiles = torch.zeros((int(masked[-1]),), dtype=torch.int32, device=high.device)
    launch(True, full, masked, tiles)
    ranges = torch.stack([full[:-1], counts[0], high], 1).contiguous()
    cost = counts[0] * rows + counts[1] * tokens
    return KeyLists(*_shares(cost), ranges, masked.contiguous(), tiles, cost.sum(dtype=torch.int64) * keys)
