"""Predicted times of a tree attention, by executor and direction: what the router compares.

A time is the larger of two sums, in microseconds:

- of the GPU: operations over a rate, bytes over the bandwidth, and a gap for each launch;
- of the host: its share of each launch. A call of few small pieces is as fast as Python issues it.

Pieces add what cuDNN takes to plan new shapes, spread over the calls that a shape serves. All numbers below are of an
H200 (`examples/bench/attention_router.py` prints them beside the measured times); other devices of compute capability
9 differ in rates, less in their ratios, which is all that the router reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from treecompile.runtime.ops.attention_kernels import Kernel
from treecompile.runtime.ops.attention_launch import Launch
from treecompile.runtime.ops.attention_plan import CAUSAL, FULL, useful_pairs
from treecompile.runtime.ops.attention_triton import (
    SHORT,
    Tiles,
    choice_for,
    column_blocks,
    padded_size,
    shared_heads,
)

__all__ = [
    "Problem",
    "pieces_microseconds",
    "planned_shapes",
    "planning_microseconds",
    "triton_microseconds",
]

# Operations per microsecond (10^6 a unit, so TFLOP/s) that each kernel reaches on long pieces, by the larger head size
# that it computes with. Operations are those that it executes: the backward kernels of Triton compute 7 products where
# 5 are useful.
RATES: dict[tuple[str, str], dict[int, float]] = {
    ("triton", "forward"): {64: 455, 128: 530, 256: 575},
    ("triton", "backward"): {64: 550, 128: 640, 256: 405},
    ("pieces-cudnn", "forward"): {64: 480, 128: 640, 256: 660},
    ("pieces-cudnn", "backward"): {64: 430, 128: 560, 256: 415},
    ("pieces-flash", "forward"): {64: 305, 128: 335, 256: 308},
    ("pieces-flash", "backward"): {64: 272, 128: 308, 256: 255},
    ("masked", "forward"): {64: 100, 128: 100, 256: 60},
    ("masked", "backward"): {64: 80, 128: 80, 256: 50},
}
# Keys per query that a whole piece costs beside its pairs: cut tiles on the diagonal, and a short piece's idle units.
RAMP = {"pieces-cudnn": 256, "pieces-flash": 128}
# Pairs of a tile by index over pairs of a tile by the copy engine: its loads are gathers, and it computes a mask.
MASKED_PAIR = 2.0
BANDWIDTH = 3.5e6
# Of a launch: an attention kernel's, and a small op's around it.
CALL_GAP, OP_GAP = 8.0, 3.0
CALL_HOST, OP_HOST = 25.0, 6.0
# Small ops around a piece: what is stored, what is merged, what has its mask made.
STORE_OPS, MERGE_OPS, MASK_OPS = 2, 8, 20
# Launches of the Triton executor: GPU kernels, and what Python does for them: as long as for one piece.
TRITON_CALLS = {"forward": 1, "backward": 4}
TRITON_HOST = {"forward": 60.0, "backward": 60.0}
# What cuDNN takes to plan a shape that is new to a process, and how many calls then use it. The rounded lengths of
# squares (`CudnnKernel.span`) are few and come back from step to step; the sizes of a rectangle are of one tree: its
# layers use them, and their recomputation.
PLANNING = {"forward": 150e3, "backward": 250e3}
SPAN_CALLS, SHAPE_CALLS = 8192, 64


@dataclass(frozen=True)
class Problem:
    """One tree attention without its tree.

    Attributes:
        heads, kv_heads: numbers of query and of K/V heads.
        tokens: N.
        qk_size, v_size: head sizes.
        dtype: of q.
        scale: factor on the logits.
        softcap: 0 for none.
        window: in columns, 0 for none.
    """

    heads: int
    kv_heads: int
    tokens: int
    qk_size: int
    v_size: int
    dtype: torch.dtype
    scale: float
    softcap: float
    window: int


def _rate(kernel: str, direction: str, size: int) -> float:
    rates = RATES[kernel, direction]
    return 1e6 * rates[next((known for known in rates if size <= known), max(rates))]


def _pair_operations(direction: str, heads: int, qk_size: int, v_size: int) -> float:
    """Useful operations of one pair: two products forward, five backward."""
    sizes = qk_size + v_size if direction == "forward" else 3 * qk_size + 2 * v_size
    return 2.0 * heads * sizes


# -- pieces --


def pieces_microseconds(
    executor: str, direction: str, problem: Problem, launch: Launch, kernel: Kernel
) -> float:
    """Predict the pieces executor.

    Args:
        executor: "pieces-cudnn" or "pieces-flash".
        direction: "forward" or "backward".
        problem: sizes of the call.
        launch: its launches, as the executor runs them.
        kernel: whose kernel it runs them with.

    Returns:
        Microseconds.
    """
    qk_size, v_size = kernel.sizes(problem.qk_size, problem.v_size)
    operations = _pair_operations(direction, problem.heads, qk_size, v_size)
    rate = _rate(executor, direction, max(qk_size, v_size))
    masked_rate = _rate("masked", direction, max(qk_size, v_size))
    gpu, ops = 0.0, 4
    for piece in launch.rectangles:
        queries, keys = piece.q_end - piece.q_start, piece.k_end - piece.k_start
        ops += STORE_OPS if piece.first else MERGE_OPS
        if piece.kind == CAUSAL:
            span = kernel.span(queries)
            gpu += operations * span * (span / 2 + RAMP[executor]) / rate
        elif piece.kind == FULL:
            gpu += operations * queries * (keys + RAMP[executor]) / rate
        else:
            gpu += operations * queries * keys / masked_rate
            ops += MASK_OPS
    for batch in launch.batches:
        gpu += operations * len(batch.q_start) * batch.q_size * batch.k_size / masked_rate
        ops += MERGE_OPS + MASK_OPS
    gpu += launch.calls * CALL_GAP + ops * OP_GAP + _piece_bytes(direction, problem, launch) / BANDWIDTH
    host = launch.calls * CALL_HOST + ops * OP_HOST
    planned = planning_microseconds(direction, launch, kernel) if executor == "pieces-cudnn" else 0.0
    return max(gpu, host) + planned


def planning_microseconds(direction: str, launch: Launch, kernel: Kernel) -> float:
    """Predict one call's part of what cuDNN takes to plan the shapes of a launch."""
    spans, shapes = planned_shapes(launch, kernel)
    return PLANNING[direction] * (spans / SPAN_CALLS + shapes / SHAPE_CALLS)


