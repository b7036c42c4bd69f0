import itertools
import json
import math
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch
from cases import some
from hypothesis import given
from hypothesis import strategies as st

from fedleak import models
from fedleak.attacks import AttackSetting, certificate
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace import dager, decoder_search, encoder_search, placed_texts
from fedleak.attacks.subspace.answer import Judged, SpanSearch
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.decoder_search import attend_next, extend_prefixes, without_runs
from fedleak.attacks.subspace.encoder_search import (
    Effort,
    Sentences,
    search_length,
    search_sentences,
)
from fedleak.attacks.subspace.span import (
    ACCEPT,
    REPEATS,
    LayerSpans,
    ProjectedSpan,
    layer_spans,
    row_space,
    tokens_in_span,
)
from fedleak.models import CAUSAL_LM, CLASS_LOSSES, CLASSIFICATION, ModelSpec, loading
from fedleak.models.llama import Llama
from fedleak.models.lora import Lora
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]
ROTARY = [("llama", CLASSIFICATION), ("llama", CAUSAL_LM)]
ALL = KINDS + ROTARY
ENDLESS = Clock(None)


def unheard(step, steps, best):
    """Progress that nobody asked for."""


def answer_of(model, seen, attack=None):
    """Runs the attack, and checks what its every answer owes."""
    answer = (attack or Dager())(seen, model, rng=stream(0, "dager"))
    json.dumps(asdict(answer), allow_nan=False)
    assert answer.status in (Status.RECOVERED, Status.ABSTAINED)
    assert len(answer.evidence) == len(answer.margins) == len(answer.sequences or ())
    if answer.status == Status.RECOVERED:  # Of adapters the tokens may be all that is read.
        assert answer.tokens
        named = {t for ids in answer.sequences or [answer.tokens] for t in ids}
        assert answer.tokens == tuple(sorted(named))
    if answer.verified:
        assert len(answer.sequences) == seen.update.num_examples
        assert certificate.proves(model, answer.sequences, seen), "a worker would not believe it"
    return answer


def scored(model, truth):
    """The tokens that something flows through: the last target is no input."""
    end = -1 if model.task == CAUSAL_LM else None
    return sorted(tuple(ids[:end]) for ids in truth.sequences)


def assert_exact(answer, model, truth):
    assert sorted(answer.sequences) == scored(model, truth)
    assert max(answer.evidence) < ACCEPT
    assert all(margin is None or margin > 10 for margin in answer.margins)
    assert answer.verified
    assert not answer.reason


def with_tensors(seen, change):
    tensors = {name: change(value) for name, value in seen.update.tensors.items()}
    return replace(seen, update=replace(seen.update, tensors=tensors))


def noisy(seen, relative, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return with_tensors(
        seen, lambda g: g + relative * g.std() * torch.randn(g.shape, generator=rng)
    )


@given(
    st.integers(0, 4), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2]), st.integers(0)
)
def test_attending_with_shared_keys_is_full_softmax_attention(past, prefixes, candidates, h, seed):
    rng = torch.Generator().manual_seed(seed % 2**40)
    q, k, v = (torch.randn(candidates, h, 5, generator=rng) for _ in range(3))
    past_k, past_v = (torch.randn(prefixes, past, h, 5, generator=rng) for _ in range(2))
    attended = attend_next(q, k, v, past_k, past_v)
    assert attended.shape == (prefixes, candidates, h * 5)
    for b, n in itertools.product(range(prefixes), range(candidates)):
        for head in range(h):
            keys = torch.cat([past_k[b, :, head], k[n, head][None]])
            values = torch.cat([past_v[b, :, head], v[n, head][None]])
            weights = torch.softmax(keys @ q[n, head] / math.sqrt(5), 0)
            expected = weights @ values
            torch.testing.assert_close(attended[b, n, head * 5 : head * 5 + 5], expected)


