"""Sums up a run: each attack's figures with their intervals, and how far to trust them."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

from pydantic import JsonValue, ValidationError

from fedleak.attacks.reconstruction import Status
from fedleak.audit import detection, estimates
from fedleak.audit.estimates import Largest
from fedleak.audit.gaps import Gaps
from fedleak.audit.ladder import ladder
from fedleak.audit.metrics.personal_data import looked_for
from fedleak.audit.privacy import canaries, membership, published
from fedleak.audit.privacy.ledger import defense_means, guarantee
from fedleak.audit.score_files import Recorded
from fedleak.audit.worst_case import worst_case
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import examples
from fedleak.config.federation.schedule import malicious_server
from fedleak.store import summaries
from fedleak.store.records import LeakageRow, ScoredRows
from fedleak.store.run import Run
from fedleak.store.summaries import Estimate, RunSummary
from fedleak.util.errors import FedleakError
from fedleak.util.lists import grouped

MEANS = dict.fromkeys(("rouge1", "rouge2", "rougeL", "control_rougeL", "guess_rougeL"), 100.0)
MEANS |= dict.fromkeys(("token_recall", "token_precision"), 1.0)
MEANS |= dict.fromkeys(("control_token_recall", "guess_token_recall"), 1.0)
"""Figures of a row whose mean over updates sums up an attack, and the largest value of each."""


def summarise(
    run: Run,
    recorded: Recorded,
    gaps: Gaps,
    rows: ScoredRows,
    positive_control: summaries.PositiveControl | None,
) -> RunSummary:
    """Returns the figures of a run.

    Args:
        run: The run directory.
        recorded: What it contains beside its vault and its captures.
        gaps: What is missing; missing utility, audits of published models and baseline are added.
        rows: The rows of all files that scoring writes.
        positive_control: What attacks read of undefended copies; None: there are none.
    """
    experiment, utility, planted = recorded.experiment, recorded.utility, recorded.published
    leakage, largest = rows.leakage, estimates.largest_client(run, experiment)
    finished = {answer.id: place for place, answer in enumerate(recorded.answers)}
    by_attack = sorted(grouped(leakage, lambda row: row.attack).items())
    info = run.info()
    held_out = examples(run).held_out
    if info["status"] == "finished" and held_out:
        rounds = filter(experiment.evaluated, range(experiment.federation.rounds + 1))
        if lost := set(rounds) - {row.round for row in utility}:
            gaps.missing.append(
                f"{run.path / 'utility.jsonl'} lacks the rounds {sorted(lost)}: only `fedleak run "
                "FILE --fresh` measures them again"
            )
    if info["status"] == "finished" and published.unaudited(experiment, planted):
        gaps.missing.append(
            f"{run.path / 'secrets.jsonl'} lacks rounds: `fedleak run` with the experiment's "
            "file audits those models"
        )
    baseline = _baseline(run, gaps)
    rungs = ladder(experiment, leakage, finished, largest)
    return RunSummary(
        name=experiment.name,
        status=info["status"],
        server=malicious_server(experiment),
        fedleak=info.get("versions", {}).get("fedleak"),
        model_fingerprint=info.get("model_fingerprint"),
        captures=len(run.captures.all_keys()),
        attacks={name: attack_summary(of_attack, largest) for name, of_attack in by_attack},
        worst_case=rungs.top.worst_case if rungs else worst_case(leakage, finished, largest),
        ladder=rungs,
        defenses=circumstances(experiment),
        defended=defense_means(rows.defended),
        privacy=guarantee(rows.ledger),
        canary=canaries.summarised(experiment, rows.canary, rows.ledger),
        membership=membership.summarised(experiment, rows.members, largest),
        published=published.summarised(experiment, planted),
        positive_control=positive_control,
        detections=detection.summarised(rows.detected),
        utility_before=utility[0] if utility and utility[0].round == 0 else None,
        utility=utility[-1] if utility else None,
        held_out=held_out,
        utility_reference=baseline,
        missing=tuple(gaps.missing),
        awaited=tuple(gaps.awaited),
        looked_for=looked_for(experiment.audit),
        notes=tuple(gaps.notes),
        unscored=gaps.unscored,
    )


def _baseline(run: Run, gaps: Gaps) -> summaries.Baseline | None:
    """Returns the utility of the central baseline; None if there is none."""
    if not (run.path / "reference.json").is_file():
        return None
    try:
        return summaries.Baseline.model_validate(run.read_json("reference.json"))
    except FedleakError as error:
        reason = str(error)
    except ValidationError:
        reason = f"{run.path / 'reference.json'} is damaged (it is no table of figures)"
    gaps.missing.append(
        f"{reason}: delete it, and `fedleak run` with the experiment's file makes it anew"
    )
    return None


def circumstances(experiment: Experiment) -> summaries.Circumstances:
    """Returns all that hinders an attack: defenses, and settings that act as defenses."""
    table, lora = experiment.federation, experiment.model.lora
    settings: dict[str, JsonValue] = {
        "share": experiment.update.share,  # type: ignore[dict-item]  # of str
        "lora": None if lora is None else lora.settings,
        "algorithm": table.algorithm,
        "batch_size": table.batch_size,
        **({"local_epochs": table.local_epochs} if table.algorithm == "fedavg" else {}),
        "dropout": table.dropout,
        **({"client": client} if (client := experiment.client.changed) else {}),
        **({"sees": experiment.sees} if experiment.sees == "models" else {}),
    }
    return summaries.Circumstances(defense=tuple(experiment.defense), **settings)


def attack_summary(rows: Sequence[LeakageRow], largest: Largest) -> summaries.AttackSummary:
    """Sums up one attack. A failed or abstaining attack counts among rows, not as a zero.

    Args:
        rows: Rows of the attack.
        largest: The most texts and updates of a client of the federation.
    """
    measured = [row for row in rows if row.rougeL is not None]
    sizes = [row.batch_size or 0 for row in measured]
    exact = [(row, row.exact_match or 0.0) for row in measured]

    def mean_of(name: str) -> Estimate | None:
        values = [(row, value) for row in rows if (value := getattr(row, name)) is not None]
        return estimates.mean_over_clients(values, MEANS[name], largest=largest.updates)

    seconds = [row.seconds for row in rows if row.seconds is not None]
    return summaries.AttackSummary(
        rows=len(rows),
        status=dict(Counter(row.status for row in rows)),
        verified=sum(row.verified for row in rows),
        knows=tuple(sorted(set(chain.from_iterable(row.knows for row in rows)))),
        sequences=sum(sizes),
        clients=len({row.client for row in measured}),
        exact_match=estimates.mean_over_clients(exact, 1.0, sizes, largest=largest.texts),
        **{name: mean_of(name) for name in MEANS},
        personal=estimates.personal_data([(row, item) for row in rows for item in row.personal]),
        facts={
            name: estimates.mean_over_clients(_right(rows, name), 1.0, largest=largest.updates)
            for name in sorted({name for row in rows for name in row.facts})
        },
        budget=_budget(rows),
        candidates=_candidates(rows),
        margin=min((row.margin for row in rows if row.margin is not None), default=None),
        seconds=sum(seconds),
        seconds_per_update=sum(seconds) / len(seconds) if seconds else None,
        warning=estimates.too_few([row for row in rows if row.status == Status.RECOVERED]),
    )


def _right(rows: Sequence[LeakageRow], name: str) -> list[tuple[LeakageRow, float]]:
    """Returns whether a fact is right, for rows whose attack named it and whose truth is known."""
    compared = [(row, row.facts[name].right) for row in rows if name in row.facts]
    return [(row, float(right)) for row, right in compared if right is not None]


def _budget(rows: Sequence[LeakageRow]) -> summaries.RankBudget | None:
    """Returns what share of its rank budget a batch used, over the rows that have a budget."""
    ratios = (_ratio(row.diagnostics.get("budget")) for row in rows)
    shares = [share for share in ratios if share is not None]
    if not shares:
        return None
    return summaries.RankBudget(mean=sum(shares) / len(shares), max=max(shares), rows=len(shares))


def _ratio(value: JsonValue) -> float | None:
    """Returns a quotient of two numbers, if it is one: attacks may write any diagnostics."""
    match value:
        case [int() | float() as used, int() | float() as available] if available:
            try:
                ratio = used / available
            except OverflowError:  # whole numbers have any size
                return None
            return ratio if math.isfinite(ratio) else None
    return None


def _candidates(rows: Sequence[LeakageRow]) -> dict[str, float] | None:
    """Returns how many candidates were left after each check, the mean over rows that have it."""
    counts: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        left = row.diagnostics.get("candidates")
        for check, count in left.items() if isinstance(left, dict) else ():
            if isinstance(count, int | float):
                counts[check].append(count)
    return {check: sum(numbers) / len(numbers) for check, numbers in counts.items()} or None
