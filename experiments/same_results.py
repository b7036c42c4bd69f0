"""Whether two versions of fedleak give the same results, to the last digit.

    python experiments/same_results.py record FOLDER     with each version, on the same machine
    python experiments/same_results.py compare BEFORE AFTER [--ignore FIELD] [--renamed OLD=NEW]

`record` runs both quickstarts, a defended run and, where FEDLEAK_ASSETS is set (see README.md), a
sweep and a LAMP run on MiniLM with the fedleak that this Python imports. `compare` holds
reconstructions.jsonl and leakage.jsonl of all runs of two such folders against each other, but for
seconds, devices, fingerprints and seals; a field that was changed on purpose is ignored or renamed.
It prints each difference and ends with status 1 if there is one.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
FILES = ("reconstructions.jsonl", "leakage.jsonl")
NEVER_THE_SAME = frozenset({"seconds", "device", "fingerprint", "seal"})
MOST_SHOWN = 20


class Recorded(NamedTuple):
    """A command whose results are kept: `fedleak COMMAND FILE --set SETTINGS`."""

    command: str
    file: str
    settings: tuple[str, ...] = ()
    assets: bool = False


_TEN_STEPS = '{kind = "dlg", preset = "faithful", steps = 10}'
_MATCHING = ", ".join(
    (
        '{kind = "dlg", steps = 20}',
        '{kind = "tag", preset = "faithful", steps = 20}',
        *(
            f'{{kind = "lamp", name = "lamp-{name}", steps = 40, guesses = 8, orders = 8, {more}, '
            'prior = "${FEDLEAK_ASSETS}/models/prior-bert-vocab"}'
            for name, more in (
                ("cos", 'preset = "faithful", loss = "cos"'),
                ("l2l1", 'preset = "faithful", loss = "l2l1"'),
                ("best", 'preset = "best"'),
            )
        ),
    )
)
RECORDED = (
    Recorded("run", "quickstart-gpt2.toml"),
    Recorded("run", "quickstart-llama.toml"),
    Recorded(
        "run",
        "quickstart-gpt2.toml",
        (
            "name=defended",
            "federation.clients=3",
            "federation.rounds=4",
            "federation.batch_size=2",
            "threat.rounds=[2, 4]",
            'defense=[{kind = "dp_sgd", noise_multiplier = 0.01}, {kind = "mask", fraction = 0.1}, '
            '{kind = "secure_sum"}]',
            f'attack=[{{kind = "dager"}}, {{kind = "keyspan"}}, {_TEN_STEPS}]',
        ),
    ),
    Recorded("sweep", "sweep-minilm-noise.toml", ("federation.rounds=1",), assets=True),
    Recorded(
        "run",
        "cola-minilm.toml",
        (
            "name=lamp",
            "federation.clients=3",
            "federation.rounds=1",
            "data.samples=20",
            'threat.knows=["labels", "lengths", "batch_size"]',
            f"attack=[{_MATCHING}]",
        ),
        assets=True,
    ),
)


def record(folder: Path) -> None:
    """Runs what is compared; results are below `folder/runs`."""
    folder.mkdir(parents=True, exist_ok=True)
    for recorded in RECORDED:
        if recorded.assets and "FEDLEAK_ASSETS" not in os.environ:
            print(f"left out, for FEDLEAK_ASSETS is not set: {recorded.file}", file=sys.stderr)
            continue
        sets = [word for setting in recorded.settings for word in ("--set", setting)]
        command = [
            sys.executable,
            "-m",
            "fedleak",
            recorded.command,
            str(HERE / recorded.file),
            *sets,
        ]
        subprocess.run(command, cwd=folder, check=True)


def differences(
    before: Path, after: Path, ignored: Collection[str], renamed: Mapping[str, str]
) -> Iterator[str]:
    """Yields a line for each thing that is not the same in two folders of runs."""
    runs = [{path.parent.relative_to(f) for path in f.rglob("run.json")} for f in (before, after)]
    for run in sorted(runs[0] ^ runs[1]):
        yield f"{run}: only in {before if run in runs[0] else after}"
    if not runs[0] & runs[1]:
        yield "no run is in both folders"
    for run in sorted(runs[0] & runs[1]):
        for name in FILES:
            old, new = (_lines(folder / run / name, ignored, renamed) for folder in (before, after))
            if not old:
                yield f"{run}/{name}: no line"
            for key in sorted(old.keys() | new.keys()):
                for path in _apart(old.get(key), new.get(key)):
                    yield f"{run}/{name}: {' '.join(map(str, key))}: {path}"


def _lines(
    path: Path, ignored: Collection[str], renamed: Mapping[str, str]
) -> dict[tuple[Any, ...], Any]:
    """Returns the rows of a file by round, client and attack."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (row["round"], row["client"], row["attack"]): _plain(row, ignored, renamed) for row in rows
    }


def _plain(value: Any, ignored: Collection[str], renamed: Mapping[str, str]) -> Any:
    """Returns a JSON value without the ignored fields, and with the new names of others."""
    if isinstance(value, dict):
        return {
            renamed.get(key, key): _plain(field, ignored, renamed)
            for key, field in value.items()
            if key not in ignored
        }
    return (
        [_plain(element, ignored, renamed) for element in value]
        if isinstance(value, list)
        else value
    )


def _apart(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yields where two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _apart(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path or 'the row'}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:100]} ..."


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("folder", type=Path)
    compare = commands.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    compare.add_argument("--ignore", action="append", default=[], metavar="FIELD")
    compare.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    given = parser.parse_args()
    if given.command == "record":
        record(given.folder)
        return
    renamed = dict(renaming.split("=", 1) for renaming in given.renamed)
    lines = list(differences(given.before, given.after, {*given.ignore, *NEVER_THE_SAME}, renamed))
    for line in lines[:MOST_SHOWN]:
        print(line)
    if lines:
        sys.exit(f"{len(lines)} differences")
    print("the same")


if __name__ == "__main__":
    main()