@pytest.fixture
def sentences(small, observe):
    """The candidates of one short sentence, widened so that there is something to search."""
    model = small("bert", width=48, layers=3)
    truth = observe(model, 1, max_length=6)
    tensors = truth.seen.update.tensors
    spans = layer_spans(model, tensors)
    table = model.family.token_table(model.module)
    slots = tokens_in_span(table, spans.first, stream(0, "sketch"), ENDLESS)
    assert [ids.tolist() for ids in slots] == [[token] for token in truth.sequences[0]]
    slots = [torch.cat([ids, torch.tensor([11, 12])]) for ids in slots]

    def make(mixed=spans.mixed):
        block = model.family.first_block(model.module)
        with torch.no_grad():
            return Sentences(slots, block, replace(spans, mixed=mixed), stream(0, "null"))

    return make, model, truth.sequences[0]


@torch.no_grad()
def test_sentences_in_parts_give_the_second_attention_input_of_the_model(sentences):
    make, model, _ = sentences
    candidates = make()
    picks = candidates.all()
    assert len(picks) == candidates.count == 3**6 == len(set(map(tuple, picks.tolist())))
    name = model.family.attention_parameters(1)[0].rpartition(".")[0]
    recorded = []
    hook = model.module.get_submodule(name).register_forward_pre_hook(
        lambda _, inputs: recorded.append(inputs[0])
    )
    ids = torch.tensor([candidates.ids(pick) for pick in picks[::50]])
    model.family.logits(model.module, torch.ones_like(ids), ids_BT=ids, embeds_BTD=None)
    hook.remove()
    torch.testing.assert_close(
        candidates.second_inputs(picks[::50]), recorded[0], atol=2e-5, rtol=1e-4
    )


@torch.no_grad()
@pytest.mark.parametrize("pruned", [True, False])
def test_only_the_true_sentence_of_all_passes_and_a_descent_finds_it(sentences, pruned):
    make, _, truth = sentences
    candidates = make() if pruned else make(mixed=None)
    judged = candidates.judge(candidates.all())
    assert [sentence.ids for sentence in judged] == [
        candidates.ids(picks) for picks in candidates.all()
    ]
    assert [sentence.ids for sentence in judged if sentence.excess < ACCEPT] == [truth]
    cost = candidates.cost(candidates.all())
    assert candidates.ids(candidates.all()[cost.argmin()]) == truth
    start = candidates.start([], 6, stream(0, "start"))
    picks, arrived = candidates.descend(start, stream(0, "descend"), ENDLESS)
    assert (arrived <= candidates.cost(start)).all()
    torch.testing.assert_close(arrived, candidates.cost(picks))
    for r, t, c in itertools.product(range(6), range(6), range(3)):
        other = picks[r].clone()
        other[t] = c
        assert candidates.cost(other[None])[0] >= arrived[r] * (1 - 1e-4)
    assert truth in [candidates.ids(pick) for pick in picks]


@torch.no_grad()
@pytest.mark.parametrize("pruned", [True, False])
def test_the_cost_of_each_candidate_is_that_of_its_sentence_from_scratch(sentences, pruned):
    make, _, _ = sentences
    candidates = make() if pruned else make(mixed=None)
    picks = candidates.start([], 5, stream(0, "start"))
    for t in range(6):
        costs = candidates.costs_at(picks, t)
        assert costs.shape == (5, len(candidates.slots[t]))
        for r, c in itertools.product(range(5), range(len(candidates.slots[t]))):
            trial = picks[r].clone()
            trial[t] = c
            torch.testing.assert_close(costs[r, c], candidates.cost(trial[None])[0])


@torch.no_grad()
@pytest.mark.parametrize("pruned", [True, False])
def test_a_cost_is_the_mean_distance_from_the_null_space_of_what_is_cheapest_to_see(
    sentences, pruned
):
    make, _, _ = sentences
    candidates = make() if pruned else make(mixed=None)
    picks = candidates.all()[::50]
    x_BTD = candidates.mixed(picks) if pruned else candidates.second_inputs(picks)
    expected = (x_BTD @ candidates.null_DS).norm(dim=-1).mean(-1)
    torch.testing.assert_close(candidates.cost(picks), expected)
    span = candidates.spans.mixed if pruned else candidates.spans.second
    assert (candidates.null_DS.double().T @ span.basis_DR).norm() < 1e-5


