"""Tracks running model calls: the documents of their rows, for masks built inside, and the position ids a model expects.

Hand-written attention gets no packing arguments: its mask must have the documents when it is built. So every model with one
of our attention names records its calls, and the mask builders look them up here.

    enter   documents, from cu_seq_lens_q or restarting position ids, are recorded and passed to the forward if it takes them,
            else unpacked to their own rows (on a slice only where tokens are mixed, see `gathered_attention.py`); position ids
            that count from 0 become those that the model would compute itself; arguments that the forward does not take are
            recorded here
    inside  `documents_of(config)` finds the documents of the sequence that a mask is built for
    leave   the record is dropped; layers recomputed by transformers' activation checkpointing find it again

    B rows   S tokens of the full sequence   s = S / sp of this rank
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from patchgen.runtime import compatibility, mask_functions, parallel
from patchgen.runtime.document_rows import LEFT, PACKING, DocumentRows, DocumentSeparation
from patchgen.runtime.parallel import batch, checkpointing, collectives
from patchgen.runtime.parallel.checkpointing import CHECKPOINT_ATTRIBUTE
from patchgen.runtime.tensor_cache import TensorCache

BOUNDS, POSITIONS, MASK = "cu_seq_lens_q", "position_ids", "attention_mask"
CACHES = ("past_key_values", "cache")
"""The input with what decoding has computed before, by release of transformers."""
STEP_INPUTS = ("shift_labels", "num_items_in_batch")
"""Inputs for the loss, which is a share of a step while a parallel state is active."""
POSITION_RULE = "create_position_ids_from_input_ids"
"""Upstream's name for the rule by which an embedding derives positions from token ids and padding."""


@dataclass(frozen=True)
class Call:
    """A running call of a model.

    Attributes:
        cu_seq_lens: None, or `(documents + 1,)` over the flattened rows of the full sequence.
        rows: the mapping of unpacked rows, if each document has its own row.
        consecutive: None, or position ids that are known not to restart.
        extra: arguments that the forward does not take.
    """

    module: nn.Module
    cu_seq_lens: Tensor | None
    rows: DocumentRows | None = None
    consecutive: Tensor | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_RUNNING = _Running()
_SAW_PACKED_ROWS = threading.Event()  # whether the last model that mixed tokens had packed rows
_NOTED = "patchgen_notes_calls"
_SEPARATES = "patchgen_separates_documents"
GATHERS = "patchgen_gathers_in_rows"
"""On a model whose attention is given full sequences (`gathered_attention.py`): None before its first call on a slice, then whether
it is given one document per row."""


def note_calls(model: nn.Module) -> None:
    """Records the calls of a model from now on (idempotent)."""
    if not getattr(model, _NOTED, False):
        setattr(model, _NOTED, True)
        model.register_forward_pre_hook(_enter, with_kwargs=True)
        model.register_forward_hook(_leave, always_call=True)


def separate_documents(model: nn.Module, separated: DocumentSeparation = True) -> None:
    """Computes each document of packed rows in its own row from now on, or not; see `document_rows`.

    For models that take no document bounds, where documents would see each other. On a slice of a sequence only what mixes
    tokens gets such rows, which `selfcheck.require_sliceable` compares. Models of which nothing was decided do as the proof of
    their file says, and are refused on slices.

    Raises:
        RuntimeError: the model was called on a slice of a sequence, decided otherwise.
    """
    if getattr(model, GATHERS, None) not in (None, bool(separated)):
        raise RuntimeError(
            f"{type(model).__name__} was called on a slice of a sequence before separate_documents(model, {separated!r}). To fix: "
            "decide before the first call."
        )
    note_calls(model)
    setattr(model, _SEPARATES, separated)


def separate_as_proven(model: nn.Module) -> None:
    """`separate_documents`, if the proof of the model's file says so: for upstream's attention, whose calls are not recorded.

    With our names each call asks the proof.
    """
    if not hasattr(model, _SEPARATES) and (proven := compatibility.proven_separation(type(model))):
        separate_documents(model, proven)


def separation(module: nn.Module, *, is_packed: bool = True) -> DocumentSeparation:
    """How a model separates documents: as decided for it, else by the proof of its file; and if its forward takes no bounds."""
    decided = getattr(module, _SEPARATES, None)
    if decided is None:
        decided = compatibility.proven_separation(type(module))
    return decided or (is_packed and not takes_documents(type(module)))


def takes_documents(model_class: type[nn.Module]) -> bool:
    """Whether a model's forward takes document bounds, by name or as keyword arguments."""
    names, has_kwargs = _parameters(model_class)
    return has_kwargs or BOUNDS in names


def is_outermost(model: nn.Module) -> bool:
    """Whether a model, whose call is running, is not called by another."""
    return not _RUNNING.calls or _RUNNING.calls[0].module is model


