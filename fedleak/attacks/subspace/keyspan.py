"""Keyspan: whole sentences from the first attention layer alone, past the rank limit of DAGER.

In the first layer the query of token i is q_i = W_Q x_i, and likewise its key and value. With
scores S_ij = q_i . k_j / sqrt(K) and A = softmax(S), the gradients at queries and keys are

    dq_i = sum_j dS_ij k_j / sqrt(K)      dk_j = sum_i dS_ij q_i / sqrt(K)      in every head,

so the gradient at a token's query lies in the span of the keys of its own sequence, and the
gradient at its key in the span of the queries: as many equations as heads have dimensions, in every
head at once. `token_bag` splits the weight gradients into such gradients, one for each token of the
bag. For a token that occurs once (a seed), its sequence is the smallest set of (token, position)
pairs (`atoms`) that spans its gradient in all heads. Orthogonal least squares with a beam finds it
(`beam_search`; for decoders, SOMP, arXiv 2603.16761, is the closest relative), and the residual
certifies it: a right set leaves rounding, a set with one wrong token thousands of times as much.
In a rotary model, whose inputs do not depend on positions, sentences grow from their beginnings
(`prefix_tree`).

After a mask or pruning, or a step of Adam, rows are completed first (`completion`). If too few
rows of queries and keys can be completed, the last block groups the pairs (`paired_texts`). What
noise is left in each output is known then, and outputs count in units of it.

The sentences that the model's own gradient confirms (`certificate`) are subtracted from the update,
and the rest is read anew: tokens that two sentences shared become seeds. Batch size, lengths and
labels are not used.

Shapes: N tokens of the bag, A atoms, H heads (of queries, then of keys), K head size, D hidden
size, C classes; X: any axes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedleak.attacks import AttackSetting, Show, certificate
from fedleak.attacks.adam_step import BehindAdam, behind_adam
from fedleak.attacks.clock import Clock, Seconds
from fedleak.attacks.reconstruction import Ids, Reconstruction
from fedleak.attacks.subspace.answer import (
    Judged,
    OnJudged,
    Reader,
    Reading,
    by_excess,
    likeliest,
    recovered,
    telling,
)
from fedleak.attacks.subspace.atoms import Atoms, Targets, make_atoms
from fedleak.attacks.subspace.beam_search import Spanned, read_seeds
from fedleak.attacks.subspace.completion import completed
from fedleak.attacks.subspace.dropped_inputs import read_dropped
from fedleak.attacks.subspace.paired_texts import read_pairs
from fedleak.attacks.subspace.pooled_span import PooledSpan
from fedleak.attacks.subspace.prefix_tree import Prefixes, make_prefixes, read_tree
from fedleak.attacks.subspace.span import ACCEPT, margin
from fedleak.models import CLASSIFICATION, LanguageModel, example_losses, pad, target_counts
from fedleak.training.observation import Observation

_WIDER = 4
"""How much wider the beam of the last try is, before the rest of an update is given up."""

_TRIES = 2
"""How often all seeds are tried before the rest of an update is given up."""

_RUNS = (1, 2, 8)
"""Lengths of the runs that a tree of prefixes steps over, of tokens whose gradient is a mixture: a
longer run is tried if shorter ones leave nothing to prove."""

_NOISY_SEEDS = 4
"""Seeds for each text of the batch that are read if noise leaves no sentence certain."""

_TOGETHER = 32
"""Seeds that a GPU reads side by side; a CPU gains more from skipping explained seeds."""

_UNEXPLAINED = 0.3
"""Share of the gradients at its seeds that a sentence may leave, however much noise there is."""

_WORD = 8.0
"""Nats that speak against each word of an end, before the model tells how likely it is."""

_ENDS, _LIKELY_ENDS = 32, 8
"""Ends of a beginning that go through the model under noise; those whose gradients are computed."""


@dataclass(frozen=True)
class Keyspan(Reader):
    """Whole sentences and the exact token bag from the first attention layer's gradients alone.

    Attributes:
        beam: Sets of atoms that grow side by side for one seed.
        seconds: After which what was read so far counts; None: no limit.
    """

    kind: ClassVar[str] = "keyspan"
    uses: ClassVar[frozenset[str]] = frozenset()
    beam: Annotated[int, Field(ge=1)] = 8
    seconds: Seconds | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs the query or the key matrix of the first layer; of a rotary model, the query."""
        if setting.num_layers < 2:
            return "needs 2 layers, and the model has 1: choose another model.name"
        family = setting.family
        # In a rotary model the tree grows by queries; keys only end it.
        names = family.attention_parameters(0)[: 1 if family.position_embedding is None else 2]
        if not setting.shared.intersection(names):
            return (
                f"needs one of {', '.join(names)} itself, and clients send none: see update.share; "
                "with model.lora they train adapters in their place"
            )
        return None

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Reads the first attention layer, and the classifier, which gives labels.

        In a rotary model also the word embedding: without positions its rows are the token bag.
        With positions both embeddings: if dropout hides words and places, their rows show them. In
        a classifier also the last block, which groups words if pruning hides queries.
        """
        family = setting.family
        last = family.modules(setting.num_layers - 1)
        pooled = [name for letter in "ofp" for name in last.get(letter, ())]
        pooled = pooled if setting.task == CLASSIFICATION else []
        return setting.tables | {*family.attention_parameters(0), *family.classifier, *pooled}

    @torch.no_grad()
    def reading(
        self, seen: Observation, model: LanguageModel, rng: torch.Generator, on_progress: Show
    ) -> Reading:
        """Returns the sentences whose keys and queries span the gradients at their tokens."""
        clock, tell = Clock(self.seconds), telling(on_progress, model)
        seen = behind_adam(seen, model) or seen
        observed, size = certificate.as_gradient(seen), seen.update.num_examples
        names = [name for name in model.family.attention_parameters(0) if name in observed]
        mended = completed(model, seen, observed, names)
        if model.family.causal and isinstance(seen, BehindAdam) and mended is None:
            return Reading.none(
                "nothing proved: no row of the first attention can be completed, because a step of "
                "Adam shows too few numbers of it, or embeddings were not sent"
            )
        whole = left = mended.gradients if mended else {name: observed[name] for name in names}
        rotary = model.family.position_embedding is None
        make = make_prefixes if rotary else make_atoms
        most = len(_RUNS) if rotary else _TRIES
        among_N, effort = mended.tokens_N if mended else _looked_up(model, observed), 1
        passes: list[Targets] = []
        passed: dict[Ids, Judged] = {}
        nearest: list[Spanned] = []
        proofs: list[certificate.Proof] = []
        tried: set[tuple[Ids, float]] = set()
        counted = certificate.Counted([], 1.0)
        while (atoms := make(model, left, whole, among_N=among_N, rng=rng)) is not None:
            passes.append(atoms)
            if isinstance(atoms, Prefixes):
                spanned, nearest = read_tree(atoms, _RUNS[effort - 1], clock, tell)
            else:
                seeds = seeds_of(atoms, model.special_ids(), size)
                width = self.beam * _WIDER ** (effort - 1)
                spanned, nearest = read_sentences(atoms, seeds, width, clock, tell)
            linear = certificate.is_linear(seen)
            noisy = isinstance(atoms, Prefixes) and not atoms.span.exact
            likely = _likeliest_first(model, spanned, atoms, tried) if noisy else spanned
            explained = explain(likely, atoms, model, names, clock) if linear else []
            if noisy and not linear:
                spanned = _of_each_seed(likely)
            elif noisy or (isinstance(atoms, Prefixes) and atoms.key is None):
                # Without keys, and under noise, only its own gradient tells where a sentence ends.
                known = {proof.pull.unit.ids for proof in explained}
                if noisy:
                    nearest = [text for text in _of_each_seed(spanned) if text.ids not in known]
                spanned = [sentence for sentence in spanned if sentence.ids in known]
            passed = {**{sentence.ids: sentence for sentence in spanned}, **passed}
            counted = _counted(model, [*proofs, *explained], seen, passes[0])
            new = [*compress(explained, counted.of_pulls[len(proofs) :])]
            proofs = [*compress([*proofs, *explained], counted.of_pulls)]
            if clock.up() or (not new and (effort == most or not (rotary or atoms.span.exact))):
                break
            # A token that these share with others had a sum of gradients: read the rest anew.
            left = {
                name: (g - sum(proof.gradient[name] for proof in new)).where(whole[name] != 0, 0)
                for name, g in left.items()
            }
            if all(left[name].norm() < 2 * noise for name, noise in passes[0].noise.items()):
                break
            effort = 1 if new else effort + 1
            among_N = atoms.bag.tokens_N
        if not passes and not rotary and seen.knowledge.dropout is not False:
            dropped = read_dropped(model, observed, size, self.beam, clock, tell)
            if dropped is not None:
                return dropped
        members = [known for known in counted.of_pulls if known]
        first = passes[0] if passes else None
        if mended and isinstance(first, Atoms) and len(members) < size:
            several = model.task == CLASSIFICATION and size > 1 and first.span.exact
            span = PooledSpan(model, observed, 1.0, size) if several else None
            paired = read_pairs(first, span, size, rng, clock, tell) if span else []
            passed = {**{text.ids: text for text in paired}, **passed}
            if passed:
                members = certificate.explain(model, [*passed], seen, clock) or members
        answer = _answer(passes, list(passed.values()), nearest, members, seen, model, clock)
        # Noise lets a wrong sentence explain a gradient, too.
        certain = members if passes and passes[0].span.exact else []
        if clock.rang:
            late = f"nothing proved in seconds = {self.seconds:g}"
            late += ": sentences that are here are guesses"
            answer = replace(answer.with_diagnostics(time_up=True), reason=answer.reason and late)
        # It blurs the bag, too; where a sentence stands out, so does the bag.
        tokens = (answer.tokens or ()) if answer.verified or passed else ()
        return Reading.of(answer, members=tuple(certain), tokens=tokens, scale=counted.scale)


def seeds_of(atoms: Atoms, special: frozenset[int], batch_size: int) -> list[int]:
    """Returns the tokens that may be seeds, as indices of the bag, the clearest gradient first.

    Args:
        atoms: The dictionary.
        special: Tokens that are in every sentence, so that they are no seeds.
        batch_size: Sentences at most; it limits the work that is spent on noise.
    """
    if atoms.first is not None and not len(atoms.mark()):
        return []  # no sentence can begin
    tokens = atoms.bag.tokens_N.tolist()
    placed = set(atoms.bag_A[atoms.position_A >= atoms.begin].tolist())
    clearest = atoms.clearest()
    seeds = [seed for seed in clearest if seed in placed and tokens[seed] not in special]
    if atoms.span.exact:
        return seeds
    # More tokens than there is room for split no gradient.
    return [] if atoms.span.full else seeds[: _NOISY_SEEDS * batch_size]


def read_sentences(
    atoms: Atoms, seeds: Sequence[int], width: int, clock: Clock, tell: OnJudged
) -> tuple[list[Spanned], list[Spanned]]:
    """Returns the sentences that passed at a seed, and the nearest sentences of the other seeds.

    Args:
        atoms: The dictionary.
        seeds: Indices of the bag.
        width: Of the beam.
        clock: Ends with the seed that is being read, and with the sets that it has.
        tell: Called with the number of seeds explained, the number of all, and each new sentence.
    """
    if seeds and len(atoms.token_A) == atoms.positions and atoms.span.exact:
        # One token for each position: the span alone gives the only sentence, however long.
        ids = atoms.ids(torch.arange(atoms.positions, device=atoms.token_A.device))
        excess, rejected = atoms.bag.worst_accepted, atoms.bag.best_rejected
        return [Spanned(ids=ids, excess=excess, rejected=rejected, seeds=(seeds[0],))], []
    passed: dict[Ids, Spanned] = {}
    nearest: list[Spanned] = []
    tokens, waiting = atoms.bag.tokens_N.tolist(), seeds
    together = 1 if atoms.token_A.is_cpu else _TOGETHER
    while waiting and not clock.up():
        some, waiting = waiting[:together], waiting[together:]
        for sentence in read_seeds(atoms, some, width, clock):
            if sentence.passed:
                passed.setdefault(sentence.ids, sentence)
            else:
                nearest.append(sentence)
            tell(len(seeds) - len(waiting), len(seeds), sentence)
        # A token of a sentence that passed is in it alone, or is no seed at all.
        known = {token for ids in passed for token in ids}
        waiting = [seed for seed in waiting if tokens[seed] not in known]
    return list(passed.values()), sorted(nearest, key=by_excess)


def explain(
    spanned: Iterable[Spanned],
    atoms: Targets,
    model: LanguageModel,
    names: Sequence[str],
    clock: Clock,
) -> list[certificate.Proof]:
    """Returns the sentences whose own gradient at their seeds explains the observed one.

    A seed is of one sentence alone, so the first that explains it is that one.

    Args:
        spanned: Sentences.
        atoms: The dictionary from which they were read.
        model: At the broadcast weights.
        names: Parameters of the first layer's attention that were shared.
        clock: When time is up, the other sentences stay without a proof.
    """
    proofs: list[certificate.Proof] = []
    explained: set[int] = set()
    for sentence in spanned:
        if clock.up():
            break
        if explained.intersection(sentence.seeds):
            continue
        (unit,) = certificate.units(model, [sentence.ids], names)
        # The beginning of a text may begin one that was not read, too.
        for seeds in (sentence.seeds, sentence.seeds[-1:]):
            proof = _explained(unit, atoms, model, [*seeds])
            if proof is not None:
                proofs.append(proof)
                explained.update(seeds)
                break
    return proofs


def _looked_up(model: LanguageModel, observed: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the tokens whose word rows have a gradient; None if all have one, or none is sent."""
    rows_VD = observed.get(model.family.word_embedding)
    used_V = None if rows_VD is None else rows_VD.any(1)
    return None if used_V is None or used_V.all() else used_V.nonzero().flatten()