@torch.no_grad()
def test_a_margin_is_that_of_the_nearest_sentence_one_token_away(sentences):
    make, _, truth = sentences
    candidates = make()
    judged = {sentence.ids: sentence.excess for sentence in candidates.judge(candidates.all())}
    sentence = candidates.with_margin(Judged(truth, judged[truth], math.inf))
    away = [
        excess
        for ids, excess in judged.items()
        if sum(a != b for a, b in zip(ids, truth, strict=True)) == 1
    ]
    assert (sentence.ids, sentence.excess) == (truth, judged[truth])
    assert len(away) == 12
    assert sentence.rejected == pytest.approx(min(away))
    assert sentence.rejected > 100 * ACCEPT


@torch.no_grad()
@pytest.mark.parametrize("ticks", [0, 1, 4])
def test_a_descent_ends_with_what_it_has_when_time_is_up(sentences, ticking, ticks):
    make, _, _ = sentences
    candidates = make()
    start = candidates.start([], 6, stream(0, "start"))
    work = ticking(dager, ticks, (Sentences, "costs_at"))
    picks, cost = candidates.descend(start, stream(0, "descend"), work.clock)
    assert (work.before, work.after) == (ticks, 0)
    torch.testing.assert_close(cost, candidates.cost(picks))
    assert (cost <= candidates.cost(start)).all()


@torch.no_grad()
@pytest.mark.parametrize(("enumerate_up_to", "ticks"), [(10**6, 0), (10**6, 2), (1, 0), (1, 30)])
def test_a_search_of_one_length_ends_with_its_nearest_when_time_is_up(
    sentences, ticking, monkeypatch, enumerate_up_to, ticks
):
    make, _, _ = sentences
    candidates = make()
    monkeypatch.setattr(encoder_search, "JUDGED_AT_ONCE", 100)
    work = ticking(dager, ticks, (Sentences, "costs_at"), (Sentences, "judge"))
    effort = Effort(enumerate_up_to, searches=4, kicks=10**6)
    passed, nearest = search_length(candidates, effort, stream(0, "search"), work.clock)
    assert work.after <= 1  # where a descent ended is judged
    assert work.before <= ticks + 1
    assert nearest.excess < math.inf
    assert all(sentence.excess < ACCEPT for sentence in passed)


@pytest.mark.parametrize(("family", "task"), ROTARY)
def test_a_sequence_and_its_last_target_fit_the_model(small, observe, family, task):
    model = small(family, task)
    spans = layer_spans(model, observe(model, ["she said so"]).seen.update.tensors)
    slots = dager.candidates(model, spans.first, stream(0, "dager"), ENDLESS)
    assert len(certificate.close(model, range(len(slots)))) == model.max_length


@torch.no_grad()
def test_of_all_that_noise_lets_pass_only_those_answered_get_a_margin(sentences, monkeypatch):
    make, model, _ = sentences
    tried = make()
    noisy_span = replace(tried.spans.second, floor=1.0, exact=False)
    with_margin, margined = Sentences.with_margin, []
    monkeypatch.setattr(
        Sentences,
        "with_margin",
        lambda self, sentence: margined.append(sentence.ids) or with_margin(self, sentence),
    )
    spans = LayerSpans(tried.spans.first, noisy_span, None)
    search = SpanSearch(tried.slots, tried.block, spans, 2, stream(0, "x"), ENDLESS, unheard)
    effort = Effort(enumerate_up_to=512, searches=4, kicks=32)
    passing = search_sentences(search, model.tokenizer.sep_token_id, effort)
    assert len(passing) == 3**5
    assert margined == [
        sentence.ids for sentence in sorted(passing, key=lambda sentence: sentence.excess)[:2]
    ]


def test_kicks_and_starts_stay_among_the_candidates(sentences):
    make, _, truth = sentences
    candidates = make()
    picks = candidates.start([truth], 200, stream(0, "start"))
    kicked = candidates.kick(picks, stream(0, "kick"))
    for t, ids in enumerate(candidates.slots):
        assert set(picks[:, t].tolist()) | set(kicked[:, t].tolist()) <= set(range(len(ids)))
        # What a found sentence uses is rarer.
        used = float((ids[picks[:, t]] == truth[t]).float().mean())
        assert used < 0.25
    assert float((kicked != picks).float().mean()) > 0


