"""The layers of a vision tower work on this rank's slice of the patches."""

from __future__ import annotations

from patchgen.anatomy import Role
from patchgen.passes.base import Example
from patchgen.passes.tower_slices import TowerSlices


class VisionSP(TowerSlices):
    """Ulysses sequence parallelism in the tower: the rows are those of all images in order; attention exchanges heads."""

    name = "vision_sp"
    purpose = "The layers of a vision tower work on a slice of the patches, padded to whole groups that are merged."
    expects = "one hit per vision tower whose layers attend by lengths, and one per attention class of these"
    role = Role.VISION
    EXAMPLES = (
        Example("""patches are divided above the layers, merged patches gathered below them
        class ExampleAttention(nn.Module):
            def forward(self, hidden_states, cu_seqlens):
                attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation)
                q = hidden_states.reshape(hidden_states.shape[0], 2, -1).transpose(0, 1).unsqueeze(0)
      -         if is_flash_attention_requested(self.config):
      +         # patchgen: vision_sp
      +         if ops.attends_by_lengths(self.config):
                    return attention_interface(self, q, q, q, cu_seq_lens_q=cu_seqlens)[0]
                return attention_interface(self, q, q, q)[0]


        class ExampleBlock(nn.Module):
            def __init__(self, config):
                self.attn = ExampleAttention(config)

            def forward(self, hidden_states, cu_seqlens, position_embeddings):
                return hidden_states + self.attn(hidden_states, cu_seqlens)


        class ExampleMerger(nn.Module):
            def __init__(self, config):
                self.size = config.hidden_size * config.spatial_merge_size**2
                self.proj = nn.Linear(self.size, config.out_hidden_size)

            def forward(self, x):
                return self.proj(x.view(-1, self.size))


        class ExampleVision(PreTrainedModel):
            def __init__(self, config):
                self.spatial_merge_size = config.spatial_merge_size
                self.patch_embed = nn.Linear(config.patch_size**2, config.hidden_size)
                self.blocks = nn.ModuleList([ExampleBlock(config) for _ in range(config.depth)])
                self.merger = ExampleMerger(config)

            def forward(self, hidden_states, grid_thw):
                cu_seqlens = get_vision_cu_seqlens(grid_thw)
                hidden_states = self.patch_embed(hidden_states)
                position_embeddings = self.rotary_pos_emb(hidden_states, get_vision_position_ids(grid_thw))
      +         # patchgen: vision_sp
      +         rows = ops.tower_rows(self.blocks, hidden_states, group=self.spatial_merge_size**2)
      +         cu_seqlens = rows.lengths(cu_seqlens)
      +         hidden_states = rows.shard(hidden_states)
      +         position_embeddings = rows.shard(position_embeddings)
                for block in self.blocks:
                    hidden_states = block(hidden_states, cu_seqlens=cu_seqlens, position_embeddings=position_embeddings)
                merged = self.merger(hidden_states)
      +         # patchgen: vision_sp
      +         merged = rows.gather(merged)
                return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=merged)
        """),
    )