def _counted(
    model: LanguageModel, proofs: Sequence[certificate.Proof], seen: Observation, atoms: Targets
) -> certificate.Counted:
    """Returns which labels, if any, explain how hard each sentence pulls."""
    pulls, size = [proof.pull for proof in proofs], seen.update.num_examples
    if atoms.span.exact:
        return certificate.counted(model, pulls, size, whole=False)
    # With noise some scale makes anything whole.
    return certificate.Counted([certificate.member(model, *pull, size) for pull in pulls], 1.0)


def _of_each_seed(spanned: Iterable[Spanned]) -> list[Spanned]:
    """Returns the first of the sentences that have the same seeds."""
    return [next(group) for _, group in groupby(spanned, key=lambda sentence: sentence.seeds)]


def _likeliest_first(
    model: LanguageModel, spanned: Sequence[Spanned], atoms: Targets, tried: set[tuple[Ids, float]]
) -> Iterator[Spanned]:
    """Yields the likeliest sentences of those that have the same seeds.

    Their ends differ, of which the gradient at the last seed's key says little under noise.

    Args:
        model: At the broadcast weights.
        spanned: Sentences, those with the same seeds one after the other.
        atoms: The dictionary from which they were read.
        tried: What was yielded before, with the size of the gradient at its seeds; it grows.
    """
    numbers = atoms.target_NHK[0].numel()

    def nats(sentence: Spanned) -> float:
        return -numbers / 2 * sentence.excess**2 - _WORD * len(sentence.ids)

    for seeds, group in groupby(spanned, key=lambda sentence: sentence.seeds):
        # A gradient that has changed was a sum.
        size = round(float(atoms.target_NHK[[*seeds]].norm().log()), 2)
        new = [sentence for sentence in group if (sentence.ids, size) not in tried]
        sentences = sorted(new, key=nats, reverse=True)[:_ENDS]
        nats_N = torch.tensor([nats(sentence) for sentence in sentences])
        if model.task != CLASSIFICATION and sentences:
            ids = [certificate.close(model, sentence.ids) for sentence in sentences]
            ids_NT, mask_NT = pad(ids, model.tokenizer.pad_token_id, model.device)
            loss_N = example_losses(model, ids_NT, mask_NT, mask_NT)
            nats_N -= loss_N.cpu() * torch.tensor(target_counts(model, ids))
        for i in nats_N.topk(min(_LIKELY_ENDS, len(sentences))).indices.tolist():
            tried.add((sentences[i].ids, size))
            yield sentences[i]