# --- prefixes -------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize(("family", "task"), ALL[1:])
def test_prefixes_grow_to_the_true_sentences_among_any_candidates(
    small, observe, family, task, pruned
):
    model = small(family, task, width=64, layers=3)
    with torch.enable_grad():
        truth = observe(model, 3, max_length=8)
    tensors = truth.seen.update.tensors
    block, spans = model.family.first_block(model.module), layer_spans(model, tensors)
    if not pruned:
        spans = replace(spans, mixed=None)
    wanted = scored(model, truth)
    strangers = set(range(50, 60))
    slots = [
        torch.tensor(sorted({ids[p] for ids in wanted if p < len(ids)} | strangers))
        for p in range(max(map(len, wanted)))
    ]

    def grow(slots):
        rng = stream(0, "grow")
        return extend_prefixes(SpanSearch(slots, block, spans, 3, rng, ENDLESS, unheard))

    grown = grow(slots)
    assert sorted(sentence.ids for sentence in grown) == wanted
    assert all(isinstance(sentence, Judged) and sentence.excess < ACCEPT for sentence in grown)
    # A candidate that is missing cuts the sentences that need it, and no others.
    gone = wanted[0][3]
    slots[3] = slots[3][slots[3] != gone]
    grown = grow(slots)
    cut = {ids[:3] if ids[3:4] == (gone,) else ids for ids in wanted}
    assert {sentence.ids for sentence in grown} == cut


@pytest.mark.core
def test_searching_finds_what_trying_all_finds(small, observe):
    model = small("bert", width=64, layers=3)
    truth = observe(model, 2, max_length=9)
    tried = answer_of(model, truth.seen, Dager(enumerate_up_to=10**6))
    searched = answer_of(model, truth.seen, Dager(enumerate_up_to=1))
    assert_exact(tried, model, truth)
    assert_exact(searched, model, truth)


# --- whole attacks --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    """Built-in models by name and task."""
    return {
        (name, task): loading.load(ModelSpec(name=f"builtin/{name}-tiny", task=task, num_labels=2))
        for name, task in ALL
    }


@pytest.mark.parametrize(
    ("family", "task", "batch"),
    some([(*kind, batch) for kind in ALL[1:] for batch in (1, 2, 3, 4)], every=3),
)
def test_decoders_are_read_exactly_but_for_the_last_token_that_has_no_target(
    tiny, observe, texts, family, task, batch
):
    model = tiny[family, task]
    truth = observe(model, texts[10 : 10 + batch])
    assert_exact(answer_of(model, truth.seen), model, truth)


@pytest.mark.core
@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bert_is_read_exactly(bert_tiny, observe, texts, batch):
    truth = observe(bert_tiny, texts[20 : 20 + batch])
    assert_exact(answer_of(bert_tiny, truth.seen), bert_tiny, truth)


@pytest.mark.parametrize("loss", sorted(CLASS_LOSSES))
@pytest.mark.parametrize(("family", "task"), [*KINDS[:2], ROTARY[0]])
def test_the_loss_of_a_classifier_does_not_matter(small, observe, family, task, loss):
    model = replace(small(family, task, width=64, layers=3), class_loss=CLASS_LOSSES[loss])
    truth = observe(model, 3, max_length=8)
    assert_exact(answer_of(model, truth.seen), model, truth)


@pytest.mark.parametrize(
    ("family", "task", "std"),
    some([(*kind, std) for std in (1e-3, 0.02, 0.2) for kind in (*KINDS[:2], ROTARY[0])], every=2),
)
def test_the_size_of_the_classifier_does_not_matter(small, observe, family, task, std):
    model = small(family, task, width=64, layers=3)
    head = model.module.get_parameter(model.family.classifier[0])
    head.data.mul_(std / head.std().item())
    truth = observe(model, 3, max_length=8)
    assert_exact(answer_of(model, truth.seen), model, truth)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("task", [CLASSIFICATION, CAUSAL_LM])
def test_query_heads_may_share_keys_and_values(small, observe, task, kv_heads):
    model = small("llama", task, width=64, layers=3, kv_heads=kv_heads)
    truth = observe(model, 3, max_length=8)
    assert_exact(answer_of(model, truth.seen), model, truth)


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("task", [CLASSIFICATION, CAUSAL_LM])
def test_the_activation_does_not_matter(small, observe, task, activation):
    model = small("gpt2", task, width=64, layers=3, activation_function=activation)
    truth = observe(model, 3, max_length=8)
    assert_exact(answer_of(model, truth.seen), model, truth)


