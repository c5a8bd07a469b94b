"""The fixed inputs of a proof: seeded text batches with every field that a training batch may have.

Shapes: B batch, S sequence.

    plain         ids and labels; some labels are -100
    padded        the second row ends in padding: attention mask 0, labels -100
    packed        two documents in each row: position ids restart at 0 in the middle
    step          the plain rows as a trainer passes them, with the number of labels of the whole step
    other caller  the second row begins with padding; labels that the caller has shifted, and the number of labels as an int
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
NUM_ITEMS = "num_items_in_batch"
SHIFTED = "shift_labels"
OTHER_CALLER = "other caller"
ITEMS_OF_STEP = 100


@dataclasses.dataclass(frozen=True)
class Case:
    """One input by name: the keyword arguments of the model's forward."""

    name: str
    batch: Mapping[str, Any]


def text_cases(
    config: PreTrainedConfig, model_class: type[nn.Module], *, seed: int = 0, packed: bool = False
) -> tuple[Case, ...]:
    """The cases that the forward of `model_class` takes.

    Args:
        config: ids are drawn from its vocabulary without its special tokens.
        model_class: cases with arguments that its forward does not take are left out.
        packed: give the packed case to a forward without `position_ids`, too: for callers that hand it each document alone.

    Returns:
        ids, labels, mask and position ids are int64 `[B, S]`; labels of other heads are as in `head_kinds.py`.
    """
    ids, labels = _ids_and_labels(config, seed)
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
        Case("step", {"input_ids": ids, "labels": labels, NUM_ITEMS: torch.tensor(ITEMS_OF_STEP)}),
    )
    taken = _taken(cases, config, model_class)
    is_left_out = all(case.name != "packed" for case in taken)
    return (*taken, *(case for case in cases if case.name == "packed")) if packed and is_left_out else taken


def caller_cases(config: PreTrainedConfig, model_class: type[nn.Module], *, seed: int = 0) -> tuple[Case, ...]:
    """The case of another caller than patchgen's trainer, as far as the forward of `model_class` takes it."""
    ids, labels = _ids_and_labels(config, seed)
    mask = torch.ones_like(ids)
    mask[1, :NUM_PADDED] = 0
    labels = labels.masked_fill(mask == 0, IGNORED)
    labels[1, NUM_PADDED] = IGNORED  # predicted by padding
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    shifted = labels.roll(-2, dims=1)  # by two: whoever shifts labels instead computes another loss
    own_loss = {SHIFTED: shifted, NUM_ITEMS: ITEMS_OF_STEP}
    cases = _taken((Case(OTHER_CALLER, {**batch, **own_loss}),), config, model_class)
    return cases or _taken((Case(OTHER_CALLER, batch),), config, model_class)


def _ids_and_labels(config: PreTrainedConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Random ids, and labels with a prompt and single tokens ignored, int64 `[B, S]`."""
    generator = torch.Generator().manual_seed(seed)
    drawable = torch.tensor(drawable_ids(config))
    ids = drawable[torch.randint(len(drawable), (BATCH, SEQUENCE), generator=generator)]
    labels = ids.clone()
    labels[torch.rand(BATCH, SEQUENCE, generator=generator) < 0.15] = IGNORED
    labels[:, :2] = IGNORED  # a prompt
    return ids, labels


def _taken(cases: tuple[Case, ...], config: PreTrainedConfig, model_class: type[nn.Module]) -> tuple[Case, ...]:
    """The cases that a forward takes, with the labels of its kind of head."""
    parameters = inspect.signature(model_class.forward).parameters
    input_names = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()) and "labels" in input_names:
        input_names |= {NUM_ITEMS, SHIFTED} if getattr(model_class, "accepts_loss_kwargs", True) else set()
    kind = head_kinds.kind_of(model_class.__name__)
    if kind is not None:
        input_names -= {NUM_ITEMS, SHIFTED}  # only language models' losses are means over a step
    cases = tuple(case for case in cases if case.batch.keys() <= input_names | {"labels"})
    if kind is not None:
        return tuple(Case(one.name, head_kinds.head_batch(kind, config, parameters, one.batch)) for one in cases)
    if "labels" in input_names:
        return cases
    return tuple(Case(one.name, {k: v for k, v in one.batch.items() if k != "labels"}) for one in cases)


def drawable_ids(config: PreTrainedConfig) -> list[int]:
    """The ids of the small vocabulary without 0, the reserved ones and special tokens of the config or of its sub-configs."""
    text = config.get_text_config(decoder=True)
    vocab = min(vars(text).get(type(text).attribute_map.get("vocab_size", "vocab_size")) or sizes.VOCAB, sizes.VOCAB)
    special = set(special_ids(config))
    ids = [token for token in range(1, sizes.first_reserved_id(vocab)) if token not in special]
    if not ids:
        raise ValueError(
            f"a vocabulary of {vocab} ids with {len(special)} special tokens leaves a proof none to draw: expected ids below "
            f"{sizes.first_reserved_id(vocab)} that are neither 0 nor special."
        )
    return ids


def special_ids(config: PreTrainedConfig) -> list[int]:
    """The special tokens of the config and of its sub-configs."""
    from transformers import PreTrainedConfig

    ids = []
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            ids += special_ids(value)
        elif sizes.is_special_id(name) and value is not None:
            ids += value if isinstance(value, (list, tuple)) else [value]
    return ids
