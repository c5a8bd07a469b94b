"""Our attention names for transformers: any backend, packed sequences, and Ulysses sequence parallelism around it.

    from patchgen.runtime import attention

    attention.register()
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="patchgen_flash_attention_4")

| name                           | runs on | beyond causal, full and packed attention                   |
| ------------------------------ | ------- | ---------------------------------------------------------- |
| `patchgen_eager`               | any     | window, soft cap, sinks, dropout, padding, upstream masks, |
|                                |         | two sequences, sinks of each token, float32                |
| `patchgen_sdpa`                | any     | window, dropout, padding, upstream masks, two sequences,   |
|                                |         | float32                                                    |
| `patchgen_flex_attention`      | any     | window, soft cap, sinks (GPU), padding, upstream masks,    |
|                                |         | float32; trains on a GPU only                              |
| `patchgen_flash_varlen`        | GPU     | window (torch's own varlen_attn)                           |
| `patchgen_flash_attention_2`   | GPU     | window, soft cap, dropout                                  |
| `patchgen_flash_attention_3`   | GPU     | window, soft cap                                           |
| `patchgen_flash_attention_4`   | GPU     | window, soft cap, sinks                                    |
| `patchgen_by_layer`            | any     | each call by the fastest of these that has what it asks    |

All names share one contract, flash-attention's: structure comes from `is_causal`, `sliding_window` and
`cu_seq_lens_q` (of the whole sequence), not from a mask tensor. So nothing of size S x S exists unless the backend
builds it, and a slice of a sequence needs no slice of a mask. What a backend cannot do it refuses by name.

A model that attends by its own code takes the mask for the tensor that it would be (`attention_masks.py`). What a model
lays over its mask, keys that an indexer selected or biases, means the same under every name (`attention_overlays.py`).

    B rows   S tokens per row   s = S / sp of this rank   N heads   D head size
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.kernels import choices
from patchgen.runtime import model_calls, parallel, whole_attention
from patchgen.runtime.attention_backends import BACKENDS, Backend
from patchgen.runtime.attention_calls import FEATURES, Attention, Documents, of_dtype
from patchgen.runtime.attention_masks import MaskStructure, UnsupportedError, mask_function
from patchgen.runtime.attention_overlays import added, cuts, within_documents
from patchgen.runtime.parallel import sequence
from patchgen.runtime.parallel.media import is_replicated
from patchgen.runtime.tensor_cache import TensorCache, longest

__all__ = [
    "BY_LAYER",
    "FEATURES",
    "ORDER",
    "UnsupportedError",
    "attention_function",
    "choose",
    "lacks",
    "names",
    "recording",
    "register",
]

BY_LAYER = "patchgen_by_layer"
"""The name under which each call gets the fastest attention that has what it asks for. There is no `flash` in it: upstream
decides by that whether masks in chunks are drawn at all."""

# Fastest first, as measured in docs/parallel.md; the formula, which has every feature and runs anywhere, comes last.
ORDER = (
    "patchgen_flash_attention_4",
    "patchgen_flash_attention_3",
    "patchgen_flash_attention_2",
    "patchgen_flash_varlen",
    "patchgen_sdpa",
    "patchgen_flex_attention",
    "patchgen_eager",
)


def names() -> tuple[str, ...]:
    """The registered names."""
    return (*BACKENDS, BY_LAYER)


def register() -> None:
    """Registers every backend with transformers' attention and mask interfaces; more than once is harmless."""
    from transformers import masking_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in names():
        ALL_ATTENTION_FUNCTIONS.register(name, attention_function(name, BACKENDS.get(name)))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask_function)
    search = masking_utils.find_packed_sequence_indices
    if not hasattr(search, "knows_patchgen"):
        masking_utils.find_packed_sequence_indices = model_calls.asks_the_call(search)
    accept_names()


def accept_names() -> None:
    """Makes model classes take our names as they are.

    A name with `flash` in it is otherwise looked up as a kernel repository when the model is built, and models with a
    list of compatible flash implementations replace it silently. Both happen in one method, which is wrapped here; a
    name without `flash` would avoid that, but vision towers decide by it whether to hand over packed lengths.
    """
    from transformers.modeling_utils import PreTrainedModel

    original = PreTrainedModel._check_and_adjust_attn_implementation
    if getattr(original, "knows_patchgen", False):
        return

    @wraps(original)
    def check(self, attn_implementation, *args, **kwargs):
        if not isinstance(attn_implementation, str) or attn_implementation not in names():
            return original(self, attn_implementation, *args, **kwargs)
        reason = None if attn_implementation == BY_LAYER else BACKENDS[attn_implementation].unavailable()
        if reason is not None:
            usable = [name for name, backend in BACKENDS.items() if backend.unavailable() is None]
            raise ImportError(
                f"attn_implementation='{attn_implementation}' cannot run here: {reason}. Usable: {', '.join(usable)}."
            )
        model_calls.note_calls(self)
        self.register_forward_pre_hook(whole_attention.prepare)
        return _with_own_class(type(self), attn_implementation)

    vars(check)["knows_patchgen"] = True
    PreTrainedModel._check_and_adjust_attn_implementation = check


