"""What the canaries of an audit show about each client's privacy, compared with the ledger.

The server scores canaries in its captures: it knows their places and directions. Which canaries are
in is the client's secret; only this module reads it from the vault.

The scores of a canary in all its rounds make one number, and these numbers give three lower bounds
on the epsilon of the whole run (`bounds`), for each client and for all together. Each kind of bound
holds in all cells at once with the stated confidence: half of the error is for the bound over all
clients, and the other half is divided among the clients.

A fourth bound is on one step without sampling, from the canaries that it is known to have drawn.

A bound contradicts the ledger if it is above the epsilon that the tighter accountant gives for what
the ledger counts: the mechanism does not do what the ledger says. These bounds are set so that
chance causes this less than once in a thousand audits, over all cells and kinds.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from fedleak.audit.gaps import Gaps
from fedleak.audit.score_files import Recorded
from fedleak.audit.vault import read_truth, summed_clients, weight
from fedleak.config.experiment import Experiment
from fedleak.config.federation import canaries
from fedleak.store.records import CanaryRow, Epsilon, LedgerRow
from fedleak.store.run import EVERYONE, Capture, Key, Run
from fedleak.store.summaries import CanaryBound, CanarySummary
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.planted import DUMMIES
from fedleak.training.privacy import accounting
from fedleak.training.privacy.canaries import Floats, log_ratios, scores
from fedleak.training.privacy.lower_bounds import (
    UNBOUNDED_MU,
    Bounds,
    gaussian_bound,
    gaussian_epsilon,
    lower_bounds,
)
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import CaptureError
from fedleak.util.finite import all_finite
from fedleak.util.lists import grouped

CONFIDENCE = 0.95
"""The confidence with which each kind of bound holds in all cells."""

ALARM = 0.001
"""How often a mechanism that does what its ledger says causes an alarm."""

TESTS = 5
"""The error of an alarm is divided among the three kinds of bounds, the bound on a step, and the
search for noise that was used twice."""

LOUD_NOISE = 0.97
"""With this share of noise in an update's squared norm, witnesses measure the noise and not the
gradient, which is much the same in every round."""


def canary_rows(run: Run, recorded: Recorded, gaps: Gaps) -> list[CanaryRow]:
    """Returns the rows of canaries.jsonl: the scores in each update whose capture is here.

    Earlier rows stay if the capture or the coins are gone.
    """
    rows = {row.key: row for row in recorded.earlier.canary}
    if recorded.experiment.canary is None:
        return []
    for captured in run.captures.all_keys():
        try:
            rows |= {row.key: row for row in _scored(run, recorded, captured, gaps)}
        except CaptureError as error:
            gaps.missing.append(f"canaries of {captured} cannot be scored: {error}")
    return [rows[key] for key in sorted(rows)]


def _scored(run: Run, recorded: Recorded, captured: Key, gaps: Gaps) -> Iterator[CanaryRow]:
    """Yields a row for each client whose canaries may be in a capture."""
    experiment, model, clients = recorded.experiment, recorded.model, [captured.client]
    if captured.client == EVERYONE:
        clients = summed_clients(run, experiment, captured.round)
    capture: Capture | None = None
    noise_share: float | None = None
    for client in filter(experiment.carries_canaries, clients):
        key = Key(captured.round, client)
        truth = read_truth(run, key)
        if truth is None or truth.canaries is None:
            continue
        if truth.canaries.copy and not run.vault.has_differences(key):
            gaps.notes.append(f"the audited copy of {key} is not here: its canaries have no score")
            continue
        if capture is None:
            capture = run.captures.read_capture(captured, dict(model.module.named_parameters()))
            if not all(map(all_finite, capture.update.tensors.values())):
                raise CaptureError(f"not every number of {captured} is finite")
            noise_share = _noise_share(capture.update, read_truth(run, captured))
        yield _row(run, recorded, capture, truth, noise_share)


def _noise_share(update: ClientUpdate, truth: GroundTruth | None) -> float | None:
    """Returns how much of an update's squared norm is the noise that defenses say they add."""
    if truth is None or truth.noise_scale is None:
        return None
    squared = sum(float(value.double().square().sum()) for value in update.tensors.values())
    numbers = sum(value.numel() for value in update.tensors.values())
    return truth.noise_scale**2 * numbers / max(squared, 1e-300)


