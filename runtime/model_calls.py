"""What a model was called with, for whatever it makes inside: the documents of its rows, and positions as it counts them.

Attention that is written by hand gets no packing arguments: its mask must know the documents when it is made. So every
model with one of our attention names notes its call, and the mask builders ask here.

    enter   the documents of the rows, told by cu_seq_lens_q or by position ids that start again, are noted and handed on
            to all that take them; position ids that count from 0 become those that the model makes for itself; what a
            forward takes no argument for is kept here, and documents that it cannot be told of go to rows of their own
    inside  `documents_of(config)` finds the documents of the sequence that a mask is made for
    leave   the note is dropped; a layer that transformers' activation checkpointing computes again finds it once more

    B rows   S tokens of the whole sequence   s = S / sp of this rank
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from patchgen.runtime import mask_functions, parallel
from patchgen.runtime.document_rows import LEFT, DocumentRows, Separated
from patchgen.runtime.parallel import batch, checkpointing, collectives
from patchgen.runtime.parallel.checkpointing import CHECKPOINT_ATTRIBUTE
from patchgen.runtime.tensor_cache import TensorCache

BOUNDS, POSITIONS, MASK = "cu_seq_lens_q", "position_ids", "attention_mask"
OF_A_STEP = ("shift_labels", "num_items_in_batch")
"""What a run hands over for the loss, which is a share of a step while a parallel state is live."""
OWN_POSITIONS = "create_position_ids_from_input_ids"
"""What upstream names the rule by which an embedding numbers tokens from their ids, beside padding."""


@dataclass(frozen=True)
class Call:
    """A call of a model that runs now.

    Attributes:
        cu_seq_lens: None, or `(documents + 1,)` over the rows of the whole sequence one after the other.
        rows: where its documents went that are computed in rows of their own.
        counted_through: None, or position ids that are known to start again nowhere.
        kept: what a run handed over and the forward takes no argument for.
    """

    module: nn.Module
    cu_seq_lens: Tensor | None
    rows: DocumentRows | None = None
    counted_through: Tensor | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_RUNNING = _Running()
_SEEN = threading.Event()  # whether the last model that mixed tokens had packed rows
_NOTED = "patchgen_notes_calls"
_SEPARATES = "patchgen_separates_documents"


def note_calls(model: nn.Module) -> None:
    """Notes the calls of a model from now on; more than once is harmless."""
    if not getattr(model, _NOTED, False):
        setattr(model, _NOTED, True)
        model.register_forward_pre_hook(_enter, with_kwargs=True)
        model.register_forward_hook(_leave, always_call=True)


def separate_documents(model: nn.Module, how: Separated = True) -> None:
    """Computes packed rows with each document in a row of its own from now on; see `document_rows`.

    For a model that cannot be told where documents end: without it, one would see the next. Not on a slice of a sequence.
    """
    note_calls(model)
    setattr(model, _SEPARATES, how)


def takes_documents(model_class: type[nn.Module]) -> bool:
    """Whether a model can be told where the documents of packed rows end: its forward takes them, or arguments to hand on."""
    names, takes_more = _parameters(model_class)
    return takes_more or BOUNDS in names


def kept() -> Mapping[str, Any]:
    """What a run hands to the outermost model that is called now, and its forward takes no argument for."""
    return _RUNNING.calls[0].kept if _RUNNING.calls else {}


def documents_of(config: object) -> Tensor | None:
    """The `cu_seq_lens` of the sequence that a mask with this config is made for; None: its rows are not packed.

    It is that of the nearest call of a model with this very config, or with one whose text config it is: a tower inside
    has its own config and its own rows.
    """
    for call in reversed(_RUNNING.calls):
        own: Any = call.module.config
        if call.cu_seq_lens is not None and (config is own or config is own.get_text_config(decoder=True)):
            return call.cu_seq_lens
    return None


def bounds_of_call() -> Tensor | None:
    """The `cu_seq_lens` of the rows that the outermost call of a model has; None: not packed, or no call is noted.

    A layer that is computed again in the backward runs in no call: `checkpointing.remember` has what its first run found,
    and transformers' own checkpointing runs it inside the calls of its first run.

    Raises:
        RuntimeError: in a backward, by a checkpoint of a third kind, once packed rows were seen: nothing tells whether
            these are.
    """
    if not _RUNNING.calls and torch._C._current_graph_task_id() == -1:
        _SEEN.clear()  # a model whose calls nobody notes: no row of it is packed
    if not _RUNNING.calls and _SEEN.is_set():
        raise RuntimeError(
            "A layer is computed again in the backward, outside the call of its model, so nothing says where the documents "
            "of its packed rows end. To fix: checkpoint by model.gradient_checkpointing_enable() or by patchgen's own "
            "activation_checkpointing, not by wrapping layers (torch's checkpoint_wrapper, FSDP plugins)."
        )
    return next((call.cu_seq_lens for call in _RUNNING.calls if call.cu_seq_lens is not None), None)


def documents_apart() -> DocumentRows | None:
    """Where the documents of the packed rows went that a model computes now in rows of their own; None: nowhere."""
    return next((call.rows for call in reversed(_RUNNING.calls) if call.rows is not None), None)


_COUNTED_THROUGH = WeakIdKeyDictionary()  # position ids -> their version when the host knew it


def note_counted_through(position_ids: Tensor) -> None:
    """Says that these position ids start again nowhere, which the collator knows: nobody need ask the device."""
    _COUNTED_THROUGH[position_ids] = _version(position_ids)


def _is_counted_through(position_ids: object) -> bool:
    return (
        isinstance(position_ids, Tensor)
        and position_ids in _COUNTED_THROUGH
        and _COUNTED_THROUGH[position_ids] == _version(position_ids)  # nobody wrote to it since
    )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def asks_the_call(search: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Upstream's search for documents in position ids `(B, S)`, without its wait for the device where a call knows.

    It returns the number of each token's document, or None where there is one per row; that it may also return zeros is
    upstream's own rule, for compiled code, which cannot wait.
    """

    @wraps(search)
    def find(position_ids: Tensor) -> Tensor | None:
        if any(call.cu_seq_lens is not None for call in _RUNNING.calls):
            return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
        seen = [call.counted_through for call in _RUNNING.calls]
        if any(known is not None and (position_ids is known or position_ids._base is known) for known in seen):
            return None
        return search(position_ids)

    vars(find)["knows_patchgen"] = True
    return find