SHORT = [
    ["nobody"],
    ["nobody", "knows"],
    ["nobody knows", "nobody knows", "he pays"],
    ["nobody knows", "nobody knows"],
    ["nobody knows that we pay", "nobody knows"],
    ["pay", "pay pay", "pay pay pay"],
]


@pytest.mark.parametrize(
    ("family", "task", "texts"),
    some([(*kind, texts) for texts in SHORT for kind in ALL], every=3),
)
def test_short_repeated_and_beginning_texts_are_read(small, observe, family, task, texts):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, texts)
    assert_exact(answer_of(model, truth.seen), model, truth)


def test_without_a_certificate_repeated_and_beginning_texts_are_missed(small, observe):
    model = small("gpt2", width=64, layers=3)
    truth = observe(model, ["nobody knows that we pay", "nobody knows", "he pays", "he pays"])
    answer = answer_of(model, truth.seen, Dager(certify=False))
    begun = tuple(model.encode(["nobody knows"])[0])
    assert sorted(answer.sequences) == sorted(set(scored(model, truth)) - {begun})
    assert not answer.verified
    assert_exact(answer_of(model, truth.seen), model, truth)


PATTERNS = [
    ["query.weight", "c_attn.weight", "q_proj", "v_proj"],
    ["value.weight", "output.dense", "attn", "v_proj", "o_proj"],
    ["key.weight", "value.weight", "c_attn.weight", "k_proj", "v_proj"],
]


@pytest.mark.parametrize(
    ("family", "task", "patterns"),
    some([(*kind, patterns) for patterns in PATTERNS for kind in ALL], every=2),
)
def test_part_of_the_attention_is_enough(small, observe, family, task, patterns):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, 2, max_length=8)
    seen = replace(truth.seen, update=partial_update(truth.seen.update, patterns))
    answer = answer_of(model, seen)
    assert sorted(set(answer.sequences)) == scored(model, truth)


@pytest.mark.core
@pytest.mark.parametrize(
    ("scale", "family", "task"),
    some([(scale, *kind) for scale in (1e-4, 1e4) for kind in ALL], every=2),
)
def test_the_scale_of_the_update_changes_nothing(small, observe, family, task, scale):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, 2, max_length=8)
    plain = answer_of(model, truth.seen)
    scaled = answer_of(model, with_tensors(truth.seen, lambda value: scale * value))
    assert_exact(plain, model, truth)
    assert sorted(scaled.sequences) == scored(model, truth)
    assert scaled.verified
    assert scaled.diagnostics["scale"] == pytest.approx(scale, rel=1e-4)


# --- what is repeated -----------------------------------------------------------------------


def test_a_run_of_one_token_is_that_token_unless_it_begins_another_text(llama_tiny):
    judged = [Judged(ids, 0.0, math.inf) for ids in ((7, 7, 7), (9, 9), (9, 4), (5,), (6, 5))]
    kept = without_runs(judged, llama_tiny)
    assert [sentence.ids for sentence in kept] == [(9, 4), (6, 5), (7,), (5,)]


class Unmarked(Llama):
    """A LLaMA whose tokenizer adds no token that begins every text."""

    def encode(self, tokenizer, texts, task):
        return [ids[1:] for ids in super().encode(tokenizer, texts, task)]


@pytest.fixture
def unmarked(small):
    """Makes such a model, of many positions."""

    def make(task):
        model = small("llama", task, width=64, layers=3)
        model.module.config.max_position_embeddings = 1024
        return replace(model, family=Unmarked())

    return make


UNMARKED = [
    ["nobody knows that we pay"],
    ["nobody knows that we pay", "he pays"],
    ["we pay for it", "they pay", "they know it", "nobody knows"],
    ["pay pay pay pay for it", "they pay"],
    ["pay pay pay pay for it", "pay pay for it"],
    ["they pay", "they pay for it"],
]


