"""Recorded proofs hold while what they depend on is the same, and `patchgen check` names those that do not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from patchgen import provenance
from patchgen.commands.examination import digest, row
from patchgen.runtime.verify import code_sets, records, source_closure, source_keys

CODE = "\n\nUNUSED = 1\n"
RAN = frozenset({"patchgen.runtime.ops:", "patchgen.runtime.attention:choose"})
ON_RANKS = frozenset({"patchgen.runtime.parallel.sequence:gather_heads"})


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's sources, from which the keys are computed."""
    copy = tmp_path / "patchgen"
    ignored = shutil.ignore_patterns("generated_models", "__pycache__")
    shutil.copytree(source_closure.ROOT, copy, ignore=ignored)
    monkeypatch.setattr(source_closure, "ROOT", copy)
    return copy


def changed(sources: Path, file: str, text: str) -> bool:
    """Whether a text at the end of a file changes the hash of the generator."""
    path = sources / file
    assert path.is_file()
    before, whole = source_keys.generator_hash.__wrapped__(), path.read_text()
    path.write_text(whole + text)
    found = source_keys.generator_hash.__wrapped__() != before
    path.write_text(whole)
    return found


def test_the_key_of_the_generator_follows_its_code(sources: Path):
    assert changed(sources, "passes/fused_loss.py", CODE)
    assert changed(sources, "templates/header.jinja", "more")
    assert not changed(sources, "passes/fused_loss.py", "\n# A comment.\n")
    for file in ("cli.py", "commands/examination.py", "runtime/train/trainer.py", "runtime/verify/verify_model.py"):
        assert not changed(sources, file, CODE), file


def test_the_config_of_another_model_changes_no_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from patchgen import model_configs, upstream

    release = upstream.open_release()
    before = [source_keys.model_sources_hash(kind, release) for kind in ("qwen3_moe", "llama")]
    copy = tmp_path / "model_configs"
    shutil.copytree(Path(model_configs.__file__).parent, copy)
    config = copy / "llama.py"
    config.write_text((config.read_text() if config.is_file() else "") + CODE)
    monkeypatch.setattr(model_configs, "__file__", str(copy / "__init__.py"))
    after = [source_keys.model_sources_hash(kind, release) for kind in ("qwen3_moe", "llama")]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]


def record_of(path: Path, **changes: object) -> Path:
    """A record of one type that is refused and one that is proven, as a sweep would write it now."""
    from patchgen.commands.examination import generated_digest
    from patchgen.upstream import open_release

    release, key = open_release(), records.required_key()
    bytes_ = generated_digest("llama", release.version)
    made_with = records.row_made_with(bytes_, RAN, key) | changes
    cells = {name: {"difference": 0.0, "reason": "", "applies": True} for name in records.LAYOUTS}
    cells = {
        name: cell | {"made_with": records.cell_made_with(bytes_, RAN | ON_RANKS, key, False)}
        for name, cell in cells.items()
    }
    sources = source_keys.model_sources_hash("llama", release)
    proven = {**row("llama", "proven", ""), "sources": sources, "made_with": made_with, "ranks": cells}
    records.write(path, {(False, "llama"): proven})
    return path


def stale(path: Path, missing: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{one.what}: {', '.join(one.names)}" for one in records.stale_rows(path, missing={False: missing, True: ()})
    ]


def test_a_row_holds_while_bytes_prover_and_releases_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = "rows of docs/coverage.md (text)"
    path = record_of(tmp_path / "coverage.json")
    assert stale(path) == []
    assert stale(path, missing=("new_type",)) == [f"{text}: new_type"]
    for change in ({"prover": "older"}, {"torch": "2.11.0"}, {"transformers": "5.17.0"}):
        assert stale(record_of(tmp_path / "coverage.json", **change)) == [f"{text}: llama"], change
    path = record_of(tmp_path / "coverage.json")
    on_ranks = [f"comparisons on ranks ({name}): llama" for name in records.LAYOUTS]
    with monkeypatch.context() as within:
        within.setattr(
            code_sets, "_hash_of", lambda code: "newer" if code & ON_RANKS else code_sets.source_units.hash_of(code)
        )
        assert stale(path) == on_ranks
    rows = records.read(path)
    rows[False, "llama"]["training"] = {"separates_documents": True}
    records.write(path, rows)
    assert stale(path) == on_ranks, "packed documents are computed in another way now"
    rows[False, "llama"]["training"] = None
    del rows[False, "llama"]["ranks"]["ep2"]
    records.write(path, rows)
    assert stale(path) == [on_ranks[list(records.LAYOUTS).index("ep2")]]
    assert records.with_ranks(rows[False, "llama"])["status"] == "proven, without ep", (
        "nothing says that it agrees there"
    )
    del rows[False, "llama"]["ranks"]
    records.write(path, rows)
    assert stale(path) == on_ranks, "a comparison that is not there does not hold"


def test_a_proven_type_with_media_is_compared_on_ranks_too(tmp_path: Path):
    path = record_of(tmp_path / "coverage.json")
    rows = records.read(path)
    rows[True, "llama"] = {**rows[False, "llama"], "family": "vision", "ranks": {}}
    rows[True, "refused"] = {**rows[True, "llama"], "model_type": "refused", "status": "generated"}
    records.write(path, rows)
    told = [one for one in stale(path) if "on ranks" in one]
    assert told == [f"comparisons on ranks ({name}, media): llama" for name in records.LAYOUTS]
    assert "**sp2: 0 agree**, of 0 that were compared." in path.with_suffix(".md").read_text()


def test_bytes_are_generated_again_only_where_the_generator_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = record_of(tmp_path / "coverage.json")
    asked = []
    real = records.generated_digest
    monkeypatch.setattr(
        records,
        "digests",
        lambda kinds, *_: asked.extend(kinds) or [real(k, records.required_key()["transformers"]) for k in kinds],
    )
    assert stale(path) == [] and asked == []
    monkeypatch.setattr(source_keys, "generator_hash", lambda: "moved, and gives the same bytes")
    assert stale(path) == [] and asked == ["llama"]
    monkeypatch.setattr(records, "digests", lambda kinds, *_: [digest("other bytes")] * len(kinds))
    assert len(stale(path)) == 1 + len(records.LAYOUTS)  # the row, and its comparisons on ranks


def test_check_fails_on_a_proof_of_older_sources_and_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    from patchgen.commands import generation

    root = tmp_path / "generated_models"
    shutil.copytree(provenance.generated_root() / "llama", root / "llama")
    monkeypatch.setattr(provenance, "generated_root", lambda: root)
    proof = root / "llama" / "verify.json"
    record = code_sets.read(proof)
    key = records.required_key()
    made_with = code_sets.made_with(RAN, key)
    proof.write_text(code_sets.dumps(record | {"made_with": made_with}, indent=2))
    (root / "llama" / "verify_ranks.json").unlink(missing_ok=True)
    assert generation.check([]) == 0
    proof.write_text(code_sets.dumps(record | {"made_with": made_with | {"prover": "older"}}, indent=2))
    assert generation.check([]) == 1
    assert "make verify-all" in capsys.readouterr().out
