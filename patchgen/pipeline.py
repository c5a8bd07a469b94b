"""upstream source -> parse -> anatomy -> passes -> imports -> checks -> header -> .py + .diff + provenance.json"""

from __future__ import annotations

import ast
import contextlib
import difflib
import gc
import itertools
import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchgen import custom_sources, emit, provenance, source
from patchgen.anatomy import Anatomy, Role, study
from patchgen.anatomy.classes import parameter_names
from patchgen.errors import ConfigError, PassMismatch, nearest
from patchgen.inherited import with_inherited
from patchgen.model_configs import Expect, ModelConfig, config_for
from patchgen.passes import all_passes, default_pipeline, pass_named
from patchgen.passes.base import Outcome, Pass, SitePass
from patchgen.passes.generic_heads import generic_base
from patchgen.passes.hand_edits import lost_edits
from patchgen.passes.prune import default_roots
from patchgen.source import Module
from patchgen.upstream import AUTO_CLASS_MAPPINGS, Upstream, load_from


@dataclass(frozen=True)
class Step:
    """A pass that ran, and its outcome."""

    name: str
    outcome: Outcome
    seconds: float
    before: Module
    anatomy: Anatomy  # that the pass read; shared, classes that passes add included; new after hand edits

    @property
    def rewrites(self) -> bool:
        """Whether the pass rewrites classes or functions site by site (a `SitePass`); hand edits do not count."""
        pass_class = pass_named(self.name)
        return pass_class is not None and issubclass(pass_class, SitePass)

    @property
    def changed_lines(self) -> int:
        """The number of lines that the pass added and removed."""
        left, right = self.before.text.splitlines(), self.outcome.module.text.splitlines()
        for _ in range(2):  # strips the equal lines at the start, then at the end: most passes change one place
            pairs = zip(left, right, strict=False)
            same = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
            left, right = left[same:][::-1], right[same:][::-1]
        return emit.changed_lines("\n".join(difflib.unified_diff(left, right, lineterm="")))


@dataclass(frozen=True)
class Generated:
    """A generated model: its files as text, and the steps that made them."""

    upstream: Upstream
    config: ModelConfig
    anatomy: Anatomy
    steps: tuple[Step, ...]
    text: str
    diff: str
    provenance: str  # JSON

    @property
    def model(self) -> str:
        return self.upstream.model

    @property
    def parts(self) -> list[str]:
        """The models with generated files of their own that this one builds by default, such as its language model."""
        return [name for part in json.loads(self.provenance).get("parts", ()) if (name := part["default"]["model"])]

    @property
    def files(self) -> dict[str, str]:
        """File name -> text, for the folder `generated_models/<model>/`."""
        return _files(self.upstream, self.text, self.diff) | {"provenance.json": self.provenance}


def _files(upstream: Upstream, text: str, diff: str) -> dict[str, str]:
    return {f"modeling_{upstream.model}.py": text, f"modeling_{upstream.model}.diff": diff, **upstream.siblings}


def run_passes(module: Module, anatomy: Anatomy, passes: Sequence[Pass], config: ModelConfig) -> list[Step]:
    """Runs passes in order and checks each against the hits that the config expects; recomputes the anatomy after hand edits.

    Raises PassMismatch for what passes refuse and for other numbers of hits, for a file on disk once for all passes; and
    ConfigError if the config expects hits of an unknown pass.
    """
    for name in config.expect:
        if pass_named(name) is None:
            raise ConfigError(
                f"The config of '{config.model}' expects hits of '{name}', and there is no such pass. "
                f"Nearest: {nearest([name], [kind.name for kind in all_passes()])}."
            )
    steps: list[Step] = []
    refusals: list[PassMismatch] = []
    for current in passes:
        start = time.perf_counter()
        try:
            outcome = _apply(current, module, anatomy, config)
        except PassMismatch as error:
            if anatomy.upstream.version is not None:
                raise
            refusals.append(error)  # the author of a file on disk sees all of them
            continue
        except Exception:
            if refusals:  # it may follow from an earlier refusal
                break
            raise
        steps.append(Step(current.name, outcome, time.perf_counter() - start, before=module, anatomy=anatomy))
        module = outcome.module
        if current.name == "hand_edits" and outcome.hits:
            anatomy = study(module, anatomy.upstream)
            _mark_asked_heads(config.heads, anatomy)
        for name in outcome.added:
            anatomy.add(name, module)
    if refusals:
        raise custom_sources.combined_refusal(anatomy.upstream, config, refusals)
    return steps


