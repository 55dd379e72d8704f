"""Index sequences in run-length form, and the dtype of indices."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Stretches", "fragmented", "index_dtype", "ramps"]

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Stretches:
    """A sequence of flat grid positions in run-length form: R stretches, one behind the other."""

    start: Array
    length: Array

    @functools.cached_property
    def offset(self) -> Array:
        """[R] where each stretch begins in the sequence."""
        offset: Array = np.cumsum(self.length) - self.length
        return offset

    @property
    def total(self) -> int:
        return int(self.length.sum())

    def index(self) -> Array:
        """The sequence itself, int64."""
        return ramps(self.start, self.length, np.dtype(np.int64))

    def _pairs(self) -> Iterator[tuple[slice, slice]]:
        """(slice of the grid, slice of the sequence)."""
        for start, size, at in zip(
            self.start.tolist(), self.length.tolist(), self.offset.tolist(), strict=True
        ):
            yield slice(start, start + size), slice(at, at + size)

    def take(self, flat: Array) -> Array:
        """``flat[index()]``."""
        if fragmented(self.length):
            return flat[self.index()]
        out: Array = np.empty(self.total, flat.dtype)
        for grid, own in self._pairs():
            out[own] = flat[grid]
        return out

    def put(self, flat: Array, values: Array) -> None:
        """``flat[index()] = values``."""
        if fragmented(self.length):
            flat[self.index()] = values
            return
        for grid, own in self._pairs():
            flat[grid] = values[own]

    def slices(self, begin: Array, length: Array) -> tuple[Stretches, Array]:
        """The stretches of the concatenated slices ``[begin, begin + length)`` of the sequence, length >= 1.

        Returns:
            the stretches, and the number of the slice that each belongs to.
        """
        low = np.searchsorted(self.offset, begin, side="right") - 1
        count = np.searchsorted(self.offset, begin + length - 1, side="right") - low
        run = ramps(low, count, np.dtype(np.int64))
        piece = np.repeat(np.arange(len(begin)), count)
        head = np.maximum(self.offset[run], begin[piece])
        tail = np.minimum(self.offset[run] + self.length[run], (begin + length)[piece])
        return Stretches(self.start[run] + head - self.offset[run], tail - head), piece


def fragmented(length: Array) -> bool:
    """True where a Python step per stretch would cost more than an index per token."""
    return int(length.sum()) < 256 * len(length)


def index_dtype(limit: int) -> np.dtype[Any]:
    """int32 while every index fits (half the memory traffic), else int64."""
    return np.dtype(np.int32 if limit < 2**31 else np.int64)


def ramps(offset: Array, length: Array, dtype: np.dtype[Any]) -> Array:
    """Concatenation of ``offset[s] + arange(length[s])`` over s. O(total length)."""
    total = int(length.sum())
    out: Array = np.empty(total, dtype)
    if not fragmented(length):
        ramp, begin = np.arange(int(length.max(initial=0)), dtype=dtype), 0
        for first, size in zip(offset.tolist(), length.tolist(), strict=True):
            np.add(ramp[:size], first, out=out[begin : begin + size])
            begin += size
        return out
    ends = np.cumsum(length)
    np.add(np.repeat((offset - ends + length).astype(dtype), length), np.arange(total, dtype=dtype), out=out)
    return out
