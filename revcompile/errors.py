"""Every error that revcompile raises on purpose: where, what was expected, and what to do."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable


class RevcompileError(Exception):
    """Base of all errors raised on purpose by revcompile.

    >>> import revcompile
    >>> try:
    ...     revcompile.reversify(object())
    ... except revcompile.RevcompileError as error:
    ...     print(error)
    reversify: expected a torch.nn.Module, got object
    """


class InputError(RevcompileError, ValueError):
    """An argument is not usable as given."""


class ModelError(InputError):
    """The user's model itself fails on the inputs."""


class GuardError(InputError):
    """A guard does not hold: for this call, the captured graph would differ from the model.

    `expression`, `expected` and `found` describe it, `source` is the user's line that read it.
    """

    def __init__(
        self, message: str, *, expression: str, expected: object, found: object, source: str
    ) -> None:
        super().__init__(message)
        self.expression = expression
        self.expected = expected
        self.found = found
        self.source = source


class CaptureError(RevcompileError):
    """The model could not be turned into a graph, or the graph computes something else."""


class InversionError(RevcompileError):
    """A chain of couplings does not reconstruct its own input."""


class OriginalMethodError(RevcompileError, AttributeError):
    """A method of the original model cannot be used on the reversible one."""


class ModifiedError(RevcompileError, RuntimeError):
    """Something a backward pass needs has changed since the forward pass."""


class NonFiniteError(RevcompileError, ArithmeticError):
    """A loss or gradient is infinite or not a number; the micro-batch was skipped."""

    def __init__(self, message: str, *, stage: int, microbatch: int) -> None:
        super().__init__(message)
        self.stage = stage
        self.microbatch = microbatch


class RankError(RevcompileError, RuntimeError):
    """Another rank was lost, does not answer, or raised an error; this rank cannot continue."""


class RevcompileWarning(UserWarning):
    """Something works, but probably not as expected."""


def nearest(word: object, known: Iterable[str], otherwise: str = "") -> str:
    """A hint for a word that is not known.

    >>> nearest("petar", ["petra", "gpipe"])
    "did you mean 'petra'?"
    """
    near = difflib.get_close_matches(str(word), [*dict.fromkeys(known)], 3)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def warn(message: str) -> None:
    """Warn, at the line of user code that called into the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("revcompile."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RevcompileWarning, stacklevel=level)


class TrainerStoppedError(RevcompileError, RuntimeError):
    """This trainer cannot continue: a step failed midway, or its model got other weights."""


class VerificationError(RevcompileError):
    """A pass produced an invalid result: a bug in revcompile, or gradients that cannot be rebuilt
    precisely enough.
    """
