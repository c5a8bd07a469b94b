"""Checks at start-up that a model computes the same on slices of a sequence as on the full sequence: a few small forwards.

A layer that mixes tokens by other means than the attention, convolutions, recurrences and scans that `ops` handles
(positions derived from token ids, hand-written attention) runs on a slice without an error, and trains wrongly. And a router
that takes the tokens of several rows in another order than row by row has a loss of other groups of tokens.

Logits hide a small difference inside: what the last layers add, and what a head multiplies. So the decoder's layers are
compared one by one, each with what it adds to its input, and each gets the input of the full sequence:

    full sequence    layer 1 -> x1 -> layer 2 -> x2 -> ... -> logits
    slices           layer 1 -> y1    x1 -> layer 2 -> y2    x2 -> ... -> logits        y1 with x1, y2 with x2, ...

So a difference belongs to one layer, and rounding does not accumulate. Gradients are compared in the same way.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.runtime import minimal_media, parallel
from patchgen.runtime.config_positions import num_positions
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import slice_media, unused
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.fixed_draws import fixed_draws
from patchgen.runtime.parallel.reshard import reshard, reshard_after_error
from patchgen.runtime.parallel.restored import restored
from patchgen.runtime.parallel.slice_layers import LayerComparison, random_slice, recorded_routers, router_logits
from patchgen.runtime.parallel.state import ParallelState

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
HALF_PRECISION_TOLERANCE = 5e-2
NUM_ROWS = 2
"""Of text: more than one shows what mixes rows, or takes them in another order."""
PRIMES = (11, 13, 17, 19, 23, 29, 37)
"""Lengths of slices: what repeats every few tokens differs on them."""
CHUNK = 64
"""Tokens of a chunk of upstream's delta rules: only longer rows show what they hand from one to the next."""


@torch.no_grad()
def require_sliceable(
    model: nn.Module, state: ParallelState, *, vocab_size: int, packed: bool = True, padded: bool = True
) -> float:
    """Compares logits `(B, S, V)`, hidden states and their gradients for random tokens, computed in slices, with those of the
    full sequence: of two rows, of a packed one, and of two with padding.

    Args:
        model: a causal language model, after `shard_model` and with its weights. Every rank must call this.
        vocab_size: upper bound of the random token ids.
        packed: also compare a packed batch whose documents end where slices end: there position ids do not restart within
            a slice, so logits are right only if every attention gets the document lengths.
        padded: also compare two rows that end with padding, which an attention mask marks. `patchgen train` packs rows, and
            passes no mask with zeros.

    Rows with a small image, video and sound are compared as well if the model takes them (`slice_media.py`), with a warning
    if no such row is known. A model in training mode is compared in that mode as well: without dropout, and with constants in
    place of random numbers; not if others than torch's own functions draw them. Gradients are compared of rows of text;
    parameters keep those that they had.

    Returns:
        The largest relative difference over all ranks; 0 without sequence parallelism.

    Raises:
        ValueError: they differ by more than rounding, or the model does not take such a row.
    """
    if state.sp == 1:
        return 0.0
    modes = {module: module.training for module in model.modules()}
    reshard(model)  # what an earlier forward left
    try:
        return _compare_rows(model, state, vocab_size, packed=packed, padded=padded)
    finally:
        for module, mode in modes.items():
            module.training = mode
        reshard(model)


def _compare_rows(model: nn.Module, state: ParallelState, vocab_size: int, *, packed: bool, padded: bool) -> float:
    """The comparisons of `require_sliceable`; leaves the model in one of the modes."""
    tokens_per_rank = _tokens_per_rank(model, state.sp)
    ids = _random_ids(vocab_size, tokens_per_rank * state.sp)
    was_training = model.training
    model.eval()
    compare = partial(_require_equal_logits, model, state)
    differences = [compare(row, suspicion) for row, suspicion in _text_rows(ids, tokens_per_rank, packed=packed)]
    if padded:
        suspicion = "(rows with padding) Some layer reads the attention mask"
        differences.append(compare(_padded_rows(ids, tokens_per_rank), suspicion, with_gradients=False))
    for kind, row in slice_media.media_rows(model, state, vocab_size=vocab_size, tokens_per_rank=PRIMES[0]):
        suspicion = (
            f"(a row with {kind}) Some layer, or what the features pass through, mixes tokens without attention"
        )
        differences.append(compare(row, suspicion, with_gradients=False))
    if was_training:
        model.train()
        suspicion = "(in training mode) Some layer mixes tokens without attention"
        differences.append(compare({"input_ids": ids}, suspicion))
        if differences[-1] is None:
            with fixed_draws():
                differences.append(compare({"input_ids": ids}, suspicion))
    return max(difference for difference in differences if difference is not None)


