"""Modeling files that are not part of transformers: the refusals of all passes are one error, and so are all missing imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from patchgen.anatomy.classes import calls, dotted
from patchgen.errors import ConfigError, PassMismatch, UpstreamNotFound
from patchgen.model_configs import ModelConfig, shown_file
from patchgen.source import Module, bound_names
from patchgen.upstream import Release, Upstream, open_release


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
    it, or names that the installed transformers does not have."""
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
        if name.split(".")[0] == "transformers" and not statement.level:
            missing += _not_in_transformers(name, [alias.name for alias in statement.names])
    if missing:
        listed = "".join(f"\n  {message}" for message in dict.fromkeys(missing))
        raise ConfigError(f"{upstream.given or upstream.origin} imports what does not exist:{listed}")


def _not_in_transformers(module: str, names: Sequence[str]) -> Iterator[str]:
    """A message for each imported name that the installed transformers does not have; none if that cannot be known."""
    try:
        release = open_release()
    except UpstreamNotFound:
        return
    if module == "transformers":
        return  # a lazy module: its text does not list its names
    path = "/".join(module.split(".")[1:])
    text = next((t for t in (release.read(f"{path}.py"), release.read(f"{path}/__init__.py")) if t is not None), None)
    if text is None:
        yield f"{module}: {release.origin} has no such module; remove its import from the file"
        return
    tree = ast.parse(text)
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "__getattr__" in functions or any(dotted(call.func) == "_LazyModule" for call in calls(tree)):
        return  # another lazy module
    known = {name for node in ast.walk(tree) if isinstance(node, ast.stmt) for name in bound_names(node)}
    for name in names:
        if "*" not in known and name not in known and not _is_module(release, f"{path}/{name}"):
            yield f"{module}.{name}: {release.origin} has no such name; remove it from the file, or define it there"


def _is_module(release: Release, path: str) -> bool:
    return any(release.read(file) is not None for file in (f"{path}.py", f"{path}/__init__.py"))
