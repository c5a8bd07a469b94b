"""What ranks read from each other's memory: the kernels against torch's own operations, all ranks in one process."""

from __future__ import annotations

import pytest
import torch
from moe_cases import Case, run
from torch import Tensor

from patchgen.kernels.moe import triton_backend as moe_triton
from patchgen.kernels.peers import peer_rows
from patchgen.kernels.peers.published import Published, TokenCounts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNTS, TOP_K, HIDDEN, OWN = (5, 0, 9), 3, 40, 4  # the second rank has no tokens
NUM_EXPERTS = OWN * len(COUNTS)


def publish(*parts: list[Tensor]) -> tuple[Published, list[int]]:
    """Each rank's tensors, one after the other at the same offsets in each rank's bytes."""
    offsets, size = [], 0
    for tensors in parts:
        offsets.append(size)
        size += -(-max(tensor.numel() * tensor.element_size() for tensor in tensors) // 256) * 256
    memory = [torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) for _ in COUNTS]
    published = Published(tuple(memory), torch.tensor([part.data_ptr() for part in memory], device=DEVICE))
    for offset, tensors in zip(offsets, parts, strict=True):
        for rank, tensor in enumerate(tensors):
            published.read(rank, offset, tuple(tensor.shape), tensor.dtype).copy_(tensor)
    return published, offsets


def tokens() -> TokenCounts:
    return TokenCounts(COUNTS, torch.tensor([0, *COUNTS], device=DEVICE).cumsum(0))


def routing(dtype: torch.dtype = torch.int64) -> list[Tensor]:
    """Each rank's experts, some slots left out; the first token of each rank has none."""
    made = [torch.randint(NUM_EXPERTS + 1, (count, TOP_K), dtype=dtype, device=DEVICE) for count in COUNTS]
    for index in made:
        index[:1] = NUM_EXPERTS
    return made


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_routing_of_all_ranks_is_read_as_that_of_one(rank: int, dtype: torch.dtype):
    indices = routing(torch.int32)
    weights = [torch.rand(index.shape, device=DEVICE).to(dtype) for index in indices]
    published, (index_offset, weights_offset) = publish(indices, weights)
    index = torch.full((sum(COUNTS), TOP_K), -7, dtype=torch.int32, device=DEVICE)
    read = torch.empty(index.shape, dtype=dtype, device=DEVICE)
    peer_rows.launch_read_routing(published, tokens(), index, read, index_offset, weights_offset, rank * OWN, OWN)
    whole = torch.cat(indices)
    here = (whole >= rank * OWN) & (whole < (rank + 1) * OWN)
    assert torch.equal(index, torch.where(here, whole - rank * OWN, OWN))
    assert torch.equal(read, torch.cat(weights))


@pytest.mark.parametrize("hidden", [40, 33, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_with_a_slot_here_are_read_and_no_others(hidden: int, dtype: torch.dtype):
    sent = [torch.randn(count, hidden, device=DEVICE).to(dtype) for count in COUNTS]
    published, _ = publish(sent)
    whole = torch.cat(routing(torch.int32))
    index = torch.where(whole < OWN, whole, OWN)
    rows = torch.full((sum(COUNTS), hidden), torch.nan, dtype=dtype, device=DEVICE)
    peer_rows.launch_read_tokens(published, tokens(), index, OWN, rows)
    wanted = (index < OWN).any(dim=1)
    assert wanted.any() and not wanted.all()
    assert torch.equal(rows[wanted], torch.cat(sent)[wanted])
    assert rows[~wanted].isnan().all()


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sums_of_the_ranks_are_added_where_a_token_has_their_experts(rank: int, dtype: torch.dtype):
    """Ranks that own none of a token's experts published anything for it: NaN here."""
    index = routing()[rank]
    first = sum(COUNTS[:rank])
    owner = index // OWN
    sums, expected = [], torch.zeros(COUNTS[rank], HIDDEN, device=DEVICE)
    for source in range(len(COUNTS)):
        asked = (owner == source).any(dim=1)
        whole = torch.full((sum(COUNTS), HIDDEN), torch.nan, dtype=dtype, device=DEVICE)
        values = torch.randn(COUNTS[rank], HIDDEN, device=DEVICE).to(dtype)
        whole[first : first + COUNTS[rank]][asked] = values[asked]
        expected[asked] += values[asked].float()
        sums.append(whole)
    published, _ = publish(sums)
    out = torch.full((COUNTS[rank], HIDDEN), torch.nan, dtype=dtype, device=DEVICE)
    peer_rows.launch_sum_rows(published, tokens(), rank, index, OWN, out)
    if DEVICE == "cuda" or dtype == torch.float32:
        assert torch.equal(out, expected.to(dtype))
    else:  # the interpreter cuts off bits where a GPU rounds
        torch.testing.assert_close(out.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_value_of_a_slot_comes_from_the_rank_of_its_expert(rank: int):
    index, first = routing()[rank], sum(COUNTS[:rank])
    values = [torch.randn(sum(COUNTS), TOP_K, device=DEVICE) for _ in COUNTS]
    published, (_, offset) = publish([torch.zeros(3, device=DEVICE)] * len(COUNTS), values)
    out = torch.full(index.shape, torch.nan, device=DEVICE)
    peer_rows.launch_read_slots(published, tokens(), rank, index, OWN, offset, out)
    expected = torch.zeros(index.shape, device=DEVICE)
    for source, value in enumerate(values):
        mine = index // OWN == source
        expected[mine] = value[first : first + COUNTS[rank]][mine]
    assert torch.equal(out, expected)


def test_a_bound_on_rows_changes_nothing_but_memory(monkeypatch):
    """The experts with room for exactly the slots that are not left out."""
    case = Case("bound", routing="left_out", num_tokens=90, num_experts=3, hidden_size=24, intermediate_size=16)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    tensors = {name: tensor.to(DEVICE) for name, tensor in case.tensors(dtype).items()}
    expected = run(case, tensors, "triton")
    used = int((tensors["top_k_index"] < case.num_experts).sum())
    assert used < tensors["top_k_index"].numel()
    made, make_plan = [], moe_triton.make_plan
    monkeypatch.setattr(moe_triton, "make_plan", lambda *args: made.append(args[2]) or make_plan(*args))
    found = run(case, tensors, "triton", max_rows=used)
    assert made == [used]
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
