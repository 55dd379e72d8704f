"""The convolution of a tree on one GPU: `python -m examples.bench.causal_conv`.

Forward and backward, with SiLU, of the Triton kernels and of the PyTorch code that specifies them, beside the ideal:
what the op must read and write (x and the result; the gradient, x and its gradient) at `--bandwidth`. A copy of x shows
what the device reaches of that. Checks the kernels against PyTorch first. `--sweep` times launch parameters instead.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from examples.bench.tree_attention import search, times
from treecompile.runtime.ops import causal_conv, tree_causal_conv1d, tree_causal_conv1d_backward
from treecompile.runtime.ops.causal_conv_tables import conv_tables

Table = npt.NDArray[np.int32]


def branches(tokens: int, count: int) -> Table:
    """A prompt of a quarter of the tokens, and `count` answers that share the others evenly."""
    cuts = np.linspace(tokens // 4, tokens, count + 1).astype(np.int32)
    answers = [[start, end, 0, end] for start, end in itertools.pairwise(cuts)]
    return np.array([[0, cuts[0], -1, tokens], *answers], np.int32)


TREES: dict[str, Callable[[int], Table]] = {
    "chain": lambda tokens: np.array([[0, tokens, -1, tokens]], np.int32),
    "16 answers": lambda tokens: branches(tokens, 16),
    "1024 answers": lambda tokens: branches(tokens, 1024),
    "search": search,
}


@dataclass(frozen=True)
class Workload:
    """Inputs on the GPU: the arguments of the op, and the gradient of its result."""

    name: str
    arguments: tuple[Any, ...]
    grad: Tensor

    @property
    def x(self) -> Tensor:
        x: Tensor = self.arguments[0]
        return x

    def forward(self) -> list[Tensor]:
        return [tree_causal_conv1d(*self.arguments)]

    def backward(self) -> list[Tensor]:
        """Gradients of x and the weights."""
        return list(tree_causal_conv1d_backward(self.grad, *self.arguments)[:2])

    @property
    def odd(self) -> int:
        """Tokens that shifts do not serve."""
        made = conv_tables(self.arguments[4], self.arguments[1].shape[1], self.x.device)
        return int(made.odd.shape[0])


def workload(name: str, options: argparse.Namespace) -> Workload:
    """Put a tree on the GPU and draw inputs, laid out as projections leave them."""
    table = TREES[name](options.tokens)
    tokens = int(table[:, 1].max(initial=0))
    end = np.repeat(table[:, 3], table[:, 1] - table[:, 0]).astype(np.int32)
    dtype = getattr(torch, options.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    x, grad = (draw(1, tokens, options.channels).transpose(1, 2) for _ in range(2))
    weight = draw(options.channels, options.taps) * options.taps**-0.5
    arguments = (x, weight, None, torch.from_numpy(end).cuda(), torch.from_numpy(table), "silu")
    return Workload(name, arguments, grad)


@contextmanager
def by_pytorch() -> Iterator[None]:
    """The op runs its PyTorch code."""
    os.environ[causal_conv.VARIABLE] = "pytorch"
    yield
    del os.environ[causal_conv.VARIABLE]


def check(load: Workload) -> None:
    """Raise unless kernels and PyTorch agree but for rounding."""
    why = causal_conv.why_not_triton(load.x, load.arguments[1].shape[1])
    if why:
        raise SystemExit(f"the kernels do not run: {why}")
    mine = load.forward() + load.backward()
    with by_pytorch():
        theirs = load.forward() + load.backward()
    for a, b in zip(mine, theirs, strict=True):
        error = float((a.float() - b.float()).norm() / b.float().norm())
        if not error < 5e-3:
            raise RuntimeError(f"{load.name}: kernels and PyTorch differ by {error:.1e}")


def measure(load: Workload, options: argparse.Namespace) -> None:
    """Print the times of one tree."""
    check(load)
    size = load.x.numel() * load.x.element_size()
    print(
        f"{load.name}: {load.x.shape[2]} tokens, {load.odd} of them near a fork, {options.channels} channels"
    )
    line(options, "copy", "", lambda: load.x.clone(), 2 * size)
    for what, function, moved in (
        ("forward", load.forward, 2 * size),
        ("backward", load.backward, 3 * size),
    ):
        line(options, "triton", what, function, moved)
        with by_pytorch():
            line(options, "pytorch", what, function, moved)


def line(
    options: argparse.Namespace, executor: str, what: str, function: Callable[[], Any], moved: int
) -> None:
    """Time a function that must move so many bytes."""
    median = statistics.median(times(function, options.milliseconds))
    ideal = moved / options.bandwidth / 1e9
    print(
        f"  {executor:8} {what:9} {median:8.3f} ms   ideal {ideal:6.3f} ms   {ideal / median:5.1%} of it",
        flush=True,
    )


# Constants of the kernels in place of their own.
SWEEP: list[dict[str, Any]] = [
    {"RUN": 128},
    {"RUN": 64},
    {"RUN": 256},
    {"BLOCK": 256},
    {"BLOCK": 1024},
    {"BLOCK": 1024, "CHANNELS": 8},
    {"FORWARD_STEP": 4, "BACKWARD_STEP": 2},
    {"FORWARD_STEP": 16, "BACKWARD_STEP": 8},
]


def sweep(load: Workload, options: argparse.Namespace) -> None:
    """Print the times of one tree with other launch parameters."""
    from treecompile.runtime.kernels import causal_conv as kernels

    print(
        f"{load.name}: {load.x.shape[2]} tokens, {load.odd} of them near a fork, {options.channels} channels"
    )
    for constants in SWEEP:
        with mock.patch.multiple(kernels, **constants):
            forward, backward = (
                statistics.median(times(f, options.milliseconds)) for f in (load.forward, load.backward)
            )
        print(f"  forward {forward:.3f} ms   backward {backward:.3f} ms   {constants}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--trees", default=",".join(TREES))
    for name, value in (("tokens", 21792), ("channels", 8192), ("taps", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bandwidth", type=float, default=4.0, help="TB/s of the ideal")
    parser.add_argument("--milliseconds", type=float, default=50.0, help="time spent on each number")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, options.dtype, f"{options.taps} taps")
    for name in options.trees.split(","):
        (sweep if options.sweep else measure)(workload(name, options), options)


if __name__ == "__main__":
    main()
