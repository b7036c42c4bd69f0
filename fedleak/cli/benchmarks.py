"""The commands of the benchmark."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedleak.cli.display import CellProgress, console, remark
from fedleak.cli.options import Fresh, Retry
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.sanitise import markup


def bench(
    suite: Annotated[str, typer.Argument(metavar="[SUITE]", hidden=True)] = "quick",
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", metavar="KIND", help="Run this attack, too; repeatable."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--attacks", metavar="FILE", help="Run the attacks of a TOML file, too."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Run an outside program as an attack, too."),
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="Leave out the attacks of the suite.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--setting", metavar="NAME", help="Run this setting alone; repeatable."),
    ] = None,
    assets: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            envvar="FEDLEAK_ASSETS",
            help="Models and data that are not part of fedleak.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result there.")
    ] = None,
    retry: Retry = False,
    fresh: Fresh = False,
) -> None:
    """Compare attacks on a fixed suite of settings, all scored alike.

    SUITE is a name, quick (CPU minutes) or full (GPU hours), or a file. To enter an attack, name
    its kind, or give a command: `--command 'python mine.py {observation} {answer}'`

    Updates are made once and kept in runs/bench-SUITE-VERSION: another attack takes no more than
    its own time. The result is bench.json in there. The same command again finishes what is left.
    """
    from fedleak.report.tables.sweep import attacks_table
    from fedleak.report.terminal.table import print_table
    from fedleak.running import sweep
    from fedleak.running.bench import results, running, suites
    from fedleak.store.files import publish

    loaded = suites.load(suite)
    tables = suites.entered(loaded, attacks or (), file, command, only=only)
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {str(out)!r}: there is no such folder: make it")
    entered = running.prepare(loaded, tables, assets, chosen=settings or (), fresh=fresh)
    from fedleak.flower.engines import train  # as for `run`

    remark(
        f"setting {name} is left out: {why}"
        for name, why in entered.left_out.items()
        if why != running.NOT_CHOSEN
    )
    with entered.sweep.lock():
        keep = partial(running.collect, entered)
        watch = CellProgress([*entered.ready]).watch
        failures = sweep.carry_out(entered.sweep, entered.plans, train, watch, keep, retry=retry)
        result = keep(failures)
    print_table(console, attacks_table(running.asked(entered)))
    for (name, why), where in running.obstacles(result).items():
        console.print(f"{markup(name)} cannot work in {', '.join(where)}: {markup(why)}")
    if out is not None:
        publish(out, results.RESULT.written(result))
    console.print(f"result: {markup(out or entered.sweep.path / results.RESULT.name)}")
    if result.missing:
        raise FedleakError("; ".join(result.missing))


def bench_table(
    paths: Annotated[list[Path], typer.Argument(metavar="RESULT...", hidden=True)],
    page: Annotated[
        Path | None,
        typer.Option(
            "--into", metavar="FILE", help="Write the tables below the marker of a Markdown file."
        ),
    ] = None,
) -> None:
    """Make tables in Markdown of results of one suite and version.

    RESULT is a bench.json; there may be several. Results of other versions, weights or texts are
    refused.
    """
    from fedleak.report.marked_pages import above
    from fedleak.running.bench import markdown

    tables = markdown.markdown(markdown.read_results(paths))
    if page is None:
        print(tables)  # noqa: T201 - Markdown as it is, however wide
        return
    page.write_text(above(page, markdown.MARKER, "--into") + tables, encoding="utf-8")
    console.print(f"tables: {markup(page)}", soft_wrap=True)
