"""The random number generators of a process."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def capture() -> dict:
    """The states of Python's, NumPy's and torch's generators, as plain values and tensors."""
    numpy_state = np.random.get_state()
    assert isinstance(numpy_state, tuple), "only `legacy=False` returns a dict"
    kind, keys, *numbers = numpy_state
    numpy = (kind, torch.from_numpy(keys.astype("int64")), *map(float, numbers))
    state = {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": numpy}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict) -> None:
    """Sets the generators to a state from `capture`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype("uint32"), int(position), int(has_gauss), cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed(number: int) -> None:
    """Seeds the three generators; NumPy's takes 32 bits."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def derive(state: dict, rank: int) -> None:
    """Seeds the generators of a rank that the saved run did not have, from the state of one of its ranks."""
    digest = hashlib.sha256(bytes(state["torch"].tolist()) + rank.to_bytes(4, "little")).digest()
    seed(int.from_bytes(digest[:4], "little"))
