"""What the check at the start of a run refuses on two ranks that share a sequence, and what it lets pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cases_selfcheck as cases
import pytest
import torch


def test_a_sliceable_model_passes(two_ranks):
    assert max(two_ranks.run(cases.a_sliceable_model_passes)) < 1e-5


def test_a_model_that_cannot_run_on_slices_is_refused(two_ranks):
    two_ranks.run(cases.what_slices_would_hide_is_refused)
    two_ranks.run(cases.an_error_of_slices_alone_is_a_refusal)
    two_ranks.run(cases.what_reads_the_mask_or_the_number_of_labels_is_refused)
    two_ranks.run(cases.what_mixes_features_of_images_is_refused, timeout=60)


def test_what_differs_in_gradients_or_in_the_routers_loss_alone_is_refused(two_ranks):
    two_ranks.run(cases.what_several_rows_or_training_with_gradients_show_is_refused)
    two_ranks.run(cases.what_gradients_alone_show_is_refused)
    two_ranks.run(cases.router_logits_that_depend_on_other_tokens_are_refused)
    two_ranks.run(cases.routers_that_take_rows_in_turn_are_refused)
    two_ranks.run(cases.what_a_delta_rule_hands_from_chunk_to_chunk_is_compared)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_run_after_the_check_is_that_without_it(reshard_after_forward, two_ranks):
    two_ranks.run(cases.the_check_leaves_no_trace, reshard_after_forward)


def test_the_checks_leave_shards_without_gradients(two_ranks):
    two_ranks.run(cases.the_check_of_rows_with_images_leaves_no_gradients, timeout=60)
    for has_reset in (True, False):
        two_ranks.run(cases.routers_of_a_model_that_raises_leave_shards, has_reset)


@pytest.mark.gpu
def test_a_run_after_the_check_is_that_without_it_on_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two CUDA devices")
    script = Path(__file__).with_name("selfcheck_on_gpu.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
