"""The masks that transformers builds under our attention names: structure for our backends, a tensor for other code.

    our attention                reads window, padding and documents from it; nothing of size S x S exists
    hand-written attention       `scores + mask`, `mask[:, 0]`, `mask.to(...)`: it becomes upstream's eager mask on use,
                                 once for all layers, with documents masked from each other

It is not a tensor, so neither FSDP's casts nor checkpointing touch it.

    B rows   S tokens per row   s = S / sp of this rank
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from patchgen.runtime import mask_functions, model_calls, parallel
from patchgen.runtime.document_rows import DocumentRows
from patchgen.runtime.parallel import collectives
from patchgen.runtime.parallel.media import inside_replicated
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.tensor_cache import TensorCache
from patchgen.runtime.uncompiled import uncompiled

_ALL = {"bidirectional_mask_function"}
_PLAIN = {"causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay"}
_PACKED = {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"}


class UnsupportedError(ValueError):
    """A model needs attention that cannot be computed here as upstream computes it; the message says what to do."""


@dataclass(frozen=True, eq=False)
class MaskDefinition:
    """What mask tensors are built from.

    Attributes:
        function: upstream's mask function, with the packing that it found in the position ids.
        arguments: the other arguments of upstream's mask builders: sizes, offsets, the 2-D mask, dtype, device, ...
        state: the layout, if this rank has a slice of the sequence; else None.
        padding: as in `MaskStructure`.
    """

    function: Callable
    arguments: dict[str, Any]
    state: ParallelState | None
    padding: Tensor | None

    def gathered(self) -> MaskDefinition:
        """The definition of the full sequence's mask."""
        if self.state is None:
            return self
        s = self.arguments["q_length"]
        function = mask_functions.for_full_sequence(self.function, s, self.state.sp, self.padding)
        sizes = dict.fromkeys(("q_length", "kv_length"), s * self.state.sp)
        return MaskDefinition(
            function, {**self.arguments, **sizes, "attention_mask": self.padding}, None, self.padding
        )

    def build(self, builder: Callable, bounds: Tensor | None, **overrides: Any) -> Any:
        """The mask of the full sequence, from an upstream builder, restricted to documents if there are bounds."""
        definition = self.gathered()
        function, arguments = definition.function, {**definition.arguments, **overrides}
        if bounds is not None:
            document_BS = mask_functions.document_of(bounds, arguments["batch_size"], arguments["kv_length"])
            is_packed = mask_functions.find_packing(function) is not None
            position_BS = None if is_packed else mask_functions.positions_within(document_BS)
            function = mask_functions.within_documents(function, document_BS, position_BS)
        return builder(mask_function=function, **arguments)


