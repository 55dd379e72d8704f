"""Scoped leaf functions: one graph for the tree backend, nothing new for any other."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from treecompile.leaves import install, scope
from treecompile.runtime.ops.leaf_attention import leaf_attention
from treecompile.runtime.ops.leaf_experts import BODIES, leaf_experts, leaf_experts_opaque

SLOW = pytest.mark.slow
pytestmark = SLOW  # `make test` reaches the leaves through tests/test_models.py
ROWS, COLUMNS = 3, 12
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 5.0},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {"head_dim": 8, "sliding_window": 4},
    "gpt_oss": {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "glm4_moe": {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"],
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
}


class Recorder:
    """Stands in for the tree backend: keeps the graphs and runs them with `inner`."""

    def __init__(self, inner: Callable[..., Any] | None = None) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.inner = inner

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any], **options: Any) -> Any:
        self.graphs.append(gm)
        return self.inner(gm, example_inputs) if self.inner else gm.forward

    def leaves(self) -> list[int]:
        return [len(leaf_nodes(gm)) for gm in self.graphs]


def leaf_nodes(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.target in (leaf_attention, leaf_experts)]


def aot(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)


@pytest.fixture
def tree(fresh_dynamo: None) -> Iterator[Recorder]:
    recorder = Recorder()
    scope.serve(recorder)
    install()
    yield recorder
    scope._served.remove(recorder)


def build(
    family: str, attention: str = "sdpa", experts: str | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A two-layer model in train mode; the same weights for every implementation."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 64,
        "first_k_dense_replace": 1,
    }
    if family == "nemotron_h":
        del sizes["num_hidden_layers"]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]})
    start = "eager" if family == "gpt_oss" else "sdpa"
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=start, dtype=dtype
    )
    # Set afterwards, as FlashAttention itself is not installed and flex is refused where sinks meet a CPU.
    model.config._attn_implementation = attention
    if experts is not None:
        model.config._experts_implementation = experts
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.train()


def batch() -> dict[str, Tensor]:
    """Left-padded rows."""
    mask = torch.ones(ROWS, COLUMNS, dtype=torch.long)
    for row in range(ROWS):
        mask[row, :row] = 0
    return {"input_ids": torch.randint(3, 64, (ROWS, COLUMNS)), "attention_mask": mask}


def outcome(model: nn.Module, call: Callable[..., Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits at kept positions and every gradient of a random projection of them."""
    logits = call(**inputs, use_cache=False).logits
    if "attention_mask" in inputs:
        logits = logits * inputs["attention_mask"][..., None].to(logits.dtype)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    model.zero_grad()
    (logits * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().clamp_min(1e-30)
        assert (actual[name] - value).abs().max() <= tolerance * scale, name


# ---- one graph, the same numbers ----


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma2",
        "gpt_oss",
        *(pytest.param(f, marks=SLOW) for f in ("qwen3", "gemma3_text", "mistral")),
    ],
)
def test_flex_and_flash_models_are_one_graph(tree: Recorder, family: str, attention: str) -> None:
    inputs = batch()
    # sdpa knows neither softcap nor sinks; eager attention takes its softmax in fp32.
    exact = family not in ("gemma2", "gpt_oss")
    dtype = torch.float64 if exact else torch.float32
    model = build(family, attention, "batched_mm", dtype)
    reference = build(family, "sdpa" if exact else "eager", "batched_mm", dtype)
    actual = outcome(model, torch.compile(model, backend=tree, fullgraph=True), inputs)
    assert [len([n for n in leaf_nodes(gm) if n.target is leaf_attention]) for gm in tree.graphs] == [2]
    assert_same(actual, outcome(reference, reference, inputs), 1e-12 if exact else 1e-5)


