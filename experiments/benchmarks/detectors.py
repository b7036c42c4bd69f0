"""Measures what detectors of clients find, beside how often they alarm in honest rounds.

    python experiments/benchmarks/detectors.py [FILE] [--runs FOLDER] [--no-run] [--out PAGE]

It trains the runs of detectors.toml, or of another file like it, without attacks; the same command
goes on where it was stopped. A round of a client is one trial, and a run is a cluster. What has no
limit by itself gets one for this table: the largest statistic of the honest runs with public seeds,
whose texts no judged run has. The tables are written into the page, docs/detectors.md, below its
marker, and beside it what docs/curves.py draws of them; --no-run writes what there is.
"""

import copy
import itertools
import runpy
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from arguments import parser_of

from fedleak import detectors
from fedleak.attacks.reconstruction import Status
from fedleak.audit import scoring
from fedleak.audit.metrics.intervals import clustered_mean
from fedleak.cli.mistakes import mended
from fedleak.config.experiment import Experiment
from fedleak.config.federation.schedule import clients_of_round, target
from fedleak.config.loading import expanded, parse, set_
from fedleak.flower.engines import train
from fedleak.report.marked_pages import above
from fedleak.running import preparation
from fedleak.running.dispatch.dispatcher import attack_captures
from fedleak.store.records import LEAKAGE, LeakageRow
from fedleak.store.run import Key, Run

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "detectors.md"
CURVES = HERE.parents[1] / "docs" / "curves.py"
MARKER = (
    "<!-- Below this line everything is written by `python experiments/benchmarks/detectors.py`. "
    "-->\n"
)

HONEST = "honest"

DRAWN = ("same_model", "zeros", "rank", "jump", "parallel_rows", "d_snr", "gradient_norm")
"""Detectors that see a changed model."""


class Cell(NamedTuple):
    """A run.

    Attributes:
        setting: The name of its setting.
        mode: What the server does; "honest": nothing.
        seed: Of the experiment.
        public: Whether limits may be taken from it.
        experiment: All of it.
        left: Of a server that knows the detectors: the share that it leaves of what is otherwise
            zero. None: it does not know them.
    """

    setting: str
    mode: str
    seed: int
    public: bool
    experiment: Experiment
    left: float | None = None

    @property
    def folder(self) -> str:
        """The name of its run directory."""
        return f"{self.experiment.fingerprint}-{'public' if self.public else self.seed}"


@dataclass(frozen=True)
class Trial:
    """What one detector found for one client in one round.

    Attributes:
        cell: The run.
        key: The round and the client.
        kind: Of the detector.
        statistic: None: it had nothing to look at, or what it found is no number.
        limit: Its own; None: it has none.
        alarm: Whether it alarmed, by its own limit; for hashes, in the next round, too.
        changed: Whether the client was sent something else than the global model.
    """

    cell: Cell
    key: Key
    kind: str
    statistic: float | None
    limit: float | None
    alarm: bool
    changed: bool


def main() -> int:
    """Trains what is left and writes the page."""
    parser = parser_of(__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "detectors.toml")
    parser.add_argument("--runs", type=Path, default=Path("runs/detectors"), metavar="FOLDER")
    parser.add_argument("--no-run", action="store_true", help="only write what there is")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page", metavar="PAGE")
    args = parser.parse_args()
    with mended():
        written_above = above(args.out, MARKER)
        trials: list[Trial] = []
        read: list[tuple[Cell, LeakageRow]] = []
        left = 0
        for cell in cells(expanded(tomllib.loads(args.file.read_text()))):
            run = Run((args.runs / cell.folder).absolute())
            if not (run.exists() and run.info()["status"] == "finished"):
                if args.no_run:
                    left += 1
                    continue
                print(f"{cell.setting}; {cell.mode}; seed {cell.seed}", flush=True)
                run = preparation.prepare(cell.experiment, run.path)
                train(run, cell.experiment)
                if cell.left is not None:
                    attack_captures(run, cell.experiment, no_more=lambda: True)
                    scoring.score_run(run)
                run.update_info(status="finished")
            trials += trials_of(run, cell)
            if cell.left is not None:
                rows = [row for row in run.rows(LEAKAGE) if row.attack != "probes"]
                read += [(cell, row) for row in rows if row.status != Status.FAILED]
        if left:
            print(f"{left} runs are not there, and are in no figure")
        picture = args.out.with_suffix(".svg")
        lines = [*page(trials), *adaptive_page(trials, read, picture.name)]
        written = written_above + "\n" + "\n".join(lines) + "\n"
        args.out.write_text(written, encoding="utf-8")
        curves = runpy.run_path(str(CURVES))
        curves["write"](curves["detectors"](written), picture)
        print(f"written: {args.out}")
    return 0


