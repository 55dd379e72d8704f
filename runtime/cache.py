"""A bounded cache keyed by the contents of arrays."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from treecompile.runtime.stretches import Array

__all__ = ["TreeCache", "bits"]

V = TypeVar("V")
Content: TypeAlias = "Array | torch.Tensor | None"

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLES = 1024  # values per array that enter the fingerprint


@dataclass(frozen=True)
class _Entry(Generic[V]):
    key: Hashable
    contents: tuple[Content, ...]
    size: int
    value: V

    @cached_property
    def fingerprints(self) -> tuple[int, ...]:
        return tuple(map(_fingerprint, self.contents))

    def holds(self, arrays: Sequence[Content]) -> bool:
        return all(map(_equal, self.contents, arrays))


class TreeCache(Generic[V]):
    """Values (trees, plans, device tensors) by the contents of the arrays they were built from.

    An entry is used after all its contents were compared, on the arrays' own device: first the last one used. Where a
    comparison waits for a device, a fingerprint of a few samples says which of the others to look at. Copies are
    kept, so the caller may write into the arrays afterwards.
    Least recently used entries leave first. Thread-safe; a value is built once, under the lock.

    Args:
        capacity: number of entries.
        max_bytes: bound on the kept copies, in bytes, over all devices. Larger arrays are not cached.

    Example:
        >>> cache = TreeCache(capacity=2)
        >>> ids = np.array([[1, 2], [1, 3]])
        >>> cache.get([ids], lambda: "built"), cache.get([ids.copy()], lambda: "not called")
        ('built', 'built')
        >>> cache.get([ids], lambda: "for another device", device="cuda:0")
        'for another device'
        >>> cache.hits, cache.misses, len(cache)
        (1, 2, 2)

    Notes:
        A hit costs one comparison of the arrays, memory-bound; a miss one copy beside the build.
    """

    def __init__(self, capacity: int = 8, max_bytes: int = 2**31) -> None:
        self.capacity, self.max_bytes = capacity, max_bytes
        self.hits = self.misses = 0
        self._entries: list[_Entry[V]] = []
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self,
        arrays: Sequence[Content],
        build: Callable[[], V],
        *,
        device: torch.device | str = "cpu",
        options: Hashable = (),
    ) -> V:
        """The value for these contents, options and device; built if there is none.

        Args:
            arrays: numpy arrays or tensors (on any device); None where an argument is absent.
            build: makes the value.
            device: the device that the value lives on.
            options: whatever else the value depends on.

        Returns:
            the cached or new value; the same object to all callers, which must not modify it.
        """
        with self._lock:
            key = (options, str(device), tuple(map(_form, arrays)))
            at = self._find(key, arrays)
            if at is not None:
                self._entries.append(self._entries.pop(at))
                self.hits += 1
                return self._entries[-1].value
            self.misses += 1
            value = build()
            size = sum(map(_size, arrays))
            if size <= self.max_bytes and self.capacity > 0:
                self._entries.append(_Entry(key, tuple(map(_copy, arrays)), size, value))
                self._shrink()
            return value

    def _find(self, key: Hashable, arrays: Sequence[Content]) -> int | None:
        """The entry of these arrays. The last one used is the likeliest: for the others, fingerprints are taken."""
        alike = [i for i, entry in enumerate(self._entries) if entry.key == key]
        if alike and self._entries[alike[-1]].holds(arrays):
            return alike[-1]
        found = tuple(map(_fingerprint, arrays)) if len(alike) > 1 else ()
        for i in reversed(alike[:-1]):
            if self._entries[i].fingerprints == found and self._entries[i].holds(arrays):
                return i
        return None

    def _shrink(self) -> None:
        total = sum(entry.size for entry in self._entries)
        while len(self._entries) > self.capacity or total > self.max_bytes:
            total -= self._entries.pop(0).size

    def clear(self) -> None:
        """Forget all entries."""
        with self._lock:
            self._entries.clear()


def _form(array: Content) -> Hashable:
    if array is None:
        return None
    device = array.device if isinstance(array, torch.Tensor) else "numpy"
    return device, array.dtype, tuple(array.shape)


def _fingerprint(array: Content) -> int:
    """Checksum of samples spread over rows and columns: cheap, and never taken for equality. 0 on the host."""
    if not isinstance(array, torch.Tensor) or array.device.type == "cpu" or 0 in array.shape:
        return 0
    samples = bits(array)[_sampled(tuple(array.shape), array.device)]
    return zlib.crc32(samples.cpu().numpy().tobytes())


@lru_cache(maxsize=64)
def _sampled(shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Where the samples of arrays of a shape are: an index by dim, on the device."""
    at = np.unique(np.linspace(0, int(np.prod(shape)) - 1, _SAMPLES).astype(np.int64))
    return tuple(torch.from_numpy(i).to(device) for i in np.unravel_index(at, shape))


def _equal(old: Content, new: Content) -> bool:
    """Whether arrays of one form are equal: by bits, as 0.0 and -0.0 are not, and a NaN is."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and new.device.type != "cpu":
        return torch.equal(bits(old), bits(new))
    if old is None or new is None:
        return old is new
    # Not by torch: on the host it wakes threads for small arrays, and waits for them.
    return bool((_on_host(old) == _on_host(new)).all())


def bits(array: torch.Tensor) -> torch.Tensor:
    """Floats as integers of their bits; other tensors as they are.

    Example:
        >>> bits(torch.tensor([0.0, -0.0], dtype=torch.float16)).tolist()
        [0, -32768]
    """
    array = array.detach().resolve_conj().resolve_neg()
    return array.view(_INTEGERS[array.element_size()]) if array.is_floating_point() else array


def _on_host(array: Array | torch.Tensor) -> Array:
    if isinstance(array, torch.Tensor):
        return bits(array).numpy()
    return array.view(f"i{array.itemsize}") if array.dtype.kind == "f" else array


def _copy(array: Content) -> Content:
    return (
        array.detach().clone() if isinstance(array, torch.Tensor) else None if array is None else array.copy()
    )


def _size(array: Any) -> int:
    return 0 if array is None else int(array.nbytes)
