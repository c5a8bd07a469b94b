"""Run by test_peer_shards.py under torchrun, a process for each GPU: what it claims on gloo ranks, by NCCL and symmetric memory."""

from __future__ import annotations

import os

import cases_peer_shards as cases
import torch
import torch.distributed as dist


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    cases.DEVICE = "cuda"
    for small in (0, 300, 2**20):
        for accumulate_unsharded in (False, True):
            cases.equals_fsdp(accumulate_unsharded, writes=True, freeze=None, small=small)
    cases.equals_fsdp(False, writes=True, freeze=None, small=150, tied=False)
    cases.equals_fsdp(False, writes=True, freeze=None, small=40, piece=22)
    cases.equals_fsdp(False, writes=False, freeze="layers.0.up.weight", small=300, reshard_after_forward=False)
    assert all(cases.ranks_that_sum_different_gradients_get_nan())
    cases.a_change_is_seen_by_all()
    assert all(cases.a_model_is_freed())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
