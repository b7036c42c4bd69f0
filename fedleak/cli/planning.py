"""The commands that look at an experiment, and train nothing."""

import itertools

from fedleak.cli.display import console
from fedleak.cli.options import File, Files, Set, files_or_shipped
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.sanitise import markup


def explain(files: Files = None, changes: Set = None) -> None:
    """Show what an experiment lets the server see, and which attacks can read it.

    FILE is an experiment file. Without one, what `fedleak run` would run is explained: the two
    experiments of the quickstart, or with `--set preset=flowertune` a round in that setting.
    Nothing is trained and nothing is written.
    """
    from fedleak.audit.explanation import explain as explained
    from fedleak.config.loading import load
    from fedleak.report.terminal import explanation

    paths = files_or_shipped(files, changes or ())
    for experiment in [load(path, changes or ()) for path in paths]:
        if len(paths) > 1:
            console.print(f"[bold]{markup(experiment.name)}[/]")
        explanation.show(experiment, explained(experiment), console)


def check_defense(file: File, changes: Set = None) -> None:
    """Test whether each defense of an experiment does what it says, and print the figures.

    FILE is an experiment file; or the name of a defense, as `fedleak list` has it, which is then
    tested on a small built-in model. Nothing is trained and no private text is used. Where a
    defense guarantees an epsilon, canaries in a few updates test that its noise and its clipping
    are what the ledger counts. `fedleak run` does the same test before it trains.
    """
    from fedleak import defenses
    from fedleak.audit.defense_checks import check
    from fedleak.config.loading import load, with_defense

    by_name = str(file) in defenses.kinds() and not file.exists()
    experiment = with_defense(str(file), changes or ()) if by_name else load(file, changes or ())
    if not experiment.defense:
        raise ConfigError(f"{str(file)!r} has no [[defense]]: there is nothing to check")
    findings = check(experiment)
    for defense, its_findings in itertools.groupby(findings, lambda finding: finding.defense):
        console.print(f"[bold]{markup(defense)}[/]")
        for finding in its_findings:
            mark = "[green]holds[/]" if finding.holds else "[red]FAILS[/]"
            console.print(f"  {mark}  {markup(finding.claim)}: [dim]{markup(finding.figures)}[/]")
    broken = {finding.defense for finding in findings if not finding.holds}
    if broken:
        raise FedleakError(f"{', '.join(sorted(broken))}: does not do what it says")


def list_() -> None:
    """Name the attacks, defenses, server modes, models and data sets, and where each comes from."""
    from fedleak.cli import catalogue

    catalogue.show(console)
