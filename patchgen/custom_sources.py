"""Modeling files that are not part of transformers: the refusals of all passes are one error, and so are all missing imports."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from patchgen.errors import ConfigError, PassMismatch
from patchgen.model_configs import ModelConfig, shown_file
from patchgen.source import Module
from patchgen.upstream import Upstream


def combined_refusal(upstream: Upstream, config: ModelConfig, refusals: Sequence[PassMismatch]) -> PassMismatch:
    """The refusals of all passes as one error, with the config that skips these passes; a single refusal as it is."""
    if len(refusals) == 1:
        return refusals[0]
    names = dict.fromkeys(error.pass_name for error in refusals)
    expected = "".join(f'        "{name}": Expect(0, reason="..."),\n' for name in names)
    messages = "\n\n".join(map(str, refusals))
    return PassMismatch(
        f"{len(names)} passes refuse {upstream.origin}: {', '.join(names)}.\n\n{messages}\n\n"
        f"To leave sites that no fix above covers as upstream wrote them, declare it for each pass in {config_path(upstream)}:\n\n"
        "    from patchgen.model_configs import Expect, ModelConfig\n\n"
        f'    CONFIG = ModelConfig(model="{config.model}", expect={{\n{expected}    }})',
        tuple(site for error in refusals for site in error.sites),
        refusals[0].pass_name,
    )


def config_path(upstream: Upstream) -> str:
    """The path of a model's config, which may not exist: for a file on disk beside it, else in `model_configs`."""
    if upstream.given is None:
        return shown_file(upstream.model)
    given = Path(upstream.given)
    name = f"patchgen_{upstream.model}.py"
    return upstream.config_file or str(given.with_name(name) if given.suffix == ".py" else given / name)


def check_imports(module: Module, upstream: Upstream) -> None:
    """Raises ConfigError if the generated form of a file on disk would import, at its top level, modules that are not beside
    it, or hides the names of torch or transformers, by which passes know what code means, in a star import."""
    if upstream.version is not None or upstream.module.startswith("transformers."):
        return
    package_prefix = f"{upstream.package}."
    missing: list[str] = []
    for statement in (node for node in module.statements if isinstance(node, ast.ImportFrom)):
        name = statement.module or ""
        is_of_package = name == upstream.package  # `from . import parts`
        modules = [alias.name for alias in statement.names] if is_of_package else []
        modules += [name.removeprefix(package_prefix).split(".")[0]] if name.startswith(package_prefix) else []
        absent = [f"{module_name}.py" for module_name in modules if f"{module_name}.py" not in upstream.siblings]
        missing += [f"{file}, which it imports: put the file beside {upstream.origin}" for file in absent]
        if statement.names[0].name == "*" and name.split(".")[0] in ("torch", "transformers"):
            missing.append(f"names hidden by `{ast.unparse(statement)}`: write out those that the file uses")
    if missing:
        listed = "".join(f"\n  {message}" for message in dict.fromkeys(missing))
        raise ConfigError(f"{upstream.given or upstream.origin} imports what cannot be found:{listed}")
