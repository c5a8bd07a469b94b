"""An environment with another release of transformers that shares everything else with this one. Created in seconds.

A path file adds torch and the other packages of the running environment; pip installs the release, and those packages
that the release needs in other versions, into the new one.
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
from patchgen.upgrade.releases import LocatedRelease
from patchgen.wheels import cache_directory

READY_FILE = "patchgen_ready"
"""Marks an environment whose creation finished."""
PATH_FILE = "patchgen_shared.pth"


def python_for(target: LocatedRelease, python: Path | None = None) -> Path:
    """A Python with that release: the given one, the running one, or that of an environment that is created and kept.

    Raises:
        UpstreamNotFound: the Python cannot be run or has another release, or the environment cannot be created.
    """
    if python is None and target.is_installed:
        return Path(sys.executable)
    python = python or _environment(target)
    version = target.release.version
    imported = _imported_version(python)
    if imported != version:
        raise UpstreamNotFound(
            f"{python} should have transformers {version} and has {imported}. To fix: install it there, give another --python, "
            "or omit --python to create an environment."
        )
    return python


def _environment(target: LocatedRelease) -> Path:
    """The Python of a release's environment, which is created on first use."""
    path = target.wheel or target.folder
    assert path is not None, "the installed release needs no environment"
    stamp = f"{path.stat().st_mtime_ns} {path} {sys.executable} {__file__}"
    name = f"transformers-{target.release.version}-{hashlib.sha256(stamp.encode()).hexdigest()[:8]}"
    folder = cache_directory() / "environments" / name
    python = folder / "bin" / "python"
    if (folder / READY_FILE).is_file():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], target)
    _share_packages(folder, target)
    if target.wheel is not None:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", str(target.wheel)], target)
    (folder / READY_FILE).touch()
    return python


def _share_packages(folder: Path, target: LocatedRelease) -> None:
    """Appends the release's folder, if any, and the running environment's packages to the new environment's import path."""
    site = next(folder.glob("lib/python*/site-packages"))
    checkout = Path(__file__).parents[2]  # the folder that patchgen is imported from
    paths = [
        target.folder,
        checkout,
        *map(Path, dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))),
    ]
    (site / PATH_FILE).write_text(
        "".join(f"{path}\n" for path in dict.fromkeys(paths) if path is not None), encoding="utf-8"
    )


def environment_variables() -> dict[str, str]:
    """The environment variables of this process, without those that would make a Python import another transformers."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def _imported_version(python: Path) -> str:
    """The release of transformers that a Python imports."""
    code = "import transformers; print(transformers.__version__)"
    try:
        result = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=False, env=environment_variables()
        )
    except OSError as error:
        raise UpstreamNotFound(f"{python} cannot be run as a Python: {error}.") from error
    return result.stdout.strip() or f"none ({(result.stderr.strip().splitlines() or ['no output'])[-1]})"


def _run(command: list[str], target: LocatedRelease) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment_variables())
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise UpstreamNotFound(
            f"No environment for {target.release.origin} could be created: `{' '.join(command)}` failed: {reason}\n"
            "To fix: create one yourself and give its Python with --python."
        )
