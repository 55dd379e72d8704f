"""One compilation for all batches, shared by models with the same graph, and never used where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.law import Toy, batch, compiled, counting
from treecompile import lowering
from treecompile.regions import with_autocast_blocks
from treecompile.runtime.program import Input

SHAPES = [(2 + i % 5, 5 + (3 * i) % 8) for i in range(20)]


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No compilation of an earlier test is left."""
    torch._dynamo.reset()
    lowering.clear()


def _train(toy: Toy, call: Callable[..., Any], shapes: list[tuple[int, int]], mark: bool = False) -> None:
    for seed, (count, length) in enumerate(shapes):
        b = batch(count=count, length=length, pad=("mixed", "left", "right")[seed % 3], seed=seed)
        if mark:
            for x in (b.ids, b.mask):
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(x, 1)
        out = call(b.ids, b.mask)
        out.sum().backward()
        if seed % 5 == 0:
            torch.testing.assert_close(out[b.kept], toy(b.ids, b.mask)[b.kept], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("dynamic", "mark"), [(None, False), (True, False), (None, True)], ids=["auto", "dynamic", "marked"]
)
def test_twenty_batches_compile_the_packed_graph_at_most_twice(dynamic: bool | None, mark: bool) -> None:
    toy = Toy()
    with counting() as seen:
        _train(toy, compiled(toy, dynamic=dynamic), SHAPES, mark)
    assert seen["packed"] == 20
    assert not seen["dense"]
    assert seen["compiled"] <= 2
    assert seen["captured"] <= 4


def test_static_shapes_share_one_packed_graph() -> None:
    """dynamic=False captures each shape anew; the packed graph is compiled once."""
    toy = Toy()
    with counting() as seen:
        _train(toy, compiled(toy, dynamic=False), SHAPES[:5])
    assert seen["captured"] == 5
    assert seen["compiled"] == 1


def test_a_length_in_the_formula_does_not_compile_once_a_length() -> None:
    toy = Toy(middle=lambda h, ids, mask: h / h.shape[1])
    with counting() as seen:
        _train(toy, compiled(toy, dynamic=True), SHAPES[:6])
    assert seen["packed"] == 6
    assert seen["compiled"] <= 2


def test_few_tokens_run_without_a_compilation_of_their_own() -> None:
    toy = Toy()
    call = compiled(toy, dynamic=True)
    with counting() as seen:
        for kept in (9, 1, 0, 2, 1):
            b = batch(count=4, length=9, pad="none")
            b.mask[:, kept:] = 0
            b.ids[:, 0] = 3
            out = call(b.ids, b.mask)
            out.sum().backward()
            torch.testing.assert_close(
                out[b.mask > 0], toy(b.ids, b.mask)[b.mask > 0], rtol=1e-10, atol=1e-10
            )
    assert seen["compiled"] == 1
    assert seen["packed"] == 4
    assert seen["dense:empty"] == 1


@pytest.mark.parametrize("size", [5, 9, 12, 13, 24])
def test_packed_tokens_as_many_as_something_else(size: int) -> None:
    """N equal to T, to the width, to the vocabulary, to B * T."""
    toy = Toy()
    call = compiled(toy, dynamic=True)
    for count, length in ((1, size), (2, size), (size, 3)):
        b = batch(count=count, length=length, pad="none")
        b.ids[1:] = b.ids[:1]
        out = call(b.ids, b.mask)
        torch.testing.assert_close(out, toy(b.ids, b.mask), rtol=1e-10, atol=1e-10)
        out.sum().backward()


def test_models_that_differ_in_width_alone_do_not_share_code() -> None:
    """No size of the inner layer stands in the graph's text."""
    b = batch(pad="mixed")
    for inner in (16, 24):
        toy = Toy(inner=inner)
        out = compiled(toy)(b.ids, b.mask)
        torch.testing.assert_close(out[b.kept], toy(b.ids, b.mask)[b.kept], rtol=1e-10, atol=1e-10)
        out.sum().backward()
        assert toy.layers[0].up.weight.grad is not None
        assert toy.layers[0].up.weight.grad.shape == (inner, 12)


def test_models_with_the_same_graph_share_code() -> None:
    b = batch(pad="mixed")
    with counting() as seen:
        for _ in range(2):
            torch._dynamo.reset()
            compiled(Toy())(b.ids, b.mask)
    assert seen["captured"] == 2
    assert seen["compiled"] == 1


class Scaled(Toy):
    """A tensor constant in the model."""

    def __init__(self, values: list[float]) -> None:
        super().__init__(middle=lambda h, *_: h * torch.tensor(self.values, dtype=torch.float64).sum())
        self.values = values


def test_models_that_differ_in_a_tensor_constant_do_not_share_it() -> None:
    b = batch(pad="mixed")
    for values in ([1.0, 2.0], [0.5, -3.0]):
        torch._dynamo.reset()
        toy = Scaled(values)
        out = compiled(toy)(b.ids, b.mask)
        torch.testing.assert_close(out[b.kept], toy(b.ids, b.mask)[b.kept], rtol=1e-10, atol=1e-10)


