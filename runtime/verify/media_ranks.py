"""Multimodal models on real ranks against upstream's own class on one.

    patchgen verify qwen3_vl --ranks 4 --sp 2 --fsdp

Every batch is given to upstream's class in one process, whole, and to the generated class on gloo ranks: its samples
divided over the ranks that hold batches, the tokens of each over the ranks that share one. Compared are the loss and
every gathered gradient.

    images    several per sample, across the boundary of two slices, on one slice only, and a sample without
    video, audio, sound, mixed, text, packed
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from patchgen.runtime import model_calls, parallel, seams
from patchgen.runtime.document_rows import Separated
from patchgen.runtime.parallel import batch, loss, media, sharding
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify.conditioning import ROUNDING, moved_gradients, relative_difference
from patchgen.runtime.verify.media import AUDIO
from patchgen.runtime.verify.media_samples import Sample
from patchgen.runtime.verify.ranks import CaseFailed, RankPool
from patchgen.runtime.verify.yardstick import NotApplicable, Subject, Yardstick, find, state_of, yardstick

TOLERANCE = 1e-5
WATCHDOG = 60.0  # seconds: a batch that takes longer on the ranks hangs
MIXED_RANKS = "one modality each"
PACKED = "packed"


@dataclass(frozen=True)
class RankResult:
    """One batch on the ranks against one rank; relative differences, `reason` empty where everything agrees."""

    case: str
    loss: float = math.nan
    gradient: float = math.nan
    parameter: str = ""
    seconds: float = 0.0
    reason: str = ""
    towers: dict[str, str] = field(default_factory=dict)
    """How each tower that ran was computed on the ranks that share a sequence."""


# ------------------------------------------------------------------------------------------ on every rank


def case_names(model: Subject, head: str, *, has_several_batches: bool = False) -> list[str]:
    """The batches of a model; runs on every rank, the answer is the same.

    Args:
        has_several_batches: whether ranks may hold batches of different modalities, if the model takes any.
    """
    known = yardstick(model, head)
    return [*known.batches(), PACKED, *([MIXED_RANKS] if has_several_batches and known.builder.layouts else [])]


def compare(
    model: Subject, head: str, name: str, *, sp: int, fsdp: bool, ep: int = 1, training: bool = True
) -> dict[str, Any]:
    """One batch on this layout against one rank; runs on every rank, with the same answer on all."""
    return compare_with(yardstick(model, head), name, sp=sp, fsdp=fsdp, ep=ep, training=training)


def compare_with(
    known: Yardstick, name: str, *, sp: int, fsdp: bool, ep: int = 1, training: bool = True
) -> dict[str, Any]:
    """`compare`, of models that are built."""
    started = time.perf_counter()
    state = state_of(sp, ep)
    whole, mine = inputs_of(known, name, state)
    one_rank = functools.partial(known.one_rank, whole, is_one_row=name == PACKED, training=training)
    expected_loss, expected = one_rank()
    generated = known.generated()
    if fsdp:
        sharding.shard_model(generated, state)
    kernels = known.seams
    got_loss, got = on_ranks(generated, mine, state, pad=known.pad, fsdp=fsdp, training=training, kernels=kernels)
    row = {"case": name, "seconds": time.perf_counter() - started, "towers": media.describe(generated, sp)}
    return row | differences(got_loss, got, expected_loss, expected, _moved(known, one_rank, expected))


def _moved(known: Yardstick, one_rank: Callable[[], tuple], expected: Mapping[str, Tensor]) -> Callable:
    return lambda least: moved_gradients(known.model, lambda _model: one_rank(), expected, least)


def compare_all(model: Subject, head: str, *, sp: int, ep: int, separates: Separated) -> dict[str, Any]:
    """Every batch of a model, until one differs: the worst of all; runs on every rank.

    Where ranks hold batches of their own, a step for each modality, and one for text, on every rank in turn, follows.

    Args:
        separates: whether documents are computed in rows of their own.
    """
    known = yardstick(model, head)
    known.separates = separates
    rows = []
    for name in case_names(model, head, has_several_batches=dist.get_world_size() > sp):
        if name == MIXED_RANKS:
            rows += mixed_steps(model, head, sp=sp, ep=ep, num_steps=len(known.builder.layouts) + 1)
        else:
            with contextlib.suppress(NotApplicable):
                rows.append(compare_with(known, name, sp=sp, ep=ep, fsdp=True))
        if any(row.get("reason") for row in rows):
            break
    reason = next((f"{row['case']}: {row['reason']}" for row in rows if row.get("reason")), "")
    worst = {"loss": max(row["loss"] for row in rows), "gradients": max(row["gradient"] for row in rows)}
    return worst | {"reason": reason}


def mixed_steps(
    model: Subject, head: str, *, sp: int = 1, ep: int = 1, num_steps: int = 10, fsdp: bool = True
) -> list[dict[str, Any]]:
    """Each batch index its own modality, optimizer steps in a row; runs on every rank.

    With four ranks and an omni model: images, video, audio and text only. In every step the gradients of the ranks are
    compared with those of one rank that takes the whole batch from the same weights.
    """
    known = yardstick(model, head)
    state = state_of(sp, ep)
    generated = known.generated()
    if fsdp:
        sharding.shard_model(generated, state)
    optimizer = torch.optim.SGD(generated.parameters(), lr=1e-2)
    start = {name: tensor.clone() for name, tensor in known.model.state_dict().items()}
    rows = []
    try:
        for number in range(num_steps):
            started = time.perf_counter()
            samples = one_modality_each(known, state.config.num_batches, number)
            # Some models tell images and videos by nothing but the batch that they are in: upstream takes no mixed one.
            refused = known.refusal("mixed", samples)
            pieces = [[sample] for sample in samples] if refused else [samples]
            whole = [dict(known.builder.case("mixed", piece).batch) for piece in pieces]
            mine = dict(known.builder.case("mixed", [samples[state.batch_index]]).batch)
            mine["position_ids"] = known.positions(mine)
            known.model.load_state_dict(known.correspondence.undo(generated, _whole_state(generated)))
            one_rank = functools.partial(known.one_rank, whole)
            expected_loss, expected = one_rank()
            got_loss, got = on_ranks(generated, mine, state, pad=known.pad, fsdp=fsdp, kernels=known.seams)
            optimizer.step()
            optimizer.zero_grad()
            row = differences(got_loss, got, expected_loss, expected, _moved(known, one_rank, expected))
            rows.append({"case": f"step {number}", "seconds": time.perf_counter() - started} | row)
    finally:
        known.model.load_state_dict(start)
    return rows


def one_modality_each(known: Yardstick, num_batches: int, number: int) -> list[Sample]:
    """A sample for each batch index: the model's modalities, then text only, moved on by one each step."""
    kinds = [*known.builder.layouts, None]
    samples = []
    for rank in range(num_batches):
        kind = kinds[(rank + number) % len(kinds)]
        items = [] if kind is None else [known.builder.maker.item(kind, number % 2)]
        samples.append(known.builder.sample([3 + rank, *items, 5]))
    return samples


