"""Certificates: what the model's own gradient proves of sequences that an attack found.

The attacker has the model, so it can compute the gradient of any batch. That gradient is linear in
the gradients of the sequences' logits, `G = sum_s sum_k kappa_sk dlogit_sk/dW`. If sequence s
occurs m_c times with label c in a batch of n, then
`kappa_s = sum_c m_c dloss(logits_s, c)/dlogits / n`. So least squares gives kappa, and kappa gives
the labels and the multiplicities. A batch is proved when the gradient recomputed from all of it
equals the observed gradient.

Shapes: B sequences, T tokens, C classes, U logits of all sequences; X: all numbers of a gradient.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.models import CLASSIFICATION, LanguageModel, batch_loss, pad
from fedleak.observation import Observation, UpdateKind

WHOLE = 0.01
"""How far from a whole number a multiplicity may be."""

PRECISION = 1e-4
"""Relative difference of two float32 computations of one gradient, with room."""

TOKENS_AT_ONCE = 1024
"""Tokens, padding included, whose gradients are computed before the clock is looked at."""

_SMALL = 1e-3
"""A tensor below this fraction of the update's norm counts as this large: some are zero."""


class Units(NamedTuple):
    """One sequence's gradient, before it is known how often and with which label it occurs.

    Attributes:
        ids: Its tokens.
        logits_C: Its logits; None in next-token training, which needs no label.
        gradients: The gradient of each logit, by parameter name. In next-token training there is
            one: the gradient of the loss, summed over the sequence.
    """

    ids: tuple[int, ...]
    logits_C: Tensor | None
    gradients: list[dict[str, Tensor]]


class Member(NamedTuple):
    """A sequence of the batch.

    Attributes:
        ids: Its tokens.
        weight: Its share of the batch's mean loss.
        counts: How often it occurs with each label; None in next-token training, where only the
            whole batch tells.
    """

    ids: tuple[int, ...]
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
    return known.local_steps in (None, 1) and not known.dropout and known.optimiser is None


