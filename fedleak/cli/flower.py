"""The commands about your own Flower app, and about `flwr run`."""

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedleak.cli.display import console, remark
from fedleak.cli.options import AllowCommands
from fedleak.util.errors import FedleakError
from fedleak.util.sanitise import markup

if TYPE_CHECKING:
    from fedleak.tap.importing import Imported


def watch(
    superlink: Annotated[str, typer.Argument(metavar="SUPERLINK", hidden=True)],
    run_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Of the run; left out: the newest.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="The SuperLink may be silent so long.")
    ] = 60.0,
) -> None:
    """Follow a run of `flwr run` to its true end, which the exit status of `flwr run` hides.

    SUPERLINK is a connection in Flower's configuration, by its name. The exit status is 0 if the
    run was completed, and else 1, with the reason in the last line.
    """
    from fedleak.flower import runs as flower_runs

    def tell(at: flower_runs.FlowerRun) -> None:
        console.print(f"run {markup(at.number)}: {markup(at.status)}", soft_wrap=True)

    ended = flower_runs.follow(superlink, run_id, tell, patience)
    if ended.status != flower_runs.COMPLETED:
        reason = f": {ended.details}" if ended.details else ""
        raise FedleakError(f"run {ended.number} ended as {ended.status}{reason}")


def import_(
    tapped: Annotated[Path, typer.Argument(metavar="TAPPED", hidden=True)],
    about: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Left out: about.toml in TAPPED.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="The run to make; left out: TAPPED-run.")
    ] = None,
    allow_commands: AllowCommands = False,
) -> None:
    """Make a run of what a tap kept of your own Flower app.

    TAPPED is a folder that the app's ServerApp gave to `tap(grid, "FOLDER")`. The file says what
    the messages do not: model, learning rate, batch size. `fedleak attack RUN` attacks the run.

    Programs that about.toml in TAPPED names as attacks need `--allow-commands`; `--about FILE` is
    your own file, and does not.

    The same command again adds what is not there yet, such as the truth.
    """
    import_tapped(tapped, about, out, allow_commands=allow_commands).refuse_gaps()


def import_tapped(
    tapped: Path, about: Path | None, out: Path | None, *, allow_commands: bool
) -> "Imported":
    """Makes a run of what a tap kept, and prints what the run has.

    Raises:
        ConfigError: It cannot be imported, or names programs that are not allowed.
    """
    from fedleak.config.components import build_attack
    from fedleak.running.preparation import refuse_programs_of_others
    from fedleak.tap.about import load_about
    from fedleak.tap.folder import Tapped
    from fedleak.tap.importing import import_run

    description = load_about(about or tapped / "about.toml")
    if about is None and not allow_commands:
        refuse_programs_of_others(
            tapped / "about.toml", map(build_attack, count(), description.attack)
        )
    path = tapped.absolute()
    imported = import_run(Tapped(tapped), description, out or path.with_name(f"{path.name}-run"))
    console.print(
        f"{imported.updates} updates of {imported.clients} clients in {imported.rounds} "
        f"rounds, {imported.truths} with the truth: {markup(imported.run.path)}",
        soft_wrap=True,
    )
    remark(imported.remarks)
    return imported
