"""What `patchgen generate` says of the proof of a file that it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from patchgen.commands.generation import _proof_line
from patchgen.runtime.compatibility import digest


def test_lines_that_no_proof_ran_are_told_of_these_bytes_only(tmp_path: Path):
    file = tmp_path / "one" / "modeling_one.py"
    file.parent.mkdir()
    file.write_text("x = 1\n")
    to_prove = f"not proven as it is now: patchgen verify one --directory {file.parent}"
    assert _proof_line(tmp_path, "one") == to_prove
    proof = {"status": "proven", "sha256": digest(file), "not_run": ["7", "10-12"]}
    file.with_name("verify.json").write_text(json.dumps(proof))
    assert _proof_line(tmp_path, "one") == "proven; 4 lines that no proof ran: 7, 10-12"
    file.write_text("x = 2\n")
    assert _proof_line(tmp_path, "one") == to_prove