def _apply(current: Pass, module: Module, anatomy: Anatomy, config: ModelConfig) -> Outcome:
    """Runs a pass and checks its number of hits if the config expects one.

    With `Expect(0, ...)` a site that the pass rewrites is an error; one that it misses is not.
    """
    expected = config.expect.get(current.name)
    wanted, why = (expected.hits, f" ({expected.reason})") if isinstance(expected, Expect) else (expected, "")
    no_hits_note = f"no hits: {expected.reason}" if isinstance(expected, Expect) and not wanted else None
    try:
        outcome = current.apply(module, anatomy)
    except PassMismatch as error:
        error.pass_name = current.name
        if no_hits_note is None:
            raise
        return Outcome(module, notes=(no_hits_note,))  # a missed site, or signs of one: the config's reason covers it
    if wanted is not None and len(outcome.hits) != wanted:
        listed = "\n".join(f"  {hit.site}: {hit.what}" for hit in (*outcome.hits, *outcome.upstream)) or "  none"
        raise PassMismatch(
            f"The pass '{current.name}' has {len(outcome.hits)} hits on {anatomy.upstream.origin}, and the config of "
            f"'{config.model}' expects {wanted}{why}. Hits, and sites where upstream already does this:\n"
            f"{listed}\n"
            f"  to fix   update the pass, or review the change and correct `expect` in "
            f"{custom_sources.config_path(anatomy.upstream)}.",
            tuple(hit.site for hit in outcome.hits),
            current.name,
        )
    if no_hits_note is None:
        return outcome
    return Outcome(module, upstream=outcome.upstream, notes=(no_hits_note, *outcome.notes))


