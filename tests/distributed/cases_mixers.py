"""What each rank does in the tests of convolution and recurrence over slices; see test_mixers.py."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import cases_models
import torch
import torch.distributed as dist
from cases_sequence import state_of
from rounding import require_equal_up_to_rounding
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as served_by
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from patchgen.runtime import attention, ops, parallel
from patchgen.runtime.parallel import batch

BOUNDS = (0, 3, 4, 13, 16, 24, 32)  # documents of two rows of 16
ROWS, LENGTH = 2, 16


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}


def _whole_by_document(call, tensors: dict[str, Tensor], along: dict[str, int], packed: bool, out_dim: int) -> Tensor:
    """The yardstick: upstream's function on each document alone."""
    parts = []
    for row in range(ROWS):
        inner = [bound - row * LENGTH for bound in BOUNDS if row * LENGTH <= bound <= (row + 1) * LENGTH]
        spans = list(itertools.pairwise(inner)) if packed else [(0, LENGTH)]
        pieces = []
        for start, end in spans:
            sliced = {
                name: t[row : row + 1].narrow(along[name], start, end - start) if name in along else t
                for name, t in tensors.items()
            }
            pieces.append(call(**sliced))
        parts.append(torch.cat(pieces, dim=out_dim))
    return torch.cat(parts)


def _agrees(whole_call, sliced_call, tensors, along, out_dim, packed, state) -> None:
    leaves = _leaves(tensors)
    expected = _whole_by_document(whole_call, leaves, along, packed, out_dim)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * direction).sum().backward()

    size, rank = state.sp, state.sp_rank
    mine = _leaves({n: t.chunk(size, dim=along[n])[rank] if n in along else t for n, t in tensors.items()})
    lengths = {"cu_seq_lens_q": torch.tensor(BOUNDS, dtype=torch.int32)} if packed else {}
    with parallel.using(state):
        got = sliced_call(**mine, **lengths)
    (got * direction.chunk(size, dim=out_dim)[rank]).sum().backward()
    require_equal_up_to_rounding(got, expected.chunk(size, dim=out_dim)[rank])
    for name, leaf in mine.items():
        gradient = leaf.grad.clone()
        if name in along:
            full = leaves[name].grad.chunk(size, dim=along[name])[rank]
        else:
            dist.all_reduce(gradient, group=state.sp_group)
            full = leaves[name].grad
        require_equal_up_to_rounding(gradient, full, what=name)


def convolution_agrees(packed: bool, sp: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "hidden_states": torch.randn(ROWS, 8, LENGTH, generator=generator),
        "weight": torch.randn(8, 3, generator=generator),
        "bias": torch.randn(8, generator=generator),
    }

    def whole(hidden_states, weight, bias):
        return causal_conv1d_fn(hidden_states, weight, bias, activation="silu")

    def sliced(hidden_states, weight, bias, **lengths):
        return ops.causal_conv1d(causal_conv1d_fn, hidden_states, weight, bias, activation="silu", **lengths)

    _agrees(whole, sliced, tensors, {"hidden_states": 2}, 2, packed, state_of(sp=sp))


