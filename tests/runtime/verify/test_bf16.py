"""Casts are invisible in fp32: in bf16 the eager form is upstream's bit for bit, and kernels are about as exact as upstream."""

from __future__ import annotations

import functools

import pytest
import torch
from stand_in import upstream_head, write_stand_in
from torch.nn import functional as F

from patchgen.runtime import registry, seams
from patchgen.runtime.verify.bf16 import (
    EPS,
    LEFT_OUT,
    SameChoices,
    further_than_upstream,
    left_out,
    model_in_bf16,
    rounded,
)
from patchgen.runtime.verify.comparison import Step
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.proof import BF16
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.training_path import prove_training_path
from patchgen.runtime.verify.verify_model import verify_model

ROUTER = ("softmax(router_logits, dtype=torch.float, dim=-1)", "softmax(router_logits, dim=-1)")
EXPERTS = ("self.act_fn(gate) * up", "(self.act_fn(gate.float()) * up).to(up.dtype)")
HEAD = "logits = self.lm_head(hidden_states)\n"
NORM = ("hidden_states = hidden_states.to(torch.float32)\n", "hidden_states = hidden_states\n")


@pytest.mark.parametrize("edit", [ROUTER, EXPERTS, NORM], ids=["router", "experts", "norm"])
def test_a_cast_that_is_lost_or_added_is_seen_in_bf16_alone(tmp_path, edit):
    folder = write_stand_in(tmp_path, "qwen3_moe", edits=(edit,))
    proof = verify_model(folder, variants=("base",), implementations=(), training_path=False)
    assert proof.failures and all(failure.startswith("case bf16") for failure in proof.failures)


def path_with(model: str, seam: str, kernel):
    generated = registry.find_model(model)
    head = generated.heads[0]
    upstream = getattr(generated.upstream(), head)
    config = small_config(upstream.config_class).config
    with seams.registered({seam: kernel}, "planted"):
        return prove_training_path(upstream, getattr(generated.load(), head), config, named_seams={seam: "planted"})


def test_a_loss_that_does_not_compute_in_fp32_is_seen_on_the_path_of_a_run():
    def narrow(head, hidden_states, labels, *, shift_labels=None, num_items_in_batch=None, **_):
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
        total = F.cross_entropy(head(hidden_states).flatten(0, 1), targets.flatten(), reduction="sum")
        return None, total / num_items_in_batch

    path = path_with("llama", "causal_lm_loss", narrow)
    (failure,) = path.failures
    assert failure.startswith("in bf16 loss is ")


def test_experts_that_round_their_tokens_to_fp8_are_seen_on_the_path_of_a_run():
    fused = _fused_moe()

    def coarse(hidden_states, *arguments, **options):
        narrow = hidden_states.to(torch.float8_e4m3fn).to(hidden_states) - hidden_states
        is_bf16 = hidden_states.dtype == torch.bfloat16
        return fused(hidden_states + narrow.detach() * is_bf16, *arguments, **options)

    path = path_with("qwen3_moe", "fused_moe", coarse)
    (failure,) = path.failures
    assert failure.startswith("in bf16 ") and "as far from upstream's in fp32 as upstream's own" in failure


def _fused_moe():
    with seams.using(fused_moe="torch"):
        return seams.implementation("fused_moe")


