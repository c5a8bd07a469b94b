"""What `vision_sp` and `audio_sp` share: the rows of a tower are divided around the loop over its layers."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from patchgen.anatomy import Anatomy
from patchgen.anatomy.row_reader import LENGTHS_TEST
from patchgen.anatomy.towers import ChunkedConvolution, LayerLoop, chunked_convolution, layer_loop
from patchgen.passes.base import LeftAlone, Rewritten, Site, SitePass, site_of
from patchgen.rewrite import edit_function, function_body, insert_before, marked, replace, statements, with_body
from patchgen.source import Block, Module

DIVIDER = "ops.tower_rows"
CHOICE = "ops.attends_by_lengths"


class TowerSlices(SitePass):
    """Rows are sliced above the loop over the layers and gathered where the result is smallest.

    What stands above the loop (patch embeddings, position embeddings, the order of windows) sees all rows on every rank;
    a tower spends less than a per cent of its time there. Convolutions over chunks of sound are divided by chunks.
    """

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        found: list[Site] = []
        for info in anatomy.with_role(self.role, module):
            if "forward" not in info.methods:
                continue
            found.append(site_of(info, info.roles[self.role], "forward"))
            try:
                loop = layer_loop(anatomy, info)
            except LeftAlone:
                continue
            found += [
                site_of(anatomy.classes[name], f"attention of the layers of {info.name}", "forward")
                for name in loop.attentions
                if "forward" in anatomy.classes[name].methods and name not in {site.block for site in found}
            ]
        return found

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        info = anatomy.classes[site.block]
        if self.role not in info.roles:
            return Rewritten(replace(block, _TEST, self._by_lengths), "takes lengths under every name of ours")
        try:
            loop = layer_loop(anatomy, info, _forward(block))
        except LeftAlone as reason:
            why = f"{site.block} is computed whole on every rank that shares a sequence: {reason}"
            raise LeftAlone(why) from reason
        chunks = chunked_convolution(anatomy, info, _forward(block))
        edited = edit_function(block, "forward", lambda forward: self._divide(forward, loop, chunks))
        names = ", ".join(dict.fromkeys(name for _, gathered in loop.gathers for name in gathered))
        convolved = "; convolutions on a slice of the chunks" if chunks is not None else ""
        return Rewritten(edited, f"self.{loop.layers} on a slice of the rows; {names} gathered{convolved}")

    def _by_lengths(self, node: cst.If) -> cst.If:
        """`if is_flash_attention_requested(self.config):` becomes `if ops.attends_by_lengths(self.config):`."""
        test = node.test.with_changes(func=cst.parse_expression(CHOICE))
        return marked(node.with_changes(test=test), self.mark)

    def _divide(self, forward: cst.FunctionDef, loop: LayerLoop, chunks: ChunkedConvolution | None) -> cst.FunctionDef:
        new = {place: [f"{name} = rows.gather({name})" for name in names] for place, names in loop.gathers}
        group = f", group={loop.group}" if loop.group != "1" else ""
        new[loop.place] = [f"rows = {DIVIDER}(self.{loop.layers}, {loop.rows[0]}{group})"]
        new[loop.place] += [f"{name} = rows.lengths({name})" for name in loop.bounds]
        new[loop.place] += [f"{name} = rows.longest({name})" for name in loop.longest]
        new[loop.place] += [f"{name} = rows.shard({name})" for name in loop.rows]
        if chunks is not None:
            new[chunks.end] = [f"{chunks.result} = chunks.gather({chunks.result})"]
            new[chunks.start] = [f"chunks = ops.chunk_rows({chunks.chunks[0]})"]
            new[chunks.start] += [f"{name} = chunks.shard({name})" for name in chunks.chunks]
        body = function_body(forward)
        for place, lines in sorted(new.items(), reverse=True):
            body = insert_before(body, place, statements("\n".join(lines), depth=2, comment=self.mark))
        return with_body(forward, body)


def _forward(block: Block) -> ast.FunctionDef:
    return next(node for node in block.node.body if isinstance(node, ast.FunctionDef) and node.name == "forward")


_TEST = m.If(test=m.Call(func=m.Name(LENGTHS_TEST.strip("."))))
