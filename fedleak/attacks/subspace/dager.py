"""DAGER: exact recovery of a batch from the span of attention gradients.

Petrov et al., "DAGER: Exact Gradient Inversion for Large Language Models", NeurIPS 2024
(arXiv 2405.15586). Departures from the authors' code:

- All of the query, key and value gradients that were shared define the span, and the rank of each
  layer is read from its own spectrum; the authors fix absolute thresholds per batch size.
- Membership is judged by a residual in units of what rounding can cause (`span.Span.excess`).
- Decoders: the attention output matrix gives a third span (`decoder_search`).
- Encoders: iterated local search over the candidates of each position (`encoder_search`) instead
  of a random draw of 10^7 sentences, until the sentences found hold as many tokens as the second
  layer has rank.
- Behind a step of Adam of a decoder, whose numbers each have noise of their own, the spans of
  several layers are fitted, and texts are chosen by their gradients (`depth_search`).
- The tokens of adapters that earlier rounds trained are found by sparse Bayesian learning, also
  where they are more than the rows, and one text's order by its positions (`sparse_bayes`). A
  decoder's texts behind a step of Adam are sought among these tokens, and next-token texts are
  checked one by one (`bag_search`).
- For adapters in their first round, the gradients of the second matrices have the spans: of inputs
  times the first matrices (`span.ProjectedSpan`).
- Batch size, lengths and labels are not used.

Shapes: N tokens, A pairs of a token and a position.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedleak.attacks import AttackSetting, Show, certificate, replay
from fedleak.attacks.adam_step import BehindAdam, behind_adam
from fedleak.attacks.clock import Clock, Seconds
from fedleak.attacks.measured_gradient import MeasuredGradient, measured
from fedleak.attacks.subspace.answer import (
    Judged,
    OnJudged,
    Reader,
    Reading,
    SpanSearch,
    by_excess,
    lacks_two_layers,
    ranked,
    recovered,
    telling,
)
from fedleak.attacks.subspace.bag_search import texts_of_bag
from fedleak.attacks.subspace.decoder_search import (
    at_all_places,
    extend_prefixes,
    first_inputs,
    without_runs,
)
from fedleak.attacks.subspace.depth_search import adapters_of, layer_rows, read_depths
from fedleak.attacks.subspace.encoder_search import Effort, search_sentences
from fedleak.attacks.subspace.placed_texts import texts_of_places
from fedleak.attacks.subspace.span import (
    ACCEPT,
    REPEATS,
    ProjectedSpan,
    Span,
    layer_spans,
)
from fedleak.attacks.subspace.sparse_bayes import placed_text, sparse_tokens
from fedleak.attacks.subspace.token_bag import pairs, read_token_bag
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel
from fedleak.models.family import LORA_A, lora_a, lora_b, with_adapters
from fedleak.training.observation import Observation

_NOISY = 4
"""Part of the time for rows that may have noise, which takes long to show."""

_EXPLAINED = "nothing proved: these texts explain most"
_ALONE = "nothing proved: each text explains what its tokens have in the first layer's adapters"
_TOKENS = "nothing proved: these tokens alone explain the adapters of the first layer"
_NOISE = "nothing proved: these tokens explain the adapters of the first layer but for noise"


@dataclass(frozen=True, kw_only=True)
class Dager(Reader):
    """Exact token sequences from the first two layers' attention gradients.

    Attributes:
        enumerate_up_to: An encoder's sentences of one length are all tried up to this many.
        searches: Else, local searches that run side by side.
        kicks: Times that they are shaken, without finding anything new, before giving up.
        certify: Recompute the gradient, for labels, repeated texts and a proof of the whole batch.
        seconds: After which what was found so far counts; None: no limit.
    """

    kind: ClassVar[str] = "dager"
    uses: ClassVar[frozenset[str]] = frozenset()
    enumerate_up_to: Annotated[int, Field(ge=1)] = 512
    searches: Annotated[int, Field(ge=1)] = 4
    kicks: Annotated[int, Field(ge=0)] = 32
    certify: bool = True
    seconds: Seconds | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs gradients of attention weights, or of their adapters, of the first two layers."""
        return lacks_two_layers(setting)

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Reads the matrices that give the spans, and the classifier, which gives labels.

        Of a decoder also the adapters of all layers, which tell more behind a step of Adam.
        """
        family = setting.family
        inputs = (*family.attention_parameters(0), *family.attention_parameters(1))
        deep = range(2, setting.num_layers if family.causal else 2)
        deeper = [name for layer in deep for name in family.attention_parameters(layer)]
        second = {lora_b(name) for name in (*inputs, *deeper)} | {lora_a(name) for name in deeper}
        return with_adapters((*inputs, *family.modules(0)["o"])) | second | {*family.classifier}

    @torch.no_grad()
    def reading(
        self, seen: Observation, model: LanguageModel, rng: torch.Generator, on_progress: Show
    ) -> Reading:
        """Returns the sequences whose every token passes both layers' span checks.

        Their multiplicities, and a proof, are returned where the gradient gives them.
        """
        clock, tell = Clock(self.seconds), telling(on_progress, model)
        behind, gradients = behind_adam(seen, model), certificate.as_gradient(seen)
        spans = None if behind else layer_spans(model, gradients)
        if spans is None or not (spans.first.exact and spans.second.exact):
            by_rows = _by_rows(model, seen, behind or measured(seen, gradients), clock, tell)
            if by_rows is not None:
                return by_rows
        if spans is None:
            return Reading.none(
                "nothing proved: the gradients' row space has no end above their noise, or holds "
                f"as many tokens as the hidden size ({model.hidden_size}) or an adapter's rank",
            )
        # Except for repetitions, no sequence is longer than the rank of the second layer's inputs.
        slots = candidates(model, spans.first, rng, clock)[: spans.second.rank + REPEATS]
        block, wanted = model.family.first_block(model.module), seen.update.num_examples
        search = SpanSearch(slots, block, spans, wanted, rng, clock, tell)
        if model.family.causal:
            sentences = without_runs(extend_prefixes(search), model)
        else:
            effort = Effort(self.enumerate_up_to, self.searches, self.kicks)
            sentences = search_sentences(search, model.tokenizer.sep_token_id, effort)
        exact = spans.second.exact
        passed = [sentence for sentence in sentences if exact and sentence.excess < ACCEPT]
        diagnostics: dict[str, Any] = {
            "rank": [spans.first.rank, spans.second.rank],
            "budget": [spans.second.rank, model.hidden_size],
            "candidates": {"pairs": sum(map(len, slots)), "passed": len(passed)},
        }
        if not sentences:
            reason = "nothing proved: no sequence passes the second layer's check"
            if clock.rang:
                reason = f"nothing passed in seconds = {self.seconds:g}: give it more"
            return Reading.none(reason, **diagnostics, **clock.late())
        ids = [sentence.ids for sentence in passed] if self.certify else []
        verdict = certificate.judge(model, ids, seen, clock)
        diagnostics |= clock.late()
        # Only the gradient tells a sequence that begins another, or that occurs twice.
        known = {sentence.ids for sentence in sentences}
        begun = []
        for text in verdict.repeats:
            if text not in known:
                longer = [sentence for sentence in sentences if sentence.ids[: len(text)] == text]
                begun.append(replace(min(longer, key=by_excess), ids=text))
        # Noise lets any number of them pass.
        sequences = ranked([*sentences, *begun], verdict, wanted)
        reason = "" if passed else "nothing proved: these are the likeliest sequences"
        return Reading.of(recovered(sequences, verdict, diagnostics=diagnostics, reason=reason))


def _by_rows(
    model: LanguageModel,
    seen: Observation,
    gradient: MeasuredGradient,
    clock: Clock,
    tell: OnJudged,
) -> Reading | None:
    """Returns the tokens that rows of adapters are mixes of, and their texts; None: nothing shows.

    One text is read in order by its positions if the model has them, and else a decoder's texts
    behind a step of Adam are. If that proves nothing, texts are sought one by one.
    """
    names, bag, texts, share = adapters_of(model, gradient, 0), None, list[Judged](), clock
    if names and names[0].endswith(LORA_A):  # earlier rounds have trained it
        matrix, _, _ = layer_rows(model, gradient, 0)
        known = isinstance(gradient, BehindAdam)
        share = clock if known or gradient.divided else clock.part(_NOISY)
        bag = sparse_tokens(model, matrix, share, divided=gradient.divided)
    text = placed_text(bag) if bag is not None and gradient.update.num_examples == 1 else None
    if bag is not None and text is not None:
        texts = [Judged(text, bag.noise, math.inf)]
    elif model.family.causal and isinstance(gradient, BehindAdam):
        texts = read_depths(model, gradient, bag, clock, tell) or []
    if not texts and bag is None:
        return None
    tokens_only = _NOISE if bag is not None and bag.noise else _TOKENS
    reason = _EXPLAINED if texts else tokens_only
    # The texts of several steps have gradients at weights of their own.
    one_by_one = model.task == CAUSAL_LM and seen.knowledge.local_steps in (None, 1)
    alone = list[Judged]()
    if bag is not None and one_by_one and not _proved(model, texts, seen, clock):
        alone = texts_of_bag(model, gradient, bag, clock, tell)
    elif bag is not None and not texts and model.task == CLASSIFICATION and not gradient.divided:
        alone = texts_of_places(model, gradient, bag, clock, tell)
    texts, reason = (alone, _ALONE) if alone else (texts, reason)
    verdict = certificate.judge(model, [text.ids for text in texts], seen, clock)
    if verdict.verified:  # also a text that occurs again, or begins another, and was read once
        judged = {text.ids: text for text in texts}
        texts = [
            replace(judged.get(ids, texts[0]), ids=ids)
            for ids, times in verdict.repeats.items()
            for _ in range(times)
        ]
    diagnostics: dict[str, Any] = clock.late() | share.late()
    if bag is not None:
        diagnostics |= {"rows": bag.token_NO.shape[1], "noise": bag.noise}
    answer = recovered(
        texts,
        verdict,
        tokens=None if bag is None or verdict.verified else bag.told_apart,
        diagnostics=diagnostics,
        reason=reason,
    )
    if bag is None:
        return Reading.of(answer)
    answer = answer if texts else replace(answer, sequences=None)
    return Reading.of(answer, tokens=bag.candidates, named=bag.told_apart)


def _proved(model: LanguageModel, texts: Sequence[Judged], seen: Observation, clock: Clock) -> bool:
    """Whether a gradient, or a client's steps, prove texts; what is proved is remembered."""
    ids = [text.ids for text in texts]
    if certificate.judge(model, ids, seen, clock).verified:
        return True
    made = replay.replay(model, ids, seen, clock.left())
    return made is not None and made.verified


def candidates(
    model: LanguageModel, span: Span, rng: torch.Generator, clock: Clock
) -> list[Tensor]:
    """Returns for each position the tokens that may stand there.

    The token bag is read first, because that takes one look at the vocabulary; beyond its budget
    each position takes a look. A rotary model's first inputs do not depend on positions.
    """
    table = model.family.token_table(model.module)
    # The input that an adapter projects is no sum of rows.
    projected = isinstance(span, ProjectedSpan)
    bag = None if projected else read_token_bag(table.directions(), span, rng)
    if bag is None:
        rotary = table.position_PD is None
        return [] if rotary and not projected else first_inputs(model, span, rng, clock)
    if table.position_PD is None:
        return at_all_places(model, bag.tokens_N)
    bag_A, position_A = pairs(table, bag, span)
    return [bag.tokens_N[bag_A[position_A == p]] for p in range(bag.positions)]
