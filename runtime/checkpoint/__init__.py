"""Checkpoints: weights in, training state in and out, weights out.

    load.py                 weights from any Hugging Face layout into a sharded model
    train_state.py          save and resume a run: whole or not at all, on any layout
    export.py               weights out, in the layout of the original
    convert.py              from one layout to another, without a model in memory
    fingerprint.py          a hash per tensor, equal in every layout

    moves.py                how tensors are made of other tensors, without having them
    layout.py               transformers' own conversions on such tensors
    safetensor_files.py     bytes of safetensors files
    placement.py            which rank holds which part
"""

from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.layout import LAYOUTS
from patchgen.runtime.checkpoint.load import LoadReport, load_pretrained
from patchgen.runtime.checkpoint.train_state import Checkpointer

__all__ = ["LAYOUTS", "CheckpointError", "Checkpointer", "LoadReport", "load_pretrained"]
