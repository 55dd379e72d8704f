"""Tree programs that run op by op, without a compiler: for reports and audits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from treecompile.lowering import PackedCode
from treecompile.passes.program import Draft
from treecompile.runtime.batch import TreeCache
from treecompile.runtime.program import TreeProgram

__all__ = ["plain_program"]


def plain_program(gm: fx.GraphModule, draft: Draft, cache: TreeCache) -> TreeProgram:
    """A program that packs every batch and runs its graphs as plain PyTorch.

    Args:
        gm: the captured graph, which runs where the batch has no tree.
        draft: its tree program.
        cache: for trees.
    """
    shapes = {name: spec.shape for name, spec in draft.packs.items()}
    code = PackedCode(draft.packed, draft.inputs, shapes, "aot_eager", "default", lambda: None)

    def packed(numbers: tuple[Any, ...], values: list[Any]) -> Sequence[Any]:
        return code.numbered(numbers)(*values)  # type: ignore[no-any-return]

    return TreeProgram(
        arguments=tuple(n.name for n in draft.lowered.graph.nodes if n.op == "placeholder"),
        keys=draft.keys.module,
        key_arguments=tuple(n.name for n in draft.keys.inputs),
        key_outputs=draft.key_outputs,
        tree=draft.tree,
        inputs=draft.inputs,
        packs=draft.packs,
        constants=draft.constants,
        packed=packed,
        frontier=draft.frontier,
        tail=draft.tail.module,
        tail_inputs=tuple(n.name for n in draft.tail.inputs),
        repeats=draft.repeats,
        key_constants=draft.key_constants,
        dense=gm,
        observe=lambda how, why: None,
        failed=lambda error: None,
        min_sharing=0.0,
        cache=cache,
    )
