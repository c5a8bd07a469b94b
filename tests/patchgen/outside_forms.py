"""The forms of modeling files outside transformers that docs/own_architecture.md promises, each as a change of the small file in
tests/patchgen/data/list_moe, in words of our own."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent / "data" / "list_moe"
TEXT = (SOURCE / "modeling_list_moe.py").read_text(encoding="utf-8")
BLOCK = TEXT[TEXT.index("class ListMoeBlock") : TEXT.index("class ListMoeLayer")]

# Each expert gets its rows of all `[T * K]` choices; in inference the rows are sorted by expert and counted.
BY_CHOICE = """
class ListMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.top_k = config.num_experts_per_tok
        {BUILT}
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
{METHOD}
    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        weights, chosen = torch.topk(self.gate(hidden_states).float().softmax(-1), self.top_k, dim=-1)
        flat = chosen.view(-1)
        if self.training:
            hidden_states = hidden_states.repeat_interleave(self.top_k, dim=0)
            y = torch.empty_like(hidden_states)
            for i, expert in enumerate(self.experts):
                y[flat == i] = expert(hidden_states[flat == i])
            y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
            y = y.to(hidden_states.dtype).view(*shape)
        else:
            y = self.infer(hidden_states, chosen, weights).view(*shape)
        return y

    @torch.no_grad()
    def infer(self, x, chosen, weights):
        counts = chosen.new_zeros((chosen.shape[0], len(self.experts)))
        counts.scatter_(1, chosen, 1)
        numbers = counts.sum(dim=0)
        order = chosen.view(-1).argsort()
        ordered = x[order // chosen.shape[1]]
        numbers = numbers.cpu().numpy()
        outputs = []
        start = 0
        for i, number in enumerate(numbers):
            end = start + number
            if number == 0:
                continue
            expert = self.experts[{INDEX}]
            rows = ordered[start:end]
            outputs.append(expert(rows).to(x.device))
            start = end
        made = torch.cat(outputs, dim=0) if len(outputs) else ordered.new_empty(0)
        back = torch.empty_like(made)
        back[order] = made
        weighted = back.view(*chosen.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1))
        return weighted.sum(dim=1).type(back.dtype)
"""
LIST = "self.experts = nn.ModuleList([ListMoeExpert(config) for i in range(config.num_experts)])"
ONE_RANK = """if hasattr(config, "ep_size") and config.ep_size > 1:
            self.ep_size = config.ep_size
            self.ep_rank = torch.distributed.get_rank()
            self.experts = nn.ModuleList(
                [ListMoeExpert(config) if i == self.ep_rank else None for i in range(config.num_experts)]
            )
        else:
            self.ep_size = 1
            self.ep_rank = 0
            self.experts = nn.ModuleList([ListMoeExpert(config) for i in range(config.num_experts)])"""
HELPER = """
    def _setup_experts(self, config):
        self.experts = nn.ModuleList(
            [ListMoeExpert(config=config, width=config.moe_intermediate_size) for _ in range(self.config.num_experts)]
        )
"""
AUXILIARY = '''class ListMoeAddLoss(torch.autograd.Function):
    """Adds the gradient of a loss to that of an output."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype, ctx.is_required = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(1, dtype=ctx.dtype, device=gradient.device) if ctx.is_required else None


'''
# A loop over the experts with a token, by lists of indices; the file also has the form in which an expert scales its output.
BY_TOKEN = """
class ListMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts = getattr(config, "num_experts", 8)
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        self.experts = nn.ModuleList([ListMoeExpert(config) for _ in range(config.num_experts)])

    def forward(self, hidden_states, cache_position=None):
        batch_size, length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        weights = nn.functional.softmax(self.gate(hidden_states), dim=1, dtype=torch.float)
        weights, selected = torch.topk(weights, self.top_k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden_states.dtype)
        total = torch.zeros((batch_size * length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device)
        mask = nn.functional.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        for number in range(self.num_experts):
            layer = self.experts[number]
            slot, token = torch.where(mask[number])
            if token.shape[0] == 0:
                continue
            tokens = token.tolist()
            slots = slot.tolist()
            state = hidden_states[None, tokens].reshape(-1, hidden_dim)
            made = layer(state) * weights[tokens, slots, None]
            total.index_add_(0, token, made.to(hidden_states.dtype))
        return total.reshape(batch_size, length, hidden_dim)
"""
EXPERT = "    def forward(self, x):\n        return self.wo(self.act(self.wi(x)) * self.wu(x))"
HEAD_CALL = "        logits = self.lm_head(hidden_states)\n"
CHAT = '''
    def stream_chat(self, tokenizer, query):
        """Yields the answer word by word."""

        class Streamer:
            def __init__(self, tokenizer):
                self.tokenizer = tokenizer
                self.cache = []

            def put(self, value):
                self.cache.extend(value.tolist())
                return self.tokenizer.decode(self.cache)

        return Streamer(tokenizer).put(self.generate(**tokenizer(query)))


