"""Layers that mix tokens, computed again in the backward by checkpoints of others: they keep packed documents apart then, too."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from patchgen.generated_models.nemotron_h.modeling_nemotron_h import causal_conv1d_fn
from patchgen.runtime import model_calls, ops
from patchgen.runtime.parallel import batch

ROWS_BSH = torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(0))
LENGTHS = batch.document_lengths(torch.tensor([[i in (0, 5, 11) for i in range(16)]]))


class Layer(GradientCheckpointingLayer):
    """A short convolution that is told nothing of documents: it asks the call of its model."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 32).view(8, 4))

    def forward(self, rows_BSH):
        mixed = ops.causal_conv1d(causal_conv1d_fn, rows_BSH.transpose(1, 2), self.weight, None, activation="silu")
        return rows_BSH + mixed.transpose(1, 2)


class Model(PreTrainedModel):
    config_class, supports_gradient_checkpointing = LlamaConfig, True

    def __init__(self):
        super().__init__(LlamaConfig())
        self.layers = nn.ModuleList([Layer(), Layer()])
        model_calls.note_calls(self)

    def get_input_embeddings(self):
        return nn.Identity()

    def forward(self, inputs_embeds, **kwargs):
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        return inputs_embeds


def _gradients(prepare=lambda model: None, **lengths) -> list[torch.Tensor]:
    model = Model().train()
    prepare(model)
    model(inputs_embeds=ROWS_BSH.clone().requires_grad_(), **lengths).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_checkpoints_keep_documents_apart(reentrant):
    """Gradients of packed rows with transformers' activation checkpointing against those without, to the bit."""
    kept = _gradients(**LENGTHS)

    def enable(model):  # by the name that the release has
        named = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        named({"use_reentrant": reentrant})

    again = _gradients(enable, **LENGTHS)
    assert all(torch.equal(*both) for both in zip(kept, again, strict=True))
    assert not torch.equal(kept[0], _gradients()[0])  # of rows that are one document


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpoint_that_hides_the_call_is_refused(compiled):
    """torch's own wrapper runs a layer again outside the model's call: documents would be mixed there. Also by a layer that was
    compiled for rows that are one document."""

    def wrap(model):
        if compiled:
            _compile(model)
            model(inputs_embeds=ROWS_BSH)
        model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))

    with pytest.raises(RuntimeError, match="so the documents of its packed rows are unknown"):
        _gradients(wrap, **LENGTHS)


def _compile(model, **options):
    torch._dynamo.reset()
    model.layers[0].compile(backend="aot_eager", **options)  # the other one stays as it is: quicker


def test_layers_that_mix_tokens_compile_in_one_graph():
    """Gradients of rows that are one document, to rounding; compiled layers keep documents apart, too."""
    for options, lengths in (({"fullgraph": True}, {}), ({}, LENGTHS)):
        expected = _gradients(**lengths)
        found = _gradients(lambda model, options=options: _compile(model, **options), **lengths)
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two)
