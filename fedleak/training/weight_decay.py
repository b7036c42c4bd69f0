"""What weight decay alone does to weights, so that it can be taken out of a delta."""

from torch import Tensor

from fedleak.training.observation import Optimiser


def by_decay(
    before: Tensor, *, optimiser: Optimiser, decay: float, rate: float, steps: int
) -> Tensor:
    """Returns what weight decay alone makes of a parameter in local steps, less the parameter.

    It is computed as PyTorch does, step by step, so that a row of an embedding that was not used is
    zero to the last bit without it. Adam's cannot be told apart, so it is zero here.

    Args:
        before: The parameter that training starts from.
        optimiser: What the client steps with.
        decay: Its weight decay.
        rate: Its learning rate.
        steps: Its local steps.
    """
    after = before.clone()
    if decay and optimiser in ("sgd", "adamw"):
        for _ in range(steps):
            if optimiser == "adamw":
                after.mul_(1 - rate * decay)
            else:
                after.add_(after * decay, alpha=-rate)
    return after - before
