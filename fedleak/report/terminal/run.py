"""Prints a run: what leaked per round and client, and examples beside the truth.

Whatever others wrote, names too, is put through `markup` or `printable` where it is printed.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from fedleak.attacks.reconstruction import Status
from fedleak.audit.answer_scores import Scored, TextPair
from fedleak.audit.metrics import intervals
from fedleak.report.tables.attacks import attack_table
from fedleak.report.tables.canaries import canary_table
from fedleak.report.tables.detections import detections_table
from fedleak.report.tables.ladder import ladder_table
from fedleak.report.tables.leakage import leakage_table, shares
from fedleak.report.tables.membership import membership_tables, who_was_in
from fedleak.report.tables.personal_data import personal_data_tables
from fedleak.report.tables.published import published_table
from fedleak.report.terminal.table import print_table
from fedleak.report.words import MALICIOUS, few_digits, in_words, percent
from fedleak.store.lines import Measured
from fedleak.store.records import LEDGER, Guarantee
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY, RunSummary
from fedleak.training.privacy import NONE
from fedleak.util.sanitise import markup, printable

EXAMPLES = 4
"""Recovered texts that are printed at most."""


def print_run(
    run: Run, scored: Sequence[Scored], console: Console | None = None, *, texts: bool = False
) -> None:
    """Prints a run's table, its summary and some recovered texts.

    Args:
        run: The run directory.
        scored: Its scores.
        console: Where to print; left out: standard output.
        texts: Print private texts to a pipe or file, too; a terminal always shows some.
    """
    console = console or Console(emoji=False)
    summary = run.read_document(SUMMARY)
    if summary.server is not None:
        console.print(f"[red]{MALICIOUS}[/]: {markup(summary.server)}", soft_wrap=True)
    if not scored:
        console.print(f"nothing scored yet in {markup(run.path)}")
        _print_measured(summary, console)
        _print_notes(summary, console)
        return
    if (first := who_was_in(summary)) is not None:
        console.print(f"[bold]{markup(first)}[/]", soft_wrap=True)
    rows = [answer.row for answer in scored]
    of_models = summary.defenses.settings.get("sees") == "models"
    print_table(
        console,
        leakage_table(summary.name, rows, shares(rows), run.rows(LEDGER), of_models),
    )
    print_table(console, attack_table(summary))
    for table in personal_data_tables(summary):
        print_table(console, table)
    if summary.ladder is not None:
        print_table(console, ladder_table(summary, summary.ladder))
    for line in [*any_attack(summary), *positive_control(summary), *circumstances(summary)]:
        console.print(Text(printable(line)), soft_wrap=True)
    _print_measured(summary, console)
    examples = best_examples(scored)
    # Not `console.is_terminal`, which an environment can force: a log must not be taken for one.
    if examples and (texts or console.file.isatty()):
        console.print("some private texts, and what was read")
        for name, pair in examples:
            console.print(f"  [bold]private[/]    {markup(pair.truth)}")
            console.print(
                f"  [bold]{markup(f'{name:<10}')}[/] {markup(pair.answer or '')}  "
                f"[dim]ROUGE-L {pair.rougeL:.0f}[/]"
            )
    elif examples:
        console.print(
            "private texts are printed on a terminal only, or with --texts: "
            f"`fedleak score {markup(run.path)} --texts`",
            soft_wrap=True,
        )
    failures = {(answer.row.attack, answer.row.status, answer.row.reason) for answer in scored}
    for attack, status, reason in sorted(failures):
        if status != Status.RECOVERED:
            why = reason or "what the client trained on is not here"
            console.print(f"  [yellow]{markup(f'{attack} {status}')}[/]: {markup(why)}")
    _print_notes(summary, console)
    console.print(f"results: {markup(run.path)}")


def _print_measured(summary: RunSummary, console: Console) -> None:
    """Prints what canaries, attacks on membership, secrets and detectors measured."""
    if summary.canary is not None:
        print_table(console, canary_table(summary.canary))
    if summary.membership is not None:
        for table in membership_tables(summary.membership):
            print_table(console, table)
    if summary.published is not None:
        print_table(console, published_table(summary.published))
    if summary.detections is not None:
        print_table(console, detections_table(summary.detections))


def _print_notes(summary: RunSummary, console: Console) -> None:
    """Prints what else should be known; what is missing is said at the end of the command."""
    for note in summary.notes:
        console.print(f"[yellow]note[/]: {markup(note)}", soft_wrap=True)


def any_attack(summary: RunSummary) -> list[str]:
    """Returns which attacks read texts first; none if there is only one to sum up.

    They are text, not markup, as others wrote it.
    """
    worst = summary.worst_case
    if worst is None or len(worst.attacks) < 2:
        return []
    lines = []
    if worst.first:
        counts = ", ".join(f"{name} {count}" for name, count in worst.first.items())
        lines.append(f"read exactly first, of {worst.texts} texts: {counts}")
    if worst.unattacked:
        lines.append(f"no attack names a sequence for {worst.unattacked} of {worst.texts} texts")
    return lines


def positive_control(summary: RunSummary) -> list[str]:
    """Returns lines about what attacks read of undefended copies; none if there are none.

    They are text, not markup, as others wrote it.
    """
    if (control := summary.positive_control) is None:
        return []
    return [
        f"positive control: {control.copies} batches without any defense ({control.texts} texts)",
        *(
            f"  {name} read a text of {reading.read} of {control.copies} word for word; "
            f"texts exact {percent(reading.exact)}, ROUGE-L {reading.rougeL:.0f}, "
            f"tokens found {percent(reading.token_recall)}"
            for name, reading in control.attacks.items()
        ),
    ]


def circumstances(summary: RunSummary) -> list[str]:
    """Returns lines about what was in the way of the attacks, what it guarantees and costs.

    They are text, not markup, as others wrote it.
    """
    settings = [
        f"{key.replace('_', ' ')} {in_words(value)}"
        for key, value in summary.defenses.settings.items()
        if value not in (None, "all")
    ]
    lines = [
        f"defenses: {'; '.join(map(in_words, summary.defenses.defense)) or 'none'}",
        f"settings that act as such: {', '.join(settings)}",
    ]
    for did in summary.defended:
        means = [
            f"{name.replace('_', ' ')} {value:.3g}"
            for name, value in did.figures.items()
            if value is not None
        ]
        if means:
            lines.append(f"  {did.kind}, mean of an update: {', '.join(means)}")
    if summary.privacy is not None:
        lines.append(f"privacy: {_guaranteed(summary.privacy)}")
    held_out = summary.held_out
    if (before := summary.utility_before) is not None:
        lines.append(f"utility before training: {_scores(before, held_out)}")
    if (utility := summary.utility) is not None:
        lines.append(f"utility after round {utility.round}: {_scores(utility, held_out)}")
    if (baseline := summary.utility_reference) is not None:
        lines.append(f"trained centrally, without defenses: {_scores(baseline, held_out)}")
    return lines


def _guaranteed(privacy: Guarantee) -> str:
    if privacy.epsilon == NONE:
        return "epsilon none: nothing is guaranteed to every client"
    return (
        f"epsilon {privacy.epsilon:.4g} at delta {privacy.delta:g}, noise multiplier "
        f"{privacy.noise_multiplier:.4g} (unit: {privacy.unit}, {privacy.neighbouring}; "
        f"{privacy.accountant})"
    )


def _scores(utility: Measured, held_out: int) -> str:
    """Returns the figures, and the accuracy's interval: texts that nobody has are independent."""
    named = {"mcc": "MCC", "f1": "F1"}
    shown = {name: few_digits(value) for name, value in utility.figures.items()}
    if held_out and (accuracy := utility.figures.get("accuracy")) is not None:
        _, low, high = intervals.wilson(round(accuracy * held_out), held_out)
        shown["accuracy"] += f" [{low:.2f}, {high:.2f}]"
    return ", ".join(f"{named.get(name, name)} {value}" for name, value in shown.items())


def best_examples(scored: Sequence[Scored]) -> list[tuple[str, TextPair]]:
    """Returns the best answers, at most one per private text, best first."""
    best: dict[str, tuple[str, TextPair]] = {}
    for answer in scored:
        for pair in answer.pairs:
            held = best.get(pair.truth)
            if pair.answer is not None and (held is None or pair.rougeL > held[1].rougeL):
                best[pair.truth] = (answer.row.attack, pair)
    return sorted(best.values(), key=lambda example: -example[1].rougeL)[:EXAMPLES]
