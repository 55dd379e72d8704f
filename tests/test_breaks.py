"""Around the graph: breaks, order of backward passes, threads, exceptions, copies, modes."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import law
from tests.law import Batch, Toy, batch, causal_and_padding, check, compiled, counting, sdpa
from tests.models import FAMILIES

# ---- graph breaks ------------------------------------------------------------------------------------------


class Broken(Toy):
    """Breaks before the first layer, between the layers, or before the head."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.before = before

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h, seen = self.tokens(ids), causal_and_padding(ids, mask)
        if self.before == 0:
            torch._dynamo.graph_break()
        h = self.layers[0](h, seen, sdpa)
        if self.before == 1:
            torch._dynamo.graph_break()
        h = self.layers[1](h, seen, sdpa)
        if self.before == 2:
            torch._dynamo.graph_break()
        return self.head(h)


@pytest.mark.parametrize(
    ("before", "expect"),
    [
        (0, {"no-attention": 1, "no-token-ids": 1}),
        (1, {"packed": 1, "no-token-ids": 1}),
        (2, {"packed": 1, "no-token-ids": 1}),
    ],
)
def test_graph_that_receives_ids_is_packed_and_the_next_one_runs_dense(
    before: int, expect: dict[str, int]
) -> None:
    b = batch(pad="mixed")
    check(Broken(before), b.ids, b.mask, kept=b.kept, expect=expect)


class Indexed(Toy):
    """The head runs on the kept tokens only."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h, seen = self.tokens(ids), causal_and_padding(ids, mask)
        for layer in self.layers:
            h = layer(h, seen, sdpa)
        return self.head(h[mask.bool()])


def test_boolean_index_breaks_the_graph() -> None:
    b = batch(pad="mixed")
    check(Indexed(), b.ids, b.mask, expect={"packed": 1, "no-token-ids": 1})


def test_boolean_index_in_the_graph_is_a_region() -> None:
    b = batch(pad="mixed")
    config = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    check(Indexed(), b.ids, b.mask, around=lambda: config)


def test_layers_compiled_one_by_one_run_dense() -> None:
    """Per-layer compilation hands hidden states to each graph."""
    model, b = Toy(), batch(pad="mixed")
    expected = model(b.ids, b.mask)
    with counting() as seen:
        for layer in model.layers:
            layer.compile(backend="tree", options={"compiler": "aot_eager"})
        found = model(b.ids, b.mask)
    assert seen["dense:no-token-ids"] == 2
    assert not seen["packed"]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# ---- two batches at a time -----------------------------------------------------------------------------------


class Checkpointed(Toy):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h, seen = self.tokens(ids), causal_and_padding(ids, mask)
        for layer in self.layers:
            h = checkpoint(layer, h, seen, sdpa, use_reentrant=False)
        return self.head(h)


def _loss(out: Tensor, b: Batch) -> Tensor:
    return (out.sin() * b.mask[..., None]).sum()


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _same_grads(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("model", [Toy, Checkpointed], ids=["plain", "checkpointed"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_each_backward_sees_its_own_tree(model: Callable[[], Toy]) -> None:
    """forward(1), forward(2), backward(2), backward(1): the trees are no global state."""
    toy = model()
    one, two = batch(pad="mixed"), batch(count=4, length=7, pad="left", seed=5)
    (_loss(toy(one.ids, one.mask), one) + 3 * _loss(toy(two.ids, two.mask), two)).backward()
    expected = _grads(toy)
    toy.zero_grad()
    call = compiled(toy)
    with counting() as seen:
        first, second = _loss(call(one.ids, one.mask), one), 3 * _loss(call(two.ids, two.mask), two)
        second.backward()
        first.backward()
    assert seen["packed"] == 2
    assert not seen["dense"]
    _same_grads(expected, _grads(toy))


@pytest.mark.usefixtures("fresh_dynamo")
def test_gradient_accumulation_over_batches() -> None:
    toy = Toy()
    batches = [batch(pad="mixed", seed=s) for s in range(3)]
    sum(_loss(toy(b.ids, b.mask), b) for b in batches).backward()
    expected = _grads(toy)
    toy.zero_grad()
    call = compiled(toy)
    for b in batches:
        _loss(call(b.ids, b.mask), b).backward()
    _same_grads(expected, _grads(toy))


@pytest.mark.usefixtures("fresh_dynamo")
def test_second_backward_as_with_the_stock_compiler_at_dynamic_shapes() -> None:
    """Saved buffers are donated to the first backward pass unless torch's own switch says otherwise."""
    toy, b = Toy(), batch(pad="mixed")
    for call in (torch.compile(toy, backend="aot_eager", dynamic=True), compiled(toy)):
        with pytest.raises(RuntimeError, match="donated buffer"):
            _loss(call(b.ids, b.mask), b).backward(retain_graph=True)
    torch._dynamo.reset()
    toy.zero_grad()
    with torch._functorch.config.patch(donated_buffer=False):
        loss = _loss(compiled(toy)(b.ids, b.mask), b)
        loss.backward(retain_graph=True)
        once = _grads(toy)
        loss.backward()
        _same_grads({n: 2 * g for n, g in once.items()}, _grads(toy))
        (grad,) = torch.autograd.grad(
            _loss(compiled(toy)(b.ids, b.mask), b), toy.head.weight, create_graph=True
        )
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            grad.square().sum().backward()


