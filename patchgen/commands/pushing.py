"""push: a trained model goes to the Hub, with a card that says how it was made, and nothing else of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from patchgen.commands.finished_run import model_folder
from patchgen.errors import PatchgenError
from patchgen.templates import render

CARD = "README.md"
SENT = (
    *("*.safetensors", "*.safetensors.index.json", "*config.json", "token*.json", "vocab.*", "merges.txt", "*.model"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.*", "chat_templates/*", CARD),
)
"""What a model consists of. A folder may hold more, which is nobody's business."""
TOLD = (
    *("objective", "optim", "train", "lora", "parallel", "kernels", "model.dtype", "model.overrides", "data.kind"),
    *("data.tokens_per_batch", "data.max_length", "data.epochs", "data.packing", "checkpoint.export"),
)
"""The keys of a recipe that a card shows, with what lies below them."""
UNTOLD = "train.prompts"
KEPT_POINTS = 20
"""How many losses of the curve the card lists."""
PLACE = re.compile(r"^([~./]|[A-Za-z]:\\|\w+://)|[*?\\]|/.*/")
"""A path, a pattern of paths or an address, rather than `builtin:chat` or a name on the Hub, `owner/name`."""


def push(run: Path, repository: str, *, private: bool) -> str:
    """Uploads the model of a run, or a checkpoint, and returns its address.

    A card goes along: the folder's own `README.md`, else one made of the run's recipe, data and curve.

    Raises:
        ConfigError: no model there.
        PatchgenError: the Hub refuses, or does not answer.
    """
    folder = model_folder(run)
    text = None if (folder / CARD).is_file() else card(run, folder, repository)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    client_error = cast("type[Exception]", HfHubHTTPError.__mro__[1])  # the HTTP client's, also where nobody answers
    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id, folder_path=folder, allow_patterns=[*SENT], commit_message="A model of patchgen"
        )
        if text is not None:
            api.upload_file(
                path_or_fileobj=text.encode(), path_in_repo=CARD, repo_id=address.repo_id, commit_message="Its card"
            )
    except (client_error, OSError, ValueError) as error:
        raise PatchgenError(
            f"{repository} was not pushed: {type(error).__name__}: {error}\nTo fix: `hf auth login` with a token that may "
            "write there, and look whether the Hub can be reached."
        ) from error
    return str(address)


def card(run: Path, folder: Path, repository: str) -> str:
    """The text of the card: what the run's files say, and nothing that they do not; of places only the last part."""
    from patchgen.runtime.checkpoint.safetensor_files import CONFIG
    from patchgen.runtime.train import page, run_log
    from patchgen.runtime.train.recipe import changed

    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    recipe, entries = _recipe(run), run_log.read(run)
    told = {key: _public(value) for key, value in changed(recipe).items() if _is_told(key)} if recipe else {}
    model = (recipe or {}).get("model", {})
    return render(
        "model_card.jinja",
        name=repository.rpartition("/")[2],
        base=_public(model.get("source", "")),
        is_own=bool(model.get("code") or model.get("trust_remote_code")),
        model_type=config.get("model_type", ""),
        summary=run_log.read_summary(run),
        figures=page.figures(entries),
        losses=_spread(page.series(entries, "loss")),
        evaluations=_spread(page.series(entries, "eval_loss")),
        sources=[(_public(name), tokens, labels) for name, tokens, labels in page.totals_by_source(entries)],
        recipe=yaml.safe_dump(told, sort_keys=False) if told else "",
    )


def _recipe(run: Path) -> dict[str, Any] | None:
    path = run / "recipe.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None


def _is_told(key: str) -> bool:
    return any(f"{key}.".startswith(f"{told}.") for told in TOLD) and not key.startswith(UNTOLD)


def _public(value: Any) -> Any:
    """A value without places: the last part of each path or address."""
    if isinstance(value, list):
        return [_public(part) for part in cast("list[object]", value)]
    if not isinstance(value, str) or not PLACE.search(value):
        return value
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1]


def _spread(series: Sequence[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """The first and the last point that is finite, and others between them at even distances."""
    points = [(step, value) for step, value in series if value is not None]
    if len(points) <= KEPT_POINTS:
        return points
    return [points[round(i * (len(points) - 1) / (KEPT_POINTS - 1))] for i in range(KEPT_POINTS)]