def cells(tables: Mapping[str, Any]) -> Iterator[Cell]:
    """Yields all runs of a file: the public ones of each setting, its judged ones, the modes."""
    settings = {setting["name"]: setting for setting in tables["setting"]}

    def cell(setting: str, mode: str, seed: int, changes: Mapping[str, Any], public: bool) -> Cell:
        table = copy.deepcopy({"name": "detectors", "seed": seed, **tables["base"]})
        for key, value in {**settings[setting].get("set", {}), **changes}.items():
            set_(table, key, value, setting)
        table["detector"] = [{"kind": kind} for kind in sorted(detectors.kinds())]
        return Cell(setting, mode, seed, public, parse(table))

    for name, setting in settings.items():
        for seed in tables["public"]:
            yield cell(name, HONEST, seed, setting.get("public", {}), public=True)
        for seed in tables["seeds"]:
            yield cell(name, HONEST, seed, {}, public=False)
    for adaptive, seed in itertools.product(tables["adaptive"], tables["seeds"]):
        name, changes = adaptive["name"], adaptive["set"]
        for left in adaptive["left"]:
            own = changes | {"server": {**changes["server"], "left": left}}
            hidden = cell(adaptive["setting"], name, seed, own, public=False)
            yield hidden._replace(left=left)
    for mode in tables["mode"]:
        for name in mode["settings"]:
            for seed in tables["seeds"]:
                yield cell(name, mode["name"], seed, mode["set"], public=False)


def trials_of(run: Run, cell: Cell) -> Iterator[Trial]:
    """Yields what all detectors found in a run; of a malicious one, in the rounds that are."""
    experiment = cell.experiment
    for round in range(1, experiment.federation.rounds + 1):
        malicious = experiment.mode_in(round) is not None
        if malicious != (cell.mode != HONEST):
            continue
        spared = target(experiment, round)
        for client in clients_of_round(experiment, round):
            key = Key(round, client)
            note = run.detected.read_note(key) or {"findings": []}
            for finding in note["findings"]:
                yield Trial(
                    cell,
                    key,
                    finding["detector"],
                    finding["statistic"],
                    finding["limit"],
                    finding["alarm"] or _learns_later(run, key, finding["detector"]),
                    malicious and client != spared,
                )


def _learns_later(run: Run, key: Key, kind: str) -> bool:
    """Returns whether a client learns in its next round that others were sent another model."""
    note = run.detected.read_note(Key(key.round + 1, key.client))
    findings = note["findings"] if note and kind == "same_model" else ()
    return any(finding["detector"] == kind and finding["alarm"] for finding in findings)


def limits(trials: Sequence[Trial]) -> Mapping[tuple[str, str], float]:
    """Returns by setting and kind the largest statistic of public runs, for what has no limit."""
    largest: dict[tuple[str, str], float] = {}
    for trial in trials:
        cls = detectors.kinds()[trial.kind]
        has_none = getattr(cls(), "limit", 0.0) is None
        if trial.cell.public and has_none and trial.statistic is not None:
            place = (trial.cell.setting, trial.kind)
            largest[place] = max(largest.get(place, 0.0), trial.statistic)
    return largest


def alarmed(trial: Trial, public: Mapping[tuple[str, str], float]) -> bool:
    """Returns whether a detector alarms, by its own limit or by that of public runs."""
    limit = public.get((trial.cell.setting, trial.kind))
    return trial.alarm or (
        limit is not None and trial.statistic is not None and trial.statistic > limit
    )


