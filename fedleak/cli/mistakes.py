"""How a command ends that cannot go on: one line on stderr, and an exit status."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedleak.util import logs
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.sanitise import printable

LONGEST_ERROR = 500
"""Characters of an unexpected error that are shown."""

_log = logging.getLogger(__name__)


@contextmanager
def mended() -> Iterator[None]:
    """Prints a mistake as one line; status 2 for a wrong experiment, 1 for a failed run."""
    try:
        with _kept_traceback():
            yield
    except ConfigError as error:
        print(f"fedleak: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from error
    except BrokenPipeError:  # nobody reads on, which is for typer
        raise
    except FedleakError as error:
        print(f"fedleak: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        print("fedleak: stopped; the same command again finishes the rest", file=sys.stderr)  # noqa: T201
        raise typer.Exit(130) from error
    except (typer.Exit, typer.BadParameter):
        raise
    except Exception as error:
        where = logs.noted(error) or "no run directory was in use"
        shown = printable(f"{type(error).__name__}: {error}")[:LONGEST_ERROR]
        print(  # noqa: T201
            f"fedleak: unexpected error: {shown} ({printable(where)}; `fedleak --debug "
            "COMMAND ...` shows it)",
            file=sys.stderr,
        )
        raise typer.Exit(1) from error


@contextmanager
def _kept_traceback() -> Iterator[None]:
    """Notes the traceback of an error that no log of a run has, for `--debug`."""
    try:
        yield
    except Exception as error:
        if not logs.noted(error):
            _log.info("ended by an error", exc_info=error)
        raise
