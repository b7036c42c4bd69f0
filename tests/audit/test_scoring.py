import io
import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from built import answer_of, truth_of
from rich.console import Console

from fedleak.attacks.analytic.probes import Probes
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.audit import answer_scores, scoring
from fedleak.audit.answer_scores import guess, score_sequences
from fedleak.audit.gaps import refuse_gaps
from fedleak.audit.grants import knowledge
from fedleak.audit.metrics.rouge import rouge
from fedleak.audit.score_files import mark, primary
from fedleak.audit.scoring import score, score_run
from fedleak.config.components import NamedAttack
from fedleak.config.loading import parse
from fedleak.models import CLASSIFICATION, ModelSpec, loading
from fedleak.report.tables.attacks import attack_table
from fedleak.report.tables.personal_data import personal_data_tables
from fedleak.report.terminal.table import print_table
from fedleak.running.workers.answers import checked
from fedleak.running.workers.process import Job
from fedleak.running.workers.process import answer_of as answer_to
from fedleak.store import records
from fedleak.store.records import Fact, LeakageRow
from fedleak.store.run import EVERYONE, Capture, Key, Run
from fedleak.store.summaries import SUMMARY, CopiesRead, PositiveControl
from fedleak.training.observation import ClientUpdate, Knowledge, ThreatModel, UpdateKind
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import FedleakError
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

SCORES = [
    name
    for name in LeakageRow.model_fields
    if name.startswith(("rouge", "paper", "exact", "token", "control"))
]


@pytest.fixture
def sequences(bert_tiny, texts):
    return [tuple(ids) for ids in bert_tiny.encode(texts[:40])]


@pytest.fixture
def make(tmp_path, sequences):
    """Writes a run as training and attacks leave it."""

    def write(truths, answers, *, controls=True, name="builtin/bert-tiny", task=None):
        experiment = parse(
            {
                "name": "made",
                "model": {"name": name} | ({"task": task} if task else {}),
                "data": {"name": "builtin/notes"},
                "audit": {"controls": controls},
            }
        )
        run = Run(tmp_path)
        run.create(
            experiment=experiment.model_dump(mode="json"),
            fingerprint=experiment.fingerprint,
            status="finished",
            num_labels=2,
            examples={"training": experiment.data.samples, "held_out": experiment.data.held_out},
            versions={"fedleak": "0"},
            model_fingerprint="x",
        )
        run.write_json("held_out.json", {"sequences": sequences[20:], "labels": [0] * 20})
        for truth in truths:
            run.vault.write(Key(truth.round, truth.client), truth.to_json())
        run.write_rows(records.answers(run.fingerprint()), answers)
        return run

    return write


def figures(scores):
    return [*scores.content, *scores.paper, scores.exact_match, scores.token_recall]


# --- one answer against one truth -----------------------------------------------------------


def test_the_truth_in_any_order_is_perfect(bert_tiny, sequences):
    for order in itertools.permutations(sequences[:3]):
        scores = score_sequences(order, sequences[:3], bert_tiny)
        assert figures(scores) == [100.0] * 6 + [1.0, 1.0]
        assert scores.token_precision == 1.0


@pytest.mark.parametrize("answers", [[], [()], [(0,) * 9] * 2, [(0,) * 9], [(2, 3)] * 2])
def test_no_answer_padding_and_marks_are_worth_nothing(bert_tiny, sequences, answers):
    assert bert_tiny.tokenizer.pad_token_id == 0
    scores = score_sequences(answers, sequences[:2], bert_tiny)
    assert (*scores.content, scores.exact_match, scores.token_recall) == (0.0,) * 5
    if (2, 3) not in answers:  # papers keep [CLS] and [SEP]
        assert figures(scores) == [0.0] * 8
    assert scores.token_precision is None


def test_one_answer_counts_for_one_text(bert_tiny, sequences):
    a, b = sequences[:2]
    twice = score_sequences([a, a], [a, b], bert_tiny)
    once = score_sequences([a], [a, b], bert_tiny)
    assert twice.exact_match == once.exact_match == 0.5
    assert once.content.rougeL == 50.0
    assert [pair.answer for pair in once.pairs] == [bert_tiny.decode(a), None]
    assert score_sequences([a, a], [a, a], bert_tiny).exact_match == 1.0
    assert score_sequences([a], [a, a], bert_tiny).exact_match == 0.5


def test_more_answers_than_texts_do_not_help(bert_tiny, sequences):
    wrong, right = sequences[10:12], sequences[:2]
    assert score_sequences(wrong + right, right, bert_tiny) == score_sequences(
        wrong, right, bert_tiny
    )
    assert score_sequences(right + wrong, right, bert_tiny).exact_match == 1.0


def test_an_answer_that_has_each_text_twice_over_is_that_of_the_batch(bert_tiny, sequences):
    first, second, *_ = sequences
    truths = [first, first, second]
    twice = score_sequences([first] * 4 + [second] * 2, truths, bert_tiny)
    assert twice == score_sequences(truths, truths, bert_tiny)
    of_one = score_sequences([first] * 3 + [second] * 3, truths, bert_tiny)
    assert of_one.exact_match == pytest.approx(2 / 3)


def test_no_more_of_an_answer_is_compared_than_a_model_takes(bert_tiny, sequences):
    long = [sequences[0] * 100_000]
    cut = [ids[: bert_tiny.max_length] for ids in long]
    assert score_sequences(long, sequences[:1], bert_tiny) == score_sequences(
        cut, sequences[:1], bert_tiny
    )


