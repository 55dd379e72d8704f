"""What `explain` reports: facts, texts, files; and that it leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import treecompile
from tests.golden import assert_golden
from treecompile.backend import tree as tree_backend
from treecompile.graph_text import graph_text
from treecompile.report import STAGES, Report
from treecompile.runtime.ops.attention_router import Route

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

VOCAB, WIDTH = 40, 16


def rollouts() -> tuple[Tensor, Tensor]:
    """Token ids of four rows that share prefixes, and their mask: left- and right-padded."""
    ids = torch.arange(3, 15).repeat(4, 1)
    ids[1, 6:] = torch.arange(20, 26)
    ids[2, 6:] = torch.arange(20, 26)
    ids[2, 9:] = torch.arange(30, 33)
    mask = torch.ones_like(ids)
    mask[3, :3] = 0
    mask[1, 10:] = 0
    return ids, mask


class Toy(nn.Module):
    """One attention layer; what a case adds to it is a function of its inner values."""

    def __init__(
        self, inside: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.inside, self.after = inside, after

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        x = self.embed(ids)
        if self.inside is not None:
            x = self.inside(x, *more)
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + y.transpose(1, 2).flatten(-2))
        return logits if self.after is None else self.after(logits, *more)


def log_probs(logits: Tensor, labels: Tensor, advantages: Tensor) -> Tensor:
    picked = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).squeeze(-1)
    return -(picked * advantages[:, None]).mean()


def language_model(name: str, attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 5,
        "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes)
    config._attn_implementation = attention
    return getattr(transformers, f"{name}ForCausalLM")(config)  # type: ignore[no-any-return]


# ---- golden texts ----


@pytest.mark.parametrize(("name", "attention"), [("Llama", "sdpa"), ("Gemma2", "eager")])
def test_golden_language_models(name: str, attention: str) -> None:
    ids, mask = rollouts()
    model = language_model(name, attention)
    report = treecompile.explain(model, input_ids=ids, attention_mask=mask, use_cache=False)
    assert report.supported
    assert report.rewritten["tree_attention"] == 2
    assert_golden(f"{name.lower()}-report", str(report))
    assert_golden(f"{name.lower()}-packed", report["packed"])


def test_golden_module() -> None:
    ids, _ = rollouts()
    report = treecompile.explain(Toy(after=log_probs), ids, ids, torch.ones(4))
    assert report.rewritten == {"pack": 1, "tree_attention": 1, "selective_log_probs": 1}
    assert_golden("module-report", str(report))
    for stage in STAGES:
        assert_golden(f"module-{stage}", report[stage])
    assert report.tree is not None
    assert_golden("module-tree", report.tree.text())
    assert_golden("module-mask", report.mask)


def test_stages_are_python_and_share_their_names() -> None:
    ids, _ = rollouts()
    report = treecompile.explain(Toy(after=log_probs), ids, ids, torch.ones(4))
    for stage in STAGES:
        compile(report[stage], stage, "exec")
    assert "head_weight" in report["lowered"]
    assert "head_weight" in report["packed"]
    assert "+    scaled_dot_product_attention = tree_attention[0]" in report.diff("lowered", "packed")
    with pytest.raises(treecompile.OptionError, match="Did you mean 'packed'"):
        report["pakced"]


def test_texts_do_not_depend_on_what_was_captured_before() -> None:
    ids, _ = rollouts()
    first = treecompile.explain(Toy(after=log_probs), ids, ids, torch.ones(4))
    second = treecompile.explain(Toy(after=log_probs), ids[:, :9], ids[:, :9], torch.ones(4))
    again = treecompile.explain(Toy(after=log_probs), ids, ids, torch.ones(4))
    assert second["packed"] == first["packed"]
    assert [again[stage] for stage in STAGES] == [first[stage] for stage in STAGES]


# ---- facts ----


def test_values_that_leave_the_packed_graph_say_why() -> None:
    ids, _ = rollouts()
    report = treecompile.explain(Toy(after=lambda logits: (logits, logits.flip(1))), ids)
    assert report.supported
    assert [reason.slug for reason in report.reasons] == ["mixes-tokens"]
    assert "flip" in report.reasons[0].source
    text = str(report)
    assert "expanded at test_report.py" in text
    assert "because\n  aten.flip.default mixes positions along the sequence axis" in text


def test_the_report_names_who_computes_attentions() -> None:
    ids, _ = rollouts()
    (found,) = treecompile.explain(Toy(), ids).graphs[0].routes
    assert (found.count, found.problem.heads, found.problem.qk_size) == (1, 2, 8)
    assert found.problem.dtype == torch.float32
    for route in (found.forward, found.backward):
        assert route.executor == "pieces"
        assert route.why_not["triton"] == "not on a CUDA device"
    with torch.autocast("cpu", torch.bfloat16):
        (ambient,) = treecompile.explain(Toy(), ids).graphs[0].routes
    assert ambient.problem.dtype == torch.bfloat16
    apart = replace(found, count=3, backward=Route("triton", {"pieces-cudnn": "why", "pieces-flash": "why"}))
    assert str(apart).splitlines() == [
        "tree_attention of 2 heads over 2, size 8, f32   x3",
        "  forward by pieces",
        "    not triton, pieces-cudnn, pieces-flash: not on a CUDA device",
        "  backward by triton",
        "    not pieces-cudnn, pieces-flash: why",
    ]


def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return x + y.transpose(1, 2).flatten(-2)


def test_autocast_inside_the_model_decides_who_computes_attentions() -> None:
    ids, _ = rollouts()
    routes = treecompile.explain(Toy(inside=in_autocast), ids).graphs[0].routes
    assert [found.problem.dtype for found in routes] == [torch.bfloat16, torch.float32]


def test_a_batch_that_shares_too_little_says_so() -> None:
    ids = torch.arange(4)[:, None] + torch.arange(6)
    report = treecompile.explain(Toy(), ids)
    assert report.supported
    assert "this batch runs dense: it shares too little" in str(report)
    assert report.graphs[0].dense == "min_sharing"
    assert report.graphs[0].routes == ()
    assert "runs dense" not in str(treecompile.explain(Toy(), ids, options={"min_sharing": 0}))


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def test_graph_breaks_are_part_of_the_report() -> None:
    ids, _ = rollouts()
    report = treecompile.explain(Toy(inside=broken), ids)
    assert not report.supported
    assert len(report.graphs) == 2
    assert [reason.slug for reason in report.reasons] == ["no-attention", "no-token-ids"]
    text = str(report)
    assert "treecompile: 2 graphs" in text
    assert "graph break at test_report.py" in text
    assert "graph 2 of 2" in report["captured"]


def masked_head(logits: Tensor, keep: Tensor) -> Tensor:
    return logits[keep]


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=False)
def test_a_setting_that_costs_a_graph_break_is_named() -> None:
    ids, mask = rollouts()
    report = treecompile.explain(Toy(after=masked_head), ids, mask.bool())
    assert [setting.name for setting, _ in report.settings] == ["capture_dynamic_output_shape_ops"]
    assert "setting torch._dynamo.config.capture_dynamic_output_shape_ops: hidden[mask]" in str(report)


def test_configure_changes_once_what_it_says() -> None:
    config = torch._dynamo.config
    with config.patch(optimize_ddp=True, capture_dynamic_output_shape_ops=False, recompile_limit=8):
        changed = treecompile.configure()
        assert changed["optimize_ddp"] == (True, False)
        assert changed["recompile_limit"] == (8, 64)
        assert config.capture_dynamic_output_shape_ops is True
        assert treecompile.configure() == {}


def test_loading_the_backend_changes_no_setting() -> None:
    from treecompile.settings import SETTINGS

    config = torch._dynamo.config
    defaults = {"optimize_ddp": True, "capture_dynamic_output_shape_ops": False, "recompile_limit": 8}
    assert {name: getattr(config, name) for name in defaults} == defaults
    assert {setting.name for setting in SETTINGS} >= set(defaults)


# ---- no trace ----


def entries(function: Callable[..., Any]) -> list[Any]:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    found = _debug_get_cache_entry_list(function.__code__)
    return [entry for entry in found if entry.guard_manager.extra_state is not None]


def test_explaining_leaves_no_trace() -> None:
    ids, _ = rollouts()
    model = Toy(inside=lambda x: F.dropout(broken(x), 0.5))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(ids)
    before = len(entries(Toy.forward))
    model.head.weight.grad = torch.ones_like(model.head.weight)
    states = torch.get_rng_state(), random.getstate(), dict(treecompile.counters)
    treecompile.explain(compiled, ids)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), dict(treecompile.counters))
    assert len(entries(Toy.forward)) == before
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.embed.weight.grad is None
    torch._dynamo.config.error_on_recompile = True
    try:
        with torch.no_grad():
            compiled(ids)  # what was compiled still serves
    finally:
        torch._dynamo.config.error_on_recompile = False


def test_explaining_often_reaches_no_limit() -> None:
    ids, _ = rollouts()
    model = Toy(inside=broken)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert len(treecompile.explain(model, ids).graphs) == 2


def compiled_in_place(model: Toy) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "form",
    [
        lambda model: model,
        lambda model: model.forward,
        lambda model: lambda ids: model(ids),
        lambda model: torch.compile(model, backend="eager"),
        lambda model: torch.compile(model.forward, backend="eager"),
        compiled_in_place,
    ],
    ids=["module", "method", "function", "compiled", "compiled-method", "compiled-in-place"],
)
def test_every_form_of_a_model(form: Callable[[Toy], Callable[..., Any]]) -> None:
    ids, _ = rollouts()
    report = treecompile.explain(form(Toy()), ids)
    assert report.supported
    assert report.rewritten["tree_attention"] == 1


def test_a_model_without_torch() -> None:
    report = treecompile.explain(lambda x: x, 1)
    assert not report.supported
    assert "captured no graph" in str(report)


# ---- files ----


def test_save_writes_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # without Graphviz
    ids, _ = rollouts()
    index = treecompile.explain(Toy(after=log_probs), ids, ids, torch.ones(4)).save(tmp_path / "out")
    names = {path.name for path in index.parent.iterdir()}
    assert names == {
        "00_captured.py", "10_lowered.py", "20_keys.py", "30_packed.py", "40_tail.py", "graph.dot", "index.html",
        "mask.txt", "report.txt", "tree.dot", "tree.txt",
    }  # fmt: skip
    assert all(name in index.read_text() for name in names - {"index.html"})
    dot = (index.parent / "graph.dot").read_text()
    assert dot.count("aten.scaled_dot_product_attention") == 1
    assert "legend" in dot


def test_pictures_are_drawn_where_graphviz_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho '<svg/>'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    ids, _ = rollouts()
    index = treecompile.explain(Toy(), ids).save(tmp_path / "out")
    assert (index.parent / "tree.svg").read_text() == "<svg/>\n"
    assert '<img src="graph.svg"' in index.read_text()


def test_trace_saves_each_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREECOMPILE_TRACE", str(tmp_path))
    ids, _ = rollouts()
    options = {"compiler": "aot_eager", "min_sharing": 0}
    with torch.no_grad():
        torch.compile(Toy(), backend=tree_backend, options=options)(ids)
        torch.compile(Toy(inside=lambda x: F.dropout(x, 0.5)), backend=tree_backend, options=options)(ids)
    assert (tmp_path / "000" / "30_packed.py").exists()
    assert "dropout with p=0.5" in (tmp_path / "001" / "report.txt").read_text()


def test_checkpointed_regions_are_functions_of_the_text() -> None:
    from torch.utils.checkpoint import checkpoint

    ids, _ = rollouts()
    model = Toy(after=lambda logits: checkpoint(torch.relu, logits, use_reentrant=False))
    text = treecompile.explain(model, ids)["packed"]
    assert "def checkpoint_0(" in text
    compile(text, "packed", "exec")


def test_text_of_any_graph() -> None:
    gm = torch.fx.symbolic_trace(
        lambda x: x.view(2, -1)[0].sum(dim=0, keepdim=True).to(torch.float64) + float("inf")
    )
    text = graph_text(gm, "a title")
    assert text.startswith("# a title\ndef forward(\n    arg_0,\n):")
    assert "view = arg_0.view(2, -1)" in text
    assert "getitem = view[0]" in text


def test_reports_are_values() -> None:
    assert str(Report(())) == str(treecompile.explain(lambda x: x, 1))
