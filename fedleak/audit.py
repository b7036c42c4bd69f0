"""Scores what attacks answered against what clients held. Only this opens the vault.

Every row says what the attacker knew and what two controls score against the same truth: the same
attack's answer for another client's update, and held-out texts that were drawn without looking
at any update.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch

from fedleak import models, privacy
from fedleak.config import Experiment
from fedleak.defenses.dp_sgd import DpSgd
from fedleak.errors import FedleakError
from fedleak.federation import clients_of_round
from fedleak.metrics import intervals, rouge
from fedleak.metrics.matching import assign
from fedleak.metrics.rouge import Rouge
from fedleak.metrics.tokens import Overlap, overlap
from fedleak.models import LanguageModel
from fedleak.observation import Knowledge, ThreatModel
from fedleak.privacy import Event, Spent
from fedleak.reconstruction import Status
from fedleak.store import EVERYONE, SCHEMA_VERSION, Key, Run
from fedleak.streams import stream
from fedleak.truth import GroundTruth

GUESSES = 10
"""Draws of held-out texts that the guess control is the mean of."""

FEW_TEXTS, FEW_CLIENTS = 20, 10
"""Fewer than these are reported with a warning."""


@dataclass(frozen=True)
class LeakageRow:
    """One answer, scored. None is "not measured", never zero.

    Attributes:
        status: recovered, abstained, inadmissible or failed.
        batch_size, num_tokens: Sequences in the batch; their tokens, special ones included.
        rouge1, rouge2, rougeL: 0 to 100, content only; an unanswered sequence counts 0.
        paper_rouge1, paper_rouge2, paper_rougeL: The same pairs with special tokens kept, as
            published tables have them.
        exact_match: Share of sequences recovered exactly.
        token_recall, token_precision: Of distinct content tokens: those that the attack says were
            in the batch, or, if it names sequences only, those of its sequences.
        control_rougeL, control_token_recall: The attack's answer for another client's update.
        guess_rougeL, guess_token_recall: Held-out texts, no update.
        facts: For each other fact the attack read: what it said and what is true.
        margin: The smallest of the sequences that the attack is certain of; None where it is of
            none, or nothing was rejected in their place.
        diagnostics: How the attack went, in its own words.
        seconds, device: The attack alone.
        knows: Facts that the attacker had.
    """

    round: int
    client: int
    attack: str
    status: str
    reason: str
    verified: bool
    batch_size: int
    num_tokens: int
    rouge1: float | None
    rouge2: float | None
    rougeL: float | None
    paper_rouge1: float | None
    paper_rouge2: float | None
    paper_rougeL: float | None
    exact_match: float | None
    token_recall: float | None
    token_precision: float | None
    control_rougeL: float | None
    control_token_recall: float | None
    guess_rougeL: float | None
    guess_token_recall: float | None
    facts: dict[str, Any]
    margin: float | None
    diagnostics: dict[str, Any]
    seconds: float | None
    device: str | None
    knows: list[str]


@dataclass(frozen=True)
class Pair:
    """A private text and what an attack made of it; None where it has no answer for it."""

    truth: str
    answer: str | None
    rougeL: float


@dataclass(frozen=True)
class Scored:
    """A row and the texts behind it."""

    row: LeakageRow
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Scores:
    """An answer's scores against one truth."""

    content: Rouge | None = None
    paper: Rouge | None = None
    exact_match: float | None = None
    token_recall: float | None = None
    token_precision: float | None = None
    pairs: tuple[Pair, ...] = ()


def knowledge(run: Run, key: Key, threat: ThreatModel) -> Knowledge:
    """Returns what the attacker knows of a capture: the server's facts and the granted ones.

    Raises:
        FedleakError: A private fact is granted but the client wrote no truth.
        CaptureError: The capture is damaged.
    """
    server = run.read_knowledge(key)
    if not threat.knows:
        return server
    truth = read_truth(run, key)
    if truth is None:
        raise FedleakError(
            f"threat.knows grants {', '.join(sorted(threat.knows))}, but the vault has no {key}: "
            "run with the vault on, or grant nothing"
        )
    longest_first = sorted(
        range(len(truth.sequences)), key=lambda i: len(truth.sequences[i]), reverse=True
    )
    private = Knowledge(
        batch_size=truth.batch_size,
        lengths=tuple(len(truth.sequences[i]) for i in longest_first),
        labels=tuple(truth.labels[i] for i in longest_first) if truth.labels else None,
        noise_scale=truth.noise_scale,
    )
    return threat.grant(server, private)


