"""The layers of an audio tower work on this rank's slice of the frames."""

from __future__ import annotations

from patchgen.anatomy import Role
from patchgen.passes.base import Example
from patchgen.passes.tower_slices import TowerSlices


class AudioSP(TowerSlices):
    """`cu_seqlens` stays that of all frames, plus an entry for padding: in attention each rank has all frames of some heads."""

    name = "audio_sp"
    purpose = "An audio tower convolves a slice of the chunks, and its layers work on a slice of the frames."
    expects = "one hit per audio tower with variable-length attention (by `cu_seqlens`), and one per attention class of its layers"
    role = Role.AUDIO
    EXAMPLES = (
        Example("""chunks for the convolution; frames, gathered above a pooling that knows where each sound ends
        class ExampleAttention(nn.Module):
            def forward(self, hidden_states, cu_seqlens, max_seqlen):
                attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation)
                q = hidden_states.reshape(hidden_states.shape[0], 2, -1).transpose(0, 1).unsqueeze(0)
      -         if is_flash_attention_requested(self.config):
      +         # patchgen: audio_sp
      +         if ops.attends_by_lengths(self.config):
                    return attention_interface(self, q, q, q, cu_seq_lens_q=cu_seqlens, max_length_q=max_seqlen)[0]
                return attention_interface(self, q, q, q)[0]


        class ExampleLayer(nn.Module):
            def __init__(self, config):
                self.self_attn = ExampleAttention(config)

            def forward(self, hidden_states, cu_seqlens, max_seqlen):
                return hidden_states + self.self_attn(hidden_states, cu_seqlens, max_seqlen)


        class ExampleAudio(PreTrainedModel):
            def __init__(self, config):
                self.conv1 = nn.Conv1d(config.num_mel_bins, config.d_model, 3)
                self.layers = nn.ModuleList([ExampleLayer(config) for _ in range(config.encoder_layers)])

            def forward(self, input_features, feature_lens):
                padded_feature, valid_indices = chunk_and_pad(input_features, feature_lens)
                cu_seqlens, max_seqlen, pairs = get_audio_lengths(feature_lens)
      +         # patchgen: audio_sp
      +         chunks = ops.chunk_rows(padded_feature)
      +         padded_feature = chunks.shard(padded_feature)
                padded_embed = self.conv1(padded_feature).transpose(1, 2)
      +         # patchgen: audio_sp
      +         padded_embed = chunks.gather(padded_embed)
                hidden_states = torch.index_select(padded_embed.flatten(0, 1), 0, valid_indices)
      +         # patchgen: audio_sp
      +         rows = ops.tower_rows(self.layers, hidden_states)
      +         cu_seqlens = rows.lengths(cu_seqlens)
      +         max_seqlen = rows.longest(max_seqlen)
      +         hidden_states = rows.shard(hidden_states)
                for layer in self.layers:
                    hidden_states = layer(hidden_states, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
      +         # patchgen: audio_sp
      +         hidden_states = rows.gather(hidden_states)
                hidden_states = (hidden_states[pairs] + hidden_states[pairs + 1]) / 2
                return BaseModelOutput(last_hidden_state=hidden_states)
        """),
    )
