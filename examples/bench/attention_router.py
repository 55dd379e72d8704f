"""Tree attention on one GPU by executor, and what the router makes of it: `python -m examples.bench.attention_router`.

First each head size is tried on cuDNN's kernels. Then every executor's results, its gradients from another one's
forward, are compared with the reference in fp32, and on each workload with each other. Per workload and direction: the
time of each executor on the GPU and what the host takes for a call, what was predicted, what was picked, and what the
pick lost against the fastest. Times are of shapes that are planned; what cuDNN took to plan them is printed beside.
Predictions are in brackets, the part of them that stands for planning after a plus.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.bench.tree_attention import WORKLOADS, Table, search, times
from treecompile.runtime.ops import (
    plan_header,
    tree_attention,
    tree_attention_backward,
    tree_attention_reference,
)
from treecompile.runtime.ops.attention_costs import Problem, planned_shapes, planning_microseconds
from treecompile.runtime.ops.attention_kernels import Kernel, Tile, choose_kernel
from treecompile.runtime.ops.attention_plan import useful_pairs
from treecompile.runtime.ops.attention_router import (
    MOST_SEGMENTS,
    VENDORS,
    Route,
    device_of,
    force,
    launched,
    problem_of,
    route,
)

EXECUTORS = ("triton", *VENDORS)
Results = dict[str, Tensor]
# Relative difference in norm that bf16 results of two kernels may have.
AGREE = 0.02
# What did not run or did not agree: the exit status.
FAILED: list[str] = []


def chains(*lengths: int) -> Table:
    """Sequences that share nothing."""
    end = np.cumsum(lengths)
    return np.stack([end - lengths, end, np.full(len(lengths), -1), end], 1).astype(np.int32)


TREES: dict[str, Callable[[], Table]] = {
    **{name: WORKLOADS[name] for name in ("tau", "random", "comb", "treepo")},
    "search": lambda: search(30_000),
    "chains": lambda: chains(5120, 2048, 6000, 3333, 4096, 1024, 7100, 2500),
    **{f"chain {n}": partial(chains, n) for n in (512, 1024, 2048, 4096, 8192, 16384, 10_000)},
    "long fork": lambda: np.array(
        [[0, 12288, -1, 24576], [12288, 18432, 0, 18432], [18432, 24576, 0, 24576]], np.int32
    ),
    "small": lambda: np.array(
        [[0, 700, -1, 2500], [700, 1500, 0, 1500], [1500, 1529, 0, 1529], [1529, 2500, 0, 2500]], np.int32
    ),
}
# Workloads by heads and head sizes: "query heads/K/V heads/Dqk/Dv". The rest of a model family costs less time here.
CASES: dict[tuple[int, int, int, int], tuple[str, ...]] = {
    (32, 8, 128, 128): tuple(name for name in TREES if name != "small"),
    (16, 16, 192, 128): ("chain 16384", "chain 4096", "tau"),
    (32, 8, 64, 64): ("chain 16384", "chain 4096", "tau"),
    (16, 4, 256, 256): ("chain 16384", "chain 4096", "tau"),
}


@dataclass(frozen=True)
class Load:
    """A tree on the GPU, as the ops take it, random inputs as projections leave them, and visible pairs."""

    problem: Problem
    tree: tuple[Any, ...]
    inputs: tuple[Tensor, Tensor, Tensor]
    grad: Tensor
    pairs: int

    @property
    def operations(self) -> float:
        """Useful ones of a forward."""
        return 2.0 * self.problem.heads * (self.problem.qk_size + self.problem.v_size) * self.pairs

    def forward(self) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = tree_attention(*self.inputs, *self.tree)
        return found

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = tree_attention_backward(self.grad, *self.inputs, out, lse, *self.tree)
        return found

    def route(self, direction: str) -> Route:
        """What the router picks."""
        return route(direction, self.problem, device_of(self.grad.device), self.tree[3], self.tree[4])

    def shapes(self, direction: str) -> tuple[int, float]:
        """How many shapes cuDNN plans for this tree, and what the prediction counts for that."""
        content = (x.numpy().tobytes() for x in self.tree[3:5])
        launch, kernel = launched("pieces-cudnn", self.problem, *content)
        return sum(planned_shapes(launch, kernel)), planning_microseconds(direction, launch, kernel)


def load_of(table: Table, sizes: tuple[int, int, int, int]) -> Load:
    """Put a tree on the GPU and draw inputs."""
    heads, kv_heads, qk_size, v_size = sizes
    length, tokens = table[:, 1] - table[:, 0], int(table[:, 1].max())
    end = np.repeat(table[:, 3], length).astype(np.int32)
    column = (np.arange(tokens) - np.bincount(end, minlength=tokens + 1)[:tokens].cumsum()).astype(np.int32)
    host = torch.from_numpy(table)
    on_gpu = [torch.from_numpy(x).cuda() for x in (end, column, table)]
    plan = torch.from_numpy(plan_header(table, column))
    tree = (*on_gpu, host, plan, on_gpu[0][:0], None, qk_size**-0.5, 0.0, 0)

    def draw(count: int, size: int) -> Tensor:
        return torch.randn(1, tokens, count, size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    inputs = draw(heads, qk_size), draw(kv_heads, qk_size), draw(kv_heads, v_size)
    problem = problem_of(*inputs, qk_size**-0.5, 0.0, 0)
    return Load(problem, tree, inputs, draw(heads, v_size), useful_pairs(table))


# -- agreement --


def results(load: Load, executor: str, other: str) -> Results:
    """Output and log-sum-exp of an executor, and its gradients from a forward by `other`."""
    with force(executor, executor):
        out, lse = load.forward()
    with force(other, executor):
        given = load.forward()
        grads = load.backward(*given)[:3]
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


def reference(load: Load) -> Results:
    """The same in fp32, with the whole matrix of logits."""
    q, k, v = (x.float().requires_grad_() for x in load.inputs)
    out, lse = tree_attention_reference(q, k, v, load.tree[0], load.tree[1], scale=load.problem.scale)
    grads = torch.autograd.grad(out, (q, k, v), load.grad.float())
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))


def differences(found: Results, wanted: Results) -> dict[str, float]:
    """Relative differences in norm."""
    return {
        name: float((found[name].float() - x.float()).norm() / x.float().norm())
        for name, x in wanted.items()
        if name in found
    }


def compare(title: str, found: Results, wanted: Results) -> None:
    """Print the largest difference, and note those that roundings do not explain."""
    apart = differences(found, wanted)
    worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else float("inf"))
    verdict = "agrees" if apart[worst] < AGREE else "DIFFERS"
    print(f"  {title}: {verdict}, at most {apart[worst]:.1e} ({worst})", flush=True)
    if not apart[worst] < AGREE:
        FAILED.append(f"{title} {verdict}")


def probe(sizes: tuple[int, int, int, int]) -> bool:
    """Try cuDNN's kernels on a square and a rectangle of a head size, and say whether they took both directions."""
    heads, kv_heads, qk_size, v_size = sizes
    group = heads // kv_heads
    kernel, formulas = choose_kernel(torch.device("cuda"), torch.bfloat16, 0.0, "cudnn"), Kernel()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    for queries, keys, causal in ((576, 576, True), (300, 444, False)):
        q, k, v = (
            draw(kv_heads, group, queries, qk_size),
            draw(kv_heads, 1, keys, qk_size),
            draw(kv_heads, 1, keys, v_size),
        )
        tile = Tile(causal, None, qk_size**-0.5, 0.0)
        mask = torch.ones(queries, keys, device="cuda", dtype=torch.bool).tril() if causal else None
        plain = Tile(False, mask, tile.scale, 0.0)
        out, lse = formulas.forward(q, k, v, plain)
        grad = draw(*out.shape)
        wanted = (out, lse, *formulas.backward(grad.float(), q, k, v, out, lse, plain))
        title = f"cuDNN {qk_size}/{v_size}, {queries} x {keys}"
        try:
            began = time.perf_counter()
            found = kernel.forward(q, k, v, tile)
            torch.cuda.synchronize()
            forward = time.perf_counter() - began
            grads = kernel.backward(grad, q, k, v, out.bfloat16(), lse, tile)
            torch.cuda.synchronize()
            backward = time.perf_counter() - began - forward
        except RuntimeError as error:
            print(f"  {title}: refused: {str(error).splitlines()[0][:150]}", flush=True)
            return False
        names = ("out", "lse", "dq", "dk", "dv")
        compare(
            f"{title} (first call {forward * 1e3:.0f} + {backward * 1e3:.0f} ms)",
            dict(zip(names, (*found, *grads), strict=True)),
            dict(zip(names, wanted, strict=True)),
        )
    return True


