"""Attention that heads cannot divide, under sequence parallelism: each rank computes it on the full sequence and keeps its slice.

Hand-written attention has no point at which heads could be exchanged for tokens. Attention that selects its keys (an indexer
scores them, from the mask as a tensor) sees other keys in each row of each head. And what takes no document bounds gets each
document in its own row. So inputs are gathered and the output is sliced:

    hidden states (B, s, H)   gather   (B, S, H)   the model's code, the full mask   (B, S, H)   slice   (B, s, H)
                               unpack  (D, L, H)   one document per row              (D, L, H)   pack

Gradients of the gathered tokens are summed over the ranks, each of which has those of its own slice. The rest of a layer runs
on slices; memory and time of such an attention are those of the full sequence on every rank.

    B rows   S tokens per row   s = S / sp of this rank   H width   D documents, of up to L tokens
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from patchgen.runtime import model_calls, parallel
from patchgen.runtime.attention_masks import MaskStructure, UnsupportedError
from patchgen.runtime.attention_overlays import OVERLAYS
from patchgen.runtime.document_rows import PACKING, DocumentRows
from patchgen.runtime.parallel import checkpointing
from patchgen.runtime.parallel.collectives import gather_rows
from patchgen.runtime.parallel.media import is_replicated, set_replicated
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.tensor_cache import TensorCache

MASK, POSITIONS = "attention_mask", "position_ids"
SEQUENCE_DIMS = {"hidden_states": 1, POSITIONS: -1, "position_embeddings": 1}
"""Arguments of transformers' attention classes with an entry for each token -> that dimension."""
TOKEN_MASKS = ("conv_mask",)
"""Arguments `(B, s)` that are False, or 0, for padding; None if this slice has none."""
LAYER_ARGUMENTS = ("encoder_hidden_states", "encoder_attention_mask", "use_cache", "output_attentions")
"""Arguments of a layer that its self-attention does not take: for cross attention, and for what it returns."""
SDPA = "scaled_dot_product_attention"
OTHER_SEQUENCES = ("encoder_hidden_states", "key_value_states", "cross_attention_states")
"""Arguments with tokens of another sequence, to which a module then attends."""
_WRAPPED = "patchgen_gets_full_sequences"


def prepare(model: nn.Module) -> None:
    """Before the first call of `model` on a slice of a sequence, wraps what needs the full sequence."""
    if not hasattr(model, model_calls.GATHERS):
        setattr(model, model_calls.GATHERS, None)
        model.register_forward_pre_hook(_wrap_modules)


def _wrap_modules(model: nn.Module, arguments: object) -> None:
    """Wraps hand-written attention and attention that selects its keys; if each document gets its own row, all that mixes tokens.

    Raises:
        ValueError: nothing is known to mix the tokens of a model whose documents get their own rows.
    """
    state = parallel.sequence_parallel_state()
    if state is None or getattr(model, model_calls.GATHERS) is not None or not model_calls.is_outermost(model):
        return
    in_rows = bool(model_calls.separation(model))
    modules = mixing_tokens(model) if in_rows else attending_to_all(model)
    if in_rows and not modules:
        raise ValueError(model_calls.no_slices(type(model).__name__.removeprefix("FSDP"), state.sp))
    setattr(model, model_calls.GATHERS, in_rows)
    for module in modules:
        if not hasattr(module, _WRAPPED) and not is_replicated(module):
            setattr(module, _WRAPPED, True)
            set_replicated(module, replicated=True)  # transformers' table gets full queries and keys
            module.forward = partial(_run_on_full_sequence, module, module.forward, in_rows)


def attending_to_all(model: nn.Module) -> list[nn.Module]:
    """Attention that heads cannot divide: written by hand, or with other keys or biases for each token."""
    selecting = {type(module) for module in model.modules() if _selects_keys(module)}
    # Layers without an indexer take the keys of the layer before.
    return _outermost(model, lambda module, parent: type(module) in selecting or _is_hand_written(module, parent))


def mixing_tokens(model: nn.Module) -> list[nn.Module]:
    """What mixes tokens: attention, or what else takes a mask or owns a convolution."""
    return _outermost(model, lambda module, _: _mixes_tokens(module))