def test_marks_and_their_absence_do_not_change_content(bert_tiny, sequences):
    (sequence,) = sequences[:1]
    bare = score_sequences([sequence[1:-1]], [sequence], bert_tiny)
    assert bare.exact_match == 1.0
    assert bare.content.rougeL == 100.0
    assert bare.paper.rougeL < 100.0


def test_exact_answers_are_paired_with_their_texts_first(bert_tiny):
    """ROUGE does not see punctuation, so by ROUGE alone any order would do."""
    a, b = (tuple(x) for x in bert_tiny.encode(["he hit her!", "he hit her?"]))
    scores = score_sequences([b, a], [a, b], bert_tiny)
    assert scores.exact_match == 1.0


def test_a_text_without_content_is_scored(bert_tiny):
    empty = tuple(bert_tiny.encode(["\u200b"])[0])
    assert set(empty) <= bert_tiny.special_ids()
    score_sequences([empty], [empty], bert_tiny)


def test_a_guess_scores_what_chance_does(bert_tiny, sequences):
    """The mean over all held-out texts is what ten draws estimate."""
    held_out = sequences[20:]
    texts = [bert_tiny.decode(sequence) for sequence in sequences]
    guessed, chance, variance = [], [], []
    for n, sequence in enumerate(sequences[:20]):
        guessed.append(guess(held_out, truth_of(1, n, [sequence]), bert_tiny, 0).content.rougeL)
        rouges = [rouge(other, texts[n]).rougeL for other in texts[20:]]
        chance.append(statistics.fmean(rouges))
        variance.append(statistics.pvariance(rouges) / answer_scores.GUESSES)
    error = math.sqrt(sum(variance)) / 20
    assert statistics.fmean(guessed) == pytest.approx(statistics.fmean(chance), abs=4 * error)
    assert 0 < statistics.fmean(chance) < 30
    assert len(set(guessed)) > 1


def test_a_guess_finds_the_share_of_tokens_that_its_draws_find_on_average(bert_tiny, sequences):
    truth, held_out = truth_of(1, 0, sequences[:2]), sequences[20:]
    rng, recalls = stream(0, "guess", 1, 0), []
    for _ in range(answer_scores.GUESSES):
        drawn = [held_out[i] for i in torch.randint(len(held_out), (2,), generator=rng).tolist()]
        recalls.append(score_sequences(drawn, truth.sequences, bert_tiny).token_recall)
    guessed = guess(held_out, truth, bert_tiny, 0)
    assert guessed.token_recall == pytest.approx(statistics.fmean(recalls))
    assert 0 < guessed.token_recall < 1


def test_a_guess_looks_at_nothing_but_the_number_of_texts(bert_tiny, sequences):
    held_out = sequences[20:]
    scores = guess(held_out, truth_of(1, 0, sequences[:2]), bert_tiny, 0)
    assert scores == guess(held_out, truth_of(1, 0, sequences[:2]), bert_tiny, 0)
    # Held-out texts that are the truth: what is drawn does not depend on it.
    cheat = guess(sequences[:2], truth_of(1, 0, sequences[:2]), bert_tiny, 0)
    assert 0 < cheat.content.rougeL < 100
    assert guess([], truth_of(1, 0, sequences[:2]), bert_tiny, 0) == answer_scores.Scores()


def test_no_pair_of_texts_is_compared_twice(bert_tiny, sequences):
    """Ten draws let every text of a batch meet every held-out one, and more than once."""
    for size in (5, 10, 20):
        rouge.cache_clear()
        guess(sequences[20:26], truth_of(1, 0, sequences[:size]), bert_tiny, 0)
        # Content, and the chosen pairs once more with their marks.
        assert 5 * size <= rouge.cache_info().misses <= 2 * 6 * size


# --- what an attacker is told ---------------------------------------------------------------

SERVER = Knowledge(learning_rate=0.5, local_steps=1, dropout=False)


@pytest.fixture
def captured(make):
    truth = GroundTruth(
        round=1,
        client=0,
        sequences=((2, 5, 3), (2, 6, 7, 8, 3), (2, 9, 4, 3)),
        labels=(0, 1, 1),
        batch_size=3,
        noise_scale=0.25,
    )
    run = make([truth], [])
    for client in (0, 1):
        update = ClientUpdate(UpdateKind.GRADIENT, {"a": torch.zeros(1)}, 3)
        run.captures.write(Capture(Key(1, client), update, SERVER))
    return run


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ((), {}),
        (("lengths",), {"lengths": (5, 4, 3)}),
        (("labels", "lengths"), {"labels": (1, 1, 0), "lengths": (5, 4, 3)}),
        (("batch_size", "noise_scale"), {"batch_size": 3, "noise_scale": 0.25}),
    ],
)
def test_only_what_is_granted_is_known(captured, facts, expected):
    known = knowledge(captured, Key(1, 0), ThreatModel(frozenset(facts)))
    assert known == Knowledge(learning_rate=0.5, local_steps=1, dropout=False, **expected)
    assert set(known.granted()) == {"learning_rate", "local_steps", "dropout"} | set(facts)


def test_facts_that_are_not_there_cannot_be_granted(captured):
    assert knowledge(captured, Key(1, 1), ThreatModel()) == SERVER
    with pytest.raises(FedleakError, match=r"\[threat\] grants labels, but the vault has no"):
        knowledge(captured, Key(1, 1), ThreatModel(frozenset({"labels"})))


# --- a whole run ----------------------------------------------------------------------------


