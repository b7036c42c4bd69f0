"""Scores what attacks answered against what clients held. Only this opens the vault.

Every row says what the attacker knew and what two controls score against the same truth: the same
attack's answer for another client's update, and held-out texts that were drawn without looking
at any update.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedleak import models, privacy
from fedleak.attacks import unchecked
from fedleak.audit.vault import read_truth
from fedleak.config.experiment import Experiment
from fedleak.defenses.dp_sgd import DpSgd
from fedleak.errors import CaptureError, FedleakError
from fedleak.federation.lookup import stored
from fedleak.federation.schedule import clients_of_round, expected_captures
from fedleak.metrics import intervals, rouge
from fedleak.metrics.matching import assign
from fedleak.metrics.rouge import Rouge
from fedleak.metrics.tokens import Overlap, overlap
from fedleak.models import LanguageModel
from fedleak.privacy import Event, Spent
from fedleak.reconstruction import Status
from fedleak.rng import stream
from fedleak.store import records
from fedleak.store.run import EVERYONE, SCHEMA_VERSION, Key, Run
from fedleak.truth import GroundTruth

GUESSES = 10
"""Draws of held-out texts that the guess control is the mean of."""

FEW_TEXTS, FEW_CLIENTS = 20, 10
"""Fewer than these are reported with a warning."""

NAMED = 3
"""Of many captures or reasons so many are named where something is missing."""


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
        facts: For each other fact the attack read: what it said and what is true, None if that
            cannot be told.
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
    facts: dict[str, dict[str, Any]]
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


@dataclass
class Gaps:
    """What is not there that should be, in sentences.

    Attributes:
        missing: What makes the results incomplete, and the command that mends it.
        notes: What else should be known.
        unscored: Answers that should have a row and have none.
    """

    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unscored: int = 0


def score_run(run: Run, asked: Iterable[str] | None = None) -> list[Scored]:
    """Scores every reconstruction of a run and writes leakage.jsonl and summary.json.

    What was scored earlier is never replaced by less: a row whose truth or whose answer is gone
    stays as it was. Whoever calls this holds the lock.

    Args:
        run: The run directory.
        asked: Names of the attacks that should have answered; None: those of its experiment.

    Raises:
        ConfigError: There is no run here.
        FedleakError: run.json or held_out.json is damaged; nothing was changed then.
    """
    experiment, gaps = stored(run), Gaps()
    model = models.outline(experiment.model_spec(run.info()["num_labels"]))
    vocabulary = _vocabulary(model)
    answers = {
        (Key(line["round"], line["client"]), line["attack"]): line
        for line in run.salvage(
            "reconstructions.jsonl", records.answer(run.fingerprint(), vocabulary)
        )
    }
    earlier = {
        (Key(line["round"], line["client"]), line["attack"]): LeakageRow(
            **{name: line[name] for name in LeakageRow.__dataclass_fields__}
        )
        for line in run.salvage("leakage.jsonl", _LEAKAGE)
    }
    truths = _truths(run, sorted({key for key, _ in answers}), vocabulary, gaps)
    scored = _score(run, experiment, model, answers, earlier, truths)
    fresh = {(Key(one.row.round, one.row.client), one.row.attack) for one in scored}
    for name, row in earlier.items():
        # What failed was not measured, so without its answer there is nothing to keep.
        if name not in fresh and (name in answers or row.status != Status.FAILED):
            scored.append(Scored(row, ()))
    scored.sort(key=lambda one: (one.row.round, one.row.client, one.row.attack))
    rows = [one.row for one in scored]
    names = [each.name for each in experiment.attacks] if asked is None else list(asked)
    _find_gaps(run, experiment, names, answers, rows, truths, gaps)
    gaps.notes += unchecked(line["settings"]["kind"] for line in answers.values())
    notes = _notes(run, gaps)
    run.write_rows("leakage.jsonl", map(asdict, rows))
    run.write_rows("privacy.jsonl", ledger(run, experiment, notes, gaps))
    run.write_rows("defenses.jsonl", _defense_rows(run, notes))
    run.write_json("summary.json", summarise(run, experiment, rows, gaps))
    return scored


def refuse_gaps(*runs: Run) -> None:
    """Refuses to call runs that were just scored complete where they are not.

    Raises:
        FedleakError: Answers failed, captures are damaged or could not be scored.
    """
    if missing := list(chain(*(run.read_json("summary.json")["missing"] for run in runs))):
        raise FedleakError("; ".join(missing))


def _score(
    run: Run,
    experiment: Experiment,
    model: LanguageModel,
    answers: Mapping[tuple[Key, str], dict[str, Any]],
    earlier: Mapping[tuple[Key, str], LeakageRow],
    truths: Mapping[Key, GroundTruth | None],
) -> list[Scored]:
    """Scores the answers whose truth is known."""
    # Poisson sampling may draw nobody, and then there is nothing to find.
    known = {key: truth for key, truth in truths.items() if truth is not None and truth.sequences}
    controls, guesses = experiment.audit.controls, {key: Scores() for key in known}
    if controls and known:
        held_out = _held_out(run, _vocabulary(model))
        guesses = {
            key: guess(held_out, truth, model, experiment.seed) for key, truth in known.items()
        }
    by_attack: dict[str, dict[Key, dict[str, Any]]] = defaultdict(dict)
    for (key, attack), answer in answers.items():
        by_attack[attack][key] = answer
    scored = []
    for attack, of_attack in by_attack.items():
        for key, answer in sorted(of_attack.items()):
            before = earlier.get((key, attack))
            if key not in known or _is_less(answer, before):
                continue
            other = _other_client(key, of_attack) if controls else None
            control = score_answer(other, known[key], model) if other else Scores()
            one = _row(answer, known[key], control, guesses[key], model)
            if controls and other is None and before is not None:  # the other's answer is gone
                kept = replace(
                    one.row,
                    control_rougeL=before.control_rougeL,
                    control_token_recall=before.control_token_recall,
                )
                one = Scored(kept, one.pairs)
            scored.append(one)
    return scored


def _is_less(answer: Mapping[str, Any], before: LeakageRow | None) -> bool:
    """Whether a try that failed stands against something that was measured earlier."""
    measured = before is not None and before.status != Status.FAILED
    return measured and answer["status"] == Status.FAILED


_LEAKAGE = records.of_shape(LeakageRow)


def _vocabulary(model: LanguageModel) -> int:
    """Returns how many token ids a text may have; a model may have more than its tokenizer."""
    return max(int(model.module.config.vocab_size), len(model.tokenizer))  # type: ignore[union-attr,arg-type]


class _HeldOut(BaseModel):
    sequences: list[list[int]]


def _held_out(run: Run, vocabulary: int) -> list[list[int]]:
    """Returns the held-out texts.

    Raises:
        FedleakError: The file is missing or damaged.
    """
    remedy = "`fedleak run` with the experiment's file makes it anew, and nothing else is lost"
    try:
        found = _HeldOut.model_validate(run.read_json("held_out.json")).sequences
    except ValidationError as error:
        raise FedleakError(
            f"{run.path / 'held_out.json'} is damaged (it has no list of texts): {remedy}"
        ) from error
    except FedleakError as error:
        raise FedleakError(f"{error}: {remedy}") from error
    if not records.within(chain(*found), vocabulary):
        raise FedleakError(
            f"{run.path / 'held_out.json'} is damaged (token ids outside the vocabulary): {remedy}"
        )
    return found


def _truths(
    run: Run, keys: Iterable[Key], vocabulary: int, gaps: Gaps
) -> dict[Key, GroundTruth | None]:
    """Returns what clients trained on; None where that is missing or damaged."""
    truths: dict[Key, GroundTruth | None] = {}
    for key in keys:
        try:
            truths[key] = truth = read_truth(run, key)
            if truth is not None and not records.within(chain(*truth.sequences), vocabulary):
                raise CaptureError(
                    f"{run.path / 'vault' / f'{key}.json'} is damaged (token ids outside the "
                    "vocabulary)"
                )
        except CaptureError as error:
            truths[key] = None
            gaps.missing.append(
                f"{error}: what was scored with it stays, and only `fedleak run FILE --fresh` "
                "writes such a file again"
            )
    return truths


def _find_gaps(
    run: Run,
    experiment: Experiment,
    asked: Sequence[str],
    answers: Mapping[tuple[Key, str], dict[str, Any]],
    rows: Sequence[LeakageRow],
    truths: Mapping[Key, GroundTruth | None],
    gaps: Gaps,
) -> None:
    """Notes which answers failed, are missing, or could not be scored."""
    info, missing, notes = run.info(), gaps.missing, gaps.notes
    failed = [line for line in answers.values() if line["status"] == Status.FAILED]
    if failed:
        reasons = list(dict.fromkeys(f"{line['attack']}: {line['reason']}" for line in failed))
        more = [f"and {len(reasons) - NAMED} more reasons"] * (len(reasons) > NAMED)
        missing.append(
            f"{len(failed)} of {len(answers)} answers failed "
            f"({'; '.join([*reasons[:NAMED], *more])}): `fedleak attack {run.path} --retry` "
            "tries them again"
        )
    elif answers and all(line["status"] in _NO_ANSWER for line in answers.values()):
        notes.append(f"no attack gave an answer: all {len(answers)} abstained or are inadmissible")
    if purged := info.get("purged"):
        notes.append(
            f"the private data was purged on {purged}: all {len(rows)} rows stay as they were, and "
            "nothing can be attacked or scored again"
        )
        return
    expected, here = expected_captures(experiment), set(run.captures())
    wanted = [(key, name) for key in expected for name in asked]
    unanswered = [(key, name) for key, name in wanted if (key, name) not in answers]
    if info["status"] != "finished":
        notes.append(
            f"the run is not finished ({info['status']}): {len(here & set(expected))} of "
            f"{len(expected)} captures are here; `fedleak run` with the experiment's file goes on"
        )
    elif unanswered:
        gaps.unscored += len(unanswered)
        gone = sorted({key for key, _ in unanswered} - here)
        if gone:
            missing.append(
                f"{len(gone)} of {len(expected)} captures are missing ({_some(gone)}): `fedleak "
                "run` with the experiment's file trains their rounds again"
            )
        if left := [key for key, _ in unanswered if key in here]:
            missing.append(
                f"{len(left)} of {len(wanted)} answers are missing (for {_some(left)}): `fedleak "
                f"attack {run.path}` gives them"
            )
    others = sorted(
        {row.attack for row in rows if (Key(row.round, row.client), row.attack) not in answers}
        - set(asked)
    )
    if others:
        missing.append(
            f"answers of {', '.join(others)} are gone: their rows stay as they were, and `fedleak "
            f"attack {run.path} --set 'attack=[...]'` gives them again"
        )
    untrue = [key for key, truth in truths.items() if truth is None]
    have = {(Key(row.round, row.client), row.attack) for row in rows}
    without = [key for key, name in answers if key in untrue and (key, name) not in have]
    gaps.unscored += len(without)
    if bare := sorted(set(without)):
        missing.append(
            f"{len(bare)} of {len(truths)} captures have no truth in {run.path / 'vault'} "
            f"({_some(bare)}), so answers for them cannot be scored: only `fedleak run FILE "
            "--fresh`, with the vault on, writes it"
        )
    if kept := sorted(set(untrue) - set(bare)):
        notes.append(
            f"{len(kept)} of {len(truths)} captures have no truth: {_some(kept)}: their rows stay "
            "as they were"
        )
    for file, number, reason in run.damaged():
        notes.append(f"line {number} of {file} was damaged ({reason}): it is in damaged.jsonl now")


_NO_ANSWER = (Status.ABSTAINED, Status.INADMISSIBLE)


def _some(keys: Iterable[Key]) -> str:
    """Returns the first few keys, and how many more there are."""
    names = list(dict.fromkeys(map(str, keys)))
    more = [f"and {len(names) - NAMED} more"] * (len(names) > NAMED)
    return ", ".join([*names[:NAMED], *more])


class _Told(BaseModel):
    """What one defense did to one update; its figures are the other fields."""

    model_config = ConfigDict(extra="allow")

    defense: int
    kind: str


class _Note(BaseModel):
    """A file of what a client's defenses did."""

    defenses: list[_Told]
    training: dict[str, float | None]
    events: list[Event]


