"""What the backend made of a model: as text, as Python code per stage, as pictures, as files."""

from __future__ import annotations

import difflib
import html
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import fx

from treecompile import draw
from treecompile.executors import AttentionRoutes, RecurrenceRoutes
from treecompile.graph_text import Argument, Names, graph_text
from treecompile.options import Options
from treecompile.passes.notes import Exit, Rewrite, region_text
from treecompile.passes.program import Draft
from treecompile.passes.reasons import Reason, source_text
from treecompile.runtime.batch import PackedBatch
from treecompile.runtime.errors import OptionError
from treecompile.runtime.program import Input
from treecompile.runtime.tree import RolloutTree
from treecompile.settings import Setting

__all__ = ["STAGES", "Break", "GraphReport", "Report"]

STAGES = ("captured", "lowered", "keys", "packed", "tail")

_DENSE = {
    "min_sharing": "it shares too little: fewer than min_sharing grid tokens for one packed token",
    "chained-documents": "rows hold documents that its attentions keep apart and its recurrences do not",
    "masked-between": "a masked position between kept ones moves a recurrence or shifts a convolution",
    "masked-after": "something reads masked positions after the last kept one, where recurrences go on",
    "masked-before": "masked positions before the first kept one are not proved to leave its recurrences at zero",
    "masked-query": "a masked position that something reads averages over keys that the tree does not have",
    "empty": "every position is masked",
    "shapes": "its inputs do not have one batch size and one length",
    "compiler": "the compiler failed on the packed graph",
}


@dataclass(frozen=True)
class Break:
    """Why a captured graph ended before the model did."""

    reason: str
    where: str


@dataclass(frozen=True)
class GraphReport:
    """One captured graph.

    Attributes:
        captured: as Dynamo gave it to the backend.
        draft: its tree program; None if it was refused.
        reason: why it was refused.
        batch: the tree of the batch, if there is one.
        dense: why this batch would run dense although the graph is packed; "" if it would not.
        ended_by: the graph break after it.
        routes: who computes its attentions and recurrences, and why not others; empty where the batch has no tree or
            runs dense.
    """

    captured: fx.GraphModule
    draft: Draft | None
    reason: Reason | None
    batch: PackedBatch | None = None
    dense: str = ""
    ended_by: Break | None = None
    routes: tuple[AttentionRoutes | RecurrenceRoutes, ...] = ()
    _texts: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nodes(self) -> int:
        """How many operations the graph has."""
        gm = self.captured if self.draft is None else self.draft.lowered
        return sum(node.op in ("call_function", "call_method", "call_module") for node in gm.graph.nodes)

    def reasons(self) -> list[Reason]:
        """Why it, or values in it, cannot be packed."""
        if self.reason is not None:
            return [self.reason]
        exits = self.draft.exits if self.draft is not None else []
        return list(dict.fromkeys(leaving.reason for leaving in exits if leaving.reason is not None))

    def key(self) -> list[str]:
        """What two rows must agree on to share: values that Dynamo was given, or computed from them."""
        if self.draft is None:
            return []
        nodes = [n for n in self.captured.graph.nodes if n.op == "placeholder"]
        lowered = [n.name for n in self.draft.lowered.graph.nodes if n.op == "placeholder"]
        source = {name: source_text(node) for name, node in zip(lowered, nodes, strict=True)}
        spec = self.draft.tree
        columns = {"absolute": ["column"], "step": ["steps between columns"]}.get(spec.column or "", [])
        documents = ["document"] if spec.documents else []
        values = (source.get(name) or f"a value computed from the inputs ({name})" for name in spec.keys)
        return [*values, *columns, *documents]

    # ---- stages as text ----

    def stage(self, name: str) -> str:
        """A stage as Python text; a refused graph has only the first."""
        if not self._texts:
            self._texts.update(self._written())
        return self._texts.get(name, "")

    def _written(self) -> dict[str, str]:
        nodes = [n for n in self.captured.graph.nodes if n.op == "placeholder"]
        given = [Argument.of(n.name, source_text(n)) for n in nodes]
        texts = {
            "captured": graph_text(
                self.captured, "captured by Dynamo", arguments=lambda i, _: given[i], name="captured"
            )
        }
        if self.draft is None:
            return texts
        return texts | _stages(self.draft, [argument.note for argument in given])


