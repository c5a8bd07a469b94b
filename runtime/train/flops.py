"""What a training step costs in floating-point operations, and how much of a device that uses (MFU).

    FLOPs = 6 A T  +  sum over attention layers and documents of  3 N (D_qk + D_v) l^2

    A    matrix parameters that a token passes through: of E stacked experts K count; embeddings are looked up and
         count nothing, the head counts
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

# Dense peaks in TFLOP/s for bfloat16, from the makers' data sheets; the first name that occurs in the device's counts.
PEAKS = {
    "GB200": 2500.0,
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
    """What the language model of a class costs.

    Attributes:
        parameters: of the whole model.
        active: matrix parameters that a token passes through.
        attention: per attention layer `N (D_qk + D_v)` and its window, or None.
    """

    parameters: int
    active: int
    attention: tuple[tuple[int, int | None], ...]

    def flops(self, lengths: Iterable[int]) -> float:
        """Of the forward and backward of documents of these lengths."""
        lengths = list(lengths)
        total = 6.0 * self.active * sum(lengths)
        for width, window in self.attention:
            total += sum(6.0 * width * _pairs(length, window) for length in lengths)
        return total


def _pairs(length: int, window: int | None) -> float:
    """Pairs of tokens that attend, the diagonal as a half: `l^2 / 2` without a window."""
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2


def model_cost(model: PreTrainedModel) -> ModelCost:
    """The cost of a generated model, whole or sharded, on any device.

    Raises:
        ValueError: the model has experts, but its config does not say how many a token gets.
    """
    text = model.config.get_text_config()
    counted = [model.get_decoder(), model.get_output_embeddings()]
    own = {id(p) for module in counted if module is not None for p in module.parameters()}
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    head = model.get_output_embeddings()
    if head is not None:  # tied to the embeddings or not, the head multiplies
        looked_up -= {id(p) for p in head.parameters()}
    experts = set(sharding.expert_paths(model))
    active, total = 0, 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if id(parameter) not in own or id(parameter) in looked_up or parameter.ndim < 2:
            continue
        if name in experts:
            active += parameter.numel() * experts_per_token(text) // parameter.shape[0]
        else:
            active += parameter.numel()
    return ModelCost(parameters=total, active=active, attention=tuple(_attention_layers(model)))


def experts_per_token(config: PreTrainedConfig) -> int:
    """K of a config, found by what its fields mean."""
    common = {own: name for name, own in config.attribute_map.items()}
    for name, value in config.to_dict().items():
        rule = rule_for(common.get(name, name), name) if isinstance(value, int) else None
        if rule is not None and rule.meaning == "experts per token":
            return value
    raise ValueError(f"{type(config).__name__} does not say how many experts a token gets.")


def _attention_layers(model: PreTrainedModel) -> Iterable[tuple[int, int | None]]:
    decoder = model.get_decoder()
    for module in decoder.modules():
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
    """The dense bf16 peak of a device in TFLOP/s; None if its name is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)
