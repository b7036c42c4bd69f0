"""What the closed form of `position_marginals` reads of updates of one text, beside `auto`.

    python experiments/benchmarks/single_texts.py [--short 20] [--long 4] [--seconds 12]

MiniLM (6 x 384, pretrained) as a classifier with dropout on, whole updates of one text: sentences
of CoLA's out-of-domain set in an order that the seed draws, and paragraphs of WikiText-2 of so many
words. An update is one gradient, or the weights' change by five steps of SGD. `auto without` is
`auto` without the closed form. Nothing is told. Seconds are CPU time of this process.

Prints a line per texts, update and attack:

  tokens      of the texts, special ones included
  exact       texts with equal token ids
  ROUGE-L     the mean
  certain     texts that the attack calls determined, or likely
  seconds     CPU time, the mean and the longest
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from subspace_attacks import MINILM, load, read_corpus

from fedleak import data
from fedleak.attacks import clock
from fedleak.attacks.analytic.position_marginals import PositionMarginals
from fedleak.attacks.auto import attack as ensemble
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.reconstruction import Reconstruction
from fedleak.audit.metrics.rouge import rouge
from fedleak.models import LanguageModel
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

STEPS = {UpdateKind.GRADIENT: 1, UpdateKind.DELTA: 5}


class Answer(NamedTuple):
    """How an attack did on an update."""

    tokens: int
    exact: bool
    rouge_l: float
    certain: bool
    seconds: float


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--short", type=int, default=20, help="CoLA sentences")
    parser.add_argument("--long", type=int, default=4, help="WikiText-2 paragraphs")
    parser.add_argument("--words", type=int, default=70, help="of a paragraph")
    parser.add_argument("--seconds", type=float, default=12.0, help="for an update, of auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--assets", type=Path, default=os.environ.get("FEDLEAK_ASSETS"))
    args = parser.parse_args()
    if args.assets is None:
        parser.error("say where models and data are: --assets, or FEDLEAK_ASSETS")
    torch.set_num_threads(1)
    args.device, clock.now = "cpu", time.process_time
    model = load(MINILM, args)
    corpus = read_corpus(args.assets, args.seed)
    texts = {
        "CoLA": list(corpus.texts[: args.short]),
        "WikiText-2": paragraphs(args.assets, args.words)[: args.long],
    }
    attacks: dict[str, Callable[..., Reconstruction]] = {
        PositionMarginals.kind: PositionMarginals(),
        "auto": Auto(seconds=args.seconds),
        "auto without": Auto(seconds=args.seconds),
    }
    print(HEADING)
    for name, some in texts.items():
        for kind, steps in STEPS.items():
            rows: dict[str, list[Answer]] = {attack: [] for attack in attacks}
            for number, text in enumerate(some):
                seen, ids = observed(model, text, number, kind, steps, args.seed)
                for attack, ask in attacks.items():
                    with asked_without(attack == "auto without"):
                        rows[attack].append(answered(ask, seen, ids, model, args.seed))
            for attack, answers in rows.items():
                print(line(name, steps, attack, answers), flush=True)


def paragraphs(assets: Path, words: int) -> list[str]:
    """Returns the beginnings, of so many words, of long paragraphs."""
    text = (assets / "data/wikitext2/test.txt").read_text(encoding="utf-8")
    every = (paragraph.split() for paragraph in text.splitlines())
    return [" ".join(paragraph[:words]) for paragraph in every if len(paragraph) >= words]


def observed(
    model: LanguageModel, text: str, number: int, kind: UpdateKind, steps: int, seed: int
) -> tuple[Observation, tuple[int, ...]]:
    """Returns what the server sees of a client with one text, and the text."""
    ids = data.tokenise([text], model.encode, limit=model.max_length, max_length=None)
    local = LocalTraining(kind=kind, batch_size=1, epochs=steps, learning_rate=1e-3, dropout=True)
    before = {name: value.clone() for name, value in model.parameters().items()}
    update = local_update_(model, ids, [number % 2], local, seed=seed + number)
    for name, value in model.module.named_parameters():
        value.data.copy_(before[name])
    known = Knowledge(learning_rate=local.learning_rate, local_steps=steps, dropout=True)
    return Observation(round=1, client=0, update=update, knowledge=known), tuple(ids[0])


@contextmanager
def asked_without(closed_form: bool) -> Iterator[None]:
    """Leaves the closed form out of `auto` for a while, where that is wanted."""
    whole = ensemble.ENSEMBLE
    if closed_form:
        ensemble.ENSEMBLE = whole[1:]
    try:
        yield
    finally:
        ensemble.ENSEMBLE = whole


def answered(
    ask: Callable[..., Reconstruction],
    seen: Observation,
    ids: tuple[int, ...],
    model: LanguageModel,
    seed: int,
) -> Answer:
    """Attacks an update and scores the answer."""
    begin = time.process_time()
    answer = ask(seen, model, rng=stream(seed, "attack"))
    seconds = time.process_time() - begin
    (best, *_) = answer.sequences or [()]
    likely: Any = answer.diagnostics.get("likely", [answer.diagnostics.get("determined")])
    return Answer(
        tokens=len(ids),
        exact=best == ids,
        rouge_l=rouge(model.decode(best), model.decode(ids)).rougeL,
        certain=any(likely),
        seconds=seconds,
    )


HEADING = (
    f"{'texts':<10} {'steps':>5} {'attack':<18} {'tokens':>8} {'exact':>7} {'ROUGE-L':>7} "
    f"{'certain':>7} {'seconds':>8} {'longest':>8}"
)


def line(name: str, steps: int, attack: str, answers: list[Answer]) -> str:
    """Returns the answers of an attack as text, below HEADING."""
    count, lengths = len(answers), [answer.tokens for answer in answers]
    seconds = [answer.seconds for answer in answers]
    tokens = f"{min(lengths)}-{max(lengths)}"
    exact, certain = (
        f"{sum(column)}/{count}"
        for column in ([a.exact for a in answers], [a.certain for a in answers])
    )
    rouge_l = sum(answer.rouge_l for answer in answers) / count
    return (
        f"{name:<10} {steps:>5} {attack:<18} {tokens:>8} {exact:>7} {rouge_l:>7.0f} "
        f"{certain:>7} {sum(seconds) / count:>8.2f} {max(seconds):>8.2f}"
    )


if __name__ == "__main__":
    main()
