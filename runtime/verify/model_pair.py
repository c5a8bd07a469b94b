"""Upstream's model and the generated one, built from the same config and with the same weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from patchgen.runtime.verify.correspondence import Correspondence, correspondence

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SEED = 42
SPREAD = 0.02
CONSTANT_SPREAD = 0.1


@dataclass
class ModelPair:
    """Both models, and where their structure differs (`problems` is empty if they can be compared)."""

    upstream: PreTrainedModel
    generated: PreTrainedModel
    correspondence: Correspondence = field(default_factory=Correspondence)
    """How upstream's tensors become those of the generated model."""
    problems: list[str] = field(default_factory=list)
    foreign_classes: list[str] = field(default_factory=list)
    """Classes in the generated model from modeling files of other models (towers)."""


def config_class_of(model_class: type[PreTrainedModel]) -> type[PreTrainedConfig]:
    """The class of the configs that a model is built from."""
    if model_class.config_class is None:
        raise TypeError(f"{model_class.__name__}.config_class is None: expected the class of its configs.")
    return model_class.config_class


def build_pair(
    upstream_class: type[PreTrainedModel], generated_class: type[PreTrainedModel], config: PreTrainedConfig
) -> ModelPair:
    """Builds both models in fp32 with eager attention and experts, with the same perturbed weights."""
    upstream = build_model(upstream_class, config)
    perturb(upstream)
    return paired(upstream, generated_class, config)


def paired(upstream: PreTrainedModel, generated_class: type[PreTrainedModel], config: PreTrainedConfig) -> ModelPair:
    """A pair of `upstream` and the generated class with upstream's weights, unless their structure differs."""
    generated = build_model(generated_class, config)
    pair = ModelPair(upstream, generated, correspondence(upstream, generated))
    pair.problems += [*_class_problems(pair.generated, type(upstream)), *pair.correspondence.problems]
    converted = pair.correspondence.to_generated(dict(pair.upstream.named_parameters()))
    pair.problems += _tensor_problems("parameter", dict(pair.generated.named_parameters()), converted.items())
    pair.problems += _tensor_problems("buffer", dict(pair.generated.named_buffers()), pair.upstream.named_buffers())
    pair.foreign_classes = _foreign_classes(pair.generated, type(upstream))
    if pair.problems:
        return pair
    pair.generated.load_state_dict(pair.correspondence.to_generated(pair.upstream.state_dict()), strict=True)
    pair.problems += _buffer_value_problems(pair)
    return pair


def enable_checkpointing(model: PreTrainedModel) -> None:
    if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.23
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable()


def perturb(model: nn.Module, seed: int = SEED) -> None:
    """Adds noise to every floating-point weight, most to constant ones (zero routers, unit norms).

    A comparison on fresh weights would not see an unused bias or a norm without its weight. Constant buffers that are saved
    (score corrections, ...) change like parameters; those derived from the config do not.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            is_constant = bool((tensor == tensor.flatten()[0]).all())
            if name not in parameters and not is_constant:
                continue
            spread = CONSTANT_SPREAD if is_constant else SPREAD
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.add_((noise * spread).to(tensor))


def build_model(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model in training mode, with eager attention and experts and a seeded init; `config` is not changed."""
    torch.manual_seed(SEED)
    return model_class._from_config(
        copy.deepcopy(config), attn_implementation="eager", experts_implementation="eager", dtype=dtype
    ).train()


def _class_problems(generated: nn.Module, upstream_class: type[nn.Module]) -> list[str]:
    """The outermost modules whose class is upstream's: no pass changed them, so all their numbers agree."""
    upstreams = {
        path for path, module in generated.named_modules() if type(module).__module__ == upstream_class.__module__
    }
    return [
        f"Module '{path}' of the generated model is upstream's {type(module).__name__} ({type(module).__module__}), "
        "so no pass changes it. To fix: let the pass local_classes build the class of the generated file."
        for path, module in generated.named_modules()
        if path in upstreams and not upstreams.intersection(_ancestors(path))
    ]


def _ancestors(path: str) -> list[str]:
    """The paths of the modules that contain the one at `path`: of `a.b.c` the paths ``, `a` and `a.b`."""
    names = path.split(".") if path else []
    return [".".join(names[:length]) for length in range(len(names))]


def _foreign_classes(generated: nn.Module, upstream_class: type[nn.Module]) -> list[str]:
    class_names = {
        f"{type(module).__module__}.{type(module).__name__}"
        for module in generated.modules()
        if type(module).__module__.startswith("transformers.models.")
        and type(module).__module__ != upstream_class.__module__
    }
    return sorted(class_names)


def _tensor_problems(kind: str, generated: dict, upstream) -> list[str]:
    expected = dict(upstream)
    problems = [f"The generated model lacks {kind} '{name}'." for name in expected if name not in generated]
    problems += [
        f"The generated model has {kind} '{name}', upstream does not." for name in generated if name not in expected
    ]
    for name in expected.keys() & generated.keys():
        tensor, reference = generated[name], expected[name]
        if (tensor.shape, tensor.dtype) != (reference.shape, reference.dtype):
            problems.append(
                f"{kind.capitalize()} '{name}' is {tensor.dtype} {list(tensor.shape)} in the generated model, "
                f"{reference.dtype} {list(reference.shape)} upstream."
            )
    return sorted(problems)


def _buffer_value_problems(pair: ModelPair) -> list[str]:
    """Differences in buffers, most of which are computed from the config (rotary frequencies, masks)."""
    generated = dict(pair.generated.named_buffers())
    return [
        f"Buffer '{name}' has other values in the generated model."
        for name, buffer in pair.upstream.named_buffers()
        if not torch.equal(buffer, generated[name])
    ]
