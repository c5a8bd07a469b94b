"""What a reader sees of an upgrade: on the terminal, and the message of the commit."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Iterator

from rich.console import Console

from patchgen.commands.console import print_diff
from patchgen.upgrade.findings import PERSON, REVIEW, SAME, WORDS, ModelUpgrade, Site, Upgrade

STYLES = {SAME: "green", REVIEW: "yellow", PERSON: "red"}


def show_model(found: ModelUpgrade, console: Console, *, verbose: bool) -> None:
    """A model: its verdict, and each site with what changed. Of imported helpers their names alone, and of those that training
    does not run their number, unless `verbose`."""
    console.print(
        f"{found.model}: {found.old} -> {found.new}: {WORDS[found.verdict]}", style=STYLES[found.verdict], markup=False
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
            f"  helpers: {len(run)} symbols in {files} imported files (their sources: --verbose)", markup=False
        )
        listed = ", ".join(f"{site.symbol} ({site.kind})" for site in run)
        console.print(textwrap.indent(textwrap.fill(listed, 110), "    "), style="dim", markup=False, soft_wrap=True)
        if len(helpers) > len(run):
            console.print(
                f"  and {len(helpers) - len(run)} that training does not run (--verbose lists them)", markup=False
            )
    if not found.sites:
        console.print("  no class, function or field that the model uses changed; comments and formatting may have")


def _show_site(site: Site, console: Console, shown: set[tuple[str, ...]]) -> None:
    """A site; its change by reference where it was shown with another one, as that of a pass whose hits moved there."""
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
        console.print("    its code: above", style="dim", markup=False)
        return
    shown.add(change)
    labels = ("upstream's, old", "upstream's, new")
    _show_change(site.old_upstream, site.new_upstream, labels, console)
    if site.edit:
        console.print("    the edit, written for the old one:", markup=False)
        console.print(textwrap.indent(site.edit, "      "), style="cyan", markup=False, soft_wrap=True)
    elif _without_blank(site.generated_then) != _without_blank(site.new_upstream) and site.generated_then:
        _show_change(site.generated_now, site.generated_then, ("generated now", "generated then"), console)


def _without_blank(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _show_change(old: str, new: str, labels: tuple[str, str], console: Console) -> None:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), *labels, n=2, lineterm="")
    print_diff(lines, indent="    ")


def summary(found: Upgrade) -> Iterator[str]:
    """A line for each verdict that models have."""
    for verdict, words in WORDS.items():
        names = [model.model for model in found.models if model.verdict == verdict]
        if names:
            yield f"{len(names)} {words}: {', '.join(names)}"


# -------------------------------------------------------------------------------------------------- the commit


def commit_message(found: Upgrade, written: Iterable[str], reviewed: Iterable[str], held_back: dict[str, str]) -> str:
    """The message for what `--apply` wrote.

    Args:
        written: the models that moved, each proven with the new release.
        reviewed: the targets of hand edits that a person said to be right as they are.
        held_back: model -> why it stays where it is.
    """
    models = {model.model: model for model in found.models}
    written = list(written)
    names = ", ".join(written) if len(written) < 4 else f"{len(written)} models"
    parts = [f"Generated from transformers {found.new}: {names}"]
    proven = "Each is proven equal to the release's own class: loss, logits, every gradient."
    parts.append(textwrap.fill(f"They were made from {found.old}. {proven}", 72))
    same = [name for name in written if not models[name].sites]
    if same:
        parts.append(textwrap.fill(f"Nothing but comments changed in {', '.join(same)}.", 72))
    for name in written:
        if lines := list(_changes(models[name])):
            parts.append("\n".join([f"{name}:", *lines]))
    if beside := _beside(models[name] for name in written):
        parts.append(beside)
    if reviewed := list(reviewed):
        parts.append(textwrap.fill(f"Hand edits read against their new targets: {', '.join(reviewed)}.", 72))
    if held_back:
        reasons = (f"- {name}: {reason.splitlines()[0]}" for name, reason in held_back.items())
        parts.append("\n".join(["Not moved:", *(_item(reason) for reason in reasons)]))
    return "\n\n".join(parts) + "\n"


def _changes(model: ModelUpgrade) -> Iterator[str]:
    """A line for each site of the modeling file and its configuration."""
    for site in model.sites:
        if site.place == "helper":
            continue
        under = f" ({', '.join(site.passes)})" if site.passes else ""
        what = site.reason if site.kind in ("hits", "census") else f"{site.symbol} {site.kind}{under}"
        yield _item(f"- {what}")


def _item(text: str) -> str:
    return textwrap.fill(text, 72, subsequent_indent="  ", break_long_words=False)


def _beside(models: Iterable[ModelUpgrade]) -> str:
    helpers = {
        (site.file, site.symbol) for model in models for site in model.sites if site.place == "helper" and site.is_run
    }
    if not helpers:
        return ""
    files = sorted({file.removeprefix("transformers/") for file, _ in helpers})
    return textwrap.fill(
        f"Of what they import and training runs, {len(helpers)} symbols changed, in {', '.join(files)}.", 72
    )
