"""The base of `vision_sp` and `audio_sp`: the rows of a tower are divided around the loop over its layers."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy
from patchgen.anatomy.row_reader import LENGTHS_TEST
from patchgen.anatomy.towers import ChunkedConvolution, LayerLoop, chunked_convolution, layer_loop
from patchgen.passes.base import LeftAlone, Rewritten, Site, SitePass, site_of
from patchgen.rewrite import Editor
from patchgen.source import Block, Module

DIVIDER = "ops.tower_rows"
CHOICE = "ops.attends_by_lengths"


class TowerSlices(SitePass):
    """Rows are sliced above the loop over the layers and gathered below it where the result is smallest.

    Code above the loop (patch embeddings, position embeddings, the order of windows) sees all rows on every rank; a tower
    spends less than one per cent of its time there. Convolutions over chunks of audio are sliced by chunks.
    """

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        tower_sites: list[Site] = []
        for info in anatomy.with_role(self.role, module):
            if "forward" not in info.methods:
                continue
            tower_sites.append(site_of(info, info.roles[self.role], "forward"))
            try:
                loop = layer_loop(anatomy, info)
            except LeftAlone:
                continue
            tower_sites += [
                site_of(anatomy.classes[name], f"attention of the layers of {info.name}", "forward")
                for name in loop.attentions
                if "forward" in anatomy.classes[name].methods and name not in {site.block for site in tower_sites}
            ]
        return tower_sites

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        info, editor = anatomy.classes[site.block], Editor(block, self.mark)
        if self.role not in info.roles:
            for node in ast.walk(block.node):
                match node:
                    case ast.If(ast.Call(test)) if anatomy.names.is_upstream(test, LENGTHS_TEST):
                        editor.mark(node)
                        editor.instead(test, CHOICE)
            return Rewritten(editor.result, "takes lengths under every name of ours")
        forward = editor.function("forward")
        try:
            loop = layer_loop(anatomy, info, forward)
        except LeftAlone as reason:
            why = f"{site.block} is computed whole on every rank that shares a sequence: {reason}"
            raise LeftAlone(why) from reason
        chunks = chunked_convolution(anatomy, info, forward)
        for place, lines in self._divided(loop, chunks).items():
            editor.above(forward.body[place], "\n".join(lines))
        names = ", ".join(dict.fromkeys(name for _, gathered in loop.gathers for name in gathered))
        convolved = "; convolutions on a slice of the chunks" if chunks is not None else ""
        return Rewritten(editor.result, f"self.{loop.layers} on a slice of the rows; {names} gathered{convolved}")

    def _divided(self, loop: LayerLoop, chunks: ChunkedConvolution | None) -> dict[int, list[str]]:
        """Index of a statement of the forward -> the lines to insert above it."""
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
        return new