@pytest.mark.parametrize(
    ("task", "texts"), some(product([CLASSIFICATION, CAUSAL_LM], UNMARKED), every=3)
)
def test_without_a_first_mark_the_search_ends_and_finds_the_texts(
    unmarked, observe, monkeypatch, task, texts
):
    model, steps = unmarked(task), []
    step = decoder_search.attend_next

    def counted(*inputs):
        steps.append(1)
        assert len(steps) < 500, "it goes on and on"
        return step(*inputs)

    monkeypatch.setattr(decoder_search, "attend_next", counted)
    truth = observe(model, texts)
    answer = answer_of(model, truth.seen)
    assert_exact(answer, model, truth)
    assert len(steps) <= answer.diagnostics["rank"][1] + REPEATS


@pytest.mark.slow
def test_how_often_a_text_of_one_token_repeats_it_is_not_proved_to_a_classifier(unmarked, observe):
    model = unmarked(CLASSIFICATION)
    (token,) = model.encode(["pay"])[0]
    gradients = []
    for text in ("pay", "pay pay", "pay pay pay pay pay"):
        truth = observe(model, [text])
        gradients.append(truth.seen.update.tensors)
        answer = answer_of(model, truth.seen)
        assert answer.sequences == ((token,),)
        assert answer.diagnostics["gradient_difference"] < certificate.PRECISION
        assert not answer.verified
    # Nothing tells: it is the same update.
    for other in gradients[1:]:
        for name, value in gradients[0].items():
            torch.testing.assert_close(value, other[name], atol=1e-6, rtol=1e-3)


@pytest.mark.slow
def test_next_token_training_tells_one_token_from_its_repetitions(unmarked, observe):
    model = unmarked(CAUSAL_LM)
    (token, _) = model.encode(["pay"])[0]
    for text, verified in (("pay", True), ("pay pay", False), ("pay pay pay", False)):
        answer = answer_of(model, observe(model, [text]).seen)
        assert answer.sequences == ((token,),)
        assert answer.verified == verified


@pytest.mark.parametrize("begun", ["pay", "pay pay"])
def test_a_run_that_begins_another_text_is_found_and_not_proved(unmarked, observe, begun):
    model = unmarked(CLASSIFICATION)
    truth = observe(model, ["pay pay pay for it", begun])
    answer = answer_of(model, truth.seen)
    assert sorted(answer.sequences) == sorted(
        tuple(model.encode([text])[0]) for text in ("pay pay pay for it", "pay")
    )
    assert not answer.verified


# --- time -----------------------------------------------------------------------------------

WORK = (
    (decoder_search, "attend_next"),
    (Sentences, "costs_at"),
    (Sentences, "judge"),
    (certificate, "units"),
    (certificate, "difference"),
)


@pytest.mark.parametrize(
    ("family", "task", "ticks"),
    some(
        [(*kind, n) for kind in ALL for n in (0, 1, 3, 6, 10, 20, 40, 80, math.inf)],
        every=4,
    ),
)
def test_when_time_is_up_what_was_found_counts(small, observe, ticking, family, task, ticks):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, 2, max_length=8)
    work = ticking(dager, ticks, *WORK)
    answer = answer_of(model, truth.seen, Dager(enumerate_up_to=1, seconds=7))
    assert work.after <= 4
    assert answer.diagnostics.get("time_up", False) == work.clock.rang
    if not work.clock.rang:
        assert_exact(answer, model, truth)
    if ticks == 0:
        assert work.before == 0
        assert answer.reason == "nothing passed in seconds = 7: give it more"
    if answer.status == Status.ABSTAINED:
        assert "seconds = 7" in answer.reason
    if family != "bert" and answer.status == Status.RECOVERED:
        # Prefixes that passed are beginnings of texts.
        wanted = scored(model, truth)
        assert all(ids in [other[: len(ids)] for other in wanted] for ids in answer.sequences)


