"""Tables for the terminal: what leaked per round and client, and examples beside the truth."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedleak.audit import LeakageRow, Pair, Scored
from fedleak.reconstruction import Status
from fedleak.store import Key, Run

EXAMPLES = 4
NOT_MEASURED = "-"


def print_run(run: Run, scored: Sequence[Scored], console: Console | None = None) -> None:
    """Prints a run's table, its summary and some recovered texts."""
    console = console or Console()
    if not scored:
        console.print(f"nothing scored yet in {run.path}")
        return
    summary = run.read_json("summary.json")
    console.print(leakage_table(summary["name"], [one.row for one in scored]))
    console.print(summary_table(summary))
    for name, pair in best_examples(scored):
        console.print(f"  [bold]private[/]    {escape(pair.truth)}")
        console.print(f"  [bold]{name:<10}[/] {escape(pair.answer or '')}  [dim]ROUGE-L {pair.rougeL:.0f}[/]")
    failures = {(one.row.attack, one.row.status, one.row.reason) for one in scored}
    for attack, status, reason in sorted(failures):
        if status != Status.RECOVERED:
            console.print(f"  [yellow]{attack} {status}[/]: {escape(reason)}")
    console.print(f"results: {run.path}")


def leakage_table(name: str, rows: Sequence[LeakageRow]) -> Table:
    """Returns a line per round and client, with a column group per attack."""
    table = Table(title=f"{name}: what the server read, per round and client", title_justify="left")
    attacks = sorted({row.attack for row in rows})
    for heading in ("round", "client", "texts", "tokens"):
        table.add_column(heading, justify="right")
    for attack in attacks:
        table.add_column(attack, justify="right")
    table.add_column("no update\nROUGE-L", justify="right")
    by_key: dict[Key, dict[str, LeakageRow]] = {}
    for row in rows:
        by_key.setdefault(Key(row.round, row.client), {})[row.attack] = row
    last = None
    for key, of_key in sorted(by_key.items()):
        if last is not None and key.round != last:
            table.add_section()
        last = key.round
        any_row = next(iter(of_key.values()))
        guesses = [row.guess_rougeL for row in of_key.values() if row.guess_rougeL is not None]
        table.add_row(
            str(key.round),
            str(key.client),
            str(any_row.batch_size),
            str(any_row.num_tokens),
            *(cell(of_key.get(attack)) for attack in attacks),
            number(guesses[0] if guesses else None),
        )
    return table


def cell(row: LeakageRow | None) -> str:
    """Returns what one attack got from one update, in a few words."""
    if row is None:
        return NOT_MEASURED
    if row.status != Status.RECOVERED:
        return f"[yellow]{row.status}[/]"
    if row.rougeL is None:
        return f"{percent(row.token_recall)} of tokens"
    exact = round((row.exact_match or 0) * row.batch_size)
    words = f"{exact}/{row.batch_size} exact, RL {number(row.rougeL)}"
    return f"[red]{words}[/]" if exact else words


def summary_table(summary: dict[str, object]) -> Table:
    """Returns a line per attack, with 95 % intervals and both controls."""
    table = Table(title="in all (mean and 95 % interval)", title_justify="left")
    for heading in ("attack", "knows", "answers", "exact", "ROUGE-1", "ROUGE-2", "ROUGE-L"):
        table.add_column(heading)
    for heading in ("other client's\nupdate: ROUGE-L", "no update:\nROUGE-L", "tokens found", "seconds"):
        table.add_column(heading)
    attacks = summary["attacks"]
    assert isinstance(attacks, dict)
    for name, of in attacks.items():
        status = of["status"].get(Status.RECOVERED, 0)
        table.add_row(
            name + (" *" if of["warning"] else ""),
            ", ".join(of["knows"]),
            f"{status}/{of['rows']}",
            interval(of["exact_match"], 100),
            *(interval(of[f"rouge{n}"]) for n in "12L"),
            interval(of["control_rougeL"]),
            interval(of["guess_rougeL"]),
            interval(of["token_recall"], 100),
            f"{of['seconds']:.1f}",
        )
    if any(of["warning"] for of in attacks.values()):
        table.caption = "* fewer than 20 texts: take it as an example, not as a rate"
        table.caption_justify = "left"
    return table


def best_examples(scored: Sequence[Scored]) -> list[tuple[str, Pair]]:
    """Returns the best answers, at most one per private text, best first."""
    found: dict[str, tuple[str, Pair]] = {}
    for one in scored:
        for pair in one.pairs:
            held = found.get(pair.truth)
            if pair.answer is not None and (held is None or pair.rougeL > held[1].rougeL):
                found[pair.truth] = (one.row.attack, pair)
    return sorted(found.values(), key=lambda item: -item[1].rougeL)[:EXAMPLES]


def interval(value: dict[str, float] | None, scale: float = 1) -> str:
    """Returns `mean [low, high]`."""
    if value is None:
        return NOT_MEASURED
    return f"{scale * value['mean']:.0f} [dim]\\[{scale * value['low']:.0f}, {scale * value['high']:.0f}][/]"


def number(value: float | None) -> str:
    """Returns a score without decimals."""
    return NOT_MEASURED if value is None else f"{value:.0f}"


def percent(share: float | None) -> str:
    """Returns a share in per cent."""
    return NOT_MEASURED if share is None else f"{100 * share:.0f} %"
