"""FP8 forms of weights that stay until the weight is written: by its optimizer, in the same pass, or made when first asked for.

    forms = fp8_kept.keep(tensor, transposed=True)      # by whoever owns the memory of the weight
    ...                                                 # the experts find them by the weight's address
    forms.forget()                                      # before the memory is written
    rows = forms.to_write(shape); ...; forms.mark_written()         # by an optimizer that writes both

Without them a step of M micro-batches quantises a weight twice in each, and once more in each layer that is computed again.
What is kept costs one byte per element and form. A CUDA graph may read what an optimizer writes between its replays; what a
call would keep for the next one is neither kept nor found while a graph is captured, for replays would not see a change.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from patchgen.kernels.moe.fp8_values import DTYPE, Quantised, quantise_transposed, quantise_weight, transpose_quantised


class KeptForms:
    """The forms of one weight.

    Attributes:
        tensor: the weight's memory, which lives as long as this.
        keeps_transposed: whether what the backward reads is kept, too, for a step of several micro-batches.
    """

    def __init__(self, tensor: Tensor, *, keeps_transposed: bool) -> None:
        self.tensor, self.keeps_transposed = tensor, keeps_transposed
        self._is_used = False
        self._version: int | None = None  # of the weight that the forms are of
        self._rows: Quantised | None = None
        self._transposed: Quantised | None = None
        self._written: Quantised | None = None  # where the optimizer writes, always the same memory

    def forget(self) -> None:
        """To be called before the weight is written."""
        self._version = self._rows = self._transposed = None

    def to_write(self, shape: torch.Size) -> Quantised | None:
        """Where an optimizer writes the rows of a weight of this shape; None as long as no experts have asked for them."""
        self.forget()
        if not self._is_used:
            return None
        if self._written is None:
            values = torch.empty(shape, dtype=DTYPE, device=self.tensor.device)
            self._written = Quantised(values, torch.empty(shape[:-1], dtype=torch.float32, device=values.device))
        self._rows = self._written
        return self._rows

    def mark_written(self) -> None:
        """Records that the rows, if an optimizer has written them, are those of the tensor as it is."""
        self._version = self.tensor._version

    def rows(self, weight: Tensor) -> Quantised:
        """As `quantise_weight`."""
        self._is_used = True
        if self._rows is not None and self._version == weight._version:
            if self._rows is self._written or not _is_capturing(weight):
                return self._rows
        elif not _is_capturing(weight):
            self.forget()
            self._rows, self._version = quantise_weight(weight), weight._version
            return self._rows
        return quantise_weight(weight)

    def transposed(self, weight: Tensor, row_scales: Tensor) -> Quantised:
        """As `quantise_transposed`, from the rows, which are half the bytes of the weight."""
        is_capturing = _is_capturing(weight)
        if (
            self._rows is None
            or self._version != weight._version
            or (is_capturing and self._rows is not self._written)
        ):
            return quantise_transposed(weight, row_scales)
        if self._transposed is not None and not is_capturing:
            return self._transposed
        made = transpose_quantised(self._rows)
        if self.keeps_transposed and not is_capturing:
            self._transposed = made
        return made


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


_by_address: weakref.WeakValueDictionary[int, KeptForms] = weakref.WeakValueDictionary()
"""Not an attribute of weights: a layer that is computed again hands its backward other tensors of the same memory."""


def keep(tensor: Tensor, *, transposed: bool) -> KeptForms:
    """Keeps the forms of the weight that is in this memory as long as what is returned lives."""
    forms = KeptForms(tensor, keeps_transposed=transposed)
    _by_address[tensor.data_ptr()] = forms
    return forms


def rows_of(weight: Tensor) -> Quantised:
    """The weight with a scale for each row, kept or made; its scales are the caller's own."""
    forms = _forms_of(weight)
    if forms is None:
        return quantise_weight(weight)
    found = forms.rows(weight)
    return Quantised(found.values, found.scales.clone())


def transposed_of(weight: Tensor, row_scales: Tensor) -> Quantised:
    """The weight with its other side last and the scales of `rows_of`, kept or made."""
    forms = _forms_of(weight)
    return quantise_transposed(weight, row_scales) if forms is None else forms.transposed(weight, row_scales)


def _forms_of(weight: Tensor) -> KeptForms | None:
    forms = _by_address.get(weight.data_ptr())
    if forms is None or forms.tensor.numel() != weight.numel() or not weight.is_contiguous() or weight.is_inference():
        return None
    return forms
