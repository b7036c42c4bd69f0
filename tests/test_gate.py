"""The gate: what opens it, what closes it, and that nobody can cheat it."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cases import some
from tiny import DLG, TABLES, Here, call, toml

from fedleak.attacks.reconstruction import Status
from fedleak.audit import scoring
from fedleak.audit.estimates import Largest
from fedleak.audit.gate.check import Check, Outcome
from fedleak.audit.gate.control import with_abstentions
from fedleak.audit.gate.evidence import Evidence, gather
from fedleak.audit.gate.judge import Verdict, judge
from fedleak.audit.gate.limits import limit_checks
from fedleak.audit.gate.measured import measured_checks, required_checks
from fedleak.audit.worst_case import worst_case
from fedleak.config.federation.lookup import stored
from fedleak.config.loading import limited, parse
from fedleak.config.tables import GateTable
from fedleak.report import ci
from fedleak.running.dispatch import dispatcher
from fedleak.store.records import Answer, LeakageRow, answers
from fedleak.store.run import Run
from fedleak.store.summaries import (
    SUMMARY,
    CanaryBound,
    CanarySummary,
    CopiesRead,
    Estimate,
    MembershipFigures,
    MembershipSummary,
    PersonalData,
    PositiveControl,
)

ENOUGH: dict[str, Any] = {
    "data": {"name": "builtin/notes", "samples": 20, "held_out": 4},
    "federation": {"clients": 10, "rounds": 1, "batch_size": 2},
    "threat": {"knows": ["labels", "lengths"]},
    "attack": [DLG],
    "defense": [{"kind": "gaussian_noise", "sigma": 1.0}],
}
"""Ten clients with two texts each, of whose noisy updates nobody reads anything."""

TWO: dict[str, Any] = {
    "data": {"name": "builtin/notes", "samples": 4, "held_out": 4},
    "federation": {"clients": 2, "rounds": 1, "batch_size": 2},
}
"""Two clients, where it does not matter how many there are."""


@pytest.fixture(scope="module", autouse=True)
def model(saved: Callable[..., str]) -> None:
    """Makes a model of one layer, which is enough for the attack of most tests."""
    ENOUGH["model"] = {"name": saved("bert", layers=1)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attacks are taken to be able to read: tests/audit/test_positive_control.py asks that."""
    monkeypatch.setattr("fedleak.audit.gate.judge.control_checks", lambda *_: [])


def trained(changes: Mapping[str, Any] | None = None, status: int = 0) -> None:
    """Runs the experiment with these changes, in the current folder."""
    Path("small.toml").write_text(toml(ENOUGH | dict(changes or {})))
    assert call("run", "small.toml", "--fresh")[0] == status


