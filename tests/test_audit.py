"""`fedleak audit`: what fits into its time, and one run of it from a file to a page."""

import io
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import call, tables, toml

from fedleak.attacks.reconstruction import Status
from fedleak.cli.questions import ask
from fedleak.config import checks
from fedleak.config.experiment import Experiment
from fedleak.config.federation.schedule import expected_captures
from fedleak.config.federation.workload import outline
from fedleak.config.loading import load, parse
from fedleak.running.audit import begin, defenses, rehearsal
from fedleak.running.audit import plan as planning
from fedleak.running.audit.plan import Plan, plan, to_audit
from fedleak.running.audit.rehearsal import in_small, timings_of
from fedleak.running.workers import hiring
from fedleak.store.audits import AUDIT, REHEARSAL, Timings
from fedleak.store.records import Answer
from fedleak.store.run import Run
from fedleak.store.shards import read_answers
from fedleak.util.errors import ConfigError

pytestmark = pytest.mark.core

DP = [{"kind": "dp_sgd", "noise_multiplier": 1.0}]
BOTH = [{"kind": "auto"}, {"kind": "membership"}]


def experiment(**changes: Any) -> Experiment:
    """Eight clients, five rounds, and the attacks of every audit."""
    base = {"federation.clients": 8, "federation.rounds": 5, "data.samples": 32, "attack": BOTH}
    return parse(tables(base | changes))


QUICK = Timings(
    rehearsal=20.0,
    around=10.0,
    training=5.0,
    update=0.5,
    utility=0.25,
    attacks={"probes": 0.1, "membership": 1.0, "auto": 2.0},
)
LATE = QUICK.model_copy(
    update={
        "copies": {"probes": 0.1, "auto": 2.0},
        "attacks": {"probes": 0.1, "membership": 1.0, "auto": 10.0},
        "late": ("auto",),
    }
)


def seconds_of(decided: Plan) -> float:
    (table,) = (table for table in decided.experiment.attack if table["kind"] == "auto")
    return float(table["seconds"])


def test_all_clients_of_a_first_and_a_later_round_are_attacked_where_they_fit() -> None:
    decided = plan(experiment(), QUICK, 10)
    assert {key.round for key in expected_captures(decided.experiment)} == {1, 5}
    assert len(expected_captures(decided.experiment)) == 16
    assert seconds_of(decided) == 60
    parts = {part.what: part.seconds for part in decided.parts}
    assert parts["training: 5 rounds of 8 clients"] == 5 + 40 * 0.5 + 6 * 0.25
    assert parts["auto on 16 updates, 2.0 s each"] == 32
    assert sum(parts.values()) == pytest.approx(20 + 26.5 + 16 * 3.1 + 10 + 10)
    assert decided.left_out == (
        "3 rounds of 5: attacked are 1 and 5 (threat.rounds chooses others)",
        "undefended copies: the updates are undefended, so they are their own control",
    )


@pytest.mark.parametrize("minutes", [5, 10, 20, 60])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("timings", [QUICK, LATE])
def test_a_plan_fits_into_its_time(minutes: int, workers: int, timings: Timings) -> None:
    decided = plan(experiment(defense=DP), timings, minutes, workers)
    assert sum(part.seconds for part in decided.parts) <= 0.9 * 60 * minutes + 1e-6


def test_an_attack_whose_time_was_up_takes_all_of_it_on_fewer_clients() -> None:
    decided = plan(experiment(defense=DP), LATE, 10)
    keys = expected_captures(decided.experiment)
    assert {key.round for key in keys} == {1, 5}
    assert 60 <= seconds_of(decided) < 120
    assert len(keys) == 6  # of 540 s, 66 are for the rest: 474 / (60 + 1.1) and 6.3 for copies
    left_out = "10 updates of clients in these rounds: there is time for 3 clients"
    assert decided.left_out[0].startswith(left_out)
    # With an hour there is time for all, and more for each.
    hour = plan(experiment(defense=DP), LATE, 60)
    assert len(expected_captures(hour.experiment)) == 16
    assert seconds_of(hour) > 180


def test_the_minutes_that_are_named_have_time_for_all_clients() -> None:
    left_out = plan(experiment(defense=DP), LATE, 10).left_out[0]
    minutes = int(left_out.split("--minutes ")[1].split()[0])
    assert len(expected_captures(plan(experiment(defense=DP), LATE, minutes).experiment)) == 16


def test_a_gate_that_limits_reading_gets_the_seconds_that_it_asks_for() -> None:
    gated = experiment(defense=DP, gate={"exact": 0.1, "seconds": 150.0})
    assert seconds_of(plan(gated, LATE, 20)) >= 150
    short = plan(gated, LATE, 4)
    assert any("it wants 150 s" in sentence for sentence in short.left_out)


