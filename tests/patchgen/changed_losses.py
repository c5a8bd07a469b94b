"""Changes of a head, its loss and its router loss that no pass refuses: what `test_losses_against_the_proof.py` judges."""

from __future__ import annotations

from changed_sources import IF_LABELS, LOSS, PROJECTED, RETURNED, SourceChange, changed

AUX = "        aux_loss = None\n"
TERM = "loss += self.router_aux_loss_coef * aux_loss.to(loss.device)"
BALANCE = "def load_balancing_loss_func("
MASKED = "                attention_mask,\n            )\n            if labels"
HELD = "        self.router_aux_loss_coef = config.router_aux_loss_coef\n"
HEAD_CLASS = "@auto_docstring\nclass Qwen3MoeForCausalLM"
HIDDEN = "        hidden_states = outputs.last_hidden_state\n"
OUTPUT = "return MoeCausalLMOutputWithPast("
CHANGED = "result.loss = result.loss**2\n    return result\n\n\n"
SQUARED = "def squared(module, given, made):\n    return made * 2\n\n\n"
ROOTED = "def rooted(f):\n    return lambda *a: f(*a) ** 0.5\n\n\n"


def case(title: str, *edits: tuple[str, str]) -> SourceChange:
    return changed("fused_loss", "qwen3_moe", title, *edits)


def below(title: str, code: str) -> SourceChange:
    """Code between the loss and what is added to it."""
    return case(title, (AUX, f"{AUX}        {code}\n"))


def beside(title: str, code: str, *edits: tuple[str, str]) -> SourceChange:
    """Code in `__init__`, above the head."""
    return case(title, (HELD, f"{HELD}        {code}\n"), (HEAD_CLASS, SQUARED + HEAD_CLASS), *edits)


def loss_of(title: str, arguments: str) -> SourceChange:
    return case(title, (LOSS, LOSS.replace("self.vocab_size, **kwargs", arguments)))


ABOVE_THE_LOSS = (
    *(case(title, (PROJECTED, f"{PROJECTED}{after}")) for title, after in (
        ("hidden states changed below the head", "\n        hidden_states = hidden_states * 0"),
        ("labels moved by the logits", "\n        labels = labels.to(logits.device) if labels is not None else None"),
        ("another operand of another tensor", " + self.lm_head(outputs[0].flip(1))"),
        ("a mean over the tokens", "\n        logits = logits - logits.mean(dim=1, keepdim=True)"),
        ("a maximum over everything", "\n        logits = logits / logits.max()"),
        ("a shift of the tokens", "\n        logits = logits.roll(1, 1)"),
        ("a change that depends on the length", "\n        if logits.shape[1] > 7:\n            logits = logits * 2"),
        ("a convolution below the head", "\n        logits = torch.conv1d(logits.mT.contiguous(), logits.new_ones(logits.shape[2], 1, 3), padding=1, groups=logits.shape[2]).mT.contiguous()"),
    )),
    *(case(title, (PROJECTED, f"{code}\n        {PROJECTED}")) for title, code in (
        ("labels changed above the head", "labels = labels.masked_fill(labels < 50, -100) if labels is not None else None"),
    )),
    case("a scale of another local", (PROJECTED, f"spread = hidden_states.std()\n        {PROJECTED}\n        logits = logits * spread")),
    case("a column of the whole row", (PROJECTED, f"{PROJECTED}\n        columns = logits.argmax(-1)\n        logits[:, :, columns] = -7.0")),
    case("labels that a function changes", (HIDDEN, HIDDEN + "        seen = masked(labels)\n"), (HEAD_CLASS, "def masked(y):\n    return None if y is None else y.masked_fill_(y % 3 == 0, -100)\n\n\n" + HEAD_CLASS)),
    loss_of("a number of items of this rank's labels", "self.vocab_size, (labels != -100).sum()"),
    loss_of("an argument made of the logits", "self.vocab_size, scale=logits.std()"),
    case("a number of items of the tokens", (LOSS, LOSS.replace("**kwargs", "num_items_in_batch=labels.shape[1]"))),
    case("a number of items in the arguments", (HIDDEN, HIDDEN + '        kwargs["num_items_in_batch"] = hidden_states.shape[1]\n')),
    case("a number of items by an update", (HIDDEN, HIDDEN + "        kwargs.update(num_items_in_batch=hidden_states.shape[1])\n")),
    case("arguments made anew", (HIDDEN, HIDDEN + "        kwargs = dict(kwargs, num_items_in_batch=7)\n")),
)  # fmt: skip