def _stages(draft: Draft, sources: Sequence[str]) -> dict[str, str]:
    """The stages of a tree program; a value has one name in all of them."""
    names = Names()
    placeholders = [n.name for n in draft.lowered.graph.nodes if n.op == "placeholder"]
    given = {name: Argument.of(name, source) for name, source in zip(placeholders, sources, strict=True)}

    def known(inputs: Sequence[fx.Node]) -> Callable[[int, fx.Node], Argument]:
        return lambda i, _: given.get(inputs[i].name) or Argument(inputs[i].name, "value")

    def packed(i: int, _: fx.Node) -> Argument:
        return _input(draft.inputs[i], given, names)

    keys, tail = draft.keys, draft.tail
    texts = (
        ("lowered", draft.lowered, "flat ATen graph", lambda i, _: given[placeholders[i]]),
        ("keys", keys.module, "before the tree: its key, masks and labels, on the grid", known(keys.inputs)),
        ("packed", draft.packed, "one row of N packed tokens", packed),
        ("tail", tail.module, "after the tree: what belongs to rows, on the grid", known(tail.inputs)),
    )
    return {name: graph_text(gm, title, names, what, name) for name, gm, title, what in texts}


def _input(spec: Input, given: dict[str, Argument], names: Names) -> Argument:
    """What an input of the packed graph is."""
    where = region_text(spec.region)
    of = f" of grid{where}" if where else ""
    if spec.role == "tree":
        return Argument(f"tree {spec.name}", spec.name, "tree")
    if spec.role in ("rows", "row_index", "offsets", "positions", "multiplicity"):
        return Argument(f"{spec.role}{of}", spec.role, f"layout{of}")
    argument = given.get(spec.name)
    name = argument.note if argument is not None else names.known.get(spec.name, spec.name)
    if spec.role == "argument" and argument is not None:
        return argument
    note = {
        "constant": "constant tensor",
        "number": f"the number {name}",
        "quantity": f"the number {name}",
        "scalar": f"the scalar {name}",
        "pack": f"{name} of packed tokens",
        "index": f"{name} of grid positions",
    }.get(spec.role, f"{spec.role} {name}")
    word = argument.word if argument is not None else name
    return Argument(f"{spec.role} {spec.name}", f"{word}_packed" if spec.role == "pack" else word, note + of)