def _notes(run: Run, gaps: Gaps) -> dict[Key, _Note | None]:
    """Returns what clients' defenses did; None where that is damaged."""
    notes: dict[Key, _Note | None] = {}
    for key, value in run.defended().items():
        try:
            notes[key] = _Note.model_validate(value)
        except ValidationError:
            notes[key] = None
            gaps.missing.append(
                f"{run.path / 'defended' / f'{key}.json'} is damaged: what was counted with it "
                "stays, and only `fedleak run FILE --fresh` writes such a file again"
            )
    return notes


def ledger(
    run: Run,
    experiment: Experiment,
    notes: Mapping[Key, _Note | None],
    gaps: Gaps,
) -> list[dict[str, Any]]:
    """Returns the rows of privacy.jsonl: what each client has spent by each of its rounds.

    It is composed anew from what clients noted of every round, so a run that was stopped and goes
    on counts none twice and forgets none. From a round on whose note is gone a client's rows are
    the earlier ones; where there are none, nothing is guaranteed.
    """
    table, truths = experiment.privacy, set(run.truths())
    earlier: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for line in run.salvage("privacy.jsonl", records.SPENT):
        earlier[Key(line["round"], line["client"])].append(line)
    events: dict[int, list[Event]] = defaultdict(list)
    lost: set[int] = set()
    rows: list[dict[str, Any]] = []
    for round in range(1, experiment.federation.rounds + 1):
        for client in clients_of_round(experiment, round):
            key = Key(round, client)
            if not (key in truths or key in notes or key in earlier):
                continue  # not yet trained
            note = notes.get(key)
            if note is None and experiment.defenses_of(client):
                lost.add(client)
            if client in lost:
                rows += earlier.get(key) or [{**key._asdict(), **_NOTHING_GUARANTEED}]
                continue
            events[client] += note.events if note is not None else ()
            spent = privacy.compose(events[client], table.delta, table.accountant)
            rows += [_ledger_row(key, each, table.accountant) for each in spent] or [
                {**key._asdict(), **_NOTHING_GUARANTEED}
            ]
    if lost:
        clients = ", ".join(map(str, sorted(lost)))
        gaps.missing.append(
            f"what the defenses of {len(lost)} clients ({clients}) did is not all in "
            f"{run.path / 'defended'}: the ledger keeps what it had of them, and counts what it "
            "never had as no guarantee; only `fedleak run FILE --fresh` writes such files again"
        )
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


