"""docs/models.md: what each committed model was proven on, from the records beside the generated files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from patchgen.runtime.verify import source_keys
from patchgen.runtime.verify.committed_models import CommittedModel, committed, docs
from patchgen.templates import render

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import CaseRecord, HitRecord

REFUSALS = ("attention_masks.UnsupportedError: ", "Train this model with sp=1.")
"""In the record of a case that the runtime refuses in this layout."""
MEDIA_CASES = ("images", "video", "audio", "sound", "mixed", "packed media", "handed in")


def write() -> None:
    """Writes `docs/models.md` from `provenance.json`, `verify.json` and `verify_ranks.json` of every committed model."""
    (docs() / "models.md").write_text(models_page(), encoding="utf-8")


def models_page() -> str:
    """The text of the page, from the records alone."""
    return render("models.jinja", rows=rows())


def rows() -> list[dict[str, object]]:
    """A row of the page per committed model."""
    return [_row(name) for name in committed()]


def _row(name: str) -> dict[str, object]:
    model = CommittedModel(name)
    passes = {step["name"]: step for step in model.record["passes"]}
    proof = model.current_proof
    cases = proof.get("cases", []) if proof else []
    case_names = dict.fromkeys(case["case"] for case in cases)
    syncs = passes.get("host_sync_lint")
    hits = {step: len(found["hits"]) for step, found in passes.items() if found["hits"]}
    return {
        "name": name,
        "status": proof.get("status", "not proven") if proof else "not proven",
        "head": proof.get("head", "") if proof else "",
        "mended": proof.get("mended", []) if proof else [],
        "text": [case for case in case_names if case not in MEDIA_CASES],
        "media": [case for case in MEDIA_CASES if case in case_names],
        "takes_media": "fill_back" in hits,
        "types": model.record["model_types"],
        "parts": [part["default"]["model"] for part in model.record.get("parts", ())],
        "variants": list(dict.fromkeys(case["variant"] for case in cases)),
        "steps": len(cases),
        "equal": sum(_is_equal(case) for case in cases),
        "refused": proof.get("refused_inputs", {}) if proof else {},
        "without_gradient": len(proof.get("without_gradient", [])) if proof else 0,
        "hits": hits,
        "lines": model.changed_lines,
        "config_lines": len(source_keys.own_config(name).splitlines()),
        "syncs": _allowed_syncs(syncs["upstream"] if syncs else ()),
        "open_syncs": syncs["notes"] if syncs else [],
        "ranks": rank_results(model),
    }


def _is_equal(case: CaseRecord) -> bool:
    return all(difference["equal"] for difference in (case["loss"], case["outputs"], case["gradient"]))


def _allowed_syncs(hits: Iterable[HitRecord]) -> list[dict[str, str]]:
    """The host syncs that stay: each distinct site, code and reason once."""
    found: dict[tuple[str, str, str], None] = {}
    for hit in hits:
        code, _, why = hit["what"].rpartition("`: ")
        found[hit["site"], code.strip("`"), why] = None
    return [{"site": site, "code": code, "why": why} for site, code, why in found]


def rank_results(model: CommittedModel) -> dict[str, str]:
    """Layout -> the largest difference over its batches, or how many failed or were refused, for the current file."""
    found: dict[str, str] = {}
    for layout, result in model.current_rank_proofs.items():
        cases = result["cases"].values()
        failures = [case["failed"] for case in cases if "failed" in case]
        kind = "refused" if all(any(told in failure for told in REFUSALS) for failure in failures) else "failed"
        worst = max((max(float(case["loss"]), float(case["gradient"])) for case in cases), default=0.0)
        found[layout] = f"{len(failures)} of {len(cases)} {kind}" if failures else f"{worst:.0e}"
    return found
