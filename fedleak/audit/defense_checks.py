"""Does each defense do what it says? Tested on the update as a client would send it.

Published results were wrong where nobody looked: noise measured before it was added, the batch's
mean clipped and not each example, a budget that began anew in every round
(docs/how-a-number-can-lie.md). Every run with defenses is checked before it trains, and
`fedleak check-defense` prints the figures.

The checks feed texts of random tokens to the experiment's own model, and never a client's data. A
loud batch is one whose first example has a gradient some thousand times too large.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from fedleak import models
from fedleak.audit.privacy import bounds as privacy_bounds
from fedleak.audit.privacy.canaries import ALARM
from fedleak.config.checks import check_defenses
from fedleak.config.experiment import Experiment
from fedleak.config.sent_parameters import selected_parameters
from fedleak.config.tables import CanaryTable
from fedleak.defenses import Claims, Defense, TrustedAggregator, root_mean_square
from fedleak.federation.canaries import ClientCanaries, client_canaries, sent_sizes
from fedleak.federation.lookup import client_sizes
from fedleak.federation.protection import Protection, protection
from fedleak.federation.workload import divide, read_data
from fedleak.models import CLASSIFICATION, LanguageModel, loading, pad
from fedleak.models.parameter_selection import select
from fedleak.store.run import Run
from fedleak.training import privacy
from fedleak.training.aggregation import WeightedSum, aggregate
from fedleak.training.batches import passes
from fedleak.training.canaries import Planted, most_canaries, scores
from fedleak.training.local import local_update_
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.privacy import Event
from fedleak.training.settings import LocalTraining
from fedleak.training.wire import from_wire, partial_update, to_wire
from fedleak.util.errors import FedleakError
from fedleak.util.finite import all_finite
from fedleak.util.rng import stream, stream_seed

EXAMPLES, TOKENS = 4, 8
LOUD = 1e4
"""Factor of the loud example's logits, and so of its gradient."""

DEVIATIONS = 5.0
"""Standard deviations by which a figure that chance decides may be off: once in two million."""

CANARIES, CANARY_UPDATES, WHOLE_UPDATES = 64, 4, 16
"""Canaries of an update, and updates that they are in; a canary may be a whole update."""

ROUNDING = 1e-3
"""Relative error of a norm: half of the numbers of a large model may round the same way."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim of a defense, put to the test.

    Attributes:
        defense: Its place in the file and its kind; or what else was tested.
        claim: What should be so.
        holds: Whether it is.
        figures: What was measured; "found" in checks.json.
    """

    defense: str
    claim: str
    holds: bool
    figures: Annotated[str, Field(alias="found")]


Test = tuple[str, bool, str]
"""Claim, whether it holds, and the figures."""

