"""Models get a method that returns a picklable function, which computes multimodal positions in the data workers."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.vocabulary import attributes_read, with_methods
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass, site_of
from patchgen.rewrite import append_method
from patchgen.source import Block, Module

SOURCE = "get_rope_index"
NAME = "get_position_id_func"


class PositionIdFunc(SitePass):
    """Positions depend on the images in the whole sample, so they are computed before it is packed and sliced."""

    name = "position_id_func"
    purpose = f"`{NAME}()` gives a picklable function that computes {SOURCE}'s positions without the model."
    expects = f"one hit per class with {SOURCE}, and one per head above it"
    EXAMPLES = (
        Example("""what the method reads off the model goes with it
        class ExampleModel(ExamplePreTrainedModel):
            def __init__(self, config):
                self.merge = config.vision_config.spatial_merge_size

            def get_rope_index(self, input_ids, image_grid_thw=None):
                return grid_positions(input_ids, image_grid_thw // self.merge, self.config.image_token_id)
      +
      +     # patchgen: position_id_func
      +     def get_position_id_func(self) -> ops.PositionIds:
      +         return ops.PositionIds(type(self), self.config, dict(merge=self.merge))
        """),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        model_sites = [
            Site(info.name, info.name, info.methods[SOURCE].lineno, f"computes multimodal positions in {SOURCE}")
            for info in anatomy.still_in(module)
            if SOURCE in info.methods
        ]
        heads = [
            site_of(info, f"head of a model with {SOURCE}, its self.{below}")
            for info in anatomy.with_role(Role.HEAD, module)
            if not anatomy.method(info.name, SOURCE) and (below := _model_below(anatomy, info.name))
        ]
        return model_sites + heads

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        header = f"def {NAME}(self) -> ops.PositionIds:\n    "
        if SOURCE not in anatomy.classes[site.block].methods:
            below = _model_below(anatomy, site.block)
            code = f"{header}return self.{below}.{NAME}()"
            return Rewritten(append_method(block, code, self.mark), f"that of self.{below}")
        names = sorted(_read_attributes(anatomy, site.block) - {"config"})
        heavy = [name for name in names if name == "training" or _is_module(anatomy, site.block, name)]
        if heavy:
            expected = f"{SOURCE} that reads what `__init__` leaves: numbers and the config"
            raise Missed(expected, f"self.{heavy[0]}")
        attributes = ", ".join(f"{name}=self.{name}" for name in names)
        code = f"{header}return ops.PositionIds(type(self), self.config, dict({attributes}))"
        return Rewritten(append_method(block, code, self.mark), f"takes along {', '.join(['config', *names])}")


def _model_below(anatomy: Anatomy, name: str) -> str | None:
    """The attribute that a class builds as a model with `get_rope_index`."""
    for build in anatomy.builds(name):
        if build.attribute and build.target and anatomy.method(build.target, SOURCE):
            return build.attribute
    return None


def _read_attributes(anatomy: Anatomy, name: str) -> set[str]:
    """The attributes that `get_rope_index` and the methods of the class that it calls read; without the methods."""
    read = attributes_read(*with_methods(anatomy, name, anatomy.classes[name].methods[SOURCE]))
    return {attribute for attribute in read if not anatomy.method(name, attribute)}


def _is_module(anatomy: Anatomy, name: str, attribute: str) -> bool:
    """Whether an attribute is built from a class of this file, an Auto class or `torch.nn`: it is not to be pickled."""
    value = anatomy.attribute(name, attribute)
    builds = (*anatomy.builds(name), *anatomy.auto_builds(name))
    meaning = anatomy.names.resolve(value.func) if isinstance(value, ast.Call) else None
    return any(build.attribute == attribute for build in builds) or "torch.nn." in (meaning or "")