def _with_own_class(model_class: type[nn.Module], name: str) -> str:
    """The name under which a model finds its attention: where its file has a table of attention classes by upstream's
    names, ours means the class of upstream's eager name, which attends by its own code with the mask that it is given.

    Where the table has a class for flash names as well, a model that was built under one would take that class, whose
    kernel is chosen by upstream's names: it gets the name of the formula instead.
    """
    for table in vars(sys.modules[model_class.__module__]).values():
        if not isinstance(table, dict) or not isinstance(table.get("eager"), type):
            continue
        if "flash" in name and any(isinstance(key, str) and key.startswith("flash") for key in table):
            name = "patchgen_eager"
        if issubclass(table["eager"], nn.Module):
            table.setdefault(name, table["eager"])
    return name


# ------------------------------------------------------------------------------------------- choosing a backend


def lacks(name: str, asked: Collection[str], *, device_type: str | None = None, head_size: int = 0) -> tuple[str, ...]:
    """The features of `asked` that an attention does not have, and heads of `head_size` if they are too large for it.

    Args:
        asked: names out of `attention_backends.FEATURES`.
        device_type: where it would run; default: "cuda" if there is such a device.
        head_size: of the largest heads.

    Raises:
        ValueError: a feature that does not exist.
    """
    unknown = sorted(set(asked) - set(FEATURES))
    if unknown:
        raise ValueError(f"Unknown attention feature {unknown}. Known: {', '.join(FEATURES)}.")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    able, largest = BACKENDS[name].features_on(device_type), BACKENDS[name].max_head
    too_large = (f"heads of {head_size}",) if largest is not None and head_size > largest else ()
    return tuple(feature for feature in FEATURES if feature in asked and feature not in able) + too_large


def choose(asked: Collection[str] = (), *, device_type: str | None = None, head_size: int = 0) -> str:
    """The fastest attention that can train here and has all features; `patchgen_eager` has every one."""
    return next(name for name in ORDER if not _against(name, asked, device_type, head_size))


def passed_over(name: str, asked: Collection[str], *, head_size: int = 0) -> dict[str, str]:
    """Why each attention that is faster than `name` is not taken here for a model that asks for this."""
    faster = ORDER[: ORDER.index(name)]
    reasons = {other: _against(other, asked, None, head_size) for other in faster}
    return {other: reason for other, reason in reasons.items() if reason}


def _against(name: str, asked: Collection[str], device_type: str | None, head_size: int) -> str:
    """Why an attention cannot train this here; "" if it can."""
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    lacking = lacks(name, asked, device_type=device_type, head_size=head_size)
    if lacking:
        return f"cannot do {' and '.join(lacking)}"
    if device_type != "cuda" and not BACKENDS[name].has_cpu_backward:
        return "has no backward on the CPU"
    return BACKENDS[name].unavailable() or ""


Recorded = dict[nn.Module, set[tuple[str, ...]]]
"""For each module that attended, the features of each of its calls."""

_RECORDINGS: list[Recorded] = []


@contextlib.contextmanager
def recording() -> Iterator[Recorded]:
    """Collects what calls of our attention ask for; all compute by the formula meanwhile, and none refuses."""
    asked: Recorded = {}
    _RECORDINGS.append(asked)
    try:
        yield asked
    finally:
        _RECORDINGS[:] = [one for one in _RECORDINGS if one is not asked]


# -------------------------------------------------------------------------------------------- attention


