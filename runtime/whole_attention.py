"""Attention that a model computes by its own code, on ranks that share a sequence: each is given all of it, and keeps its slice.

Such code has no place at which heads could be exchanged for tokens. What it takes is gathered, and what it gives is cut:

    hidden states (B, s, H)   gather   (B, S, H)   the model's code, the whole mask   (B, S, H)   cut   (B, s, H)

Gradients of the gathered tokens are summed over the ranks, each of which has those of its own slice. All else of a layer is
divided; memory and time of such an attention are those of the whole sequence on every rank.

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
from patchgen.runtime.parallel.state import ParallelState

MASK = "attention_mask"
ALONG = {"hidden_states": 1, "position_ids": -1, "position_embeddings": 1}
"""The arguments of transformers' attention classes that have an entry for each token of the slice, and where."""
OTHERS = ("encoder_hidden_states", "encoder_attention_mask", "use_cache", "output_attentions")
"""What a layer takes beside what its attention does: for its attention to another sequence, and for what it returns."""
_PREPARED = "patchgen_gathers_for_attention"


def prepare(model: nn.Module, arguments: object = None) -> None:
    """Hands whole sequences to the attention below that is the model's own code; before its first call on a slice."""
    state = parallel.current()
    if state is None or state.sp == 1 or getattr(model, _PREPARED, False):
        return
    setattr(model, _PREPARED, True)
    for holder in model.modules():
        for module in holder.children():
            if not hasattr(module, _PREPARED) and _is_own_code(module, holder):
                setattr(module, _PREPARED, True)
                module.forward = partial(_on_slices, module.forward, tuple(_parameters(module)))


def _is_own_code(module: nn.Module, holder: nn.Module) -> bool:
    """Whether a module attends by its own code, and always: one that another form takes the place of, as sequences grow, is
    in a module that takes more for it (the bands of blocks that see each other)."""
    names = _parameters(module)
    if not names or next(iter(names)) not in ALONG or MASK not in names:
        return False
    hands_on = any(MASK in _parameters(child) for child in list(module.modules())[1:])
    more = {name for name, one in _parameters(holder).items() if one.kind is not one.VAR_KEYWORD} - {*names, *OTHERS}
    asks = any(
        _asks_transformers(type(one)) for one in (module, holder)
    )  # of a holder that asks: an indexer of its keys
    return not hands_on and not (more and MASK in _parameters(holder)) and not asks


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(type(module).forward).parameters.items())[1:])


def _asks_transformers(attention: type) -> bool:
    """Whether a method of a class reads transformers' table of attention functions, whatever name it has there."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    methods = [
        inspect.unwrap(one) for kind in attention.__mro__ for one in vars(kind).values() if inspect.isfunction(one)
    ]
    return any(
        one.__globals__.get(name) is ALL_ATTENTION_FUNCTIONS for one in methods for name in one.__code__.co_names
    )


def _on_slices(forward: Callable, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """A call of an attention's forward: on the whole where its mask is of a slice, and all that it takes is known."""
    given = dict(zip(names, args, strict=False)) | kwargs
    mask = given.get(MASK)
    unknown = [n for n in names if n not in ALONG and isinstance(given.get(n), Tensor)]
    if not isinstance(mask, MaskStructure) or mask.drawing.state is None or unknown:
        return forward(*args, **kwargs)  # of a slice, the mask itself refuses
    state = mask.drawing.state
    whole = {name: _gathered(given[name], dim, state) for name, dim in ALONG.items() if given.get(name) is not None}
    output = forward(**(given | whole | {MASK: mask.of_the_whole()}))
    s = mask.shape[2]
    attended, *others = output if isinstance(output, tuple) else (output,)
    own = attended.narrow(1, state.sp_rank * s, s)
    return (own, *others) if isinstance(output, tuple) else own


def _gathered(slices: Any, dim: int, state: ParallelState) -> Any:
    if isinstance(slices, tuple):
        return tuple(_gathered(one, dim, state) for one in slices)
    rows = gather_rows(slices.transpose(0, dim), state.sp_group, operation="gather a sequence for its attention")
    return rows.transpose(0, dim)
