"""What each rank does in the tests of norms, losses, reports and stalls; see test_training.py."""

from __future__ import annotations

import functools
import time

import cases_models
import cases_sequence
import pytest
import torch
import torch.distributed as dist
from rounding import require_equal_up_to_rounding
from transformers.loss.loss_utils import ForCausalLMLoss, ForTokenClassification

from patchgen.runtime import attention, ops, parallel, seams
from patchgen.runtime.parallel import checkpointing, gradients, loss, report, sharding, watch
from patchgen.runtime.parallel.expert_load import ExpertLoad
from patchgen.runtime.parallel.selfcheck import require_sliceable


def sharded_model(name: str = "qwen3_moe", **layout):
    attention.register()
    state = cases_sequence.state_of(**layout)
    model = cases_models.build(name, generated=True, attention_name="patchgen_eager")
    return sharding.shard_model(model, state), state


def norm_is_one_number(**layout) -> None:
    """Of gradients that are known: parameter i has gradient i + 1 in every element, experts scaled by their number."""
    model, _ = sharded_model(**layout)
    square = 0.0
    for place, (_, parameter) in enumerate(model.named_parameters()):
        parameter.grad = torch.full_like(parameter, float(place + 1))
        square += (place + 1) ** 2 * parameter.numel()  # a DTensor's numel is the whole tensor's
    expected = square**0.5
    total = gradients.norm(model.parameters())
    assert abs(float(total) - expected) < 1e-5 * expected, (float(total), expected)
    before = gradients.clip(model, max_norm=expected / 2)
    assert abs(float(before) - expected) < 1e-5 * expected
    assert abs(float(gradients.norm(model.parameters())) - expected / 2) < 1e-4 * expected


def nonfinite_gradient_is_named(rank_with_nan: int, policy: str) -> None:
    """One rank's shard of one parameter is not a number: all ranks name it and decide alike."""
    model, _ = sharded_model(ep=2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    name = "model.layers.1.mlp.experts.down_proj"
    if dist.get_rank() == rank_with_nan:
        dict(model.named_parameters())[name].grad.to_local().view(-1)[0] = float("nan")
    total = gradients.clip(model, max_norm=1.0)
    if policy == "skip":
        assert not gradients.accept(model, total, on_nonfinite="skip")
        assert gradients.first_nonfinite(model) == name
        return
    try:
        gradients.accept(model, total, on_nonfinite="stop")
    except gradients.NonFiniteGradient as error:
        assert name in str(error), error
    else:
        raise AssertionError("a NaN was accepted")


def labels_without_shift_are_shifted_over_ranks() -> None:
    """A model that gets a slice of unshifted labels computes the loss of the whole sequence."""
    size = dist.get_world_size()
    state = cases_sequence.state_of(sp=size)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 8 * size, 4, generator=generator)
    labels = torch.randint(0, 4, (2, 8 * size), generator=generator)
    from transformers.loss.loss_utils import ForCausalLMLoss

    expected = ForCausalLMLoss(hidden, labels, vocab_size=4)
    mine = hidden.chunk(size, dim=1)[state.sp_rank].contiguous()
    for own_labels in (labels.chunk(size, dim=1)[state.sp_rank], labels):
        with parallel.using(state):
            _, share = ops.causal_lm_loss(lambda x: x, mine, own_labels, loss_function=ForCausalLMLoss, vocab_size=4)
        dist.all_reduce(share)
        require_equal_up_to_rounding(share, expected)


def report_reads_live_modules() -> str:
    model, state = sharded_model(sp=2, ep=2)
    with seams.using(fused_moe="torch"):
        text = report.describe(model, state, {"fused_moe": "torch"})
        try:
            report.describe(model, state, {"causal_lm_loss": "chunked"})
        except ValueError as error:
            assert "'eager' is selected" in str(error), error
        else:
            raise AssertionError("an implementation that does not serve was accepted")
    return text


def report_refuses_a_seam_that_nothing_uses() -> None:
    model, state = sharded_model("qwen3")
    with seams.using(fused_moe="torch"):
        try:
            report.describe(model, state, {"fused_moe": "torch"})
        except ValueError as error:
            assert "no module of this model calls that seam" in str(error), error
        else:
            raise AssertionError("an inactive seam was accepted")


def load_is_counted_over_ranks(checkpoint: str | bool) -> None:
    """Each slot once, in layers that run again in the backward as well, which here runs outside `using`.

    Args:
        checkpoint: a mode of ours; or transformers' own, whether it is reentrant, whose backward runs inside.
    """
    attention.register()
    state = cases_sequence.state_of(sp=2, ep=2)
    model = cases_models.build("qwen3_moe", generated=True, attention_name="patchgen_eager")
    own = isinstance(checkpoint, str)
    if own:
        checkpointing.apply(model, checkpoint)
    else:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": checkpoint})
        model.enable_input_require_grads()
    sharding.shard_model(model, state)
    load = ExpertLoad(model)
    micro = [cases_models.slice_of_step(0, False, state, 0, 1)]
    with parallel.using(state), loss.step(loss.count_items(micro, "cpu")):
        value = model(**micro[0]).loss
        if not own:
            value.backward()
    if own:
        value.backward()
    counts = load.read()
    assert sorted(counts) == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    slots = cases_models.ROWS * cases_models.LENGTH * 2
    assert all(int(count.sum()) == slots for count in counts.values()), counts
    assert load.read() == {}
    load.close()


