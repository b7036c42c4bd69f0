"""What a large federation takes: memory, disk and time of the server, and what `kill -9` costs.

    python experiments/benchmarks/scale.py many [--clients 1000]
    python experiments/benchmarks/scale.py large [--clients 50] [--layers 12] [--width 768]
    python experiments/benchmarks/scale.py turns [--clients 12] [--layers 12] [--width 768]

`many` is one round of `builtin/bert-tiny` (FedSGD). `large` is one round of FedAvg of a BERT
classifier with random weights, 30,522 tokens and the size of BERT-base, short texts. Both run in
one process (`inline`), keep no capture that is answered (`audit.keep = "none"`), let four captures
wait for `probes`, and need no files. Each run is a process of its own:

  one client    loads the model and trains the first client of the run, without any server
  the run       trains and attacks all; its disk is looked at every 50 ms
  killed        the same, killed with -9 at the shares of the first run's time that `--kill` names,
                and each time started again; its model and its rows must be those of the run

Memory is the most that the process ever held in pages of its own (anonymous ones: files that are
mapped are not counted), without the workers that attack. What capturing costs a round: the seconds
that the thread that trains spends in `Beside` (waiting for the disk), which is all that a capture
adds to summing an update; and the seconds that the thread beside it writes.

`turns` is the round of `large` that keeps every capture and attacks none. A client's turn is the
time from the beginning of its training to that of the next client's: the training, and sending,
receiving, summing and capturing the update.
"""

import argparse
import itertools
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from clocks import Most

from fedleak import models
from fedleak.config.federation.workload import divide, outline, read_data
from fedleak.config.loading import parse
from fedleak.flower.client import app as client_app
from fedleak.flower.engines import train
from fedleak.flower.server.round_sum import Beside
from fedleak.models import builtin, loading
from fedleak.running import forecast, pipeline, preparation
from fedleak.store import records
from fedleak.store.captures import Captures
from fedleak.store.run import Run
from fedleak.training.local import local_update_

VOCABULARY = 30522
WAITING = 4
"""Captures that may wait for their attack."""


def table(name: str, model: str, clients: int) -> dict[str, Any]:
    """Returns the experiment."""
    algorithm = "fedsgd" if name == "many" else "fedavg"
    return {
        "name": name,
        "model": {"name": model},
        "data": {"name": "builtin/notes", "samples": clients, "held_out": 10},
        "federation": {
            "clients": clients,
            "rounds": 1,
            "batch_size": 1,
            "algorithm": algorithm,
            "learning_rate": 0.01,
        },
        "attack": [],
        "audit": {"keep": "none", "waiting": WAITING},
        "utility": {"rounds": []},
        "workers": {"devices": ["cpu"]},
    }


def large_model(folder: Path, layers: int, width: int) -> str:
    """Makes a BERT with random weights, and the built-in one's words and many that nobody uses."""
    from transformers import (
        AutoTokenizer,
        BertConfig,
        BertForSequenceClassification,
        BertTokenizer,
    )

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    words = AutoTokenizer.from_pretrained(builtin.folder("bert-tiny")).get_vocab()
    words |= {f"[unused{number}]": number for number in range(len(words), VOCABULARY)}
    BertTokenizer(vocab=words, model_max_length=512).save_pretrained(folder)
    return str(folder)


