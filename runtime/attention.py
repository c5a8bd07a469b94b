"""Our attention names for transformers: any backend, packed sequences, and Ulysses sequence parallelism around it.

    from patchgen.runtime import attention

    attention.register()
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="patchgen_flash_attention_4")

| name                           | runs on | beyond causal, full and packed attention                   |
| ------------------------------ | ------- | ---------------------------------------------------------- |
| `patchgen_eager`               | any     | window, soft cap, sinks, dropout, padding, upstream masks  |
| `patchgen_sdpa`                | any     | window, dropout, padding, upstream masks                   |
| `patchgen_flex_attention`      | any     | window, soft cap, sinks (GPU), padding, upstream masks     |
| `patchgen_flash_varlen`        | GPU     | window (torch's own varlen_attn)                           |
| `patchgen_flash_attention_2`   | GPU     | window, soft cap, dropout                                  |
| `patchgen_flash_attention_3`   | GPU     | window, soft cap                                           |
| `patchgen_flash_attention_4`   | GPU     | window, soft cap, sinks                                    |

All names share one contract, flash-attention's: structure comes from `is_causal`, `sliding_window` and
`cu_seq_lens_q` (of the whole sequence), not from a mask tensor. So nothing of size S x S exists unless the backend
builds it, and a slice of a sequence needs no slice of a mask. What a backend cannot do it refuses by name.

    B rows   S tokens per row   s = S / sp of this rank   N heads   D head size
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from patchgen.runtime import mask_functions, parallel
from patchgen.runtime.attention_backends import BACKENDS, Attention, Backend, Documents, document_of
from patchgen.runtime.parallel import collectives, sequence
from patchgen.runtime.parallel.media import holds_whole, inside_whole
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.per_tensor import PerTensor

# Arguments of some models' attention that mean structure no backend here knows: sparse indexers, relative positions.
REFUSED_ARGUMENTS = ("indices", "block_indices", "position_bias")


@dataclass(frozen=True, eq=False)
class MaskStructure:
    """Stands where a mask tensor would: what upstream's masks say beyond causal and full attention.

    Attributes:
        window: None, or the sliding window. Most models hand it to their attention as well; some only draw it.
        is_packed: position ids show several documents per row.
        document: `(B, S)`, the number of each token's document; None on a slice of the sequence, whose position ids
            do not say where documents meet.
        padding: None, or `(B, S)` bool of the whole sequence, True for tokens that count.
    """

    window: int | None = None
    is_packed: bool = False
    document: Tensor | None = None
    padding: Tensor | None = None


def names() -> tuple[str, ...]:
    """The registered names."""
    return tuple(BACKENDS)


def register() -> None:
    """Registers every backend with transformers' attention and mask interfaces; more than once is harmless."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, backend in BACKENDS.items():
        ALL_ATTENTION_FUNCTIONS.register(name, attention_function(name, backend))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask_function(name, backend))
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
        if not isinstance(attn_implementation, str) or attn_implementation not in BACKENDS:
            return original(self, attn_implementation, *args, **kwargs)
        reason = BACKENDS[attn_implementation].unavailable()
        if reason is not None:
            usable = [name for name, backend in BACKENDS.items() if backend.unavailable() is None]
            raise ImportError(
                f"attn_implementation='{attn_implementation}' cannot run here: {reason}. Usable: {', '.join(usable)}."
            )
        return attn_implementation

    check.knows_patchgen = True
    PreTrainedModel._check_and_adjust_attn_implementation = check


# ------------------------------------------------------------------------------------------------ masks

