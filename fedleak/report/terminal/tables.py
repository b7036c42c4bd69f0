"""Tables for the terminal: what leaked per round and client, and examples beside the truth.

Whatever others wrote, names too, is put through `markup` or `printable` where it is printed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import JsonValue
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedleak.attacks.reconstruction import Status
from fedleak.audit.metrics import intervals
from fedleak.audit.scoring import Scored, TextPair
from fedleak.report.terminal import canary_table, ladder, membership_table
from fedleak.report.words import ANY_ATTACK, NOT_MEASURED, interval, plain_interval
from fedleak.store.lines import Measured
from fedleak.store.records import LEDGER, LeakageRow, LedgerRow
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.store.summaries import SUMMARY, AttackSummary, Guarantee, RunSummary
from fedleak.training.observation import GRANTABLE
from fedleak.training.privacy import NONE
from fedleak.util.sanitise import markup, printable

EXAMPLES = 4

INTERVALS = "intervals: for other clients like these, by Gaffke's method"


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
    summary = run.read(SUMMARY)
    if not scored:
        console.print(f"nothing scored yet in {markup(run.path)}")
        _print_measured(summary, console)
        _print_notes(summary, console)
        return
    ledger, rows = run.rows(LEDGER), [answer.row for answer in scored]
    names = sorted({row.attack for row in rows})
    of_models = summary.defenses.settings.get("sees") == "models"
    print_in_parts(
        console, names, lambda some: leakage_table(summary.name, rows, ledger, some, of_models)
    )
    print_in_parts(
        console, list(summary.attacks), lambda some: summary_table(summary.attacks, some)
    )
    if summary.ladder is not None:
        console.print(ladder.table(summary, summary.ladder))
        for line in ladder.left_out(summary.ladder):
            console.print(Text(printable(line)), soft_wrap=True)
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
    """Prints what canaries and attacks on membership measured, if there are any."""
    if summary.canary is not None:
        console.print(canary_table.table(summary.canary))
        for line in canary_table.notes(summary.canary):
            console.print(f"  [dim]{markup(line)}[/]", soft_wrap=True)
    if summary.membership is not None:
        for attack in dict.fromkeys(row.attack for row in summary.membership.figures):
            console.print(membership_table.table(summary.membership, attack))
        for line in membership_table.notes(summary.membership):
            console.print(f"  [dim]{markup(line)}[/]", soft_wrap=True)


def _print_notes(summary: RunSummary, console: Console) -> None:
    """Prints what else should be known; what is missing is said at the end of the command."""
    for note in summary.notes:
        console.print(f"[yellow]note[/]: {markup(note)}", soft_wrap=True)


def print_in_parts(
    console: Console, attacks: Sequence[str], table_of: Callable[[Sequence[str]], Table]
) -> None:
    """Prints a table of attacks, or several of fewer attacks each, so that no cell is cut.

    Args:
        console: Where to print.
        attacks: Names of the attacks.
        table_of: Makes the table of some of them.
    """
    left, first = list(attacks), True
    unbounded = console.options.update(max_width=10_000)
    while left or first:
        count = len(left)
        while count > 1 and (
            console.measure(table_of(left[:count]), options=unbounded).maximum > console.width
        ):
            count -= 1
        table = table_of(left[:count])
        left = left[count:]
        if not first:
            table.title = None
        if left:
            table.caption = None
        console.print(table)
        first = False


def leakage_table(
    name: str,
    rows: Sequence[LeakageRow],
    ledger: Sequence[LedgerRow] = (),
    attacks: Sequence[str] | None = None,
    of_models: bool = False,
) -> Table:
    """Returns a line per round and client, with a column per attack.

    Args:
        name: The name of the run.
        rows: Scored answers.
        ledger: Rows of privacy.jsonl.
        attacks: Those that get a column; None: all.
        of_models: Whether differences of published models were attacked, in place of updates.
    """
    subject = (
        "what the published models tell" if of_models else "what the server read in each update"
    )
    table = Table(
        title=f"{markup(name)}: {subject}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="attacks: texts recovered exactly and ROUGE-L, or the share of tokens found; "
        "eps: epsilon spent so far",
        title_justify="left",
        caption_justify="left",
    )
    attacks = sorted({row.attack for row in rows}) if attacks is None else attacks
    names = map(markup, attacks)
    headings = ("round", "client", "texts", "tokens", *names, "no\nupdate", "eps")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, overflow="fold")
    by_key: dict[Key, dict[str, LeakageRow]] = {}
    for row in rows:
        by_key.setdefault(row.key, {})[row.attack] = row
    last = None
    for key, of_key in sorted(by_key.items()):
        if last is not None and key.round != last:
            table.add_section()
        last = key.round
        # A row whose truth is damaged lacks the sizes that other rows of the update have.
        some = max(of_key.values(), key=lambda row: row.batch_size or 0)
        guesses = [row.guess_rougeL for row in of_key.values() if row.guess_rougeL is not None]
        table.add_row(
            str(key.round),
            "all" if key.client == EVERYONE else str(key.client),
            *(
                NOT_MEASURED if value is None else str(value)
                for value in (some.batch_size, some.num_tokens)
            ),
            *(cell(of_key.get(attack)) for attack in attacks),
            number(guesses[0] if guesses else None),
            epsilon_of(key, ledger),
        )
    return table


def epsilon_of(key: Key, ledger: Sequence[LedgerRow]) -> str:
    """Returns the epsilon that a client has spent by a round; for a sum, the largest one."""
    clients: dict[int, list[float | str]] = {}
    for row in ledger:
        if row.round == key.round and key.client in (row.client, EVERYONE):
            clients.setdefault(row.client, []).append(row.epsilon)
    # Of statements about one client the smallest is what counts.
    epsilons = [min(map(float, spent)) for spent in clients.values() if NONE not in spent]
    if len(epsilons) < len(clients):
        return NONE
    return f"{max(epsilons):.3g}" if epsilons else NOT_MEASURED


def any_attack(summary: RunSummary) -> list[str]:
    """Returns lines about what all attacks together read; none if there is only one to sum up.

    They are text, not markup, as others wrote it.
    """
    worst = summary.worst_case
    if worst is None or len(worst.attacks) < 2:
        return []
    figures = [
        ("texts exact, %", worst.exact_match, None, 100),
        ("ROUGE-L", worst.rougeL, worst.control_rougeL, 1),
        ("tokens found, %", worst.token_recall, worst.control_token_recall, 100),
    ]
    readings = [
        f"{name} {plain_interval(estimate, scale)}"
        + (f" (other update: {plain_interval(control, scale)})" if control else "")
        for name, estimate, control, scale in figures
        if estimate is not None
    ]
    grants = f", told {summary.ladder.top.told}" if summary.ladder else ""
    lines = [f"{ANY_ATTACK}{grants}: {'; '.join(readings)}"]
    if worst.first:
        counts = ", ".join(f"{name} {count}" for name, count in worst.first.items())
        lines.append(f"  read exactly first, of {worst.texts} texts: {counts}")
    if worst.unattacked:
        lines.append(f"  no attack names a sequence for {worst.unattacked} of {worst.texts} texts")
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
    defenses = [_defense(table) for table in summary.defenses.defense]
    settings = [
        f"{key.replace('_', ' ')} {_value(value)}"
        for key, value in summary.defenses.settings.items()
        if value not in (None, "all")
    ]
    lines = [
        f"defenses: {'; '.join(defenses) or 'none'}",
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


def _defense(table: Mapping[str, JsonValue]) -> str:
    rest = [f"{key} {_value(value)}" for key, value in table.items() if key != "kind"]
    return " ".join([str(table["kind"]), *rest])


def _value(value: JsonValue) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {_value(nested)}" for key, nested in value.items())
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _scores(utility: Measured, held_out: int) -> str:
    """Returns the figures, and the accuracy's interval: texts that nobody has are independent."""
    named = {"mcc": "MCC", "f1": "F1"}
    shown = {
        name: NOT_MEASURED if value is None else f"{value:.3g}"
        for name, value in utility.figures.items()
    }
    if held_out and (accuracy := utility.figures.get("accuracy")) is not None:
        _, low, high = intervals.wilson(round(accuracy * held_out), held_out)
        shown["accuracy"] += f" [{low:.2f}, {high:.2f}]"
    return ", ".join(f"{named.get(name, name)} {value}" for name, value in shown.items())


