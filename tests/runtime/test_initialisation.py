"""A generated class initialises every weight that upstream's does."""

from __future__ import annotations

import pytest
import torch

from patchgen.commands.generation import committed
from patchgen.runtime import registry
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.small_config import small_config


@pytest.fixture
def memory_is_filled():
    """Uninitialised memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", committed())
@pytest.mark.usefixtures("memory_is_filled")
def test_no_weight_keeps_what_was_in_memory(name: str) -> None:
    """A class outside of transformers counts as custom code there, and modules without weights of their own are skipped:
    Qwen3-Omni initialises its experts in such a module."""
    generated = registry.find_model(name)
    model_class = getattr(generated.load(), generated.heads[0])
    model = build_model(model_class, small_config(model_class.config_class).config)
    assert [path for path, weight in model.named_parameters() if not weight.isfinite().all()] == []
