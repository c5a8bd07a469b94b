"""Modeling files that are no part of transformers: all that keeps one from being generated is said at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from patchgen.anatomy.classes import calls, dotted
from patchgen.errors import ConfigError, PassMismatch, UpstreamNotFound
from patchgen.model_configs import ModelConfig, shown_file
from patchgen.source import Module, bound_names
from patchgen.upstream import Release, Upstream, open_release

LAZY = "__getattr__"


def tells_all(upstream: Upstream) -> bool:
    """Whether every pass is asked before a refusal: of another's file one wants to know all that there is to do."""
    return upstream.version is None


def refused(upstream: Upstream, config: ModelConfig, refusals: Sequence[PassMismatch]) -> PassMismatch:
    """The refusals of all passes as one, with the config that would leave each pass out."""
    if len(refusals) == 1:
        return refusals[0]
    names = dict.fromkeys(error.pass_name for error in refusals)
    expected = "".join(f'        "{name}": Expect(0, reason="..."),\n' for name in names)
    told = "\n\n".join(map(str, refusals))
    return PassMismatch(
        f"{len(names)} passes refuse {upstream.origin}: {', '.join(names)}.\n\n{told}\n\n"
        f"What nothing of the above mends can be left as it is, pass by pass, in {config_place(upstream)}:\n\n"
        "    from patchgen.model_configs import Expect, ModelConfig\n\n"
        f'    CONFIG = ModelConfig(model="{config.model}", expect={{\n{expected}    }})',
        tuple(site for error in refusals for site in error.sites),
        refusals[0].pass_name,
    )


def config_place(upstream: Upstream) -> str:
    """Where the config of a model stands, or would: beside a file on disk, else where those of models are."""
    if upstream.given is None:
        return shown_file(upstream.model)
    given = Path(upstream.given)
    name = f"patchgen_{upstream.model}.py"
    return upstream.config_file or str(given.with_name(name) if given.suffix == ".py" else given / name)


def check_imports(module: Module, upstream: Upstream) -> None:
    """Refuses a file on disk whose generated form would import what is not there.

    Raises:
        ConfigError: with every such import: modules beside the file that are missing, and names that the installed
            transformers does not have.
    """
    if upstream.version is not None or upstream.module.startswith("transformers."):
        return
    beside = f"{upstream.package}."
    missing = []
    for statement in (node for block in module for node in block.statements if isinstance(node, ast.ImportFrom)):
        name = statement.module or ""
        if name.startswith(beside) and f"{name.removeprefix(beside).split('.')[0]}.py" not in upstream.siblings:
            file = f"{name.removeprefix(beside).split('.')[0]}.py"
            missing.append(f"{file}, which it imports: put the file beside {upstream.origin}")
        elif name.split(".")[0] == "transformers" and not statement.level:
            missing += _not_in_transformers(name, [alias.name for alias in statement.names])
    if missing:
        listed = "".join(f"\n  {one}" for one in dict.fromkeys(missing))
        raise ConfigError(f"{upstream.given or upstream.origin} needs what is not there:{listed}")


def _not_in_transformers(name: str, wanted: Sequence[str]) -> Iterator[str]:
    """The names that the installed transformers does not have, in words."""
    try:
        release = open_release()
    except UpstreamNotFound:
        return
    if name == "transformers":
        return  # it makes its names when they are asked for
    path = "/".join(name.split(".")[1:])
    text = next((t for t in (release.read(f"{path}.py"), release.read(f"{path}/__init__.py")) if t is not None), None)
    if text is None:
        yield f"{name}: {release.origin} has no such module; take the lines that import it out of the file"
        return
    tree = ast.parse(text)
    made = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if LAZY in made or any(dotted(call.func) == "_LazyModule" for call in calls(tree)):
        return  # as well
    known = {one for node in ast.walk(tree) if isinstance(node, ast.stmt) for one in bound_names(node)}
    for one in wanted:
        if "*" not in known and one not in known and not _is_module(release, f"{path}/{one}"):
            yield f"{name}.{one}: {release.origin} has no such name; take it out of the file, or define it there"


def _is_module(release: Release, path: str) -> bool:
    return any(release.read(file) is not None for file in (f"{path}.py", f"{path}/__init__.py"))
