"""Makes the report of a run from its files and from what scoring returned."""

import re
import shlex
from collections.abc import Sequence
from itertools import chain
from typing import Any

import tomli_w
from pydantic import ValidationError

from fedleak.audit.answer_scores import Scored, TextPair
from fedleak.audit.defense_checks import FINDINGS
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import stored
from fedleak.models import LanguageModel
from fedleak.models.loading import outline
from fedleak.report.html import pictures
from fedleak.report.html.page import Entry, PrivateText, RunPage, TextAnswer
from fedleak.report.html.verdict import granted, informed, verdict_of
from fedleak.report.table import Cell, Row, Table, Tone, cells, figures, words
from fedleak.report.tables.advice import advice_table
from fedleak.report.tables.audit import gate_tables, plan_table
from fedleak.report.tables.leakage import MOST_ROWS, client_name, leakage_table, shares
from fedleak.report.tables.run import run_tables
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
from fedleak.store.summaries import SUMMARY, RunSummary
from fedleak.training.privacy.accounting import NONE
from fedleak.util.errors import FedleakError
from fedleak.util.lists import first_of
from fedleak.util.nested import mapped

MOST_NAMED = 12
"""Rounds or clients that are named."""

WRITTEN = "Zoë pays 5 € at the Café, \U0001f600!"
"""A text that a tokenizer may change: capitals, accents, signs."""


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
    rows, ledger, utility = [answer.row for answer in scored], run.rows(LEDGER), run.rows(UTILITY)
    read = shares([row for row in rows if row.attack in informed(summary).attacks])
    texts, tables = [] if redact else _texts(scored), run_tables(summary, experiment.defense)
    of_models = experiment.sees == "models"
    leaked = leakage_table(experiment.name, rows, read, ledger, of_models)
    versions = {
        "begun": info.get("begun"),
        **({} if redact else {"run by": info.get("user")}),
        "machine": info.get("machine"),
        "attacks ran on": ", ".join(sorted({row.device for row in rows if row.device})),
        **info.get("versions", {}),
        "commit": info.get("git_commit"),
        "experiment": info["fingerprint"],
        "weights at the start": summary.model_fingerprint,
    }
    return RunPage(
        name=summary.name,
        begun=str(info.get("begun") or "on a day that was not noted"),
        redacted=redact,
        verdict=verdict_of(run, rows),
        audit=_audit_tables(run, redact),
        missing=_sentences_or_count(summary.missing, redact),
        notes=_sentences_or_count(summary.notes, redact),
        setting=_setting(experiment),
        threat=_threat(experiment, summary),
        leakage=[*pictures.leakage(read), leaked] if rows else [],
        training=[
            *pictures.training(utility, ledger, sorted({key.round for key in read})),
            *_training_tables(utility, summary),
        ],
        attacks=[*pictures.attacks(summary.attacks), *tables["attacks"]],
        ladder=tables["ladder"],
        membership=[*pictures.membership(summary.membership), *tables["membership"]],
        published=tables["published"],
        texts=texts,
        texts_note=_texts_note(rows, texts, model, redact),
        defenses=[*tables["defenses"], *_findings(run), *tables["detections"]],
        canary_alarms=summary.canary.alarms if summary.canary else (),
        ledger=[*_ledger_tables(ledger, audited=bool(summary.canary)), *tables["canaries"]],
        versions=[Entry(name, str(value or NOT_MEASURED)) for name, value in versions.items()],
        repeat=f"fedleak run {shlex.quote(experiment.name + '.toml')}",
        experiment=tomli_w.dumps(experiment.model_dump(mode="json", exclude_none=True)),
    )


def _sentences_or_count(sentences: Sequence[str], redact: bool) -> Sequence[str]:
    """Returns sentences, or, redacted, their number: reasons of others may have private texts."""
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


