"""Makes the report of a run from its files and from what scoring returned."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import tomli_w
from pydantic import ValidationError

from fedleak.audit.answer_scores import Scored, TextPair
from fedleak.audit.defense_checks import FINDINGS, Finding
from fedleak.config.experiment import Experiment
from fedleak.federation.lookup import stored
from fedleak.federation.schedule import captures_made
from fedleak.models import LanguageModel
from fedleak.models.loading import outline
from fedleak.report.html import pictures
from fedleak.report.html.page import Entry, PrivateText, RunPage, Shown, TextAnswer
from fedleak.report.html.verdict import Extent, Guaranteed, run_verdict
from fedleak.report.table import Cell, Table, Tone, figures, plain, words
from fedleak.report.tables.advice import advice_table
from fedleak.report.tables.attacks import attack_table
from fedleak.report.tables.audit import gate_tables, plan_table
from fedleak.report.tables.canaries import canary_table
from fedleak.report.tables.detections import detections_table
from fedleak.report.tables.ladder import ladder_table
from fedleak.report.tables.leakage import (
    MOST_ROWS,
    ReadShare,
    client_name,
    leakage_table,
    shares,
)
from fedleak.report.tables.membership import membership_tables
from fedleak.report.tables.personal_data import personal_data_tables
from fedleak.report.tables.published import published_table
from fedleak.report.words import NOT_MEASURED, SEES, counted, figure, in_words, listed, number
from fedleak.store.audits import AUDIT
from fedleak.store.records import (
    LEDGER,
    UTILITY,
    LeakageRow,
    LedgerRow,
    TextScore,
    Utility,
    text_counts,
)
from fedleak.store.run import Key, Run
from fedleak.store.summaries import SUMMARY, CanarySummary, RunSummary
from fedleak.training.privacy import NONE
from fedleak.util.errors import FedleakError
from fedleak.util.nested import mapped

WORDS_KNOWN, ORDER_UNKNOWN = 0.9, 0.5
"""Words are known if at least this share of tokens is found; their order is not if less than this
share of texts is read exactly."""

WRITTEN = "Zoë pays 5 € at the Café, \U0001f600!"
"""What a tokenizer may not keep as it is: capitals, accents, signs."""


def run_page(run: Run, scored: Sequence[Scored], *, redact: bool = False) -> RunPage:
    """Returns the report of a run that was just scored.

    Args:
        run: The run directory.
        scored: What scoring returned.
        redact: Leave out private texts, and what attacks say of themselves in words.

    Raises:
        FedleakError: A file is missing or damaged.
    """
    experiment, info, summary = stored(run), run.info(), run.read_document(SUMMARY)
    model = outline(experiment.model_spec(info["num_labels"]))
    if redact:
        experiment = _without_folders(experiment)
    rows = [answer.row for answer in scored]
    ledger, utility = run.rows(LEDGER), run.rows(UTILITY)
    most = _with_all_facts(summary)
    read = shares([row for row in rows if row.attack in most.attacks])
    texts = [] if redact else _texts(scored)
    of_rounds = sorted({key.round for key in read})
    guaranteed = _guaranteed(experiment, summary, ledger)
    return RunPage(
        name=summary.name,
        begun=str(info.get("begun") or "on a day that was not noted"),
        redacted=redact,
        verdict=run_verdict(most, _extent(experiment, most, rows, read), guaranteed),
        audit=_audit_tables(run, redact),
        missing=_sentences_or_count(summary.missing, redact),
        notes=_sentences_or_count(summary.notes, redact),
        setting=_setting(experiment),
        threat=_threat(experiment, summary),
        leakage=_leakage(experiment, rows, read, ledger),
        training=[
            *pictures.training(utility, ledger, of_rounds),
            *_training_tables(utility, summary),
        ],
        attacks=_attacks(summary),
        ladder=[ladder_table(summary, summary.ladder)] if summary.ladder else [],
        membership=_membership(summary),
        published=[published_table(summary.published)] if summary.published else [],
        texts=texts,
        texts_note=_texts_note(rows, texts, model, redact),
        defenses=_defense_tables(run, experiment, summary, redact),
        privacy=guaranteed.sentence,
        canary_alarms=summary.canary.alarms if summary.canary else (),
        ledger=_ledger_tables(ledger, summary.canary),
        versions=[
            Entry("begun", str(info.get("begun") or NOT_MEASURED)),
            *([] if redact else [Entry("run by", str(info.get("user") or NOT_MEASURED))]),
            Entry("machine", str(info.get("machine") or NOT_MEASURED)),
            Entry("attacks ran on", ", ".join(_devices(rows)) or NOT_MEASURED),
            *(Entry(name, str(value)) for name, value in info.get("versions", {}).items()),
            Entry("commit", str(info.get("git_commit") or NOT_MEASURED)),
            Entry("experiment", str(info["fingerprint"])),
            Entry("weights at the start", str(summary.model_fingerprint or NOT_MEASURED)),
        ],
        repeat=f"fedleak run {shlex.quote(experiment.name + '.toml')}",
        experiment=tomli_w.dumps(experiment.model_dump(mode="json", exclude_none=True)),
    )


def _sentences_or_count(sentences: Sequence[str], redact: bool) -> Sequence[str]:
    """Returns sentences, or only their number: reasons of others may name private texts."""
    if redact and sentences:
        return [f"{counted(len(sentences), 'remark')}, left out here: `fedleak score` has them"]
    return sentences


def _audit_tables(run: Run, redact: bool) -> list[Table]:
    """Returns the tables of an audit, and which defenses it tried; none where there was none."""
    if not run.has(AUDIT.name):
        return []
    audit = run.read_document(AUDIT)
    advice = [] if audit.advice is None else [advice_table(audit.advice, reasons=not redact)]
    return [*gate_tables(audit), plan_table(audit), *advice]


def _with_all_facts(summary: RunSummary) -> RunSummary:
    """Returns the figures of attacks that are told all facts, where there is a ladder."""
    if summary.ladder is None:
        return summary
    names = summary.ladder.top.attacks.values()
    return summary.model_copy(
        update={
            "attacks": {name: attack for name, attack in summary.attacks.items() if name in names}
        }
    )


def _granted(experiment: Experiment, summary: RunSummary) -> Sequence[str]:
    """Returns the facts that the best informed attacker is told."""
    return summary.ladder.top.granted if summary.ladder else sorted(experiment.threat.knows)


def _without_folders(experiment: Experiment) -> Experiment:
    """Returns an experiment with the last part of each path: folders may name their owner."""

    def shortened(value: Any) -> Any:
        folders = r"(^|[\s=:,\"'])[/~].*/"
        return re.sub(folders, r"\1.../", value) if isinstance(value, str) else value

    return Experiment.model_validate(mapped(experiment.model_dump(mode="json"), shortened))


def _devices(rows: Sequence[LeakageRow]) -> list[str]:
    return sorted({row.device for row in rows if row.device is not None})


def _extent(
    experiment: Experiment,
    summary: RunSummary,
    rows: Sequence[LeakageRow],
    read: Mapping[Key, ReadShare],
) -> Extent:
    return Extent(
        attacked=len(read),
        sent=len(captures_made(experiment)),
        unordered=unordered(rows, read),
        late=len(late(rows)),
        granted=_granted(experiment, summary),
        sees=experiment.sees,
        adapters=experiment.model.lora is not None,
    )


def late(rows: Iterable[LeakageRow]) -> frozenset[Key]:
    """Returns the updates of which an attack's time was up and nothing is proved."""
    rows = list(rows)
    up = {row.key for row in rows if row.diagnostics.get("time_up")}
    return frozenset(up - {row.key for row in rows if row.verified})


