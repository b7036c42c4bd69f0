"""Low-rank adapters, through peft (Hu et al. 2022, "LoRA", section 4.1).

Shapes: O outputs and I inputs of a linear layer, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedleak.util.errors import ConfigError, unknown


@dataclass(frozen=True)
class Lora:
    """Adds `alpha / rank * B A` to matrices [O, I] that stay as they are.

    Attributes:
        rank: R, of A [R, I] and B [O, R].
        alpha: Their scale.
        targets: Names of the linear layers, or the ends of names; "all-linear": all but the output
            layer and the classifier; None is peft's choice for the architecture, the query and
            value projections.
        dropout: Probability with which a number of an adapter's input is zero in training.
        rslora: Scales by `alpha / sqrt(rank)` (Kalajdzievski 2023).
        dora: Trains the norm of each output's weights, too (Liu et al. 2024).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | Literal["all-linear"] | None = None
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False


def adapt_(module: nn.Module, lora: Lora, trained: Sequence[str]) -> None:
    """Adds adapters: A random, B zero. From now on only they and `trained` can be trained.

    Args:
        module: The model.
        lora: What to add.
        trained: Names of parameters that are trained whole, if the model has them.

    Raises:
        ConfigError: A target that is no linear layer, or one that is trained whole.
    """
    # Here, because it takes seconds.
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT
    from transformers.pytorch_utils import Conv1D

    whole = {name.rpartition(".")[0] for name in trained}
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D)) and name not in whole
    }
    names = {name.rpartition(".")[2] for name in layers}
    model_type: str = module.config.model_type  # type: ignore[union-attr,assignment]
    targets: Sequence[str] | None = lora.targets or DEFAULT.get(model_type)
    if lora.targets == "all-linear":
        output = module.get_output_embeddings()  # type: ignore[operator]
        targets = [name for name, layer in layers.items() if layer is not output]
    if targets is None:
        raise ConfigError(
            f"model.lora.targets is missing, and peft has no default for the family "
            f"{model_type!r}: choose from {', '.join(sorted(names))}"
        )
    for target in targets:
        # As peft compares them. All must be linear: attacks read embeddings and norms by name.
        matches = {n for n, _ in module.named_modules() if n == target or n.endswith(f".{target}")}
        if not matches or not matches <= layers.keys():
            raise ConfigError(f"model.lora.targets: {unknown('linear layer', target, names)}")
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(targets),
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
    )
    inject_adapter_in_model(settings, module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name in trained)
