"""Checkpoints: weights in, training state in and out, weights out.

load.py                 weights from any Hugging Face layout into a sharded model
train_state.py          save and resume a run: whole or not at all, on any layout
export.py               weights out of a sharded model, in the layout of the original
in_parts.py             weights some at a time, for a model that never holds all of them
weight_stream.py        the same without files, for an engine that generates
offline.py              from disk to disk: other layouts, a run's weights, fingerprints
merge.py                an adapter into a checkpoint
rest.py                 what a checkpoint holds beside the model that trains

tensor_sources.py       how tensors are made of other tensors, without having them
layout.py               transformers' own conversions on such tensors
safetensor_files.py     headers of safetensors files       writing.py   and files of them
file_reader.py          the bytes behind them
placement.py            which rank holds which part        staging.py   copies while training goes on
"""

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.export import export_pretrained
from patchgen.runtime.checkpoint.layout import LAYOUTS
from patchgen.runtime.checkpoint.load import LoadReport, load_pretrained
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
