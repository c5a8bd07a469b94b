"""What a process has called is what is recorded of it: its functions and methods, nothing that it only imported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest

from patchgen import executed_code

RECORDING = """
import json
from patchgen import executed_code
executed_code.start()
{code}
print(json.dumps(sorted(executed_code.functions())))
"""


def recorded(code: str) -> set[str]:
    """What a new process records that starts to, and then runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", RECORDING.format(code=code)], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_functions_are_those_that_were_called():
    found = recorded(
        "from patchgen.runtime.code_hash import short_hash\n"
        "from patchgen.runtime.parallel.config import ParallelConfig, mesh_text\n"
        "short_hash('text')\nParallelConfig.for_world(2)\n"
    )
    assert {
        "patchgen.runtime.code_hash:short_hash",
        "patchgen.runtime.parallel.config:ParallelConfig.for_world",
    } <= found
    assert not {"patchgen.runtime.code_hash:symbol_hash", "patchgen.runtime.parallel.config:mesh_text"} & found
    assert "patchgen.runtime.code_hash:" in found, "its statements were run"


def test_a_module_from_before_counts_as_a_whole():
    assert (
        "patchgen.runtime.code_hash:*" in executed_code.functions() or "patchgen.runtime.code_hash" not in sys.modules
    )
    before = "from patchgen.runtime import code_hash\n"
    code = RECORDING.replace("executed_code.start()", before + "executed_code.start()").format(code="")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "patchgen.runtime.code_hash:*" in json.loads(done.stdout)


def test_a_process_that_is_started_records_too():
    found = recorded(
        "import subprocess, sys\n"
        "child = 'from patchgen import executed_code; from patchgen.runtime.code_hash import short_hash; short_hash(); '\n"
        "child += 'assert \"patchgen.runtime.code_hash:short_hash\" in executed_code.functions()'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
    )
    assert "patchgen.runtime.code_hash:short_hash" not in found, "that was the other process"


def test_a_process_records_nothing_unless_asked():
    code = "import sys; from patchgen.runtime import code_hash; print('patchgen.executed_code' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "PATCHGEN_RECORD_CODE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"


def test_everything_lists_the_modules_of_the_runtime_and_the_kernels():
    found = executed_code.everything()
    for name in (
        "runtime",
        "runtime.ops",
        "runtime.verify.verify_model",
        "kernels.loss.token_log_probs",
        "commands.examination",
    ):
        assert f"patchgen.{name}:*" in found
    assert not any(name.startswith(("patchgen.passes", "patchgen.generated_models")) for name in found)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f():\n    def inner(): ...\n", ["f"]),
        ("class A:\n    def m(self): ...\n    class B:\n        def n(self): ...\n", ["A.m", "A.B.n"]),
        ("if True:\n    def f(): ...\n", []),
    ],
)
def test_units_are_functions_and_methods_outside_functions_and_conditions(text: str, names: list[str]):
    assert [name for name, _ in executed_code.units(ast.parse(text))] == names