@pytest.fixture(scope="module")
def trained_once(model: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with enough clients and texts."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dispatcher, "hire", lambda *_: nullcontext([Here()]))
        trained()
    return folder


@pytest.fixture
def judged_run(folder: Path, in_process: None, trained_once: Path) -> Path:
    shutil.copytree(trained_once, folder, dirs_exist_ok=True)
    return folder / "runs" / "small"


@pytest.fixture(scope="module")
def scored(trained_once: Path) -> Evidence:
    """The same run, scored anew."""
    return gather(Run(trained_once / "runs" / "small"))


def verdict(*limits: str, may_abstain: Sequence[str] = (), accept_purged: bool = False) -> Verdict:
    run = Run(Path("runs/small"))
    changes = [f"gate.{limit}" for limit in limits]
    changes += [f"gate.may_abstain={json.dumps(may_abstain)}"] if may_abstain else []
    return judge(run, limited(stored(run).gate, changes), accept_purged=accept_purged)


def judged(*limits: str, **options: Any) -> dict[str, Check]:
    return {check.name: check for check in verdict(*limits, **options).checks}


def change_answers(run: Path, change: Callable[[Answer], Answer | None]) -> None:
    """Changes answers as somebody would who has the key of this machine."""
    at = Run(run)
    lines = answers(at.fingerprint())
    changed = [change(answer) for answer in at.rows(lines)]
    (run / lines.name).unlink()
    at.append(lines, *(answer for answer in changed if answer is not None))


def of(attack: str, **changes: Any) -> Callable[[Answer], Answer]:
    return lambda answer: answer.model_copy(update=changes if answer.attack == attack else {})


ABSTAINED = {"status": Status.ABSTAINED, "sequences": None, "tokens": None}


def test_the_upper_end_of_the_interval_decides(judged_run: Path) -> None:
    exact = Run(judged_run).read_document(SUMMARY).worst_case.exact_match
    assert exact.mean == 0 < exact.high < 1
    status, text, errors = call(
        "gate", str(judged_run), "--set", f"gate.exact={exact.high + 0.001}"
    )
    assert (status, errors) == (0, "")
    assert "within  exact: " in text
    assert "safe" not in text
    status, text, errors = call(
        "gate", str(judged_run), "--set", f"gate.exact={exact.high - 0.001}"
    )
    assert status == 3
    assert f"up to {exact.high:.3g}; limit" in text
    assert errors == "fedleak: the gate is closed, because of: exact\n"


def test_every_limit_is_compared(judged_run: Path) -> None:
    checks = judged("exact=0", "rougeL=0", "token_recall=0", "epsilon=8", "auc=1", "canary=1")
    assert {name: checks[name].outcome for name in ("exact", "rougeL", "token_recall")} == {
        "exact": Outcome.EXCEEDED, "rougeL": Outcome.EXCEEDED, "token_recall": Outcome.EXCEEDED
    }  # fmt: skip
    for name in ("epsilon", "auc", "canary"):
        assert checks[name].outcome is Outcome.UNTOLD
    assert "nothing is guaranteed" in checks["epsilon"].sentence
    assert checks["complete"].passed
    assert checks["texts"].passed
    assert checks["attack dlg"].sentence == "it answered 10 of 10 updates"


def test_an_epsilon_alone_needs_no_attack(folder: Path, in_process: None) -> None:
    noise = {"kind": "local_dp", "epsilon": 6.0, "max_norm": 1.0}
    trained(TWO | {"attack": [], "defense": [noise]})
    assert call("gate", "runs/small", "--set", "gate.epsilon=8")[0] == 0
    status, text, _ = call("gate", "runs/small", "--set", "gate.epsilon=2")
    assert status == 3
    assert "EXCEEDED  epsilon: epsilon 5.99" in text


def test_limits_of_the_file_are_those_of_the_gate_and_may_change(judged_run: Path) -> None:
    status, _, errors = call("gate", str(judged_run))
    assert status == 2
    assert "there is no limit" in errors
    Path("small.toml").write_text(toml(ENOUGH | {"gate": {"exact": 0.9}}))
    assert call("run", "small.toml")[0] == 0
    assert call("gate", str(judged_run))[0] == 0
    assert call("gate", str(judged_run), "--set", "gate.exact=0.001")[0] == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "gate.exact"], "write it as dotted.key=value"),
        (["--set", "gate.exact=much"], "gate.exact = 'much': input should be a valid number"),
        (["--set", "gate.exact=nan"], "finite number"),
        (["--set", "gate.exact=20"], "less than or equal to 1"),
        (["--set", "gate.exact=-1"], "greater than or equal to 0"),
        (["--set", "gate.exatc=0.1"], "did you mean 'exact'?"),
        (["--set", 'gate.may_abstain=["dagger"]', "--set", "gate.exact=1"], "attack 'dagger'"),
        (["--set", "federation.rounds=1"], "only gate can change here"),
        (["--set", "gate.exact=0.9", "--junit", "no/such/folder.xml"], "no/such/folder.xml"),
    ],
)
def test_a_wrong_limit_is_one_line(judged_run: Path, arguments: list[str], says: str) -> None:
    status, _, errors = call("gate", str(judged_run), *arguments)
    assert status == (1 if "--junit" in arguments else 2)
    assert says in errors
    assert errors.count("\n") == 1


# --- too little was measured to tell --------------------------------------------------------------


