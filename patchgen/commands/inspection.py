"""diff, explain, inspect, new: looking at models and passes."""

from __future__ import annotations

import difflib
import textwrap
from pathlib import Path

from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from patchgen import emit, model_configs, pipeline, project_code, source, upstream
from patchgen.anatomy import Role, study
from patchgen.commands import mends
from patchgen.commands.console import console, display_path, print_diff, text_diff
from patchgen.errors import ConfigError, PatchgenError, UpstreamNotFound
from patchgen.passes import all_passes, default_pipeline, pass_named
from patchgen.passes.base import Pass
from patchgen.passes.prune import default_roots
from patchgen.pipeline import Generated
from patchgen.templates import render


def diff(model: str, version: str | None, path: Path | None) -> None:
    """Prints the diff, one group per pass."""
    generated = pipeline.generate(upstream.load(model, version, path))
    for step in generated.steps:
        before, after = step.before.text, step.outcome.module.text
        if before == after:
            continue
        if step.name == "prune":
            dropped = ", ".join(hit.site for hit in step.outcome.hits)
            console.rule(f"prune: {len(step.outcome.hits)} dropped", align="left")
            console.print(textwrap.fill(dropped, 110))
            continue
        console.rule(f"{step.name}: {emit.summary(step.outcome)}", align="left")
        print_diff(text_diff(before, after).splitlines()[2:])


def explain(subject: str | None, version: str | None, path: Path | None) -> None:
    """Prints what a pass is or what passes do to a model; without a subject, the list of passes."""
    if subject is None:
        table = Table("pass", "purpose")
        for pass_class in all_passes():
            table.add_row(pass_class.name, pass_class.purpose)
        console.print(table)
        return
    found = pass_named(subject)
    if found is not None:
        _explain_pass(found)
        return
    try:
        generated = pipeline.generate(upstream.load(subject, version, path))
    except UpstreamNotFound as error:
        nearest = difflib.get_close_matches(subject, [pass_class.name for pass_class in all_passes()], n=3)
        raise UpstreamNotFound(
            f"'{subject}' is neither a pass (nearest: {', '.join(nearest) or 'none'}) nor a model. {error}"
        ) from error
    _explain_model(generated)


def _explain_pass(pass_class: type[Pass]) -> None:
    console.rule(pass_class.name, align="left")
    console.print(pass_class.purpose)
    console.print(textwrap.fill(" ".join((pass_class.__doc__ or "").split()), 110))
    console.print(f"It expects {pass_class.expects}.", markup=False)
    for example in pass_class.EXAMPLES:
        console.rule(example.title, align="left", characters="·")
        for title, text in (("before", example.before), ("after", example.after)):
            console.print(title, style="dim")
            console.print(Syntax(text, "python", background_color="default", word_wrap=True))


def _explain_model(generated: Generated) -> None:
    console.print(f"{generated.model} from {generated.upstream.origin} ({generated.upstream.path})")
    for step in generated.steps:
        has_findings = step.outcome.hits or step.outcome.upstream or step.outcome.notes
        if step.name in ("prune", "absolute_imports") or not has_findings:
            continue
        console.rule(step.name, align="left")
        for hit in step.outcome.hits:
            console.print(f"{hit.site}  (upstream line {hit.line}): {hit.what}", markup=False)
            block = hit.site.split(".")[0]
            if step.before.has(block) and step.outcome.module.has(block):
                changes = text_diff(step.before.block(block).text, step.outcome.module.block(block).text)
                print_diff(changes.splitlines()[3:], indent="    ")
        for hit in step.outcome.upstream:
            console.print(
                f"{hit.site}  (upstream line {hit.line}): upstream does it itself: {hit.what}",
                style="dim",
                markup=False,
            )
        for note in step.outcome.notes:
            console.print(f"note: {note}", style="yellow", markup=False)


def inspect(subject: str, version: str | None) -> None:
    """Prints the anatomy of a model or of a file, what each pass would hit, and a draft config; of a file outside transformers
    also what it uses that transformers 5 no longer has."""
    path = Path(subject)
    name = path.stem.removeprefix("modeling_") if path.is_file() else path.name
    origin = upstream.load(name, version, path) if path.exists() else upstream.load(subject, version)
    module = source.parse(origin.text, origin.path)
    anatomy = study(module, origin)
    console.print(f"{origin.model}: {origin.path} of {origin.origin}, {len(anatomy.classes)} classes")
    table = Table("line", "class", "role", "why")
    for info in anatomy.classes.values():
        for role, why in info.roles.items() or {"": ""}.items():
            table.add_row(str(info.node.lineno), info.name, role, why)
    console.print(table)
    if origin.version is None:
        _print_mends(origin.text)
    roots = default_roots(module, anatomy)
    console.print(f"roots: {', '.join(roots)}")
    config = model_configs.config_for(origin.model)
    try:
        steps = pipeline.run_passes(module, anatomy, default_pipeline(config), config)
    except PatchgenError as error:
        console.print(f"[red]would not generate:[/] {escape(str(error))}", soft_wrap=True)
        return
    for step in steps:
        console.print(f"  {step.name:20}{emit.summary(step.outcome)}")
    console.rule("draft config", align="left")
    console.print(
        Syntax(render("model_config.jinja", model=origin.model, roots=roots), "python", background_color="default")
    )


def _print_mends(text: str) -> None:
    """Prints the rows of the table of mends that a file needs, each with its first line."""
    found = mends.needed(text)
    if not found:
        return
    table = Table(
        "line", "it has", "transformers 5", "write", title=f"from transformers 4 ({mends.PAGE})", title_justify="left"
    )
    for one in found:
        table.add_row(str(one.line), *map(escape, (one.mend.name, one.mend.now, one.mend.write)))
    console.print(table)


def new(model: str, version: str | None, path: Path | None, *, force: bool) -> None:
    """Writes the draft of a config file."""
    if not model.isidentifier():
        raise ConfigError(
            f"'{model}' cannot name a Python file. To fix: give the name of the model's folder under transformers/models."
        )
    project_code.refuse_installed_package(model_configs.folder(), "The config")
    target = model_configs.folder() / f"{model}.py"
    if target.exists() and not force:
        raise ConfigError(f"{display_path(target)} already exists. To fix: edit it, or give --force to overwrite it.")
    generated = pipeline.generate(upstream.load(model, version, path), model_configs.ModelConfig(model=model))
    heads = [name for name, info in generated.anatomy.classes.items() if Role.HEAD in info.roles]
    original = source.parse(generated.upstream.text, generated.upstream.path)
    roots = default_roots(original, generated.anatomy)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render("model_config.jinja", model=model, roots=roots), encoding="utf-8")
    console.print(f"wrote {display_path(target)}. Heads of the file: {', '.join(heads)}.")
