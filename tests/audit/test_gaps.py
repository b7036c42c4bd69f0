"""What ends with status 1 because something is missing, and says what."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from built import answer_of, run_of, summary_of, truth_of
from cases import some
from scored import row
from tiny import Here, call, tables, toml

from fedleak.audit import gaps
from fedleak.audit.gaps import Gaps, Known, find_gaps, refuse_gaps
from fedleak.config.loading import parse
from fedleak.running.dispatch import dispatcher
from fedleak.store.records import UNSCORED, UTILITY, Answer, LeakageRow, answers
from fedleak.store.run import Key, Run
from fedleak.store.shards import Shard, Share, share
from fedleak.store.summaries import SUMMARY, CanarySummary
from fedleak.util.errors import FedleakError


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory, saved: Callable[..., str]) -> Path:
    folder, model = tmp_path_factory.mktemp("trained"), {"name": saved("bert", layers=1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dispatcher, "hire", lambda *_: nullcontext([Here()]))
        Path("small.toml").write_text(toml({"model": model}))
        assert call("run", "small.toml")[0] == 0
    return folder


@pytest.fixture
def damaged_run(trained_once: Path, tmp_path: Path, in_process: None) -> Run:
    return Run(shutil.copytree(trained_once / "runs" / "small", tmp_path / "small"))


def interrupted(run: Run) -> str:
    run.update_info(status="interrupted")
    return "the run is not finished (interrupted): 2 of 2 captures are here"


def without_a_capture(run: Run) -> str:
    (run.path / "captures" / "r0001-c01.safetensors").unlink()
    return "1 of 2 captures are missing (r0001-c01)"


@pytest.mark.parametrize(
    ("lacking", "command"),
    some(product([interrupted, without_a_capture], ["score", "report", "attack"]), every=2),
)
def test_what_is_missing_is_the_last_line_and_status_1(
    damaged_run: Run, lacking: Callable[[Run], str], command: str
) -> None:
    says = lacking(damaged_run)
    status, _, errors = call(command, str(damaged_run.path))
    assert status == 1
    assert says in errors.splitlines()[-1]


@pytest.mark.parametrize("content", [None, "{"])
def test_a_shard_that_lost_its_mark_still_lacks_its_answers(
    damaged_run: Run, content: str | None
) -> None:
    """Shard 1 of 2 tried another attack on one of two updates, and shard 2 was never begun."""
    shard, given = Shard(2, 1), damaged_run.rows(answers(damaged_run.fingerprint()))
    damaged_run.write(share(shard), Share(attacks=("other",), complete=False))
    other = given[0].model_copy(update={"attack": "other"})
    damaged_run.append(shard.lines(answers(damaged_run.fingerprint())), other)
    lacks = "1 of 4 answers are missing (for r0001-c01)"
    status, _, errors = call("score", str(damaged_run.path))
    assert status == 1
    assert lacks in errors
    mark = damaged_run.path / shard.folder / "shard.json"
    mark.unlink() if content is None else mark.write_text(content)
    status, _, errors = call("score", str(damaged_run.path))
    assert status == 1
    assert lacks in errors
    assert "shard.json of shard 1/2 is missing or damaged" in errors


def test_a_report_prints_the_notes(damaged_run: Run) -> None:
    damaged_run.update_info(left_out=["a message"])
    status, text, _ = call("report", str(damaged_run.path))
    assert status == 0
    assert "note: 1 messages were left out of the run when it was imported" in text


# --- each sentence, of runs that nobody trained ---------------------------------------------------

KEYS = [Key(1, client) for client in range(5)]
KNOWN = {key: truth_of(*key, [(2, 5, 3)]) for key in KEYS}


def gaps_of(
    folder: Path,
    answers: Sequence[Answer] = (),
    rows: Sequence[LeakageRow] = (),
    *,
    changes: Mapping[str, Any] = MappingProxyType({}),
    captures: Sequence[Key] = KEYS,
    truths: Mapping[Key, Any] | None = None,
    attack_names: Sequence[str] = (),
    prepared: Callable[[Run], Any] = lambda _: None,
    **info: Any,
) -> tuple[Run, Gaps]:
    """Returns what is missing in a run of five clients."""
    experiment = parse(tables({"federation.clients": 5, **changes}))
    run, gaps = run_of(folder, experiment, captures=captures, **info), Gaps()
    prepared(run)
    given = {answer.id: answer for answer in answers}
    truths = KNOWN if truths is None else truths
    find_gaps(Known(run, experiment, attack_names, given, rows, truths), gaps)
    return run, gaps


def read(client: int, attack: str = "dlg", **more: Any) -> Answer:
    return answer_of(1, client, [(2, 5, 3)], attack=attack, **more)


def test_a_whole_run_lacks_nothing(tmp_path: Path) -> None:
    answers = [read(client) for client in range(5)]
    rows = [row("dlg", client, (True, 100.0, 1.0)) for client in range(5)]
    _, gaps = gaps_of(tmp_path, answers, rows, attack_names=["dlg"])
    assert gaps == Gaps()


def test_failures_are_counted_with_their_reasons(tmp_path: Path) -> None:
    reasons = ["out of memory", "out of memory", "killed", "no time", "lost"]
    answers = [read(c, status="failed", reason=why) for c, why in enumerate(reasons[:4])]
    run, gaps = gaps_of(tmp_path / "some", [*answers, read(4)], attack_names=["dlg"])
    tries = f"`fedleak attack {run.path} --retry` tries them again"
    assert gaps.missing == [
        "4 of 5 answers failed (dlg: out of memory; dlg: killed; dlg: no time): " + tries
    ]
    answers.append(read(4, status="failed", reason=reasons[4]))
    run, gaps = gaps_of(tmp_path / "all", answers, attack_names=["dlg"])
    tries = f"`fedleak attack {run.path} --retry` tries them again"
    assert gaps.missing == [
        "5 of 5 answers failed (dlg: out of memory; dlg: killed; dlg: no time; and 1 more "
        f"reasons): {tries}"
    ]
    assert gaps.notes == []


def test_a_proof_that_the_truth_refutes_is_named(tmp_path: Path) -> None:
    answers = [read(c, verified=c < 3) for c in range(5)]
    answers += [read(c, "tag", verified=True) for c in range(4)]
    rows = [row("dlg", c, (True, 100.0, 1.0), verified=c == 0) for c in range(5)]
    rows += [row("tag", c, (False, 0.0, 0.0)) for c in (1, 2, 3)]
    rows += [row("tag", 0, (False, 0.0, 0.0))]
    _, gaps = gaps_of(tmp_path / "some", answers, rows, attack_names=["dlg"])
    assert gaps.missing == [
        "6 of 9 answers claim a proof of what the client did not train on (of dlg, tag; for "
        "r0001-c01, r0001-c02, r0001-c00, and 1 more): they count as not proved, and no other "
        "proof of the attack can be trusted"
    ]


@pytest.mark.parametrize("status", ["abstained", "inadmissible"])
def test_that_nobody_answered_is_a_note(tmp_path: Path, status: str) -> None:
    answers = [read(client, status=status) for client in range(5)]
    _, gaps = gaps_of(tmp_path / "all", answers, attack_names=["dlg"])
    assert (gaps.missing, gaps.unscored) == ([], 0)
    assert gaps.notes == ["no attack gave an answer: all 5 abstained or are inadmissible"]
    _, gaps = gaps_of(tmp_path / "some", [*answers[:4], read(4)], attack_names=["dlg"])
    assert gaps.notes == []


def test_who_dropped_out_and_what_was_left_out_are_notes(tmp_path: Path) -> None:
    absent = {"1": [2, 3], "2": [], "3": [0], "4": [1]}
    _, gaps = gaps_of(tmp_path / "few", dropped_out=absent, left_out=["one", "two"])
    ends = "): their texts are not in it, and nothing is scored against them"
    begins = "clients dropped out of the secure sum (2, 3 in round 1; 0 in round 3; 1 in round 4"
    left_out = "2 messages were left out of the run when it was imported"
    assert gaps.notes == [begins + ends, left_out]
    more = absent | {"5": [4]}
    _, gaps = gaps_of(tmp_path / "more", dropped_out=more)
    assert gaps.notes == [f"{begins}; and others in 1 more rounds{ends}"]


def test_a_purged_run_lacks_nothing_but_the_end_of_its_purge(tmp_path: Path) -> None:
    rows = [row("dlg", client, (True, 100.0, 1.0)) for client in range(3)]
    stay = (
        "the private data was purged on a day: all 3 rows stay as they were, and nothing can be "
        "attacked or scored again"
    )
    for name, complete in (("whole", {"purge_complete": True}), ("old", {})):
        _, gaps = gaps_of(
            tmp_path / name, [], rows, attack_names=["dlg"], captures=(), purged="a day", **complete
        )
        assert gaps == Gaps(notes=[stay])
    run, gaps = gaps_of(tmp_path / "part", [], rows, purged="a day", purge_complete=False)
    goes_on = f"`fedleak purge {run.path}` goes on"
    assert gaps == Gaps(
        missing=[f"the purge that began on a day is not complete: {goes_on}"], notes=[stay]
    )


def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path) -> None:
    other = Key(7, 0)
    _, gaps = gaps_of(
        tmp_path, attack_names=["dlg"], captures=[*KEYS[:2], other], status="interrupted"
    )
    assert gaps.missing == [
        "the run is not finished (interrupted): 2 of 5 captures are here; the "
        "command that began it goes on"
    ]
    assert gaps.unscored == 0


def test_captures_that_are_gone_and_answers_that_are_missing_are_counted(tmp_path: Path) -> None:
    answers = [read(client) for client in range(4)]
    run, gaps = gaps_of(tmp_path, answers, attack_names=["dlg", "tag"], captures=KEYS[4:])
    assert gaps.missing == [
        "4 of 5 captures are missing (r0001-c00, r0001-c01, r0001-c02, and 1 more): `fedleak run` "
        "with the experiment's file trains their rounds again",
        f"2 of 10 answers are missing (for r0001-c04): `fedleak attack {run.path}` gives them",
    ]
    assert gaps.unscored == 6


def test_attacks_that_came_too_late_are_named(tmp_path: Path) -> None:
    def deleted(run: Run) -> None:
        for key in KEYS[:4]:
            run.captures.close(key, delete=True)

    answers = [read(client) for client in range(3)]
    run, gaps = gaps_of(tmp_path, answers, attack_names=["tag", "dlg"], prepared=deleted)
    assert gaps.missing == [
        "dlg, tag came after 4 of 5 captures were deleted (r0001-c00, r0001-c01, r0001-c02, and 1 "
        "more; audit.keep): only `fedleak run FILE --fresh` with audit.keep = 'all' captures them "
        "again",
        f"2 of 10 answers are missing (for r0001-c04): `fedleak attack {run.path}` gives them",
    ]
    assert gaps.unscored == 7


def test_shards_that_are_not_complete_are_named(tmp_path: Path) -> None:
    def begun(run: Run) -> None:
        for number, complete in ((1, True), (2, False)):
            run.write(share(Shard(3, number)), Share(attacks=("tag",), complete=complete))

    def lost(run: Run) -> None:
        begun(run)
        for number in (1, 2):
            (run.path / Shard(25, number).folder).mkdir()

    answers = [read(client, "tag") for client in range(4)]
    run, gaps = gaps_of(tmp_path / "some", answers, prepared=begun)
    remedy = (
        "; the command that started it gives them, or `fedleak attack {} on one machine".format(
            f"{run.path}`"
        )
    )
    assert gaps.missing == [
        f"1 of 5 answers are missing (for r0001-c04): not complete: shard 2/3, 3/3{remedy}"
    ]
    run, gaps = gaps_of(tmp_path / "many", answers, prepared=lost)
    shown = ", ".join(["2/3", "3/3", *(f"{number}/25" for number in range(1, 19))])
    remedy = remedy.replace("some", "many")
    assert gaps.missing == [
        f"1 of 5 answers are missing (for r0001-c04): not complete: shard {shown}, and 7 more"
        f"{remedy}",
        "shard.json of shard 1/25, 2/25 is missing or damaged, so nobody knows what it was asked "
        "for: the command that started the shard writes it anew, and gives no answer twice",
    ]


def test_rows_whose_answers_are_gone_are_named(tmp_path: Path) -> None:
    rows = [row(name, 0, (True, 100.0, 1.0)) for name in ("dlg", "tag", "lamp", "dager")]
    run, gaps = gaps_of(tmp_path, [read(0, "dlg")], rows, captures=KEYS, attack_names=["dager"])
    assert gaps.missing[-1] == (
        "answers of lamp, tag are gone: their rows stay as they were, and `fedleak attack "
        f"{run.path} --set 'attack=[...]'` gives them again"
    )


def test_updates_without_a_truth_are_named(tmp_path: Path) -> None:
    truths = {key: None if key.client else KNOWN[key] for key in KEYS}
    answers = [read(client) for client in range(5)]
    unscored = {"status": UNSCORED, "batch_size": None, "texts": None}
    rows = [row("dlg", c, (True, 100.0, 1.0)) for c in (0, 1)]
    rows += [row("dlg", c, **unscored) for c in (2, 3, 4)]
    run, gaps = gaps_of(tmp_path / "own", answers, rows, truths=truths, attack_names=["dlg"])
    bare = (
        "3 of 5 captures have no truth in {}/vault (r0001-c02, r0001-c03, r0001-c04), so 3 answers "
        "are unscored: "
    )
    remedy = (
        f"`fedleak score {run.path} --vault FOLDER` takes it from the vault of a node, whose owner "
        "has to hand it over; else only `fedleak run FILE --fresh`, with the vault on, writes it"
    )
    assert gaps == Gaps(
        missing=[bare.format(run.path) + remedy],
        notes=["1 of 5 captures have no truth: r0001-c01: their rows stay as they were"],
        unscored=3,
    )
    on_nodes = {"data": {"name": "data.csv", "on_nodes": True, "text": "text", "label": "label"}}
    _, gaps = gaps_of(tmp_path / "nodes", answers, rows, truths=truths, changes=on_nodes)
    assert gaps.awaited == gaps.missing[-1:]
    tapped = {"tapped": {"optimiser": "sgd", "labels": 2, "clients": [[*range(5)]], "messages": ""}}
    run, gaps = gaps_of(
        tmp_path / "tap", answers, rows, truths=truths, changes=tapped, tapped="a/tap"
    )
    assert gaps.missing == [
        bare.format(run.path) + "where you have it, name it in truth.file, and `fedleak import "
        f"a/tap --about FILE --out {run.path}` adds it"
    ]
    assert gaps.awaited == []


def test_lines_that_were_damaged_are_a_note(tmp_path: Path) -> None:
    def salvaged(run: Run) -> None:
        (run.path / "utility.jsonl").write_text("{\n")
        run.salvage(UTILITY)

    _, gaps = gaps_of(tmp_path, prepared=salvaged)
    (note,) = gaps.notes
    assert note.startswith("line 1 of utility.jsonl was damaged (")
    assert note.endswith("): it is in damaged.jsonl now")


def test_results_that_are_not_complete_are_refused_in_one_line(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name) for name in ("one", "two")]
    alarmed = CanarySummary(confidence=0.95, delta=1e-5, bounds=(), alarms=("too much",))
    for run, figures in zip(
        runs, ({"missing": ("a", "b")}, {"missing": ("c",), "canary": alarmed}), strict=True
    ):
        run.path.mkdir()
        run.write(SUMMARY, summary_of(**figures))
    with pytest.raises(FedleakError, match=r"^a; b; too much; c$"):
        refuse_gaps(*runs)
    with pytest.raises(FedleakError, match=r"^too much$"):
        refuse_gaps(*runs, besides=["a", "b", "c"])
    refuse_gaps(runs[0], besides=["b", "a"])


def test_a_run_says_which_answers_lack_a_score():
    lacking = SimpleNamespace(attack="membership", scores={"residual": (1.0,)}, reason="no lira")
    whole = SimpleNamespace(attack="membership", scores={"residual": (1.0,)}, reason="")
    abstained = SimpleNamespace(attack="membership", scores={}, reason="the list is empty")
    answers = dict(enumerate((lacking, whole, abstained, lacking)))
    (note,) = gaps._without_a_score(SimpleNamespace(answers=answers))
    assert note == "2 of 4 answers lack a score (membership: no lira)"
    assert not [*gaps._without_a_score(SimpleNamespace(answers={0: whole, 1: abstained}))]