def test_few_texts_and_clients_close_it(folder: Path, in_process: None) -> None:
    trained(TWO)
    status, text, _ = call("gate", "runs/small", "--set", "gate.exact=1")
    assert status == 3
    assert "NOT TOLD  texts: fewer than 10 clients and fewer than 20 texts" in text


@pytest.mark.parametrize("kind", some(["auto", "dlg", "keyspan", "dager", "tag", "lamp"], every=6))
def test_an_attack_without_time_closes_it(folder: Path, in_process: None, kind: str) -> None:
    """Also beside one that answers."""
    # The own search of dlg ends before it looks at its clock.
    preset = {"preset": "faithful"} if kind == "dlg" else {}
    hurried = {"kind": kind, "seconds": 0.001} | preset
    spans = kind in ("dager", "keyspan")
    # Behind noise, or where words fill the row space, these two have nothing to search.
    wide = {"model": {"name": "builtin/bert-tiny"}, "defense": []} if spans else {}
    attacks = [DLG | {"name": "weak"}, hurried]
    trained(TWO | {"model": TABLES["model"], "attack": attacks} | wide)
    allowed = ["--set", f'gate.may_abstain=["{kind}"]'] if spans else []
    status, text, _ = call("gate", "runs/small", "--set", "gate.exact=1", *allowed)
    assert status == 3
    late = "its time (`seconds`) was up after 0.001 s on 2 of 2 updates: the gate asks for 120 s"
    assert f"NOT TOLD  attack {kind}: {late}" in text, text


def test_less_than_a_second_cannot_be_agreed(judged_run: Path) -> None:
    status, _, errors = call(
        "gate", str(judged_run), "--set", "gate.exact=1", "--set", "gate.seconds=0.001"
    )
    assert status == 2
    assert "greater than or equal to 1" in errors


def test_a_search_that_used_what_was_agreed_has_answered(scored: Evidence) -> None:
    rows = [
        row.model_copy(update={"diagnostics": {"time_up": True, "likely": [False, False]}})
        for row in scored.rows.leakage
        if row.attack == "dlg"
    ]
    agreed = [of("dlg", settings={"seconds": 30.0})(answer) for answer in scored.answers]
    late = replace(scored, answers=agreed, rows=replace(scored.rows, leakage=rows))

    def check(seconds: float) -> Check:
        checks = measured_checks(GateTable(seconds=seconds), late, {"exact"})
        return next(check for check in checks if check.name == "attack dlg")

    assert check(30).passed
    assert "10 of them with all of the 30 s that were agreed" in check(30).sentence
    assert check(31).outcome is Outcome.UNTOLD


