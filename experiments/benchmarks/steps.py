"""What `fedleak.attack` costs of an update of one's own, in client's steps on the same texts.

    python experiments/benchmarks/steps.py [--sizes 1 4 16] [--batches 5] [--attack auto] [--seed 7]

GPT-2's architecture (12 x 768, random weights), next-token training on CoLA's out-of-domain set in
an order that the seed draws; the model and its gradient are given as transformers has them. All of
the call counts: the copy of the model, the checks, the attack, and the proof of its answer.

Prints a line per size: how many batches are exact and proved, CPU seconds of a step and of the call
(means), and the call in steps (the mean and the largest of the batches).
"""

import time
from collections.abc import Sequence
from statistics import mean

import torch
from arguments import parser_of, with_assets
from subspace_attacks import read_corpus
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import fedleak


def main() -> None:
    """Runs the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--attack", default="auto")
    parser.add_argument("--seed", type=int, default=7)
    args = with_assets(parser)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(f"{args.assets}/tokenizers/gpt2")
    tokenizer.pad_token = tokenizer.eos_token
    model = GPT2LMHeadModel(GPT2Config(pad_token_id=tokenizer.eos_token_id)).eval()
    texts = read_corpus(args.assets, args.seed).texts
    print("| texts a batch | exact | proved | a step, s | the call, s | in steps, mean (max) |")
    print("|---|---|---|---|---|---|")
    for size in args.sizes:
        measured = []
        for _ in range(args.batches):
            batch, texts = texts[:size], texts[size:]
            step(model, tokenizer, batch)  # the first of a shape allocates
            begin = time.process_time()
            step(model, tokenizer, batch)
            between = time.process_time()
            sent = fedleak.SentUpdate(num_examples=size)
            result = fedleak.attack(model, model, tokenizer, sent=sent, kind=args.attack)
            seconds = between - begin, time.process_time() - between
            measured.append((*seconds, sorted(result.texts) == sorted(batch), result.verified))
        steps, calls, exact, proved = zip(*measured, strict=True)
        ratios = [call / step_seconds for step_seconds, call in zip(steps, calls, strict=True)]
        print(
            f"| {size} | {sum(exact)}/{len(exact)} | {sum(proved)}/{len(proved)} "
            f"| {mean(steps):.2f} | {mean(calls):.2f} | {mean(ratios):.1f} ({max(ratios):.1f}) |",
            flush=True,
        )


def step(model: GPT2LMHeadModel, tokenizer: AutoTokenizer, texts: Sequence[str]) -> None:
    """Computes the gradient of a batch, as a client's training loop does."""
    model.zero_grad(set_to_none=True)
    ended = [text + tokenizer.eos_token for text in texts]
    batch = tokenizer(ended, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    model(**batch, labels=labels).loss.backward()


if __name__ == "__main__":
    main()