def _explained(
    unit: certificate.Units, atoms: Targets, model: LanguageModel, seeds: list[int]
) -> certificate.Proof | None:
    """Returns a sentence's part of the update, if its gradient explains that at all its seeds."""
    system_XC = torch.stack([_at(atoms, model, part, seeds) for part in unit.gradients], 1)
    target_X = atoms.target_NHK[seeds].flatten()
    noise = atoms.noise_NH[seeds].norm() * atoms.target_NHK.shape[-1] ** 0.5
    size = target_X.norm()
    room = (ACCEPT * noise + certificate.PRECISION * size).minimum(_UNEXPLAINED * size)
    return certificate.proof_of(unit, system_XC, target_X, room)


def _at(
    atoms: Targets, model: LanguageModel, gradients: Mapping[str, Tensor], seeds: list[int]
) -> Tensor:
    """Returns a gradient's coefficients of some tokens, in the order of the targets."""
    by_side = model.family.projections(gradients, 0)
    inverse_SD = atoms.bag.inverse_DM[:, seeds].T
    sides = [inverse_SD @ by_side[side].double().T for side in ("query", "key") if side in by_side]
    parts_SHK = torch.cat(sides, 1).reshape(len(seeds), *atoms.target_NHK.shape[1:])
    return (parts_SHK * atoms.weight_HK).flatten()


