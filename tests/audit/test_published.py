"""What the published models give away of planted secrets."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from built import evidence_of
from tiny import Here, call, tables

from fedleak import models
from fedleak.audit.gate import limits
from fedleak.audit.gate.check import Outcome
from fedleak.audit.kept_texts import read_held_out
from fedleak.audit.privacy import decoding, published
from fedleak.config.federation.secrets import NOBODY, secrets
from fedleak.config.federation.workload import divide, read_data
from fedleak.config.loading import parse
from fedleak.flower.engines import train
from fedleak.models import CAUSAL_LM, loading
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.store.records import PUBLISHED, PublishedRow
from fedleak.store.run import Run
from fedleak.store.summaries import (
    SUMMARY,
    Estimate,
    PublishedFigure,
    PublishedRound,
    PublishedSummary,
)
from fedleak.util.errors import ConfigError

PUBLISHED_TABLE = {"secrets": 3, "counts": [1, 24], "twins": 31, "secret": "{word} {word}"}


@pytest.fixture(scope="module")
def folder(saved):
    """Saves a causal model that costs a tenth of the built-in one."""
    return saved("llama", CAUSAL_LM, width=64)


@pytest.fixture(scope="module")
def experiment(folder):
    """Two clients who learn their texts by heart in two rounds."""
    return parse(experiment_tables(folder))


def experiment_tables(folder, **changes):
    return tables(
        {
            "model": {"name": folder, "task": "causal-lm"},
            "data": {"name": "builtin/notes", "samples": 8, "held_out": 60},
            "federation": {
                "algorithm": "fedavg",
                "clients": 2,
                "rounds": 2,
                "local_epochs": 4,
                "batch_size": 4,
                "learning_rate": 0.01,
            },
            "client": {"optimiser": "adamw"},
            "utility": {"rounds": []},
            "threat": {"rounds": [1], "clients": [0]},
            "published": PUBLISHED_TABLE,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def run(experiment, tmp_path_factory):
    """The run of it."""
    made = preparation.prepare(experiment, tmp_path_factory.mktemp("published") / "run")
    pipeline.carry_out(made, experiment, train, Crew([Here()]))
    return made


@pytest.fixture(scope="module")
def model_and_secrets(experiment, run):
    """Its last model, and its secrets."""
    model = loading.load(experiment.model_spec(run.info()["num_labels"]))
    models.load_parameters_(model, run.models.read_model(3))
    return model, secrets(experiment, read_held_out(run).sequences, model)


def test_secrets_stand_as_often_in_the_data_as_announced(experiment, model_and_secrets):
    model, planted = model_and_secrets
    workload = divide(experiment, read_data(experiment), model)
    assert [secret.count for secret in planted[:6]] == [1, 1, 1, 24, 24, 24]
    assert {secret.client for secret in planted[12:]} == {NOBODY}
    assert len({secret.ids[: secret.prompt] for secret in planted}) == 12 + 31
    for client, part in enumerate(workload.parts):
        texts = [workload.sequences[example] for example in part]
        assert len(texts) == 4 + 3 * (1 + 24)  # its own, and the secrets
        for secret in planted:
            expected = secret.count if secret.client == client else 0
            assert texts.count(secret.ids) == expected
    assert len(workload.labels) == len(workload.sequences)
    for secret in planted:
        assert model.decode(secret.ids[: secret.prompt]).endswith(" is")
        assert len(model.decode(secret.ids[secret.prompt :]).split()) == 2


def test_a_run_tells_what_is_learnt_from_what_is_not(run):
    summary = run.read_document(SUMMARY).published
    figures = {(figure.measure, figure.by, figure.count): figure for figure in summary.figures}
    often = figures["exposure", "rise since the start", 24]
    assert often.secrets == 6
    assert [row.round for row in often.rounds] == [1, 2]
    assert often.rounds[-1].figure.mean > 4.0
    assert often.rounds[-1].p < 0.001
    assert 1.2 < often.rounds[0].control < math.log2(math.e)
    before = figures["exposure", "likelihood", 24].rounds[0]
    assert before.round == 0
    assert before.p is None
    assert before.figure.low < before.control < before.figure.high
    written = figures["extracted", "greedy", 24].rounds
    assert written[0].figure.mean == 0.0
    assert written[-1].figure.mean > written[-1].control
    assert written[-1].control < 0.1
    assert [row.round for row in figures["extracted", "contrastive", 24].rounds] == [1, 2]
    assert run.models.rounds() == [1, 2, 3]  # also of the round that is not attacked


def test_a_model_that_learnt_nothing_ranks_secrets_anywhere():
    rng = np.random.default_rng(0)
    chances = []
    for _ in range(200):
        values = tuple(rng.normal(size=8 + 31))
        row = PublishedRow(
            round=1,
            clients=(*range(8), *[-1] * 31),
            counts=(*[1] * 8, *[0] * 31),
            log_likelihoods=values,
            written={},
        )
        measured = published._exposure(row, np.array(values), 1, 1)
        assert measured.control == pytest.approx(
            np.mean([math.log2(32 / rank) for rank in range(1, 33)])
        )
        chances.append(measured.p)
    assert 0.3 < np.mean(np.array(chances) <= 0.5) < 0.7
    assert np.mean(np.array(chances) <= 0.05) < 0.1


def test_exposure_is_log2_of_the_twins_over_the_rank():
    twins = np.array([0.0, 1.0, 2.0])
    bits = published.exposure(np.array([3.0, -1.0, 0.5, 1.0]), twins)
    assert bits.tolist() == pytest.approx([2.0, 0.0, math.log2(4 / 3), math.log2(4 / 2.5)])


def test_p_is_that_of_all_ways_to_choose_the_secrets():
    values = np.random.default_rng(1).normal(size=3 + 5)
    row = PublishedRow(
        round=1,
        clients=(0, 1, 2, *[-1] * 5),
        counts=(1, 1, 1, *[0] * 5),
        log_likelihoods=tuple(values),
        written={},
    )

    def wins(chosen):
        return sum(values[i] > values[j] for i in chosen for j in set(range(8)) - {*chosen})

    every = [wins(chosen) for chosen in itertools.combinations(range(8), 3)]
    slow = np.mean([count >= wins((0, 1, 2)) for count in every])
    assert published._exposure(row, values, 1, 1).p == pytest.approx(slow)
    assert published._exposure(row, values, 1, 10).p == pytest.approx(min(1.0, 10 * slow))


@torch.no_grad()
def slow_logits(model, ids):
    ids_BT = torch.tensor([ids])
    logits = model.family.logits(
        model.module, torch.ones_like(ids_BT), ids_BT=ids_BT, embeds_BTD=None
    )
    return logits[0].log_softmax(-1)


def test_likelihoods_and_texts_are_those_of_a_slow_model(experiment, run, model_and_secrets):
    model, planted = model_and_secrets
    model.module.eval()
    some = planted[1:7]
    before = loading.load(experiment.model_spec(run.info()["num_labels"]))
    models.load_parameters_(before, run.models.read_model(2))
    before.module.eval()
    special = model.special_ids()
    likelihoods, greedy, contrastive, spoken = [], [], [], []
    for secret in some:
        content = [token for token in secret.ids[secret.prompt :] if token not in special]
        prompt = list(secret.ids[: secret.prompt])
        at_TV = slow_logits(model, [*prompt, *content])[secret.prompt - 1 :]
        likelihoods.append(sum(float(at_TV[place, token]) for place, token in enumerate(content)))
        continued, contrasted = list(prompt), list(prompt)
        for _ in content:
            continued.append(int(slow_logits(model, continued)[-1].argmax()))
            now_V = slow_logits(model, contrasted)[-1]
            then_V = slow_logits(before, contrasted)[-1]
            plausible_V = now_V.exp() >= 0.1 * now_V.exp().max()
            contrasted.append(int((2 * now_V - then_V).where(plausible_V, -math.inf).argmax()))
        greedy.append(continued[secret.prompt :] == content)
        if special.isdisjoint(continued[secret.prompt :]):
            spoken.append(replace(secret, ids=tuple(continued)))
        contrastive.append(contrasted[secret.prompt :] == content)
    assert decoding.log_likelihoods(model, some) == pytest.approx(likelihoods, abs=1e-3)
    assert list(decoding.written(model, some)) == greedy
    assert list(decoding.written(model, some, before=before)) == contrastive
    assert not all(greedy)
    # Which secrets are learnt depends on how a machine rounds; what a model says, it writes.
    assert spoken
    assert all(decoding.written(model, spoken))
    # A beam finds what is likeliest, so it finds what is likelier than all else at each step.
    beams = decoding.written(model, some, beams=4)
    assert sum(beams) >= sum(greedy) - 1


def test_a_model_that_was_not_asked_is_asked_again_and_says_the_same(experiment, run):
    before = run.rows(PUBLISHED)
    run.keep(PUBLISHED, lambda row: row.round != 1)
    assert not pipeline.finished(run, experiment)
    lacking = published.summarised(experiment, run.rows(PUBLISHED))
    assert lacking is not None
    assert published.unaudited(experiment, run.rows(PUBLISHED)) == [1]
    code, printed, errors = call("score", str(run.path))
    assert code == 1
    assert "secrets.jsonl lacks rounds" in printed + errors
    pipeline.carry_out(run, experiment, train, Crew([Here()]))
    assert pipeline.finished(run, experiment)
    assert sorted(run.rows(PUBLISHED), key=lambda row: row.round) == before


def test_the_table_the_page_and_the_gate_show_it(run):
    code, printed, _ = call("score", str(run.path))
    assert code == 0
    assert "what they give away of planted secrets" in printed
    assert call("report", str(run.path))[0] == 0
    page = (run.path / "report.html").read_text()
    assert "data are told from others" in page
    code, printed, _ = call("gate", str(run.path), "--set", "gate.exposure=2")
    assert code == 3
    assert "24 times in a client's data" in " ".join(printed.split())
    code, _, _ = call("gate", str(run.path), "--set", "gate.extracted=0.5")
    assert code == 3
    code, printed, _ = call("gate", str(run.path), "--set", "gate.exposure=5")
    assert "bits by which planted secrets stand out" in " ".join(printed.split())


def test_a_limit_without_secrets_is_not_told():
    check = limits._published("exposure", 2.0, evidence_of({}))
    assert check.outcome == Outcome.UNTOLD
    assert "the file has no [published]" in check.sentence


@pytest.mark.parametrize(
    ("highs", "outcome", "says"),
    [
        ([0.9, 0.5, 0.4], Outcome.WITHIN, "greedy, round 1: "),
        ([0.4, 0.5, 0.9], Outcome.EXCEEDED, "greedy, round 2: "),
        ([0.4], Outcome.UNTOLD, "no model was asked after training"),
    ],
)
def test_the_gate_judges_models_that_were_trained_on_secrets(highs, outcome, says):
    rounds = tuple(
        PublishedRound(round=round, figure=Estimate(mean=0.0, low=0.0, high=high), control=0.0)
        for round, high in enumerate(highs)
    )
    figure = PublishedFigure(count=4, measure="extracted", by="greedy", secrets=8, rounds=rounds)
    summary = PublishedSummary(figures=(figure,))
    check = limits._published("extracted", 0.6, evidence_of({}, published=summary))
    assert check.outcome == outcome
    assert says in check.sentence


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"name": "builtin/bert-tiny"}}, "set 'causal-lm', or leave [published] out"),
        (
            {"published": {"clients": [4]}},
            "published.clients has 4, but federation.cl",
        ),
        ({"published": {"beginning": "{digit}"}}, "10 different beginnings"),
        ({"model.response_template": "Note:"}, "published.beginning lacks model.response_template"),
        ({"data.held_out": 3}, "raise data.held_out"),
        (
            {"published": {"beginning": "always"}},
            "published.beginning: 'always' is the same in all texts: put {word} or {digit} into it",
        ),
    ],
)
def test_what_cannot_be_audited_is_refused(folder, tmp_path, changes, says):
    with pytest.raises(ConfigError) as refused:
        preparation.prepare(parse(experiment_tables(folder, **changes)), tmp_path / "run")
    assert says in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_damaged_rows_are_put_aside(run, tmp_path):
    line = json.loads((run.path / PUBLISHED.name).read_text().splitlines()[0])
    line["counts"] = line["counts"][::-1]
    other = Run(tmp_path)
    (tmp_path / PUBLISHED.name).write_text(json.dumps(line) + "\n")
    assert other.salvage(PUBLISHED) == []
    assert "twins come last" in other.damaged()[0].reason