@dataclass(frozen=True)
class Report:
    """What the backend made of a model, for one batch.

    ``str(report)`` is the summary; ``report["packed"]`` the packed graph as Python text.

    Attributes:
        graphs: the captured graphs, in order.
        options: the options it was captured with.
        settings: settings of Dynamo that cost this model graphs or speed, with the value that helps.

    Example:
        >>> import torch, treecompile
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = torch.nn.Embedding(10, 8)
        ...     def forward(self, ids):
        ...         x = self.embed(ids)
        ...         q = x.view(*ids.shape, 2, 4).transpose(1, 2)
        ...         return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> report = treecompile.explain(Model(), torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]]))
        >>> report.supported, report.rewritten["tree_attention"], report.tree.n
        (True, 1, 5)
    """

    graphs: tuple[GraphReport, ...]
    options: Options = field(default_factory=Options)
    settings: tuple[tuple[Setting, Any], ...] = ()

    # ---- facts ----

    @property
    def supported(self) -> bool:
        """Whether every graph is packed."""
        return bool(self.graphs) and all(graph.draft is not None for graph in self.graphs)

    @property
    def rewritten(self) -> Counter[str]:
        """How many nodes were rewritten, by kind: ``tree_attention``, ``column``, ``sub_layout``, ..."""
        return Counter(rewrite.kind for rewrite in self._rewrites())

    @property
    def reasons(self) -> list[Reason]:
        """Why graphs run dense, and why values leave packed graphs."""
        return list(dict.fromkeys(reason for graph in self.graphs for reason in graph.reasons()))

    @property
    def tree(self) -> RolloutTree | None:
        """The rollout tree of the batch; None if no graph is packed."""
        return next((graph.batch.tree for graph in self.graphs if graph.batch is not None), None)

    @property
    def mask(self) -> str:
        """The attention mask by blocks; see :func:`treecompile.draw.mask_text`."""
        return draw.mask_text(self.tree) if self.tree is not None else "(no tree)"

    def _rewrites(self) -> list[Rewrite]:
        return [r for graph in self.graphs if graph.draft is not None for r in graph.draft.rewrites]

    # ---- stages ----

    def __getitem__(self, stage: str) -> str:
        """A stage of all graphs as Python text.

        Args:
            stage: "captured", "lowered", "keys", "packed" or "tail".

        Raises:
            OptionError: another name.
        """
        if stage not in STAGES:
            raise OptionError(argument="stage", value=stage, choices=STAGES)
        texts = [(i, graph.stage(stage)) for i, graph in enumerate(self.graphs, 1)]
        if len(self.graphs) == 1:
            return texts[0][1]
        return "\n\n".join(f"# graph {i} of {len(texts)}\n{text}" for i, text in texts if text)

    def diff(self, a: str, b: str) -> str:
        """A unified diff of two stages, such as ``report.diff("lowered", "packed")``."""
        lines = difflib.unified_diff(self[a].splitlines(), self[b].splitlines(), a, b, lineterm="")
        return "\n".join(lines)

    # ---- text ----

    def __str__(self) -> str:
        parts = [self._summary()]
        for number, graph in enumerate(self.graphs, 1):
            title = [f"graph {number} of {len(self.graphs)}"] if len(self.graphs) > 1 else []
            parts += ["\n".join(title + _steps(graph))] if title or graph.draft else []
            parts += _blocks(graph)
        for setting, wanted in self.settings:
            shown = "..." if isinstance(wanted, set) else repr(wanted)
            parts.append(
                f"setting torch._dynamo.config.{setting.name}: {setting.cost}\n"
                f"  Hint: treecompile.configure(), or torch._dynamo.config.{setting.name} = {shown}"
            )
        return "\n\n".join(parts)

    def _summary(self) -> str:
        refused = sum(graph.draft is None for graph in self.graphs)
        nodes = sum(graph.nodes for graph in self.graphs)
        count = len(self.graphs)
        lines = [
            f"treecompile: {count} graph{'' if count == 1 else 's'}, {nodes} nodes, "
            f"{len(self._rewrites())} rewritten, {refused} unsupported"
        ]
        if not self.graphs:
            return "treecompile: Dynamo captured no graph: the model never called torch, or is disabled"
        if self.tree is not None:
            lines += [_tree_line(self.tree)]
        keys = dict.fromkeys(key for graph in self.graphs for key in graph.key())
        lines += [f"tree key: {', '.join(keys)}"] if keys else []
        lines += [f"this batch runs dense: {_DENSE.get(g.dense, g.dense)}" for g in self.graphs if g.dense]
        return "\n".join(lines)

    # ---- files ----

    def save(self, directory: str | Path) -> Path:
        """Write everything to files.

        Args:
            directory: made if it does not exist.

        Returns:
            the path of ``index.html``: a static page with the report and links to the stages of each graph
            (``00_captured.py`` ... ``40_tail.py``), ``tree.txt``, ``mask.txt`` and the pictures
            (``graph.dot``, ``tree.dot``, and SVGs of them where Graphviz is installed).
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        files = dict(self._files())
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        index = folder / "index.html"
        index.write_text(_page(str(self), list(files)), encoding="utf-8")
        return index

    def _files(self) -> Iterable[tuple[str, str]]:
        yield "report.txt", str(self) + "\n"
        for number, graph in enumerate(self.graphs, 1):
            prefix = f"graph{number}_" if len(self.graphs) > 1 else ""
            for i, stage in enumerate(STAGES):
                if text := graph.stage(stage):
                    yield f"{prefix}{10 * i:02d}_{stage}.py", text
            if graph.draft is not None:
                yield from _picture(f"{prefix}graph", draw.graph_dot(graph.draft.lowered))
        if self.tree is not None:
            yield "tree.txt", self.tree.text() + "\n"
            yield "mask.txt", self.mask + "\n"
            yield from _picture("tree", draw.tree_dot(self.tree))


def _picture(name: str, dot: str) -> Iterable[tuple[str, str]]:
    yield f"{name}.dot", dot
    drawn = draw.svg(dot)
    if drawn is not None:
        yield f"{name}.svg", drawn


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>treecompile</title></head><body>
<pre>{text}</pre>
<ul>
{links}
</ul>
{pictures}
</body></html>
"""