@pytest.mark.parametrize(("family", "task"), [KINDS[0], *ALL[2:]])
def test_progress_is_reported_with_the_nearest_so_far(small, observe, family, task):
    model, reports = small(family, task, width=64, layers=3), []
    truth = observe(model, 2, max_length=8)
    (answer,) = Dager().many(
        [truth.seen],
        model,
        rngs=[stream(0, "dager")],
        report=lambda *report: reports.append(report),
    )
    assert answer == answer_of(model, truth.seen)
    assert reports
    assert all(which == 0 for which, _ in reports)
    steps = [progress.step for _, progress in reports]
    assert steps == list(range(1, len(steps) + 1))
    assert {progress.steps for _, progress in reports} == {reports[0][1].steps}
    assert steps[-1] <= reports[0][1].steps
    assert all(progress.loss < ACCEPT for _, progress in reports[-2:])
    texts = [model.decode(ids) for ids in answer.sequences]
    assert any(text.startswith(reports[-1][1].text) for text in texts)


# --- adapters -------------------------------------------------------------------------------


def adapted(name, task, rank=64, size=0.05):
    """A built-in model with adapters, as they are after some training: B is no longer zero."""
    lora = Lora(rank=rank, alpha=float(rank))
    model = loading.load(ModelSpec(name=f"builtin/{name}-tiny", task=task, num_labels=2, lora=lora))
    rng = stream(0, "adapters")
    for parameter, value in model.trained().items():
        if "lora_B" in parameter:
            value.data.copy_(size * torch.randn(value.shape, generator=rng))
    return model


# After a first round and after others.
ADAPTED = some([(size, *kind) for size in (0.0, 0.05) for kind in ALL], every=2)


@pytest.mark.parametrize(("size", "family", "task"), ADAPTED)
def test_adapters_are_read(observe, texts, family, task, size):
    model = adapted(family, task, size=size)
    truth = observe(model, texts[:1] if family == "bert" else texts[:2])
    assert any("lora_A" in name for name in truth.seen.update.tensors)
    assert Dager().obstacle(AttackSetting.of(truth.seen, model)) is None
    assert_exact(answer_of(model, truth.seen), model, truth)


@pytest.mark.parametrize(("size", "family", "task"), ADAPTED)
def test_adapters_of_a_lower_rank_than_there_are_tokens_prove_nothing(
    observe, texts, family, task, size, monkeypatch
):
    monkeypatch.setattr(placed_texts, "_DRAWN", 1)  # it may begin often in vain
    monkeypatch.setattr(placed_texts, "_KICKS", 1)
    model = adapted(family, task, rank=4, size=size)
    seen = observe(model, texts[:2]).seen
    answer = Dager(seconds=3.0)(seen, model, rng=stream(0, "dager"))
    assert "nothing proved" in answer.reason
    assert not answer.verified


# --- what is not exact ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "family", "task"),
    some(
        [
            (change, *kind)
            for change in ("noise", "float16", "bfloat16", "a little noise")
            for kind in ALL
        ],
        every=2,
    ),
)
def test_a_little_noise_leaves_the_likeliest_sentences(small, observe, family, task, change):
    # Not of every model: half precision hides where LLaMA's texts end in a third of forty.
    model = small(family, task, width=64, layers=3, seed=3)
    truth = observe(model, 2, max_length=8)
    if "noise" in change:
        seen = noisy(truth.seen, 1e-4 if "little" in change else 1e-2)
    else:
        seen = with_tensors(truth.seen, lambda value: value.to(getattr(torch, change)))
    answer = answer_of(model, seen)
    assert sorted(set(answer.sequences)) == scored(model, truth)
    assert not answer.verified or sorted(answer.sequences) == scored(model, truth)


@pytest.mark.parametrize(
    ("family", "task", "batch", "relative"),
    some([(*kind, *case) for case in product([1, 2], [0.1, 1.0, 10.0]) for kind in ALL], every=4),
)
def test_much_noise_is_answered_without_a_proof(small, observe, family, task, batch, relative):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, batch, max_length=8)
    answer = answer_of(model, noisy(truth.seen, relative), Dager(searches=2, kicks=2))
    assert "nothing proved" in answer.reason
    assert not answer.verified
    assert relative < 10 or answer.status == Status.ABSTAINED


@pytest.mark.parametrize(("family", "task"), ALL)
def test_of_an_update_that_holds_no_batch_nothing_is_proved(small, observe, family, task):
    model = small(family, task, width=64, layers=3)
    truth, rng = observe(model, 2, max_length=8), stream(0, "noise")
    other = small(family, task, width=64, layers=3, seed=1)
    for seen in (
        with_tensors(truth.seen, torch.zeros_like),
        with_tensors(truth.seen, lambda value: torch.randn(value.shape, generator=rng)),
        observe(other, 2, max_length=8).seen,
    ):
        answer = answer_of(model, seen)
        assert "nothing proved" in answer.reason
        assert not answer.verified


