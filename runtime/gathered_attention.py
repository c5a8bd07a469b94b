"""Attention that heads cannot divide, under sequence parallelism: each rank computes it on the full sequence and keeps its slice.

Hand-written attention has no point at which heads could be exchanged for tokens. Attention that selects its keys (an indexer
scores them, from the mask as a tensor) sees other keys in each row of each head. So inputs are gathered and the output is sliced:

    hidden states (B, s, H)   gather   (B, S, H)   the model's code, the full mask   (B, S, H)   slice   (B, s, H)

Gradients of the gathered tokens are summed over the ranks, each of which has those of its own slice. The rest of a layer runs
on slices; memory and time of such an attention are those of the full sequence on every rank.

    B rows   S tokens per row   s = S / sp of this rank   H width
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchgen.runtime import parallel
from patchgen.runtime.attention_masks import MaskStructure
from patchgen.runtime.parallel.collectives import gather_rows
from patchgen.runtime.parallel.media import set_replicated
from patchgen.runtime.parallel.state import ParallelState

MASK = "attention_mask"
SEQUENCE_DIMS = {"hidden_states": 1, "position_ids": -1, "position_embeddings": 1}
"""Arguments of transformers' attention classes with an entry for each token -> that dimension."""
LAYER_ARGUMENTS = ("encoder_hidden_states", "encoder_attention_mask", "use_cache", "output_attentions")
"""Arguments of a layer that its self-attention does not take: for cross attention, and for what it returns."""
_PREPARED = "patchgen_gathers_for_attention"


def prepare(model: nn.Module, arguments: object = None) -> None:
    """Wraps the hand-written attention in `model` to run on full sequences, before its first call on a slice."""
    state = parallel.current()
    if state is None or state.sp == 1 or getattr(model, _PREPARED, False):
        return
    setattr(model, _PREPARED, True)
    selecting = {type(module) for module in model.modules() if _selects_keys(module)}
    for parent in model.modules():
        for module in parent.children():
            selects = type(module) in selecting  # layers without an indexer take the keys of the layer before
            if not hasattr(module, _PREPARED) and (selects or _is_hand_written(module, parent)):
                setattr(module, _PREPARED, True)
                set_replicated(module, replicated=True)  # transformers' table gets full queries and keys
                module.forward = partial(_run_on_full_sequence, module.forward, tuple(_parameters(module)))


def _selects_keys(module: nn.Module) -> bool:
    """Whether an attention has a module that is given the mask and attends to nothing: the indexer of its keys."""
    names = _parameters(module)
    if (
        not names
        or next(iter(names)) not in SEQUENCE_DIMS
        or MASK not in names
        or not _uses_attention_table(type(module))
    ):
        return False
    return any(MASK in _parameters(child) and not _uses_attention_table(type(child)) for child in module.children())


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

    members = [member for cls in attention.__mro__ for member in vars(cls).values()]
    methods = [inspect.unwrap(member) for member in members if inspect.isfunction(member)]
    return any(
        method.__globals__.get(name) is ALL_ATTENTION_FUNCTIONS
        for method in methods
        for name in method.__code__.co_names
    )


def _run_on_full_sequence(forward: Callable, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Calls an attention's forward: on the full sequence if its mask covers a slice and all its tensors can be gathered."""
    arguments = dict(zip(names, args, strict=False)) | kwargs
    mask = arguments.get(MASK)
    if not isinstance(mask, MaskStructure) or mask.definition.state is None:
        return forward(*args, **kwargs)  # on a slice, the mask itself raises an error
    full = mask.shape[2] * mask.definition.state.sp
    tensors = {n: arguments[n] for n in names if n not in SEQUENCE_DIMS and isinstance(arguments.get(n), Tensor)}
    # A tensor of the full length is of such an attention, in a layer before.
    if any(tensor.ndim < 2 or tensor.shape[1] != full for tensor in tensors.values()):
        return forward(*args, **kwargs)
    state = mask.definition.state
    gathered = {
        name: _gather(arguments[name], dim, state)
        for name, dim in SEQUENCE_DIMS.items()
        if arguments.get(name) is not None
    }
    output = forward(**(arguments | gathered | {MASK: mask.gathered()}))
    s = mask.shape[2]
    attended, *other_outputs = output if isinstance(output, tuple) else (output,)
    local = attended.narrow(1, state.sp_rank * s, s)
    return (local, *other_outputs) if isinstance(output, tuple) else local


def _gather(slices: Any, dim: int, state: ParallelState) -> Any:
    if isinstance(slices, tuple):
        return tuple(_gather(part, dim, state) for part in slices)
    rows = gather_rows(slices.transpose(0, dim), state.sp_group, operation="gather a sequence for its attention")
    return rows.transpose(0, dim)
