"""Which tensors of a model upstream keeps in fp32 while the others are narrower, as `from_pretrained(dtype=...)` does.

    class DeepseekV3PreTrainedModel:
        _keep_in_fp32_modules_strict = ["e_score_correction_bias"]    # with bf16 and with fp16
        _keep_in_fp32_modules = [...]                                 # with fp16 only

transformers looks for these names anywhere in the name of a tensor, and `*` stands for any text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

STRICT, LENIENT = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"


def keeps_in_fp32(model: nn.Module, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Whether upstream keeps the tensor of a name in fp32 in a model of this dtype.

    Args:
        model: transformers' models have the names of all models inside them.
        dtype: None: no tensor is kept.
    """
    attributes = {torch.bfloat16: (STRICT,), torch.float16: (STRICT, LENIENT)}.get(dtype, ()) if dtype else ()
    names = sorted({name for attribute in attributes for name in getattr(model, attribute, None) or ()})
    pattern = re.compile("|".join(name.replace("*", ".*") for name in names))
    return lambda name: bool(names) and pattern.search(name) is not None


def keep_in_fp32(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Casts what upstream keeps in fp32 of a model that was built in this dtype, in place: parameters, and buffers that are saved.

    To be called before the model has values, on the meta device: what was bf16 once has lost its digits. Shards stay as they are:
    `shard_model` has cast them before.

    Args:
        dtype: None: that of most parameters.
    """
    is_kept = keeps_in_fp32(model, dtype or most_common_dtype(model))
    saved = model.state_dict(keep_vars=True)
    for name, tensor in saved.items():
        if tensor.is_floating_point() and is_kept(name) and not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(torch.float32)


def most_common_dtype(model: nn.Module) -> torch.dtype | None:
    """The floating-point dtype of most parameters, by their elements; None: there are none."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel() if parameter.is_floating_point() else 0
    return max(sizes, key=sizes.__getitem__, default=None)
