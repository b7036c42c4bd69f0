"""The frontier: leakage, utility and epsilon along the strengths of each family."""

import math

import pytest

from fedleak.report.drawings import common as drawing
from fedleak.report.drawings import frontier
from fedleak.report.drawings.common import NO_ANSWER
from fedleak.store.records import Utility
from fedleak.store.summaries import (
    AttackSummary,
    CellSummary,
    Estimate,
    Guarantee,
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
    families = [one.values["family"] for one in cells]
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


def panels(found):
    with drawing.style("grid"):
        figure = frontier.frontier(found)
    drawn = [axes for axes in figure.axes if axes.axison]
    return {axes.get_title(): axes for axes in drawn if axes.get_title()}, drawn, figure


def points(axes, label):
    """The points of all series of a label, in their order."""
    series = [
        *(each.lines[0] for each in axes.containers if each.get_label() == label),
        *(line for line in axes.lines if line.get_label() == label),
    ]
    return [
        (float(x), float(y))
        for line in series
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        if not math.isnan(y)
    ]


def test_each_family_has_its_strengths_in_the_files_order_beside_the_undefended_cell():
    by_name, drawn, _ = panels(swept(*CELLS, units={"noise": "sigma / rms"}))
    assert list(by_name) == ["noise", "dp", "share", "sign"]
    assert len(drawn) == 2 * 4  # a panel of leaks and one of the utility, each
    rouge = points(by_name["noise"], "ROUGE-L")
    assert sorted(rouge) == [(-1.0, 100.0), (0.0, 50.0)]
    assert [y for _, y in sorted(points(by_name["share"], "ROUGE-L"))] == [100.0, 25.0, 0.0]
    exact = sorted(points(by_name["dp"], "texts exact, %"))
    assert [round(x) for x, _ in exact] == [-1, 0, 1, 2]
    assert [y for _, y in exact] == [100.0, 0.0, 0.0, 0.0]


def test_a_cell_without_an_answer_is_marked_and_one_that_was_not_run_is_not():
    by_name, _, _ = panels(swept(*CELLS))
    silent = points(by_name["noise"], NO_ANSWER)
    assert {round(x) for x, _ in silent} == {1}  # two kinds of leak; tokens were found
    assert len(silent) == 2
    marked = points(by_name["share"], frontier.SOME_UNATTACKED)
    assert [(round(x), y) for x, y in marked] == [(0, 25.0)]


def test_lines_join_numbers_and_not_words():
    by_name, _, _ = panels(swept(*CELLS))
    for name, style in (("dp", "--"), ("share", "None"), ("sign", "None")):
        lines = [c.lines[0] for c in by_name[name].containers if c.get_label() == "ROUGE-L"]
        assert lines[0].get_linestyle() == style


def test_utility_has_one_scale_and_epsilon_stands_below_its_strength(tmp_path):
    found = swept(*CELLS, units={"noise": "sigma / rms", "dp": "noise multiplier"})
    _, drawn, _ = panels(found)
    of_utility = [axes for axes in drawn if not axes.get_title()]
    assert len({axes.get_ylim() for axes in of_utility}) == 1
    low, high = of_utility[0].get_ylim()
    assert low < 0.0 < 0.5 < high
    labels = [[text.get_text() for text in axes.get_xticklabels()] for axes in of_utility]
    assert labels == [
        ["none", "0.3", "3", "30"],
        ["none", "1.0\n8.2", "2.0\n1.2e5", "3.0\n486"],
        ["none", "q1", "o1"],
        ["none", "on"],
    ]
    assert [axes.get_xlabel() for axes in of_utility] == [
        "sigma / rms",
        "noise multiplier (below: epsilon)",
        "",
        "",
    ]
    frontier.draw_frontier(found, tmp_path / "frontier.svg")
    drawn_first = (tmp_path / "frontier.svg").read_text()
    frontier.draw_frontier(found, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn_first


def test_perplexities_far_apart_have_a_log_scale():
    cells = [cell("mask", s, 1.0, {"perplexity": p}) for s, p in ((0.5, 10.0), (0.9, 9000.0))]
    _, drawn, _ = panels(swept(*cells))
    assert [axes.get_yscale() for axes in drawn] == ["linear", "log"]
    # No formula, of which a picture would have the source.
    marks = [mark.get_text() for mark in drawn[1].get_yticklabels()]
    assert marks == ["10", "100", "1,000", "10,000"]


def test_without_utility_there_is_no_panel_of_it():
    _, drawn, figure = panels(swept(cell("none", None, 1.0), cell("mask", 0.5, 0.5)))
    assert len(drawn) == len(figure.axes) == 1


def test_further_keys_stand_at_their_first_value():
    def at(size, share):
        one = cell("mask", 0.5, share)
        return one.model_copy(update={"values": {**one.values, "seed": size}})

    by_name, _, _ = panels(swept(at(1, 0.5), at(2, 1.0), axes={"seed": [1, 2]}))
    assert points(by_name["mask"], "ROUGE-L") == [(0.0, 50.0)]


@pytest.mark.parametrize(
    "found",
    [
        swept(cell("none", None, 1.0)),
        swept(cell("mask", 0.5, 0.0, done=False)),
        SweepSummary(name="grid", axes={"seed": [1]}, cells=()),
    ],
    ids=["undefended alone", "nothing finished", "no families"],
)
def test_where_there_is_nothing_to_draw_there_is_no_file(found, tmp_path):
    path = tmp_path / "frontier.svg"
    path.write_text("of an earlier sweep")
    frontier.draw_frontier(found, path)
    assert not path.exists()
