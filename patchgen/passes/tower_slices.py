"""The base of `vision_sp` and `audio_sp`: the rows of a tower are divided around the loop over its layers."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy
from patchgen.anatomy.towers import LENGTHS_TEST, ChunkedConvolution, LayerLoop, chunked_convolution, layer_loop
from patchgen.passes.base import LeftAlone, Rewritten, Site, SitePass, site_of
from patchgen.rewrite import Editor
from patchgen.source import Block, Module

TOWER_ROWS = "ops.tower_rows"
OUR_LENGTHS_TEST = "ops.attends_by_lengths"


class TowerSlices(SitePass):
    """Rows are sliced above the loop over the layers and gathered below it where the result is smallest. A site is the forward of
    a tower, or that of the attention of its layers, which must attend by lengths.

    Code above the loop (patch embeddings, position embeddings, the order of windows) sees all rows on every rank; a tower
    spends less than one per cent of its time there. Convolutions over chunks of audio are sliced by chunks.
    """

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        sites: list[Site] = []
        for info in anatomy.with_role(self.role, module):
            if "forward" not in info.methods:
                continue
            sites.append(site_of(info, info.roles[self.role], "forward"))
            try:
                loop = layer_loop(anatomy, info)
            except LeftAlone:
                continue
            sites += [
                site_of(anatomy.classes[name], f"attention of the layers of {info.name}", "forward")
                for name in loop.attentions
                if "forward" in anatomy.classes[name].methods and name not in {site.block for site in sites}
            ]
        return sites

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        info, editor = anatomy.classes[site.block], Editor(block, self.mark)
        if self.role not in info.roles:
            for node in ast.walk(block.node):
                match node:
                    case ast.If(ast.Call(function)) if anatomy.names.is_upstream(function, LENGTHS_TEST):
                        editor.mark(node)
                        editor.instead(function, OUR_LENGTHS_TEST)
            return Rewritten(editor.result, "takes lengths under every name of ours")
        forward = editor.function("forward")
        try:
            loop = layer_loop(anatomy, info, forward)
        except LeftAlone as reason:
            why = f"{site.block} is computed whole on every rank that shares a sequence: {reason}"
            raise LeftAlone(why) from reason
        convolution = chunked_convolution(anatomy, info, forward)
        for place, lines in self._insertions(loop, convolution).items():
            editor.above(forward.body[place], "\n".join(lines))
        names = ", ".join(dict.fromkeys(name for _, gathered in loop.gathers for name in gathered))
        convolved = "; convolutions on a slice of the chunks" if convolution is not None else ""
        return Rewritten(editor.result, f"self.{loop.layers} on a slice of the rows; {names} gathered{convolved}")

    def _insertions(self, loop: LayerLoop, convolution: ChunkedConvolution | None) -> dict[int, list[str]]:
        """Index of a statement of the forward -> the lines to insert above it."""
        new = {place: [f"{name} = rows.gather({name})" for name in names] for place, names in loop.gathers}
        group = f", group={loop.group}" if loop.group != "1" else ""
        new[loop.place] = [f"rows = {TOWER_ROWS}(self.{loop.layers}, {loop.rows[0]}{group})"]
        new[loop.place] += [f"{name} = rows.lengths({name})" for name in loop.bounds]
        new[loop.place] += [f"{name} = rows.longest({name})" for name in loop.longest]
        new[loop.place] += [f"{name} = rows.shard({name})" for name in loop.rows]
        if convolution is not None:
            new[convolution.end] = [f"{convolution.result} = chunks.gather({convolution.result})"]
            new[convolution.start] = [f"chunks = ops.chunk_rows({convolution.chunks[0]})"]
            new[convolution.start] += [f"{name} = chunks.shard({name})" for name in convolution.chunks]
        return new