def test_controls_are_of_another_client_in_the_same_round(make, bert_tiny, sequences):
    keys = [Key(r, c) for r in (1, 2) for c in (0, 1, 2)]
    truth = {key: [sequences[i]] for i, key in enumerate(keys)}
    given = {key: [sequences[i + 6]] for i, key in enumerate(keys)}
    run = make(
        [truth_of(*key, truth[key]) for key in keys],
        [answer_of(*key, given[key]) for key in reversed(keys)],
    )
    rows = [scored.row for scored in score_run(run)]
    assert [(row.round, row.client) for row in rows] == keys
    for row in rows:
        key = Key(row.round, row.client)
        own = score_sequences(given[key], truth[key], bert_tiny)
        others = {
            (scores.content.rougeL, scores.token_recall)
            for k in keys
            if k.client != key.client and k.round == key.round
            for scores in [score_sequences(given[k], truth[key], bert_tiny)]
        }
        assert (row.rougeL, row.token_recall) == (own.content.rougeL, own.token_recall)
        assert (row.control_rougeL, row.control_token_recall) in others
        assert row.guess_rougeL is not None


def test_a_client_is_no_control_of_itself(make, sequences):
    run = make(
        [truth_of(r, 0, sequences[r : r + 1]) for r in (1, 2)],
        [answer_of(r, 0, [sequences[r]]) for r in (1, 2)],
    )
    assert [scored.row.control_rougeL for scored in score_run(run)] == [None, None]
    run = make(
        [truth_of(r, 0, sequences[r : r + 1]) for r in (1, 2)],
        [answer_of(r, 0, [sequences[r]]) for r in (1, 2)]
        + [answer_of(1, 1, status="failed"), answer_of(2, 1, status="abstained")],
    )
    assert [scored.row.control_rougeL for scored in score_run(run)] == [None] * 4


def test_controls_can_be_left_out(make, sequences):
    run = make(
        [truth_of(1, c, sequences[c : c + 1]) for c in (0, 1)],
        [answer_of(1, c, [sequences[c]]) for c in (0, 1)],
        controls=False,
    )
    for scored in score_run(run):
        assert scored.row.control_rougeL is scored.row.guess_rougeL is None
        assert scored.row.rougeL == 100.0


@pytest.mark.parametrize("status", ["abstained", "inadmissible", "failed"])
def test_without_an_answer_nothing_was_measured(make, sequences, status):
    run = make(
        [truth_of(1, 0, sequences[:1]), truth_of(1, 1, sequences[1:2])],
        [
            answer_of(1, 0, status=status, reason="why", seconds=None, device=None),
            answer_of(1, 1, [sequences[1]]),
        ],
    )
    row = score_run(run)[0].row
    assert (row.status, row.reason) == (status, "why")
    measured = {name for name in SCORES if getattr(row, name) is not None}
    assert measured == {"control_rougeL", "control_token_recall"}
    summary = run.read_json("summary.json")["attacks"]["dager"]
    assert summary["status"] == {status: 1, "recovered": 1}
    assert summary["rows"] == 2
    assert summary["sequences"] == 1
    assert summary["exact_match"]["mean"] == 1.0
    assert summary["rougeL"]["mean"] == 100.0


def test_a_summary_without_any_answer_has_no_figures(make, sequences):
    run = make([truth_of(1, 0, sequences[:1])], [answer_of(1, 0, status="failed")])
    score_run(run)
    summary = run.read_json("summary.json")["attacks"]["dager"]
    assert summary["exact_match"] is summary["rougeL"] is summary["token_recall"] is None


def test_a_set_of_tokens_is_scored_as_a_set_of_content_tokens(make):
    truth = truth_of(1, 0, [(2, 50, 50, 51, 3), (2, 51, 52, 3)])
    run = make(
        [truth],
        [
            answer_of(
                1,
                0,
                tokens=[2, 3, 50, 52, 60],
                facts={"longest_sequence": 5, "label_counts": [1, 1]},
            )
        ],
    )
    row = score_run(run)[0].row
    assert (row.token_recall, row.token_precision) == (2 / 3, 2 / 3)
    assert row.rougeL is row.exact_match is row.guess_rougeL is None
    assert row.num_tokens == 9
    assert row.facts == {
        "longest_sequence": Fact(claimed=5, true=5),
        "label_counts": Fact(claimed=[1, 1], true=[0, 2]),
    }
    facts = run.read_json("summary.json")["attacks"]["dager"]["facts"]
    assert (facts["longest_sequence"]["mean"], facts["label_counts"]["mean"]) == (1.0, 0.0)


def test_tokens_and_sequences_of_one_answer_are_each_scored_as_what_they_are(make, bert_tiny):
    """All of the bag and one sentence of two; the same for the other client, as a control."""
    first, second, other = (2, 50, 50, 51, 3), (2, 52, 53, 3), (2, 51, 60, 61, 62, 3)
    bag = [2, 3, 50, 51, 52, 53]
    truths = [truth_of(1, 0, [first, second]), truth_of(1, 1, [other])]
    answers = [
        answer_of(1, 0, [first], tokens=bag),
        answer_of(1, 1, [other], tokens=[2, 3, 51, 60, 61, 62]),
    ]
    row, of_other = (scored.row for scored in score_run(make(truths, answers)))
    alone = score_sequences([first], [first, second], bert_tiny)
    assert (row.token_recall, row.token_precision) == (1.0, 1.0)
    assert (row.exact_match, row.rougeL) == (0.5, alone.content.rougeL)
    assert alone.token_recall == 0.5
    # Of the others' tokens, content and distinct, 51 alone is in this batch.
    assert (row.control_token_recall, of_other.control_token_recall) == (0.25, 0.25)
    crossed = score_sequences([other], [first, second], bert_tiny)
    assert row.control_rougeL == crossed.content.rougeL


