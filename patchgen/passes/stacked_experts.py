"""Lists of expert modules become stacked weights `gate_up_proj [E, 2I, H]` and `down_proj [E, H, I]`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from patchgen.anatomy import Anatomy, ClassInfo, Role
from patchgen.anatomy.classes import calls, dotted, uses
from patchgen.anatomy.expert_lists import ExpertList, ExpertLoop, branch_of, read_expert_list, statement_at
from patchgen.anatomy.experts import read_experts
from patchgen.errors import LeftAlone, PassMismatch
from patchgen.passes.base import AlreadyDone, Example, Hit, Missed, Outcome, Rewritten, Site, SitePass, site_of
from patchgen.rewrite import Editor, append_method, at_end, format_code, insert_first, with_torch
from patchgen.source import Block, Module
from patchgen.templates import render

METHOD = "_init_weights"
REFUSED_BRANCH = (
    """raise ValueError("This branch builds one rank's experts. """
    """Ranks divide the whole list: set parallel.ep in the recipe.")"""
)


class StackedExperts(SitePass):
    """A grouped kernel and sharding along the expert dimension need stacked weights, not a list of modules."""

    name = "stacked_experts"
    purpose = (
        "Experts are stacked weights; lists of expert modules become stacks, with initialisation and checkpoints."
    )
    expects = (
        "one hit per list of experts of a known form; experts that upstream stacks are upstream's, others are notes"
    )
    role = Role.EXPERTS
    EXAMPLES = (
        Example('''a list of modules becomes two stacks, its loop one call
      + import torch
      + from torch import nn
        class ExampleMLP(nn.Module):
            def __init__(self, config):
                self.gate_proj = nn.Linear(config.hidden, config.size, bias=False)
                self.up_proj = nn.Linear(config.hidden, config.size, bias=False)
                self.down_proj = nn.Linear(config.size, config.hidden, bias=False)
                self.act_fn = ACT2FN[config.hidden_act]

            def forward(self, x):
                return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


      + # patchgen: stacked_experts
      + class ExampleMoEStackedExperts(nn.Module):
      +     """The experts of ExampleMoE as stacks: slice e of each is the ExampleMLP number e."""
      +
      +     def __init__(self, expert, num_experts):
      +         ...
      +         self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size, **like))
      +         self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size, **like))
      +         ...
      +
      +     def forward(self, hidden_states, top_k_index, top_k_weights):
      +         ...
      +
      +
        class ExampleMoE(nn.Module):
            def __init__(self, config):
      -         self.experts = nn.ModuleList([ExampleMLP(config) for _ in range(config.num_experts)])
      +         # patchgen: stacked_experts
      +         self.experts = ExampleMoEStackedExperts(ExampleMLP(config), num_experts=config.num_experts)

            def forward(self, hidden_states, selected_experts, routing_weights):
      -         routed = torch.zeros_like(hidden_states)
      -         expert_mask = F.one_hot(selected_experts, num_classes=len(self.experts)).permute(2, 1, 0)
      -         for expert_idx in torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero():
      -             idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
      -             current_state = hidden_states[None, top_x].reshape(-1, hidden_states.shape[-1])
      -             current_state = self.experts[expert_idx](current_state) * routing_weights[top_x, idx, None]
      -             routed.index_add_(0, top_x, current_state.to(hidden_states.dtype))
      +         # patchgen: stacked_experts
      +         routed = self.experts(hidden_states, selected_experts, routing_weights)
                return routed


        class ExampleModel(PreTrainedModel):
            def _init_weights(self, module):
      +         # patchgen: stacked_experts
      +         if isinstance(module, ExampleMoEStackedExperts):
      +             module.initialise(self._init_weights)
                std = self.config.initializer_range
                if isinstance(module, nn.Linear):
                    module.weight.data.normal_(mean=0.0, std=std)
      +
      +
      + # patchgen: stacked_experts
      + ops.register_stacked_experts("ExampleModel", experts={"experts": ("gate_proj", "up_proj", "down_proj")})
        '''),
    )

    def sites(self, module: Module, anatomy: Anatomy) -> Sequence[Site]:
        lists = anatomy.with_role(Role.EXPERT_LIST, module)
        found = [site_of(info, f"{Role.EXPERT_LIST}: {info.roles[Role.EXPERT_LIST]}") for info in lists]
        return [*super().sites(module, anatomy), *found]

    def rewrite(self, block: Block, site: Site, anatomy: Anatomy) -> Rewritten | AlreadyDone:
        info = anatomy.classes[site.block]
        try:
            return self._stacked(block, info, anatomy)
        except Missed as miss:
            raise LeftAlone(f"{info.name}: experts of no known form, left as they are: {miss}") from miss

    def _stacked(self, block: Block, info: ClassInfo, anatomy: Anatomy) -> Rewritten | AlreadyDone:
        if Role.EXPERTS in info.roles:
            if read_experts(anatomy, info.name).is_transposed:
                return AlreadyDone(
                    "stacked as [E, H, 2I] and [E, I, H]; kernels take both layouts, checkpoints none converted"
                )
            return AlreadyDone("stacked as [E, 2I, H] and [E, H, I]")
        experts, loops = read_expert_list(anatomy, info)
        name = _stacked_name(anatomy, info.name)
        told = {"name": name, "block": info.name, "experts": experts, "dtype": loops[0].inside, "mark": self.mark}
        stacked = Block(text="\n\n" + format_code(render("stacked_experts.jinja", **told).lstrip("\n")))
        editor = Editor(block, self.mark)
        built = editor.function(experts.method).body
        code = f"self.{experts.attribute} = {name}({experts.expert}, num_experts={experts.num_experts})"
        editor.replace(statement_at(built, experts.place), code)
        for branch in (branch_of(built, place) for place in experts.parts):
            editor.replace(branch[0], REFUSED_BRANCH, branch[-1])
        for loop in loops:
            self._call(editor, experts.attribute, loop)
        block = editor.result
        if uses(block.node, experts.attribute) != 1 + len(loops):  # built once, called once per loop
            raise Missed(f"no use of self.{experts.attribute} but its loop", block.text)
        return Rewritten(block, f"{experts.expert_class} x {experts.num_experts} as {name}", before=(stacked,))

    def apply(self, module: Module, anatomy: Anatomy) -> Outcome:
        """Rewrites the blocks, then adds the initialisation and the checkpoint conversion of the new parameters."""
        outcome = super().apply(module, anatomy)
        rewritten = [anatomy.classes[hit.site] for hit in outcome.hits]
        if not rewritten:
            return outcome
        lists = [read_expert_list(anatomy, info)[0] for info in rewritten]
        names = tuple(_stacked_name(anatomy, info.name) for info in rewritten)
        module, hits = self._with_init(outcome.module, anatomy, names)
        module = self._with_conversion(module, anatomy, lists)
        return replace(outcome, module=with_torch(module), hits=(*outcome.hits, *hits), added=names)

    def _call(self, editor: Editor, experts: str, loop: ExpertLoop) -> None:
        """Replaces a loop by one call, and removes the statements that only the loop needs."""
        body = branch_of(editor.function(loop.method).body, loop.place)
        cast = f".to({loop.dtype})" if loop.dtype else ""  # a kernel returns the dtype of the hidden states
        given = f"{loop.accumulator} =" if loop.accumulator else "return"
        code = f"{given} self.{experts}({loop.hidden_states}, {loop.top_k_index}, {loop.top_k_weights}){cast}"
        place = int(loop.place[-1])
        for position in {*loop.superseded, place}:
            editor.drop(body[position])
        editor.below(body[place], code, spaced=bool({*range(place)} - {*loop.superseded}))

    def _with_init(self, module: Module, anatomy: Anatomy, names: Sequence[str]) -> tuple[Module, list[Hit]]:
        """Adds to every `_init_weights` the initialisation of the stacks, each slice by that of linear layers."""
        hits: list[Hit] = []
        for info in _initialising_classes(anatomy, module):
            block = module.block(info.name)
            module = module.swap(block, _initialised(block, info, names, self.mark))
            hits.append(Hit(f"{info.name}.{METHOD}", info.node.lineno, "initialises the stacks like linear layers"))
        return module, hits

    def _with_conversion(self, module: Module, anatomy: Anatomy, lists: Sequence[ExpertList]) -> Module:
        """Adds one call that registers the layout of the experts in checkpoints."""
        models = anatomy.models_in(module)
        if not models:
            return module  # nothing in the file loads or saves a checkpoint
        projections: dict[str, tuple[str, str, str]] = {}
        for experts in lists:
            own = (experts.gate, experts.up, experts.down)
            if projections.setdefault(experts.attribute, own) != own:
                raise PassMismatch(
                    f"The pass '{self.name}' found two lists of experts under the name '{experts.attribute}' with "
                    f"projections {projections[experts.attribute]} and {own}; checkpoint keys cannot tell them apart. "
                    "Rename one with a hand edit in the model's config."
                )
        arguments = ", ".join([*(f'"{name}"' for name in models), f"experts={projections!r}"])
        return at_end(module, f"# {self.mark}\nops.register_stacked_experts({arguments})\n")


