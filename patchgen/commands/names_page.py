"""docs/names.md: the names that people know models by, with the type that trains them and what is proven of it.

python -m patchgen.commands.names_page      # writes it again, from NAMES and the records
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchgen.runtime.verify import records
from patchgen.runtime.verify.committed_models import CommittedModel, committed, docs

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import CoverageRow, RankCell

FP8, INT4, MXFP4, FP4 = "FP8", "INT4", "MXFP4", "FP4 beside FP8"
"""Forms of published weights that are read (docs/checkpoints.md); "" where they were published in bf16."""

NAMES: tuple[tuple[str, str, str], ...] = (
    ("Qwen3 8B, 32B", "qwen3", FP8),
    ("Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder", "qwen3_moe", FP8),
    ("Qwen3-Next, Qwen3-Coder-Next", "qwen3_next", FP8),
    ("Qwen3-VL 8B", "qwen3_vl", FP8),
    ("Qwen3-VL-30B-A3B, 235B-A22B", "qwen3_vl_moe", FP8),
    ("Qwen3-Omni", "qwen3_omni_moe", ""),
    ("Qwen3.5-27B, Qwen3.6-27B, Qwen3.8-27B", "qwen3_5", FP8),
    ("Qwen3.5-35B-A3B, Qwen3.6-35B-A3B", "qwen3_5_moe", FP8),
    ("Qwen4-Exp, Qwen3.8-Flash-Next", "qwen4_exp", FP8),
    ("Kimi-K2, K2-Instruct", "deepseek_v3", FP8),
    ("Kimi-K2.5, Kimi-K2.6", "kimi_k25", INT4),
    ("Kimi-Linear", "kimi_linear", ""),
    ("DeepSeek-V3, R1, V3.1", "deepseek_v3", FP8),
    ("DeepSeek-V3.2", "deepseek_v32", FP8),
    ("DeepSeek-V4", "deepseek_v4", FP4),
    ("GLM-4.5, 4.6, 4.7", "glm4_moe", FP8),
    ("GLM-4.5V, 4.6V", "glm4v_moe", FP8),
    ("GLM-5, 5.1, 5.2", "glm_moe_dsa", FP8),
    ("GLM-5.3-Flash", "glm5_next", FP8),
    ("MiniMax-M2, M2.5, M2.7", "minimax_m2", FP8),
    ("MiniMax-M3", "minimax_m3_vl", ""),
    ("gpt-oss 20b, 120b", "gpt_oss", MXFP4),
    ("Llama 3", "llama", ""),
    ("Llama 4 Scout, Maverick", "llama4", ""),
    ("Gemma 3", "gemma3", ""),
    ("Gemma 4", "gemma4", ""),
    ("Mistral Small 3.1", "mistral3", ""),
    ("Nemotron 3 Nano", "nemotron_h", ""),
    ("Sarvam-30B", "sarvam_moe", ""),
    ("Hy4", "hy_v4_vl", ""),
)
"""Name, type (`model_type` of its config.json), and a quantised form in which it is published, beside or instead of bf16. By hand,
of 2026-11: the names in transformers' own docstrings, and what the publishers' repositories say."""

HEAD = """# Models by name

Which type a model's `config.json` has, whether its file is committed, and what the records say: *FSDP*, *SP* and *EP* are the
largest relative differences to upstream on one rank, on two ranks that shard, share a sequence, and share the experts; "no" where
a run refuses it. *Reads* is the quantised form that it is published in and that loads as it is ([checkpoints.md](checkpoints.md)).
A type without a file trains after `patchgen generate TYPE`. Another checkpoint: its `model_type` is the type.
Written by `python -m patchgen.commands.names_page`.

| name | type | committed | status | FSDP | SP | EP | reads |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The text of the page, from `NAMES` and the records alone."""
    types = _rows_by_type()
    return HEAD + "".join(_line(name, kind, form, types.get(kind)) for name, kind, form in NAMES)


def _rows_by_type() -> dict[str, CoverageRow]:
    """The row of coverage of each type; with media, if it takes any."""
    rows = records.read(records.path_in(None)).items()
    return {kind: records.with_ranks(row) for (_, kind), row in sorted(rows, key=lambda item: item[0][0])}


def _line(name: str, kind: str, form: str, row: CoverageRow | None) -> str:
    is_committed = kind in committed()
    proof = CommittedModel(kind).current_proof if is_committed else None
    status = proof["status"] if proof else row["status"] if row else "no record"
    ranks = row.get("ranks", {}) if row else {}
    cells = [_cell(ranks.get(layout)) for layout in records.LAYOUTS]
    columns = (name, f"`{kind}`", "yes" if is_committed else "", status, *cells, form)
    return f"| {' | '.join(columns)} |\n"


def _cell(result: RankCell | None) -> str:
    if result is None or not result.get("applies", True):
        return ""
    if result["reason"] or result["difference"] is None:
        return "no"
    return f"{result['difference']:.0e}"


if __name__ == "__main__":
    (docs() / "names.md").write_text(page(), encoding="utf-8")