FINDINGS = TypeAdapter(list[Finding])
"""The content of checks.json."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where one defense is tested.

    Attributes:
        model: At the weights that are broadcast; tests leave it so.
        plain: How a client without defenses trains; dropout is off, because it is random too.
        local: How a client with only this defense trains.
        defense: With its noise worked out.
        num_examples: Examples that its client has.
        seed: Of all that is random.
        sends: What clients of the experiment send; a test always takes a single step.
    """

    model: LanguageModel
    plain: LocalTraining
    local: LocalTraining
    defense: Defense
    num_examples: int
    seed: int
    sends: UpdateKind

    @property
    def claims(self) -> Claims:
        """What the defense says of a single step's update."""
        return self.defense.claims(self.local, self.num_examples)

    def raw(self, *, loud: bool = False) -> ClientUpdate:
        """Returns the update of a client without the defense."""
        return self.trained(loud=loud, local=self.plain)

    def sent(
        self, chosen: Sequence[int] = range(EXAMPLES), *, loud: bool = False, noise: int = 0
    ) -> ClientUpdate:
        """Returns the update that arrives at the server.

        Args:
            chosen: Which of the examples the client has.
            loud: The first example of all is loud.
            noise: Another number draws other noise.
        """
        return self.defended(self.trained(chosen, loud=loud, noise=noise), noise)

    def defended(self, update: ClientUpdate, noise: int = 0) -> ClientUpdate:
        """Returns an update as the defense leaves it and the wire delivers it."""
        client = Protection(self.local, {0: self.defense}, self.num_examples)
        update, _ = client.defend(update, lambda _: stream(self.seed, "check", noise))
        return replace(update, tensors=from_wire(to_wire(update.tensors)))

    def combined(self, updates: Sequence[ClientUpdate], noise: int = 0) -> ClientUpdate:
        """Returns what is seen of the updates of several clients, where that is one update."""
        assert isinstance(self.defense, TrustedAggregator)
        return self.defense.combined(updates, rng=stream(self.seed, "check", "combined", noise))

    def trained(
        self,
        chosen: Sequence[int] = range(EXAMPLES),
        *,
        loud: bool = False,
        noise: int = 0,
        local: LocalTraining | None = None,
        planted: Planted | None = None,
    ) -> ClientUpdate:
        """Returns the update before the defense has it.

        Args:
            chosen, loud, noise: As in `sent`.
            local: How to train; None: as a client with only this defense.
            planted: Canaries.
        """
        sequences = random_texts(self.model, self.seed)
        labels = _labels(self.model, sequences)
        family: Any = _Loud(self.model.family) if loud else self.model.family
        before = {name: value.clone() for name, value in self.model.parameters().items()}
        update = local_update_(
            replace(self.model, family=family),
            [sequences[i] for i in chosen],
            [labels[i] for i in chosen],
            local or self.local,
            seed=stream_seed(self.seed, "check", noise),
            planted=planted,
        )
        models.load_parameters_(self.model, before)
        return update


def refuse_broken(run: Run, experiment: Experiment) -> None:
    """Checks the defenses of a run that has not begun, and notes the findings in checks.json.

    Raises:
        FedleakError: One does not do what it says.
    """
    if not experiment.defense or run.captures.all_keys():
        return
    findings = check(experiment, client_sizes(run))
    run.write_json("checks.json", FINDINGS.dump_python(findings, by_alias=True))
    broken = [
        f"{finding.defense}: {finding.claim}: {finding.figures}"
        for finding in findings
        if not finding.holds
    ]
    if broken:
        raise FedleakError(
            f"a defense fails its check ({'; '.join(broken)}): nothing was trained; see "
            f"`fedleak check-defense` and {run.path / 'checks.json'}"
        )


def check(experiment: Experiment, sizes: Sequence[int] | None = None) -> list[Finding]:
    """Puts every claim of every defense to the test, and the update of all together.

    Args:
        experiment: The experiment.
        sizes: How many examples each client has, where that is for the nodes to say; None: not
            known yet, a batch each.

    Raises:
        ConfigError: The experiment cannot work.
    """
    split = read_data(experiment)
    model = loading.load(experiment.model_spec(len(split.train.label_names)))
    check_defenses(experiment, model)
    parts = divide(experiment, split, model).parts
    if experiment.data.on_nodes:
        table = experiment.federation
        sizes = [table.batch_size] * table.clients if sizes is None else sizes
        parts = [list(range(size)) for size in sizes]
    findings = []
    for number, placed in enumerate(experiment.defenses):
        client = placed.clients[0] if placed.clients else 0
        of_client = protection(experiment, client, len(parts[client]))
        name = f"defense[{number}] ({placed.defense.kind})"
        bench = _bench(experiment, model, of_client, of_client.defenses[number])
        tests = chain(
            _changes(bench),
            _keeps(bench),
            _guarantees(bench),
            _measured(bench, experiment, client),
        )
        findings += _findings(name, tests)
    return findings + _findings("the update", _all_together(experiment, model, parts))


def _findings(name: str, tests: Iterable[Test]) -> list[Finding]:
    return [
        Finding(defense=name, claim=claim, holds=holds, figures=figures)
        for claim, holds, figures in tests
    ]


