"""What refusals of lists of experts say: each case of REFUSED in test_stacked_experts.py -> what is expected, and found."""

from __future__ import annotations

USUAL = "a statement of the usual loop over experts"
BUILT = "self.experts = nn.ModuleList([Expert(...) for _ in range(N)])"
USED = "no use of the list of experts but as self.experts in ToyMoE"
BY_ROW = "an activation of each row by itself, without learned values"
UNHOOKED = "an expert without hooks"
OF_CLASS = "an expert of modules that run the forward of their class"
PLAIN = "an expert without a weight that torch computes from others"
NAMED = {
    "the weight goes into the expert": (USUAL, "expert(state, weights[token])"),
    "slot and token are swapped": (USUAL, "hidden_states[None, token]"),
    "the expert's output is clamped": (USUAL, "state.clamp(-1, 1)"),
    "the first token alone left out": (USUAL, "token.any()"),
    "a capacity": (USUAL, "token.numel() > 64"),
    "another choice in the loop": (
        "a loop over the experts that were hit, or over all of them",
        "for number in self.favourites",
    ),
    "not a sum over experts": (
        "plain assignments from one value to the next, then one index_add_",
        "total.index_copy_(0, token, ",
    ),
    "the sum starts elsewhere": ("<zeros>.index_add_(0, <rows>, <weighted output>)", "total.index_add_(0, token, "),
    "tokens chosen from new values": (
        "no new value of selected between its use above the loop and the loop",
        "for number in hit:",
    ),
    "a value of the loop lives on": ("no use of the loop's own state after it", "return total + state.sum()"),
    "experts of different widths": (
        "experts that are built alike, whatever their number",
        "self.experts = nn.ModuleList([ToyMLP(config, width=config.size + i) for i in ",
    ),
    "experts inside another module": (
        "torch.nn.Sequential.forward(x) that returns self.<down>(self.<activation>(self.<gate>(x)) * self.<up>(x))",
        "torch.nn.Sequential",
    ),
    "experts beside the list": (
        BUILT,
        "self.experts = nn.ModuleList([ToyMLP(config, width=config.size) for _ in range(self.num_experts)] + [",
    ),
    "a part of the experts": (USUAL, "range(self.top_k)"),
    "a use beside the loop": ("no use of self.experts but its loop", "class ToyMoE(nn.Module):"),
    "a function of the file that is called range": (
        BUILT,
        "self.experts = nn.ModuleList([ToyMLP(config, width=config.size) for _ in range(self.num_experts)])",
    ),
    "an activation that mixes tokens": (BY_ROW, "self.act_fn: self.act_fn, which is nn.Softmax(dim=0)"),
    "an activation with learned values": (BY_ROW, "self.act_fn: self.act_fn, which is nn.PReLU()"),
    "a subclass that uses the list": ("no subclass of ToyMoE that uses self.experts", "OtherMoE"),
    "a class outside that uses the list": (USED, "self.moe.experts"),
    "a function that uses the list": (USED, "moe.experts"),
    "an expert that does more": (USUAL, "self.w2(product) + x"),
    "a hook on a projection": (UNHOOKED, "self.w2.register_forward_hook("),
    "a hook on the gradients of an expert": (UNHOOKED, "self.register_full_backward_hook("),
    "a hook on a weight": (UNHOOKED, "self.w2.weight.register_hook("),
    "a weight of another form": (PLAIN, "nn.utils.parametrizations.weight_norm"),
    "a hook on all modules of a model": (UNHOOKED, "one.register_forward_hook(print)"),
    "a forward of the expert's own": (OF_CLASS, "another value of forward"),
    "a call of the expert's own": (OF_CLASS, "another value of __call__"),
    "a hook where modules keep them": (UNHOOKED, "one._forward_hooks"),
    "a hook on all weights of a model": (UNHOOKED, "one.register_hook(print)"),
    "a hook on weights that a function adds": (UNHOOKED, "one.register_hook(lambda g: g / 2)"),
    "a forward that a function sets": (OF_CLASS, "another value of forward"),
    "a forward set by its name": (OF_CLASS, "another value of forward"),
    "weights of another form by a base class": (PLAIN, "nn.utils.parametrizations.weight_norm"),
    "weights of another form by a helper class": (PLAIN, "Norms.apply(self.moe.experts[0].w2)"),
    "a weight of another form by a function": (PLAIN, "nn.utils.parametrizations.weight_norm"),
    "a hook that a function adds": (UNHOOKED, "module.register_forward_hook("),
}
