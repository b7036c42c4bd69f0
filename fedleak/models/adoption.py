"""From a transformers model of somebody's own training loop to a model that attacks can use.

The model may be wrapped (DistributedDataParallel, torch.compile, peft, a module of its owner's) and
in half precision. It stays as it is: attacks get a copy, in float32, with attention that has second
derivatives.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedleak.models import CAUSAL_LM, CLASS_LOSSES, CLASSIFICATION, LanguageModel, loading
from fedleak.models.parameter_names import NO_NAMES, plain
from fedleak.util.errors import ConfigError, unknown
from fedleak.util.finite import all_finite


def adopt(
    module: nn.Module,
    tokenizer: Any,
    *,
    loss: str = "cross-entropy",
    response_template: str = "",
    names: Mapping[str, str] = NO_NAMES,
    own_head: bool = False,
) -> LanguageModel:
    """Returns a copy of a model, at the weights that it has, with its tokenizer.

    What the original trains (`requires_grad`), the copy trains.

    Args:
        module: A sequence classifier or a causal language model of transformers, or what wraps one.
            With `names` or `own_head`: also a model without a head, as `AutoModel` makes it, or
            what wraps that, which is taken for a classifier.
        tokenizer: The one that it is trained with.
        loss: A key of `CLASS_LOSSES`.
        response_template: The words behind which next-token training begins.
        names: Of parameters in `module` that are not named as in the classifier, and their names
            there: those of a head.
        own_head: The head is another one, which stays unknown; the copy's is zero and not trained.

    Raises:
        ConfigError: A model, a tokenizer or a loss that fedleak cannot attack.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.initialization import no_init_weights

    theirs = inner(module)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"the tokenizer is {type(tokenizer).__name__}: give the tokenizer itself, as "
            "AutoTokenizer.from_pretrained returns it"
        )
    named = f"the model ({type(theirs).__name__})"
    task = _task(theirs, own_head or bool(names))
    tokenizer, config = copy.deepcopy(tokenizer), copy.deepcopy(theirs.config)
    family = loading.family_of(named, config, task)
    head = {names[name]: p for name, p in module.named_parameters() if name in names}
    if (rows := head.get(family.classifier[0])) is not None:
        config.num_labels = len(rows)
    _check_loss(named, task, loss, config)
    loading.set_up_(named, config, tokenizer, task)
    # To draw random weights, which are overwritten below, would take longer than a client's step.
    with torch.random.fork_rng(devices=[]), no_init_weights():
        own = loading.auto_class(task).from_config(config, dtype=torch.float32)
    own.tie_weights()
    if (adapters := _adapters(module)) is not None:
        from peft import inject_adapter_in_model

        inject_adapter_in_model(adapters, own)
    own.to(next(theirs.parameters()).device)
    _copy_weights_(own, theirs, named, head, own_head)
    return LanguageModel(
        module=own.eval(),
        tokenizer=tokenizer,
        family=family,
        task=task,
        class_loss=CLASS_LOSSES[loss],
        response_template=loading.template_ids(tokenizer, response_template),
    )


def inner(module: nn.Module) -> Any:
    """Returns the transformers model in a module: itself, or what it wraps.

    Raises:
        ConfigError: There is none, or there are several.
    """
    from transformers import PreTrainedModel

    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the model is {type(module).__name__}, not a torch module: give the transformers "
            "model of your training loop, or the folder or hub id of a whole checkpoint"
        )
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    if not models:
        raise ConfigError(
            f"the model ({type(module).__name__}) holds no transformers model: give one of the "
            "classes ...ForSequenceClassification or ...ForCausalLM"
        )
    within = {id(part) for part in models[0].modules()}
    if any(id(model) not in within for model in models):
        raise ConfigError(
            f"the model ({type(module).__name__}) holds several transformers models: give the one "
            "that the update is of"
        )
    return models[0]