# -- times --


def on_host(function: Callable[[], Any]) -> float:
    """Microseconds that the host takes for a call, while the device has an empty queue."""
    found = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return statistics.median(found) * 1e6


@dataclass(frozen=True)
class Timed:
    """One executor in one direction: median ms on the GPU, us on the host, ms that the first call took beyond that."""

    gpu: float
    host: float
    first: float


def timed(function: Callable[[], Any], milliseconds: float) -> Timed:
    """Time a call whose shapes are new."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    first = 1e3 * (time.perf_counter() - began)
    gpu = statistics.median(times(function, milliseconds))
    return Timed(gpu, on_host(function), first - gpu)


def able(load: Load, options: argparse.Namespace, cudnn: bool) -> list[str]:
    """Executors that are timed on a tree."""
    count, _ = load.shapes("forward")
    if cudnn and count <= options.shapes:
        return list(EXECUTORS)
    print(f"    pieces-cudnn left out: {f'{count} shapes to plan' if cudnn else 'it refused the head size'}")
    return [name for name in EXECUTORS if name != "pieces-cudnn"]


def measure(load: Load, options: argparse.Namespace, cudnn: bool) -> None:
    """Print a tree's lines, and how far executors' results are apart."""
    names = able(load, options, cudnn)
    with force("triton", "triton"):
        given = load.forward()
    runs: dict[str, Callable[[], Any]] = {"forward": load.forward, "backward": lambda: load.backward(*given)}
    for direction, run in runs.items():
        found: dict[str, Timed] = {}
        for name in list(names):
            try:
                with force(**{direction: name}):
                    found[name] = timed(run, options.milliseconds)
            except Exception as error:
                # Not tried again: up to now PyTorch keeps an empty plan for a shape that cuDNN has refused.
                names.remove(name)
                FAILED.append(f"{name} {direction}, {load.problem}")
                print(
                    f"    {direction:8s} {name} failed: {type(error).__name__} {str(error).splitlines()[:1]}"
                )
        picked = load.route(direction)
        for name, spent in found.items():
            print(f"    {direction:8s} {name:13s} {line(load, direction, name, spent, picked)}")
        if picked.executor in found:
            fastest = min(found, key=lambda name: found[name].gpu)
            lost = found[picked.executor].gpu / found[fastest].gpu - 1
            print(
                f"    {direction:8s} router: {picked.executor}, host {on_host(run):.0f} us, {lost:.1%} over {fastest}"
            )
        print(f"    {direction:8s} why not: {picked.why_not}", flush=True)
    if names:
        wanted = results(load, names[0], names[0])
        for name in names[1:]:
            compare(f"  {name} against {names[0]}", results(load, name, names[0]), wanted)


def line(load: Load, direction: str, name: str, spent: Timed, picked: Route) -> str:
    """One executor's numbers."""
    rate = (1.0 if direction == "forward" else 2.5) * load.operations / spent.gpu / 1e9
    text = f"{spent.gpu:8.3f} ms {rate:4.0f} TFLOP/s, host {spent.host:5.0f} us"
    count, planning = load.shapes(direction) if name == "pieces-cudnn" else (0, 0.0)
    if name in picked.predicted:
        text += f" [{(picked.predicted[name] - planning) / 1e3:.3f}" + (
            f" + {planning / 1e3:.3f}]" if count else "]"
        )
    if count:
        text += f", {count} shapes planned in {spent.first:.0f} ms"
    return text


