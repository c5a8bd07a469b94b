"""What two ranks that share a sequence check about attention and positions of models beside the usual ones."""

from __future__ import annotations

import copy
import importlib

import cases_sequence
import torch
from transformers import PreTrainedModel

from patchgen.runtime import attention, parallel
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.small_config import small_config

LENGTHS = (7, 12, 5)
ROUNDING = 64 * torch.finfo(torch.float32).eps


def _pair(kind: str, head: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Upstream's class with its eager attention, and with ours and the same weights."""
    attention.register()
    cls = getattr(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), head)
    config = small_config(cls.config_class).config
    expected = build_model(cls, config).eval()
    perturb(expected)
    own = cls._from_config(copy.deepcopy(config), attn_implementation="patchgen_sdpa").eval()
    own.load_state_dict(expected.state_dict())
    return expected, own


@torch.no_grad()
def positions_are_those_of_each_document_alone(kind: str, head: str) -> None:
    """Logits of a slice, of rows with a padding id in them and of packed rows, against upstream without position ids."""
    state = cases_sequence.state_of(sp=2)
    expected, own = _pair(kind, head)
    ids = torch.randint(3, 60, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    ids[1, 4] = expected.config.pad_token_id
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)
    alone = torch.cat([expected(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    whole = expected(input_ids=ids, use_cache=False).logits
    for batch, wanted in (({}, whole), ({"position_ids": positions}, alone)):
        mine = slice_batch({"input_ids": ids, **batch}, sp=2, sp_rank=state.sp_rank)
        with parallel.using(state):
            got = own(**mine, use_cache=False).logits
        error = (got - wanted.chunk(2, dim=1)[state.sp_rank]).abs().max() / wanted.abs().max()
        assert error < ROUNDING, float(error)


def refusal(kind: str, head: str) -> str:
    """The message with which a model refuses a slice of a sequence."""
    state = cases_sequence.state_of(sp=2)
    _, own = _pair(kind, head)
    mine = slice_batch({"input_ids": torch.arange(3, 27)[None]}, sp=2, sp_rank=state.sp_rank)
    try:
        with parallel.using(state):
            own(**mine, use_cache=False)
    except attention.UnsupportedError as error:
        return str(error)
    return "nothing was refused"
