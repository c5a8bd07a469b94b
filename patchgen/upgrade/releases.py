"""A release of transformers, wherever it is: installed, on the package index, in a wheel, in a folder. None is imported."""

from __future__ import annotations

import functools
import re
import shlex
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchgen.errors import UpstreamNotFound
from patchgen.upstream import Release, open_release
from patchgen.wheels import cached_wheel, installed_version

PACKAGE = "transformers"


@dataclass(frozen=True)
class Place:
    """A release and what an environment that runs it installs: a wheel, a folder on the path, or nothing (it is here)."""

    release: Release
    wheel: Path | None = None
    folder: Path | None = None

    @property
    def is_installed(self) -> bool:
        return self.wheel is None and self.folder is None


@functools.lru_cache(maxsize=16)
def find(where: str) -> Place:
    """The release that a person names: "5.17.0", "transformers-5.17.0-py3-none-any.whl", a folder with the package.

    A version is the installed one, or is downloaded once into the cache.

    Raises:
        UpstreamNotFound: there is none, with the places that were looked at.
    """
    path = Path(where)
    if path.is_dir():
        return _in_folder(path)
    if where.endswith(".whl"):
        return _in_wheel(path)
    if len(path.parts) > 1:
        raise UpstreamNotFound(f"There is no folder {where}. Give a version, a wheel or a folder to --to.")
    release = open_release(where)
    return Place(release) if where == installed_version() else Place(release, wheel=cached_wheel(where).resolve())


def _in_wheel(path: Path) -> Place:
    if not path.is_file():
        raise UpstreamNotFound(f"There is no wheel {path}. Give a version, a wheel or a folder to --to.")
    try:
        root = zipfile.Path(path, f"{PACKAGE}/")
    except zipfile.BadZipFile as error:
        raise UpstreamNotFound(f"{path} should be a wheel of transformers and is not a zip file: {error}.") from error
    return Place(Release(root, _version(root, path)), wheel=path.resolve())


def _in_folder(path: Path) -> Place:
    candidates = (path, path / PACKAGE, path / "src" / PACKAGE)
    root = next((one for one in candidates if (one / "models").is_dir() and (one / "__init__.py").is_file()), None)
    if root is None or root.name != PACKAGE:
        raise UpstreamNotFound(
            f"{path} holds no transformers: looked for the package 'transformers', with models/, there and in "
            "transformers/ and src/transformers/."
        )
    root = root.resolve()
    return Place(Release(root, _version(root, path)), folder=root.parent)


def _version(root: Path | zipfile.Path, path: Path) -> str:
    text = (root / "__init__.py").read_text(encoding="utf-8") if (root / "__init__.py").is_file() else ""
    found = re.search(r"^__version__ = [\"']([^\"']+)[\"']", text, re.MULTILINE)
    if found is None:
        raise UpstreamNotFound(f"{path}: transformers/__init__.py does not state a __version__: it is not a release.")
    return found[1]


def installed() -> str:
    """The version that is installed here.

    Raises:
        UpstreamNotFound: none is.
    """
    return open_release().version


def own_source(model: str, record: Mapping) -> Path:
    """The file or folder that a model was made from, where it is of no release: its record has the command.

    Raises:
        UpstreamNotFound: it is not there.
    """
    words = shlex.split(record["command"])
    given = Path(words[words.index("--source") + 1])
    if not given.exists():
        raise UpstreamNotFound(
            f"{model} was made from {given}, which is not there. Run this where that path leads to it: it was given as "
            f"`{record['command']}`."
        )
    return given
