"""Tree attention on one GPU, by executor and workload: `python -m examples.bench.tree_attention`.

Forward and backward of what the router picks, of the Triton kernels, of FlexAttention with an interval mask (its
BlockMask made before the timing, and inside it), of FlashAttention 2 over keys gathered along each segment's path (as
TRL's tree packing does with version 3), and of causal attention on dense rows of the same tree. Checks ours against
FlexAttention first. Appends to a CSV file: GPU, versions, median and spread in ms, useful TFLOP/s, for the Triton
kernels also computed over useful operations. `--rollouts` adds trees from files. `--sweep` times launch parameters
instead.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import inspect
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from examples.rollout_files import read_rollouts
from treecompile.runtime.ops import attention_lists as al
from treecompile.runtime.ops import attention_triton as at
from treecompile.runtime.ops import plan_header, tree_attention, tree_attention_backward
from treecompile.runtime.ops.attention_router import last_route
from treecompile.runtime.ops.attention_triton import Tiles
from treecompile.runtime.tree import RolloutTree

Rows = list[list[int]]
# Cycles, about a millisecond.
SLEEP = 2_000_000
COLUMNS = (
    "time", "gpu", "torch", "triton", "dtype", "heads", "head_size", "workload", "tokens", "executor", "what", "ms",
    "low", "high", "useful_tflops", "waste", "hardware_tflops",
)  # fmt: skip
# How often all cases of a workload are timed, one after the other.
TURNS = 3
Table = npt.NDArray[np.int32]


def _draw(random: np.random.Generator, count: int) -> list[int]:
    drawn: list[int] = random.integers(0, 10**6, count).tolist()
    return drawn


def tau() -> Rows:
    """A trunk of 6,144 tokens, 4 branches and 16 leaves of 1,024."""
    random = np.random.default_rng(0)
    root = _draw(random, 6144)
    branches = [root + _draw(random, 1024) for _ in range(4)]
    return [branch + _draw(random, 1024) for branch in branches for _ in range(4)]


def random_tree() -> Rows:
    """49 nodes of 100 to 900 tokens, joined where a node has one child."""
    random = np.random.default_rng(1)
    paths = [_draw(random, 500)]
    while len(paths) < 49:
        parent = (len(paths) - 1) // 2 if len(paths) % 2 or random.random() < 0.5 else len(paths) - 2
        paths.append(paths[parent] + _draw(random, int(random.integers(100, 901))))
    return paths


def comb() -> Rows:
    """One row a turn of an agent whose past thinking is stripped: 60 teeth along a growing trunk."""
    random = np.random.default_rng(2)
    rows, path = [], _draw(random, 3000)
    for _ in range(60):
        rows.append(path + _draw(random, int(random.integers(40, 900))))
        path = path + _draw(random, int(random.integers(50, 300)))
    return rows


def treepo() -> Rows:
    """Segment-wise sampling: 14 segments of 512 tokens, up to 16 paths."""
    random = np.random.default_rng(3)
    paths = [_draw(random, 180)]
    for _ in range(14):
        paths = [path + _draw(random, 512) for path in paths]
        paths += paths[: 16 - len(paths)]
    return paths


def _puzzle(seed: int) -> RolloutTree:
    random = np.random.default_rng(seed)
    rows, paths = [], [_draw(random, 60)]
    for _ in range(4):
        grown = [
            path + _draw(random, int(random.integers(1, 6)))
            for path in paths
            for _ in range(int(random.integers(3, 8)))
        ]
        random.shuffle(grown)
        kept = max(1, len(grown) * 2 // 3)
        rows += grown[kept:]
        paths = grown[:kept]
    return RolloutTree.from_rows(rows + paths)


def search(tokens: int) -> Table:
    """Tree search over thoughts of 1 to 5 tokens: many small trees below one prompt of 400 tokens."""
    parts, end, count = [np.array([[0, 400, -1, 0]])], 400, 1
    puzzles = [np.asarray(_puzzle(seed).segments, np.int64) for seed in range(4)]
    while end < tokens:
        table = puzzles[len(parts) % 4].copy()
        size = table[0, 3] if table[0, 2] < 0 else 0
        table[:, [0, 1, 3]] += end
        table[:, 2] = np.where(table[:, 2] >= 0, table[:, 2] + count, 0)
        parts.append(table)
        end, count = end + int(size), count + len(table)
    joined = np.concatenate(parts)
    joined[0, 3] = end
    return joined.astype(np.int32)


def _segments(rows: Rows) -> Table:
    return np.ascontiguousarray(RolloutTree.from_rows(rows).segments, np.int32)


def segments_of(file: str) -> Table:
    read, _ = read_rollouts(file, max_rows=1 << 16, max_tokens=1 << 24)
    return _segments([list(rollout.input_ids) for rollout in read])


WORKLOADS: dict[str, Callable[[], Table]] = {
    "tau": lambda: _segments(tau()),
    "random": lambda: _segments(random_tree()),
    "comb": lambda: _segments(comb()),
    "treepo": lambda: _segments(treepo()),
    "search": lambda: search(100_000),
    "chain": lambda: np.array([[0, 16384, -1, 16384]], np.int32),
}
# Dense rows of the same tree are timed where their pairs fit into a few seconds.
DENSE: dict[str, Callable[[], Rows]] = {"tau": tau, "chain": lambda: [list(range(16384))]}


@dataclass(frozen=True)
class Workload:
    """A tree on the GPU, and random inputs: q, k, v, the output's gradient."""

    name: str
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    useful: int

    @property
    def tokens(self) -> int:
        return self.inputs[0].shape[2]

    @property
    def flops(self) -> float:
        """Useful operations of a forward."""
        q, _, v, _ = self.inputs
        return 2.0 * q.shape[1] * (q.shape[3] + v.shape[3]) * self.useful