def cell(row: LeakageRow | None) -> str:
    """Returns what one attack got from one update."""
    if row is None:
        return NOT_MEASURED
    if row.status != Status.RECOVERED:
        return f"[yellow]{markup(row.status)}[/]"
    if row.rougeL is None:
        return percent(row.token_recall)
    words = f"{texts_exact(row)} {number(row.rougeL):>3}"
    return f"[red]{words}[/]" if row.exact_match else words


def texts_exact(row: LeakageRow) -> str:
    """Returns how many texts of a batch were read exactly, and of how many."""
    texts = row.batch_size or 0
    return f"{round((row.exact_match or 0) * texts)}/{texts}"


Show = Callable[[AttackSummary], str]


def summary_table(
    summaries: Mapping[str, AttackSummary], chosen: Sequence[str] | None = None
) -> Table:
    """Returns a column per attack: its figures with 95 % intervals, and the controls.

    Args:
        summaries: The figures of each attack, by its name.
        chosen: Names of the attacks that get a column; None: all.
    """
    attacks = {
        name: summary for name, summary in summaries.items() if chosen is None or name in chosen
    }
    table = Table(
        title="in all: mean and 95 % interval over clients",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="\n".join([*map(markup, warnings(summaries.values())), INTERVALS]),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column(overflow="fold")
    for name, summary in attacks.items():
        heading = markup(name) + (" *" if summary.warning else "")
        table.add_column(heading, justify="right", overflow="fold")
    lines: list[tuple[str, Show]] = [
        ("was told", lambda summary: told(summary.knows)),
        ("answers", answers),
        ("texts exact, %", lambda summary: interval(summary.exact_match, 100)),
        ("ROUGE-1", lambda summary: interval(summary.rouge1)),
        ("ROUGE-2", lambda summary: interval(summary.rouge2)),
        ("ROUGE-L", lambda summary: interval(summary.rougeL)),
        ("  other update", lambda summary: interval(summary.control_rougeL)),
        ("  no update", lambda summary: interval(summary.guess_rougeL)),
        ("tokens found, %", lambda summary: interval(summary.token_recall, 100)),
        ("  other update", lambda summary: interval(summary.control_token_recall, 100)),
        ("  no update", lambda summary: interval(summary.guess_token_recall, 100)),
        ("tokens right, %", lambda summary: interval(summary.token_precision, 100)),
        *(
            _fact(name)
            for name in sorted({name for summary in attacks.values() for name in summary.facts})
        ),
        ("seconds", lambda summary: f"{summary.seconds:.1f}"),
    ]
    for heading, show in lines:
        table.add_row(heading, *(show(summary) for summary in attacks.values()))
    optional: list[tuple[str, Show]] = [
        ("an update", lambda summary: decimal(summary.seconds_per_update, 3)),
        ("batches proved", proved),
        ("smallest margin", lambda summary: decimal(summary.margin)),
        ("rank budget, %", budget),
        ("candidates", candidates),
    ]
    for heading, show in optional:
        cells = [show(summary) for summary in attacks.values()]
        if set(cells) != {NOT_MEASURED}:
            table.add_row(heading, *cells)
    return table


def _fact(name: str) -> tuple[str, Show]:
    """Returns the line of a fact that attacks read: how often it is right."""

    def show(summary: AttackSummary) -> str:
        if name not in summary.facts:
            return NOT_MEASURED
        right = summary.facts[name]
        return "not compared" if right is None else interval(right, 100)

    return f"{markup(name.replace('_', ' '))}, %", show


def warnings(summaries: Iterable[AttackSummary]) -> list[str]:
    """Returns why figures of attacks that are marked with a star are no rates, each reason once."""
    return [
        f"* {reason}"
        for reason in sorted({summary.warning for summary in summaries if summary.warning})
    ]


def answers(summary: AttackSummary) -> str:
    """Returns how many updates an attack has answers for, and how many of them are unscored."""
    unscored = f", {summary.unscored} unscored" if summary.unscored else ""
    return f"{summary.answers} of {summary.rows}{unscored}"


def proved(summary: AttackSummary) -> str:
    """Returns how many whole batches an attack proved; one that checks nothing proves nothing."""
    checks = summary.verified or summary.candidates
    return f"{summary.verified} of {summary.rows}" if checks else NOT_MEASURED


def budget(summary: AttackSummary) -> str:
    """Returns `mean (max ...)` of the shares used, and the number of rows if some have none."""
    used = summary.budget
    if used is None:
        return NOT_MEASURED
    few = "" if used.rows == summary.rows else f"; {used.rows} of {summary.rows}"
    return f"{100 * used.mean:.0f} [dim](max {100 * used.max:.0f}{few})[/]"


def candidates(summary: AttackSummary) -> str:
    """Returns how many candidates an update had after each check, in the order of the checks."""
    return (
        ">".join(f"{count:,.0f}" for count in (summary.candidates or {}).values()) or NOT_MEASURED
    )


def told(knows: Sequence[str]) -> str:
    """Returns the facts that were granted beyond what the server sets itself."""
    return ", ".join(fact for fact in knows if fact in GRANTABLE) or "nothing more"


def best_examples(scored: Sequence[Scored]) -> list[tuple[str, TextPair]]:
    """Returns the best answers, at most one per private text, best first."""
    best: dict[str, tuple[str, TextPair]] = {}
    for answer in scored:
        for pair in answer.pairs:
            held = best.get(pair.truth)
            if pair.answer is not None and (held is None or pair.rougeL > held[1].rougeL):
                best[pair.truth] = (answer.row.attack, pair)
    return sorted(best.values(), key=lambda example: -example[1].rougeL)[:EXAMPLES]


def number(value: float | None) -> str:
    """Returns a score without decimals."""
    return NOT_MEASURED if value is None else f"{value:.0f}"


def decimal(value: float | None, places: int = 1) -> str:
    """Returns a figure with decimals."""
    return NOT_MEASURED if value is None else f"{value:,.{places}f}"


def percent(share: float | None) -> str:
    """Returns a share in per cent."""
    return NOT_MEASURED if share is None else f"{100 * share:.0f} %"
