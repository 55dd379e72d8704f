"""The tree of one batch on one device: the tensors that packed graphs take, and the layouts of grid regions."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from treecompile.runtime.cache import TreeCache as ContentCache
from treecompile.runtime.cache import bits
from treecompile.runtime.ops import plan_header, plan_pieces
from treecompile.runtime.tree import RolloutTree

__all__ = ["PackedBatch", "RegionTensors", "TreeCache", "TreeTensors"]

V = TypeVar("V")

_KEPT_REGIONS = 16
_PROGRAMS = 4  # whose plans are kept for each batch
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
# Bound on the copies of arguments that plans are compared with.
_PLANNED_BYTES = 2**28


@dataclass(frozen=True)
class TreeTensors:
    """The tree as arguments of the packed graph, in the order that every tree op takes them.

    Attributes:
        subtree_end: int32 [N]; column: int32 [N].
        segments, segments_host: int32 [S, 4] on the device and on the host.
        pieces: int32 [P, 6] on the host, the plan of the pieces executor: its first row alone on CUDA, where the
            Triton executor is the rule.
        blocks: int32 [0] on the device, reserved for block lists.
        chain_end, chain_segments: `subtree_end` and `segments_host` for recurrences and convolutions, in which a leaf
            pad is a row of one token: those that a chained graph has come before all tokens of their rows.
    """

    subtree_end: Tensor
    column: Tensor
    segments: Tensor
    segments_host: Tensor
    pieces: Tensor
    blocks: Tensor
    chain_end: Tensor
    chain_segments: Tensor


@dataclass(frozen=True)
class RegionTensors:
    """The layout of a grid region on the device.

    Attributes:
        rows: int64 [H] rows of the *parent* region that this one uses.
        row_index: int64 [M] row of each region position, -1 dropped; offsets [H + 1], positions [K]: its CSR inverse.
        multiplicity: int64 [H] how many region positions each row stands for.
        packed: int64 [H] packed tokens of the rows, on the host.
    """

    rows: Tensor
    row_index: Tensor
    offsets: Tensor
    positions: Tensor
    multiplicity: Tensor
    packed: np.ndarray[Any, Any] = field(repr=False)


class PackedBatch:
    """A rollout tree on a device.

    Args:
        tree: the tree.
        device: where the packed graph runs.
    """

    def __init__(self, tree: RolloutTree, device: torch.device) -> None:
        self.tree, self.device = tree, device
        self._layouts: dict[Any, RegionTensors] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def sharing(self) -> float:
        """Kept grid positions for one packed token."""
        kept = int(np.count_nonzero(self.tree.row_index >= 0))
        return kept / max(self.tree.n, 1)

    @functools.cached_property
    def tensors(self) -> TreeTensors:
        segments = np.ascontiguousarray(self.tree.segments, np.int32)
        host = torch.from_numpy(segments)
        plan = plan_header if self.device.type == "cuda" else plan_pieces
        end = self.tree.tensor("subtree_end", self.device, torch.int32)
        chain_end, chain_segments = end, host
        if bool((segments[:, 3] == segments[:, 0]).any()):
            chain_end = torch.maximum(
                end, torch.arange(1, len(end) + 1, dtype=torch.int32, device=self.device)
            )
            chain_segments = host.clone()
            chain_segments[:, 3] = torch.maximum(host[:, 3], host[:, 1])
        return TreeTensors(
            end,
            self.tree.tensor("column", self.device, torch.int32),
            host.to(self.device),
            host,
            torch.from_numpy(plan(segments, self.tree.column)),
            torch.zeros(0, dtype=torch.int32, device=self.device),
            chain_end,
            chain_segments,
        )

    @functools.cached_property
    def first(self) -> Tensor:
        """int64 [N]: a grid position (flat) of each packed token."""
        return self.tree.tensor("first", self.device)

    @functools.cached_property
    def first_column(self) -> Tensor:
        """int64 [N]: the grid column of that position."""
        return self.first % max(self.tree.length, 1)

    def pack(self, value: Tensor, batched: bool, shape: tuple[int, ...]) -> Tensor:
        """Grid values at packed tokens, in the packed shape (-1 stands for N)."""
        index = self.first if batched else self.first_column
        dtype = value.dtype
        # PyTorch selects no unsigned integers but bytes.
        value = value.view(_SIGNED[dtype]) if dtype in _SIGNED else value
        return value.reshape(-1).index_select(0, index).reshape(shape).view(dtype)

    def layout(self, region: Sequence[tuple[Any, ...]], values: dict[str, Any]) -> RegionTensors:
        """The layout of a region; slices are kept, selections by a mask are made anew.

        Args:
            region: steps from the whole grid.
            values: named bounds and masks.
        """
        steps = tuple(
            (kind, *(values[b] if isinstance(b, str) else b for b in bounds)) for kind, *bounds in region
        )
        masked = any(kind == "mask" for kind, *_ in steps)
        if masked:
            return self._make(steps)
        with self._lock:
            if steps not in self._layouts:
                if len(self._layouts) >= _KEPT_REGIONS:
                    self._layouts.pop(next(iter(self._layouts)))
                self._layouts[steps] = self._make(steps)
            return self._layouts[steps]

    def _make(self, steps: tuple[tuple[Any, ...], ...]) -> RegionTensors:
        grid = np.arange(self.tree.batch * self.tree.length).reshape(self.tree.batch, self.tree.length)
        parent: np.ndarray[Any, Any] | None = None
        for i, (kind, *bounds) in enumerate(steps):
            if i == len(steps) - 1:
                parent = None if i == 0 else self.tree.layout(grid.reshape(-1)).rows
            if kind == "slice":
                grid = grid[:, slice(*bounds)]
            else:
                mask = bounds[0].cpu().numpy()
                grid = grid[mask.reshape(grid.shape)].reshape(1, -1)
        layout = self.tree.layout(grid.reshape(-1) if steps else None)
        rows = layout.rows if parent is None else np.searchsorted(parent, layout.rows)

        def send(array: np.ndarray[Any, Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.device)

        return RegionTensors(
            send(rows), send(layout.row_index), send(layout.offsets), send(layout.positions),
            send(np.diff(layout.offsets)), layout.rows,
        )  # fmt: skip


class TreeCache:
    """Packed batches and plans by content, bounded: policy, reference and old-log-prob passes share one tree.

    Args:
        capacity: batches kept; of each there may be plans of several programs.
    """

    def __init__(self, capacity: int = 8) -> None:
        self._cache: ContentCache[PackedBatch] = ContentCache(capacity)
        self._plans: ContentCache[Any] = ContentCache(_PROGRAMS * capacity, max_bytes=_PLANNED_BYTES)

    def get(
        self,
        keys: Sequence[Tensor],
        *,
        visible: Tensor | None,
        exact: Tensor | None,
        documents: Tensor | None,
        column_key: Any,
        device: torch.device,
    ) -> PackedBatch:
        """The packed batch of these key columns; see :meth:`RolloutTree.from_grid`."""

        def build() -> PackedBatch:
            tree = RolloutTree.from_grid(
                [bits(key) for key in keys],
                visible=visible,
                exact=exact,
                documents=documents,
                column_key=column_key,
            )
            return PackedBatch(tree, device)

        return self._cache.get([*keys, visible, exact, documents], build, device=device, options=column_key)

    def plan(self, program: int, arguments: Sequence[Any], build: Callable[[], V]) -> V:
        """What a program makes of its arguments before it runs, once for equal ones.

        Args:
            program: number of the program.
            arguments: tensors, compared by content, and numbers. The ambient autocast, default dtype and CUDA stream
                count, too.
            build: makes the plan; it must not hold the memory of an argument.
        """
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        numbers = tuple(None if isinstance(x, Tensor) else (type(x), repr(x)) for x in arguments)
        found: V = self._plans.get(tensors, build, options=(program, numbers, _ambient(tensors)))
        return found

    def clear(self) -> None:
        """Forget all batches and plans."""
        self._cache.clear()
        self._plans.clear()


def _ambient(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """State around a call that its plan depends on."""
    devices = dict.fromkeys(x.device for x in tensors)
    return torch.get_default_dtype(), *(
        (
            device.type,
            torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
            torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None,
        )
        for device in devices
    )
