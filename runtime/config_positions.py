"""The number of positions that a config says its language model has: reading beyond a table of them cannot be caught on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FIELDS = (
    "max_position_embeddings",
    "max_target_positions",
    "max_decoder_position_embeddings",
    "n_positions",
    "max_seq_len",
)
"""Of transformers' configs."""


def num_positions(config: PreTrainedConfig) -> int | None:
    """The smallest number of positions in a config's fields; None if it has none."""
    text = config.get_text_config(decoder=True)
    found = [value for name in FIELDS if isinstance(value := getattr(text, name, None), int)]
    return min((value for value in found if value > 0), default=None)  # -1: without a bound
