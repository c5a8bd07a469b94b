"""What `patchgen generate` says of the proof of a file that it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invoked import invoke, record_proof

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


@pytest.mark.parametrize(
    ("not_run", "told"),
    [
        ([], "proven; its proofs ran every line"),
        (["3"], "proven; 1 lines that no proof ran: 3"),
        (["3-4", "8", "10-19"], "proven; 13 lines that no proof ran: 3-4, 8, 10-19"),
    ],
)
def test_lines_are_counted_in_their_ranges(tmp_path: Path, not_run: list[str], told: str):
    file = tmp_path / "one" / "modeling_one.py"
    file.parent.mkdir()
    file.write_text("x = 1\n")
    proof = {"status": "proven", "sha256": digest(file)} | ({"not_run": not_run} if not_run else {})
    file.with_name("verify.json").write_text(json.dumps(proof))
    assert _proof_line(tmp_path, "one") == told


def test_generate_ends_with_it_and_a_dry_run_says_nothing_of_a_proof(tmp_path: Path):
    command = ("generate", "llama", "--output", str(tmp_path))
    dry_run = invoke(*command, "--dry-run").output
    assert "dry run: nothing written" in dry_run and "prove" not in dry_run
    last = invoke(*command).output.strip().splitlines()[-1]
    assert last.strip() == f"not proven as it is now: patchgen verify llama --directory {tmp_path / 'llama'}"
    record_proof(tmp_path / "llama")
    assert invoke(*command).output.strip().splitlines()[-1].strip() == "proven; its proofs ran every line"