def attention_function(name: str, backend: Backend | None) -> Callable:
    """The attention function of one name, as transformers calls it; None: each call gets the backend for what it asks.

    It takes query, key, value `(B, N, s, D)` of this rank and returns `((B, s, N_q, D_v), None)`.
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | MaskStructure | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        where = type(module).__name__
        state = parallel.sequence_parallel_state() if not is_replicated(module) else None
        size = state.sp if state is not None else 1
        q, k, v = (states.transpose(1, 2) for states in (query, key, value))
        keys = k.shape[1] * size
        if isinstance(attention_mask, Tensor) and attention_mask.shape[-1] > keys:  # with one for a token to come
            attention_mask = attention_mask[..., :keys]
        request = Attention(
            causal=_is_causal(attention_mask, is_causal, module),
            scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
            softcap=softcap,
            sinks=_sinks(s_aux if s_aux is not None else sinks, heads=query.shape[1]),
            dropout=dropout,
            is_cross=q.shape[1] != k.shape[1],
            **_structure(attention_mask, sliding_window, cu_seq_lens_q, max_length_q, where=where),
        )
        more = {argument: kwargs[argument] for argument in added(kwargs)}
        if request.is_cross or more or "sinks of each token" in request.asks_for:
            _require_whole(request, size, more, where)
        asked = tuple(dict.fromkeys((*request.asks_for, *(("overlays",) if more else ()))))
        used = _serving(name, backend, asked, module, q, v)
        if request.overlay is not None:
            bounds = request.documents.bounds if request.documents is not None else None
            form = _overlay(attention_mask, bounds, q, size, where, as_blocks=used.takes_blocks and not more)
            request = replace(request, overlay=form)
        if more:
            request = replace(request, overlay=cuts(request, q, k, more, attention_mask, module))
        if request.documents is not None and (size > 1 or (request.causal and not torch.compiler.is_compiling())):
            require_whole_lengths(request.documents, len(q) * q.shape[1] * size, causal=request.causal, where=where)
        if state is None:
            return used.function(q, k, v, request).contiguous(), None
        if hasattr(request.sinks, "full_tensor"):
            raise ValueError("Attention sinks are still sharded: the attention module must be inside an FSDP2 unit.")

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            return used.function(q, k, v, replace(request, sinks=sinks))

        return sequence.attend_over_heads(q, k, v, request.sinks, attend, state, where=where).contiguous(), None

    return forward


def _serving(
    name: str, backend: Backend | None, asked: tuple[str, ...], module: nn.Module, q: Tensor, v: Tensor
) -> Backend:
    """What computes one call: the backend of the name, if it can, or the fastest that can; eager while calls are recorded."""
    where, needed = type(module).__name__, asked + of_dtype(q.dtype)
    for recorded in _RECORDINGS:  # of small forms, in fp32: the dtype of a run is not theirs to say
        recorded.setdefault(module, set()).add(asked)
    if _RECORDINGS:
        return BACKENDS["patchgen_eager"]
    if backend is None:
        taken = _for_call(needed, q.device.type, max(q.shape[-1], v.shape[-1]))
        choices.record("attention", f"{taken} in {where}{''.join(f', {feature}' for feature in asked)}", q[:, :, 0])
        return BACKENDS[taken]
    require_features(name, needed, where, q.device.type)
    return backend


@torch.compiler.assume_constant_result
def _for_call(asked: tuple[str, ...], device_type: str, head_size: int) -> str:
    """The fastest attention for one call; compiled code holds its answer, for what is asked is known when it is traced."""
    return choose(asked, device_type=device_type, head_size=head_size)


# One host sync per batch, not per layer, where lengths did not come as numbers.
_total = TensorCache(lambda cu_seq_lens: int(cu_seq_lens[-1]))
# The totals that the device was told to check.
_asserted: TensorCache[set[int]] = TensorCache(lambda _cu_seq_lens: set())


def _sinks(logits: Tensor | None, *, heads: int) -> Tensor | None:
    """One for each head as `(N_q,)`, whatever shape the model keeps them in; those of each token stay as they are."""
    return logits.reshape(-1) if logits is not None and logits.numel() == heads else logits


def _is_causal(mask: object, asked: bool | None, module: nn.Module) -> bool:
    """Whether no token sees a later one: as the mask was drawn, for upstream's formula reads nothing else; without a
    mask, as the module says."""
    if isinstance(mask, MaskStructure) and mask.causal is not None:
        return mask.causal
    return asked if asked is not None else getattr(module, "is_causal", True)


def _structure(
    mask: Tensor | MaskStructure | None,
    window: int | None,
    cu_seq_lens: Tensor | None,
    max_length: int | Tensor | None,
    *,
    where: str,
) -> dict[str, Any]:
    """The `window`, `documents`, `padding` and `overlay` of a call; the overlay is drawn when all else is known."""
    if mask is not None and not isinstance(mask, MaskStructure):
        documents = _documents(cu_seq_lens, max_length) if cu_seq_lens is not None else None
        return {"overlay": mask, "documents": documents}
    if mask is None:
        documents = _documents(cu_seq_lens, max_length) if cu_seq_lens is not None else None
        return {"window": window, "documents": documents}
    bounds = mask.bounds(cu_seq_lens, where)
    documents = _documents(bounds, max_length) if bounds is not None else None
    if mask.is_overlay:
        return {"overlay": mask, "documents": documents}
    if bounds is not None and mask.padding is not None:
        raise ValueError(f"{where} got both cu_seq_lens_q and a padding mask: a packed batch has no padding.")
    window = window if window is not None else mask.window
    return {"window": window, "documents": documents, "padding": mask.padding}


def _overlay(mask: Any, bounds: Tensor | None, q: Tensor, size: int, where: str, *, as_blocks: bool) -> object:
    """Upstream's own mask within the documents, in the form that a backend takes."""
    if isinstance(mask, MaskStructure):
        return mask.blocks(bounds) if as_blocks else mask.dense(bounds)
    if size > 1 and (mask.shape[1] != 1 or mask.shape[-1] != q.shape[1] * size):
        raise UnsupportedError(
            f"{where} hands a mask of shape {tuple(mask.shape)} to its attention, and this rank holds a slice of "
            f"{q.shape[1]} tokens (sp={size}): a mask must be one for all heads and of the whole sequence. Train this "
            "model with sp=1."
        )
    return within_documents(mask, bounds, q.shape[0], where) if bounds is not None else mask


