"""Which defense is the cheapest within the limits, and what is said where none is."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from built import answer_of, run_of, truth_of
from tiny import DLG, call, tables, toml

from fedleak.audit.gate import early
from fedleak.audit.gate.early import exceeded_already
from fedleak.audit.gate.evidence import gather
from fedleak.audit.scoring import score_run
from fedleak.config.experiment import Experiment
from fedleak.config.federation.schedule import expected_captures
from fedleak.config.loading import parse
from fedleak.models import LanguageModel
from fedleak.report.tables.advice import advice_sentence, advice_table
from fedleak.running.audit import search
from fedleak.running.audit.defenses import (
    candidates,
    defended,
    fewest_units,
    refuse_without_limits,
)
from fedleak.running.audit.search import ENDING, Enough, advise, utility_lost
from fedleak.running.dispatch.progress import Finished, RunProgress
from fedleak.running.workers import hiring
from fedleak.store.audits import AUDIT, Advice, Audit, Timings, Trial, Tried
from fedleak.store.records import Utility
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.store.summaries import SUMMARY, Estimate
from fedleak.util.errors import ConfigError

LIMITED = {
    "gate": {"exact": 0.3, "may_abstain": ["keyspan"], "seconds": 60.0},
    "federation.clients": 12,
    "federation.rounds": 3,
    "threat.rounds": [1, 3],
}
BATCH = {"federation.batch_size": 2}


def experiment(**changes: Any) -> Experiment:
    return parse(tables({**LIMITED, "attack": [DLG, {"kind": "keyspan"}], **changes}))


def tried(name: str, trial: Trial, lost: float | None = 0.0, **more: Any) -> Tried:
    return Tried(name=name, free=False, trial=trial, lost=lost, **more)


def found(*rows: Tried) -> Advice:
    return Advice(
        limits="exact 0.5",
        seconds=20.0,
        measure="accuracy",
        utility=0.8,
        trained=True,
        held_out=50,
        rounds=3,
        tried=rows,
    )


def summary(utility: float | None, held_out: int = 100, name: str = "accuracy") -> Any:
    measured = None if utility is None else Utility(round=1, **{name: utility})
    return SimpleNamespace(utility=measured, held_out=held_out)


def test_what_is_free_comes_first(bert_tiny: LanguageModel, llama_tiny: LanguageModel) -> None:
    of_bert = candidates(experiment(), bert_tiny, 9)
    free = [candidate.free for candidate in of_bert]
    assert free == sorted(free, reverse=True)
    names = [candidate.name for candidate in of_bert]
    assert names[:2] == ["frozen position rows", "frozen embeddings"]
    assert {"texts in a batch 4", "texts in a batch 9", "LoRA, rank 8"} < {*names}
    assert len(set(names)) == len(names)
    others = [c.name for c in candidates(experiment(), llama_tiny, 1)]
    assert not [name for name in others if "position" in name or "batch" in name]


def test_every_defense_of_the_set_can_be_tried(
    tmp_path: Path, bert_tiny: LanguageModel, llama_tiny: LanguageModel
) -> None:
    """Those that cannot were all refused for the setting, and said nothing of themselves."""
    adam = {"federation.server_optimiser": "adam"}
    causal = {"model": {"name": "builtin/llama-tiny", "task": "causal-lm"}}
    lists = [({}, bert_tiny), (adam, bert_tiny), (causal | {"data.label": None}, llama_tiny)]
    for number, (changes, model) in enumerate(lists):
        auto = experiment(attack=[{"kind": "auto", "seconds": 9.0}], gate={"exact": 0.3}, **changes)
        run = run_of(tmp_path / str(number), auto, node_examples=[40] * 12)
        for candidate in candidates(auto, model, 40):
            made = defended(run, auto, candidate.setting, model, 12)
            assert made.fingerprint != auto.fingerprint
            assert made.attack == [{"kind": "auto"}]  # the search gives it its time


def test_attacks_that_cannot_work_are_left_out_and_others_stay(
    tmp_path: Path, bert_tiny: LanguageModel
) -> None:
    settings = {c.name: c.setting for c in candidates(experiment(), bert_tiny, 8)}
    run = run_of(tmp_path / "a", experiment(), node_examples=[8] * 12)
    frozen = settings["frozen embeddings and first layer"]
    changed = defended(run, experiment(), frozen, bert_tiny, 12)
    assert [attack["kind"] for attack in changed.attack] == ["dlg"]
    assert changed.gate.may_abstain == []
    assert changed.defense == [{"kind": "freeze", "parameters": ["embeddings", "t1"]}]
    adapters = settings["LoRA, rank 8"]  # whose query matrices are not sent
    assert [a["kind"] for a in defended(run, experiment(), adapters, bert_tiny, 12).attack] == [
        "dlg"
    ]
    alone = experiment(attack=[{"kind": "keyspan"}])
    with pytest.raises(ConfigError, match="keyspan"):
        defended(run, alone, frozen, bert_tiny, 12)
    clipped = experiment(defense=[{"kind": "clip", "max_norm": 1.0}])
    noise = settings["Gaussian noise, sigma / rms 3.0"]
    kinds = [table["kind"] for table in defended(run, clipped, noise, bert_tiny, 12).defense]
    assert kinds == ["clip", "gaussian_noise"]
    with_membership = experiment(attack=[DLG, {"kind": "membership"}])
    assert [a["kind"] for a in defended(run, with_membership, noise, bert_tiny, 12).attack] == [
        "dlg"
    ]
    limited = experiment(attack=[{"kind": "membership"}], gate={"exact": 0.3, "auc": 0.6})
    assert defended(run, limited, noise, bert_tiny, 12).attack


@pytest.mark.parametrize(
    ("changes", "sizes", "keys"),
    [
        (BATCH, [8] * 20, [(3, client) for client in range(12)]),
        # Twelve texts are an example and no rate: a second round is attacked, too.
        ({}, [8] * 20, [(round, client) for round in (1, 3) for client in range(12)]),
        # Who defends itself otherwise comes first.
        (
            BATCH | {"defense": [{"kind": "clip", "max_norm": 1.0, "clients": [19]}]},
            [8] * 20,
            [(3, client) for client in (*range(11), 19)],
        ),
    ],
)
def test_as_few_updates_are_attacked_as_the_gate_can_judge(
    tmp_path: Path,
    bert_tiny: LanguageModel,
    changes: dict[str, Any],
    sizes: list[int],
    keys: list[tuple[int, int]],
) -> None:
    wide = experiment(**{**changes, "federation.clients": 20})
    run = run_of(tmp_path, wide, node_examples=sizes)
    noise = candidates(wide, bert_tiny, 8)[-1].setting
    assert expected_captures(defended(run, wide, noise, bert_tiny, 12)) == [Key(*k) for k in keys]


def test_a_sum_is_judged_over_sums_of_different_texts(
    tmp_path: Path, bert_tiny: LanguageModel
) -> None:
    summed = next(c for c in candidates(experiment(), bert_tiny, 8) if c.name == "secure sum")
    run = run_of(tmp_path / "a", experiment(), node_examples=[12] * 12)
    made = defended(run, experiment(), summed.setting, bert_tiny, 12)
    assert expected_captures(made) == [Key(round, EVERYONE) for round in range(1, 13)]
    few = run_of(tmp_path / "b", experiment(), node_examples=[11] * 12)
    with pytest.raises(ConfigError, match=r"over 12 sums of different texts, .* texts for 11"):
        defended(few, experiment(), summed.setting, bert_tiny, 12)


@pytest.mark.parametrize("limit", [0.9, 0.3, 0.26, 0.1])
def test_so_many_clients_are_needed_that_reading_nothing_is_within(limit: float) -> None:
    """Clopper and Pearson: of n of whom none is read, as many as 1 - 0.025 ** (1 / n) may be."""
    needed = fewest_units({"exact": limit, "rougeL": 100.0})
    assert needed is not None
    assert max(10, math.log(0.025) / math.log(1 - limit)) <= needed
    assert needed <= max(10, 1.05 * math.log(0.025) / math.log(1 - limit) + 2)
    assert fewest_units({"rougeL": 100 * limit}) == needed
    assert fewest_units({"exact": 0.0}) is None


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
    untrained = found(as_cheap).model_copy(update={"trained": False})
    assert "so little training changed nothing" in advice_sentence(untrained)


def test_where_none_is_within_that_is_said() -> None:
    impossible = tried("b", Trial.IMPOSSIBLE, why="it needs two clients")
    advice = found(tried("a", Trial.EXCEEDED), impossible, tried("c", Trial.UNTOLD))
    assert advice.cheapest is None
    assert advice_sentence(advice).startswith(
        "None of 2 defenses that were tried was shown to keep within the limits (exact 0.5): 1 "
        "exceeded one, and of 1 too little was measured"
    )
    read = {"mean": 0.0, "low": 0.0, "high": 0.2}
    untold = tried("d", Trial.UNTOLD, 0.1, utility=0.7, exact=Estimate(**read))
    assert advice_sentence(found(untold)).endswith(
        "The cheapest that exceeded none is d: accuracy 0.7 in place of 0.8 on 50 held-out texts "
        "after 3 rounds; no epsilon; attacks had 20 s for an update."
    )
    shown = advice_table(advice)
    assert [row[1].text for row in shown.rows] == ["exceeded", "not possible", "not told"]
    assert shown.rows[1][6].text == "it needs two clients"
    redacted = advice_table(advice, reasons=False)
    assert len(redacted.columns) == len(redacted.rows[0]) == 6
    words = " ".join([*shown.notes, *(cell.text for row in shown.rows for cell in row)])
    assert "safe" not in words.lower()


def answered(folder: Path, read: int, **changes: Any) -> Run:
    """Returns a run that goes on: of 12 clients the first answer, and `read` of these are right."""
    settings = experiment(**{"federation.rounds": 1, "threat.rounds": None, **BATCH, **changes})
    texts = [[[2, 10 + client, 20, 3], [2, 40 + client, 21, 3]] for client in range(12)]
    run = run_of(
        folder,
        settings,
        [truth_of(1, client, of_client) for client, of_client in enumerate(texts)],
        [answer_of(1, client, texts[client], attack="keyspan") for client in range(read)],
        status="running",
        node_examples=[2] * 12,
    )
    run.write_json("held_out.json", {"sequences": [], "labels": []})
    return run


def test_a_limit_is_exceeded_once_no_other_answer_can_change_that(tmp_path: Path) -> None:
    """With one of 12 clients read the interval reaches .38, if nothing else is read."""
    limits = experiment().gate
    assert exceeded_already(answered(tmp_path / "none", 0), limits) is None
    check = exceeded_already(answered(tmp_path / "one", 1), limits)
    assert check is not None
    assert check.name == "exact"
    assert "0.0833" in check.sentence
    half = limits.model_copy(update={"exact": 0.5})
    assert exceeded_already(answered(tmp_path / "same", 1), half) is None
    assert exceeded_already(answered(tmp_path / "five", 5), half) is not None


def test_poisson_sampling_may_draw_all_texts_of_a_client(tmp_path: Path) -> None:
    private = {"kind": "dp_sgd", "max_grad_norm": 1.0, "noise_multiplier": 1.0, "clients": [3]}
    run = answered(tmp_path, 1, defense=[private])
    run.update_info(node_examples=[9] * 12)
    evidence = gather(run)
    keys = [Key(1, client) for client in (2, 3, EVERYONE)]
    assert [early.most_texts(evidence, key) for key in keys] == [2, 9, 11 * 2 + 9]


def test_a_run_is_looked_at_when_something_was_read_and_ends_in_time(tmp_path: Path) -> None:
    progress_reports: list[RunProgress] = []
    run = answered(tmp_path, 1)
    enough = Enough(run, experiment().gate, math.inf, progress_reports.append)
    some = RunProgress(1, 1, 1, 1)
    enough.noted(some)
    assert not enough()
    done = Finished("keyspan", Key(1, 0), "recovered", 1.0)
    enough.noted(some._replace(finished=(done,)))
    assert enough()
    assert len(progress_reports) == 2
    assert Enough(run, experiment().gate, -math.inf, progress_reports.append)()


@pytest.mark.parametrize("may_abstain", [[], ["auto"]])
def test_abstentions_are_not_what_exceeds_a_limit(tmp_path: Path, may_abstain: list[str]) -> None:
    """Of five clients of whom nothing is read the interval reaches .52; seven abstentions."""
    gate = {"exact": 0.3, "may_abstain": may_abstain}
    auto = {"attack": "auto", "settings": {"kind": "auto"}}

    def scored(name: str, settings: Experiment, read: int, wrong: int) -> Run:
        texts = [[[2, 10 + client, 20, 3], [2, 40 + client, 21, 3]] for client in range(12)]
        run = run_of(
            tmp_path / name,
            settings,
            [truth_of(1, client, of_client) for client, of_client in enumerate(texts)],
            [
                *(answer_of(1, client, texts[client], **auto) for client in range(read)),
                *(answer_of(1, client, [[2, 7, 3]] * 2, **auto) for client in range(wrong)),
                *(
                    answer_of(1, client, status="abstained", **auto)
                    for client in range(max(read, wrong), 12)
                ),
            ],
            node_examples=[2] * 12,
        )
        run.write_json("held_out.json", {"sequences": [], "labels": []})
        score_run(run)
        return run

    table = {"federation.rounds": 1, "threat.rounds": None, "attack": [{"kind": "auto"}], **BATCH}
    before = scored("before", experiment(**table, gate=gate), read=12, wrong=0)
    adapters = {"name": "builtin/bert-tiny", "lora": {"rank": 2}}
    after = scored("after", experiment(**table, gate=gate, model=adapters), read=0, wrong=5)
    lora = SimpleNamespace(name="LoRA", free=True)
    row = search._judged(lora, after, before)  # type: ignore[arg-type]
    assert row.trial is Trial.UNTOLD
    # Where the gate takes abstentions of who reads undefended updates, nothing was read of twelve.
    assert ("exact: " in row.why, "attack auto: it abstained" in row.why) == (
        (not may_abstain),
        (not may_abstain),
    )


@pytest.fixture
def leaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A finished audit whose limit is exceeded; how defenses end is up to the test."""
    monkeypatch.chdir(tmp_path)
    settings = experiment(**BATCH)
    run = run_of(tmp_path / "runs" / "small", settings, node_examples=[40] * 12)
    timings = Timings(rehearsal=1.0, around=1.0, update=1.0, attacks={"dlg": 1.0, "keyspan": 1.0})
    audit = Audit(source="a", minutes=10, attack=(), timings=timings, parts=(), left_out=())
    run.write(AUDIT, audit)
    read = Run.read_document

    def read_document(of_run: Run, document: Any) -> Any:
        return summary(0.8) if document is SUMMARY else read(of_run, document)

    monkeypatch.setattr(Run, "read_document", read_document)
    monkeypatch.setattr(search, "has_learnt", lambda summary: True)
    monkeypatch.setattr(search.sweeps, "collect", lambda sweep: None)
    return SimpleNamespace(run=run, time=SimpleNamespace(ends=search.now() + 3000))


