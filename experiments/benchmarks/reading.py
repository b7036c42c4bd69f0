"""What attacks read of updates of one client's texts, whatever is done to the updates.

    python experiments/benchmarks/reading.py [--texts cola] [--sizes 1 4] [--sent plain mask=0.9]
        [--attacks auto auto-keyspan] [--dropout] [--steps 5] [--model minilm] [--updates 5]

Whole updates of a classifier: MiniLM (6 x 384, pretrained, heads of 32), or GPT-2's architecture
(12 x 768, random weights, heads of 64). Texts are `cola` (its out-of-domain set),
`rotten_tomatoes` or `wikitext2` (beginnings of paragraphs) of `--words` words, in an order that the
seed draws; no text is in two updates of a line. An update is one gradient, or with `--steps` the
weights' change by so many steps of SGD. `--sent` is what a client does to it: `plain`,
`noise=3e-4` (standard deviation), `mask=0.9`, `prune=0.9` (share of zeros), `quantize=4` (bits),
`sign`, `cast=bfloat16`, `dp_sgd=1e-4` (noise multiplier, at a clipping norm of 1; its epsilon is
accounted for this one step, at a delta of 1e-5). Nothing is told but whether there were steps and
dropout.

`auto-KIND` is `auto` without that attack. Seconds are CPU time of this process; an attack has
`--seconds` for an update.

Prints a line per size, `--sent` and attack:

  exact     texts with equal token ids, one to one; Wilson's 95 % interval in per cent
  ROUGE-L   the mean in the best match of texts; `other`: that of the previous update's answer
  proved    updates that are proved whole, by the attack, or by making the client's steps again
  likely    updates of which it calls a text likely, or determined; how many of them are exact
  evidence  the largest of an exact text, and the smallest of another one
  seconds   CPU time of an update, the mean and the longest

`--keep FILE` adds these figures to a file, a line of JSON each.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from unittest import mock

import torch
from arguments import parser_of, with_assets
from material import update_of
from subspace_attacks import GPT2, MINILM, load, read_corpus

from fedleak import data
from fedleak.attacks import Attack, clock, kinds
from fedleak.attacks.auto import attack as ensemble
from fedleak.attacks.reconstruction import Reconstruction
from fedleak.audit.answer_scores import score_sequences
from fedleak.audit.metrics.intervals import wilson
from fedleak.defenses import Defense
from fedleak.defenses.cast import Cast
from fedleak.defenses.dp_sgd import DpSgd
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.defenses.prune import Prune
from fedleak.defenses.quantize import Quantize
from fedleak.defenses.sign import Sign
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.running.workers import attempt
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.privacy.accounting import FAST_ACCOUNTANT, compose
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

Ids = tuple[int, ...]
Labelled = tuple[str, int]

SENT: dict[str, Callable[[str], Defense]] = {
    "plain": lambda _: Defense(),
    "noise": lambda value: GaussianNoise(sigma=float(value)),
    "mask": lambda value: Mask(fraction=float(value)),
    "prune": lambda value: Prune(fraction=float(value)),
    "quantize": lambda value: Quantize(bits=int(value)),
    "sign": lambda _: Sign(),
    "cast": lambda value: Cast(dtype="float16" if value == "float16" else "bfloat16"),
    "dp_sgd": lambda value: DpSgd(noise_multiplier=float(value), sampling="fixed"),
}
DELTA = 1e-5


class Answer(NamedTuple):
    """An update's texts, and what an attack says of them."""

    truth: list[Ids]
    answer: Reconstruction
    seconds: float

    @property
    def texts(self) -> Sequence[Ids]:
        """The texts of the answer."""
        return (self.answer.sequences or ())[: len(self.truth)]

    @property
    def exact(self) -> int:
        """How many texts of the update the answer has."""
        return (Counter(self.truth) & Counter(self.texts)).total()

    @property
    def likely(self) -> bool:
        """Whether the attack says that a text is no guess, where it proves nothing."""
        diagnostics = self.answer.diagnostics
        return any(diagnostics.get("likely", [diagnostics.get("determined")]))

    def evidence(self, *, right: bool) -> list[float]:
        """The evidence of the answer's exact texts, or of the others."""
        pairs = zip(self.texts, self.answer.evidence or (), strict=False)
        return [value for ids, value in pairs if (ids in self.truth) == right]