def _enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    names, takes_more = _parameters(type(module))
    given = dict(zip(names, args, strict=False)) | kwargs
    rows, kept = None, {}
    if not _RUNNING.calls:
        _carry_into_checkpoints(module)
        if takes_more and given.get(BOUNDS) is None:
            given |= _lengths(given)
        positions = _own_positions(module, given)
        if positions is not None:
            given[POSITIONS] = positions
        is_packed = given.get(BOUNDS) is not None
        separates = getattr(module, _SEPARATES, is_packed and not takes_documents(type(module)))
        if separates:
            _require_whole_rows(module)
        if separates and is_packed:
            rows = _rows(module, given, is_left=separates == LEFT)
            given, args = rows.apart(given), ()
            if separates == LEFT and MASK in names:
                given[MASK] = rows.is_token.long()
        if not takes_more:
            of_a_run = ("real_tokens", *(OF_A_STEP if parallel.current() is not None else ()))
            kept = {name: given.pop(name) for name in of_a_run if name in given and name not in names}
    positions = given.get(POSITIONS)
    whole = positions if _is_counted_through(positions) and rows is None else None
    if given.get(BOUNDS) is not None:
        _SEEN.set()
    _RUNNING.calls.append(Call(module, None if rows is not None else given.get(BOUNDS), rows, whole, kept))
    in_order = names[: len(args)]
    return (*(given.pop(name) for name in in_order), *args[len(in_order) :]), given