@pytest.mark.parametrize("sentences", [[], [(2, 50, 3)]])
def test_a_bag_counts_where_sentences_are_missing(make, sentences):
    """An attack that looked for sentences and has too few is wrong about them, not silent."""
    truths = [truth_of(1, c, [(2, 50, 3), (2, 52, 53, 3)]) for c in (0, 1)]
    run = make(truths, [answer_of(1, c, sentences, tokens=[50, 52, 53, 54]) for c in (0, 1)])
    for scored in score_run(run):
        row = scored.row
        assert (row.token_recall, row.token_precision) == (1.0, 0.75)
        assert (row.control_token_recall, row.exact_match) == (1.0, len(sentences) / 2)
        assert None not in (row.rougeL, row.paper_rougeL, row.control_rougeL, row.guess_rougeL)
        assert len(scored.pairs) == 2
    assert (
        run.read_json("summary.json")["attacks"]["dager"]["exact_match"]["mean"] == row.exact_match
    )


def test_distinct_tokens_of_sequences_count_where_no_bag_is_given(bert_tiny):
    scores = score_sequences([(2, 50, 50, 51, 3)], [(2, 50, 52, 52, 52, 3)], bert_tiny)
    assert (scores.token_recall, scores.token_precision) == (0.5, 0.5)


def test_a_row_says_all_that_was_measured(bert_tiny, sequences):
    first, second = sequences[:2]
    near = (second[0], *second[6:2:-1], *second[7:])
    truth = truth_of(3, 4, [first, second])
    answer = answer_of(
        3, 4, [first, near], facts={"longest_sequence": 9, "colour": "red"},
        margins=(0.5, None, 3.0, 1.0), diagnostics={"a": 1}, seconds=2.5, device="gpu",
        granted=("labels",), knows=("labels", "lengths"), reason="why",
    )  # fmt: skip
    other = answer_of(3, 5, [sequences[6]])
    drawn = guess(sequences[20:], truth, bert_tiny, 7)
    scored = answer_scores.compared(answer, truth, bert_tiny, other=other, guessed=drawn)
    scores = score_sequences([first, near], [first, second], bert_tiny)
    control = score_sequences([sequences[6]], [first, second], bert_tiny)
    assert scored.row == LeakageRow(
        round=3, client=4, attack="dager", status=Status.RECOVERED, reason="why", verified=False,
        batch_size=2, num_tokens=len(first) + len(second),
        **scores.content._asdict(),
        **{f"paper_{name}": value for name, value in scores.paper._asdict().items()},
        exact_match=0.5, token_recall=scores.token_recall, token_precision=scores.token_precision,
        control_rougeL=control.content.rougeL, control_token_recall=control.token_recall,
        guess_rougeL=drawn.content.rougeL, guess_token_recall=drawn.token_recall,
        texts=scores.texts,
        facts={
            "longest_sequence": Fact(claimed=9, true=max(len(first), len(second))),
            "colour": Fact(claimed="red"),
        },
        margin=1.0, diagnostics={"a": 1}, seconds=2.5, device="gpu", granted=("labels",),
        knows=("labels", "lengths"),
    )  # fmt: skip
    # No figure could stand in another's place.
    assert len({*scores.content, *scores.paper}) == 6
    assert len({scores.content.rougeL, control.content.rougeL, drawn.content.rougeL}) == 3
    pairs = scored.pairs
    assert [(pair.truth, pair.answer) for pair in pairs] == [
        (bert_tiny.decode(first), bert_tiny.decode(first)),
        (bert_tiny.decode(second), bert_tiny.decode(near)),
    ]
    assert [pair.rougeL for pair in pairs] == [text.rougeL for text in scored.row.texts]
    no_control = answer_scores.Scores()
    alone = answer_scores.compared(answer, truth, bert_tiny, other=None, guessed=no_control).row
    assert alone.control_rougeL is alone.guess_rougeL is alone.guess_token_recall is None


def test_each_text_has_the_tokens_of_the_whole_answer(bert_tiny):
    texts = [(2, 50, 51, 3), (2, 52, 53, 3)]
    scores = score_sequences([(2, 50, 52, 3), (2, 53, 60, 3)], texts, bert_tiny)
    assert [text.token_recall for text in scores.texts] == [0.5, 1.0]
    assert [text.exact for text in scores.texts] == [False, False]


def test_the_control_is_the_next_client_of_the_nearest_round(bert_tiny, sequences, make):
    """Clients stand in a circle; the sum of a round is compared with that of another round."""
    keys = [Key(1, 0), Key(1, 2), Key(2, 1), Key(2, 2), Key(4, 0)]
    truths = [truth_of(*key, [sequences[i]]) for i, key in enumerate(keys)]
    answers = [answer_of(*key, [sequences[10 + i]]) for i, key in enumerate(keys)]
    rows = {scored.row.key: scored.row for scored in score_run(make(truths, answers))}
    expected = {
        Key(1, 0): Key(1, 2),
        Key(1, 2): Key(1, 0),  # of the same round, and after the last comes the first
        Key(2, 1): Key(2, 2),
        Key(2, 2): Key(2, 1),
        Key(4, 0): Key(2, 1),
    }
    for i, key in enumerate(keys):
        other = sequences[10 + keys.index(expected[key])]
        control = score_sequences([other], [sequences[i]], bert_tiny)
        assert rows[key].control_token_recall == control.token_recall
        assert rows[key].control_rougeL == control.content.rougeL


def test_an_attack_that_should_have_answered_is_missed(make, sequences, monkeypatch):
    run = make([truth_of(1, 0, sequences[:1])], [answer_of(1, 0, sequences[1:2])])
    expected = []
    monkeypatch.setattr(
        scoring, "find_gaps", lambda known, gaps: expected.append(known.attack_names)
    )
    score_run(run, ["absent"])
    score_run(run)
    assert expected == [["absent"], ["probes", "auto"]]