def test_frozen_parameters_and_strides_are_part_of_the_key() -> None:
    b = batch(pad="mixed")
    toy = Toy()
    with counting() as seen:
        for change in ("none", "freeze", "transpose"):
            torch._dynamo.reset()
            if change == "freeze":
                toy.layers[0].requires_grad_(False)
            if change == "transpose":
                toy.head.weight.data = toy.head.weight.data.t().contiguous().t()
            toy.zero_grad()
            out = compiled(toy)(b.ids, b.mask)
            torch.testing.assert_close(out[b.kept], toy(b.ids, b.mask)[b.kept], rtol=1e-10, atol=1e-10)
            out.sum().backward()
            assert (toy.layers[0].q.weight.grad is None) is (change != "none")
    assert seen["compiled"] == 3


# ---- guards ------------------------------------------------------------------------------------------------


def _code(function: Callable[[Tensor], Tensor]) -> tuple[lowering.PackedCode, list[int]]:
    """A packed graph of one column, and the count of its compilations."""
    graph = fx.Graph()
    graph.output((graph.call_function(function, (graph.placeholder("column"),)),))
    compilations: list[int] = []
    code = lowering.PackedCode(
        fx.GraphModule({}, graph),
        [Input("tree", "column")],
        {},
        "aot_eager",
        "default",
        lambda: compilations.append(1),
    )
    return code, compilations


def _column(n: int) -> list[Tensor]:
    return [torch.arange(n, dtype=torch.int32)]


def _branches(x: Tensor) -> Tensor:
    """As a compiler that picks 32-bit indices while they suffice."""
    return x + 1 if x.shape[0] * 64 < 2000 else x + 2


def _special(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] == 7 else x + 2


def _even(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] % 2 == 0 else x + 2


@pytest.mark.parametrize("function", [_branches, _special, _even])
def test_what_was_assumed_of_a_size_is_checked_at_each_call(function: Callable[[Tensor], Tensor]) -> None:
    code, compilations = _code(function)
    for n in (7, 9, 40, 8, 7, 31, 32, 1, 2, 3, 0):
        (out,) = code((), _column(n))
        assert torch.equal(out, function(_column(n)[0])), n
    assert len(compilations) == 2


def test_numbers_are_written_into_the_graph() -> None:
    graph = fx.Graph()
    x, k = graph.placeholder("column"), graph.placeholder("k")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, k)),))
    inputs = [Input("tree", "column"), Input("number", "k")]
    code = lowering.PackedCode(fx.GraphModule({}, graph), inputs, {}, "aot_eager", "default", lambda: None)
    for n in (1, 5):
        for k_value in (2, 3):
            assert torch.equal(code((k_value,), _column(n))[0], _column(n)[0] * k_value)


def test_grad_mode_and_autocast_are_part_of_the_key() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("pack"), graph.placeholder("w")
    graph.output((graph.call_function(torch.ops.aten.matmul.default, (x, w)),))
    inputs = [Input("pack", "x"), Input("argument", "w")]
    code = lowering.PackedCode(
        fx.GraphModule({}, graph), inputs, {"x": (-1, 4)}, "aot_eager", "default", lambda: None
    )
    x_value, w_value = torch.randn(6, 4), torch.randn(4, 3, requires_grad=True)
    for _ in range(2):
        assert code((), [x_value, w_value])[0].requires_grad
        with torch.no_grad():
            assert not code((), [x_value, w_value])[0].requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert code((), [x_value, w_value])[0].dtype is torch.bfloat16


# ---- the dense form ----


@torch._dynamo.disable
def _left(x: Tensor) -> Tensor:
    """What breaks a graph."""
    return x + 1


def _regions(breaks: bool) -> fx.GraphModule:
    """autocast [ product, without autocast [ product of what was before ], product ], sum of what was inside."""
    enter, leave = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function
    outer = call(enter, ("cpu", torch.bfloat16, True, None))
    a = call(torch.matmul, (x, x))
    if breaks:
        a = call(_left, (a,))
    inner = call(enter, ("cpu", torch.bfloat16, False, None))
    b = call(torch.matmul, (call(torch.Tensor.float, (a,)), x))
    call(leave, (inner,))
    c = call(torch.matmul, (b, graph.get_attr("weight")))
    call(leave, (outer,))
    graph.output((a, call(torch.matmul, (b, x)), c))
    root = torch.nn.Module()
    root.weight = torch.nn.Parameter(torch.randn(3, 3))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("breaks", [False, True])
def test_autocast_regions_of_a_dense_graph(breaks: bool) -> None:
    gm = _regions(breaks)
    blocks = with_autocast_blocks(gm)
    assert (
        len(blocks.graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast)) == 0
    )
    x = torch.randn(3, 3, requires_grad=True)
    expected = gm(x)
    assert [out.dtype for out in expected] == [torch.bfloat16, torch.float32, torch.bfloat16]
    wanted = torch.autograd.grad(sum(out.sum() for out in expected), (x, gm.weight))
    for run in (blocks, lowering.compile_dense(gm, "eager", "default")):
        found = run(x)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        grads = torch.autograd.grad(sum(out.sum() for out in found), (x, gm.weight))
        assert all(torch.equal(one, other) for one, other in zip(grads, wanted, strict=True))
    assert not torch.is_autocast_enabled("cpu")


def test_regions_that_do_not_nest_stay_as_they_are() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    graph.output(x)
    gm = fx.GraphModule({}, graph)
    assert with_autocast_blocks(gm) is gm