def unordered(rows: Iterable[LeakageRow], read: Mapping[Key, ReadShare]) -> int:
    """Counts the updates whose words are known and whose order more time may read."""
    unfinished = late(rows)
    return sum(
        (share.tokens or 0.0) >= WORDS_KNOWN and (share.exact or 0.0) < ORDER_UNKNOWN
        for key, share in read.items()
        if key in unfinished
    )


def _setting(experiment: Experiment) -> list[Entry]:
    model, data, table = experiment.model, experiment.data, experiment.federation
    steps = "one gradient of one batch (FedSGD)"
    if table.algorithm == "fedavg":
        steps = f"the change of its weights after {counted(table.local_epochs, 'epoch')} (FedAvg)"
    shares = experiment.update.share
    lora = model.lora
    texts = "all texts" if data.samples is None else counted(data.samples, "training text")
    learned = (words := model.response_template) and f" on what stands behind {words!r}"
    return [
        Entry("model", f"{model.name}, {model.task}, loss {model.loss}{learned}"),
        Entry("trained", f"LoRA of rank {lora.rank}" if lora else "the whole model"),
        Entry("data", f"{data.name}: {texts}, {table.partition}"),
        Entry("clients", f"{table.clients:,}, of which {experiment.clients_per_round:,} a round"),
        Entry("rounds", f"{table.rounds:,}"),
        Entry("a client sends", steps),
        Entry("parameters sent", "all that are trained" if shares == "all" else ", ".join(shares)),
        Entry("batch size", str(table.batch_size)),
        Entry("learning rate", f"{table.learning_rate:g}"),
        Entry("server's step", _server_step(experiment)),
        Entry("dropout", "on" if table.dropout else "off"),
        Entry("a client's step", in_words(experiment.client.changed) or "plain SGD in float32"),
        Entry("defenses", "; ".join(map(in_words, experiment.defense)) or "none"),
    ]