def test_clients_stand_in_a_circle(bert_tiny, sequences, make):
    keys = [Key(1, client) for client in range(4)]
    truths = [truth_of(*key, [sequences[i]]) for i, key in enumerate(keys)]
    answers = [answer_of(*key, [sequences[10 + i]]) for i, key in enumerate(keys)]
    for scored in score_run(make(truths, answers)):
        client = scored.row.client
        control = score_sequences(
            [sequences[10 + (client + 1) % 4]], [sequences[client]], bert_tiny
        )
        assert scored.row.control_token_recall == control.token_recall
        assert scored.row.control_rougeL == control.content.rougeL


def test_the_work_of_an_outside_program_is_noted(make, sequences):
    run = make([truth_of(1, 0, sequences[:1])], [answer_of(1, 0, sequences[1:2])])
    assert not any("import contract" in note for note in score(run, primary(run)).summary.notes)
    outside = answer_of(1, 0, sequences[1:2], settings={"kind": "command"})
    run = make([truth_of(1, 0, sequences[:1])], [outside])
    notes = score(run, primary(run)).summary.notes
    assert any(note.startswith("command runs an outside program") for note in notes)


def test_the_model_of_a_run_is_made_once(make, sequences, monkeypatch):
    run = make([truth_of(1, 0, sequences[:1])], [answer_of(1, 0, sequences[1:2])])
    make_model, made = loading.outline, []

    def counted(spec):
        made.append(spec)
        return make_model(spec)

    monkeypatch.setattr(loading, "outline", counted)
    score_run(run)
    assert len(made) == 1


def test_a_control_whose_answer_is_gone_stays(make, sequences):
    truths = [truth_of(1, c, sequences[c : c + 1]) for c in (0, 1)]
    answers = [answer_of(1, c, [sequences[5 + c]]) for c in (0, 1)]
    run = make(truths, answers)
    before = [scored.row for scored in score_run(run)]
    run.write_rows(records.answers(run.fingerprint()), answers[:1])
    after = [scored.row for scored in score_run(run)]
    assert after == before
    assert before[0].control_rougeL is not None
    # What failed was not measured, and a failure replaces nothing that was.
    failed = answer_of(1, 0, status="failed")
    run.write_rows(records.answers(run.fingerprint()), [failed])
    assert [scored.row for scored in score_run(run)] == before


def test_the_mark_of_rows_changes_with_each_file(make, sequences):
    row = score_run(make([truth_of(1, 0, sequences[:1])], [answer_of(1, 0, sequences[:1])]))[0].row
    nothing = records.ScoredRows()
    marks = {
        mark(records.ScoredRows(**{field: [row]}), None)
        for field in ("leakage", "ledger", "defended", "canary", "members")
    }
    reading = CopiesRead(read=1, exact=1.0, rougeL=1.0, token_recall=1.0)
    copies = PositiveControl(copies=1, texts=1, together=reading, attacks={})
    assert len(marks | {mark(nothing, None), mark(nothing, copies)}) == 7


def test_ids_outside_the_vocabulary_are_a_damaged_vault(make, sequences):
    run = make([truth_of(1, 0, [(2, 10**6, 3)])], [answer_of(1, 0, sequences[:1])])
    assert [scored.row.status for scored in score_run(run)] == ["unscored"]
    assert run.read_document(SUMMARY).missing[0] == (
        f"{run.path / 'vault' / 'r0001-c00.json'} is damaged (token ids outside the vocabulary): "
        "what was scored with it stays, and only `fedleak run FILE --fresh` writes such a file "
        "again"
    )


# --- evidence -------------------------------------------------------------------------------


def summary_of(make, sequences, *lines):
    """The summary of answers that differ in `lines`, one per round."""
    truths = [truth_of(r, 0, sequences[r : r + 1]) for r in range(len(lines))]
    answers = [answer_of(r, 0, [sequences[r]], **line) for r, line in enumerate(lines)]
    run = make(truths, answers)
    rows = [scored.row for scored in score_run(run)]
    return rows, run.read_json("summary.json")["attacks"]["dager"], run


def test_the_smallest_margin_is_that_of_sequences_that_were_proved(make, sequences):
    rows, summary, _ = summary_of(
        make, sequences, {"margins": (900.0, 40.0, 0.5)}, {"margins": (None, 70.0)},
        {"margins": (0.0,)}, {"margins": (None,)}, {},
    )  # fmt: skip
    assert [row.margin for row in rows] == [40.0, 70.0, None, None, None]
    assert summary["margin"] == 40.0


def test_texts_of_one_client_are_no_sample_of_clients(make, sequences):
    """Wilson's interval of these 24 texts would begin at 86, that of 4 clients at 40."""
    keys = [Key(r, c) for r in (1, 2, 3) for c in range(4)]
    truths = [truth_of(*key, sequences[:2]) for key in keys]
    right = {"longest_sequence": max(map(len, sequences[:2]))}
    run = make(truths, [answer_of(*key, sequences[:2], facts=right) for key in keys])
    score_run(run)
    summary = run.read_json("summary.json")["attacks"]["dager"]
    shares = [summary["exact_match"], summary["token_recall"], summary["facts"]["longest_sequence"]]
    ends = ("mean", "low", "high")
    scores = [{end: summary[f"rouge{n}"][end] / 100 for end in ends} for n in "12L"]
    for figure in (*shares, *scores):
        assert (figure["mean"], figure["high"]) == (1.0, 1.0)
        assert figure["low"] == pytest.approx(0.025**0.25, abs=0.02)
    assert summary["guess_rougeL"]["low"] < summary["guess_rougeL"]["mean"] < 40
    assert summary["guess_rougeL"]["high"] > 40