def _leave(module: nn.Module, args: object, output: Any) -> Any:
    calls = _RUNNING.calls
    while any(call.module is module for call in calls):  # calls above it ended in an error
        call = calls.pop()
        if call.module is module:
            return call.rows.together(output) if call.rows is not None and output is not None else None
    return None


_CHECKPOINTED: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()


def _carry_into_checkpoints(model: nn.Module) -> None:
    """Lets what transformers' activation checkpointing computes again find the calls that its first run was in."""
    if model not in _CHECKPOINTED:
        _CHECKPOINTED[model] = WeakSet(one for one in model.modules() if hasattr(one, "gradient_checkpointing"))
    for one in _CHECKPOINTED[model]:
        func = getattr(one, CHECKPOINT_ATTRIBUTE, None)
        if func is not None and not isinstance(func, _InItsCalls) and not checkpointing.is_ours(func):
            setattr(one, CHECKPOINT_ATTRIBUTE, _InItsCalls(func))


@dataclass(frozen=True)
class _InItsCalls:
    """`checkpoint(layer, ...)` as transformers hands it to its layers; each run of the layer is inside the calls of now."""

    checkpoint: Callable[..., Any]

    def __call__(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls = list(_RUNNING.calls)

        def run(*args: Any, **kwargs: Any) -> Any:
            before, _RUNNING.calls = _RUNNING.calls, calls  # the backward may run in a thread of its own
            try:
                return layer(*args, **kwargs)
            finally:
                _RUNNING.calls = before

        return self.checkpoint(run, *args, **kwargs)


def _require_whole_rows(module: nn.Module) -> None:
    """Of unpacked rows, too: what cannot be told where a document ends goes on over the bounds of slices as well."""
    state = parallel.sequence_parallel_state()
    if state is not None:
        raise ValueError(no_slices(type(module).__name__.removeprefix("FSDP"), state.sp))


def no_slices(name: str, sp: int) -> str:
    """Why a model of this name, whose documents are in rows of their own, does not train on slices of a sequence."""
    return (
        f"{name} computes each document in a row of its own, and this rank holds a slice of the rows (sp={sp}). "
        "Train this model with sp=1."
    )


def _rows(module: nn.Module, given: dict[str, Any], *, is_left: bool) -> DocumentRows:
    if given.get(MASK) is not None:
        raise ValueError(
            f"{type(module).__name__} got both {BOUNDS} and a padding mask: a packed batch has no padding."
        )
    tokens = _tokens(given)
    if tokens is None:
        raise ValueError(f"{type(module).__name__} got {BOUNDS} without input_ids or inputs_embeds.")
    return DocumentRows.of(given[BOUNDS], tokens.shape[0], tokens.shape[1], is_left=is_left)


@cache
def _parameters(model_class: type[nn.Module]) -> tuple[tuple[str, ...], bool]:
    """The names that a forward takes, and whether it takes others besides."""
    found = list(inspect.signature(model_class.forward).parameters.values())[1:]
    named = tuple(p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return named, any(p.kind is p.VAR_KEYWORD for p in found)


def _lengths(given: dict[str, Any]) -> dict[str, Any]:
    """The packing arguments that position ids `(B or 1, S)` tell by starting again; of a slice they tell nothing.

    One host sync per batch, as upstream's own search for documents. Where a collator adds a mask of ones, upstream does not
    search: here such a mask is taken for none.

    Raises:
        ValueError: position ids start again in a row that has padding as well.
    """
    positions, mask, tokens = given.get(POSITIONS), given.get(MASK), _tokens(given)
    state = parallel.current()
    if not isinstance(positions, Tensor) or positions.ndim != 2 or (state is not None and state.sp > 1):
        return {}
    if tokens is None or given.get("past_key_values") is not None or _is_counted_through(positions):
        return {}
    positions_BS = positions.expand(tokens.shape[0], -1)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != positions_BS.shape:
            return {}
        if not _is_all_ones(mask):
            _require_one_document(positions_BS, mask.bool())
            return {}
    found = _restarts(positions_BS)
    if not found:
        note_counted_through(positions)
    return found | {MASK: None} if found and mask is not None else found


_is_all_ones = TensorCache(lambda mask: bool((mask == 1).all()))


def _require_one_document(positions_BS: Tensor, is_token_BS: Tensor) -> None:
    """Refuses rows in which a token follows another and counts from the start again: the mask would hide that from all."""
    both_BR = is_token_BS[:, 1:] & is_token_BS[:, :-1]
    if bool((both_BR & (positions_BS[:, 1:] <= positions_BS[:, :-1])).any()):
        raise ValueError(
            f"{POSITIONS} start again within a row, so it holds several documents, and {MASK} has zeros, so it has padding: "
            f"with a mask documents would see each other. Hand over {BOUNDS} and {BOUNDS.replace('_q', '_k')} and no mask, "
            "with the padding as a document of its own, or one document per row."
        )


def _restarts(positions_BS: Tensor) -> dict[str, Any]:
    starts = torch.ones_like(positions_BS, dtype=torch.bool)
    starts[:, 1:] = positions_BS[:, 1:] != positions_BS[:, :-1] + 1
    return batch.document_lengths(starts) if bool(starts[:, 1:].any()) else {}


def _tokens(given: dict[str, Any]) -> Tensor | None:
    """The tokens `(B, s)` or their embeddings `(B, s, H)`."""
    ids = given.get("input_ids")
    return ids if ids is not None else given.get("inputs_embeds")


# ----------------------------------------------------------------------------------- positions that a model makes itself


def _own_positions(module: nn.Module, given: dict[str, Any]) -> Tensor | None:
    """Position ids `(B, s)` as the model makes them for each document alone, where those handed over count from 0.

    Embeddings of some models number tokens from their ids, from `padding_idx + 1` on and past the padding. A collator
    cannot know that: it counts from 0. Positions that count in another way are the caller's own and stay.
    """
    positions, ids = given.get(POSITIONS), given.get("input_ids")
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
    bounds = given.get(BOUNDS)
    if bounds is None:
        own, counted = numbering(ids), torch.arange(S, device=ids.device).expand(B, S)
    else:
        ends = _ends(bounds)
        tokens, pieces = ids.reshape(1, -1), itertools.pairwise(ends)
        own = torch.cat([numbering(tokens[:, a:b]) for a, b in pieces if b > a], dim=1).view(B, S)
        counted = mask_functions.positions_within(mask_functions.document_of(bounds, B, S))
    own, counted = own[:, start : start + s], counted[:, start : start + s]
    return torch.where((positions == counted).all(), own, positions)


_ends = TensorCache(lambda bounds: bounds.tolist())


_NUMBERING: WeakKeyDictionary[nn.Module, Callable[[Tensor], Tensor] | None] = WeakKeyDictionary()


def _numbering(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The rule by which an embedding of this model numbers the tokens `(B, S)` of whole rows; None: it has none."""
    if model not in _NUMBERING:
        _NUMBERING[model] = next(filter(None, map(_rule_of, model.modules())), None)
    return _NUMBERING[model]


def _rule_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """A method of the module, or a function of its file that its forward calls; both are told the padding id."""
    padding = getattr(module, "padding_idx", None)
    if padding is None or POSITIONS not in _parameters(type(module))[0]:
        return None
    rule = getattr(module, OWN_POSITIONS, None)
    if rule is None and OWN_POSITIONS in inspect.unwrap(type(module).forward).__code__.co_names:
        rule = getattr(sys.modules[type(module).__module__], OWN_POSITIONS, None)
    return partial(rule, padding_idx=padding) if rule is not None else None