def _server_step(experiment: Experiment) -> str:
    """Returns how the server moves the global model."""
    optimiser = experiment.server_optimiser
    if optimiser.kind == "adam":
        return f"Adam along the mean (FedAdam), learning rate {optimiser.learning_rate:g}"
    if experiment.federation.algorithm == "fedavg":
        return "the mean of the clients' weights"
    return "plain SGD along the mean gradient"


def _threat(experiment: Experiment, summary: RunSummary) -> list[Entry]:
    """Returns who the attacker is, and what it sees and is told."""
    attacker = "the server; it follows the protocol and is curious"
    if summary.server is not None:
        attacker = f"the server, which is malicious: {summary.server}"
    if experiment.sees == "models":
        attacker = "whoever has the models that the server publishes; not the server itself"
    rounds, clients = experiment.threat.rounds, experiment.threat.clients
    granted = [fact.replace("_", " ") for fact in _granted(experiment, summary)]
    grants = listed(granted) if granted else "nothing more"
    if summary.ladder is not None:
        grants = f"{grants} (and less: see what each fact is worth)"
    return [
        Entry("attacker", attacker),
        Entry("sees", f"{SEES[experiment.sees]}, and the models that it broadcast"),
        Entry("knows anyway", "learning rate, number of local steps, whether there is dropout"),
        Entry("is granted", grants),
        Entry("attacked rounds", "all" if rounds is None else listed(_first_numbers(rounds))),
        Entry("attacked clients", "all" if clients is None else listed(_first_numbers(clients))),
        Entry("attacks", listed(sorted(summary.attacks)) if summary.attacks else "none"),
    ]


def _first_numbers(numbers: Sequence[int]) -> list[str]:
    """Returns the first numbers of many, in words."""
    return [f"{number:,}" for number in numbers[:12]]


