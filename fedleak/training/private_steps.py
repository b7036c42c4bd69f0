"""DP-SGD on a client, through Opacus (Abadi et al. 2016, algorithm 1; Yousefpour et al. 2021).

Each example's gradient is clipped and noise is added to the sum. The sum is divided by the expected
batch size: the size that was drawn is private.

Ghost clipping (Li et al. 2022, "Large Language Models Can Be Strong Differentially Private
Learners", section 4) computes the examples' norms without their gradients and then makes a second
backward pass. It is cheaper for whole matrices, most of all for the word embedding, whose gradient
would otherwise be stored once per example. Adapters are small, and ghost clipping has no norm for a
parameter that is in two places (a tied output layer): in both cases each example's gradient is
computed.

Canaries of an audit enter a step as the gradients of further examples: dummy records of the
client's data set, which its sampler draws. They have a text that goes through the model, and a
canary replaces its gradient before norms are computed (`Planted`).

Shapes: B examples, K canaries, R records: examples and dummies of canaries.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.grad_sample.linear import compute_linear_grad_sample, compute_linear_norm_sample
from opacus.grad_sample.utils import register_grad_sampler, register_norm_sampler
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedleak.models import LanguageModel, example_losses, pad
from fedleak.training.batches import Records
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.planted import Planted
from fedleak.training.settings import LocalTraining, OnFigures, PrivateSteps
from fedleak.training.steps import Batch, delta_
from fedleak.util.rng import stream


# GPT-2's linear layer: its weight is the transpose of nn.Linear's, which has the same norm.
@register_grad_sampler(Conv1D)  # type: ignore[untyped-decorator]
def _conv1d_gradients(
    layer: Conv1D, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    grads: dict[nn.Parameter, Tensor] = compute_linear_grad_sample(layer, activations, backprops)
    if layer.weight in grads:
        grads[layer.weight] = grads[layer.weight].mT
    return grads


register_norm_sampler(Conv1D)(compute_linear_norm_sample)


def private_update_(
    model: LanguageModel,
    examples: Batch,
    training: LocalTraining,
    *,
    seed: int,
    report: OnFigures,
    planted: Planted | None = None,
) -> ClientUpdate:
    """Trains with DP-SGD and returns the update.

    Args:
        model: Holds the broadcast weights; FedAvg leaves it trained.
        examples: FedSGD: of the batch, which may be empty; FedAvg: all. Classes are not used by a
            causal model.
        training: How to train, with private steps.
        seed: For noise and the order of local batches.
        report: Called with the examples' mean norm, the share that was clipped, signal and noise.
        planted: Canaries that take part as examples do.
    """
    noise, seen, private = stream(seed, "private"), Seen(), training.private
    assert private is not None
    step = partial(private_gradient, model, private=private, noise=noise, seen=seen)
    num_examples = len(examples.sequences)
    if training.kind == UpdateKind.GRADIENT:
        # How many were drawn is private.
        num_examples = training.batch_size
        tensors = step(examples, num_examples, planted=planted)
    else:
        expected = min(training.batch_size, num_examples)
        records = Records(num_examples, 0, False) if planted is None else planted.records
        of_records = records.training(training)

        def gradients() -> Iterator[dict[str, Tensor]]:
            for drawn in of_records.batches(records.count, seed):
                seen.drawn.append(drawn)
                batch = examples.of(records.drawn_examples(drawn))
                in_step = planted and replace(planted, drawn_K=records.drawn_canaries(drawn))
                yield step(batch, expected, planted=in_step)

        tensors = delta_(model, gradients(), training.recipe, training.learning_rate)
    report(seen.figures() | {"drawn": seen.drawn})
    return ClientUpdate(training.kind, tensors, num_examples)


def private_gradient(
    model: LanguageModel,
    batch: Batch,
    expected: int,
    private: PrivateSteps,
    noise: torch.Generator,
    seen: "Seen",
    *,
    ghost: bool | None = None,
    planted: Planted | None = None,
) -> dict[str, Tensor]:
    """Returns the clipped and noisy mean gradient of one batch, by parameter name.

    Args:
        model: At the current weights.
        batch: Its examples, maybe none.
        expected: What the sum is divided by.
        private: Clipping norm and noise.
        noise: The generator that the noise comes from.
        seen: Collects the figures of the step.
        ghost: Whether norms are computed without gradients; None: if that is cheaper.
        planted: Canaries beside the batch's examples, of which it is known who takes part.
    """
    trained: dict[str, Any] = dict(model.trained())  # Opacus puts attributes on parameters
    if ghost is None:
        ghost = not model.tied and not has_adapters(trained)
    optimizer = (DPOptimizerFastGradientClipping if ghost else DPOptimizer)(
        torch.optim.SGD(trained.values(), lr=0.0),  # only its gradients are wanted
        noise_multiplier=private.noise_multiplier,
        max_grad_norm=private.max_grad_norm,
        expected_batch_size=expected,
        generator=noise,
    )
    with per_example(model, ghost) as hooks:
        norms_B, signal = clipped_sum_(model, batch, planted, hooks, optimizer, ghost)
        optimizer.add_noise()
        sums = [p.summed_grad for p in trained.values()]
        optimizer.scale_grad()
    gradient = {name: p.grad for name, p in trained.items()}
    noises = [p.grad - summed / expected for p, summed in zip(trained.values(), sums, strict=True)]
    noise_norm = torch.stack([parameter_noise.norm() for parameter_noise in noises]).norm()
    seen.add(norms_B, private.max_grad_norm, signal / expected, noise_norm)
    for parameter in trained.values():
        parameter.grad = None
        parameter.summed_grad = None
    return gradient


def clipped_sum_(
    model: LanguageModel,
    batch: Batch,
    planted: Planted | None,
    hooks: GradSampleHooks,
    optimizer: DPOptimizer,
    ghost: bool,
) -> tuple[Tensor, Tensor]:
    """Leaves the sum of all clipped gradients, of examples and canaries, with the optimizer.

    Returns:
        The norms of the examples' gradients before clipping [B], and the norm of the sum of the
        clipped gradients, without canaries.
    """
    if planted is not None and not planted.in_step.any():
        planted = None
    if planted is not None:
        dummies = planted.dummies
        batch = Batch([*batch.sequences, *dummies.sequences], [*batch.labels, *dummies.labels])
    norms_R, factors_R = _clipped_records_(model, batch, planted, hooks, optimizer, ghost)
    signal = torch.stack([p.summed_grad.norm() for p in optimizer.params]).norm()
    if planted is None:
        return norms_R, signal
    sums = {name: p.summed_grad for name, p in model.trained().items()}  # type: ignore[attr-defined]
    examples = len(norms_R) - len(planted.norms)
    planted.add_(sums, factors_R[examples:])
    return norms_R[:examples], signal


def clipping_factors(norms_R: Tensor, most: float) -> Tensor:
    """Returns the factors that bring gradients of these norms down to the norm `most`.

    It is Opacus's formula.
    """
    return (most / (norms_R + 1e-6)).clamp(max=1.0)


def _clipped_records_(
    model: LanguageModel,
    records: Batch,
    planted: Planted | None,
    hooks: GradSampleHooks,
    optimizer: DPOptimizer,
    ghost: bool,
) -> tuple[Tensor, Tensor]:
    """Leaves the sum of the examples' clipped gradients with the optimizer.

    The last records are dummies, if there are canaries. Each has a canary in the place of its
    gradient before norms are taken, and is not in the sum.

    Returns:
        The norm of each record's gradient, and the factor that it is clipped by [R].
    """
    sequences, labels = records
    if not sequences:
        for parameter in optimizer.params:
            parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)
            parameter.summed_grad = torch.zeros_like(parameter)
        return torch.zeros(0), torch.zeros(0)
    ids_RT, mask_RT = pad(sequences, model.tokenizer.pad_token_id, model.device)
    losses_R = example_losses(model, ids_RT, mask_RT, torch.tensor(labels, device=model.device))
    torch.autograd.backward(losses_R.sum(), retain_graph=ghost)
    examples = slice(len(sequences) - (0 if planted is None else len(planted.norms)))
    parameters: dict[str, Any] = dict(model.trained())
    if ghost:
        optimizer.zero_grad()
        if planted is not None:
            planted.put_norms_({n: p._norm_sample[examples.stop :] for n, p in parameters.items()})
        norms_R: Tensor = hooks.get_norm_sample()
        factors_R = clipping_factors(norms_R, optimizer.max_grad_norm)
        hooks.disable_hooks()
        torch.autograd.backward((factors_R[examples] * losses_R[examples]).sum())
        optimizer.accumulate()
        return norms_R, factors_R
    if planted is not None:
        planted.put_({name: p.grad_sample[examples.stop :] for name, p in parameters.items()})
    norms = [p.grad_sample.flatten(1).norm(dim=1) for p in optimizer.params]
    norms_R = torch.stack(norms, dim=1).norm(dim=1)
    factors_R = clipping_factors(norms_R, optimizer.max_grad_norm)
    for p in optimizer.params:
        factors = factors_R[examples].to(p.dtype)
        p.summed_grad = torch.einsum("i,i...", factors, p.grad_sample[examples])
    return norms_R, factors_R


@contextmanager
def per_example(model: LanguageModel, ghost: bool) -> Iterator[GradSampleHooks]:
    """Lets Opacus listen to the layers that are trained, within the block.

    Opacus listens to layers in training mode only. Those with parameters of their own have no
    dropout, so that mode changes nothing else about them.
    """
    layers = [
        layer
        for layer in model.module.modules()
        if any(p.requires_grad for p in layer.parameters(recurse=False))
    ]
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    kind = GradSampleHooksFastGradientClipping if ghost else GradSampleHooks
    hooks = kind(model.module, loss_reduction="sum", strict=False)
    try:
        with warnings.catch_warnings():
            # Inputs of the word embedding are token ids, which have no gradient.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            yield hooks
    finally:
        hooks.cleanup()
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


def has_adapters(trained: Iterable[str]) -> bool:
    """Returns whether adapters are among the names of what is trained."""
    return any(".lora_A." in name for name in trained)


@dataclass(kw_only=True)
class Seen:
    """What happened in private steps; the client's own figures.

    Attributes:
        drawn: The records of each local step.
    """

    drawn: list[list[int]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: int = 0
    steps: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def add(self, norms_B: Tensor, max_norm: float, signal: Tensor, noise: Tensor) -> None:
        """Notes one step."""
        self.norms += norms_B.tolist()
        self.clipped += int((norms_B > max_norm).sum())
        self.steps += 1
        self.signal += float(signal)
        self.noise += float(noise)

    def figures(self) -> dict[str, float]:
        """Returns means over examples and over steps; without examples there is no mean norm."""
        about = {"signal_norm": self.signal / self.steps, "noise_norm": self.noise / self.steps}
        if not self.norms:
            return about | {"examples": 0}
        return about | {
            "examples": len(self.norms),
            "example_norm": sum(self.norms) / len(self.norms),
            "clipped": self.clipped / len(self.norms),
        }
