"""What the trainer adds to reading data: errors name the recipe's section, counts are of all ranks, and what is read beside the
steps changes no random number of theirs.

Loaders know only of one section, `data`. Of evaluation data the same error is
    data.media: no such option        eval_data.media: no such option
    rows.jsonl:3: not readable        eval_data: rows.jsonl:3: not readable
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator

from patchgen.runtime import random_state
from patchgen.runtime.data import Counters, DataConfig, DataError, Loader
from patchgen.runtime.data.agreement import counters_of_all_ranks
from patchgen.runtime.data.problems import FailedOnAnotherRank
from patchgen.runtime.parallel.state import ParallelState

# A key of the section `data` in a message; not a file such as x/data.jsonl.
_DATA_KEY = re.compile(
    rf"(?<![\w./-])data\.(?=(?:{'|'.join(field.name for field in dataclasses.fields(DataConfig))})\b)"
)


@contextlib.contextmanager
def naming_section(section: str) -> Iterator[None]:
    """Makes a DataError of the section "eval_data" name it; one of "data" does already."""
    try:
        yield
    except FailedOnAnotherRank:  # known by its message
        raise
    except DataError as error:
        if section == "data":
            raise
        message = _DATA_KEY.sub("eval_data.", str(error)).replace(" a eval_data.", " an eval_data.")
        raise DataError(
            message if message.startswith(("eval_data.", "eval_data:")) else f"eval_data: {message}"
        ) from error


def counters_of(loader: Loader, state: ParallelState) -> Counters:
    """What became of the samples that all ranks have read (collective)."""
    if not loader.is_sharded:
        return loader.counters
    return counters_of_all_ranks(loader.counters, batch_index=state.batch_index)


def nothing_to_evaluate(loader: Loader, state: ParallelState) -> DataError:
    """The error of an evaluation without a batch (collective)."""
    return DataError(
        "eval_data: no sample can be used, so there is no loss to evaluate. What was read: "
        f"{counters_of(loader, state).summary()}. To fix: correct the samples, or raise eval_data.tokens_per_batch or max_length "
        "if they are too long."
    )


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Sets the random generators back at the end: workers draw their seed from them, transforms draw as well, and training must
    not depend on what else was read."""
    generators = random_state.capture()
    try:
        yield
    finally:
        random_state.restore(generators)
