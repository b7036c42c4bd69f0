"""How exactly an inconsistent server gets one client's update out of a secure sum.

    python experiments/benchmarks/inconsistent.py [--clients 4 16 64]

A line for each setting and number of clients: the relative distance (L2, over all parameters of the
capture) between what is captured of the sum and what the same client sends where nothing is summed.
Model and data are those of experiments/inconsistent-minilm.toml, and of FEDLEAK_ASSETS a LLaMA.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

from torch import Tensor

from fedleak.config.federation.schedule import expected_captures
from fedleak.config.loading import expanded, parse, read_tables
from fedleak.flower.engines import train
from fedleak.running import preparation

EXPERIMENT = Path(__file__).parents[1] / "inconsistent-minilm.toml"

WHOLE = ("update.share=all",)
LLAMA = (*WHOLE, 'model.name="${FEDLEAK_ASSETS}/models/stories15m"', "model.task=causal-lm")
LORA = ("model.lora={rank=8}",)
FEDAVG = ("federation.algorithm=fedavg", "federation.local_epochs=2", "federation.batch_size=4")
PROTOCOL = '"secure_sum", protocol="secagg+", clipping=1.0, max_weight=8'

SETTINGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "MiniLM, gradient": ('"secure_sum"', ()),
    "MiniLM, gradient of all parameters": ('"secure_sum"', WHOLE),
    "MiniLM, delta of 4 steps": ('"secure_sum"', FEDAVG),
    "MiniLM, gradient, SecAgg+": (PROTOCOL, ()),
    "LLaMA, next token, gradient": ('"secure_sum"', LLAMA),
    "LLaMA with adapters, delta of 4 steps": ('"secure_sum"', (*LLAMA, *LORA, *FEDAVG)),
}
"""By name the settings of the sum, and what else is set."""


def captured(folder: Path, *changes: str) -> Mapping[str, Tensor]:
    """Returns the capture of a run of one round that attacks nothing."""
    shared = ("federation.rounds=1", "attack=[]", "utility.rounds=[]", "data.held_out=8")
    tables = read_tables(EXPERIMENT, [*shared, *changes])
    del tables["sweep"]
    experiment = parse(expanded(tables))
    run = preparation.prepare(experiment, folder)
    train(run, experiment)
    return run.captures.read_capture(expected_captures(experiment)[0]).update.tensors


def distance(recovered: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> float:
    """Returns the L2 distance of tensors, relative to the norm of the second ones."""
    pairs = [(value.double(), own[name].double()) for name, value in recovered.items()]
    change = math.fsum(float((value - other).square().sum()) for value, other in pairs)
    return math.sqrt(change / math.fsum(float(other.square().sum()) for _, other in pairs))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    options = parser.parse_args()
    print("| setting | clients | relative distance | parameters left out | CPU seconds |")
    print("|---|---|---|---|---|")
    for name in options.settings:
        kind, changes = SETTINGS[name]
        for clients in options.clients:
            sized = (
                f"federation.clients={clients}",
                f"data.samples={7 * clients + clients // 2}",
                *changes,
            )
            begun = process_time()
            target = clients // 2
            server: tuple[str, ...] = ("server.mode=inconsistent", f"server.targets=[{target}]")
            with TemporaryDirectory() as folder:
                recovered = captured(
                    Path(folder, "sum"), *sized, *server, f"defense=[{{kind={kind}}}]"
                )
                alone = ("defense=[]", f"threat.clients=[{target}]")
                own = captured(Path(folder, "own"), *sized, *alone)
            print(
                f"| {name} | {clients} | {distance(recovered, own):.1e} "
                f"| {', '.join(sorted(own.keys() - recovered.keys())) or 'none'} "
                f"| {process_time() - begun:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
