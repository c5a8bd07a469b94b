"""A process that knows nothing of patchgen: loads checkpoints with transformers and compares their logits, bit for bit.

Reads lines of JSON, [CLASS, ORIGINAL, EXPORT...], and prints for each "same" if every export gives the logits of the
original with no missing or unexpected key; what differs ends it.
"""

from __future__ import annotations

import json
import sys

import torch
import transformers


def logits(cls, folder: str) -> torch.Tensor:
    model, info = cls.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, attn_implementation="eager", dtype=torch.float32
    )
    wrong = {kind: info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]}
    assert not wrong, (folder, wrong)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, vocabulary // 2, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = model.eval()(input_ids=ids)
    return outputs.logits


def compare(name: str, original: str, *exports: str) -> None:
    cls = getattr(transformers, name)
    expected = logits(cls, original)
    assert expected.isfinite().all() and expected.std() > 0
    for export in exports:
        got = logits(cls, export)
        assert torch.equal(got, expected), f"{export} gives other logits, by {(got - expected).abs().max()}"
    assert not any(module.startswith("patchgen") for module in sys.modules)
    print("same", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for line in sys.stdin:
        compare(*json.loads(line))
