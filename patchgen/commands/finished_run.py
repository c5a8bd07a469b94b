"""What commands read of a run that has ended: its model, its recipe, and its log."""

from __future__ import annotations

from pathlib import Path

from patchgen.errors import ConfigError

ADAPTER, ADAPTER_CONFIG = "adapter", "adapter_config.json"


def model_folder(place: Path) -> Path:
    """The folder with the model: `export/` of a run, or the place itself if it is a checkpoint.

    Raises:
        ConfigError: there is neither.
    """
    if not place.is_dir():
        raise ConfigError(f"There is no folder {place}. To fix: name a run's folder, or a checkpoint.")
    from patchgen.runtime.checkpoint.safetensor_files import CONFIG
    from patchgen.runtime.train.setup import EXPORT, is_complete

    for folder in (place / EXPORT, place):
        if (folder / CONFIG).is_file():
            if not is_complete(folder):
                raise ConfigError(f"{folder} is not complete: the run that writes it has not ended, or was killed.")
            return folder
    if (
        adapter := next((one for one in (place / ADAPTER, place) if (one / ADAPTER_CONFIG).is_file()), None)
    ) is not None:
        raise ConfigError(
            f"{adapter} has an adapter alone. To fix: patchgen merge {adapter} --output FOLDER, and name that folder."
        )
    raise ConfigError(
        f"{place} has no {EXPORT}/ and no {CONFIG}. To fix, for a run that was stopped or exports nothing: "
        f"patchgen export {place} --output FOLDER, and name that folder."
    )
