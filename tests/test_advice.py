"""Which defense is the cheapest within the limits, and what is said where none is."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from built import run_of
from tiny import DLG, tables

from fedleak.audit.gate.check import Check, Outcome
from fedleak.audit.gate.judge import Verdict
from fedleak.config.experiment import Experiment
from fedleak.config.loading import parse
from fedleak.models import LanguageModel
from fedleak.report.tables.advice import advice_sentence, advice_table
from fedleak.running import advice as advising
from fedleak.running.advice import ENDING, advise, candidates, refuse_without_leak, utility_lost
from fedleak.store.advice import ADVICE, Advice, Trial, Tried
from fedleak.store.records import Utility
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY
from fedleak.util.errors import ConfigError

LIMITED = {"gate": {"exact": 0.5, "may_abstain": ["keyspan"]}, "federation.clients": 12}


def experiment(**changes: Any) -> Experiment:
    return parse(tables({**LIMITED, "attack": [DLG, {"kind": "keyspan"}], **changes}))


def tried(name: str, trial: Trial, lost: float | None = 0.0, **more: Any) -> Tried:
    return Tried(name=name, free=False, trial=trial, lost=lost, **more)


def found(*rows: Tried) -> Advice:
    return Advice(
        limits="exact 0.5", measure="accuracy", utility=0.8, held_out=50, rounds=3, tried=rows
    )


def summary(utility: float | None, held_out: int = 100, name: str = "accuracy") -> Any:
    measured = None if utility is None else Utility(round=1, **{name: utility})
    return SimpleNamespace(utility=measured, held_out=held_out)


def test_what_is_free_comes_first(bert_tiny: LanguageModel, llama_tiny: LanguageModel) -> None:
    of_bert = candidates(experiment(), bert_tiny)
    free = [candidate.free for candidate in of_bert]
    assert free == sorted(free, reverse=True)
    names = [candidate.name for candidate in of_bert]
    assert names[:2] == ["frozen position rows", "frozen embeddings"]
    assert {"texts in a batch 4", "texts in a batch 16", "DP-SGD, epsilon 8.0"} < {*names}
    assert len(set(names)) == len(names)
    assert "frozen position rows" not in [c.name for c in candidates(experiment(), llama_tiny)]


def test_attacks_that_cannot_work_are_left_out_and_others_stay(bert_tiny: LanguageModel) -> None:
    settings = {c.name: c.setting for c in candidates(experiment(), bert_tiny)}
    frozen = settings["frozen embeddings and first layer"]
    changed = advising._cell(experiment(), frozen, bert_tiny, 8).experiment
    assert [attack["kind"] for attack in changed.attack] == ["dlg"]
    assert changed.gate.may_abstain == []
    assert changed.defense == [{"kind": "freeze", "parameters": ["embeddings", "t1"]}]
    alone = experiment(attack=[{"kind": "keyspan"}])
    with pytest.raises(ConfigError, match="keyspan"):
        advising._cell(alone, frozen, bert_tiny, 8)
    with pytest.raises(ConfigError, match="a client has only 3 texts"):
        advising._cell(experiment(), settings["texts in a batch 4"], bert_tiny, 3)
    defended = experiment(defense=[{"kind": "clip", "max_norm": 1.0}])
    noise = settings["Gaussian noise, sigma / rms 3.0"]
    kinds = [
        table["kind"] for table in advising._cell(defended, noise, bert_tiny, 8).experiment.defense
    ]
    assert kinds == ["clip", "gaussian_noise"]


def test_a_loss_that_chance_makes_is_none() -> None:
    assert utility_lost(summary(0.8), summary(0.75)) == 0
    assert utility_lost(summary(0.8), summary(0.6)) == pytest.approx(0.2)
    assert utility_lost(summary(0.8, 10_000), summary(0.75, 10_000)) == pytest.approx(0.05)
    assert utility_lost(summary(0.8), summary(0.9)) == 0
    of_words = [summary(value, name="perplexity") for value in (20.0, 25.0)]
    assert utility_lost(*of_words) == pytest.approx(0.25)
    assert utility_lost(*reversed(of_words)) == 0
    assert utility_lost(summary(None), summary(0.9)) is None


def test_the_cheapest_loses_the_least_and_of_equals_is_the_first() -> None:
    exceeded = tried("a", Trial.EXCEEDED)
    dear, cheap = tried("b", Trial.WITHIN, 0.2), tried("c", Trial.WITHIN, 0.1, utility=0.7)
    as_cheap = tried("d", Trial.WITHIN, 0.1, utility=0.7, epsilon=8.0)
    advice = found(exceeded, dear, cheap, as_cheap)
    assert advice.cheapest == cheap
    sentence = advice_sentence(advice)
    assert sentence.startswith("The cheapest of 4 defenses that were tried")
    assert "is c: accuracy 0.7 in place of 0.8 on 50 held-out texts after 3 rounds; no epsilon" in (
        sentence
    )
    assert "epsilon 8" in advice_sentence(found(as_cheap))


def test_where_none_is_within_that_is_said() -> None:
    impossible = tried("b", Trial.IMPOSSIBLE, why="it needs two clients")
    advice = found(tried("a", Trial.EXCEEDED), impossible, tried("c", Trial.UNTOLD))
    assert advice.cheapest is None
    assert advice_sentence(advice).startswith(
        "None of 2 defenses that were tried was shown to keep within the limits (exact 0.5): 1 "
        "exceeded one, and of 1 too little was measured"
    )
    shown = advice_table(advice)
    assert [row[1].text for row in shown.rows] == ["exceeded", "not possible", "not told"]
    assert shown.rows[1][6].text == "it needs two clients"
    redacted = advice_table(advice, reasons=False)
    assert len(redacted.columns) == len(redacted.rows[0]) == 6
    words = " ".join([*shown.notes, *(cell.text for row in shown.rows for cell in row)])
    assert "safe" not in words.lower()


@pytest.fixture
def leaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose limit is exceeded; how defenses end is up to the test."""
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path / "runs" / "small", experiment())
    monkeypatch.setattr(advising, "refuse_without_leak", lambda *_: None)
    read = Run.read_document

    def read_document(of_run: Run, document: Any) -> Any:
        return summary(0.8) if document is SUMMARY else read(of_run, document)

    monkeypatch.setattr(Run, "read_document", read_document)
    monkeypatch.setattr(advising.preparation, "plan", lambda experiment: experiment)
    monkeypatch.setattr(advising.pipeline, "finished", lambda *_: False)
    monkeypatch.setattr(advising.sweeps, "collect", lambda sweep: None)
    return run


