"""What DP-SGD costs a client: time and memory of one FedSGD gradient, with and without.

    python experiments/benchmarks/private_training.py [--sizes 6x384] [--batches 4 16] [--tokens 16]

  plain         the gradient of the mean loss
  examples      the gradient of every example, made and clipped (Opacus)
  ghost         norms without gradients, then a second backward pass (Opacus)
  as used       the one of the two that `dp_sgd` takes for this model

BERT and GPT-2 classifiers with random weights, 30,522 tokens, whole and with LoRA of rank 8; no
files are needed. Each line is a process of its own, because the memory is the most that the process
ever held above what the loaded model takes, sampled every millisecond. CPU seconds of one thread,
the median of `--repeats`, each beside the plain one of the same process.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import torch
from arguments import parser_of
from clocks import Most, in_turns
from material import bert_config, gradient_of
from transformers import BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

from fedleak import models
from fedleak.models import LanguageModel
from fedleak.models.lora import Lora, adapt_
from fedleak.training import private_steps
from fedleak.training.local import local_update_
from fedleak.training.settings import PrivateSteps
from fedleak.training.steps import Batch
from fedleak.util.rng import stream

VOCABULARY, RANK = 30522, 8
PLAIN, EXAMPLES, GHOST = "plain", "examples", "ghost"


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        family: "bert" or "gpt2".
        layers, width: Its size.
        lora: Only adapters and the classifier are trained.
        batch, tokens: Texts, and tokens in each.
    """

    family: str
    layers: int
    width: int
    lora: bool
    batch: int
    tokens: int


class Cost(NamedTuple):
    """Of one gradient: CPU seconds, and MiB above the loaded model."""

    seconds: float
    mib: float


def main() -> None:
    """Prints a line per case and way."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["6x384"], help="layers x width")
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print("| model | texts | way | ms | ratio | MiB | as used |\n|---|---|---|---|---|---|---|")
    for size in args.sizes:
        layers, width = map(int, size.split("x"))
        for family in ("bert", "gpt2"):
            for lora in (False, True):
                for batch in args.batches:
                    case = Case(family, layers, width, lora, batch, args.tokens)
                    print("\n".join(lines(case, args.repeats)), flush=True)


def lines(case: Case, repeats: int) -> Iterator[str]:
    """Yields the lines of one case."""
    name = f"{case.family} {case.layers}x{case.width}{', LoRA' if case.lora else ''}"
    costs = {way: apart(measure, case, way, repeats) for way in (PLAIN, EXAMPLES, GHOST)}
    for way, cost in costs.items():
        ratio = cost.seconds / costs[PLAIN].seconds
        used = way == (EXAMPLES if case.lora else GHOST)
        yield (
            f"| {name} | {case.batch} | {way} | {1000 * cost.seconds:.0f} | "
            f"{ratio:.1f} | {cost.mib:.0f} | {'yes' if used else ''} |"
        )


def apart(measured: Callable[..., Cost], *arguments: Any) -> Cost:
    """Returns a cost, measured in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(measured, *arguments).result()


def measure(case: Case, way: str, repeats: int) -> Cost:
    """Returns the cost of one gradient in this process."""
    torch.set_num_threads(1)
    model = made(case)
    rng = stream(0, "benchmark")
    ids = torch.randint(VOCABULARY, (case.batch, case.tokens), generator=rng).tolist()
    labels = [i % 2 for i in range(case.batch)]
    return cost_of(work(model, way, ids, labels), repeats)


def cost_of(do: Callable[[], object], repeats: int) -> Cost:
    """Returns what an action costs in this process."""
    own = psutil.Process()
    before = own.memory_info().rss
    with Most(lambda: int(own.memory_info().rss - before), 0.001) as most:
        do()
    (seconds,) = in_turns([do], repeats)
    return Cost(seconds, most.value / 2**20)


def work(
    model: LanguageModel, way: str, ids: list[list[int]], labels: list[int]
) -> Callable[[], object]:
    """Returns what is timed."""
    if way == PLAIN:
        return lambda: local_update_(model, ids, labels, gradient_of(len(ids)), seed=0)
    private = PrivateSteps(1.0, 1.0, "fixed")
    return lambda: private_steps.private_gradient(
        model,
        Batch(ids, labels),
        len(ids),
        private,
        stream(0, "noise"),
        private_steps.Seen(),
        ghost=way == GHOST,
    )


def made(case: Case) -> LanguageModel:
    """Returns a classifier of that size with random weights."""
    torch.default_generator.manual_seed(0)
    family = models.families()[case.family]
    module: torch.nn.Module
    if case.family == "bert":
        config = bert_config(VOCABULARY, case.layers, case.width, case.width // 32)
        module = BertForSequenceClassification(config)
    else:
        module = GPT2ForSequenceClassification(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=case.width,
                n_layer=case.layers,
                n_head=case.width // 32,
                pad_token_id=0,
                attn_implementation="eager",
            )
        )
    if case.lora:
        adapt_(module, Lora(RANK, 16.0), family.classifier)
    return LanguageModel(
        module=module.eval(), tokenizer=_Padding(), family=family, task=models.CLASSIFICATION
    )


class _Padding:
    """All that training asks of a tokenizer."""

    pad_token_id = 0


if __name__ == "__main__":
    main()