def recurrence_agrees(packed: bool, sp: int, key_heads: int, value_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tensors = {
        "query": normal(ROWS, LENGTH, key_heads, 6),
        "key": normal(ROWS, LENGTH, key_heads, 6),
        "value": normal(ROWS, LENGTH, value_heads, 5),
        "g": -normal(ROWS, LENGTH, value_heads).abs(),
        "beta": normal(ROWS, LENGTH, value_heads).sigmoid(),
    }

    def whole(**inputs):
        return torch_chunk_gated_delta_rule(**inputs, chunk_size=4, use_qk_l2norm_in_kernel=True)[0]

    def sliced(query, key, value, g, beta, cu_seq_lens_q=None):
        out, state = ops.delta_rule(
            torch_chunk_gated_delta_rule,
            query,
            key,
            value,
            g=g,
            beta=beta,
            chunk_size=4,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seq_lens_q,
        )
        assert state is None
        return out

    _agrees(whole, sliced, tensors, dict.fromkeys(tensors, 1), 1, packed, state_of(sp=sp))


def scan_by_heads_agrees(packed: bool, sp: int, groups: int, kernels: bool = False) -> None:
    """Mamba-2's: `B` and `C` of fewer groups than ranks are those of the rank's heads."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    heads = 4
    tensors = {
        "hidden_states": normal(ROWS, LENGTH, heads, 6),
        "dt": normal(ROWS, LENGTH, heads),
        "A": -normal(heads).exp(),
        "B": normal(ROWS, LENGTH, groups, 5),
        "C": normal(ROWS, LENGTH, groups, 5),
        "D": normal(heads),
        "dt_bias": normal(heads),
    }
    plain = inspect.unwrap(mamba2_chunk_scan)
    with kernel_packages(kernels):
        scan = served_by("mamba_chunk_scan_combined", "mamba_ssm")(plain)

    def whole(hidden_states, dt, A, B, C, **more):
        return plain(hidden_states, dt, A, B, C, chunk_size=4, dt_softplus=True, **more)

    def sliced(hidden_states, dt, A, B, C, cu_seq_lens_q=None, **more):
        more |= {"z": None, "initial_states": None, "return_final_states": False, "cu_seq_lens_q": cu_seq_lens_q}
        return ops.state_space_scan(scan, hidden_states, dt, A, B, C, chunk_size=4, dt_softplus=True, **more)

    along = dict.fromkeys(("hidden_states", "dt", "B", "C"), 1)
    _agrees(whole, sliced, tensors, along, 1, packed, state_of(sp=sp))


def scan_by_channels_agrees(packed: bool, sp: int) -> None:
    """Mamba's: each rank has all of `B` and `C`. As many channels as tokens and states: no size tells them apart."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    channels = states = LENGTH
    tensors = {
        "hidden_states": normal(ROWS, channels, LENGTH),
        "dt": normal(ROWS, channels, LENGTH),
        "A": -normal(channels, states).exp(),
        "B": normal(ROWS, states, LENGTH),
        "C": normal(ROWS, states, LENGTH),
        "D": normal(channels),
        "z": normal(ROWS, channels, LENGTH),
        "delta_bias": normal(channels),
    }

    def whole(hidden_states, dt, A, B, C, **more):
        return mamba_selective_scan(hidden_states, dt, A, B, C, delta_softplus=True, **more)

    def sliced(hidden_states, dt, A, B, C, **more):
        return ops.selective_scan(mamba_selective_scan, hidden_states, dt, A, B, C, delta_softplus=True, **more)

    along = dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2)
    _agrees(whole, sliced, tensors, along, 2, packed, state_of(sp=sp))


def kernels_of_whole_mixers_see_whole_rows() -> None:
    """A kernel for all of a mixer is called on whole unpacked rows alone; what mixes otherwise refuses a slice."""
    given = {"cu_seq_lens_q": torch.tensor([0, 3, 8])}
    for state, lengths, expected in (
        (None, {}, "whole"),
        (None, {"cu_seq_lens_q": None}, "whole"),
        (None, given, None),
        (state_of(sp=dist.get_world_size()), {}, None),
        (state_of(sp=1), {}, "whole"),
    ):
        with parallel.using(state):
            assert ops.fused_scan(lambda x: x, "whole", **lengths) == expected
            try:
                ops.refuse_slices("AnyMixer")
                refused = False
            except ValueError as error:
                refused = "AnyMixer mixes tokens along the sequence" in str(error)
        assert refused is (state is not None and state.sp > 1)


# ------------------------------------------------------------------------------------ numbers of documents

PACKAGES = Path(__file__).parent / "kernel_packages"


@contextlib.contextmanager
def kernel_packages(there: bool) -> Iterator[None]:
    """Within the block, what is imported finds `fla`, `mamba_ssm` and `causal_conv1d`: stand-ins with their signatures."""
    if not there:
        yield
        return
    sys.path.insert(0, str(PACKAGES))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(PACKAGES))
        for name in [one for one in sys.modules if one.partition(".")[0] in ("fla", "causal_conv1d", "mamba_ssm")]:
            del sys.modules[name]


def bounds_of(documents: int, total: int) -> list[int]:
    """`documents` lengths, unlike ones, that add up to `total`."""
    inner = torch.randperm(total - 1, generator=torch.Generator().manual_seed(documents))[: documents - 1] + 1
    return [0, *sorted(inner.tolist()), total]


