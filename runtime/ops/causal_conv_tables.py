"""Who reads whom in a tree convolution: tables of one tree and one number of taps, made once and kept.

Legend: N packed tokens, W taps, M odd tokens, F tokens that an odd token reads, K reads by odd tokens.

A token reads itself and its W - 1 nearest ancestors. In preorder most tokens stand right behind theirs, as in a single
row: they read by shifts. *Odd* tokens, at most W - 1 behind a fork or the start of a later root, do not; what they
read is listed by index. An odd token reads itself, so it is one of the F.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treecompile.runtime.cache import TreeCache
from treecompile.runtime.stretches import Array, ramps
from treecompile.runtime.tree import RolloutTree

__all__ = ["ConvTables", "Reads", "Shares", "conv_tables"]


# Reads of one token that a program takes a few at a time; longer lists are shared by more threads.
LONG = 32


@dataclass(frozen=True)
class Reads:
    """Who reads a tap of odd tokens: int64 tokens that are read, CSR offsets, and the readers among the odd ones."""

    tokens: Tensor
    offsets: Tensor
    readers: Tensor


@dataclass(frozen=True)
class Shares:
    """All taps at once, by the token that is read: what the kernels add up for its gradient.

    Attributes:
        notes: int32 [N]: 0 for a token that no odd one reads; 2 (f + 1) for the f-th of those that one does, and one
            more if it is odd itself. Those with long lists come first, else tokens ascend.
        offsets: int64 [F + 1], CSR offsets into the reads.
        readers: int32 [K], reader of each read, numbered among the odd tokens; nearest taps first, readers ascending.
        distances: int32 [K], how far above its reader the token is.
        long: how many tokens have more than `LONG` reads.
    """

    notes: Tensor
    offsets: Tensor
    readers: Tensor
    distances: Tensor
    long: int


@dataclass(frozen=True)
class ConvTables:
    """What a tree and W give.

    Attributes:
        tokens: N.
        subtree_end: int32 [N] on the host.
        odd: int64 [M], ascending.
        ancestors: int64 [W, M], from the token itself upwards, -1 where there is none.
        reads: in the same order, W of them.
        shares: the same reads by token.
    """

    tokens: int
    subtree_end: Tensor
    odd: Tensor
    ancestors: Tensor
    reads: tuple[Reads, ...]
    shares: Shares


_kept: TreeCache[ConvTables] = TreeCache(capacity=16)


def conv_tables(segments: Tensor, taps: int, device: torch.device) -> ConvTables:
    """The tables of a tree, from the cache where its content was asked for before.

    Args:
        segments: int32 [S, 4] on the host, rows (start, end, parent row or -1, subtree end of start), no leaf pads.
        taps: W.
        device: where the tables live.

    Example:
        >>> table = torch.tensor([[0, 2, -1, 4], [2, 3, 0, 3], [3, 4, 0, 4]], dtype=torch.int32)
        >>> made = conv_tables(table, 3, torch.device("cpu"))  # a fork after two tokens
        >>> made.odd.tolist(), made.ancestors.tolist()
        ([3], [[3], [1], [0]])
        >>> made.shares.notes.tolist(), made.shares.distances.tolist()
        ([2, 4, 0, 7], [2, 1, 0])
    """
    return _kept.get([segments], lambda: _build(segments.numpy(), taps, device), device=device, options=taps)


def _build(segments: Array, taps: int, device: torch.device) -> ConvTables:
    tree = RolloutTree.from_segments(segments)
    number = np.arange(tree.n)
    above = np.r_[tree.parent.astype(np.int64), -1]  # the last one: nothing is above nothing
    ancestors, odd = [number], np.zeros(tree.n, np.bool_)
    for j in range(1, taps):
        ancestors.append(above[ancestors[-1]])
        odd |= ancestors[-1] != np.maximum(number - j, -1)
    where = np.flatnonzero(odd)
    found = np.stack(ancestors)[:, where]

    def tensor(values: Array, dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype)).to(device)

    reads = []
    for tap in found:
        tokens, offsets, readers = _by_token(tap)
        reads.append(Reads(tensor(tokens), tensor(offsets), tensor(readers)))
    shares = _shares(found, odd, tensor)
    ends = torch.from_numpy(tree.subtree_end.astype(np.int32))
    return ConvTables(tree.n, ends, tensor(where), tensor(found), tuple(reads), shares)


def _shares(found: Array, odd: Array, tensor: Callable[..., Tensor]) -> Shares:
    """`Shares` of ancestors [W, M] and the truth values [N] of who is odd."""
    tokens, offsets, order = _by_token(found.reshape(-1))
    count = np.diff(offsets)
    first = np.argsort(count <= LONG, kind="stable")
    order = order[ramps(offsets[first], count[first], np.dtype(np.int64))]
    distances, readers = np.divmod(order, max(found.shape[1], 1))
    notes = odd.astype(np.int32)
    notes[tokens[first]] += 2 * np.arange(1, len(tokens) + 1, dtype=np.int32)
    return Shares(
        tensor(notes, np.int32),
        tensor(np.r_[0, np.cumsum(count[first])]),
        tensor(readers, np.int32),
        tensor(distances, np.int32),
        int((count > LONG).sum()),
    )


def _by_token(read: Array) -> tuple[Array, Array, Array]:
    """The tokens that are read, CSR offsets, and who reads them, ascending; -1 is no token."""
    order = np.argsort(read, kind="stable")
    readers = order[np.searchsorted(read[order], 0) :]
    tokens, counts = np.unique(read[readers], return_counts=True)
    return tokens, np.r_[0, np.cumsum(counts)], readers