def test_the_time_that_a_file_gives_an_attack_stays() -> None:
    own = [{"kind": "auto", "seconds": 33.0}, {"kind": "membership"}]
    decided = plan(experiment(defense=DP, attack=own), LATE, 10)
    assert seconds_of(decided) == 33
    assert "auto on 12 updates, 33.0 s each" in [part.what for part in decided.parts]


def test_rounds_and_clients_of_the_file_stay() -> None:
    chosen = experiment(**{"threat.rounds": [2], "threat.clients": [3, 4]})
    keys = expected_captures(plan(chosen, QUICK, 10).experiment)
    assert [(key.round, key.client) for key in keys] == [(2, 3), (2, 4)]


def test_a_client_of_each_group_with_the_same_defenses_comes_first() -> None:
    mixed = experiment(defense=[DP[0] | {"clients": [0, 1, 2, 3, 4, 5, 6]}])
    few = plan(mixed, LATE, 6)
    assert {0, 7} <= {key.client for key in expected_captures(few.experiment)}


def test_what_cannot_fit_is_refused_with_the_minutes_that_it_takes() -> None:
    slow = QUICK.model_copy(update={"update": 30.0})
    with pytest.raises(ConfigError, match=r"training takes about 20 min: give --minutes 24"):
        plan(experiment(), slow, 10)
    assert expected_captures(plan(experiment(), slow, 24).experiment)
    waited = LATE.model_copy(update={"rehearsal": 250.0})
    with pytest.raises(ConfigError, match=r"no update can be attacked in 5 minutes.*--minutes 6"):
        plan(experiment(defense=DP), waited, 5)
    assert expected_captures(plan(experiment(defense=DP), waited, 6).experiment)


def test_noise_gets_canaries_and_what_cannot_be_is_said() -> None:
    plain, none = to_audit(parse(tables()), outline(parse(tables()), 2))
    assert [named.attack.kind for named in plain.attacks] == ["probes", "auto", "membership"]
    assert (plain.canary, none) == (None, [])
    noisy = parse(tables({"defense": DP}))
    assert to_audit(noisy, outline(noisy, 2))[0].canary is not None
    _, left_out = to_audit(noisy, outline(noisy, 2), trained=True)
    assert left_out == ["canaries: clients take them in while they train, and that is over"]
    deleting = parse(tables({"defense": DP, "audit.keep": "none"}))
    unable, left_out = to_audit(deleting, outline(deleting, 2))
    assert unable.canary is None
    assert left_out[0].startswith("canaries: audit.keep = 'none' deletes captures")


def test_a_rehearsal_is_one_client_a_round_and_attacks_its_last_update() -> None:
    small = in_small(experiment(attack=[{"kind": "auto", "seconds": 90.0}, {"kind": "dager"}]))
    assert [(key.round) for key in expected_captures(small)] == [3]
    assert [table.get("seconds") for table in small.attack] == [rehearsal.SECONDS] * 2
    summed = in_small(experiment(defense=[{"kind": "secure_sum"}]))
    assert summed.clients_per_round == 8


def answer(attack: str, seconds: float, **diagnostics: Any) -> Answer:
    return Answer(
        round=1, client=0, attack=attack, settings={}, granted=(), knows=(), seconds=seconds,
        device="cpu", status=Status.RECOVERED, sequences=None, margins=(), tokens=None, facts={},
        diagnostics=diagnostics, verified=False, reason="",
    )  # fmt: skip


def test_the_parts_of_a_rehearsal_add_up_to_what_it_took() -> None:
    # Loaded for 4 s; clients are asked at 10, 13, 15; the last update, the utility, the end.
    moments = [6.0, 10.0, 13.0, 15.0, 18.0]
    given = [answer("probes", 1.0), answer("auto", 10.0, time_up=True)]
    timings = timings_of(40.0, moments, given, [answer("auto", 2.0)], in_small(experiment()))
    assert (timings.update, timings.utility) == (2.0, 1.0)
    assert timings.training == 12 - 3 * 2.0 - 2 * 1.0
    assert timings.around == 40 - 12 - 13
    assert (timings.attacks, timings.copies) == ({"probes": 1.0, "auto": 10.0}, {"auto": 2.0})
    assert (timings.late, timings.late_copies) == (("auto",), ())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment file; attacks run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hiring, "hire", lambda *_: nullcontext([tiny.Here()]))
    Path("small.toml").write_text(toml({"attack": None}))
    return tmp_path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which that file was audited once, and what was printed."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(hiring, "hire", lambda *_: nullcontext([tiny.Here()]))
        Path("small.toml").write_text(toml({"attack": None}))
        status, text, errors = call("audit", "small.toml")
    assert (status, errors) == (0, "")
    return folder, text


