"""FP8 forms of weights that stay until the weight is written: micro-batches and layers that are computed again share them.

    forms = fp8_kept.keep(tensor, transposed=True)      # by whoever owns the memory of the weight
    ...                                                 # the experts find them by the weight's address
    forms.forget()                                      # before the memory is written

A step of M micro-batches quantises a weight twice in each, and once more in each layer that is computed again. What
is kept costs one byte per element and form. While a CUDA graph is captured nothing is kept or found: a replay would not
see that the weight has changed.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from patchgen.kernels.moe.fp8_values import Quantised, quantise_transposed, quantise_weight, transpose_quantised


class KeptForms:
    """The forms of one weight, made when they are first asked for.

    Attributes:
        tensor: the weight's memory, which lives as long as this.
        keeps_transposed: whether what the backward reads is kept, too, for a step of several micro-batches.
    """

    def __init__(self, tensor: Tensor, *, keeps_transposed: bool) -> None:
        self.tensor, self.keeps_transposed = tensor, keeps_transposed
        self._version: int | None = None
        self._rows: Quantised | None = None
        self._transposed: Quantised | None = None

    def forget(self) -> None:
        """To be called before the weight is written, and where its forms are not needed for long."""
        self._version = self._rows = self._transposed = None

    def rows(self, weight: Tensor) -> Quantised:
        """As `quantise_weight`."""
        if self._rows is None or self._version != weight._version:
            self.forget()
            self._rows, self._version = quantise_weight(weight), weight._version
        return self._rows

    def transposed(self, weight: Tensor, row_scales: Tensor) -> Quantised:
        """As `quantise_transposed`, from the kept rows, which are half the bytes of the weight."""
        if self._rows is None or self._version != weight._version:
            return quantise_transposed(weight, row_scales)
        if self._transposed is not None:
            return self._transposed
        made = transpose_quantised(self._rows)
        if self.keeps_transposed:
            self._transposed = made
        return made


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
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return forms
