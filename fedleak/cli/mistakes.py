"""How a command ends if it cannot go on: one line on stderr, and an exit status."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from fedleak.util import logs
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.sanitise import printable

LONGEST_ERROR = 500
"""Characters of an unexpected error that are shown."""

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C has ended."""

FOR_OTHERS = (typer.Exit, typer.BadParameter, BrokenPipeError, ModuleNotFoundError)
"""Errors that typer handles, and one for which `fedleak.__main__` says what to install."""

_log = logging.getLogger(__name__)


@contextmanager
def mended() -> Iterator[None]:
    """Prints a mistake as one line; status 2 for a wrong experiment, 1 for a failed run."""
    try:
        yield
    except KeyboardInterrupt as error:
        end("stopped; the same command again finishes the rest", INTERRUPTED, error)
    except Exception as error:
        if not (where := logs.noted(error)):  # no log of a run has it: for `--debug`
            _log.info("ended by an error", exc_info=error)
        if isinstance(error, FOR_OTHERS):
            raise
        if isinstance(error, FedleakError):
            end(str(error), 2 if isinstance(error, ConfigError) else 1, error)
        where = where or "no run directory was in use"
        shown = printable(f"{type(error).__name__}: {error}")[:LONGEST_ERROR]
        reason = f"unexpected error: {shown} ({where}; `fedleak --debug COMMAND ...` shows it)"
        end(reason, 1, error)


def end(reason: str, status: int, error: BaseException | None = None) -> NoReturn:
    """Ends a command with a line on stderr."""
    print(f"fedleak: {printable(reason)}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(status) from error