def _whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def differences(
    got_loss: float,
    got: dict[str, Tensor],
    expected_loss: float,
    expected: dict[str, Tensor],
    moved: Callable[[float], Mapping[str, float]] = lambda _least: {},
) -> dict[str, Any]:
    """Loss and the worst gradient, relative, and why they do not agree.

    Args:
        moved: how far rounding alone moves each gradient (`conditioning.py`): asked where one is beyond the bar.
    """
    # Some gradients are sums that cancel (biases of keys, decay rates): what is left is rounding. Nothing is asked to be
    # closer than 2e-7 of the largest gradient of all, which is two roundings of fp32.
    least = 2e-2 * max(float(gradient.abs().max()) for gradient in expected.values())
    found = {name: relative_difference(got.get(name), gradient, least) for name, gradient in expected.items()}
    found |= {
        parameter: math.inf
        for parameter, gradient in got.items()
        if parameter not in expected and bool(gradient.any())
    }
    worst = max(found, key=found.__getitem__)
    beyond = {name: difference for name, difference in found.items() if not difference <= TOLERANCE}
    if any(name in expected for name in beyond):
        bars = moved(least)
        beyond = {name: far for name, far in beyond.items() if not far <= ROUNDING * bars.get(name, 0.0)}
    row = {"loss": abs(got_loss - expected_loss) / abs(expected_loss), "gradient": found[worst], "parameter": worst}
    if not row["loss"] <= TOLERANCE:
        row["reason"] = f"loss {got_loss:.7f}, upstream {expected_loss:.7f}"
    elif beyond:
        furthest = max(beyond, key=beyond.__getitem__)
        row["reason"] = f"gradient of {furthest} differs by {beyond[furthest]:.1e}"
    return row


