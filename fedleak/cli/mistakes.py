"""How a command ends that cannot go on: one line on stderr, and an exit status."""

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

_log = logging.getLogger(__name__)


@contextmanager
def mended() -> Iterator[None]:
    """Prints a mistake as one line; status 2 for a wrong experiment, 1 for a failed run."""
    try:
        with _kept_traceback():
            yield
    except (typer.Exit, typer.BadParameter, BrokenPipeError):  # for typer: nobody reads on
        raise
    except ModuleNotFoundError:  # for `fedleak.__main__`, which says what to install
        raise
    except ConfigError as error:
        end(str(error), 2, error)
    except FedleakError as error:
        end(str(error), 1, error)
    except KeyboardInterrupt as error:
        end("stopped; the same command again finishes the rest", INTERRUPTED, error)
    except Exception as error:  # noqa: BLE001 - it gets its line, too
        where = logs.noted(error) or "no run directory was in use"
        shown = printable(f"{type(error).__name__}: {error}")[:LONGEST_ERROR]
        reason = f"unexpected error: {shown} ({where}; `fedleak --debug COMMAND ...` shows it)"
        end(reason, 1, error)


def end(reason: str, status: int, error: BaseException | None = None) -> NoReturn:
    """Ends a command with a line on stderr."""
    print(f"fedleak: {printable(reason)}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(status) from error


@contextmanager
def _kept_traceback() -> Iterator[None]:
    """Notes the traceback of an error that no log of a run has, for `--debug`."""
    try:
        yield
    except Exception as error:
        if not logs.noted(error):
            _log.info("ended by an error", exc_info=error)
        raise
