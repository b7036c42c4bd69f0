"""The frontier: leakage, utility and epsilon along the strengths of each family."""

import pytest

from fedleak.report.drawings.chart import silent, write
from fedleak.report.drawings.sweeps import SOME_UNATTACKED, frontier
from fedleak.store.records import Guarantee, Utility
from fedleak.store.summaries import (
    AttackSummary,
    CellSummary,
    Estimate,
    SweepSummary,
    WorstCase,
)

ATTACK = AttackSummary(
    **dict.fromkeys(AttackSummary.model_fields)
    | {
        "rows": 2, "status": {}, "verified": 0, "knows": (), "sequences": 2, "clients": 2,
        "facts": {}, "seconds": 1.0,
    }
)  # fmt: skip


def worst(share, *, unattacked=0):
    """What all attacks read: a share of the texts, and of all else as much; None: no answer."""

    def estimate(scale):
        if share is None:
            return None
        return Estimate(mean=scale * share, low=scale * share / 2, high=scale)

    return WorstCase(
        attacks=("auto",),
        texts=2,
        clients=2,
        unattacked=unattacked,
        exact_match=estimate(1.0),
        rougeL=estimate(100.0),
        token_recall=Estimate(mean=0.75, low=0.5, high=1.0),
        control_rougeL=Estimate(mean=8.0, low=0.0, high=50.0),
        control_token_recall=None,
        first={},
        warning=None,
    )


def cell(kind, strength, share, figure=None, epsilon="none", *, done=True, **more):
    family = {"kind": kind} | ({} if strength is None else {"strength": strength})
    about = {"cell": f"{kind}-{strength}", "values": {"family": family}}
    if not done:
        return CellSummary(**about, status="new")
    guarantee = Guarantee(
        epsilon=epsilon, delta=1e-5, accountant="rdp", unit="example",
        neighbouring="zero out one", noise_multiplier=None,
    )  # fmt: skip
    return CellSummary(
        **about,
        status="finished",
        attacks={"auto": ATTACK},
        worst_case=worst(share, **more),
        utility=None if figure is None else Utility(round=1, **figure),
        privacy=guarantee,
    )


def swept(*cells, axes=None, units=None):
    families = [summary.values["family"] for summary in cells]
    return SweepSummary(
        name="grid", axes={"family": families} | (axes or {}), cells=cells, units=units or {}
    )


CELLS = (
    cell("none", None, 1.0, {"mcc": 0.5}),
    cell("noise", 0.3, 0.5, {"mcc": 0.4}),
    cell("noise", 3, None, {"mcc": 0.1}),
    cell("noise", 30, 0.0, done=False),
    cell("dp", 1.0, 0.0, {"mcc": 0.2}, 8.25),
    cell("dp", 2.0, 0.0, {"mcc": 0.0}, 123456.0),
    cell("dp", 3.0, 0.0, {"mcc": 0.0}, 486.2),
    cell("share", "q1", 0.25, {"mcc": 0.5}, unattacked=1),
    cell("share", "o1", 0.0, {"mcc": 0.5}),
    cell("sign", None, 0.0, {"mcc": 0.3}),
)


def panels(sweep):
    """The panel of leaks of each family, by its name, and those of utility in their order."""
    stacks = [column["vconcat"] for column in frontier(sweep)["concat"]]
    return {stack[0]["title"]: stack[0] for stack in stacks}, [
        stack[1] for stack in stacks if stack[1:]
    ]


def rows(panel, series, mark="point"):
    """The rows of a series that are drawn by a mark, in their order."""
    layers = [layer for layer in panel["layer"] if layer["mark"]["type"] == mark]
    values = [row for layer in layers for row in layer["data"]["values"]]
    return [row for row in values if row["series"] == series and row.get("y") is not None]


def points(panel, series, mark="point"):
    return [(row["x"], row["y"]) for row in rows(panel, series, mark)]


def axis(panel, side):
    return next(layer for layer in panel["layer"] if side in layer["encoding"])["encoding"][side]