def _answer(
    passes: Sequence[Targets],
    passed: Sequence[Judged],
    nearest: Sequence[Judged],
    members: Sequence[certificate.Member],
    seen: Observation,
    model: LanguageModel,
    clock: Clock,
) -> Reconstruction:
    """Returns the sentences that passed, then the nearest of the other seeds.

    A batch is verified only if all of it is known; then the answer holds nothing else.
    """
    if not passes:
        return Reconstruction.abstained(
            "nothing proved: the gradients' row space has no end, or has no room for tokens "
            f"(distinct tokens + learned positions + 1 must stay below the hidden size, "
            f"{model.hidden_size})",
        )
    first = passes[0]
    verdict = certificate.verify(model, members, seen, clock)
    sequences = likeliest(passed, nearest, verdict, seen.update.num_examples)
    reason = "" if passed else "nothing proved: tokens and sentences are the likeliest ones"
    if passed and not first.span.exact and not verdict.verified:
        reason = "nothing proved: noise or rounding lets wrong sentences pass, too"
    elif reason and first.span.full:
        reason = (
            "nothing proved: there are more tokens than the hidden size "
            f"({model.hidden_size}), so that these are the likeliest and no sentence is sought"
        )
    diagnostics: dict[str, Any] = {
        "rank": first.span.rank,
        "budget": list(first.bag.basis_MD.shape),
        "candidates": {
            "tokens": len(first.bag.tokens_N),
            "pairs": len(first.token_A) if isinstance(first, Atoms) else len(first.bag.tokens_N),
            "spanned": len(passed),
            "proved": len(members),
        },
        "token_margin": margin(first.bag.worst_accepted, first.bag.best_rejected),
        "passes": len(passes),
    }
    tokens = first.bag.tokens_N.tolist()
    return recovered(sequences, verdict, tokens=tokens, diagnostics=diagnostics, reason=reason)
