"""Who was in an update: the lists that are asked about, and what is said of the answers."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import beta
from tiny import Here, call, tables

import fedleak
from fedleak import models
from fedleak.attacks.membership.attack import Membership
from fedleak.attacks.reconstruction import Status
from fedleak.audit import scoring
from fedleak.audit.estimates import Largest
from fedleak.audit.grants import knowledge
from fedleak.audit.kept_texts import KeptTexts, read_held_out
from fedleak.audit.metrics import intervals
from fedleak.audit.privacy import membership
from fedleak.audit.privacy.candidates import questions
from fedleak.audit.vault import read_truth
from fedleak.config.loading import parse
from fedleak.flower.engines import train
from fedleak.models import loading
from fedleak.report.tables.membership import membership_tables
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.store.records import LEAKAGE, MEMBERSHIP, Answer, MembershipRow
from fedleak.store.run import EVERYONE, Key
from fedleak.store.summaries import SUMMARY
from fedleak.training.observation import Observation, ThreatModel
from fedleak.training.privacy.lower_bounds import gaussian_epsilon
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

MODEL = {"name": "smaller than builtin/bert-tiny: `folder`"}
ASKED = ThreatModel(frozenset({"candidates"}))
ONE_ROUND = {
    "federation.rounds": 1,
    "federation.clients": 4,
    "federation.batch_size": 4,
    "data.samples": 16,
}
DP_SGD = {"kind": "dp_sgd", "noise_multiplier": 0.01, "max_grad_norm": 0.5, "sampling": "fixed"}


@pytest.fixture(scope="module", autouse=True)
def folder(saved):
    """Makes a model of one layer, of the built-in one's vocabulary: it costs a twentieth."""
    MODEL["name"] = saved("bert", layers=1)


def experiment_of(**changes):
    return parse(
        tables(
            {
                "model": MODEL,
                "data": {"name": "builtin/notes", "samples": 24, "held_out": 68},
                "federation": {"clients": 6, "rounds": 2, "batch_size": 2, "learning_rate": 0.1},
                "utility": {"rounds": []},
                "attack": [{"kind": "membership"}],
            }
            | changes
        )
    )


def carried_out(path, experiment):
    run = preparation.prepare(experiment, path / "run")
    pipeline.carry_out(run, experiment, train, Crew([Here()]))
    return run


@pytest.fixture(scope="module")
def attacked(folder, tmp_path_factory):
    return carried_out(tmp_path_factory.mktemp("attacked"), experiment_of())


def figures(run):
    summary = run.read_document(SUMMARY)
    assert not summary.missing
    return {figure.score: figure for figure in summary.membership.figures}


# --- the list -----------------------------------------------------------------------------------


def ids(start, count):
    return [(1, i, 2) for i in range(start, start + count)]


def truth_of(sequences, labels=()):
    return GroundTruth(
        round=1, client=0, sequences=tuple(sequences), labels=tuple(labels), batch_size=4
    )


def test_each_text_of_a_batch_stands_beside_a_held_out_one_of_its_class():
    truth = truth_of(ids(10, 6), [0, 1, 1, 0, 1, 1])
    held_out = KeptTexts(sequences=ids(100, 90), labels=[i % 2 for i in range(90)])
    made = questions(truth, held_out, seed=0, clients=1)
    assert made == questions(truth, held_out, seed=0, clients=1)
    assert len(made.pairs) == 6
    assert len(made.asked.public) == 45  # half of them, which is less than 200
    texts = [example.ids for example in made.asked.listed]
    assert len(set(texts)) == 12
    assert not set(texts) & {example.ids for example in made.asked.public}
    for member, other in made.pairs:
        assert texts[member] in truth.sequences
        assert texts[other] in held_out.sequences
        assert made.asked.listed[member].label == made.asked.listed[other].label
        assert made.inside[member]
        assert not made.inside[other]


def test_the_order_of_the_list_says_nothing():
    """Of a pair, the text of the batch comes first as often as not."""
    held_out = KeptTexts(sequences=ids(100, 90))
    first = []
    for seed in range(200):
        made = questions(truth_of(ids(10, 2)), held_out, seed, clients=1)
        first += [member < other for member, other in made.pairs]
    assert abs(sum(first) - 200) < 4 * math.sqrt(400 * 0.25)