_PLAIN = {"causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay"}
_PACKED = {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"}


def mask_function(name: str, backend: Backend) -> Callable:
    """The mask builder of one name: None for causal and full attention, else a `MaskStructure`."""
    from transformers import masking_utils

    upstream = {
        "patchgen_eager": masking_utils.eager_mask,
        "patchgen_sdpa": masking_utils.sdpa_mask,
        "patchgen_flex_attention": masking_utils.flex_attention_mask,
    }.get(name)

    def build(
        batch_size: int,
        q_length: int,
        kv_length: int,
        *,
        mask_function: Callable,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        **kwargs: object,
    ):
        state = parallel.current()
        sliced = state is not None and state.sp > 1 and not inside_whole()
        parts = mask_functions.parts(mask_function)
        unknown = sorted(set(parts) - _PLAIN - _PACKED)
        if unknown:
            if upstream is None:
                raise ValueError(
                    f"This model lays {', '.join(unknown)} over the causal mask, which '{name}' cannot express: it "
                    "knows causal, sliding-window, packed and padded attention. Train it with 'patchgen_eager', "
                    "'patchgen_sdpa' or 'patchgen_flex_attention'."
                )
            is_packed = mask_functions.find_packing(mask_function) is not None
            if sliced:
                # Attention sees the whole sequence of some heads, so the mask is the whole one.
                mask_function = mask_functions.of_whole_sequence(mask_function, q_length, state)
                if attention_mask is not None:
                    attention_mask = _padding(attention_mask, q_length, state)
                q_length = kv_length = q_length * state.sp

            def draw(function: Callable):
                return upstream(
                    batch_size=batch_size,
                    q_length=q_length,
                    kv_length=kv_length,
                    mask_function=function,
                    attention_mask=attention_mask,
                    local_size=local_size,
                    **kwargs,
                )

            if is_packed and not sliced:
                mask_function = mask_functions.packed(mask_function, mask_functions.document_numbers(mask_function))
            mask = draw(mask_function)
            if mask is not None:
                _OVERLAYS[mask] = Overlay(draw, mask_function, is_packed=is_packed, is_slice=sliced)
            return mask
        padding = None
        if attention_mask is not None:
            padding = _padding(attention_mask, q_length, state if sliced else None)
        is_packed = bool(_PACKED & set(parts))
        document = mask_functions.document_numbers(mask_function) if is_packed and not sliced else None
        if local_size is None and padding is None and not is_packed:
            return None
        return MaskStructure(local_size, is_packed, document, padding)

    return build


def _padding(attention_mask: Tensor, q_length: int, state: ParallelState | None) -> Tensor | None:
    """The whole `(B, S)` padding mask, True for tokens that count; None without padding. One host sync per forward."""
    if state is not None and attention_mask.shape[1] == q_length:
        attention_mask = collectives.all_gather(
            attention_mask, state.sp_group, dim=1, operation="gather the padding mask over SP"
        )
    return None if bool(attention_mask.all()) else attention_mask.bool()


# -------------------------------------------------------------------------------------------- attention


def attention_function(name: str, backend: Backend) -> Callable:
    """The attention function of one name, as transformers calls it.

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
        refused = [argument for argument in REFUSED_ARGUMENTS if kwargs.get(argument) is not None]
        if refused:
            raise ValueError(f"{where} hands {', '.join(refused)} to its attention, which '{name}' cannot honour.")
        state = parallel.current()
        size = state.sp if state is not None and not holds_whole(module) else 1
        q, k, v = (states.transpose(1, 2) for states in (query, key, value))
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"'{name}' in {where}: {q.shape[1]} queries and {k.shape[1]} keys. It serves training, where both are "
                "the same sequence; generate and cross-attend with upstream's names."
            )
        sink_logits = s_aux if s_aux is not None else sinks
        request = Attention(
            causal=is_causal if is_causal is not None else getattr(module, "is_causal", True),
            scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
            softcap=softcap,
            sinks=sink_logits,
            dropout=dropout,
            **_structure(attention_mask, sliding_window, cu_seq_lens_q, max_length_q, where=where),
        )
        if request.overlay is not None:
            request = replace(request, overlay=_within_documents(request.overlay, cu_seq_lens_q, where))
        if size > 1 and request.documents is not None:
            tokens = q.shape[0] * q.shape[1] * size
            require_whole_lengths(request.documents, tokens, causal=request.causal, where=where)
        require_features(name, backend, request, where)
        if size == 1:
            return backend.function(q, k, v, request).contiguous(), None
        if hasattr(sink_logits, "full_tensor"):
            raise ValueError("Attention sinks are still sharded: the attention module must be inside an FSDP2 unit.")

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            return backend.function(q, k, v, replace(request, sinks=sinks))

        out = sequence.attend_over_heads(q, k, v, sink_logits, attend, state, where=where)
        return out.contiguous(), None

    return forward


# One host sync per batch, not per layer, where lengths did not come as numbers.
_longest = PerTensor(lambda cu_seq_lens: int(cu_seq_lens.diff().max()))
_total = PerTensor(lambda cu_seq_lens: int(cu_seq_lens[-1]))
_asserted: PerTensor[set[int]] = PerTensor(lambda _cu_seq_lens: set())  # the totals that the device was told to check


def _structure(
    mask: Tensor | MaskStructure | None,
    window: int | None,
    cu_seq_lens: Tensor | None,
    max_length: int | Tensor | None,
    *,
    where: str,
) -> dict[str, object]:
    """The `window`, `documents`, `padding` and `overlay` of a call."""
    if mask is not None and not isinstance(mask, MaskStructure):
        return {"overlay": mask}
    told = mask or MaskStructure()
    if cu_seq_lens is None and told.is_packed:
        cu_seq_lens = _bounds(told, where)
    if cu_seq_lens is not None and told.padding is not None:
        raise ValueError(f"{where} got both cu_seq_lens_q and a padding mask: a packed batch has no padding.")
    return {
        "window": window if window is not None else told.window,
        "documents": _documents(cu_seq_lens, max_length) if cu_seq_lens is not None else None,
        "padding": told.padding,
    }


def _documents(cu_seq_lens: Tensor, max_length: int | Tensor | None) -> Documents:
    return Documents(cu_seq_lens, _longest(cu_seq_lens) if max_length is None else _number(max_length))


def _number(length: int | Tensor) -> int:
    return length if isinstance(length, int) else _item(length)


_item = PerTensor(int)


def _bounds(packed: MaskStructure, where: str) -> Tensor:
    if packed.document is None:
        raise ValueError(
            f"{where}: the position ids start again within this rank's slice of the sequence, but no cu_seq_lens_q "
            "was handed over. The documents of the whole sequence cannot be told from a slice: hand cu_seq_lens_q to "
            "the model (runtime.parallel.batch.slice_batch makes them)."
        )
    return _document_bounds(packed.document)


@PerTensor
def _document_bounds(document_BS: Tensor) -> Tensor:
    """`cu_seq_lens` over the rows one after the other, from each token's document."""
    starts = torch.ones_like(document_BS, dtype=torch.bool)
    starts[:, 1:] = document_BS[:, 1:] != document_BS[:, :-1]
    first = torch.nonzero(starts.view(-1)).view(-1).to(torch.int32)
    return torch.cat([first, first.new_tensor([document_BS.numel()])])


@dataclass(frozen=True, eq=False)
class Overlay:
    """What a mask was drawn from, to draw it again when documents are known.

    Attributes:
        draw: makes a mask from a mask function of the whole sequence.
        function: the mask function that it was drawn from.
        is_packed: position ids start again: there are documents.
        is_slice: they are those of a slice, so the mask was drawn without them.
    """

    draw: Callable[[Callable], Any]
    function: Callable
    is_packed: bool
    is_slice: bool


_OVERLAYS = WeakIdKeyDictionary()  # mask -> Overlay
_WITHIN = WeakIdKeyDictionary()  # mask -> (lengths, the mask within these documents): one for all layers


def _within_documents(mask: Any, cu_seq_lens: Tensor | None, where: str) -> Any:
    """Upstream's mask of the whole sequence (bool, added, or of blocks) within the documents that lengths tell."""
    overlay = _OVERLAYS.get(mask)
    if overlay is not None and overlay.is_packed and not overlay.is_slice:
        return mask
    if cu_seq_lens is None:
        if overlay is not None and overlay.is_packed:
            _bounds(MaskStructure(is_packed=True), where)
        return mask
    if mask in _WITHIN and _WITHIN[mask][0] is cu_seq_lens:
        return _WITHIN[mask][1]
    document_BS = document_of(_documents(cu_seq_lens, None), mask.shape[0], mask.shape[-1])
    if overlay is not None:
        position_BS = mask_functions.positions_within(document_BS)
        within = overlay.draw(mask_functions.packed(overlay.function, document_BS, position_BS))
    elif isinstance(mask, Tensor):
        same = (document_BS[:, :, None] == document_BS[:, None, :])[:, None]
        within = mask.masked_fill(~same, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
    else:
        raise ValueError(f"{where} got cu_seq_lens_q and a {type(mask).__name__} that this runtime did not draw.")
    _WITHIN[mask] = (cu_seq_lens, within)
    return within


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
            torch._assert_async(documents.bounds[-1] == tokens, "cu_seq_lens_q must span the whole sequence")
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


def require_features(name: str, backend: Backend, request: Attention, where: str) -> None:
    """Raises if the backend cannot do what a module asks for, naming those that can."""
    missing = [feature for feature in request.asks_for if feature not in backend.features]
    if not missing:
        return
    able = [other for other, one in BACKENDS.items() if set(request.asks_for) <= one.features]
    raise ValueError(
        f"attention '{name}' cannot do {' and '.join(missing)}, which {where} asks for. "
        f"Those that can: {', '.join(able)}."
    )
