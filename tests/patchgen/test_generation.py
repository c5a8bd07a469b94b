"""Generation as a whole: what it leaves alone, that it is repeatable, light, and gives a file that stands alone."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from generation_cases import edited, load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchgen import emit, model_configs, passes, pipeline, provenance, source, templates
from patchgen.anatomy import Anatomy
from patchgen.errors import EmissionError, PassMismatch
from patchgen.model_configs import ModelConfig, config_for
from patchgen.passes.base import Outcome, Pass
from patchgen.runtime.verify.committed_models import CommittedModel, committed
from patchgen.runtime.verify.source_keys import own_config
from patchgen.source import Module

COMMITTED = ("qwen3_moe", "qwen3_omni_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3", "llama", "qwen3_next")
OTHERS = ("qwen3_vl", "olmoe", "gemma3", "granite", "qwen2_moe", "glm4_moe", "phi3", "cohere")
MOST_LINES = {"qwen3_moe": 100, "qwen3_omni_moe": 250}
"""Changed lines that no change of a pass may make more."""


def run(code: str, *arguments: str, **environment: str) -> str:
    """Runs code in a fresh interpreter and gives what it prints."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def touched(generated: pipeline.Generated) -> set[str]:
    """The classes and functions that a hit lies in, or from which prune removed a mention."""
    sites = {hit.site.split(".")[0] for step in generated.steps for hit in step.outcome.hits}
    dropped = {hit.site for step in generated.steps if step.name == "prune" for hit in step.outcome.hits}
    original = source.parse(generated.upstream.text)
    mentions = {block.name for block in original if block.name and any(name in block.text for name in dropped)}
    imports = {block.name for block in original if block.name and re.search(r"^\s+from \.", block.text, re.MULTILINE)}
    return sites | mentions | imports


@settings(max_examples=4, derandomize=True, suppress_health_check=list(HealthCheck))
@given(model=st.sampled_from((*COMMITTED, *OTHERS)))
def test_code_outside_the_sites_keeps_its_bytes(model: str):
    """Blocks without a hit are upstream's, byte for byte, in upstream's order; in the others, every line that is not
    marked, inserted below a mark, or changed by a hit is upstream's too."""
    generated = pipeline.generate(load(model))
    original = source.parse(generated.upstream.text)
    after = source.parse(generated.text)
    names = [block.name for block in after if block.name]
    assert names == [block.name for block in original if block.name in set(names)]
    changed = touched(generated)
    for block in after:
        if block.name and block.name not in changed:
            assert block.text.strip("\n") == original.block(block.name).text.strip("\n")
    plain = [b.text.strip() for b in original if not b.name and not b.is_import and "__all__" not in b.binds]
    kept = [b.text.strip() for b in after if not b.name and not b.is_import and "__all__" not in b.binds]
    assert [text for text in kept if text in plain] == [text for text in plain if text in kept]


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_the_diff_is_what_changed_and_is_short(model: str):
    generated = pipeline.generate(load(model))
    assert emit.changed_lines(generated.diff) <= 150
    removed = [line[1:] for line in generated.diff.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert not any(line.startswith("class ") for line in removed)
    assert "ForTokenClassification" in generated.diff.split("--- ")[0]


@pytest.mark.parametrize("model", ["llama", "qwen3_omni_moe"])
def test_the_numbers_of_a_hunk_are_those_of_the_two_files(model: str):
    """The first line of each hunk, on both sides, stands at that line of upstream's file and of the generated one.

    Of the generated one below our record: how long that is must not move the numbers.
    """
    generated = pipeline.generate(load(model))
    body = generated.text.partition("\n\n")[2]
    upstream_lines, generated_lines = generated.upstream.text.splitlines(), body.splitlines()
    lines = generated.diff.splitlines()
    hunks = [i for i, line in enumerate(lines) if line.startswith("@@ ")]
    assert len(hunks) > 3
    for i in hunks:
        removed, added = (int(part[1:].partition(",")[0]) for part in lines[i].split()[1:3])
        old = next(line[1:] for line in lines[i + 1 :] if line[:1] in " -")
        new = next(line[1:] for line in lines[i + 1 :] if line[:1] in " +")
        assert (upstream_lines[removed - 1], generated_lines[added - 1]) == (old, new)


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_a_new_pass_that_finds_nothing_changes_no_file(model: str, monkeypatch: pytest.MonkeyPatch):
    class Idle(Pass):
        name, purpose, expects = "idle", "Finds nothing.", "nothing"

        def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
            return Outcome(module)

    before = pipeline.generate(load(model))
    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES[:5], Idle, *passes.PASSES[5:]))
    after = pipeline.generate(load(model))
    assert "idle" in [step.name for step in after.steps] and "idle" not in [step.name for step in before.steps]
    assert after.files == before.files