def test_attacks_whose_workers_are_killed_close_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    Path("sitecustomize.py").write_text(
        f"import sys\nif any('spawn_main' in each for each in sys.orig_argv):\n    {killed}\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    )
    trained(TWO, status=1)
    status, text, errors = call("gate", "runs/small", "--set", "gate.exact=1")
    assert status == 3, text
    assert "NOT TOLD  attack dlg: it failed on 2 of 2 updates" in text
    assert "complete" in errors


@pytest.mark.slow
def test_a_time_limit_that_nobody_can_keep_closes_it(folder: Path) -> None:
    attack = {"kind": "dlg", "preset": "faithful", "steps": 100_000}
    limit = {"devices": ["cpu"], "time_limit": 0.001}
    trained(TWO | {"attack": [attack], "workers": limit}, status=1)
    assert call("gate", "runs/small", "--set", "gate.exact=1")[0] == 3


def test_an_abstention_closes_it_unless_it_may(judged_run: Path) -> None:
    change_answers(judged_run, of("probes", **ABSTAINED))
    assert judged("exact=1")["attack probes"].outcome is Outcome.UNTOLD
    checks = judged("exact=1", "token_recall=1", may_abstain=["probes"])
    assert checks["attack probes"].passed
    # Its tokens were all there was for one limit, but for those of the sequences.
    assert checks["texts"].passed


@pytest.mark.parametrize("limit", ["exact", "rougeL"])
def test_texts_without_a_sequence_close_it(judged_run: Path, limit: str) -> None:
    change_answers(
        judged_run,
        lambda answer: of("dlg", **ABSTAINED)(answer) if answer.client == 3 else answer,
    )
    checks = judged(f"{limit}=1", may_abstain=["dlg"])
    assert "2 of 20 texts: no attack named sequences" in checks["texts"].sentence
    assert not checks["texts"].passed


def test_an_abstention_of_the_strongest_is_an_answer_where_it_reads_undefended_copies(
    scored: Evidence,
) -> None:
    def closing(
        read: int, may_abstain: Sequence[str] = ("dlg",), kind: str = "auto"
    ) -> Mapping[str, Check]:
        reading = CopiesRead(read=read, exact=1.0, rougeL=100.0, token_recall=1.0)
        copies = PositiveControl(copies=3, texts=6, together=reading, attacks={"dlg": reading})
        rows = [
            row.model_copy(update={"status": Status.ABSTAINED, "texts": None})
            if row.attack == "dlg"
            else row
            for row in scored.rows.leakage
        ]
        summary = scored.summary.model_copy(
            update={"positive_control": copies, "worst_case": worst_case(rows, {}, Largest())}
        )
        table = scored.experiment.model_dump(mode="json")
        table["attack"] = [{"kind": kind, "name": "dlg"}]
        abstained = replace(
            scored,
            experiment=parse(table),
            rows=replace(scored.rows, leakage=rows),
            summary=summary,
        )
        counted = with_abstentions(abstained, may_abstain)
        limits = GateTable(exact=0.9, require=[kind], may_abstain=list(may_abstain))
        checks = [
            *limit_checks(limits, counted),
            *required_checks(limits, counted),
            *measured_checks(limits, counted, {"exact"}),
        ]
        return {check.name: check for check in checks if not check.passed}

    assert closing(3) == {}
    assert closing(2).keys() >= {"exact", "texts", "required auto"}
    assert closing(3, may_abstain=()).keys() >= {"exact", "texts", "attack dlg"}
    # Any noise ends the search of keyspan.
    assert closing(3, kind="keyspan").keys() >= {"exact", "texts", "required keyspan"}


def test_texts_without_tokens_close_it(scored: Evidence) -> None:
    rows = [row.model_copy(update={"texts": None}) for row in scored.rows.leakage]
    bare = replace(scored, rows=replace(scored.rows, leakage=rows))
    checks = {check.name: check for check in measured_checks(GateTable(), bare, {"token_recall"})}
    assert checks["texts"].sentence == "20 of 20 texts: no attack named tokens"
    assert "`fedleak score` adds them" in checks["attack dlg"].sentence


def test_probes_alone_say_nothing_of_whole_texts(folder: Path, in_process: None) -> None:
    trained({"attack": [], "defense": []})
    checks = judged("exact=1", "token_recall=1")
    assert checks["exact"].outcome is Outcome.UNTOLD
    assert checks["token_recall"].outcome is Outcome.WITHIN
    assert checks["texts"].outcome is Outcome.UNTOLD


def test_clients_unlike_those_attacked_are_named_and_close_it(scored: Evidence) -> None:
    def check(defended: list[int] | None, attacked: list[int] | None) -> Check:
        noise = {"kind": "gaussian_noise", "sigma": 1.0, "clients": defended}
        table = scored.experiment.model_dump(mode="json")
        table["defense"] = [{key: value for key, value in noise.items() if value is not None}]
        table["threat"]["clients"] = attacked
        checks = measured_checks(GateTable(), replace(scored, experiment=parse(table)), ())
        return next(check for check in checks if check.name == "clients")

    defended = list(range(8))
    assert check(defended, defended).sentence == (
        "clients 8, 9 use no defense and were never attacked, and no client like them was: add one "
        "to threat.clients"
    )
    assert check(defended, [0, 9]).passed
    assert check(None, [0]).passed


def test_alarms_of_other_rows_close_it(scored: Evidence) -> None:
    def check(change: Callable[[LeakageRow], Mapping[str, Any]], limit: str = "exact") -> Check:
        rows = [row.model_copy(update=change(row)) for row in scored.rows.leakage]
        changed = replace(scored, rows=replace(scored.rows, leakage=rows))
        checks = measured_checks(GateTable(), changed, {limit})
        return next(check for check in checks if check.name == "alarms")

    def swapped(row: LeakageRow) -> Mapping[str, Any]:
        return {"rougeL": 1.0, "control_rougeL": 60.0} if row.attack == "dlg" else {}

    def chance(row: LeakageRow) -> Mapping[str, Any]:
        return swapped(row) if row.client % 2 else {"control_rougeL": 0.0}

    def words_known(row: LeakageRow) -> Mapping[str, Any]:
        if row.attack == "dlg":
            return {"token_recall": 0.2}
        return {"token_recall": 1.0, "token_precision": 0.9}

    def all_words(row: LeakageRow) -> Mapping[str, Any]:
        return {**words_known(row), "token_precision": 0.01}

    assert check(lambda row: {}).passed
    assert (
        "dlg reads less of an update than its answer for another client" in check(swapped).sentence
    )
    assert check(chance).passed
    assert "probes found every token of 10 of 10 updates" in check(words_known).sentence
    assert check(all_words).passed  # whoever names every word finds every word
    assert check(words_known, "token_recall").passed


# --- limits besides leakage -----------------------------------------------------------------------


def compare(evidence: Evidence, **limits: Any) -> dict[str, Check]:
    table = GateTable(**limits)
    checks = [*limit_checks(table, evidence), *required_checks(table, evidence)]
    return {check.name: check for check in checks if not check.passed}


def test_membership_is_limited_by_its_best_score(scored: Evidence) -> None:
    sure, unsure = (Estimate(mean=mean, low=0.1, high=mean + 0.2) for mean in (0.7, 0.5))
    few = MembershipFigures(
        attack="membership", score="loss", updates=10, clients=10, members=20, controls=20,
        auc=unsure, rounds=(), roc=(), found_at_1_percent=None, found_at_01_percent=None,
        pairs=20, no_bound=None, p=1.0, epsilon=0.0,
    )  # fmt: skip
    best = few.model_copy(update={"score": "residual", "auc": sure, "found_at_1_percent": sure})
    figures = MembershipSummary(confidence=0.95, delta=1e-5, figures=(few, best))
    summary = scored.summary.model_copy(update={"membership": figures})
    evidence = replace(scored, summary=summary)
    assert compare(evidence, auc=0.9) == {}
    check = compare(evidence, auc=0.89)["auc"]
    assert check.outcome is Outcome.EXCEEDED
    assert "membership by residual: area under the ROC curve" in check.sentence
    assert compare(evidence, tpr=0.9)["tpr"].sentence == (
        "membership by loss: 20 members and 20 others are too few"
    )
    # What is not known does not hide what is exceeded.
    assert compare(evidence, tpr=0.5)["tpr"].outcome is Outcome.EXCEEDED
    assert compare(scored, auc=1.0)["auc"].outcome is Outcome.UNTOLD


def test_personal_data_is_limited_where_there_is_any(scored: Evidence) -> None:
    worst = scored.summary.worst_case
    assert worst is not None
    share = Estimate(mean=0.02, low=0.0, high=0.3)
    read = PersonalData(kinds={}, unanswered=0, read=share, control=None)

    def with_data(personal: PersonalData | None) -> Evidence:
        case = worst.model_copy(update={"personal": personal})
        summary = scored.summary.model_copy(update={"worst_case": case, "ladder": None})
        return replace(scored, summary=summary)

    assert compare(with_data(read), personal_data=0.3) == {}
    exceeded = compare(with_data(read), personal_data=0.29)["personal_data"]
    assert exceeded.outcome is Outcome.EXCEEDED
    assert "share of the personal data in the texts read: 0.02" in exceeded.sentence
    none = compare(with_data(None), personal_data=1.0)["personal_data"]
    assert none.outcome is Outcome.UNTOLD
    assert none.sentence == "no personal data was found in the private texts"
    unanswered = read.model_copy(update={"read": None, "unanswered": 3})
    assert compare(with_data(unanswered), personal_data=1.0)["personal_data"].outcome is (
        Outcome.UNTOLD
    )


def test_a_canary_bound_is_limited_and_of_every_client(scored: Evidence) -> None:
    bound = CanaryBound(
        client=-1, unit="example", canaries=64, updates=10, in_copies=False, epsilon=8.0,
        gaussian=None, f_dp=1.5, epsilon_delta=0.5,
    )  # fmt: skip
    everyone = (bound, *(bound.model_copy(update={"client": client}) for client in range(10)))

    def check(limit: float, bounds: tuple[CanaryBound, ...]) -> dict[str, Check]:
        canary = CanarySummary(confidence=0.95, delta=1e-5, bounds=bounds, alarms=())
        summary = scored.summary.model_copy(update={"canary": canary})
        return compare(replace(scored, summary=summary), canary=limit)

    assert check(1.5, everyone) == {}
    assert "canaries show 1.5 or more" in check(1.4, everyone)["canary"].sentence
    assert check(1.5, everyone[:-1])["canaries of clients"].sentence == (
        "clients without a scored canary: 9"
    )


def test_the_trained_model_is_measured_anew(judged_run: Path) -> None:
    accuracy = Run(judged_run).read_document(SUMMARY).utility.figures["accuracy"]
    assert judged(f"accuracy={accuracy}", "mcc=-1")["accuracy"].passed
    assert judged(f"accuracy={accuracy + 0.01}")["accuracy"].outcome is Outcome.EXCEEDED
    # Of a classifier there is no perplexity.
    assert judged("perplexity=100")["perplexity"].outcome is Outcome.UNTOLD
    (judged_run / "models" / "r0002.safetensors").unlink()
    assert judged("accuracy=0")["accuracy"].outcome is Outcome.UNTOLD


def test_coverage_counts_the_texts_of_all_rounds_and_clients(scored: Evidence) -> None:
    def check(coverage: float, evidence: Evidence) -> Check:
        checks = measured_checks(GateTable(coverage=coverage), evidence, ())
        return next(check for check in checks if check.name == "coverage")

    assert check(1, scored).passed
    rows = [row for row in scored.rows.leakage if row.client]
    without = replace(scored, rows=replace(scored.rows, leakage=rows))
    assert check(0.9, without).passed
    assert check(0.91, without).outcome is Outcome.EXCEEDED
    assert "an attack answered for 18 of 20 private texts" in check(0.91, without).sentence


def test_attacks_are_required_by_their_kind(scored: Evidence) -> None:
    assert compare(scored, require=["dlg"]) == {}
    sentence = compare(scored, require=["auto"])["required auto"].sentence
    assert sentence == "no attack of this kind answered for 10 of 10 updates"
    rows = [row.model_copy(update={"attack": "auto"}) for row in scored.rows.leakage]
    called = replace(scored, rows=replace(scored.rows, leakage=rows))
    assert "required auto" in compare(called, require=["auto"])


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        ({"may_abstain": ["dagger"]}, "gate.may_abstain: unknown attack 'dagger'"),
        ({"require": ["lamp"]}, "gate.require: unknown kind of attack 'lamp'"),
        ({"exact": 20}, "less than or equal to 1"),
        ({"auc": -0.1}, "greater than or equal to 0"),
        ({"seconds": 0.5}, "greater than or equal to 1"),
    ],
)
def test_a_wrong_gate_is_refused_before_training(
    folder: Path, gate: Mapping[str, Any], says: str
) -> None:
    Path("small.toml").write_text(toml(ENOUGH | {"gate": gate}))
    status, _, errors = call("run", "small.toml")
    assert status == 2
    assert says in errors
    assert not (folder / "runs").exists()