@dataclass(frozen=True, eq=False)
class MaskStructure:
    """Replaces a mask tensor. Code other than our attention gets upstream's eager mask when it uses it.

    Attributes:
        definition: what mask tensors are built from.
        causal: whether no token sees a later one; None for overlays, which decide it themselves.
        window: None, or the sliding window. Most models pass it to their attention as well; some only put it in the mask.
        is_overlay: the mask has more conditions than order, window, packing and padding: backends need the mask itself.
        is_packed: position ids show several documents per row.
        document: `(B, S)`, the index of each token's document that upstream found in the position ids; None if it found none,
            and on a slice of the sequence, whose position ids do not show document bounds.
        cu_seq_lens: None, or the document bounds that the model was called with when the mask was built.
        padding: None, or `(B, S)` bool of the full sequence, False for padding.
    """

    definition: MaskDefinition
    causal: bool | None = None
    window: int | None = None
    is_overlay: bool = False
    is_packed: bool = False
    document: Tensor | None = None
    cu_seq_lens: Tensor | None = None
    padding: Tensor | None = None
    _built: dict = field(default_factory=dict, repr=False)  # kind -> (bounds, mask): shared by all layers

    # ------------------------------------------------------------------------------------ what our attention reads

    def bounds(self, cu_seq_lens: Tensor | None, where: str) -> Tensor | None:
        """The `cu_seq_lens` of the full sequence: the argument, else those known here; None: not packed.

        Raises:
            ValueError: position ids restart within a slice, and there are no document bounds.
        """
        if cu_seq_lens is not None:
            return cu_seq_lens
        if self.cu_seq_lens is not None or not self.is_packed:
            return self.cu_seq_lens
        if self.document is None:
            raise ValueError(
                f"{where}: the position ids start again within this rank's slice of the sequence, but cu_seq_lens_q is "
                "missing. The documents of the full sequence cannot be found in a slice: pass cu_seq_lens_q to the model "
                "(runtime.parallel.batch.slice_batch computes them)."
            )
        return _bounds_of(self.document)

    def dense(self, bounds: Tensor | None) -> Tensor:
        """The mask of the full sequence, `(B, 1, S, S)` bool, True where a query sees a key."""
        from transformers.masking_utils import sdpa_mask

        options = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return self._cached("dense", bounds, lambda: self.definition.build(sdpa_mask, bounds, **options))

    def blocks(self, bounds: Tensor | None) -> Any:
        """The same as a BlockMask of flex attention."""
        from transformers.masking_utils import flex_attention_mask

        return self._cached("blocks", bounds, lambda: self.definition.build(flex_attention_mask, bounds))

    def gathered(self) -> MaskStructure:
        """This mask for code that gets the full sequence; shared by all layers."""
        return self._cached("gathered", None, lambda: replace(self, definition=self.definition.gathered(), _built={}))

    def in_rows(self, rows: DocumentRows) -> MaskStructure:
        """This mask for code that gets each document in its own row, `(D, L)`, with padding after the tokens.

        Raises:
            UnsupportedError: it looks up what a token is (of which image, ...).
        """
        full = self.definition.gathered()
        if mask_functions.looks_up(full.function):
            raise UnsupportedError(
                f"{_calling_module()} gets each document in its own row, but its mask looks up values of packed rows. Train this "
                "model with sp=1."
            )
        D, L = rows.is_token.shape
        sizes = {"batch_size": D, "q_length": L, "kv_length": L, "attention_mask": None}
        function = mask_functions.for_full_sequence(full.function, L, 1, rows.is_token)
        definition = MaskDefinition(function, {**full.arguments, **sizes}, None, None)
        plain: dict[str, Any] = {"is_packed": False, "document": None, "cu_seq_lens": None, "padding": None}
        return self._cached("rows", rows.is_token, lambda: replace(self, definition=definition, _built={}, **plain))

    def _cached(self, kind: object, bounds: Tensor | None, build: Callable[[], Any]) -> Any:
        cached = self._built.get(kind)
        if cached is None or cached[0] is not bounds:
            with torch.no_grad():
                cached = self._built[kind] = (bounds, build())
        return cached[1]

    # ----------------------------------------------------------------------------------- the interface of a tensor

    @uncompiled
    def tensor(self, dtype: torch.dtype | None = None) -> Tensor:
        """Upstream's eager mask, `(B, 1, S, S)` in `dtype`: 0 where a query sees a key, else the lowest number.

        Raises:
            UnsupportedError: this rank has a slice of the sequence, so the caller would attend to that slice only.
        """
        from transformers.masking_utils import eager_mask

        if self.definition.state is not None:
            raise UnsupportedError(
                f"{_calling_module()} uses its mask as a tensor, so its attention is hand-written and would see only this "
                f"rank's slice of the sequence (sp={self.definition.state.sp}). Train this model with sp=1."
            )
        dtype = dtype or self.dtype
        bounds = self.bounds(None, "the mask")
        return self._cached(dtype, bounds, lambda: self.definition.build(eager_mask, bounds, dtype=dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.definition.arguments["dtype"]

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        return torch.device(self.definition.arguments["device"])

    @property
    def ndim(self) -> int:
        """The tensor's number of dimensions."""
        return 4

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape; on a slice of the sequence, that of the slice's mask."""
        sizes = self.definition.arguments
        return torch.Size((sizes["batch_size"], 1, sizes["q_length"], sizes["kv_length"]))

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        """As `Tensor.dim`."""
        return self.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> MaskStructure | Tensor:
        """Itself for another device or floating dtype, since `tensor` takes the user's dtype; else the tensor's `to`."""
        dtypes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
        return self if all(dtype.is_floating_point for dtype in dtypes) else self.tensor().to(*args, **kwargs)

    def __getitem__(self, index: Any) -> MaskStructure | Tensor:
        return self if _selects_all(index, self.shape) else self.tensor()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"An attention mask has no attribute '{name}'.")
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls the function on the tensor, in the dtype of the other operand: the lowest number does not fit a smaller one."""
        leaves = tree_leaves((args, kwargs))
        dtype = next((a.dtype for a in leaves if isinstance(a, Tensor) and a.is_floating_point()), None)
        tensors = tree_map(lambda a: a.tensor(dtype) if isinstance(a, cls) else a, (args, kwargs or {}))
        return func(*tensors[0], **tensors[1])


def _operation(call: Callable, *, swapped: bool = False) -> Callable:
    def operate(self: MaskStructure, *others: Any) -> Any:
        if any(other is None for other in others):
            return NotImplemented
        dtype = next((o.dtype for o in others if isinstance(o, Tensor) and o.is_floating_point()), None)
        values = [self.tensor(dtype), *(o.tensor(dtype) if isinstance(o, MaskStructure) else o for o in others)]
        return call(*(reversed(values) if swapped else values))

    return operate


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    setattr(MaskStructure, f"__{_name}__", _operation(getattr(operator, f"__{_name}__")))
    setattr(MaskStructure, f"__r{_name}__", _operation(getattr(operator, f"__{_name}__"), swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert"):
    setattr(MaskStructure, f"__{_name}__", _operation(getattr(operator, f"__{_name}__")))

_bounds_of = TensorCache(mask_functions.bounds_of)  # one host sync per batch, not per layer


def _selects_all(index: Any, shape: torch.Size) -> bool:
    """Whether an index selects a full tensor of this shape, unchanged."""
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > len(shape) or any(part is not Ellipsis and not isinstance(part, slice) for part in parts):
        return False
    if Ellipsis in parts:
        dots = parts.index(Ellipsis)
        parts = (*parts[:dots], *[slice(None)] * (len(shape) - len(parts) + 1), *parts[dots + 1 :])
    return all(
        part.start in (None, 0) and part.step in (None, 1) and (part.stop is None or part.stop >= length)
        for part, length in zip(parts, shape, strict=False)
    )


def _calling_module() -> str:
    """The class of the innermost module whose code runs, for an error message."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return type(module).__name__
        frame = frame.f_back
    return "The attention"


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable,
    attention_mask: Tensor | MaskStructure | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> MaskStructure | None:
    """The mask of a call, for transformers' mask interface; None if upstream's eager mask is None, too."""
    if isinstance(attention_mask, MaskStructure):  # already prepared, as a 4-D tensor is
        return attention_mask
    state = parallel.current()
    is_slice = state is not None and state.sp > 1 and not inside_replicated()
    padding = _padding(attention_mask, q_length, state if is_slice else None) if attention_mask is not None else None
    if allow_is_bidirectional_skip and padding is None and local_size is None:
        return None
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "attention_mask": attention_mask,
        "dtype": torch.float32,
        "device": "cpu",
        **{name: value for name, value in kwargs.items() if name not in ("allow_is_causal_skip", "config")},
    }
    parts = set(mask_functions.condition_names(mask_function))
    is_packed = mask_functions.find_packing(mask_function) is not None or bool(parts & _PACKED)
    is_overlay = bool(parts - _PLAIN - _PACKED)
    return MaskStructure(
        definition=MaskDefinition(mask_function, arguments, state if is_slice else None, padding),
        causal=None if is_overlay else "causal_mask_function" in parts,
        window=local_size,
        is_overlay=is_overlay,
        is_packed=is_packed,
        document=mask_functions.document_numbers(mask_function) if is_packed and not is_slice else None,
        cu_seq_lens=model_calls.documents_of(kwargs.get("config")) if parts != _ALL else None,
        padding=padding,
    )


def _padding(attention_mask: Tensor, q_length: int, state: ParallelState | None) -> Tensor | None:
    """The full `(B, S)` padding mask, False for padding; None without padding. One host sync per forward."""
    if state is not None and attention_mask.shape[1] == q_length:
        attention_mask = collectives.all_gather(
            attention_mask, state.sp_group, dim=1, operation="gather the padding mask over SP"
        )
    return None if bool(attention_mask.all()) else attention_mask.bool()