def test_a_source_that_binds_our_name_is_refused():
    with pytest.raises(EmissionError, match=r"binds the name 'ops' itself.*from torch import nn, ops"):
        pipeline.generate(edited(load("llama"), ("from torch import nn\n", "from torch import nn, ops\n")))


def test_an_omni_model_is_standalone_and_has_its_thinker_only():
    generated = pipeline.generate(load("qwen3_omni_moe"))
    tree = ast.parse(generated.text)
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert not [name for name in classes if "Talker" in name or "Code2Wav" in name or "Vocoder" in name]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    assert not re.search(r"Auto\w*\._?from_config", generated.text)
    recorded = {step["name"]: step for step in json.loads(generated.provenance)["passes"]}
    assert recorded["parallel_plan"]["hits"] and "Talker" not in json.dumps(recorded["parallel_plan"])
    assert emit.changed_lines(generated.diff) <= 500
    own = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module.startswith("patchgen")}
    assert own == {"patchgen.runtime"}


BLOCKED = """
import importlib.util, sys
sys.modules["patchgen.passes"] = None
spec = importlib.util.spec_from_file_location("generated", sys.argv[1])
module = sys.modules["generated"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.Qwen3MoeForCausalLM.__name__)
"""


def test_a_generated_file_imports_without_the_passes(tmp_path: Path):
    pytest.importorskip("torch")
    path = tmp_path / "modeling_qwen3_moe.py"
    path.write_text(pipeline.generate(load("qwen3_moe")).text)
    assert "Qwen3MoeForCausalLM" in run(BLOCKED, str(path))


HASHES = """
import hashlib, sys
from patchgen import pipeline, upstream
for model in ("qwen3_moe", "qwen3_vl"):
    for name, text in sorted(pipeline.generate(upstream.load(model)).files.items()):
        print(name, hashlib.sha256(text.encode()).hexdigest())
print([name for name in sys.modules if name.split(".")[0] in ("torch", "transformers", "numpy", "triton")])
print(sorted(name for name in sys.modules if name.startswith(("patchgen.runtime", "patchgen.kernels"))))
"""


def test_output_is_the_same_in_every_process_and_needs_no_torch():
    first, second = run(HASHES, PYTHONHASHSEED="1"), run(HASHES, PYTHONHASHSEED="4242", LC_ALL="C")
    assert first == second
    torch, runtime = first.splitlines()[-2:]
    assert torch == "[]"
    allowed = ["patchgen.runtime", "patchgen.runtime.code_hash", "patchgen.runtime.project"]
    assert runtime == str(allowed)  # these import only the standard library


@pytest.mark.parametrize("model", committed())
def test_a_committed_model_has_its_seams_few_changes_and_a_short_config(model: str):
    """As its files say; that they are what generation gives now is what `make check` compares, of every model.

    A language model of another file has its positions there; hits stand in the record, and no config counts them again.
    """
    config = config_for(model)
    assert len([line for line in own_config(model).splitlines() if line.strip()]) <= 40
    assert not config.expect
    found = CommittedModel(model)
    assert provenance.edited_files(found.folder, found.record) == []
    hits = {step["name"] for step in found.record["passes"] if step["hits"]}
    assert {"fused_loss", "parallel_plan", "local_classes" if found.record.get("parts") else "language_sp"} <= hits
    assert found.changed_lines <= MOST_LINES.get(model, 250)


def test_one_hit_less_than_pinned_is_an_error_that_lists_what_was_hit():
    config = ModelConfig("qwen3_moe", expect={"fused_ops": 4})
    with pytest.raises(PassMismatch, match=r"has 3 hits .* expects 4[\s\S]*Qwen3MoeRMSNorm.forward"):
        pipeline.generate(load("qwen3_moe"), config)


def test_a_pass_that_is_expected_to_do_nothing_speaks_up_when_it_has_something_to_do():
    nothing = {"router_loss": model_configs.Expect(0, reason="it has none")}
    with pytest.raises(PassMismatch, match=r"has 2 hits .* expects 0 \(it has none\)[\s\S]*load_balancing_loss_func"):
        pipeline.generate(load("qwen3_moe"), ModelConfig("qwen3_moe", expect=nothing))
    generated = pipeline.generate(load("llama"), ModelConfig("llama", expect=nothing))
    step = next(step for step in generated.steps if step.name == "router_loss")
    assert step.outcome.hits == () and step.outcome.notes[0] == "no hits: it has none"


