"""Errors that the user can mend: one line each, with the problem, what was found, what to do."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class FedleakError(Exception):
    """Something the user can mend. The command line prints it as one line, without a traceback."""


class ConfigError(FedleakError):
    """An experiment that cannot be run as it is written (exit status 2)."""


class UnknownKindError(ConfigError):
    """An attack or a defense that is not installed, or whose kind is misspelt."""


class StoppedError(FedleakError):
    """Training that was told to stop: what goes on beside it has failed, or need not go on."""


class RoundRefusedError(FedleakError):
    """A client that stays out of a round, because of what it was sent."""


class CaptureError(FedleakError):
    """A captured update that cannot be read back."""


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Puts the subject of a refusal before its message.

    Raises:
        ConfigError: What was refused, after the subject.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from error


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Says what failed where somebody's plugin is called, which may raise anything.

    Raises:
        FedleakError: What failed, and the error.
    """
    try:
        yield
    except Exception as error:
        raise FedleakError(f"{what}: {type(error).__name__}: {error}") from error


def unknown(noun: str, name: str, known: Iterable[str]) -> str:
    """Returns a message for a name that does not exist, with the nearest one that does."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown {noun} {name!r}: {hint}(known: {', '.join(known)})"