def planned_shapes(launch: Launch, kernel: Kernel) -> tuple[int, int]:
    """Count the shapes of a launch: of squares, and of rectangles."""
    spans = {kernel.span(r.q_end - r.q_start) for r in launch.squares}
    shapes = {(r.q_end - r.q_start, r.k_end - r.k_start) for r in launch.rectangles if r.kind == FULL}
    return len(spans), len(shapes)


def _piece_bytes(direction: str, problem: Problem, launch: Launch) -> float:
    """Bytes moved around the kernels: layouts changed, pieces stored or merged, results cast."""
    queries = problem.heads * (problem.v_size if direction == "forward" else problem.qk_size)
    keys = 0 if direction == "forward" else problem.kv_heads * (problem.qk_size + problem.v_size)
    if launch.single:
        return 4.0 * problem.tokens * (queries + keys)
    # In half precision a store reads and writes 2 bytes; a sum is in fp32, and a merge reads the piece twice.
    total, store, merge = (2, 4, 18) if launch.disjoint else (4, 6, 18 if direction == "forward" else 10)
    moved = float((total + 2) * problem.tokens * (queries + keys) + 4 * problem.tokens * queries)
    pieces = [(r.q_end - r.q_start, r.k_end - r.k_start, r.first) for r in launch.rectangles]
    pieces += [(len(b.q_start) * b.q_size, len(b.k_start) * b.k_size, b.first) for b in launch.batches]
    for q_rows, k_rows, first in pieces:
        moved += (q_rows * queries + k_rows * keys) * (store if first else merge)
    return moved


