"""Loads a model with its tokenizer, and refuses what is not a whole model of a known family."""

import logging
import os
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fedleak.models import (
    CAUSAL_LM,
    CLASS_LOSSES,
    CLASSIFICATION,
    LanguageModel,
    ModelSpec,
    builtin,
    families,
    found_families,
)
from fedleak.models.family import ModelFamily
from fedleak.models.lora import adapt_
from fedleak.util.errors import ConfigError, unknown
from fedleak.util.finite import all_finite

_log = logging.getLogger(__name__)

_LONGEST = 160
"""Characters of another library's error that a message repeats."""

MOST_LAYERS = 10_000
"""The most layers of a model: all are built before any of its weights is checked."""


def load(spec: ModelSpec, *, weights: bool = True) -> LanguageModel:
    """Loads a model with its tokenizer.

    Args:
        spec: Which one.
        weights: False leaves uninitialised what a broadcast fills: all that is trained.

    Raises:
        ConfigError: No such model, or an architecture, task or adapter that is not supported.
    """
    # The weights that adapters are added to are never sent.
    return _make(spec, checkpoint=weights or spec.lora is not None)


@lru_cache(maxsize=64)
def check_weights(name: str, task: str, num_labels: int) -> None:
    """Loads a model and forgets it; a second time in this process it does nothing.

    Raises:
        ConfigError: `load` would refuse it, for example for weights that do not fit.
    """
    load(ModelSpec(name=name, task=task, num_labels=num_labels))


def load_checkpoint(
    name: str,
    *,
    task: str | None = None,
    loss: str = "cross-entropy",
    response_template: str = "",
    own_head: bool = False,
) -> LanguageModel:
    """Loads a whole checkpoint as it was saved, with the classes that it has.

    Args:
        name: A hub id, or a folder.
        task: "sequence-classification" or "causal-lm"; None: what its config.json says.
        loss: What a classifier is trained on, a key of `CLASS_LOSSES`.
        response_template: The words behind which next-token training begins.
        own_head: The head is another one: a classifier need not be there.

    Raises:
        ConfigError: No such model, one that is not supported, or one whose classifier is not there.
    """
    if task not in (None, CLASSIFICATION, CAUSAL_LM):
        raise ConfigError(unknown("task", str(task), (CLASSIFICATION, CAUSAL_LM)))
    if loss not in CLASS_LOSSES:
        raise ConfigError(unknown("loss", loss, CLASS_LOSSES))
    config = read_config(f"model.name = {name!r}", name)
    task = task or (CLASSIFICATION if own_head else _task(name, config))
    spec = ModelSpec(
        name=name,
        task=task,
        num_labels=config.num_labels,
        loss=loss,
        response_template=response_template,
    )
    return _make(spec, checkpoint=True, whole=not own_head)


def outline(spec: ModelSpec) -> LanguageModel:
    """Returns a model with its tokenizer and its parameters' names, but without weights.

    As long as its files stay as they are, all callers share it, so nobody may change it.

    Raises:
        ConfigError: No such model, or an architecture, task or adapter that is not supported.
    """
    named = f"model.name = {spec.name!r}"
    names = [spec.name] if spec.tokenizer is None else [spec.name, spec.tokenizer]
    folders = [source(named, name) for name in names]
    if not all(map(os.path.isdir, folders)):  # a hub id, whose files are wherever its library says
        return _outline.__wrapped__(spec, ())
    return _outline(spec, tuple(map(_files, folders)))


@lru_cache(maxsize=16)
def _outline(spec: ModelSpec, files: tuple[Hashable, ...]) -> LanguageModel:
    """Returns an outline of a model whose folders have these files: one command asks for many."""
    with torch.device("meta"):
        return _make(spec, checkpoint=False)


def _files(folder: str) -> Hashable:
    """Returns a value that changes if a file of a folder is written, replaced, added or removed."""
    with os.scandir(folder) as entries:
        looked_at = [(entry.path, entry.stat()) for entry in entries if entry.is_file()]
    return tuple(
        (path, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        for path, about in sorted(looked_at)
    )


def _make(spec: ModelSpec, *, checkpoint: bool, whole: bool = False) -> LanguageModel:
    """Makes a model, with the weights of its checkpoint or with any.

    Args:
        spec: Which one.
        checkpoint: Whether to load weights.
        whole: Whether a classifier must be among them.
    """
    name, task = spec.name, spec.task
    named = f"model.name = {name!r}"
    place, config = source(named, name), read_config(named, name)
    family = family_of(named, config, task)
    tokenizer = read_tokenizer(named, name if spec.tokenizer is None else spec.tokenizer)
    set_up_(named, config, tokenizer, task)
    config.num_labels = spec.num_labels
    auto = auto_class(task)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)  # torch.manual_seed would reseed GPUs too
        try:
            if checkpoint:
                module, loading_info = auto.from_pretrained(
                    place,
                    config=config,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                )
            else:
                module = auto.from_config(config, dtype=torch.float32)
        except Exception as error:
            raise ConfigError(
                f"{named} has weights that cannot be loaded "
                f"({one_line(error)}): save it again, or download it again"
            ) from error
        if checkpoint:
            _check_weights(name, task, module, loading_info, whole=whole)
        if spec.lora is not None:
            adapt_(module, spec.lora, family.classifier if task == CLASSIFICATION else ())
    module.eval()
    return LanguageModel(
        module=module,
        tokenizer=tokenizer,
        family=family,
        task=task,
        class_loss=CLASS_LOSSES[spec.loss],
        response_template=template_ids(tokenizer, spec.response_template),
    )