def _defense_rows(run: Run, notes: Mapping[Key, _Note | None]) -> list[dict[str, Any]]:
    """Returns the rows of defenses.jsonl: what each defense did to each update."""
    rows = [
        {
            **key._asdict(),
            **told.model_dump(),
            **(note.training if told.kind == DpSgd.kind else {}),
        }
        for key, note in notes.items()
        if note is not None
        for told in note.defenses
    ]
    kept = [
        row
        for row in run.salvage("defenses.jsonl", records.DEFENDED)
        if notes.get(Key(row["round"], row["client"])) is None
    ]
    return sorted(rows + kept, key=lambda row: (row["round"], row["client"], row["defense"]))


def _what_defenses_did(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each defense the means of its figures over all updates that have them."""
    found: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        of_defense = found[row["defense"], row["kind"]]
        for key in row.keys() - {"round", "client", "defense", "kind"}:
            if isinstance(row[key], int | float):
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


def summarise(
    run: Run, experiment: Experiment, rows: Sequence[LeakageRow], gaps: Gaps
) -> dict[str, Any]:
    """Returns the content of summary.json: each attack's figures with their intervals."""
    attacks = {
        name: _summary([row for row in rows if row.attack == name])
        for name in sorted({row.attack for row in rows})
    }
    info, utility = run.info(), run.salvage("utility.jsonl", records.UTILITY)
    if info["status"] == "finished" and experiment.data.held_out:
        rounds = filter(experiment.evaluated, range(experiment.federation.rounds + 1))
        if lost := set(rounds) - {row["round"] for row in utility}:
            gaps.missing.append(
                f"{run.path / 'utility.jsonl'} lacks the rounds {sorted(lost)}: only `fedleak run "
                "FILE --fresh` measures them again"
            )
    return {
        "schema_version": SCHEMA_VERSION,
        "name": experiment.name,
        "status": info["status"],
        "fedleak": info.get("versions", {}).get("fedleak"),
        "model_fingerprint": info.get("model_fingerprint"),
        "captures": len(run.captures()),
        "attacks": attacks,
        "defenses": settings_that_defend(experiment),
        "defended": _what_defenses_did(run.rows("defenses.jsonl")),
        "privacy": _guarantee(run.rows("privacy.jsonl")),
        "utility_before": utility[0] if utility and utility[0]["round"] == 0 else None,
        "utility": utility[-1] if utility else None,
        "held_out": experiment.data.held_out,
        "utility_reference": _reference(run, gaps),
        **asdict(gaps),
    }


def _reference(run: Run, gaps: Gaps) -> Any:
    """Returns the figures of the central reference; None if there is none."""
    if not (run.path / "reference.json").is_file():
        return None
    try:
        return _FIGURES.validate_python(run.read_json("reference.json"))
    except FedleakError as error:
        reason = str(error)
    except ValidationError:
        reason = f"{run.path / 'reference.json'} is damaged (it is no table of figures)"
    gaps.missing.append(
        f"{reason}: delete it, and `fedleak run` with the experiment's file makes it anew"
    )
    return None


_FIGURES = TypeAdapter(dict[str, float | None])


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
            name: mean
            for name in sorted({name for row in rows for name in row.facts})
            if (mean := _mean(_right(rows, name), 1.0)) is not None
        },
        "budget": _budget(rows),
        "candidates": _candidates(rows),
        "margin": min((row.margin for row in rows if row.margin is not None), default=None),
        "seconds": sum(seconds),
        "seconds_per_update": sum(seconds) / len(seconds) if seconds else None,
        "warning": _warning([row for row in rows if row.status == Status.RECOVERED]),
    }