# --- what nobody cheats ---------------------------------------------------------------------------


def test_an_honest_run_opens_it_and_nothing_is_written(judged_run: Path) -> None:
    def files() -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(judged_run.rglob("*"))
            if path.is_file()
        }

    before = files()
    checks = judged("exact=0.9")
    assert all(check.passed for check in checks.values()), checks
    assert files() == before


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def edit_lines(path: Path, change: Callable[[Any], Any]) -> None:
    changed = (change(json.loads(line)) for line in path.read_text().splitlines())
    path.write_text("".join(json.dumps(line) + "\n" for line in changed if line is not None))


def stale_figures(run: Path) -> str:
    """An attack is killed after it has read, before anybody scores it."""
    at = Run(run)
    lines = answers(at.fingerprint())
    given = [answer for answer in at.rows(lines) if answer.attack == "dlg"]
    at.append(
        lines,
        *(
            answer.model_copy(
                update={"attack": "late", "sequences": true_texts(at, answer), "verified": True}
            )
            for answer in given[:4]
        ),
    )
    return "exact"


def true_texts(run: Run, answer: Answer) -> Any:
    return tuple(map(tuple, run.vault.read_note(answer.key)["sequences"]))


def late_attack_is_not_complete(run: Path) -> str:
    stale_figures(run)
    return "complete"


