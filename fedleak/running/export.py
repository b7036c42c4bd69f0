"""The rows of a run as a table for other programs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedleak.attacks.server_modes.honest import Honest
from fedleak.audit.answer_scores import score_answer
from fedleak.audit.vault import read_truth
from fedleak.config.federation.lookup import stored
from fedleak.config.federation.workload import outline
from fedleak.running.preparation import refuse_purged
from fedleak.store.files import new_file
from fedleak.store.records import LEAKAGE, LeakageRow
from fedleak.store.run import Key, Run
from fedleak.store.shards import read_answers
from fedleak.util.errors import CaptureError, ConfigError, FedleakError

_KINDS = (".csv", ".parquet")

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""The beginnings of a cell that a spreadsheet takes for a formula."""


def export(run: Run, path: Path, *, texts: bool = False) -> int:
    """Writes a run's rows of leakage.jsonl as a table, and returns how many there are.

    A table or a list in leakage.jsonl becomes JSON in one cell. The column `server` has the
    server's mode in the round. Only the owner can open the file.

    Args:
        run: A run that was scored.
        path: Ends in .csv or .parquet. In a csv file, text that a spreadsheet would take for a
            formula begins with an apostrophe.
        texts: Also write the private texts, beside what was read of each.

    Raises:
        ConfigError: Another kind of file, no run directory, or texts of a run that was purged.
        FedleakError: There are no rows, texts are missing, or the file cannot be written.
    """
    from datasets import Dataset  # it takes a second

    kind = path.suffix.lower()
    if kind not in _KINDS:
        raise ConfigError(
            f"--to {str(path)!r} is no kind of file that rows are written to: end it in "
            f"{' or '.join(_KINDS)}, or name a tracker, mlflow or tensorboard"
        )
    rows = scored_rows(run)
    read = _texts(run) if texts else {}
    experiment = stored(run)
    table = []
    for row in rows:
        mode, pairs = experiment.mode_in(row.round), {"pairs": read.get(row.id)} if texts else {}
        table.append({**_flat(row), "server": mode.kind if mode else Honest.kind, **pairs})
    with new_file(path) as temporary:
        if kind == ".csv":
            harmless = [{name: _harmless(value) for name, value in row.items()} for row in table]
            Dataset.from_list(harmless).to_csv(str(temporary), index=False)
        else:
            Dataset.from_list(table).to_parquet(str(temporary))
    return len(rows)


def scored_rows(run: Run) -> list[LeakageRow]:
    """Returns the rows of a scored run.

    Raises:
        ConfigError: This is no run directory.
        FedleakError: It was not scored, or a row is damaged.
    """
    run.info()  # refuses a folder that is no run
    if not (rows := run.rows(LEAKAGE)):
        raise FedleakError(f"{str(run.path)!r} has no rows: `fedleak score {run.path}` makes them")
    return rows


def _flat(row: LeakageRow) -> dict[str, Any]:
    """Returns a row as cells: a table or a list becomes JSON."""
    personal = [item.model_dump(mode="json") for item in row.personal]
    cells = {**row.model_dump(mode="json"), "personal": personal}
    return {
        name: json.dumps(value) if isinstance(value, dict | list) else value
        for name, value in cells.items()
    }


def _texts(run: Run) -> Mapping[tuple[Key, str], str]:
    """Returns each private text and what was read of it, as JSON, by update and attack."""
    refuse_purged(run)
    model = outline(stored(run), run.info()["num_labels"])
    texts = {}
    for answer in read_answers(run):
        try:
            truth = read_truth(run, answer.key)
        except CaptureError as error:
            raise FedleakError(f"{error}: leave out --texts") from error
        if truth is None:
            raise FedleakError(f"{answer.key} has no private batch in the vault: leave out --texts")
        pairs = score_answer(answer, truth, model).pairs if truth.sequences else ()
        read = [{"text": pair.truth, "read": pair.answer} for pair in pairs]
        if not read:  # the attack named no sequence
            contents = map(model.content, truth.sequences)
            read = [{"text": model.decode(ids), "read": None} for ids in contents]
        texts[answer.id] = json.dumps(read)
    return texts


def _harmless(value: Any) -> Any:
    """Returns a cell that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