def _bench(
    experiment: Experiment, model: LanguageModel, of_client: Protection, defense: Defense
) -> Bench:
    """Returns the bench of one defense. FedAvg takes one step: its noise is what was added."""
    plain = replace(
        experiment.local_training,
        kind=UpdateKind.GRADIENT,
        batch_size=min(experiment.federation.batch_size, of_client.num_examples),
        dropout=False,
    )
    return Bench(
        model=model,
        plain=plain,
        local=defense.training(plain),
        defense=defense,
        num_examples=of_client.num_examples,
        seed=experiment.seed,
        sends=experiment.local_training.kind,
    )


def _changes(bench: Bench) -> Iterator[Test]:
    """Tests that what is captured is not what was computed."""
    if isinstance(bench.defense, TrustedAggregator):
        yield from _combines(bench)
        return
    raw, sent = bench.raw(loud=True), bench.sent(loud=True)
    missing = raw.tensors.keys() - sent.tensors.keys()
    if not missing and _distance(sent, raw) == 0:
        # A defense may leave a short or sparse update as it is: try a long one without zeros.
        raw = _dense(raw, 10 * (bench.claims.max_norm or 1.0), bench.seed)
        sent = bench.defended(raw)
    moved = _distance(sent, raw) / _norm(raw)
    yield (
        "the captured update differs from the raw one",
        bool(missing) or moved > 0,
        f"by {moved:.2g} of its norm; {len(missing)} of {len(raw.tensors)} tensors are missing",
    )


def _combines(bench: Bench) -> Iterator[Test]:
    """Tests what is captured of two clients in place of their updates."""
    first, second = bench.sent(range(1)), bench.sent(range(1, EXAMPLES))
    total = bench.combined([first, second])
    if bench.claims.step is not None:
        yield from _rounds(bench)
    apart = min(_distance(total, update) / max(_norm(update), 1e-300) for update in (first, second))
    yield (
        "the capture is neither of two updates",
        apart > ROUNDING,
        f"{apart:.2g} of an update away from it",
    )
    if bench.claims.mean_of_clients:
        mean = {
            name: (value * first.num_examples + second.tensors[name] * second.num_examples)
            / (first.num_examples + second.num_examples)
            for name, value in first.tensors.items()
        }
        off = _distance(total, replace(first, tensors=mean)) / max(_norm(total), 1e-300)
        yield "the capture is the weighted mean of two updates", off < ROUNDING, f"{off:.1g} off"
    if bench.claims.client_norm is not None:
        yield _client_bounded(bench, bench.claims.client_norm, second)
    assert isinstance(bench.defense, TrustedAggregator)
    if scale := bench.defense.noise_on_mean(2):
        again = bench.combined([first, second], noise=1)
        yield _noise(total, again, scale)


def _client_bounded(bench: Bench, norm: float, other: ClientUpdate) -> Test:
    """Tests by how much a loud client moves the sum of two, against one that sends zeros."""
    loud = bench.sent(loud=True)
    there, gone = bench.combined([other, loud]), bench.combined([other, _zeroed(loud)])
    moved = 2 * _distance(there, gone)
    return (
        f"a loud client moves the sum of updates by no more than {norm:g}",
        moved <= norm * (1 + ROUNDING) + 2 * _rounded(there, gone),
        f"by {moved:.4g}, of {_norm(loud):.2g} before",
    )


def _rounds(bench: Bench) -> Iterator[Test]:
    """Tests the rounding of one client's update, before it is added to others.

    It says how large the error is beside the update: rounding that loses the update hides it too.
    """
    raw = bench.trained()
    before, after = _numbers(raw).double(), _numbers(bench.defended(raw)).double()
    claims = bench.defense.claims(bench.local, raw.num_examples)
    assert claims.step is not None
    assert claims.largest_number is not None
    inside = before.clamp(-claims.largest_number, claims.largest_number)
    moved = float((after - inside).abs().max())
    float32 = torch.finfo(torch.float32).eps * float(after.abs().max())
    size, error = (float(numbers.square().mean().sqrt()) for numbers in (before, after - before))
    lost = (after == 0) & (before != 0)
    yield (
        f"each number is cut off at {claims.largest_number:.3g} and moves by less than a step of "
        f"{claims.step:.3g}",
        moved <= claims.step + float32,
        f"by up to {moved:.3g}; the error is {error / size:.3g} of the update's root mean square, "
        f"{100 * float(lost.double().mean()):.3g} % of the numbers become zero and "
        f"{100 * float((before != inside).double().mean()):.3g} % are cut off",
    )