def edited_summary(run: Path) -> str:
    def harmless(table: Any) -> Any:
        table["worst_case"]["rougeL"]["high"] = 0.0
        return table

    edit(run / "summary.json", harmless)
    return "figures"


def edited_rows(run: Path) -> str:
    edit_lines(run / "leakage.jsonl", lambda row: row | {"rougeL": 0.0})
    return "figures"


def deleted_rows(run: Path) -> str:
    edit_lines(run / "leakage.jsonl", lambda row: None if row["client"] == 3 else row)
    return "figures"


def deleted_figures(run: Path) -> str:
    (run / "summary.json").unlink()
    return "figures"


def files_of_another_experiment(run: Path) -> str:
    edit_lines(run / "reconstructions.jsonl", lambda row: row | {"fingerprint": "0" * 16})
    return "figures"


def captures_of_another_experiment(run: Path) -> str:
    for path in (run / "captures").iterdir():
        content = path.read_bytes()
        mark = Run(run).fingerprint().encode()
        path.write_bytes(content.replace(mark, b"0" * len(mark)))
    return "own"


def deleted_captures(run: Path) -> str:
    shutil.rmtree(run / "captures")
    return "complete"


def deleted_vault(run: Path) -> str:
    shutil.rmtree(run / "vault")
    return "complete"


