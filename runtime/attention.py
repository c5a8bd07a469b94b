"""Attention implementations for transformers: several backends, packed sequences, Ulysses sequence parallelism.

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
| `patchgen_by_layer`            | any     | each call by the fastest that supports its features        |

All names share flash-attention's interface: structure comes from `is_causal`, `sliding_window` and `cu_seq_lens_q` (of the
full sequence), not from a mask tensor. So nothing of size S x S exists unless the backend builds it, and a slice of a
sequence needs no slice of a mask. A backend refuses unsupported features by name.

Models with hand-written attention get a mask that behaves like upstream's tensor (`attention_masks.py`). Overlays on the mask,
such as keys selected by an indexer or biases, mean the same under every name (`attention_overlays.py`).

    B rows   S tokens per row   s = S / sp of this rank   N heads, N_q of queries   D head size, D_v of values
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
from patchgen.runtime import gathered_attention, model_calls, parallel
from patchgen.runtime.attention_backends import BACKENDS, Backend
from patchgen.runtime.attention_calls import FEATURES, Attention, Documents, dtype_features
from patchgen.runtime.attention_masks import MaskStructure, UnsupportedError, mask_function
from patchgen.runtime.attention_overlays import overlay_arguments, overlay_mask, within_documents
from patchgen.runtime.parallel import gathered_keys, sequence
from patchgen.runtime.parallel.media import is_replicated
from patchgen.runtime.tensor_cache import TensorCache, longest

__all__ = [
    "BY_LAYER",
    "FEATURES",
    "ORDER",
    "UnsupportedError",
    "attention_function",
    "choose",
    "missing_features",
    "names",
    "recording",
    "register",
]

BY_LAYER = "patchgen_by_layer"
"""Each call gets the fastest attention that supports its features. The name must not contain `flash`: upstream then skips
chunked masks."""

# Fastest first, as measured in docs/parallel.md; eager, which has every feature and runs anywhere, comes last.
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
    """Registers every backend with transformers' attention and mask interfaces (idempotent)."""
    from transformers import masking_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in names():
        ALL_ATTENTION_FUNCTIONS.register(name, attention_function(name, BACKENDS.get(name)))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask_function)
    search = masking_utils.find_packed_sequence_indices
    if not hasattr(search, "knows_patchgen"):
        masking_utils.find_packed_sequence_indices = model_calls.search_call_first(search)
    accept_names()


def accept_names() -> None:
    """Makes model classes accept our names unchanged.

    Otherwise a name with `flash` in it is looked up as a kernel repository when the model is built, and models with a
    list of compatible flash implementations replace it silently. Both happen in one method, which is wrapped here. A
    name without `flash` would avoid that, but vision towers pass packed lengths only to names with it.
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
        gathered_attention.prepare(self)
        return _register_attention_class(type(self), attn_implementation)

    vars(check)["knows_patchgen"] = True
    PreTrainedModel._check_and_adjust_attn_implementation = check


def _register_attention_class(model_class: type[nn.Module], name: str) -> str:
    """The name under which a model finds its attention. If its file has a table of attention classes by upstream's names,
    ours are added with the eager class, whose hand-written attention uses the mask it is given.

    If the table also has a class for flash names, our flash names would select that class, whose kernel depends on upstream's
    names: the model gets `patchgen_eager` instead.
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


def missing_features(
    name: str, features: Collection[str], *, device_type: str | None = None, head_size: int = 0
) -> tuple[str, ...]:
    """The features that an attention does not support, and heads of `head_size` if they are too large for it.

    Args:
        features: names from `attention_calls.FEATURES`.
        device_type: where it would run; default: "cuda" if available.
        head_size: of the largest heads.

    Raises:
        ValueError: an unknown feature.
    """
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        raise ValueError(f"Unknown attention feature {unknown}. Known: {', '.join(FEATURES)}.")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    supported, largest = BACKENDS[name].features_on(device_type), BACKENDS[name].max_head
    too_large = (f"heads of {head_size}",) if largest is not None and head_size > largest else ()
    return tuple(feature for feature in FEATURES if feature in features and feature not in supported) + too_large


def choose(features: Collection[str] = (), *, device_type: str | None = None, head_size: int = 0) -> str:
    """The fastest attention that can train here and supports all features; `patchgen_eager` supports every one."""
    return next(name for name in ORDER if not _obstacle(name, features, device_type, head_size))


def passed_over(name: str, features: Collection[str], *, head_size: int = 0) -> dict[str, str]:
    """Attention faster than `name` -> why it cannot be used here with these features."""
    faster = ORDER[: ORDER.index(name)]
    reasons = {candidate: _obstacle(candidate, features, None, head_size) for candidate in faster}
    return {candidate: reason for candidate, reason in reasons.items() if reason}


def _obstacle(name: str, features: Collection[str], device_type: str | None, head_size: int) -> str:
    """Why an attention cannot train with these features here; "" if it can."""
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    missing = missing_features(name, features, device_type=device_type, head_size=head_size)
    if missing:
        return f"cannot do {' and '.join(missing)}"
    if device_type != "cuda" and not BACKENDS[name].has_cpu_backward:
        return "has no backward on the CPU"
    return BACKENDS[name].unavailable() or ""