def _task(theirs: Any, headless: bool) -> str:
    """Returns what a transformers model is made for; a headless one is taken for a classifier."""
    from transformers.models.auto import modeling_auto as auto

    tasks = {
        CLASSIFICATION: auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        CAUSAL_LM: auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    for task, classes in tasks.items():
        config_class = type(theirs.config)
        if config_class in classes and isinstance(theirs, classes[config_class]):
            return task
    if headless:
        return CLASSIFICATION
    raise ConfigError(
        f"the model ({type(theirs).__name__}) has no head that fedleak knows: give one of the "
        "classes ...ForSequenceClassification or ...ForCausalLM of transformers; or, for a head of "
        "your own, say own_head = true, or what its parameters are called there in names"
    )


def _check_loss(named: str, task: str, loss: str, config: Any) -> None:
    """Refuses a loss that fedleak does not compute."""
    if loss not in CLASS_LOSSES:
        raise ConfigError(unknown("loss", loss, CLASS_LOSSES))
    if task == CAUSAL_LM and loss != "cross-entropy":
        raise ConfigError(
            f"loss = {loss!r} is of classifiers, and {named} predicts tokens: leave it out"
        )
    if task == CLASSIFICATION and (
        config.num_labels < 2 or config.problem_type == "multi_label_classification"
    ):
        raise ConfigError(
            f"{named} has {config.num_labels} labels and problem_type = {config.problem_type!r}: "
            "fedleak attacks classifiers of two or more classes, one of which is right"
        )


def _adapters(module: nn.Module) -> Any:
    """Returns the settings of a model's LoRA adapters, as peft wants them; None if it has none.

    Raises:
        ConfigError: Adapters of another kind, or several.
    """
    adapted: Any = next((part for part in module.modules() if hasattr(part, "peft_config")), None)
    adapters: Mapping[str, Any] = {} if adapted is None else adapted.peft_config
    if not adapters:
        return None
    from peft import LoraConfig

    if len(adapters) > 1 or not all(type(adapter) is LoraConfig for adapter in adapters.values()):
        kinds = ", ".join(f"{name}: {type(adapter).__name__}" for name, adapter in adapters.items())
        raise ConfigError(f"the model has the adapters {kinds}: fedleak attacks one LoRA adapter")
    # A module that is trained whole is trained in its place.
    return dataclasses.replace(copy.deepcopy(next(iter(adapters.values()))), modules_to_save=None)


def _copy_weights_(
    own: Any, theirs: nn.Module, named: str, head: Mapping[str, nn.Parameter], own_head: bool
) -> None:
    """Copies the original's weights, and trains the parameters that the original trains.

    Where the head is another one, what the original lacks is zero and not trained.
    """
    named_theirs = ((plain(name), parameter) for name, parameter in theirs.named_parameters())
    source = {name: parameter for name, parameter in named_theirs if name is not None}
    body, headless = f"{own.base_model_prefix}.", type(theirs) is type(own.base_model)
    if headless:
        source = {body + name: value for name, value in source.items()}
    if own_head:
        source = {name: value for name, value in source.items() if name.startswith(body)}
    source |= head
    copies = dict(own.named_parameters())
    lacking = copies.keys() - source.keys()
    if lacking and headless and not own_head:
        raise ConfigError(
            f"names has no name for {min(lacking)} of the classifier: name all of its parameters, "
            "or say own_head = true in place of names"
        )
    others = source.keys() - copies.keys() if own_head else source.keys() ^ copies.keys()
    if different := sorted(others):
        raise ConfigError(
            f"{named} has other parameters than its class has, such as {different[0]}: give a "
            "plain one, or one with LoRA adapters"
        )
    for name in lacking:
        copies[name].data.zero_()
        copies.pop(name).requires_grad_(False)
    for name, parameter in copies.items():
        value = source[name].detach()
        if value.is_meta or value.shape != parameter.shape or not value.is_floating_point():
            raise ConfigError(
                f"{named} has {name} as {value.dtype} of shape {list(value.shape)} on "
                f"{value.device.type}: load all of it, neither quantised nor sharded"
            )
        if not all_finite(value):
            raise ConfigError(
                f"{named} has weights that are not finite, such as {name}: its training diverged"
            )
        parameter.data.copy_(value)
        parameter.requires_grad_(source[name].requires_grad)
