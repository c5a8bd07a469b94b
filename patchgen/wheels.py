"""The version of the installed transformers, and a cache of the wheels of other releases."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from patchgen.errors import UpstreamNotFound


def installed_version() -> str | None:
    """The version of the installed transformers, read without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_directory() -> Path:
    """The folder for wheels, environments and staged upgrades: `$PATCHGEN_CACHE`, else `patchgen` in the user's cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PATCHGEN_CACHE") or base / "patchgen")


def cached_wheel(version: str) -> Path:
    """The wheel of a release, downloaded into the cache on first use; safe for concurrent runs. Raises
    UpstreamNotFound if `version` is not a version, or its wheel cannot be downloaded."""
    if not re.fullmatch(r"\d+(\.\w+)*", version):
        raise UpstreamNotFound(f"'{version}' is not a version of transformers. To fix: give one such as 5.17.0.")
    cache = cache_directory()
    cached = sorted(cache.glob(f"transformers-{version}-*.whl"))
    if cached:
        return cached[0]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        result = subprocess.run(
            [*command, "--dest", folder, f"transformers=={version}"], capture_output=True, text=True, check=False
        )
        wheels = sorted(Path(folder).glob("*.whl"))
        if result.returncode or not wheels:
            reason = (result.stderr.strip().splitlines() or ["pip downloaded no wheel"])[-1]
            raise UpstreamNotFound(
                f"The wheel of transformers {version} is unavailable. Looked at: the installed package "
                f"({installed_version() or 'none'}), the cache {cache}, and `pip download`, which said: {reason}"
            )
        target = cache / wheels[0].name
        wheels[0].replace(target)
    return target
