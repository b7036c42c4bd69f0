import io
import random
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.measure import Measurement

from fedleak.audit.privacy.ledger import defense_means, guarantee
from fedleak.report.html.render import _environment
from fedleak.report.table import Cell, Column, Table
from fedleak.report.tables.attacks import attack_table
from fedleak.report.tables.canaries import FIRST_CLIENTS, canary_table
from fedleak.report.tables.defenses import defense_tables
from fedleak.report.tables.leakage import epsilon_of
from fedleak.report.terminal.table import _rich_table, least_width, print_table
from fedleak.store.records import DefenseFigures, DefenseRow, LedgerRow
from fedleak.store.run import EVERYONE, Key
from fedleak.store.summaries import (
    CanaryBound,
    CanarySummary,
    Estimate,
    WorstCase,
)

pytestmark = pytest.mark.core


def spent(round, client, epsilon, unit="example"):
    return LedgerRow(
        round=round,
        client=client,
        epsilon=epsilon,
        delta=1e-5,
        accountant="rdp",
        unit=unit,
        neighbouring="replace one, given n",
        sampling="none",
        sampling_rate=1.0,
        steps=round,
        noise_multiplier=None if epsilon == "none" else 1.0,
    )


def test_what_a_defense_did_is_the_mean_over_the_updates_that_say():
    rows = [
        DefenseRow(round=1, client=0, defense=0, kind="dp_sgd", clipped=1.0, examples=3),
        DefenseRow(round=1, client=1, defense=0, kind="dp_sgd", examples=0),
        DefenseRow(round=1, client=0, defense=1, kind="mask", zeroed=0.25, norm_after=None),
        DefenseRow(round=2, client=0, defense=1, kind="mask", zeroed=0.75, norm_after=2.0),
    ]
    assert defense_means(rows) == (
        DefenseFigures(defense=0, kind="dp_sgd", clipped=1.0, examples=1.5),
        DefenseFigures(defense=1, kind="mask", zeroed=0.5, norm_after=2.0),
    )


@pytest.mark.parametrize(
    ("rows", "epsilon"),
    [
        ([], None),
        ([spent(1, 0, 1.0), spent(2, 0, 2.0), spent(1, 1, 1.5)], 2.0),
        # A client's two statements hold both, so the smaller one counts; of clients the larger.
        ([spent(1, 0, 3.0), spent(1, 0, 9.0, "client"), spent(1, 1, 4.0)], 4.0),
        ([spent(1, 0, 3.0), spent(1, 1, "none")], "none"),
    ],
)
def test_the_guarantee_of_a_run_is_the_one_that_all_clients_have(rows, epsilon):
    run_guarantee = guarantee(rows)
    assert (run_guarantee and run_guarantee.epsilon) == epsilon


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        (Key(1, 0), "1.23"),
        (Key(1, 1), "none"),
        (Key(2, 0), "4"),
        (Key(2, EVERYONE), "12"),
        (Key(1, EVERYONE), "none"),
        (Key(3, 0), "-"),
    ],
)
def test_the_table_has_what_was_spent_by_each_round(key, shown):
    rows = [spent(1, 0, 1.234), spent(1, 1, "none"), spent(2, 0, 4.0), spent(2, 1, 12.0)]
    rows.append(spent(2, 0, 40.0, "client"))
    assert epsilon_of(key, rows) == shown


def test_a_line_for_each_defense_has_its_settings_and_what_it_did():
    defenses = ({"kind": "dp_sgd", "noise_multiplier": 1.0}, {"kind": "sign"})
    effects = (DefenseFigures(defense=0, kind="dp_sgd", clipped=0.5, noise_norm=12.0),)
    (table,) = defense_tables(defenses, effects)
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["0: dp_sgd", "noise_multiplier=1.0", "clipped 0.5, noise norm 12"],
        ["1: sign", "defaults", "-"],
    ]
    assert defense_tables((), ()) == []


def test_the_worst_case_over_attacks_is_said_with_what_chance_gives():
    def estimate(mean):
        return Estimate(mean=mean, low=mean / 2, high=2 * mean)

    worst = WorstCase(
        attacks=("dager", "probes"),
        texts=24,
        clients=12,
        unattacked=2,
        exact_match=estimate(0.5),
        rougeL=estimate(40.0),
        token_recall=None,
        control_rougeL=estimate(10.0),
        control_token_recall=None,
        first={"dager": 11},
        warning=None,
    )
    table = attack_table(SimpleNamespace(attacks={}, worst_case=worst, ladder=None))
    assert [column.heading for column in table.columns] == ["figure", "any attack"]
    shown = {figure.text: cell.text for figure, cell in table.rows}
    assert shown["texts exact, %"] == "50 [25, 100]"
    assert shown["ROUGE-L"] == "40 [20, 80]"
    assert shown["ROUGE-L, other update"] == "10 [5, 20]"
    assert shown["tokens found, %"] == "-"


def test_a_page_has_the_bounds_of_all_clients_and_a_terminal_those_of_the_first():
    bound = CanaryBound(
        client=EVERYONE,
        unit="example",
        canaries=64,
        updates=1,
        in_copies=False,
        epsilon=8.0,
        gaussian=1.0,
        f_dp=1.0,
        epsilon_delta=0.5,
    )
    clients = range(FIRST_CLIENTS + 5)
    alone = (bound.model_copy(update={"client": client}) for client in clients)
    table = canary_table(
        CanarySummary(confidence=0.95, delta=1e-5, bounds=(bound, *alone), alarms=())
    )
    assert [row[0].text for row in table.rows] == ["all, by example", *map(str, clients)]
    page = _environment().from_string("{% from 'macros.html.j2' import table %}{{ table(shown) }}")
    shown, folded = page.render(shown=table).split("<details>")
    assert "<summary>5 more</summary>" in folded
    for part, there in ((shown, clients[:FIRST_CLIENTS]), (folded, clients[FIRST_CLIENTS:])):
        rows = [row for row in clients if f"<span>{row}</span></th>" in part]
        assert rows == [*there]
    console = Console(file=io.StringIO(), width=200)
    print_table(console, table)
    printed = console.file.getvalue()
    assert "5 more are in the report of the run." in printed
    assert printed.count("\n") < len(table.rows) + 20


def test_the_least_width_of_a_table_is_what_rich_measures():
    rng, wide = random.Random(0), Console(width=10_000, force_terminal=False)

    def text():
        return " ".join(rng.choice("ab世") * rng.randrange(30) for _ in range(rng.randrange(4)))

    for size in range(1, 7):
        columns = [Column(text(), words=rng.random() < 0.5) for _ in range(size)]
        rows = [[Cell(text(), below=[text()]) for _ in range(size)] for _ in range(3)]
        table = Table(title=text(), columns=columns, rows=rows)
        for breaks in (False, True):
            measured = Measurement.get(wide, wide.options, _rich_table(table, breaks=breaks))
            assert least_width(table, breaks=breaks) == measured.minimum
