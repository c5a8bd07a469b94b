"""What generated code calls, in one process: identities, and upstream's own formulas while a seam is eager."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.loss.loss_utils import ForMaskedLMLoss

from patchgen.runtime import ops, parallel, seams


def cross_entropy(logits, labels, vocab_size, scale=1.0):
    return scale * nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return torch.randn(2, 3, 8), torch.randint(0, 5, (2, 3))


def test_causal_lm_loss_is_head_then_loss(batch):
    hidden_BSH, labels_BS = batch
    head = nn.Linear(8, 5)
    logits, loss = ops.causal_lm_loss(
        head, hidden_BSH, labels_BS, loss_function=cross_entropy, vocab_size=5, scale=2.0
    )
    assert torch.equal(logits, head(hidden_BSH))
    assert torch.equal(loss, cross_entropy(head(hidden_BSH), labels_BS, 5, 2.0))


def test_a_loss_of_transformers_whose_labels_are_not_shifted_is_known_in_chunks():
    """Against transformers' own function: bit for bit eager, and within rounding where no logits are made."""
    torch.manual_seed(0)
    head, hidden, labels = nn.Linear(8, 11, bias=False), torch.randn(2, 9, 8), torch.randint(11, (2, 9))
    labels[:, 4] = -100
    expected = ForMaskedLMLoss(head(hidden), labels, 11)
    found = {}
    for implementation in ("eager", "chunked"):
        with seams.using(causal_lm_loss=implementation):
            options = {"loss_function": ForMaskedLMLoss, "vocab_size": 11}
            found[implementation] = ops.causal_lm_loss(head, hidden, labels, **options)[1]
    assert torch.equal(found["eager"], expected)
    torch.testing.assert_close(found["chunked"], expected, rtol=1e-6, atol=0)


def test_logits_keep_their_dtype_where_the_loss_function_casts_its_own_copy():
    torch.manual_seed(0)
    head, hidden = nn.Linear(8, 11, dtype=torch.bfloat16), torch.randn(2, 9, 8, dtype=torch.bfloat16)
    labels = torch.randint(11, (2, 9))
    logits, loss = ops.causal_lm_loss(head, hidden, labels, loss_function=ForMaskedLMLoss, vocab_size=11)
    assert logits.dtype == torch.bfloat16 and torch.equal(logits, head(hidden))
    assert torch.equal(loss, ForMaskedLMLoss(head(hidden), labels, 11))


def test_without_labels_there_are_logits_and_no_loss(batch):
    hidden_BSH, _ = batch
    head = nn.Linear(8, 5)
    logits, loss = ops.causal_lm_loss(head, hidden_BSH, None, loss_function=cross_entropy, vocab_size=5)
    assert torch.equal(logits, head(hidden_BSH))
    assert loss is None


def test_a_vocabulary_that_only_the_logits_know_is_read_from_them(batch):
    hidden_BSH, labels_BS = batch
    head = nn.Linear(8, 7)
    _, loss = ops.causal_lm_loss(head, hidden_BSH, labels_BS, loss_function=cross_entropy, vocab_size=None)
    assert torch.equal(loss, cross_entropy(head(hidden_BSH), labels_BS, 7))


def test_swiglu_is_the_product_while_eager():
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    assert not ops.serves("swiglu")
    assert torch.equal(ops.swiglu(gate, up, nn.functional.silu), nn.functional.silu(gate) * up)


@pytest.mark.parametrize("positions", [None, torch.arange(5)[None], torch.arange(15).view(3, 1, 5)])
def test_positions_are_untouched_in_one_process(positions):
    assert ops.sequence_position_ids(positions, torch.zeros(1, 5, 8)) is positions


@pytest.mark.parametrize("live", [False, True], ids=["one process", "ranks"])
@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5])
def test_the_layout_of_multimodal_positions_is_what_their_name_says(batch_size, rows, live, monkeypatch):
    """Three samples of three rows have one shape in both layouts."""
    if live:
        monkeypatch.setattr(parallel, "current", object)
    upstream = torch.arange(rows * batch_size * 7).view(rows, batch_size, 7)
    tokens, stacked = torch.zeros(batch_size, 7), upstream.transpose(0, 1)
    assert ops.mrope_position_ids(upstream, tokens) is upstream
    assert torch.equal(ops.mrope_position_ids(None, tokens, stacked), upstream)
    with pytest.raises(ValueError, match="both position_ids and stacked_position_ids"):
        ops.mrope_position_ids(upstream, tokens, stacked)
    if batch_size != rows:
        with pytest.raises(ValueError, match="as stacked_position_ids"):
            ops.mrope_position_ids(stacked, tokens)
        with pytest.raises(ValueError, match=f"expected \\({batch_size}, 3 or 4, length"):
            ops.mrope_position_ids(None, tokens, upstream)


@pytest.mark.parametrize("shape", [(1, 2, 7), (3, 1, 7), (4, 1, 7), (1, 1, 7)])
def test_positions_that_upstream_broadcasts_stay(shape):
    positions = torch.zeros(shape)
    assert ops.mrope_position_ids(positions, torch.zeros(2, 7)) is positions


