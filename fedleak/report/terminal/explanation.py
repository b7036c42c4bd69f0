"""What `fedleak explain` prints."""

from rich.console import Console
from rich.table import Table

from fedleak.audit.explanation import Applicability, Explanation
from fedleak.config.experiment import Experiment
from fedleak.federation.schedule import first_of_adapters, rounds_attacked
from fedleak.util.sanitise import markup


def show(experiment: Experiment, found: Explanation, console: Console) -> None:
    """Prints what the server sees and knows, and a line for each attack."""
    for line in (
        _sees(experiment, found),
        *_trusts(experiment),
        *filter(None, [first_of_adapters(experiment)]),
        *_knows(experiment, found),
    ):
        console.print(markup(line), soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    for one in sorted(found.attacks, key=lambda one: (not one.listed, one.reason is not None)):
        mark = "[yellow]cannot work[/]" if one.reason else "can work"
        used = "listed" if one.listed else "not listed"
        table.add_row(f"  {markup(one.name)}", used, mark, markup(_said(one)))
    console.print("attacks")
    console.print(table)
    for one in found.attacks:
        _show_plans(one, console)
    console.print(
        "An attack that can work may read nothing. That an attack cannot work says nothing about "
        "other attacks.",
        soft_wrap=True,
    )


def _show_plans(one: Applicability, console: Console) -> None:
    """Prints the attacks that an attack is made of, for each different plan."""
    for plan in dict.fromkeys(one.plans):
        console.print(f"{markup(one.name)} asks, in this order, until a batch is proved")
        table = Table(show_header=False, box=None, pad_edge=False)
        for step in plan:
            mark = "[yellow]out[/]" if step.obstacle else "in"
            table.add_row(f"    {markup(step.kind)}", mark, markup(step.obstacle or step.purpose))
        console.print(table)


def _sees(experiment: Experiment, found: Explanation) -> str:
    """Returns what a capture is."""
    table = experiment.federation
    what = "gradient" if table.algorithm == "fedsgd" else "weight delta"
    counts = " or ".join(str(count) for count in sorted(set(found.captured)))
    seen = {
        "updates": f"the server sees: the {what} of each client",
        "sum": f"the server sees: the {what} of all clients of a round together",
        "models": f"who has the published models sees: in their differences the mean {what} of all "
        "clients of a round",
    }[experiment.sees]
    chosen = experiment.threat.clients
    clients = "" if chosen is None else f", and {len(set(chosen))} of {table.clients} clients"
    return (
        f"{seen}, {counts} of {found.parameters} parameters; {len(rounds_attacked(experiment))} of "
        f"{table.rounds} rounds{clients} are attacked"
    )


def _trusts(experiment: Experiment) -> list[str]:
    """Returns for whom a guarantee does not hold, if there is somebody."""
    aggregator = experiment.aggregator
    return [] if aggregator is None or aggregator.trust is None else [aggregator.trust]


def _knows(experiment: Experiment, found: Explanation) -> list[str]:
    """Returns what the attacker knows, and what it could be granted."""
    lines = [f"the attacker knows: {', '.join(found.knows)}"]
    if experiment.threat.ladder:
        lines.append(
            "threat.ladder: each attack is told nothing more, each fact that it uses alone, and all"
            " of them"
        )
        lines += [f"  no rung for {f}: {why}" for f, why in experiment.absent_facts.items()]
    elif found.unknown:
        lines.append(f"threat.knows could grant: {', '.join(found.unknown)}")
    return lines


def _said(one: Applicability) -> str:
    """Returns why an attack cannot work, or on which part of the captures it can."""
    able = sum(obstacle is None for obstacle in one.obstacles)
    if one.reason is not None or able == len(one.obstacles):
        return one.reason or ""
    some = next(obstacle for obstacle in one.obstacles if obstacle)
    return f"on {able} of {len(one.obstacles)} kinds of captures; on the others it {some}"
