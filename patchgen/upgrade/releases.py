"""A release of transformers: installed, from the package index, in a wheel or in a folder. It is never imported."""

from __future__ import annotations

import functools
import re
import shlex
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.errors import UpstreamNotFound
from patchgen.upstream import Release, open_release
from patchgen.wheels import cached_wheel, installed_version

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import Provenance

PACKAGE = "transformers"


@dataclass(frozen=True)
class LocatedRelease:
    """A release and what another environment needs to import it: a wheel to install, a folder for its path, or neither if the
    release is installed here."""

    release: Release
    wheel: Path | None = None
    folder: Path | None = None

    @property
    def is_installed(self) -> bool:
        return self.wheel is None and self.folder is None


@functools.lru_cache(maxsize=16)
def find(where: str) -> LocatedRelease:
    """The release of a version ("5.17.0"), a wheel ("transformers-5.17.0-py3-none-any.whl") or a folder with the package.

    A version that is not installed is downloaded into the cache once.

    Raises:
        UpstreamNotFound: there is none; the message says where it was searched for.
    """
    path = Path(where)
    if path.is_dir():
        return _in_folder(path)
    if where.endswith(".whl"):
        return _in_wheel(path)
    if len(path.parts) > 1:
        raise UpstreamNotFound(f"There is no folder {where}. Give a version, a wheel or a folder to --to.")
    release = open_release(where)
    return (
        LocatedRelease(release)
        if where == installed_version()
        else LocatedRelease(release, wheel=cached_wheel(where).resolve())
    )


def _in_wheel(path: Path) -> LocatedRelease:
    if not path.is_file():
        raise UpstreamNotFound(f"There is no wheel {path}. Give a version, a wheel or a folder to --to.")
    try:
        root = zipfile.Path(path, f"{PACKAGE}/")
    except zipfile.BadZipFile as error:
        raise UpstreamNotFound(f"{path} should be a wheel of transformers but is not a zip file: {error}.") from error
    return LocatedRelease(Release(root, _version(root, path)), wheel=path.resolve())


def _in_folder(path: Path) -> LocatedRelease:
    candidates = (path, path / PACKAGE, path / "src" / PACKAGE)
    root = next(
        (
            candidate
            for candidate in candidates
            if (candidate / "models").is_dir() and (candidate / "__init__.py").is_file()
        ),
        None,
    )
    if root is None or root.name != PACKAGE:
        raise UpstreamNotFound(
            f"{path} contains no transformers: searched for the package 'transformers', with models/, there and in "
            "transformers/ and src/transformers/."
        )
    root = root.resolve()
    return LocatedRelease(Release(root, _version(root, path)), folder=root.parent)


def _version(root: Path | zipfile.Path, path: Path) -> str:
    text = (root / "__init__.py").read_text(encoding="utf-8") if (root / "__init__.py").is_file() else ""
    match = re.search(r"^__version__ = [\"']([^\"']+)[\"']", text, re.MULTILINE)
    if match is None:
        raise UpstreamNotFound(f"{path}: transformers/__init__.py defines no __version__, so it is not a release.")
    return match[1]


def installed() -> str:
    """The installed version.

    Raises:
        UpstreamNotFound: transformers is not installed.
    """
    return open_release().version


def user_source(model: str, record: Provenance) -> Path:
    """The file or folder that a model outside any release was generated from, as the command in its record names it.

    Raises:
        UpstreamNotFound: it does not exist.
    """
    arguments = shlex.split(record["command"])
    path = Path(arguments[arguments.index("--source") + 1])
    if not path.exists():
        raise UpstreamNotFound(
            f"{model} was generated from {path}, which does not exist. To fix: run this in the folder that the path is "
            f"relative to: it is an argument of `{record['command']}`."
        )
    return path
