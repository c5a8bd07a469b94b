"""Runs every tower on every rank, even if the batch has no input for it."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy, ClassInfo
from patchgen.anatomy.classes import stored
from patchgen.anatomy.embeddings import Embeddings, entered
from patchgen.anatomy.media import FeatureCall, feature_calls, optional_media, same_features, takes_media
from patchgen.passes.base import Example, LeftAlone, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import Editor
from patchgen.source import Block, Module

ENCODED = "mm_encoder_outputs"


class DummyForward(SitePass):
    """Under FSDP a tower's weights are gathered on all ranks or on none: ranks with different modalities would hang."""

    name = "dummy_forward"
    purpose = "A tower with no input on this rank runs on a minimal one; its features enter as zero times their mean."
    expects = "one hit per model that calls get_<modality>_features in its forward"
    EXAMPLES = (
        Example("""before the call, so that towers run in one order on all ranks
        class ExampleModel(ExamplePreTrainedModel):
            def get_audio_features(self, input_features):
                return self.audio_tower(input_features)

            def forward(self, input_ids, input_features=None):
                inputs_embeds = self.get_input_embeddings()(input_ids)
      +         # patchgen: dummy_forward
      +         inputs_embeds = ops.absent_tower(inputs_embeds, input_features, self.get_audio_features)
                if input_features is not None:
                    features = self.get_audio_features(input_features)
                    inputs_embeds = inputs_embeds.masked_scatter(self.mask(input_ids), features)
                return self.language_model(inputs_embeds)
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        media = optional_media(anatomy, info.name)
        return f"hands {', '.join(media)} to a tower" if media else ""

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """The media for which this pass runs no tower on a minimal input."""
        return [
            f"{info.name}: {media} goes to {', '.join(callees)}, not to a get_<modality>_features, or is required: "
            "every rank must hold it"
            for info in anatomy.still_in(module)
            for media, callees in takes_media(anatomy, info.name).items()
            if callees and media not in optional_media(anatomy, info.name)
        ]

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        optional = optional_media(anatomy, site.block)
        editor, above, served = Editor(block, self.mark), list[str](), list[str]()
        forward = editor.function("forward")
        media_calls = [call for call in feature_calls(forward.body) if call.media in optional]
        joint = _joint(media_calls, forward.body, site.block, anatomy)
        for call in media_calls:
            embedding_names = Embeddings(anatomy, site.block).above(forward, forward.body[: call.position])
            if not embedding_names:
                above.append(call.media)
                continue
            found_names = entered(anatomy, site.block, embedding_names, call.method, forward.body[call.position :])
            if len(found_names) != 1:
                several = f"{len(found_names)} of {', '.join(embedding_names)}"
                expected = f"one name of embeddings that the features from {call.method} go into, not {several}"
                raise Missed(expected, editor.code(forward.body[call.position]))
            embeddings = found_names[0]
            code = f"{embeddings} = ops.absent_tower({embeddings}, {call.media}, self.{call.method})"
            if joint is not None and call in joint:
                image, video = joint
                if call is video:
                    continue
                code = (
                    f"{ENCODED}, {embeddings} = ops.encode_vision(self.{image.method}, self.{video.method}, {ENCODED}, "
                    f"{embeddings}, images=({image.media}, {image.grid}), videos=({video.media}, {video.grid}), {image.kwargs})"
                )
                editor.replace(forward.body[image.position], code, forward.body[video.position])
            else:
                editor.above(forward.body[call.position], code)
            served.append("one pass over images and videos" if joint and call in joint else call.media)
        if above:
            which = ", ".join(reversed(above))
            raise LeftAlone(f"{site.block}: {which} is encoded above the embeddings: every rank must hold it")
        if not served:
            raise Missed(f"a call of get_<modality>_features with {', '.join(optional)}", block.text[-400:])
        return Rewritten(editor.result, f"a minimal input where there is none: {', '.join(served)}")


def _joint(
    media_calls: Sequence[FeatureCall], body: Sequence[ast.stmt], owner: str, anatomy: Anatomy
) -> tuple[FeatureCall, FeatureCall] | None:
    """The calls for images and videos, if one tower pass can serve both: adjacent, guarded, and of the same computation."""
    image = next((call for call in media_calls if call.modality == "image"), None)
    video = next((call for call in media_calls if call.modality == "video"), None)
    if image is None or video is None or image.grid is None or video.grid is None or image.kwargs is None:
        return None
    if video.position != image.position + 1 or not same_features(anatomy, owner, image.method, video.method):
        return None
    guarded = all(_is_guarded(body[call.position], call) for call in (image, video))
    has_encodings = any(ENCODED in stored(node) for node in body[: image.position])
    return (image, video) if guarded and has_encodings else None


def _is_guarded(node: ast.stmt, call: FeatureCall) -> bool:
    """Whether a statement is `if <not encoded yet> and <there is input>: <encode>`, in upstream's exact form."""
    place = f'{ENCODED}["{call.modality}"]'
    features = f"self.{call.method}({call.media}, {call.grid}, return_dict=True, {call.kwargs})"
    written = f'if {ENCODED}.get("{call.modality}") is None and {call.media} is not None:\n    {place} = {features}'
    match node:
        case ast.If(body=[ast.AnnAssign(target, value=ast.expr() as value)]):
            node = ast.If(node.test, [ast.Assign([target], value, lineno=0)], node.orelse)
    return ast.unparse(node) == ast.unparse(ast.parse(written))
