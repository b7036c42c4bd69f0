"""How many sentences `dager` and `keyspan` recover exactly, how many batches they prove, how fast.

    python experiments/benchmarks/subspace_attacks.py [--rows NAME...]

Prints a line per case and batch size, over batches of CoLA sentences in an order that the seed
draws; no sentence is in two batches of a line. An attack sees what the server receives and is told
no other fact.

  gpt2-dager      GPT-2's architecture (12 x 768, random weights) and tokenizer, whole update
  minilm-dager    MiniLM (6 x 384, pretrained), classifier, whole update
  minilm-keyspan  the same
  minilm-query    keyspan on the query matrix of layer 1 alone
  gpt2-keyspan    as gpt2-dager
  stories-*       stories15m (LLaMA, 6 x 288, pretrained), classifier, whole update
  stories-f16-*   the same, sent in float16; stories-bf16-*: in bfloat16
  stories-lora*   the same with new adapters of that rank, which alone are sent, with the classifier
  smollm-*        SmolLM2-135M (LLaMA, 30 x 576, pretrained), from the folder of --smollm

The columns:

  exact      sentences with equal token ids, special tokens aside, one to one; 95 % Wilson interval
  bags       batches whose distinct tokens are exactly those that the attack names
  proved     batches that the attack proves whole
  seconds    of the attack alone, a batch: CPU time, or on a GPU the time that passed
  w/o cert.  of the attack without its certificate, where that can be left out
  margin     how many times worse than a certain sentence the best rejected one in its place is;
             the smallest of all
"""

import argparse
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from arguments import parser_of, with_assets
from material import content, gradient_of, model_of, timed
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from fedleak import data
from fedleak.attacks import Attack
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.audit.metrics.intervals import wilson
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel
from fedleak.models.lora import Lora
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

MINILM, GPT2, STORIES, SMOLLM = "minilm", "gpt2", "stories", "smollm"
FOLDERS = {MINILM: "minilm-l6-h384", STORIES: "stories15m"}
QUERY = ["layer.0.attention.self.query.weight"]


class Case(NamedTuple):
    """An attack on one model.

    `shared`: patterns of what is sent, None is all; `dtype`: how; `rank`: of adapters, 0 is none.
    """

    name: str
    model: str
    attack: Attack
    batch_sizes: tuple[int, ...]
    shared: list[str] | None = None
    dtype: torch.dtype = torch.float32
    rank: int = 0


LIMITED: dict[str, Attack] = {"dager": Dager(seconds=60), "keyspan": Keyspan(seconds=300)}
CASES = (
    Case("gpt2-dager", GPT2, Dager(), (1, 2, 4, 16, 32)),
    Case("minilm-dager", MINILM, Dager(), (1, 2, 4)),
    Case("minilm-keyspan", MINILM, Keyspan(), (1, 4, 8, 16, 32, 64)),
    Case("minilm-query", MINILM, Keyspan(), (1, 4, 8, 16, 32), QUERY),
    Case("gpt2-keyspan", GPT2, Keyspan(), (4, 16, 32)),
    *(Case(f"stories-{name}", STORIES, LIMITED[name], (1, 2, 4, 8, 16, 32)) for name in LIMITED),
    *(
        Case(f"stories-{how}-{name}", STORIES, LIMITED[name], (2,), dtype=dtype)
        for how, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16))
        for name in LIMITED
    ),
    *(
        Case(f"stories-lora{rank}-dager", STORIES, LIMITED["dager"], (1, 2), rank=rank)
        for rank in (8, 16, 32, 64)
    ),
    *(Case(f"smollm-{name}", SMOLLM, LIMITED[name], (1, 4, 8)) for name in LIMITED),
)


class Row(NamedTuple):
    """A line of the table. None: the attack has no such thing."""

    name: str
    batches: int
    sentences: int
    exact: int
    bags: int
    proved: int
    seconds: list[float]
    seconds_without_certificate: list[float] | None
    margin: float | None


def main() -> None:
    """Runs the benchmark."""
    parser = parser_of(__doc__)
    names = [f"{case.name}-{size}" for case in CASES for size in case.batch_sizes]
    parser.add_argument(
        "--rows", nargs="+", metavar="NAME", help="cases, or lines such as minilm-keyspan-8"
    )
    parser.add_argument("--batches", type=int, default=20, help="a line, if there are sentences")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="or cuda")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--task", default=CAUSAL_LM, choices=[CAUSAL_LM, CLASSIFICATION], help="of GPT-2"
    )
    parser.add_argument("--smollm", type=Path, help="folder of SmolLM2-135M")
    parser.add_argument("--json", type=Path, help="keep the rows in this file")
    args = with_assets(parser)
    wanted = args.rows or [name for name in names if args.smollm or SMOLLM not in name]
    for name in wanted:
        if name not in names and name not in [case.name for case in CASES]:
            parser.error(f"there is no row {name!r}: choose from {', '.join(names)}")
    torch.set_num_threads(args.threads)
    corpus = read_corpus(args.assets, args.seed)
    loaded: dict[tuple[str, int], LanguageModel] = {}
    rows: list[Row] = []
    print(HEADING)
    for case in CASES:
        for size in case.batch_sizes:
            if not {case.name, f"{case.name}-{size}"} & set(wanted):
                continue
            which = case.model, case.rank
            if which not in loaded:
                loaded[which] = load(case.model, args, case.rank)
            rows.append(measure(case, loaded[which], corpus, size, args.batches, args.seed))
            print(line(rows[-1]), flush=True)
            if args.json:
                kept = {"settings": vars(args), "rows": [row._asdict() for row in rows]}
                args.json.write_text(json.dumps(kept, indent=1, default=str) + "\n")