def _row(
    run: Run, recorded: Recorded, capture: Capture, truth: GroundTruth, noise_share: float | None
) -> CanaryRow:
    experiment, coins, update = recorded.experiment, truth.canaries, capture.update
    key = Key(truth.round, truth.client)
    assert coins is not None
    where = canaries.places(experiment, key.client, key.round, recorded.model)
    if len(coins.inside) != where.count or min(coins.steps, coins.uses) < 1:
        raise CaptureError(f"what the vault says of the canaries of {key} is not of this run")
    # A delta goes against the gradient.
    sign = 1 if update.kind == UpdateKind.GRADIENT else -1
    values_SK = where.taken(update.tensors)
    if coins.copy:
        differences_SK = run.vault.read_differences(key)
        if tuple(differences_SK.shape) != values_SK.shape:
            raise CaptureError(f"the audited copy of {key} has other numbers than its update")
        summed = capture.key.client == EVERYONE and not coins.joined
        counts = weight(truth, experiment) / update.num_examples if summed else 1.0
        values_SK += counts * differences_SK.numpy()
    witnesses = canaries.witnesses(experiment, where.sizes)
    return CanaryRow(
        **key._asdict(),
        audited_copy=coins.copy,
        numbers=where.numbers,
        noise_share=noise_share,
        scores=tuple((sign * scores(values_SK, where.directions())).tolist()),
        witnesses=tuple(witnesses.score(update.tensors).tolist()),
        **vars(coins),
    )


@dataclass(frozen=True)
class Tally:
    """The canaries of one client, with one score each over all rounds, and the client's ledger.

    Attributes:
        client: The client.
        rows: The client's scored updates.
        ledger: The row of the ledger after the last of these; None: nothing is guaranteed.
    """

    client: int
    rows: tuple[CanaryRow, ...]
    ledger: LedgerRow | None

    @property
    def signed(self) -> bool:
        """Whether its canaries are whole updates, plus or minus, and not in or out."""
        return self.rows[0].whole and not self.rows[0].joined

    @property
    def sampled(self) -> bool:
        """Whether its canaries are sampled as examples are."""
        return self.rows[0].rate is not None

    @property
    def unit(self) -> str:
        """What its canaries stand for."""
        return "client" if self.rows[0].whole else "example"

    @property
    def epsilon(self) -> Epsilon:
        """The epsilon of its ledger."""
        return accounting.NONE if self.ledger is None else self.ledger.epsilon

    @property
    def least_epsilon(self) -> float:
        """The smallest epsilon that an accountant gives for the uses of its ledger."""
        row = self.ledger
        assert row is not None
        assert row.delta is not None
        if not row.uses:  # an older version did not write them down
            return float(row.epsilon)
        return accounting.epsilon(row.uses, row.delta, accounting.BOTH_ACCOUNTANTS)

    @property
    def mu(self) -> float:
        """How far apart the scores of canaries in and out should be, by the ledger."""
        if self.ledger is None:
            return UNBOUNDED_MU
        most = max(len(slot) for slot in self._slots.values())
        return math.sqrt(most) * self._mu_of_update * (self.rows[0].rate or 1.0)

    @property
    def _mu_of_update(self) -> float:
        """How far apart these should be in one update, for a canary in all its possible steps."""
        row, ledger = self.rows[0], self.ledger
        noise = (ledger and ledger.noise_multiplier) or 1 / UNBOUNDED_MU
        return row.uses / (math.sqrt(row.steps) * noise)

    @cached_property
    def _slots(self) -> Mapping[int, Sequence[CanaryRow]]:
        return grouped(self.rows, lambda row: row.slot)

    @cached_property
    def coins(self) -> list[bool]:
        """Whether each canary is in; for whole updates with a sign, whether the sign is plus."""
        return list(chain(*(rows[0].inside for rows in self._slots.values())))

    @cached_property
    def scores(self) -> list[float]:
        """One score for each canary; it has variance 1 if the canary is out and not sampled."""
        return list(chain(*(self._together(rows) for rows in self._slots.values())))

    def _together(self, rows: Sequence[CanaryRow]) -> list[float]:
        """Returns the scores of a slot's canaries over its rounds [K]."""
        mu, scale = self._mu_of_update, 1.0 if self.sampled else math.sqrt(len(rows))
        scores_TK = [
            log_ratios(row.scores, mu, rate=row.rate or 1.0, steps=row.steps, numbers=row.numbers)
            if self.sampled
            else np.array(row.scores)
            for row in rows
        ]
        pooled: list[float] = (np.array(scores_TK).sum(0) / scale).tolist()
        return pooled