def _stacked_name(anatomy: Anatomy, block: str) -> str:
    """The name of the class of stacks, derived from the MoE block's and unused in the file."""
    wanted = f"{block}StackedExperts"
    while wanted in anatomy.names.origins or wanted in {*anatomy.classes, *anatomy.functions, *anatomy.tables}:
        wanted += "_"
    return wanted


def _initialising_classes(anatomy: Anatomy, module: Module) -> list[ClassInfo]:
    """The model classes whose `_init_weights` must handle new modules: base classes, and overrides that do not call super."""
    classes: list[ClassInfo] = []
    for name in anatomy.models_in(module):
        info = anatomy.classes[name]
        is_root = not any(base in anatomy.classes and anatomy.is_model(base) for base in info.bases)
        method = info.methods.get(METHOD)
        if is_root or (
            method is not None and not any(dotted(call.func) == f"super.{METHOD}" for call in calls(method))
        ):
            classes.append(info)
    return classes


def _initialised(block: Block, info: ClassInfo, names: Sequence[str], mark: str) -> Block:
    """The model class with an `_init_weights` that initialises stacks, of the classes `names`."""
    method = info.methods.get(METHOD)
    argument = method.args.args[1].arg if method is not None else "module"
    kinds = names[0] if len(names) == 1 else f"({', '.join(names)})"
    code = f"if isinstance({argument}, {kinds}):\n    {argument}.initialise(self.{METHOD})\n"
    if method is not None:
        return insert_first(block, METHOD, code, mark)
    inherited = f"def {METHOD}(self, module):\n    super().{METHOD}(module)\n"
    return append_method(block, inherited + textwrap.indent(code, "    "), mark)