def _outermost(model: nn.Module, is_one: Callable[[nn.Module, nn.Module], bool]) -> list[nn.Module]:
    """The outermost modules, inside layers, that satisfy `is_one(module, parent)`; not in towers, whose config is another one."""
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    text_config = model.config.get_text_config(decoder=True)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]  # of transformers

    def search(parent: nn.Module) -> Iterator[nn.Module]:
        for child in parent.children():
            config = getattr(child, "config", None)
            if isinstance(config, PreTrainedConfig) and config.get_text_config(decoder=True) is not text_config:
                continue
            if not isinstance(child, PreTrainedModel | GradientCheckpointingLayer) and is_one(child, parent):
                yield child
            else:
                yield from search(child)

    return list(search(model))


def _mixes_tokens(module: nn.Module) -> bool:
    takes_mask = MASK in _parameters(module)
    forwards_mask = any(MASK in _parameters(inner) for inner in module.modules() if inner is not module)
    attends = takes_mask and (_uses_attention_table(type(module)) or not forwards_mask)
    return attends or _attends_without_mask(module) or _owns_convolution(module)


def _attends_without_mask(module: nn.Module) -> bool:
    """Whether a module that is given tokens alone calls torch's attention."""
    required = [
        one for one in _parameters(module).values() if one.default is one.empty and one.kind is not one.VAR_KEYWORD
    ]
    return len(required) == 1 and any(SDPA in method.__code__.co_names for method in _methods(type(module)))


def _owns_convolution(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in module.children())


def _selects_keys(module: nn.Module) -> bool:
    """Whether an attention passes transformers' table keys or biases of each token, or has a module that is given the mask and
    attends to nothing: the indexer of its keys."""
    names = _parameters(module)
    if (
        not names
        or next(iter(names)) not in SEQUENCE_DIMS
        or MASK not in names
        or not _uses_attention_table(type(module))
    ):
        return False
    has_indexer = any(
        MASK in _parameters(child) and not _uses_attention_table(type(child)) for child in module.children()
    )
    return has_indexer or any(name in OVERLAYS for names in _keywords(type(module)) for name in names)


def _is_hand_written(module: nn.Module, parent: nn.Module) -> bool:
    """Whether a module always attends by its own code. If its parent takes more arguments with the mask, the parent may replace
    it by another form for long sequences (block-sparse attention)."""
    names = _parameters(module)
    if not names or next(iter(names)) not in SEQUENCE_DIMS or MASK not in names:
        return False
    inside = list(module.modules())[1:]
    # A mask in `**kwargs` reaches the attention that reads transformers' table.
    forwards_mask = any(MASK in _parameters(child) or _uses_attention_table(type(child)) for child in inside)
    parent_names = {
        name for name, parameter in _parameters(parent).items() if parameter.kind is not parameter.VAR_KEYWORD
    }
    extra = parent_names - {*names, *LAYER_ARGUMENTS}
    # If only the parent uses transformers' table, the module is the indexer of its keys.
    uses_table = any(_uses_attention_table(type(owner)) for owner in (module, parent))
    return not forwards_mask and not (extra and MASK in _parameters(parent)) and not uses_table


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(type(module).forward).parameters.items())[1:])


def _uses_attention_table(attention: type) -> bool:
    """Whether a method of a class reads transformers' table of attention functions, under any name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return any(
        method.__globals__.get(name) is ALL_ATTENTION_FUNCTIONS
        for method in _methods(attention)
        for name in method.__code__.co_names
    )


def _keywords(module: type) -> list[tuple]:
    """The names of the keywords in each call of a class's methods, among other tuples of constants."""
    constants = [constant for method in _methods(module) for constant in method.__code__.co_consts]
    return [constant for constant in constants if isinstance(constant, tuple)]


def _methods(module: type) -> list[Any]:
    members = [member for cls in module.__mro__ for member in vars(cls).values()]
    return [inspect.unwrap(member) for member in members if inspect.isfunction(member)]


_ROWS: TensorCache[dict[tuple[int, int], DocumentRows]] = TensorCache(lambda _bounds: {})


