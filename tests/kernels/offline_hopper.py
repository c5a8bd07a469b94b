"""Compiles Gluon kernels for Hopper where there is none, and says what a test of them has to know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from patchgen.kernels.moe.schedule import SPECIALIZED_RELEASES

needs_gluon = pytest.mark.skipif(
    triton.__version__ not in SPECIALIZED_RELEASES,
    reason=f"the kernels serve Triton {', '.join(SPECIALIZED_RELEASES)}",
)
_SHARED_MEMORY = 232448
SOUND = {"fits": True, "spilled": [0, 0], "warnings": [], "fixed_bounds": []}
"""Of a kernel that fits the shared memory of a multiprocessor, whose registers hold its values, whose products do not wait
for each other, and whose loops do not keep the bounds of the first tile."""


def compile_for_hopper(launch: Callable[[], None], cache: Path) -> list[dict]:
    """What `_describe` returns for each kernel that `launch`, a function of a test's module, launches.

    It runs in a process of its own, for this one may have Triton's interpreter, with an empty `cache`.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    module, name = launch.__module__, launch.__name__
    source = f"import offline_hopper, {module}; offline_hopper.compile_only({module}.{name})"
    ran = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def compile_only(launch: Callable[[], None]) -> None:
    """Calls `launch` with launches that end when the kernel is compiled, and prints each one's description."""

    def compile_instead(kernel: JITFunction, *arguments: object, warmup: bool, **options: object) -> None:
        print(json.dumps(_describe(run(kernel, *arguments, warmup=True, **options))))

    run, JITFunction.run = JITFunction.run, compile_instead
    hopper = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
    )
    driver.set_active(hopper)
    launch()


def _describe(kernel: CompiledKernel) -> dict:
    """`products`, how many `wgmma` of each shape it executes, and what `SOUND` says of a kernel without faults."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [assembler, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "products": Counter(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)", kernel.asm["ptx"])),
        "fits": kernel.metadata.shared <= _SHARED_MEMORY,
        "spilled": [int(number) for number in re.findall(r"(\d+) bytes spill", said)],
        "warnings": [line for line in said.splitlines() if "wgmma" in line],
        "fixed_bounds": _fixed_bounds(kernel.asm["ttgir"]),
    }


def _fixed_bounds(code: str) -> list[str]:
    """The inner loops with a bound that is computed before the outermost loop around them.

    A number that an outer loop carries for nothing but the bounds of an inner one Triton 3.6 silently takes for dead,
    and the inner loop keeps the bounds of the first tile. The kernels tested have no inner loop whose bounds are to stay.
    """
    loops: list[int] = []  # the indents of those around the line
    computed_before: dict[str, bool] = {}
    found = []
    for line in code.splitlines():
        indent = len(line) - len(line.lstrip())
        while loops and indent <= loops[-1]:
            loops.pop()
        for name in re.findall(r"^ *(%\w+)(?::\d+)? = ", line):
            computed_before[name] = not loops and "arith.constant" not in line
        loop = re.search(r"scf\.for (%\w+) = (%\w+)\S* to (%\w+)\S* step (%\w+)(.*)", line)
        if loop:
            if loops and any(computed_before[bound] for bound in loop.groups()[1:4]):
                found.append(line.strip())
            computed_before |= dict.fromkeys([loop[1], *re.findall(r"(%\w+) = ", loop[5])], False)
            loops.append(indent)
    return found