def tallies(rows: Iterable[CanaryRow], ledger: Sequence[LedgerRow]) -> list[Tally]:
    """Returns each client's canaries with what its ledger says of the same rounds."""
    spent = {(row.client, row.round, row.unit): row for row in ledger}
    tallied = []
    for client, own in sorted(grouped(rows, lambda row: row.client).items()):
        unit = "client" if own[0].whole else "example"
        ledger_row = spent.get((client, max(row.round for row in own), unit))
        announced = ledger_row is not None and ledger_row.epsilon != accounting.NONE
        tallied.append(Tally(client, tuple(own), ledger_row if announced else None))
    return tallied


def summarised(
    experiment: Experiment, rows: Sequence[CanaryRow], ledger: Sequence[LedgerRow]
) -> CanarySummary | None:
    """Returns the bounds of a run; None if no canary was scored."""
    tallied = tallies(rows, ledger)
    if not tallied:
        return None
    delta = experiment.privacy.delta
    cells = list(_cells(tallied))
    # Each unit has a bound over all clients; most experiments have one unit.
    together = sum(len(cell) > 1 or len(tallied) == 1 for cell in cells)
    alone = len(cells) - together

    def share(cell: Sequence[Tally]) -> float:
        """Returns the share of the error that a cell has; over all cells they add up to 1."""
        if not alone:
            return 1 / together
        return 0.5 / together if len(cell) > 1 else (0.5 if together else 1.0) / alone

    shown = [_bound(cell, (1 - CONFIDENCE) * share(cell), delta) for cell in cells]
    alarms = [
        alarm
        for cell in cells
        if (alarm := _contradiction(cell, ALARM * share(cell) / TESTS, delta)) is not None
    ]
    steps = [step for tally in tallied for step in _steps(tally)]
    alarms += _loud_steps(steps, delta)
    alarms += _reused_noise(tallied, sums=experiment.sees != "updates")
    return CanarySummary(
        confidence=CONFIDENCE,
        delta=delta,
        bounds=tuple(shown),
        step=_step_bound(steps, 1 - CONFIDENCE, delta),
        alarms=tuple(alarms),
    )


def _cells(tallied: Sequence[Tally]) -> Iterator[Sequence[Tally]]:
    """Yields all clients of a unit together, then each client alone."""
    for unit in sorted({tally.unit for tally in tallied}):
        of_unit = [tally for tally in tallied if tally.unit == unit]
        if len(of_unit) > 1:
            yield of_unit
    yield from ([tally] for tally in tallied)


def _bound(cell: Sequence[Tally], alpha: float, delta: float) -> CanaryBound:
    """Returns the bounds on the epsilon of the least protected client of a cell."""
    return CanaryBound(
        client=cell[0].client if len(cell) == 1 else EVERYONE,
        unit=cell[0].unit,
        canaries=sum(len(tally.coins) for tally in cell),
        updates=sum(len(tally.rows) for tally in cell),
        in_copies=any(row.audited_copy for tally in cell for row in tally.rows),
        epsilon=_accounted(cell),
        **vars(_lower_bounds(cell, alpha, delta)),
    )


def _lower_bounds(cell: Sequence[Tally], alpha: float, delta: float) -> Bounds:
    return lower_bounds(
        list(chain(*(tally.scores for tally in cell))),
        list(chain(*(tally.coins for tally in cell))),
        alpha,
        delta,
        mu=max(tally.mu for tally in cell),
        sampled=any(tally.sampled for tally in cell),
        signed=cell[0].signed,
    )


def _accounted(cell: Sequence[Tally]) -> Epsilon:
    """Returns the weakest guarantee of a cell's clients."""
    epsilons = [tally.epsilon for tally in cell]
    return accounting.NONE if accounting.NONE in epsilons else max(map(float, epsilons))


def _contradiction(cell: Sequence[Tally], alpha: float, delta: float) -> str | None:
    """Returns what contradicts the ledger; None: nothing does.

    The bound is compared with the smallest epsilon that an accountant gives for what the ledger
    counts: it holds if the mechanism does what the ledger says.
    """
    if _accounted(cell) == accounting.NONE:
        return None
    accounted = max(tally.least_epsilon for tally in cell)
    largest = _lower_bounds(cell, alpha, delta).largest
    if largest <= accounted:
        return None
    who = f"client {cell[0].client}" if len(cell) == 1 else f"{len(cell)} clients together"
    return (
        f"canaries of {who} show an epsilon of at least {largest:.3g} at delta {delta:g}, and the "
        f"ledger says {accounted:.3g} by the tighter accountant (p < {ALARM:g}): the mechanism "
        "does not do what the ledger says"
    )