def _leakage(
    experiment: Experiment,
    rows: Sequence[LeakageRow],
    read: Mapping[Key, ReadShare],
    ledger: Sequence[LedgerRow],
) -> list[Shown]:
    if not rows:
        return []
    of_models = experiment.sees == "models"
    table = leakage_table(experiment.name, rows, read, ledger, of_models)
    return [*pictures.leakage(read), table]


def _training_tables(utility: Sequence[Utility], summary: RunSummary) -> list[Table]:
    if not utility:
        return []
    names = list(dict.fromkeys(chain.from_iterable(row.figures for row in utility)))
    measured = [(f"round {row.round}", row.figures) for row in utility[:MOST_ROWS]]
    if (baseline := summary.utility_reference) is not None:
        measured.append(("central, undefended", baseline.figures))
    rows = [plain(after, *(figure(row.get(name)) for name in names)) for after, row in measured]
    columns = [*words("after"), *figures(*names)]
    notes = [f"On {counted(summary.held_out, 'held-out text')}."]
    return [Table("Utility by round", columns, rows, notes)]


def _attacks(summary: RunSummary) -> list[Shown]:
    if not summary.attacks:
        return []
    return [
        *pictures.attacks(summary.attacks),
        attack_table(summary),
        *personal_data_tables(summary),
    ]


def _membership(summary: RunSummary) -> list[Shown]:
    if summary.membership is None:
        return []
    return [*pictures.membership(summary.membership), *membership_tables(summary.membership)]


def _texts(scored: Sequence[Scored]) -> list[PrivateText]:
    """Returns each private text of a sequence-naming attack with all answers, the worst first."""
    truths: dict[tuple[Key, int], str] = {}
    answers: dict[tuple[Key, int], list[TextAnswer]] = {}
    for scored_answer in scored:
        row = scored_answer.row
        for place, (pair, score) in enumerate(zip_longest(scored_answer.pairs, row.texts or ())):
            at = (row.key, place)
            if pair is not None:
                truths[at] = pair.truth
            answers.setdefault(at, []).append(_answer(row, pair, score))
    texts = [
        PrivateText(
            at[0].round, client_name(at[0].client), truth, sorted(answers[at], key=_goodness)
        )
        for at, truth in truths.items()
    ]
    return sorted(texts, key=lambda text: _goodness(text.best))


def _answer(row: LeakageRow, pair: TextPair | None, score: TextScore | None) -> TextAnswer:
    # Tokens decide whether an answer is exact; a row of an older version has the texts alone.
    exact = pair is not None and pair.answer == pair.truth if score is None else bool(score.exact)
    return TextAnswer(
        attack=row.attack,
        text=None if pair is None else pair.answer,
        rougeL=None if pair is None or pair.answer is None else pair.rougeL,
        tokens=None if score is None else score.token_recall,
        exact=exact,
        proved=row.verified,
        margin=row.margin,
    )


def _goodness(answer: TextAnswer) -> tuple[bool, bool, float, float]:
    """Returns what sorts answers, the best first."""
    silent = -1.0 if answer.rougeL is None else answer.rougeL
    return not answer.exact, not answer.proved, -silent, -(answer.tokens or 0.0)


def _texts_note(
    rows: Sequence[LeakageRow], texts: Sequence[PrivateText], model: LanguageModel, redact: bool
) -> str:
    if redact:
        return "Private texts, and what was read of them, are left out of this report."
    notes = []
    kept = model.decode(model.encode([WRITTEN])[0])
    if texts and kept != WRITTEN:
        notes.append(
            "A private text is shown as the tokenizer gives its tokens back, and word for word "
            f'means these: "{WRITTEN}" would be "{kept}".'
        )
    if unlisted := sum(text_counts(rows).values()) - len(texts):
        notes.append(
            f"{counted(unlisted, 'text')} not listed: no attack named a sequence for the update, "
            "or the private data is gone."
        )
    return " ".join(notes)