def test_a_text_on_both_sides_or_without_a_partner_is_left_out():
    known = [*ids(100, 9), (1, 10, 2)]
    made = questions(
        truth_of([*ids(10, 3), (1, 11, 2)]), KeptTexts(sequences=known), seed=0, clients=1
    )
    assert {
        example.ids
        for example, inside in zip(made.asked.listed, made.inside, strict=True)
        if inside
    } == {
        (1, 11, 2),
        (1, 12, 2),
    }
    few = questions(truth_of(ids(10, 9)), KeptTexts(sequences=ids(100, 4)), seed=0, clients=1)
    assert len(few.pairs) == 2
    one_class = KeptTexts(sequences=ids(100, 20), labels=[1] * 20)
    assert not questions(truth_of(ids(10, 3), [0, 0, 0]), one_class, seed=0, clients=1).pairs


def test_only_the_attack_that_is_asked_gets_the_list(attacked):
    experiment = experiment_of(**{"threat.knows": ["labels"]})
    threats = {attack.name: attack.threat.knows for attack in experiment.attacks}
    assert threats == {
        "membership": frozenset({"labels", "candidates"}),
        "probes": frozenset({"labels"}),
    }
    assert knowledge(attacked, Key(1, 0), ThreatModel()).candidates is None
    for row in attacked.rows(LEAKAGE):
        assert ("candidates" in row.knows) == (row.attack == "membership")


# --- what is said of the answers ----------------------------------------------------------------


def test_who_was_in_an_update_without_a_defense_is_told(attacked):
    by_score = figures(attacked)
    assert by_score["residual"].auc.mean > 0.95
    assert by_score["residual"].p < 0.01
    assert by_score["residual"].epsilon > 0.5
    assert by_score["cosine"].auc.mean < by_score["residual"].auc.mean
    # Some held-out texts stand beside two texts of a client, in two rounds: they count once.
    assert by_score["residual"].members == 24
    assert by_score["residual"].pairs == by_score["residual"].controls > 15
    assert by_score["residual"].found_at_1_percent is None  # fewer than 100 controls
    assert [round_figure.round for round_figure in by_score["residual"].rounds] == [1, 2]


def test_texts_that_are_not_in_the_update_are_told_apart_by_chance(attacked):
    """The same attack is asked about the batch of another client: its update says nothing of it."""
    experiment, held_out = experiment_of(), read_held_out(attacked)
    model = loading.load(experiment.model_spec(2))
    answers, truths = {}, {}
    for key in attacked.captures.all_keys():
        models.load_parameters_(model, attacked.models.read_model(key.round))
        other = Key(key.round, (key.client + 1) % 6)
        seen = Observation(
            round=key.round,
            client=key.client,
            update=attacked.captures.read_capture(key).update,
            knowledge=knowledge(attacked, other, ASKED),
        )
        reconstruction = Membership()(seen, model, rng=stream(0))
        truths[other] = read_truth(attacked, other)
        answers[other, "membership"] = answer_of(other, reconstruction.scores)
    rows = membership.membership_rows(experiment, held_out, {}, answers, truths, [])
    summary = membership.summarised(experiment, rows, Largest())
    assert len(summary.figures) == 4
    for figure in summary.figures:
        assert abs(figure.auc.mean - 0.5) < 0.2
        assert figure.auc.low < 0.5 < figure.auc.high
        assert figure.p > 0.05
        assert figure.epsilon == 0.0


