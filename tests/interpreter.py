"""Repairs of Triton's interpreter, which tests use where there is no GPU. Import before kernels run."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element, which NumPy 2.4 no longer converts: ranges need an index."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor
