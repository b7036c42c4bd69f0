"""Does all that needs a GPU in one call, in parts, and writes what each measured.

    bash experiments/benchmarks/gpu.sh [--dry-run] [--out FOLDER] [--part NAME ...] [--seconds N]

  tests       the tests marked `gpu`
  workers     a run with two workers on one device, beside the same with one: answers and time
  subspace    `dager` and `keyspan` on GPT-2 and BERT of 12x768 with random weights
  stories15m  `dager` on a small pretrained LLaMA
  matching    a step, moves and the schedule of LAMP beside the straightforward version
  pass        `fedleak.attacks.matching.victims.PASS`: other values beside the present one
  together    `fedleak.attacks.matching.gradient_distance.TOGETHER`: likewise
  cola        20 sentences of CoLA with LAMP's published constants: ROUGE, and what chance scores

A part is a process of its own, has a time budget, and ends with what it measured by then. A part
for which too little of the total is left is skipped, and so is one whose files are not below
FEDLEAK_ASSETS. What was measured goes to gpu.json, with the device, versions, the commit and the
traceback of a part that failed, and to gpu.md as a table, after every part. The exit status is 1
if a part failed, was cut, or was left out for lack of time.

`--dry-run` does the same on the CPU, with small sizes; its figures say nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from gpu_figures import ROOT, Settings, Skip
from gpu_packages import installed, name_of, needed

SECONDS = 520.0
"""Of everything, what the shell script installs included: under nine minutes."""

GRACE_SECONDS = 5.0
"""How long a part's process may take to end, once it has said that it is done."""

_DIED = "its process died"

DONE, SKIPPED, CUT, FAILED = "done", "skipped", "cut", "failed"


class Part(NamedTuple):
    """A part of the list.

    Attributes:
        name: As on the command line.
        run: Where the function (settings) -> figures is, as `module:name`. It is imported by the
            part's own process, so that a package that is missing fails nothing else.
        least: Seconds without which it is not begun.
        most: Seconds after which it is cut.
    """

    name: str
    run: str
    least: float
    most: float


PARTS = (
    Part("tests", "gpu_parts:tests", 15, 90),
    Part("workers", "gpu_parts:workers", 20, 90),
    Part("subspace", "gpu_parts:subspace", 20, 90),
    Part("stories15m", "gpu_parts:stories15m", 10, 40),
    Part("matching", "gpu_parts:matching", 20, 120),
    Part("pass", "gpu_sweeps:passes", 10, 40),
    Part("together", "gpu_sweeps:together", 10, 40),
    Part("cola", "gpu_parts:cola", 20, 200),
)


@dataclass(frozen=True)
class Outcome:
    """What came of a part.

    Attributes:
        name: Of the part.
        status: "done", "skipped", "cut" (when its time was over) or "failed".
        reason: Why, if it was not done.
        seconds: That it took.
        figures: What it measured: the fields of `Figure`, `ratio`, and `peak_bytes`, the most GPU
            memory that tensors took since the figure before.
        traceback: If it failed.
        complete: It did all it can do here.
    """

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    figures: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    traceback: str | None = None
    complete: bool = True


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Runs the parts and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="gpu.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="where results go")
    names = [part.name for part in parts]
    parser.add_argument("--part", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of everything")
    parser.add_argument("--spent", type=float, default=0.0, help="of them, before this")
    parser.add_argument("--device", default=None, help="cuda:0, or of a dry run the CPU")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    begin: float = time.monotonic() - args.spent
    end: float = begin + args.seconds
    device = args.device or ("cpu" if args.dry_run else "cuda:0")
    assets = os.environ.get("FEDLEAK_ASSETS")
    settings = Settings(
        device, args.dry_run, Path(assets) if assets else None, args.seed, args.seconds
    )
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts if part.name in args.part]
    if args.dry_run:
        chosen = [part._replace(least=1, most=3 * part.most) for part in chosen]

    outcomes: list[Outcome] = []
    here = Part("machine", "gpu_parts:machine", 1, 120)
    for part in (here, *chosen):
        outcomes.append(carry_out(part, settings, end - time.monotonic()))
        record = report(outcomes, settings, args.spent, time.monotonic() - begin)
        write(args.out, record)
        if outcomes[0].status in (CUT, FAILED):
            print(f"{device} cannot be used: {outcomes[0].reason}", file=sys.stderr)
            return 1
        if part is not here:
            print(f"{outcomes[-1].name}: {said(outcomes[-1])}", flush=True)
    print(f"\n{table(record)}\n{args.out / 'gpu.json'} and gpu.md")
    return 0 if all(outcome.complete for outcome in outcomes) else 1


