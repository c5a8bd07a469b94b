"""docs/models.md: what each committed model was proven on, from the records beside the generated files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from patchgen import emit, model_configs, provenance
from patchgen.commands.generation import committed
from patchgen.templates import render

MEDIA_CASES = ("images", "video", "audio", "sound", "mixed", "packed media", "handed in")
SYNC_PASS = "host_sync_lint"


def write_models_page(root: Path | None = None) -> Path:
    """Writes `models.md` from `provenance.json`, `verify.json` and `verify_ranks.json` of every committed model."""
    path = (root or provenance.generated_root().resolve().parent / "docs") / "models.md"
    path.write_text(models_page(), encoding="utf-8")
    return path


def models_page() -> str:
    """The text of the page. It follows from the records alone."""
    return render("models.jinja", rows=[_row(name) for name in committed()])


def _row(name: str) -> dict[str, object]:
    directory = provenance.generated_root() / name
    record = provenance.read(directory)
    digest = hashlib.sha256((directory / f"modeling_{name}.py").read_bytes()).hexdigest()
    proof = _of_this_file(directory / "verify.json", digest)
    cases = proof.get("cases", [])
    config = Path(model_configs.__file__).parent / f"{name}.py"
    return {
        "name": name,
        "status": proof.get("status", "not proven"),
        "head": proof.get("head", ""),
        "text": list(dict.fromkeys(case["case"] for case in cases if case["case"] not in MEDIA_CASES)),
        "media": [kind for kind in MEDIA_CASES if any(case["case"] == kind for case in cases)],
        "variants": list(dict.fromkeys(case["variant"] for case in cases)),
        "steps": len(cases),
        "equal": sum(
            case["loss"]["equal"] and case["outputs"]["equal"] and case["gradient"]["equal"] for case in cases
        ),
        "refused": proof.get("refused_inputs", {}),
        "without_gradient": len(proof.get("without_gradient", [])),
        "hits": {step["name"]: len(step["hits"]) for step in record["passes"] if step["hits"]},
        "lines": emit.changed_lines((directory / f"modeling_{name}.diff").read_text(encoding="utf-8")),
        "config_lines": len(config.read_text(encoding="utf-8").splitlines()) if config.is_file() else 0,
        "syncs": _excused(record),
        "open_syncs": next((step["notes"] for step in record["passes"] if step["name"] == SYNC_PASS), []),
        "ranks": rank_results(directory, name),
    }


def _of_this_file(path: Path, digest: str) -> dict:
    """A record, if it is of the very file that stands beside it."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return record if record.get("sha256") == digest else {}


def _excused(record: dict) -> list[dict[str, str]]:
    """The host syncs that stay, each with where it is, what it is and why, once."""
    served = next((step["upstream"] for step in record["passes"] if step["name"] == SYNC_PASS), [])
    found = {}
    for hit in served:
        code, _, why = hit["what"].rpartition("`: ")
        found[hit["site"], code.strip("`"), why] = None
    return [{"site": site, "code": code, "why": why} for site, code, why in found]


def rank_results(directory: Path, name: str) -> dict[str, str]:
    """Layout -> the largest difference over its batches, or how many failed; of the file that stands there now."""
    digest = hashlib.sha256((directory / f"modeling_{name}.py").read_bytes()).hexdigest()
    record = _of_this_file(directory / "verify_ranks.json", digest)
    found = {}
    for layout, result in record.get("layouts", {}).items():
        cases = result["cases"].values()
        failed = sum("failed" in case for case in cases)
        worst = max((max(float(case["loss"]), float(case["gradient"])) for case in cases), default=0.0)
        found[layout] = f"{failed} of {len(cases)} failed" if failed else f"{worst:.0e}"
    return found