def _keeps(bench: Bench) -> Iterator[Test]:
    """Tests the defense's own claims."""
    claims = bench.claims
    if claims.max_norm is not None:
        loud = bench.trained(loud=True)
        sent, noise = bench.defended(loud), bench.defended(_zeroed(loud))
        moved = _distance(sent, noise)
        yield (
            f"the update is no longer than {claims.max_norm:g}, its noise aside",
            moved <= claims.max_norm * (1 + ROUNDING) + _rounded(sent, noise),
            f"{moved:.4g}, of {_norm(loud):.2g} before",
        )
    if claims.example_norm is not None:
        sent, without = bench.sent(loud=True), bench.sent(range(1, EXAMPLES))
        moved = _distance(sent, without)
        yield (
            f"a loud example moves the update by no more than {claims.example_norm:g}",
            moved <= claims.example_norm * (1 + ROUNDING) + _rounded(sent, without),
            f"by {moved:.4g}; a raw one by {_distance(bench.raw(loud=True), bench.raw()):.2g}",
        )
    scale = claims.noise_scale
    if claims.relative_noise is not None:
        scale = claims.relative_noise * root_mean_square(bench.trained())
    if scale is not None:
        yield _noise(bench.sent(), bench.sent(noise=1), scale)
    if claims.masked is not None:
        yield _masked(bench, claims.masked)
    if claims.zeros is not None:
        yield _zeros(bench, claims.zeros)
    if claims.levels is not None:
        most = max(len(torch.unique(value)) for value in bench.sent().tensors.values())
        yield (f"no more than {claims.levels} numbers a tensor", most <= claims.levels, f"{most}")
    if claims.absent:
        names = select(bench.model, claims.absent, "parameters")
        there = [name for name in names if name in bench.sent().tensors]
        yield (f"{len(names)} tensors are not sent", not there, f"{len(there)} were sent")


def _noise(first: ClientUpdate, second: ClientUpdate, scale: float) -> Test:
    """Tests the variance of the noise, by two updates that differ in nothing else.

    The sum of n squared differences over 2 scale^2 is chi-square with n degrees of freedom for a
    normal distribution; the deviation of their mean is taken from the numbers themselves, which is
    right for any.
    """
    ratio_N = (_numbers(first).double() - _numbers(second).double()).square() / (2 * scale**2)
    mean, deviation = float(ratio_N.mean()), float(ratio_N.std()) / math.sqrt(len(ratio_N))
    off = (mean - 1) / deviation if deviation else math.copysign(math.inf, mean - 1)
    return (
        f"the noise has standard deviation {scale:.4g}",
        abs(off) < DEVIATIONS,
        f"{scale * math.sqrt(mean):.4g} on {len(ratio_N):,} numbers, {off:+.1f} deviations off",
    )


def _masked(bench: Bench, fraction: float) -> Test:
    """Tests a mask on the numbers that were not zero before."""
    before, after = _numbers(bench.raw()), _numbers(bench.sent())
    used = before != 0
    dropped, numbers = float((after[used] == 0).double().mean()), int(used.sum())
    deviation = math.sqrt(fraction * (1 - fraction) / numbers)
    kept = torch.equal(after[after != 0], before[after != 0])
    return (
        f"{100 * fraction:g} % of the numbers are set to zero, the others stay",
        abs(dropped - fraction) < DEVIATIONS * deviation + 1 / numbers and kept,
        f"{100 * dropped:.4g} % of {numbers:,}",
    )


def _zeros(bench: Bench, fraction: float) -> Test:
    """Tests how many numbers are zero, and that they were the smallest."""
    before, after = _numbers(bench.raw()), _numbers(bench.sent())
    zero = after == 0
    share = float(zero.double().mean())
    largest = float(before[zero].abs().max()) if zero.any() else 0.0
    smallest = float(after[~zero].abs().min()) if not zero.all() else math.inf
    kept = torch.equal(after[~zero], before[~zero])
    return (
        f"{100 * fraction:g} % of the numbers are zero, the smallest; the others stay",
        share >= fraction - 1 / len(after) and largest <= smallest and kept,
        f"{100 * share:.4g} % of {len(after):,}, up to {largest:.2g}; others from {smallest:.2g}",
    )