def test_a_site_of_another_form_may_be_declared_nothing_to_do():
    other = edited(load("llama"), ("self.loss_function(", "self.other("))
    with pytest.raises(PassMismatch, match="fused_loss"):
        pipeline.generate(other, ModelConfig("llama"))
    config = ModelConfig("llama", expect={"fused_loss": model_configs.Expect(0, reason="a loss of its own")})
    assert "ops.causal_lm_loss(" not in pipeline.generate(other, config).text


def test_an_expectation_of_an_unknown_pass_is_an_error():
    with pytest.raises(Exception, match="fused_los") as error:
        pipeline.generate(load("qwen3"), ModelConfig("qwen3", expect={"fused_los": 1}))
    assert "fused_loss" in str(error.value)


def test_roots_that_leave_a_name_out_are_an_error():
    with pytest.raises((EmissionError, PassMismatch)):
        pipeline.generate(load("qwen3"), ModelConfig("qwen3", roots=("Qwen3ForNothing",)))


def test_the_record_names_what_the_file_came_from():
    generated = pipeline.generate(load("qwen3_moe"))
    facts = json.loads(generated.provenance)
    assert facts["upstream"]["sha256"] == hashlib.sha256(generated.upstream.text.encode()).hexdigest()
    assert facts["generated_sha256"] == hashlib.sha256(generated.text.encode()).hexdigest()
    assert facts["upstream"]["sha256"] in generated.text
    assert facts["symbols"].keys() >= {"Qwen3MoeExperts", "load_balancing_loss_func"}
    licence = [line for line in generated.upstream.text.splitlines()[:40] if "Copyright" in line or "Apache" in line]
    assert licence and all(line in generated.text for line in licence)


def test_every_operation_has_a_word_on_one_rank():
    told = templates.table("one_rank.toml")
    tree = ast.parse((Path(emit.__file__).parents[1] / "runtime" / "ops.py").read_text())
    exported = next(n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    assert {*told, "parallel_plan"} == {*ast.literal_eval(exported)}, "it stands below ParallelPlan, which has one"


TWICE = "from ..llama.modeling_llama import rotate_half\nfrom ..cohere.modeling_cohere import rotate_half\n"
CONFIG = "from .configuration_qwen3_moe import Qwen3MoeConfig\n"


def test_of_two_imports_of_one_name_the_later_still_counts():
    origin = load("qwen3_moe")
    start = origin.text.index("def rotate_half")
    own = origin.text[start : origin.text.index("\n\n\n", start)]
    text = pipeline.generate(edited(origin, (own, ""), (CONFIG, TWICE + CONFIG))).text
    assert 0 < text.index("models.llama.modeling_llama import") < text.index("models.cohere.modeling_cohere import")


@pytest.mark.parametrize(
    ("statement", "at"),
    [
        ("x = x + \\\n        ops.fused_moe(x) + \\\n        1", 1),  # a line that goes on
        ('x = ops.fused_moe("""a\n    # patchgen: b\n""")', 1),  # a string that does
        ("x = ops.fused_moe(\n        x\n    )", 2),
    ],
)
def test_an_operation_is_explained_where_a_comment_can_stand(statement: str, at: int):
    text = f"def f(x):\n    # patchgen: experts\n    {statement}\n    return x\n"
    module = source.parse(text)
    explained = emit._explained(module).text
    assert ast.dump(ast.parse(explained)) == ast.dump(ast.parse(text))
    assert [i for i, line in enumerate(explained.split("\n")) if "the kernel" in line] == [at]


def test_an_operation_is_explained_at_its_next_use_where_nothing_can_stand_at_the_first():
    text = "x = ops.fused_moe(1) + \\\n    1\ny = ops.fused_moe(2)\n"
    assert emit._explained(source.parse(text)).text == text.replace("(2)", "(2)  # the kernel")


def test_imports_of_generated_files_stand_in_isorts_order():
    """But for blank lines below them, of which upstream has two."""
    rule = ["--isolated", "--select=I001", "--config=line-length=119", "--fix", "--stdin-filename=x.py", "-q", "-"]
    ruff = [sys.executable, "-m", "ruff", "check", '--config=lint.isort.known-third-party=["patchgen"]', *rule]
    for model in ("qwen3_moe", "qwen3_vl", "qwen3_omni_moe"):
        text = (CommittedModel(model).folder / f"modeling_{model}.py").read_text()
        fixed = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
        assert [line for line in fixed.splitlines() if line] == [line for line in text.splitlines() if line]