def read_truth(run: Run, key: Key) -> GroundTruth | None:
    """Opens the vault for one client and round, or for all of a round whose sum was captured."""
    if key.client == EVERYONE:
        return _together(run, key.round)
    value = run.read_truth(key)
    return None if value is None else GroundTruth.from_json(value)


def _together(run: Run, round: int) -> GroundTruth | None:
    """Returns the batches of all clients of a round as one."""
    found = [read_truth(run, key) for key in run.truths() if key.round == round]
    truths = [truth for truth in found if truth is not None]
    if not truths:
        return None
    # As the server weighs them: of FedSGD a client reports the size that it expects.
    of_fedsgd = run.info()["experiment"]["federation"]["algorithm"] == "fedsgd"
    weights = [truth.batch_size if of_fedsgd else len(truth.sequences) for truth in truths]
    scales = [
        w * (truth.noise_scale or 0.0) / sum(weights)
        for w, truth in zip(weights, truths, strict=True)
    ]
    return GroundTruth(
        round,
        EVERYONE,
        tuple(chain.from_iterable(truth.sequences for truth in truths)),
        tuple(chain.from_iterable(truth.labels for truth in truths)),
        sum(truth.batch_size for truth in truths),
        math.hypot(*scales) if any(scales) else None,
    )


def score_sequences(
    answers: Sequence[Sequence[int]], truths: Sequence[Sequence[int]], model: LanguageModel
) -> Scores:
    """Scores sequences one-to-one, content only.

    Only as many answers count as there are sequences, in the attack's own order, so that more
    answers do not buy a better score.
    """
    special = model.special_ids()

    def content(sequences: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
        return [tuple(t for t in one if t not in special) for one in sequences]

    answers = answers[: len(truths)]
    answer_ids, truth_ids = content(answers), content(truths)
    answer_texts = [model.decode(one) for one in answer_ids]
    truth_texts = [model.decode(one) for one in truth_ids]

    def similarity(answer: int, truth: int) -> float:
        exact = 100.0 * (answer_ids[answer] == truth_ids[truth])
        return exact + sum(rouge.rouge(answer_texts[answer], truth_texts[truth]))

    chosen = assign(range(len(answers)), range(len(truths)), similarity)
    texts = [None if a is None else answer_texts[a] for a in chosen]
    scores = [rouge.rouge(a or "", t) for a, t in zip(texts, truth_texts, strict=True)]
    paper = [
        rouge.rouge("" if a is None else model.decode(answers[a], special=True), true)
        for a, true in zip(chosen, (model.decode(t, special=True) for t in truths), strict=True)
    ]
    exact = [a is not None and answer_ids[a] == t for a, t in zip(chosen, truth_ids, strict=True)]
    return Scores(
        rouge.mean(scores),
        rouge.mean(paper),
        sum(exact) / len(exact),
        *score_tokens(chain(*answers), truths, model),
        tuple(Pair(t, a, s.rougeL) for t, a, s in zip(truth_texts, texts, scores, strict=True)),
    )


def score_tokens(
    answer: Iterable[int], truths: Iterable[Sequence[int]], model: LanguageModel
) -> Overlap:
    """Scores a set of tokens, content only."""
    special = model.special_ids()
    return overlap(set(answer) - special, set(chain(*truths)) - special)


def score_answer(answer: dict[str, Any], truth: GroundTruth, model: LanguageModel) -> Scores:
    """Scores a line of reconstructions.jsonl by what that attack looks for."""
    scores = Scores()
    if answer["sequences"] is not None:
        scores = score_sequences(answer["sequences"], truth.sequences, model)
    if answer["tokens"] is not None:
        found = score_tokens(answer["tokens"], truth.sequences, model)
        scores = replace(scores, token_recall=found.recall, token_precision=found.precision)
    return scores


def guess(
    held_out: Sequence[Sequence[int]], truth: GroundTruth, model: LanguageModel, seed: int
) -> Scores:
    """Returns the mean scores of held-out texts, drawn without any update."""
    if not held_out:
        return Scores()
    rng = stream(seed, "guess", truth.round, truth.client)
    drawn = []
    for _ in range(GUESSES):
        picks = torch.randint(len(held_out), (len(truth.sequences),), generator=rng).tolist()
        drawn.append(score_sequences([held_out[i] for i in picks], truth.sequences, model))
    return Scores(
        content=rouge.mean([one.content for one in drawn if one.content]),
        token_recall=sum(one.token_recall or 0.0 for one in drawn) / GUESSES,
    )


def score_run(run: Run) -> list[Scored]:
    """Scores every reconstruction of a run and writes leakage.jsonl and summary.json.

    Raises:
        FedleakError: There is no run here.
    """
    info = run.info()
    experiment = info["experiment"]
    answers = run.rows("reconstructions.jsonl")
    table = Experiment.model_validate(experiment)
    model = models.outline(table.model_spec(info["num_labels"]))
    held_out = run.read_json("held_out.json")["sequences"]
    answered = sorted({Key(answer["round"], answer["client"]) for answer in answers})
    truths = {key: read_truth(run, key) for key in answered}
    controls = experiment["audit"]["controls"]
    guesses = {
        key: guess(held_out, truth, model, experiment["seed"]) if controls else Scores()
        for key, truth in truths.items()
        if truth is not None and truth.sequences
    }
    by_attack: dict[str, dict[Key, dict[str, Any]]] = defaultdict(dict)
    for answer in answers:
        by_attack[answer["attack"]][Key(answer["round"], answer["client"])] = answer
    scored = []
    for of_attack in by_attack.values():
        for key, answer in sorted(of_attack.items()):
            truth = truths.get(key)
            # Poisson sampling may draw nobody, and then there is nothing to find.
            if truth is None or not truth.sequences:
                continue
            other = _other_client(key, of_attack) if controls else None
            control = score_answer(other, truth, model) if other else Scores()
            scored.append(_row(answer, truth, control, guesses[key], model))
    scored.sort(key=lambda one: (one.row.round, one.row.client, one.row.attack))
    run.write_rows("leakage.jsonl", (asdict(one.row) for one in scored))
    run.write_rows("privacy.jsonl", ledger(run, table))
    run.write_rows("defenses.jsonl", _defense_rows(run))
    run.write_json("summary.json", summarise(run, info, [one.row for one in scored]))
    return scored


def ledger(run: Run, experiment: Experiment) -> list[dict[str, Any]]:
    """Returns the rows of privacy.jsonl: what each client has spent by each of its rounds.

    It is composed anew from what clients noted of every round, so a run that was stopped and goes
    on counts none twice and forgets none.
    """
    table, defended = experiment.privacy, run.defended()
    events: dict[int, list[Event]] = defaultdict(list)
    rows = []
    for round in range(1, experiment.federation.rounds + 1):
        for client in clients_of_round(experiment, round):
            key = Key(round, client)
            if run.read_truth(key) is None and key not in defended:
                continue  # not yet trained
            noted = defended.get(key, {"events": []})["events"]
            events[client] += map(Event.from_json, noted)
            spent = privacy.compose(events[client], table.delta, table.accountant)
            rows += [_ledger_row(key, each, table.accountant) for each in spent] or [
                {**key._asdict(), **_NOTHING_GUARANTEED}
            ]
    return rows


_NOTHING_GUARANTEED = {
    "epsilon": privacy.NONE,
    "delta": None,
    "accountant": privacy.NONE,
    "unit": privacy.NONE,
    "neighbouring": privacy.NONE,
    "sampling": privacy.NONE,
    "sampling_rate": None,
    "steps": None,
    "noise_multiplier": None,
}


def _ledger_row(key: Key, spent: Spent, accountant: str) -> dict[str, Any]:
    finite = math.isfinite(spent.epsilon)
    return {
        **key._asdict(),
        "epsilon": spent.epsilon if finite else privacy.NONE,
        "delta": spent.delta,
        "accountant": accountant,
        "unit": spent.of.unit,
        "neighbouring": spent.of.neighbouring,
        "sampling": spent.of.sampling,
        "sampling_rate": spent.of.sampling_rate,
        "steps": sum(event.steps for event in spent.events),
        "noise_multiplier": spent.of.noise_multiplier,
    }


def _defense_rows(run: Run) -> list[dict[str, Any]]:
    """Returns the rows of defenses.jsonl: what each defense did to each update."""
    return [
        {
            **key._asdict(),
            **told,
            **(noted["training"] if told["kind"] == DpSgd.kind else {}),
        }
        for key, noted in run.defended().items()
        for told in noted["defenses"]
    ]


def _what_defenses_did(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each defense the means of its figures over all updates that have them."""
    found: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        of_defense = found[row["defense"], row["kind"]]
        for key in row.keys() - {"round", "client", "defense", "kind"}:
            if row[key] is not None:
                of_defense[key].append(row[key])
    return [
        {"defense": number, "kind": kind}
        | {key: sum(values) / len(values) for key, values in sorted(figures.items())}
        for (number, kind), figures in sorted(found.items())
    ]


def _guarantee(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns what holds for every client after its last round: the weakest of the strongest.

    A client that bounds both its examples and itself has the smaller epsilon of the two.
    """
    last = {(row["client"], row["unit"]): row for row in rows}

    def size(row: dict[str, Any]) -> float:
        return math.inf if row["epsilon"] == privacy.NONE else float(row["epsilon"])

    of_client = [
        min((row for row in last.values() if row["client"] == client), key=size)
        for client in sorted({row["client"] for row in rows})
    ]
    if not of_client:
        return None
    worst = max(of_client, key=size)
    fields = ("epsilon", "delta", "accountant", "unit", "neighbouring", "noise_multiplier")
    return {field: worst[field] for field in fields}


def summarise(run: Run, info: dict[str, Any], rows: Sequence[LeakageRow]) -> dict[str, Any]:
    """Returns the content of summary.json: each attack's figures with their intervals."""
    attacks = {
        name: _summary([row for row in rows if row.attack == name])
        for name in sorted({row.attack for row in rows})
    }
    utility, reference = run.rows("utility.jsonl"), run.path / "reference.json"
    return {
        "schema_version": SCHEMA_VERSION,
        "name": info["experiment"]["name"],
        "status": info["status"],
        "fedleak": info["versions"]["fedleak"],
        "model_fingerprint": info["model_fingerprint"],
        "captures": len(run.captures()),
        "attacks": attacks,
        "defenses": settings_that_defend(Experiment.model_validate(info["experiment"])),
        "defended": _what_defenses_did(run.rows("defenses.jsonl")),
        "privacy": _guarantee(run.rows("privacy.jsonl")),
        "utility_before": utility[0] if utility and utility[0]["round"] == 0 else None,
        "utility": utility[-1] if utility else None,
        "held_out": info["experiment"]["data"]["held_out"],
        "utility_reference": run.read_json("reference.json") if reference.is_file() else None,
    }


def settings_that_defend(experiment: Experiment) -> dict[str, Any]:
    """Returns all that is in the way of an attack: defenses, and settings that act as such."""
    table = experiment.federation
    of_fedavg = {"local_epochs": table.local_epochs} if table.algorithm == "fedavg" else {}
    return {
        "defense": experiment.defense,
        "share": experiment.update.share,
        "lora": experiment.model.lora and experiment.model.lora.model_dump(),
        "algorithm": table.algorithm,
        "batch_size": table.batch_size,
        **of_fedavg,
        "dropout": table.dropout,
    }


def _summary(rows: Sequence[LeakageRow]) -> dict[str, Any]:
    """Sums up one attack. A failed or abstaining attack counts among rows, not as a zero."""
    measured = [row for row in rows if row.rougeL is not None]

    def mean_of(field: str, most: float) -> dict[str, float] | None:
        return _mean([(r, value) for r in rows if (value := getattr(r, field)) is not None], most)

    seconds = [row.seconds for row in rows if row.seconds is not None]
    return {
        "rows": len(rows),
        "status": dict(Counter(row.status for row in rows)),
        "verified": sum(row.verified for row in rows),
        "knows": sorted(set(chain.from_iterable(row.knows for row in rows))),
        "sequences": sum(row.batch_size for row in measured),
        "clients": len({row.client for row in measured}),
        "exact_match": _mean(
            [(row, row.exact_match or 0.0) for row in measured],
            1.0,
            [row.batch_size for row in measured],
        ),
        **{
            field: mean_of(field, 100.0)
            for field in ("rouge1", "rouge2", "rougeL", "control_rougeL", "guess_rougeL")
        },
        **{
            field: mean_of(field, 1.0)
            for field in (
                "token_recall",
                "token_precision",
                "control_token_recall",
                "guess_token_recall",
            )
        },
        "facts": {
            name: _mean(
                [
                    (row, float(row.facts[name]["found"] == row.facts[name]["true"]))
                    for row in rows
                    if name in row.facts
                ],
                1.0,
            )
            for name in sorted({name for row in rows for name in row.facts})
        },
        "budget": _budget(rows),
        "candidates": _candidates(rows),
        "margin": min((row.margin for row in rows if row.margin is not None), default=None),
        "seconds": sum(seconds),
        "seconds_per_update": sum(seconds) / len(seconds) if seconds else None,
        "warning": _warning([row for row in rows if row.status == Status.RECOVERED]),
    }


def _mean(
    found: Sequence[tuple[LeakageRow, float]],
    most: float,
    weights: Sequence[float] | None = None,
) -> dict[str, float] | None:
    """Returns the mean of values of rows with its interval over clients; None if there are none."""
    if not found:
        return None
    values, clients = [value for _, value in found], [row.client for row, _ in found]
    return intervals.clustered_mean(values, clients, weights, most=most)._asdict()


def _warning(answered: Sequence[LeakageRow]) -> str | None:
    """Returns why the figures of these answers are examples and no rates; None if they are."""
    clients, texts = {row.client for row in answered}, sum(row.batch_size for row in answered)
    if clients == {EVERYONE}:
        few = ["one group of clients"]
    elif len(clients) == 1:
        few = ["one client"]
    else:
        few = [f"fewer than {FEW_CLIENTS} clients"] if len(clients) < FEW_CLIENTS else []
        few += [f"fewer than {FEW_TEXTS} texts"] if texts < FEW_TEXTS else []
    return f"{' and '.join(few)}: an example, not a rate" if clients and few else None


def _budget(rows: Sequence[LeakageRow]) -> dict[str, float] | None:
    """Returns what share of its rank budget a batch used, over rows where that can be told."""
    budgets = [row.diagnostics["budget"] for row in rows if "budget" in row.diagnostics]
    shares = [used / available for used, available in budgets if used is not None]
    if not shares:
        return None
    return {"mean": sum(shares) / len(shares), "max": max(shares), "rows": len(shares)}


def _candidates(rows: Sequence[LeakageRow]) -> dict[str, float] | None:
    """Returns how many candidates were left after each check, the mean over rows that say so."""
    counts = defaultdict(list)
    for row in rows:
        for check, count in row.diagnostics.get("candidates", {}).items():
            counts[check].append(count)
    return {check: sum(found) / len(found) for check, found in counts.items()} or None


def _other_client(key: Key, of_attack: dict[Key, dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the attack's answer for the next other client, of the same round if there is one."""
    others = [
        k
        for k, answer in of_attack.items()
        if (k.client != key.client or (k.client == EVERYONE and k != key))
        and answer["status"] == Status.RECOVERED
    ]
    if not others:
        return None
    after = sorted(
        others, key=lambda k: (abs(k.round - key.round), (k.client - key.client) % 10**6)
    )
    return of_attack[after[0]]


def _row(
    answer: dict[str, Any],
    truth: GroundTruth,
    control: Scores,
    guessed: Scores,
    model: LanguageModel,
) -> Scored:
    recovered = answer["status"] == Status.RECOVERED
    scores = score_answer(answer, truth, model) if recovered else Scores()
    true_facts = {
        "longest_sequence": max(map(len, truth.sequences)),
        "label_counts": [truth.labels.count(c) for c in range(model.num_labels)],
    }
    # Below 1 is a guess; null had nothing to be compared with. Early runs have no margins.
    margins = [m for m in answer.get("margins", ()) if m is not None and m >= 1]
    content, paper = scores.content, scores.paper
    only_tokens = recovered and answer["sequences"] is None
    row = LeakageRow(
        round=truth.round,
        client=truth.client,
        attack=answer["attack"],
        status=answer["status"],
        reason=answer["reason"],
        verified=answer["verified"],
        batch_size=len(truth.sequences),
        num_tokens=sum(map(len, truth.sequences)),
        rouge1=content.rouge1 if content else None,
        rouge2=content.rouge2 if content else None,
        rougeL=content.rougeL if content else None,
        paper_rouge1=paper.rouge1 if paper else None,
        paper_rouge2=paper.rouge2 if paper else None,
        paper_rougeL=paper.rougeL if paper else None,
        exact_match=scores.exact_match,
        token_recall=scores.token_recall,
        token_precision=scores.token_precision,
        control_rougeL=control.content.rougeL if control.content else None,
        control_token_recall=control.token_recall,
        guess_rougeL=guessed.content.rougeL if guessed.content and not only_tokens else None,
        guess_token_recall=guessed.token_recall,
        facts={
            name: {"found": value, "true": true_facts[name]}
            for name, value in answer["facts"].items()
        },
        margin=min(margins, default=None),
        diagnostics=answer["diagnostics"],
        seconds=answer["seconds"],
        device=answer["device"],
        knows=answer["knows"],
    )
    return Scored(row, scores.pairs)