def test_each_family_has_its_strengths_in_the_files_order_beside_the_undefended_cell():
    by_name, costs = panels(swept(*CELLS, units={"noise": "sigma / rms"}))
    assert list(by_name) == ["noise", "dp", "share", "sign"]
    assert len(costs) == 4
    assert axis(by_name["noise"], "x")["scale"]["domain"] == ["undefended", "0.3", "3", "30"]
    assert points(by_name["noise"], "ROUGE-L") == [("undefended", 100.0), ("0.3", 50.0)]
    assert [y for _, y in points(by_name["share"], "ROUGE-L")] == [100.0, 25.0, 0.0]
    assert [y for _, y in points(by_name["dp"], "texts exact, %")] == [100.0, 0.0, 0.0, 0.0]
    [first, *_] = rows(by_name["share"], "ROUGE-L")
    assert (first["low"], first["high"]) == (50.0, 100.0)


def test_a_cell_without_an_answer_is_marked_and_one_that_was_not_run_is_not():
    by_name, _ = panels(swept(*CELLS))
    for heading in ("texts exact, %", "ROUGE-L"):
        assert [x for x, _ in points(by_name["noise"], silent(heading))] == ["3"]
    assert points(by_name["noise"], silent("tokens found, %")) == []  # they were found
    assert points(by_name["share"], SOME_UNATTACKED) == [("q1", 25.0)]


def test_lines_join_numbers_and_not_words():
    by_name, _ = panels(swept(*CELLS))
    assert [x for x, _ in points(by_name["dp"], "ROUGE-L", "line")] == [
        "1.0\n8.2", "2.0\n1.2e5", "3.0\n486",
    ]  # fmt: skip
    for name in ("share", "sign"):
        assert points(by_name[name], "ROUGE-L", "line") == []


def test_utility_has_one_scale_and_epsilon_stands_below_its_strength(tmp_path):
    sweep = swept(*CELLS, units={"noise": "sigma / rms", "dp": "noise multiplier"})
    _, costs = panels(sweep)
    [(low, high)] = {tuple(axis(panel, "y")["scale"]["domain"]) for panel in costs}
    assert low < 0.0 < 0.5 < high
    assert [axis(panel, "x")["scale"]["domain"] for panel in costs] == [
        ["undefended", "0.3", "3", "30"],
        ["undefended", "1.0\n8.2", "2.0\n1.2e5", "3.0\n486"],
        ["undefended", "q1", "o1"],
        ["undefended", "on"],
    ]
    assert [axis(panel, "x")["title"] for panel in costs] == [
        "sigma / rms",
        "noise multiplier (below: epsilon)",
        "",
        "",
    ]
    assert [y for _, y in points(costs[0], "MCC of the trained model")] == [0.5, 0.4, 0.1]
    write(frontier(sweep), tmp_path / "frontier.svg")
    drawn = (tmp_path / "frontier.svg").read_text()
    for words in ("noise", "1.2e5", "sigma / rms", "MCC without a defense", SOME_UNATTACKED):
        assert f">{words}<" in drawn
    write(frontier(sweep), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn


def test_perplexities_far_apart_have_a_log_scale():
    cells = [cell("mask", s, 1.0, {"perplexity": p}) for s, p in ((0.5, 10.0), (0.9, 9000.0))]
    by_name, [cost] = panels(swept(*cells))
    assert axis(by_name["mask"], "y")["scale"]["type"] == "linear"
    assert axis(cost, "y")["scale"]["type"] == "log"


def test_without_utility_there_is_no_panel_of_it():
    by_name, costs = panels(swept(cell("none", None, 1.0), cell("mask", 0.5, 0.5)))
    assert (list(by_name), costs) == (["mask"], [])


def test_further_keys_stand_at_their_first_value():
    def at(size, share):
        summary = cell("mask", 0.5, share)
        return summary.model_copy(update={"values": {**summary.values, "seed": size}})

    by_name, _ = panels(swept(at(1, 0.5), at(2, 1.0), axes={"seed": [1, 2]}))
    assert points(by_name["mask"], "ROUGE-L") == [("0.5", 50.0)]


@pytest.mark.parametrize(
    "sweep",
    [
        swept(cell("none", None, 1.0)),
        swept(cell("mask", 0.5, 0.0, done=False)),
        SweepSummary(name="grid", axes={"seed": [1]}, cells=()),
    ],
    ids=["undefended alone", "nothing finished", "no families"],
)
def test_where_there_is_nothing_to_draw_there_is_no_file(sweep, tmp_path):
    path = tmp_path / "frontier.svg"
    path.write_text("of an earlier sweep")
    write(frontier(sweep), path)
    assert not path.exists()
