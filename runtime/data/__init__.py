"""Data: from files to the batches of each rank. `docs/data.md` says what it guarantees.

config.py      what to read and how to batch it        build.py       from a configuration to a loader
sources.py     opens files.py, hub.py, builtin.py      records.py     one sample, not yet parsed
formats.py     rows as people have them                rows.py        which of these a source has
text.py        plain text to tokens                    chat.py        conversations to tokens and labels
feedback.py    pairs and numbers                       transform.py   a function of the user's own
cache.py       tokens on disk, shared by all ranks     documents.py   the samples of one cache
multimodal.py  images, videos, sounds to samples       media.py       reads them
processors.py  one way to call upstream's processors   prepare.py     records to samples, in the workers
order.py       shuffling, mixing by weight             packing.py     which samples share a batch
batch_plan.py  the batches of all ranks                cached_loader.py loader of cached samples
record_stream.py each rank's share of the records        stream_loader.py loader of streams and multimodal samples
collate.py     samples to a batch                      problems.py    bad samples: where, why, how many
agreement.py   what ranks ask each other               tokenizers.py  a tokenizer trained on the data
"""

from patchgen.runtime.data.build import build_loader
from patchgen.runtime.data.config import DataConfig, SourceConfig
from patchgen.runtime.data.loader import Loader
from patchgen.runtime.data.problems import Counters, DataError
from patchgen.runtime.data.tokenizers import train_tokenizer

__all__ = ["Counters", "DataConfig", "DataError", "Loader", "SourceConfig", "build_loader", "train_tokenizer"]