def _without_folders(experiment: Experiment) -> Experiment:
    """Returns an experiment with only the last part of each path: folders may name their owner."""

    def shortened(value: Any) -> Any:
        folders = r"(^|[\s=:,\"'])[/~].*/"
        return re.sub(folders, r"\1.../", value) if isinstance(value, str) else value

    return Experiment.model_validate(mapped(experiment.model_dump(mode="json"), shortened))


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
    facts = [fact.replace("_", " ") for fact in granted(experiment, summary)]
    grants = listed(facts) if facts else "nothing more"
    if summary.ladder is not None:
        grants = f"{grants} (and less: see what each fact is worth)"
    return [
        Entry("attacker", attacker),
        Entry("sees", f"{SEES[experiment.sees]}, and the models that it broadcast"),
        Entry("knows anyway", "learning rate, number of local steps, whether there is dropout"),
        Entry("is granted", grants),
        Entry("attacked rounds", first_numbers(experiment.threat.rounds)),
        Entry("attacked clients", first_numbers(experiment.threat.clients)),
        Entry("attacks", listed(sorted(summary.attacks)) if summary.attacks else "none"),
    ]


def first_numbers(numbers: Sequence[int] | None) -> str:
    """Returns the first of many rounds or clients, and how many more there are; None: all."""
    return "all" if numbers is None else first_of((f"{n:,}" for n in numbers), MOST_NAMED)


def _training_tables(utility: Sequence[Utility], summary: RunSummary) -> list[Table]:
    if not utility:
        return []
    names = list(dict.fromkeys(chain.from_iterable(row.figures for row in utility)))
    measured = [(f"round {row.round}", row.figures) for row in utility[:MOST_ROWS]]
    if (baseline := summary.utility_reference) is not None:
        measured.append(("central, undefended", baseline.figures))
    rows = [[after, *(figure(row.get(name)) for name in names)] for after, row in measured]
    columns = [*words("after"), *figures(*names)]
    notes = [f"On {counted(summary.held_out, 'held-out text')}."]
    return [Table("Utility by round", columns, cells(rows), notes)]


def _texts(scored: Sequence[Scored]) -> list[PrivateText]:
    """Returns each private text of updates with named sequences, with all answers, worst first."""
    truths: dict[tuple[Key, int], str] = {}
    answers: dict[tuple[Key, int], list[TextAnswer]] = {}
    for scored_answer in scored:
        row = scored_answer.row
        for place, score in enumerate(row.texts or ()):
            # A row that was kept from an earlier scoring has scores without pairs.
            pair = scored_answer.pairs[place] if scored_answer.pairs else None
            if pair is not None:
                truths[row.key, place] = pair.truth
            answers.setdefault((row.key, place), []).append(_answer(row, pair, score))
    texts = [
        PrivateText(
            at[0].round, client_name(at[0].client), truth, sorted(answers[at], key=_goodness)
        )
        for at, truth in truths.items()
    ]
    return sorted(texts, key=lambda text: _goodness(text.best))


def _answer(row: LeakageRow, pair: TextPair | None, score: TextScore) -> TextAnswer:
    return TextAnswer(
        attack=row.attack,
        text=None if pair is None else pair.answer,
        rougeL=None if pair is None or pair.answer is None else pair.rougeL,
        tokens=score.token_recall,
        exact=bool(score.exact),  # by its tokens, not by its words
        proved=row.verified,
        margin=None if row.margin is None else figure(row.margin),
    )


def _goodness(answer: TextAnswer) -> tuple[bool, bool, float, float]:
    """Returns a sort key that puts the best answer first."""
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


def _findings(run: Run) -> list[Table]:
    """Returns what the check of the defenses found before the run, if there was one."""
    path = run.path / "checks.json"
    if not path.is_file():
        return []
    try:
        findings = FINDINGS.validate_python(run.read_json(path.name))
    except ValidationError:
        raise FedleakError(
            f"{path} is damaged (it is no list of findings): delete it; the report is then "
            "without what the check of the defenses found"
        ) from None
    result = {True: Cell("holds"), False: Cell("FAILS", Tone.ALARM)}
    rows: list[Row] = [
        [finding.defense, finding.claim, result[finding.holds], finding.figures]
        for finding in findings
    ]
    columns = words("tested", "claim", "result", "figures")
    note = "The check uses made-up updates and no private text."
    title = "What the check before the run found"
    return [Table(title, columns, cells(rows), [note])] if rows else []


def _ledger_tables(ledger: Sequence[LedgerRow], *, audited: bool) -> list[Table]:
    last = {(row.client, row.unit): row for row in ledger}
    if not audited and all(row.epsilon == NONE for row in last.values()):
        return []
    rows = [
        [
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
        ]
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
    return [Table("Each client's last row of the ledger", columns, cells(rows), notes)]