def _require_whole(request: Attention, size: int, more: Collection[str], where: str) -> None:
    """Raises if a call means something that is known of this rank's slice only, or of two sequences."""
    asks = (
        f"{where} attends to another sequence" if request.is_cross else f"{where} has {' and '.join(request.asks_for)}"
    )
    if more:
        asks = f"{where} hands {', '.join(more)} to its attention"
    if size > 1:
        raise UnsupportedError(
            f"{asks}, and this rank holds a slice of the sequence (sp={size}): they are known for the slice only. Train "
            "this model with sp=1."
        )
    if request.is_cross and (
        isinstance(request.overlay, MaskStructure) or (request.overlay is None and request.causal)
    ):
        raise UnsupportedError(
            f"{asks}, whose tokens have no order beside its own, without a mask that says who sees whom. Our attention "
            "serves training, where both are the same sequence; generate with upstream's names."
        )


def _documents(cu_seq_lens: Tensor, max_length: int | Tensor | None) -> Documents:
    return Documents(cu_seq_lens, longest(cu_seq_lens) if max_length is None else _number(max_length))


def _number(length: int | Tensor) -> int:
    return length if isinstance(length, int) else _item(length)


_item = TensorCache(int)


def require_whole_lengths(documents: Documents, tokens: int, *, causal: bool, where: str) -> None:
    """Raises if the lengths are not those of the gathered sequence.

    Lengths of this rank's slice would cut documents apart. A vision or audio tower that no pass has sliced holds all of
    its input on every rank: exchanging heads around its attention would put copies of it one after the other.

    One host sync per batch for towers; the language model's lengths are checked on the device, where an error ends the
    process without a sync.
    """
    if causal and documents.bounds.is_cuda:
        if tokens not in _asserted(documents.bounds):
            _asserted(documents.bounds).add(tokens)
            torch.ops.aten._assert_async.msg(
                documents.bounds[-1] == tokens, "cu_seq_lens_q must span the whole sequence"
            )
        return
    if _total(documents.bounds) != tokens:
        told = f"{where} was handed lengths of {_total(documents.bounds)} tokens for a gathered sequence of {tokens}: "
        if causal:
            raise ValueError(
                f"{told}cu_seq_lens_q must be those of the whole sequence, not of this rank's slice "
                "(runtime.parallel.batch.slice_batch makes them)."
            )
        raise ValueError(
            f"{told}its input was not sliced over the SP ranks. Run it within `parallel.using(None)`, or generate the "
            "model with the passes that slice its towers."
        )


def require_features(name: str, asked: Collection[str], where: str, device_type: str) -> None:
    """Raises if an attention cannot do what a module asks for, naming those that can."""
    missing = lacks(name, asked, device_type=device_type) if asked else ()
    if not missing:
        return
    able = [other for other in BACKENDS if not lacks(other, asked, device_type=device_type)]
    raise UnsupportedError(
        f"attention '{name}' cannot do {' and '.join(missing)}, which {where} asks for. "
        f"Those that can: {', '.join(able)}."
    )