@pytest.mark.core
@pytest.mark.parametrize(("family", "task"), ALL)
def test_dropout_proves_nothing(small, observe, family, task):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, 1, dropout=True)
    answer = answer_of(model, truth.seen)
    assert not answer.verified
    if family == "llama":  # it has none
        assert answer.sequences == tuple(scored(model, truth))
    else:
        assert "nothing proved" in answer.reason


@pytest.mark.parametrize(
    ("learning_rate", "family", "task"),
    some([(rate, *kind) for rate in (0.1, 1e-3) for kind in ALL], every=2),
)
def test_one_step_of_fedavg_is_read_as_a_gradient_is(small, observe, family, task, learning_rate):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, 2, max_length=8, kind=UpdateKind.DELTA, learning_rate=learning_rate)
    answer = answer_of(model, truth.seen)
    assert sorted(answer.sequences) == scored(model, truth)


@pytest.mark.parametrize(
    ("family", "task", "batch_size", "epochs", "learning_rate"),
    some(
        [
            (*kind, *steps, rate)
            for kind in ALL
            for steps in ((1, 1), (2, 2))
            for rate in (0.1, 1e-3, 1e-5)
        ],
        every=4,
    ),
)
def test_several_steps_of_fedavg_prove_nothing_and_small_ones_are_read(
    small, observe, family, task, batch_size, epochs, learning_rate
):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, 2, max_length=8)
    before = {name: value.clone() for name, value in model.parameters().items()}
    how = LocalTraining(
        kind=UpdateKind.DELTA,
        batch_size=batch_size,
        epochs=epochs,
        learning_rate=learning_rate,
        dropout=False,
    )
    update = local_update_(model, truth.sequences, truth.labels, how, seed=0)
    models.load_parameters_(model, before)
    knowledge = Knowledge(learning_rate=learning_rate, local_steps=how.steps(2), dropout=False)
    seen = replace(truth.seen, update=update, knowledge=knowledge)
    answer = answer_of(model, seen, Dager(searches=2, kicks=4))
    assert not answer.verified
    if learning_rate == 1e-5 and epochs == 1:
        assert sorted(answer.sequences) == scored(model, truth)


@pytest.mark.parametrize(
    ("family", "task", "batch"),
    some([(*kind, batch) for batch in (2, 3, 4, 6) for kind in ALL], every=3),
)
def test_more_tokens_than_dimensions_are_never_proved(small, observe, family, task, batch):
    model = small(family, task, width=32, layers=3)
    truth = observe(model, batch)
    assert sum(map(len, truth.sequences)) > 32
    answer = answer_of(model, truth.seen, Dager(searches=2, kicks=2))
    assert "nothing proved" in answer.reason
    assert not answer.verified


def test_a_projected_span_holds_what_a_dense_solution_holds():
    rng = torch.Generator().manual_seed(4)
    first_ID = torch.randn(12, 40, generator=rng)
    x_ND = torch.randn(9, 40, generator=rng, dtype=torch.float64)
    inputs_NI = x_ND @ first_ID.T.double()
    gradient_OI = torch.randn(30, 7, generator=rng).double() @ inputs_NI[:7]
    span = row_space([gradient_OI.float()], spare=1)
    projected = ProjectedSpan(**vars(span), first_ID=first_ID.double())
    solution_ON = torch.linalg.pinv(gradient_OI.T, rtol=1e-6) @ inputs_NI.T
    missed_N = (gradient_OI.T @ solution_ON - inputs_NI.T).norm(dim=0)
    assert ((projected.excess(x_ND) < ACCEPT) == (missed_N < 1e-6)).all()
    assert (projected.excess(x_ND[:7]) < ACCEPT).all()
    sketch_DS = projected.null_sketch(64, rng)
    assert sketch_DS.shape == (40, 5)
    assert (x_ND[:7] @ sketch_DS).abs().max() < 1e-3 < (x_ND[7:] @ sketch_DS).abs().max()