def _right(rows: Sequence[LeakageRow], name: str) -> list[tuple[LeakageRow, float]]:
    """Returns whether a fact is right, where an attack said it and the truth is known."""
    told = [(row, fact) for row in rows if (fact := row.facts.get(name)) is not None]
    return [
        (row, float(fact["found"] == fact["true"]))
        for row, fact in told
        if "found" in fact and fact.get("true") is not None
    ]


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
    budgets: Iterable[Any] = (row.diagnostics.get("budget") for row in rows)
    shares = [used / available for used, available in filter(_two_numbers, budgets)]
    if not shares:
        return None
    return {"mean": sum(shares) / len(shares), "max": max(shares), "rows": len(shares)}


def _two_numbers(value: Any) -> bool:
    """Whether a value is a share of something: attacks fill their diagnostics as they like."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(each, int | float) for each in value)
        and value[1] != 0
    )


def _candidates(rows: Sequence[LeakageRow]) -> dict[str, float] | None:
    """Returns how many candidates were left after each check, the mean over rows that say so."""
    counts = defaultdict(list)
    for row in rows:
        told = row.diagnostics.get("candidates")
        for check, count in told.items() if isinstance(told, dict) else ():
            if isinstance(count, int | float):
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
    # Below 1 is a guess; null had nothing to be compared with.
    margins = [m for m in answer["margins"] if m is not None and m >= 1]
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
            name: {"found": value, "true": true_facts.get(name)}
            for name, value in answer["facts"].items()
        },
        margin=min(margins, default=None),
        diagnostics=answer["diagnostics"],
        seconds=answer["seconds"],
        device=answer["device"],
        knows=answer["knows"],
    )
    return Scored(row, scores.pairs)
