"""What is noted of each command: `log.txt` in the run directory, and stderr with `--debug`.

Modules write to `logging.getLogger(__name__)`, as everywhere; without `log.txt` or `--debug`
nothing is shown. Tracebacks are kept without the values of variables, which may be private texts.
"""

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from fedleak.util.plain_files import opened
from fedleak.util.sanitise import printable

LOG = "log.txt"

_log = logging.getLogger(__name__)


class _Printable(logging.Formatter):
    """Formats a record as printable lines, whatever is in it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(line) for line in super().format(record).split("\n"))


class _File(logging.FileHandler):
    """Appends to a file that its owner alone can read, from the first line on.

    A line that cannot be written is left out: what needs the disk reports that it is full.

    Attributes:
        complete: Whether all of it was written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self.complete = True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it cannot be opened
            self.complete = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is given
        self.complete = False

    def close(self) -> None:
        with suppress(OSError):  # what is left of a line that did not fit
            super().close()

    def _open(self) -> TextIOWrapper:
        handle = opened(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return os.fdopen(handle, "a", encoding="utf-8")


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Appends to the log of a folder what happens in the body, and the error that ends it.

    The error says in a note where its traceback is.
    """
    file = _File(folder / LOG)
    with handled(file):
        _log.info("fedleak %s", shlex.join(sys.argv[1:]))
        try:
            yield
        except Exception as error:
            _log.error("ended by an error", exc_info=error)
            if file.complete and not noted(error):
                error.add_note(f"the traceback is in {folder / LOG}")
            raise
        except BaseException as error:
            _log.info("ended by %s", type(error).__name__)
            raise
        _log.info("done")


def noted(error: BaseException) -> str:
    """Returns where an error's traceback is; empty if nobody has kept it."""
    return "; ".join(getattr(error, "__notes__", ()))


@contextmanager
def handled(handler: logging.Handler) -> Iterator[None]:
    """Passes what our modules log in the body to a handler, and not to the loggers above them.

    Libraries that we import give Python's root logger a handler that prints.
    """
    handler.setFormatter(_Printable())
    logger = logging.getLogger("fedleak")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        handler.close()