def test_tensors_that_upstream_keeps_in_fp32_are_kept():
    head = upstream_head("deepseek_v3")
    config = small_config(head.config_class).config
    model = build_model(head, config)
    perturb(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with rounded(model):
        narrow = model_in_bf16(head, config, model.state_dict()).state_dict()
        kept = {name for name, tensor in narrow.items() if tensor.dtype == torch.float32}
        assert kept and all(name.endswith("e_score_correction_bias") for name in kept)
        assert all(torch.equal(tensor.float(), model.state_dict()[name]) for name, tensor in narrow.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_upstream_cannot_compute_in_bf16_is_told(tmp_path, monkeypatch):
    upstream = upstream_head("llama")
    forward = upstream.forward

    @functools.wraps(forward)
    def refusing(self, *arguments, **options):
        if self.lm_head.weight.dtype == torch.bfloat16:
            raise NotImplementedError('"cumulative" not implemented for BFloat16')
        return forward(self, *arguments, **options)

    folder = write_stand_in(tmp_path, "llama")
    monkeypatch.setattr(upstream, "forward", refusing)
    proof = verify_model(folder, variants=("base",), implementations=())
    assert proof.is_proven and BF16 not in {case.name for case in proof.cases}
    assert proof.left_out[BF16].startswith("upstream's own class fails: NotImplementedError")
    assert proof.training.left_out[BF16].startswith("upstream's own class fails: NotImplementedError")


def test_steps_choose_what_the_first_one_chose():
    scores, others = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[5.0, 2.0, 4.0]])
    choices = SameChoices()
    with choices:
        assert scores.topk(2).indices.tolist() == [[2, 1]]
        assert torch.argmax(scores, dim=-1).tolist() == [2]
        assert scores.max(dim=-1).indices.tolist() == [2]
    with choices:
        values, indices = torch.topk(others, 2)
        assert (values.tolist(), indices.tolist()) == ([[4.0, 2.0]], [[2, 1]])
        assert others.argmax(dim=-1).tolist() == [2]
        assert others.sort(dim=-1).indices.tolist() == [[1, 2, 0]], "a choice that the first step did not make"
        assert not choices.differs
        assert others.max(dim=-1).indices.tolist() == [0] and choices.differs, "a maximum is only compared"
    with choices:
        assert not choices.differs
        others.max(dim=-1)
    assert not choices.differs, "with that of the step before"
    assert others.topk(2).indices.tolist() == [[0, 2]]


def test_a_relu_is_open_where_it_was_in_the_first_step():
    choices, signs = SameChoices(), torch.tensor([0.1, -0.1, 2.0])
    with choices:
        assert torch.equal(F.relu(signs), signs.relu())
    near = torch.tensor([-0.01, 0.01, 2.0], requires_grad=True)
    with choices:
        F.relu(near).sum().backward()
    assert near.grad.tolist() == [1.0, 0.0, 1.0]


def test_a_choice_is_the_same_whatever_names_its_arguments_have():
    scores, others = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[5.0, 2.0, -4.0]])
    choices = SameChoices()
    with choices:
        torch.topk(input=scores, k=2)
        F.relu(input=scores)
    with choices:
        assert torch.topk(input=others, k=2).indices.tolist() == [[2, 1]]
        assert F.relu(input=others).tolist() == others.tolist()


def in_bf16(tmp_path, code: str):
    """The training path of a llama that does this to its logits, in bf16 alone, when it is called without labels."""
    plant = f"{HEAD}        if logits.dtype == torch.bfloat16 and labels is None:\n            {code}\n"
    generated = registry.read_model(write_stand_in(tmp_path, "llama", edits=((HEAD, plant),)))
    upstream = upstream_head("llama")
    config = small_config(upstream.config_class).config
    return prove_training_path(upstream, generated.load().LlamaForCausalLM, config)


def test_logits_are_compared_on_the_path_of_a_run_as_the_loss_is(tmp_path):
    (failure,) = in_bf16(tmp_path, "logits = logits * 1.5").failures
    assert failure.startswith("in bf16 logits ")


def test_what_only_ours_cannot_compute_in_bf16_is_a_failure(tmp_path):
    path = in_bf16(tmp_path, "raise NotImplementedError('no form in bf16')")
    assert path.failures == ("bf16: NotImplementedError: no form in bf16.",) and "bf16" not in path.left_out


def test_another_maximum_upstream_excuses_nothing_of_ours(tmp_path, monkeypatch):
    """In bf16 both find another largest element than in fp32, where the two are equal."""
    upstream, largest = upstream_head("llama"), "torch.tensor([[1.0, 1.001]]).to(logits.dtype).max(dim=-1)"
    forward = upstream.forward

    @functools.wraps(forward)
    def with_maximum(self, *arguments, **options):
        torch.tensor([[1.0, 1.001]]).to(self.lm_head.weight.dtype).max(dim=-1)
        return forward(self, *arguments, **options)

    spoiled = (
        f"{HEAD}        {largest}\n        if logits.dtype == torch.bfloat16:\n            logits = logits * 1.5\n"
    )
    generated = registry.read_model(write_stand_in(tmp_path, "llama", edits=((HEAD, spoiled),)))
    monkeypatch.setattr(upstream, "forward", with_maximum)
    config = small_config(upstream.config_class).config
    path = prove_training_path(upstream, generated.load().LlamaForCausalLM, config)
    (failure,) = path.failures
    assert failure.startswith("in bf16 ") and "bf16" not in path.left_out


