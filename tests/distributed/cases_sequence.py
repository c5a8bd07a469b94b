"""What each rank does in the tests of sequence parallelism; see test_sequence.py."""

from __future__ import annotations

import copy
from functools import cache

import torch
import torch.distributed as dist
from rounding import require_equal_up_to_rounding
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from patchgen.runtime import attention, parallel
from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.attention_masks import MaskStructure
from patchgen.runtime.parallel import ParallelConfig, selfcheck, sequence, sharding
from patchgen.runtime.parallel.state import ParallelState


@cache
def state_of(sp: int = 1, ep: int = 1, dp_replicate: int = 1, **options) -> ParallelState:
    """One state per configuration and process: meshes make process groups, which are never freed."""
    config = ParallelConfig.for_world(dist.get_world_size(), dp_replicate=dp_replicate, sp=sp, ep=ep)
    return ParallelState.create(config, "cpu", **options)


def slices_are_told_from_wholes() -> None:
    """A slice stays, the whole is cut, anything else is refused: it would be taken for a slice."""
    state = state_of(sp=dist.get_world_size())
    whole = torch.arange(4 * state.sp)[None]
    mine = whole.chunk(state.sp, dim=1)[state.sp_rank]
    hidden = torch.zeros(1, 4, 2)
    assert torch.equal(sequence.position_slice(mine, hidden, state), mine)
    assert torch.equal(sequence.position_slice(whole, hidden, state), mine)
    try:
        sequence.position_slice(whole[:, 1:], hidden, state)
    except ValueError as error:
        assert "spans neither this rank's slice of 4 tokens" in str(error), error
    else:
        raise AssertionError("positions of another length were accepted")


def frequencies_are_those_of_the_rows_length(rope_parameters: dict) -> None:
    """Rotary angles of slices are those of the row, past upstream's threshold of 12 positions and below it, where it goes back."""
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=12, rope_parameters=rope_parameters, attn_implementation="patchgen_eager",
    )  # fmt: skip
    attention.register()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    whole, state = copy.deepcopy(model), state_of(sp=dist.get_world_size())
    sharding.shard_model(model, state)
    chosen = []
    for length in (8, 32, 8):
        positions = torch.arange(length)[None]
        mine = positions.chunk(state.sp, dim=1)[state.sp_rank]
        x = torch.zeros(1, 1, dtype=torch.float64)
        expected = whole.model.rotary_emb(x, positions)
        with parallel.using(state):
            actual = model.model.rotary_emb(x, position_ids=mine)
        for full, slice_of_it in zip(expected, actual, strict=True):
            torch.testing.assert_close(slice_of_it, full.chunk(state.sp, dim=1)[state.sp_rank], rtol=0, atol=0)
        chosen.append(expected[0][0, 7])
    assert torch.equal(chosen[0], chosen[2])
    assert not torch.equal(chosen[0], chosen[1])
    assert selfcheck.require_sliceable(model, state, vocab_size=61) < 1e-5


def exchange_round_trip() -> None:
    """Heads scattered and gathered again are the same tensor, and so is the gradient; the head slices are right."""
    size = dist.get_world_size()
    state = state_of(sp=size)
    torch.manual_seed(0)
    B, S, D = 2, 4 * size, 3
    whole = [torch.randn(B, S, 2 * size, D), torch.randn(B, S, size, D + 2), torch.randn(B, S, size, 1).bfloat16()]
    mine = [t.chunk(size, dim=1)[state.sp_rank].clone().requires_grad_() for t in whole]
    scattered = sequence.scatter_heads(mine, state, operation="test")
    for got, full in zip(scattered, whole, strict=True):
        torch.testing.assert_close(got, full.chunk(size, dim=2)[state.sp_rank], rtol=0, atol=0)
    weights = torch.randn(B, S, 2 * size, D)
    back = sequence.gather_heads(scattered[0], state, operation="test")
    torch.testing.assert_close(back, mine[0], rtol=0, atol=0)
    (back * weights.chunk(size, dim=1)[state.sp_rank]).sum().backward()
    torch.testing.assert_close(mine[0].grad, weights.chunk(size, dim=1)[state.sp_rank], rtol=0, atol=0)


class AttentionModule(nn.Module):
    """What transformers hands to an attention function as `module`."""

    is_causal = True