@pytest.mark.usefixtures("fresh_dynamo")
def test_create_graph_gives_the_first_derivative_and_refuses_the_second_as_stock_does() -> None:
    """A gradient penalty needs eager mode: no compiled graph has a second derivative, packed or not."""
    toy, b = Toy(), batch(pad="mixed")
    weights = [toy.head.weight, toy.layers[0].q.weight, toy.tokens.weight]
    expected = torch.autograd.grad(_loss(toy(b.ids, b.mask), b), weights)
    for call, packed in ((torch.compile(toy, backend="aot_eager"), 0), (compiled(toy), 1)):
        with torch._functorch.config.patch(donated_buffer=False), counting() as seen:
            found = torch.autograd.grad(_loss(call(b.ids, b.mask), b), weights, create_graph=True)
        assert (seen["packed"], seen["dense"]) == (packed, 0)
        for grad, want in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-11)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            sum(grad.square().sum() for grad in found).backward()
        assert not _grads(toy)


# ---- gradients of inputs -------------------------------------------------------------------------------------


def _hidden() -> Tensor:
    return torch.randn(6, 9, 12, dtype=torch.float64, requires_grad=True)


def _given(model: Toy, ids: Tensor, mask: Tensor, given: Tensor) -> Tensor:
    return given + model.places(torch.arange(ids.shape[1]))


def _added(model: Toy, ids: Tensor, mask: Tensor, given: Tensor) -> Tensor:
    return model.tokens(ids) + given


@pytest.mark.parametrize(("embed", "expect"), [(_given, "no-token-ids"), (_added, "dense-input")])
def test_gradients_asked_of_hidden_states_run_dense(embed: Callable[..., Tensor], expect: str) -> None:
    b = batch(pad="mixed")
    found = check(Toy(embed=embed, middle=_same), b.ids, b.mask, _hidden(), kept=b.kept, expect=expect)
    assert "input2" in found.grads


def test_gradients_asked_of_an_input_of_the_tail_are_packed() -> None:
    """A value head's noise, say: it meets the logits on the grid."""
    b = batch(pad="mixed")
    given = torch.randn(6, 9, law.VOCAB, dtype=torch.float64, requires_grad=True)
    model = Toy(tail=lambda logits, ids, mask, given: logits * given, middle=_same)
    found = check(model, b.ids, b.mask, given, kept=b.kept)
    assert "input2" in found.grads


def _same(h: Tensor, *_: Any) -> Tensor:
    return h


