"""One process without Triton, which only the extras `gpu` and `test` install: models run and train on torch alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

WITHOUT_TRITON = """
import sys

sys.modules["triton"] = sys.modules["triton.language"] = None
"""

MODULES = """
import patchgen.runtime.ops
import patchgen.runtime.parallel.media
import patchgen.runtime.parallel.sharding
import patchgen.runtime.parallel.state
import patchgen.runtime.train.trainer
"""

STEP = """
import torch

from patchgen.runtime import registry
from patchgen.runtime.verify.small_config import small_config

torch.manual_seed(0)
config = small_config("{model}").config
model = registry.find_model("{model}").load().{head}(config)
ids = torch.randint(0, config.vocab_size, (2, 8))
model(input_ids=ids, labels=ids).loss.backward()
assert any(parameter.grad is not None for parameter in model.parameters())
"""


@pytest.mark.parametrize(
    "code",
    [
        MODULES,
        STEP.format(model="qwen3_moe", head="Qwen3MoeForCausalLM"),
        STEP.format(model="qwen3_next", head="Qwen3NextForCausalLM"),  # linear attention
    ],
    ids=["modules", "experts", "linear attention"],
)
@pytest.mark.sampled(3)
def test_models_run_without_triton(code: str):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_TRITON + code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
