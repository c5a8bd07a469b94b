"""Drift under hand edits: the code that an edit replaces has changed since the edit was written or reviewed."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from patchgen import source
from patchgen.passes.hand_edits import (
    AddMethod,
    Edit,
    OverrideMethod,
    content_hash,
    is_not_needed,
    target_of,
    targets_record,
)
from patchgen.source import Block, Module
from patchgen.upgrade.findings import PERSON, REVIEW, Site
from patchgen.upstream import Upstream

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import Provenance


def drift_under_edits(
    edits: Sequence[Edit], record: Provenance, old: Upstream, new: Upstream, reviewed: Collection[str]
) -> Iterator[Site]:
    """A site for each edit whose target changed or is gone, or that adds a method which the new release has itself.

    The target is compared with the hash in the record, taken when the edit was written or last reviewed; without one, with
    the release that the committed file was generated from.
    """
    parsed = [source.parse(upstream_file.text, upstream_file.path) for upstream_file in (old, new)]
    recorded = {(edit_record["verb"], edit_record["target"]): edit_record for edit_record in record.get("edits", ())}
    for edit in edits:
        if isinstance(edit, AddMethod):
            yield from _added_upstream(edit, parsed[1], new.path)
            continue
        before, after = (target_of(edit, module) for module in parsed)
        if not before and not after:
            continue
        current = next(iter(targets_record((edit,), parsed[0] if before else parsed[1])))
        reference = recorded.get((current["verb"], current["target"]), current if before else None)
        if after and reference is not None and content_hash(*after) == reference["upstream"]:
            continue
        is_mended = is_not_needed(edit, after)
        is_reviewed = edit.target in reviewed or (reference is not None and reference["edit"] != current["edit"])
        yield Site(
            place="model",
            kind="hand edit",
            file=new.path,
            symbol=edit.target,
            passes=("hand_edits",),
            verdict=REVIEW if is_mended or (after and is_reviewed) else PERSON,
            reason=_reason(current["verb"], edit, after, is_mended=is_mended, is_reviewed=is_reviewed),
            old_upstream=_text(edit, before, parsed[0]),
            new_upstream=_text(edit, after, parsed[1]),
            edit=getattr(edit, "code", "").strip("\n"),
            old_line=_line(edit, before, parsed[0]),
            new_line=_line(edit, after, parsed[1]),
        )


def _added_upstream(edit: AddMethod, module: Module, path: str) -> Iterator[Site]:
    """A site if upstream now has the method that an edit adds."""
    nodes = target_of(OverrideMethod(edit.target, edit.code, edit.reason), module)
    if nodes:
        reason = f"add_method adds {edit.target}, which the new release has itself (the edit: {edit.reason})"
        sides: dict[str, Any] = {"new_upstream": _text(edit, nodes, module), "new_line": _line(edit, nodes, module)}
        code = edit.code.strip("\n")
        yield Site("model", "hand edit", path, edit.target, ("hand_edits",), PERSON, reason, edit=code, **sides)


def _reason(verb: str, edit: Edit, after: list[ast.stmt], *, is_mended: bool, is_reviewed: bool) -> str:
    why = " ".join(edit.reason.split())
    if not after:
        return f"{verb} replaces {edit.target}, which the new release does not have (the edit: {why})"
    if is_mended:
        return f"{verb} is not needed in the new release: {edit.target} lacks the statement that it replaces (the edit: {why})"
    state = (
        "the edit was reviewed against it"
        if is_reviewed
        else "the edit was written for the old code and would hide the new"
    )
    return f"the target of {verb} changed: {state} (the edit: {why})"


def _text(edit: Edit, nodes: list[ast.stmt], module: Module) -> str:
    """The source of a target, decorators and comments included."""
    lines = _block(edit, module).text.splitlines() if nodes else []
    starts = [_first_line(node) for node in nodes]
    return "\n\n".join("\n".join(lines[a - 1 : node.end_lineno]) for a, node in zip(starts, nodes, strict=True))


def _line(edit: Edit, nodes: list[ast.stmt], module: Module) -> int:
    """The first line of a target in its file."""
    if not nodes:
        return 0
    block = _block(edit, module)
    return block.line + nodes[0].lineno - _first_line(block.node)


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _block(edit: Edit, module: Module) -> Block:
    return module.block(edit.target.partition(".")[0])
