"""The weight gradients in Gluon, which has no interpreter: here they are compiled for Hopper, on any machine.

On a GPU `test_moe_triton.py` compares them with the Triton kernel, bit for bit.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton

from patchgen.kernels.grouped_gemm_weights import has_pipelined

COMPILE = """
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
))
from patchgen.kernels import grouped_gemm_weights_pipelined as module

kernel, made = module._pipelined_gemm_weights, []
class Compiled:
    def __getitem__(self, grid):
        return lambda *arguments, **options: made.append(kernel.run(*arguments, grid=grid, warmup=True, **options))
module._pipelined_gemm_weights = Compiled()
starts = torch.zeros(4, dtype=torch.int32)
plan = SimpleNamespace(num_experts=3, row_start=starts, tile_start=starts)
for tokens_first, dtype in ((False, torch.bfloat16), (True, torch.float16)):
    copied, padded = torch.zeros(256, 136, dtype=dtype), torch.zeros(256, 328, dtype=dtype)
    module.pipelined_gemm_weights(copied, padded, plan, tokens_first)
for compiled in made:
    text = compiled.asm["ptx"]
    print(text.count("wgmma.mma_async"), "cp.async.bulk.tensor.3d.global" in text, compiled.metadata.shared <= 232448)
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the kernel serves Triton 3.6")
def test_the_kernel_compiles_for_hopper_without_one(tmp_path):
    """Four products per step in one loop, the result stored by TMA, within the shared memory of a multiprocessor."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines() == ["4 True True"] * 2


def test_a_cpu_has_it_not():
    assert not has_pipelined(torch.zeros(1))