def template_ids(tokenizer: Any, template: str) -> tuple[int, ...]:
    """Returns the tokens of a response template as they stand in a text, behind a line break.

    At the beginning of a text, many tokenizers make other tokens of the template.

    Raises:
        ConfigError: The template has no tokens.
    """
    ids, words = tokenizer.encode(f"\n{template}", add_special_tokens=False), template.strip()
    while words and words in tokenizer.decode(ids[1:]):
        ids = ids[1:]
    if not template:
        return ()
    if not words or tokenizer.decode(ids).strip() != words:
        raise ConfigError(
            f"model.response_template = {template!r} has no tokens of its own in the model's "
            "tokenizer: write words that stand before each response, such as '### Response:'"
        )
    return tuple(ids)


def auto_class(task: str) -> Any:
    """Returns what loads models of a task."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForCausalLM if task == CAUSAL_LM else AutoModelForSequenceClassification


def read_config(named: str, name: str) -> Any:
    """Returns the configuration of a checkpoint; the arguments are those of `source`.

    Raises:
        ConfigError: There is none.
    """
    from transformers import AutoConfig

    place = source(named, name)
    try:
        # Code that comes with a checkpoint is not run.
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"{named} cannot be loaded ({one_line(error)}): give a hub id "
            f"that can be reached from here, a folder with config.json, weights and tokenizer, or "
            f"one of {', '.join('builtin/' + known for known in builtin.BUILTIN)}"
        ) from error


def read_tokenizer(named: str, name: str) -> Any:
    """Returns the tokenizer of a checkpoint; the arguments are those of `source`.

    Raises:
        ConfigError: There is none.
    """
    from transformers import AutoTokenizer  # here, because it takes a second

    place = source(named, name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"{named} has no tokenizer that can be loaded ({one_line(error)}): "
            "save it beside config.json, as tokenizer.save_pretrained does; of the model that is "
            "trained, model.tokenizer may name another"
        ) from error
    refuse_empty(named, tokenizer)
    return tokenizer


def refuse_empty(named: str, tokenizer: Any) -> None:
    """Refuses the tokenizer that transformers makes where there is none."""
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(
            f"{named} has no tokenizer: save it beside config.json, as "
            "tokenizer.save_pretrained does"
        )


def _task(name: str, config: Any) -> str:
    """Returns what a checkpoint was trained for, as its configuration says."""
    heads = {"ForSequenceClassification": CLASSIFICATION, "LMHeadModel": CAUSAL_LM}
    heads["ForCausalLM"] = CAUSAL_LM
    classes = config.architectures or ()
    for ending, task in heads.items():
        if any(class_name.endswith(ending) for class_name in classes):
            return task
    raise ConfigError(
        f"model.name = {name!r} is of the class {', '.join(classes) or 'unknown'}, which has no "
        f"head that says what it was trained for: set the task to {CLASSIFICATION} or {CAUSAL_LM}; "
        "or, for an update with a head of its own, own_head = true"
    )


def family_of(named: str, config: Any, task: str) -> ModelFamily:
    """Returns the family of a model.

    Args:
        named: The model, as a message names it.
        config: Its configuration.
        task: "sequence-classification" or "causal-lm".

    Raises:
        ConfigError: The family is not known, or cannot do the task.
    """
    family = families().get(config.model_type)
    if family is None:
        raise ConfigError(
            f"{named} is of the family {config.model_type!r}: choose one of the "
            f"families {', '.join(sorted(families()))}" + found_families().cannot_be_used()
        )
    if config.num_hidden_layers > MOST_LAYERS:
        raise ConfigError(
            f"{named} has {config.num_hidden_layers:,} layers by its config.json, and at most "
            f"{MOST_LAYERS:,} are taken: give the config.json that it was saved with"
        )
    if task == CAUSAL_LM and not family.causal:
        causal = " or ".join(sorted(known for known, other in families().items() if other.causal))
        raise ConfigError(
            f"model.task = {task!r} needs a causal model, but {named} is a {config.model_type} "
            f"encoder: set model.task = {CLASSIFICATION!r} or choose a {causal} model"
        )
    if getattr(config, "is_decoder", False) and not family.causal:
        raise ConfigError(
            f"{named} is a {config.model_type} that reads one way only: set "
            "is_decoder to false in its config.json, or choose another model"
        )
    return family


def set_up_(named: str, config: Any, tokenizer: Any, task: str) -> None:
    """Refuses the tokenizer of another model, and makes a model's settings fit for attacks.

    It adds a padding token to the tokenizer if there is none, and sets it in the configuration, and
    attention that can be differentiated.

    Args:
        named: The model, as a message names it.
        config: Its configuration.
        tokenizer: What was found beside it.
        task: What is trained.
    """
    refuse_empty(named, tokenizer)
    vocabulary, rows = tokenizer.get_vocab(), config.vocab_size
    largest = max(vocabulary.values())
    # Tables are padded to a round number, by a few rows of many thousand.
    if largest >= rows or len(vocabulary) < rows / 2:
        raise ConfigError(
            f"{named} has the tokenizer of another model: it has {len(vocabulary):,} "
            f"tokens, up to number {largest:,}, and the model has embeddings of {rows:,}: save the "
            "tokenizer that the model was trained with beside it"
        )
    if task == CAUSAL_LM and tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{named} has a tokenizer without an end token, which closes each text "
            "of next-token training: set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"{named} has a tokenizer without a padding or an end token: set "
            "pad_token in its tokenizer_config.json"
        )
    config.pad_token_id = tokenizer.pad_token_id
    # Fused attention has no second derivative, and gradient matching needs one.
    config._attn_implementation = "eager"


def _check_weights(
    name: str, task: str, module: nn.Module, loading_info: Mapping[str, Any], *, whole: bool
) -> None:
    """Refuses a checkpoint that does not fit the model; only a classifier may be new.

    Args:
        name: Of the model.
        task: What it is for.
        module: As it was loaded.
        loading_info: What transformers reports of the loading.
        whole: Whether the classifier must be there, too.
    """
    prefix = f"{module.base_model_prefix}."

    def of_head(key: str) -> bool:
        """Whether a classifier is trained with such a parameter from scratch."""
        new = task == CLASSIFICATION and not whole
        return new and (not key.startswith(prefix) or ".pooler." in key)

    names = [key for key, _ in module.named_parameters()]
    new = sorted(key for key in loading_info["missing_keys"] if of_head(key))
    if missing := sorted(set(loading_info["missing_keys"]) - set(new)):
        raise ConfigError(
            f"model.name = {name!r} lacks {len(missing)} of its {len(names)} weights, such as "
            f"{missing[0]}: give a whole checkpoint"
        )
    for key, there, wanted in sorted(loading_info["mismatched_keys"]):
        if of_head(key):
            raise ConfigError(
                f"model.name = {name!r} has a classifier for {there[0]} classes, and the data has "
                f"{wanted[0]}: give other data, or save the checkpoint without its classifier"
            )
        raise ConfigError(
            f"model.name = {name!r} has the weight {key} of shape {list(there)}, and its "
            f"config.json asks for {list(wanted)}: give the config.json that it was saved with"
        )
    if broken := [key for key, p in module.named_parameters() if not all_finite(p)]:
        raise ConfigError(
            f"model.name = {name!r} has {len(broken)} weights that are not finite, such as "
            f"{broken[0]}: give a checkpoint whose training did not diverge"
        )
    if new:
        _log.info("%s: new weights for %s", name, ", ".join(new))


def source(named: str, name: str) -> str:
    """Returns the hub id, or the absolute path of the folder, that a name stands for.

    Args:
        named: The model, as a message names it.
        name: A hub id, a folder, or `builtin/<name>`.

    Raises:
        ConfigError: There is no such folder, or no such built-in model.
    """
    if name.startswith("builtin/"):
        try:
            return str(builtin.folder(name.removeprefix("builtin/")))
        except ValueError as error:
            raise ConfigError(f"{named}: {error}") from error
    path = os.path.expanduser(name)  # an unknown user's ~name stays as it is
    if os.path.isdir(path):
        return os.path.abspath(path)
    if name.startswith((".", "/", "~")):
        raise ConfigError(
            f"{named}: there is no such folder: give one with config.json, weights and tokenizer"
        )
    return name


def builtin_model(name: str) -> str:
    """Returns the folder of a built-in model, which transformers loads without a network.

    Args:
        name: "bert-tiny", "gpt2-tiny" or "llama-tiny": small, with random weights. It is made on
            this machine when it is first used.

    Raises:
        ConfigError: There is no such model.
    """
    return source("builtin_model", f"builtin/{str(name).removeprefix('builtin/')}")


def one_line(error: Exception) -> str:
    """Returns what an error of another library says, in one line that is not too long."""
    return " ".join(str(error).split())[:_LONGEST].rstrip(" .") or type(error).__name__
