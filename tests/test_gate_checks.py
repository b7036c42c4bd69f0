"""What each check of the gate says, word for word, of runs that nobody trained."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from built import answer_of, evidence_of, run_of, summary_of, truth_of
from scored import row
from tiny import DLG, call, tables

from fedleak.attacks.reconstruction import Status
from fedleak.audit import score_files, scoring
from fedleak.audit.estimates import Largest
from fedleak.audit.gate.check import Check, Outcome
from fedleak.audit.gate.control import control_checks, with_abstentions
from fedleak.audit.gate.evidence import Evidence, complete, figures, genuine, own
from fedleak.audit.gate.judge import judge
from fedleak.audit.gate.limits import limit_checks
from fedleak.audit.gate.measured import measured_checks, required_checks
from fedleak.audit.worst_case import worst_case
from fedleak.config.loading import parse
from fedleak.config.tables import GateTable
from fedleak.running.workers.process import settings
from fedleak.store import records
from fedleak.store.records import (
    UNSCORED,
    UTILITY,
    CanaryRow,
    DefenseRow,
    Guarantee,
    LeakageRow,
    LedgerRow,
    MembershipRow,
    ScoredRows,
    TextScore,
    Utility,
)
from fedleak.store.run import Key, Run
from fedleak.store.summaries import (
    SUMMARY,
    CanaryBound,
    CanarySummary,
    CopiesRead,
    Estimate,
    Ladder,
    MembershipFigures,
    MembershipSummary,
    PositiveControl,
    Rung,
)
from fedleak.util.errors import ConfigError

pytestmark = pytest.mark.core

READ, MISSED = (True, 100.0, 1.0), (False, 10.0, 0.2)
WITHIN, EXCEEDED, UNTOLD = Outcome.WITHIN, Outcome.EXCEEDED, Outcome.UNTOLD
SIX: dict[str, Any] = {"federation.clients": 6, "attack": [DLG]}


def measured(
    evidence: Evidence, leaks: Sequence[str] = (), **limits: Any
) -> dict[str, tuple[Outcome, str]]:
    checks = measured_checks(GateTable(**limits), evidence, leaks)
    return {check.name: (check.outcome, check.sentence) for check in checks}


def required(evidence: Evidence, **limits: Any) -> list[Check]:
    return required_checks(GateTable(**limits), evidence)


# --- attacks --------------------------------------------------------------------------------------


def test_what_an_attack_did_not_do_is_said_in_one_line() -> None:
    late = {"diagnostics": {"time_up": True}}
    rows = [
        row("dlg", 0, READ, **late),
        row("dlg", 1, status=Status.FAILED, texts=None),
        row("dlg", 2, status=UNSCORED, texts=None, batch_size=None),
        row("dlg", 3, status=Status.ABSTAINED, texts=None, **late),
        row("dlg", 4, texts=None, rougeL=1.0),
    ]
    evidence = evidence_of(SIX, rows)
    parts = [
        "it has no answer for 1 of 6 updates",
        "it failed on 1 of 6 updates",
        "its answers for 1 of 6 updates are unscored: the truth is not here",
        "its time (`seconds`) was up on 2 of 6 updates: the gate asks for 120 s (gate.seconds)",
        "it abstained on 1 of 6 updates, which is no evidence that nothing can be read: where the "
        "other attacks are enough for you, name it in gate.may_abstain",
        "1 of 6 updates have no scores of single texts: `fedleak score` adds them",
    ]
    assert measured(evidence)["attack dlg"] == (UNTOLD, "; ".join(parts))
    allowed = measured(evidence, may_abstain=["dlg"])["attack dlg"]
    assert allowed == (UNTOLD, "; ".join(parts[:4] + parts[5:]))
    probes = measured(evidence)["attack probes"]
    assert probes == (UNTOLD, "it has no answer for 6 of 6 updates")


@pytest.mark.parametrize(
    ("figures", "lacks"),
    [({}, 0), ({"rougeL": 1.0}, 1), ({"token_recall": 1.0}, 1)],
)
def test_an_answer_that_names_no_text_lacks_no_score_of_one(
    figures: Mapping[str, float], lacks: int
) -> None:
    rows = [row("dlg", client, texts=None, **figures) for client in range(6)]
    outcome, sentence = measured(evidence_of(SIX, rows))["attack dlg"]
    assert outcome is (UNTOLD if lacks else WITHIN)
    assert ("`fedleak score` adds them" in sentence) == bool(lacks)


def test_no_answer_is_asked_for_of_an_update_of_no_text() -> None:
    nothing = {"texts": (), "batch_size": 0, "diagnostics": {"time_up": True}}
    rows = [row("dlg", client, READ) for client in range(4)]
    rows += [row("dlg", 4, status=Status.ABSTAINED, **nothing), row("dlg", 5, **nothing)]
    evidence = evidence_of(SIX, rows)
    sentence = "it answered 4 of 6 updates; 2 have no text"
    assert measured(evidence)["attack dlg"] == (WITHIN, sentence)
    kept = {check.name: check.outcome for check in required(evidence, require=["dlg"])}
    assert kept["required dlg"] is WITHIN


def test_an_attack_of_a_rung_may_abstain_by_its_listed_name() -> None:
    rows = [row("dlg+all", client, status=Status.ABSTAINED, texts=None) for client in range(6)]
    checks = measured(evidence_of(SIX, rows), may_abstain=["dlg"])
    assert checks["attack dlg+all"] == (WITHIN, "it answered 0 of 6 updates")


@pytest.mark.parametrize(
    ("settings", "attack", "seconds", "says"),
    [
        ([{"seconds": 30}, {"seconds": 40.0}], DLG, 30, None),
        ([{"seconds": 40.0}, {"seconds": 30}], DLG, 40, "after 30 s "),
        ([{"seconds": None}], DLG, 1, ""),
        ([], DLG | {"seconds": 50.0}, 50, None),
        ([], DLG | {"seconds": 50.0}, 51, "after 50 s "),
    ],
)
def test_the_least_time_that_any_answer_was_given_is_what_was_agreed(
    settings: Sequence[Any], attack: Mapping[str, Any], seconds: float, says: str | None
) -> None:
    """Where no answer says it, the experiment does."""
    answers = [answer_of(1, client, settings=table) for client, table in enumerate(settings)]
    answers = [answer.model_copy(update={"attack": "dlg"}) for answer in answers]
    answers.append(answer_of(1, 5, attack="other", settings={"seconds": 0.1}))
    rows = [row("dlg", client, READ, diagnostics={"time_up": client == 0}) for client in range(6)]
    evidence = evidence_of(
        SIX | {"attack": [{"kind": "tag", "seconds": 1.0}, attack]}, rows, answers
    )
    outcome, sentence = measured(evidence, seconds=seconds)["attack dlg"]
    if says is None:
        given = (
            f"it answered 6 of 6 updates, 1 of them with all of the {seconds:g} s that were agreed"
        )
        assert (outcome, sentence) == (WITHIN, given)
    else:
        assert (outcome, sentence) == (
            UNTOLD,
            f"its time (`seconds`) was up {says}on 1 of 6 updates: the gate asks for {seconds:g} s "
            "(gate.seconds)",
        )


# --- clients and coverage -------------------------------------------------------------------------


def test_clients_whose_defenses_nobody_tried_are_listed() -> None:
    noise = {"kind": "gaussian_noise", "sigma": 1.0}
    changes: dict[str, Any] = {
        "federation.clients": 16,
        "data.samples": 16,
        "threat.clients": [0],
        "defense": [noise, {"kind": "clip", "max_norm": 1.0, "clients": [1, 3]}],
    }
    assert measured(evidence_of(changes))["clients"] == (
        UNTOLD,
        "clients 1, 3 use gaussian_noise and clip and were never attacked, and no client like them "
        "was: add one to threat.clients",
    )
    changes["defense"] = [noise | {"clients": [0]}]
    assert measured(evidence_of(changes))["clients"] == (
        UNTOLD,
        "clients 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 5 more use no defense and were never attacked, "
        "and no client like them was: add one to threat.clients",
    )
    changes["threat.clients"] = [0, 7]
    sentence = "every client was attacked, or one with the same defenses: 2 of them"
    assert measured(evidence_of(changes))["clients"] == (WITHIN, sentence)


def test_a_sum_is_of_all_clients() -> None:
    evidence = evidence_of({"threat.sees": "models"})
    sentence = "what was attacked is of all clients of a round"
    assert measured(evidence)["clients"] == (WITHIN, sentence)


def test_coverage_counts_texts_and_knows_where_it_cannot(tmp_path: Path) -> None:
    changes = {"federation.clients": 4, "federation.batch_size": 3}
    texts = [(2, 5, 3), (2, 6, 3), (2, 7, 3)]
    truths = [truth_of(1, client, texts[: client + 1]) for client in range(3)]
    run = run_of(tmp_path / "run", parse(tables(changes)), truths)
    rows = [
        row("dlg", 0, texts=None),  # an answer of which no text has a score
        row("dlg", 1, status=Status.ABSTAINED, texts=None),
        row("dlg", 2, *[MISSED] * 3, status=Status.ABSTAINED),  # which counts as an answer
    ]
    evidence = evidence_of(changes, rows, folder=run.path)
    unknown = "1 updates have no truth in the vault"
    assert measured(evidence, coverage=0.0)["coverage"] == (UNTOLD, unknown)
    (run.path / "vault" / "r0001-c02.json").write_text("{")
    unknown = "2 updates have no truth in the vault"
    assert measured(evidence, coverage=0.0)["coverage"] == (UNTOLD, unknown)
    run.vault.write(Key(1, 2), truths[2].to_json())
    run.vault.write(Key(1, 3), truth_of(1, 3, texts[:2]).to_json())
    sentence = "an attack answered for 4 of 8 private texts; limit "
    assert measured(evidence, coverage=0.5)["coverage"] == (WITHIN, f"{sentence}0.5")
    assert measured(evidence, coverage=0.51)["coverage"] == (EXCEEDED, f"{sentence}0.51")


def test_of_no_texts_nothing_is_covered(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", parse(tables()), [truth_of(1, c, []) for c in (0, 1)])
    check = measured(evidence_of({}, folder=run.path), coverage=0.0)["coverage"]
    assert check == (UNTOLD, "0 updates have no truth in the vault")


# --- texts ----------------------------------------------------------------------------------------

TEN: dict[str, Any] = {"federation.clients": 10, "data.samples": 20, "federation.batch_size": 2}


def of_ten(attack: str, *texts: Any, **more: Any) -> list[LeakageRow]:
    return [row(attack, client, *texts, **more) for client in range(10)]


def test_texts_of_enough_clients_are_counted() -> None:
    evidence = evidence_of(TEN, of_ten("dlg", MISSED, MISSED) + of_ten("tag", READ, MISSED))
    sentence = "20 texts of 10 clients, by dlg, tag"
    assert measured(evidence, ["exact", "token_recall"])["texts"] == (WITHIN, sentence)


def test_texts_that_nobody_searched_close_the_limits_that_need_them() -> None:
    bags, silent = (None, None, 0.5), of_ten("dager", status=Status.ABSTAINED, texts=None)
    silent = [answer_row.model_copy(update={"batch_size": 2}) for answer_row in silent]
    rows = [*of_ten("probes", bags, bags)[:9], *silent]
    texts = {limit: measured(evidence_of(TEN, rows), [limit])["texts"] for limit in LIMITS}
    few = "fewer than 10 clients and fewer than 20 texts: an example, not a rate"
    unnamed = f"{few}; 20 of 20 texts: no attack named sequences"
    assert texts == {
        "exact": (UNTOLD, unnamed),
        "rougeL": (UNTOLD, unnamed),
        "token_recall": (UNTOLD, f"{few}; 2 of 20 texts: no attack named tokens"),
    }


LIMITS = ("exact", "rougeL", "token_recall")


def test_no_answer_with_scores_is_untold() -> None:
    silent = of_ten("dager", status=Status.ABSTAINED, texts=None)
    sentence = "no attack gave an answer with scores of single texts"
    assert measured(evidence_of(TEN, silent), LIMITS)["texts"] == (UNTOLD, sentence)


def test_each_rung_has_its_own_texts() -> None:
    rungs = tuple(
        Rung(granted=granted, attacks=attacks, worst_case=None, worth=())
        for granted, attacks in (((), {"dlg": "dlg"}), (("labels",), {"dlg": "dlg+labels"}))
    )
    plain, with_labels = (
        of_ten("dlg", MISSED, MISSED),
        of_ten("dlg+labels", (None, None, 0.1), READ),
    )
    whole = evidence_of(TEN, plain).summary.worst_case
    part = evidence_of(TEN, with_labels).summary.worst_case
    rungs = tuple(
        rung.model_copy(update={"worst_case": worst})
        for rung, worst in zip(rungs, (whole, part), strict=True)
    )
    ladder = Ladder(rungs=rungs, left_out={}, correction="")
    texts = measured(evidence_of(TEN, [*plain, *with_labels], ladder=ladder), LIMITS)["texts"]
    assert texts == (UNTOLD, "told labels: 10 of 20 texts: no attack named sequences")
    silent = [answer_row.model_copy(update={"texts": None}) for answer_row in with_labels]
    top = rungs[1].model_copy(update={"worst_case": None})
    ladder = Ladder(rungs=(rungs[0], top), left_out={}, correction="")
    texts = measured(evidence_of(TEN, [*plain, *silent], ladder=ladder), LIMITS)["texts"]
    assert texts == (
        UNTOLD, "told labels: no attack gave an answer with scores of single texts"
    )  # fmt: skip
    # What others named does not count for a rung.
    ladder = Ladder(rungs=rungs, left_out={}, correction="")
    bare = [
        answer_row.model_copy(
            update={
                "texts": tuple(
                    t.model_copy(update={"token_recall": None}) for t in answer_row.texts or ()
                )
            }
        )
        for answer_row in with_labels
    ]
    texts = measured(evidence_of(TEN, [*plain, *bare], ladder=ladder), ["token_recall"])["texts"]
    assert texts == (UNTOLD, "told labels: 20 of 20 texts: no attack named tokens")


def test_abstentions_of_the_strongest_count_on_each_rung() -> None:
    """As texts of which nothing was read; those of other attacks stay what they are."""
    silent = of_ten("auto", status=Status.ABSTAINED, batch_size=2, texts=None)
    with_labels = of_ten("auto+all", status=Status.ABSTAINED, batch_size=2, texts=None)
    rows = [*silent, *with_labels, *of_ten("dlg", MISSED, MISSED)]
    rows += of_ten("dager", status=Status.ABSTAINED, batch_size=2, texts=None)
    rows.append(row("auto", 10, status=Status.FAILED, batch_size=2, texts=None))
    rows.append(row("auto", 11, status=Status.ABSTAINED, batch_size=None, texts=None))
    names = {(): {"auto": "auto", "dlg": "dlg"}, ("labels",): {"auto": "auto+all"}}
    rungs = tuple(
        Rung(granted=granted, attacks=attacks, worst_case=None, worth=())
        for granted, attacks in names.items()
    )
    reads = {"auto": copies_read(3, 1.0), "auto+all": copies_read(3, 1.0)}
    reads["dager"] = copies_read(3, 1.0)
    copies = PositiveControl(copies=3, texts=6, together=reads["auto"], attacks=reads)
    answers = [
        answer_of(1, 0, attack=name, settings={"kind": "auto"}) for name in ("auto", "auto+all")
    ]
    figures = {"positive_control": copies, "held_out": 3}
    plain = evidence_of(TEN, rows, answers, **figures)
    counted = with_abstentions(plain, ["auto", "dager"])
    nothing = TextScore(exact=False, rougeL=0.0, token_recall=0.0)
    expected = [
        answer_row.model_copy(update={"texts": (nothing,) * 2}) if i < 20 else answer_row
        for i, answer_row in enumerate(rows)
    ]
    assert counted.rows.leakage == expected
    # Of two that answer alike the first is named, in the order of answers.
    places = {answer.id: place for place, answer in enumerate(answers)}
    worst = worst_case(expected, places, Largest())
    assert counted.summary == plain.summary.model_copy(update={"worst_case": worst})
    ladder = Ladder(rungs=rungs, left_out={"lengths": "no"}, correction="none")
    climbed = with_abstentions(evidence_of(TEN, rows, answers, ladder=ladder, **figures), ["auto"])
    assert climbed.summary.ladder == ladder.model_copy(
        update={
            "rungs": (
                rungs[0].model_copy(
                    update={
                        "worst_case": worst_case(expected[:10] + expected[20:], places, Largest())
                    }
                ),
                rungs[1].model_copy(
                    update={"worst_case": worst_case(expected[10:20], places, Largest())}
                ),
            )
        }
    )
    for untouched in (with_abstentions(plain, ["dlg"]), with_abstentions(plain, [])):
        assert untouched is plain
    alone = evidence_of(TEN, rows, answers)
    assert with_abstentions(alone, ["auto"]) is alone
    weak = copies.model_copy(update={"attacks": {"auto": copies_read(2, 1.0)}})
    unable = evidence_of(TEN, rows, answers, positive_control=weak)
    assert with_abstentions(unable, ["auto"]) is unable


# --- alarms ---------------------------------------------------------------------------------------


def apart(attack: str, *differences: float) -> list[LeakageRow]:
    return [
        row(attack, client, MISSED, rougeL=50.0 + difference, control_rougeL=50.0)
        for client, difference in enumerate(differences)
    ]


def alarm(rows: Sequence[LeakageRow], *leaks: str) -> tuple[Outcome, str]:
    return measured(evidence_of(TEN, rows), leaks or ["exact"])["alarms"]


QUIET = (WITHIN, "no other row of the run says that more was to be read")


def test_answers_that_fit_other_clients_better_are_an_alarm_if_chance_would_not_do_it() -> None:
    sentence = (
        "dlg reads less of an update than its answer for another client's update holds, for 6 of 6 "
        "clients: its answers are not of the updates that they are said to be of"
    )
    assert alarm(apart("dlg", *[-1.0] * 6)) == (UNTOLD, sentence)
    assert alarm(apart("dlg", *[-1.0] * 5)) == QUIET  # p is 0.06
    assert alarm(apart("dlg", *[1.0] * 6)) == QUIET
    # Each attack more that is looked at makes chance likelier.
    assert alarm(apart("dlg", *[-1.0] * 6) + apart("tag", 1.0)) == QUIET
    two = alarm(apart("tag", *[-1.0] * 8) + apart("dlg", *[-1.0] * 8))
    assert two[1].split(" ")[0] == "dlg"
    assert "; tag reads less" in two[1]
    equal = alarm(apart("dlg", *[-1.0] * 6, 0.0))
    assert "for 6 of 7 clients" in equal[1]


def test_a_clients_rows_are_one_difference() -> None:
    rounds = [
        answer_row.model_copy(update={"round": number, "rougeL": rougeL})
        for number, rougeL in ((1, 0.0), (2, 60.0))
        for answer_row in apart("dlg", *[0.0] * 6)
    ]
    assert alarm(rounds)[0] is UNTOLD  # 50 less and 10 more are less
    for name in ("rougeL", "control_rougeL"):
        assert alarm([answer_row.model_copy(update={name: None}) for answer_row in rounds]) == QUIET


def bag(client: int, recall: float | None, precision: float | None = 0.5) -> LeakageRow:
    return row(
        "probes", client, (None, None, recall), token_recall=recall, token_precision=precision
    )


def named(client: int, recall: float | None, attack: str = "dlg") -> LeakageRow:
    return row(attack, client, (False, 0.0, recall), rougeL=0.0, token_recall=recall)


def test_tokens_that_sequences_do_not_hold_are_an_alarm() -> None:
    unread = [bag(0, 1.0), named(0, 0.49), named(0, 0.0, "tag")]
    sentence = (
        "probes found every token of 1 of 2 updates, and the attacks that name sequences found "
        "less than half of them: they left unread what was there"
    )
    assert alarm([*unread, bag(1, 1.0), named(1, 0.5)]) == (UNTOLD, sentence)
    assert alarm(unread, "rougeL")[0] is UNTOLD
    assert alarm(unread, "token_recall") == QUIET
    assert alarm([bag(0, 1.0)]) == QUIET  # no attack names sequences
    assert alarm([bag(0, 0.99), named(0, 0.0)]) == QUIET
    assert alarm([bag(0, 1.0, 0.49), named(0, 0.0)]) == QUIET
    assert alarm([bag(0, 1.0, None), named(0, 0.0)]) == QUIET
    assert alarm([*unread, named(0, 0.9, "lamp")]) == QUIET
    # What one attack reads of another update is of no help.
    assert alarm([*unread, named(1, 0.9)])[0] is UNTOLD
    # Whoever names sequences that hold all tokens has left none unread.
    assert alarm([named(0, 1.0), named(0, 0.1, "tag")]) == QUIET


# --- what is required -----------------------------------------------------------------------------


def test_what_is_required_has_a_check_each_once() -> None:
    rows = [row("dlg", client, MISSED) for client in range(5)]
    rows.append(row("dlg", 5, status=Status.ABSTAINED, texts=None))
    rows += [row("tag", client, texts=None) for client in range(6)]
    answers = [answer_of(1, 0, attack="tag", settings={"kind": "tag"})]
    evidence = evidence_of(SIX, rows, answers)
    assert required(evidence) == []
    assert required(evidence, require=["tag", "dlg", "tag", "canary"], canary=1.0) == [
        Check("required tag", WITHIN, "it answered for all 6 updates"),
        Check(
            "required dlg", UNTOLD, "no attack of this kind answered for 1 of 6 updates"
        ),
        Check("canaries of clients", UNTOLD, "there are no canaries: the file has no [canary]"),
    ]  # fmt: skip
    assert [check.name for check in required(evidence, canary=1.0)] == ["canaries of clients"]


def of_ledger(*clients: int) -> list[LedgerRow]:
    return [LedgerRow.nothing_guaranteed(Key(1, client)) for client in clients]


def bound(client: int, **more: Any) -> CanaryBound:
    about = {
        "client": client, "unit": "example", "canaries": 64, "updates": 1, "in_copies": False,
        "epsilon": 8.0, "gaussian": 1.0, "f_dp": 2.0, "epsilon_delta": 0.5,
    }  # fmt: skip
    return CanaryBound(**about | more)


def test_canaries_are_of_every_client_and_alarm() -> None:
    def check(*clients: int, alarms: tuple[str, ...] = ()) -> Check:
        canary = CanarySummary(
            confidence=0.95, delta=1e-5, bounds=tuple(map(bound, clients)), alarms=alarms
        )
        evidence = evidence_of({}, others={"ledger": of_ledger(0, 1, 2)}, canary=canary)
        (canary_check,) = required(evidence, require=["canary"])
        return canary_check

    name = "canaries of clients"
    assert check(-1, 0, 1, 2) == Check(name, WITHIN, "canaries of all 3 clients were scored")
    assert check(-1, 0) == Check(name, UNTOLD, "clients without a scored canary: 1, 2")
    alarmed = check(-1, alarms=("one", "two"))
    assert alarmed == Check(name, EXCEEDED, "one; two")


# --- limits ---------------------------------------------------------------------------------------


def limited(evidence: Evidence, **limits: Any) -> dict[str, tuple[Outcome, str]]:
    checks = limit_checks(GateTable(**limits), evidence)
    return {check.name: (check.outcome, check.sentence) for check in checks}


def estimate(mean: float, high: float) -> Estimate:
    return Estimate(mean=mean, low=0.0, high=high)


def test_the_highest_case_is_compared_with_the_limits_on_leakage() -> None:
    worst = evidence_of(TEN, of_ten("dlg", READ, MISSED)).summary.worst_case
    assert worst is not None
    figures = {
        "exact_match": estimate(0.25, 0.5),
        "rougeL": estimate(12.345, 20.0),
        "token_recall": estimate(0.75, 0.875),
    }
    worst = worst.model_copy(update=figures)
    evidence = evidence_of(TEN, worst_case=worst)
    assert limited(evidence, exact=0.5, rougeL=19.99, token_recall=0.9) == {
        "exact": (
            WITHIN,
            "share of texts read word for word: 0.25, with its interval up to 0.5; limit 0.5",
        ),
        "rougeL": (
            EXCEEDED,
            "mean ROUGE-L of the texts: 12.3, with its interval up to 20; limit 19.99",
        ),
        "token_recall": (
            WITHIN,
            "share of a text's tokens found: 0.75, with its interval up to 0.875; limit 0.9",
        ),
    }
    higher = worst.model_copy(update={"exact_match": estimate(0.125, 0.625), "rougeL": None})
    rungs = tuple(
        Rung(granted=granted, attacks={}, worst_case=of_rung, worth=())
        for granted, of_rung in (((), worst), (("labels", "lengths"), higher), (("labels",), None))
    )
    rises = evidence_of(TEN, ladder=Ladder(rungs=rungs, left_out={}, correction=""))
    checks = limited(rises, exact=0.6, rougeL=20.0)
    assert checks["exact"] == (
        EXCEEDED,
        "told labels, lengths: share of texts read word for word: 0.125, with its interval up to "
        "0.625; limit 0.6",
    )
    assert checks["rougeL"] == (
        UNTOLD,
        "told labels, lengths: no attack gave an answer that has a mean ROUGE-L of the texts; told "
        "labels: no attack gave an answer that has a mean ROUGE-L of the texts",
    )
    assert limited(rises, exact=0.625)["exact"][0] is UNTOLD
    assert limited(rises, rougeL=19.0)["rougeL"] == (
        EXCEEDED,
        "told nothing more: mean ROUGE-L of the texts: 12.3, with its interval up to 20; limit 19",
    )
    nobody = "no attack gave an answer that has a share of texts read word for word"
    assert limited(evidence_of(TEN), exact=1.0) == {"exact": (UNTOLD, nobody)}
    assert limited(evidence) == {}


def score_of(name: str, **more: Any) -> MembershipFigures:
    about = {
        "attack": "membership", "score": name, "updates": 2, "clients": 2, "members": 20,
        "controls": 200, "auc": estimate(0.5, 0.75), "rounds": (), "roc": (),
        "found_at_1_percent": estimate(0.0625, 0.125), "found_at_01_percent": None, "pairs": 20,
        "no_bound": None, "p": 1.0, "epsilon": 0.0,
    }  # fmt: skip
    return MembershipFigures(**about | more)


def test_the_best_score_of_membership_is_compared() -> None:
    rows = [row("membership", client, texts=None) for client in range(3)]
    rows += [row("membership", 3, status=Status.ABSTAINED, texts=None), row("dlg", 0, MISSED)]
    several = (score_of("loss"), score_of("residual", auc=estimate(0.625, 0.875), updates=3))

    def checks(figures: Sequence[MembershipFigures], **limits: float) -> Any:
        summary = MembershipSummary(confidence=0.95, delta=1e-5, figures=tuple(figures))
        return limited(evidence_of({}, rows, membership=summary), **limits)

    lacks = "membership by loss: 1 of 3 answers have no score"
    assert checks(several, auc=0.8, tpr=0.2) == {
        "auc": (
            EXCEEDED,
            "membership by residual: area under the ROC curve of membership: 0.625, with its "
            "interval up to 0.875; limit 0.8",
        ),
        "tpr": (UNTOLD, lacks),
    }
    assert checks(several[1:], auc=0.875, tpr=0.125) == {
        "auc": (
            WITHIN,
            "membership by residual: area under the ROC curve of membership: 0.625, with its "
            "interval up to 0.875; limit 0.875",
        ),
        "tpr": (
            WITHIN,
            "membership by residual: share of members found at 1 % false accusations: 0.0625, with "
            "its interval up to 0.125; limit 0.125",
        ),
    }
    # An update that is alone in its round is compared with no other.
    assert checks([*several[1:], score_of("calibrated")], tpr=0.125)["tpr"][0] == WITHIN
    few = score_of("norm", updates=3, found_at_1_percent=None)
    assert checks([few], tpr=1.0)["tpr"] == (
        UNTOLD, "membership by norm: 20 members and 200 others are too few"
    )  # fmt: skip
    assert limited(evidence_of({}, rows), auc=1.0)["auc"] == (
        UNTOLD, "no attack on membership gave an answer"
    )  # fmt: skip


def guarantee(epsilon: float | str) -> Guarantee:
    return Guarantee(
        epsilon=epsilon, delta=1e-5, accountant="prv", unit="example", neighbouring="add",
        noise_multiplier=1.0,
    )  # fmt: skip


def test_an_epsilon_is_of_every_client_that_trained() -> None:
    def check(limit: float, clients: int, epsilon: float | str | None) -> Any:
        privacy = None if epsilon is None else guarantee(epsilon)
        ledger = {"ledger": of_ledger(*range(clients))}
        changes = {"federation.clients": 3, "federation.rounds": 2}
        evidence = evidence_of(changes, others=ledger, privacy=privacy)
        return limited(evidence, epsilon=limit)

    sentence = "epsilon 7.123 at delta 1e-05, of one example by the accountant prv; limit "
    assert check(8, 3, 7.1234) == {"epsilon": (WITHIN, f"{sentence}8")}
    assert check(7.1234, 3, 7.1234)["epsilon"][0] is WITHIN
    assert check(7.1, 3, 7.1234) == {"epsilon": (EXCEEDED, f"{sentence}7.1")}
    nothing = {"epsilon": (UNTOLD, "nothing is guaranteed; limit 8")}
    assert check(8, 3, "none") == check(8, 3, None) == nothing
    assert check(8, 1, 7.0) == {"epsilon": (UNTOLD, "the ledger has no clients 1, 2")}


def test_canaries_bound_an_epsilon_unless_they_have_a_limit_of_their_own() -> None:
    def checks(bounds: Sequence[CanaryBound], **limits: float) -> Any:
        canary = CanarySummary(confidence=0.95, delta=1e-5, bounds=tuple(bounds), alarms=())
        return limited(evidence_of({}, canary=canary), **limits)

    several = [bound(-1), bound(0, gaussian=None, f_dp=3.0), bound(1)]
    if_gaussian = "canaries show 3 or more (if the trade-off curve is Gaussian); limit "
    assert checks(several, canary=3.0) == {"canary": (WITHIN, f"{if_gaussian}3")}
    assert checks(several, canary=2.9) == {"canary": (EXCEEDED, f"{if_gaussian}2.9")}
    by_epsilon = checks(several, epsilon=2.0)
    assert list(by_epsilon) == ["epsilon", "epsilon by canaries"]
    assert by_epsilon["epsilon by canaries"] == (EXCEEDED, f"{if_gaussian}2")
    assert list(checks(several, epsilon=2.0, canary=3.0)) == ["epsilon", "canary"]
    noise = checks([bound(0, gaussian=4.56789)], canary=8)["canary"][1]
    assert noise == "canaries show 4.568 or more (if the noise is Gaussian); limit 8"
    free = checks([bound(0, epsilon_delta=2.5)], canary=8)["canary"][1]
    assert free == "canaries show 2.5 or more (assuming nothing); limit 8"
    none = {"canary": (UNTOLD, "there are no canaries; limit 1.5")}
    assert limited(evidence_of({}), canary=1.5) == none


def test_utility_of_a_purged_run_is_what_was_written(tmp_path: Path) -> None:
    utility = Utility(round=1, accuracy=0.75, mcc=0.5, perplexity=12.0)
    written = evidence_of({}, utility=utility, held_out=40, purged="today")
    limits = {"accuracy": 0.75, "f1": 0.1, "mcc": 0.6, "perplexity": 12.0}
    on = "on 40 held-out texts; limit"
    assert limited(written, **limits) == {
        "accuracy": (WITHIN, f"0.75 {on} 0.75"),
        "f1": (UNTOLD, "no f1 was measured on held-out texts"),
        "mcc": (EXCEEDED, f"0.5 {on} 0.6"),
        "perplexity": (WITHIN, f"12 {on} 12"),
    }
    assert limited(written, perplexity=11.9)["perplexity"] == (EXCEEDED, f"12 {on} 11.9")
    nobody = (UNTOLD, "no mcc was measured on held-out texts")
    assert limited(evidence_of({}, purged="today"), mcc=0.0) == {"mcc": nobody}
    run = run_of(tmp_path / "run", parse(tables()))
    gone = limited(evidence_of({}, utility=utility, folder=run.path), mcc=0.0, f1=0.0)
    assert gone["mcc"][0] is UNTOLD
    assert gone["mcc"] == gone["f1"]
    assert "held_out.json" in gone["mcc"][1]


# --- the positive control -------------------------------------------------------------------------

NOISY: dict[str, Any] = TEN | {"defense": [{"kind": "gaussian_noise", "sigma": 1.0}]}


def copies_read(read: int, exact: float, recall: float = 0.0) -> CopiesRead:
    return CopiesRead(read=read, exact=exact, rougeL=100 * exact, token_recall=recall)


def control_of(leaks: Mapping[str, float], evidence: Evidence) -> tuple[Outcome, str]:
    check, _ = control_checks(leaks, evidence)
    assert check.name == "positive control"
    return check.outcome, check.sentence


def test_each_limit_has_to_be_exceeded_where_nothing_is_defended_by_who_answers() -> None:
    copies = PositiveControl(
        copies=3, texts=6, together=copies_read(3, 1.0, 0.5),
        attacks={"dlg": copies_read(1, 0.25, 0.5), "keyspan": copies_read(3, 0.875, 0.125)},
    )  # fmt: skip
    evidence = evidence_of(NOISY, of_ten("dlg", MISSED, MISSED), positive_control=copies)
    read = (
        "dlg read a text of 1 of 3 undefended copies; keyspan read a text of 3 of 3 undefended "
        "copies; share of texts read word for word: 1, limit "
    )
    assert control_of({"exact": 0.2}, evidence) == (WITHIN, f"{read}0.2")
    assert control_of({"exact": 0.25}, evidence) == (
        UNTOLD,
        f"{read}0.25; exact rests on dlg here, and keyspan exceeds it there",
    )
    assert control_of({"exact": 0.9}, evidence) == (
        UNTOLD,
        f"{read}0.9; exact rests on dlg here, and no single attack exceeds it there",
    )
    silent = evidence_of(NOISY, positive_control=copies)
    assert control_of({"exact": 0.2}, silent) == (
        UNTOLD,
        f"{read}0.2; exact rests on no answer here, and dlg, keyspan exceeds it there",
    )
    bags = evidence_of(NOISY, of_ten("dlg", (None, None, 1.0)), positive_control=copies)
    assert control_of({"exact": 0.2}, bags)[0] is UNTOLD
    assert control_of({"token_recall": 0.4}, bags)[0] is WITHIN
    assert control_of({"exact": 1.0, "token_recall": 0.5}, evidence) == (
        UNTOLD,
        f"{read}1; share of a text's tokens found: 0.5, limit 0.5; where nothing is in their way "
        "the attacks stay within exact, too; where nothing is in their way the attacks stay within "
        "token_recall, too",
    )


def test_an_undefended_run_is_its_own_positive_control() -> None:
    rows = [*of_ten("dlg", READ, MISSED)]
    rows = [
        answer_row.model_copy(update={"exact_match": float(answer_row.client > 2)})
        for answer_row in rows
    ]
    sentence = (
        "dlg read a text of 7 of 10 updates, none of them defended; share of texts read word for "
        "word: 0.5, limit 0.4"
    )
    undefended = evidence_of(TEN | {"federation.dropout": False, "audit.controls": False}, rows)
    assert control_of({"exact": 0.4}, undefended) == (WITHIN, sentence)


def test_why_there_is_no_positive_control(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", parse(tables(NOISY)))
    assert control_of({"exact": 0.4}, evidence_of(NOISY, folder=run.path)) == (
        UNTOLD,
        "no private batch is in the vault, so there is nothing to make undefended copies of",
    )
    run.vault.write(Key(1, 3), truth_of(1, 3, [(2, 5, 3)]).to_json())
    assert control_of({"exact": 0.4}, evidence_of(NOISY, folder=run.path)) == (
        UNTOLD,
        "no undefended copies were attacked, so these attacks may be unable to read anything: "
        f"`fedleak attack {run.path} --positive-control` tells",
    )
    assert control_of({"exact": 0.4}, evidence_of(NOISY, folder=run.path, purged="today")) == (
        UNTOLD,
        "no undefended copies were attacked before the private data was deleted",
    )


def test_the_attackers_that_limits_hold_for_are_named() -> None:
    def attackers(rows: Sequence[LeakageRow], *kinds: str) -> Check:
        changes = NOISY | {"attack": [{"kind": kind} for kind in kinds]}
        return control_checks({}, evidence_of(changes, rows))[1]

    rows = of_ten("tag", MISSED) + of_ten("dlg", MISSED)
    weak = (
        "the limits hold for dlg, tag alone: auto, the strongest attacker here, is not among them"
    )
    assert attackers(rows, "dlg") == Check("attackers", WITHIN, weak)
    strong = Check("attackers", WITHIN, "the limits hold for dlg, tag")
    assert attackers(rows, "dlg", "auto") == strong
    assert attackers([], "auto").sentence == "the limits hold for no attack"


# --- whether it is the run, and all of it ---------------------------------------------------------


def test_what_scoring_found_missing_closes_the_gate() -> None:
    whole = "the run is finished and nothing is missing"
    assert complete(evidence_of({})) == Check("complete", WITHIN, whole)
    lacking = evidence_of({}, missing=("dlg: a private text", "b"), unscored=2)
    assert complete(lacking) == Check(
        "complete",
        UNTOLD,
        f"2 things are missing or wrong: `fedleak score {lacking.run.path}` says what; "
        "2 answers have no score",
    )


def test_captures_and_answers_are_of_this_experiment(tmp_path: Path) -> None:
    captures = [Key(1, client) for client in range(3)]
    changes = {"federation.clients": 4, "attack": [DLG]}
    run = run_of(tmp_path / "run", parse(tables(changes)), captures=captures)
    fine = "captures and answers are of this experiment and its settings"
    assert own(evidence_of(changes, folder=run.path)) == Check("own", WITHIN, fine)
    for client in (0, 2):
        (run.path / "captures" / f"r0001-c0{client}.safetensors").write_bytes(b"no")
    strange = [answer_of(1, 0, attack="dlg"), answer_of(1, 0, attack="other")]
    check = own(evidence_of(changes, answers=strange, folder=run.path))
    assert (check.name, check.outcome) == ("own", UNTOLD)
    first, second, third = check.sentence.split("; ", 2)
    assert "r0001-c00" in first
    assert "r0001-c02" in second
    assert third.startswith("attack 'dlg' already ran here with other settings (")
    purged = own(evidence_of(changes, answers=strange, folder=run.path, purged="today"))
    assert purged.sentence == third


def test_files_that_nobody_here_wrote_are_named(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", parse(tables()), captures=[Key(1, 0)])
    fine = "fedleak wrote on this machine all that figures rest on, and nobody changed it"
    assert genuine(evidence_of({}, folder=run.path)) == Check("written here", WITHIN, fine)
    explanation = (
        ": fedleak did not write that on this machine, or somebody changed it since: run the "
        "experiment here, or share the key of the machine that did (FEDLEAK_SEAL_KEY)"
    )
    folder, names = run.path / "vault", []
    folder.mkdir()
    for client, more in enumerate(["", "", "", " and 1 more"]):
        (folder / f"r0001-c0{client}.json").write_text("{}")
        names.append(f"vault/r0001-c0{client}.json")
        check = genuine(evidence_of({}, folder=run.path))
        assert check == Check("written here", UNTOLD, ", ".join(names[:3]) + more + explanation)


def written(folder: Path, evidence: Evidence) -> Evidence:
    """Returns evidence of a run in whose folder scoring has written just that."""
    run, rows = run_of(folder, evidence.experiment), evidence.rows
    score_files.write(run, rows, evidence.summary)
    return replace(evidence, run=run)


def canary_row(score: float) -> CanaryRow:
    return CanaryRow(
        round=1, client=0, slot=0, audited_copy=False, whole=False, rate=None, steps=1, uses=1,
        numbers=9, noise_share=None, inside=(True,), scores=(score,), witnesses=(),
    )  # fmt: skip


def member_row(score: float) -> MembershipRow:
    return MembershipRow(
        round=1, client=0, attack="membership", texts=(0,), inside=(True,), pairs=(),
        scores={"loss": (score,)},
    )  # fmt: skip


def test_each_file_that_scoring_wrote_is_what_the_answers_give(tmp_path: Path) -> None:
    about = {"round": 1, "client": 0, "defense": 0, "kind": "clip"}
    rows = ScoredRows(
        leakage=[row("dlg", 0, MISSED)],
        ledger=of_ledger(0),
        defended=[DefenseRow(**about, norm=1.0)],
        canary=[canary_row(0.5)],
        members=[member_row(0.5)],
    )
    others: dict[str, Sequence[Any]] = {
        "leakage": [row("dlg", 0, READ)],
        "ledger": of_ledger(1),
        "defended": [DefenseRow(**about, norm=1.001)],
        "canary": [canary_row(0.25)],
        "members": [member_row(0.25)],
    }
    same = replace(evidence_of({}, held_out=3), rows=rows)
    scored = written(tmp_path / "run", same)
    fine = Check("figures", WITHIN, "scored anew, and the files say the same")
    assert figures(scored, accept_purged=False) == fine
    rounded = replace(rows, leakage=[row("dlg", 0, (False, 10.0 + 1e-12, 0.2))])
    assert figures(replace(scored, rows=rounded), accept_purged=False) == fine
    remedy = (
        ": not what the answers, the captures and the vault give: `fedleak score "
        f"{scored.run.path}` writes it anew, once you know who changed what"
    )

    def changed(evidence: Evidence) -> str:
        check = figures(evidence, accept_purged=False)
        assert check.outcome is UNTOLD
        return check.sentence.removesuffix(remedy)

    names = ["leakage.jsonl", "privacy.jsonl", "defenses.jsonl", "canaries.jsonl"]
    names.append("membership.jsonl")
    for field, name in zip(others, names, strict=True):
        altered = replace(scored, rows=replace(rows, **{field: others[field]}))
        assert changed(altered) == name
    everything = replace(scored, rows=ScoredRows(**others), summary=summary_of(held_out=4))
    assert changed(everything) == ", ".join([*names, "summary.json"])
    # When and with what command it was scored does not matter.
    sentences = {
        "status": "running", "fedleak": "9", "missing": ("a",), "notes": ("b",), "unscored": 2
    }  # fmt: skip
    summary = scored.summary.model_copy(update=sentences)
    assert figures(replace(scored, summary=summary), accept_purged=False) == fine
    (scored.run.path / "summary.json").unlink()
    gone = figures(scored, accept_purged=False)
    assert gone.outcome is UNTOLD
    assert "summary.json" in gone.sentence


def test_figures_agree_but_for_rounding(tmp_path: Path) -> None:
    def agree(mine: float, file: float) -> bool:
        utility = Utility(round=1, loss=mine)
        evidence = written(tmp_path / f"{mine}-{file}", evidence_of({}, utility=utility))
        other = evidence.summary.model_copy(update={"utility": Utility(round=1, loss=file)})
        return figures(replace(evidence, summary=other), accept_purged=False).passed

    assert agree(1000.0, 1000.0 + 5e-7)  # relative to what is large
    assert not agree(1000.0, 1000.0 + 5e-6)
    assert agree(0.0, 5e-10)  # and absolute where it is small
    assert not agree(0.0, 5e-9)


def test_figures_of_a_purged_run_are_those_that_were_left(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", parse(tables()))
    evidence = evidence_of({}, [row("dlg", 0, MISSED)], folder=run.path, purged="a day")
    before = (
        "not checked again: the private data was purged on a day, and the figures rest on the rows "
        "that were written before"
    )
    accepted = f"{before}; --purged takes them as they are"
    asks = f"{before}: --purged takes them as they are"
    other = "rows are not those that were there when the run was purged"
    assert figures(evidence, accept_purged=True) == Check("figures", UNTOLD, other)
    assert figures(evidence, accept_purged=False).sentence == f"{asks}; {other}"
    run.update_info(figures=evidence.mark)
    assert figures(evidence, accept_purged=True) == Check("figures", WITHIN, accepted)
    assert figures(evidence, accept_purged=False) == Check("figures", UNTOLD, asks)


def test_the_digest_changes_with_experiment_limits_and_figures() -> None:
    rows, limits = [row("dlg", 0, MISSED)], {"exact": 0.5}
    evidence = evidence_of({}, rows)
    digest = evidence.digest(limits)
    assert re.fullmatch("[0-9a-f]{16}", digest)
    assert evidence_of({}, rows, notes=("a",)).digest(limits) == digest
    others = [
        evidence.digest({"exact": 0.25}),
        evidence_of({"seed": 1}, rows).digest(limits),
        evidence_of({}, rows, held_out=1).digest(limits),
        replace(evidence, rows=ScoredRows(leakage=rows, ledger=of_ledger(0))).digest(limits),
    ]
    assert len({digest, *others}) == 5
    value = [
        evidence.experiment.fingerprint,
        limits,
        evidence.mark,
        evidence.summary.model_dump(
            mode="json", exclude={"status", "fedleak", "missing", "notes", "unscored", "looked_for"}
        ),
    ]
    expected = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    assert expected.startswith(digest)


def test_an_attack_is_of_the_kind_that_answered_unless_the_experiment_names_it() -> None:
    answers = [
        answer_of(1, 0, attack="mine", settings={"kind": "tag"}),
        answer_of(1, 0, attack="dlg", settings={"kind": "lamp"}),
        answer_of(1, 0, attack="old", settings={}),
    ]
    evidence = evidence_of({"attack": [DLG]}, answers=answers)
    assert evidence.kinds == {"mine": "tag", "dlg": "dlg", "old": "None", "probes": "probes"}


# --- all of it ------------------------------------------------------------------------------------


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Two clients whose noisy updates two attacks were tried on; nobody trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    changes = {
        "attack": [DLG, DLG | {"name": "again"}],
        "defense": [{"kind": "gaussian_noise", "sigma": 1.0}],
        "gate": {"exact": 0.9, "may_abstain": ["again"], "seconds": 60.0},
    }
    experiment = parse(tables(changes))
    truths = [truth_of(1, client, [(2, 50 + client, 60, 3)]) for client in (0, 1)]
    settings_of = {
        named_attack.name: settings(named_attack.attack) for named_attack in experiment.attacks
    }
    guesses = {"dlg": [(2, 50, 70, 3)], "again": [(2, 70, 3)]}
    answers = [
        answer_of(1, client, guess, attack=name, settings=settings_of[name])
        for client in (0, 1)
        for name, guess in guesses.items()
    ]
    answers += [
        answer_of(1, client, tokens=[50, 60], attack="probes", settings=settings_of["probes"])
        for client in (0, 1)
    ]
    keys = [Key(1, 0), Key(1, 1)]
    run = run_of(tmp_path / "built", experiment, truths, answers, keys)
    run.update_info(examples={"training": 2, "held_out": 4})
    run.write_json("held_out.json", {"sequences": [(2, 80, 3)] * 4, "labels": [0] * 4})
    run.append(UTILITY, *(Utility(round=number, accuracy=0.5) for number in (0, 1)))
    for key in keys:
        run.defended.write(
            key,
            {"fingerprint": experiment.fingerprint, "defenses": [], "training": {}, "events": []},
        )
    scoring.score_run(run)
    return run


SAID = """\
written here: fedleak wrote on this machine all that figures rest on, and nobody changed it
own: captures and answers are of this experiment and its settings
complete: the run is finished and nothing is missing
clients: every client was attacked, or one with the same defenses: 2 of them
texts: fewer than 10 clients and fewer than 20 texts: an example, not a rate
alarms: no other row of the run says that more was to be read
attack again: it answered 2 of 2 updates
attack dlg: it answered 2 of 2 updates
attack probes: it answered 2 of 2 updates
positive control: no undefended copies were attacked, so these attacks may be unable to read \
anything: `fedleak attack built --positive-control` tells
attackers: the limits hold for again, dlg, probes alone: auto, the strongest attacker here, is not \
among them
"""


def said_by(run: Run, *first: str) -> list[list[str]]:
    """Returns name and sentence of each check, after those of the limits."""
    lines = [*first, "figures: scored anew, and the files say the same", *SAID.splitlines()]
    return [line.split(": ", 1) for line in lines]


def test_the_gate_prints_each_check_and_what_they_rest_on(built: Run) -> None:
    high = built.read_document(SUMMARY).worst_case.exact_match.high
    read = f"share of texts read word for word: 0, with its interval up to {high:.3g}; limit"
    status, text, errors = call(
        "gate", "built", "--set", "gate.exact=0.1", '--set', 'gate.require=["auto", "canary"]',
        "--junit", "gate.xml",
    )  # fmt: skip
    checks = said_by(
        built,
        f"exact: {read} 0.1",
        "required auto: no attack of this kind answered for 2 of 2 updates",
        "canaries of clients: there are no canaries: the file has no [canary]",
    )
    marks = dict.fromkeys([name for name, _ in checks], "within") | {
        "exact": "EXCEEDED", "required auto": "NOT TOLD", "canaries of clients": "NOT TOLD",
        "texts": "NOT TOLD", "positive control": "NOT TOLD",
    }  # fmt: skip
    limits = (
        "exact 0.1 (command line); require auto, canary (command line); seconds 60.0 ([gate] of "
        "run.json); may_abstain again ([gate] of run.json)"
    )
    *lines, digest = text.splitlines()
    assert lines == [
        *(f"{marks[name]}  {name}: {sentence}" for name, sentence in checks), f"limits: {limits}"
    ]  # fmt: skip
    assert re.fullmatch(r"digest: [0-9a-f]{16} \(SHA-256 of limits and figures\)", digest)
    closing = "exact, required auto, canaries of clients, texts, positive control"
    assert errors == f"fedleak: the gate is closed, because of: {closing}\n"
    assert status == 3

    counts = {"tests": str(len(checks)), "failures": "1", "errors": "4"}
    suites = ElementTree.parse("gate.xml").getroot()
    (suite,) = suites
    assert (suites.tag, suites.attrib) == ("testsuites", counts)
    assert (suite.tag, suite.attrib) == ("testsuite", {"name": "built", **counts})
    properties, *cases = suite
    assert [(element.tag, element.attrib) for element in properties] == [
        ("property", {"name": "limits", "value": limits}),
        ("property", {"name": "digest", "value": digest.removeprefix("digest: ")}),
    ]
    kinds = {"EXCEEDED": ("failure", "exceeded"), "NOT TOLD": ("error", "untold")}
    for case, (name, sentence) in zip(cases, checks, strict=True):
        about = {"classname": "fedleak.gate.built", "name": name}
        assert (case.tag, case.attrib) == ("testcase", about)
        (entry,) = case
        if marks[name] == "within":
            assert (entry.tag, entry.attrib, entry.text) == ("system-out", {}, sentence)
        else:
            tag, kind = kinds[marks[name]]
            assert (entry.tag, entry.attrib) == (tag, {"type": kind, "message": sentence})


def test_an_open_gate_says_so(built: Run) -> None:
    built.update_info(experiment=built.info()["experiment"] | {"gate": {"require": ["dlg"]}})
    status, text, errors = call("gate", "built")
    assert (status, errors) == (0, "")
    first, *others, limits, _, ends = text.splitlines()
    assert first == "within  required dlg: it answered for all 2 updates"
    assert [line.split(": ")[0] for line in others] == [
        "within  figures", "within  written here", "within  own", "within  complete"
    ]  # fmt: skip
    assert limits == (
        "limits: require dlg ([gate] of run.json); seconds 120.0 ([gate] of run.json); may_abstain "
        "none ([gate] of run.json)"
    )
    assert ends == "the gate is open: these attacks read no more than the limits allow"


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ({"epsilon": 8.0}, "epsilon"),
        ({"auc": 1.0}, "auc clients attacks"),
        ({"coverage": 0.0}, "clients coverage attacks"),
        ({"rougeL": 99.0}, "rougeL clients texts alarms attacks control"),
        (
            {"token_recall": 1.0, "mcc": 0.0},
            "token_recall mcc clients texts alarms attacks control",
        ),
    ],
)
def test_limits_on_attacks_need_what_says_that_attacks_were_free_to_work(
    built: Run, limits: Mapping[str, float], names: str
) -> None:
    verdict = judge(built, GateTable(**limits))
    several = {
        "attacks": ["attack again", "attack dlg", "attack probes"],
        "control": ["positive control", "attackers"],
    }
    expected = [name for part in names.split() for name in several.get(part, [part])]
    of_run = ["figures", "written here", "own", "complete"]
    shown = [check.name for check in verdict.checks]
    assert [name for name in shown if name not in of_run] == expected
    assert [name for name in shown if name in of_run] == of_run


def test_a_gate_without_a_limit_and_names_of_nobody_are_refused(built: Run) -> None:
    with pytest.raises(ConfigError) as refused:
        judge(built, GateTable(seconds=5.0, may_abstain=["dlg"]))
    assert str(refused.value) == (
        "there is no limit: give --set gate.exact=0.01, for example, or a [gate] in the experiment "
        "file (limits: exact, rougeL, token_recall, personal_data, epsilon, canary, auc, tpr, "
        "exposure, extracted, perplexity, alarms, accuracy, f1, mcc, coverage, seconds)"
    )
    for wrong in ({"require": ["dgl"]}, {"may_abstain": ["dgl"]}):
        with pytest.raises(ConfigError, match="did you mean 'dlg'"):
            judge(built, GateTable(exact=1.0, **wrong))
    with pytest.raises(ConfigError):
        judge(Run(built.path.parent), GateTable(exact=1.0))


def test_a_run_that_cannot_be_scored_closes_the_gate_and_has_no_digest(built: Run) -> None:
    (built.path / "reconstructions.jsonl").write_text("{\n")
    verdict = judge(built, GateTable(exact=1.0))
    (check,) = verdict.checks
    assert (check.name, check.outcome, verdict.digest) == ("figures", UNTOLD, None)
    assert "reconstructions.jsonl" in check.sentence


def test_every_attack_that_answered_has_to_have_answered_for_all(built: Run) -> None:
    """Also one that the experiment does not name."""
    built.append(records.answers(built.fingerprint()), answer_of(1, 0, tokens=[50], attack="late"))
    checks = {check.name: check for check in judge(built, GateTable(exact=1.0)).checks}
    assert checks["attack late"].sentence == "it has no answer for 1 of 2 updates"
    assert checks["complete"].sentence.startswith("1 thing is missing or wrong: ")
