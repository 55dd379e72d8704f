"""Sharing figures of a tree."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sharing"]


@dataclass(frozen=True)
class Sharing:
    """How much a tree saves, in tokens and in attended pairs.

    grid: grid positions B*T. kept: grid positions that are not masked. packed: N.
    grid_pairs: pairs of a dense causal kernel on the padded grid, B*T(T+1)/2.
    kept_pairs: the same over kept tokens, sum of L(L+1)/2 over trajectories of length L.
    packed_pairs: attended pairs in the tree, the sum of all depths.
    """

    grid: int
    kept: int
    packed: int
    grid_pairs: int
    kept_pairs: int
    packed_pairs: int

    @property
    def tokens(self) -> float:
        """Kept tokens per packed token."""
        return self.kept / max(self.packed, 1)

    @property
    def pairs(self) -> float:
        """Attended pairs of the kept tokens per pair of the tree."""
        return self.kept_pairs / max(self.packed_pairs, 1)

    def __str__(self) -> str:
        return (
            f"{self.packed:,} packed of {self.kept:,} kept and {self.grid:,} grid tokens "
            f"({self.tokens:.2f}x tokens, {self.pairs:.2f}x pairs)"
        )
