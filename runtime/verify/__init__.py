"""The numerical proof that a generated model is upstream's model.

    patchgen verify qwen3_moe          # the table; verify.json beside the generated file; exit 1 unless proven

    config class ──small_config──> small config ──build_pair──> upstream model    generated model
                                        │                       same weights, constants moved off their values
                                        └──text_cases, media_cases──> cases ──train_step──> outputs and gradients, bit for bit
                                                                               fused seams: tolerance, calls
                                                                               checkpoints exchanged both ways

| file | does |
| --- | --- |
| `small_config.py` | a small config from any config class, with `small_*.py` and the rules of `field_*.py` |
| `inputs.py` | the fixed inputs of text: plain, padded, packed |
| `multimodal_inputs.py` | batches with images, videos and audio, with `media_samples.py`, `media.py` |
| `model_pair.py` | builds both models with the same weights and compares their structure |
| `correspondence.py` | upstream's tensors by our names: lists of experts become stacks, weights and gradients alike |
| `comparison.py` | one training step, and how far two of them are apart |
| `seam_proof.py` | the kernels behind the seams |
| `layout.py` | how ranks share the work of a proof |
| `round_trip.py` | checkpoints from one class to the other |
| `proof.py` | puts these together for one config |
| `verify_model.py` | one model with all its variants: `verify_model("qwen3_moe")` |
| `report.py` | the table and `verify.json` |
| `source_closure.py` | what code a proof depends on, as a hash |
| `source_keys.py` | what a recorded result depends on: these hashes, the generator's, and releases |
| `records.py` | the rows of records/coverage.json, and whether what is recorded still holds |
| `committed_models.py` | a committed model, and what is recorded of proofs beside it |
"""
