"""Deletes what a private text can be read from, once a run is scored."""

import shutil
import time
from dataclasses import dataclass

from fedleak.audit import scoring
from fedleak.errors import FedleakError
from fedleak.store.run import Run
from fedleak.store.shards import begun
from fedleak.store.summaries import SUMMARY

PRIVATE = {
    "vault": "the clients' private batches",
    "captures": "updates, from which they can be read",
    "held": "updates that were summed",
    "models": "models: two of a row differ by an update",
    "positive-control": "undefended copies of batches, and what attacks read of them",
    "held_out.json": "held-out texts",
    "candidates": "texts that attacks on membership were asked about",
    "reconstructions.jsonl": "what attacks read",
    "attempts.jsonl": "how tries of attacks failed",
    "damaged.jsonl": "damaged lines of these",
    "report.html": "a report that shows private texts",
}
"""By name in the run directory.

All other files hold settings and figures, and beside these what attacks say of themselves, in
`reason` and `diagnostics` of the rows.
"""


@dataclass(frozen=True)
class Purged:
    """What a purge did, a line for each file or folder."""

    deleted: tuple[str, ...]
    kept: tuple[str, ...]


def purge(run: Run) -> Purged:
    """Deletes the private data of a run; its rows, ledger and summary stay.

    One that was cut short is finished by the next. Whoever calls this holds the lock.

    Raises:
        FedleakError: The run is not finished, or not all of it is scored.
    """
    if not run.info().get("purged"):
        _refuse_unscored(run)
        # Noted first: if this is cut short, what is left is not taken for a run.
        run.update_info(purged=time.strftime("%Y-%m-%d %H:%M:%S"))
    deleted = []
    for name, what in PRIVATE.items():
        path = run.path / name
        if path.is_dir():
            files = sum(each.is_file() for each in path.rglob("*"))
            shutil.rmtree(path)
            deleted.append(f"{path} ({files} files: {what})")
        elif path.exists():
            path.unlink()
            deleted.append(f"{path} ({what})")
    for shard in begun(run):
        shutil.rmtree(run.path / shard.folder)
        deleted.append(f"{run.path / shard.folder} (what attacks read in shard {shard})")
    for path in run.path.glob(".*.[0-9]*"):  # what a killed process had not yet renamed
        path.unlink()
        deleted.append(f"{path} (half written)")
    scores = scoring.score(run, scoring.salvaged(run))
    scoring.write(run, scores)  # so that the summary says it too
    if "figures" not in run.info():  # run.json has a seal, and rows have none
        run.update_info(figures=scoring.mark(scores.rows, scores.summary.positive_control))
    kept = sorted(each.name for each in run.path.iterdir() if not each.name.startswith("."))
    return Purged(tuple(deleted), (f"{run.path}: {', '.join(kept)}",))


def _refuse_unscored(run: Run) -> None:
    """Refuses to delete what figures are still to be made of."""
    info = run.info()
    if info["status"] != "finished":
        raise FedleakError(
            f"{str(run.path)!r} is not finished ({info['status']}), so nothing was deleted: "
            "`fedleak run` with the experiment's file finishes it; or delete the folder"
        )
    scoring.score_run(run)
    unscored = run.read(SUMMARY).unscored
    if unscored:
        raise FedleakError(
            f"{unscored} answers of {str(run.path)!r} are not scored, so nothing was deleted: "
            f"`fedleak score {run.path}` says why; or delete the folder"
        )