def on_ranks(
    model: nn.Module,
    inputs: dict[str, Any],
    state: ParallelState,
    *,
    pad: int,
    fsdp: bool,
    training: bool = True,
    kernels: Mapping[str, str] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """A forward and backward of this rank's part of a batch; loss and gradients summed over the ranks.

    Args:
        kernels: implementations of seams by name; the others are eager.
    """
    mine = batch.slice_batch(inputs, sp=state.sp, sp_rank=state.sp_rank, pad_token_id=pad)
    items = loss.count_items([mine], "cpu")
    model.train(training)
    with parallel.using(state), loss.step(items), seams.using(**(kernels or {})):
        share = model(**mine, num_items_in_batch=items, use_cache=False).loss
        share.backward()
    total = share.detach().clone()
    dist.all_reduce(total)
    gradients = {}
    for name, parameter in model.named_parameters():
        if fsdp:
            if isinstance(parameter.grad, DTensor):
                gradients[name] = parameter.grad.full_tensor().clone()
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)  # what a step of an optimizer takes is that of all ranks
        gradients[name] = parameter.grad.clone()
    return float(total), gradients


def inputs_of(known: Yardstick, name: str, state: ParallelState) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What one rank is given, and the samples of it that the ranks of this SP group hold, with their positions.

    One rank takes the batch as a whole; where upstream's features of an item depend on what else is in its batch, the
    batches of the ranks one after the other. Chunks of sounds are padded to the longest of a batch, and convolutions see
    that padding; a batch norm takes its statistics over a batch.
    """
    if name == PACKED:
        return _packed_inputs(known, state)
    samples = known.batches()[name]
    # Every batch index gets samples: what is missing is filled up with text.
    while len(samples) < state.config.num_batches:
        samples = (*samples, known.builder.sample([9]))
    pieces = divided(samples, state.config.num_batches)
    samples = [sample for piece in pieces for sample in piece]
    has_sound = any(AUDIO in (item.kind, *(part.kind for part in item.parts)) for one in samples for item in one.items)
    is_by_batch = has_sound or normalises_by_batch(known.model)
    whole = [dict(known.builder.case(name, piece).batch) for piece in (pieces if is_by_batch else [samples])]
    mine = dict(known.builder.case(name, pieces[state.batch_index]).batch)
    mine["position_ids"] = known.positions(mine)
    return whole, mine


def _packed_inputs(known: Yardstick, state: ParallelState) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The samples of the richest batch, padded for one rank and in one row for many; upstream does not keep documents
    apart in every kind of layer. All batch indices hold the same row, and one of them its labels."""
    batches = known.batches()
    samples = next(batches[name] for name in ("mixed", "images", "audio", "video", "text") if name in batches)
    whole = dict(known.builder.case("mixed", samples).batch)
    case = known.builder.packed(whole, samples)
    if case is not None:
        whole, mine = [whole], dict(case.batch)
    elif whole.get("use_audio_in_video") or known.positions(whole).ndim != 2:
        raise NotApplicable(
            "a row of several samples needs multimodal positions that upstream does not compute for one"
        )
    else:
        positions = torch.cat([torch.arange(len(sample.ids)) for sample in samples])[None]
        mine = dict(known.builder.in_one_row(whole, positions).batch)
        # Padding changes what upstream's overlays see: each sample by itself. Sounds are padded to the longest of a batch.
        alone = [dict(known.builder.case("mixed", [sample]).batch) for sample in samples]
        is_by_batch = set(known.builder.layouts) == {AUDIO} or normalises_by_batch(known.model)
        whole = [whole] if is_by_batch else alone
    if state.batch_index:
        mine["labels"] = torch.full_like(mine["labels"], batch.IGNORED)
    return whole, mine