def workload(name: str, table: Table, options: argparse.Namespace) -> Workload:
    """Put a tree on the GPU and draw inputs, laid out as projections leave them."""
    length = table[:, 1] - table[:, 0]
    tokens = int(table[:, 1].max())
    end = np.repeat(table[:, 3], length).astype(np.int32)
    depth = (np.arange(tokens) - np.bincount(end, minlength=tokens + 1)[:tokens].cumsum()).astype(np.int32)
    pieces = torch.from_numpy(plan_header(table, depth))
    host = torch.from_numpy(table)
    tensors = torch.from_numpy(end).cuda(), torch.from_numpy(depth).cuda(), host.cuda(), host, pieces

    def draw(heads: int, size: int) -> Tensor:
        return torch.randn(
            1, tokens, heads, size, device="cuda", dtype=getattr(torch, options.dtype)
        ).transpose(1, 2)

    inputs = (
        draw(options.heads, options.head_size),
        draw(options.kv_heads, options.head_size),
        draw(options.kv_heads, options.v_size),
        draw(options.heads, options.v_size),
    )
    return Workload(name, tensors, inputs, int(depth.sum(dtype=np.int64)) + tokens)


# -- executors: what to time --


@dataclass(frozen=True)
class Case:
    """What to time: useful operations, and computed over useful ones where that is known."""

    executor: str
    what: str
    run: Callable[[], Any]
    flops: float
    waste: float | None = None


Timed = Iterator[Case]


def routed(load: Workload) -> Timed:
    """What a model gets: the op, by the router."""
    q, k, v, grad = load.inputs
    tree = (*load.tensors, load.tensors[0][:0], None, q.shape[3] ** -0.5, 0.0, 0)
    out, lse = tree_attention(q, k, v, *tree)
    tree_attention_backward(grad, q, k, v, out, lse, *tree)
    picked = {
        direction: getattr(last_route(direction), "executor", "?") for direction in ("forward", "backward")
    }
    yield Case(f"routed:{picked['forward']}", "forward", lambda: tree_attention(q, k, v, *tree), load.flops)
    yield Case(
        f"routed:{picked['backward']}",
        "backward",
        lambda: tree_attention_backward(grad, q, k, v, out, lse, *tree),
        2.5 * load.flops,
    )