def advised(
    opened: Any, monkeypatch: pytest.MonkeyPatch, within: str = ""
) -> tuple[Advice, list[str], list[str]]:
    """Searches; returns the advice, the defenses that were run, and what was said first."""
    ran: list[str] = []
    messages: list[str] = []

    def of_cell(candidate: Any, cell: Any, *_: Any) -> Tried:
        ran.append(candidate.name)
        assert opened.run.path.with_name(f"small{ENDING}").exists()
        trial = Trial.WITHIN if candidate.name == within else Trial.EXCEEDED
        return Tried(name=candidate.name, free=candidate.free, trial=trial, lost=0.0)

    monkeypatch.setattr(search, "_tried", of_cell)
    advice = advise(
        opened,
        None,
        [object()],
        lambda name: nullcontext(lambda progress: None),
        messages.append,  # type: ignore[arg-type,list-item]
    )
    assert opened.run.read_document(AUDIT).advice == advice
    return advice, ran, messages


def test_the_search_ends_where_nothing_can_be_cheaper(
    leaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice, ran, messages = advised(leaking, monkeypatch, within="LoRA, rank 8")
    assert "defenses can be tried in the 50 min that are left" in messages[0]
    trials = {row.name: row.trial for row in advice.tried}
    assert trials["frozen position rows"] is Trial.EXCEEDED
    assert trials["LoRA, rank 8"] is Trial.WITHIN
    assert {trials["local epochs 2"], trials["DP-SGD, epsilon 1.0"]} == {Trial.SKIPPED}
    assert ran == ["frozen position rows", "frozen embeddings", *ran[2:3], "LoRA, rank 8"]


def test_a_search_goes_on_where_it_was_and_limits_that_change_begin_it_anew(
    leaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first, _ = advised(leaking, monkeypatch)
    assert len(first) == len({*first}) == 16
    assert advised(leaking, monkeypatch)[1] == []
    info = leaking.run.info()["experiment"]
    leaking.run.update_info(experiment=info | {"gate": info["gate"] | {"exact": 0.4}})
    assert advised(leaking, monkeypatch)[1] == first


def test_what_no_time_is_left_for_is_not_tried(
    leaking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaking.time.ends = search.now() + 30
    advice, ran, messages = advised(leaking, monkeypatch)
    assert {row.trial for row in advice.tried} == {Trial.SKIPPED}
    assert ran == []
    assert "gate.seconds asks for 60" in messages[-1]
    assert advice.seconds == 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gate": {"epsilon": 1.0}}, "there is no limit that a defense has to keep"),
        ({"gate": {"exact": 0.1}}, r"exact = 0.1 cannot be kept: .* have 36 clients"),
        ({"gate": {"exact": 0.0}}, r"exact = 0 cannot be kept: .* raise the limit"),
    ],
)
def test_a_setting_that_no_defense_can_help_is_refused_first(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse_without_limits(experiment(**changes))


def test_sums_that_share_no_text_stand_for_themselves(tmp_path: Path) -> None:
    """Of twelve sums of which nothing was read, as much as of twelve clients may be read."""
    summed = experiment(
        **{"federation.clients": 2, "threat.rounds": None, "federation.rounds": 12, **BATCH},
        defense=[{"kind": "secure_sum"}],
    )

    def worst(folder: str, text: Any) -> Any:
        truths = [
            truth_of(round, client, [text(round, client), [2, 9, 9 + client, round + 9, 3]])
            for round in range(1, 13)
            for client in range(2)
        ]
        answers = [answer_of(round, EVERYONE, [[2, 5, 3]]) for round in range(1, 13)]
        run = run_of(tmp_path / folder, summed, truths, answers, node_examples=[24, 24])
        run.write_json("held_out.json", {"sequences": [], "labels": []})
        score_run(run)
        return run.read_document(SUMMARY).worst_case

    apart = worst("apart", lambda round, client: [2, 10 + round, 30 + client, 3])
    assert (apart.clients, apart.texts, apart.warning) == (12, 48, None)
    assert apart.exact_match.high == pytest.approx(1 - 0.025 ** (1 / 12), abs=0.01)
    shared = worst("shared", lambda round, client: [2, 10 + client, 30, 3])
    assert (shared.clients, shared.warning) == (1, "one group of clients: an example, not a rate")
    assert shared.exact_match.high > 0.95


@pytest.mark.slow
def test_a_search_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of positions are not what says all; frozen with the first layer little is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hiring, "hire", lambda *_: nullcontext([tiny.Here()]))
    settings = {
        "federation.clients": 12,
        "federation.batch_size": 2,
        "data": {"name": "builtin/notes", "samples": 48, "held_out": 8},
        "attack": [{"kind": "keyspan"}, {"kind": "auto", "seconds": 1.0}],
        "gate": {"exact": 0.3, "seconds": 1.0, "may_abstain": ["auto", "keyspan", "probes"]},
    }
    Path("small.toml").write_text(toml(settings))
    status, text, errors = call("audit", "small.toml", "--defend", "--minutes", "40")
    assert status == 3, errors
    run = Run(tmp_path / "runs/small-audit")
    advice = run.read_document(AUDIT).advice
    assert advice is not None
    trials = {row.name: row for row in advice.tried}
    assert trials["frozen position rows"].trial is Trial.EXCEEDED
    ended = Run(run.path.with_name("small-audit-defend")).path
    early = next(path for path in ended.iterdir() if "position" in path.name)
    assert len((early / "reconstructions.jsonl").read_bytes().splitlines()) < 36
    assert advice.cheapest is not None
    assert advice.cheapest.exact is not None
    assert advice.cheapest.exact.high <= 0.3
    assert f"is {advice.cheapest.name}: " in " ".join(text.split())
    assert advice.cheapest.name in (run.path / "report.html").read_text()
    before = {path: path.stat().st_mtime_ns for path in ended.rglob("reconstructions.jsonl")}
    assert call("audit", "small.toml", "--defend", "--minutes", "40")[0] == 3
    assert run.read_document(AUDIT).advice == advice
    assert {path: path.stat().st_mtime_ns for path in ended.rglob("*.jsonl") if path in before} == (
        before
    )