def _page(text: str, files: Sequence[str]) -> str:
    names = [html.escape(name) for name in files]
    return _PAGE.format(
        text=html.escape(text),
        links="\n".join(f'<li><a href="{name}">{name}</a></li>' for name in names),
        pictures="\n".join(f'<img src="{name}" alt="{name}">' for name in names if name.endswith(".svg")),
    )


# ---- parts of the text ----


def _tree_line(tree: RolloutTree) -> str:
    segments = tree.segments
    inner = set(segments[:, 2].tolist())
    pads = int(np.count_nonzero(segments[:, 3] == segments[:, 0]))
    leaves = sum(s not in inner for s in range(len(segments))) - pads
    sharing = tree.sharing
    flat = int(np.count_nonzero(tree.row_index >= 0))
    text = (
        f"tree: {len(segments)} segments, {leaves} leaves, {tree.n:,} tokens packed for {flat:,} flat "
        f"({flat / max(tree.n, 1):.2f}x tokens, {sharing.pairs:.2f}x pairs)"
    )
    dropped = tree.batch * tree.length - flat
    notes = [f"{pads:,} masked positions kept as leaves"] if pads else []
    notes += [f"{dropped:,} dropped"] if dropped else []
    return ", ".join([text, *notes])


def _steps(graph: GraphReport) -> list[str]:
    if graph.draft is None:
        return []
    steps = graph.draft.steps
    width = max(len(step.name) for step in steps)
    lines = [f"{'pass':<{width}}  changed      ms  note"]
    for step in steps:
        line = f"{step.name:<{width}}  {step.changed:>7}  {step.seconds * 1e3:>6.1f}  {step.note}"
        lines.append(line.rstrip())
    return lines


def _blocks(graph: GraphReport) -> list[str]:
    blocks = []
    if graph.draft is not None:
        blocks += _rewrite_blocks(graph.draft.rewrites)
        blocks += map(str, graph.routes)
        blocks += _exit_blocks(graph.draft.exits)
    if graph.reason is not None:
        blocks.append(f"runs dense: {graph.reason}")
    if graph.ended_by is not None:
        blocks.append(f"graph break{_at(graph.ended_by.where)}:\n{_indent(graph.ended_by.reason)}")
    return blocks


def _rewrite_blocks(rewrites: Sequence[Rewrite]) -> list[str]:
    """One block per kind and line of the user's code."""
    lines: dict[tuple[str, str, str], Counter[tuple[str, str]]] = {}
    for r in rewrites:
        lines.setdefault((r.kind, r.where, r.source), Counter())[(r.before, r.after)] += 1
    blocks = []
    for (kind, where, source), forms in lines.items():
        head = [where or kind, *_source(source)]
        for (before, after), times in forms.items():
            head += [f"  - {before}" + (f"   x{times}" if times > 1 else ""), f"  + {after}"]
        blocks.append("\n".join(head))
    return blocks


def _exit_blocks(exits: Sequence[Exit]) -> list[str]:
    """One block per value that leaves the packed graph."""
    blocks: list[str] = []
    for leaving in exits:
        how = "read per position" if leaving.packed.endswith("[M]") else "expanded"
        how = how if leaving.packed != leaving.shape else "returned"
        line = f"{how}{_at(leaving.where)}: {leaving.packed} -> {leaving.shape}"
        if leaving.reason is not None:
            blocks.append(f"{line}, because\n{_indent(str(leaving.reason))}")
        else:
            why = "an output" if leaving.output else "for what belongs to rows"
            blocks.append("\n".join([f"{line}, {why}", *_source(leaving.source)]))
    return list(dict.fromkeys(blocks))


def _source(line: str) -> list[str]:
    return [f"    {line}"] if line else []


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in text.splitlines())
