"""The ops of packed graphs, `treecompile::*`: importing this package registers them."""

from treecompile.runtime.ops.attention import tree_attention, tree_attention_backward
from treecompile.runtime.ops.attention_math import tree_attention_reference
from treecompile.runtime.ops.attention_plan import PieceCount, count_pieces, plan_header, plan_pieces
from treecompile.runtime.ops.expand import (
    expand,
    expand_backward,
    gather_expand,
    gather_expand_backward,
    take,
    take_backward,
)

__all__ = [
    "PieceCount",
    "count_pieces",
    "expand",
    "expand_backward",
    "gather_expand",
    "gather_expand_backward",
    "plan_header",
    "plan_pieces",
    "take",
    "take_backward",
    "tree_attention",
    "tree_attention_backward",
    "tree_attention_reference",
]
