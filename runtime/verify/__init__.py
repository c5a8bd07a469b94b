"""The numerical proof that a generated model is upstream's model.

    patchgen verify qwen3_moe          # a table, and verify.json next to the generated file; exit 1 unless proven

    config class ──small_config──> small config ──build_pair──> upstream model    generated model
                                        │                       same weights, constants perturbed
                                        └──text_cases, media_cases──> cases ──train_step──> outputs and gradients, bit for bit
                                                                               fused seams: tolerance, calls
                                                                               checkpoints exchanged both ways

| file | does |
| --- | --- |
| `small_config.py` | a small config from any config class, with `small_*.py` and the rules of `field_*.py` |
| `inputs.py` | the fixed text inputs: plain, padded, packed, and the batch of another caller than patchgen's trainer |
| `multimodal_inputs.py` | batches with images, videos and audio, with `media_samples.py`, `media.py` |
| `model_pair.py` | builds both models with the same weights and compares their structure |
| `correspondence.py` | upstream's tensors by our names: lists of experts become stacks |
| `comparison.py` | one training step, and the differences between two |
| `conditioning.py` | how far rounding alone moves a step |
| `large_weights.py` | weights of experts, MLPs and the head on which clamps and caps bite |
| `bf16.py` | both models in bf16, in units of upstream's own error |
| `seam_proof.py` | the kernels behind the seams |
| `round_trip.py` | checkpoints from one class to the other |
| `proof.py` | puts these together for one config |
| `training_path.py` | the same with the attention, kernels and batches of a run |
| `training_checks.py` | each of its checks, on the steps of `training_steps.py` |
| `observe/` | what a step reads, computes from lengths and keeps, and the layouts that this leaves |
| `verify_model.py` | one model with all its variants: `verify_model("qwen3_moe")` |
| `two_ranks.py` | a class on two ranks: FSDP2, shared experts, a shared sequence; `parallel_coverage.py` sweeps over types |
| `media_ranks.py` | one model on gloo ranks (`ranks.py`) against upstream's on one (`reference_model.py`) |
| `mutants.py` | verdicts on changed upstream sources, with `mutants_on_ranks.py` |
| `report.py` | `verify.json`: written, and read by a run |
| `proof_table.py` | the table that `verify` prints; no proof depends on it |
| `source_closure.py` | the code that a proof depends on, as a hash |
| `source_keys.py` | what a recorded result depends on: these hashes, the generator's, and releases |
| `record_types.py` | the types of what the records hold |
| `records.py` | the rows of records/coverage.json, and whether they are still valid |
"""
