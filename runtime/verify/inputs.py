"""The fixed inputs of a proof: seeded text batches with everything that a training batch may carry.

Shapes: B batch, S sequence.

    plain    ids and labels; some labels are -100
    padded   the second row ends in padding: attention mask 0, labels -100
    packed   two documents in each row: position ids start again at 0 in the middle
    step     the plain rows as a trainer hands them in, with the number of labels of the step that they are a part of
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from patchgen.runtime.verify import field_semantics as sizes
from patchgen.runtime.verify import head_kinds

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

BATCH = 2
SEQUENCE = sizes.SEQUENCE
IGNORED = -100
NUM_PADDED = 7
FIRST_DOCUMENT = 15
ITEMS = "num_items_in_batch"
ITEMS_OF_STEP = 100


@dataclasses.dataclass(frozen=True)
class Case:
    """One input by name: the keyword arguments of the model's forward."""

    name: str
    batch: Mapping[str, Any]


def text_cases(config: PreTrainedConfig, model_class: type[nn.Module], *, seed: int = 0) -> tuple[Case, ...]:
    """The cases that the forward of `model_class` takes.

    Args:
        config: its special token ids are never drawn; its vocabulary bounds the others.
        model_class: arguments that its forward does not name are left out, and with them the cases that need them.

    Returns:
        ids, labels, mask and position ids are int64 `[B, S]`.
    """
    generator = torch.Generator().manual_seed(seed)
    drawable = torch.tensor(drawable_ids(config))
    ids = drawable[torch.randint(len(drawable), (BATCH, SEQUENCE), generator=generator)]
    labels = ids.clone()
    labels[torch.rand(BATCH, SEQUENCE, generator=generator) < 0.15] = IGNORED
    labels[:, :2] = IGNORED  # a prompt

    mask = torch.ones_like(ids)
    mask[1, -NUM_PADDED:] = 0
    padded_labels = labels.masked_fill(mask == 0, IGNORED)

    second = SEQUENCE - FIRST_DOCUMENT
    positions = torch.cat([torch.arange(FIRST_DOCUMENT), torch.arange(second)]).expand(BATCH, SEQUENCE).contiguous()
    packed_labels = labels.clone()
    packed_labels[:, FIRST_DOCUMENT] = IGNORED  # the first token of a document has no context

    cases = (
        Case("plain", {"input_ids": ids, "labels": labels}),
        Case("padded", {"input_ids": ids, "labels": padded_labels, "attention_mask": mask}),
        Case("packed", {"input_ids": ids, "labels": packed_labels, "position_ids": positions}),
        Case("step", {"input_ids": ids, "labels": labels, ITEMS: torch.tensor(ITEMS_OF_STEP)}),
    )
    parameters = inspect.signature(model_class.forward).parameters
    known = set(parameters)
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and "labels" in known:
        known |= {ITEMS} if getattr(model_class, "accepts_loss_kwargs", True) else set()
    if (kind := head_kinds.kind_of(model_class.__name__)) is not None:
        known -= {ITEMS}  # a mean over a step is a language model's
        return tuple(
            Case(case.name, head_kinds.batch_of(kind, config, parameters, case.batch))
            for case in cases
            if _takes(known, case)
        )
    return tuple(_without(case, "labels" if "labels" not in known else "") for case in cases if _takes(known, case))


def drawable_ids(config: PreTrainedConfig) -> list[int]:
    """The ids of the vocabulary that no field of the config, or of a sub-config, gives a special meaning."""
    text = config.get_text_config(decoder=True)
    vocab = min(vars(text).get(type(text).attribute_map.get("vocab_size", "vocab_size")) or sizes.VOCAB, sizes.VOCAB)
    special = set(special_ids(config))
    return [token for token in range(1, vocab - sizes.NUM_RESERVED_IDS) if token not in special]


def special_ids(config: PreTrainedConfig) -> list[int]:
    """The ids that fields of the config and of its sub-configs give a special meaning."""
    from transformers import PreTrainedConfig

    found = []
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found += special_ids(value)
        elif sizes.is_special_id(name) and value is not None:
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


def _takes(known: set[str], case: Case) -> bool:
    return all(name in known for name in case.batch if name != "labels")


def _without(case: Case, name: str) -> Case:
    return Case(case.name, {key: value for key, value in case.batch.items() if key != name})