@pytest.fixture
def audited(here: Path, first: tuple[Path, str]) -> Run:
    """The run of that audit, in a folder of its own."""
    shutil.copytree(first[0] / "runs", here / "runs")
    return Run(here / "runs/small-audit")


def test_one_command_goes_from_a_file_to_a_page(first: tuple[Path, str]) -> None:
    folder, text = first
    run = Run(folder / "runs/small-audit")
    audit = run.read_document(AUDIT)
    assert audit.page is not None
    assert audit.page.headline == "2 of 2 private texts were read word for word"
    assert text.index("The plan of the audit") < text.index(audit.page.headline)
    assert text.count("The plan of the audit") == 1
    took = f"{audit.estimate:,.0f} s were planned for all of it, and it took {audit.seconds:,.0f} s"
    assert took in text
    assert {*audit.page.paragraphs} >= {"Read", "Who was in", "Guaranteed", "Model", "Next"}
    assert audit.seconds is not None
    assert 0 < audit.estimate < 540
    page = (run.path / "report.html").read_text()
    assert audit.page.headline in page
    assert "The plan of the audit, for 10 minutes" in page
    assert [path.name for path in (folder / "runs").iterdir()] == ["small-audit"]


def test_an_audit_that_was_stopped_goes_on_with_its_plan(audited: Run) -> None:
    planned = audited.read_document(AUDIT).model_copy(update={"seconds": None, "page": None})
    audited.write(AUDIT, planned)
    file = audited.path / "reconstructions.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    status, text, _ = call("audit", "small.toml")
    assert status == 0
    assert "It was stopped and went on" in " ".join(text.split())
    audit = audited.read_document(AUDIT)
    assert (audit.parts, audit.seconds) == (planned.parts, None)
    after = file.read_bytes().splitlines(keepends=True)
    assert (after[:-1], len(after)) == (lines[:-1], len(lines))


