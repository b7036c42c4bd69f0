"""Enters the authors' code of LAMP (eth-sri/lamp) as an outside attack.

    git clone https://github.com/eth-sri/lamp && git -C lamp checkout 852d12f
    LAMP_CODE=$PWD/lamp fedleak bench --attacks experiments/outside/lamp-authors.toml

It needs torch, transformers and scipy. `LAMP_CODE` names the folder of their code. What
follows the two paths are arguments of their `attack.py`. `--prior FOLDER` is a language model in
the victim's vocabulary, in place of theirs; without one, their `coeff_perplexity` is 0.

What runs is their `reconstruct`, with the start, the loss, the optimiser and the reordering of
tokens. These things are put in its way, and no others:

- the gradient that was observed, where they compute that of the private sentences;
- the lengths and labels that were granted, where they read those of the private sentences;
- the token ids as the answer, where they match sentences to the private ones for their table;
- this model's numbers of [CLS], [SEP] and [PAD], of tokens that no sentence has, and the mean norm
  of its word embeddings (`init_size`), where theirs are those of bert-base-uncased;
- stand-ins for names that their libraries had and that are not used here.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

BERT_BASE_VOCABULARY = 30_522


class NotForLampError(Exception):
    """The attack cannot work on what was observed."""


class Shape:
    """Stands for their tokenizer: knows how long each sentence is, and writes answers as ids."""

    def __init__(self, lengths: list[int], tokenizer: Any, vocabulary: int) -> None:
        self._lengths, self._tokenizer, self.vocab_size = lengths, tokenizer, vocabulary

    def __call__(self, sequences: Any, **_: Any) -> Any:
        """Returns a batch of these lengths; which tokens are in it is not known."""
        import torch
        from transformers import BatchEncoding

        ids = torch.full((len(self._lengths), max(self._lengths)), self._tokenizer.pad_token_id)
        for row, length in zip(ids, self._lengths, strict=True):
            row[:length] = self._tokenizer.unk_token_id
        return BatchEncoding({"input_ids": ids})

    def batch_decode(self, ids: Any) -> list[str]:
        """Returns what they print."""
        return list(self._tokenizer.batch_decode(ids))

    def decode(self, ids: Any) -> str:
        """Returns what they answer."""
        return json.dumps(ids.tolist())


class NoPrior:
    """Stands for their language model where there is none."""

    def __init__(self, embeddings: Any, device: str) -> None:
        self._embeddings, self.device = embeddings, device

    def get_input_embeddings(self) -> Any:
        """Returns an embedding that nobody looks at."""
        return self._embeddings

    def __call__(self, **_: Any) -> Any:
        """Finds all texts alike."""
        import torch

        return SimpleNamespace(loss=torch.zeros((), device=self.device))


class NoMetric:
    """Stands for ROUGE, by which they match answers to private sentences."""

    def compute(self, **_: Any) -> Any:
        """Finds all pairs alike."""
        return {"rouge1": SimpleNamespace(mid=SimpleNamespace(fmeasure=0.0))}


def answer(folder: Path, prior: Path | None, theirs: list[str]) -> list[list[int]]:
    """Returns the token ids of each sequence that their code finds."""
    seen = json.loads((folder / "observation.json").read_text())
    known, model_table = seen["knowledge"], seen["model"]
    if model_table["type"] != "bert" or model_table["loss"] != "cross-entropy":
        raise NotForLampError("their code is for BERT classifiers with cross-entropy")
    if known["lengths"] is None or known["labels"] is None:
        raise NotForLampError("their code is told the lengths and the labels: grant both")
    if seen["update"]["kind"] == "delta" and known["local_steps"] != 1:
        raise NotForLampError("their code is for one step")

    import torch
    from safetensors.torch import load_file
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    device = seen["device"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "model", attn_implementation="eager"
    )
    model.to(device).eval()
    update = load_file(folder / "update.safetensors", device=device)
    if seen["update"]["kind"] == "delta":
        update = {name: tensor / -known["learning_rate"] for name, tensor in update.items()}
    observed = [
        update[name].float() if name in update else None for name, _ in model.named_parameters()
    ]
    embeddings = model.get_input_embeddings()
    lm: Any = NoPrior(embeddings, device)
    if prior is not None:
        lm = AutoModelForCausalLM.from_pretrained(prior).to(device).eval()
    given = ["--dataset", "cola", "--split", "test", "--n_inputs", "1", "--device", device]
    given += ["--batch_size", str(len(known["lengths"])), "--rng_seed", str(seen["seed"])]
    norms = embeddings.weight.detach().norm(dim=1)
    given += ["--init_size", str(float(norms.mean()))]
    given += [] if prior is not None else ["--coeff_perplexity", "0"]
    attack = their_code(Path(os.environ["LAMP_CODE"]), tokenizer, [*given, *theirs])
    attack.compute_grads = lambda *_: observed
    if len(tokenizer) != BERT_BASE_VOCABULARY:
        never = {tokenizer.unk_token_id, tokenizer.mask_token_id}
        # A row of zeros, as padding has in a new model, has no angle to anything.
        never |= {i for i, norm in enumerate(norms.tolist()) if norm == 0}
        use_tokens_of_(attack, sorted(never))
    labels = torch.tensor([known["labels"]], device=device)
    texts, _ = attack.reconstruct(
        attack.args,
        device,
        ([""] * len(known["lengths"]), labels),
        NoMetric(),
        Shape(known["lengths"], tokenizer, len(tokenizer)),
        lm,
        model,
    )
    return [json.loads(text) for text in texts]


def their_code(folder: Path, tokenizer: Any, arguments: list[str]) -> Any:
    """Imports their attack.py, with arguments and with this model's numbers of special tokens."""
    import transformers

    for name in ("AdamW", "BeamSearchScorer"):
        if not hasattr(transformers, name):
            setattr(transformers, name, None)
    datasets: Any = ModuleType("datasets")
    datasets.load_dataset = datasets.load_metric = None
    real = sys.modules.get("datasets")
    sys.modules["datasets"] = datasets
    sys.path.insert(0, str(folder))
    sys.argv = ["attack.py", *arguments]
    import constants  # type: ignore[import-not-found]

    constants.BERT_CLS_TOKEN = tokenizer.cls_token_id
    constants.BERT_SEP_TOKEN = tokenizer.sep_token_id
    constants.BERT_PAD_TOKEN = tokenizer.pad_token_id
    import attack  # type: ignore[import-not-found]

    del sys.modules["datasets"]
    if real is not None:
        sys.modules["datasets"] = real
    return attack


def use_tokens_of_(attack: Any, never: list[int]) -> None:
    """Names the tokens that no sentence has, where theirs are numbers of another vocabulary."""
    import init  # type: ignore[import-not-found]

    closest = attack.get_closest_tokens

    def of_this_vocabulary(embeds: Any, _: Any, weight: Any, **how: Any) -> Any:
        return closest(embeds, never, weight, **how)

    attack.get_closest_tokens = init.get_closest_tokens = of_this_vocabulary


def main() -> None:
    """Reads the observation and writes the answer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("observation", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--prior", type=Path)
    args, theirs = parser.parse_known_args()
    if "LAMP_CODE" not in os.environ:
        sys.exit("LAMP_CODE is not set: name the folder of eth-sri/lamp")
    table: dict[str, Any] = {"format": "fedleak-answer", "version": 1}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            sequences = answer(args.observation, args.prior, theirs)
        table |= {"status": "recovered", "sequences": sequences}
    except NotForLampError as error:
        table |= {"status": "inadmissible", "reason": str(error)}
    args.answer.write_text(json.dumps(table))


if __name__ == "__main__":
    main()