BELOW_THE_LOSS = (
    case("a second loss", (IF_LABELS, IF_LABELS + "\n        if labels is not None and self.training:\n            loss = loss + self.loss_function(logits, labels, self.vocab_size)")),
    below("logits used below", "spread = logits.std()"),
    below("logits handed to another loss", "loss = loss + 1e-3 * logits.logsumexp(-1).pow(2).mean() if labels is not None else loss"),
    below("logits handed to it where there are any", "loss = loss + 1e-3 * logits.logsumexp(-1).pow(2).mean() if logits is not None and loss is not None else loss"),
    below("another name for the logits", "scores = logits"),
    below("no loss after all", "loss = None"),
    below("another loss below", "loss = hidden_states.pow(2).mean()"),
    below("a term of one rank's tokens", "loss = loss + 0.1 * hidden_states.pow(2).mean() if labels is not None else None"),
    below("a loss to a power", "loss = loss**2 if labels is not None else None"),
    below("a loss with a bound", "loss = loss.clamp(max=3.0) if labels is not None else None"),
    below("a loss times a number of tokens", "loss = loss * hidden_states.shape[1] if labels is not None else None"),
    below("a loss times a mean", "loss = loss * hidden_states.detach().std() if labels is not None else None"),
    below("a condition of data", "loss = loss * 2 if loss is not None and hidden_states[0, 0, 0] > 0 else loss"),
    below("a loss of no part in its value", "loss = hidden_states.std().to(loss.device) if loss is not None else None"),
    case("another value as the loss", ("            loss=loss,\n            aux", "            loss=hidden_states.std(),\n            aux")),
    case("a result with a method", (OUTPUT, "return Made("), (HEAD_CLASS, "class Made(MoeCausalLMOutputWithPast):\n    def __post_init__(self):\n        self.loss = None if self.loss is None else self.loss**2\n        super().__post_init__()\n\n\n" + HEAD_CLASS)),
    case("a result that a function changes", ("            router_logits=outputs.router_logits,\n        )\n", "            router_logits=outputs.router_logits,\n        )\n        return squared(made)\n"), (OUTPUT, "made = MoeCausalLMOutputWithPast("), (HEAD_CLASS, "def squared(result):\n    " + CHANGED.replace("result.loss**2", "result.loss and result.loss**2") + HEAD_CLASS)),
    case("a forward that a call goes around", ("        self.post_init()\n\n    @can_return_tuple", "        self.post_init()\n\n    def __call__(self, *args, **kwargs):\n        result = super().__call__(*args, **kwargs)\n        " + CHANGED.replace("result.loss**2", "result.loss and result.loss**2").replace("\n    return", "\n        return").rstrip() + "\n\n    @can_return_tuple")),
    case("a coefficient changed in forward", (AUX, "        self.router_aux_loss_coef = hidden_states.detach().std()\n" + AUX)),
    case("a router loss changed in place", (TERM, f"aux_loss = aux_loss * hidden_states.detach().std()\n                {TERM}")),
    case("a condition of one rank's tokens", (TERM, f"if labels.shape[1] > 8:\n                    {TERM}")),
)  # fmt: skip

AUXILIARY = """class AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=grad.dtype)


"""

GRADIENTS = (
    beside("a hook on the head's gradients", "self.lm_head.register_full_backward_hook(lambda module, given, made: (given[0] / given[0].norm(),))"),
    case("a hook that scales gradients", (PROJECTED, f"hidden_states.register_hook(lambda g: g / g.norm()) if hidden_states.requires_grad else None\n        {PROJECTED}")),
    case("a loss that a backward adds", (HEAD_CLASS, AUXILIARY + HEAD_CLASS), (PROJECTED, f"hidden_states = AddLoss.apply(hidden_states, hidden_states.mean())\n        {PROJECTED}")),
)  # fmt: skip

TYPES = (
    *(beside(title, f"self.loss_type = {kind}") for title, kind in (
        ("a masked loss by a local name", 'str("ForMaskedLM")'),
    )),
)  # fmt: skip

ROUTERS = (
    case("a router loss under a decorator", (BALANCE, ROOTED + "@rooted\n" + BALANCE)),
    case("a router loss replaced below", (RETURNED, RETURNED + "\n\n" + ROOTED + "load_balancing_loss_func = rooted(load_balancing_loss_func)\n")),
    case("router logits changed above", (AUX, "        outputs.router_logits = outputs.router_logits and tuple(x * 2 for x in outputs.router_logits)\n" + AUX)),
)  # fmt: skip

ALL = (*ABOVE_THE_LOSS, *BELOW_THE_LOSS, *GRADIENTS, *TYPES, *ROUTERS)
