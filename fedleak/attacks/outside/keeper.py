"""Runs a program in a process group of its own, and ends all of the group when it is time.

    python keeper.py FOLDER PROGRAM [ARGUMENT]...

It is time when the program ends, or when standard input is closed. The parent holds the other end
of standard input, so the program does not outlive the parent, whatever ends the parent. Then the
folder is removed too. The exit status is the program's; 128 and more is the number of a signal.
This file stands alone: it starts without fedleak, in a few milliseconds.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def main(folder: str, *program: str) -> None:
    """Runs the program; does not return."""
    try:
        child = subprocess.Popen(program, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{program[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(127)
    first = threading.Lock()

    def end_group() -> None:
        # macOS raises PermissionError for a group that has ended.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)

    def wait() -> None:
        status = child.wait()
        if first.acquire(blocking=False):
            end_group()  # what the program started and left behind
            os._exit(status if status >= 0 else 128 - status)

    threading.Thread(target=wait, daemon=True).start()
    sys.stdin.buffer.read()
    if first.acquire(blocking=False):
        end_group()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
    threading.Event().wait()  # the program has just ended: the other thread exits


if __name__ == "__main__":
    main(*sys.argv[1:])
