"""`verify.json` and the table: the same proof gives the same bytes, and a failed one claims no release."""

from __future__ import annotations

import json

import transformers
from rich.console import Console
from stand_in import write_stand_in

from patchgen.runtime.verify.inputs import OTHER_CALLER
from patchgen.runtime.verify.proof import BF16, LARGE_WEIGHTS
from patchgen.runtime.verify.proof_table import print_proof
from patchgen.runtime.verify.report import proof_record, write_proof
from patchgen.runtime.verify.verify_model import verify_model

MADE_WITH = {"prover": "these sources", "transformers": transformers.__version__, "torch": "of this machine"}


def test_two_runs_write_the_same_bytes_without_paths(tmp_path):
    first = write_stand_in(tmp_path / "one", "mixtral")
    second = write_stand_in(tmp_path / "two", "mixtral")
    for folder in (first, second):
        write_proof(verify_model(folder, variants=("base",), implementations=()), folder, MADE_WITH)
    text = (first / "verify.json").read_text()
    assert text == (second / "verify.json").read_text()
    assert str(tmp_path) not in text
    record = json.loads(text)
    assert record["status"] == "proven"
    assert record["transformers"] == [transformers.__version__]
    assert record["head"] == "MixtralForCausalLM"
    assert record["config"]["num_local_experts"] == 4
    assert [case["case"] for case in record["cases"]] == [
        *("plain", "padded", "packed", "step"), OTHER_CALLER, LARGE_WEIGHTS, BF16,
    ]  # fmt: skip
    assert record["training"]["checks"]["plain"]["loss"] == "0", "as of the cases"
    assert all(case["gradient"] == {"equal": True, "absolute": "0", "relative": "0"} for case in record["cases"])


def test_releases_stay_listed_while_the_file_is_the_same(tmp_path):
    folder = write_stand_in(tmp_path, "llama")
    proof = verify_model(folder, variants=("base",), implementations=())
    record = proof_record(proof) | {"transformers": ["5.9.0"]}
    (folder / "verify.json").write_text(json.dumps(record))
    both = json.loads(write_proof(proof, folder, MADE_WITH).read_text())["transformers"]
    assert both == ["5.9.0", transformers.__version__]
    proof.failures.append("something differs")
    assert json.loads(write_proof(proof, folder, MADE_WITH).read_text())["transformers"] == ["5.9.0"]
    proof.file_sha256 = "of another file"
    assert json.loads(write_proof(proof, folder, MADE_WITH).read_text())["transformers"] == []


def test_a_proof_against_a_mended_upstream_names_what_was_mended(tmp_path):
    """With a statement that upstream has, and with one that it has not, where its class is compared as it is."""
    folder = write_stand_in(tmp_path, "llama")
    provenance = json.loads((folder / "provenance.json").read_text())
    edit = {"verb": "mend_upstream", "target": "LlamaMLP.forward", "edit": "", "upstream": ""}

    def record_with(statement: str) -> dict[str, object]:
        mend = {"statement": statement, "code": "down_proj = down_proj + 0\nreturn down_proj"}
        (folder / "provenance.json").write_text(json.dumps({**provenance, "edits": [{**edit, "mend": mend}]}))
        proof = verify_model(folder, variants=("base",), implementations=(), training_path=False)
        return json.loads(write_proof(proof, folder, MADE_WITH).read_text())

    assert record_with("return down_proj")["mended"] == ["LlamaMLP.forward"]
    assert "mended" not in record_with("return other_proj")


def test_a_failed_proof_claims_no_release_and_prints_why(tmp_path):
    edit = ("logits = self.lm_head(hidden_states)", "logits = self.lm_head(hidden_states) * 2")
    folder = write_stand_in(tmp_path, "llama", edits=(edit,))
    proof = verify_model(folder, variants=("base",), implementations=())
    record = proof_record(proof)
    assert record["status"] == "generated"
    assert "output 'logits' differs" in record["reason"]
    assert record["transformers"] == []
    console = Console(width=200, record=True)
    print_proof(proof, console)
    printed = console.export_text()
    assert "generated: case plain, variant base" in printed
    assert "output 'logits' differs" in printed
    assert "hidden_size=64" in printed
