"""FlowerTune's example, tapped: import it in the words of an experiment, and ask who was in.

    python experiments/flowertune.py --model FOLDER --out FOLDER [--clients 20] [--texts 160] ...

The app below is Flower's example flowertune-llm (client_app.py, server_app.py, dataset.py and
models.py) with what needs a hub or a GPU swapped: the model and the data are local, the base is not
quantised, and transformers' Trainer with a collator of the same rule stands for TRL's. An end token
closes each text. One line of the server is new.

It prints what `fedleak import` makes of the tap and what `fedleak attack` finds.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from fedleak.data.notes import notes
from fedleak.flower.inline import NODE_ID, RUN_ID, InlineGrid
from fedleak.tap import tap

PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n### Instruction:\n{instruction}\n### Response: {response}"
)
HELD_OUT = 200


# --- dataset.py and models.py ---------------------------------------------------------------------


class CompletionOnly(DataCollatorForLanguageModeling):  # type: ignore[misc]
    """What TRL's DataCollatorForCompletionOnlyLM does: only what stands behind a template counts.

    Args:
        template_ids: Its tokens.
        tokenizer: Of the model.
    """

    def __init__(self, template_ids: Sequence[int], tokenizer: Any) -> None:
        super().__init__(tokenizer=tokenizer, mlm=False)
        self.template_ids = list(template_ids)

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        """Returns a batch whose labels are -100 up to the end of the last template."""
        batch: dict[str, Any] = super().torch_call(examples)
        size = len(self.template_ids)
        for labels in batch["labels"]:
            ids = labels.tolist()
            starts = [i for i in range(len(ids)) if ids[i : i + size] == self.template_ids]
            labels[: starts[-1] + size if starts else len(ids)] = -100
        return batch


def tokenizer_and_collator(name: str) -> tuple[Any, CompletionOnly]:
    """Returns the tokenizer and the collator, as the example has them."""
    tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True, padding_side="right")
    if tokenizer.pad_token in (None, tokenizer.eos_token):  # else the end token is masked, too
        tokenizer.pad_token = tokenizer.unk_token
    template_ids = tokenizer.encode("\n### Response:", add_special_tokens=False)[2:]
    return tokenizer, CompletionOnly(template_ids, tokenizer)


def load_data(partition: int, count: int) -> list[str]:
    """Returns the texts of a client; partition -1 has those that nobody trains on."""
    texts = [PROMPT.format(instruction="Write down a note.", response=n.text) for n in notes(9000)]
    start = HELD_OUT + partition * count
    return texts[:HELD_OUT] if partition < 0 else texts[start : start + count]


def get_model(config: Mapping[str, Any]) -> Any:
    """Returns the model with adapters, which begin alike everywhere."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(str(config["model.name"]))
    return get_peft_model(
        model,
        LoraConfig(
            r=int(config["model.lora.peft-lora-r"]),
            lora_alpha=int(config["model.lora.peft-lora-alpha"]),
            lora_dropout=float(config["model.lora.dropout"]),
            task_type="CAUSAL_LM",
        ),
    )


def cosine_annealing(round: int, rounds: int, highest: float, lowest: float) -> float:
    """Returns the learning rate of a round."""
    return lowest + 0.5 * (highest - lowest) * (1 + math.cos(math.pi * round / rounds))


