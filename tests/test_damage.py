"""A run directory whose files are damaged, missing, or of another experiment, and a purge.

Whatever is wrong: no traceback, the file and the remedy are named, and what was measured stays.
"""

import errno
import json
import os
import shlex
import shutil
import stat
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from cases import some
from tiny import DLG, Here, toml
from tiny import call as call_tiny

from fedleak.audit import score_files
from fedleak.config.loading import load
from fedleak.flower.engines import train
from fedleak.models import loading
from fedleak.running import pipeline, preparation
from fedleak.running import purge as purging
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.store.lines import Lines
from fedleak.store.run import Key, Run
from fedleak.util.errors import FedleakError

NOISY = {
    "kind": "dp_sgd",
    "noise_multiplier": 1.0,
    "max_grad_norm": 1.0,
    "sampling": "fixed",
    "clients": [1],
}
EXPERIMENT = {"defense": [NOISY], "attack": [DLG]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with an experiment and its finished run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(toml(EXPERIMENT))
    experiment, umask = load(folder / "small.toml"), os.umask(0o022)
    try:
        run = preparation.prepare(experiment, folder / "runs" / "small")
        pipeline.carry_out(run, experiment, train, Crew([Here()]))
    finally:
        os.umask(umask)
    return folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch, in_process):
    """A copy of the finished run, below the current folder; attacks run in this process."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path / "runs" / "small")


def call(*arguments: str) -> tuple[int, str, str]:
    """Calls the command line, which explains itself in one line."""
    status, printed, errors = call_tiny(*arguments)
    assert errors.count("\n") == (status != 0), errors
    assert status == 0 or errors.startswith("fedleak: ")
    return status, " ".join(printed.split()), errors


def call_on(run: Run, command: str) -> tuple[int, str, str]:
    return call("run", "small.toml") if command == "run" else call(command, str(run.path))


def scores(run: Run) -> dict[tuple[int, int, str], dict[str, object]]:
    """Returns the rows of leakage.jsonl without their times."""
    return {
        (row["round"], row["client"], row["attack"]): row | {"seconds": None}
        for row in run.rows(Lines("leakage.jsonl", dict))
    }


def texts(run: Run) -> list[str]:
    """Returns the private texts of a run, as text and as ids."""
    model = loading.outline(load(Path("small.toml")).model_spec(2))
    sequences = [
        ids for key in run.vault.all_keys() for ids in run.vault.read_note(key)["sequences"]
    ]
    return [model.decode(ids) for ids in sequences] + [str(ids)[1:-1] for ids in sequences]


# --- damage, what it says, and what stays ---------------------------------------------------------


def cut(name: str, share: float = 0.5) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: int(share * len(content))])

    return damage


def put(name: str, content: bytes | str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def gone(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        target = path / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return damage


def line(name: str, number: int, content: bytes | str) -> Callable[[Path], None]:
    """Replaces one line of a JSONL file."""

    def damage(path: Path) -> None:
        lines = (path / name).read_bytes().splitlines(keepends=True)
        new = content.encode() if isinstance(content, str) else content
        lines[number - 1] = new + b"\n"
        (path / name).write_bytes(b"".join(lines))

    return damage


def field(name: str, number: int, **values: object) -> Callable[[Path], None]:
    """Changes fields of one line of a JSONL file."""

    def damage(path: Path) -> None:
        lines = (path / name).read_text().splitlines(keepends=True)
        lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | values) + "\n"
        (path / name).write_text("".join(lines))

    return damage


REC = "reconstructions.jsonl"
ANSWERS = {
    "not-json": line(REC, 2, '{"round": 1, oops'),
    "binary": line(REC, 2, b"\x00\xff\xfe\x80\x01"),
    "not-utf8": line(REC, 2, b'{"attack": "\xff\xfe"}'),
    "a-list": line(REC, 2, "[1, 2]"),
    "no-keys": line(REC, 2, "{}"),
    "nan": line(REC, 2, '{"round": NaN}'),
    "nested": line(REC, 2, "[" * 100_000),
    "wrong-type": field(REC, 2, client="0"),
    "wrong-status": field(REC, 2, status="solved"),
    "outside-vocabulary": field(REC, 2, sequences=[[5, 10**9]]),
    "negative-id": field(REC, 2, tokens=[-1]),
    "texts-for-ids": field(REC, 2, sequences=[["a", "b"]]),
    "another-experiment": field(REC, 2, fingerprint="0" * 16),
}


@pytest.mark.parametrize("kind", some(ANSWERS, every=2))
def test_a_damaged_answer_is_put_aside_told_and_given_anew(run, kind):
    before, kept = scores(run), run.rows(Lines(REC, dict))
    ANSWERS[kind](run.path)
    status, text, errors = call_on(run, "score")
    assert status == 1
    assert "1 of 4 answers are missing" in errors
    assert f"`fedleak attack {run.path}` gives them" in errors
    assert f"line 2 of {REC} was damaged (" in text
    assert scores(run) == before
    assert run.rows(Lines(REC, dict)) == [kept[0], *kept[2:]]
    (aside,) = run.rows(Lines("damaged.jsonl", dict))
    assert (aside["file"], aside["line"]) == (REC, 2)
    assert call_on(run, "attack")[0] == 0
    assert scores(run) == before
    assert len(run.rows(Lines(REC, dict))) == 4


@pytest.mark.parametrize(
    ("command", "kind"),
    some(product(["run", "attack"], ["not-json", "no-keys", "another-experiment"]), every=2),
)
def test_run_and_attack_give_a_damaged_answer_anew(run, kind, command):
    before = scores(run)
    ANSWERS[kind](run.path)
    status, text, _ = call_on(run, command)
    assert status == 0
    assert f"line 2 of {REC} was damaged (" in text
    assert scores(run) == before


def test_a_file_of_answers_that_is_all_garbage_is_no_torn_line(run):
    before = scores(run)
    put(REC, b"\x00\x01\x02" * 100)(run.path)
    status, text, errors = call_on(run, "score")
    assert (status, scores(run)) == (1, before)
    assert "4 of 4 answers are missing" in errors
    assert f"line 1 of {REC} was damaged" in text
    assert call_on(run, "run")[0] == 0
    assert scores(run) == before


def test_answers_that_are_gone_leave_their_rows(run):
    before = scores(run)
    gone(REC)(run.path)
    status, _, errors = call_on(run, "score")
    assert (status, scores(run)) == (1, before)
    assert "4 of 4 answers are missing" in errors


def test_an_answer_that_is_gone_takes_no_control_of_another_along(run):
    lines = run.rows(Lines(REC, dict))
    (read,) = (row for row in lines if (row["client"], row["attack"]) == (0, "dlg"))
    for row in lines:  # as if the noise had not been in the way of client 1's
        row |= {name: read[name] for name in ("status", "sequences")}
    run.write_rows(Lines(REC, dict), lines)
    assert call_on(run, "score")[0] == 0
    before = scores(run)
    assert before[1, 0, "dlg"]["control_rougeL"] is not None
    run.write_rows(Lines(REC, dict), [row for row in lines if row["client"] == 0])
    assert call_on(run, "score")[0] == 1
    assert scores(run) == before


def said(**values: object) -> Callable[[Path], None]:
    """Changes what run.json says."""

    def damage(path: Path) -> None:
        info = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(info | values))

    return damage


def labelled_twice(path: Path) -> None:
    file = path / "vault/r0001-c00.json"
    truth = json.loads(file.read_text())
    file.write_text(json.dumps(truth | {"labels": truth["labels"] * 2}))


def lengthened(path: Path) -> None:
    file = path / "vault/r0001-c00.json"
    truth = json.loads(file.read_text())
    file.write_text(json.dumps(truth | {"sequences": [[5] * 100_000] * len(truth["labels"])}))


OTHER = {
    "vault-long": (lengthened, 1, "is damaged (a text of more than the 64 tokens"),
    "vault-labels": (labelled_twice, 1, "vault/r0001-c00.json is damaged (not every text has one"),
    "run-versions": (said(versions="1.0"), 1, "run.json cannot be read (versions: "),
    "run-left-out": (said(left_out=5), 1, "run.json cannot be read (left_out: "),
    "run-dropped-out": (said(dropped_out=[1]), 1, "run.json cannot be read (dropped_out: "),
    "run-sizes": (said(examples={"training": -8, "held_out": 4}), 1, "(examples.training: "),
    "run-classes": (said(num_labels=10**9), 1, "run.json cannot be read (num_labels: "),
    "vault-cut": (cut("vault/r0001-c00.json"), 1, r"vault/r0001-c00.json is damaged (Expecting"),
    "vault-empty-object": (put("vault/r0001-c00.json", "{}"), 1, "it is no private batch"),
    "vault-list": (put("vault/r0001-c00.json", "[]"), 1, "it is no private batch"),
    "vault-other": (
        lambda path: shutil.copy(path / "vault/r0001-c01.json", path / "vault/r0001-c00.json"),
        1,
        "of another round or client",
    ),
    "held-out-gone": (gone("held_out.json"), 1, "held_out.json cannot be read: No such file"),
    "held-out-cut": (cut("held_out.json"), 1, "held_out.json is damaged (Expecting"),
    "held-out-list": (put("held_out.json", "[]"), 1, "it has no list of texts"),
    "held-out-ids": (put("held_out.json", '{"sequences": [[999999999]]}'), 1, "the vocabulary"),
    "run-cut": (cut("run.json"), 1, "run.json cannot be read ("),
    "run-empty-object": (put("run.json", "{}"), 1, "it has schema_version None"),
    "run-list": (put("run.json", "[]"), 1, "it holds a list, not a table"),
    "run-old": (put("run.json", '{"schema_version": 1}'), 1, "has schema_version 1, and this"),
    "run-bare": (put("run.json", '{"schema_version": 2}'), 1, "experiment: Field required"),
    "run-binary": (put("run.json", b"\xff\xfe\x00"), 1, "run.json cannot be read ("),
    "utility-torn": (line("utility.jsonl", 1, '{"round": 0, "lo'), 1, "lacks the rounds [0]"),
    "utility-type": (line("utility.jsonl", 1, '{"round": "0"}'), 1, "lacks the rounds [0]"),
    "defended-cut": (cut("defended/r0001-c01.json"), 1, "defended/r0001-c01.json is damaged"),
    "defended-empty": (put("defended/r0001-c01.json", "{}"), 1, "defended/r0001-c01.json is dam"),
    "defended-gone": (gone("defended"), 1, "the ledger keeps what it had of them"),
    "reference": (put("reference.json", "[1"), 1, "reference.json is damaged"),
    "reference-list": (put("reference.json", "[]"), 1, "reference.json is damaged"),
    "summary-cut": (cut("summary.json"), 0, ""),
    "summary-list": (put("summary.json", "[]"), 0, ""),
    "summary-old": (put("summary.json", '{"schema_version": 1}'), 0, ""),
    "leakage-torn": (line("leakage.jsonl", 1, '{"round":'), 0, ""),
    "leakage-keys": (line("leakage.jsonl", 1, '{"round": 1}'), 0, ""),
    "privacy-torn": (line("privacy.jsonl", 1, '{"round":'), 0, ""),
    "defenses-torn": (line("defenses.jsonl", 1, "oops"), 0, ""),
    "attempts": (put("attempts.jsonl", "oops\n"), 0, ""),
    "damaged": (put("damaged.jsonl", b"oops\n\xff\n"), 0, ""),
    "capture-extra": (put("captures/r0009-c77.safetensors", "oops"), 0, ""),
    "capture-note": (put("captures/notes.txt", "oops"), 0, ""),
    "model-extra": (put("models/rest.safetensors", "oops"), 0, ""),
}


@pytest.mark.parametrize("kind", some(OTHER, every=2))
def test_damage_is_named_and_takes_nothing_along(run, kind):
    damage, expected, says = OTHER[kind]
    before, spent = scores(run), run.rows(Lines("privacy.jsonl", dict))
    private = texts(run)
    damage(run.path)
    status, _, errors = call_on(run, "score")
    assert (status, says in errors) == (expected, True), errors
    assert not any(text in errors for text in private)
    if status:
        assert "fedleak run" in errors  # the remedy
    assert (scores(run), run.rows(Lines("privacy.jsonl", dict))) == (before, spent)
    # Once more: what was told is told again, and nothing wears off.
    assert call_on(run, "score")[0] == expected
    assert (scores(run), run.rows(Lines("privacy.jsonl", dict))) == (before, spent)


@pytest.mark.parametrize("kind", some((k for k in OTHER if not k.startswith("run-")), every=5))
def test_run_and_attack_end_without_a_traceback_too(run, kind):
    before = scores(run)
    OTHER[kind][0](run.path)
    attacked = call_on(run, "attack")[0]
    status, _, errors = call_on(run, "run")
    assert scores(run) == before
    mends = kind.startswith(("held-out", *(k for k, (_, code, _) in OTHER.items() if not code)))
    assert status == (0 if mends else 1), errors
    assert attacked in (0, 1)


@pytest.mark.parametrize(
    ("kind", "command"),
    some(
        product((k for k in OTHER if k.startswith("run-")), ["run", "attack", "purge"]),
        every=2,
    ),
)
def test_a_damaged_run_json_stops_every_command(run, kind, command):
    OTHER[kind][0](run.path)
    status, _, errors = call_on(run, command)
    assert status == 1
    assert "run.json" in errors
    assert "--fresh" in errors


def test_a_run_json_whose_experiment_was_edited_is_refused(run):
    info = run.info()
    info["experiment"]["seed"] = 5
    run.write_json("run.json", info)
    for command in ("score", "attack", "run"):
        status, _, errors = call_on(run, command)
        assert status == 1
        assert "its experiment was changed after its updates were captured" in errors
    info["experiment"] = info["experiment"] | {"seed": "five"}
    run.write_json("run.json", info)
    assert "run.json: seed = 'five'" in call_on(run, "score")[2]


def test_without_the_vault_rows_and_ledger_stay(run):
    before, spent = scores(run), run.rows(Lines("privacy.jsonl", dict))
    defended = run.rows(Lines("defenses.jsonl", dict))
    assert {row["epsilon"] == "none" for row in spent} == {True, False}
    gone("vault")(run.path)
    gone("defended")(run.path)
    status, text, errors = call_on(run, "score")
    assert "2 of 2 captures have no truth: r0001-c00, r0001-c01: their rows stay" in text
    assert status == 1
    assert "the ledger keeps what it had of them" in errors
    assert (scores(run), run.rows(Lines("privacy.jsonl", dict))) == (before, spent)
    assert run.rows(Lines("defenses.jsonl", dict)) == defended


def test_without_the_vault_alone_nothing_is_missing(run):
    before = scores(run)
    gone("vault")(run.path)
    assert call_on(run, "score")[0] == 0
    assert scores(run) == before


def test_what_was_never_scored_and_has_no_truth_is_missing(run):
    gone("vault")(run.path)
    gone("leakage.jsonl")(run.path)
    status, out, errors = call_on(run, "score")
    assert status == 1
    assert "probes unscored: what the client trained on is not here" in out
    assert "2 of 2 captures have no truth" in errors
    assert "answers are unscored: `fedleak score" in errors
    leakage_rows = scores(run).values()
    assert {row["status"] for row in leakage_rows} <= {"unscored", "abstained"}
    assert {row["rougeL"] for row in leakage_rows} == {None}


def test_a_ledger_without_its_notes_guarantees_nothing(run):
    gone("defended")(run.path)
    gone("privacy.jsonl")(run.path)
    status, _, errors = call_on(run, "score")
    assert status == 1
    assert "counts what it never had as no guarantee" in errors
    assert [row["epsilon"] for row in run.rows(Lines("privacy.jsonl", dict))] == ["none"] * 2


# --- captures and models of another experiment, or damaged ----------------------------------------


def foreign(path: Path, name: str) -> None:
    """Makes a capture or a model one of another experiment."""
    info = json.loads((path / "run.json").read_text())
    other = Run(path.parent / "other")
    other.create(**{k: v for k, v in info.items() if k != "schema_version"} | {"fingerprint": "f"})
    if name.startswith("captures"):
        other.captures.write(Run(path).captures.read_capture(Key(1, 0)))
    else:
        other.models.write(1, Run(path).models.read_model(1))
    shutil.copy(other.path / name, path / name)


CAPTURE, MODEL = "captures/r0001-c00.safetensors", "models/r0001.safetensors"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: foreign(path, CAPTURE), "it is of another experiment, f; this one is"),
        (lambda path: foreign(path, MODEL), "it is of another experiment, f; this one is"),
        (cut(CAPTURE), f"{CAPTURE} is damaged"),
        (cut(MODEL), f"{MODEL} is damaged"),
        (gone(MODEL), f"{MODEL} is damaged"),
    ],
)
def test_what_is_not_this_runs_is_neither_attacked_nor_taken_for_an_answer(run, damage, says):
    before = scores(run)
    damage(run.path)
    status, _, errors = call(
        "attack", str(run.path), "--set", 'attack=[{kind="probes", name="again"}]'
    )
    assert status == 1
    assert says in errors
    assert "answers failed" in errors
    new_attack_rows = [
        row for row in run.rows(Lines(REC, dict)) if row["attack"] == "again" and row["client"] == 0
    ]
    assert [row["status"] for row in new_attack_rows] == ["failed"]
    assert {key: row for key, row in scores(run).items() if key in before} == before


def test_a_capture_that_is_gone_is_missing_for_a_new_attack(run):
    gone(CAPTURE)(run.path)
    status, _, errors = call_on(run, "score")  # all that was asked is answered
    assert status == 1
    assert "1 of 2 captures are missing (r0001-c00)" in errors
    command = ["attack", str(run.path), "--set", 'attack=[{kind="probes", name="again"}]']
    status, _, errors = call(*command)
    assert status == 1
    assert "1 of 2 captures are missing (r0001-c00)" in errors
    assert "trains their rounds again" in errors
    assert call_on(run, "run")[0] == 0
    assert call(*command)[0] == 0


def test_a_folder_with_files_of_nobody_knows_what_is_refused(run):
    before = (run.path / "leakage.jsonl").read_bytes()
    gone("run.json")(run.path)
    status, _, errors = call("run", "small.toml", "--set", "seed=5")
    assert status == 2
    assert "runs/small' is not empty (captures, checks.json, defended and " in errors
    assert "has no run.json" in errors
    assert "--fresh" in errors
    assert (run.path / "leakage.jsonl").read_bytes() == before
    assert not run.exists()


def test_other_attacks_are_asked_for_with_the_command_that_is_named(run):
    before = scores(run)
    dlg = ", ".join(f"{name} = {json.dumps(value)}" for name, value in DLG.items())
    added = f'attack=[{{{dlg}}}, {{kind="probes", name="again"}}]'
    status, _, errors = call("run", "small.toml", "--set", added)
    assert status == 2
    assert "--fresh" not in errors
    named = errors.partition("`fedleak ")[2].partition("`")[0]
    assert call(*shlex.split(named))[0] == 0
    assert {key for _, _, key in scores(run)} == {"probes", "dlg", "again"}
    assert {key: row for key, row in scores(run).items() if key in before} == before
    status, _, errors = call("run", "small.toml", "--set", 'threat.knows=["labels"]')
    assert "--set 'threat.knows=[\"labels\"]'" in errors
    status, _, errors = call("run", "small.toml", "--set", "seed=2", "--set", added)
    assert (status, "--fresh" in errors) == (2, True)


# --- disks --------------------------------------------------------------------------------------


def test_runs_that_is_a_file_is_named(finished, tmp_path, monkeypatch):
    shutil.copy(finished / "small.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("")
    status, _, errors = call("run", "small.toml")
    assert status == 1
    assert "runs/small cannot be written: " in errors
    Path("runs").unlink()
    Path("runs").mkdir()
    Path("runs/small").write_text("")
    status, _, errors = call("run", "small.toml")
    assert (status, "runs/small" in errors) == (1, True)


@pytest.mark.parametrize("name", ["leakage.jsonl", "summary.json", "reconstructions.jsonl"])
def test_a_full_disk_is_named_and_nothing_is_lost(run, monkeypatch, name):
    before, lines = scores(run), run.rows(Lines(REC, dict))
    full, sync = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), os.fsync

    def fsync(opened):
        if name in os.readlink(f"/proc/self/fd/{opened}"):
            raise full
        return sync(opened)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        status, _, errors = call(
            "attack", str(run.path), "--set", 'attack=[{kind="probes", name="again"}]'
        )
    assert status == 1
    assert f"{name} cannot be written: No space left on device" in errors
    assert not list(run.path.glob(".*.[0-9]*"))
    assert {key: row for key, row in scores(run).items() if key in before} == before
    assert [row for row in run.rows(Lines(REC, dict)) if row["attack"] != "again"] == lines
    assert call_on(run, "score")[0] == 0


# --- exit statuses --------------------------------------------------------------------------------


def test_only_what_abstained_is_complete_and_is_said(run):
    lines = [
        row | {"status": "abstained", "reason": "nothing found"}
        for row in run.rows(Lines(REC, dict))
    ]
    run.write_rows(Lines(REC, dict), lines)
    status, text, _ = call_on(run, "score")
    assert status == 0
    assert "no attack gave an answer: all 4 abstained or are inadmissible" in text


def test_failed_answers_are_counted_with_their_reasons(run):
    lines = run.rows(Lines(REC, dict))
    for i, row in enumerate(lines[:3]):
        row |= {"status": "failed", "reason": f"reason {i % 2}"}
    run.write_rows(Lines(REC, dict), lines)
    gone("leakage.jsonl")(run.path)
    status, text, errors = call_on(run, "score")
    assert status == 1
    assert "3 of 4 answers failed (" in errors
    assert "reason 0; " in errors
    assert f"`fedleak attack {run.path} --retry` tries them again" in errors
    assert "what the server read in each update" in text
    assert call(*f"attack {run.path} --retry".split())[0] == 0
    assert call_on(run, "score")[0] == 0


# --- who may read it ------------------------------------------------------------------------------


def test_only_its_owner_can_read_any_file_of_a_run(finished):
    path = finished / "runs" / "small"
    modes = {
        str(member.relative_to(path)): stat.S_IMODE(member.stat().st_mode)
        for member in [path, *path.rglob("*")]
    }
    folders = {".", "captures", "models", "vault", "defended"}
    keys = ("r0001-c00", "r0001-c01")
    files = {
        ".lock", "run.json", "held_out.json", "reconstructions.jsonl", "leakage.jsonl",
        "privacy.jsonl", "defenses.jsonl", "utility.jsonl", "summary.json", "checks.json",
        "models/r0001.safetensors", "models/r0002.safetensors", "defended/r0001-c01.json",
        *(f"captures/{key}.safetensors" for key in keys), *(f"vault/{key}.json" for key in keys),
    }  # fmt: skip
    log = {"log.txt"} & modes.keys()
    assert modes == dict.fromkeys(folders, 0o700) | dict.fromkeys(files | log, 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755  # `runs` itself is anyone's


# --- purge ----------------------------------------------------------------------------------------

PURGED = {"vault", "captures", "models", "held_out.json", REC}


def everything(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())


def test_a_purge_deletes_what_texts_can_be_read_from_and_keeps_the_figures(run):
    before, spent = scores(run), run.rows(Lines("privacy.jsonl", dict))
    there = {child.name for child in run.path.iterdir()}
    private = [json.dumps(run.vault.read_note(key)["sequences"][0]) for key in run.vault.all_keys()]
    (run.path / f".{REC}.4711").write_text("half written")
    for status, text, _ in [call_on(run, "purge")]:
        assert status == 0
        for name in PURGED:
            assert f"deleted: {run.path / name} (" in text
        assert "kept:" in text
        assert "leakage.jsonl" in text.partition("kept:")[2]
    assert there - {child.name for child in run.path.iterdir()} == PURGED
    assert not any(sequence.encode() in everything(run.path) for sequence in private)
    date = run.info()["purged"]
    for _ in range(2):
        status, text, _ = call_on(run, "score")
        assert status == 0
        assert f"the private data was purged on {date}: all 4 rows stay as they were" in text
        assert (scores(run), run.rows(Lines("privacy.jsonl", dict))) == (before, spent)
    for command in ("attack", "run"):
        status, _, errors = call_on(run, command)
        assert status == 2
        assert f"was purged on {date}" in errors
    assert call_on(run, "purge")[0] == 0
    assert run.info()["purged"] == date
    assert pipeline.finished(run, load(Path("small.toml")))


def test_a_purge_that_was_cut_short_is_finished_by_the_next(run, monkeypatch):
    stuck, unlink = run.path / "captures/r0001-c00.safetensors", Path.unlink

    def stop(path, **options):
        if path == stuck:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stop)
        status, text, errors = call_on(run, "purge")
        assert status == 1
        assert f"1 files could not be deleted, such as {stuck} (Input/output error)" in errors
    assert f"deleted: {run.path / 'vault'} (2 files" in text
    assert f"deleted: {run.path / 'captures'}" not in text
    assert [path for path in run.path.rglob("*") if path.name in PURGED] == [stuck.parent]
    status, _, errors = call_on(run, "score")
    assert status == 1
    assert "the purge that began on" in errors
    for command in ("attack", "run"):
        status, _, errors = call_on(run, command)
        assert status == 2
        assert f"is not complete: `fedleak purge {run.path}` goes on" in errors
    assert call_on(run, "purge")[0] == 0
    assert not PURGED & {path.name for path in run.path.iterdir()}
    assert call_on(run, "score")[0] == 0


def test_a_purge_deletes_links_and_not_what_they_lead_to(run, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    for name in ("captures", "models", "vault"):
        (run.path / name).rename(home / name)
        (run.path / name).symlink_to(home / name)
    before = everything(home)
    (run.path / "shard-1of2").mkdir()
    (run.path / "shard-1of2" / "captures").symlink_to(home / "captures")
    (run.path / f".{REC}.x.part").write_text("half written")
    status, text, errors = call_on(run, "purge")
    assert status == 0, errors
    assert f"{run.path / 'vault'} (a link to {home / 'vault'}, which stays)" in text
    assert everything(home) == before
    assert not {*PURGED, "shard-1of2"} & {path.name for path in run.path.iterdir()}
    assert {path.name for path in run.path.glob(".*")} == {".lock"}


def test_a_full_disk_is_purged(run, monkeypatch):
    assert call_on(run, "score")[0] == 0
    write = Run.write_unsealed

    def full(self, name, value):
        if (run.path / "captures").exists():
            raise FedleakError(f"{name} cannot be written: No space left on device")
        write(self, name, value)

    monkeypatch.setattr(Run, "write_unsealed", full)
    keep = score_files.write

    def write_scores(run, rows, summary):
        assert "purged" in run.info(), "what was scored is written already"
        keep(run, rows, summary)

    monkeypatch.setattr(score_files, "write", write_scores)
    done = purging.purge(run)
    assert not done.left
    assert not PURGED & {path.name for path in run.path.iterdir()}


@pytest.mark.parametrize("kind", ["interrupted", "unscored", "unanswered"])
def test_a_run_that_is_not_finished_or_not_scored_is_not_purged(run, kind):
    if kind == "interrupted":
        run.update_info(status="interrupted")
    elif kind == "unscored":
        gone("vault")(run.path)
        gone("leakage.jsonl")(run.path)
    else:
        run.write_rows(Lines(REC, dict), run.rows(Lines(REC, dict))[1:])
    there = {child.name for child in run.path.iterdir()}
    status, _, errors = call_on(run, "purge")
    assert status == 1
    assert "nothing was deleted" in errors
    assert "purged" not in run.info()
    assert there <= {child.name for child in run.path.iterdir()}


# --- a cell of a sweep ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["summary-cut", "summary-list", "leakage-torn", "run-cut"])
def test_a_damaged_cell_is_run_again_or_named(run, kind):
    Path("grid.toml").write_text(toml({**EXPERIMENT, "name": "grid", "sweep.seed": [0]}))
    cell = Run(Path("runs/grid/seed=0").absolute())
    shutil.copytree(run.path, cell.path)
    cell.update_info(experiment=cell.info()["experiment"] | {"name": "grid"})
    before = scores(cell)
    OTHER[kind][0](cell.path)
    status, _, errors = call_tiny("sweep", "grid.toml", "--jobs", "1")
    if kind == "run-cut":
        assert status == 1
        assert "seed=0/run.json cannot be read" in errors
    else:
        assert status == 0, errors
        (row,) = json.loads(Path("runs/grid/sweep.json").read_text())["cells"]
        assert set(row["attacks"]) == {"dlg", "probes"}
        assert kind == "leakage-torn" or scores(cell) == before
