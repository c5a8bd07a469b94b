"""One backward of a model on several ranks against upstream's class or another way to sum; see test_models.py."""

from __future__ import annotations

import cases_models
import cases_sequence
import torch
import torch.distributed as dist

from patchgen.runtime import attention, parallel
from patchgen.runtime.parallel import batch, checkpointing, gradients, loss, sharding


def half_precision_is_near(name: str, **options) -> tuple[float, float]:
    """Loss and norm in bf16 with fp32 parameters and reduction, relative to fp32 in one process."""
    attention.register()
    state = cases_sequence.state_of(sp=2, ep=2)
    model = cases_models.build(name, generated=True, attention_name="patchgen_eager")
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    sharding.shard_model(model, state, options=sharding.ShardingOptions(**dtypes, **options))
    total = cases_models.one_backward(model, state)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    norm = float(gradients.norm(model.parameters()))
    if dist.get_rank() != 0:
        return 0.0, 0.0
    losses, norms, *_ = cases_models.reference(name, False, 1)
    return abs(total - losses[0]) / losses[0], abs(norm - norms[0]) / norms[0]


def an_exchange_sums_what_a_reduce_scatter_sums(accumulate_unsharded: bool, **layout) -> float:
    """Gradients of two micro-batches in bf16, summed in fp32, both ways; the worst difference relative to the largest."""
    attention.register()
    state = cases_sequence.state_of(**layout)
    found = []
    for exchange in (False, True):
        model = cases_models.build("qwen3_moe", generated=True, attention_name="patchgen_eager")
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        options = sharding.ShardingOptions(**dtypes, exchange_gradients=exchange)
        sharding.shard_model(model, state, options=options)
        for last in (False, True):
            sharding.reduce_gradients(model, is_last=last, accumulate_unsharded=accumulate_unsharded)
            cases_models.one_backward(model, state)
        own = {key: parameter.grad for key, parameter in model.named_parameters()}
        assert {gradient.dtype for gradient in own.values()} == {torch.float32}
        widened = [key for key, value in own.items() if not torch.equal(value.to_local(), value.to_local().bfloat16())]
        assert len(widened) > len(own) // 2, "the sums are no more precise than bf16"
        found.append({key: cases_models.full_tensor(gradient) for key, gradient in own.items()})
    by_reduce_scatter, by_exchange = found
    return max(cases_models.difference(by_exchange[key], by_reduce_scatter[key]) for key in by_exchange)


def every_token_goes_to_the_same_experts(name: str, checkpoint: str = "none") -> None:
    """A router of zeros: the first experts get all tokens, the last rank's experts none, in model and reference."""
    attention.register()
    state = cases_sequence.state_of(ep=dist.get_world_size())

    def even(model):
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith("mlp.gate.weight"):
                    parameter.zero_()
        return model

    model = even(cases_models.build(name, generated=True, attention_name="patchgen_eager"))
    checkpointing.apply(model, checkpoint)
    sharding.shard_model(model, state)
    total = cases_models.one_backward(model, state)
    own = {key: cases_models.full_tensor(parameter.grad) for key, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        alone = even(cases_models.build(name, generated=False, attention_name="eager"))
        whole = cases_models.global_batch(0, False)
        items = (whole["labels"][:, 1:] != batch.IGNORED).sum()
        value = alone(**whole, num_items_in_batch=items, use_cache=False).loss
        value.backward()
        assert abs(total - float(value.detach())) < 1e-5 * float(value.detach())
        expected = {key: parameter.grad for key, parameter in alone.named_parameters()}
        unused = [key for key in expected if "experts" in key and float(expected[key][-1].abs().max()) == 0]
        assert unused, "every expert got tokens: the case does not test what it says"
        worst = max(cases_models.difference(own[key], expected[key]) for key in own)
        assert worst < 1e-5, worst


def padded_rows_agree(name: str, sp: int) -> None:
    """Rows padded left and right, over slices, against upstream's eager attention on the same mask."""
    attention.register()
    state = cases_sequence.state_of(sp=sp)
    whole = cases_models.global_batch(0, False)
    mask = torch.ones(cases_models.ROWS, cases_models.LENGTH, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, -9:] = 0
    mask[2, :1] = 0
    # What stands before the first token of a row is padding: it sees nothing, so nobody may ask it for that token.
    counts = mask.bool() & torch.cat([torch.zeros(cases_models.ROWS, 1, dtype=torch.bool), mask[:, :-1].bool()], dim=1)
    whole["labels"] = whole["labels"].masked_fill(~counts, batch.IGNORED)
    whole |= {"attention_mask": mask, "position_ids": torch.arange(cases_models.LENGTH).expand(cases_models.ROWS, -1)}
    model = sharding.shard_model(cases_models.build(name, generated=True, attention_name="patchgen_sdpa"), state)
    rows = torch.arange(cases_models.ROWS).chunk(state.config.num_batches)[state.batch_index]
    inputs = batch.slice_batch({k: v[rows] for k, v in whole.items()}, sp=state.sp, sp_rank=state.sp_rank)
    items = loss.count_items([inputs], "cpu")
    with parallel.using(state), loss.step(items):
        share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
        share.backward()
    total = share.detach().clone()
    dist.all_reduce(total)
    own = {key: cases_models.full_tensor(parameter.grad) for key, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        alone = cases_models.build(name, generated=False, attention_name="eager")
        value = alone(**whole, num_items_in_batch=items, use_cache=False).loss
        value.backward()
        assert abs(float(total) - float(value.detach())) < 1e-5 * float(value.detach()), (total, value)
        found = {key: cases_models.difference(own[key], parameter.grad) for key, parameter in alone.named_parameters()}
        assert max(found.values()) < 1e-5, {key: error for key, error in found.items() if error > 1e-5}
