"""The cost of a step, by hand for three models at their released sizes, and against torch's own FLOP counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from patchgen.runtime import attention, registry
from patchgen.runtime.train import flops


def cost(config) -> flops.ModelCost:
    with torch.device("meta"):
        return flops.model_cost(registry.build_model(config))


def test_qwen3_30b_a3b_by_hand():
    from transformers import Qwen3MoeConfig

    found = cost(
        Qwen3MoeConfig(
            vocab_size=151_936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
            head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        )
    )  # fmt: skip
    projections = 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 32 * 128 * 2048  # q, k and v, o: 18,874,368
    experts = 8 * 3 * 2048 * 768  # gate, up and down of eight: 37,748,736
    router = 2048 * 128
    head = 151_936 * 2048
    assert found.active == 48 * (projections + experts + router) + head == 3_041_656_832
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    assert found.parameters == 48 * (projections + 128 * 3 * 2048 * 768 + router) + 2 * head + norms == 30_532_122_624
    assert found.attention == ((32 * (128 + 128), None),) * 48
    attended = 48 * 3 * 32 * 256 * 4096**2  # 3 N (D_qk + D_v) l^2 per layer
    assert found.flops([4096]) == pytest.approx(6 * 3_041_656_832 * 4096 + attended)
    assert found.flops([2048, 2048]) == pytest.approx(6 * 3_041_656_832 * 4096 + attended / 2)


def test_qwen3_1_7b_by_hand():
    from transformers import Qwen3Config

    found = cost(
        Qwen3Config(
            vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        )
    )  # fmt: skip
    layer = 2 * 2048 * 16 * 128 + 2 * 2048 * 8 * 128 + 3 * 2048 * 6144  # 50,331,648
    assert (
        found.active == 28 * layer + 151_936 * 2048 == 1_720_451_072
    )  # the tied head multiplies, its lookup does not
    assert found.attention == ((16 * 256, None),) * 28


def test_deepseek_v3_by_hand():
    from transformers import DeepseekV3Config

    found = cost(DeepseekV3Config(num_hidden_layers=5, first_k_dense_replace=3))
    q = 7168 * 1536 + 1536 * 128 * (128 + 64)
    kv = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    attention_layer = q + kv + 128 * 128 * 7168
    dense = 3 * 7168 * 18_432
    experts = 8 * 3 * 7168 * 2048 + 3 * 7168 * 2048 + 256 * 7168  # eight routed, one shared, the router
    assert found.active == 5 * attention_layer + 3 * dense + 2 * experts + 129_280 * 7168 == 3_847_684_096
    assert found.attention == ((128 * (192 + 128), None),) * 5


def test_windows_bound_what_a_token_sees():
    both = flops.ModelCost(parameters=0, active=0, attention=((10, None), (10, 4)))
    pairs = 100 / 2 + (4 * 10 - 16 / 2)
    assert both.flops([10]) == 6 * 10 * pairs
    assert both.flops([3, 3]) == 6 * 10 * 2 * 2 * 9 / 2  # within the window: as without one


def test_torchs_counter_agrees_on_a_small_model():
    """torch counts every product it runs, attention without the causal mask: twice our count of it."""
    from transformers import Qwen3Config

    attention.register()
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_cache=False,
    )  # fmt: skip
    model = registry.build_model(config, attn_implementation="patchgen_eager")
    found = flops.model_cost(model)
    ids = torch.randint(0, 64, (1, 24))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    ours = 6 * found.active * 24 + 2 * sum(6 * width * 24**2 / 2 for width, _ in found.attention)
    # The rotary frequencies are a product, too, and the first layer's input needs no gradient of its own.
    assert counter.get_total_flops() == pytest.approx(ours, rel=0.01)


def test_the_number_of_experts_is_found_by_meaning():
    from transformers import MixtralConfig, Qwen3Config

    assert flops.experts_per_token(MixtralConfig(num_experts_per_tok=3)) == 3
    with pytest.raises(ValueError, match="how many experts"):
        flops.experts_per_token(Qwen3Config())


def test_devices_by_name(monkeypatch):
    peaks = {"NVIDIA H200": 989.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA H20": 148.0, "RTX 9": None}
    # The same dies have a higher limit of power beside Grace.
    peaks |= {"NVIDIA B200": 2250.0, "NVIDIA GB200": 2500.0, "NVIDIA B300": 2250.0, "NVIDIA GB300": 2500.0}
    for name, peak in peaks.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        assert flops.peak_tflops(torch.device("cuda", 0)) == peak
    assert flops.peak_tflops(torch.device("cpu")) is None
