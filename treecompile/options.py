"""Options of the backend, validated at once: ``torch.compile(model, backend="tree", options={...})``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from treecompile.runtime.chunks import Alignment
from treecompile.runtime.errors import OptionError

__all__ = ["Options"]


_MODES = ("default", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Options:
    """What a user may choose.

    Attributes:
        on_unsupported: "dense" runs a graph that cannot be proved as stock Inductor would, and logs why once;
            "error" raises :class:`UnsupportedError`.
        min_sharing: a batch with fewer kept grid positions for one packed token than this runs dense.
        alignment: where the chunks of linear attentions start in the packed tree: "trajectory" (from the first token of
            each row, as in a dense run: the same rounding, tokens before a fork inside a chunk run again in each
            branch), "branch" (anew at each fork: no token twice, other rounding), or "auto" (whichever has fewer
            chunks for a batch).
        compiler: what runs the graphs: "inductor", or "aot_eager" (no code generation: for tests and debugging).
        mode: of Inductor, as in ``torch.compile(mode=...)`` (which takes no options beside it): "default" or
            "max-autotune-no-cudagraphs".

    Example:
        >>> Options.parse({"min_sharing": 1.5}).min_sharing
        1.5
    """

    on_unsupported: str = "dense"
    min_sharing: float = 1.05
    alignment: Alignment = "trajectory"
    compiler: str = "inductor"
    mode: str = "default"

    @staticmethod
    def parse(given: dict[str, Any] | None, mode: str | None = None) -> Options:
        """Options from a dict, and the `mode` argument of ``torch.compile``.

        Raises:
            OptionError: an unknown name or a value out of range, with the nearest valid one.
        """
        given = {**(given or {}), **({} if mode is None else {"mode": mode})}
        names = tuple(f.name for f in fields(Options))
        for name in given:
            if name not in names:
                raise OptionError(argument="options", value=name, choices=names)
        options = Options(**given)
        _choice("on_unsupported", options.on_unsupported, ("dense", "error"))
        _choice("alignment", options.alignment, ("trajectory", "branch", "auto"))
        _choice("compiler", options.compiler, ("inductor", "aot_eager"))
        if options.mode in ("reduce-overhead", "max-autotune"):
            remedy = "CUDA graphs need fixed sizes, and the sizes of a tree vary"
            raise OptionError(argument="mode", value=options.mode, remedy=remedy, choices=_MODES)
        _choice("mode", options.mode, _MODES)
        sharing = options.min_sharing
        if isinstance(sharing, bool) or not isinstance(sharing, (int, float)) or not sharing >= 0:
            raise OptionError(
                argument="min_sharing",
                value=sharing,
                remedy="pass a ratio of at least 0 (0 packs every batch)",
            )
        return options


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(argument=name, value=value, choices=choices)