Recorded = dict[nn.Module, set[tuple[str, ...]]]
"""Attention module -> the features that each of its calls needs."""

_RECORDINGS: list[Recorded] = []


@contextlib.contextmanager
def recording() -> Iterator[Recorded]:
    """Records the features that attention calls need; meanwhile all of them run in eager, which has every feature."""
    recorded: Recorded = {}
    _RECORDINGS.append(recorded)
    try:
        yield recorded
    finally:
        _RECORDINGS[:] = [recording for recording in _RECORDINGS if recording is not recorded]


# -------------------------------------------------------------------------------------------- attention


def attention_function(name: str, backend: Backend | None) -> Callable:
    """The attention function of one name, as transformers calls it; `backend` None: chosen for each call.

    It takes query, key, value `(B, N, s, D)` of this rank and returns `((B, s, N_q, D_v), None)`.
    """

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | MaskStructure | None,
        dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
        sliding_window: int | None = None, softcap: float | None = None,
        s_aux: Tensor | None = None, sinks: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None, max_length_q: int | Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        where = type(module).__name__
        state = parallel.sequence_parallel_state() if not is_replicated(module) else None
        size = state.sp if state is not None else 1
        q, k, v = (states.transpose(1, 2) for states in (query, key, value))
        keys = k.shape[1] * size
        if isinstance(attention_mask, Tensor) and attention_mask.shape[-1] > keys:  # has an entry for the next token
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
        overlays = {argument: kwargs[argument] for argument in overlay_arguments(kwargs)}
        if request.is_cross or overlays or "sinks of each token" in request.features:
            _require_full_sequence(request, size, overlays, where)
        features = tuple(dict.fromkeys((*request.features, *(("overlays",) if overlays else ()))))
        backend_used = _backend_for(name, backend, features, module, q, v)
        if request.overlay is not None:
            bounds = request.documents.bounds if request.documents is not None else None
            overlay = _overlay(
                attention_mask, bounds, q, size, where, as_blocks=backend_used.takes_blocks and not overlays
            )
            request = replace(request, overlay=overlay)
        if overlays:
            request = replace(request, overlay=overlay_mask(request, q, k, overlays, attention_mask, module))
        if request.documents is not None and (size > 1 or (request.causal and not torch.compiler.is_compiling())):
            require_full_lengths(request.documents, len(q) * q.shape[1] * size, causal=request.causal, where=where)
        if state is None:
            return backend_used.function(q, k, v, request).contiguous(), None
        if hasattr(request.sinks, "full_tensor"):
            raise ValueError("Attention sinks are still sharded: the attention module must be inside an FSDP2 unit.")

        def attend(
            q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, queries: tuple[int, int] | None = None
        ) -> Tensor:
            return backend_used.function(q, k, v, replace(request, sinks=sinks, queries=queries))

        whole_blocks = gathered_keys.head_blocks(q.shape[2], state.sp) == state.sp
        share = sequence.attend_over_heads if whole_blocks else gathered_keys.attend_over_parts
        return share(q, k, v, request.sinks, attend, state, where=where).contiguous(), None

    return forward


def _backend_for(
    name: str, backend: Backend | None, features: tuple[str, ...], module: nn.Module, q: Tensor, v: Tensor
) -> Backend:
    """The backend of one call: the named one, if it can, or the fastest that can; eager while calls are recorded."""
    where, needed = type(module).__name__, features + dtype_features(q.dtype)
    for recorded in _RECORDINGS:  # without features of the dtype: small models are recorded in fp32
        recorded.setdefault(module, set()).add(features)
    if _RECORDINGS:
        return BACKENDS["patchgen_eager"]
    if backend is None:
        fastest = _choose_for_call(needed, q.device.type, max(q.shape[-1], v.shape[-1]))
        choices.record(
            "attention", f"{fastest} in {where}{''.join(f', {feature}' for feature in features)}", q[:, :, 0]
        )
        return BACKENDS[fastest]
    require_features(name, needed, where, q.device.type)
    return backend


@torch.compiler.assume_constant_result
def _choose_for_call(features: tuple[str, ...], device_type: str, head_size: int) -> str:
    """`choose`, as a constant in compiled code: its arguments are known when the code is traced."""
    return choose(features, device_type=device_type, head_size=head_size)


# One host sync per batch, not per layer, if lengths are only on the device.
_total = TensorCache(lambda cu_seq_lens: int(cu_seq_lens[-1]))
# The totals that the device already asserts.
_asserted_totals: TensorCache[set[int]] = TensorCache(lambda _cu_seq_lens: set())


def _sinks(logits: Tensor | None, *, heads: int) -> Tensor | None:
    """Sinks per head flattened to `(N_q,)`; sinks per token unchanged."""
    return logits.reshape(-1) if logits is not None and logits.numel() == heads else logits