def extra_inputs() -> Mapping[str, Any]:
    """The arguments of the outermost running call that its forward does not take."""
    return _RUNNING.calls[0].extra if _RUNNING.calls else {}


def documents_of(config: object) -> Tensor | None:
    """The `cu_seq_lens` of the sequence that a mask with this config is built for; None: its rows are not packed.

    They belong to the innermost call of a model with this config object or text config: towers have their own config and
    rows.
    """
    for call in reversed(_RUNNING.calls):
        if call.cu_seq_lens is None:
            continue
        model_config: Any = call.module.config
        if config is model_config or config is model_config.get_text_config(decoder=True):
            return call.cu_seq_lens
    return None


def bounds_of_call() -> Tensor | None:
    """The `cu_seq_lens` of the outermost running call; None: not packed, or no call is recorded.

    A layer recomputed in the backward is outside any call: `checkpointing.remember` has the result of its first run, and
    transformers' checkpointing is wrapped to run inside the calls of the first run.

    Raises:
        RuntimeError: another kind of checkpoint recomputes in the backward after packed rows: their documents are unknown.
    """
    if not _RUNNING.calls and _lost_documents():
        raise RuntimeError(
            "A layer is computed again in the backward, outside the call of its model, so the documents of its packed rows are "
            "unknown. To fix: checkpoint by model.gradient_checkpointing_enable() or by patchgen's own "
            "activation_checkpointing, not by wrapping layers (torch's checkpoint_wrapper, FSDP plugins)."
        )
    return next((call.cu_seq_lens for call in _RUNNING.calls if call.cu_seq_lens is not None), None)


@torch.compiler.assume_constant_result  # asked when a layer is traced, which a recomputation outside a call does again
def _lost_documents() -> bool:
    """Whether a layer runs in the backward, outside any call, after packed rows."""
    if torch._C._current_graph_task_id() == -1:
        _SAW_PACKED_ROWS.clear()  # a model whose calls are not recorded: its rows are not packed
    return _SAW_PACKED_ROWS.is_set()


@contextlib.contextmanager
def without_documents(module: nn.Module) -> Iterator[None]:
    """Around a module that gets one document per row: what it calls finds no bounds of packed rows."""
    before, _RUNNING.calls = _RUNNING.calls, [Call(module, None)]
    try:
        yield
    finally:
        _RUNNING.calls = before


def documents_apart() -> DocumentRows | None:
    """The mapping of the innermost running call with one document per row; None: rows are not unpacked."""
    return next((call.rows for call in reversed(_RUNNING.calls) if call.rows is not None), None)


_CONSECUTIVE = WeakIdKeyDictionary()  # position ids -> their version when they were marked


def mark_consecutive(position_ids: Tensor) -> None:
    """Marks position ids that do not restart, as the collator knows, which saves a host sync."""
    _CONSECUTIVE[position_ids] = _version(position_ids)


