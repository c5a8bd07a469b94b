"""The base classes of passes.

A pass is one class in one file with one purpose. It lists the sites that it must rewrite (`sites`) and rewrites one of
them (`rewrite`). The base class does the rest: it collects hits, and raises `PassMismatch` for sites that were missed and
for signs of sites that were not found. Nothing is silently inactive.
"""

from __future__ import annotations

import abc
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from patchgen.anatomy import Anatomy, ClassInfo, Role
from patchgen.anatomy.roles import unread_heads
from patchgen.errors import LeftAlone, Missed, PassMismatch
from patchgen.source import Block, Module

if TYPE_CHECKING:
    from patchgen.model_configs import ModelConfig


@dataclass(frozen=True)
class Site:
    """A place that a pass must rewrite: a class, a method or a function of the file."""

    name: str  # "Qwen3MoeExperts.forward"
    block: str  # the class or function that contains it: "Qwen3MoeExperts"
    line: int  # in the upstream file
    why: str  # for example the role that makes it a site


@dataclass(frozen=True)
class Hit:
    """A site that was rewritten, or that upstream already has in the wanted form."""

    site: str
    line: int  # in the upstream file; 0 if unknown
    what: str  # what was done, or what upstream does


@dataclass(frozen=True)
class Rewritten:
    """The result of `rewrite`: the site's block rewritten, and blocks to insert before it."""

    block: Block
    what: str
    before: tuple[Block, ...] = ()


@dataclass(frozen=True)
class AlreadyDone:
    """The result of `rewrite` if upstream already does the pass's work, or leaves nothing to do; `what` says why."""

    what: str


@dataclass(frozen=True)
class Outcome:
    """What `Pass.apply` returns."""

    module: Module
    hits: tuple[Hit, ...] = ()
    upstream: tuple[Hit, ...] = ()  # sites where upstream already does the pass's work
    notes: tuple[str, ...] = ()
    added: tuple[str, ...] = ()  # classes that the pass wrote; the pipeline adds them to the anatomy


@dataclass(frozen=True)
class Example:
    """A source before and after a pass: its documentation and its test.

    The first line of `text` is the title. Of the others, those with a `-` in the left margin exist only before, those with
    a `+` only after; code starts in the column of the closing quotes. A line `...` with a `+` is any number of added lines.
    Upstream's usual imports are left out.
    """

    text: str

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def before(self) -> str:
        return self._lines("-")

    @property
    def after(self) -> str:
        return self._lines("+")

    def shows(self, text: str) -> bool:
        """Whether a text matches the example's `after`."""
        parts = re.split(r"^ *\.\.\.\n", self.after, flags=re.MULTILINE)
        return re.fullmatch("(.*\n)*".join(map(re.escape, parts)), text) is not None

    def _lines(self, sign: str) -> str:
        _, *lines, margin = self.text.split("\n")
        start = len(margin)
        return "".join(f"{line[start:]}\n" for line in lines if line[:start].strip() in ("", sign))


class Pass(abc.ABC):
    """Base of all passes. `patchgen explain` shows the docstring of a pass, its purpose, what it expects and its examples."""

    name: ClassVar[str]
    purpose: ClassVar[str]
    expects: ClassVar[str]  # in words; errors show it too
    before: ClassVar[str] = "host_sync_lint"  # of a project's own pass: the pass that it runs before
    EXAMPLES: ClassVar[tuple[Example, ...]] = ()

    @classmethod
    def of_config(cls, config: ModelConfig) -> Self:
        """The pass as a model's config parametrises it."""
        return cls()

    @property
    def mark(self) -> str:
        """The text of the comment at every rewritten site."""
        return f"patchgen: {self.name}"

    @abc.abstractmethod
    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        """Rewrites the module, with what the anatomy says about upstream's file. Raises PassMismatch if the pass does
        not find what it expects."""


