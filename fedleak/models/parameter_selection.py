"""Parts of a model, by patterns on parameter names or by the partial-gradient paper's names.

Li et al. 2024, "Seeing the Forest through the Trees: Data Leakage from Partial Transformer
Gradients": q, k, v, o, f and p are weights of a layer, without biases, and t is all of it. A number
is that of the layer, from 1; a letter without a number means every layer. The words `embeddings`
and `classifier` are for what is before the layers and behind them. BERT's pooler, a decoder's last
norm and the output layer of a next-token model are in no part.

Departs from the authors' code, whose selector of p finds the attention output matrix as well.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from fedleak.models import LanguageModel
from fedleak.models.family import lora_a, lora_b
from fedleak.util.errors import ConfigError

_PART = re.compile(r"[qkvofpt][0-9]*|embeddings|classifier")


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Returns the names that contain one of the patterns (`*` is a wildcard)."""
    return [name for name in names if any(fnmatchcase(name, f"*{p}*") for p in patterns)]


def select(model: LanguageModel, wanted: Sequence[str], where: str) -> list[str]:
    """Returns the trained parameters that parts and patterns name, in the model's order.

    Args:
        model: The model.
        wanted: Parts and patterns.
        where: The setting that they stand in, for the message.

    Raises:
        ConfigError: One of them names nothing that is trained, or a part of a parameter.
    """
    names = list(model.trained())
    parts = parameters_of(model, list(filter(is_part, wanted)), where)
    chosen: set[str] = set()
    for choice in wanted:
        matches = parts[choice] if choice in parts else matching(names, [choice])
        if not matches:
            reason = "nothing that is trained" if choice in parts else "in no parameter's name"
            words = {word for name in names for word in name.split(".")}
            raise ConfigError(
                f"{where}: {choice!r} is {reason}; the parts of parameters' names are "
                f"{', '.join(sorted(word for word in words if not word.isdigit()))}"
            )
        chosen.update(matches)
    return [name for name in names if name in chosen]


def is_part(name: str) -> bool:
    """Returns whether a name is a part; any other is a pattern on parameter names."""
    return _PART.fullmatch(name) is not None


def parameters_of(
    model: LanguageModel, parts: Sequence[str], where: str = "update.share"
) -> dict[str, list[str]]:
    """Returns the trained parameters of each part; an adapter belongs to its weight's part.

    Args:
        model: The model.
        parts: All that are asked for, because some can only be had together.
        where: The setting that they stand in, for the message.

    Raises:
        ConfigError: A layer that the model lacks, or some of what one parameter holds.
    """
    words = {"embeddings": model.family.embeddings, "classifier": model.family.classifier}
    layers = {part: _layers(part, model.num_layers, where) for part in parts if part not in words}
    wanted = {(part[0], layer) for part, where in layers.items() for layer in where}
    parameters = {}
    for part in parts:
        names = set(words.get(part, ()))
        for layer in layers.get(part, ()):
            names.update(_in_layer(model, part, layer, wanted, where))
        parameters[part] = [name for name in model.trained() if name in names]
    return parameters


def _layers(part: str, num_layers: int, where: str) -> range:
    """Returns the layers, from 0, that a part is in."""
    if len(part) == 1:
        return range(num_layers)
    number = int(part[1:])
    if not 1 <= number <= num_layers:
        raise ConfigError(
            f"{where}: {part!r} is of layer {number}, but the model has {num_layers} layers: "
            f"count them from 1 to {num_layers}"
        )
    return range(number - 1, number)


def _in_layer(
    model: LanguageModel, part: str, layer: int, wanted: Collection[tuple[str, int]], where: str
) -> list[str]:
    """Returns the names in one layer: what is trained, or may be.

    Args:
        model: The model.
        part: A letter, and maybe a number.
        layer: From 0.
        wanted: Letters and layers of everything that is asked for.
        where: The setting, for the message.
    """
    family, letter, number = model.family, part[0], part[1:]
    stem = f"{family.layers}.{layer}."
    if letter == "t":
        return [name for name in model.trained() if name.startswith(stem)]
    together, weights = next(group for group in family.modules(layer).items() if letter in group[0])
    if ("t", layer) not in wanted and any((other, layer) not in wanted for other in together):
        owner = weights[0].removesuffix(".weight")
        pattern = owner if number else owner.replace(stem, f"{family.layers}.*.")
        raise ConfigError(
            f"{where}: {part!r} cannot be had alone, because {family.model_type} keeps "
            f"{', '.join(together)} of a layer in one parameter: name all of "
            f"{[other + number for other in together]}, or {pattern!r}"
        )
    return [name for weight in weights for name in (weight, lora_a(weight), lora_b(weight))]


@contextmanager
def freezing(model: LanguageModel, patterns: Sequence[str]) -> Iterator[None]:
    """Leaves parameters out of what is trained, within the block."""
    trained = model.trained()
    frozen = [trained[name] for name in select(model, patterns, "freeze.parameters")]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
