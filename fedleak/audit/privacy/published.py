"""What the published models of a run give away of planted secrets, round by round.

This is apart from what updates give away. An attacker who gets the models after each round, and
nothing else, uses them

- to tell which texts they were trained on: a secret's exposure is log2(m + 1) - log2(rank), with
  its rank among m twins, which nobody trained on (Carlini et al. 2019). Texts are ranked by the
  log-likelihood of the secret after its beginning in one model, or by its difference between two
  models. Secrets and twins were drawn alike, so a model that learnt nothing of them gives every
  rank with the same chance, and the p of Mann and Whitney's test is exact;
- to continue a beginning (`decoding`): a secret that a model writes word for word was extracted.
  Twins show how often that happens without training.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from fedleak import models
from fedleak.audit.estimates import estimate
from fedleak.audit.kept_texts import read_held_out
from fedleak.audit.privacy import decoding
from fedleak.audit.privacy.membership import shares_won
from fedleak.config.experiment import Experiment
from fedleak.config.federation.secrets import secrets
from fedleak.models import loading
from fedleak.store import summaries
from fedleak.store.records import PUBLISHED, PublishedRow
from fedleak.store.run import Run
from fedleak.store.summaries import Estimate, PublishedRound, PublishedSummary

MOST_EXACT = 40_000
"""The most pairs of a secret and a twin for which the test uses its exact distribution."""

Numbers = npt.NDArray[np.float64]


def unaudited(experiment: Experiment, rows: Iterable[PublishedRow]) -> list[int]:
    """Returns the rounds whose published model was not audited yet; none without `[published]`."""
    if experiment.published is None:
        return []
    return sorted({*range(experiment.federation.rounds + 1)} - {row.round for row in rows})


def audit_models(run: Run, experiment: Experiment) -> None:
    """Audits each published model that was not audited yet; whoever calls this holds the lock.

    Raises:
        FedleakError: held_out.json or a model is missing or damaged.
    """
    rounds = unaudited(experiment, run.rows(PUBLISHED))
    if not rounds:
        return
    torch.set_num_threads(1)  # so that sums have one order
    spec = experiment.model_spec(run.info()["num_labels"])
    now, before = (loading.load(spec, weights=False) for _ in range(2))
    planted = secrets(experiment, read_held_out(run, now.vocabulary).sequences, now)
    tried = planted[: 2 * sum(secret.count > 0 for secret in planted)]
    for round in rounds:
        models.lend_parameters_(now, run.models.read_model(round + 1))
        written = {
            "greedy": decoding.written(now, tried),
            "beam": decoding.written(now, tried, beams=decoding.BEAMS),
        }
        if round:
            models.lend_parameters_(before, run.models.read_model(round))
            written["contrastive"] = decoding.written(now, tried, before=before)
        row = PublishedRow(
            round=round,
            clients=tuple(secret.client for secret in planted),
            counts=tuple(secret.count for secret in planted),
            log_likelihoods=tuple(decoding.log_likelihoods(now, planted)),
            written=written,
        )
        run.append(PUBLISHED, row)


def summarised(experiment: Experiment, rows: Sequence[PublishedRow]) -> PublishedSummary | None:
    """Returns the figures of a run's rows; None: there are no rows."""
    if not rows or experiment.published is None:
        return None
    rows = sorted(rows, key=lambda row: row.round)
    scores, counts = _scores(rows), sorted({*rows[0].counts} - {0})
    cells = len(counts) * sum(map(len, scores[1:]))
    rounds: dict[tuple[summaries.Measure, int, str], list[PublishedRound]] = defaultdict(list)
    for row, by_name in zip(rows, scores, strict=True):
        for count in counts:
            for name, values in by_name.items():
                rounds["exposure", count, name].append(_exposure(row, values, count, cells))
            for name, written in row.written.items():
                rounds["extracted", count, name].append(_extracted(row, written, count))
    figures = [
        summaries.PublishedFigure(
            count=count,
            measure=measure,
            by=name,
            secrets=rows[0].counts.count(count),
            rounds=tuple(of_rounds),
        )
        for (measure, count, name), of_rounds in rounds.items()
    ]
    figures.sort(key=lambda figure: (figure.measure, figure.by, figure.count))
    return PublishedSummary(figures=tuple(figures))


def _scores(rows: Sequence[PublishedRow]) -> list[dict[str, Numbers]]:
    """Returns for each round the values that rank texts; a likelier text has a larger one."""
    values = [np.array(row.log_likelihoods) for row in rows]
    later = (
        {
            "likelihood": after,
            "rise since the start": after - values[0],
            "rise in the round": after - before,
        }
        for before, after in pairwise(values)
    )
    return [{"likelihood": values[0]}, *later]


def exposure(secrets: Numbers, twins: Numbers) -> Numbers:
    """Returns the exposure of each secret in bits, by their scores; a tie counts half a rank."""
    above = len(twins) * (1 - np.array(shares_won(secrets, twins)))
    return np.asarray(math.log2(len(twins) + 1) - np.log2(1 + above))


def _exposure(row: PublishedRow, scores: Numbers, count: int, cells: int) -> PublishedRound:
    """Returns the exposure of the secrets that occur `count` times in a client's data."""
    from scipy.stats import mannwhitneyu  # it takes half a second to import

    is_asked = np.array(row.counts) == count
    secrets, twins = scores[is_asked], scores[np.array(row.counts) == 0]
    most = math.log2(len(twins) + 1)
    method = "exact" if len(secrets) * len(twins) <= MOST_EXACT else "asymptotic"
    chance = mannwhitneyu(secrets, twins, alternative="greater", method=method).pvalue
    return PublishedRound(
        round=row.round,
        figure=_mean(exposure(secrets, twins).tolist(), np.array(row.clients)[is_asked], most),
        control=most - float(np.log2(np.arange(1, len(twins) + 2)).mean()),
        p=min(1.0, cells * float(chance)) if row.round else None,
    )


def _extracted(row: PublishedRow, written: Sequence[bool], count: int) -> PublishedRound:
    """Returns what share of the secrets that occur `count` times in a client's data was written."""
    came, counts = np.array(written, float), np.array(row.counts[: len(written)])
    clients = np.array(row.clients[: len(written)])[counts == count]
    return PublishedRound(
        round=row.round,
        figure=_mean(came[counts == count].tolist(), clients, 1.0),
        control=float(came[counts == 0].mean()),
    )


def _mean(values: Sequence[float], clients: npt.NDArray[np.int64], most: float) -> Estimate:
    """Returns a mean over secrets; all clients have as many of them."""
    largest = float(np.bincount(clients).max())
    return estimate(values, clients.tolist(), most=most, largest=largest)