def test_flex_is_bit_equal_to_sdpa(tree: Recorder) -> None:
    inputs = batch()
    tree.inner = aot
    model, reference = build("qwen3", "flex_attention"), build("qwen3")
    actual = outcome(model, torch.compile(model, backend=tree, fullgraph=True), inputs)
    assert_same(actual, outcome(reference, reference, inputs), 0.0)


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_packed_documents_stay_apart(tree: Recorder, attention: str) -> None:
    inputs = {
        "input_ids": torch.randint(3, 64, (1, COLUMNS)),
        "position_ids": torch.cat([torch.arange(5), torch.arange(COLUMNS - 5)])[None],
    }
    model, reference = build("llama", attention), build("llama")
    actual = outcome(model, torch.compile(model, backend=tree, fullgraph=True), inputs)
    assert_same(actual, outcome(reference, reference, inputs), 1e-5)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize(
    "family",
    ["mixtral", "gpt_oss", *(pytest.param(f, marks=SLOW) for f in ("qwen3_moe", "glm4_moe", "nemotron_h"))],
)
def test_experts_are_one_node_and_exact(tree: Recorder, family: str, implementation: str) -> None:
    inputs = batch()
    tree.inner = aot if family in ("mixtral", "gpt_oss") and implementation != "batched_mm" else None
    attention = "eager" if family == "gpt_oss" else "sdpa"
    model = build(family, attention, implementation, torch.float64)
    # torch's grouped_mm, and with it the eager model, has no fp64: the loops are its reference.
    reference = build(
        family, attention, "eager" if implementation == "grouped_mm" else implementation, torch.float64
    )
    actual = outcome(model, torch.compile(model, backend=tree, fullgraph=True), inputs)
    assert tree.leaves() == [1 if family in ("glm4_moe", "nemotron_h") else 2]
    assert_same(actual, outcome(reference, reference, inputs), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_grouped_experts_in_low_precision(tree: Recorder, dtype: torch.dtype, autocast: bool) -> None:
    inputs = batch()
    tree.inner = aot
    model = build("mixtral", experts="grouped_mm", dtype=dtype)
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        actual = outcome(model, torch.compile(model, backend=tree, fullgraph=True), inputs)
        expected = outcome(reference, reference, inputs)
    assert_same(actual, expected, 0.0)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_labels_and_checkpointing_keep_one_graph(tree: Recorder, implementation: str) -> None:
    tree.inner = aot
    model = build("mixtral", experts=implementation)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inputs = batch()
    call = torch.compile(model, backend=tree, fullgraph=True)
    call(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    assert len(tree.graphs) == 1
    actual = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    assert_same(actual, {n: p.grad for n, p in model.named_parameters()}, 0.0)


def test_frozen_experts_have_no_gradient(tree: Recorder) -> None:
    inputs = batch()
    tree.inner = aot
    model = build("mixtral", experts="eager", dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj" not in name)
    reference = copy.deepcopy(model)
    actual = outcome(model, torch.compile(model, backend=tree, fullgraph=True), inputs)
    assert_same(actual, outcome(reference, reference, inputs), 1e-12)


def test_second_model_and_other_lengths_reuse_the_graph(tree: Recorder) -> None:
    pytest.importorskip("transformers")
    for seed in range(2):
        model = build("mixtral", "flex_attention", "eager")
        call = torch.compile(model, backend=tree, fullgraph=True, dynamic=True)
        for columns in (COLUMNS, COLUMNS + 5):
            call(input_ids=torch.randint(3, 64, (ROWS, columns)), use_cache=False)
        assert len(tree.graphs) == 1, seed


def test_a_changed_setting_compiles_again(tree: Recorder) -> None:
    model = build("gpt_oss", "eager", "batched_mm")
    inputs = batch()
    call = torch.compile(model, backend=tree, fullgraph=True)
    call(**inputs, use_cache=False)
    for layer in model.model.layers:
        layer.mlp.experts.alpha = 3.0
    actual = call(**inputs, use_cache=False).logits
    assert len(tree.graphs) == 2
    torch.testing.assert_close(actual, model(**inputs, use_cache=False).logits)


@SLOW
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_through_inductor(tree: Recorder) -> None:
    tree.inner = torch._dynamo.lookup_backend("inductor")
    inputs = batch()
    model, reference = build("gpt_oss", "flex_attention", "eager"), build("gpt_oss", "eager", "eager")
    call = torch.compile(model, backend=tree, fullgraph=True, dynamic=True)
    assert_same(outcome(model, call, inputs), outcome(reference, reference, inputs), 1e-4)


# ---- the ops by themselves ----


def test_ops_stay_whole_before_dispatch_and_dissolve_after(tree: Recorder) -> None:
    model = build("mixtral", "flex_attention", "eager")
    torch.compile(model, backend=tree, fullgraph=True)(**batch(), use_cache=False)
    (gm,) = tree.graphs
    fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    with fakes[0].fake_mode, torch._dispatch.python.enable_python_dispatcher():
        early = make_fx(gm, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
        late = make_fx(gm, _allow_non_fake_inputs=True)(*fakes)
    assert len(leaf_nodes(early)) == len(leaf_nodes(gm)) == 4
    assert not leaf_nodes(late)
    assert len([node for node in late.graph.nodes if node.target is leaf_experts_opaque]) == 2


def test_experts_without_tokens(tree: Recorder) -> None:
    model = build("mixtral", experts="eager", dtype=torch.float64)
    torch.compile(model, backend=tree, fullgraph=True)(**batch(), use_cache=False)
    node = leaf_nodes(tree.graphs[0])[0]
    experts = model.model.layers[0].mlp.experts
    tensors = [experts.get_parameter(path) for path in BODIES[node.args[4]].paths]
    hidden = torch.randn(0, 32, dtype=torch.float64, requires_grad=True)
    index, weights = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.float64)
    out = leaf_experts_opaque(hidden, index, weights, tensors, node.args[4], None)
    out.sum().backward()
    assert out.shape == (0, 32)
    assert not experts.down_proj.grad.any()


def test_opaque_experts_pass_opcheck(tree: Recorder) -> None:
    model = build("mixtral", experts="eager", dtype=torch.float64)
    torch.compile(model, backend=tree, fullgraph=True)(**batch(), use_cache=False)
    body = leaf_nodes(tree.graphs[0])[0].args[4]
    experts = model.model.layers[0].mlp.experts
    tensors = [experts.get_parameter(path) for path in BODIES[body].paths]
    hidden, weights = torch.randn(5, 32, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    index = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 1], [2, 0]])
    arguments = (hidden.requires_grad_(), index, weights.requires_grad_(), tensors, body, None)
    torch.library.opcheck(leaf_experts_opaque, arguments)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_leaf_attention_against_its_definition(softcap: float, sinks: bool, additive: bool) -> None:
    q, k, v = (torch.randn(2, h, 5, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    sees = torch.ones(5, 5).tril().bool().expand(2, 1, 5, 5).clone()
    sees[1, :, :2] = False
    mask = (
        torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(~sees, float("-inf")) if additive else sees
    )
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    leaves = [q, k, v, *([sink] if sink is not None else [])]
    out = leaf_attention(q, k, v, mask, sink, 0.3, softcap)
    expected = torch.zeros(2, 4, 5, 4, dtype=torch.float64)
    for b, h, t in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(5)).tolist():
        keys = sees[b, 0, t].nonzero()[:, 0]
        scores = (k[b, h // 2, keys] @ q[b, h, t]) * 0.3
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        total = scores.exp().sum() + (sink[h].exp() if sink is not None else 0)
        if len(keys):
            expected[b, h, t] = (scores.exp() / total) @ v[b, h // 2, keys]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(expected)
    actual_grads = torch.autograd.grad((out * weights).sum(), leaves)
    expected_grads = torch.autograd.grad((expected * weights).sum(), leaves)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-9, atol=1e-11)


# ---- the gate ----


def test_every_spelling_of_the_backend_opens_the_gate(tree: Recorder) -> None:
    if "leaf_test" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(name="leaf_test")(lambda gm, inputs, **options: gm.forward)
    torch._dynamo.backends.registry._COMPILER_FNS["leaf_test"] = tree
    model = build("llama", "flex_attention")
    inputs = batch()
    for backend, options in (
        (tree, None),
        (tree, {"on_unsupported": "dense"}),
        ("leaf_test", {"on_unsupported": "dense"}),
        (functools.partial(tree, on_unsupported="dense"), None),
    ):
        torch._dynamo.reset()
        torch.compile(model, backend=backend, options=options, fullgraph=True)(**inputs, use_cache=False)
    torch._dynamo.reset()
    model.compile(backend=tree, fullgraph=True)
    model(**inputs, use_cache=False)
    assert tree.leaves() == [2] * 5


def test_the_backend_is_known_by_its_name() -> None:
    def tree(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return gm.forward

    assert not scope.served(tree)
    tree.__module__, tree.__qualname__ = "treecompile.backend", "tree"
    assert scope.served(tree)
    assert scope.served(functools.partial(tree, verbose=True))
    assert not scope.served(None)
    assert not scope.served(aot)


def test_install_is_idempotent(tree: Recorder) -> None:
    build("mixtral", experts="eager")
    install()
    before = len(scope._substituted)
    assert install() == []
    torch._dynamo.reset()
    assert install() == []
    assert len(scope._substituted) == before


@pytest.mark.parametrize(
    ("family", "attention", "experts"),
    [pytest.param("llama", "flex_attention", None, marks=SLOW), ("mixtral", "sdpa", "batched_mm")],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of stock FlexAttention
def test_recapture_gives_the_graphs_of_any_other_backend(
    tree: Recorder, family: str, attention: str, experts: str | None
) -> None:
    model = build(family, attention, experts)
    inputs = batch()
    stock = Recorder()
    kept: list[str] = []

    def dense(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        if scope.can_recapture():
            scope.recapture_dense()
        assert not leaf_nodes(gm)
        kept.append(gm.code)
        return gm.forward

    tree.inner = dense
    with torch.no_grad():
        expected = torch.compile(model, backend=stock)(**inputs, use_cache=False).logits
        torch._dynamo.reset()
        actual = torch.compile(model, backend=tree)(**inputs, use_cache=False).logits
    assert kept == [gm.code for gm in stock.graphs]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_recapture_is_not_offered_where_a_break_is_an_error(tree: Recorder) -> None:
    answers: list[tuple[bool, bool]] = []

    def ask(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        answers.append((scope.in_use(), scope.can_recapture()))
        return gm.forward

    tree.inner = ask
    model, plain = build("llama", "flex_attention"), build("llama")
    torch.compile(model, backend=tree, fullgraph=True)(**batch(), use_cache=False)
    torch.compile(plain, backend=tree)(**batch(), use_cache=False)
    assert answers == [(True, False), (False, False)]


@SLOW
def test_our_mask_serves_stock_flex(tree: Recorder) -> None:
    """Mask and layers in different graphs, and only the graphs with attention captured again."""
    model, reference = build("llama", "flex_attention"), build("llama")
    inputs = batch()

    def mixed(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        if leaf_nodes(gm):
            scope.recapture_dense()
        return gm.forward

    tree.inner = mixed
    kept = inputs["attention_mask"][..., None]
    with torch.no_grad():
        actual = torch.compile(model, backend=tree)(**inputs, use_cache=False).logits
        expected = reference(**inputs, use_cache=False).logits
    assert any(gm.code.count("where") for gm in tree.graphs if not leaf_nodes(gm))
    torch.testing.assert_close(actual * kept, expected * kept)


def test_an_addition_is_one_value(tree: Recorder) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    def twin(original: types.FunctionType) -> Callable[[Tensor], Tensor]:
        return lambda x: original(x) + 0

    def use(x: Tensor) -> Tensor:
        return double(x)

    assert scope.substitute(double, twin)
    assert not scope.substitute(double, twin)
    other = Recorder()
    for backend in (tree, other):
        torch._dynamo.reset()
        torch.compile(use, backend=backend)(torch.ones(3))
    assert "+ 0" in tree.graphs[0].code
    assert "+ 0" not in other.graphs[0].code


# ---- whole processes ----

PRELUDE = """
import sys, torch
from tests.test_leaves import Recorder, batch, build, leaf_nodes
"""


def run_fresh(script: str) -> None:
    """Run a script in a process where nothing is installed yet."""
    subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        check=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
    )


def test_install_before_transformers_is_imported() -> None:
    pytest.importorskip("transformers")
    run_fresh(
        """
        from treecompile.leaves import install, scope
        assert install() == []
        assert "transformers" not in sys.modules
        tree = Recorder()
        scope.serve(tree)
        torch._dynamo.reset()
        model = build("mixtral", "flex_attention", "eager")
        torch.compile(model, backend=tree, fullgraph=True)(**batch(), use_cache=False)
        torch._dynamo.reset()
        model = build("qwen3_moe", "sdpa", "eager")
        torch.compile(model, backend=tree, fullgraph=True)(**batch(), use_cache=False)
        assert tree.leaves() == [4, 2], tree.leaves()
        """
    )


def test_other_backends_see_the_graphs_they_saw_before() -> None:
    pytest.importorskip("transformers")
    run_fresh(
        """
        import torch._inductor.compile_fx as inductor
        inductor.compile_fx = lambda gm, *args, **kwargs: seen(gm, *args)
        cases = [("llama", "sdpa", None), ("qwen3", "sdpa", None), ("qwen3", "eager", None),
                 ("llama", "flex_attention", None), ("mixtral", "sdpa", "eager")]
        models = [build(*case) for case in cases]
        def capture():
            global seen
            codes = []
            for number, model in enumerate(models):
                seen = Recorder()
                torch._dynamo.reset()
                with torch.no_grad():
                    backend = "inductor" if number < 2 else seen
                    torch.compile(model, backend=backend)(**batch(), use_cache=False)
                codes.append([gm.code for gm in seen.graphs])
            return codes
        settings = torch._dynamo.config.get_config_copy()
        before = capture()
        assert [len(codes) for codes in before] == [1, 1, 1, 6, 11], [len(codes) for codes in before]
        from treecompile.leaves import install, scope
        assert "flex mask" in install()
        assert capture() == before
        assert torch._dynamo.config.get_config_copy() == settings
        tree = Recorder()
        scope.serve(tree)
        torch._dynamo.reset()
        torch.compile(models[4], backend=tree, fullgraph=True)(**batch(), use_cache=False)
        assert tree.leaves() == [2], tree.leaves()
        """
    )
