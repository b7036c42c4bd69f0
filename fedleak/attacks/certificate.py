"""Certificates: what the model's own gradient proves of sequences that an attack found.

The attacker has the model, so it can compute the gradient of any batch. That gradient is linear in
the gradients of the sequences' logits, `G = sum_s sum_k kappa_sk dlogit_sk/dW`. If sequence s
occurs m_c times with label c in a batch of n, then
`kappa_s = sum_c m_c dloss(logits_s, c)/dlogits / n`. So least squares gives kappa, and kappa gives
the labels and the multiplicities. A batch is proved when the gradient recomputed from all of it
equals the observed gradient. The update contains nothing of a text without a target. So with a
response template, batches with such texts, or with repeated ones, stay unproved.

The two may differ by one positive factor on the whole update, the scale. Clipping by norm, a sum in
place of the mean, accumulation without division, loss scaling and an unknown learning rate multiply
all numbers alike. So a proof covers the update's direction, which is one number less than the
update. A scale other than 1 hides one thing: a batch in which every text occurs equally often, and
more than once, pulls like the batch in which each occurs once. Such a batch is not proved. Nor is a
batch with a text of which the model is sure, because that text has nearly no gradient.

A sum over clients of next-token training is a sum of their means, in which a target weighs more the
fewer its client has. So the weights of its texts are those of least squares. They hide how often a
text occurs, so a sum with a repeated text is not proved.

A mask, or pruning, sends some numbers of a row as they were, and zeros in place of the others; a
change of large weights is rounded to zero here and there. Then the numbers that came are compared,
and zeros say nothing.

Shapes: B sequences, T tokens, C classes, U logits of all sequences; X: all numbers of a gradient.
"""

import math
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.models import (
    CLASSIFICATION,
    LanguageModel,
    batch_loss,
    example_losses,
    pad,
    target_counts,
)
from fedleak.models.family import frozen_rows
from fedleak.training.observation import Observation, UpdateKind

WHOLE = 0.01
"""How far from a whole number a multiplicity may be."""

PRECISION = 1e-4
"""Relative difference of two float32 computations of one gradient, with room."""

TOKENS_AT_ONCE = 1024
"""Tokens, padding included, whose gradients are computed before the clock is looked at."""

SEQUENCES_AT_ONCE = 16
"""Likewise: each sequence has a backward pass of its own."""

_TOLD_APART = 20.0
"""An update can tell two words apart if their embeddings differ, relative to their length, by this
many times its precision: a word is one of many in a batch."""

_WORDS_AT_ONCE = 256
"""Words whose distances to all others are in memory."""

_ZEROS = 0.02
"""Share of zeros in used rows, above which these zeros are numbers that did not come."""

_TELLS = 2.0
"""A text's part of an update tells which text it is if it is this many times its precision."""

_SMALL = 1e-3
"""A tensor below this fraction of the update's norm counts as this large: some are zero."""

_NUMBERS = 2**25
"""Numbers of the equations for a batch's labels and repetitions that are in memory, at most."""

Kept = TypeVar("Kept")


class Units(NamedTuple):
    """One sequence's gradient, before it is known how often and with which label it occurs.

    Attributes:
        ids: Its tokens.
        logits_C: Its logits; None in next-token training, which needs no label.
        gradients: The gradient of each logit, by parameter name. In next-token training there is
            one: the gradient of the loss, summed over the sequence.
    """

    ids: Ids
    logits_C: Tensor | None
    gradients: list[dict[str, Tensor]]


class Pull(NamedTuple):
    """How hard a sequence pulls, in an update, at its own logits.

    Attributes:
        unit: The sequence.
        kappa_C: The weight of the gradient of each logit.
    """

    unit: Units
    kappa_C: Tensor


class Proof(NamedTuple):
    """How hard a sequence pulls at the observed gradient, and its part of it by name."""

    pull: Pull
    gradient: dict[str, Tensor]


class Member(NamedTuple):
    """A sequence of the batch.

    Attributes:
        ids: Its tokens.
        weight: Its share of the batch's mean loss.
        counts: How often it occurs with each label; None in next-token training, where only the
            whole batch tells.
    """

    ids: Ids
    weight: float
    counts: tuple[int, ...] | None


