"""Where a model passes images, videos and audio to its towers."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from patchgen.anatomy.bodies import form_of, normal_form
from patchgen.anatomy.classes import (
    FunctionNode,
    all_arguments,
    calls,
    defaults_of,
    dotted,
    loaded,
    own_attribute,
    parameter_names,
    walk,
)
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.roles import AUDIO_INPUTS, PIXELS, TOKENS

MEDIA = (*PIXELS, *AUDIO_INPUTS, "image_pixel_values", "flattened_patches", "audio_input_features")
# transformers' public methods of models that take media; users and transformers' decorators rely on these names.
FEATURE_METHODS = re.compile(r"get_(image|video|audio|speech)_features$")


def handed_sizes(method: FunctionNode) -> set[str]:
    """The parameters for precomputed sizes of a `get_<modality>_features`, which spare it a read from the device.

    They have the form that the pass host_values writes: `split_sizes: list[int] | None`, and in the body
    `sizes = split_sizes or <tensor>.tolist()`. Empty for other methods.
    """
    size_names: set[str] = set()
    for node in method.body if FEATURE_METHODS.match(method.name) else ():
        match node:
            case ast.Assign(value=ast.BoolOp(ast.Or(), [ast.Name(name), ast.Call(ast.Attribute(attr="tolist"))])):
                size_names.add(name)
    annotated = {argument.arg: argument.annotation for argument in walk(method.args) if isinstance(argument, ast.arg)}
    declared = {name for name, kind in annotated.items() if kind and ast.unparse(kind) == "list[int] | None"}
    return size_names & declared


@dataclass(frozen=True)
class FeatureCall:
    """A call `self.get_<modality>_features(media, grid, ..., **kwargs)` in a forward."""

    position: int  # index of its statement in the body
    method: str
    modality: str
    media: str  # the name of the tensor
    grid: str | None = None  # the second of exactly two positional arguments, both names, the media first
    kwargs: str | None = None  # "**kwargs" where the call passes them


def takes_media(anatomy: Anatomy, name: str) -> dict[str, list[str]]:
    """Media parameter of a model's forward -> the attributes of `self` that get it: methods and modules (`_callees`).

    Empty for classes that are no models, and for a forward that takes no tokens or is inherited.
    """
    forward = anatomy.classes[name].methods.get("forward") if anatomy.is_model(name) else None
    if forward is None:
        return {}
    return {media: _callees(anatomy, name, forward, media) for media in _beside_tokens(forward)}


def _beside_tokens(forward: FunctionNode) -> list[str]:
    """The media among the parameters of a forward that also takes tokens; none of one that takes no tokens."""
    parameters = set(parameter_names(forward))
    return [media for media in MEDIA if media in parameters and parameters & TOKENS]


def optional_media(anatomy: Anatomy, name: str) -> list[str]:
    """The media that a model's forward passes to `get_<modality>_features`, to fuse the features with its text, and that have a
    default: without one, no batch of any rank lacks them."""
    taken = takes_media(anatomy, name)
    fused = [media for media, callees in taken.items() if any(map(FEATURE_METHODS.match, callees))]
    return [media for media in fused if media in defaults_of(anatomy.classes[name].methods["forward"])]


def _callees(anatomy: Anatomy, name: str, forward: FunctionNode, media: str) -> list[str]:
    """The attributes of `self` that a forward calls with the media or what an argument computes from it, each once.

    Left out are inner models that get it as the keyword of the same name, and whose forward takes it beside tokens.
    Calls of attributes of attributes (`self.model.visual`) are not searched.
    """
    attributes: list[str] = []
    for call in calls(forward):
        callee = dotted(call.func)
        if not callee.startswith("self.") or callee.count(".") > 1:
            continue
        values = all_arguments(call)
        if not any(_is_given(value, media) for value in values):
            continue
        hands_on = any(keyword.arg == media for keyword in call.keywords)
        builds_model = any(
            media in _beside_tokens(below[1])
            for build in anatomy.builds(name)
            if build.attribute == callee[5:] and (below := anatomy.method(build.target or "", "forward"))
        )
        if not (hands_on and builds_model):
            attributes.append(callee[5:])
    return list(dict.fromkeys(attributes))


def _is_given(value: ast.AST, media: str) -> bool:
    """Whether an argument is the media, or computed from it by anything but a call on `self`."""
    if isinstance(value, ast.Name):
        return value.id == media
    if isinstance(value, ast.Call) and dotted(value.func).startswith("self."):
        return False
    return any(_is_given(child, media) for child in ast.iter_child_nodes(value))


def feature_calls(body: Sequence[ast.stmt]) -> list[FeatureCall]:
    """The calls of `self.get_<modality>_features` with one of `MEDIA` among the arguments, in the order of their statements."""
    calls_found: list[FeatureCall] = []
    for position, node in enumerate(body):
        for call in calls(node):
            match = FEATURE_METHODS.match(own_attribute(call.func) or "")
            used = [name for given in (*call.args, *(k.value for k in call.keywords)) for name in loaded(given)]
            media = next((name for name in used if name in MEDIA), None)
            if match is None or media is None:
                continue
            plain = [given.id for given in call.args if isinstance(given, ast.Name)]
            starred = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
            grid = plain[1] if len(plain) == len(call.args) == 2 and plain[0] == media else None
            kwargs = f"**{starred[0]}" if starred else None
            calls_found.append(FeatureCall(position, match[0], match[1], media, grid, kwargs))
    return calls_found


def same_features(anatomy: Anatomy, owner: str, image: str, video: str) -> bool:
    """Whether the method for videos computes the same as the one for images.

    It does if it only calls that one, or has the same body up to the names of parameters and locals and `return_dict=True`.
    Both must have two named parameters, media and grid, and no decorator that may wrap them; of each subclass, too, which may
    override one of the two.
    """
    return all(_computes_same(anatomy, name, image, video) for name in anatomy.below(owner))


def _computes_same(anatomy: Anatomy, owner: str, image: str, video: str) -> bool:
    first, second = anatomy.method(owner, image), anatomy.method(owner, video)
    if first is None or second is None or any(anatomy.names.is_wrapped(method) for _, method in (first, second)):
        return False
    calls_it = form_of(f"def video(self, media, grid, **kwargs):\n    return self.{image}(media, grid, **kwargs)")
    is_usual = len(parameter_names(first[1])) == len(parameter_names(second[1])) == 2
    return is_usual and _computed(second[1]) in (_computed(first[1]), (calls_it, (image,)))


def _computed(function: FunctionNode) -> tuple[str, tuple[str, ...]]:
    """The normal form of a function, without `return_dict=True` in its calls, and the attributes of `self` that it uses."""
    form = normal_form(function)
    return form.text.replace(", return_dict=True", ""), form.attributes