def answer_of(key, scores):
    return Answer(
        round=key.round,
        client=key.client,
        attack="membership",
        settings={},
        granted=(),
        knows=(),
        seconds=None,
        device=None,
        status=Status.RECOVERED,
        sequences=None,
        margins=(),
        tokens=None,
        scores=dict(scores),
        facts={},
        diagnostics={},
        verified=False,
        reason="",
    )


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        pytest.param({"defense": [DP_SGD]}, 0.85, marks=pytest.mark.slow),
        ({"defense": [DP_SGD, {"kind": "secure_sum"}]}, 0.6),
        pytest.param(
            {"federation.algorithm": "fedavg", "update.share": ["attention", "classifier"]},
            0.9,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["noise", "sum", "fedavg"],
)
def test_it_works_under_noise_on_sums_and_after_local_training(tmp_path, changes, limit):
    """The areas are 0.92, 0.75 and 1: to be wrong about the sum, rounding had to move 38 pairs."""
    run = carried_out(tmp_path, experiment_of(**ONE_ROUND | changes))
    figure = figures(run)["residual"]
    assert figure.auc.mean > limit
    sums = "secure_sum" in str(changes)
    assert figure.clients == (None if sums else 4)
    assert {row.client for row in run.rows(MEMBERSHIP)} == ({EVERYONE} if sums else {*range(4)})


def test_updates_of_a_round_that_are_asked_together_are_calibrated_on_each_other(tmp_path):
    together, alone = (
        carried_out(
            tmp_path / str(at_once), experiment_of(**ONE_ROUND | {"workers.at_once": at_once})
        )
        for at_once in (8, 1)
    )
    assert figures(together).keys() - figures(alone).keys() == {"calibrated"}
    figure = figures(together)["calibrated"]
    assert (figure.updates, figure.clients, figure.pairs) == (4, 4, 16)
    assert figure.auc.mean > 0.9
    for row, other in zip(together.rows(MEMBERSHIP), alone.rows(MEMBERSHIP), strict=True):
        assert row.scores["residual"] == pytest.approx(other.scores["residual"], rel=1e-3, abs=1e-3)


def test_rows_stay_where_the_truth_is_gone(tmp_path):
    changes = {"federation.rounds": 1, "federation.clients": 2, "data.samples": 8}
    run = carried_out(tmp_path, experiment_of(**changes))
    before = run.rows(MEMBERSHIP)
    (run.path / "vault" / f"{Key(1, 0)}.json").unlink()
    scoring.score_run(run)
    assert run.rows(MEMBERSHIP) == before


def test_score_and_report_show_it_and_say_what_it_assumes(attacked, tmp_path):
    code, out, _ = call("score", str(attacked.path))
    assert code == 0
    shown = " ".join(out.split())
    for words in (
        "membership: which texts were in an update",
        "0.5 is chance",
        "too few",
        "decided before training",
        "assumes nothing of the mechanism",
    ):
        assert words in shown
    page = tmp_path / "report.html"
    code, _, _ = call("report", str(attacked.path), "--out", str(page))
    assert code == 0
    assert "membership: which texts were in an update" in page.read_text()


def row(client, inside, scores, round=1, texts=None):
    """A row whose pairs are neighbours in the list, and whose texts no other row has."""
    inside = tuple(inside)
    pairs = tuple((i, i + 1) if inside[i] else (i + 1, i) for i in range(0, len(inside), 2))
    own = range(1000 * client + 100 * round, 1000 * client + 100 * round + len(inside))
    return MembershipRow(
        round=round,
        client=client,
        attack="membership",
        texts=tuple(own if texts is None else texts),
        inside=inside,
        pairs=pairs,
        scores={"s": tuple(scores)},
    )


def test_the_area_is_the_share_of_pairs_of_a_list_in_the_right_order():
    rng = np.random.default_rng(0)
    rows = []
    for client in range(4):
        inside = [
            bool(coin) == second for coin in rng.integers(0, 2, 6) for second in (True, False)
        ]
        rows.append(row(client, inside, rng.integers(0, 5, 12).tolist()))
    right = count = 0
    for client_row in rows:
        for i, was_in in enumerate(client_row.inside):
            for j, other_in in enumerate(client_row.inside):
                if was_in and not other_in:
                    a, b = client_row.scores["s"][i], client_row.scores["s"][j]
                    right, count = right + (a > b) + 0.5 * (a == b), count + 1
    (figure,) = membership.summarised(experiment_of(), rows, Largest()).figures
    assert figure.auc.mean == pytest.approx(right / count)
    assert figure.auc.low < figure.auc.mean < figure.auc.high