def page(trials: Sequence[Trial]) -> Iterator[str]:
    """Yields the lines of the tables."""
    public = limits(trials)
    judged = [trial for trial in trials if not trial.cell.public and trial.cell.left is None]
    modes = list(dict.fromkeys(trial.cell.mode for trial in judged if trial.cell.mode != HONEST))
    honest = [trial for trial in judged if trial.cell.mode == HONEST]
    count = len({(trial.cell.folder, trial.key) for trial in honest})
    runs = len({trial.cell.folder for trial in honest})
    yield (
        f"Per cent of a client's rounds with an alarm, with 95 % intervals over runs. Honest: "
        f"{count} rounds of clients in {runs} runs, those in which the detector had something to "
        "look at. Malicious: of the clients that were sent a "
        "changed model. A star: the detector has no limit by itself, and has that of public runs. "
        "`same_model` counts if it alarms in the client's next round, as far as there is one."
    )
    yield ""
    yield "| detector | false alarms | " + " | ".join(modes) + " |"
    yield "|---" * (len(modes) + 2) + "|"
    for kind in sorted(detectors.kinds()):
        star = "*" if any(place[1] == kind for place in public) else ""
        # Where it had nothing to look at, its silence is no merit; a miss is a miss anyway.
        looked = [t for t in honest if t.kind == kind and (t.statistic is not None or t.alarm)]
        row = [f"{_rate(looked, public)} of {len(looked)}"]
        for mode in modes:
            of_mode = [t for t in judged if (t.kind, t.cell.mode) == (kind, mode) and t.changed]
            row.append(_rate(of_mode, public))
        yield f"| `{kind}`{star} | " + " | ".join(row) + " |"
    yield ""
    yield "False alarms by setting:"
    yield ""
    settings = list(dict.fromkeys(trial.cell.setting for trial in honest))
    yield "| setting | rounds | " + " | ".join(f"`{k}`" for k in sorted(detectors.kinds())) + " |"
    yield "|---" * (len(detectors.kinds()) + 2) + "|"
    for setting in settings:
        of_setting = [trial for trial in honest if trial.cell.setting == setting]
        rounds = len({(trial.cell.folder, trial.key) for trial in of_setting})
        cells = []
        for kind in sorted(detectors.kinds()):
            of_kind = [trial for trial in of_setting if trial.kind == kind]
            alarms = sum(alarmed(trial, public) for trial in of_kind)
            had_something = any(trial.statistic is not None for trial in of_kind)
            cells.append(str(alarms) if had_something else "-")
        yield f"| {setting} | {rounds} | " + " | ".join(cells) + " |"
    yield from _rounds_needed(judged)


def adaptive_page(
    trials: Sequence[Trial], read: Sequence[tuple[Cell, LeakageRow]], picture: str
) -> Iterator[str]:
    """Yields the lines about attackers that know the detectors."""
    if not read:
        return
    yield (
        "\nAn attacker that knows the detectors leaves a share of what it would set to zero. Per "
        "cent of the texts that it is after read word for word, and of the clients that were sent "
        "a changed model and notice:\n"
    )
    yield f"![What an adaptive attacker reads, and which detectors notice]({picture})\n"
    yield "| attacker | runs | left | texts read | " + " | ".join(f"`{k}`" for k in DRAWN) + " |"
    yield "|---" * (len(DRAWN) + 4) + "|"
    public = limits(trials)
    for name in dict.fromkeys(cell.mode for cell, _ in read):
        for left in sorted({cell.left or 0.0 for cell, _ in read if cell.mode == name}):
            pairs = [pair for pair in read if (pair[0].mode, pair[0].left) == (name, left)]
            runs = len({cell.folder for cell, _ in pairs})
            texts = sum(row.batch_size or 0 for _, row in pairs)
            exact = sum((row.exact_match or 0.0) * (row.batch_size or 0) for _, row in pairs)
            hidden = [trial for trial in trials if trial.changed and trial.cell.mode == name]
            rates = []
            for kind in DRAWN:
                alarms = [
                    alarmed(trial, public)
                    for trial in hidden
                    if (trial.kind, trial.cell.left) == (kind, left)
                ]
                rates.append(f"{100 * sum(alarms) / max(1, len(alarms)):.3g}")
            share = 100 * exact / max(1, texts)
            yield f"| {name} | {runs} | {left:g} | {share:.3g} | {' | '.join(rates)} |"


def _rounds_needed(judged: Sequence[Trial]) -> Iterator[str]:
    """Yields the lines about an attacker that moves the model a little in each round."""
    yield (
        "\nA server that moves the model there a little in each round stays below the limit of "
        "`jump` on one round if it takes this many rounds (median distance / limit on one round; "
        "below 1 one round is enough, and nothing alarms):\n"
    )
    yield "| mode | setting | rounds |\n|---|---|---|"
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for trial in judged:
        if trial.kind == "jump" and trial.changed and trial.statistic is not None and trial.limit:
            ratios[trial.cell.mode, trial.cell.setting].append(trial.statistic / trial.limit)
    for (mode, setting), of_setting in ratios.items():
        yield f"| {mode} | {setting} | {statistics.median(of_setting):.3g} |"


def _rate(trials: Sequence[Trial], public: Mapping[tuple[str, str], float]) -> str:
    """Returns a rate with its interval, in per cent; trials of a run are a cluster."""
    if not any(trial.statistic is not None for trial in trials):
        return "-"
    numbers: dict[str, int] = defaultdict(lambda: len(numbers))
    clusters = [numbers[trial.cell.folder] for trial in trials]
    values = [float(alarmed(trial, public)) for trial in trials]
    mean, low, high = (100 * part for part in clustered_mean(values, clusters, most=1.0))
    return f"{mean:.3g} [{low:.1f}, {high:.1f}]"


if __name__ == "__main__":
    sys.exit(main())