def _numbers(update: ClientUpdate) -> Tensor:
    """Returns all numbers of an update [N]."""
    return torch.cat([update.tensors[name].flatten() for name in sorted(update.tensors)])


def _guarantees(bench: Bench) -> Iterator[Test]:
    """Tests that two rounds with the same example cost more than one, in one run as in two."""
    local = replace(bench.local, kind=bench.sends)
    again = 1 + (passes(bench.num_examples, local) if bench.sends == UpdateKind.GRADIENT else 1)
    first, second = (bench.defense.event(local, bench.num_examples, round) for round in (1, again))
    if first is None and second is None:
        return

    def epsilon(events: Sequence[Event | None]) -> float:
        return sum(
            spent.epsilon
            for spent in privacy.compose([event for event in events if event], 1e-5, "rdp")
        )

    noted = first and Event.from_json(first.to_json())
    single, whole, later = epsilon([first]), epsilon([first, second]), epsilon([noted, second])
    yield (
        "two runs of one round spend what one run of two does, and more than one round",
        whole == later and whole > single > 0,
        f"epsilon {whole:.4g} and {later:.4g} at delta 1e-5; one round {single:.4g}",
    )


def _measured(bench: Bench, experiment: Experiment, client: int) -> Iterator[Test]:
    """Tests by canaries that a step spends no more than its event says.

    It is a step that every canary takes part in, so it is compared without sampling.
    """
    event = bench.defense.event(bench.local, bench.num_examples, 1)
    room = most_canaries(sum(sent_sizes(experiment, client, bench.model).values()))
    if event is None or not room:
        return
    whole = event.unit == "client"
    updates = WHOLE_UPDATES if whole else CANARY_UPDATES
    table = CanaryTable(count=1 if whole else min(CANARIES, room))
    with_canaries = experiment.model_copy(update={"canary": table})
    client_alone = Protection(bench.local, {0: bench.defense}, bench.num_examples)
    inside: list[float] = []
    for noise in range(updates):
        made = client_canaries(with_canaries, client_alone, client, 1 + noise, bench.model)
        assert made is not None
        captured = bench.defended(_with_canaries(bench, made, noise), noise)
        if isinstance(bench.defense, TrustedAggregator):
            captured = bench.combined([captured], noise)
        scores_K = scores(made.canaries.taken(captured.tensors), made.canaries.directions())
        pairs = zip(scores_K.tolist(), made.coins.inside, strict=True)
        inside += [z if coin else -z for z, coin in pairs if coin or whole]
    delta = experiment.privacy.delta
    # Plus and minus are as far apart as any two updates, and twice as far as one and nothing.
    apart = 2.0 if event.neighbouring.startswith("replace") else 1.0
    bound = privacy_bounds.gaussian_bound(inside, ALARM, delta, per_score=apart)
    step = replace(event, steps=1, sampling_rate=1.0, sampling="none", disjoint=None)
    (spent,) = privacy.compose([step], delta, privacy.BOTH_ACCOUNTANTS)
    yield (
        f"a step without sampling spends no more than epsilon {spent.epsilon:.4g} at delta "
        f"{delta:g}",
        bound <= spent.epsilon,
        f"{len(inside)} canaries show at least {bound:.4g} (p < {ALARM:g})",
    )


def _with_canaries(bench: Bench, made: ClientCanaries, noise: int) -> ClientUpdate:
    """Returns an update with canaries before the defense has it."""
    if made.planted is None:
        return made.copied(bench.trained(noise=noise))
    in_every_step = torch.ones(made.canaries.count, dtype=torch.bool)
    return bench.trained(noise=noise, planted=replace(made.planted, drawn_K=in_every_step))