@torch.no_grad()
def require_router_order(model: nn.Module, state: ParallelState, *, vocab_size: int) -> None:
    """Compares what transformers records of the routers for a row beside another with what it records for the row alone.

    The loss of the routers takes these logits, `(B * S, E)`, for those of one row after the other. Does nothing for a model
    without this loss, and on slices, of which `require_sliceable` compares these logits. Every rank must call this.

    Raises:
        ValueError: those of most tokens differ.
    """
    config = model.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]  # of transformers
    routers = recorded_routers(model) if getattr(config, "output_router_logits", False) else []
    if state.sp > 1 or not routers:
        return
    ids = _random_ids(vocab_size, PRIMES[0]).to(state.data_mesh.device_type)
    modes = {module: module.training for module in model.modules()}
    reshard(model)
    model.eval()
    try:
        with parallel.using(state):
            beside, alone = _recorded_logits(model, routers, ids), _recorded_logits(model, routers, ids[:1])
    except minimal_media.REFUSALS as error:
        reraise_machine_failure(error)
        reshard_after_error(model)
        warnings.warn(
            "Whether the routers take the tokens of several rows row by row is not compared: "
            f"{type(model).__name__.removeprefix('FSDP')} takes no rows of text alone: {_described(error)}",
            stacklevel=2,
        )
        return
    finally:
        for module, mode in modes.items():
            module.training = mode
        reshard(model)
    differing = ""
    for path, expected in alone.items():
        by_token = (beside[path][: len(expected)] - expected).float().abs().amax(-1)
        if not differing and bool(by_token.median() > HALF_PRECISION_TOLERANCE * expected.float().abs().max()):
            differing = path
    is_other = torch.tensor(float(bool(differing)), device=state.data_mesh.device_type)
    if all_reduce(is_other, op=dist.ReduceOp.MAX, operation="compare the order of router logits"):
        raise ValueError(
            f"{type(model).__name__.removeprefix('FSDP')} gives its routers the tokens of several rows in another order than row "
            f"by row, or mixes rows{f' (first in {differing})' * bool(differing)}: its router loss would be that of other tokens. "
            "To fix: train without it (output_router_logits: false), or give each router its tokens row by row."
        )


def _recorded_logits(model: nn.Module, routers: list[tuple[str, nn.Module, int]], ids: Tensor) -> dict[str, Tensor]:
    """The logits `(B * S, E)` of each router, by its path, in the forward of these tokens `(B, S)`."""
    found: dict[str, Tensor] = {}

    def record(_, __, output, path: str, index: int) -> None:
        logits = router_logits(output, index)
        if isinstance(logits, Tensor):
            found[path] = logits.flatten(0, -2)

    hooks = [module.register_forward_hook(partial(record, path=path, index=index)) for path, module, index in routers]
    with contextlib.ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(restored(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled layer would keep these sizes
        model(input_ids=ids, use_cache=False)
    return found


def _random_ids(vocab_size: int, length: int) -> Tensor:
    """Random tokens `(NUM_ROWS, length)`, the same on every rank."""
    return torch.randint(1, vocab_size, (NUM_ROWS, length), generator=torch.Generator().manual_seed(0))


def _tokens_per_rank(model: nn.Module, sp: int) -> int:
    """The length of a slice: of rows longer than a chunk, if the config says that the model has as many positions."""
    positions = num_positions(model.config)  # pyright: ignore[reportArgumentType]  # of transformers
    length = next(prime for prime in PRIMES if prime * sp > CHUNK)
    return length if positions is not None and length * sp <= positions else PRIMES[0]


def _text_rows(ids: Tensor, tokens_per_rank: int, *, packed: bool) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Rows of text, each with what is suspected where slices of it differ."""
    yield {"input_ids": ids}, "Some layer mixes tokens without attention"
    if packed:
        positions = torch.arange(ids.shape[1])[None] % tokens_per_rank
        yield (
            {"input_ids": ids[:1], "position_ids": positions},
            "(a packed batch) Some layer does not pass cu_seq_lens_q to its attention",
        )


def _padded_rows(ids: Tensor, tokens_per_rank: int) -> dict[str, Tensor]:
    """Rows that end with padding: half a slice, and a slice and a few tokens; in half precision most tokens must differ."""
    mask = torch.ones_like(ids)
    mask[0, -(tokens_per_rank // 2) :] = 0
    mask[-1, -tokens_per_rank - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _generator_states() -> Tensor:
    """The states of torch's random number generators: what is drawn moves them."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state()]) if torch.cuda.is_initialized() else state


def _require_equal_logits(
    model: nn.Module,
    state: ParallelState,
    batch: dict[str, Tensor],
    suspicion: str,
    *,
    with_gradients: bool = True,
) -> float | None:
    """The largest relative difference; None if the model draws random numbers, so that nothing can be compared."""
    # All ranks of a group compute the full sequence; experts stay sharded.
    unsliced_state = replace(state, config=replace(state.config, dp_shard=state.config.num_shards, sp=1))
    real_tokens = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    layers = LayerComparison(model, state, batch["input_ids"], real_tokens.to(state.data_mesh.device_type))
    run = partial(_logits, model, batch, with_gradients=with_gradients)
    name = type(model).__name__.removeprefix("FSDP")
    # Both start from the same state: what the first forward keeps, or counts, is that of a slice then. The second shows it if
    # it is used before it is kept.
    times = 2 if with_gradients else 1
    try:
        with layers.recorded(), _trial(model):
            states_before = _generator_states()
            full = [run(unsliced_state) for _ in range(times)][-1]
            is_random = not torch.equal(states_before, _generator_states())
    except minimal_media.REFUSALS as error:
        reraise_machine_failure(error)
        without = ", or pass padded=False if no row of yours has padding" if "attention_mask" in batch else ""
        raise ValueError(
            f"Whether {name} computes the same on slices of a sequence (sp={state.sp}) cannot be compared: it does not take a row "
            f"of {batch['input_ids'].shape[1]} tokens with {', '.join(batch)}: {_described(error)} To fix: train it with "
            f"sp=1{without}."
        ) from error
    if model.training:
        any_random = torch.tensor(float(is_random), device=state.data_mesh.device_type)
        if all_reduce(any_random, op=dist.ReduceOp.MAX, operation="compare random states around a forward"):
            return None
    try:
        with layers.compared(), _trial(model):
            sliced = [run(state) for _ in range(times)][-1]
    except minimal_media.REFUSALS as error:
        reraise_machine_failure(error)
        if isinstance(error, ValueError | NotImplementedError):  # a refusal with its own advice
            raise
        raise ValueError(
            f"{name} does not take a slice of a sequence (sp={state.sp}, {', '.join(batch)}): {_described(error)} {suspicion}. "
            "To fix: train it with sp=1, or generate it with the pass for what mixes its tokens."
        ) from error
    return _require_close(full, sliced, layers, state, name, suspicion)


@contextlib.contextmanager
def _trial(model: nn.Module) -> Iterator[None]:
    """`restored`, of the shards: a forward without a backward leaves gathered parameters, whose gradients are others'."""
    reshard(model)
    with restored(model):
        yield
    reshard(model)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}."


def _logits(model: nn.Module, batch: dict[str, Tensor], state: ParallelState, *, with_gradients: bool) -> Tensor:
    """The logits of this rank's slice, `(B, S / sp, V)`; a backward of random gradients as well, if it is asked for."""
    # On the full sequence this is what upstream computes: without position ids the model uses its own, not ours.
    is_upstreams = state.sp == 1 and "position_ids" not in batch
    place: dict[str, Any] = {"sp": state.sp, "sp_rank": state.sp_rank if state.sp > 1 else 0}
    part = batch if is_upstreams else slice_batch(batch, **place)
    device = state.data_mesh.device_type
    inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in part.items()}
    with parallel.using(state), torch.set_grad_enabled(with_gradients):
        logits = model(**inputs, **_num_items(model, device), use_cache=False).logits
        if logits.requires_grad:
            logits.backward(random_slice(logits, **place, seed=0))
            unused.drop_unused_gradients(model)  # as a step ends: which parameters it used is forgotten
    return logits.detach()


