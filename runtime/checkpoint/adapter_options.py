"""Which of PEFT's options a merge of files computes, and which are refused by name.

A merge adds the product of two factors to each adapted weight. Some initialisations also change the frozen weights when the
adapter is made; PEFT repeats the change when it loads the adapter, so what an adapter adds is

    scaling * (B A - B0 A0)      B0, A0: the factors that the initialisation makes of the stored weight

which is a product of factors of twice the rank.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.runtime.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG_FILE = "adapter_config.json"
KEEP_WEIGHTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the frozen weights as they are."""
CHANGE_WEIGHTS = ("pissa", "olora")
"""Those that change them in a way that follows from the stored weights alone."""
NOT_REPEATABLE = {
    "pissa_niter": "it starts from random numbers, which PEFT draws anew when it loads the adapter",
    "corda": "what it subtracts from the frozen weights depends on its data, which the adapter does not hold",
    "lora_ga": "what it subtracts from the frozen weights depends on gradients, which the adapter does not hold (PEFT merges "
    "it into the unchanged weights, without an error)",
    "loftq": "it replaces the frozen weights by quantised ones",
}
"""Those that change them in a way that the files do not tell, and why."""
OTHER_TENSORS = {
    "bias": "trains biases, which the adapter replaces",
    "modules_to_save": "trains whole modules, which the adapter replaces",
    "trainable_token_indices": "trains rows of the embedding, which the adapter replaces",
    "layer_replication": "repeats layers, so the merged model would be another one",
    "lora_bias": "adds to biases",
    "use_qalora": "has factors of pooled inputs",
}
"""Further options with effects that a product of two factors does not have."""
_PEFT = "To fix: load it with PEFT, and call merge_and_unload."
_CONVERT = (
    "To fix: save the adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), which makes an "
    "ordinary one of it; or, if --source holds the frozen weights as they were changed, set init_lora_weights: true in "
    f"{CONFIG_FILE}."
)


def mergeable_config(adapter: Path) -> LoraConfig:
    """The config of an adapter that adds products of two factors.

    Raises:
        CheckpointError: it cannot be read, or has an option with another effect, by name.
    """
    try:
        fields = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{adapter} holds no readable PEFT adapter ({CONFIG_FILE}): {error}") from error
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{adapter} is an adapter of the type {kind}: only LORA can be merged from files. {_PEFT}"
        )
    problems = list(_problems(fields))
    if problems:
        raise CheckpointError(f"{adapter} cannot be merged from files, by its {CONFIG_FILE}:", problems)

    import peft

    config = peft.PeftConfig.from_pretrained(str(adapter))
    assert isinstance(config, peft.LoraConfig), "the type was checked"
    return config


def _problems(fields: dict[str, Any]) -> Iterator[str]:
    """A sentence for each option that a merge of files would not compute as PEFT does."""
    import peft

    start = fields.get("init_lora_weights", True)
    if start not in KEEP_WEIGHTS and start not in CHANGE_WEIGHTS:
        reason = next((why for name, why in NOT_REPEATABLE.items() if str(start).startswith(name)), None)
        yield f"init_lora_weights = {start!r}: {reason or 'its effect on the frozen weights is not known here'}. {_CONVERT}"
    for name, effect in OTHER_TENSORS.items():
        if fields.get(name) not in (None, False, "none", [], {}):
            yield f"{name} = {fields[name]!r} {effect}. {_PEFT}"
    for option in dataclasses.fields(peft.LoraConfig):
        value = fields.get(option.name)
        if option.metadata.get("is_lora_variant") and value:
            yield f"{option.name} = {value!r} is more than a product of two factors. {_PEFT}"


def initial_factors(layer: Any, config: LoraConfig, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The factors that PEFT makes of a weight, and subtracts from it, when it adds an adapter.

    Args:
        layer: PEFT's layer on the adapted module, on the meta device.
        name: of the adapter.
        weight: of the module, in fp32, on the CPU.

    Returns:
        A0 [r, I] and B0 [O, r], in fp32.
    """
    parameter = getattr(layer, "parameter_name", "weight")
    base = layer.get_base_layer()
    setattr(base, parameter, nn.Parameter(weight, requires_grad=False))
    with torch.no_grad():
        layer.update_layer(name, layer.r[name], lora_alpha=layer.lora_alpha[name], config=config)
    return layer.lora_A[name].weight.detach().float(), layer.lora_B[name].weight.detach().float()
