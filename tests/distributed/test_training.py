"""Norms, clipping, losses, non-finite gradients, reports and stalls on real ranks."""

from __future__ import annotations

import subprocess
import sys

import cases_training as cases
import pytest
import torch

from patchgen.runtime.parallel import watch


@pytest.mark.parametrize(
    "layout",
    [{}, {"ep": 2}, {"ep": 4}, {"dp_replicate": 2}, {"dp_replicate": 2, "ep": 2}, {"sp": 2, "ep": 4}],
    ids=str,
)
def test_the_norm_is_one_number_over_all_meshes(layout, four_ranks):
    four_ranks.run(cases.norm_is_one_number, **layout)


@pytest.mark.parametrize("policy", ["skip", "stop"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(rank, policy, four_ranks):
    four_ranks.run(cases.nonfinite_gradient_is_named, rank, policy)


def test_unshifted_labels_of_a_slice(two_ranks, four_ranks):
    two_ranks.run(cases.labels_without_shift_are_shifted_over_ranks)
    four_ranks.run(cases.labels_without_shift_are_shifted_over_ranks)


def test_a_loss_that_is_no_sum_of_shares_is_refused(two_ranks):
    two_ranks.run(cases.a_loss_of_another_kind_is_no_share)


def test_the_report_reads_live_modules(two_ranks):
    text = two_ranks.run(cases.report_reads_live_modules)[0]
    assert "Qwen3MoeForCausalLM on 2 ranks: dp_replicate 1 x dp_shard 1 x sp 2, ep 2" in text
    assert "patchgen_eager around an exchange of heads over sp 2" in text
    assert "2 Qwen3MoeAttention" in text
    assert "torch, tokens exchanged over ep 2" in text
    assert "2 Qwen3MoeExperts" in text
    assert "divided over fsdp 2" in text


def test_the_report_refuses_a_seam_that_nothing_uses(two_ranks):
    two_ranks.run(cases.report_refuses_a_seam_that_nothing_uses)


def test_a_parameter_that_cannot_be_sharded_is_named(one_rank):
    one_rank.run(cases.a_parameter_without_a_dimension_is_named)


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective", False, True])
def test_expert_load_counts_every_slot(checkpoint, two_ranks):
    two_ranks.run(cases.load_is_counted_over_ranks, checkpoint)


def test_expert_load_of_modules_that_some_ranks_run(two_ranks):
    expected = {"first": [2, 0, 0, 4], "second": [1, 0, 0, 2]}
    assert two_ranks.run(cases.load_of_experts_that_some_ranks_run) == [expected, expected]


def test_a_stall_names_rank_module_and_operation(two_ranks):
    message, other = two_ranks.run(cases.stalled_exchange_is_reported)
    assert "rank 0: module 0, operation exchange q, k and v of TestAttention" in message
    assert other == ""


def test_the_watch_knows_the_module_of_the_backward():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    seen = []
    with watch.Watch(model, timeout=60.0):
        out = model(torch.ones(1, 2))
        model[0].weight.register_hook(lambda _: seen.append(watch.describe()))
        out.sum().backward()
    assert len(seen) == 1
    assert seen[0].startswith(
        "rank 0: module 0 (backward), operation its forward or backward (last exchange started: "
    )


def test_a_stall_ends_the_process():
    code = (
        "import time, torch; from patchgen.runtime.parallel import watch\n"
        "with watch.Watch(torch.nn.Linear(1, 1), timeout=0.5), watch.operation('wait for nobody'): time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == watch.EXIT_STATUS
    assert "operation wait for nobody" in done.stderr
    assert "Thread" in done.stderr


def test_what_upstream_keeps_in_fp32_is_computed_in_fp32(two_ranks):
    two_ranks.run(cases.what_upstream_keeps_in_fp32_is_computed_in_fp32)


def test_a_model_that_drops_the_lengths_of_documents_keeps_them_apart(two_ranks):
    two_ranks.run(cases.a_model_that_drops_the_lengths_of_documents_keeps_them_apart)
