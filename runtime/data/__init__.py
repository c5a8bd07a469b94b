"""Data: from files to the batches of each rank. `docs/data.md` says what it guarantees.

config.py        what to read and how to batch it       build.py           from a configuration to a loader
sources.py       opens json_files.py, files.py (text    records.py         one sample, not yet parsed
                 and Parquet), hub.py, builtin.py       text_files.py      text in any encoding, compressed or not
formats.py       row formats and their fields           rows.py            maps the rows of a source
text.py          encodes plain text                     chat.py            encodes conversations, with a loss mask
feedback.py      encodes pairs and labelled samples     task_encoders.py   encodes samples of other heads
literals.py      special tokens in data as plain text   transform.py       the user's own function on rows
rendering.py     chat templates, by message             provenance.py      the message of each character
turn_spans.py    what is learned of a turn
cache.py         tokens on disk, shared by all ranks    documents.py       the samples of one cache
multimodal.py    prepares images, videos, sounds        media_items.py     finds them in samples; media.py reads them
media_options.py options of processors (`data.media`)   loader.py          the interface of loaders
processors.py    one interface for processors           token_alignment.py aligns their tokens with the text
prepare.py       records to samples, in the workers     roles.py           the role of each token
order.py         shuffling, mixing by weight            packing.py         which samples share a batch
batch_plan.py    the batches of all ranks               cached_loader.py   loader of cached samples
record_stream.py each rank's share of the records       stream_loader.py   loader of streams and multimodal samples
collate.py       samples to a batch                     problems.py        bad samples: where, why, how many
agreement.py     collectives on data                    tokenizers.py      trains a tokenizer on the data
arrow_rows.py    rows of Arrow without its padding      preview.py         batches for display: preview_text.py,
                                                        preview_page.py, decoder.py
"""

from patchgen.runtime.data.build import build_loader
from patchgen.runtime.data.config import DataConfig, SourceConfig
from patchgen.runtime.data.loader import Loader
from patchgen.runtime.data.problems import Counters, DataError
from patchgen.runtime.data.tokenizers import train_tokenizer

__all__ = ["Counters", "DataConfig", "DataError", "Loader", "SourceConfig", "build_loader", "train_tokenizer"]
