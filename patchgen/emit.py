"""Turns rewritten blocks into a standalone file: imports, header, diff, and checks that every name is defined."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import builtins
import copy
import difflib
import itertools
import symtable
import sys
import textwrap
from collections.abc import Iterator, Sequence

from patchgen import __version__
from patchgen.anatomy.classes import dotted
from patchgen.anatomy.graph import references
from patchgen.errors import EmissionError
from patchgen.passes.base import Outcome
from patchgen.rewrite import LINE_LENGTH, format_code, inside_strings
from patchgen.source import Block, Module, bound_names
from patchgen.templates import render, table
from patchgen.upstream import Upstream

BANNER_FRAME = "🚨"
NOTHING = "-"
OPS_IMPORT = "from patchgen.runtime import ops\n"


def with_imports(module: Module, upstream: Upstream) -> Module:
    """Removes unused imports, adds that of `ops` and the version guard, and comments the first use of each operation.

    Imports of `__future__`, imports that a pass or hand edit added, and those marked `# noqa: F401` stay unchanged.

    Raises EmissionError if the file binds the name `ops` itself.
    """
    binding = next((b for b in module if "ops" in b.binds), None)
    if binding is not None and ast.unparse(binding.node) != OPS_IMPORT.strip():
        raise EmissionError(
            f"{upstream.path} binds the name 'ops' itself (line {binding.line}: "
            f"`{ast.unparse(binding.node).splitlines()[0]}`), and generated code calls the runtime by that name. "
            "Rename it in the source, or with a hand edit."
        )
    used = {name for block in module if not block.is_import for name in references(ast.parse(block.text))}
    used |= set(exported_names(module))
    parts = [with_used_names(b, used) if b.is_import and not _stays_whole(b) else b for b in module]
    blocks = [block for block in parts if block is not None]
    start = next((i for i, b in enumerate(blocks) if not (b.is_docstring or is_future(b))), len(blocks))
    end = next((i for i, b in enumerate(blocks) if i >= start and not b.is_import), len(blocks))
    code_blocks = blocks[end:]
    if code_blocks and not code_blocks[0].text.startswith("\n"):
        code_blocks[0] = code_blocks[0].with_text("\n" + code_blocks[0].text)
    imports = _in_order(blocks[start:end], upstream)
    return _explained(module.with_blocks([*blocks[:start], *imports, *code_blocks]))


def _in_order(imports: Sequence[Block], upstream: Upstream) -> list[Block]:
    """A file's leading imports, with that of `ops` where isort puts it and the version guard above those of transformers.

    In a release's file the imports from transformers on were relative and ordered by dots, so they are sorted by name; not
    if two of them bind the same name, since the last one counts, or with a star import.
    """
    first = next(
        (i for i, b in enumerate(imports) if import_place(b)[2].split(".")[0] == "transformers"), len(imports)
    )
    head, tail = list(imports[:first]), list(imports[first:])
    ops_import = Block(text=OPS_IMPORT)
    position = next((i for i, block in enumerate(head) if import_place(block) > import_place(ops_import)), len(head))
    release = next((taken.version for taken in upstream.taken), upstream.version)
    guard = [Block(text=f'ops.require_transformers(__file__, made_from="{release}")\n')] if release else []
    bound = [name for block in tail for name in block.binds]
    is_sorted = upstream.version is not None and len({*bound}) == len(bound) and "*" not in bound
    if is_sorted:
        tail.sort(key=import_place)
    placed = [*head[:position], ops_import, *head[position:], *guard, *tail]
    moved = {id(block) for block in (ops_import, *guard, *(tail if is_sorted else ()))}
    sections = [import_place(block)[0] if block.is_import else None for block in placed]
    lead = imports[0].text if imports else ""
    between = ["" if section == next_section else "\n" for section, next_section in itertools.pairwise(sections)]
    gaps = [lead[: len(lead) - len(lead.lstrip("\n"))], *between]
    beside = zip((ops_import, *placed), placed, gaps, strict=False)
    return [
        block.with_text(gap + block.text.lstrip("\n")) if moved & {id(before), id(block)} else block
        for before, block, gap in beside
    ]


def import_place(block: Block) -> tuple[int, bool, str]:
    """isort's sort key of an import: its section, `import x` before `from x import`, the module's name."""
    node = block.node
    level, module = (node.level, node.module or "") if isinstance(node, ast.ImportFrom) else (0, "")
    module = module or (node.names[0].name if isinstance(node, ast.Import) else "")
    section = 3 if level else 1 if module.split(".")[0] in sys.stdlib_module_names else 2
    return section, isinstance(node, ast.ImportFrom), module.lower()


def _explained(module: Module) -> Module:
    """Adds a comment on what an operation does on one rank to its first use: on that line, or in the pass's comment above."""
    descriptions = table("one_rank.toml")
    blocks: list[Block] = []
    for block in module:
        lines = block.text.split("\n")
        inside = inside_strings(*block.statements)
        uses = [node for node in block.nodes if isinstance(node, ast.Attribute)]
        for node in sorted(uses, key=lambda node: node.lineno):
            if dotted(node) != f"ops.{node.attr}" or (comment := descriptions.get(node.attr)) is None:
                continue
            line = node.lineno - 1
            ends = not lines[line].endswith("\\") and line + 2 not in inside  # so that a comment can follow
            is_short = len(lines[line]) + len(comment) + 4 <= LINE_LENGTH
            marks = (i for i in range(line, -1, -1) if lines[i].lstrip().startswith("# patchgen: "))
            above = next((i for i in marks if i + 1 not in inside), None)
            if above is not None and not (ends and is_short):
                lines[above] += f" ({comment})"
            elif ends:
                lines[line] += f"  # {comment}"
            else:
                continue  # try its next use
            del descriptions[node.attr]
        blocks.append(block.with_text("\n".join(lines)))
    return module.with_blocks(blocks)