def documents_are_computed_alone(kernels: bool, first: int, last: int) -> None:
    """Both mixers of a row with `first` to `last` documents, over slices, against upstream's torch form of each alone.

    Value heads and channels are 32 each, so that the bounds of 31 documents are as many.
    """
    total, heads, channels = 80, (16, 32), 32
    state = state_of(sp=dist.get_world_size())
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key, value = normal(1, total, heads[0], 4), normal(1, total, heads[0], 4), normal(1, total, heads[1], 4)
    g, beta = -normal(1, total, heads[1]).abs(), normal(1, total, heads[1]).sigmoid()
    x, weight, bias = normal(1, channels, total), normal(channels, 3), normal(channels)
    plain_rule, plain_convolution = inspect.unwrap(torch_chunk_gated_delta_rule), inspect.unwrap(causal_conv1d_fn)
    rule, convolution, more = plain_rule, plain_convolution, {"chunk_size": 4}
    if kernels:
        with kernel_packages(True):
            rule = served_by("chunk_gated_delta_rule", "fla")(plain_rule)
            convolution = served_by("causal_conv1d_fn", "causal_conv1d")(plain_convolution)
        more = {}

    def own(tensor: Tensor, dim: int = 1) -> Tensor:
        return tensor.chunk(state.sp, dim=dim)[state.sp_rank]

    for documents in range(first, last + 1):
        bounds = bounds_of(documents, total)
        spans = list(itertools.pairwise(bounds))
        expected = [plain_rule(*(t[:, a:b] for t in (query, key, value, g, beta)), chunk_size=4)[0] for a, b in spans]
        convolved = [plain_convolution(x[:, :, a:b], weight, bias, activation="silu") for a, b in spans]
        lengths = torch.tensor(bounds, dtype=torch.int32)
        with parallel.using(state):
            got = ops.delta_rule(
                rule, *map(own, (query, key, value)), g=own(g), beta=own(beta), cu_seqlens=lengths, **more
            )
            out = ops.causal_conv1d(convolution, own(x, 2), weight, bias, activation="silu", cu_seq_lens_q=lengths)
        said = f"{documents} documents"
        torch.testing.assert_close(got[0], own(torch.cat(expected, 1)), msg=lambda text, s=said: f"{s}: {text}")
        torch.testing.assert_close(out, own(torch.cat(convolved, 2), 2), msg=lambda text, s=said: f"{s}: {text}")


def model_computes_documents_alone(name: str, kernels: bool, counts: list[int]) -> None:
    """Loss and gradients of a model over slices against the same model on the whole row, as one rank has it."""
    attention.register()
    total = 144
    cached = cases_models.import_generated
    state = state_of(sp=dist.get_world_size())
    with kernel_packages(kernels):
        cases_models.import_generated = cached.__wrapped__  # decorated anew, by what is importable now
        try:
            model = cases_models.build(name, generated=True, attention_name="patchgen_sdpa")
        finally:
            cases_models.import_generated = cached
    ids = torch.randint(0, cases_models.VOCABULARY, (1, total), generator=torch.Generator().manual_seed(0))
    for documents in counts:
        lengths = torch.tensor(bounds_of(documents, total), dtype=torch.int32)
        positions = torch.cat([torch.arange(n) for n in lengths.diff().tolist()])[None]
        given = {"input_ids": ids, "labels": ids, "position_ids": positions, "cu_seq_lens_q": lengths}
        values = {}
        for sp, sp_rank, using in ((1, 0, None), (state.sp, state.sp_rank, state)):
            inputs = batch.slice_batch(given, sp=sp, sp_rank=sp_rank)
            items = total - documents
            with parallel.using(using):
                share = model(**inputs, num_items_in_batch=torch.tensor(items), use_cache=False).loss
                share.backward()
            found = [share.detach(), *(parameter.grad for parameter in model.parameters())]
            if sp > 1:
                for tensor in found:
                    dist.all_reduce(tensor)
            values[sp] = [tensor.clone() for tensor in found]
            model.zero_grad()
        for got, expected in zip(values[state.sp], values[1], strict=True):
            bar = 1e-5 * float(expected.abs().max()) + 1e-12
            torch.testing.assert_close(got, expected, rtol=0, atol=bar, msg=lambda text, n=documents: f"{n}: {text}")


def refusals() -> list[str]:
    """What is said of tensors whose names say nothing, or say another size, of caches and of lengths of a slice."""
    state = state_of(sp=dist.get_world_size())
    x, weight = torch.randn(1, 4, 8), torch.randn(4, 3)
    heads = torch.randn(1, 8, 4, 2)

    def rule(query, key, value, g, beta, decay_of_heads=None, initial_state=None, chunk_size=4, **kwargs):
        return value

    def convolution(hidden_states, weight, bias=None, gates=None, **kwargs):
        return hidden_states

    def refusal(call, *args, using=state, **kwargs) -> str:
        try:
            with parallel.using(using):
                call(*args, **kwargs)
        except ValueError as error:
            return str(error)
        raise AssertionError("it was computed")

    gates = {"g": heads[..., 0], "beta": heads[..., 0]}
    return [
        refusal(ops.delta_rule, rule, heads, heads, heads, **gates, decay_of_heads=torch.ones(4)),
        refusal(ops.delta_rule, rule, heads, heads, heads, g=heads[:, :, :2, 0], beta=heads[..., 0]),
        refusal(ops.delta_rule, rule, heads, heads, heads, **gates, initial_state=torch.ones(1, 4, 2, 2)),
        refusal(ops.causal_conv1d, convolution, x, weight, gates=torch.ones(4)),
        refusal(ops.causal_conv1d, convolution, x, torch.randn(8, 3)),
        refusal(ops.causal_conv1d, convolution, x, weight, seq_idx=torch.zeros(1, 8)),
        refusal(ops.causal_conv1d, convolution, x, weight, cu_seq_lens_q=torch.tensor([0, 3, 6]), using=None),
    ]
