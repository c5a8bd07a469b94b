"""Upstream sources with one change under a pass each: what `test_mutations.py` generates from."""

from __future__ import annotations

from dataclasses import dataclass

from generation_cases import load

MODELS = ("qwen3_moe", "qwen3_omni_moe", "mixtral", "gpt_oss", "qwen3_next", "qwen3_vl", "deepseek_v4")
UPSTREAM = {model: load(model) for model in MODELS}


@dataclass(frozen=True)
class SourceChange:
    """One edit of an upstream file. Without `because` it must be refused; with it, `gives` must be in the result."""

    title: str
    target: str  # the pass
    model: str
    edits: tuple[tuple[str, str], ...]
    because: str = ""
    gives: str = ""


def changed(
    target: str, model: str, title: str, *edits: tuple[str, str], because: str = "", gives: str = ""
) -> SourceChange:
    return SourceChange(title, target, model, edits, because, gives)


GATE_UP = "gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)"
ACTIVATED = "current_hidden_states = self.act_fn(gate) * up"
ADDED = "final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))"
ZEROS = "final_hidden_states = torch.zeros_like(hidden_states)"
HIT = "expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()"
LOSS = "loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)"
IF_LABELS = "        if labels is not None:\n            " + LOSS
PROJECTED = "logits = self.lm_head(hidden_states)"
PRODUCT = "overall_loss = torch.sum(tokens_per_expert * router_prob_per_expert.unsqueeze(0))"
DEFAULT = "        if position_ids is None:\n            past_seen_tokens"

EXPERTS = (
    changed("fused_experts", "qwen3_moe", "a sum in fp32", (ZEROS, ZEROS.replace("(hidden_states)", "(hidden_states, dtype=torch.float32)")), because="the fused call adds up in fp32 too", gives="ops.fused_moe("),
    changed("fused_experts", "qwen3_moe", "the experts' class and its attribute renamed", ("Qwen3MoeExperts", "ManyFeedForwards"), ("self.experts", "self.many"), because="the role is found in the class itself: stacks and a routed loop", gives="fused_moe("),
    changed("fused_experts", "qwen3_moe", "both weights renamed throughout", ("gate_up_proj", "w13"), ("self.down_proj[expert_idx]", "self.w2[expert_idx]"), ("self.down_proj = nn.Parameter", "self.w2 = nn.Parameter"), because="names are read from the code", gives="self.w13,"),
    changed("fused_experts", "qwen3_omni_moe", "a loop of another form", ("            " + ADDED, "            final_hidden_states = final_hidden_states.index_add(0, token_idx, current_hidden_states)"), because="the sum is the same, by another name", gives="ops.fused_moe("),
)  # fmt: skip