def attention_agrees(
    name: str,
    heads: tuple[int, int],
    head_sizes: tuple[int, int],
    packed: bool,
    head_groups: int = 1,
    expected_groups: int = 1,
    **options,
) -> None:
    """One backend over slices against the same backend over the whole sequence: outputs and all gradients.

    Of the options `with_sinks` draws them, `padded` is the number of tokens of padding at the start of the first row, `overlay`
    hands in a mask in which some queries see later keys.

    Torch has no backward of flex attention on the CPU: there, outputs only.
    """
    differentiable = name != "patchgen_flex_attention"
    size = dist.get_world_size()
    state = state_of(sp=size, head_groups=head_groups)
    N_q, N_k = heads
    if N_q % size == 0:
        assert sequence.num_head_groups(N_q, N_k, size, head_groups) == expected_groups
    D, D_v = head_sizes
    B, S = (1, 24) if packed else (2, 16)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    whole = [normal(B, N_q, S, D), normal(B, N_k, S, D), normal(B, N_k, S, D_v)]
    direction = normal(B, S, N_q, D_v)
    arguments = dict(options)
    if arguments.pop("with_sinks", False):
        arguments["s_aux"] = normal(N_q)
    mask: torch.Tensor | MaskStructure | None = None
    if arguments.pop("overlay", False):
        mask = torch.ones(S, S, dtype=torch.bool).tril() | (normal(B, 1, S, S) > 1)
    if padded := arguments.pop("padded", 0):
        padding = torch.arange(S).expand(B, S) >= torch.tensor([padded] + [0] * (B - 1))[:, None]
        mask = MaskStructure(definition=None, causal=True, padding=padding)
    if packed:
        arguments |= {"cu_seq_lens_q": torch.tensor([0, 5, 6, 19, 24], dtype=torch.int32), "max_length_q": 13}
    call = attention.attention_function(name, BACKENDS[name])

    def run(states, weights, with_state):
        inputs = [t.detach().clone().requires_grad_(differentiable) for t in states]
        extra = {k: v.clone().requires_grad_() if k == "s_aux" else v for k, v in arguments.items()}
        with parallel.using(with_state):
            out, _ = call(AttentionModule(), *inputs, mask, **extra)
        if differentiable:
            (out * weights).sum().backward()
        sink_gradient = extra["s_aux"].grad if "s_aux" in extra else torch.zeros(())
        return out.detach(), [t.grad for t in inputs], sink_gradient

    expected, expected_gradients, expected_sinks = run(whole, direction, None)
    rank = state.sp_rank
    got, gradients, sinks = run([t.chunk(size, dim=2)[rank] for t in whole], direction.chunk(size, dim=1)[rank], state)
    require_equal_up_to_rounding(got, expected.chunk(size, dim=1)[rank])
    for gradient, full in zip(gradients, expected_gradients, strict=True):
        if not differentiable:
            break
        require_equal_up_to_rounding(gradient, full.chunk(size, dim=2)[rank])
    dist.all_reduce(sinks)
    require_equal_up_to_rounding(sinks, expected_sinks)


def fewer_heads_agree() -> None:
    """Every number of heads below twice the ranks that these do not divide, and slices of lengths that chunks do not."""
    size = dist.get_world_size()
    for N_q in range(1, 2 * size):
        for N_k in (heads for heads in range(1, N_q + 1) if N_q % heads == 0):
            if N_q % size:
                attention_agrees("patchgen_sdpa", (N_q, N_k), (8, 8), packed=True)
                attention_agrees("patchgen_eager", (N_q, N_k), (8, 4), packed=False, sliding_window=3, with_sinks=True)


def one_token_of_each_rank() -> None:
    """Half of the chunks of one head are empty then."""
    state = state_of(sp=dist.get_world_size())
    call = attention.attention_function("patchgen_eager", BACKENDS["patchgen_eager"])
    q, k, v = (torch.randn(1, 1, state.sp, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    expected = call(AttentionModule(), q, k, v, None)[0]
    with parallel.using(state):
        out = call(AttentionModule(), *(t.chunk(state.sp, dim=2)[state.sp_rank] for t in (q, k, v)), None)[0]
    require_equal_up_to_rounding(out, expected.chunk(state.sp, dim=1)[state.sp_rank])


def lengths_of_a_slice_are_refused() -> None:
    """Causal attention handed the documents of this rank's slice, where those of the whole sequence are meant."""
    state = state_of(sp=dist.get_world_size())
    call = attention.attention_function("patchgen_eager", BACKENDS["patchgen_eager"])
    states = torch.randn(1, 4, 8, 8)
    with parallel.using(state):
        try:
            call(AttentionModule(), states, states, states, None, cu_seq_lens_q=torch.tensor([0, 3, 8]))
        except ValueError as error:
            assert "must be those of the full sequence, not of this rank's slice" in str(error), error
            return
    raise AssertionError("lengths of a slice were taken for those of the sequence")


def towers_that_were_not_sliced_are_refused() -> None:
    """Every rank holds the whole input of a tower, with the lengths of the whole."""
    state = state_of(sp=dist.get_world_size())
    call = attention.attention_function("patchgen_eager", BACKENDS["patchgen_eager"])
    states = torch.randn(1, 4, 8, 8)
    lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
    with parallel.using(state):
        try:
            call(AttentionModule(), states, states, states, None, is_causal=False, cu_seq_lens_q=lengths)
        except ValueError as error:
            assert "got lengths of 8 tokens for a gathered sequence of 16" in str(error), error
        else:
            raise AssertionError("a tower that was not sliced was accepted")
        with parallel.using(None):
            call(AttentionModule(), states, states, states, None, is_causal=False, cu_seq_lens_q=lengths)
