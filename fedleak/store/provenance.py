"""Names files and lines that fedleak did not write on this machine, or that were changed since."""

from typing import Any

from fedleak.store.lines import Lines
from fedleak.store.records import PUBLISHED, UTILITY, answers
from fedleak.store.run import Run
from fedleak.store.shards import begun

FILES = ("run.json", "held_out.json", "reference.json")
FOLDERS = ("captures", "candidates", "defended", "detected", "models", "vault")
"""The files that figures depend on, beside answers, utilities and the scores of secrets."""


def unsealed(run: Run) -> list[str]:
    """Returns the names of files and lines that carry no seal of this machine, or a wrong one.

    Files computed from these, such as scores and the summary, have no seal and are not named.
    """
    names = [name for name in FILES if (run.path / name).exists()]
    for folder in FOLDERS:
        paths = sorted((run.path / folder).glob("[!.]*"))
        names += [f"{folder}/{path.name}" for path in paths]
    changed = [name for name in names if not run.is_genuine(name)]
    given = answers(run.fingerprint())
    sealed: list[Lines[Any]] = [UTILITY, PUBLISHED, given]
    for lines in sealed + [shard.lines(given) for shard in begun(run)]:
        changed += [f"{lines.name}, line {number}" for number in run.changed_lines(lines)]
    return changed