def test_the_search_ends_where_nothing_can_be_cheaper(
    leaking: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def carry_out(sweep: Any, plans: Any, *_: Any) -> dict[str, str]:
        ran.extend(plans)
        assert sweep.path.name == f"small{ENDING}"
        return {}

    def judged(candidate: Any, *_: Any) -> Tried:
        trial = Trial.WITHIN if candidate.name == "secure sum" else Trial.EXCEEDED
        return Tried(name=candidate.name, free=candidate.free, trial=trial, lost=0.0)

    monkeypatch.setattr(advising.sweeps, "carry_out", carry_out)
    monkeypatch.setattr(advising, "_judged", judged)
    told: list[str] = []
    advice = advise(leaking, None, lambda name: nullcontext(lambda progress: None), told.append)  # type: ignore[arg-type]
    assert "defenses are tried; attacks with a time limit take at most" in told[0]
    trials = {row.name: row.trial for row in advice.tried}
    assert trials["frozen position rows"] is Trial.EXCEEDED
    assert trials["secure sum"] is Trial.WITHIN
    assert {trials["local epochs 2"], trials["DP-SGD, epsilon 1.0"]} == {Trial.SKIPPED}
    assert len(ran) == 4
    assert leaking.read_document(ADVICE) == advice


@pytest.mark.parametrize(
    ("changes", "checks", "says"),
    [
        ({"gate": {"epsilon": 1.0}}, {}, "there is no limit that a defense has to keep"),
        ({}, {"texts": Outcome.UNTOLD}, "no defense could be judged here: why"),
        ({}, {"exact": Outcome.WITHIN}, "exceeds no limit on what is read"),
        ({"gate": {"exact": 0.1}}, {}, "exact = 0.1 cannot be kept: .* attack more clients"),
    ],
)
def test_a_run_that_no_defense_can_be_judged_against_is_refused_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    checks: dict[str, Outcome],
    says: str,
) -> None:
    outcomes = {"exact": Outcome.EXCEEDED, "epsilon": Outcome.EXCEEDED} | checks
    verdict = Verdict([Check(name, outcome, "why") for name, outcome in outcomes.items()], None)
    monkeypatch.setattr(advising, "judge", lambda *_: verdict)
    settings = experiment(**changes)
    run = run_of(tmp_path, settings)
    keys = [SimpleNamespace(client=client) for client in range(12)]
    monkeypatch.setattr(type(run.captures), "all_keys", lambda *_: keys)
    with pytest.raises(ConfigError, match=says):
        refuse_without_leak(run, settings)