class _Steps(NamedTuple):
    """The canaries of an update that are clipped alike, as uses of one step.

    Attributes:
        key: The update.
        group: Which group of the update's canaries it is.
        scores, means: For each canary that is in, its score, and its mean if noise were 1.
        noise: The least noise multiplier that the ledger counts.
    """

    key: Key
    group: int
    scores: Floats
    means: Floats
    noise: float


def _steps(tally: Tally) -> Iterator[_Steps]:
    """Yields the canaries that took part in a client's updates, if a ledger announces noise.

    A canary that is in n of T steps that count alike has the mean n / sqrt(T); if they count
    differently, sqrt(n) at most.
    """
    if tally.ledger is None or not tally.ledger.uses:
        return
    noise = min(use.noise_multiplier for use in tally.ledger.uses)
    for row in tally.rows:
        if not row.drawn or not noise:
            continue
        inside_K, scores_K, drawn_K = map(np.array, (row.inside, row.scores, row.drawn))
        means_K = drawn_K / math.sqrt(row.steps) if row.alike else np.sqrt(drawn_K)
        if tally.signed:  # plus and minus are twice as far apart
            scores_K, means_K = np.where(inside_K, scores_K, -scores_K), means_K / 2
            inside_K = np.ones_like(inside_K)
        for group in range(DUMMIES):
            in_group_K = inside_K & (np.arange(len(inside_K)) % DUMMIES == group)
            yield _Steps(row.key, group, scores_K[in_group_K], means_K[in_group_K], noise)


def _step_bound(steps: Sequence[_Steps], alpha: float, delta: float) -> float | None:
    """Returns a lower bound on the epsilon of a step; None: nothing is announced about steps."""
    if not steps:
        return None
    scores, means = (np.concatenate(part) for part in zip(*(s[2:4] for s in steps), strict=True))
    length = float(np.linalg.norm(means))
    if not length:
        return 0.0
    return gaussian_bound([float(scores @ means) / length], alpha, delta, per_score=1 / length)


def _loud_steps(steps: Sequence[_Steps], delta: float) -> Iterator[str]:
    """Yields what contradicts the noise and the clipping of a step.

    A third of the error is for all canaries together, a third for the canaries of each client, and
    a third for canaries that are clipped alike in an update: a clip may be wrong only for some
    norms or lengths.
    """
    for cells in (
        {"all clients": steps},
        grouped(steps, lambda s: f"client {s.key.client}"),
        grouped(steps, lambda s: f"{s.key}, every {DUMMIES} from number {s.group}"),
    ):
        alpha = ALARM / TESTS / 3 / max(1, len(cells))
        for who, cell in cells.items():
            spent = max((gaussian_epsilon(1 / step.noise, delta) for step in cell), default=0.0)
            shown = _step_bound(cell, alpha, delta) or 0.0
            if shown > spent:
                yield (
                    f"a step without sampling has an epsilon of at least {shown:.3g} at delta "
                    f"{delta:g} by canaries of {who}, and the ledger's noise gives {spent:.3g} (p "
                    f"< {ALARM:g}): the mechanism does not do what the ledger says"
                )
                break


def _reused_noise(tallied: Sequence[Tally], *, sums: bool) -> list[str]:
    """Returns a sentence if two updates that a ledger counts as noisy have the same noise.

    If the noise of two updates is independent, so are the witnesses' scores: then their scalar
    product, divided by the norm of one of them, is normal. With the same noise it is about that
    norm.
    """
    from scipy.special import ndtr  # here, because it takes a while

    rows = [
        row
        for tally in tallied
        for row in tally.rows
        if tally.ledger is not None and (row.noise_share or 0.0) >= LOUD_NOISE
    ]
    if sums:  # all clients of a round have the same capture
        rows = list({row.round: row for row in rows}.values())
    # Clients who send less may have fewer witnesses.
    alike = grouped(rows, lambda row: len(row.witnesses))
    pairs = sum(len(group) * (len(group) - 1) // 2 for group in alike.values())
    for group in alike.values():
        scores_UW = np.array([row.witnesses for row in group])
        for place, first in enumerate(group[:-1]):
            agreed_U = np.abs(scores_UW[place + 1 :] @ scores_UW[place])
            agreed_U /= max(float(np.linalg.norm(scores_UW[place])), 1e-300)
            at = int(agreed_U.argmax())
            if 2 * ndtr(-agreed_U[at]) * pairs < ALARM / TESTS:
                return [
                    f"the updates {first.key} and {group[place + 1 + at].key} have the same noise "
                    f"(p < {ALARM:g}): the mechanism does not do what the ledger says"
                ]
    return []