@pytest.mark.parametrize("accused", membership.ACCUSED)
def test_those_found_are_above_all_but_a_share_of_the_others(accused):
    rng = np.random.default_rng(1)
    controls, scores = rng.normal(size=2000), rng.normal(2, size=500)
    members = [membership._Text(i % 20, score, True) for i, score in enumerate(scores)]
    allowed = [t for t in sorted([*controls, *scores]) if (controls > t).mean() <= accused]
    slow = (scores > allowed[0]).mean()
    share = membership.found_where(members, controls, accused, 0)
    assert share.mean == pytest.approx(slow, abs=0.003)
    assert share.low < share.mean <= share.high
    enough = math.ceil(1 / accused - 1e-9)
    assert membership.found_where(members, controls[:enough], accused, 0) is not None
    assert membership.found_where(members, controls[: enough - 1], accused, 0) is None


@pytest.mark.parametrize(("share", "count"), [(0.01, 1000), (0.05, 100), (0.5, 40), (0.01, 100)])
def test_thresholds_are_as_high_and_as_low_as_their_own_error_makes_them(share, count):
    """The share of all controls above the one that k others exceed is of Beta(k + 1, count - k)."""
    first, second = intervals.ranks_of_quantile(share, count, 0.0125)

    def above(rank):
        return beta.sf(share, rank + 1, count - rank)

    assert above(0) > 0.0125 if first is None else above(first) <= 0.0125 < above(first + 1)
    assert 1 - above(second) <= 0.0125 < 1 - above(second - 1)


def test_the_interval_of_those_found_has_the_error_of_the_threshold():
    rng = np.random.default_rng(3)
    controls = rng.normal(size=100)
    members = [
        membership._Text(i % 20, score, True) for i, score in enumerate(rng.normal(1, 1, 500))
    ]
    share = membership.found_where(members, controls, 0.01, 0)
    assert share.low == 0  # of 100 controls none is surely above 99 % of all
    assert share.high > (np.array([text.score for text in members]) > np.sort(controls)[-4]).mean()
    surer = membership.found_where(members, rng.normal(size=100_000), 0.01, 0)
    assert surer.high - surer.low < 0.6 * (share.high - share.low)


def test_several_scores_share_the_error_of_p_and_of_the_bounds():
    rng = np.random.default_rng(5)
    insides = [[x for coin in rng.integers(0, 2, 8) for x in (coin, not coin)] for _ in range(8)]
    rows = [
        row(client, map(bool, inside), rng.normal(size=16) + 2.0 * np.array(inside))
        for client, inside in enumerate(insides)
    ]
    (alone,) = membership.summarised(experiment_of(), rows, Largest()).figures
    twice = [
        client_row.model_copy(update={"scores": client_row.scores | {"t": client_row.scores["s"]}})
        for client_row in rows
    ]
    for shared in membership.summarised(experiment_of(), twice, Largest()).figures:
        assert 0 < alone.p < 0.5
        assert shared.p / alone.p == pytest.approx(2)
        assert 0 < shared.epsilon < alone.epsilon


def test_a_text_has_the_same_number_and_partner_in_every_round():
    held_out = KeptTexts(sequences=ids(100, 40))
    truths = {Key(round, 0): replace(truth_of(ids(10, 4)), round=round) for round in (1, 2)}
    answers = {(key, "membership"): answer_of(key, {"s": (0.0,) * 8}) for key in truths}
    rows = membership.membership_rows(experiment_of(), held_out, {}, answers, truths, [])
    paired = [
        {(row.texts[member], row.texts[control]) for member, control in row.pairs} for row in rows
    ]
    assert paired[0] == paired[1]
    assert rows[0].texts != rows[1].texts  # the order is another
    (figure,) = membership.summarised(experiment_of(), rows, Largest()).figures
    assert (figure.members, figure.controls, figure.pairs, figure.updates) == (4, 4, 4, 2)