def main() -> None:
    """Runs the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=MINILM, choices=[MINILM, GPT2])
    parser.add_argument("--texts", default="cola", choices=["cola", "rotten_tomatoes", "wikitext2"])
    parser.add_argument("--words", type=int, nargs=2, default=[20, 30], help="not of cola")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--updates", type=int, default=5, help="of each size")
    parser.add_argument("--sent", nargs="+", default=["plain"])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--attacks", nargs="+", default=["auto"])
    parser.add_argument("--seconds", type=float, default=30.0, help="for an update")
    parser.add_argument("--prior", help="a causal language model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add the figures to this file")
    args = with_assets(parser)
    torch.set_num_threads(1)
    args.device, args.task, clock.now = "cpu", CLASSIFICATION, time.process_time
    model, texts = load(args.model, args), read_texts(args)
    print(HEADING)
    for size in args.sizes:
        if len(texts) < size * args.updates:
            parser.error(f"there are {len(texts)} such texts: lower --updates")
        for sent in args.sent:
            name, _, value = sent.partition("=")
            observed = [
                observe(model, texts[size * i : size * (i + 1)], SENT[name](value), i, args)
                for i in range(args.updates)
            ]
            for kind in args.attacks:
                with asked_without(kind.removeprefix("auto-")):
                    attack = make(kind.split("-")[0], args)
                    answers = [answered(attack, *pair, model, args.seed) for pair in observed]
                read = figures(answers, model, accounted(SENT[name](value), size, args))
                print(line(f"{size:>4} {sent:<14} {kind:<26}", read), flush=True)
                if args.keep:
                    about = {"size": size, "sent": sent, "attack": kind, "seed": args.seed}
                    with args.keep.open("a") as kept:
                        print(json.dumps(about | read._asdict()), file=kept)


def read_texts(args: Any) -> list[Labelled]:
    """Returns texts with labels in a drawn order."""
    if args.texts == "cola":
        corpus = read_corpus(args.assets, args.seed)
        return [*zip(corpus.texts, corpus.labels, strict=True)]
    folder, (fewest, most) = args.assets / "data" / args.texts, args.words
    if args.texts == "wikitext2":
        lines = (folder / "test.txt").read_text(encoding="utf-8").splitlines()
        pairs = [(" ".join(line.split()[:most]), number % 2) for number, line in enumerate(lines)]
    else:
        pairs = [
            (text.strip(), label)
            for label, end in ((1, "pos"), (0, "neg"))
            for text in (folder / f"rt-polarity.utf8.{end}").read_text("utf-8").splitlines()
        ]
    some = sorted(pair for pair in pairs if fewest <= len(pair[0].split()) <= most)
    random.Random(args.seed).shuffle(some)
    return some


def observe(
    model: LanguageModel, texts: Sequence[Labelled], defense: Defense, number: int, args: Any
) -> tuple[Observation, list[Ids]]:
    """Returns what the server sees of a client with some texts, and the texts."""
    words, labels = zip(*texts, strict=True)
    ids = data.tokenise(words, model.encode, limit=model.max_length, max_length=None)
    local = defense.training(training(len(ids), args))
    update = update_of(model, ids, labels, local, seed=args.seed + number)
    update = defense(update, rng=stream(args.seed, "noise", number))
    known = Knowledge(
        learning_rate=local.learning_rate, local_steps=args.steps or 1, dropout=args.dropout
    )
    seen = Observation(round=1, client=0, update=update, knowledge=known)
    return seen, [tuple(text) for text in ids]


def training(size: int, args: Any) -> LocalTraining:
    """Returns how a client trains."""
    return LocalTraining(
        kind=UpdateKind.DELTA if args.steps else UpdateKind.GRADIENT,
        batch_size=size,
        epochs=args.steps or 1,
        learning_rate=1e-3,
        dropout=args.dropout,
    )


def make(kind: str, args: Any) -> Attack:
    """Returns an attack with its seconds and prior, as far as it takes them."""
    attack: Any = kinds()[kind]
    given = {"seconds": args.seconds, "prior": args.prior}
    names = {field.name for field in fields(attack)}
    made: Attack = attack(**{name: given[name] for name in given.keys() & names})
    return made


def asked_without(kind: str) -> AbstractContextManager[object]:
    """Leaves an attack out of `auto` within the block."""
    others = tuple(member for member in ensemble.ENSEMBLE if member[0].kind != kind)
    return mock.patch.object(ensemble, "ENSEMBLE", others)


def answered(
    attack: Attack, seen: Observation, truth: list[Ids], model: LanguageModel, seed: int
) -> Answer:
    """Attacks an update."""
    begin = time.process_time()
    answer = attack(seen, model, rng=stream(seed, "attack"))
    (answer,) = attempt.answers(attack, [answer], [seen], model, ())
    return Answer(truth, answer, time.process_time() - begin)


class Figures(NamedTuple):
    """What an attack read of the updates of a line; attributes as the head of this file says.

    Attributes:
        texts, exact: Texts, and those with equal token ids.
        rougeL, other: Of its answers, and of the previous update's; None of a single update.
        updates, proved, likely, likely_exact: Updates, those that are proved, those with a text
            that is called likely, and of these the exact ones.
        right, wrong: The largest evidence of an exact text, the smallest of another one.
        seconds, longest: Of an update.
        epsilon: Accounted; None: none is.
    """

    texts: int
    exact: int
    rougeL: float
    other: float | None
    updates: int
    proved: int
    likely: int
    likely_exact: int
    right: float
    wrong: float | None
    seconds: float
    longest: float
    epsilon: float | None


def figures(
    answers: Sequence[Answer], model: LanguageModel, epsilon: float | None = None
) -> Figures:
    """Returns what an attack read."""
    shifted = [answers[-1], *answers[:-1]]
    own, others = (
        mean(
            text.rougeL or 0.0
            for answer, other in zip(answers, some, strict=True)
            for text in score_sequences(other.texts, answer.truth, model).texts or ()
        )
        for some in (answers, shifted)
    )
    likely = [answer for answer in answers if answer.likely]
    return Figures(
        texts=sum(len(answer.truth) for answer in answers),
        exact=sum(answer.exact for answer in answers),
        rougeL=own,
        other=others if len(answers) > 1 else None,
        updates=len(answers),
        proved=sum(answer.answer.verified for answer in answers),
        likely=len(likely),
        likely_exact=sum(answer.exact == len(answer.truth) for answer in likely),
        right=max(
            (value for answer in answers for value in answer.evidence(right=True)), default=0.0
        ),
        wrong=min(
            (value for answer in answers for value in answer.evidence(right=False)), default=None
        ),
        seconds=mean(answer.seconds for answer in answers),
        longest=max(answer.seconds for answer in answers),
        epsilon=epsilon,
    )


def accounted(defense: Defense, size: int, args: Any) -> float | None:
    """Returns the epsilon of a client's update; None: its defense has none."""
    event = defense.event(training(size, args), size, round=1)
    return None if event is None else compose([event], DELTA, FAST_ACCOUNTANT)[0].epsilon


HEADING = (
    f"{'size':>4} {'sent':<14} {'attack':<26} {'exact':>18} {'ROUGE-L (other)':>15} "
    f"{'proved':>7} {'likely (exact)':>14} {'evidence':>14} {'seconds':>8} {'longest':>8} "
    f"{'epsilon':>8}"
)


def line(begin: str, read: Figures) -> str:
    """Returns figures as text, below HEADING."""
    share = wilson(read.exact, read.texts)
    count = f"{read.exact}/{read.texts} [{100 * share.low:.0f}, {100 * share.high:.0f}]"
    rouge = f"{read.rougeL:.0f}" + ("" if read.other is None else f" ({read.other:.0f})")
    evidence = f"{read.right:.0e}" + ("" if read.wrong is None else f", {read.wrong:.0e}")
    epsilon = "-" if read.epsilon is None else f"{read.epsilon:.2g}"
    return (
        f"{begin} {count:>18} {rouge:>15} {f'{read.proved}/{read.updates}':>7} "
        f"{f'{read.likely} ({read.likely_exact})':>14} {evidence:>14} {read.seconds:>8.1f} "
        f"{read.longest:>8.1f} {epsilon:>8}"
    )


if __name__ == "__main__":
    main()
