from dataclasses import replace

from fedleak.attacks.subspace.coarseness import EXACT, coarseness
from fedleak.defenses.quantize import Quantize
from fedleak.models import CAUSAL_LM
from fedleak.util.rng import stream


def test_numbers_of_which_a_part_alone_has_few_levels_are_exact(small, observe):
    """The part that is looked at first decides only that an update is not rounded."""
    model = small("llama", CAUSAL_LM, width=96)
    seen = observe(model, 2).seen
    names = [name for name in seen.update.tensors if name.startswith(model.family.layers)]
    largest = max(sorted(names), key=lambda name: seen.update.tensors[name].numel())
    value = seen.update.tensors[largest].clone()
    assert value.numel() > 2 * 4096
    value.flatten()[:4096] = value.std()
    tensors = {**seen.update.tensors, largest: value}
    assert coarseness(replace(seen, update=replace(seen.update, tensors=tensors)), names) is EXACT
    rounded = Quantize(bits=4)(seen.update, rng=stream(0, "defense"))
    assert coarseness(replace(seen, update=rounded), names) is not EXACT
