"""What each check of the gate says, word for word, of runs that nobody trained."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from built import answer_of, evidence_of, run_of, truth_of
from scored import row
from tiny import DLG, tables

from fedleak.audit.gate.check import Check, Outcome
from fedleak.audit.gate.evidence import Evidence
from fedleak.audit.gate.measured import measured_checks, required_checks
from fedleak.config.loading import parse
from fedleak.config.tables import GateTable
from fedleak.reconstruction import Status
from fedleak.store.records import UNSCORED, LeakageRow, LedgerRow
from fedleak.store.run import Key
from fedleak.store.summaries import CanaryBound, CanarySummary, Ladder, Rung

READ, MISSED = (True, 100.0, 1.0), (False, 10.0, 0.2)
WITHIN, EXCEEDED, UNTOLD = Outcome.WITHIN, Outcome.EXCEEDED, Outcome.UNTOLD
SIX: dict[str, Any] = {"federation.clients": 6, "attack": [DLG]}


def measured(
    evidence: Evidence, leaks: Sequence[str] = (), **limits: Any
) -> dict[str, tuple[Outcome, str]]:
    checks = measured_checks(GateTable(**limits), evidence, leaks)
    return {check.name: (check.outcome, check.said) for check in checks}


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
        "its time (`seconds`) was up on 2 of 6 updates: the gate asks for 120 s (--min, "
        "gate.seconds)",
        "it abstained on 1 of 6 updates, which is no evidence that nothing can be read: where the "
        "other attacks are enough for you, let it (--may-abstain, gate.may_abstain)",
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
    outcome, said = measured(evidence_of(SIX, rows))["attack dlg"]
    assert outcome is (UNTOLD if lacks else WITHIN)
    assert ("`fedleak score` adds them" in said) == bool(lacks)


def test_an_attack_of_a_rung_may_abstain_by_its_listed_name() -> None:
    rows = [row("dlg+all", client, status=Status.ABSTAINED, texts=None) for client in range(6)]
    checks = measured(evidence_of(SIX, rows), may_abstain=["dlg"])
    assert checks["attack dlg+all"] == (WITHIN, "it answered 0 of 6 updates")


@pytest.mark.parametrize(
    ("settings", "attack", "least", "says"),
    [
        ([{"seconds": 30}, {"seconds": 40.0}], DLG, 30, None),
        ([{"seconds": 40.0}, {"seconds": 30}], DLG, 40, "after 30 s "),
        ([{"seconds": None}], DLG, 1, ""),
        ([], DLG | {"seconds": 50.0}, 50, None),
        ([], DLG | {"seconds": 50.0}, 51, "after 50 s "),
    ],
)
def test_the_least_time_that_any_answer_was_given_is_what_was_agreed(
    settings: Sequence[Any], attack: Mapping[str, Any], least: float, says: str | None
) -> None:
    """Where no answer says it, the experiment does."""
    answers = [answer_of(1, client, settings=table) for client, table in enumerate(settings)]
    answers = [answer.model_copy(update={"attack": "dlg"}) for answer in answers]
    answers.append(answer_of(1, 5, attack="other", settings={"seconds": 0.1}))
    rows = [row("dlg", client, diagnostics={"time_up": client == 0}) for client in range(6)]
    evidence = evidence_of(
        SIX | {"attack": [{"kind": "tag", "seconds": 1.0}, attack]}, rows, answers
    )
    outcome, said = measured(evidence, seconds=least)["attack dlg"]
    if says is None:
        given = (
            f"it answered 6 of 6 updates, 1 of them with all of the {least:g} s that were agreed"
        )
        assert (outcome, said) == (WITHIN, given)
    else:
        assert (outcome, said) == (
            UNTOLD,
            f"its time (`seconds`) was up {says}on 1 of 6 updates: the gate asks for {least:g} s "
            "(--min, gate.seconds)",
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
    said = "every client was attacked, or one with the same defenses: 2 of them"
    assert measured(evidence_of(changes))["clients"] == (WITHIN, said)


def test_a_sum_is_of_all_clients() -> None:
    evidence = evidence_of({"threat.sees": "models"})
    said = "what was attacked is of all clients of a round"
    assert measured(evidence)["clients"] == (WITHIN, said)


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
    run.write_truth(Key(1, 2), truths[2].to_json())
    run.write_truth(Key(1, 3), truth_of(1, 3, texts[:2]).to_json())
    said = "an attack answered for 4 of 8 private texts; limit "
    assert measured(evidence, coverage=0.5)["coverage"] == (WITHIN, f"{said}0.5")
    assert measured(evidence, coverage=0.51)["coverage"] == (EXCEEDED, f"{said}0.51")


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
    said = "20 texts of 10 clients, by dlg, tag"
    assert measured(evidence, ["exact", "token_recall"])["texts"] == (WITHIN, said)


def test_texts_that_nobody_searched_close_the_limits_that_need_them() -> None:
    bags, silent = (None, None, 0.5), of_ten("dager", status=Status.ABSTAINED, texts=None)
    silent = [one.model_copy(update={"batch_size": 2}) for one in silent]
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
    said = "no attack gave an answer with scores of single texts"
    assert measured(evidence_of(TEN, silent), LIMITS)["texts"] == (UNTOLD, said)


def test_each_rung_has_its_own_texts() -> None:
    rungs = tuple(
        Rung(granted=granted, attacks=attacks, worst_case=None, worth=())
        for granted, attacks in (((), {"dlg": "dlg"}), (("labels",), {"dlg": "dlg+labels"}))
    )
    plain, told = of_ten("dlg", MISSED, MISSED), of_ten("dlg+labels", (None, None, 0.1), READ)
    whole = evidence_of(TEN, plain).summary.worst_case
    part = evidence_of(TEN, told).summary.worst_case
    rungs = tuple(
        rung.model_copy(update={"worst_case": worst})
        for rung, worst in zip(rungs, (whole, part), strict=True)
    )
    ladder = Ladder(rungs=rungs, left_out={}, correction="")
    texts = measured(evidence_of(TEN, [*plain, *told], ladder=ladder), LIMITS)["texts"]
    assert texts == (UNTOLD, "told labels: 10 of 20 texts: no attack named sequences")
    silent = [one.model_copy(update={"texts": None}) for one in told]
    top = rungs[1].model_copy(update={"worst_case": None})
    ladder = Ladder(rungs=(rungs[0], top), left_out={}, correction="")
    texts = measured(evidence_of(TEN, [*plain, *silent], ladder=ladder), LIMITS)["texts"]
    assert texts == (
        UNTOLD, "told labels: no attack gave an answer with scores of single texts"
    )  # fmt: skip
    # What others named does not count for a rung.
    ladder = Ladder(rungs=rungs, left_out={}, correction="")
    bare = [
        one.model_copy(
            update={
                "texts": tuple(t.model_copy(update={"token_recall": None}) for t in one.texts or ())
            }
        )
        for one in told
    ]
    texts = measured(evidence_of(TEN, [*plain, *bare], ladder=ladder), ["token_recall"])["texts"]
    assert texts == (UNTOLD, "told labels: 20 of 20 texts: no attack named tokens")


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
    said = (
        "dlg reads less of an update than its answer for another client's update holds, for 6 of 6 "
        "clients: its answers are not of the updates that they are said to be of"
    )
    assert alarm(apart("dlg", *[-1.0] * 6)) == (UNTOLD, said)
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
        one.model_copy(update={"round": number, "rougeL": rougeL})
        for number, rougeL in ((1, 0.0), (2, 60.0))
        for one in apart("dlg", *[0.0] * 6)
    ]
    assert alarm(rounds)[0] is UNTOLD  # 50 less and 10 more are less
    for name in ("rougeL", "control_rougeL"):
        assert alarm([one.model_copy(update={name: None}) for one in rounds]) == QUIET


def bag(client: int, recall: float | None, precision: float | None = 0.5) -> LeakageRow:
    return row(
        "probes", client, (None, None, recall), token_recall=recall, token_precision=precision
    )


def named(client: int, recall: float | None, attack: str = "dlg") -> LeakageRow:
    return row(attack, client, (False, 0.0, recall), rougeL=0.0, token_recall=recall)


def test_tokens_that_sequences_do_not_hold_are_an_alarm() -> None:
    unread = [bag(0, 1.0), named(0, 0.49), named(0, 0.0, "tag")]
    said = (
        "probes found every token of 1 of 2 updates, and the attacks that name sequences found "
        "less than half of them: they left unread what was there"
    )
    assert alarm([*unread, bag(1, 1.0), named(1, 0.5)]) == (UNTOLD, said)
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
        (found,) = required(evidence, require=["canary"])
        return found

    name = "canaries of clients"
    assert check(-1, 0, 1, 2) == Check(name, WITHIN, "canaries of all 3 clients were scored")
    assert check(-1, 0) == Check(name, UNTOLD, "clients without a scored canary: 1, 2")
    alarmed = check(-1, alarms=("one", "two"))
    assert alarmed == Check(name, EXCEEDED, "one; two")