def _is_consecutive(position_ids: object) -> bool:
    return (
        isinstance(position_ids, Tensor)
        and position_ids in _CONSECUTIVE
        and _CONSECUTIVE[position_ids] == _version(position_ids)  # not written to since
    )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def search_call_first(search: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Upstream's search for documents in position ids `(B, S)`, without its host sync if a running call has the answer.

    It returns the index of each token's document, or None if there is one per row; zeros are allowed, too, by upstream's
    rule for compiled code, which cannot sync.
    """

    @wraps(search)
    def find(position_ids: Tensor) -> Tensor | None:
        if any(call.cu_seq_lens is not None for call in _RUNNING.calls):
            return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
        marked = [call.consecutive for call in _RUNNING.calls]
        if any(
            marked_ids is not None and (position_ids is marked_ids or position_ids._base is marked_ids)
            for marked_ids in marked
        ):
            return None
        return search(position_ids)

    vars(find)["knows_patchgen"] = True
    return find


def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    names, has_kwargs = _parameters(type(module))
    inputs = dict(zip(names, args, strict=False)) | kwargs
    bounds, rows, extra = None, None, {}
    if not _RUNNING.calls:
        carry_into_checkpoints(module)
        if has_kwargs and inputs.get(BOUNDS) is None:
            inputs |= _find_documents(inputs)
        positions = _model_positions(module, inputs)
        if positions is not None:
            inputs[POSITIONS] = positions
        is_packed = inputs.get(BOUNDS) is not None
        separated = separation(module, is_packed=is_packed)
        if separated and (separated == LEFT or not hasattr(module, GATHERS) or not hasattr(module, _SEPARATES)):
            _require_full_sequence(module)
        if separated and is_packed and parallel.sequence_parallel_state() is not None:
            _require_no_mask(module, inputs)
            bounds, args = inputs[BOUNDS], ()
            inputs = {name: value for name, value in inputs.items() if name not in PACKING}
        elif separated and is_packed:
            rows = _document_rows(module, inputs, is_left=separated == LEFT)
            inputs, args = rows.unpack(inputs), ()
            if separated == LEFT and MASK in names:
                inputs[MASK] = rows.is_token.long()
        if not has_kwargs:
            candidates = ("real_tokens", *(STEP_INPUTS if parallel.current() is not None else ()))
            extra = {name: inputs.pop(name) for name in candidates if name in inputs and name not in names}
    positions = inputs.get(POSITIONS)
    consecutive = positions if _is_consecutive(positions) and rows is None else None
    bounds = bounds if bounds is not None else inputs.get(BOUNDS)
    if bounds is not None:
        _SAW_PACKED_ROWS.set()
    _RUNNING.calls.append(Call(module, bounds, rows, consecutive, extra))
    positional = names[: len(args)]
    return (*(inputs.pop(name) for name in positional), *args[len(positional) :]), inputs


def _leave(module: nn.Module, args: object, output: Any) -> Any:
    calls = _RUNNING.calls
    while any(call.module is module for call in calls):  # inner calls that ended in an error are still there
        call = calls.pop()
        if call.module is module:
            return call.rows.repack(output) if call.rows is not None and output is not None else None
    return None


_CHECKPOINTED: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()


def carry_into_checkpoints(model: nn.Module) -> None:
    """Makes layers that transformers' activation checkpointing recomputes find the calls of their first run, and what routers
    selected in it (idempotent)."""
    if model not in _CHECKPOINTED:
        _CHECKPOINTED[model] = WeakSet(m for m in model.modules() if hasattr(m, "gradient_checkpointing"))
    for module in _CHECKPOINTED[model]:
        func = getattr(module, CHECKPOINT_ATTRIBUTE, None)
        if func is not None and not isinstance(func, _CheckpointInCalls) and not checkpointing.is_ours(func):
            setattr(module, CHECKPOINT_ATTRIBUTE, _CheckpointInCalls(func))


@dataclass(frozen=True)
class _CheckpointInCalls:
    """transformers' `checkpoint(layer, ...)`, with every run of the layer inside the calls that are running now. Routers select in
    each what they selected in the first.

    Runs after one with gradients are replays. A reentrant checkpoint runs the layer without gradients first.
    """

    checkpoint: Callable[..., Any]

    def __call__(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls = list(_RUNNING.calls)
        selections: list[Tensor] = []
        has_run = has_run_with_gradients = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run, has_run_with_gradients
            this_run = checkpointing.foreign_run(
                selections, is_first=not has_run, is_counted=not has_run_with_gradients
            )
            has_run, has_run_with_gradients = True, has_run_with_gradients or torch.is_grad_enabled()
            before, _RUNNING.calls = _RUNNING.calls, calls  # the backward may run in another thread
            try:
                with this_run:
                    return layer(*args, **kwargs)
            finally:
                _RUNNING.calls = before

        return self.checkpoint(run, *args, **kwargs)


def _require_full_sequence(module: nn.Module) -> None:
    """Also for unpacked rows: a model without document bounds may mix tokens across slices as well."""
    state = parallel.sequence_parallel_state()
    if state is not None:
        raise ValueError(no_slices(type(module).__name__.removeprefix("FSDP"), state.sp))


def no_slices(name: str, sp: int) -> str:
    """The error message for a model with one document per row on slices of a sequence, before a run and in a call."""
    return (
        f"{name} computes each document in its own row, but this rank has a slice of the rows (sp={sp}). "
        "Train this model with sp=1."
    )


def _require_no_mask(module: nn.Module, inputs: dict[str, Any]) -> None:
    if inputs.get(MASK) is not None:
        raise ValueError(
            f"{type(module).__name__} got both {BOUNDS} and a padding mask: a packed batch has no padding."
        )


def _document_rows(module: nn.Module, inputs: dict[str, Any], *, is_left: bool) -> DocumentRows:
    _require_no_mask(module, inputs)
    tokens = _tokens(inputs)
    if tokens is None:
        raise ValueError(f"{type(module).__name__} got {BOUNDS} without input_ids or inputs_embeds.")
    return DocumentRows.of(inputs[BOUNDS], tokens.shape[0], tokens.shape[1], pads_left=is_left)


@cache
def _parameters(model_class: type[nn.Module]) -> tuple[tuple[str, ...], bool]:
    """The named parameters of a forward, and whether it takes further keyword arguments."""
    parameters = list(inspect.signature(model_class.forward).parameters.values())[1:]
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _find_documents(inputs: dict[str, Any]) -> dict[str, Any]:
    """The packing arguments, if position ids `(B or 1, S)` restart; {} on a slice.

    One host sync per batch, as in upstream's own search for documents. With a mask upstream does not search; here a mask of
    ones, as collators add, is ignored.

    Raises:
        ValueError: position ids restart in a row that has padding as well.
    """
    positions, mask, tokens = inputs.get(POSITIONS), inputs.get(MASK), _tokens(inputs)
    state = parallel.current()
    if not isinstance(positions, Tensor) or positions.ndim != 2 or (state is not None and state.sp > 1):
        return {}
    if tokens is None or any(inputs.get(name) is not None for name in CACHES) or _is_consecutive(positions):
        return {}
    positions_BS = positions.expand(tokens.shape[0], -1)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != positions_BS.shape:
            return {}
        if not _is_all_ones(mask):
            _require_one_document(positions_BS, mask.bool())
            return {}
    documents = _restarts(positions_BS)
    if not documents:
        mark_consecutive(positions)
    return documents | {MASK: None} if documents and mask is not None else documents


_is_all_ones = TensorCache(lambda mask: bool((mask == 1).all()))


def _require_one_document(positions_BS: Tensor, is_token_BS: Tensor) -> None:
    """Refuses rows with padding in which positions restart: with a mask, the documents would not be found."""
    # R: the S - 1 pairs of neighbouring tokens of a row.
    both_BR = is_token_BS[:, 1:] & is_token_BS[:, :-1]
    if bool((both_BR & (positions_BS[:, 1:] <= positions_BS[:, :-1])).any()):
        raise ValueError(
            f"{POSITIONS} start again within a row, so it has several documents, and {MASK} has zeros, so it has padding: "
            f"with a mask documents would see each other. To fix: pass {BOUNDS} and {BOUNDS.replace('_q', '_k')} and no "
            "mask, with the padding as another document, or one document per row."
        )


def _restarts(positions_BS: Tensor) -> dict[str, Any]:
    starts = torch.ones_like(positions_BS, dtype=torch.bool)
    starts[:, 1:] = positions_BS[:, 1:] != positions_BS[:, :-1] + 1
    return batch.document_lengths(starts) if bool(starts[:, 1:].any()) else {}


def _tokens(inputs: dict[str, Any]) -> Tensor | None:
    """The tokens `(B, s)` or their embeddings `(B, s, H)`."""
    ids = inputs.get("input_ids")
    return ids if ids is not None else inputs.get("inputs_embeds")


# ------------------------------------------------------------------------------ positions that a model computes itself


def _model_positions(module: nn.Module, inputs: dict[str, Any]) -> Tensor | None:
    """Position ids `(B, s)` as the model computes them for each document, if those passed count from 0.

    Embeddings of some models derive positions from token ids, starting at `padding_idx + 1` and skipping padding. Collators
    do not know that and count from 0. Other positions are the caller's choice and stay unchanged.
    """
    positions, ids = inputs.get(POSITIONS), inputs.get("input_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or ids is None:
        return None
    numbering = _numbering(module)
    if numbering is None:
        return None
    state = parallel.current()
    start, s = 0, ids.shape[1]
    if state is not None and state.sp > 1:
        start = state.sp_rank * s
        ids = collectives.all_gather(ids, state.sp_group, dim=1, operation="gather token ids for their positions")
    B, S = ids.shape
    bounds = inputs.get(BOUNDS)
    if bounds is None:
        computed, counted = numbering(ids), torch.arange(S, device=ids.device).expand(B, S)
    else:
        tokens, documents = ids.reshape(1, -1), itertools.pairwise(_bounds_on_host(bounds))
        computed = torch.cat([numbering(tokens[:, a:b]) for a, b in documents if b > a], dim=1).view(B, S)
        counted = mask_functions.positions_within(mask_functions.document_of(bounds, B, S))
    computed, counted = computed[:, start : start + s], counted[:, start : start + s]
    return torch.where((positions == counted).all(), computed, positions)


_bounds_on_host = TensorCache(lambda bounds: bounds.tolist())


_NUMBERING: WeakKeyDictionary[nn.Module, Callable[[Tensor], Tensor] | None] = WeakKeyDictionary()


def _numbering(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The rule by which an embedding of this model derives positions from tokens `(B, S)` of full rows; None: none."""
    if model not in _NUMBERING:
        _NUMBERING[model] = next(filter(None, map(_rule_of, model.modules())), None)
    return _NUMBERING[model]


def _rule_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """A method of the module, or a function of its file that its forward calls, with the padding id bound."""
    padding = getattr(module, "padding_idx", None)
    if padding is None or POSITIONS not in _parameters(type(module))[0]:
        return None
    rule = getattr(module, POSITION_RULE, None)
    if rule is None and POSITION_RULE in inspect.unwrap(type(module).forward).__code__.co_names:
        rule = getattr(sys.modules[type(module).__module__], POSITION_RULE, None)
    return partial(rule, padding_idx=padding) if rule is not None else None