def _defense_tables(
    run: Run, experiment: Experiment, summary: RunSummary, redact: bool
) -> list[Table]:
    tables = []
    effects = {effect.defense: effect for effect in summary.defended}
    rows = [
        plain(
            f"{place}: {table['kind']}",
            in_words({key: value for key, value in table.items() if key != "kind"}) or "defaults",
            _figures(effects[place].figures) if place in effects else NOT_MEASURED,
        )
        for place, table in enumerate(experiment.defense)
    ]
    if rows:
        note = (
            "An update is one client's: what rounding before a secure sum does is here, and what "
            "the sum itself hides is not."
        )
        title = "Defenses, and what they did to an update on average"
        tables.append(Table(title, words("defense", "settings", "did"), rows, [note]))
    rows = [
        [
            *plain(finding.defense, finding.claim),
            Cell("holds") if finding.holds else Cell("FAILS", Tone.ALARM),
            Cell(finding.figures),
        ]
        for finding in _checks(run)
    ]
    if rows:
        note = "The check uses made-up updates and no private text."
        title = "What the check before the run found"
        tables.append(Table(title, words("tested", "claim", "result", "figures"), rows, [note]))
    if summary.detections is not None:
        tables.append(detections_table(summary.detections))
    return tables


def _figures(figures: Mapping[str, float | None]) -> str:
    shown = [f"{name.replace('_', ' ')} {figure(value)}" for name, value in figures.items()]
    return ", ".join(shown) or NOT_MEASURED


def _checks(run: Run) -> list[Finding]:
    if not (run.path / "checks.json").is_file():
        return []
    try:
        return FINDINGS.validate_python(run.read_json("checks.json"))
    except ValidationError:
        path = run.path / "checks.json"
        raise FedleakError(
            f"{path} is damaged (it is no list of findings): delete it; the report is then "
            "without what the check of the defenses found"
        ) from None


def _guaranteed(
    experiment: Experiment, summary: RunSummary, ledger: Sequence[LedgerRow]
) -> Guaranteed:
    held, aggregator = summary.privacy, experiment.aggregator
    if held is None:
        return Guaranteed(None, "No client has trained, so there is no ledger.")
    rounds = counted(max(row.round for row in ledger), "round")
    if held.epsilon == NONE:
        return Guaranteed(
            None, f"Nothing is guaranteed to every client: there is no epsilon after {rounds}."
        )
    sentence = (
        f"Every client has an epsilon of at most {figure(held.epsilon)} at delta "
        f"{figure(held.delta)} after {rounds} (unit: {held.unit}; neighbouring: "
        f"{held.neighbouring}; accountant: {held.accountant})."
    )
    if aggregator is None or aggregator.trust is None:
        return Guaranteed(float(held.epsilon), sentence)
    against = float(held.epsilon) if experiment.sees == "models" else None
    return Guaranteed(against, f"{sentence} Mind that {aggregator.trust}.")


def _ledger_tables(ledger: Sequence[LedgerRow], canary: CanarySummary | None) -> list[Table]:
    last = {(row.client, row.unit): row for row in ledger}
    if canary is None and all(row.epsilon == NONE for row in last.values()):
        return []
    rows = [
        plain(
            str(row.client),
            str(row.round),
            figure(row.epsilon),
            figure(row.delta),
            row.unit,
            row.neighbouring,
            row.sampling,
            figure(row.noise_multiplier),
            number(row.steps),
            row.accountant,
        )
        for _, row in sorted(last.items())[:MOST_ROWS]
    ]
    more = len(last) - len(rows)
    columns = [
        *figures("client", "round", "epsilon", "delta"),
        *words("unit", "neighbouring", "sampling"),
        *figures("noise multiplier", "steps"),
        *words("accountant"),
    ]
    notes = [f"{more:,} more are in privacy.jsonl of the run."] if more else []
    table = Table("Each client's last row of the ledger", columns, rows, notes)
    return [table, *([canary_table(canary)] if canary else [])]