def main() -> None:
    """Probe, compare, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--milliseconds", type=float, default=50.0, help="time spent on each number")
    parser.add_argument("--shapes", type=int, default=24, help="most shapes that cuDNN is to plan for a tree")
    parser.add_argument("--workloads", default="", help="names, by comma; all by default")
    options = parser.parse_args()
    device = torch.device("cuda")
    began = time.perf_counter()
    cudnn: Any = torch.backends.cudnn
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {cudnn.version()}, {device_of(device)}"
    )
    took = {sizes: probe(sizes) for sizes in CASES}
    for sizes, names in CASES.items():
        title = "{}/{} heads, {}/{}".format(*sizes)
        small = load_of(TREES["small"](), sizes)
        wanted = reference(small)
        for name in EXECUTORS:
            if name != "pieces-cudnn" or took[sizes]:
                compare(f"{title}: {name} against fp32", results(small, name, "triton"), wanted)
        for name in names:
            if options.workloads and name not in options.workloads.split(","):
                continue
            table = TREES[name]()
            load = load_of(table, sizes)
            known = "" if len(table) <= MOST_SEGMENTS else ", too many segments to predict"
            spent = time.perf_counter() - began
            print(
                f"{title}: {name}, {load.problem.tokens} tokens, {len(table)} segments{known} ({spent:.0f} s)"
            )
            try:
                measure(load, options, took[sizes])
            except torch.cuda.OutOfMemoryError as error:
                FAILED.append(f"{title}: {name}")
                print(f"    left out: {str(error).splitlines()[0][:120]}")
    print(f"{time.perf_counter() - began:.0f} s")
    if FAILED:
        raise SystemExit("\n".join(["failed:", *FAILED]))


if __name__ == "__main__":
    main()
