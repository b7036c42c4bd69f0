"""What every attack owes, whatever it does: a new attack is in here without being named.

It must find a batch in an easy setting, the same for all attacks that `EASY` does not name.

Where an attack, a model and what is sent vary, any two of them meet in some case, but not any
three: the full product is four times as many cases, and nearly all of them ask the same again. What
only three together make is named (`KEPT`).
"""

import dataclasses
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedleak import attacks
from fedleak.attacks import (
    AttackSetting,
    Batched,
    OneByOne,
    Progress,
    Selective,
    certificate,
    read_by,
    server_modes,
)
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import CAUSAL_LM, CLASSIFICATION, ModelSpec, load_parameters_, loading
from fedleak.models.lora import Lora, adapt_
from fedleak.training.observation import ClientUpdate, Knowledge, Observation, UpdateKind
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

PROGRAM = Path(__file__).parents[2] / "experiments" / "outside" / "bag_of_words.py"
QUICK = {
    "dlg": {"steps": 2, "starts": 1, "shapes": 3},
    "lamp": {"steps": 2, "starts": 1, "shapes": 3, "guesses": 4, "orders": 8},
    "tag": {"steps": 2, "starts": 1, "shapes": 3},
    "dager": {"searches": 2, "kicks": 2, "enumerate_up_to": 64},
    "keyspan": {"beam": 2},
    "command": {"command": f"{shlex.quote(sys.executable)} {PROGRAM} {{observation}} {{answer}}"},
    "auto": {"steps": 2},
    "state_pursuit": {"width": 2, "longest": 3},
}
MODELS = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CLASSIFICATION),
    ("llama", CAUSAL_LM),
]
ONE_OF_EACH_FAMILY = [("bert", CLASSIFICATION), ("gpt2", CAUSAL_LM), ("llama", CAUSAL_LM)]
PUBLIC = 8
"""Public texts that are granted: each costs a gradient."""

LONGEST = 10
"""Tokens that a model can read: who guesses lengths has less to try."""