def as_gradient(seen: Observation) -> dict[str, Tensor]:
    """Returns the update as a gradient in float32: a delta is divided by minus the learning rate.

    Several local steps give the sum of their gradients, each at the weights of its step.
    """
    tensors = {name: tensor.float() for name, tensor in seen.update.tensors.items()}
    if seen.update.kind == UpdateKind.GRADIENT:
        return tensors
    scale = -1 / (seen.knowledge.learning_rate or 1.0)
    return {name: scale * tensor for name, tensor in tensors.items()}


def is_linear(seen: Observation) -> bool:
    """Whether the update is one gradient of the model as it was broadcast."""
    known = seen.knowledge
    return known.local_steps in (None, 1) and not known.dropout and known.adds_up


def lacks_numbers(tensors: Iterable[Tensor]) -> bool:
    """Whether some numbers of used rows did not come."""
    lacking, total = 0, 0
    for value in tensors:
        used = int(value.any(-1).sum()) * (value.shape[-1] if value.dim() else 1)
        lacking, total = lacking + used - int(value.count_nonzero()), total + used
    return lacking > _ZEROS * total


def were_cast(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers were rounded to half precision on their way."""
    tensors = [*tensors]
    return any(
        all(torch.equal(value_X.to(dtype).to(value_X.dtype), value_X) for value_X in tensors)
        for dtype in (torch.bfloat16, torch.float16)
    )


def close(model: LanguageModel, ids: Sequence[int]) -> Ids:
    """Returns the sequence as the client trained on it: with its last target, if it has one."""
    end = () if model.task == CLASSIFICATION else (model.tokenizer.eos_token_id,)
    return (*ids, *end)


def opened(model: LanguageModel, ids: Sequence[int]) -> Ids:
    """Returns a sequence without the last target that `close` gave it."""
    return tuple(ids[: len(ids) - len(close(model, ()))])


def units(
    model: LanguageModel, sequences: Sequence[Sequence[int]], names: Sequence[str]
) -> list[Units]:
    """Returns the gradients of each sequence with respect to the parameters of these names."""
    parameters = [model.module.get_parameter(name) for name in names]
    closed = [close(model, ids) for ids in sequences]
    sequence_units = []
    with torch.enable_grad():
        ids_BT, mask_BT = pad(closed, model.tokenizer.pad_token_id, model.device)
        if model.task == CLASSIFICATION:
            logits_BC = model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
            parts = [list(logits_C) for logits_C in logits_BC]
        else:
            logits_BC = None
            counts = target_counts(model, closed)
            parts = [
                [batch_loss(model, ids_T[None], mask_T[None], None) * count]
                for ids_T, mask_T, count in zip(ids_BT, mask_BT, counts, strict=True)
            ]
        for i, ids in enumerate(sequences):
            gradients = [
                torch.autograd.grad(part, parameters, retain_graph=True, materialize_grads=True)
                for part in parts[i]
            ]
            by_name = [dict(zip(names, values, strict=True)) for values in gradients]
            logits_C = None if logits_BC is None else logits_BC[i].detach()
            sequence_units.append(Units(tuple(ids), logits_C, by_name))
    return sequence_units


def proof_of(
    unit: Units, system_XU: Tensor, target_X: Tensor, room: Tensor | float
) -> Proof | None:
    """Returns a sequence's part of an update, if its gradients explain some numbers of it.

    Args:
        unit: The sequence.
        system_XU: These numbers of its gradients.
        target_X: These numbers of the update.
        room: The largest norm of what they may leave.
    """
    kappa_U = torch.linalg.lstsq(system_XU, target_X[:, None]).solution[:, 0]
    if not (target_X - system_XU @ kappa_U).norm() <= room:
        return None
    weighted = list(zip(kappa_U.tolist(), unit.gradients, strict=True))
    gradient = {name: sum(w * g[name] for w, g in weighted) for name in unit.gradients[0]}
    return Proof(Pull(unit._replace(gradients=[]), kappa_U), gradient)


def member(model: LanguageModel, unit: Units, kappa_C: Tensor, batch_size: int) -> Member | None:
    """Returns how often a sequence occurs, and with which labels; None if no counts explain kappa.

    Of several explanations, the one with the fewest occurrences is taken: many occurrences could
    explain anything.
    """
    if unit.logits_C is None:
        (count,) = target_counts(model, [close(model, unit.ids)])
        weight = float(kappa_C[0]) * count
        return Member(unit.ids, weight, None) if weight > 0 else None
    grad_CC = _gradients_by_label(model, unit.logits_C)
    # The gradients of cross-entropy are linearly dependent, so the total has to be given.
    system_CC = torch.cat([grad_CC.T, grad_CC.new_ones(1, len(grad_CC))])
    totals_N = torch.arange(1, batch_size + 1, device=grad_CC.device, dtype=grad_CC.dtype)
    pulled_CN = batch_size * kappa_C.double()[:, None].expand(-1, batch_size)
    wanted_CN = torch.cat([pulled_CN, totals_N[None]])
    counts_CN = torch.linalg.lstsq(system_CC, wanted_CN).solution
    whole_CN = counts_CN.round()
    missed_N = (system_CC @ whole_CN - wanted_CN).abs().amax(0)
    apart_N = (counts_CN - whole_CN).abs().amax(0)
    fits_N = (whole_CN >= 0).all(0) & (apart_N < WHOLE) & (missed_N < WHOLE)
    if not fits_N.any():
        return None
    fewest = int(fits_N.nonzero()[0])
    counts = tuple(int(count) for count in whole_CN[:, fewest])
    return Member(unit.ids, (fewest + 1) / batch_size, counts)


def _gradients_by_label(model: LanguageModel, logits_C: Tensor) -> Tensor:
    """Returns the gradient of one sequence's loss at its logits, a row for each label [C, C]."""
    classes = len(logits_C)
    labels_C = torch.arange(classes, device=logits_C.device)
    with torch.enable_grad():
        each_CC = logits_C.expand(classes, classes).detach().clone().requires_grad_()
        # The loss is a mean over rows; row c of its sum's gradient is that of label c.
        loss = model.class_loss(each_CC, labels_C) * classes
        return torch.autograd.grad(loss, each_CC)[0].double()


class Counted(NamedTuple):
    """What sequences are in a batch.

    Attributes:
        of_pulls: The member behind each pull; None if no counts explain it.
        scale: The factor on the whole update that makes their counts whole.
    """

    of_pulls: list[Member | None]
    scale: float


def counted(
    model: LanguageModel, pulls: Sequence[Pull], batch_size: int, *, whole: bool
) -> Counted:
    """Returns how often, and with which labels, sequences occur, whatever the update's scale.

    The scale is 1 if that explains all that pulls. Among other scales, the one with the fewest
    occurrences is taken. In next-token training weights need not be whole, and the scale is 1.

    Args:
        model: At the broadcast weights.
        pulls: Of different sequences; a sequence that hardly pulls may not be in the batch.
        batch_size: Texts in the batch.
        whole: The sequences are the whole batch; else others may be in it, too.
    """

    def at(scale: float) -> Counted:
        return Counted(
            [member(model, unit, kappa_C / scale, batch_size) for unit, kappa_C in pulls], scale
        )

    def explains(candidate: Counted) -> bool:
        count = _occurrences(candidate)
        return (count == batch_size if whole else count <= batch_size) and all(
            known is not None or float(kappa_C.abs().max()) <= threshold
            for known, (_, kappa_C) in zip(candidate.of_pulls, pulls, strict=True)
        )

    plain = at(1.0)
    if not pulls or pulls[0].unit.logits_C is None:
        return plain
    threshold = WHOLE * max(float(kappa_C.abs().max()) for _, kappa_C in pulls)
    if explains(plain):
        return plain
    others = (at(scale) for scale in _scales(model, pulls, batch_size))
    return min(filter(explains, others), key=_occurrences, default=plain)


def _occurrences(candidate: Counted) -> int:
    """Returns how many texts of the batch are known."""
    return sum(sum(known.counts or ()) for known in candidate.of_pulls if known is not None)


def _scales(model: LanguageModel, pulls: Sequence[Pull], batch_size: int) -> list[float]:
    """Returns the scales at which one of the sequences occurs once."""
    scales: list[float] = []
    for unit, kappa_C in pulls:
        assert unit.logits_C is not None
        for once_C in _gradients_by_label(model, unit.logits_C):
            scale = batch_size * float(kappa_C.double() @ once_C / once_C.square().sum())
            known = (math.isclose(scale, other, rel_tol=PRECISION) for other in scales)
            if scale > 0 and not any(known):
                scales.append(scale)
    return scales


def explain(
    model: LanguageModel,
    sequences: Sequence[Ids],
    seen: Observation,
    clock: Clock,
) -> list[Member]:
    """Returns how often, and with which labels, each sequence is in the batch; none if unknown.

    Least squares over the units of all sequences uses the last shared parameters: their gradients
    cost little more than a forward pass. If the sequences do not explain the update, their
    beginnings are tried too: in a causal model one sequence may begin another. If time is up before
    all of them are tried, nothing is known.
    """
    if members := _explained(model, sequences, (), seen, clock):
        return members
    if not model.family.causal:
        return []
    begun = {ids[:length] for ids in sequences for length in range(1, len(ids))}
    # Of runs of one token that count alike, the shortest stands for all.
    begun = {ids for ids in begun if len(ids) == 1 or not is_run(model, ids)}
    return _explained(model, sequences, sorted(begun.difference(sequences)), seen, clock)


def _explained(
    model: LanguageModel,
    sequences: Sequence[Ids],
    begun: Sequence[Ids],
    seen: Observation,
    clock: Clock,
) -> list[Member]:
    """Returns the members among sequences, and beginnings of them, that explain the update."""
    observed, every = as_gradient(seen), [*sequences, *begun]
    unknown = len(every) * max(model.num_labels, 1)
    names = _last_parameters(model, observed, 4 * unknown)
    target_X = flat({name: observed[name] for name in names})
    # A mask, or pruning, may have made a zero of any number. Evenly many of the others are enough:
    # what they say of the batch is checked on the whole gradient.
    numbers_X = target_X.nonzero()[:, 0]
    numbers_X = numbers_X[:: max(1, math.ceil(len(numbers_X) * unknown / _NUMBERS))]
    target_X = target_X[numbers_X].double()
    sequence_units: list[Units] = []
    columns: list[Tensor] = []
    for part in clock.paced(_parts(every)):
        for unit in units(model, part, names):
            columns += [flat(gradient)[numbers_X].double() for gradient in unit.gradients]
            sequence_units.append(unit._replace(gradients=[]))
    if len(sequence_units) < len(every) or len(columns) > len(target_X):
        return []
    system_XU = torch.stack(columns, 1)
    kappa_U = torch.linalg.lstsq(system_XU, target_X[:, None]).solution[:, 0]
    if not (target_X - system_XU @ kappa_U).norm() < precision(seen) * target_X.norm():
        return []
    kappas = kappa_U.split(len(columns) // len(sequence_units))
    threshold = WHOLE * kappa_U.abs().max()
    pulls = [
        Pull(unit, kappa_C)
        for unit, kappa_C in zip(sequence_units, kappas, strict=True)
        # A beginning need not be in the batch.
        if unit.ids in sequences or kappa_C.abs().max() > threshold
    ]
    of_pulls = counted(model, pulls, seen.update.num_examples, whole=True).of_pulls
    return [known for known in of_pulls if known is not None]


def is_run(model: LanguageModel, ids: Sequence[int]) -> bool:
    """Whether this is one repeated token, and the spans of the model cannot tell how often.

    Under rotary positions each token then attends to equal values alone, unless a mark begins every
    sequence. The whole gradient of a classifier is the same for any number of repetitions.
    """
    rotary = model.family.causal and model.family.position_embedding is None
    return rotary and len(set(ids)) == 1 and ids[0] != model.tokenizer.bos_token_id


def _parts(sequences: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
    """Yields the sequences, as many at once as their tokens allow."""
    size = max(1, min(SEQUENCES_AT_ONCE, TOKENS_AT_ONCE // max(map(len, sequences))))
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]


def _last_parameters(
    model: LanguageModel, observed: Mapping[str, Tensor], numbers: int
) -> list[str]:
    """Returns shared parameters, from the end of the network, with at least so many numbers."""
    names: list[str] = []
    null = model.family.null_parameters(observed)
    for name in reversed([name for name, _ in model.module.named_parameters()]):
        if name in observed and name not in null:
            names.append(name)
            numbers -= int(observed[name].count_nonzero())
            if numbers <= 0:
                break
    return names


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns all numbers of an update as one vector, float32 [X]."""
    return torch.cat([value.flatten().float() for value in tensors.values()])


def multiplicities(model: LanguageModel, members: Sequence[Member], batch_size: int) -> list[int]:
    """Returns how often each member occurs in a batch of this size that holds nothing else."""
    weights = weights_per_target(model, members)
    return [
        sum(member.counts)
        if member.counts is not None
        else round(batch_size * weight / sum(weights))
        for member, weight in zip(members, weights, strict=True)
    ]


def weights_per_target(model: LanguageModel, members: Sequence[Member]) -> list[float]:
    """Returns each member's weight for one target.

    Next-token training weighs each target alike, so this counts occurrences, up to one factor.
    """
    counts = target_counts(model, [close(model, member.ids) for member in members])
    return [member.weight / count for member, count in zip(members, counts, strict=True)]


class Verdict(NamedTuple):
    """What recomputing a batch's gradient shows.

    Attributes:
        repeats: How often each sequence is in the batch, by its tokens.
        difference: How far the recomputed gradient is from the observed one; None if the sequences
            do not make up a whole batch.
        verified: The two are equal within the precision of the update, and would not be with other
            repetitions.
        scale: How many times the recomputed gradient the observed one is; 1 if nothing is verified.
    """

    repeats: dict[Ids, int]
    difference: float | None
    verified: bool
    scale: float = 1.0

    def diagnostics(self) -> dict[str, float]:
        """Returns what an answer says of it."""
        of_scale = {} if self.scale == 1 else {"scale": self.scale}
        known = {} if self.difference is None else {"gradient_difference": self.difference}
        return known | of_scale

    def remark(self) -> str:
        """Returns what the scale looks like, in a sentence; empty if it is 1."""
        if self.scale == 1:
            return ""
        terms, tokens = round(self.scale), sum(len(ids) * n for ids, n in self.repeats.items())
        if 1 < terms <= tokens and abs(self.scale - terms) < WHOLE:
            looks = f"a sum over {terms}, not a mean"
        else:
            looks = "a clipped one" if self.scale < 1 else "a scaled one"
        return (
            f"this update looks like {looks}: it is {self.scale:.4g} times the mean gradient of "
            "these texts"
        )


NOTHING_PROVED = Verdict({}, None, False)


def written(tensors: Iterable[Tensor]) -> list[tuple[int, int | None]]:
    """Returns where tensors are in memory, and how often torch saw each of them written to.

    None: torch does not count that, because the tensor was made in inference mode.
    """
    return [(t.data_ptr(), None if t.is_inference() else t._version) for t in tensors]


Texts = Mapping[Ids, int]
"""How often each sequence is in a batch, by its tokens."""


class Proofs(Generic[Kept]):
    """The last proofs, so that a check of an attack's answer need not repeat the attack's proof.

    A proof counts only for the same observation and network, with all tensors as they were.
    """

    def __init__(self) -> None:
        self._kept = deque[tuple[Any, Any, list[tuple[int, int | None]], Texts, Kept]](maxlen=64)

    def keep(self, model: LanguageModel, seen: Observation, texts: Texts, proof: Kept) -> None:
        """Keeps a new proof, unless torch does not count the writes to one of the tensors."""
        now = self._written(model, seen)
        if all(count is not None for _, count in now):
            self._kept.append((weakref.ref(seen), weakref.ref(model.module), now, texts, proof))

    def get(self, model: LanguageModel, seen: Observation, texts: Texts) -> Kept | None:
        """Returns the proof of these texts, if it is kept."""
        now = self._written(model, seen)
        for about, module, before, proved, proof in self._kept:
            if seen is about() and model.module is module() and (now, texts) == (before, proved):
                return proof
        return None

    @staticmethod
    def _written(model: LanguageModel, seen: Observation) -> list[tuple[int, int | None]]:
        return written([*model.module.parameters(), *seen.update.tensors.values()])


_proofs: Proofs[Verdict] = Proofs()


def judge(
    model: LanguageModel,
    sequences: Sequence[Ids],
    seen: Observation,
    clock: Clock = UNLIMITED,
) -> Verdict:
    """Returns what the model's own gradient says of sequences, whatever their repetitions are.

    Nothing is proved if the update is no single gradient, or if time is up before.
    """
    if not is_linear(seen) or not sequences:
        return NOTHING_PROVED
    times = Counter(sequences)
    unlabelled = model.task != CLASSIFICATION and not weighs_clients(model, seen)
    if unlabelled and len(times) == seen.update.num_examples:
        # There is no label to find, and a batch of other repetitions would lack one of them.
        verdict = _remembered(model, _unlabelled(model, dict.fromkeys(times, 1)), seen, clock)
        if verdict.verified:
            return verdict
    return _remembered(model, explain(model, list(times), seen, clock), seen, clock)


def _remembered(
    model: LanguageModel, members: Sequence[Member], seen: Observation, clock: Clock
) -> Verdict:
    """Returns the verdict on members that this module made of tokens alone, and keeps a proof."""
    verdict = verify(model, members, seen, clock)
    if verdict.verified:
        _proofs.keep(model, seen, verdict.repeats, verdict)
    return verdict


def _unlabelled(model: LanguageModel, times: Mapping[Ids, int]) -> list[Member]:
    """Returns the members of a next-token batch, or none if one has no target."""
    targets = target_counts(model, [close(model, ids) for ids in times])
    if not all(times) or not all(targets):
        return []
    return [
        Member(ids, float(times[ids] * count), None)
        for ids, count in zip(times, targets, strict=True)
    ]


def verify(
    model: LanguageModel,
    members: Sequence[Member],
    seen: Observation,
    clock: Clock = UNLIMITED,
) -> Verdict:
    """Recomputes the gradient of a batch of these members, if they make up the whole batch.

    If time is up before all of it is recomputed, nothing is proved.
    """
    tokens = sum(len(member.ids) for member in members)
    if not members or not can_tell(model, seen, tokens):
        return NOTHING_PROVED
    if has_twins(model, {token for member in members for token in member.ids}, seen):
        return NOTHING_PROVED
    repeats, shares = multiplicities(model, members, seen.update.num_examples), None
    if weighs_clients(model, seen):
        repeats, shares = [1] * len(members), [member.weight for member in members]
    by_ids = dict(zip((member.ids for member in members), repeats, strict=True))
    known = members[0].counts is not None
    if sum(repeats) != seen.update.num_examples or not all(repeats):
        return Verdict(by_ids, None, False)
    relative = difference(model, members, repeats, seen, clock, shares)
    if relative is None:
        return Verdict(by_ids, None, False)
    apart, scale = relative
    # A classifier's gradient of a run is the same for any number of repetitions.
    alike = model.task == CLASSIFICATION and any(is_run(model, member.ids) for member in members)
    # At another scale, a batch of which every text is repeated pulls like one without repeats.
    doubled = abs(scale - 1) > WHOLE and math.gcd(*repeats) > 1
    # So does a batch with a text that has no target, which says nothing.
    doubled |= bool(model.response_template) and max(repeats) > 1
    if apart < precision(seen) and not alike and not doubled:
        verified = _each_tells(model, members, repeats, seen, scale, clock, shares)
        return Verdict(by_ids, apart, verified, scale if verified else 1.0)
    whole = known or abs(sum(member.weight for member in members) - 1) <= WHOLE
    return Verdict(by_ids, apart if whole else None, False)


def weighs_clients(model: LanguageModel, seen: Observation) -> bool:
    """Whether the targets of one client may weigh more than another's, as in a sum of means."""
    return seen.client < 0 and model.task != CLASSIFICATION


def _each_tells(
    model: LanguageModel,
    members: Sequence[Member],
    repeats: Sequence[int],
    seen: Observation,
    scale: float,
    clock: Clock,
    shares: Sequence[float] | None,
) -> bool:
    """Whether each text of a batch has a part of the update that its precision does not hide.

    A text of which the model is sure has nearly no gradient: any other such text could stand there.
    """
    if len(members) == 1:
        return True
    observed = as_gradient(seen)
    norms = {name: float(value.norm()) for name, value in observed.items()}
    smallest = _SMALL * math.hypot(*norms.values())
    counts = target_counts(model, [close(model, member.ids) for member in members])
    total = sum(count * times for count, times in zip(counts, repeats, strict=True))
    # Most texts show in the last parameters, whose gradients cost little more than a pass forward.
    last = _last_parameters(model, observed, 1)

    def shows(ids: Ids, label: int, share: float, names: Sequence[str]) -> bool:
        part = mean_gradient(model, [(close(model, ids), label)], names, clock)
        sizes = (max(norms[name], smallest) for name in names)
        return part is not None and any(
            share * float(gradient.norm()) > _TELLS * precision(seen) * size
            for gradient, size in zip(part, sizes, strict=True)
        )

    of_targets = shares or [count / total for count in counts]
    for member, times, part in zip(members, repeats, of_targets, strict=True):
        for label, occurs in enumerate(member.counts or (times,)):
            share = scale * occurs * part
            if occurs and not any(
                shows(member.ids, label, share, names) for names in (last, [*observed])
            ):
                return False
    return True


def proves(
    model: LanguageModel,
    sequences: Sequence[Ids],
    seen: Observation,
    clock: Clock = UNLIMITED,
) -> bool:
    """Whether the recomputed gradient of exactly these sequences is the update.

    Every claim of a proof is checked here, whoever makes it. Only the tokens come from the attack:
    labels follow from the update. A verdict that this module reached in this way is not computed
    again for the same tokens, observation and model, if their tensors are where they were and were
    not written to since, as torch counts writes. So a wrong attack is not believed, nor an attack
    that changed a tensor after its proof. An attack that writes past that count (`.data`) before a
    proof, and restores the tensor afterwards, could as well replace this function: if you do not
    trust its code, run it in another process (`attacks.outside`).

    Args:
        model: At the broadcast weights.
        sequences: The batch, each sequence as often as it occurs, with or without the last target
            of next-token training.
        seen: The update.
        clock: When time is up, nothing is proved.
    """
    if not is_linear(seen) or not 0 < len(sequences) == seen.update.num_examples:
        return False
    end = close(model, ())
    inputs = [opened(model, ids) if ids[-1:] == end else ids for ids in sequences]
    # Inputs may themselves end with an end token: then the first reading cuts off too much.
    return any(
        _is_batch(model, batch, seen, clock)
        for batch in dict.fromkeys((tuple(inputs), tuple(sequences)))
    )


def _is_batch(
    model: LanguageModel, sequences: Sequence[Ids], seen: Observation, clock: Clock
) -> bool:
    times = Counter(sequences)
    if not all(times):
        return False
    if _proofs.get(model, seen, times) is not None:
        return True
    if model.task == CLASSIFICATION or weighs_clients(model, seen):
        members = _explained(model, list(times), (), seen, clock)
    else:
        members = _unlabelled(model, times)
    verdict = _remembered(model, members, seen, clock)
    return verdict.verified and verdict.repeats == times


def can_tell(model: LanguageModel, seen: Observation, tokens: int) -> bool:
    """Whether an update has enough numbers to prove a batch of so many tokens.

    If its bits, at their precision, are fewer than the bits of the text, then other texts have the
    same update.
    """
    numbers, needed = 0, tokens * math.log2(len(model.tokenizer)) / -math.log2(precision(seen))
    for tensor in seen.update.tensors.values():
        if numbers - 1 >= needed:  # one number determines the scale
            break
        numbers += int(tensor.count_nonzero())
    return numbers - 1 >= needed


def has_twins(model: LanguageModel, words: Set[int], seen: Observation) -> bool:
    """Whether another text gives the same update, because two words have nearly one embedding.

    Words that a model hardly met in training may be such words. Only the rows of the embedding's
    gradient tell them apart; a pruned update may lack the row of a word.
    """
    content = sorted(words - model.special_ids())
    if (rows_VD := seen.update.tensors.get(model.family.word_embedding)) is not None:
        content = [word for word in content if not rows_VD[word].any()]
    return bool(content) and float(nearest_words(model, content)[1].min()) < (
        _TOLD_APART * precision(seen)
    )


def nearest_words(model: LanguageModel, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns which other word has the most similar embedding, and how similar it is.

    Args:
        model: Its special tokens are no words.
        ids: Tokens [N].

    Returns:
        The other word of each token [N], and the distance of the two embeddings, relative to the
        length of the token's [N].
    """
    (table_VD,) = frozen_rows(model.module, model.family.word_embedding)
    words_VD, special = table_VD[: len(model.tokenizer)].float(), sorted(model.special_ids())
    parts = []
    for ids_M in torch.split(torch.tensor(ids, device=table_VD.device), _WORDS_AT_ONCE):
        apart_MV = torch.cdist(words_VD[ids_M], words_VD) / words_VD[ids_M].norm(dim=1)[:, None]
        apart_MV.nan_to_num_(nan=0.0, posinf=math.inf)  # of a word without an embedding
        apart_MV[:, special] = math.inf
        apart_MV[torch.arange(len(ids_M)), ids_M] = math.inf
        parts.append(apart_MV.min(1))
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def precision(seen: Observation) -> float:
    """Returns the relative difference below which two gradients are equal, as they were sent."""
    rounding = max(torch.finfo(tensor.dtype).eps for tensor in seen.update.tensors.values())
    return max(PRECISION, rounding)


class Difference(NamedTuple):
    """How far a recomputed gradient is from the observed one.

    Attributes:
        relative: The largest difference of a tensor, relative to its norm.
        scale: The factor on the recomputed gradient. It is 1 if that gradient is the observed one
            as it is, or if no factor makes it so.
    """

    relative: float
    scale: float


def difference(
    model: LanguageModel,
    members: Sequence[Member],
    repeats: Sequence[int],
    seen: Observation,
    clock: Clock = UNLIMITED,
    shares: Sequence[float] | None = None,
) -> Difference | None:
    """Returns how far a batch's gradient is from the observed one.

    None if time is up before the whole gradient is computed.

    Args:
        model: At the broadcast weights.
        members: The whole batch.
        repeats: How often each occurs, where its counts do not say.
        seen: The update.
        clock: Looked at after some sequences.
        shares: The weight of each member's mean loss; None: all targets, or texts, weigh alike.
    """
    batch: list[tuple[Ids, int]] = []
    for member, times in zip(members, repeats, strict=True):
        for label, count in enumerate(member.counts or (times,)):
            batch += [(close(model, member.ids), label)] * count
    observed = as_gradient(seen)
    gradients = mean_gradient(model, batch, [*observed], clock, shares)
    if gradients is None:
        return None
    as_sent = _apart(gradients, [*observed.values()], precision(seen))
    if as_sent.relative < precision(seen) or not lacks_numbers(observed.values()):
        return as_sent
    for own_X, observed_X in zip(gradients, observed.values(), strict=True):
        own_X.masked_fill_(observed_X == 0, 0)
    return _apart(gradients, [*observed.values()], precision(seen))


def mean_gradient(
    model: LanguageModel,
    batch: Sequence[tuple[Ids, int]],
    names: Sequence[str],
    clock: Clock = UNLIMITED,
    shares: Sequence[float] | None = None,
) -> list[Tensor] | None:
    """Returns the gradient of a batch's mean loss, by name; None if time is up before it is whole.

    Args:
        model: At the broadcast weights.
        batch: Texts as the client trained on them, with labels, which next-token training ignores.
        names: Of parameters.
        clock: Looked at after some texts.
        shares: The weight of each text's mean loss; None: all targets, or texts, weigh alike.
    """
    counts = target_counts(model, [ids for ids, _ in batch])
    parameters = [model.module.get_parameter(name) for name in names]
    size = max(1, TOKENS_AT_ONCE // max(len(ids) for ids, _ in batch))
    gradients: list[Tensor] = []
    done = 0
    for start in clock.paced(range(0, len(batch), size)):
        some = batch[start : start + size]
        with torch.enable_grad():
            ids_BT, mask_BT = pad(
                [ids for ids, _ in some], model.tokenizer.pad_token_id, model.device
            )
            labels_B = torch.tensor([label for _, label in some], device=model.device)
            if shares is None:
                loss = batch_loss(model, ids_BT, mask_BT, labels_B)
                loss = loss * (sum(counts[start : start + size]) / sum(counts))
            else:
                share_B = torch.tensor(shares[start : start + size], device=model.device)
                loss = share_B @ example_losses(model, ids_BT, mask_BT, labels_B)
            grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
        gradients = [a.add_(b) for a, b in zip(gradients, grads, strict=False)] or [*grads]
        done += len(some)
    return gradients if done == len(batch) else None


def _apart(own: Sequence[Tensor], observed: Sequence[Tensor], enough: float) -> Difference:
    """Returns how far tensors are from others; at another scale, if they are near enough there."""
    sizes = torch.stack([tensor.norm() for tensor in observed])
    sizes = sizes.clamp_min(_SMALL * float(sizes.norm()))
    room = own[0].new_empty(max(tensor.numel() for tensor in own))

    def apart(scale: float) -> float:
        norms = [
            torch.sub(b, a, alpha=scale, out=room[: a.numel()].view_as(a)).norm()
            for a, b in zip(own, observed, strict=True)
        ]
        return float((torch.stack(norms) / sizes).max())

    plain = Difference(apart(1.0), 1.0)
    if plain.relative < enough:
        return plain
    own_square = sum(float(a.flatten() @ a.flatten()) for a in own)
    inner = sum(float(a.flatten() @ b.flatten()) for a, b in zip(own, observed, strict=True))
    # No client reverses the sign of its update.
    if not inner > 0 < own_square:
        return plain
    scale = inner / own_square
    scaled = Difference(apart(scale), scale)
    return scaled if scaled.relative < enough else plain