class SitePass(Pass):
    """A pass that rewrites sites one by one."""

    role: ClassVar[str] = ""  # of the classes that are sites; without one, the pass overrides `why` or `sites`
    member: ClassVar[str] = "forward"  # the method that is the site; empty: the class itself

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        """Every place that must be rewritten, independent of whether `rewrite` knows its form."""
        reasons = [(info, self.why(info, anatomy)) for info in anatomy.still_in(module)]
        return [site_of(info, why, self.member) for info, why in reasons if why]

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        """Why a class is a site; empty if it is none."""
        return f"{self.role}: {info.roles[self.role]}" if self.role in info.roles else ""

    @abc.abstractmethod
    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | AlreadyDone:
        """Rewrites one site in its block.

        Raises:
            Missed: the site does not have a known form; an error.
            LeftAlone: the site is deliberately not rewritten; a note.
        """

    def evidence(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """Signs of sites that `sites` did not find, found by other means. Any is an error."""
        return unread_heads(module, anatomy) if self.role == Role.HEAD else ()

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        sites = list(self.sites(module, anatomy))
        signs = list(self.evidence(module, anatomy))
        if signs:
            raise PassMismatch(self._no_site_message(signs))
        hits, upstream, misses, notes = list[Hit](), list[Hit](), list[tuple[Site, Missed]](), list[str]()
        for site in sites:
            block = module.block(site.block)
            if f"# {self.mark}" in block.text and self.is_done(block, site):
                upstream.append(Hit(site.name, site.line, "rewritten before"))
                continue
            try:
                result = self.rewrite(block, site, anatomy)
            except Missed as miss:
                misses.append((site, miss))
                continue
            except LeftAlone as left:
                notes.append(str(left))
                continue
            if isinstance(result, AlreadyDone):
                upstream.append(Hit(site.name, site.line, result.what))
            else:
                if result.block.text == block.text:
                    raise PassMismatch(f"The pass '{self.name}' reports a hit on {site.name} and changed nothing.")
                module = module.swap(block, *result.before, result.block)
                hits.append(Hit(site.name, site.line, result.what))
        if misses:
            raise PassMismatch(self._miss_message(misses), tuple(site.name for site, _ in misses))
        return Outcome(module, tuple(hits), tuple(upstream), (*notes, *self.notes(module, anatomy)))

    def is_done(self, block: Block, site: Site) -> bool:
        """Whether this site, of a block that has the pass's mark somewhere, was rewritten (a block may have several)."""
        if "." not in site.name:  # the class or function is the site
            return True
        member = site.name.rpartition(".")[2]
        lines = block.text.splitlines()
        ends = [block.node.lineno]  # the last line of each member so far: comments above a member belong to it
        for node in getattr(block.node, "body", ()):
            is_marked = any(f"# {self.mark}" in line for line in lines[ends[-1] : node.end_lineno])
            if is_marked and getattr(node, "name", None) == member:
                return True
            ends.append(node.end_lineno)
        return False

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """Notes for the record, for example on code that the pass deliberately leaves unchanged."""
        return ()

    def _miss_message(self, misses: Sequence[tuple[Site, Missed]]) -> str:
        parts = [f"The pass '{self.name}' missed {len(misses)} site(s). It expects {self.expects}."]
        for site, miss in misses:
            parts.append(f"  site     {site.name} (upstream line {site.line}): {site.why}")
            parts.append(f"  expected {miss.expected}")
            if miss.found:
                closest = "\n           ".join(miss.found.strip().splitlines()[:8])
                parts.append(f"  closest  {closest}")
        return "\n".join([*parts, self._way_out()])

    def _no_site_message(self, signs: Sequence[str]) -> str:
        message = f"The pass '{self.name}' found no site where the file should have one. It expects {self.expects}."
        return "\n".join([message, *(f"  sign     {sign}" for sign in signs[:5]), self._way_out()])

    def _way_out(self) -> str:
        config = f'`expect={{"{self.name}": Expect(0, reason="...")}}`'
        return f"  to fix   update the pass ({_shown_file(type(self))}), or state in the model's config {config}."


def _shown_file(kind: type[Pass]) -> str:
    """The path of a pass's file, relative to the repository if it is one of this package."""
    file, package = Path(inspect.getfile(kind)), Path(__file__).parents[2]
    return str(file.relative_to(package)) if file.is_relative_to(package) else str(file)


def site_of(info: ClassInfo, why: str, member: str = "") -> Site:
    """The site of a class, or of its own method `member`."""
    name, node = (f"{info.name}.{member}", info.methods[member]) if member else (info.name, info.node)
    return Site(name, info.name, node.lineno, why)