def ours(load: Workload) -> Timed:
    """The Triton kernels, each backward pass alone, and the making of the block lists."""
    q, k, v, grad = load.inputs
    scale = q.shape[3] ** -0.5
    tree = (*load.tensors, None, scale, 0.0, 0)
    call = at.prepare(q, k, v, *load.tensors, scale, 0.0, 0)
    tiles, for_dq, for_dkv = (call.chosen(kernel) for kernel in ("forward", "dq", "dkv"))
    by_query, for_query = (call.pairs(x) / load.useful for x in (tiles, for_dq))
    by_key = call.key_lists(for_dkv).pairs.item() / load.useful
    out, lse = at.triton_forward(q, k, v, *tree)
    yield Case("triton", "forward", lambda: at.triton_forward(q, k, v, *tree), load.flops, by_query)
    # Seven products where five are useful: three by query, four by key.
    yield Case(
        "triton",
        "backward",
        lambda: at.triton_backward(grad, q, k, v, out, lse, *tree),
        2.5 * load.flops,
        (3 * for_query + 4 * by_key) / 5,
    )
    lse2, delta = at.statistics(call, grad, out, lse)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    yield Case(
        "triton",
        "dq",
        lambda: at.query_gradient(call, grad, lse2, delta, for_dq, dq),
        1.5 * load.flops,
        for_query,
    )
    yield Case(
        "triton",
        "dk, dv",
        lambda: at.key_gradients(call, grad, lse2, delta, for_dkv, dk, dv),
        2 * load.flops,
        by_key,
    )

    def lists() -> None:
        al._kept.clear()
        at.triton_forward(q, k, v, *tree)

    yield Case("triton", "forward and lists", lists, load.flops)


def gathered(load: Workload) -> Timed:
    """Keys and values copied along each segment's path, then attention over sequences of different lengths.

    The layout of TRL's tree packing (`trl.experimental.async_grpo.packing`), with torch's FlashAttention 2 for the
    FlashAttention 3 that TRL fetches.
    """
    from torch.nn.attention.varlen import varlen_attn

    paths: list[npt.NDArray[np.int64]] = []
    table = load.tensors[3].numpy()
    for begin, end, parent, _ in table.tolist():
        own = np.arange(begin, end)
        paths.append(np.concatenate([paths[parent], own]) if parent >= 0 else own)
    lengths = table[:, 1] - table[:, 0]
    along = np.array([len(path) for path in paths])
    index = torch.from_numpy(np.concatenate(paths)).cuda()
    del paths
    cu_q, cu_k = (
        torch.from_numpy(np.concatenate([[0], x.cumsum()]).astype(np.int32)).cuda() for x in (lengths, along)
    )
    q, k, v, grad = (x[0].transpose(0, 1).contiguous() for x in load.inputs)
    for x in (q, k, v):
        x.requires_grad_()
    # Early versions of the function take grouped heads without being told.
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def run() -> Any:
        keys, values = (x.index_select(0, index) for x in (k, v))
        return varlen_attn(
            q, keys, values, cu_q, cu_k, int(lengths.max()), int(along.max()), window_size=(-1, 0), **grouped
        )

    out = run()
    yield Case("gathered", "forward", run, load.flops)
    yield Case(
        "gathered",
        "backward",
        lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
        2.5 * load.flops,
    )