def carry_out(part: Part, settings: Settings, left: float) -> Outcome:
    """Runs a part in a process of its own, for at most its time and what is left of everything."""
    if left < part.least:
        reason = f"{max(left, 0):.0f} s are left of all, and it needs {part.least:.0f}"
        return Outcome(part.name, SKIPPED, reason, complete=False)
    # A server process that has imported what is slow to import, and started no thread, is forked.
    context = get_context("forkserver")
    context.set_forkserver_preload(["gpu_parts"])
    receiver, sender = context.Pipe(duplex=False)
    seconds = min(part.most, left)
    part_settings = replace(settings, seconds=seconds)
    process = context.Process(target=work, args=(part.run, part_settings, sender), name=part.name)
    begin = time.monotonic()
    process.start()
    sender.close()
    figures: list[Mapping[str, Any]] = []
    try:
        ended = _listen(receiver, figures, begin + seconds)
        if ended is not None:
            process.join(GRACE_SECONDS)
    finally:
        process.kill()
        process.join()
    taken = time.monotonic() - begin
    if ended is None:
        reason = f"its {seconds:.0f} s were over"
        return Outcome(part.name, CUT, reason, taken, figures, complete=False)
    status, reason, trace = ended
    if reason == _DIED:
        reason = f"{_DIED} with exit status {process.exitcode}"
    return Outcome(part.name, status, reason, taken, figures, trace, status != FAILED)


def _listen(
    receiver: Connection, figures: list[Mapping[str, Any]], end: float
) -> tuple[str, str, str | None] | None:
    """Collects figures and returns how a part ended; None if its time was over first."""
    while receiver.poll(max(end - time.monotonic(), 0)):
        try:
            kind, value = receiver.recv()
        except EOFError:
            return FAILED, _DIED, None
        if kind == DONE:
            return DONE, "", None
        if kind == SKIPPED:
            return SKIPPED, value, None
        if kind == FAILED:
            return FAILED, value.strip().splitlines()[-1], value
        figures.append(value)
    return None


def work(run: str, settings: Settings, sender: Connection) -> None:
    """Runs a part, in its own process, and sends figures as they come, and how it ended."""
    try:
        if settings.small:
            import torch

            torch.set_num_threads(1)  # other work may keep the rest of the machine busy
        for figure in resolve_name(run)(settings):
            sent = {**figure._asdict(), "ratio": figure.ratio, "peak_bytes": _peak()}
            sender.send(("figure", sent))
        sender.send((DONE, ""))
    except Skip as reason:
        sender.send((SKIPPED, str(reason)))
    except BaseException:  # noqa: BLE001 - all that goes wrong is recorded
        sender.send((FAILED, traceback.format_exc()))


def _peak() -> int | None:
    """Returns the most bytes on the GPU since the last call; None if it was not used."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def report(
    outcomes: Sequence[Outcome], settings: Settings, installing: float, seconds: float
) -> dict[str, Any]:
    """Returns what gpu.json holds. The first outcome is that of looking at the machine."""
    machine, *parts = outcomes
    machine_values = machine.figures[0]["values"] if machine.figures else {"device": None}
    if machine.status in (CUT, FAILED):
        parts = [machine]
    return {
        "schema": 1,
        "dry_run": settings.small,
        "machine": machine_values,
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in map(name_of, needed())},
        "commit": _commit(),
        "assets": settings.assets is not None,
        "seed": settings.seed,
        "seconds": {"installing": round(installing, 1), "all": round(seconds, 1)},
        "parts": [asdict(part) for part in parts],
    }


def write(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes gpu.json and gpu.md, each whole or not at all."""
    texts = {"gpu.json": json.dumps(record, indent=1), "gpu.md": table(record)}
    for name, text in texts.items():
        part = folder / f"{name}.part"
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(folder / name)


def table(record: Mapping[str, Any]) -> str:
    """Returns a record in Markdown: what was measured where, and a line for each figure."""
    machine, seconds = record["machine"], record["seconds"]
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
    dry = " A dry run: its figures say nothing." if record["dry_run"] else ""
    commit = record["commit"] or "unknown"
    lines = [
        f"{machine['device'] or 'No device was looked at'}; {versions}; commit {commit}; "
        f"{seconds['all']:.0f} s in all, {seconds['installing']:.0f} s of them to install.{dry}",
        "",
        "| part | measured | size | ms | beside | ms | ratio | peak MiB | found |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for part in record["parts"]:
        lines += [_row(part["name"], figure) for figure in part["figures"]]
        lines.append(f"| {part['name']} | **{_cell(said(Outcome(**part)))}** | | | | | | | |")
    return "\n".join(lines)


def said(outcome: Outcome) -> str:
    """Returns how a part ended, in a few words."""
    why = f": {outcome.reason}" if outcome.reason else ""
    return f"{outcome.status} in {outcome.seconds:.0f} s{why}"


def _row(part: str, figure: Mapping[str, Any]) -> str:
    peak, ratio = figure["peak_bytes"], figure["ratio"]
    cells = [
        part,
        figure["what"],
        figure["size"],
        _ms(figure["seconds"]),
        figure["beside"],
        _ms(figure["beside_seconds"]),
        "" if ratio is None else f"{ratio:.2f}",
        "" if peak is None else f"{peak / 2**20:,.0f}",
        "; ".join(f"{name} {_short(value)}" for name, value in figure["values"].items()),
    ]
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.2f}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    """Returns a text that stays in its cell."""
    return " ".join(text.split()).replace("|", r"\|")[:200]


def _commit() -> str | None:
    """Returns the commit, marked if files differ from it; None without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