def test_clients_prefer_different_held_out_texts():
    held_out = KeptTexts(sequences=ids(100, 90))
    seen = []
    for client in range(4):
        truth = replace(truth_of(ids(10 + 4 * client, 4)), client=client)
        made = questions(truth, held_out, seed=0, clients=4)
        seen += [made.asked.listed[control].ids for _, control in made.pairs]
    assert len(set(seen)) == 16


def test_intervals_of_scores_that_are_calibrated_on_each_other_have_the_true_value():
    """Updates of unlike clients, texts that look likely everywhere, 8 clients of 20 texts."""
    rng, inside = np.random.default_rng(7), [True] * 20 + [False] * 20

    def drawn():
        scores_UCK = rng.normal(size=(8, 8, 40)) + rng.normal(size=(8, 40))
        scores_UCK += np.einsum("uf,ckf->uck", rng.normal(size=(8, 4)), rng.normal(size=(8, 40, 4)))
        own_CK = scores_UCK[range(8), range(8)] + rng.uniform(0.5, 2.5, (8, 1)) * np.array(inside)
        others_CK = (scores_UCK.sum(0) - scores_UCK[range(8), range(8)]) / 7
        rows = [row(client, inside, own_CK[client] - others_CK[client]) for client in range(8)]
        return [client_row.model_copy(update={"pairs": ()}) for client_row in rows]

    def area(rows):
        return membership._area(membership._texts(rows, "s"), 0)

    draws = [drawn() for _ in range(100)]
    audits = [area(rows) for rows in draws]
    assert membership.summarised(experiment_of(), draws[0], Largest()).figures[0].auc == audits[0]
    true = np.mean([auc.mean for auc in audits])
    assert sum(auc.low <= true <= auc.high for auc in audits) >= 95
    assert 0.6 < true < np.mean([auc.high for auc in audits]) < 0.98


