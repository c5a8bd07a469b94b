"""The loss that computes its gradients in the forward, against transformers' own in fp64: value and all gradients."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounding import require_as_exact, require_equal_up_to_rounding
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from patchgen.kernels.loss import linear_cross_entropy
from patchgen.kernels.loss.auto import choose
from patchgen.kernels.loss.causal_lm_loss import chunked_causal_lm_loss
from patchgen.kernels.loss.cross_entropy_rows import cross_entropy_rows
from patchgen.kernels.loss.linear_cross_entropy import (
    cross_entropy_rows_in_torch,
    linear_causal_lm_loss,
    tokens_per_chunk,
)
from patchgen.kernels.unsupported import UnsupportedOptionError

VOCAB, HIDDEN = 67, 16
linear_loss = functools.partial(linear_causal_lm_loss, loss_function=ForCausalLMLoss, vocab_size=VOCAB)


@pytest.fixture
def poisoned_memory():
    """What `torch.empty` and its relatives return begins as `nan`."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_chunks(monkeypatch, poisoned_memory):
    """Five chunks of 8 tokens and one of 2."""
    monkeypatch.setattr(linear_cross_entropy, "tokens_per_chunk", lambda num_tokens, vocab_size: 8)


@pytest.fixture(params=["torch", "triton"])
def implementation(request, monkeypatch):
    """The pass over the logits in torch, and the Triton kernel in its interpreter."""
    if request.param == "triton":
        if torch.cuda.is_available():
            pytest.skip("the interpreter is chosen where there is no GPU")
        monkeypatch.setattr(linear_cross_entropy, "cross_entropy_rows_in_torch", cross_entropy_rows)
    return request.param