@contextlib.contextmanager
def _without_garbage_collection() -> Generator[None, None, None]:
    """Disables Python's garbage collector, which would traverse all syntax trees repeatedly and free none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def generate(upstream: Upstream, config: ModelConfig | None = None, heads: Sequence[str] = ()) -> Generated:
    """Generates one model in memory.

    Args:
        config: the model's settings; by default those of its file in `model_configs`, or beside a file on disk, if any.
        heads: the classes to generate for, instead of those that the config or upstream's auto maps name.

    Raises PatchgenError if the source does not parse, a pass refuses, the config does not fit, or the result is not standalone.
    """
    config_file = Path(upstream.config_file) if upstream.config_file else None
    config = (config or config_for(upstream.model, config_file)).for_heads(heads)
    original, upstream = with_inherited(source.parse(upstream.text, upstream.path), upstream)
    anatomy = study(original, upstream)
    if not anatomy.classes:
        raise ConfigError(f"{upstream.path} defines no class: there is no model in it to generate.")
    _mark_asked_heads(config.heads, anatomy)
    if not config.kept:
        custom_sources.require_head(anatomy)
    steps = run_passes(original, anatomy, default_pipeline(config), config)
    anatomy = steps[-1].anatomy
    if not heads:  # with `heads`, the config may name code that only other heads reach
        _check_config(config, original, steps[-1].outcome.module)
    module = emit.with_imports(steps[-1].outcome.module, upstream)
    emit.check_stands_alone(module)
    custom_sources.check_imports(module, upstream)

    outcomes = [(step.name, step.outcome) for step in steps]
    header = emit.header(module, upstream, outcomes, provenance.command(upstream, heads))
    text = header + "".join(block.text for block in module) + module.footer
    emit.check_parses(text, upstream.path)

    roots = config.kept or default_roots(original, anatomy)
    kept_starts = {block.line for block in module if block.line}
    dropped = [block.name for block in original if block.name and block.line not in kept_starts]
    before, before_lines = _kept_text(original, kept_starts)
    after = emit.without_banner(original.header) + text[len(header) :]
    shown_root = provenance.shown_root()
    diff = emit.diff(upstream, before, after, dropped, roots, before_lines=before_lines, root=shown_root)
    files = _files(upstream, text, diff)
    provenance_text = provenance.record(steps, roots, dropped, files, config, asked=heads)
    return Generated(upstream, config, anatomy, tuple(steps), text, diff, provenance_text)


def generate_whole(
    upstream: Upstream, has: Callable[[str], bool] = lambda name: False, heads: Sequence[str] = ()
) -> list[Generated]:
    """Generates a model, for these heads as `generate` does, and the models of other files that it builds by default
    (`Generated.parts`), recursively; without a part that, by name, exists already (`has`)."""
    generated, release = [generate(upstream, heads=heads)], upstream.release
    if release is None:  # a file on disk has no parts: they are found in a release
        return generated
    for part in generated:  # grows
        named = [name for name in part.parts if name not in {other.model for other in generated} and not has(name)]
        generated += [generate(load_from(release, name)) for name in dict.fromkeys(named)]
    return generated


def _mark_asked_heads(heads: Sequence[str], anatomy: Anatomy) -> None:
    """Gives the requested heads `Role.ASKED`. Raises ConfigError if one is not a model of this file, or cannot be
    trained and proven."""
    if not heads:
        return
    release, models = anatomy.upstream.release, [name for name in anatomy.classes if anatomy.is_model(name)]
    maps = [release.auto_map(name) for name in AUTO_CLASS_MAPPINGS.values()] if release else []
    served = {name for auto_map in maps for name in auto_map.values()} if release else {*models}
    refused = {name: why for name in models if (why := _why_refused(name, anatomy, served))}
    for head in heads:
        if head not in models or head in refused:
            near = difflib.get_close_matches(head, [name for name in models if name not in refused], n=4, cutoff=0.0)
            path = anatomy.upstream.path
            problem = f"{head} of {path} can be neither trained nor proven: {refused[head]}" if head in models else ""
            advice = f" To fix: ask for another head of this file ({', '.join(near)})." if near else ""
            raise ConfigError(f"{problem or f'{path} has no model {head}'}.{advice}")
        anatomy.classes[head].roles[Role.ASKED] = "asked for by name"


def _why_refused(name: str, anatomy: Anatomy, served: set[str]) -> str:
    """Why a model cannot be requested as a head; empty if it can. `served`: the classes that Auto classes build."""
    method = anatomy.method(name, "forward")
    if method is None and generic_base(anatomy, name) is None:
        return "no class of this file gives it a forward"
    unlabelled = method is not None and "labels" not in parameter_names(method[1])
    if name not in served:
        return f"no Auto class builds it{', and its forward takes no labels' * unlabelled} ({', '.join(AUTO_CLASS_MAPPINGS)})"
    if name not in anatomy.upstream.heads or Role.HEAD in anatomy.classes[name].roles:
        return ""
    return "its forward takes no labels" if unlabelled else "it neither generates nor computes a loss"


def _kept_text(original: Module, kept_starts: set[int]) -> tuple[str, list[int]]:
    """Upstream's text without banner and dropped blocks, and for each of its lines the number in upstream's file."""
    parts = [emit.without_banner(original.header)]
    numbers = [i + 1 for i in emit.lines_beside_banner(original.header)]
    line = original.header.count("\n")
    for block in original:
        length = block.text.count("\n")
        if block.line in kept_starts or block.is_import:
            parts.append(block.text)
            numbers += range(line + 1, line + length + 1)
        line += length
    numbers += range(line + 1, line + original.footer.count("\n") + 1)
    return "".join(parts) + original.footer, numbers


def _check_config(config: ModelConfig, original: Module, final: Module) -> None:
    """Raises ConfigError if the config edits, or allows syncs in, code that is not in the generated file."""
    lost = lost_edits(config.edits, final)
    if lost:
        raise ConfigError(
            f"The config of '{config.model}' edits {', '.join(lost)}, which the roots do not reach: prune dropped it, and "
            "the edit with it. Remove the edit, or keep its target with `roots`."
        )
    members = [(block, node) for block in final for node in block.members if isinstance(node, ast.FunctionDef)]
    methods = {node.name for _, node in members}
    methods |= {f"{block.name}.{node.name}" for block, node in members if node is not block.node}
    unknown = [name for name in config.allow_sync if name not in methods]
    if unknown:
        raise ConfigError(
            f"`allow_sync` of '{config.model}' names {', '.join(unknown)}, which {original.path} does not have or prune "
            f"dropped. Nearest: {nearest(unknown, methods, 2, 0.4)}."
        )
