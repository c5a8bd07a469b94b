"""An environment that has one release of transformers and shares everything else with this one. Made in seconds.

torch and the rest come from the environment that runs now, by a path file; pip installs the release into a folder of its
own and, where what is here will not do for it, the few packages that it wants in other versions.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from patchgen.errors import UpstreamNotFound
from patchgen.upgrade.releases import Place
from patchgen.wheels import cache_directory

READY = "patchgen_ready"
PATHS = "patchgen_shared.pth"


def python_for(place: Place, python: Path | None = None) -> Path:
    """A Python with that release: the one that is named, the one that runs, or of an environment that is made and kept.

    Raises:
        UpstreamNotFound: the named one has another release, or pip could not make one; with what it said.
    """
    if python is None and place.is_installed:
        return Path(sys.executable)
    python = python or _made(place)
    version = place.release.version
    found = _ask(python)
    if found != version:
        raise UpstreamNotFound(
            f"{python} should have transformers {version} and has {found}. Install it there, name another with --python, "
            "or leave --python out: an environment is made then."
        )
    return python


def _made(place: Place) -> Path:
    """The Python of the environment of a release, made where it is not there yet."""
    what = place.wheel or place.folder
    assert what is not None, "the installed release needs no environment"
    stamp = f"{what.stat().st_mtime_ns} {what} {sys.executable} {__file__}"
    name = f"transformers-{place.release.version}-{hashlib.sha256(stamp.encode()).hexdigest()[:8]}"
    folder = cache_directory() / "environments" / name
    python = folder / "bin" / "python"
    if (folder / READY).is_file():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], place)
    _share(folder, place)
    if place.wheel is not None:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", str(place.wheel)], place)
    (folder / READY).touch()
    return python


def _share(folder: Path, place: Place) -> None:
    """Lets an environment see what this one has, below its own: patchgen, torch, and the rest."""
    site = next(folder.glob("lib/python*/site-packages"))
    own = Path(__file__).parents[2]  # the folder that patchgen is imported from
    paths = [place.folder, own, *map(Path, dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))]
    (site / PATHS).write_text(
        "".join(f"{path}\n" for path in dict.fromkeys(paths) if path is not None), encoding="utf-8"
    )


def environment_variables() -> dict[str, str]:
    """Of this process, without what would put another transformers before that of an environment."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def _ask(python: Path) -> str:
    """The release of transformers that a Python imports."""
    code = "import transformers; print(transformers.__version__)"
    try:
        result = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=False, env=environment_variables()
        )
    except OSError as error:
        raise UpstreamNotFound(f"{python} is not a Python that runs here: {error}.") from error
    return result.stdout.strip() or f"none ({(result.stderr.strip().splitlines() or ['it said nothing'])[-1]})"


def _run(command: list[str], place: Place) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment_variables())
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UpstreamNotFound(
            f"An environment for {place.release.origin} could not be made: `{' '.join(command)}` said: {reason}\n"
            "Name one that you made yourself with --python."
        )
