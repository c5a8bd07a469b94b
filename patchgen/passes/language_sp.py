"""Position ids are those of this rank's slice of the sequence."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from patchgen.anatomy import Anatomy, Role
from patchgen.anatomy.classes import ClassInfo, FunctionNode, calls, loaded, own_attribute, parameter_names, uses
from patchgen.anatomy.embeddings import TABLE, Counts, Embeddings
from patchgen.anatomy.names import uses_name
from patchgen.anatomy.positions import POSITIONS, counts_default
from patchgen.anatomy.roles import TOKENS, media_models
from patchgen.passes.base import Example, Missed, Rewritten, Site, SitePass
from patchgen.rewrite import Editor, insert_first, wrap_calls
from patchgen.source import Block, Module


class LanguageSP(SitePass):
    """Setting them once, at the start of the forward, serves rotary embeddings, learned positions and all layers."""

    name = "language_sp"
    purpose = "Position ids are those of this rank's slice of the sequence, set before the model first reads them."
    expects = "one hit per decoder that takes position ids"
    role = Role.DECODER
    EXAMPLES = (
        Example("""above the default that upstream fills in
        class ExampleModel(ExamplePreTrainedModel):
            def __init__(self, config):
                self.layers = nn.ModuleList([ExampleLayer(config) for _ in range(config.num_layers)])

            def forward(self, input_ids=None, position_ids=None, inputs_embeds=None):
                if inputs_embeds is None:
                    inputs_embeds = self.embed_tokens(input_ids)

      +         # patchgen: language_sp
      +         position_ids = ops.sequence_position_ids(position_ids, inputs_embeds)
                if position_ids is None:
                    position_ids = torch.arange(inputs_embeds.shape[1]).unsqueeze(0)
                hidden_states = inputs_embeds
                for layer in self.layers:
                    hidden_states = layer(hidden_states, position_ids)
                return hidden_states
        """),
        Example("""in the table of a decoder that takes none and counts them
        class ExamplePositions(nn.Embedding):
            def forward(self, input_ids, position_ids=None):
                if position_ids is None:
                    position_ids = torch.arange(input_ids.shape[1])
                return super().forward(position_ids)


        class ExampleModel(ExamplePreTrainedModel):
            def __init__(self, config):
                self.embed_positions = ExamplePositions(config.max_positions, config.hidden_size)
                self.layers = nn.ModuleList([ExampleLayer(config) for _ in range(config.num_layers)])

            def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
                if inputs_embeds is None:
                    inputs_embeds = self.embed_tokens(input_ids)
      -         hidden_states = inputs_embeds + self.embed_positions(input_ids)
      +         # patchgen: language_sp
      +         hidden_states = inputs_embeds + ops.look_up_positions(
      +             self.embed_positions, input_ids, tokens=inputs_embeds, cu_seq_lens=kwargs.get("cu_seq_lens_q")
      +         )
                for layer in self.layers:
                    hidden_states = layer(hidden_states)
                return hidden_states
        """),
    )

    def why(self, info: ClassInfo, anatomy: Anatomy) -> str:
        if Role.DECODER not in info.roles:
            return ""
        takes = POSITIONS in parameter_names(info.methods["forward"])
        return super().why(info, anatomy) if takes or _knows_positions(anatomy, info) else ""

    def evidence(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """Models that take tokens and build a rotary embedding but do not have the role of a decoder."""
        media = media_models(anatomy)
        return [
            f"{name} takes tokens and builds a rotary embedding, and is no decoder"
            for name in anatomy.models_in(module)
            if name not in media
            if "forward" in (info := anatomy.classes[name]).methods and Role.DECODER not in info.roles
            if TOKENS & set(parameter_names(info.methods["forward"])) and _rotary_attributes(anatomy, info)
        ]

    def notes(self, module: Module, anatomy: Anatomy) -> Sequence[str]:
        """Causal heads below which nothing takes position ids: they cannot train sequence-parallel, or it is unknown."""
        sites = [anatomy.classes[site.block] for site in self.sites(module, anatomy)]
        served = {info.name for info in sites if not _counts_itself(anatomy, info) or _counting_tables(anatomy, info)}
        remarks: list[str] = []
        for head in anatomy.with_role(Role.HEAD, module):
            below = anatomy.reached_from([head.name])
            if served & below or any(anatomy.is_part(build) for name in below for build in anatomy.auto_builds(name)):
                continue  # served, here or in the part's own file
            decoders = [info.name for info in anatomy.with_role(Role.DECODER, module) if info.name in below]
            roles = {role for name in below for role in anatomy.classes[name].roles}
            if decoders and Role.MIXER in roles and Role.ATTENTION not in roles:
                continue  # nothing reads positions; `mixer_sp` serves or refuses the mixers
            remarks.append(
                f"{head.name}: {', '.join(decoders)} takes no position ids: not sequence-parallel"
                if decoders
                else f"{head.name}: no decoder of this file is below it, and nothing slices its position ids: prove it "
                "before it trains sequence-parallel"
            )
        return remarks

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten:
        info, editor = anatomy.classes[site.block], Editor(block, self.mark)
        forward = editor.function("forward")
        if _counts_itself(anatomy, info):
            tables = _counting_tables(anatomy, info)
            anchor = next((i for i, node in enumerate(forward.body) if any(uses(node, name) for name in tables)), None)
            more = f"tokens={(embeddings := _embeddings(anatomy, info, forward, anchor))}"
            if (kwargs := forward.args.kwarg) is not None:
                more += f', cu_seq_lens={kwargs.arg}.get("cu_seq_lens_q")'
            wanted = {f"self.{name}": "look_up_positions" for name in tables}
            if embeddings is not None and wrap_calls(editor, forward, wanted, more):
                return Rewritten(editor.result, "counted positions, of this rank's slice and within documents")
            code = f'ops.require_whole_sequence("the positions of {info.name}")'
            return Rewritten(insert_first(block, "forward", code, self.mark), "positions of a whole sequence alone")

        anchor = next((i for i, node in enumerate(forward.body) if uses_name(node, POSITIONS)), None)
        embeddings = _embeddings(anatomy, info, forward, anchor)
        if POSITIONS not in parameter_names(forward) or anchor is None or embeddings is None:
            closest = next((code for node in forward.body if POSITIONS in (code := editor.code(node))), "")
            raise Missed(f"{POSITIONS} as a parameter, first read below the embeddings [B, S, H]", closest)
        code = f"{POSITIONS} = ops.sequence_position_ids({POSITIONS}, {embeddings})"
        if not counts_default(anatomy, forward):  # upstream's default would differ on a slice
            code = f'if {POSITIONS} is None:\n    ops.require_whole_sequence("{POSITIONS}")\n{code}'
        editor.above(forward.body[anchor], code)
        return Rewritten(editor.result, "position ids of this rank's slice")


def _embeddings(anatomy: Anatomy, info: ClassInfo, forward: FunctionNode, anchor: int | None) -> str | None:
    """Code with the shape [B, S, ...] of the tokens at a statement of the forward; None where nothing has it."""
    read = {*loaded(*forward.body[anchor:])}
    names = Embeddings(anatomy, info.name).above(forward, forward.body[:anchor])
    if embeddings := next((name for name in names if name in read), None):  # any: only the shape is used
        return embeddings
    # Positions are read above the embeddings: use the inputs.
    return "inputs_embeds if input_ids is None else input_ids" if {*parameter_names(forward)} >= TOKENS else None


def _counts_itself(anatomy: Anatomy, info: ClassInfo) -> bool:
    """Whether a decoder takes no position ids and has no rotary embedding: it computes learned positions itself."""
    return POSITIONS not in parameter_names(info.methods["forward"]) and not _rotary_attributes(anatomy, info)


def _counting_tables(anatomy: Anatomy, info: ClassInfo) -> list[str]:
    """The attributes that are tables of positions: they take positions, and count along the row where they are given none."""
    found: list[str] = []
    for build in anatomy.builds(info.name):
        own = anatomy.method(build.target or "", "forward")
        if own and build.attribute and anatomy.is_a(ast.Name(own[0].name, ast.Load()), TABLE):
            found += [build.attribute] * (POSITIONS in parameter_names(own[1]) and counts_default(anatomy, own[1]))
    return found


def _rotary_attributes(anatomy: Anatomy, info: ClassInfo) -> set[str]:
    """The attributes of a class that are rotary embeddings."""
    rotary = {other.name for other in anatomy.with_role(Role.ROTARY)}
    return {build.attribute for build in anatomy.builds(info.name) if build.target in rotary and build.attribute}


def _knows_positions(anatomy: Anatomy, info: ClassInfo) -> bool:
    """Whether the forward calls a rotary embedding, or looks up positions that it computes in a table."""
    forward, counts = info.methods["forward"], Counts(anatomy, info.name)
    counts.run(forward)
    called = {own_attribute(call.func) for call in calls(forward)}
    return counts.found or bool(called & _rotary_attributes(anatomy, info))