def close(model: LanguageModel, ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the sequence as the client trained on it: with its last target, if it has one."""
    end = () if model.task == CLASSIFICATION else (model.tokenizer.eos_token_id,)
    return (*ids, *end)


def units(
    model: LanguageModel, sequences: Sequence[Sequence[int]], names: Sequence[str]
) -> list[Units]:
    """Returns the gradients of each sequence with respect to the parameters of these names."""
    own = dict(model.module.named_parameters())
    parameters = [own[name] for name in names]
    closed = [close(model, ids) for ids in sequences]
    found = []
    with torch.enable_grad():
        ids_BT, mask_BT = pad(closed, model.tokenizer.pad_token_id, model.device)
        if model.task == CLASSIFICATION:
            logits_BC = model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
            parts = [list(logits_C) for logits_C in logits_BC]
        else:
            logits_BC = None
            parts = [
                [batch_loss(model, ids_T[None], mask_T[None], None) * (mask_T.sum() - 1)]
                for ids_T, mask_T in zip(ids_BT, mask_BT, strict=True)
            ]
        for i, ids in enumerate(sequences):
            gradients = [
                torch.autograd.grad(part, parameters, retain_graph=True, materialize_grads=True)
                for part in parts[i]
            ]
            by_name = [dict(zip(names, one, strict=True)) for one in gradients]
            logits_C = None if logits_BC is None else logits_BC[i].detach()
            found.append(Units(tuple(ids), logits_C, by_name))
    return found


def member(model: LanguageModel, unit: Units, kappa_C: Tensor, batch_size: int) -> Member | None:
    """Returns how often a sequence occurs, and with which labels; None if no counts explain kappa.

    Of several explanations, the one with the fewest occurrences is taken: many occurrences could
    explain anything.
    """
    if unit.logits_C is None:
        weight = float(kappa_C[0]) * (len(close(model, unit.ids)) - 1)
        return Member(unit.ids, weight, None) if weight > 0 else None
    classes = len(unit.logits_C)
    labels_C = torch.arange(classes, device=kappa_C.device)
    with torch.enable_grad():
        each_CC = unit.logits_C.expand(classes, classes).detach().clone().requires_grad_()
        # The loss is a mean over rows; row c of its sum's gradient is that of label c.
        loss = model.class_loss(each_CC, labels_C) * classes
        grad_CC = torch.autograd.grad(loss, each_CC)[0].double()
    # The gradients of cross-entropy are linearly dependent, so the total has to be given.
    system_CC = torch.cat([grad_CC.T, grad_CC.new_ones(1, classes)])
    for total in range(1, batch_size + 1):
        wanted_C1 = torch.cat([batch_size * kappa_C.double(), grad_CC.new_tensor([total])])[:, None]
        counts_C = torch.linalg.lstsq(system_CC, wanted_C1).solution[:, 0]
        whole_C = counts_C.round()
        missed = (system_CC @ whole_C[:, None] - wanted_C1).abs().max()
        if (whole_C >= 0).all() and (counts_C - whole_C).abs().max() < WHOLE and missed < WHOLE:
            return Member(unit.ids, total / batch_size, tuple(int(n) for n in whole_C))
    return None


def explain(
    model: LanguageModel,
    sequences: Sequence[tuple[int, ...]],
    seen: Observation,
    clock: Clock,
) -> list[Member]:
    """Returns how often, and with which labels, each sequence is in the batch; none if unknown.

    Least squares over the units of all sequences uses the last shared parameters: their gradients
    cost little more than a forward pass. Where the sequences do not explain the update, their
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
    sequences: Sequence[tuple[int, ...]],
    begun: Sequence[tuple[int, ...]],
    seen: Observation,
    clock: Clock,
) -> list[Member]:
    """Returns the members among sequences, and beginnings of them, that explain the update."""
    observed, every = as_gradient(seen), [*sequences, *begun]
    names = _last_parameters(model, observed, 4 * len(every) * max(model.num_labels, 1))
    found: list[Units] = []
    for part in clock.paced(_parts(every)):
        found += units(model, part, names)
    if len(found) < len(every):
        return []
    columns = [_flat(gradient) for unit in found for gradient in unit.gradients]
    system_XU, target_X = torch.stack(columns, 1), _flat({n: observed[n] for n in names})
    if len(columns) > len(target_X):
        return []
    kappa_U = torch.linalg.lstsq(system_XU, target_X[:, None]).solution[:, 0]
    if not (target_X - system_XU @ kappa_U).norm() < precision(seen) * target_X.norm():
        return []
    each = kappa_U.split(len(columns) // len(found))
    batch_size = seen.update.num_examples
    members = [
        member(model, unit, kappa_C, batch_size)
        for unit, kappa_C in zip(found, each, strict=True)
        # A beginning need not be in the batch.
        if unit.ids in sequences or kappa_C.abs().max() * batch_size > WHOLE
    ]
    return [one for one in members if one is not None]


def is_run(model: LanguageModel, ids: Sequence[int]) -> bool:
    """Whether this is one repeated token, and the spans of the model cannot tell how often.

    Under rotary positions each token then attends to equal values alone, unless a mark begins every
    sequence. The whole gradient of a classifier is the same for any number of repetitions.
    """
    rotary = model.family.causal and model.family.position_embedding is None
    return rotary and len(set(ids)) == 1 and ids[0] != model.tokenizer.bos_token_id


def _parts(sequences: Sequence[tuple[int, ...]]) -> Iterator[Sequence[tuple[int, ...]]]:
    """Yields the sequences, as many at once as their tokens allow."""
    size = max(1, TOKENS_AT_ONCE // max(map(len, sequences)))
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
            numbers -= observed[name].numel()
            if numbers <= 0:
                break
    return names


def _flat(gradients: Mapping[str, Tensor]) -> Tensor:
    """Returns all gradients as one vector, float64."""
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).double()


def multiplicities(members: Sequence[Member], batch_size: int) -> list[int]:
    """Returns how often each member occurs in a batch of this size that holds nothing else."""
    # Next-token training weighs each target alike, so a weight per target counts occurrences.
    per_target = [one.weight / len(one.ids) for one in members]
    return [
        sum(one.counts) if one.counts is not None else round(batch_size * each / sum(per_target))
        for one, each in zip(members, per_target, strict=True)
    ]


class Verdict(NamedTuple):
    """What recomputing a batch's gradient says.

    Attributes:
        repeats: How often each sequence is in the batch, by its tokens.
        difference: Of the recomputed gradient from the observed gradient; None if the sequences do
            not make up a whole batch, so that it was not computed.
        verified: The two are equal within the precision of the update, and would not be with other
            repetitions.
    """

    repeats: dict[tuple[int, ...], int]
    difference: float | None
    verified: bool


def verify(
    model: LanguageModel,
    members: Sequence[Member],
    seen: Observation,
    clock: Clock = UNLIMITED,
) -> Verdict:
    """Recomputes the gradient of a batch of these members, if they make up the whole batch.

    If time is up before all of it is recomputed, nothing is proved.
    """
    tokens = sum(len(one.ids) for one in members)
    if not members or not can_tell(model, seen, tokens):
        return Verdict({}, None, False)
    repeats = multiplicities(members, seen.update.num_examples)
    by_ids = dict(zip((one.ids for one in members), repeats, strict=True))
    counted = members[0].counts is not None
    weight = sum(one.weight for one in members)
    if sum(repeats) != seen.update.num_examples if counted else abs(weight - 1) > WHOLE:
        return Verdict(by_ids, None, False)
    apart = difference(model, members, repeats, as_gradient(seen), clock)
    if apart is None:
        return Verdict(by_ids, None, False)
    # Of another number of repetitions a classifier's gradient would be the same.
    alike = model.task == CLASSIFICATION and any(is_run(model, one.ids) for one in members)
    return Verdict(by_ids, apart, apart < precision(seen) and not alike)


def proves(
    model: LanguageModel,
    sequences: Sequence[tuple[int, ...]],
    seen: Observation,
    clock: Clock = UNLIMITED,
) -> bool:
    """Whether the recomputed gradient of exactly these sequences is the update.

    Every claim of a proof is held against this, whoever makes it. Nothing is taken from the attack
    but its tokens: labels follow from the update.

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
    inputs = [ids[: len(ids) - len(end)] if ids[-1:] == end else ids for ids in sequences]
    # Where the inputs themselves end with what ends a text, the first reading takes too much.
    return any(
        _is_batch(model, batch, seen, clock)
        for batch in dict.fromkeys((tuple(inputs), tuple(sequences)))
    )


def _is_batch(
    model: LanguageModel, sequences: Sequence[tuple[int, ...]], seen: Observation, clock: Clock
) -> bool:
    if not all(sequences):
        return False
    members = _explained(model, list(dict.fromkeys(sequences)), (), seen, clock)
    verdict = verify(model, members, seen, clock)
    return verdict.verified and verdict.repeats == Counter(sequences)


def can_tell(model: LanguageModel, seen: Observation, tokens: int) -> bool:
    """Whether an update has enough numbers to prove a batch of so many tokens.

    If its bits, at their precision, are fewer than the bits of the text, then other texts have the
    same update.
    """
    numbers = sum(int(tensor.count_nonzero()) for tensor in seen.update.tensors.values())
    return numbers * -math.log2(precision(seen)) >= tokens * math.log2(len(model.tokenizer))


def precision(seen: Observation) -> float:
    """Returns the relative difference below which two gradients are equal, as they were sent."""
    rounding = max(torch.finfo(tensor.dtype).eps for tensor in seen.update.tensors.values())
    return max(PRECISION, rounding)


def difference(
    model: LanguageModel,
    members: Sequence[Member],
    repeats: Sequence[int],
    observed: Mapping[str, Tensor],
    clock: Clock = UNLIMITED,
) -> float | None:
    """Returns the largest relative difference between a batch's gradient and the observed one.

    None if time is up before the whole gradient is there.

    Args:
        model: At the broadcast weights.
        members: The whole batch.
        repeats: How often each occurs, where its counts do not say.
        observed: Gradients by parameter name.
        clock: Looked at after some sequences.
    """
    batch: list[tuple[tuple[int, ...], int]] = []
    for one, times in zip(members, repeats, strict=True):
        for label, count in enumerate(one.counts or (times,)):
            batch += [(close(model, one.ids), label)] * count
    counts = [1 if model.task == CLASSIFICATION else len(ids) - 1 for ids, _ in batch]
    own = dict(model.module.named_parameters())
    parameters = [own[name] for name in observed]
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
            loss = batch_loss(model, ids_BT, mask_BT, labels_B)
            loss = loss * (sum(counts[start : start + size]) / sum(counts))
            found = torch.autograd.grad(loss, parameters, materialize_grads=True)
        gradients = [a.add_(b) for a, b in zip(gradients, found, strict=False)] or [*found]
        done += len(some)
    if done < len(batch):
        return None
    sizes = torch.stack([tensor.norm() for tensor in observed.values()])
    apart = [a.sub_(b).norm() for a, b in zip(gradients, observed.values(), strict=True)]
    return float((torch.stack(apart) / sizes.clamp_min(_SMALL * float(sizes.norm()))).max())
