"""Finds the parameter of a model that a wrapper's name for it means.

Wrappers put words before a parameter's name (`module.`, `base_model.model.`) or into it
(`_orig_mod`), and peft names an adapter after itself. What is left over when they are taken away is
the name that `fedleak.models` has for it.
"""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch import nn

from fedleak.util.errors import ConfigError
from fedleak.util.lists import first_of
from fedleak.util.sanitise import printable

_INSIDE = frozenset({"_orig_mod", "_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Words that torch.compile, Opacus and FSDP put anywhere in a name."""

_ADAPTER = "default"
"""The name that fedleak gives an adapter, which is peft's default."""

_LONGEST = 200
"""Characters of a name that are repeated in an error."""


NO_NAMES: Mapping[str, str] = MappingProxyType({})


def plain(name: str) -> str | None:
    """Returns a name without a wrapper's words; None for a parameter that is not trained.

    >>> plain("bert.encoder._orig_mod.layer.0.output.dense.weight")
    'bert.encoder.layer.0.output.dense.weight'
    >>> plain("layer.0.query.lora_A.weight"), plain("layer.0.query.lora_A.mine.weight")
    ('layer.0.query.lora_A.default.weight', 'layer.0.query.lora_A.default.weight')
    >>> plain("classifier.modules_to_save.mine.bias"), plain("classifier.original_module.bias")
    ('classifier.bias', None)
    """
    parts = [part for part in name.split(".") if part not in _INSIDE]
    if "original_module" in parts:  # peft trains a copy of it, which is in modules_to_save
        return None
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        del parts[at : at + 2]
    for at, part in enumerate(parts):
        if part.startswith("lora_"):
            named = len(parts) > at + 1 and parts[at + 1] != "weight"
            parts[at + 1 : at + 1 + named] = [_ADAPTER]
            break
    return ".".join(parts)


def matched(
    given: Iterable[str],
    module: nn.Module,
    names: Mapping[str, str] = NO_NAMES,
    own_head: bool = False,
) -> dict[str, str]:
    """Returns the parameter of a model that each given name means.

    A name means the parameter whose name it ends with, with or without the words that the model
    puts before the names of its body. Names of buffers, and of copies that peft does not train,
    mean none and are left out. A tied parameter has several names, and wrappers add others: two
    given names may mean one parameter.

    Args:
        given: The names in a wrapper or a file.
        module: The model, without wrappers.
        names: What some of the given names are to be read as.
        own_head: The head is another one: names that mean no parameter of the body are its.

    Raises:
        ConfigError: A name that means no parameter of the model; or none means one.
    """
    body = f"{getattr(module, 'base_model_prefix', '')}."
    known = {name: p for name, p in _names(module).items() if not own_head or name.startswith(body)}
    known |= {name.removeprefix(body): parameter for name, parameter in known.items()}
    buffers = {name.removeprefix(body) for name, _ in module.named_buffers()}
    parameters: dict[str, str] = {}
    unmatched = []
    for name in given:
        short = plain(names.get(name, name))
        if short is None or _ending(short, buffers) is not None:
            continue
        ending = _ending(short, known)
        if ending is None:
            unmatched.append(name)
        else:
            parameters[name] = known[ending]
    if unmatched and not (own_head and parameters):
        raise ConfigError(_no_parameter(unmatched, dict.fromkeys(known.values())))
    return parameters


def _names(module: nn.Module) -> dict[str, str]:
    """Returns the names of all parameters, and for each the first name of the same parameter."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _ending(name: str, known: Iterable[str] | Mapping[str, str]) -> str | None:
    """Returns the longest known name that a name ends with, whole words only; None: there is none.

    >>> _ending("module.bert.pooler.bias", {"bert.pooler.bias"})
    'bert.pooler.bias'
    """
    while name not in known:
        _, dot, name = name.partition(".")
        if not dot:
            return None
    return name


def _no_parameter(unmatched: list[str], names: Iterable[str]) -> str:
    """Returns what is wrong with names that mean no parameter, and the nearest ones that do."""
    known = list(names)
    nearest = difflib.get_close_matches(unmatched[0][-_LONGEST:], known, n=3, cutoff=0.5)
    hint = f"its {len(known)} names are like {known[0]}"
    if nearest:
        hint = f"the nearest of its {len(known)} are {', '.join(nearest)}"
    shown = first_of((printable(repr(name))[:_LONGEST] for name in unmatched), most=1)
    return f"the model has no parameter {shown}: {hint}: name them so, or give that model"
