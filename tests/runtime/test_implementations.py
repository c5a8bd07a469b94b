"""The implementations that ship with the seams: found by name, loaded when called, equal to their eager twins."""

from __future__ import annotations

import inspect
import subprocess
import sys

import chosen_models
import pytest
import torch
from rounding import require_equal_up_to_rounding
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from patchgen.commands.generation import committed
from patchgen.runtime import ops, registry, seams
from patchgen.runtime.verify.model_pair import build_pair
from patchgen.runtime.verify.small_config import small_config

SHIPPED = {
    "fused_moe": "torch",
    "causal_lm_loss": "chunked",
    "rms_norm": "compiled",
    "rotary": "compiled",
    "swiglu": "compiled",
}


def test_every_seam_has_its_implementation():
    assert {"auto", "torch", "triton", "fp8", "fp8_wide_gradients", "sonic"} <= set(seams.implementations("fused_moe"))
    assert {"auto", "linear", "chunked"} <= set(seams.implementations("causal_lm_loss"))
    for seam, name in SHIPPED.items():
        assert name in seams.implementations(seam)
        with seams.using(**{seam: name}):
            assert ops.serves(seam)
        assert not ops.serves(seam)


def test_an_unknown_implementation_is_refused_with_the_list():
    with pytest.raises(ValueError, match="Available: eager, auto, torch"):
        seams.configure(fused_moe="tensorflow")


def test_importing_ops_loads_neither_triton_nor_a_kernel():
    code = (
        "import sys; from patchgen.runtime import ops, seams; seams.configure(fused_moe='torch');"
        "bad = [m for m in sys.modules if m == 'triton' or m.startswith('patchgen.kernels')];"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_experts_seam_equals_the_upstream_loop():
    torch.manual_seed(0)
    x, index = torch.randn(9, 16), torch.randint(0, 4, (9, 2))
    weights, gate_up, down = torch.rand(9, 2), torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    expected = torch.zeros(9, 16)
    for token in range(9):
        for slot in range(2):
            expert = index[token, slot]
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weights[token, slot] * (down[expert] @ (nn.functional.silu(gate) * up))
    with seams.using(fused_moe="torch"):
        found = ops.fused_moe(x, index, weights, gate_up, down, num_experts=4, activation=nn.SiLU())
    require_equal_up_to_rounding(found, expected)


@pytest.mark.parametrize("name", ["auto", "linear", "chunked"])
def test_the_loss_seam_equals_its_eager_twin(name: str):
    torch.manual_seed(0)
    head, hidden, labels = nn.Linear(8, 11), torch.randn(2, 5, 8), torch.randint(0, 11, (2, 5))
    logits, expected = ops.causal_lm_loss(head, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=11)
    assert logits.shape == (2, 5, 11)
    with seams.using(causal_lm_loss=name):
        logits, loss = ops.causal_lm_loss(head, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=11)
        assert ops.causal_lm_loss(head, hidden, None, loss_function=ForCausalLMLoss, vocab_size=11)[1] is None
    assert logits is None
    require_equal_up_to_rounding(loss, expected)


@pytest.mark.parametrize("name, head", chosen_models.heads(committed()))
def test_logits_come_back_in_evaluation_and_not_in_training(name: str, head: str):
    """Metrics read them; whoever trains reads the loss."""
    generated = registry.find_model(name)
    ours, theirs = getattr(generated.load(), head), getattr(generated.upstream(), head)
    pair = build_pair(theirs, ours, small_config(ours.config_class).config)
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    if "token_type_ids" in inspect.signature(theirs.forward).parameters:
        batch["token_type_ids"] = torch.zeros_like(ids)  # gemma3 asks for it in training
    with seams.using(causal_lm_loss="auto"), torch.no_grad():
        expected, got = pair.upstream.eval()(**batch), pair.generated.eval()(**batch)
        assert torch.equal(got.logits, expected.logits)
        assert torch.equal(got.loss, expected.loss)
        trained = pair.generated.train()(**batch)
    assert trained.logits is None
    assert torch.isfinite(trained.loss)


def test_a_proof_in_fp32_compares_the_experts_that_do_not_round_to_fp8():
    """Their difference from upstream is of the size of FP8's rounding, whatever the model."""
    assert {seams.without_rounding("fused_moe", name) for name in ("fp8", "fp8_wide_gradients")} == {"triton"}
    assert {seams.without_rounding("fused_moe", name) for name in ("auto", "torch", None)} == {"auto", "torch", None}
