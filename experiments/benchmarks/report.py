"""How long it takes to write the report of a run that read many texts.

    python experiments/benchmarks/report.py [--texts 2000] [--profile] [--keep FOLDER]

`builtin/llama-tiny` is trained: 20 clients, batches of two texts, as many rounds as the texts want.
Nobody attacks; the answers are written down instead, so that every score and every control has to
be computed. `keyspan` names each text, a third of them with the last half reversed; `dlg` names
each text reversed; `probes` has all tokens of the batch.

Prints CPU seconds of this process (scoring and writing, as in `fedleak report`), the size of the
file and its SHA-256 without the date; with `--profile` where the time goes.
"""

import cProfile
import hashlib
import pstats
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arguments import parser_of

from fedleak.attacks import settings
from fedleak.attacks.reconstruction import Status, tokens_of
from fedleak.audit.vault import read_truth
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import captures_of
from fedleak.config.loading import parse
from fedleak.flower.engines import train
from fedleak.running import preparation
from fedleak.running.reports import report_run
from fedleak.store import records
from fedleak.store.records import Answer
from fedleak.store.run import Run

CLIENTS, BATCH = 20, 2


def table(texts: int) -> dict[str, Any]:
    """Returns the experiment."""
    return {
        "name": "many",
        "seed": 1,
        "model": {"name": "builtin/llama-tiny"},
        "data": {"name": "builtin/notes", "samples": 2000, "held_out": 100},
        "federation": {
            "clients": CLIENTS,
            "rounds": max(1, texts // (CLIENTS * BATCH)),
            "batch_size": BATCH,
            "learning_rate": 0.02,
        },
        "attack": [{"kind": "keyspan"}, {"kind": "dlg"}, {"kind": "probes"}],
        "utility": {"rounds": []},
        "workers": {"devices": ["cpu"]},
    }


def answers(run: Run, experiment: Experiment) -> Iterator[Answer]:
    """Yields the answers of all attacks on all updates."""
    for key in sorted(captures_of(run, experiment)):
        truth = read_truth(run, key)
        assert truth is not None
        reversed_texts = [ids[::-1] for ids in truth.sequences]
        read = [
            ids if (key.client + place) % 3 else ids[: len(ids) // 2] + ids[len(ids) // 2 :][::-1]
            for place, ids in enumerate(truth.sequences)
        ]
        named: dict[str, Any] = {"keyspan": read, "dlg": reversed_texts, "probes": None}
        for attack in experiment.attacks:
            texts = named[attack.name]
            yield Answer(
                round=key.round,
                client=key.client,
                attack=attack.name,
                settings=settings(attack.attack),
                granted=(),
                knows=(),
                seconds=0.1,
                device="cpu",
                status=Status.RECOVERED,
                sequences=None if texts is None else tuple(map(tuple, texts)),
                margins=(),
                tokens=tokens_of(truth.sequences),
                facts={},
                diagnostics={},
                verified=False,
                reason="",
            )


def made(folder: Path, texts: int) -> Run:
    """Returns the run, trained and answered; an earlier one in the folder is taken as it is."""
    experiment = parse(table(texts))
    run = Run(folder)
    if not run.exists():
        run = preparation.prepare(experiment, folder)
        train(run, experiment)
        run.append(records.answers(run.fingerprint()), *answers(run, experiment))
        run.update_info(status="finished")
    return run


def main() -> None:
    """Runs the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make the run here and keep it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = made(options.keep or Path(folder, "many"), options.texts)
        profile = cProfile.Profile()
        began = time.process_time()
        if options.profile:
            profile.enable()
        file = report_run(run, Path(folder, "report.html"))
        profile.disable()
        seconds = time.process_time() - began
        undated = re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC", b"", file.read_bytes())
        digest = hashlib.sha256(undated).hexdigest()
    size = len(undated) / 2**20
    print(f"{options.texts:,} texts: {seconds:.1f} CPU-s, {size:.1f} MiB, {digest[:16]}")
    if options.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(60)


if __name__ == "__main__":
    main()