def flex(load: Workload) -> Timed:
    """FlexAttention with an interval mask."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v, grad = (x.contiguous() for x in load.inputs)
    for x in (q, k, v):
        x.requires_grad_()
    torch._dynamo.reset()
    run: Any = torch.compile(flex_attention, dynamic=False)
    mask = interval_mask(load.tensors[0])
    out = run(q, k, v, block_mask=mask, enable_gqa=True)
    theirs, mine = (
        out.detach(),
        at.triton_forward(*load.inputs[:3], *load.tensors, None, q.shape[3] ** -0.5, 0.0, 0)[0],
    )
    error = ((theirs - mine).norm() / theirs.norm()).item()
    if not error < 0.01:
        raise RuntimeError(f"{load.name}: ours and FlexAttention differ by {error:.1e}")
    yield Case("flex", "forward", lambda: run(q, k, v, block_mask=mask, enable_gqa=True), load.flops)
    yield Case(
        "flex",
        "forward and mask",
        lambda: run(q, k, v, block_mask=interval_mask(load.tensors[0]), enable_gqa=True),
        load.flops,
    )
    backward = lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)  # noqa: E731
    yield Case("flex", "backward", backward, 2.5 * load.flops)


def interval_mask(end: Tensor) -> Any:
    """A BlockMask from subtree ends: block extrema, no tokens x tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    size = 128
    tokens = end.shape[0]
    blocks = -(-tokens // size)
    missing = blocks * size - tokens
    latest = torch.nn.functional.pad(end, (0, missing)).view(blocks, size).amax(1)
    every = torch.nn.functional.pad(end, (0, missing), value=2**30).view(blocks, size).amin(1)
    at_block = torch.arange(blocks, device=end.device)
    q, k = at_block[:, None], at_block[None]
    full = (k < q) & (every[None] >= (q + 1) * size)
    part = (k <= q) & (latest[None] > q * size) & ~full

    def listed(which: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(which.int(), dim=1, descending=True, stable=True)
        return which.sum(1).int()[None, None], order.int()[None, None]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return BlockMask.from_kv_blocks(
        *listed(part), *listed(full), BLOCK_SIZE=size, mask_mod=visible, seq_lengths=(tokens, tokens)
    )


def dense(load: Workload) -> Timed:
    """Causal attention of the rows, each alone: what sharing saves is not in its rate."""
    if load.name not in DENSE:
        return
    rows = DENSE[load.name]()
    batch, length = len(rows), len(rows[0])
    q, k, v, grad = (
        torch.randn(batch, x.shape[1], length, x.shape[3], device="cuda", dtype=x.dtype) for x in load.inputs
    )
    for x in (q, k, v):
        x.requires_grad_()
    flops = 2.0 * q.shape[1] * (q.shape[3] + v.shape[3]) * batch * length * (length + 1) / 2
    backends = {
        "cudnn dense": torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
        "flash dense": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    }
    for name, backend in backends.items():

        def run(backend: Any = backend) -> Tensor:
            with torch.nn.attention.sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        out = run()
        yield Case(name, "forward", run, flops)
        backward = lambda out=out: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)  # noqa: E731
        yield Case(name, "backward", backward, 2.5 * flops)


EXECUTORS: dict[str, Callable[[Workload], Timed]] = {
    "ours": ours,
    "routed": routed,
    "flex": flex,
    "gathered": gathered,
    "dense": dense,
}


# -- measuring --


def times(function: Callable[[], Any], milliseconds: float) -> list[float]:
    """Sorted times of single calls in ms, by events, after a warm-up.

    The device sleeps before each call, so that the host's share of a launch is not in the times.
    """
    event: Any = torch.cuda.Event
    sleep: Any = torch.cuda._sleep
    function()
    torch.cuda.synchronize()
    found: list[float] = []
    while len(found) < 5 or (sum(found) < milliseconds and len(found) < 200):
        begin, end = (event(enable_timing=True) for _ in range(2))
        sleep(SLEEP)
        begin.record()
        function()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return sorted(found)


def measure(load: Workload, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Lines of the table for one workload. Cases are timed in turn: a GPU's clock drifts by several percent."""
    cases: list[Case] = []
    for name in options.executors.split(","):
        try:
            cases += EXECUTORS[name](load)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            left_out(load, name, error)
    taken: dict[int, list[float]] = {i: [] for i in range(len(cases))}
    for _ in range(TURNS):
        for i in list(taken):
            try:
                taken[i] += times(cases[i].run, options.milliseconds / TURNS)
            except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
                left_out(load, f"{cases[i].executor} {cases[i].what}", error)
                del taken[i]
    for i, found in taken.items():
        case, found = cases[i], sorted(found)
        median = statistics.median(found)
        useful = case.flops / median / 1e9
        yield {
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": _triton_version(),
            "dtype": options.dtype,
            "heads": f"{options.heads}/{options.kv_heads}",
            "head_size": f"{options.head_size}/{options.v_size}",
            "workload": load.name,
            "tokens": load.tokens,
            "executor": case.executor,
            "what": case.what,
            "ms": round(median, 3),
            "low": round(found[len(found) // 10], 3),
            "high": round(found[-1 - len(found) // 10], 3),
            "useful_tflops": round(useful, 1),
            "waste": "" if case.waste is None else round(case.waste, 3),
            "hardware_tflops": "" if case.waste is None else round(case.waste * useful, 1),
        }


def left_out(load: Workload, name: str, error: Exception) -> None:
    """Say what did not run, and why."""
    torch.cuda.empty_cache()
    print(f"{load.name}: {name} left out: {str(error).splitlines()[0][:120]}")


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


SWEEP: dict[str, list[Tiles]] = {
    kernel: [
        Tiles(rows, keys, warps, stages, masked)
        for rows, keys, warps in (
            (64, 64, 4),
            (128, 64, 8),
            (128, 128, 8),
            (64, 32, 4),
            (64, 128, 8),
            (32, 64, 4),
        )
        for stages in (2, 3)
        for masked in (1, 2)
    ]
    for kernel in ("forward", "dq", "dkv")
}


def sweep(load: Workload, options: argparse.Namespace) -> None:
    """Time launch parameters of the three kernels; those that do not fit are left out."""
    q, k, v, grad = load.inputs
    scale = q.shape[3] ** -0.5
    call = at.prepare(q, k, v, *load.tensors, scale, 0.0, 0)
    lse = torch.full(q.shape[:3], 20.0, device="cuda")
    lse2, delta = at.statistics(call, grad, grad, lse)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    kernels: dict[str, Callable[[Tiles], Any]] = {
        "forward": lambda t: at.triton_forward(q, k, v, *load.tensors, None, scale, 0.0, 0, tiles=t),
        "dq": lambda t: at.query_gradient(call, grad, lse2, delta, t, dq),
        "dkv": lambda t: at.key_gradients(call, grad, lse2, delta, t, dk, dv),
    }
    for kernel, run in kernels.items():
        found = []
        for tiles in SWEEP[kernel]:
            try:
                found.append((statistics.median(times(lambda: run(tiles), options.milliseconds)), tiles))  # noqa: B023
            except Exception as error:
                print(f"  {kernel} {tiles}: {type(error).__name__}")
        for median, tiles in sorted(found, key=lambda pair: pair[0])[:6]:
            print(f"  {load.name} {kernel} {median:.3f} ms {tiles}")


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--executors", default=",".join(EXECUTORS))
    for name, value in (("heads", 32), ("kv-heads", 8), ("head-size", 128), ("v-size", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rollouts", nargs="*", default=(), metavar="FILE", help="trees of these rows too")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--milliseconds", type=float, default=100.0, help="time spent on each number")
    parser.add_argument("--csv", default="out/tree_attention.csv")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    kept = Path(options.csv)
    if kept.exists() and kept.read_text().partition("\n")[0].strip() != ",".join(COLUMNS):
        parser.error(
            f"--csv {kept}: it has other columns than {', '.join(COLUMNS)}; move it or name another file"
        )
    tables = {name: WORKLOADS[name] for name in options.workloads.split(",") if name}
    tables |= {Path(file).stem: partial(segments_of, file) for file in options.rollouts}
    for name, make in tables.items():
        load = workload(name, make(), options)
        if options.sweep:
            sweep(load, options)
            continue
        for line in measure(load, options):
            print(
                "{workload:10s} {executor:20s} {what:18s} {ms:9.3f} ms {useful_tflops:7.1f} {waste}".format(
                    **line
                ),
                flush=True,
            )
            append(kept, line)


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to the CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(line)


if __name__ == "__main__":
    main()
