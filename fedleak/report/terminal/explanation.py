"""What `fedleak explain` prints."""

from rich.console import Console
from rich.table import Table

from fedleak.audit.explanation import Applicability, Explanation
from fedleak.config.experiment import Experiment
from fedleak.config.federation import schedule
from fedleak.config.presets import PRESETS
from fedleak.defenses.secure_sum import hidden_among
from fedleak.report.words import MALICIOUS, counted, in_words
from fedleak.util.nested import flat
from fedleak.util.sanitise import markup


def show(experiment: Experiment, explanation: Explanation, console: Console) -> None:
    """Prints what the server sees and knows, and a line for each attack."""
    if (malicious := schedule.malicious_server(experiment)) is not None:
        console.print(f"[red]{MALICIOUS}[/]: {markup(malicious)}", soft_wrap=True)
    aggregator, template = experiment.aggregator, experiment.model.response_template
    lines = [
        *_preset(experiment),
        _sees(experiment, explanation),
        template and f"clients learn what stands behind the last {template!r} of a text",
        *_hidden_among(experiment),
        aggregator.trust if aggregator else None,  # whom a guarantee does not protect from
        schedule.first_of_adapters(experiment),
        *_knows(experiment, explanation),
    ]
    for line in filter(None, lines):
        console.print(markup(line), soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    for attack in sorted(
        explanation.attacks, key=lambda attack: (not attack.listed, attack.reason is not None)
    ):
        mark = "[yellow]cannot work[/]" if attack.reason else "can work"
        used = "listed" if attack.listed else "not listed"
        table.add_row(f"  {markup(attack.name)}", used, mark, markup(_obstacle(attack)))
    console.print("attacks")
    console.print(table)
    for attack in explanation.attacks:
        _show_plans(attack, console)
    console.print(
        "An attack that can work may read nothing. That an attack cannot work says nothing about "
        "other attacks.",
        soft_wrap=True,
    )


def _show_plans(attack: Applicability, console: Console) -> None:
    """Prints the attacks that an attack is made of, for each different plan."""
    for plan in dict.fromkeys(attack.plans):
        console.print(f"{markup(attack.name)} asks, in this order, until a batch is proved")
        table = Table(show_header=False, box=None, pad_edge=False)
        for step in plan:
            mark = "[yellow]out[/]" if step.obstacle else "in"
            table.add_row(f"    {markup(step.kind)}", mark, markup(step.obstacle or step.purpose))
        console.print(table)


def _preset(experiment: Experiment) -> list[str]:
    """Returns what the preset sets, and what the file has in its place."""
    if experiment.preset is None:
        return []
    own_settings = dict(flat(experiment.model_dump(mode="json")))
    lines = [f"preset {experiment.preset}"]
    for key, value in flat(PRESETS[experiment.preset]):
        own = own_settings.get(key)
        instead = "" if own == value else f" (here {in_words(own)})"
        lines.append(f"  {key} = {in_words(value)}{instead}")
    return lines


def _sees(experiment: Experiment, explanation: Explanation) -> str:
    """Returns what a capture is."""
    table = experiment.federation
    sent = "gradient" if table.algorithm == "fedsgd" else "weight delta"
    counts = " or ".join(str(count) for count in sorted(set(explanation.captured)))
    attacked = schedule.rounds_attacked(experiment)
    alone = sum(schedule.target(experiment, round) is not None for round in attacked)
    of_sum = f"the {sent} of all clients of a round together"
    if alone:
        rest = f", and in the other {len(attacked) - alone} {of_sum}"
        of_sum = f"in {counted(alone, 'round')} the {sent} of one client, taken out of the sum"
        of_sum += rest if alone < len(attacked) else ""
    seen = {
        "updates": f"the server sees: the {sent} of each client",
        "sum": f"the server sees: {of_sum}",
        "models": f"who has the published models sees: in their differences the mean {sent} of all "
        "clients of a round",
    }[experiment.sees]
    chosen = experiment.threat.clients
    clients = "" if chosen is None else f", and {len(set(chosen))} of {table.clients} clients"
    return (
        f"{seen}, {counts} of {explanation.parameters} parameters; "
        f"{len(attacked)} of {table.rounds} rounds{clients} are attacked"
    )


def _hidden_among(experiment: Experiment) -> list[str]:
    """Returns among how many clients an update is hidden, if the server sees sums."""
    aggregator, clients = experiment.aggregator, experiment.clients_per_round
    if experiment.sees != "sum" or aggregator is None:
        return []
    lines = [hidden_among(clients)]
    if (fewest := aggregator.fewest(clients)) < clients:
        lines.append(f"where clients are lost, a sum of {counted(fewest, 'client')} still counts")
    return lines


def _knows(experiment: Experiment, explanation: Explanation) -> list[str]:
    """Returns what the attacker knows, and what it could be granted."""
    lines = [f"the attacker knows: {', '.join(explanation.knows)}"]
    if experiment.threat.ladder:
        lines.append(
            "threat.ladder: each attack is told nothing more, each fact that it uses alone, and all"
            " of them"
        )
        lines += [f"  no rung for {f}: {why}" for f, why in experiment.absent_facts.items()]
    elif explanation.unknown:
        lines.append(f"threat.knows could grant: {', '.join(explanation.unknown)}")
    return lines


def _obstacle(attack: Applicability) -> str:
    """Returns why an attack cannot work, or on which part of the captures it can."""
    able = sum(obstacle is None for obstacle in attack.obstacles)
    if attack.reason is not None or able == len(attack.obstacles):
        return attack.reason or ""
    some = next(obstacle for obstacle in attack.obstacles if obstacle)
    return f"on {able} of {len(attack.obstacles)} kinds of captures; on the others it {some}"
