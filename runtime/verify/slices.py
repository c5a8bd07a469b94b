"""What a model refuses on several ranks or on a slice of a sequence, found in one process before ranks start.

The collectives of torch's fake process group exchange nothing, so values are meaningless; only refusals count.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from patchgen.runtime import parallel
from patchgen.runtime.attention_masks import UnsupportedError
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.parallel.state import ParallelState

RANKS = 2


def refusal_on_ranks(model: PreTrainedModel, *, shares_sequence: bool) -> str:
    """Why the model cannot be computed on several ranks, or on a slice of packed rows; empty if nothing refuses it.

    Other errors may come from values that were never exchanged: the ranks themselves compare slices with the full
    sequence (`selfcheck.py`).
    """
    if shares_sequence and (refusal := encoder_decoder_refusal(type(model), RANKS)):
        return refusal
    ids = torch.arange(3, 3 + 8 * RANKS)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(ids.shape[1])[None] % 6
    batch = {"input_ids": ids, "position_ids": positions}
    sp = RANKS if shares_sequence else 1
    with fake_rank(sp) as state, parallel.using(state), torch.no_grad():
        try:
            model(**slice_batch(batch, sp=sp, sp_rank=0), use_cache=False)
        except UnsupportedError as refusal:
            return str(refusal)
        except Exception as error:
            reraise_machine_failure(error)
    return ""


def encoder_decoder_refusal(head: type[PreTrainedModel], sp: int) -> str:
    """Why ranks cannot share the sequence of an encoder-decoder; empty for other heads."""
    if "decoder_input_ids" not in inspect.signature(head.forward).parameters:
        return ""
    return (
        f"{head.__name__} has an encoder for one sequence and a decoder for another (decoder_input_ids), and sp={sp} divides "
        "a single sequence over ranks. To fix: train this model with sp=1."
    )


@contextlib.contextmanager
def fake_rank(sp: int = RANKS) -> Iterator[ParallelState]:
    """The parallel state of the first of `RANKS` ranks; the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield ParallelState.create(ParallelConfig.for_world(RANKS, sp=sp), "cpu")
    finally:
        dist.destroy_process_group()
