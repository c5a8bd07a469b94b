"""Floating-point operations of a training step, and model FLOPs utilisation (MFU).

    FLOPs = 6 A T  +  sum over attention layers and documents of  3 N (D_qk + D_v) l^2

    A    active matrix parameters: K of E stacked experts, and the head, but not embeddings, which are looked up
    T    tokens          l    tokens of a document     N heads     D_qk, D_v   sizes of a query and of a value head

A multiplication with a parameter costs 2 in the forward and 4 in the backward. Attention of l tokens costs
`2 N (D_qk + D_v) l^2` forward without the causal mask, half of that with it, and twice as much again backward; with a
window w a token sees at most w. Recomputation (activation checkpointing) is not counted: MFU is about the model, not
about how it is run. Recurrent layers count with their parameters only, towers of multimodal models not at all.

    MFU = FLOPs / (seconds * devices * peak of a device)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patchgen.runtime.parallel import report, sharding
from patchgen.runtime.verify.field_semantics import rule_for

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Dense bfloat16 peaks in TFLOP/s, from the vendors' data sheets; the first key contained in the device's name applies.
PEAKS = {
    "GB200": 2500.0,
    "GB300": 2500.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "MI300X": 1307.0,
    "MI325X": 1307.0,
}


@dataclass(frozen=True)
class ModelCost:
    """What the FLOPs of a language model are computed from.

    Attributes:
        parameters: of the full model.
        active: matrix parameters that a token passes through.
        attention: per attention layer `N (D_qk + D_v)` and its window, or None.
    """

    parameters: int
    active: int
    attention: tuple[tuple[int, int | None], ...]

    def flops(self, lengths: Iterable[int]) -> float:
        """FLOPs of the forward and backward of documents of these lengths."""
        lengths = list(lengths)
        total = 6.0 * self.active * sum(lengths)
        for width, window in self.attention:
            total += sum(6.0 * width * _attended_pairs(length, window) for length in lengths)
        return total


def _attended_pairs(length: int, window: int | None) -> float:
    """Pairs of tokens that attend, the diagonal counted as a half: `l^2 / 2` without a window."""
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2


def model_cost(model: PreTrainedModel) -> ModelCost:
    """The cost of a generated model, sharded or not, on any device.

    Raises:
        ValueError: the model has experts, but its config does not say how many a token gets.
    """
    text_config = model.config.get_text_config()
    head = model.get_output_embeddings()
    counted = {id(p) for module in (model.get_decoder(), head) if module is not None for p in module.parameters()}
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    if head is not None:  # the head is a matrix product even if it is tied to the embeddings
        looked_up -= {id(p) for p in head.parameters()}
    experts = set(sharding.expert_paths(model))
    active, total = 0, 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if id(parameter) not in counted or id(parameter) in looked_up or parameter.ndim < 2:
            continue
        if name in experts:
            active += parameter.numel() * experts_per_token(text_config) // parameter.shape[0]
        else:
            active += parameter.numel()
    return ModelCost(parameters=total, active=active, attention=tuple(_attention_layers(model)))


def experts_per_token(config: PreTrainedConfig) -> int:
    """K of a config; ValueError if it has none."""
    found = find_experts_per_token(config)
    if found is None:
        raise ValueError(f"{type(config).__name__} does not say how many experts a token gets.")
    return found


def find_experts_per_token(config: PreTrainedConfig) -> int | None:
    """K of a config, found by the meaning of its fields; None: it has no such field."""
    common_names = {field: common for common, field in config.attribute_map.items()}
    for name, value in config.to_dict().items():
        rule = rule_for(common_names.get(name, name), name) if isinstance(value, int) else None
        if rule is not None and rule.meaning == "experts per token":
            return value
    return None


def _attention_layers(model: PreTrainedModel) -> Iterable[tuple[int, int | None]]:
    for module in model.get_decoder().modules():
        if not report.attends(module):
            continue
        config: Any = module.config
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        query = getattr(config, "qk_head_dim", None) or size
        if getattr(config, "qk_nope_head_dim", None):
            query = config.qk_nope_head_dim + config.qk_rope_head_dim
        value = getattr(config, "v_head_dim", None) or size
        yield heads * (query + value), getattr(module, "sliding_window", None)


def peak_tflops(device: torch.device) -> float | None:
    """The dense bf16 peak of a device in TFLOP/s; None if it is not a GPU in `PEAKS`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for gpu, peak in PEAKS.items() if gpu in name), None)
