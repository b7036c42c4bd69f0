"""The command that runs an experiment many times."""

from collections.abc import Mapping
from typing import Annotated

import typer

from fedleak.cli.display import CellProgress, console, remark
from fedleak.cli.options import File, Fresh, Set
from fedleak.util.sanitise import markup


def sweep(
    file: File,
    changes: Set = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs at once; left out: one per GPU, else one per two cores.", metavar="N"
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Run one of N shares of the cells, such as 2/4."),
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Run an experiment for every combination of the values in its sweep table.

    FILE is an experiment file with a sweep table. Each combination is a run in runs/NAME. The
    files sweep.json, sweep.svg and tradeoff.svg, in the same folder, compare the runs; if the
    sweep has families of defenses, frontier.svg draws what leaks at each strength, and its cost.

    The same command again finishes what is left. With `--shard I/N` several machines share the
    cells, each with another I; the command without it compares them afterwards.
    """
    from fedleak.report.drawings.chart import write
    from fedleak.report.drawings.sweeps import DRAWINGS
    from fedleak.report.tables.sweep import attacks_table
    from fedleak.report.terminal.table import print_table
    from fedleak.running import sweep as sweeps
    from fedleak.store.shards import Shard

    part = None if shard is None else Shard.parse(shard)
    grid = sweeps.load(file, changes or ())
    if part is not None:
        grid = grid.part(part)
    plans = sweeps.prepare(grid, fresh=fresh)
    from fedleak.flower.engines import train  # as for `run`

    at_once = sweeps.jobs(plans, jobs)
    cells = CellProgress([*plans], len(grid.cells))

    def keep(failures: Mapping[str, str]) -> None:
        sweeps.collect(grid)

    remark(note for plan in plans.values() for note in plan.remarks)
    with grid.lock():
        sweeps.collect(grid)
        if at_once == 1:
            failures = sweeps.carry_out(grid, plans, train, cells.watch, keep)
        else:
            failures = sweeps.carry_out_at_once(grid, plans, train, at_once, cells.tell, keep)
        collected = sweeps.collect(grid)
        if part is not None:
            sweeps.refuse_gaps(collected, failures)
            console.print(f"shard {part}: {len(grid.cells)} cells are complete")
            return
        for name, (_, chart) in DRAWINGS.items():
            write(chart(collected), grid.path / f"{name}.svg")
    print_table(console, attacks_table(collected))
    console.print(f"results: {markup(grid.path)}")
    sweeps.refuse_gaps(collected, failures)