# --- client_app.py --------------------------------------------------------------------------------

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Trains the adapters on local data."""
    config, partition = context.run_config, int(context.node_config["partition-id"])
    round = int(str(message.content["config"]["server-round"]))
    texts = load_data(partition, int(config["texts"]))
    tokenizer, collator = tokenizer_and_collator(str(config["model.name"]))
    model = get_model(config)
    set_peft_model_state_dict(model, message.content.array_records["arrays"].to_torch_state_dict())
    rate = cosine_annealing(round, int(config["schedule-rounds"]), 5e-5, 1e-6)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(config["results"]),
            learning_rate=rate,
            lr_scheduler_type="constant",
            per_device_train_batch_size=int(config["batch-size"]),
            max_steps=int(config["max-steps"]),
            bf16=bool(config["bf16"]),
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=partition,
        ),
        train_dataset=[
            {"input_ids": [*ids, tokenizer.eos_token_id]} for ids in tokenizer(texts)["input_ids"]
        ],
        data_collator=collator,
    )
    loss = trainer.train().training_loss
    line = {"round": round, "node": context.node_id, "texts": texts}
    with open(str(config["truth"]), "a") as file:  # for the audit: it never leaves the client
        file.write(json.dumps(line) + "\n")
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(texts)})
    arrays = ArrayRecord(get_peft_model_state_dict(model))
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


# --- server_app.py --------------------------------------------------------------------------------

server_app = ServerApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Trains."""
    config = context.run_config
    strategy = FedAvg(
        fraction_train=float(config["strategy.fraction-train"]),
        fraction_evaluate=0.0,
        min_train_nodes=1,
        min_available_nodes=1,
    )
    strategy.start(
        grid=tap(grid, str(config["tapped"])),  # the one line
        initial_arrays=ArrayRecord(get_peft_model_state_dict(get_model(config))),
        num_rounds=int(config["num-server-rounds"]),
    )


# --- the run and its audit ------------------------------------------------------------------------


def about(config: Mapping[str, Any], held_out: Path) -> dict[str, Any]:
    """Returns what the file beside the tap says, in the words of an experiment."""
    return {
        "model": {
            "name": config["model.name"],
            "task": "causal-lm",
            "response_template": "### Response:",
            "lora": {
                "rank": config["model.lora.peft-lora-r"],
                "alpha": float(config["model.lora.peft-lora-alpha"]),
                "dropout": config["model.lora.dropout"],
            },
        },
        "training": {
            "optimiser": "adamw",
            "max_grad_norm": 1.0,
            "precision": "bfloat16-mixed" if config["bf16"] else "float32",
            "learning_rate": 5e-5,
            "schedule": "cosine",
            "schedule_rounds": config["schedule-rounds"],
            "final_learning_rate": 1e-6,
            "batch_size": config["batch-size"],
            "local_steps": config["max-steps"],
            "dropout": config["model.lora.dropout"] > 0,
        },
        "truth": {"file": config["truth"], "held_out": str(held_out)},
        "attack": [{"kind": "membership"}],
    }


def tapped(out: Path, clients: int, **changes: Any) -> Path:
    """Trains as the example does, and returns the file beside the tap.

    Args:
        out: A folder for all that is written.
        clients: How many there are.
        changes: To the configuration of the run.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "model.lora.peft-lora-r": 32,
        "model.lora.peft-lora-alpha": 64,
        "model.lora.dropout": 0.075,
        "batch-size": 16,
        "max-steps": 10,
        "bf16": True,
        "strategy.fraction-train": 0.1,
        "num-server-rounds": 1,
        "schedule-rounds": 200,
        "texts": 160,
        "tapped": str(out / "tap"),
        "truth": str(out / "truth.jsonl"),
        "results": str(out / "results"),
        **changes,
    }
    grid = InlineGrid(client_app, clients, config)
    server_app(grid, Context(RUN_ID, NODE_ID, {}, RecordDict(), config))  # type: ignore[arg-type]
    held_out = out / "held-out.jsonl"  # texts of several lines
    texts = load_data(-1, 0)
    held_out.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    file = out / "about.toml"
    file.write_text(tomli_w.dumps(about(config, held_out)))
    return file


def main() -> None:
    """Trains, imports and attacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="the folder of a LLaMA")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--texts", type=int, default=160)
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes = {"model.name": options.model, "texts": options.texts}
    file = tapped(options.out, options.clients, **changes)
    run = options.out / "run"
    fedleak = [sys.executable, "-m", "fedleak"]
    subprocess.run(
        [*fedleak, "import", str(options.out / "tap"), "--about", str(file), "--out", str(run)],
        check=True,
    )
    subprocess.run([*fedleak, "attack", str(run)], check=True)


if __name__ == "__main__":
    main()
