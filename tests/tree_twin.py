"""Slow twin of the rollout tree: a dict trie, token by token. It is the specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Twin:
    """Trie nodes in order of creation.

    node [B, T]: node of each grid position, -1 if dropped. parent, pad, depth: per node. columns, values: per
    node, the set of columns and the key tuple of its positions.
    """

    node: NDArray[np.int64]
    parent: list[int]
    pad: list[bool]
    columns: list[set[int]]
    values: list[tuple[int, ...]]

    def ancestors(self, n: int) -> set[int]:
        """What n attends to: itself (a pad does not) and everything above."""
        seen = set() if self.pad[n] else {n}
        while (n := self.parent[n]) >= 0:
            seen.add(n)
        return seen


def build(
    keys: Sequence[NDArray[np.int64]],
    visible: NDArray[np.bool_] | None = None,
    exact: NDArray[np.bool_] | None = None,
    documents: NDArray[np.int64] | None = None,
    column_key: str | None = None,
) -> Twin:
    batch, length = keys[0].shape
    shown = np.ones((batch, length), bool) if visible is None else visible
    documents = np.zeros((batch, length), int) if documents is None else documents
    twin = Twin(np.full((batch, length), -1, np.int64), [], [], [], [])
    known: dict[tuple[object, ...], int] = {}

    def visit(b: int, t: int, parent: int, column: int, pad: bool) -> int:
        key = tuple(int(k[b, t]) for k in keys)
        code = (parent, key, column if column_key else None, pad)
        if code not in known:
            known[code] = len(twin.parent)
            twin.parent.append(parent)
            twin.pad.append(pad)
            twin.columns.append(set())
            twin.values.append(key)
        node = known[code]
        twin.columns[node].add(column)
        twin.node[b, t] = node
        return node

    for b in range(batch):
        for document in np.unique(documents[b]):
            inside = np.flatnonzero(documents[b] == document)
            kept = [t for t in inside if shown[b, t]]
            origin = 0 if column_key == "absolute" or not kept else int(kept[0])
            last = -1
            for t in inside.tolist():
                if shown[b, t]:
                    last = visit(b, t, last, t - origin, False)
                elif exact is not None and exact[b, t]:
                    visit(b, t, last, t - origin, True)
    return twin