def head_and_inputs(dtype: torch.dtype, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    """Head, hidden states `[2, 21, H]` and labels `[2, 21]`, some ignored: all labels of the second chunk of 8 too."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=dtype)
    hidden = torch.randn(2, 21, HIDDEN, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (2, 21))
    labels[0, 9:17] = -100
    labels[1, 3] = -100
    return head, hidden, labels


def gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, inputs))


KEYWORDS = {
    "mean": {},
    "items": {"num_items_in_batch": 17},
    "items_tensor": {"num_items_in_batch": torch.tensor(17)},
    "ignore_index": {"ignore_index": 3},
    "shift_labels": {"shift_labels": torch.arange(42).reshape(2, 21) % VOCAB},
    "foreign_keyword": {"cu_seq_lens_q": torch.tensor([0, 21, 42])},
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
def test_equals_upstream_in_fp64(small_chunks, keywords: dict, bias: bool):
    head, hidden, labels = head_and_inputs(torch.float64, bias)
    if "ignore_index" in keywords:
        labels[labels == -100] = 3
    inputs = [hidden, *head.parameters()]
    source = head(hidden).view(-1, VOCAB)
    target = keywords.get("shift_labels", nn.functional.pad(labels, (0, 1), value=keywords.get("ignore_index", -100)))
    target = target[:, -21:].reshape(-1)
    expected = nn.functional.cross_entropy(
        source, target, ignore_index=keywords.get("ignore_index", -100), reduction="sum"
    )
    expected = expected / keywords.get("num_items_in_batch", (target != keywords.get("ignore_index", -100)).sum())

    logits, loss = linear_loss(head, hidden, labels, **keywords)

    assert logits is None and loss.dtype == torch.float64
    require_equal_up_to_rounding(loss, expected)
    for found, wanted in zip(gradients(3 * loss, *inputs), gradients(3 * expected, *inputs), strict=True):
        assert found.dtype == wanted.dtype
        require_equal_up_to_rounding(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_errs_no_more_than_upstream_times_one_and_a_half(
    small_chunks, implementation: str, dtype: torch.dtype, bias: bool
):
    head, hidden, labels = head_and_inputs(dtype, bias)
    wide = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=torch.float64)
    wide.load_state_dict(head.state_dict())
    exact_hidden = hidden.detach().double().requires_grad_()
    _, exact = linear_loss(wide, exact_hidden, labels)
    exact_gradients = gradients(exact, exact_hidden, *wide.parameters())
    upstream = ForCausalLMLoss(head(hidden), labels, VOCAB)
    upstream_gradients = gradients(upstream, hidden, *head.parameters())

    _, loss = linear_loss(head, hidden, labels)

    assert loss.dtype == torch.float32
    require_as_exact(loss, upstream, exact)
    found_gradients = gradients(loss, hidden, *head.parameters())
    for found, upstream, exact in zip(found_gradients, upstream_gradients, exact_gradients, strict=True):
        assert found.dtype == dtype
        require_as_exact(found, upstream, exact, factor=1.5)


def memory_of(matrix: Tensor) -> Tensor:
    """All that lies from a matrix's first element to the end of its last row: what is between its rows as well."""
    if matrix.stride(1) != 1:
        matrix = matrix.t()
    start = matrix.storage_offset()
    end = start + matrix.shape[0] * max(matrix.stride(0), matrix.shape[1])
    return matrix.as_strided((min(end, matrix.untyped_storage().nbytes() // matrix.itemsize) - start,), (1,), start)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab_size=st.integers(2, 140),
    num_tokens=st.integers(1, 40),
    chunk_size=st.integers(1, 48),
    hidden_size=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    bias=st.booleans(),
)
def test_no_product_can_read_uninitialised_memory(
    poisoned_memory, vocab_size, num_tokens, chunk_size, hidden_size, dtype, bias
):
    """For any sizes, no uninitialised memory lies between the rows of the factors of a product.

    Whether a product reads what is there depends on the processor (oneDNN in bf16 does with AMX), so the test checks all
    that it could read, not only the results.
    """
    torch.manual_seed(0)
    head = nn.Linear(hidden_size, vocab_size, bias=bias, dtype=dtype)
    hidden = torch.randn(num_tokens, hidden_size, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab_size, (num_tokens,))
    seen = []

    def watched(product):
        def call(*arguments, **options):
            factors = [factor for factor in arguments[-2:] if factor.numel()]
            assert all(memory_of(factor).isfinite().all() for factor in factors)
            seen.append(product)
            return product(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_cross_entropy, "tokens_per_chunk", lambda num_tokens, vocab_size: chunk_size)
        patch.setattr(torch, "mm", watched(torch.mm))
        patch.setattr(torch, "addmm", watched(torch.addmm))
        _, loss = linear_causal_lm_loss(
            head, hidden[None], None, loss_function=ForCausalLMLoss, vocab_size=vocab_size, shift_labels=labels[None]
        )
    assert len(seen) == 3 * -(-num_tokens // chunk_size)
    inputs = [hidden, *head.parameters()]
    results = [[loss, *gradients(loss, *inputs)]]
    for compute_dtype in (dtype, torch.float64):
        parameters = [parameter.to(compute_dtype) for parameter in head.parameters()]
        logits = nn.functional.linear(hidden.to(compute_dtype), *parameters)
        expected = nn.functional.cross_entropy(logits.float() if compute_dtype == torch.bfloat16 else logits, labels)
        results.append([expected, *gradients(expected, *inputs)])
    for found, upstream, exact in zip(*results, strict=True):
        assert found.isfinite().all()
        if dtype != torch.float64:  # nothing is more exact than fp64
            # A result may be a single number, and upstream's error of that small by chance.
            require_as_exact(found, upstream, exact, factor=16)


@pytest.mark.parametrize("num_columns", [1, 67, 5000], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernel_equals_the_torch_form(monkeypatch, num_columns: int, dtype: torch.dtype):
    """Rows of one block and of several, gaps between rows, an ignored row, a row of large logits and one with `-inf`."""
    from patchgen.kernels.loss import cross_entropy_rows as module

    monkeypatch.setattr(module, "_BLOCK", 2048)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    buffer = torch.full((5, num_columns + 13), float("nan"), dtype=dtype, device=device)
    logits = buffer[:, :num_columns]
    logits.copy_(torch.randn(5, num_columns) * 4)
    logits[1] += 300
    if num_columns > 1:
        logits[2, : num_columns // 2] = float("-inf")
    target = torch.tensor([0, num_columns // 3, num_columns - 1, -100, num_columns - 1], device=device)
    divisor = torch.tensor(3.0, device=device)
    expected, expected_loss = logits.clone(), torch.full((5,), float("nan"), device=device)
    cross_entropy_rows_in_torch(expected, target, divisor, expected_loss, -100, True)

    untouched, loss = logits.clone(), torch.full((5,), float("nan"), device=device)
    cross_entropy_rows(logits, target, divisor, loss, -100, False)
    require_equal_up_to_rounding(loss, expected_loss)
    assert torch.equal(logits, untouched)
    loss.fill_(float("nan"))
    cross_entropy_rows(logits, target, divisor, loss, -100, True)
    require_equal_up_to_rounding(loss, expected_loss)
    require_equal_up_to_rounding(logits, expected)
    assert not logits[3].any()
    assert buffer[:, num_columns:].isnan().all(), "written beyond the row"


@pytest.mark.parametrize("size", [0, 1, 4096, 5000], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_scaling_rounds_the_product_once(size: int, dtype: torch.dtype):
    from patchgen.kernels.loss.scaled import scaled

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor, factor = torch.randn(size, device=device), torch.tensor(1.7, device=device)
    found, expected = scaled(tensor, factor, dtype), (tensor * factor).to(dtype)
    if device == "cuda" or dtype == torch.float32:
        assert torch.equal(found, expected)
    else:  # the interpreter truncates where the device rounds
        torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0)


def test_the_kernel_gives_nan_for_a_label_out_of_range():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, loss = torch.randn(3, 8, device=device), torch.zeros(3, device=device)
    cross_entropy_rows(
        logits, torch.tensor([8, 0, -1], device=device), torch.ones((), device=device), loss, -100, True
    )
    assert loss.isnan().tolist() == [True, False, True]
    assert logits.isnan().all(1).tolist() == [True, False, True]


def test_the_gradient_of_the_loss_is_multiplied_in_and_may_be_asked_for_twice(small_chunks):
    head, hidden, labels = head_and_inputs(torch.float64)
    _, loss = linear_loss(head, hidden, labels)
    once = torch.autograd.grad(loss, [hidden, head.weight], retain_graph=True)
    scaled = torch.autograd.grad(loss * 7, [hidden, head.weight])
    for a, b in zip(once, scaled, strict=True):
        require_equal_up_to_rounding(a * 7, b)


def test_computes_only_the_gradients_that_are_asked_for(small_chunks, monkeypatch):
    products = []
    mm, add_product = torch.mm, linear_cross_entropy._add_product
    monkeypatch.setattr(torch, "mm", lambda *a, **k: products.append("mm") or mm(*a, **k))
    monkeypatch.setattr(
        linear_cross_entropy, "_add_product", lambda *a, **k: products.append("weight") or add_product(*a, **k)
    )
    head, hidden, labels = head_and_inputs(torch.float32, bias=False)
    with torch.no_grad():
        _, forward_only = linear_loss(head, hidden, labels)
    assert products == ["mm"] * 6 and not forward_only.requires_grad

    products.clear()
    head.weight.requires_grad_(False)
    _, frozen = linear_loss(head, hidden, labels)
    frozen.backward()
    assert products == ["mm", "mm"] * 6 and head.weight.grad is None
    require_equal_up_to_rounding(frozen, forward_only)

    products.clear()
    head.weight.requires_grad_(True)
    _, detached = linear_loss(head, hidden.detach(), labels)
    detached.backward()
    assert products == ["mm", "weight"] * 6 and head.weight.grad is not None


def test_all_labels_ignored_give_nan_as_upstream_does_and_zero_with_a_number_of_items(small_chunks):
    head, hidden, labels = head_and_inputs(torch.float32)
    labels.fill_(-100)
    assert ForCausalLMLoss(head(hidden), labels, VOCAB).isnan()
    assert linear_loss(head, hidden, labels)[1].isnan()
    _, loss = linear_loss(head, hidden, labels, num_items_in_batch=5)
    assert loss == 0
    for gradient in gradients(loss, hidden, *head.parameters()):
        assert not gradient.any()


def test_no_tokens_give_zero_gradients(small_chunks):
    head = nn.Linear(HIDDEN, VOCAB)
    empty = torch.zeros(1, 0, HIDDEN, requires_grad=True)
    _, loss = linear_loss(head, empty, torch.zeros(1, 0, dtype=torch.long), num_items_in_batch=5)
    loss.backward()
    assert loss == 0 and not head.weight.grad.any() and not head.bias.grad.any() and empty.grad.shape == empty.shape


def test_the_same_bits_every_time(small_chunks):
    head, hidden, labels = head_and_inputs(torch.bfloat16)
    runs = []
    for _ in range(3):
        _, loss = linear_loss(head, hidden, labels)
        runs.append([loss.detach(), *gradients(loss, hidden, *head.parameters())])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_the_operator_passes_opcheck(small_chunks):
    head, hidden, labels = head_and_inputs(torch.float32)
    arguments = (
        hidden.detach().reshape(-1, HIDDEN).requires_grad_(),
        head.weight,
        head.bias,
        labels.reshape(-1),
        torch.tensor(5.0),  # divisor
        -100,  # ignore_index
        True,  # with the gradient of the hidden states,
        True,  # of the weight
        True,  # and of the bias
    )
    torch.library.opcheck(
        torch.ops.patchgen.linear_cross_entropy.default,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_compiles_without_a_graph_break(small_chunks):
    head, hidden, labels = head_and_inputs(torch.float32)

    def function(hidden: Tensor) -> Tensor:
        return linear_loss(head, hidden * 2, labels, num_items_in_batch=30)[1]

    expected = function(hidden)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(hidden)
    require_equal_up_to_rounding(found, expected)
    inputs = [hidden, *head.parameters()]
    for a, b in zip(gradients(found, *inputs), gradients(expected, *inputs), strict=True):
        require_equal_up_to_rounding(a, b)


def test_a_second_derivative_is_refused(small_chunks):
    head, hidden, labels = head_and_inputs(torch.float32)
    _, loss = linear_loss(head, hidden, labels)
    (first,) = torch.autograd.grad(loss, [hidden], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.square().sum().backward()


class ScaledHead(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * 0.5


def hooked() -> nn.Linear:
    head = nn.Linear(HIDDEN, VOCAB)
    head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    return head


@pytest.mark.parametrize(
    ("head", "dtype", "reason"),
    [
        (lambda hidden: hidden, torch.float32, "found a function"),
        (ScaledHead(HIDDEN, VOCAB), torch.float32, "found a ScaledHead"),
        (hooked(), torch.float32, "has a hook"),
        (nn.Linear(HIDDEN, VOCAB), torch.bfloat16, "weight is torch.float32 on cpu, the hidden states are torch.bf"),
        (nn.Linear(HIDDEN, VOCAB, dtype=torch.float16), torch.float16, "underflow"),
    ],
    ids=["function", "subclass", "hooks", "dtypes", "fp16"],
)
def test_refuses_other_heads_by_name_and_auto_gives_them_to_chunked(head, dtype: torch.dtype, reason: str):
    hidden = torch.randn(1, 8, HIDDEN, dtype=dtype)
    with pytest.raises(UnsupportedOptionError, match=reason):
        linear_loss(head, hidden, torch.zeros(1, 8, dtype=torch.long))
    assert choose(head, hidden) is chunked_causal_lm_loss


def test_refuses_autocast_and_auto_takes_plain_heads():
    head, hidden, labels = head_and_inputs(torch.float32)
    assert choose(head, hidden) is linear_causal_lm_loss
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedOptionError, match="autocast"):
        linear_loss(head, hidden, labels)


def test_refuses_another_loss_and_sizes_that_do_not_fit():
    head, hidden, labels = head_and_inputs(torch.float32)
    with pytest.raises(ValueError, match="ForMaskedLMLoss"):
        linear_causal_lm_loss(head, hidden, labels, loss_function=ForMaskedLMLoss, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="vocab_size 68"):
        linear_causal_lm_loss(head, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=68)
    with pytest.raises(ValueError, match="40 labels for 42"):
        linear_loss(head, hidden, labels[:, :20])


def test_the_sizes_of_a_head_are_those_of_its_weight():
    """A layer whose weight was replaced keeps `in_features` and `out_features` of its own; upstream computes with the weight."""
    head, hidden, labels = head_and_inputs(torch.float64, bias=False)
    tied_later = nn.Linear(VOCAB, HIDDEN, bias=False, dtype=torch.float64)
    tied_later.weight = head.weight
    assert torch.equal(linear_loss(tied_later, hidden, labels)[1], linear_loss(head, hidden, labels)[1])


def test_chunks_are_equal_within_the_budget_and_cover_the_tokens():
    for vocab_size in (500, 32_000, 151_936, 262_144, 2**24):
        for num_tokens in (1, 127, 4097, 8192, 8200, 32_768):
            size = tokens_per_chunk(num_tokens, vocab_size)
            num_chunks = -(-num_tokens // size)
            assert size % 128 == 0 and size <= 8192
            assert size == 128 or (size - 128) * vocab_size <= linear_cross_entropy.CHUNK_LOGITS
            assert num_chunks * size - num_tokens < 128 * num_chunks, "the last chunk is no shorter than need be"
    assert tokens_per_chunk(8192, 151_936) == tokens_per_chunk(32_768, 151_936) == 4096


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_on_the_device_at_a_real_vocabulary(bias: bool):
    """T = 5000 tokens in bf16: upstream's loss, and gradients that err at most 1.5 times as much as upstream's, measured
    against upstream's in fp32; the same bits every time."""
    torch.manual_seed(0)
    head = nn.Linear(512, 151_936, bias=bias, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(1, 5000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 151_936, (1, 5000), device="cuda")
    labels[:, 100:300] = -100
    wide = nn.Linear(512, 151_936, bias=bias, device="cuda")
    wide.load_state_dict(head.state_dict())
    wide_hidden = hidden.detach().float().requires_grad_()
    exact_gradients = gradients(ForCausalLMLoss(wide(wide_hidden), labels, 151_936), wide_hidden, *wide.parameters())
    upstream_loss = ForCausalLMLoss(head(hidden), labels, 151_936)
    upstream_gradients = gradients(upstream_loss, hidden, *head.parameters())
    runs = []
    for _ in range(3):
        _, loss = linear_causal_lm_loss(head, hidden, labels, loss_function=ForCausalLMLoss, vocab_size=151_936)
        runs.append([loss.detach(), *gradients(loss, hidden, *head.parameters())])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    loss, *found_gradients = runs[0]
    assert loss.dtype == torch.float32
    require_equal_up_to_rounding(loss, upstream_loss)
    for found, upstream, exact in zip(found_gradients, upstream_gradients, exact_gradients, strict=True):
        assert found.dtype == torch.bfloat16
        error, upstream_error = (float((g.float() - exact).norm() / exact.norm()) for g in (found, upstream))
        assert error <= 1.5 * upstream_error
