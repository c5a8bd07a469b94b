"""Models on real ranks against upstream's own class in one process: loss, every gradient, norm, three AdamW steps."""

from __future__ import annotations

import cases_models as cases


def test_x(two_ranks):
    for kw in [
        dict(),
        dict(sp=2),
        dict(dp_replicate=2),
        dict(sp=2, packed=True),
        dict(packed=True, micro_batches=4),
        dict(sp=2, micro_batches=4, checkpoint="full", packed=True, attention_name="patchgen_sdpa"),
        dict(checkpoint="selective"),
    ]:
        for name in ["qwen3", "llama"]:
            print(name, kw, two_ranks.run(cases.agrees, name, generated=False, **kw)[0])
