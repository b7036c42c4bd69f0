"""Whether `fedleak audit` takes as long as it says before it begins.

    python experiments/benchmarks/audit_estimates.py [SETTING]... [--minutes 10] [--out FOLDER]

Runs audits of settings that end in different ways: `none` (a BERT on CoLA, no defense: everything
is proved), `dp` and `noise` (the same with DP-SGD, or with noise of a tenth of an update's root
mean square: attacks take all their time, canaries, undefended copies), `lora` (a LLaMA with
adapters and AdamW) and `quickstart` (a tiny LLaMA, 60 rounds). Prints for each the seconds that the
plan says, the seconds that it took, by the clock, and their ratio; and the seconds of the
processor. What other programs do meanwhile changes both.

FEDLEAK_ASSETS: see experiments/cola-minilm.toml; with models/stories15m for `lora`.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from arguments import parser_of

EXPERIMENTS = Path(__file__).parents[1]
COLA = ["data.samples=64", "data.held_out=48", "federation.rounds=3", "federation.batch_size=2"]
SETTINGS = {
    "none": ("cola-minilm.toml", COLA),
    "dp": ("cola-minilm.toml", [*COLA, 'defense=[{kind="dp_sgd", epsilon=8.0}]']),
    "noise": ("cola-minilm.toml", [*COLA, 'defense=[{kind="gaussian_noise", relative=0.1}]']),
    "lora": (
        "cola-minilm.toml",
        [
            *COLA,
            'model={name="${FEDLEAK_ASSETS}/models/stories15m", task="causal-lm", lora={rank=8}}',
            'data={name="builtin/notes", samples=32, held_out=24}',
            'federation={algorithm="fedavg", clients=4, rounds=3, batch_size=2, '
            "learning_rate=1e-3}",
            'client={optimiser="adamw"}',
        ],
    ),
    "quickstart": ("quickstart-llama.toml", []),
}
"""By name the experiment file, and what is changed of it."""


def main() -> None:
    """Runs the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("settings", nargs="*", default=[*SETTINGS])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    if unknown := {*args.settings} - {*SETTINGS}:
        parser.error(f"no such setting: {', '.join(sorted(unknown))}")
    print("| setting | planned, s | took, s | planned / took | processor, s |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for setting in args.settings:
            print(measured(setting, args.minutes, folder), flush=True)


def measured(setting: str, minutes: float, folder: Path) -> str:
    """Audits a setting, and returns its line of the table."""
    file, changes = SETTINGS[setting]
    sets = [argument for change in changes for argument in ("--set", change)]
    command = [sys.executable, "-m", "fedleak", "audit", str(EXPERIMENTS / file), "--fresh"]
    command += ["--minutes", str(minutes), "--set", f"name={setting}", *sets]
    with (folder / f"{setting}.txt").open("w") as log:
        before = processor()
        # One thread, as everywhere in fedleak's figures.
        own = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, stdout=log, stderr=log, check=True, env=own)
    audit = json.loads((folder / "runs" / f"{setting}-audit" / "audit.json").read_text())
    planned, took = sum(part["seconds"] for part in audit["parts"]), audit["seconds"]
    ratio = planned / took
    return f"| {setting} | {planned:.0f} | {took:.0f} | {ratio:.2f} | {processor() - before:.0f} |"


def processor() -> float:
    """Returns the processor's seconds of all audits so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
