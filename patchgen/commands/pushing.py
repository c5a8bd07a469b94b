"""push: a trained model goes to the Hub, with a card that says how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from patchgen.commands.finished_run import model_folder
from patchgen.errors import PatchgenError
from patchgen.runtime.verify.committed_models import CommittedModel, committed
from patchgen.templates import render

CARD = "README.md"
KEPT_POINTS = 20
"""How many losses of the curve the card lists."""


def push(run: Path, repository: str, *, private: bool) -> str:
    """Uploads the model of a run, or a checkpoint, and returns its address.

    A card (`README.md`) goes along: one that the folder has, else what is written there of the run's recipe, data, proof and curve.

    Raises:
        ConfigError: no model there.
        PatchgenError: the Hub refuses.
    """
    folder = model_folder(run)
    if not (folder / CARD).is_file():
        (folder / CARD).write_text(card(run, folder, repository), encoding="utf-8")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message=f"{folder} of a run of patchgen")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise PatchgenError(
            f"{repository} was not pushed: {error}\nTo fix: `hf auth login` with a token that may write there."
        ) from error
    return str(address)


def card(run: Path, folder: Path, repository: str) -> str:
    """The text of the card: what the run's files say, and nothing that they do not."""
    from patchgen.runtime.checkpoint.safetensor_files import CONFIG
    from patchgen.runtime.train import page, run_log
    from patchgen.runtime.train.recipe import changed

    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    recipe = _recipe(run)
    entries = run_log.read(run)
    return render(
        "model_card.jinja",
        name=repository.rpartition("/")[2],
        base=(recipe or {}).get("model", {}).get("source", ""),
        model_type=config.get("model_type", ""),
        summary=run_log.read_summary(run),
        proof=_proof(config.get("model_type", "")),
        figures=page.figures(entries),
        losses=_spread(page.series(entries, "loss")),
        evaluations=_spread(page.series(entries, "eval_loss")),
        sources=page.totals_by_source(entries),
        recipe=yaml.safe_dump(_nested(_shown(changed(recipe))), sort_keys=False) if recipe else "",
    )


def _recipe(run: Path) -> dict[str, Any] | None:
    path = run / "recipe.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None


def _proof(model_type: str) -> object:
    """The record of the committed model of this type; None: there is none, or it is not current."""
    models = (CommittedModel(name) for name in committed())
    found = next((model for model in models if model_type in model.record["model_types"]), None)
    return found.current_proof if found is not None else None


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of a recipe that tell how a model was made; paths of this machine by their last part."""
    kept = {key: value for key, value in values.items() if not key.startswith("log.") and key != "data.cache_dir"}
    return {
        key: Path(value).name if isinstance(value, str) and Path(value).exists() else value
        for key, value in kept.items()
    }


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as the sections of a recipe."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section = nested
        *above, last = key.split(".")
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    return nested


def _spread(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The first and the last point, and others between them at even distances."""
    if len(points) <= KEPT_POINTS:
        return points
    return [points[round(i * (len(points) - 1) / (KEPT_POINTS - 1))] for i in range(KEPT_POINTS)]
