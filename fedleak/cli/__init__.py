"""The command line: `fedleak audit | run | sweep | attack | score | report | ...`."""

import logging
import os
from typing import Annotated

# No library sends what it measures to others or checks for updates, and only fedleak draws bars.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import typer

from fedleak.cli.audit import audit
from fedleak.cli.benchmarks import bench, bench_table
from fedleak.cli.display import console
from fedleak.cli.flower import import_, watch
from fedleak.cli.mistakes import mended
from fedleak.cli.planning import check_defense, explain, list_
from fedleak.cli.priors import train_prior
from fedleak.cli.results import compare, export, gate, report
from fedleak.cli.runs import attack, purge, run, score
from fedleak.cli.sweeps import sweep
from fedleak.cli.updates import attack_update
from fedleak.util import logs
from fedleak.util.versions import versions

app = typer.Typer(
    help="Measure what a federated-learning server can read out of its clients' updates.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def say_versions(wanted: bool) -> None:
    """Prints the versions that results depend on, one in a line, and ends."""
    if wanted:
        for name, version in versions().items():
            console.print(f"{name} {version}", markup=False, highlight=False)
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show on stderr what log.txt keeps: tracebacks, too.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=say_versions,
            is_eager=True,
            help="Show the versions of fedleak, Python and the main packages.",
        ),
    ] = False,
) -> None:
    """Takes the options before the command."""
    if debug:
        context.with_resource(logs.handled(logging.StreamHandler()))  # which writes to stderr


for command in (
    *(audit, run, sweep, attack, attack_update, score, watch),
    *(report, gate, compare, export, import_, bench, bench_table),
    *(purge, explain, check_defense, train_prior, list_),
):  # the help lists them in this order
    app.command(command.__name__.strip("_").replace("_", "-"))(mended()(command))