def load_of_experts_that_some_ranks_run() -> dict[str, list[int]]:
    """Two experts in another order on each rank, one of them on rank 0 only, behind forwards that name no argument."""

    class Experts(torch.nn.Module):
        num_experts = 4

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x, *args, **kwargs):
            return x * self.weight

    model = torch.nn.ModuleDict({name: Experts() for name in ("first", "second", "unrouted")})
    load = ExpertLoad(model, list(model))
    x, weights = torch.ones(3, 2), torch.ones(3, 1)
    index = torch.tensor([[0], [3], [3]], dtype=torch.int32)
    model["unrouted"](x)
    if dist.get_rank() == 0:
        model["second"](x, weights=weights, indices=index)
    model["first"](x, index, weights)
    return {path: counts.tolist() for path, counts in load.read().items()}


def stalled_exchange_is_reported() -> str:
    """Rank 1 comes late to a collective; rank 0 says where it waits."""
    messages: list[str] = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with watch.Watch(model, timeout=1.0, on_stall=messages.append):
        if dist.get_rank() == 0:
            model(torch.zeros(1, 2))
            with watch.operation("exchange q, k and v of TestAttention"):
                dist.barrier()
        else:
            for _ in range(10):  # progress, so that only rank 0 stalls
                model(torch.zeros(1, 2))
                time.sleep(0.3)
            dist.barrier()
    return messages[0] if messages else ""


def a_parameter_without_a_dimension_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    model.scale = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"cannot be sharded: scale\. To fix"):
        sharding.shard_model(model, cases_sequence.state_of())


def what_upstream_keeps_in_fp32_is_computed_in_fp32() -> None:
    """Routers that upstream keeps in fp32 are gathered in fp32, attention beside them in bf16; gradients arrive."""
    from transformers import Ernie4_5_MoeConfig
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeForCausalLM

    config = Ernie4_5_MoeConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, moe_num_experts=4, moe_k=2, moe_layer_start_index=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Ernie4_5_MoeForCausalLM(config)
    state = cases_sequence.state_of()
    sharding.shard_model(model, state, options=sharding.ShardingOptions(param_dtype=torch.bfloat16))
    seen = {}

    def note(path):
        return lambda module, *_: seen.update({path: module.weight.dtype})

    routers = [path for path, _ in model.named_modules() if path.endswith("mlp.gate")]
    assert len(routers) == 2
    for path in [*routers, "model.layers.0.self_attn.q_proj"]:
        model.get_submodule(path).register_forward_hook(note(path))
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    assert seen == dict.fromkeys(routers, torch.float32) | {"model.layers.0.self_attn.q_proj": torch.bfloat16}
    missing = [name for name, p in model.named_parameters() if p.grad is None and p.requires_grad]
    assert not missing, missing


def a_model_that_drops_the_lengths_of_documents_keeps_them_apart() -> None:
    """Nemotron's layers hand no further arguments to their attention: its mask knows the documents of the model's call."""
    from transformers import NemotronConfig, NemotronForCausalLM

    attention.register()
    config = NemotronConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False, attn_implementation="patchgen_eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = NemotronForCausalLM(config)
    state = cases_sequence.state_of(sp=2)
    sharding.shard_model(model, state)
    assert require_sliceable(model, state, vocab_size=61, packed=False) < 1e-5
    assert require_sliceable(model, state, vocab_size=61) < 1e-5


def a_loss_of_another_kind_is_no_share() -> None:
    """A head with a loss of its own is not divided over ranks, and the seam refuses a loss of other labels."""
    attention.register()
    state = cases_sequence.state_of()
    model = cases_models.build("llama", generated=True, attention_name="patchgen_eager")
    model.own_loss = ("smoothed(logits, labels)",)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM computes a loss of its own, smoothed\(logits, labels\)"):
        sharding.shard_model(model, state)
    hidden, labels = torch.randn(1, 4, 8), torch.ones(1, 4, dtype=torch.long)
    seam = functools.partial(ops.causal_lm_loss, torch.nn.Linear(8, 5), hidden, labels, vocab_size=5)
    with parallel.using(state):
        with pytest.raises(ValueError, match="ForTokenClassification"):
            seam(loss_function=ForTokenClassification)
        assert seam(loss_function=ForCausalLMLoss)[1].isfinite()
