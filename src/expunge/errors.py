"""Every error the library raises on purpose, drawn once:

    ExpungeError
    ├── InputError (ValueError)   a value the user gave is unusable                    exit 2
    ├── CalibrationError          no value of the free parameter can meet the target   exit 2
    ├── UnlearningError           a model or data set that cannot be certified         exit 2
    ├── RunError                  a process, disk or signal failed: may be tried again exit 3
    ├── CertificateError          a file that is not a usable certificate              exit 2
    └── VerificationError         a certificate that does not hold                     exit 1

The sentence of an error names the field, the value and what would be valid.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import contextmanager


class ExpungeError(Exception):
    """Root of the tree: ``except expunge.ExpungeError`` catches all that is raised on purpose."""

    exit_code = 2
    printed_elsewhere = False  # of several processes of a run, only one prints the sentence


class InputError(ExpungeError, ValueError):
    """A value the user gave is unusable.

    >>> str(InputError.of("noise_std", -1.0, "a finite number >= 0"))
    'noise_std is -1.0; it must be a finite number >= 0'
    """

    @classmethod
    def of(cls, field: str, value: object, valid: str) -> InputError:
        """The one sentence: field, value, what is valid."""
        try:
            shown = repr(value)
        except ValueError:  # a whole number too long for Python to write
            shown = f"a {type(value).__name__} that cannot be shown"
        if "\n" in shown:
            shown = f"a {type(value).__name__}"
        return cls(f"{field} is {shown}; it must be {valid}")


class CalibrationError(ExpungeError):
    """No value of the free parameter can meet the target; the sentence says why."""


class UnlearningError(ExpungeError):
    """A model, data set or loss that cannot be unlearned with a certificate."""


class RunError(ExpungeError):
    """A run that failed for a reason outside it (a lost process, a full disk): try again."""

    exit_code = 3


class CertificateError(ExpungeError):
    """A file that is not a usable certificate, record or weights file."""


class VerificationError(ExpungeError):
    """A certificate that does not hold; the sentence names each thing that differs."""

    exit_code = 1


@contextmanager
def collecting(problems: list[str]) -> Generator[None]:
    """What is refused is one of several problems: the next step may find another.

    >>> problems = []
    >>> with collecting(problems):
    ...     raise InputError("epsilon is missing")
    >>> problems
    ['epsilon is missing']
    """
    try:
        yield
    except ExpungeError as error:
        problems += str(error).split("\n")


def describe_error(error: BaseException, own: int = 0) -> str:
    """What somebody's code raised, and where, in one line; ``own`` outer frames are not theirs.

    >>> try:
    ...     {}["shop"]
    ... except KeyError as error:
    ...     describe_error(error)[:24]
    "KeyError: 'shop' (<docte"
    """
    frames = traceback.extract_tb(error.__traceback__)[own:]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    lines = str(error).strip().split("\n")
    reason = lines[-1] if lines[0].startswith("Caught ") else lines[0]  # of another process
    return f"{type(error).__name__}{f': {reason}' if reason else ''}{where}"