def own_memory() -> int:
    """Returns the bytes of this process that are no pages of a file."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def disk(path: Path) -> int:
    """Returns the bytes of updates and models in a run directory."""
    total = 0
    for folder in ("captures", "models", "held"):
        for file in (path / folder).glob("*"):
            try:
                total += file.stat().st_size
            except FileNotFoundError:  # deleted since
                continue
    return total


def one_client(settings: dict[str, Any], note: Path) -> None:
    """Trains the first client, and notes the memory."""
    torch.set_num_threads(1)
    experiment = parse(settings)
    with Most(own_memory, 0.005) as memory:
        split = read_data(experiment)
        model = loading.load(experiment.model_spec(len(split.train.label_names)))
        workload = divide(experiment, split, model)
        chosen = workload.parts[0][:1]
        begin = time.perf_counter()
        local_update_(
            model,
            [workload.sequences[i] for i in chosen],
            [workload.labels[i] for i in chosen],
            experiment.local_training,
            seed=0,
        )
        seconds = time.perf_counter() - begin
    size = sum(4 * value.numel() for value in model.parameters().values())
    note.write_text(json.dumps({"memory": memory.value, "update": size, "seconds": seconds}))


def measured(do: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Returns an action that adds the time of each of its calls to a number."""

    def action(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return do(*arguments, **named)
        finally:
            seconds[0] += time.perf_counter() - begin

    return action


def whole_run(settings: dict[str, Any], path: Path, note: Path) -> None:
    """Trains and attacks, and notes memory, disk and time."""
    experiment = parse(settings)
    waited, written, training = [0.0], [0.0], [0.0]
    Beside.finish = measured(Beside.finish, waited)  # type: ignore[method-assign]
    Captures.write = measured(Captures.write, written)  # type: ignore[method-assign]
    with Most(own_memory, 0.005) as memory, Most(lambda: disk(path), 0.05) as bytes_:
        run = preparation.prepare(experiment, path)
        pipeline.carry_out(run, experiment, measured(train, training))
    bound = forecast.bytes_kept(experiment, outline(experiment, run.info()["num_labels"]))
    figures = {
        "memory": memory.value,
        "disk": bytes_.value,
        "bound": bound,
        "round": training[0],
        "waited": waited[0],
        "written": written[0],
    }
    note.write_text(json.dumps(figures))


def turns(settings: dict[str, Any], path: Path) -> None:
    """Trains, and prints how long the turns of clients take."""
    torch.set_num_threads(1)
    experiment = parse({**settings, "audit": {"keep": "all"}})
    spans: list[tuple[float, float]] = []

    def timed(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        update = local_update_(*arguments, **named)
        spans.append((begin, time.perf_counter()))
        return update

    client_app.local_update_ = timed  # type: ignore[attr-defined]
    train(preparation.prepare(experiment, path), experiment)
    turn = statistics.median(b - a for (a, _), (b, _) in itertools.pairwise(spans))
    training = statistics.median(end - begin for begin, end in spans)
    print(f"a client's turn: {turn:.2f} s, {turn / training:.2f} times its training")


def in_process(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Starts a process."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    """Kills a process and what it started, with -9."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in family:
        if child.is_running():
            child.kill()
    process.join()


def result(path: Path) -> tuple[str, list[tuple[Any, ...]]]:
    """Returns what a run must give, however often it was killed."""
    run = Run(path)
    rows = [
        (row.id, row.status, row.token_recall, row.token_precision, row.num_tokens)
        for row in run.rows(records.LEAKAGE)
    ]
    return models.fingerprint(run.models.read_model(2)), rows


def main() -> int:
    """Measures, and prints a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["many", "large", "turns"])
    parser.add_argument("--clients", type=int, help="1000; 50 of the large model; 12 turns")
    parser.add_argument("--layers", type=int, default=12, help="of the large model")
    parser.add_argument("--width", type=int, default=768, help="of the large model")
    parser.add_argument("--kill", type=float, nargs="*", default=[0.1, 0.5, 0.9], metavar="SHARE")
    parser.add_argument("--folder", type=Path, help="where runs go; left out: a temporary one")
    given = parser.parse_args()
    clients = given.clients or {"many": 1000, "large": 50, "turns": 12}[given.what]
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        model = "builtin/bert-tiny"
        if given.what != "many":
            model = large_model(folder / "model", given.layers, given.width)
        settings = table(given.what, model, clients)
        if given.what == "turns":
            turns(settings, folder / "run")
            return 0
        return measure(settings, folder, given.kill)


def measure(settings: dict[str, Any], folder: Path, kills: list[float]) -> int:
    """Measures an experiment; returns 1 if a run that was killed gives something else."""
    in_process(one_client, settings, folder / "one.json").join()
    client_figures = json.loads((folder / "one.json").read_text())
    update = client_figures["update"]
    print(f"{settings['federation']['clients']} clients, update {update / 1e6:.1f} MB")
    print(f"one client: {client_figures['memory'] / 1e6:.0f} MB, {client_figures['seconds']:.2f} s")
    in_process(whole_run, settings, folder / "plain", folder / "all.json").join()
    run_figures = json.loads((folder / "all.json").read_text())
    above = run_figures["memory"] - client_figures["memory"]
    print(
        f"the run: {run_figures['memory'] / 1e6:.0f} MB, "
        f"{above / update:.2f} updates above one client"
    )
    print(
        f"disk: {run_figures['disk'] / 1e6:.0f} MB at most; "
        f"bound {run_figures['bound'] / 1e6:.0f} MB"
    )
    print(
        f"round: {run_figures['round']:.1f} s; waited for the disk {run_figures['waited']:.2f} s "
        f"({run_figures['waited'] / run_figures['round']:.1%}); "
        f"wrote beside it {run_figures['written']:.1f} s",
        flush=True,
    )
    if not kills:
        return 0
    expected = result(folder / "plain")
    shutil.rmtree(folder / "plain")
    for share in kills:
        process = in_process(whole_run, settings, folder / "killed", folder / "killed.json")
        process.join(share * run_figures["round"])
        kill(process)
        seen = len(Run(folder / "killed").captures.all_keys())
        print(f"killed with {seen} captures made", flush=True)
    in_process(whole_run, settings, folder / "killed", folder / "killed.json").join()
    same = result(folder / "killed") == expected
    print(f"the model and the rows of the run that was killed: {'equal' if same else 'OTHER'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
