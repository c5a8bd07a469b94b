"""Checkpoints: weights in, training state in and out, weights out.

load.py                 weights from any Hugging Face layout into a sharded model
incremental_load.py     the same a few tensors at a time, for a model that never has all of them
train_state.py          save and resume a run: atomic, on any number of ranks
export.py               weights out of a sharded model, in the layout of the original
weight_stream.py        the same without files, for an inference engine
offline.py              from disk to disk: other layouts, a run's weights, fingerprints
merge.py                an adapter into a checkpoint
untrained_part.py       tensors of a checkpoint that the model does not load

lazy_tensors.py         tensors without data that record how they are built
layout.py               transformers' own conversions on such tensors      origin.py   the checkpoint that a model was loaded from
safetensor_files.py     headers of safetensors files        writing.py   writes such files
file_reader.py          reads their data                saved_shards.py   tensors of training checkpoints
placement.py            which rank holds which region       staging.py   copies while training goes on
model_files.py          configs, tokenizers, meta models    folders.py   describes a folder of another kind
initialise.py           parameters that are not loaded      finite.py, host_memory.py   for fast reads
optimizer_state.py      an optimizer's state by parameter name
manifest.py, saved_steps.py, small_files.py, tensor_index.py   the files that train_state.py saves
"""

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.export import export_pretrained
from patchgen.runtime.checkpoint.layout import LAYOUTS
from patchgen.runtime.checkpoint.load import load_pretrained
from patchgen.runtime.checkpoint.load_report import LoadReport
from patchgen.runtime.checkpoint.merge import merge_adapter
from patchgen.runtime.checkpoint.offline import convert, export_run, fingerprint
from patchgen.runtime.checkpoint.train_state import Checkpointer
from patchgen.runtime.checkpoint.weight_stream import stream_weights

__all__ = [
    "LAYOUTS",
    "CheckpointError",
    "Checkpointer",
    "LoadReport",
    "convert",
    "export_pretrained",
    "export_run",
    "fingerprint",
    "load_pretrained",
    "merge_adapter",
    "stream_weights",
]