def test_texts_exact_are_weighed_by_their_batches(make, sequences):
    truths = [truth_of(1, 0, sequences[:3]), truth_of(1, 1, sequences[3:4])]
    run = make(truths, [answer_of(1, 0, sequences[:3]), answer_of(1, 1, sequences[:1])])
    score_run(run)
    assert run.read_json("summary.json")["attacks"]["dager"]["exact_match"]["mean"] == 0.75


@pytest.mark.parametrize(
    ("clients", "size", "warning"),
    [
        ([0], 30, "one client"),
        ([EVERYONE], 30, "one group of clients"),
        (range(9), 3, "fewer than 10 clients"),
        (range(10), 1, "fewer than 20 texts"),
        (range(9), 1, "fewer than 10 clients and fewer than 20 texts"),
        (range(10), 2, None),
    ],
)
def test_few_clients_and_few_texts_are_examples(make, sequences, clients, size, warning):
    truths = [truth_of(1, client, sequences[:size]) for client in clients if client != EVERYONE]
    truths = truths or [truth_of(1, client, sequences[:8]) for client in range(4)]
    answers = [answer_of(1, client, tokens=[50, 51]) for client in clients]
    answers.append(answer_of(1, truths[0].client, attack="silent", status="abstained"))
    run = make(truths, answers)
    score_run(run)
    attacks = run.read_json("summary.json")["attacks"]
    assert attacks["dager"]["warning"] == (warning and f"{warning}: an example, not a rate")
    assert attacks["silent"]["warning"] is None
    console = Console(width=100, record=True, file=io.StringIO())
    print_table(console, attack_table(run.read_document(SUMMARY)))
    text = console.export_text()
    assert ("dager *" in text, f"* {warning}" in " ".join(text.split())) == (
        bool(warning),
        bool(warning),
    )
    assert "silent *" not in text
    assert "interval over clients" in text


def test_budgets_and_candidates_are_summed_up_over_the_rows_that_tell(make, sequences):
    rows, summary, _ = summary_of(
        make,
        sequences,
        {"diagnostics": {"budget": [32, 128], "candidates": {"pairs": 30, "passed": 2}}},
        {"diagnostics": {"budget": [96, 128], "candidates": {"pairs": 50}}},
        {"diagnostics": {"budget": [None, 128]}, "status": "abstained"},
        {"verified": True, "seconds": 4.0},
        {"status": "failed", "seconds": None},
    )
    assert rows[0].diagnostics["budget"] == [32, 128]
    assert summary["budget"] == {"mean": 0.5, "max": 0.75, "rows": 2}
    assert summary["candidates"] == {"pairs": 40.0, "passed": 2.0}
    assert (summary["verified"], summary["rows"]) == (1, 5)
    assert (summary["seconds"], summary["seconds_per_update"]) == (7.0, 1.75)


def test_without_evidence_none_is_reported(make, sequences):
    _, summary, _ = summary_of(make, sequences, {"status": "failed", "seconds": None})
    for key in ("budget", "candidates", "margin", "seconds_per_update"):
        assert summary[key] is None
    assert summary["seconds"] == 0


def shown(run):
    """The summary as it is printed, by heading."""
    console = Console(width=100, record=True, file=io.StringIO())
    print_table(console, attack_table(run.read_document(SUMMARY)))
    lines = (re.split(r"\s{2,}", line.strip()) for line in console.export_text().splitlines())
    return {line[0]: line[1:] for line in lines if len(line) > 1}


def test_the_table_shows_evidence_where_an_attack_has_it(make, sequences):
    given = {"budget": [32, 128], "candidates": {"pairs": 3000, "passed": 2}}
    truths = [truth_of(r, 0, sequences[r : r + 1]) for r in (0, 1)]
    answers = [
        answer_of(0, 0, [sequences[0]], diagnostics=given, verified=True, margins=(1234.56, None)),
        answer_of(1, 0, [sequences[1]], diagnostics={"budget": [None, 128]}),
        *(answer_of(r, 0, [sequences[r]], attack="dlg", seconds=0.25) for r in (0, 1)),
    ]
    run = make(truths, answers)
    score_run(run)
    lines = shown(run)
    assert lines["seconds"] == ["2.0", "0.5"]
    assert lines["an update"] == ["1.000", "0.250"]
    assert lines["batches proved"] == ["1 of 2", "-"]
    assert lines["smallest margin"] == ["1,234.6", "-"]
    assert lines["rank budget, %"] == ["25 (max 25; 1 of 2)", "-"]
    assert lines["candidates"] == ["3,000>2", "-"]


def test_the_table_has_no_lines_for_evidence_that_nobody_has(make, sequences):
    _, _, run = summary_of(make, sequences, {"status": "failed", "seconds": None})
    words = ("an update", "proved", "margin", "budget", "candidates")
    assert not [heading for heading in shown(run) if any(word in heading for word in words)]