__all__'''
REGISTRATIONS = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

AutoConfig.register("list_moe", ListMoeConfig, exist_ok=True)
AutoModel.register(ListMoeConfig, ListMoeModel, exist_ok=True)
AutoModelForCausalLM.register(ListMoeConfig, ListMoeForCausalLM, exist_ok=True)
"""
DENSE = "self.moe = ListMoeExpert(config, config.num_experts * config.moe_intermediate_size)"


@dataclass(frozen=True)
class Form:
    """A form: edits of the small file; whether it has experts, and whether a run computes what the file computes."""

    edits: tuple[tuple[str, str], ...]
    has_experts: bool = True
    is_trained: bool = True

    @property
    def text(self) -> str:
        text = TEXT
        for before, after in self.edits:
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        return text

    def write(self, root: Path) -> Path:
        """Writes the file and its configuration into a folder in `root`; returns the folder."""
        code = Path(shutil.copytree(SOURCE, root / "list_moe", ignore=shutil.ignore_patterns("__pycache__")))
        (code / "modeling_list_moe.py").write_text(self.text, encoding="utf-8")
        return code


def _block(text: str, **parts: str) -> tuple[str, str]:
    for name, code in parts.items():
        text = text.replace(f"{{{name}}}", code)
    return BLOCK, f"{textwrap.dedent(text).strip()}\n\n\n"


def _by_choice(built: str = LIST, method: str = "", index: str = "i") -> tuple[str, str]:
    return _block(BY_CHOICE, BUILT=built, METHOD=method, INDEX=index)


_ONE_RANK = _by_choice(ONE_RANK, index="i + self.ep_rank * 8")
_ADDED = "        return y\n\n    @torch.no_grad()"
_OWN_CROSS_ENTROPY = (
    "loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)",
    "shift_logits = logits[..., :-1, :].contiguous()\n"
    "            shift_labels = labels[..., 1:].contiguous()\n"
    "            loss = nn.CrossEntropyLoss()(shift_logits.view(-1, self.vocab_size), shift_labels.view(-1))",
)
_NO_MORE_ARGUMENTS = (
    "labels=None, **kwargs):",
    "attention_mask=None, position_ids=None, labels=None, use_cache=None):",
)
_DENSE = ("self.moe = ListMoeBlock(config)", DENSE)
_KEYS = "mla_eager", "mla_flash_attention_2", "mha_eager", "mha_flash_attention_2"
_TABLE = f"ATTENTION = {{{', '.join(f'{key!r}: ListMoeAttention' for key in _KEYS)}}}\n\n\n"
_CHOSEN = """chosen = config._attn_implementation
        if getattr(config, "use_mla", True):
            chosen = "mla_" + chosen
        else:
            chosen = "mha_" + chosen
        self.attention = ATTENTION[chosen](config)"""
FORMS = {
    "DeepSeek-V2": Form(
        (
            (
                _ONE_RANK[0],
                AUXILIARY
                + _ONE_RANK[1].replace(
                    _ADDED, f"        y = ListMoeAddLoss.apply(y, weights.square().mean() * 0.01)\n{_ADDED}"
                ),
            ),
        ),
        is_trained=False,
    ),
    "DeepSeek-V2, without auxiliary loss": Form((_ONE_RANK, _OWN_CROSS_ENTROPY, _NO_MORE_ARGUMENTS)),
    "DeepSeek's loop and a plain list": Form((_by_choice(),)),
    "Ling, a list that a helper builds": Form((_by_choice("self._setup_experts(config)", HELPER),)),
    "Mixtral": Form((_block(BY_TOKEN),)),
    "Mixtral, experts that scale their output": Form(
        (
            _block(BY_TOKEN.replace("layer(state) * weights[tokens, slots, None]", "layer(state, weights[tokens, slots, None])")),
            (EXPERT, EXPERT.replace("(self, x)", "(self, x, scale)").replace("return ", "return scale * ")),
        )
    ),
    "an argument that no expert reads": Form(((EXPERT, EXPERT.replace("(self, x)", "(self, x, cache=None)")),)),
    "InternLM2, a class in a helper for chats": Form((_DENSE, ("\n\n__all__", CHAT)), has_experts=False),
    "InternLM3, registrations below the model": Form(
        (_DENSE, ('"ListMoePreTrainedModel"]\n', f'"ListMoePreTrainedModel"]\n{REGISTRATIONS}')), has_experts=False
    ),
    "DeepSeek-VL2, attention of a table with computed keys": Form(
        (
            _DENSE,
            ("class ListMoeExpert", f"{_TABLE}class ListMoeExpert"),
            ("self.attention = ListMoeAttention(config)", _CHOSEN),
        ),
        has_experts=False,
    ),
    "MiniCPM3, a scale before the head": Form(
        (_DENSE, (HEAD_CALL, "        logits = self.lm_head(hidden_states / (self.vocab_size / 32))\n")), has_experts=False
    ),
}  # fmt: skip
