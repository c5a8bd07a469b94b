"""Rows with the smallest image, video or sound that a model accepts, for the comparison of slices; see `selfcheck.py`.

across      t t t t I I I | I t t t t t t    the placeholders lie where slices meet, more of them on one side (of three or more)
ahead       t I I I I t t | t t t t t t t    the last slice has none: what is counted or asked of placeholders differs
positions   0 1 2 3 4 5 ...                  counted as text: slices and the full sequence get the same ones
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.runtime import minimal_media, parallel
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.media_sizes import AUDIO, IMAGE, VIDEO
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.positions import TOKEN_TYPES

MODALITY_FIELDS = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask")
"""The arguments with the modality of each token."""


class _LanguageModelReached(Exception):
    """A trial has reached the language model."""


def media_rows(
    model: nn.Module, state: ParallelState, *, vocab_size: int, tokens_per_rank: int
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """A modality that the model takes, and a row with one item of it, two rows of each; warns if none is known. Every rank must
    iterate."""
    for kind in (IMAGE, VIDEO, AUDIO):
        features = _features(model, kind)
        if features is None:
            continue
        batches, reason = list[dict[str, Tensor]](), ""
        try:
            batches = _rows(model, features, kind, state, vocab_size=vocab_size, tokens_per_rank=tokens_per_rank)
        except minimal_media.REFUSALS as refusal:
            reraise_machine_failure(refusal)
            reason = " ".join(f"{type(refusal).__name__}: {refusal}".split())[:300]
        lacking = torch.tensor(not batches, dtype=torch.float32, device=state.data_mesh.device_type)
        if not all_reduce(lacking, op=dist.ReduceOp.MAX, operation=f"compare whether ranks have a row with {kind}"):
            yield from ((kind, batch) for batch in batches)
        elif dist.get_rank() == 0:
            warnings.warn(
                f"Slices of a sequence with {kind} are not compared with the full sequence: no small row is known that "
                f"{type(model).__name__} takes. {reason}",
                stacklevel=2,
            )


def _features(model: Any, kind: str) -> Callable[..., Any] | None:
    """`get_<kind>_features` of the model or of a child, with named parameters; heads often have `**kwargs` only."""
    for owner in (model, *model.children()):
        method = getattr(owner, f"get_{kind}_features", None)
        if method is None:
            continue
        kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
        if kinds - {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            return method
    return None


def _rows(
    model: Any, features: Any, kind: str, state: ParallelState, *, vocab_size: int, tokens_per_rank: int
) -> list[dict[str, Tensor]]:
    owner, weight = features.__self__, next(model.parameters())
    like = torch.empty(0, dtype=weight.dtype, device=state.data_mesh.device_type)
    minimal = minimal_media.minimal_inputs(features, sp=state.sp, like=like)
    if minimal is None:
        raise ValueError(minimal_media.refusal(features, sp=state.sp, like=like))
    parameters = inspect.signature(model.forward).parameters
    if missing := minimal.keys() - parameters.keys():
        raise ValueError(f"the forward has no arguments {sorted(missing)}")
    generator = torch.Generator().manual_seed(1)
    media = {
        name: torch.randn(value.shape, generator=generator).to(value) if value.is_floating_point() else value
        for name, value in minimal.items()
    }
    copy = _trial_copy(owner, like)
    with torch.no_grad(), parallel.using(None):
        count = _num_feature_rows(
            getattr(copy, features.__name__)(**media), owner.config.get_text_config().hidden_size
        )
        # Room to lie in the first half, and for all slices but the last to hold them, each with a token of text around them.
        share = max(-(-2 * (count + 1) // state.sp), -(-(count + 1) // max(state.sp - 1, 1)) + 1)
        length = max(tokens_per_rank, share) * state.sp
        text = _text(owner.config, vocab_size, length, generator)
        refusal: Exception = ValueError(f"the config of {type(owner).__name__} names no placeholder token for {kind}")
        for placeholder in _placeholders(owner.config, kind):
            batches: list[dict[str, Tensor]] = []
            middle = state.sp // 2 * (length // state.sp)  # where slices meet; a row for one rank has no such place
            for start in (max(middle - max(count * 3 // 4, 1), 1), 1):
                ids, types = text.clone(), torch.zeros_like(text)
                ids[:, start : start + count], types[:, start : start + count] = placeholder, TOKEN_TYPES[kind]
                batch = {"input_ids": ids, "position_ids": torch.arange(length)[None], **media}
                batches.append(batch | {name: types for name in MODALITY_FIELDS if name in parameters})
            try:
                copy(**{name: value.to(like.device) for name, value in batches[0].items()}, use_cache=False)
                refusal = ValueError(f"{type(owner).__name__} does not call its language model")
            except _LanguageModelReached:
                return batches
            except minimal_media.REFUSALS as error:
                reraise_machine_failure(error)
                refusal = error
    raise refusal


def _placeholders(config: Any, kind: str) -> list[int]:
    """The ids of placeholders that a modality may have: video frames may be written with an image's."""
    kinds = [kind, IMAGE] if kind == VIDEO else [kind]
    values = [getattr(config, f"{name}_{ending}", None) for name in kinds for ending in ("token_id", "token_index")]
    return [value for value in values if type(value) is int]


def _text(config: Any, vocab_size: int, length: int, generator: torch.Generator) -> Tensor:
    """Random ids `(1, length)` that the config does not name: placeholders, starts and ends of media."""
    parts = (config, config.get_text_config())
    special_ids = {
        value
        for part in parts
        for name, value in vars(part).items()
        if type(value) is int and name.endswith(("_token_id", "_token_index"))
    }
    ids = torch.tensor([token for token in range(1, min(vocab_size, 10_000)) if token not in special_ids])
    return ids[torch.randint(len(ids), (1, length), generator=generator)]


def _num_feature_rows(output: Any, width: int) -> int:
    """The number of feature rows."""
    features = getattr(output, "pooler_output", None)
    tensors = minimal_media.feature_tensors(output if features is None else features)
    return sum(tensor.numel() for tensor in tensors) // width


def _trial_copy(owner: Any, like: Tensor) -> Any:
    """A copy with constant weights, without hooks and collectives, whose language model has no layers and is not run."""
    copy = minimal_media.bare_copy(owner, like)
    decoder = owner.language_model if hasattr(owner, "language_model") else owner.get_decoder()
    path = next(path for path, module in owner.named_modules() if module is decoder)
    shell = object.__new__(type(decoder))
    vars(shell).update(vars(decoder))
    for name, value in vars(decoder).items():
        if "_hooks" in name and value is not None:
            vars(shell)[name] = type(value)()
    children = {name: part for name, part in decoder.named_children() if not isinstance(part, nn.ModuleList)}
    vars(shell)["_modules"] = {name: minimal_media.bare_copy(part, like) for name, part in children.items()}
    vars(shell)["forward"] = _raise_reached
    parent, _, name = path.rpartition(".")
    copy.get_submodule(parent)._modules[name] = shell
    return copy


def _raise_reached(*_args: object, **_kwargs: object) -> None:
    raise _LanguageModelReached