def deleted_answers(run: Path) -> str:
    (run / "reconstructions.jsonl").unlink()
    return "complete"


def deleted_answers_of_an_attack(run: Path) -> str:
    change_answers(run, lambda answer: None if answer.attack == "dlg" else answer)
    scoring.score_run(Run(run))
    return "attack dlg"


def deleted_clients(run: Path) -> str:
    """Every trace of two clients, and whoever did it scores again."""
    for client in (3, 4):
        for path in run.rglob(f"r0001-c{client:02d}.*"):
            path.unlink()
    change_answers(run, lambda answer: None if answer.client in (3, 4) else answer)
    (run / "leakage.jsonl").unlink()
    scoring.score_run(Run(run))
    return "complete"


def edited_gate(run: Path) -> str:
    def loose(table: Any) -> Any:
        table["experiment"]["gate"] = {"exact": 1.0}
        return table

    edit(run / "run.json", loose)
    return "written here"


def edited_attacks(run: Path) -> str:
    """The attack that read is forgotten, with its answers."""

    def forgotten(table: Any) -> Any:
        table["experiment"]["attack"] = []
        return table

    edit(run / "run.json", forgotten)
    return "written here"


def edited_answers(run: Path) -> str:
    edit_lines(
        run / "reconstructions.jsonl", lambda row: row | {"verified": False, "sequences": []}
    )
    scoring.score_run(Run(run))
    return "written here"


def edited_truth(run: Path) -> str:
    for path in (run / "vault").glob("*.json"):
        edit(path, lambda table: table | {"sequences": [[1, 2] for _ in table["sequences"]]})
    scoring.score_run(Run(run))
    return "written here"


