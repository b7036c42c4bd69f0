"""The parts of `gpu`: each is a function of the settings that yields what it measured.

They reuse the other benchmarks. On a CPU (a dry run) they do the same with small models.
"""

import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gradient_matching
import torch
from gpu_figures import ROOT, Figure, Settings, Skip, Value
from material import gradient_of, model_of
from subspace_attacks import Case, measure
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from fedleak import data
from fedleak.attacks import Attack, Progress
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel
from fedleak.running import preparation
from fedleak.store import records
from fedleak.store.records import Answer
from fedleak.store.run import Key
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation
from fedleak.util.rng import stream


def machine(settings: Settings) -> Iterator[Figure]:
    """Yields what the machine is.

    Raises:
        RuntimeError: PyTorch sees no such device.
    """
    values: dict[str, Value] = {
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "torch_cuda": torch.version.cuda,
        "float32_matmul": torch.get_float32_matmul_precision(),
    }
    device = torch.device(settings.device)
    if device.type == "cpu":
        yield Figure("machine", "", values={"device": platform.processor() or "CPU", **values})
        return
    seen = torch.cuda.get_device_properties(device)
    values |= {
        "device": seen.name,
        "capability": f"{seen.major}.{seen.minor}",
        "memory_bytes": seen.total_memory,
        "multiprocessors": seen.multi_processor_count,
    }
    yield Figure("machine", "", values=values)