def exported_names(module: Module) -> list[str]:
    """The strings in the literals that `__all__` is assigned, augmented (`+=`), extended or appended with."""
    values: list[ast.expr] = []
    for statement in module.statements:
        match statement:
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign() if "__all__" in bound_names(statement):
                values += [statement.value] if statement.value else []
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("__all__"), "extend" | "append"), added)):
                values += added
    return [name for value in values for name in _strings(value)]


def _strings(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(str(name)):
            yield name
        case ast.List(parts) | ast.Tuple(parts):
            yield from (name for part in parts for name in _strings(part))
        case ast.BinOp(ast.List() | ast.Tuple() | ast.BinOp() as left, ast.Add(), right):
            yield from (*_strings(left), *_strings(right))


def check_parses(text: str, path: str) -> None:
    """Checks that generated text is valid Python; `path` is upstream's file, for the message. Raises EmissionError,
    with the line, if not."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise EmissionError(
            f"What was generated from {path} is not valid Python, line {error.lineno}: {error.msg}.\n"
            f"    {(error.text or '').rstrip()}\nA pass or a hand edit wrote it; `patchgen diff` shows which."
        ) from error


def check_stands_alone(module: Module) -> None:
    """Checks that the module defines or imports every name it uses; skipped if it has a top-level star import. Raises
    EmissionError, with all undefined names, if not."""
    check_parses(module.text, module.path)
    tree = ast.parse(module.text)
    if any(isinstance(s, ast.ImportFrom) and s.names[0].name == "*" for s in tree.body):
        return  # what a star import binds is unknown without running it
    known = {name for statement in tree.body for name in bound_names(statement)} | set(dir(builtins)) | _MODULE_NAMES
    problems: list[str] = []
    for block in module:
        for statement in block.statements:
            unknown = sorted(name for name in _free_names(statement) if name not in known)
            problems += [f"  {name} in {block.where}" for name in unknown]
    problems += [f"  {name} in __all__" for name in exported_names(module) if name not in known]
    if problems:
        raise EmissionError(
            "The generated file would refer to names that are not in it:\n"
            + "\n".join(problems)
            + "\nKeep them with `roots`, or drop what uses them as well."
        )


def header(module: Module, upstream: Upstream, outcomes: Sequence[tuple[str, Outcome]], command: str) -> str:
    """The header of the generated file: our record, then upstream's comments without the "do not edit" banner."""
    summaries = [(name, summary(outcome)) for name, outcome in outcomes if name != "hand_edits"]
    passes = [{"name": name, "summary": words} for name, words in summaries if words != NOTHING]
    by_hand = [outcome for name, outcome in outcomes if name == "hand_edits"]
    edits = [f"{hit.site}: {hit.what}" for outcome in by_hand for hit in (*outcome.hits, *outcome.upstream)]
    facts = {"patchgen": __version__, "upstream": upstream, "command": command, "passes": passes, "edits": edits}
    return render("header.jinja", **facts) + without_banner(module.header)


def without_banner(text: str) -> str:
    """Upstream's comments without its "do not edit this file" banner, which two lines of sirens frame."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[i] for i in lines_beside_banner(text))


def lines_beside_banner(text: str) -> list[int]:
    """The indices of the lines outside that banner."""
    lines = text.splitlines()
    frame = [i for i, line in enumerate(lines) if line.startswith("#") and BANNER_FRAME in line]
    return [i for i in range(len(lines)) if len(frame) < 2 or not frame[0] <= i <= frame[-1]]


def summary(outcome: Outcome) -> str:
    """An outcome in one phrase: the numbers of hits, of sites that upstream serves, and of notes; `NOTHING` if all are 0."""
    parts = ((outcome.hits, "{} hit{}"), (outcome.upstream, "upstream {}"), (outcome.notes, "{} note{}"))
    phrases = [text.format(len(entries), "" if len(entries) == 1 else "s") for entries, text in parts if entries]
    return ", ".join(phrases) or NOTHING


def diff(
    upstream: Upstream,
    before: str,
    after: str,
    dropped: Sequence[str],
    roots: Sequence[str],
    *,
    before_lines: Sequence[int],
    root: str,
) -> str:
    """The unified diff against upstream without the dropped symbols, which are listed by name at its top.

    Args:
        before: upstream's text without what was dropped; each line has its number in upstream's file in `before_lines`.
        after: the generated text without our record in the header.
        root: the folder of generated models, as the diff names it.
    """
    listed = textwrap.wrap(", ".join(dropped), 110)
    head = render("diff_head.jinja", upstream=upstream, dropped=listed, roots=", ".join(roots))
    left, right = before.splitlines(keepends=True), after.splitlines(keepends=True)
    source = upstream.merged_file if upstream.taken else upstream.path
    parts = [head, f"--- a/{source}\n+++ b/{root}/{upstream.model}/modeling_{upstream.model}.py\n"]
    # Without `autojunk`: difflib's own unified diff ignores frequent lines, such as blank ones, and finds more changes.
    for hunk in difflib.SequenceMatcher(None, left, right, autojunk=False).get_grouped_opcodes(3):
        (_, i, _, k, _), (_, _, j, _, m) = hunk[0], hunk[-1]
        start = before_lines[i] if j > i else 0
        parts.append(f"@@ -{start},{j - i} +{k + (m > k)},{m - k} @@\n")
        for kind, i, j, k, m in hunk:
            parts += [f" {line}" for line in left[i:j]] if kind == "equal" else [f"-{line}" for line in left[i:j]]
            parts += [f"+{line}" for line in right[k:m]] if kind != "equal" else []
    return "".join(parts)


def changed_lines(diff_text: str) -> int:
    """The number of added and removed lines of a unified diff."""
    lines = diff_text.splitlines()
    return sum(line[:1] in "+-" and not line.startswith(("+++ ", "--- ")) for line in lines if line)


_MODULE_NAMES = {"__file__", "__name__", "__doc__", "__all__", "__package__", "__spec__", "__class__"}


def _stays_whole(block: Block) -> bool:
    """Whether an import keeps unused names: it is of `__future__`, was added, or is marked `noqa: F401`."""
    return is_future(block) or not block.line or "noqa: F401" in block.text


def is_future(block: Block) -> bool:
    return block.is_import and any(getattr(s, "module", None) == "__future__" for s in block.statements)


def with_used_names(block: Block, used: set[str]) -> Block | None:
    """The import block without unused names, or None if none is left."""
    if all(name in used for name in block.binds):
        return block
    lines: list[str] = []
    for statement in (s for s in block.statements if isinstance(s, ast.Import | ast.ImportFrom)):
        used_aliases = [a for a in statement.names if (a.asname or a.name.split(".")[0]) in used or a.name == "*"]
        if used_aliases:
            statement = copy.copy(statement)
            statement.names = used_aliases
            lines.append(ast.unparse(statement) + "\n")
    if not lines:
        return None
    stripped = block.text.lstrip("\n")
    blank = block.text[: len(block.text) - len(stripped)]
    comments = "".join(line for line in stripped.splitlines(keepends=True) if line.startswith("#"))
    return block.with_text(blank + comments + format_code("".join(lines)))


def _free_names(statement: ast.stmt) -> set[str]:
    """The names that a module-level statement reads from the module's scope."""
    top = symtable.symtable(ast.unparse(statement), "<statement>", "exec")
    used = (symbol for symbol in top.get_symbols() if symbol.is_referenced())
    free = {symbol.get_name() for symbol in used if not symbol.is_assigned() and not symbol.is_imported()}
    pending = top.get_children()
    while pending:
        scope = pending.pop()
        pending += scope.get_children()
        free |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return free