def test_an_audit_whose_time_is_up_ends_says_so_and_goes_on(
    audited: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = audited.read_document(AUDIT).model_copy(update={"seconds": None, "page": None})
    audited.write(AUDIT, planned)
    file = audited.path / "reconstructions.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-2]))
    Path("small.toml").write_text(toml({"attack": None, "gate": {"exact": 1.0}}))
    with monkeypatch.context() as patch:
        patch.setattr(planning, "STOPPED", 0.0)
        status, text, errors = call("audit", "small.toml")
    audit = audited.read_document(AUDIT)
    assert (status, audit.cut) == (3, True)
    assert "Its time was up before all of it was done" in " ".join(text.split())
    assert {check.name: check.outcome for check in audit.checks}["complete"] == "untold"
    Path("small.toml").write_text(toml({"attack": None}))
    with monkeypatch.context() as patch:
        patch.setattr(planning, "STOPPED", 0.0)
        status, text, errors = call("audit", "small.toml")
    assert status == 1
    assert "the run is not finished (interrupted)" in errors
    status, _, errors = call("audit", "small.toml")
    assert (status, errors) == (0, "")
    assert not audited.read_document(AUDIT).cut


def test_what_a_rehearsal_measured_outlives_a_refusal(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed: list[Path] = []

    def rehearse(experiment: Experiment, folder: Path, *_: Any) -> Timings:
        rehearsed.append(folder)
        return QUICK.model_copy(update={"update": 1e4})

    monkeypatch.setattr(begin, "rehearse", rehearse)
    for minutes in ("1", "2"):
        status, _, errors = call("audit", "small.toml", "--minutes", minutes)
        assert status == 2
        assert "of which training takes about" in errors
    assert len(rehearsed) == 1
    assert [path.name for path in rehearsed[0].iterdir()] == [REHEARSAL.name]
    call("audit", "small.toml", "--set", "seed=5")
    assert len(rehearsed) == 2


def test_a_rehearsal_ends_when_all_of_the_time_is_up(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "STOPPED", 0.0)
    status, _, errors = call("audit", "small.toml")
    assert (status, "a rehearsal with one client takes longer" in errors) == (2, True)
    assert [*Path("runs").iterdir()] == []


def test_a_search_for_a_defense_has_half_of_the_time() -> None:
    alone, shared = (plan(experiment(defense=DP), LATE, 20, share=s) for s in (1.0, 0.5))
    assert sum(part.seconds for part in shared.parts) <= 0.45 * 20 * 60
    assert len(expected_captures(shared.experiment)) < len(expected_captures(alone.experiment))
    slow = QUICK.model_copy(update={"update": 30.0})
    with pytest.raises(ConfigError, match="give --minutes 47"):
        plan(experiment(), slow, 24, share=0.5)
    assert plan(experiment(), slow, 47, share=0.5)


@pytest.mark.parametrize("arguments", [("--set", "seed=5"), ("--minutes", "20")])
def test_another_audit_of_the_same_name_is_refused(
    audited: Run, arguments: tuple[str, ...]
) -> None:
    status, _, errors = call("audit", "small.toml", *arguments)
    assert status == 2
    assert "holds another audit, of 10 minutes: the same file with the same --minutes" in errors


def test_the_gate_of_the_file_decides_the_status(audited: Run) -> None:
    limited, before = toml({"attack": None, "gate": {"exact": 0.1}}), audited.read_document(AUDIT)
    Path("small.toml").write_text(limited)
    status, text, errors = call("audit", "small.toml")
    assert status == 3
    assert "the gate is closed, because of: exact" in errors
    assert "The gate" in text
    audit = audited.read_document(AUDIT)
    assert {check.name: check.outcome for check in audit.checks}["exact"] == "exceeded"
    # It was done before, and how long it took stays.
    assert (audit.page, audit.seconds) == (before.page, before.seconds)
    # Limits may change without another audit.
    Path("small.toml").write_text(limited.replace("exact = 0.1", "accuracy = 0.0"))
    status, _, errors = call("audit", "small.toml")
    assert (status, errors) == (0, "")
    assert {check.outcome for check in audited.read_document(AUDIT).checks} == {"within"}


def test_without_a_leak_no_defense_is_tried(audited: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("small.toml").write_text(toml({"attack": None, "gate": {"exact": 1.0}}))
    status, text, errors = call("audit", "small.toml", "--defend")
    assert (status, "have 10 clients, or raise the limit" in errors) == (2, True)
    monkeypatch.setattr(defenses, "refuse_without_limits", lambda experiment: None)
    status, text, errors = call("audit", "small.toml", "--defend")
    assert (status, "exact" in errors) == (3, False)  # too few clients to tell, and no leak
    assert "no limit on what is read is exceeded, so no defense is tried" in text
    assert [path.name for path in Path("runs").iterdir()] == ["small-audit"]


def test_a_run_is_audited_as_it_is(here: Path, in_process: None) -> None:
    Path("small.toml").write_text(toml())
    assert call("run", "small.toml")[0] == 0
    status, text, errors = call("audit", "runs/small")
    assert (status, errors) == (0, "")
    assert "2 of 2 private texts were read word for word" in text
    run = Run(here / "runs/small")
    assert {answer.attack for answer in read_answers(run)} == {"probes", "auto", "membership"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "FILE is missing: questions are asked in a terminal only"),
        (("mine.csv",), "'mine.csv' is no experiment file: questions are asked in a terminal only"),
        (("update.safetensors",), "`fedleak attack-update` reads it"),
        (("nothing-here",), "nothing-here"),
        ((".",), "no run"),
        (("small.toml", "--defend"), "there is no limit that a defense has to keep"),
    ],
)
def test_what_cannot_be_audited_is_refused_in_one_line(
    here: Path, arguments: tuple[str, ...], says: str
) -> None:
    status, _, errors = call("audit", *arguments)
    assert status == 2
    assert says in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("training", ["gradients", "epochs", "adapters"])
@pytest.mark.parametrize("defense", ["none", "dp_sgd", "gaussian_noise", "secure_sum"])
def test_every_answer_to_the_five_questions_makes_an_experiment(
    here: Path, monkeypatch: pytest.MonkeyPatch, training: str, defense: str
) -> None:
    Path("mine.csv").write_text("Review,class\n" + "it is good,yes\nit is bad,no\n" * 20)
    answers = ["absent.csv", "mine.csv", "", "by mail", training, defense, "30"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(answers) + "\n"))
    file, minutes = ask(10)
    assert (file, minutes) == (Path("mine.toml"), 30)
    made = load(file)
    assert (made.data.text, made.data.label) == ("Review", "class")
    assert (made.model.name, made.model.task) == ("builtin/bert-tiny", "sequence-classification")
    assert (made.model.lora is not None) is (training == "adapters")
    assert made.federation.algorithm == ("fedsgd" if training == "gradients" else "fedavg")
    assert [placed.part.kind for placed in made.defenses] == [defense] * (defense != "none")
    model = outline(made, 2)
    checks.check_defenses(made, model)
    assert "membership" in [named.attack.kind for named in to_audit(made, model)[0].attacks]


def test_columns_are_asked_for_where_their_names_do_not_tell(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.csv").write_text("a,b\nit is good,1\n")
    Path("mine.toml").write_text("")
    answers = ["a", "none", "", "gradients", "none", ""]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(answers) + "\n"))
    with pytest.raises(ConfigError, match=r"'absent.csv': there is no such file"):
        ask(10, Path("absent.csv"))
    file, minutes = ask(10, Path("mine.csv"))
    assert (file, minutes) == (Path("mine-2.toml"), 10)
    made = load(file)
    assert (made.data.text, made.data.label, made.model.task) == ("a", None, "causal-lm")