def _is_causal(mask: object, is_causal: bool | None, module: nn.Module) -> bool:
    """Whether no token sees a later one: decided by the mask, as in upstream's eager attention, else by the module."""
    if isinstance(mask, MaskStructure) and mask.causal is not None:
        return mask.causal
    return is_causal if is_causal is not None else getattr(module, "is_causal", True)


def _structure(
    mask: Tensor | MaskStructure | None,
    window: int | None,
    cu_seq_lens: Tensor | None,
    max_length: int | Tensor | None,
    *,
    where: str,
) -> dict[str, Any]:
    """The `window`, `documents`, `padding` and `overlay` of a call; the overlay is converted later (`_overlay`)."""
    if not isinstance(mask, MaskStructure):
        documents = _documents(cu_seq_lens, max_length) if cu_seq_lens is not None else None
        return {"documents": documents} | ({"window": window} if mask is None else {"overlay": mask})
    bounds = mask.bounds(cu_seq_lens, where)
    documents = _documents(bounds, max_length) if bounds is not None else None
    if mask.is_overlay:
        return {"overlay": mask, "documents": documents}
    if bounds is not None and mask.padding is not None:
        raise ValueError(f"{where} got both cu_seq_lens_q and a padding mask: a packed batch has no padding.")
    window = window if window is not None else mask.window
    return {"window": window, "documents": documents, "padding": mask.padding}


def _overlay(mask: Any, bounds: Tensor | None, q: Tensor, size: int, where: str, *, as_blocks: bool) -> object:
    """Upstream's mask, restricted to documents, as a BlockMask or a tensor."""
    if isinstance(mask, MaskStructure):
        return mask.blocks(bounds) if as_blocks else mask.dense(bounds)
    if size > 1 and (mask.shape[1] != 1 or mask.shape[-1] != q.shape[1] * size):
        raise UnsupportedError(
            f"{where} passes a mask of shape {tuple(mask.shape)} to its attention, but this rank has a slice of "
            f"{q.shape[1]} tokens (sp={size}): a mask must be the same for all heads and cover the full sequence. Train "
            "this model with sp=1."
        )
    return within_documents(mask, bounds, q.shape[0], where) if bounds is not None else mask


def _require_full_sequence(request: Attention, size: int, overlays: Collection[str], where: str) -> None:
    """Raises if a call on a slice needs data of the full sequence, or attends across sequences without a mask."""
    feature = "attends to another sequence" if request.is_cross else "has sinks of each token"
    if size > 1:
        what = f"passes {', '.join(overlays)} to its attention" if overlays else feature
        raise UnsupportedError(
            f"{where} {what}, which is only known for this rank's slice of the sequence (sp={size}). Train this model with "
            "sp=1."
        )
    if request.is_cross and (
        isinstance(request.overlay, MaskStructure) or (request.overlay is None and request.causal)
    ):
        raise UnsupportedError(
            f"{where} {feature} without a mask, so it is unknown which tokens see which. Our attention is for training, where both "
            "are the same sequence; use an attention implementation of transformers, e.g. 'sdpa', for generation."
        )


def _documents(cu_seq_lens: Tensor, max_length: int | Tensor | None) -> Documents:
    return Documents(cu_seq_lens, longest(cu_seq_lens) if max_length is None else _as_int(max_length))


def _as_int(length: int | Tensor) -> int:
    return length if isinstance(length, int) else _item_on_host(length)


_item_on_host = TensorCache(int)


def require_full_lengths(documents: Documents, tokens: int, *, causal: bool, where: str) -> None:
    """Raises if the lengths are not those of the gathered sequence.

    Lengths of this rank's slice would split documents. A vision or audio tower that no pass has sliced has its full input on
    every rank: exchanging heads around its attention would concatenate copies of it.

    One host sync per batch for towers; the language model's lengths are asserted on the device without a sync, where a failure
    ends the process.
    """
    if causal and documents.bounds.is_cuda:
        if tokens not in _asserted_totals(documents.bounds):
            _asserted_totals(documents.bounds).add(tokens)
            torch.ops.aten._assert_async.msg(
                documents.bounds[-1] == tokens, "cu_seq_lens_q must span the full sequence"
            )
        return
    if _total(documents.bounds) != tokens:
        mismatch = f"{where} got lengths of {_total(documents.bounds)} tokens for a gathered sequence of {tokens}: "
        if causal:
            raise ValueError(
                f"{mismatch}cu_seq_lens_q must be those of the full sequence, not of this rank's slice "
                "(runtime.parallel.batch.slice_batch computes them)."
            )
        raise ValueError(
            f"{mismatch}its input was not sliced over the SP ranks. Run it within `parallel.using(None)`, or generate the "
            "model with the passes that slice its towers."
        )


def require_features(name: str, features: Collection[str], where: str, device_type: str) -> None:
    """Raises if an attention lacks features that a module needs, naming those that have them."""
    missing = missing_features(name, features, device_type=device_type) if features else ()
    if not missing:
        return
    able = [candidate for candidate in BACKENDS if not missing_features(candidate, features, device_type=device_type)]
    raise UnsupportedError(
        f"attention '{name}' cannot do {' and '.join(missing)}, which {where} needs. Those that can: {', '.join(able)}."
    )