def _run_on_full_sequence(module: nn.Module, forward: Callable, in_rows: bool, *args: Any, **kwargs: Any) -> Any:
    """Calls a module's forward on the full sequence, with one document of packed rows per row if `in_rows`."""
    names = tuple(_parameters(module))
    arguments = dict(zip(names, args, strict=False)) | kwargs
    masks = [mask for mask in tree_leaves(arguments.get(MASK)) if isinstance(mask, MaskStructure)]
    state = masks[0].definition.state if masks else parallel.sequence_parallel_state()
    if state is None:
        return forward(*args, **kwargs)
    bounds = checkpointing.remember(model_calls.bounds_of_call)
    tokens_BsH = arguments[names[0]]
    of_tokens = [name for name in names if name in TOKEN_MASKS or (name == MASK and in_rows and not masks)]
    dims = _token_dims(module, arguments, of_tokens)
    absent = [name for name in of_tokens if arguments.get(name) is None]  # of a slice without padding, not of others
    for name in of_tokens:
        ones_Bs = tokens_BsH.new_ones(tokens_BsH.shape[:2], dtype=torch.bool)
        arguments[name] = ones_Bs if name in absent or bounds is not None else arguments[name].bool()
    arguments |= _gathered(arguments, dims, state)
    arguments |= {name: None for name in absent if bounds is not None or bool(arguments[name].all())}
    rows = None
    if bounds is not None and in_rows:
        rows = _rows_of(bounds, *arguments[names[0]].shape[:2])
        arguments = {name: value for name, value in arguments.items() if name not in PACKING}
        for name in dims:
            unpack = partial(rows.unpack_field, name) if name == POSITIONS else rows.unpack_states
            arguments |= {name: tree_map(unpack, arguments[name])} if arguments.get(name) is not None else {}
    if masks:
        arguments[MASK] = tree_map(partial(_converted, rows=rows, padding=masks[0].padding), arguments[MASK])
    with parallel.using(None), model_calls.without_documents(module) if in_rows else contextlib.nullcontext():
        output = forward(**arguments)
    first, *others = output if isinstance(output, tuple | list) else (output,)
    packed_BSH = first if rows is None else rows.packed(first)
    s = packed_BSH.shape[1] // state.sp
    local_BsH = packed_BSH.narrow(1, state.sp_rank * s, s)
    return type(output)((local_BsH, *others)) if isinstance(output, tuple | list) else local_BsH


def _token_dims(module: nn.Module, arguments: dict[str, Any], of_tokens: list[str]) -> dict[str, int]:
    """The arguments with an entry for each token of the slice -> that dimension: the same on every rank.

    These are arguments known by their names, tensors `(B, s, H)` that every call must pass, and masks of tokens.

    Raises:
        UnsupportedError: another argument is of this slice, or of another sequence.
    """
    parameters = _parameters(module)
    B, s = arguments[next(iter(parameters))].shape[:2]
    tensors = {name: arguments[name] for name in parameters if isinstance(arguments.get(name), Tensor)}
    required = [name for name in tensors if parameters[name].default is inspect.Parameter.empty and name != MASK]
    vectors = [name for name in required if tensors[name].ndim == 3 and tensors[name].shape[:2] == (B, s)]
    for name, tensor in tensors.items():
        if name in of_tokens:
            is_known = tensor.shape == (B, s)
        else:  # what has the full length is of such a module in a layer before
            is_slice = name == MASK or name in OTHER_SEQUENCES or (tensor.ndim == 3 and tensor.shape[:2] == (B, s))
            is_known = name in (*SEQUENCE_DIMS, *vectors) or not is_slice
        if not is_known:
            raise UnsupportedError(
                f"{type(module).__name__} is computed on the full sequence, but its {name} {tuple(tensor.shape)} is of this "
                f"rank's slice of {s} tokens, or of another sequence. Train this model with sp=1."
            )
    return SEQUENCE_DIMS | dict.fromkeys((*vectors, *of_tokens), 1)


def _converted(mask: Any, *, rows: DocumentRows | None, padding: Tensor | None) -> Any:
    """The mask of the full sequence: one of attention, or of the tokens that are no padding."""
    if not isinstance(mask, MaskStructure):
        return padding if isinstance(mask, Tensor) else mask
    return mask.gathered() if rows is None else mask.in_rows(rows)


def _rows_of(bounds: Tensor, B: int, S: int) -> DocumentRows:
    if (B, S) not in _ROWS(bounds):
        _ROWS(bounds)[B, S] = DocumentRows.of(bounds, B, S)
    return _ROWS(bounds)[B, S]


def _gathered(arguments: dict[str, Any], dims: dict[str, int], state: ParallelState) -> dict[str, Any]:
    """The arguments with an entry for each token, of the full sequence."""

    def gather(slices: Tensor, dim: int) -> Tensor:
        rows = gather_rows(slices.transpose(0, dim), state.sp_group, operation="gather a sequence for its attention")
        return rows.transpose(0, dim).contiguous()

    given = {name: dim for name, dim in dims.items() if arguments.get(name) is not None}
    return {name: tree_map(partial(gather, dim=dim), arguments[name]) for name, dim in given.items()}