IN_TURN = (
    {("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("llama", CAUSAL_LM)},
    {("bert", CLASSIFICATION), ("gpt2", CAUSAL_LM), ("llama", CLASSIFICATION)},
)
"""Models that attacks have in turn: an encoder, and a decoder of each family and of each task."""

GRANTED = ("batch_size", "labels", "lengths", "candidates")
KEYS = r"algorithm = |task = |update\.share|threat\.knows|model\.name|kind = |server\.mode"
PARTS = (
    ("embedding", "wte", "wpe"),
    ("word_embeddings", "wte"),
    ("position_embeddings", "wpe"),
    ("query", "c_attn.weight", "q_proj"),
    ("key", "c_attn.bias", "k_proj"),
    ("layer.0.attention.self.value", "layer.1.attention.self.key", "h.*.c_attn.weight"),
    ("layer.0.attention", "h.0.attn", "layers.0.self_attn"),
    ("classifier", "score", "ln_f"),
    ("LayerNorm.bias", "ln_1.bias"),
)
"""Patterns of the parameters that are sent, for the names of all families."""

KEPT = (
    # A classifier without a bias: its weight tells the labels, or nothing does.
    ("probes", PARTS[7], ("gpt2", CLASSIFICATION)),
    # Gradients at keys add up to nothing: by themselves they span no single input.
    ("keyspan", PARTS[4], ("bert", CLASSIFICATION)),
    # Rotary positions: no table of them, and a span that says nothing of places.
    ("probes", PARTS[2], ("llama", CAUSAL_LM)),
    ("dager", PARTS[6], ("llama", CAUSAL_LM)),
    # A tied output layer: every row of the word embedding has a gradient.
    ("probes", PARTS[1], ("gpt2", CAUSAL_LM)),
)


def meeting(rows, columns, layers):
    """Cases in which every row, column and layer meets each of the other two (a Latin square)."""
    assert len(layers) <= min(len(rows), len(columns)), "some would not meet"
    return [
        (row, column, layers[(i + j) % len(layers)])
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def in_turn(cases):
    """The cases of attacks in turn with one half of the decoders and with the other."""
    attackers = list(dict.fromkeys(case[0] for case in cases))
    return [case for case in cases if IN_TURN[attackers.index(case[0]) % 2] & set(case)]


def over(names, cases, *, rarely=()):
    """Parametrises a test over cases, each once; with `-m slow` over those of `rarely`, too."""

    def word(value):
        if value in MODELS:
            return "-".join(value)
        if value in PARTS:
            return value[0]
        if isinstance(value, tuple):
            return f"{value[0]}-{'granted' if value[1] else 'alone'}"
        return str(value)

    often = dict.fromkeys(cases)
    every = list(often | dict.fromkeys(rarely))
    slow = {case for case in every if takes_long(case) or case not in often}
    return pytest.mark.parametrize(
        names,
        [pytest.param(*c, marks=pytest.mark.slow) if c in slow else c for c in every],
        ids=["-".join(map(word, c)) for c in every],
    )


def takes_long(case):
    """Whether a case is one of an attack for which one model is enough.

    `auto` asks all others, `tag` is `dlg` with another distance, `lamp` is `dlg` with another way
    to order what it finds, and `command` saves a model with the code of transformers.
    """
    who = case[0] if isinstance(case[0], str) else case[0][0]
    return who in ("auto", "command", "lamp", "tag") and MODELS[0] not in case


@pytest.fixture
def short(small, monkeypatch):
    """Makes models that read few tokens; the texts that attacks make up fit them."""
    monkeypatch.setattr("fedleak.attacks.analytic.facts.DUMMY_LENGTH", LONGEST)
    monkeypatch.setattr("fedleak.attacks.subspace.update_evidence.OWN_TOKENS", LONGEST - 2)
    return partial(small, width=32, longest=LONGEST)


def quick(kind):
    return attacks.kinds()[kind](**QUICK.get(kind, {}))


ALL = sorted(attacks.kinds())
BATCHED = [kind for kind in ALL if isinstance(quick(kind), Batched)]
# `lamp` makes its batches with the code of the other two, and does more with them.
TOGETHER = [k for k in BATCHED if not isinstance(quick(k), OneByOne) and k not in ("dlg", "tag")]


def with_facts(kinds):
    """Attacks and facts: nothing granted, and, to those that make use of them, facts."""
    return [(kind, f) for kind in kinds for f in ((), GRANTED) if not f or quick(kind).uses]


def with_most_facts(kinds):
    """Attacks, each with all facts of which it makes use."""
    return [(kind, GRANTED if quick(kind).uses else ()) for kind in kinds]


def granting(seen, truth, facts):
    private = {
        "batch_size": len(truth.sequences),
        "labels": tuple(truth.labels),
        "lengths": tuple(map(len, truth.sequences)),
        "candidates": replace(truth.candidates, public=truth.candidates.public[:PUBLIC]),
    }
    granted = {fact: private[fact] for fact in facts}
    return replace(seen, knowledge=replace(seen.knowledge, **granted))


def run(attack, seen, model):
    """Runs an attack where it says it can run, and checks all that an answer must be."""
    obstacle = attack.obstacle(AttackSetting.of(seen, model))
    if obstacle is not None:
        assert re.search(KEYS, obstacle), f"names no key: {obstacle}"
        return None
    answer = attack(seen, model, rng=stream(0, "attack"))
    assert isinstance(answer, Reconstruction)
    assert answer.status in (Status.RECOVERED, Status.ABSTAINED)
    json.dumps(asdict(answer), allow_nan=False)
    if answer.status == Status.ABSTAINED:
        assert answer.reason
        assert answer.sequences is None
        assert answer.tokens is None
        assert not answer.verified
        return answer
    ids = [*(answer.tokens or ()), *(t for sequence in answer.sequences or () for t in sequence)]
    assert all(type(t) is int and 0 <= t < len(model.tokenizer) for t in ids)
    assert len(answer.evidence) == len(answer.sequences or ())
    assert len(answer.margins) in (0, len(answer.evidence))
    assert all(margin is None or margin >= 0 for margin in answer.margins)
    if answer.verified:
        assert len(answer.sequences) == seen.update.num_examples
        assert certificate.proves(model, answer.sequences, seen), "a worker would not believe it"
    assert all(1 <= len(sequence) <= model.max_length for sequence in answer.sequences or ())
    assert sorted(answer.evidence) == list(answer.evidence)
    assert list(answer.tokens or ()) == sorted(set(answer.tokens or ()))
    assert answer.facts.keys() <= {"longest_sequence", "label_counts"}
    return answer


def assert_same(answer, other):
    """LAPACK rounds by where numbers lie in memory: the last digits of evidence, nothing else."""
    if answer is not None and other is not None:
        assert answer.evidence == pytest.approx(other.evidence, rel=1e-12, abs=1e-15)
        answer = replace(answer, evidence=other.evidence)
    assert answer == other


HONEST = meeting(with_facts(ALL), MODELS, list(UpdateKind))


@over(("who", "built", "update"), in_turn(HONEST), rarely=HONEST)
def test_an_honest_update_is_answered_well_twice_and_left_alone(short, observe, who, built, update):
    (kind, facts), model = who, short(*built)
    attack, truth = quick(kind), observe(model, 2, kind=update, max_length=6)
    seen = granting(truth.seen, truth, facts)
    tensors = {name: value.clone() for name, value in seen.update.tensors.items()}
    weights = {name: value.clone() for name, value in model.parameters().items()}
    answer = run(attack, seen, model)
    state = torch.get_rng_state()
    assert_same(run(attack, seen, model), answer)
    assert torch.equal(torch.get_rng_state(), state), "draws from the global stream"
    for name, value in model.module.named_parameters():
        assert torch.equal(value, weights[name])
        assert value.grad is None
        assert value.requires_grad
        assert torch.equal(seen.update.tensors[name], tensors[name])
    assert not model.module.training
    assert not [m for m in model.module.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert seen.update.tensors.keys() == tensors.keys()


@over(
    ("who", "built"),
    # An attack that takes one after the other is not another one with another model.
    # and to give it less, or nothing, is no other way to go through a list.
    [
        *product(with_facts(TOGETHER), ONE_OF_EACH_FAMILY),
        *product(with_most_facts(BATCHED), MODELS[:1]),
    ],
    rarely=product(with_facts(BATCHED), MODELS),
)
def test_together_each_is_answered_as_alone(short, observe, texts, who, built):
    (kind, facts), model = who, short(*built)
    attack = quick(kind)
    # Of different lengths, because what is padded must not matter.
    truths = [observe(model, texts[:2], max_length=6), observe(model, texts[2:4], max_length=8)]
    seen = [granting(truth.seen, truth, facts) for truth in truths]
    if (obstacle := attack.obstacle(AttackSetting.of(seen[0], model))) is not None:
        pytest.skip(obstacle)
    reports = []
    rngs = [stream(0, "attack", i) for i in range(2)]
    together = attack.many(seen, model, rngs=rngs, report=lambda *report: reports.append(report))
    assert len(together) == 2
    for i, answer in enumerate(together):
        alone = attack(seen[i], model, rng=stream(0, "attack", i))
        assert (answer.status, answer.reason) == (alone.status, alone.reason)
        # Sequences of one class and length are interchangeable: their order is anybody's.
        assert sorted(answer.sequences or ()) == sorted(alone.sequences or ())
        assert answer.tokens == alone.tokens
        assert answer.evidence == pytest.approx(alone.evidence, rel=1e-3, abs=1e-5)
    for which, progress in reports:
        assert which in (0, 1)
        assert isinstance(progress, Progress)
        assert 0 <= progress.step <= progress.steps
        assert [type(field_value) for field_value in progress] == [int, int, float, str, str]


@pytest.mark.core
@pytest.mark.parametrize("factor", [1e-6, 1e-4, 1e4])
@pytest.mark.parametrize("kind", ["probes", "keyspan", "dager", "auto"])
def test_a_factor_on_the_whole_update_changes_nothing_that_is_read(small, observe, kind, factor):
    attack, model = quick(kind), small("bert", width=48, layers=3)
    seen = observe(model, 2, max_length=6).seen
    tensors = {name: factor * value for name, value in seen.update.tensors.items()}
    plain = run(attack, seen, model)
    scaled = run(attack, replace(seen, update=replace(seen.update, tensors=tensors)), model)
    assert sorted(scaled.sequences or ()) == sorted(plain.sequences or ())
    assert scaled.tokens == plain.tokens
    assert scaled.verified == plain.verified == (kind != "probes")


USING_NOT_ALL = [kind for kind in ALL if set(GRANTED) - quick(kind).uses]


@pytest.mark.parametrize("kind", USING_NOT_ALL)
def test_facts_that_it_does_not_use_change_nothing(short, observe, kind):
    """Of the first model that it can work on: which facts it takes is no matter of the model."""
    attack, unused = quick(kind), [fact for fact in GRANTED if fact not in quick(kind).uses]
    # Of a GPT-2 several words are tried as the first one, which takes longer.
    for built in sorted(ONE_OF_EACH_FAMILY, key=lambda model: model[0] == "gpt2"):
        model = short(*built)
        truth = observe(model, 2, max_length=6)
        answer = run(attack, granting(truth.seen, truth, unused), model)
        if answer is not None:
            break
    assert_same(answer, run(attack, truth.seen, model))


IN_PARTS = meeting(ALL, PARTS, MODELS)


@over(("kind", "part", "built"), [*in_turn(IN_PARTS), *KEPT], rarely=IN_PARTS)
def test_a_part_of_an_update_is_refused_by_its_key_or_answered(short, observe, kind, part, built):
    attack, model = quick(kind), short(*built)
    seen = observe(model, 2, max_length=6).seen
    run(attack, replace(seen, update=partial_update(seen.update, part)), model)


SELECTIVE = [kind for kind in ALL if isinstance(quick(kind), Selective)]
WITHOUT = meeting(SELECTIVE, MODELS, list(UpdateKind))


@pytest.mark.core
@over(("kind", "built", "update"), in_turn(WITHOUT), rarely=WITHOUT)
def test_without_what_it_does_not_read_its_answer_is_the_same(short, observe, kind, built, update):
    attack, model = quick(kind), short(*built, layers=3)
    seen = observe(model, 2, kind=update, max_length=6).seen
    if (obstacle := attack.obstacle(AttackSetting.of(seen, model))) is not None:
        pytest.skip(obstacle)
    names = read_by(attack, AttackSetting.of(seen, model))
    assert names < seen.update.tensors.keys()
    part = {name: seen.update.tensors[name] for name in names}
    answer = run(attack, seen, model)
    of_part = run(attack, replace(seen, update=replace(seen.update, tensors=part)), model)
    assert of_part.status == answer.status
    assert sorted(of_part.sequences or ()) == sorted(answer.sequences or ())
    assert (of_part.tokens, of_part.facts) == (answer.tokens, answer.facts)
    assert of_part.verified == answer.verified


def test_an_attack_that_does_not_say_what_it_reads_reads_all(small, observe):
    model = small("bert")
    setting = AttackSetting.of(observe(model, 1).seen, model)
    assert SELECTIVE == [
        "adapter_imprint",
        "dager",
        "decepticons",
        "imprint",
        "keyspan",
        "position_marginals",
        "probes",
        "query_gradients",
    ]
    for kind in set(ALL) - set(SELECTIVE):
        assert read_by(quick(kind), setting) == setting.shared


@over(
    ("who", "built", "size"),
    meeting(with_facts(ALL), ONE_OF_EACH_FAMILY, [0.0, 1.0, 1e-30]),
)
def test_zeros_and_noise_are_no_reason_to_crash_or_to_invent_tokens(
    short, observe, who, built, size
):
    (kind, facts), model = who, short(*built)
    attack = quick(kind)
    truth = observe(model, 2, max_length=6)
    rng = torch.Generator().manual_seed(3)
    noise = {
        name: size * torch.randn(value.shape, generator=rng)
        for name, value in truth.seen.update.tensors.items()
    }
    seen = Observation(
        round=1,
        client=0,
        update=ClientUpdate(UpdateKind.GRADIENT, noise, 2),
        knowledge=Knowledge(learning_rate=0.1, local_steps=1, dropout=False),
    )
    answer = run(attack, granting(seen, truth, facts), model)
    if answer is not None and not facts:
        assert answer.sequences is None
        assert answer.tokens is None


@pytest.mark.core
@pytest.mark.parametrize("kind", ALL)
def test_an_attack_is_a_frozen_value_that_says_what_it_does(kind):
    attack = quick(kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        attack.kind = "other"
    assert attack == type(attack)(**asdict(attack))
    assert type(attack).__doc__.splitlines()[0].endswith(".")
    assert attacks.kinds()[attack.kind] is type(attack)


def test_one_layer_is_too_few_for_spans(small):
    model = small("bert", layers=1)
    setting = AttackSetting(
        update=UpdateKind.GRADIENT,
        shared=frozenset(model.parameters()),
        knows=frozenset(),
        family=model.family,
        num_layers=1,
        task=model.task,
    )
    assert "needs 3 layers" in attacks.kinds()["dager"]().obstacle(setting)


# --- what it must find ----------------------------------------------------------------------------

BEATS_BY = 0.25
"""What an answer must be better by than the placebo's, of a score from 0 to 1."""


@dataclass(frozen=True)
class Easy:
    """A setting in which an attack must find all that it answers.

    Attributes:
        family, task, layers, width: Of the model.
        texts: The batch.
        granted: Facts.
        settings: Hyper-parameters; the rest are the attack's defaults.
        server_mode: What a malicious server does to the model first; None: it is honest.
        lora: Adapters that are trained; None: the model is.
        of_step: Texts of a local step of a client; None: it sends one gradient.
    """

    family: str = "bert"
    task: str = CLASSIFICATION
    layers: int = 3
    width: int = 32
    texts: tuple[str, ...] = ("she told us that", "nobody knows it")
    granted: tuple[str, ...] = GRANTED
    settings: Mapping[str, Any] = field(default_factory=dict)
    server_mode: str | None = None
    lora: Lora | None = None
    of_step: int | None = None


EASY = {
    # On the placebos, which nothing matches, all steps are made. What is easy `auto` reads without.
    "dlg": Easy(settings={"steps": 30}),
    "lamp": Easy(settings={"steps": 30}),
    "tag": Easy(settings={"steps": 30}),
    "auto": Easy(settings={"steps": 2}),
    "command": Easy(settings=QUICK["command"]),
    # In a batch it only guesses which words belong to one text.
    "position_marginals": Easy(texts=("she told us that",)),
    "maximum_likelihood": Easy(texts=("she told us that",)),
    # Of exact gradients a second text is better read by others.
    "state_pursuit": Easy(
        "llama",
        CAUSAL_LM,
        layers=2,
        width=48,
        texts=("she told us",),
        settings={"longest": 5, "width": 4},
    ),
    "step_peeling": Easy("llama", CAUSAL_LM, width=48, of_step=1),
    "imprint": Easy(width=48, server_mode="imprint"),
    "decepticons": Easy(width=48, server_mode="decepticons"),
    # Four heads look at four tokens.
    "adapter_imprint": Easy(
        width=48, texts=("she", "nobody"), server_mode="adapter_imprint", lora=Lora(6, 12.0)
    ),
}
"""By kind, for attacks that cannot work in the setting that is easy for others, or take long."""


def score(answer, truth, model):
    """How right all that an answer says is, from 0 to 1; nothing said is 0."""
    parts = []
    if answer.sequences is not None:
        claimed, real = Counter(answer.sequences), Counter(truth.sequences)
        parts.append((claimed & real).total() / max(claimed.total(), real.total()))
    if answer.tokens is not None:
        claimed = set(answer.tokens) - model.special_ids()
        real = {token for ids in truth.sequences for token in ids} - model.special_ids()
        parts.append(len(claimed & real) / len(claimed | real))
    facts = {
        "longest_sequence": max(map(len, truth.sequences)),
        "label_counts": [truth.labels.count(label) for label in range(model.num_labels)],
    }
    if answer.scores:
        scored = list(zip(answer.scores["residual"], truth.inside, strict=True))
        lowest = min(value for value, inside in scored if inside)
        outside = [value for value, inside in scored if not inside]
        parts.append(sum(value < lowest for value in outside) / len(outside))
    parts += [float(value == facts[name]) for name, value in answer.facts.items()]
    return sum(parts) / len(parts) if parts else 0.0


def shuffled(update):
    """An update of the same numbers, none where it was."""
    rng = torch.Generator().manual_seed(0)
    tensors = {
        name: value.flatten()[torch.randperm(value.numel(), generator=rng)].view_as(value)
        for name, value in update.tensors.items()
    }
    return replace(update, tensors=tensors)


def check_that_it_finds(attack, easy, small, observe):
    """Refuses an attack that finds nothing, or nothing that it has from the update."""
    model = small(easy.family, easy.task, layers=easy.layers, width=easy.width)
    if easy.lora is not None:
        adapt_(model.module, easy.lora, model.family.classifier)
    if easy.server_mode is not None:
        mode, public = server_modes.kinds()[easy.server_mode](), observe(model, 1).candidates.public
        changes = mode.broadcast(model, targeted=True, public=public, rng=stream(0, "server"))
        load_parameters_(model, {**model.parameters(), **changes})
    kind = UpdateKind.GRADIENT if easy.of_step is None else UpdateKind.DELTA
    sent = partial(observe, server_mode=easy.server_mode, kind=kind, batch_size=easy.of_step)
    truth = sent(model, easy.texts, granted=easy.granted)
    others = sent(model, ["he pays for all of his", "my old friends"], [2, 2])
    if (candidates := truth.seen.knowledge.candidates) is not None:
        few = replace(candidates, public=candidates.public[: 2 * PUBLIC])
        known = replace(truth.seen.knowledge, candidates=few)
        truth.seen = replace(truth.seen, knowledge=known)
    obstacle = attack.obstacle(AttackSetting.of(truth.seen, model))
    assert obstacle is None, f"cannot work in its easy setting, name one in EASY: {obstacle}"

    def answer(update):
        seen = replace(truth.seen, update=update)
        return score(run(attack, seen, model), truth, model)

    own_score = answer(truth.seen.update)
    assert own_score == 1.0, f"its answer to an easy update is not right: {own_score:.2f}"
    for placebo in (others.seen.update, shuffled(truth.seen.update)):
        by_chance = answer(placebo)
        assert by_chance <= own_score - BEATS_BY, (
            f"no better than without the update: {by_chance:.2f}"
        )


@pytest.mark.parametrize(
    "kind",
    # One that matches gradients is found by the same search as another.
    [
        pytest.param(kind, marks=pytest.mark.slow) if kind in ("tag", "lamp") else kind
        for kind in ALL
    ],
)
def test_an_easy_batch_is_found_and_in_the_update_alone(kind, small, observe):
    easy = EASY.get(kind, Easy())
    check_that_it_finds(attacks.kinds()[kind](**easy.settings), easy, small, observe)


@pytest.mark.parametrize(
    ("kind", "family"),
    # A program of others reads files; membership takes gradients of texts, which are tested.
    # Adapters are changed of encoders alone. How much a token explains is a matter of the loss.
    [
        (kind, "gpt2")
        for kind in ALL
        if kind not in ("command", "membership", "adapter_imprint", "state_pursuit")
    ]
    + [("keyspan", "llama"), ("imprint", "llama")],
)
def test_a_loss_on_responses_is_read_as_well_or_named_as_an_obstacle(kind, family, small, observe):
    whole = small(family, CAUSAL_LM, layers=3, width=48)
    (template_id,) = whole.tokenizer.encode(" that", add_special_tokens=False)
    attack, mode = attacks.kinds()[kind](**QUICK.get(kind, {})), EASY.get(kind, Easy()).server_mode
    texts = ["she told us that nobody knows it", "my old friends say that he pays"]
    outcomes = []
    for model in (replace(whole, response_template=(template_id,)), whole):
        if mode is not None:
            public = observe(model, 1).candidates.public
            made = server_modes.kinds()[mode]().broadcast(
                model, targeted=True, public=public, rng=stream(0, "server")
            )
            load_parameters_(model, {**model.parameters(), **made})
        batch = texts[: 1 if kind == "position_marginals" else 2]
        truth = observe(model, batch, granted=GRANTED, server_mode=mode)
        obstacle = attack.obstacle(AttackSetting.of(truth.seen, model))
        if obstacle is not None:
            named = "model.response_template" in obstacle
            assert named or attack.obstacle(AttackSetting.of(truth.seen, whole)) == obstacle
            return
        answer = run(attack, truth.seen, model)
        outcomes.append((score(answer, truth, model), answer.verified))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] >= 0.5  # all words, or all texts


@dataclass(frozen=True)
class Fake:
    """Looks at nothing and always says the same."""

    kind: ClassVar[str] = "fake"
    uses: ClassVar[frozenset[str]] = frozenset()
    answer: Reconstruction

    def obstacle(self, setting):
        return None

    def __call__(self, seen, model, *, rng):
        return self.answer


def always(sequences=None, tokens=None, facts=None):
    evidence = (0.0,) * len(sequences or ())
    return Reconstruction(
        status=Status.RECOVERED,
        sequences=sequences,
        evidence=evidence,
        tokens=tokens,
        facts=facts or {},
    )


@pytest.mark.core
def test_an_attack_that_always_abstains_is_refused(small, observe):
    fake = Fake(Reconstruction.none(Status.ABSTAINED, "nothing to see here"))
    with pytest.raises(AssertionError, match=r"not right: 0\.00"):
        check_that_it_finds(fake, Easy(), small, observe)


def test_an_attack_that_says_nothing_is_refused(small, observe):
    with pytest.raises(AssertionError, match=r"not right: 0\.00"):
        check_that_it_finds(Fake(always()), Easy(), small, observe)


@pytest.mark.core
def test_an_attack_that_always_gives_one_answer_is_refused(small, observe):
    sequence = tuple(range(300, 306))
    fake = Fake(always((sequence, sequence), tuple(sorted(sequence))))
    with pytest.raises(AssertionError, match="not right"):
        check_that_it_finds(fake, Easy(), small, observe)


@pytest.mark.parametrize("says", ["sequences", "tokens", "facts"])
def test_an_attack_that_has_the_batch_from_elsewhere_is_refused(small, observe, says):
    easy = Easy()
    model = small(easy.family, easy.task, layers=easy.layers, width=easy.width)
    truth = observe(model, easy.texts)
    private = {
        "sequences": tuple(truth.sequences),
        "tokens": tuple(sorted({token for ids in truth.sequences for token in ids})),
        "facts": {"label_counts": [1, 1, 0]},
    }
    with pytest.raises(AssertionError, match=r"without the update: 1\.00"):
        check_that_it_finds(Fake(always(**{says: private[says]})), easy, small, observe)


def test_an_attack_that_cannot_work_where_others_can_must_name_its_setting(small, observe):
    class Picky(Fake):
        def obstacle(self, setting):
            return "needs update.share = 'nothing'"

    with pytest.raises(AssertionError, match=r"name one in EASY: needs update\.share"):
        check_that_it_finds(Picky(always()), Easy(), small, observe)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["probes", "keyspan", "dager", "auto"])
def test_real_minilm_is_read_and_proved_alike_at_every_scale(assets, observe, kind):
    name = str(assets / "models" / "minilm-l6-h384")
    model = loading.load(ModelSpec(name=name, task=CLASSIFICATION, num_labels=2))
    attack, seen = (
        attacks.kinds()[kind](),
        observe(model, ["nobody knows it", "he pays for all of us"]).seen,
    )
    answers = []
    for factor in (1.0, 1e-6, 1e-4, 1e4):
        tensors = {name: factor * value for name, value in seen.update.tensors.items()}
        answers.append(
            run(attack, replace(seen, update=replace(seen.update, tensors=tensors)), model)
        )
    assert {answer.verified for answer in answers} == {kind != "probes"}
    assert len({tuple(sorted(answer.sequences or ())) for answer in answers}) == 1
    assert len({answer.tokens for answer in answers}) == 1
