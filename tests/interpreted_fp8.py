"""Conversions to and from e4m3 in Triton's interpreter by torch: its own lose a carry when they round up to a power of two."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = interpreter._convert_float

    def convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        if target == tl.float8e4nv and source == tl.float32:
            quantised = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn)
            return quantised.view(torch.uint8).numpy().reshape(values.shape)
        if source == tl.float8e4nv and target in (tl.float32, tl.float16):
            wide = torch.float32 if target == tl.float32 else torch.float16
            bits = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8)).view(torch.float8_e4m3fn)
            return bits.to(wide).numpy().view(np.uint32 if wide == torch.float32 else np.uint16).reshape(values.shape)
        return upstream(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