def weaker_settings(run: Path) -> str:
    change_answers(run, of("dlg", settings=DLG | {"steps": 1}))
    return "own"


def unfinished(run: Path) -> str:
    Run(run).update_info(status="interrupted")
    return "complete"


@pytest.mark.parametrize(
    "cheat",
    [
        stale_figures, late_attack_is_not_complete, edited_summary, edited_rows, deleted_rows,
        deleted_figures, files_of_another_experiment, captures_of_another_experiment,
        deleted_captures, deleted_vault, deleted_answers, deleted_answers_of_an_attack,
        deleted_clients, edited_gate, edited_attacks, edited_answers, edited_truth,
        weaker_settings, unfinished,
    ],
)  # fmt: skip
def test_nobody_cheats_it(judged_run: Path, cheat: Callable[[Path], str]) -> None:
    closing = cheat(judged_run)
    checks = judged("exact=0.31")
    assert not checks[closing].passed, checks


def test_an_experiment_that_was_changed_is_refused(judged_run: Path) -> None:
    def weaker(table: Any) -> Any:
        table["experiment"]["defense"] = []
        return table

    edit(judged_run / "run.json", weaker)
    status, _, errors = call("gate", str(judged_run), "--set", "gate.exact=1")
    assert status == 1
    assert "its experiment was changed after its updates were captured" in errors


def test_a_purged_run_opens_it_only_where_that_is_accepted(judged_run: Path) -> None:
    assert call("purge", str(judged_run))[0] == 0
    check = judged("exact=0.9")["figures"]
    assert check.outcome is Outcome.UNTOLD
    assert "not checked again: the private data was purged on" in check.sentence
    checks = judged("exact=0.9", accept_purged=True)
    assert all(check.passed for check in checks.values()), checks
    assert not judged("exact=0.1", accept_purged=True)["exact"].passed
    edited_rows(judged_run)
    assert not judged("exact=0.9", accept_purged=True)["figures"].passed


# --- for continuous integration -------------------------------------------------------------------


def test_junit_has_a_case_for_every_check(judged_run: Path) -> None:
    assert call("gate", str(judged_run), "--set", "gate.exact=0", "--junit", "gate.xml")[0] == 3
    suites = ElementTree.parse("gate.xml").getroot()
    (suite,) = suites
    assert (suites.tag, suite.tag, suite.get("name")) == ("testsuites", "testsuite", "small")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("10", "1", "0")
    rests_on, *cases_of_suite = suite
    assert [entry.get("name") for entry in rests_on] == ["limits", "digest"]
    assert "exact 0.0 (command line)" in rests_on[0].get("value")
    cases = {case.get("name"): [child.tag for child in case] for case in cases_of_suite}
    assert cases["exact"] == ["failure"]
    assert cases["attack dlg"] == ["system-out"]


def test_what_others_wrote_is_inert_in_reports(tmp_path: Path) -> None:
    hostile = "x\x1b[31m\n::stop-commands::t\r %0A <b a='1'>&]]>\ud800\ufffe\u202e"
    checks = [Check(hostile, Outcome.UNTOLD, hostile)]
    ci.write_junit(hostile, checks, {hostile: hostile}, tmp_path / "gate.xml")
    (suite,) = ElementTree.parse(tmp_path / "gate.xml").getroot()
    _, (error,) = suite
    assert "::stop-commands::" in error.get("message")
    assert "\n" not in error.get("message")
    (line,) = ci.annotations(hostile, checks)
    assert len(line.splitlines()) == 1
    assert line.startswith("::error title=fedleak gate%3A x")
    assert "%250A" in line


def test_github_gets_a_line_for_every_reason(
    judged_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    _, text, _ = call("gate", str(judged_run), "--set", "gate.exact=0", "--set", "gate.epsilon=8")
    annotations = [line for line in text.splitlines() if line.startswith("::error ")]
    assert [line.split("::")[2].split(":")[0] for line in annotations] == ["exact", "epsilon"]
