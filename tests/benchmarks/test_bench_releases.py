"""A proof counts for the text that it is of, with the files of its parts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from patchgen import provenance
from patchgen.runtime.compatibility import digest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_releases


@pytest.mark.parametrize("model", ["internvl", "qwen3_moe"])
def test_a_proof_counts_if_it_is_of_the_text_and_of_its_parts(model, tmp_path):
    file = shutil.copytree(provenance.generated_root() / model, tmp_path / model) / f"modeling_{model}.py"
    proof = file.with_name("verify.json")
    proof.write_text(json.dumps({"sha256": digest(file), "status": "proven"}))
    text = file.read_text(encoding="utf-8")
    assert bench_releases.proof_of(text, file) == "proven"
    assert bench_releases.proof_of(text + "# changed\n", file) == "no proof of this text"
    proof.write_text(json.dumps({"sha256": "of another file", "status": "proven"}))
    assert bench_releases.proof_of(text, file) == "no proof of this text"
    proof.unlink()
    assert bench_releases.proof_of(text, file) == "not run"
