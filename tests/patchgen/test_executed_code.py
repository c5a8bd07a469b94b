"""What a process has called is what is recorded of it: its functions and methods, nothing that it only imported."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import types

import pytest

from patchgen import executed_code

RECORDING = """
import json
from patchgen import executed_code
executed_code.start()
{code}
print(json.dumps(sorted(executed_code.functions())))
"""


def unrecorded() -> dict[str, str]:
    """The environment of a process that records only if it starts to."""
    return {name: value for name, value in os.environ.items() if name != "PATCHGEN_RECORD_CODE"}


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
    """With `*` of the one from before, and `:` of one that is imported after."""
    before = "from patchgen.runtime import code_hash\n"
    after = "from patchgen.runtime.parallel import config"
    code = RECORDING.replace("executed_code.start()", before + "executed_code.start()").format(code=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=unrecorded())
    found = json.loads(done.stdout)
    assert "patchgen.runtime.code_hash:*" in found and "patchgen.runtime.code_hash:" not in found
    assert "patchgen.runtime.parallel.config:" in found and "patchgen.runtime.parallel.config:*" not in found


def test_a_module_whose_import_fails_is_recorded():
    """It is not in `sys.modules`, and would do something else once it is mended."""
    found = recorded(
        "import sys\n"
        "sys.modules['hashlib'] = None\n"
        "try: from patchgen.runtime import code_hash\n"
        "except ImportError: pass\n"
        "assert 'patchgen.runtime.code_hash' not in sys.modules\n"
        "del sys.modules['hashlib']\n"
    )
    assert "patchgen.runtime.code_hash:" in found


@pytest.mark.parametrize("command", ["verify", "sweep"])
def test_commands_that_prove_record_from_the_start(command: str):
    """Any module of the runtime that was imported before would count as a whole."""
    code = (
        "import json, sys\n"
        "from patchgen import cli, executed_code\n"
        "def report():\n"
        "    from patchgen.commands import own_process, proof, sweeping\n"
        "    from patchgen.runtime.verify import verify_model\n"
        "    print(json.dumps(sorted(executed_code.functions())))\n"
        f"cli.app, sys.argv = report, ['patchgen', '{command}']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=unrecorded())
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"patchgen.runtime.verify.verify_model:", "patchgen.commands.examination:"} <= {*found}
    whole = {name for name in found if name.endswith(":*")}
    assert whole <= {"patchgen.runtime:*", "patchgen.runtime.process_exit:*"}, "how the command itself ends"


LINES = '''"""A module."""


class Documented:
    def method(self, x):
        """What it does."""
        y = x

        return y

    @property
    def one(self): return 1


@decorated(
    1,
)
def several(
    x,
):
    def inner():
        return x

    return inner
'''


def test_instrumented_code_has_the_lines_of_its_source():
    """First lines, lines of instructions, docstrings, argument and variable names of each function, with those of the source."""
    plain = compile(LINES, "module", "exec", dont_inherit=True)
    tree = executed_code._instrument(ast.parse(LINES), "module")
    instrumented = compile(tree, "module", "exec", dont_inherit=True)

    def functions(code: types.CodeType) -> dict[str, tuple]:
        found = {
            code.co_qualname: (
                code.co_firstlineno,
                {line for _, _, line in code.co_lines() if line is not None},
                code.co_varnames,
                code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else None,
            )
        }
        for inner in code.co_consts:
            found |= functions(inner) if isinstance(inner, types.CodeType) else {}
        return found

    assert functions(instrumented) == functions(plain)
    assert instrumented.co_consts != plain.co_consts, "it is instrumented"


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=unrecorded())
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
