"""Our errors as Dynamo lets them pass.

Whatever a backend raises reaches the user as ``BackendCompilerFailed`` with the error as a line of its text,
so that ``except UnsupportedError`` would never catch. Dynamo passes on errors of that class as they are:
ours, raised from the backend, are of both classes. Dynamo adds a paragraph about its own settings to the
text, below ours.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, NoReturn

from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

from treecompile.runtime import errors

__all__ = ["OptionError", "UnsupportedError", "raise_option", "raise_unsupported"]


class _Passing(BackendCompilerFailed):
    """What Dynamo reads of a failure. Frames above `first_useful_frame` are its own and are cut off."""

    backend_name = "tree"
    first_useful_frame: FrameType | None = None

    def __init__(self, text: str) -> None:
        TorchDynamoException.__init__(self, text)


class UnsupportedError(errors.UnsupportedError, _Passing):
    """:class:`treecompile.UnsupportedError`, raised while Dynamo compiles."""


class OptionError(errors.OptionError, _Passing):
    """:class:`treecompile.OptionError`, raised while Dynamo compiles."""


def raise_unsupported(frame: FrameType | None, **fields: Any) -> NoReturn:
    """Raise :class:`treecompile.UnsupportedError` out of a backend.

    Args:
        frame: the backend's frame, where the traceback that the user sees begins.
        **fields: of the error.
    """
    error = UnsupportedError(**fields)
    error.first_useful_frame, error.inner_exception = frame, errors.UnsupportedError(**fields)
    raise error


def raise_option(frame: FrameType | None, error: errors.OptionError) -> NoReturn:
    """Raise an :class:`treecompile.OptionError` out of a backend; see :func:`raise_unsupported`."""
    passing = OptionError(
        argument=error.argument, value=error.value, remedy=error.remedy, choices=error.choices
    )
    passing.first_useful_frame, passing.inner_exception = frame, error
    raise passing from None
