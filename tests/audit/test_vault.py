"""The private batches of a run, its kept texts, and what of them an attacker is told."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from built import run_of, truth_of
from tiny import tables

from fedleak.audit.grants import knowledge
from fedleak.audit.kept_texts import KeptTexts, candidates_file, read_candidates, read_held_out
from fedleak.audit.privacy.candidates import questions
from fedleak.audit.vault import check_truth, read_truth, summed_clients, weight
from fedleak.config.loading import parse
from fedleak.store.run import EVERYONE, Capture, Key, Run
from fedleak.training.observation import ClientUpdate, Example, Knowledge, ThreatModel, UpdateKind
from fedleak.util.errors import CaptureError, FedleakError

pytestmark = pytest.mark.core

ALL = Key(1, EVERYONE)
TEXTS = [(2, 5, 3), (2, 6, 7, 3), (2, 8, 3)]


def built(folder: Path, truths: Any, changes: Any = None, **info: Any) -> Run:
    return run_of(
        folder, parse(tables({"federation.clients": 3} | (changes or {}))), truths, **info
    )


# --- one batch ------------------------------------------------------------------------------------


def test_a_batch_is_that_of_its_file(tmp_path: Path) -> None:
    truth = truth_of(1, 0, TEXTS[:2], noise_scale=0.5)
    run = built(tmp_path / "run", [truth])
    assert read_truth(run, Key(1, 0)) == truth
    assert read_truth(run, Key(1, 1)) is None
    file = run.path / "vault" / "r0001-c00.json"
    file.write_text("{")
    with pytest.raises(CaptureError, match=r"r0001-c00\.json"):
        read_truth(run, Key(1, 0))


def test_a_batch_of_another_client_is_damaged_and_its_file_is_named(tmp_path: Path) -> None:
    run = built(tmp_path / "run", [truth_of(1, 0, TEXTS[:2])])
    file = run.path / "vault" / "r0001-c01.json"
    file.write_text((run.path / "vault" / "r0001-c00.json").read_text())
    with pytest.raises(CaptureError) as refused:
        read_truth(run, Key(1, 1))
    assert str(refused.value) == f"{file} is damaged (it is of another round or client)"


def test_what_is_no_batch_of_a_client_is_damaged() -> None:
    file, value = Path("vault/it.json"), truth_of(1, 0, TEXTS[:2]).to_json()

    def refused(**changes: Any) -> str:
        with pytest.raises(CaptureError) as refusal:
            check_truth(value | changes, Key(1, 0), file)
        return str(refusal.value)

    assert check_truth(value, Key(1, 0), file) == truth_of(1, 0, TEXTS[:2])
    assert check_truth(value | {"labels": []}, Key(1, 0), file).labels == ()
    assert refused(sequences="all") == f"{file} is damaged (it is no private batch)"
    assert refused(labels=[1]) == f"{file} is damaged (not every text has one class)"
    other = f"{file} is damaged (it is of another round or client)"
    assert refused(round=2) == refused(client=2) == other


def test_a_client_weighs_what_it_says() -> None:
    truth = truth_of(1, 0, TEXTS, batch_size=2)
    assert weight(truth, parse(tables())) == 2
    assert weight(truth, parse(tables({"federation.algorithm": "fedavg"}))) == 3


# --- the sum of a round ---------------------------------------------------------------------------


def test_the_batch_of_a_sum_is_of_all_that_are_in_it(tmp_path: Path) -> None:
    truths = [
        truth_of(1, 0, TEXTS[:1], labels=(0,), noise_scale=3.0),
        truth_of(1, 1, [], batch_size=2),  # drew nobody
        truth_of(1, 2, TEXTS[1:], noise_scale=1.0),
    ]
    run = built(tmp_path / "all", truths)
    truth = read_truth(run, ALL)
    assert truth is not None
    assert (truth.round, truth.client, truth.batch_size) == (1, EVERYONE, 5)
    assert (truth.sequences, truth.labels) == (tuple(TEXTS), (0, 1, 1))
    # Weighed by 1, 2 and 2 of 5; who adds no noise adds none.
    assert truth.noise_scale == pytest.approx(math.hypot(1 * 3.0 / 5, 2 * 1.0 / 5))
    experiment = parse(tables({"federation.clients": 3}))
    assert summed_clients(run, experiment, 1) == [0, 1, 2]
    run.update_info(dropped_out={"1": [2]})
    assert summed_clients(run, experiment, 1) == [0, 1]
    part = read_truth(run, ALL)
    assert part is not None
    assert (part.sequences, part.batch_size, part.noise_scale) == (tuple(TEXTS[:1]), 3, 1.0)
    (run.path / "vault" / "r0001-c01.json").unlink()
    assert read_truth(run, ALL) is None


def test_without_noise_a_sum_has_none(tmp_path: Path) -> None:
    truth = read_truth(built(tmp_path / "run", [truth_of(1, c, TEXTS[:1]) for c in range(3)]), ALL)
    assert truth is not None
    assert truth.noise_scale is None


def test_a_sum_without_classes_has_none_or_is_damaged(tmp_path: Path) -> None:
    bare = [truth_of(1, client, TEXTS[:1], labels=()) for client in range(3)]
    truth = read_truth(built(tmp_path / "bare", bare), ALL)
    assert truth is not None
    assert truth.labels == ()
    run = built(tmp_path / "some", [*bare[:2], truth_of(1, 2, TEXTS[:1])])
    with pytest.raises(CaptureError) as refused:
        read_truth(run, ALL)
    assert str(refused.value) == f"{run.path / 'vault'}: not every text of round 1 has a class"


def test_the_noise_of_an_aggregator_is_that_of_the_sum_unless_clients_add_their_own(
    tmp_path: Path,
) -> None:
    central = {"kind": "central_dp", "noise_multiplier": 2.0, "max_norm": 1.0}
    truths = [truth_of(1, client, TEXTS[:1]) for client in range(3)]
    changes = {"defense": [central], "federation.algorithm": "fedavg"}
    truth = read_truth(built(tmp_path / "central", truths, changes), ALL)
    assert truth is not None
    assert truth.noise_scale == pytest.approx(2.0 * 1.0 / 3)
    loud = [truth_of(1, client, TEXTS[:1], noise_scale=0.5) for client in range(3)]
    both = read_truth(built(tmp_path / "both", loud, changes), ALL)
    assert both is not None
    assert both.noise_scale is None


# --- texts that are kept --------------------------------------------------------------------------


def test_kept_texts_have_their_classes_where_they_are_wanted_and_known() -> None:
    texts, bare = KeptTexts(sequences=TEXTS[:2], labels=[0, 1]), KeptTexts(sequences=TEXTS[:2])
    unknown = [Example(ids, None) for ids in TEXTS[:2]]
    assert texts.examples(labelled=True) == [Example(TEXTS[0], 0), Example(TEXTS[1], 1)]
    assert texts.examples(labelled=False) == bare.examples(labelled=True) == unknown


@pytest.mark.parametrize("name", ["/etc/theirs", "../../theirs", "a\0b", "", "+all"])
def test_the_name_of_an_attack_is_no_path(tmp_path: Path, name: str) -> None:
    run = built(tmp_path / "run", [])
    (tmp_path / "theirs.json").write_text('{"sequences": [[1]]}')
    with pytest.raises(FedleakError, match="is no name of an attack"):
        read_candidates(run, name)


@pytest.mark.parametrize("name", ["held_out.json", "candidates/mine.json"])
def test_kept_texts_are_checked(tmp_path: Path, name: str) -> None:
    run = built(tmp_path / "run", [])
    assert candidates_file("mine+all") == candidates_file("mine") == Path("candidates/mine.json")
    file = run.path / name

    def read(vocabulary: int | None = None) -> KeptTexts:
        if name == "held_out.json":
            return read_held_out(run, vocabulary)
        return read_candidates(run, "mine", vocabulary)

    def refused(vocabulary: int | None = None) -> str:
        with pytest.raises(FedleakError) as refusal:
            read(vocabulary)
        return str(refusal.value)

    ends = "`fedleak run` with the experiment's file makes it anew, and nothing else is lost"
    gone = refused()
    assert str(file) in gone
    assert gone.endswith(f": {ends}")
    content = {"sequences": TEXTS, "labels": [0, 1, 1]}
    run.write_json(name, content)
    assert read(9) == read() == KeptTexts(**content)
    assert refused(8) == f"{file} is damaged (token ids outside the vocabulary): {ends}"
    run.write_json(name, {"sequences": TEXTS})
    assert read(9).labels == []
    run.write_json(name, {"sequences": TEXTS, "labels": [0]})
    assert refused() == f"{file} is damaged (not every text has a class): {ends}"
    run.write_json(name, [1])
    assert refused() == f"{file} is damaged (it has no list of texts): {ends}"


# --- what an attacker is told ---------------------------------------------------------------------


def test_facts_are_told_longest_text_first(tmp_path: Path) -> None:
    truth = truth_of(1, 0, TEXTS[:2], labels=(0, 1), noise_scale=0.25)
    run = built(tmp_path / "run", [truth, truth_of(1, 1, TEXTS, labels=())], {})
    for client in (0, 1, 2):
        built_capture(run, client)
    facts = frozenset({"batch_size", "labels", "lengths", "noise_scale"})
    known = knowledge(run, Key(1, 0), ThreatModel(facts))
    assert (known.batch_size, known.labels, known.lengths) == (2, (1, 0), (4, 3))
    assert (known.noise_scale, known.candidates) == (0.25, None)
    bare = knowledge(run, Key(1, 1), ThreatModel(facts))
    assert (bare.batch_size, bare.labels, bare.lengths) == (3, None, (4, 3, 3))
    with pytest.raises(FedleakError) as refused:
        knowledge(run, Key(1, 2), ThreatModel(frozenset({"labels", "batch_size"})))
    assert str(refused.value) == (
        "[threat] grants batch_size, labels, but the vault has no r0001-c02: run with the vault "
        f"on, take it from a node with `fedleak score {run.path} --vault FOLDER`, or grant nothing"
    )


def test_a_question_is_the_audits_list_for_this_update(tmp_path: Path) -> None:
    run = built(tmp_path / "run", [truth_of(1, 0, TEXTS[:2])])
    built_capture(run, 0)
    held_out = {"sequences": [(2, 20 + i, 3) for i in range(12)], "labels": [1] * 12}
    run.write_json("held_out.json", held_out)
    threat = ThreatModel(frozenset({"candidates"}))
    truth, texts = truth_of(1, 0, TEXTS[:2]), KeptTexts(**held_out)
    assert knowledge(run, Key(1, 0), threat).candidates == questions(truth, texts, 0, 3).asked
    file = KeptTexts(sequences=[*TEXTS, (2, 30, 3)], labels=[1] * 4)
    candidates = knowledge(run, Key(1, 0), threat, file).candidates
    assert candidates == questions(truth, texts, 0, 3, file).asked
    assert candidates != questions(truth, texts, 0, 3).asked


def built_capture(run: Run, client: int) -> None:
    known = Knowledge(learning_rate=0.1, local_steps=1, dropout=False)
    update = ClientUpdate(UpdateKind.GRADIENT, {"a": torch.zeros(1)}, 2)
    run.captures.write(Capture(Key(1, client), update, known))