def test_what_is_not_finite_is_null_on_disk():
    """JSON has no infinity, and an attack may well have found nothing that comes second."""
    answer = Reconstruction(
        status=Status.RECOVERED,
        sequences=((2, 3), (2, 5, 3)),
        evidence=(0.5, math.inf),
        margins=(math.inf, -math.inf),
        diagnostics={"a": math.nan, "b": [1, {"c": (math.inf, 2.0, "x", None, True)}]},
    )
    job = Job(
        run=Path("run"),
        key=Key(1, 0),
        attack=NamedAttack("probes", Probes()),
        knowledge=SERVER,
        model=ModelSpec(name="builtin/bert-tiny", task=CLASSIFICATION, num_labels=2),
        seed=0,
    )
    answer = checked(answer, vocabulary=6, longest=3, examples=2)
    line = json.loads(records.answers("f").written(answer_to(job, answer, 1.0, "cpu")))
    assert line["sequences"] == [[2, 3], [2, 5, 3]]
    assert (line["evidence"], line["margins"]) == ([0.5, None], [None, None])
    assert line["diagnostics"] == {"a": None, "b": [1, {"c": [None, 2.0, "x", None, True]}]}


# --- files ----------------------------------------------------------------------------------


def test_what_has_no_truth_is_not_scored_and_scoring_again_changes_nothing(make, sequences):
    run = make(
        [truth_of(1, 0, sequences[:1])],
        [answer_of(1, 0, [sequences[0]]), answer_of(1, 1, [sequences[1]])],
    )
    assert [(scored.row.client, scored.row.status) for scored in score_run(run)] == [
        (0, "recovered"),
        (1, "unscored"),
    ]
    files = {name: (run.path / name).read_bytes() for name in ("leakage.jsonl", "summary.json")}
    score_run(run)
    assert files == {name: (run.path / name).read_bytes() for name in files}


def test_an_answer_without_truth_says_what_the_attack_says_and_no_score(make, sequences):
    facts = {"longest_sequence": 5}
    answer = answer_of(1, 0, [sequences[0]], facts=facts, verified=True, margins=(7.0,))
    run = make([], [answer, answer_of(1, 1, status="failed", reason="it crashed")])
    unscored, failed = (scored.row for scored in score_run(run))
    measured = [*SCORES, "batch_size", "num_tokens", "texts"]
    assert {getattr(unscored, name) for name in measured} == {None}
    assert (unscored.status, unscored.verified, unscored.margin) == ("unscored", True, 7.0)
    assert unscored.facts == {"longest_sequence": Fact(claimed=5)}
    assert (failed.status, failed.reason) == ("failed", "it crashed")
    summary = run.read_document(SUMMARY)
    assert summary.worst_case is None
    dager = summary.attacks["dager"]
    assert (dager.answers, dager.unscored, dager.verified, dager.rougeL) == (1, 1, 1, None)
    (missing,) = (message for message in summary.missing if "no truth" in message)
    assert missing.startswith("2 of 2 captures have no truth")
    assert "1 answers are unscored: `fedleak score" in missing


def test_a_proof_of_what_the_client_did_not_train_on_is_none_and_the_results_are_wrong(
    make, sequences
):
    truths = [truth_of(r, 0, sequences[:2]) for r in (1, 2, 3)]
    answers = [
        answer_of(1, 0, sequences[:2], verified=True),
        answer_of(2, 0, sequences[1:3], verified=True),
        answer_of(3, 0, tokens=sequences[0], verified=True),
    ]
    run = make(truths, answers)
    rows = [scored.row for scored in score_run(run)]
    assert [(row.verified, row.exact_match) for row in rows] == [
        (True, 1.0),
        (False, 0.5),
        (False, None),
    ]
    assert [row.reason for row in rows] == ["", answer_scores.REFUTED, answer_scores.REFUTED]
    summary = run.read_document(SUMMARY)
    assert summary.attacks["dager"].verified == 1
    assert shown(run)["batches proved"] == ["1 of 3"]
    (wrong,) = (message for message in summary.wrong if "claim a proof" in message)
    assert "2 of 3 answers claim a proof of what the client did not train on" in wrong
    assert "of dager; for r0002-c00, r0003-c00" in wrong
    with pytest.raises(FedleakError, match="claim a proof"):
        refuse_gaps(run)
    # Without the truth what was seen with it stays.
    (run.path / "vault" / "r0002-c00.json").unlink()
    assert [scored.row.verified for scored in score_run(run)] == [True, False, False]
    assert any(
        "2 of 3 answers claim a proof" in message for message in run.read_document(SUMMARY).wrong
    )


def test_a_truth_that_comes_later_scores_what_was_unscored(make, sequences):
    run = make([], [answer_of(1, 0, [sequences[0]])])
    assert [scored.row.status for scored in score_run(run)] == ["unscored"]
    truth = truth_of(1, 0, sequences[:1])
    run.vault.write(Key(1, 0), truth.to_json())
    assert [scored.row.exact_match for scored in score_run(run)] == [1.0]
    (run.path / "vault" / "r0001-c00.json").unlink()
    assert [scored.row.exact_match for scored in score_run(run)] == [1.0]
    assert not any("unscored" in message for message in run.read_document(SUMMARY).missing)


def test_rows_have_the_public_fields(make, sequences):
    run = make([truth_of(1, 0, sequences[:1])], [answer_of(1, 0, [sequences[0]])])
    score_run(run)
    (row,) = (json.loads(line) for line in (run.path / "leakage.jsonl").read_text().splitlines())
    public = """round client attack status verified batch_size num_tokens rouge1 rouge2 rougeL
        paper_rouge1 paper_rouge2 paper_rougeL exact_match token_recall token_precision
        control_rougeL seconds device knows"""
    assert set(public.split()) <= row.keys()
    assert run.read_json("summary.json")["schema_version"] == 2


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FedleakError, match="not a run directory"):
        score_run(Run(tmp_path / "none"))


# --- personal data ---------------------------------------------------------------------------


@pytest.fixture
def with_numbers(bert_tiny):
    """Private texts of which two have personal data, and other texts."""
    return [
        tuple(ids)
        for ids in bert_tiny.encode(
            ["call 12345678 or 87654321 today", "she slept well", "born 3 march 1984", "i ran home"]
        )
    ]