def test_errors_are_counted_in_upstreams_own_and_noise_is_not_compared():
    def step(weight: list[float], bias: float = 1.0, other: float = 1.01) -> Step:
        gradients = {"weight": torch.tensor(weight), "other": torch.tensor([other]), "bias": torch.tensor([bias])}
        return Step({"loss": torch.tensor(1.0)}, gradients)

    exact, upstream = step([1.0, 1.0], other=1.0), step([1.01, 0.99], bias=1.01)
    assert further_than_upstream(step([1.02, 0.98], bias=1.02), upstream, exact) == {}
    assert set(further_than_upstream(step([1.1, 0.9]), upstream, exact)) == {"gradient of weight"}
    by_chance = step([1.01, 0.99], bias=1.0)
    assert further_than_upstream(step([1.0, 1.0], bias=1.015), by_chance, exact) == {}
    noise = step([1.01, 0.99], bias=3.0)
    assert further_than_upstream(step([1.0, 1.0], bias=-40.0), noise, exact) == {}
    assert set(further_than_upstream(step([1.0, float("nan")]), upstream, exact)) == {"gradient of weight"}


def test_a_loss_that_upstream_rounds_may_be_rounded_to_its_other_neighbour():
    """Between 2 and 4 bf16 has one value every 1/64."""

    def step(loss: float) -> Step:
        return Step({"loss": torch.tensor(loss)}, {})

    exact, above, below = step(3.1707), step(3.171875), step(3.15625)
    assert not further_than_upstream(below, above, exact)
    assert set(further_than_upstream(step(3.171875 - 6 / 64), above, exact)) == {"loss"}
    assert set(further_than_upstream(below, step(3.1719), exact)) == {"loss"}, "which upstream computes in fp32"


def step_of(loss: float, *gradients: float) -> Step:
    return Step({"loss": torch.tensor(loss)}, {f"weight{i}": torch.tensor([g]) for i, g in enumerate(gradients)})


def test_a_loss_may_be_wrong_by_a_few_rounding_errors_however_wrong_gradients_are():
    exact, upstream = step_of(1.0, 1.0, 1.0), step_of(1.0, 1.3, 0.7)
    assert not further_than_upstream(step_of(1.0 + 8 * EPS, 1.3, 0.7), upstream, exact)
    assert set(further_than_upstream(step_of(1.5, 1.3, 0.7), upstream, exact)) == {"loss"}


def test_gradients_that_are_mostly_error_are_told_and_measure_nothing():
    exact, upstream = step_of(1.0, 1.0, 1.0, 1.0), step_of(1.0, 1.01, 1.9, 0.1)
    assert set(further_than_upstream(step_of(1.0, 1.5, -3.0, 5.0), upstream, exact)) == {"gradient of weight0"}
    assert left_out(upstream, exact) == {
        LEFT_OUT: "2 of 3 are mostly rounding error in upstream's own step: weight1, weight2."
    }
    assert left_out(exact, exact) == {}
    not_finite = step_of(1.0, 1.01, float("nan"), 0.1)
    assert set(further_than_upstream(not_finite, upstream, exact)) == {"gradient of weight1"}


def test_a_result_of_another_form_is_infinitely_far():
    exact, upstream = step_of(1.0, 1.0), step_of(1.0, 1.01)
    more = Step({**upstream.outputs, "logits": torch.ones(2)}, upstream.gradients)
    assert further_than_upstream(more, upstream, exact) == {"logits": float("inf")}
    narrow = Step({"loss": upstream.outputs["loss"].to(torch.bfloat16)}, upstream.gradients)
    assert further_than_upstream(narrow, upstream, exact) == {"loss": float("inf")}