class FromEmbeddings(nn.Module):
    """A transformers model that is given embeddings, of its own tokens or of the caller's."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.model, self.own = FAMILIES["qwen3"].build().double(), own

    def forward(self, ids: Tensor, mask: Tensor, embeds: Tensor | None = None) -> Tensor:
        embeds = self.model.get_input_embeddings()(ids) if self.own else embeds
        out: Tensor = self.model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).logits
        return out


@pytest.mark.parametrize(("own", "expect"), [(True, "packed"), (False, "no-token-ids")])
def test_inputs_embeds_of_transformers(own: bool, expect: str) -> None:
    b = batch(pad="right")
    embeds = () if own else (torch.randn(6, 9, 32, dtype=torch.float64, requires_grad=True),)
    found = check(FromEmbeddings(own), b.ids, b.mask, *embeds, kept=b.kept, expect=expect, tolerance=1e-6)
    assert ("input2" in found.grads) == (not own)


# ---- threads -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
def test_two_threads_train_on_their_own_batches() -> None:
    toys = [Toy(), Toy()]
    batches = [
        [batch(pad="mixed", seed=s) for s in range(4)],
        [batch(count=5, length=8, pad="left", seed=s) for s in range(4)],
    ]
    expected = []
    for toy, own in zip(toys, batches, strict=True):
        for b in own:
            _loss(toy(b.ids, b.mask), b).backward()
        expected.append(_grads(toy))
        toy.zero_grad()
    calls = [compiled(toy, dynamic=True) for toy in toys]
    failures: list[BaseException] = []

    def train(i: int) -> None:
        try:
            for b in batches[i]:
                _loss(calls[i](b.ids, b.mask), b).backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for toy, want in zip(toys, expected, strict=True):
        _same_grads(want, _grads(toy))


# ---- exceptions ----------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def _stop(*_: Any) -> Any:
    raise Stop


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("where", ["output", "parameter", "forward"])
def test_exception_in_mid_step_leaves_the_next_step_intact(where: str) -> None:
    toy, b, other = Toy(), batch(pad="mixed"), batch(pad="left", seed=9)
    before = {n: p.detach().clone() for n, p in toy.named_parameters()}
    _loss(toy(other.ids, other.mask), other).backward()
    expected = _grads(toy)
    toy.zero_grad()
    call = compiled(toy)
    call(b.ids, b.mask)
    if where == "forward":
        handle = call.register_forward_hook(_stop)
    elif where == "parameter":
        handle = toy.layers[1].q.weight.register_hook(_stop)
    with pytest.raises(Stop):
        out = call(b.ids, b.mask)
        if where == "output":
            out.register_hook(_stop)
        _loss(out, b).backward()
    if where != "output":
        handle.remove()
    toy.zero_grad()
    for n, p in toy.named_parameters():
        assert torch.equal(p, before[n])
    with counting() as seen:
        _loss(call(other.ids, other.mask), other).backward()
    assert seen["packed"] == 1
    _same_grads(expected, _grads(toy))


def _step(call: Callable[..., Tensor], b: Batch, where: str, toy: Toy) -> Tensor:
    """A step in which something raises: after the forward pass, or in the backward pass above or below the graph."""
    if where == "after":
        _stop(call(b.ids, b.mask))
    out = call(b.ids, b.mask)
    if where == "above":
        out.register_hook(_stop)
    elif where == "below":
        toy.layers[1].q.weight.register_hook(_stop)
    return _loss(out, b)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("where", ["after", "above", "below"])
def test_gradients_that_a_failed_step_leaves_are_whole(where: str) -> None:
    """As in eager mode, unless the failure is below the graph: there each gradient is the old or the new one."""
    one, two = batch(pad="mixed"), batch(pad="left", seed=9)
    left, new = [], {}
    for wrap in (lambda toy: toy, compiled):
        toy = Toy()
        call = wrap(toy)
        _loss(call(one.ids, one.mask), one).backward()
        before, old = {n: p.detach().clone() for n, p in toy.named_parameters()}, _grads(toy)
        with pytest.raises(Stop):
            _step(call, two, where, toy).backward()
        assert all(torch.equal(p, before[n]) for n, p in toy.named_parameters())
        left.append(_grads(toy))
        if where != "below":
            assert all(torch.equal(grad, old[n]) for n, grad in left[-1].items())
            continue
        new = new or _whole(one, two)
        for n, grad in left[-1].items():
            torch.testing.assert_close(
                grad, old[n] if torch.equal(grad, old[n]) else new[n], rtol=1e-9, atol=1e-11
            )
    assert left[0].keys() == left[1].keys()


def _whole(*batches: Batch) -> dict[str, Tensor]:
    toy = Toy()
    for b in batches:
        _loss(toy(b.ids, b.mask), b).backward()
    return _grads(toy)


def _cross_entropy(logits: Tensor, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _picked(logits: Tensor, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    index = labels[:, 1:].clamp(min=0)
    return (
        logits[:, :-1].log_softmax(-1).gather(-1, index[..., None]).squeeze(-1) * (labels[:, 1:] >= 0)
    ).sum()


def _looked_up(logits: Tensor, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    weights = torch.ones(law.VOCAB, dtype=logits.dtype)[labels.clamp(min=0)]
    return (logits * weights[..., None]).sum()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("tail", [_cross_entropy, _picked, _looked_up])
def test_label_out_of_range_raises_as_dense_does(tail: Callable[..., Tensor]) -> None:
    """A failing op of the tail: nothing is left of the step, and the next one is packed and right."""
    toy, b = Toy(tail=tail, middle=_same), batch(pad="none")
    bad = b.labels.clone()
    bad[1, 3] = 1000
    call = compiled(toy)
    call(b.ids, b.mask, b.labels).backward()
    before, old = {n: p.detach().clone() for n, p in toy.named_parameters()}, _grads(toy)
    for each in (toy, call):
        with pytest.raises((IndexError, RuntimeError)):
            each(b.ids, b.mask, bad).backward()
        _same_grads(old, _grads(toy))
        assert all(torch.equal(p, before[n]) for n, p in toy.named_parameters())
    toy.zero_grad()
    with counting() as seen:
        call(b.ids, b.mask, b.labels).backward()
    assert (seen["packed"], seen["dense"]) == (1, 0)
    found = _grads(toy)
    toy.zero_grad()
    toy(b.ids, b.mask, b.labels).backward()
    _same_grads(_grads(toy), found)


@pytest.mark.usefixtures("fresh_dynamo")
def test_token_out_of_range_raises_as_dense_does() -> None:
    toy, b = Toy(), batch(pad="none")
    call = compiled(toy)
    call(b.ids, b.mask)
    bad = b.ids.clone()
    bad[1, 3] = 1000
    with pytest.raises((IndexError, RuntimeError)):
        call(bad, b.mask)
    torch.testing.assert_close(call(b.ids, b.mask), toy(b.ids, b.mask), rtol=1e-10, atol=1e-10)


# ---- copies and files ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_is_copied_and_saved_like_any_other() -> None:
    toy, b = Toy(), batch(pad="mixed")
    call = compiled(toy)
    expected = call(b.ids, b.mask)
    stock = torch.compile(toy, backend="aot_eager")
    assert list(call.state_dict()) == list(stock.state_dict())
    twin = copy.deepcopy(call)
    with torch.no_grad():
        twin.head.weight.zero_()
    torch.testing.assert_close(call(b.ids, b.mask), expected)
    assert not torch.allclose(twin(b.ids, b.mask), expected)
    file = io.BytesIO()
    torch.save(call.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file))
    torch.testing.assert_close(twin(b.ids, b.mask), expected)


def _saved(model: nn.Module, backend: str, in_place: bool, *args: Any) -> Any:
    """What torch.load gives for a compiled model, called before if there are arguments; or the error."""
    options = {"compiler": "aot_eager", "min_sharing": 0} if backend == "tree" else None
    call: Any = model
    if in_place:
        model.compile(backend=backend, options=options)
    else:
        call = torch.compile(model, backend=backend, options=options)
    if args:
        call(*args)
    file = io.BytesIO()
    try:
        torch.save(call, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    except Exception as error:
        return error


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in_place"])
@pytest.mark.parametrize("called", [False, True], ids=["before", "after"])
def test_a_compiled_model_goes_through_torch_save_as_with_inductor(in_place: bool, called: bool) -> None:
    """A wrapped model is still compiled when it comes back; one compiled in place is plain, whatever the backend."""
    toy, b = Toy(), batch(pad="mixed")
    expected = toy(b.ids, b.mask)
    stock = _saved(copy.deepcopy(toy), "inductor", in_place)
    found = _saved(toy, "tree", in_place, *((b.ids, b.mask) if called else ()))
    assert type(found) is type(stock)
    assert isinstance(found, nn.Module)
    assert (found._compiled_call_impl is None) == (stock._compiled_call_impl is None)
    assert list(found.state_dict()) == list(stock.state_dict())
    with counting() as seen:
        out = found(b.ids, b.mask)
    assert (seen["packed"], seen["dense"]) == (int(not in_place), 0)
    torch.testing.assert_close(out[b.kept], expected[b.kept], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_in_place_then_decode() -> None:
    """`model.compile()` then token by token: one row, growing; right at every step."""
    toy = Toy()
    twin = copy.deepcopy(toy)
    toy.compile(backend="tree", options={"compiler": "aot_eager"})
    ids = batch(count=2, length=4, pad="none").ids
    with torch.no_grad():
        for _ in range(4):
            logits, expected = toy(ids), twin(ids)
            torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        one = toy(ids[:1, -1:])
        torch.testing.assert_close(one, twin(ids[:1, -1:]), rtol=1e-10, atol=1e-10)


# ---- modes -----------------------------------------------------------------------------------------------------


class Dropping(Toy):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h, seen = self.tokens(ids), causal_and_padding(ids, mask)
        for layer in self.layers:
            h = nn.functional.dropout(layer(h, seen, sdpa), 0.5, self.training)
        return self.head(h)


@pytest.mark.usefixtures("fresh_dynamo")
def test_train_and_eval_switch() -> None:
    toy, b = Dropping(), batch(pad="mixed")
    call = compiled(toy)
    for training, how in [
        (True, "dense:dropout"),
        (False, "packed"),
        (True, "dense:dropout"),
        (False, "packed"),
    ]:
        toy.train(training)
        with counting() as seen:
            out = call(b.ids, b.mask)
        assert seen[how] == 1
        assert seen["packed"] + seen["dense"] == 1
        if not training:
            torch.testing.assert_close(out[b.kept], toy(b.ids, b.mask)[b.kept], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("fresh_dynamo")
def test_without_gradients_then_with_then_inference_mode() -> None:
    toy, b = Toy(), batch(pad="mixed")
    expected = toy(b.ids, b.mask)
    _loss(expected, b).backward()
    grads = _grads(toy)
    toy.zero_grad()
    call = compiled(toy)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        with counting() as seen, mode():
            out = call(b.ids, b.mask)
        assert seen["packed"] == 1
        assert not seen["dense"]
        torch.testing.assert_close(
            out.detach().clone()[b.kept], expected.detach()[b.kept], rtol=1e-10, atol=1e-10
        )
    _loss(out, b).backward()
    _same_grads(grads, _grads(toy))


@pytest.mark.usefixtures("fresh_dynamo")
def test_step_function_with_methods_and_keywords() -> None:
    """def step(model, ids, mask, labels): the trainer's function is compiled, not the module."""
    toy, b = Toy(), batch(pad="mixed")

    class Trainer:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def step(
            self, model: nn.Module, ids: Tensor, *, mask: Tensor, labels: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            logits = model(ids, mask)
            loss = (
                nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
                * self.scale
            )
            return loss, {"logits": logits}

    trainer = Trainer(0.5)
    law.check(
        trainer.step,
        toy,
        b.ids,
        mask=b.mask,
        labels=b.labels,
        kept=b.kept,
        modules=[toy],
        loss=lambda out: out[0],
    )


@pytest.mark.usefixtures("fresh_dynamo")
def test_parameters_changed_between_calls_are_seen() -> None:
    toy, b = Toy(), batch(pad="mixed")
    call = compiled(toy)
    optimizer = torch.optim.SGD(toy.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        _loss(call(b.ids, b.mask), b).backward()
        optimizer.step()
        torch.testing.assert_close(
            call(b.ids, b.mask)[b.kept], toy(b.ids, b.mask)[b.kept], rtol=1e-9, atol=1e-9
        )


@pytest.mark.usefixtures("fresh_dynamo")
def test_ids_changed_in_place_between_calls_are_seen() -> None:
    """The tree is cached by content: a trainer that refills its buffers gets the new tree."""
    toy, b = Toy(), batch(pad="mixed")
    call = compiled(toy)
    call(b.ids, b.mask)
    b.ids.copy_(batch(pad="mixed", seed=11).ids)
    b.mask[:, 2] = 0
    torch.testing.assert_close(
        call(b.ids, b.mask)[b.kept], toy(b.ids, b.mask)[b.kept], rtol=1e-10, atol=1e-10
    )


# ---- losses outside of the graph -------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("pad", ["left", "mixed", "right"])
def test_a_shifted_loss_outside_of_the_graph(pad: str, holes: bool) -> None:
    """It weights by the mask of the next token: the first token of a row is predicted from the last pad before it."""
    toy, b = Toy(), batch(pad=pad, holes=holes)

    def gradients(call: Callable[..., Tensor]) -> dict[str, Tensor]:
        toy.zero_grad()
        logs = call(b.ids, b.mask)[:, :-1].log_softmax(-1)
        picked = logs.gather(-1, b.ids[:, 1:, None]).squeeze(-1)
        (picked * b.mask[:, 1:]).sum().backward()
        return {name: p.grad.clone() for name, p in toy.named_parameters() if p.grad is not None}

    wanted = gradients(toy)
    with counting() as seen:
        found = gradients(compiled(toy))
    law.held("packed", seen)
    for name, grad in wanted.items():
        torch.testing.assert_close(
            found[name], grad, rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
        )