def _all_together(
    experiment: Experiment, model: LanguageModel, parts: Sequence[Sequence[int]]
) -> Iterator[Test]:
    """Tests the update of the first client with all of its defenses, and what it does."""
    of_client = protection(experiment, 0, len(parts[0]))
    # As many examples as a step takes, so that FedAvg makes one.
    local = replace(of_client.local, batch_size=EXAMPLES, epochs=1)
    before = {name: value.clone() for name, value in model.parameters().items()}
    sequences = random_texts(model, experiment.seed)
    labels = _labels(model, sequences)
    update = local_update_(model, sequences, labels, local, seed=experiment.seed)
    models.load_parameters_(model, before)
    update, _ = of_client.defend(update, lambda n: stream(experiment.seed, "check", n))
    sent = partial_update(update, selected_parameters(experiment, model))
    frozen = set(select(model, local.frozen, "parameters")) if local.frozen else set()
    wanted = set(selected_parameters(experiment, model)) - frozen
    yield (
        "what is shared and trained is sent, and nothing else",
        sent.tensors.keys() == wanted,
        f"{len(sent.tensors)} of {len(before)} tensors",
    )
    total = WeightedSum(lambda name: before[name].dtype)
    total.add_(sent)
    after, _ = aggregate(before, total, experiment.server_optimiser, {})
    moved = sum(not torch.equal(after[name], before[name]) for name in before)
    yield (
        "the global weights move, and stay finite",
        moved > 0 and all(map(all_finite, after.values())),
        f"{moved} of {len(before)} tensors move",
    )


def random_texts(model: LanguageModel, seed: int) -> list[list[int]]:
    """Returns texts of random tokens, as a client would feed them."""
    rng, special = stream(seed, "check"), model.special_ids()
    usable = [i for i in range(len(model.tokenizer)) if i not in special]
    picks_BT = torch.randint(len(usable), (EXAMPLES, TOKENS), generator=rng).tolist()
    return model.encode([model.decode([usable[i] for i in row]) for row in picks_BT])


def _labels(model: LanguageModel, sequences: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each text the class that the model holds least likely: it has a gradient."""
    if model.task != CLASSIFICATION:
        return [0] * len(sequences)
    ids_BT, mask_BT = pad(sequences, model.tokenizer.pad_token_id, model.device)
    with torch.no_grad():
        logits_BC = model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
    labels: list[int] = logits_BC.argmin(-1).tolist()
    return labels


class _Loud:
    """A family whose first example of a batch has its logits, and so its gradient, magnified."""

    def __init__(self, family: Any) -> None:
        self._family = family

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def logits(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the family's logits, the first row magnified."""
        of_family: Callable[..., Tensor] = self._family.logits
        logits = of_family(*args, **kwargs)
        return torch.cat([LOUD * logits[:1], logits[1:]])


def _zeroed(update: ClientUpdate) -> ClientUpdate:
    zeros = {name: torch.zeros_like(value) for name, value in update.tensors.items()}
    return replace(update, tensors=zeros)


def _dense(like: ClientUpdate, norm: float, seed: int) -> ClientUpdate:
    """Returns an update of the same parameters, without zeros and with about this norm."""
    rng = stream(seed, "check", "dense")
    scale = norm / math.sqrt(sum(value.numel() for value in like.tensors.values()))
    numbers = {
        name: scale * torch.randn(value.shape, generator=rng)
        for name, value in like.tensors.items()
    }
    return replace(like, tensors=numbers)


def _rounded(first: ClientUpdate, second: ClientUpdate) -> float:
    """Returns how far apart rounding alone may put two updates that were added up in float32."""
    return 4 * torch.finfo(torch.float32).eps * (_norm(first) + _norm(second))


def _norm(update: ClientUpdate) -> float:
    return float(torch.stack([v.double().norm() for v in update.tensors.values()]).norm())


def _distance(first: ClientUpdate, second: ClientUpdate) -> float:
    """Returns the L2 distance, over the tensors that both have."""
    apart = [
        (value.double() - second.tensors[name].double()).norm()
        for name, value in first.tensors.items()
        if name in second.tensors
    ]
    return float(torch.stack(apart).norm())