def tests(settings: Settings) -> Iterator[Figure]:
    """Runs the tests marked `gpu`.

    Raises:
        AssertionError: One failed, or none ran on a GPU.
    """
    import pytest

    class Counting:
        """Counts outcomes."""

        def __init__(self) -> None:
            self.outcomes: Counter[str] = Counter()

        def pytest_runtest_logreport(self, report: Any) -> None:
            """Is told of each phase of each test."""
            if report.when == "call" or report.outcome != "passed":
                self.outcomes[report.outcome] += 1

    marked = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    counting, begin = Counting(), time.perf_counter()
    status = pytest.main(
        # This process has imported packages that pytest would rewrite: no reason to end.
        [
            *("-m", "gpu", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"),
            *("-W", "ignore::pytest.PytestAssertRewriteWarning", *marked),
        ],
        plugins=[counting],
    )
    counts = {name: counting.outcomes[name] for name in ("passed", "failed", "skipped")}
    yield Figure("tests marked gpu", "", time.perf_counter() - begin, values=counts)
    assert status == 0, f"pytest ended with status {status}: {counts}"
    assert counts["passed"] or settings.device == "cpu", "no test ran on the GPU"


_ONE_ROUND_OF_BERT = (
    "model={name = 'builtin/bert-tiny'}",
    "data.held_out=8",
    "federation.clients=4",
    "federation.rounds=1",
    "federation.batch_size=2",
    "threat.rounds=[1]",
    "attack=[{kind='dager'}, {kind='keyspan'}, {kind='dlg', steps=30, starts=1}]",
)


def workers(settings: Settings) -> Iterator[Figure]:
    """Runs a round with one and with two workers on one device and compares the answers.

    Raises:
        AssertionError: Answers of an attack that proves what it says differ.
    """
    from fedleak.config.loading import load
    from fedleak.flower.engines import train
    from fedleak.running import pipeline

    small = ["federation.clients=2", "data.samples=8"] if settings.small else []
    answers: list[dict[tuple[Key, str], Answer]] = []
    seconds: list[float] = []
    with TemporaryDirectory() as folder:
        for number in (1, 2):
            on = ", ".join([f"'{settings.device}'"] * number)
            experiment = load(
                ROOT / "experiments/quickstart-gpt2.toml",
                [f"workers.devices=[{on}]", *_ONE_ROUND_OF_BERT, *small],
            )
            run = preparation.prepare(experiment, Path(folder, str(number)))
            begin = time.perf_counter()
            pipeline.carry_out(run, experiment, train)
            seconds.append(time.perf_counter() - begin)
            rows = run.rows(records.answers(run.fingerprint()))
            answers.append({answer.id: answer for answer in rows})
    with_one, with_two = answers
    both = [(with_one[key], with_two[key]) for key in with_one]
    equal = [a.status == b.status and a.sequences == b.sequences for a, b in both]
    apart = [
        abs(x - y) / max(abs(x), abs(y), 1e-30)
        for a, b in both
        for x, y in zip(a.evidence, b.evidence, strict=False)
        if x is not None and y is not None
    ]
    yield Figure(
        "a run with two workers",
        f"bert-tiny, {len(both)} answers",
        seconds[1],
        "one worker",
        seconds[0],
        {
            "equal answers": sum(equal),
            "answers": len(both),
            "evidence apart": max(apart, default=0),
        },
    )
    wrong = [a.attack for (a, _), same in zip(both, equal, strict=True) if not same]
    proving = {"dager", "keyspan", "probes"}
    assert with_one.keys() == with_two.keys(), (
        f"answers are missing: {with_one.keys() ^ with_two.keys()}"
    )
    assert not proving & set(wrong), f"these differ between one and two workers: {wrong}"


def subspace(settings: Settings) -> Iterator[Figure]:
    """Measures attacks on GPT-2 and BERT with random weights, on texts made here."""
    few: Sequence[int] = (1,) if settings.small else (1, 2)
    many: Sequence[int] = (2,) if settings.small else (1, 4, 16, 32)
    attacks: Sequence[tuple[Attack, Sequence[int]]] = [(Dager(), many), (Keyspan(), many)]
    yield from _recovered("gpt2", random_gpt2(settings), attacks, settings)
    attacks = [(Keyspan(), many), (Dager(), few)]
    yield from _recovered("bert", random_bert(settings), attacks, settings)


def stories15m(settings: Settings) -> Iterator[Figure]:
    """Measures `dager` on a pretrained LLaMA of 6 layers and width 288.

    Raises:
        Skip: It is not there.
    """
    model = model_of(_asset(settings, "models/stories15m"), CAUSAL_LM, settings.seed)
    sizes = (1,) if settings.small else (1, 4, 16)
    yield from _recovered("stories15m", model, [(Dager(), sizes)], settings)


def _recovered(
    name: str,
    model: LanguageModel,
    attacks: Sequence[tuple[Attack, Sequence[int]]],
    settings: Settings,
) -> Iterator[Figure]:
    """Yields what attacks recover, and how long they take beside one thread of the CPU."""
    shape = f"{model.num_layers}x{model.hidden_size}"
    batches = 1 if settings.small else 3
    samples = batches * max(max(sizes) for _, sizes in attacks)
    corpus = _made_up(samples, 0, settings).train
    for attack, sizes in attacks:
        for size in sizes:
            case = Case(f"{name}-{attack.kind}", name, attack, (size,))
            model.module.to(settings.device)
            row = measure(case, model, corpus, size, batches, settings.seed)
            beside, threads = None, torch.get_num_threads()
            if size == min(sizes):
                model.module.to("cpu")
                torch.set_num_threads(1)
                beside = measure(case, model, corpus, size, 1, settings.seed)
                torch.set_num_threads(threads)
            yield Figure(
                f"{row.name}, first batch" if beside else row.name,
                f"{shape}, {size} texts",
                row.seconds[0] if beside else sum(row.seconds) / row.batches,
                "one thread of the CPU" if beside else "",
                beside.seconds[0] if beside else None,
                {
                    "exact": f"{row.exact} of {row.sentences}",
                    "bags": f"{row.bags} of {row.batches}",
                    "proved": f"{row.proved} of {row.batches}",
                    "slowest ms": 1e3 * max(row.seconds),
                },
            )


def random_gpt2(settings: Settings) -> LanguageModel:
    """Returns a next-token GPT-2 with random weights and its full vocabulary."""
    like = model_of("builtin/gpt2-tiny", CAUSAL_LM, settings.seed)
    if settings.small:
        return like
    config = GPT2Config(attn_implementation="eager", pad_token_id=like.tokenizer.pad_token_id)
    torch.manual_seed(settings.seed)
    return replace(like, module=GPT2LMHeadModel(config).eval())


def random_bert(settings: Settings) -> LanguageModel:
    """Returns a BERT classifier with random weights and its full vocabulary."""
    like = model_of("builtin/bert-tiny", CLASSIFICATION, settings.seed)
    if settings.small:
        return like
    config = BertConfig(
        attn_implementation="eager", num_labels=2, pad_token_id=like.tokenizer.pad_token_id
    )
    torch.manual_seed(settings.seed)
    return replace(like, module=BertForSequenceClassification(config).eval())


def matching(settings: Settings) -> Iterator[Figure]:
    """Compares LAMP's steps, moves and schedule with the straightforward version."""
    tokens, victims, vocabulary, repeats, many = 16, 8, 30522, 5, 1024
    sizes = ["6x384", "12x768"]
    if settings.small:
        tokens, victims, vocabulary, repeats, many, sizes = 6, 2, 200, 1, 16, ["2x64"]
    for size in map(gradient_matching.size_of, sizes):
        made = gradient_matching.bench(
            size, tokens, victims, vocabulary, settings.seed, device=torch.device(settings.device)
        )
        with made.ready():
            for line in gradient_matching.measure(made, repeats, 4 if settings.small else 10):
                composed = line.name.startswith("schedule")
                yield Figure(
                    f"{line.name} (composed)" if composed else line.name,
                    f"{size}, {tokens} tokens",
                    line.ours,
                    "straightforward",
                    line.straightforward,
                    _there({"loss apart": line.loss, "gradient apart": line.gradient}),
                )
            for used in gradient_matching.memory(made, many):
                mib = used.tensors / 2**20
                yield Figure(used.name, f"{size}, {tokens} tokens", values={"tensors MiB": mib})
        del made


def cola(settings: Settings) -> Iterator[Figure]:
    """Attacks sentences one at a time with LAMP: ours, and with the published constants."""
    begin = time.monotonic()
    number = 2 if settings.small else 20
    try:
        model, corpus, held_out, prior = _cola(settings, number)
        name = "MiniLM 6x384, CoLA"
    except Skip as absent:
        model, corpus, held_out = _notes(settings, number)
        name, prior = f"bert-tiny, built-in notes, no prior ({absent})", None
    model.module.to(settings.device)
    ids = data.tokenise(corpus.texts, model.encode, limit=model.max_length, max_length=None)
    others = data.tokenise(held_out.texts, model.encode, limit=model.max_length, max_length=None)
    seen = []
    for client, (tokens, label) in enumerate(zip(ids, corpus.labels, strict=True)):
        update = local_update_(model, [tokens], [label], gradient_of(1), seed=settings.seed)
        facts = Knowledge(
            learning_rate=5e-5,
            local_steps=1,
            dropout=False,
            batch_size=1,
            labels=(label,),
            lengths=(len(tokens),),
        )
        seen.append(Observation(round=1, client=client, update=update, knowledge=facts))
    few: dict[str, Any] = {"steps": 2, "guesses": 2, "orders": 2} if settings.small else {}
    ours = Lamp(prior=prior, **few)
    published = replace(ours, preset="faithful", precision="mixed")
    size = f"{name}, {number} sentences"
    for variant, attack, until in (("best", ours, 0.25), ("published constants", published, 0.9)):
        # What it has when its time is over counts, and the table says how many steps it made.
        left = max(begin + until * settings.seconds - time.monotonic(), 1)
        attack = replace(attack, seconds=left / number)
        yield _scored(f"lamp, {variant}", size, attack, seen, ids, others, model)


def _scored(
    attack_name: str,
    size: str,
    attack: Lamp,
    seen: Sequence[Observation],
    ids: Sequence[tuple[int, ...]],
    others: Sequence[tuple[int, ...]],
    model: LanguageModel,
) -> Figure:
    """Returns the ROUGE of an attack's answers, and that of other texts."""
    from fedleak.audit import answer_scores
    from fedleak.audit.metrics import rouge
    from fedleak.training.truth import GroundTruth

    steps: dict[int, str] = {}

    def report(which: int, progress: Progress) -> None:
        steps[which] = f"{progress.step} of {progress.steps}"

    rngs = [stream(0, "attack", observation.client) for observation in seen]
    begin = time.perf_counter()
    answers = attack.many(seen, model, rngs=rngs, report=report)
    seconds = (time.perf_counter() - begin) / len(seen)
    content, paper, chance = [], [], []
    for client, (answer, truth) in enumerate(zip(answers, ids, strict=True)):
        scores = answer_scores.score_sequences(answer.sequences or (), [truth], model)
        guessed = answer_scores.guess(
            others,
            GroundTruth(round=1, client=client, sequences=(truth,), labels=(), batch_size=1),
            model,
            0,
        )
        content += [scores.content or rouge.rouge("", "")]
        paper += [scores.paper or rouge.rouge("", "")]
        chance += [guessed.content or rouge.rouge("", "")]
    values: dict[str, Value] = {
        "R-1": rouge.mean(paper).rouge1,
        "R-2": rouge.mean(paper).rouge2,
        "R-L": rouge.mean(paper).rougeL,
        "content R-L": rouge.mean(content).rougeL,
        "chance R-L": rouge.mean(chance).rougeL,
        "steps, most": max(
            steps.values(), key=lambda progress: int(progress.split()[0]), default="none"
        ),
    }
    return Figure(f"{attack_name}: a sentence", size, seconds, values=values)


def _cola(
    settings: Settings, number: int
) -> tuple[LanguageModel, data.Corpus, data.Corpus, str | None]:
    """Returns MiniLM, sentences of CoLA, others, and the prior."""
    minilm = _asset(settings, "models/minilm-l6-h384")
    sentences = _asset(settings, "data/cola/in_domain_train.tsv")
    prior = _asset(settings, "models/prior-bert-vocab")
    model = model_of(minilm, CLASSIFICATION, 101)
    split = data.read_split(
        str(sentences), split="train", text=3, label=1, samples=number, held_out=100, seed=101
    )
    return model, split.train, split.held_out, str(prior)


def _notes(settings: Settings, number: int) -> tuple[LanguageModel, data.Corpus, data.Corpus]:
    """Returns the built-in BERT, notes, and others."""
    split = _made_up(number, 20, settings)
    return model_of("builtin/bert-tiny", CLASSIFICATION, settings.seed), split.train, split.held_out


def _made_up(samples: int, held_out: int, settings: Settings) -> data.Split:
    """Returns built-in notes."""
    return data.read_split(
        "builtin/notes",
        split="train",
        text=None,
        label=None,
        samples=samples,
        held_out=held_out,
        seed=settings.seed,
    )


def _asset(settings: Settings, path: str) -> Path:
    """Returns where a model or data set is.

    Raises:
        Skip: It is not there.
    """
    if settings.assets is None:
        raise Skip(f"FEDLEAK_ASSETS is not set: it would hold {path}")
    if not (settings.assets / path).exists():
        raise Skip(f"FEDLEAK_ASSETS holds no {path}")
    return settings.assets / path


def _there(values: Mapping[str, float | None]) -> dict[str, Value]:
    """Returns the values that there are."""
    return {name: value for name, value in values.items() if value is not None}