def test_positions_of_text_stay():
    positions = torch.arange(6).view(2, 3)
    assert ops.mrope_position_ids(positions, torch.zeros(2, 3)) is positions
    assert ops.mrope_position_ids(None, torch.zeros(2, 3)) is None


def test_positions_of_another_batch_are_refused():
    with pytest.raises(ValueError, match=r"\(3, 5, 7\) do not belong to a batch of 2"):
        ops.mrope_position_ids(torch.zeros(3, 5, 7), torch.zeros(2, 7))


def test_an_eager_seam_has_no_kernel_to_call():
    with seams.using(rms_norm=seams.EAGER), pytest.raises(RuntimeError, match="rms_norm"):
        ops.rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6)


@pytest.mark.parametrize(("at_once", "order"), [(False, ["routed", "shared"]), (True, ["shared", "routed"])])
def test_shared_experts_run_where_upstream_runs_them_without_expert_parallelism(at_once, order):
    events = []

    def shared(x):
        events.append("shared")
        return x + 1

    take = ops.beside_experts(shared, torch.ones(2), at_once=at_once)
    events.append("routed")
    assert torch.equal(take(), torch.full((2,), 2.0))
    assert events == order


@pytest.mark.parametrize(("act", "computed"), [(nn.SiLU(), 6), (nn.Sigmoid(), 12)])
def test_equal_parts_of_experts_compute_what_bmm_does_and_no_row_of_zeros(act, computed, monkeypatch):
    torch.manual_seed(0)
    E, R, H, INNER = 3, 4, 8, 5
    rows, up, down = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True)
        for s in ((E * R, H), (E, H, 2 * INNER), (E, INNER, H))
    )
    scaled = rows * torch.tensor([1.0, 0.0]).repeat(E * R // 2)[:, None]
    gate, other = torch.bmm(scaled.view(E, R, H), up).chunk(2, dim=-1)
    expected = torch.bmm(other * act(gate), down).view(-1, H)
    seen = []

    def counting(hidden_states, top_k_index, *args, **options):
        seen.append(int((top_k_index < E).sum()))
        return experts(hidden_states, top_k_index, *args, **options)

    with seams.using(fused_moe="torch"):
        experts = seams.implementation("fused_moe")
        monkeypatch.setattr(ops, "experts_kernel", lambda: counting)
        found = ops.fused_moe(scaled, None, None, up, down, num_experts=E, activation=act, is_transposed=True)
    torch.testing.assert_close(found, expected)
    assert seen == [computed]
    wanted = torch.autograd.grad(expected.square().sum(), (rows, up, down), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), (rows, up, down)), wanted)


class Places(nn.Embedding):
    """A table as bart's: what it returns for positions `(T,)` has a dimension more."""

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape[0], -1)
        else:
            position_ids = position_ids.unsqueeze(0)
        return super().forward(position_ids + 2)


def test_counted_positions_are_upstreams_in_one_process():
    table, ids = Places(12, 4), torch.zeros(2, 5, dtype=torch.long)
    assert torch.equal(ops.look_up_positions(table, ids, tokens=ids), table(ids))
    given = torch.arange(3, 8)
    found = ops.look_up_positions(table, ids, position_ids=given, tokens=ids)
    assert torch.equal(found, table(ids, given)), "the positions that the decoder counted on from a cache"


def test_counted_positions_start_again_in_each_document():
    """Packed rows against each document alone."""
    table, ids = Places(12, 4), torch.zeros(2, 5, dtype=torch.long)
    found = ops.look_up_positions(table, ids, tokens=ids, cu_seq_lens=torch.tensor([0, 2, 5, 9, 10]))
    alone = torch.cat([table(ids[:1, :length])[0] for length in (2, 3, 4, 1)]).view(2, 5, 4)
    assert torch.equal(found, alone)


@pytest.mark.parametrize("bounds", [None, [0, 2, 8, 11, 16]])
def test_counted_positions_of_slices_are_those_of_the_full_rows(bounds, monkeypatch):
    table, ids = Places(12, 4), torch.zeros(2, 8, dtype=torch.long)
    cu_seq_lens = None if bounds is None else torch.tensor(bounds)
    full = ops.look_up_positions(table, ids, tokens=ids, cu_seq_lens=cu_seq_lens)
    slices = []
    for rank in range(2):
        monkeypatch.setattr(parallel, "sequence_parallel_state", lambda r=rank: SimpleNamespace(sp=2, sp_rank=r))
        own = ids[:, :4]
        slices.append(ops.look_up_positions(table, own, tokens=own, cu_seq_lens=cu_seq_lens))
    assert torch.equal(torch.cat(slices, dim=1), full)


def test_a_table_that_takes_no_positions_refuses_packed_rows():
    table, ids = nn.Embedding(12, 4), torch.zeros(1, 4, dtype=torch.long)
    assert ops.look_up_positions(table, ids, tokens=ids).shape == (1, 4, 4)
    with pytest.raises(ValueError, match="Embedding takes no position_ids"):
        ops.look_up_positions(table, ids, tokens=ids, cu_seq_lens=torch.tensor([0, 2, 4]))
