"""Deletes the files that a private text can be read from, once a run is scored."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedleak.audit import score_files, scoring
from fedleak.store.records import ScoredRows
from fedleak.store.run import Run
from fedleak.store.shards import begun
from fedleak.store.summaries import SUMMARY
from fedleak.util.errors import FedleakError

PRIVATE = {
    "vault": "the clients' private batches",
    "captures": "updates, from which they can be read",
    "held": "updates that were summed",
    "models": "models: two of a row differ by an update",
    "kept": "models that clients kept to compare with",
    "positive-control": "undefended copies of batches, and what attacks read of them",
    "held_out.json": "held-out texts",
    "candidates": "texts that attacks on membership were asked about",
    "reconstructions.jsonl": "what attacks read",
    "attempts.jsonl": "how tries of attacks failed",
    "damaged.jsonl": "damaged lines of these",
    "report.html": "a report that shows private texts",
}
"""What is deleted, by name in the run directory.

All other files hold settings and figures, and what attacks report about themselves in `reason` and
`diagnostics` of the rows.
"""


@dataclass(frozen=True)
class Purged:
    """What a purge did, a line for each file or folder.

    Attributes:
        deleted: What is gone.
        left: What could not be deleted, and why: a file, or a folder that cannot be read.
        kept: What holds nothing private.
    """

    deleted: tuple[str, ...]
    left: tuple[str, ...]
    kept: tuple[str, ...]


def purge(run: Run) -> Purged:
    """Deletes the private data of a run; its rows, ledger and summary stay.

    If a purge is cut short, the next one finishes it. The caller holds the lock.

    Raises:
        FedleakError: The run is not finished, or not all of it is scored; or the disk is so full
            that scores, or what was done, cannot be written.
    """
    date = run.info().get("purged")
    if date is None:
        _score(run)
        date = time.strftime("%Y-%m-%d %H:%M:%S")
    # Noted first: if the purge is cut short, the rest is not taken for a run. A full disk has room
    # for the note once something is deleted.
    with suppress(FedleakError):
        run.update_info(purged=date, purge_complete=False)
    deleted: list[str] = []
    left: list[str] = []
    for path, description in filter(lambda entry: os.path.lexists(entry[0]), _private(run)):
        link = f"a link to {path.readlink()}, which stays" if path.is_symlink() else None
        before, folder = len(left), path.is_dir()
        files = _delete(path, left)
        if len(left) == before:
            deleted.append(
                f"{path} ({link or (f'{files} files: {description}' if folder else description)})"
            )
    run.update_info(purged=date, purge_complete=not left)
    scores = scoring.score(run, score_files.salvaged(run))
    score_files.write(run, scores.rows, scores.summary)  # so that the summary says it too
    if "figures" not in run.info():  # run.json has a seal, and rows have none
        run.update_info(figures=score_files.mark(scores.rows, scores.summary.positive_control))
    kept = sorted(path.name for path in run.path.iterdir() if not path.name.startswith("."))
    return Purged(tuple(deleted), tuple(left), (f"{run.path}: {', '.join(kept)}",))


def _private(run: Run) -> Iterator[tuple[Path, str]]:
    """Yields what is to be deleted, and what it is."""
    for name, description in PRIVATE.items():
        yield run.path / name, description
    for shard in begun(run):
        yield run.path / shard.folder, f"what attacks read in shard {shard}"
    for path in sorted(run.path.glob(".*")):
        if path.name != ".lock":
            yield path, "half written"  # by a process that was killed


def _delete(path: Path, left: list[str]) -> int:
    """Deletes a file, a link, or a folder and all that is in it; follows no link.

    Args:
        path: What to delete.
        left: Gets what cannot be deleted.

    Returns:
        How many files are gone.
    """
    before = len(left)
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return 1
        files = sum(_delete(inner, left) for inner in path.iterdir())
        if len(left) == before:
            path.rmdir()
    except OSError as error:
        left.append(f"{path} ({error.strerror})")
        return 0
    return files


def _score(run: Run) -> None:
    """Scores a run a last time, and refuses to delete what scores still need.

    Writes nothing if all scores are written already, so that a full disk can be purged, too.
    """
    info = run.info()
    if info["status"] != "finished":
        raise FedleakError(
            f"{str(run.path)!r} is not finished ({info['status']}), so nothing was deleted: "
            "`fedleak run` with the experiment's file finishes it; or delete the folder"
        )
    scores = scoring.score(run, score_files.salvaged(run))
    if scores.summary.unscored:
        raise FedleakError(
            f"{scores.summary.unscored} answers of {str(run.path)!r} are not scored, so nothing "
            f"was deleted: `fedleak score {run.path}` says why; or delete the folder"
        )
    try:
        before: object = (ScoredRows.read_files(run.rows), run.read_document(SUMMARY))
    except FedleakError:  # damaged, or not there
        before = None
    if before != (scores.rows, scores.summary):
        score_files.write(run, scores.rows, scores.summary)