# -- the Triton kernels --


def triton_microseconds(direction: str, problem: Problem, segments: bytes) -> float:
    """Predict the Triton executor.

    Args:
        direction: "forward" or "backward".
        problem: sizes of the call.
        segments: content of the segment table, int32 [S, 4].

    Returns:
        Microseconds.
    """
    choice = choice_for(problem.qk_size, problem.v_size)
    qk_size, v_size = sum(column_blocks(problem.qk_size)), padded_size(problem.v_size)
    rate = _rate("triton", direction, max(qk_size, v_size))
    group = problem.heads // problem.kv_heads
    moved = TRITON_CALLS[direction] * CALL_GAP
    if direction == "forward":
        pairs = _query_pairs(segments, choice.forward, choice.short_forward, group)
        operations = pairs * (qk_size + v_size)
    else:
        operations = _query_pairs(segments, choice.dq, choice.short_dq, group) * (2 * qk_size + v_size)
        operations += _key_pairs(segments, choice.dkv, group) * 2 * (qk_size + v_size)
        moved += 4.0 * problem.tokens * problem.heads * problem.v_size / BANDWIDTH
    return max(2.0 * problem.heads * operations / rate + moved, TRITON_HOST[direction])


def _query_pairs(segments: bytes, tiles: Tiles, short: Tiles, group: int) -> float:
    """Pairs that query blocks cost, with `short` tiles where the executor takes them."""
    shape = _tree_shape(segments)
    pairs = _block_pairs(shape, short, group)
    return pairs if pairs < SHORT * shape.tokens else _block_pairs(shape, tiles, group)


def _block_pairs(shape: _TreeShape, tiles: Tiles, group: int) -> float:
    """Pairs of full tiles, and those of masked tiles times `MASKED_PAIR`.

    A block packs into masked tiles half a tile of each run of its ancestors, its own tokens, as many whose subtrees end
    in it, and padding of half a tile.
    """
    tokens = tiles.rows // shared_heads(group, tiles.rows)
    found = shape.tokens * (shape.runs * tiles.keys / 2 + tokens)
    masked = found + shape.tokens * (tokens + tiles.keys / 2)
    return max(shape.useful - found, 0.0) + MASKED_PAIR * masked


@lru_cache(maxsize=64)
def _key_pairs(segments: bytes, tiles: Tiles, group: int) -> float:
    """Pairs that key blocks cost: the queries below any of a block's keys, masked unless all of its keys see them."""
    table = _table(segments)
    tokens = int(table[:, 1].max(initial=0))
    end = np.repeat(table[:, 3], table[:, 1] - table[:, 0])
    begin = np.arange(0, tokens, tiles.keys)
    every = np.minimum.reduceat(end, begin)
    high = np.maximum(np.maximum.reduceat(end, begin), begin)
    behind = np.minimum(begin + tiles.keys, tokens)
    full = np.maximum(every - behind, 0) // tiles.rows * tiles.rows
    masked = high - begin - full + tiles.rows // shared_heads(group, tiles.rows)
    return float((full + MASKED_PAIR * masked).sum() * tiles.keys)


@dataclass(frozen=True)
class _TreeShape:
    """What costs read of a tree: tokens, visible pairs, and runs of consecutive ancestors of a token, on average."""

    tokens: int
    useful: int
    runs: float


@lru_cache(maxsize=64)
def _tree_shape(segments: bytes) -> _TreeShape:
    table = _table(segments)
    length = table[:, 1] - table[:, 0]
    crossed: list[int] = []
    for row, (start, _, parent, end) in enumerate(table.tolist()):
        above = crossed[parent] if parent >= 0 else 0
        crossed.append(above + (not (parent == row - 1 >= 0 and end > start)))
    tokens = int(length.sum())
    return _TreeShape(tokens, useful_pairs(table), float(np.dot(crossed, length)) / max(tokens, 1))


def _table(segments: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(segments, np.int32).reshape(-1, 4).astype(np.int64)