def test_personal_data_is_read_piece_by_piece(make, bert_tiny, with_numbers):
    two, none, born, other = with_numbers
    # The first number is read, the second is not, and of the date one word is missing.
    half = bert_tiny.encode(["call 12345678 or 8765 today"])[0]
    run = make(
        [truth_of(1, 0, [two, none]), truth_of(1, 1, [born])],
        [answer_of(1, 0, [other, half]), answer_of(1, 1, [born])],
    )
    first, second = (scored.row for scored in score_run(run))
    assert [(item.kind, item.text, item.read) for item in first.personal] == [
        ("number", 0, True),
        ("number", 0, False),
    ]
    assert [text.personal_data for text in first.texts] == [0.5, None]
    assert [(item.kind, item.read, item.control) for item in second.personal] == [
        ("date", True, False)
    ]
    summary = run.read_document(SUMMARY)
    personal = summary.worst_case.personal
    assert summary.attacks["dager"].personal == personal
    assert {kind: (row.items, row.read, row.control) for kind, row in personal.kinds.items()} == {
        "date": (1, 1, 0),
        "number": (2, 1, 0),
    }
    assert personal.read.mean == pytest.approx(2 / 3)
    assert personal.read.of_clients.mean == pytest.approx(3 / 4)
    assert personal.control.mean == 0
    (table,) = personal_data_tables(summary)
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["date", "1", "1", "0"],
        ["number", "2", "1", "0"],
        ["all kinds", "3", "2", "0"],
    ]
    for name in ("leakage.jsonl", "summary.json"):
        assert not re.search("12345678|87654321|1984", (run.path / name).read_text())


def test_what_stands_in_another_clients_answer_is_said_beside_it(make, with_numbers):
    two, _, _, other = with_numbers
    run = make(
        [truth_of(1, 0, [two]), truth_of(1, 1, [two])],
        [answer_of(1, 0, [other]), answer_of(1, 1, [two])],
    )
    first, second = (scored.row for scored in score_run(run))
    assert [(item.read, item.control) for item in first.personal] == [(False, True)] * 2
    assert [(item.read, item.control) for item in second.personal] == [(True, False)] * 2
    # The answer of the other client is gone: what was known of it stays.
    run.write_rows(records.answers(run.fingerprint()), [answer_of(1, 1, [two])])
    assert score_run(run)[1].row.personal == second.personal


def test_more_answers_than_texts_read_no_more_personal_data(make, with_numbers):
    _, _, born, other = with_numbers
    run = make([truth_of(1, 0, [born])], [answer_of(1, 0, [other, born])])
    assert [item.read for item in score_run(run)[0].row.personal] == [False]


def test_all_attacks_together_read_what_any_reads(make, bert_tiny, with_numbers):
    two = with_numbers[0]
    halves = [
        bert_tiny.encode([text])[0] for text in ("call 12345678 or it", "call it or 87654321")
    ]
    answers = [
        answer_of(1, 0, [halves[0]]),
        answer_of(1, 0, [halves[1]], attack="keyspan"),
        answer_of(1, 0, tokens=two, attack="probes"),
        answer_of(1, 0, attack="dlg", status="abstained"),
    ]
    run = make([truth_of(1, 0, [two])], answers)
    score_run(run)
    summary = run.read_document(SUMMARY)
    read = {
        name: attack.personal.read and attack.personal.read.mean
        for name, attack in summary.attacks.items()
    }
    assert read == {"dager": 0.5, "dlg": None, "keyspan": 0.5, "probes": None}
    assert summary.attacks["dlg"].personal.unanswered == 2
    assert summary.worst_case.personal.read.mean == 1.0
    assert summary.worst_case.personal.unanswered == 0


def test_personal_data_that_no_attack_answered_for_is_not_called_unread(make, with_numbers):
    answers = [answer_of(1, 0, status="abstained"), answer_of(1, 0, tokens=[5], attack="probes")]
    run = make([truth_of(1, 0, [with_numbers[0]])], answers)
    score_run(run)
    (table,) = personal_data_tables(run.read_document(SUMMARY))
    assert [[cell.text for cell in row] for row in table.rows] == [["all kinds", "2", "-", "-"]]
    assert "how much was read is not known" in table.notes[1]


def test_of_an_update_of_no_text_nothing_could_be_read(make, sequences):
    """Poisson sampling may draw nobody."""
    truths = [truth_of(1, 0, []), truth_of(1, 1, sequences[4:5])]
    answers = [
        answer_of(1, 0, status="abstained", reason="why"),
        answer_of(1, 0, [sequences[4]], attack="wrong", verified=True),
        answer_of(1, 1, [sequences[4]]),
    ]
    run = make(truths, answers)
    score_run(run)
    rows = {row.id: row for row in run.rows(records.LEAKAGE) if row.client == 0}
    assert {row.batch_size for row in rows.values()} == {0}
    assert not any(row.texts or row.verified for row in rows.values())
    summary = run.read_document(SUMMARY)
    assert summary.worst_case.texts == 1
    assert "1 of 2 updates have no text: nothing could be read of them" in summary.notes
    assert sum("claim a proof" in sentence for sentence in summary.missing) == 1


def test_files_of_texts_without_personal_data_are_as_before(make, sequences):
    run = make([truth_of(1, 0, sequences[4:5])], [answer_of(1, 0, [sequences[4]])])
    score_run(run)
    assert "personal" not in (run.path / "leakage.jsonl").read_text()
    assert "personal_data" not in json.dumps(run.read_json("summary.json")["attacks"])