def load(name: str, args: argparse.Namespace, rank: int = 0) -> LanguageModel:
    """Returns a model on its device; GPT-2's is made, from random numbers of the seed."""
    lora = Lora(rank, 2.0 * rank) if rank else None
    if name != GPT2:
        folder = args.smollm if name == SMOLLM else args.assets / "models" / FOLDERS[name]
        model = model_of(folder, CLASSIFICATION, args.seed, lora)
    else:
        with TemporaryDirectory() as folder:
            torch.manual_seed(args.seed)
            GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(f"{args.assets}/tokenizers/gpt2")
            tokenizer.save_pretrained(folder)
            model = model_of(folder, args.task, args.seed)
    model.module.to(args.device)
    return model


def read_corpus(assets: Path, seed: int, samples: int | None = None) -> data.Corpus:
    """Returns sentences of CoLA's out-of-domain set with their labels, in a drawn order.

    Args:
        assets: The folder of models and data.
        seed: Of the order.
        samples: How many; None: all of them.
    """
    path = assets / "data/cola/out_of_domain_dev.tsv"
    drawn = data.read_split(
        str(path), split="train", text=3, label=1, samples=samples, held_out=0, seed=seed
    )
    return drawn.train


def measure(
    case: Case, model: LanguageModel, corpus: data.Corpus, size: int, batches: int, seed: int
) -> Row:
    """Attacks batch after batch and scores the answers."""
    ids = data.tokenise(corpus.texts, model.encode, limit=model.max_length, max_length=None)
    local = gradient_of(size)
    attack: Any = case.attack
    bare = replace(attack, certify=False) if hasattr(attack, "certify") else None
    exact = bags = proved = 0
    seconds: list[float] = []
    without: list[float] = []
    margins: list[float] = []
    batches = min(batches, len(ids) // size)
    for batch in range(batches):
        at = slice(batch * size, (batch + 1) * size)
        update = local_update_(model, ids[at], corpus.labels[at], local, seed=seed)
        if case.shared is not None:
            update = partial_update(update, case.shared)
        update = update.changed(lambda value: value.to(case.dtype))
        seen = Observation(round=1, client=0, update=update, knowledge=Knowledge())
        drawn = partial(stream, seed, attack.kind, batch)
        if batch == 0 and model.device.type != "cpu":
            timed(attack, seen, model, drawn())  # the first call on a GPU loads its kernels
        answer, taken = timed(attack, seen, model, drawn())
        seconds.append(taken)
        if bare is not None:
            without.append(timed(bare, seen, model, drawn())[1])
        truth, recovered = content(model, ids[at]), content(model, (answer.sequences or ())[:size])
        exact += (Counter(truth) & Counter(recovered)).total()
        bags += set(answer.tokens or ()) - model.special_ids() == set(chain(*truth))
        proved += answer.verified
        margins += [margin for margin in answer.margins if margin is not None and margin >= 1]
    return Row(
        name=f"{case.name}-{size}",
        batches=batches,
        sentences=batches * size,
        exact=exact,
        bags=bags,
        proved=proved,
        seconds=seconds,
        seconds_without_certificate=without or None,
        margin=min(margins, default=None),
    )


HEADING = (
    f"{'case':<21} {'batches':>7}  {'exact':<26} {'bags':>7} {'proved':>7}  "
    f"{'seconds: mean':>13} {'max':>7} {'w/o cert.':>9} {'margin':>9}"
)


def line(row: Row) -> str:
    """Returns a row as text, below HEADING."""
    rate = wilson(row.exact, row.sentences)
    exact = (
        f"{row.exact}/{row.sentences} {rate.mean:.1%} [{100 * rate.low:.0f}, {100 * rate.high:.0f}]"
    )
    bags, proved = (f"{count}/{row.batches}" for count in (row.bags, row.proved))
    bare = row.seconds_without_certificate
    return (
        f"{row.name:<21} {row.batches:>7}  {exact:<26} {bags:>7} {proved:>7}  "
        f"{fmean(row.seconds):>13.2f} {max(row.seconds):>7.2f} "
        f"{'-' if bare is None else format(fmean(bare), '.2f'):>9} "
        f"{'-' if row.margin is None else format(row.margin, ',.0f'):>9}"
    )


if __name__ == "__main__":
    main()
