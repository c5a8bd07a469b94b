"""What a layer saves for the backward, per token, from the widths of its linear layers, norms and experts.

    linear        its output, and its input once for all that read it (q, k and v read one)
    norm          nothing more if it is one kernel; upstream's formula keeps its input in fp32 and the normed input
    q and k norm  one more of their width: the input of the norm and that of the attention are two
    gated MLP     the activated gate, unless one kernel computes it with the product
    experts       of each of a token's K experts the first projection, 2 I; they compute the product again
    adapters      the input of each adapted linear layer in fp32

K experts per token   I width of an expert   H hidden size
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from patchgen.runtime import seams
from patchgen.runtime.parallel import ParallelConfig, expert_peers, peer_memory
from patchgen.runtime.train import lora_targets
from patchgen.runtime.train.flops import find_experts_per_token
from patchgen.runtime.train.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FP32 = 4  # bytes


def exchanges_through_peers(recipe: Recipe, layout: ParallelConfig, device_type: str) -> bool:
    """Whether experts' tokens travel through peer memory, as far as it is known here."""
    section = recipe.parallel
    by_itself = device_type == "cuda" and layout.ep <= peer_memory._MEASURED_RANKS and section.expert_capacity is None
    return layout.ep > 1 and (
        section.expert_exchange == "peer_memory" or (section.expert_exchange == "auto" and by_itself)
    )


class Widths:
    """The bytes per token of this rank's slice.

    Attributes:
        hidden: H.
        working: of each layer that was asked for, in order: what its backward takes beyond what was saved.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        layout: ParallelConfig,
        chosen: Mapping[str, str],
        itemsize: int,
        device_type: str,
    ) -> None:
        text = model.config.get_text_config()
        self.hidden, self.per_token = text.hidden_size, find_experts_per_token(text) or 0
        self.layout, self.itemsize = layout, itemsize
        self.is_fused = {name: chosen.get(name, seams.EAGER) != seams.EAGER for name in seams.names()}
        self.has_peers = exchanges_through_peers(recipe, layout, device_type)
        targets = lora_targets.find_targets(model, recipe.lora) if recipe.lora is not None else None
        self.adapted = set(targets.modules) if targets else set()
        self.adapts_experts = bool(targets and targets.experts)
        self.working: list[int] = []

    def of_layer(self, layer: nn.Module, path: str) -> int:
        """Bytes that a layer saves per token."""
        total, of_experts = self.hidden * self.itemsize, 0  # its input
        for name, module in layer.named_modules():
            linears = {
                child_name: child for child_name, child in module.named_children() if isinstance(child, nn.Linear)
            }
            if linears:
                total += self._of_linears(linears) * self.itemsize
                prefix = f"{path}.{name}.".replace("..", ".")
                adapted = [child for child_name, child in linears.items() if f"{prefix}{child_name}" in self.adapted]
                total += FP32 * sum(child.in_features for child in adapted)
            total += self._of_norms(module, linears)
            stacked = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 3]
            if stacked and not isinstance(module, nn.Linear):
                of_experts += max(parameter.shape[1:].numel() // self.hidden for parameter in stacked)
            elif (
                isinstance(weight := getattr(module, "weight", None), nn.Parameter)
                and weight.ndim == 2
                and not isinstance(module, nn.Linear | nn.Embedding)
            ):  # a router that is not a linear layer
                total += sum(weight.shape) * self.itemsize
        self.working.append(0)
        if of_experts and self.per_token:  # else stacks of convolutions
            total += self._of_experts(of_experts)
        return total

    def _of_experts(self, width: int) -> int:
        """Bytes of stacked experts whose first projection has this width."""
        rounds, ranks = (expert_peers.ROUND_SHARES, self.layout.ep) if self.has_peers else (1, 1)
        rows = self.per_token * width * rounds
        if not self.is_fused[
            "fused_moe"
        ]:  # upstream's loop keeps input, both projections, the product and its own output
            rows += self.per_token * (2 * self.hidden + width)
        if self.adapts_experts:
            rows += self.per_token * width // 2
        received = self.hidden * ranks if self.layout.ep > 1 else 0
        self.working[-1] = (self.per_token * width * rounds + received) * self.itemsize
        return (rows + received + self.hidden) * self.itemsize  # H: what is added to the residual

    def _of_linears(self, linears: Mapping[str, nn.Linear]) -> int:
        """Values of linear layers of one module."""
        outputs = sum(linear.out_features for linear in linears.values())
        inputs = sum({linear.in_features for linear in linears.values()})
        shapes = [(linear.in_features, linear.out_features) for linear in linears.values()]
        gates = [
            shape for shape in shapes if shapes.count(shape) > 1 and shape[::-1] in shapes and shape[0] != shape[1]
        ]
        return outputs + inputs + (gates[0][1] if gates and not self.is_fused["swiglu"] else 0)

    def _of_norms(self, module: nn.Module, linears: Mapping[str, nn.Linear]) -> int:
        """Bytes of the norms inside a module."""
        total = 0
        for name, child in module.named_children():
            weight = getattr(child, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or "norm" not in type(child).__name__.lower():
                continue
            width = weight.numel()
            before = linears.get(f"{name.split('_')[0]}_proj")  # q_norm of q_proj
            if before is not None and width < before.out_features:
                width = before.out_features
                total += width * self.itemsize
            if not self.is_fused["rms_norm"]:
                total += width * (FP32 + self.itemsize)
        return total