def normalises_by_batch(model: nn.Module) -> bool:
    """Whether training normalises by the statistics of a batch: the features of an item are not its own."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def divided(samples: Sequence[Sample], num_batches: int) -> list[list[Sample]]:
    """The samples of each batch index."""
    shares = torch.arange(len(samples)).tensor_split(num_batches)
    return [[samples[place] for place in places.tolist()] for places in shares]


# --------------------------------------------------------------------------------------------- all of it


def verify_on_ranks(
    model: Subject,
    pool: RankPool,
    *,
    sp: int,
    fsdp: bool,
    ep: int = 1,
    head: str | None = None,
    cases: Sequence[str] | None = None,
    training: bool = True,
) -> list[RankResult]:
    """Proves a generated model on gloo ranks; prints nothing.

    Args:
        model: it, its name, or the folder of one outside `generated_models/`.
        pool: processes on this machine.
        sp: how many of them share a sequence.
        fsdp: whether parameters are sharded over all ranks; otherwise every rank holds all.
        ep: how many of them share the experts; they are divided by FSDP2.
        head: the class to prove; default: the first head.
        cases: names of batches; default: all that upstream takes, and ten steps with one modality per rank.
        training: whether both are in training mode.
    """
    head = head or find(model).heads[0]
    head_class = getattr(find(model).load(), head)
    if local := loss.why_not_additive(head_class):
        return [RankResult("its loss", reason=local)]
    if sp > 1 and not model_calls.takes_documents(head_class):
        return [RankResult("its documents", reason=model_calls.no_slices(head, sp))]
    options: dict[str, Any] = {"sp": sp, "ep": ep, "fsdp": fsdp}
    results = []
    try:
        several = pool.world > sp
        names = cases or pool.run(case_names, model, head, has_several_batches=several, timeout=4 * WATCHDOG)[0]
    except CaseFailed as failure:
        return [RankResult("its batches", reason=str(failure))]
    for name in names:
        try:
            if name == MIXED_RANKS:
                results.append(_together(name, pool.run(mixed_steps, model, head, **options, timeout=WATCHDOG)[0]))
                continue
            found = pool.run(compare, model, head, name, **options, training=training, timeout=WATCHDOG)[0]
            results.append(RankResult(**found))
        except CaseFailed as failure:
            if NotApplicable.__name__ not in str(failure):
                results.append(RankResult(name, reason=str(failure)))
    return results


def _together(name: str, rows: Sequence[dict[str, Any]]) -> RankResult:
    """Steps as one result: the worst of each figure."""
    worst = max(rows, key=lambda row: row["gradient"])
    reasons = [f"{row['case']}: {row['reason']}" for row in rows if row.get("reason")]
    return RankResult(
        case=name,
        loss=max(row["loss"] for row in rows),
        gradient=worst["gradient"],
        parameter=worst["parameter"],
        seconds=sum(row["seconds"] for row in rows),
        reason="; ".join(reasons[:3]),
    )