def _num_items(model: nn.Module, device: str) -> dict[str, Tensor]:
    """The number of labels of a step, which a run passes to a model that takes it."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes_it = any(one.name == "num_items_in_batch" or one.kind is one.VAR_KEYWORD for one in parameters)
    return {"num_items_in_batch": torch.tensor(1, device=device)} if takes_it else {}


def _require_close(
    full: Tensor, sliced: Tensor, layers: LayerComparison, state: ParallelState, name: str, suspicion: str
) -> float:
    """The largest relative difference of logits; raises ValueError if that, or one inside the layers, is not rounding."""
    expected, real_tokens = (part.chunk(state.sp, dim=1)[state.sp_rank] for part in (full, layers.real_tokens))
    deviation = (sliced - expected)[real_tokens].float().abs()
    largest = full[layers.real_tokens].float().abs().max().clamp(min=1e-12)
    difference = deviation.max() / largest if len(deviation) else largest.new_zeros(())
    difference = difference.nan_to_num(nan=float("inf"))  # a MAX reduction may lose a NaN of one rank
    differences = torch.stack([difference, difference.new_tensor(layers.worst_ratio)])
    differences = all_reduce(differences, op=dist.ReduceOp.MAX, operation="compare slices with the full sequence")
    worst, worst_ratio = differences.tolist()
    tolerance = TOLERANCE.get(sliced.dtype, HALF_PRECISION_TOLERANCE)
    if worst <= tolerance and worst_ratio <= 1:
        return worst
    differing, by = "logits", f"{worst:.1e} of the largest, more than {tolerance:.0e}"
    if worst <= tolerance:
        differing, by = layers.first_kind, f"{worst_ratio:.1e} times the largest difference that rounding explains"
    place = f" ({layers.first_kind} first in {layers.first_module})" if layers.first_module else ""
    raise ValueError(
        f"{name} computes other {differing} on slices of a sequence (sp={state.sp}) than on the full sequence: they differ by "
        f"{by}{place}. {suspicion}, or attends without transformers' attention interface. To fix: train it "
        "with sp=1, or generate it with the pass for its mixer."
    )
