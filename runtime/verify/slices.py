"""What a model refuses on a slice of a sequence, found in one process before ranks start.

The collectives of torch's fake process group move nothing: numbers mean nothing there, and a refusal is a refusal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from patchgen.runtime import parallel
from patchgen.runtime.attention_masks import UnsupportedError
from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.parallel.state import ParallelState

SP = 2


def refusal_on_slices(model: PreTrainedModel) -> str:
    """Why the model's attention cannot be computed on a slice of packed rows; empty where nothing refuses it.

    What fails otherwise is left to the comparison of slices with the whole sequence on the ranks themselves
    (`selfcheck.py`): garbage that nobody sent may be its cause here.
    """
    ids = torch.arange(3, 3 + 8 * SP)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(ids.shape[1])[None] % 6
    batch = {"input_ids": ids, "position_ids": positions}
    with one_of_ranks() as state, parallel.using(state), torch.no_grad():
        try:
            model(**slice_batch(batch, sp=SP, sp_rank=0), use_cache=False)
        except UnsupportedError as refusal:
            return str(refusal)
        except Exception:
            return ""
    return ""


@contextlib.contextmanager
def one_of_ranks() -> Iterator[ParallelState]:
    """The parallel state of the first of `SP` ranks that share a sequence, the others of which do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SP)
    try:
        yield ParallelState.create(ParallelConfig.for_world(SP, sp=SP), "cpu")
    finally:
        dist.destroy_process_group()