HEADS = (
    changed("fused_loss", "qwen3_moe", "the loss renamed", ("self.loss_function(", "self.compute_loss(")),
    changed("fused_loss", "qwen3_moe", "the loss nested deeper", (IF_LABELS, "        if self.training or True:\n            if labels is not None:\n                " + LOSS)),
    changed("fused_loss", "qwen3_moe", "another statement beside the loss", (LOSS, LOSS + "\n            loss = loss * 2")),
    changed("fused_loss", "qwen3_moe", "labels moved between", ("logits = self.lm_head(hidden_states)\n", "logits = self.lm_head(hidden_states)\n        labels = labels.to(logits.device)\n")),
    changed("fused_loss", "qwen3_moe", "a term of the logits", ("        logits = self.lm_head(hidden_states)\n", "        z_loss = 0.0\n        logits = self.lm_head(hidden_states)\n        if self.training:\n            z_loss = logits.logsumexp(-1).mean()\n"), ("            loss=loss,\n            aux_loss", "            loss=loss + z_loss,\n            aux_loss")),
    changed("fused_loss", "qwen3_moe", "an else branch", (IF_LABELS, IF_LABELS + "\n        else:\n            loss = logits.sum() * 0")),
    changed("fused_loss", "qwen3_moe", "another condition", (IF_LABELS, IF_LABELS.replace("labels is not None", "labels is not None and self.training"))),
    changed("fused_loss", "qwen3_moe", "logits that are no plain name", (LOSS, LOSS.replace("logits, labels", "logits.float(), labels"))),
    changed("fused_loss", "qwen3_moe", "the projection elsewhere", ("logits = self.lm_head(hidden_states)", "logits = project(hidden_states)"), ("@auto_docstring\nclass Qwen3MoeForCausalLM", "def project(x):\n    return x\n\n\n@auto_docstring\nclass Qwen3MoeForCausalLM")),
    changed("fused_loss", "qwen3_moe", "labels renamed", ("labels: torch.LongTensor", "targets: torch.LongTensor"), ("labels is not None", "targets is not None"), ("logits, labels,", "logits, targets,")),
    changed("fused_loss", "qwen3_moe", "forward renamed", ("    @can_return_tuple\n    @auto_docstring\n    def forward(", "    @can_return_tuple\n    @auto_docstring\n    def run(")),
    *(changed("fused_loss", "qwen3_moe", title, (LOSS, LOSS.replace("self.vocab_size, **kwargs", arguments))) for title, arguments in (
        ("more arguments than the loss names", "self.vocab_size, None, -100, None, 0.1"),
        ("arguments by a tuple", "self.vocab_size, *self.loss_arguments"),
    )),
    changed("fused_loss", "qwen3_moe", "the number of items by its place", (LOSS, LOSS.replace("**kwargs", 'kwargs.get("num_items_in_batch")')), because="the signature of the loss names it", gives='num_items_in_batch=kwargs.get("num_items_in_batch")'),
    changed("fused_loss", "qwen3_moe", "an annotated loss", ("        loss = None\n", "        loss: torch.Tensor | None = None\n"), because="it is unset all the same", gives="logits, loss = ops.causal_lm_loss("),
    changed("fused_loss", "qwen3_moe", "a keyword that the loss ignores", (LOSS, LOSS.replace("**kwargs", "label_smoothing=0.1, **kwargs")), because="it is handed on as it is", gives="label_smoothing=0.1,"),
    changed("fused_loss", "qwen3_moe", "a value beside scaled logits", (PROJECTED, PROJECTED + "\n        shown = self.config.shown\n        logits = logits * 2"), because="what the logits do not need stays where it is", gives="\n        shown = self.config.shown\n"),
    changed("fused_loss", "qwen3_moe", "a scale of the logits", (PROJECTED, PROJECTED + "\n        logits = logits * self.config.scale - torch.logsumexp(logits, dim=-1, keepdim=True)"), because="each token by itself", gives="dim=-1, keepdim=True)\n            return logits"),
    changed("fused_loss", "qwen3_moe", "no generation, a hidden projection", ("class Qwen3MoeForCausalLM(Qwen3MoePreTrainedModel, GenerationMixin)", "class Qwen3MoeForCausalLM(Qwen3MoePreTrainedModel)"), ("self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)", "self.lm_head = make_head(config)"), ("@auto_docstring\nclass Qwen3MoeForCausalLM", "def make_head(config):\n    return nn.Linear(1, 2)\n\n\n@auto_docstring\nclass Qwen3MoeForCausalLM")),
    changed("fused_loss", "qwen3_moe", "GenerationMixin dropped", ("class Qwen3MoeForCausalLM(Qwen3MoePreTrainedModel, GenerationMixin)", "class Qwen3MoeForCausalLM(Qwen3MoePreTrainedModel)"), because="a head also shows by its vocabulary projection and its loss", gives="ops.causal_lm_loss("),
    changed("fused_loss", "qwen3_moe", "GenerationMixin under an alias", ("class Qwen3MoeForCausalLM(Qwen3MoePreTrainedModel, GenerationMixin)", "class Qwen3MoeForCausalLM(Qwen3MoePreTrainedModel, Generates)"), ("import GenerationMixin", "import GenerationMixin as Generates"), because="imports tell what an alias is", gives="ops.causal_lm_loss("),
    changed("fused_loss", "qwen3_moe", "the head renamed", ("lm_head(hidden_states)", "unembed(hidden_states)"), ("self.lm_head =", "self.unembed ="), because="the projection is read from the code", gives="self.unembed,"),
    changed("fused_loss", "qwen3_omni_moe", "the loss renamed", ("self.loss_function(", "self.compute_loss(")),
    changed("fused_loss", "qwen3_vl", "the loss nested deeper", ("        if labels is not None:\n            loss = self.loss_function(", "        if labels is not None and True:\n            loss = self.loss_function(")),
    changed("tied_embeddings", "qwen3_moe", "_tied_weights_keys removed", ('    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}\n', ""), because="the vocabulary projection is still there to tie", gives="self.lm_head = nn.Linear("),
    changed("tied_embeddings", "qwen3_moe", "no projection, super().__init__ renamed", ('    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}\n', ""), ("self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)", "self.lm_head = self.model.unembed"), ("        super().__init__(config)\n        self.model = Qwen3MoeModel(config)", "        Qwen3MoePreTrainedModel.__init__(self, config)\n        self.model = Qwen3MoeModel(config)")),
    changed("parallel_plan", "qwen3_moe", "the head takes no labels", ("        labels: torch.LongTensor | None = None,\n", ""), ("        logits = self.lm_head(hidden_states)\n", "        logits = self.lm_head(hidden_states)\n        labels = kwargs.get('labels')\n")),
    changed("checkpoint_mapping", "qwen3_moe", "the base under an alias", ("class Qwen3MoePreTrainedModel(PreTrainedModel)", "class Qwen3MoePreTrainedModel(Base)"), ("import ALL_ATTENTION_FUNCTIONS, PreTrainedModel", "import ALL_ATTENTION_FUNCTIONS, PreTrainedModel as Base"), because="imports tell what an alias is", gives='"Qwen3MoeForCausalLM"'),
    changed("checkpoint_mapping", "qwen3_moe", "the base replaced", ("(Qwen3MoePreTrainedModel", "(Custom"), ("class Qwen3MoePreTrainedModel(PreTrainedModel)", "class Custom(nn.Module)")),
    changed("prune", "qwen3_moe", "the root renamed", ("Qwen3MoeForCausalLM", "Qwen3MoeForText")),
    changed("prune", "qwen3_omni_moe", "the root of the config renamed", ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeThinkerHead")),
)  # fmt: skip

OWN_POSITIONS = "        if position_ids is None:\n            position_ids = self.compute_3d_position_ids("

MEDIA = (
    changed("vision_sp", "qwen3_vl", "the layers renamed", ("enumerate(self.blocks)", "enumerate(self.stages)"), ("self.blocks = ", "self.stages = "), because="they are known by the loop", gives="ops.tower_rows(self.stages, "),
    changed("audio_sp", "qwen3_omni_moe", "the layers run backwards", ("        for encoder_layer in self.layers:\n            layer_outputs", "        for encoder_layer in reversed(self.layers):\n            layer_outputs"), because="the order of layers is no matter of slices", gives="# patchgen: audio_sp"),
    changed("fill_back", "qwen3_vl", "features put where they belong by another operation", ("masked_scatter(image_mask, image_embeds)", "index_put((image_mask,), image_embeds)")),
    changed("deepstack_sp", "qwen3_vl", "features put where they belong by another operation", ("masked_scatter(image_mask, image_embeds)", "index_put((image_mask,), image_embeds)")),
    changed("position_id_func", "qwen3_vl", "positions that ask a module", ("spatial_merge_size = self.config.vision_config.spatial_merge_size", "spatial_merge_size = self.visual.spatial_merge_size")),
    changed("max_seqlen", "qwen3_vl", "the longest computed by hand", ('max_seqlen = get_max_seqlen(cu_seqlens, self.config, kwargs={"max_seqlen": max_seqlen})', "max_seqlen = (cu_seqlens[1:] - cu_seqlens[:-1]).max()"), because="a maximum of differences is what the pass serves", gives="ops.max_seqlen("),
)  # fmt: skip

SEQUENCE = (
    changed("shared_experts", "qwen3_next", "the call by another name", ("= self.shared_expert(hidden", "= self.dense_expert(hidden")),
    changed("shared_experts", "qwen3_next", "the routed experts called through a variable", ("expert_output = self.experts(hidden", "run = self.experts\n        expert_output = run(hidden")),
    changed("shared_experts", "qwen3_next", "the module renamed throughout", ("self.shared_expert ", "self.dense "), ("self.shared_expert(", "self.dense("), because="an MLP beside the experts is known by its class", gives="ops.beside_experts(self.dense, "),
    changed("router_loss", "qwen3_moe", "the product rewritten", (PRODUCT, "overall_loss = torch.dot(tokens_per_expert, router_prob_per_expert)")),
    changed("router_loss", "qwen3_moe", "the product by an operator", (PRODUCT, "overall_loss = (tokens_per_expert * router_prob_per_expert).sum()")),
    changed("router_loss", "qwen3_moe", "the product nested", ("    " + PRODUCT, "    if total_rows:\n        " + PRODUCT)),
    changed("router_loss", "qwen3_moe", "the logits renamed", ("gate_logits", "router_outputs")),
    changed("router_loss", "qwen3_moe", "the logits and the coefficient renamed", ("gate_logits", "router_outputs"), ("router_aux_loss_coef", "balance_weight")),
    changed("router_loss", "qwen3_moe", "the mask renamed", ("    attention_mask: torch.Tensor | None = None,\n) -> torch.Tensor | int", "    mask: torch.Tensor | None = None,\n) -> torch.Tensor | int")),
    changed("router_loss", "qwen3_moe", "the loss moved to another file", ("aux_loss = load_balancing_loss_func(", "aux_loss = imported_loss("), ("from torch import nn\n", "from torch import nn\nfrom elsewhere import imported_loss\n")),
    changed("router_loss", "qwen3_moe", "the function renamed", ("load_balancing_loss_func", "balance"), because="it is known by its parameters", gives="ops.router_means("),
    changed("router_loss", "mixtral", "the product rewritten", ("torch.sum(tokens_per_expert * router_prob_per_expert.unsqueeze(0))", "torch.einsum('e,e->', tokens_per_expert, router_prob_per_expert)")),
    changed("language_sp", "qwen3_moe", "position ids renamed", ("position_ids", "positions")),
    changed("language_sp", "qwen3_moe", "the default renamed", (DEFAULT, "        if self._no_positions(position_ids):\n            past_seen_tokens"), because="position ids are set before they are first read, in whatever statement; a default under an unread condition is no slice's", gives='ops.require_whole_sequence("position_ids")'),
    changed("language_sp", "qwen3_moe", "the default above the embeddings", ("        if inputs_embeds is None:\n            inputs_embeds = self.embed_tokens(input_ids)\n", "        if position_ids is None:\n            position_ids = torch.arange(input_ids.shape[1])[None]\n        if inputs_embeds is None:\n            inputs_embeds = self.embed_tokens(input_ids)\n"), because="the ids or the embeddings, as given, have the length of the slice", gives="ops.sequence_position_ids(position_ids, inputs_embeds if input_ids is None else input_ids)"),
    changed("language_sp", "qwen3_moe", "read before the default", ("        if use_cache and past_key_values is None:", "        offset = position_ids\n        if use_cache and past_key_values is None:"), because="the ids or the embeddings, as given, have the length of the slice", gives="position_ids = ops.sequence_position_ids(position_ids, inputs_embeds if input_ids is None else input_ids)\n"),
    changed("language_sp", "qwen3_moe", "no parameter", ("        attention_mask: torch.Tensor | None = None,\n        position_ids: torch.LongTensor | None = None,\n        past_key_values: Cache | None = None,\n        inputs_embeds: torch.Tensor | None = None,\n        use_cache: bool | None = None,\n        **kwargs: Unpack[TransformersKwargs],\n    ) -> MoeModelOutputWithPast:", "        attention_mask: torch.Tensor | None = None,\n        past_key_values: Cache | None = None,\n        inputs_embeds: torch.Tensor | None = None,\n        use_cache: bool | None = None,\n        **kwargs: Unpack[TransformersKwargs],\n    ) -> MoeModelOutputWithPast:")),
    changed("language_sp", "qwen3_moe", "layers run by a helper", ("for decoder_layer in self.layers[: self.config.num_hidden_layers]:", "for decoder_layer in chosen_layers(self):"), ("@auto_docstring\nclass Qwen3MoeModel", "def chosen_layers(model):\n    return model.layers\n\n\n@auto_docstring\nclass Qwen3MoeModel")),
    changed("language_sp", "qwen3_moe", "the rotary embedding and the positions renamed", ("self.rotary_emb", "self.turns"), ("position_ids", "positions")),
    changed("mixer_sp", "qwen3_next", "the delta rule's tokens turned otherwise", ("x.transpose(1, 2).to(torch.float32", "x.transpose(2, 1).to(torch.float32"), because="slices are refused where nothing says that tokens come first", gives="ops.refuse_slices("),
    changed("mixer_sp", "qwen3_next", "a convolution across channels", ("        groups=hidden_size,\n    )[:, :, :seq_len]", "        groups=1,\n    )[:, :, :seq_len]"), because="slices are refused where channels are mixed", gives="ops.refuse_slices("),
    changed("mixer_sp", "qwen3_next", "both functions renamed throughout", ("torch_chunk_gated_delta_rule", "delta"), ("causal_conv1d_fn", "conv"), because="they are read from their bodies", gives="ops.delta_rule("),
    changed("drawn_masks", "deepseek_v4", "the class by an import of its own", ("isinstance(attention_mask, torch.Tensor)", "isinstance(attention_mask, Tensor)"), ("from torch import nn\n", "from torch import Tensor, nn\n"), because="names are resolved", gives="ops.drawn_mask(attention_mask)"),
    changed("drawn_masks", "deepseek_v4", "torch's own question", ("isinstance(attention_mask, torch.Tensor)", "torch.is_tensor(attention_mask)"), because="torch.is_tensor asks the same", gives="ops.drawn_mask(attention_mask)"),
    changed("drawn_masks", "deepseek_v4", "a helper that asks", ("isinstance(attention_mask, torch.Tensor)", "_is_drawn(attention_mask)"), ("class DeepseekV4Attention(", "def _is_drawn(mask):\n    return isinstance(mask, torch.Tensor)\n\n\nclass DeepseekV4Attention("), because="functions of the file are followed", gives="ops.drawn_mask(attention_mask)"),
    changed("position_ids", "qwen3_vl", "position ids renamed", ("position_ids", "positions")),
)  # fmt: skip

TEXT_MODEL = "self.language_model = AutoModel.from_config(config.text_config)"
IMPORT = "from ..auto.modeling_auto import AutoModel\n"
CLASSES = (
    changed("local_classes", "qwen3_vl", "AutoModel under an alias", (IMPORT, IMPORT.replace("AutoModel\n", "AutoModel as Any\n")), ("AutoModel.from_config", "Any.from_config"), because="imports tell what an alias is", gives="Qwen3VLTextModel._from_config("),
    changed("local_classes", "qwen3_vl", "through the module", (IMPORT, "from .. import auto\n"), ("AutoModel.from_config", "auto.AutoModel.from_config"), because="the import says what it is", gives="Qwen3VLTextModel._from_config("),
    changed("local_classes", "qwen3_vl", "AutoModel of another module", (IMPORT, "from .parts import AutoModel\n")),
    changed("local_classes", "qwen3_vl", "AutoModel of this file", (IMPORT, "from .parts import build\n\n\nclass AutoModel:\n    from_config = build\n")),
    changed("local_classes", "qwen3_vl", "AutoModel of another module in __init__", ("        " + TEXT_MODEL, "        from .parts import AutoModel\n\n        " + TEXT_MODEL)),
    changed("local_classes", "qwen3_vl", "AutoModel imported in __init__", ("        " + TEXT_MODEL, "        from transformers import AutoModel\n\n        " + TEXT_MODEL), because="the function's own import says what it is", gives="Qwen3VLTextModel._from_config("),
    changed("local_classes", "qwen3_vl", "config by keyword", (TEXT_MODEL, TEXT_MODEL.replace("(config", "(config=config")), because="", gives="Qwen3VLTextModel._from_config(config=config.text_config)"),
    changed("local_classes", "qwen3_vl", "config by keyword, second", (TEXT_MODEL, TEXT_MODEL.replace("(config", "(dtype=None, config=config")), because="the argument's name decides", gives="Qwen3VLTextModel._from_config(dtype=None, config=config.text_config)"),
    changed("local_classes", "qwen3_vl", "config through a variable", (TEXT_MODEL, "text_config = config.text_config\n        " + TEXT_MODEL.replace("(config.", "(")), because="the assignment above says what it is", gives="Qwen3VLTextModel._from_config(text_config)"),
    changed("local_classes", "qwen3_vl", "config through a method", (TEXT_MODEL, TEXT_MODEL.replace("config.text_config", "config.get_text_config()")), because="transformers' own accessor", gives="Qwen3VLTextModel._from_config(config.get_text_config())"),
    changed("local_classes", "qwen3_vl", "config from a table", (TEXT_MODEL, TEXT_MODEL.replace("config.text_config", 'config.parts["text"]'))),
    changed("local_classes", "qwen3_vl", "config renamed", (TEXT_MODEL, TEXT_MODEL.replace("config.text_config", "config.language_config"))),
    changed("local_classes", "qwen3_vl", "the constructor in a variable", (TEXT_MODEL, "build = AutoModel.from_config\n        self.language_model = build(config.text_config)")),
    changed("local_classes", "qwen3_vl", "the class in a variable", (TEXT_MODEL, "kind = AutoModel\n        self.language_model = kind.from_config(config.text_config)")),
    changed("local_classes", "qwen3_vl", "built by a function", (TEXT_MODEL, "self.language_model = build(config.text_config)"), ("@auto_docstring\nclass Qwen3VLModel", "def build(config):\n    return AutoModel.from_config(config)\n\n\n@auto_docstring\nclass Qwen3VLModel")),
    changed("local_classes", "qwen3_vl", "built by another method", (TEXT_MODEL, "self.build(config)"), ("        self.post_init()\n\n    def get_vision_position_ids", "        self.post_init()\n\n    def build(self, config):\n        " + TEXT_MODEL + "\n\n    def get_vision_position_ids"), because="every method is read", gives="Qwen3VLTextModel._from_config("),
    changed("local_classes", "qwen3_vl", "the language model's class renamed", ("Qwen3VLTextModel", "Qwen3VLLanguage"), because="it is the one model written for that config", gives="Qwen3VLLanguage._from_config("),
    changed("local_classes", "qwen3_vl", "two models written for the config", ("Qwen3VLTextModel", "Qwen3VLLanguage"), ("@auto_docstring\nclass Qwen3VLModel", "class Qwen3VLOther(Qwen3VLPreTrainedModel):\n    def __init__(self, config: Qwen3VLTextConfig):\n        super().__init__(config)\n\n\n@auto_docstring\nclass Qwen3VLModel")),
    changed("absolute_imports", "qwen3_moe", "dots apart, in parentheses", ("from ...activations import ACT2FN", "from . . .activations import (\n    ACT2FN,\n)"), because="syntax decides, not spelling", gives="from transformers.activations import"),
    changed("absolute_imports", "qwen3_moe", "without a module", ("from ...activations import ACT2FN", "from ... import activations\n\nACT2FN = activations.ACT2FN"), because="the package itself is named", gives="from transformers import activations"),
    changed("absolute_imports", "qwen3_moe", "beyond the package", ("from ...activations import ACT2FN", "from ......activations import ACT2FN")),
    changed("absolute_imports", "qwen3_moe", "by a call", ("from ...activations import ACT2FN", 'import importlib\n\nACT2FN = importlib.import_module("...activations", __package__).ACT2FN')),
)  # fmt: skip

# Formulas that no table knows stay as upstream has them, with a note: correct, and no default could call them an error
# (upstream has dozens). The hits that a config pins do.
NORM = "return self.weight * hidden_states.to(input_dtype)"
FORMULAS = (
    changed("fused_ops", "qwen3_moe", "another rotation", ("return torch.cat((-x2, x1), dim=-1)", "return torch.cat((x2, -x1), dim=-1)")),
    changed("fused_ops", "qwen3_moe", "rotated halves interleaved", ("x1 = x[..., : x.shape[-1] // 2]", "x1 = x[..., 0::2]")),
    changed("fused_ops", "qwen3_moe", "rotation of q alone", ("k_embed = (k * cos) + (rotate_half(k) * sin)", "k_embed = k")),
    changed("fused_ops", "qwen3_moe", "a norm with an offset", (NORM, "return (1 + self.weight) * hidden_states.to(input_dtype)")),
    changed("fused_ops", "qwen3_moe", "a norm without epsilon", ("torch.rsqrt(variance + self.variance_epsilon)", "torch.rsqrt(variance)")),
    changed("fused_ops", "qwen3_moe", "a norm by a power", ("hidden_states * torch.rsqrt(variance + self.variance_epsilon)", "hidden_states * (variance + self.variance_epsilon) ** -0.5")),
    changed("fused_ops", "qwen3_moe", "a norm by another method", ("hidden_states * torch.rsqrt(variance + self.variance_epsilon)", "hidden_states / (variance + self.variance_epsilon).sqrt()"), ("hidden_states.pow(2)", "hidden_states.square()")),
    changed("fused_ops", "qwen3_moe", "a norm with a learned epsilon", ("self.norm = Qwen3MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)", "self.norm = Qwen3MoeRMSNorm(config.hidden_size, eps=nn.Parameter(torch.tensor(1e-6)))")),
    changed("fused_ops", "qwen3_moe", "a norm of several sizes", ("self.norm = Qwen3MoeRMSNorm(config.hidden_size,", "self.norm = Qwen3MoeRMSNorm((1, config.hidden_size),")),
    changed("fused_ops", "qwen3_moe", "gate and up summed", ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.act_fn(self.gate_proj(x)) + self.up_proj(x)")),
    changed("fused_ops", "qwen3_moe", "the product taken apart", ("        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))", "        gate = self.act_fn(self.gate_proj(x))\n        down_proj = self.down_proj(gate * self.up_proj(x))")),
    changed("fused_experts", "qwen3_moe", "gate and up swapped", (GATE_UP, GATE_UP.replace("gate, up", "up, gate"))),
    changed("fused_experts", "qwen3_moe", "a limit between", (ACTIVATED, "gate = gate.clamp(max=7.0)\n            " + ACTIVATED)),
    changed("fused_experts", "qwen3_moe", "a limit in place", (ACTIVATED, "gate.clamp_(max=7.0)\n            " + ACTIVATED)),
    changed("fused_experts", "qwen3_moe", "scaled after the loop", ("        return final_hidden_states\n\n\nclass Qwen3MoeTopKRouter", "        return final_hidden_states * 2\n\n\nclass Qwen3MoeTopKRouter")),
    changed("fused_experts", "qwen3_moe", "only some of the experts", ("for expert_idx in expert_hit:", "for expert_idx in expert_hit[: self.limit]:")),
    changed("fused_experts", "qwen3_moe", "activation in fp32", (ACTIVATED, ACTIVATED.replace("self.act_fn(gate)", "self.act_fn(gate.float())"))),
    changed("fused_experts", "qwen3_moe", "routing weights in fp32", ("top_k_weights[token_idx, top_k_pos, None]", "top_k_weights[token_idx, top_k_pos, None].float()")),
    changed("fused_experts", "qwen3_moe", "weights normalised in the experts", ("        for expert_idx in expert_hit:", "        top_k_weights = top_k_weights / top_k_weights.sum(-1, keepdim=True)\n        for expert_idx in expert_hit:")),
    changed("fused_experts", "gpt_oss", "the biases dropped from the first projection", ("+ self.gate_up_proj_bias[expert_idx]", "+ self.gate_up_proj_bias.mean()")),
)  # fmt: skip

RETURNED = "    return overall_loss * num_experts\n"
LOSSES = (
    *(changed("router_loss", "qwen3_moe", title, edit) for title, edit in (
        ("a root of the loss", (RETURNED, RETURNED.replace("overall_loss * num_experts", "(overall_loss * num_experts).sqrt()"))),
        ("a z-loss in it", (RETURNED, RETURNED[:-1] + " + sum(g.logsumexp(-1).pow(2).mean() for g in gate_logits)\n")),
        ("another number of rows", ("router_prob_sum / total_rows", "router_prob_sum / (total_rows + 1)")),
        ("a mask in another order", ("flat_mask.repeat_interleave(top_k)", "flat_mask.repeat(top_k)")),
        ("a softmax over the tokens", ("softmax(layer_gate.to(compute_device), dim=-1)", "softmax(layer_gate.to(compute_device), dim=0)")),
        ("the loss handed to a function", ("aux_loss = load_balancing_loss_func(", "aux_loss = balanced(load_balancing_loss_func,")),
    )),
)  # fmt: skip

ALL = (*EXPERTS, *HEADS, *SEQUENCE, *LOSSES, *MEDIA, *CLASSES)
