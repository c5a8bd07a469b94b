"""docs/names.md: the names that people know models by, with the type that trains them and what is proven of it.

python -m patchgen.commands.names_page      # writes it again, from NAMES and the records
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from patchgen.commands.examination import PROVEN, digest
from patchgen.runtime.verify import records
from patchgen.runtime.verify.committed_models import CommittedModel, committed, docs

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import CoverageRow, ProofRecord

FP8, INT4, MXFP4, FP4 = "FP8", "INT4", "MXFP4", "FP4 beside FP8"
"""Forms of published weights that are read (docs/checkpoints.md); "" where they were published in bf16."""

NAMES: tuple[tuple[str, str, str], ...] = (
    ("Qwen3-8B, Qwen3-32B*", "qwen3", FP8),
    ("Qwen3-30B-A3B, Qwen3-235B-A22B*, Qwen3-Coder*", "qwen3_moe", FP8),
    ("Qwen3-Next, Qwen3-Coder-Next*", "qwen3_next", FP8),
    ("Qwen3-VL-8B", "qwen3_vl", FP8),
    ("Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B*", "qwen3_vl_moe", FP8),
    ("Qwen3-Omni", "qwen3_omni_moe", ""),
    ("Qwen3.5-27B", "qwen3_5", FP8),
    ("Qwen3.5-35B-A3B", "qwen3_5_moe", FP8),
    ("Qwen4-Exp", "qwen4_exp", FP8),
    ("Kimi-K2* (its config.json says `kimi_k2`: set `model_type` to `deepseek_v3`)", "deepseek_v3", FP8),
    ("Kimi-K2.6, Kimi-K2.5*", "kimi_k25", INT4),
    ("Kimi-Linear", "kimi_linear", ""),
    ("DeepSeek-V3, DeepSeek-V3.1*, DeepSeek-R1*", "deepseek_v3", FP8),
    ("DeepSeek-V3.2", "deepseek_v32", FP8),
    ("DeepSeek-V4", "deepseek_v4", FP4),
    ("GLM-4.5, GLM-4.6*, GLM-4.7*", "glm4_moe", FP8),
    ("GLM-4.5V", "glm4v_moe", FP8),
    ("GLM-5", "glm_moe_dsa", FP8),
    ("GLM-5.3-Flash", "glm5_next", FP8),
    ("MiniMax-M2, MiniMax-M2.5*", "minimax_m2", FP8),
    ("MiniMax-M3", "minimax_m3_vl", ""),
    ("gpt-oss-20b, gpt-oss-120b*", "gpt_oss", MXFP4),
    ("Llama-2, Llama-3*", "llama", ""),
    ("Llama-4-Scout, Llama-4-Maverick*", "llama4", ""),
    ("Gemma-3", "gemma3", ""),
    ("Gemma-4", "gemma4", ""),
    ("Mistral-Small-3.1", "mistral3", ""),
    ("Nemotron-3-Nano", "nemotron_h", ""),
    ("Sarvam-30B", "sarvam_moe", ""),
    ("Hy4", "hy_v4_vl", ""),
)
"""Names, type (`model_type` of its config.json), and a quantised form in which it is published, beside or instead of bf16. By hand,
of 2026-11: the names in transformers' own source of the type, and with "*" others by their publishers."""

HEAD = """# Models by name

Which type a model's `config.json` has, whether its file is committed, and what the records say with transformers {release}: *FSDP*,
*SP* and *EP* are the largest relative differences to upstream on one rank, on two ranks that shard, share a sequence, and share the
experts; "no" where a run refuses it. "stale" is what was not proven again since the file, the code that proves it or the release
changed. *Reads* is the quantised form that it is published in and that loads as it is ([checkpoints.md](checkpoints.md)).
A type without a file trains after `patchgen generate TYPE`. Another checkpoint: its `model_type` is the type. Names with \\* are
their publishers'; transformers' source of the type does not have them.
Written by `python -m patchgen.commands.names_page`.

| name | type | committed | status | FSDP | SP | EP | reads |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
STALE = "stale"


def page() -> str:
    """The text of the page, from `NAMES` and the records alone."""
    key, rows = records.required_key(), _rows_by_type()
    lines: list[str] = []
    notes: dict[str, str] = {}
    for name, kind, form in NAMES:
        line, mended = _line(name, kind, form, rows.get(kind), key)
        lines.append(line)
        if mended:
            notes[kind] = f"\n[^{kind}]: upstream mended: {', '.join(mended)}\n"
    return HEAD.format(release=key["transformers"]) + "".join((*lines, *notes.values()))


def _rows_by_type() -> dict[str, CoverageRow]:
    """The row of coverage of each type; with media, if it takes any."""
    rows = records.read(records.path_in(None)).items()
    return {kind: row for (_, kind), row in sorted(rows, key=lambda item: item[0][0])}


def _line(
    name: str, kind: str, form: str, row: CoverageRow | None, key: Mapping[str, str]
) -> tuple[str, Sequence[str]]:
    """A line of the table, and what was mended in upstream for a status that holds."""
    model = CommittedModel(kind) if kind in committed() else None
    generated = records.recorded_digest(row) if row else None
    proof: ProofRecord | CoverageRow | None = row
    if model is not None:
        generated, proof = _committed_digest(kind), model.proof
        holds = records.proof_holds(kind, key=key)
    else:
        holds = row is not None and _row_holds(row, key, generated)
    columns = {layout: _cell(row, layout, key, generated) for layout in records.LAYOUTS}
    if proof is row and row is not None:
        proof = records.with_ranks(row)
    status = "no record" if proof is None else proof["status"] if holds else STALE
    mended = proof.get("mended", ()) if proof is not None and holds else ()
    mark = f"[^{kind}]" if mended else ""
    cells = (name.replace("*", "\\*"), f"`{kind}`", "yes" if model else "", status + mark, *columns.values(), form)
    return f"| {' | '.join(cells)} |\n", mended


def _row_holds(row: CoverageRow, key: Mapping[str, str], generated: str | None) -> bool:
    """Whether a row of a type without a committed file is of these releases and this code, on ranks, too. Nothing is generated:
    that the bytes are the same is what `make check` finds out."""
    on_ranks = row.get("ranks", {}) if row["status"] == PROVEN else {}
    return records.holds(row, key, generated) and all(records.cell_holds(row, one, key, generated) for one in on_ranks)


def _committed_digest(kind: str) -> str | None:
    """The digest of a committed file and of those that it builds by default, as rows have it; None where one is not committed."""
    names = [kind]
    for name in names:  # grows
        if name not in committed():
            return None
        parts = (part["default"]["model"] for part in CommittedModel(name).record.get("parts", ()))
        names += dict.fromkeys(part for part in parts if part and part not in names)
    files = (CommittedModel(name).folder / f"modeling_{name}.py" for name in names)
    return digest("".join(file.read_text(encoding="utf-8") for file in files))


def _cell(row: CoverageRow | None, layout: str, key: Mapping[str, str], generated: str | None) -> str:
    result = row.get("ranks", {}).get(layout) if row else None
    if row is None or result is None or not result.get("applies", True):
        return ""
    if not records.cell_holds(row, layout, key, generated):
        return STALE
    result = records.ranks_of(row)[layout]
    if result["reason"] or result["difference"] is None:
        return "no"
    return f"{result['difference']:.0e}"


if __name__ == "__main__":
    (docs() / "names.md").write_text(page(), encoding="utf-8")
