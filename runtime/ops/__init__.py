"""The ops of packed graphs, `treecompile::*`: importing this package registers them."""

from treecompile.runtime.ops.attention import tree_attention, tree_attention_backward
from treecompile.runtime.ops.attention_math import tree_attention_reference
from treecompile.runtime.ops.attention_plan import PieceCount, count_pieces, plan_header, plan_pieces
from treecompile.runtime.ops.causal_conv import (
    tree_causal_conv1d,
    tree_causal_conv1d_backward,
    tree_causal_conv1d_reference,
)
from treecompile.runtime.ops.expand import (
    expand,
    expand_backward,
    gather_expand,
    gather_expand_backward,
    take,
    take_backward,
)
from treecompile.runtime.ops.recurrence import (
    tree_recurrence,
    tree_recurrence_backward,
    tree_recurrence_reference,
)
from treecompile.runtime.ops.selective_log_probs import (
    kept_rows,
    selective_log_probs,
    selective_log_probs_backward,
    selective_log_probs_reference,
)

__all__ = [
    "PieceCount",
    "count_pieces",
    "expand",
    "expand_backward",
    "gather_expand",
    "gather_expand_backward",
    "kept_rows",
    "plan_header",
    "plan_pieces",
    "selective_log_probs",
    "selective_log_probs_backward",
    "selective_log_probs_reference",
    "take",
    "take_backward",
    "tree_attention",
    "tree_attention_backward",
    "tree_attention_reference",
    "tree_causal_conv1d",
    "tree_causal_conv1d_backward",
    "tree_causal_conv1d_reference",
    "tree_recurrence",
    "tree_recurrence_backward",
    "tree_recurrence_reference",
]