def test_rounds_together_tell_more_than_one_alone():
    rng = np.random.default_rng(4)
    inside = [True, False] * 8
    rows = [
        row(client, inside, rng.normal(size=16) + 0.5 * np.array(inside), round, texts)
        for client, texts in ((c, range(100 * c, 100 * c + 16)) for c in range(20))
        for round in range(1, 26)
    ]
    (figure,) = membership.summarised(experiment_of(), rows, Largest()).figures
    # Of one round N(0.5, 1) against N(0, 1), of 25 together N(2.5, 1).
    assert np.mean([round_figure.auc for round_figure in figure.rounds]) == pytest.approx(
        0.638, abs=0.02
    )
    assert figure.auc.mean == pytest.approx(0.961, abs=0.02)
    assert (figure.members, figure.pairs) == (160, 160)
    assert figure.found_at_1_percent.mean == pytest.approx(0.57, abs=0.15)
    assert [point.accused for point in figure.roc] == list(membership.ACCUSED[1:])


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_the_bound_is_above_the_true_epsilon_as_seldom_as_it_says(sigma):
    """A mechanism of known epsilon: a text's own number is 1 where it is in, and has noise.

    To replace one by the other changes two numbers by 1, so its mu is sqrt(2) / sigma.
    """
    rng, delta, audits = np.random.default_rng(2), 1e-5, 1000
    true = gaussian_epsilon(math.sqrt(2) / sigma, delta)
    bounds = []
    for _ in range(audits):
        coins = rng.integers(0, 2, 100).astype(bool)
        differences = np.where(coins, 1.0, -1.0) + math.sqrt(2) * sigma * rng.normal(size=100)
        bounds.append(membership.pair_bound(differences.tolist(), coins.tolist(), 0.05, delta))
    assert sum(bound > true for bound in bounds) <= 0.05 * audits
    assert sorted(bounds)[audits // 2] > 0, "a bound that is always 0 is never wrong"


@pytest.fixture
def suspects(tmp_path):
    """A file of 8 notes of clients, of a small run's data, and 8 of nobody."""
    from fedleak.config.federation.workload import read_data

    split = read_data(experiment_of(**ONE_ROUND))
    lines = [
        {"text": text, "label": split.train.label_names[label]}
        for corpus, where in ((split.train, slice(8)), (split.held_out, slice(60, 68)))
        for text, label in zip(corpus.texts[where], corpus.labels[where], strict=True)
    ]
    path = tmp_path / "suspects.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_file_asks_about_its_texts(tmp_path, suspects):
    of_file = {"kind": "membership", "name": "suspects", "candidates": str(suspects)}
    run = carried_out(tmp_path, experiment_of(**ONE_ROUND | {"attack": [of_file]}))
    figure = figures(run)["residual"]
    assert figure.auc.mean > 0.95
    assert (figure.p, figure.epsilon, figure.pairs) == (None, None, 0)
    assert "file" in figure.no_bound
    rows = run.rows(MEMBERSHIP)
    for row in rows:
        assert sorted(row.texts) == list(range(16))
        members = {line for line, inside in zip(row.texts, row.inside, strict=True) if inside}
        assert members <= set(range(8))
    # 16 texts in all of clients' batches: no text of the file was missed.
    lines_inside = {
        line for row in rows for line, inside in zip(row.texts, row.inside, strict=True) if inside
    }
    trained = {ids for key in run.captures.all_keys() for ids in read_truth(run, key).sequences}
    listed = [tuple(ids) for ids in run.read_json("candidates/suspects.json")["sequences"]]
    assert lines_inside == {line for line, ids in enumerate(listed) if ids in trained}
    assert rows == list(fedleak.read_results(run.path).membership)
    table = fedleak.read_results(run.path).membership_to_pandas()
    assert len(table) == 16 * 4
    assert table[table.inside].residual.mean() > table[~table.inside].residual.mean()


@pytest.mark.slow
def test_another_file_needs_another_name(attacked, tmp_path, suspects, in_process):
    """On a run that is trained, with the command."""
    change = f'attack=[{{kind="membership", name="suspects", candidates="{suspects}"}}]'
    copy = tmp_path / "run"
    shutil.copytree(attacked.path, copy)
    code, out, error = call("attack", str(copy), "--set", change)
    assert code == 0, error
    assert "no p and no bound" in " ".join(out.split())
    suspects.write_text("".join(suspects.read_text().splitlines(keepends=True)[:12]))
    code, _, error = call("attack", str(copy), "--set", change)
    assert code == 2
    assert "another name" in error


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "empty"),
        ('{"text": "a note"}\n', "label"),
        ('{"text": "a note", "label": "surgery"}\n', "'surgery': its classes are 'other', "),
        ('{"text": "a note", "label": "other"}\n' * 2, "same text"),
        (None, "no such file"),
    ],
)
def test_a_file_that_is_not_right_is_refused_before_training(tmp_path, content, word):
    file = tmp_path / "suspects.jsonl"
    if content is not None:
        file.write_text(content)
    wrong = experiment_of(attack=[{"kind": "membership", "candidates": str(file)}])
    with pytest.raises(ConfigError, match=f"(?s)attack 'membership': candidates.*{word}") as error:
        preparation.prepare(wrong, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_bound_says_what_it_takes_for_granted_where_others_chose_the_held_out_texts():
    experiment = experiment_of()
    on_nodes = {"data": experiment.data.model_copy(update={"on_nodes": True})}
    rows = [row(client, [True, False], [1.0, 0.0]) for client in range(12)]
    drawn, chosen = (
        membership.summarised(experiment.model_copy(update=changed), rows, Largest())
        for changed in ({}, on_nodes)
    )
    assert drawn.figures[0].assumes is None
    assert chosen.figures[0].p == drawn.figures[0].p < 0.01
    (note,) = (note for note in membership_tables(chosen)[0].notes if "hold if" in note)
    assert "by chance alone" in note


def test_there_is_no_bound_where_nobody_threw_a_coin():
    experiment = experiment_of()
    changed = {
        "model": experiment.model.model_copy(update={"task": "causal-lm"}),
        "federation": experiment.federation.model_copy(update={"partition": "dirichlet"}),
    }
    rows = [row(client, [True, False], [1.0, 0.0]) for client in range(3)]
    summary = membership.summarised(experiment.model_copy(update=changed), rows, Largest())
    assert summary.figures[0].no_bound
    assert (summary.figures[0].p, summary.figures[0].epsilon) == (None, None)
