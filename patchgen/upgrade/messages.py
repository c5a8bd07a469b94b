"""An upgrade as text: on the terminal, and as a commit message."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console

from patchgen.commands.console import print_diff
from patchgen.runtime.verify.verdict import PROVEN
from patchgen.upgrade.findings import PERSON, REVIEW, SAME, VERDICT_NAMES, ModelUpgrade, Site, Upgrade

STYLES = {SAME: "green", REVIEW: "yellow", PERSON: "red"}


def show_model(found: ModelUpgrade, console: Console, *, verbose: bool) -> None:
    """Prints a model's verdict and each site with its change. Without `verbose`, imported helpers are only named, and those that
    training does not run only counted."""
    console.print(
        f"{found.model}: {found.old} -> {found.new}: {VERDICT_NAMES[found.verdict]}",
        style=STYLES[found.verdict],
        markup=False,
    )
    helpers = [site for site in found.sites if site.place == "helper" and site.verdict < PERSON]
    shown: set[tuple[str, ...]] = set()
    for site in found.sites:
        if site not in helpers or verbose:
            _show_site(site, console, shown)
    if helpers and not verbose:
        run = [site for site in helpers if site.is_run]
        files = len({site.file for site in run})
        console.print(
            f"  helpers: {len(run)} symbols in {files} imported files (--verbose shows their sources)", markup=False
        )
        listed = ", ".join(f"{site.symbol} ({site.kind})" for site in run)
        console.print(textwrap.indent(textwrap.fill(listed, 110), "    "), style="dim", markup=False, soft_wrap=True)
        if len(helpers) > len(run):
            console.print(
                f"  and {len(helpers) - len(run)} that training does not run (--verbose lists them)", markup=False
            )
    if not found.sites:
        console.print("  no class, function or field that the model uses changed, at most comments and formatting")


def _show_site(site: Site, console: Console, shown: set[tuple[str, ...]]) -> None:
    """Prints a site. A change that was shown with an earlier site of the same symbol is not repeated."""
    where = f"{site.file}:{site.new_line or site.old_line}" if site.new_line or site.old_line else site.file
    passes = f" [{', '.join(site.passes)}]" if site.passes else ""
    style = STYLES[site.verdict] if site.verdict == PERSON else "bold"
    console.print(
        f"  {site.kind} {site.symbol or site.file}{passes}  {where}", style=style, markup=False, soft_wrap=True
    )
    reason = site.reason if site.is_run else f"training does not run it: {site.reason}"
    console.print(textwrap.indent(reason, "    "), style="dim", markup=False, soft_wrap=True)
    sides = (site.old_upstream, site.new_upstream, site.generated_now, site.generated_then, site.edit)
    change = (site.file, site.symbol, *sides)
    if any(sides) and change in shown:
        console.print("    the change is shown above", style="dim", markup=False)
        return
    shown.add(change)
    labels = ("old upstream", "new upstream")
    _show_change(site.old_upstream, site.new_upstream, labels, console)
    if site.edit:
        console.print("    the edit, written for the old code:", markup=False)
        console.print(textwrap.indent(site.edit, "      "), style="cyan", markup=False, soft_wrap=True)
    elif _stripped_lines(site.generated_then) != _stripped_lines(site.new_upstream) and site.generated_then:
        _show_change(site.generated_now, site.generated_then, ("generated now", "generated then"), console)


def _stripped_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _show_change(old: str, new: str, labels: tuple[str, str], console: Console) -> None:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), *labels, n=2, lineterm="")
    print_diff(lines, "    ", console)


def summary(found: Upgrade) -> Iterator[str]:
    """A line per verdict with its models."""
    for verdict, verdict_name in VERDICT_NAMES.items():
        names = [model.model for model in found.models if model.verdict == verdict]
        if names:
            yield f"{len(names)} {verdict_name}: {', '.join(names)}"


# -------------------------------------------------------------------------------------------------- the commit


def commit_message(
    found: Upgrade, written: Mapping[str, str], reviewed: Iterable[str], held_back: Mapping[str, str]
) -> str:
    """The message for what `--apply` wrote.

    Args:
        written: the models that moved -> the status of their proof.
        reviewed: the targets of hand edits that a person confirmed.
        held_back: model -> why it was not moved.
    """
    models = {model.model: model for model in found.models}
    names = ", ".join(written) if len(written) < 4 else f"{len(written)} models"
    parts = [f"Generated from transformers {found.new}: {names}"]
    parts.append(textwrap.fill(f"They were generated from {found.old}. {_proof_summary(written)}", 72))
    same = [name for name in written if not models[name].sites]
    if same:
        parts.append(textwrap.fill(f"Only comments changed in {', '.join(same)}.", 72))
    for name in written:
        if lines := list(_changes(models[name])):
            parts.append("\n".join([f"{name}:", *lines]))
    if helpers := _changed_helpers(models[name] for name in written):
        parts.append(helpers)
    if reviewed := list(reviewed):
        parts.append(textwrap.fill(f"Hand edits compared with their new targets: {', '.join(reviewed)}.", 72))
    if held_back:
        reasons = (f"- {name}: {reason.splitlines()[0]}" for name, reason in held_back.items())
        parts.append("\n".join(["Not moved:", *(_item(reason) for reason in reasons)]))
    return "\n\n".join(parts) + "\n"


def _proof_summary(written: Mapping[str, str]) -> str:
    """Which models are proven, and the status of the others, which they had before."""
    proven = [name for name, status in written.items() if status == PROVEN]
    others = [f"{name} ({status})" for name, status in written.items() if status != PROVEN]
    equal = "proven equal to the release's own class: loss, logits, every gradient."
    if not others:
        return f"Each is {equal}"
    proven_sentence = f"{', '.join(proven)}: {equal} " if proven else ""
    return f"{proven_sentence}Not proven as training runs them, as before: {', '.join(others)}."


def _changes(model: ModelUpgrade) -> Iterator[str]:
    """A line for each site of the modeling file and its configuration."""
    for site in model.sites:
        if site.place == "helper":
            continue
        passes = f" ({', '.join(site.passes)})" if site.passes else ""
        yield _item("- " + (site.reason if site.kind in ("hits", "census") else f"{site.symbol} {site.kind}{passes}"))


def _item(text: str) -> str:
    return textwrap.fill(text, 72, subsequent_indent="  ", break_long_words=False)


def _changed_helpers(models: Iterable[ModelUpgrade]) -> str:
    helpers = {
        (site.file, site.symbol) for model in models for site in model.sites if site.place == "helper" and site.is_run
    }
    if not helpers:
        return ""
    files = sorted({file.removeprefix("transformers/") for file, _ in helpers})
    return textwrap.fill(
        f"Of the imported code that training runs, {len(helpers)} symbols changed, in {', '.join(files)}.", 72
    )
