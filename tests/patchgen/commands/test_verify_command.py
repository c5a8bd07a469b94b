"""`patchgen verify` over several models: what a machine fails at one of them ends neither the others nor their records."""

from __future__ import annotations

import shutil
from pathlib import Path

from patchgen.commands import proof as command
from patchgen.runtime import registry
from patchgen.runtime.verify import two_ranks, verify_model
from patchgen.runtime.verify.proof import Proof
from patchgen.runtime.verify.ranks import CaseFailed


def test_a_machine_that_fails_at_one_model_leaves_its_record_and_goes_on(tmp_path: Path, monkeypatch, capsys):
    folders = [
        Path(shutil.copytree(registry.find_model(name).directory, tmp_path / name)) for name in ("llama", "qwen3")
    ]
    before = [(folder / "verify.json").read_text() for folder in folders]

    def complete(found: Proof, model: registry.GeneratedModel) -> Proof:
        if model.name == "llama":
            raise CaseFailed("rank 1:\nthe process ended (exit code -9)\n", is_inconclusive=True)
        return found

    monkeypatch.setattr(verify_model, "verify_model", lambda subject, head: Proof(subject.name, "Head"))
    monkeypatch.setattr(two_ranks, "complete", complete)
    assert list(command._prove([registry.read_model(folder) for folder in folders], None)) == [False, False]
    after = [(folder / "verify.json").read_text() for folder in folders]
    assert after[0] == before[0] and after[1] != before[1]
    told = " ".join(capsys.readouterr().out.split())
    assert "error: llama could not be compared on two processes of this machine" in told and "exit code -9" in told
