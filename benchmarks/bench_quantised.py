"""Loading a quantised checkpoint beside the same model's in bf16: time, bytes, and peak memory above the model's share.

    python benchmarks/bench_quantised.py --directory /scratch --layers 2

Files in the shape of Qwen3-30B-A3B with one key per expert: bf16, FP8 in blocks of 128 x 128, NVFP4 and INT4 as compressed-tensors
store them, with random values. Each load is a process of its own, with the files in the page cache. Before it is timed, every
loaded projection of the first layer is compared with `value * scale` on whole tensors. Appends to results_quantised.csv.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_checkpoints import config, empty_model
from result_rows import append
from safetensors.torch import save_file
from torch import Tensor

RESULTS = Path(__file__).with_name("results_quantised.csv")
COLUMNS = (
    "date", "torch", "threads", "layers", "form", "files_gb", "share_gib", "load_s", "peak_above_share_gib",
)  # fmt: skip
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FORMS = ("bf16", "FP8", "NVFP4", "INT4")
GROUPS = {"NVFP4": 16, "INT4": 32}


def stored_as(form: str, name: str, shape: tuple[int, int], generator: torch.Generator) -> tuple[dict, Tensor]:
    """Random stored tensors of a weight, and its numbers."""
    rows, columns = shape
    if form == "bf16":
        weight = torch.randn(shape, generator=generator).bfloat16()
        return {name: weight}, weight
    if form == "FP8":
        values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5
        factors = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return {name: values, f"{name}_scale_inv": scales}, values.float() * factors
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.int32)
    scales = (torch.rand(rows, columns // GROUPS[form], generator=generator) + 0.5).bfloat16()
    if form == "INT4":
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        packed = (codes.view(rows, -1, 8) << shifts).sum(-1, dtype=torch.int32)
        stored = {f"{name}_packed": packed, f"{name}_scale": scales}
        return stored, (codes - 8).float() * scales.float().repeat_interleave(32, 1)
    scales, whole = scales.to(torch.float8_e4m3fn), torch.tensor([2.0])
    numbers = FP4[(codes & 7).long()] * (1 - 2 * (codes >> 3))
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    stored = {f"{name}_packed": packed, f"{name}_scale": scales, f"{name}_global_scale": whole}
    return stored, numbers * (scales.float() / whole).repeat_interleave(16, 1)


def make(folder: Path, form: str, layers: int) -> None:
    """Writes a checkpoint, a file for each layer, and the numbers of the first layer."""
    folder.mkdir()
    generator, weight_map, expected = torch.Generator().manual_seed(0), {}, {}
    one = config(layers)
    files: dict[str, dict[str, Tensor]] = {"model-rest.safetensors": {}}
    for name, tensor in empty_model(layers).state_dict().items():
        if "layers" not in name:
            files["model-rest.safetensors"][name] = torch.randn(tensor.shape, generator=generator).bfloat16()
    for layer in range(layers):
        tensors, prefix = {}, f"model.layers.{layer}"
        width, heads, head_dim = one.hidden_size, one.num_attention_heads, one.head_dim
        linear = {
            f"{prefix}.self_attn.q_proj.weight": (heads * head_dim, width),
            f"{prefix}.self_attn.k_proj.weight": (one.num_key_value_heads * head_dim, width),
            f"{prefix}.self_attn.v_proj.weight": (one.num_key_value_heads * head_dim, width),
            f"{prefix}.self_attn.o_proj.weight": (width, heads * head_dim),
        }
        for expert in range(one.num_experts):
            for kind in ("gate_proj", "up_proj", "down_proj"):
                shape = (one.moe_intermediate_size, width)
                linear[f"{prefix}.mlp.experts.{expert}.{kind}.weight"] = shape[::-1] if kind == "down_proj" else shape
        for name, shape in linear.items():
            stored, numbers = stored_as(form, name, shape, generator)
            tensors |= stored
            if layer == 0 and (".0.gate_proj" in name or "self_attn" in name):
                expected[name] = numbers.bfloat16()
        for name, size in (("input_layernorm", width), ("post_attention_layernorm", width)):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(head_dim, dtype=torch.bfloat16)
        tensors[f"{prefix}.mlp.gate.weight"] = torch.randn(one.num_experts, width, generator=generator).bfloat16()
        files[f"model-{layer}.safetensors"] = tensors
    for file, tensors in files.items():
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    fields = one.to_dict() | ({"quantization_config": {"weight_block_size": [128, 128]}} if form == "FP8" else {})
    (folder / "config.json").write_text(json.dumps(fields))
    torch.save(expected, folder / "expected.pt")


def load(folder: Path, layers: int) -> None:
    """Loads a checkpoint and prints its figures."""
    from patchgen.runtime.checkpoint import load_pretrained

    model = empty_model(layers)
    report = load_pretrained(model, folder)
    state = model.state_dict()
    for name, numbers in torch.load(folder / "expected.pt").items():
        rows = numbers.shape[0]
        found = state["model.layers.0.mlp.experts.gate_up_proj"][0, :rows] if ".experts." in name else state[name]
        assert torch.equal(found, numbers), name
    share = sum(tensor.nbytes for tensor in state.values())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"share": share, "seconds": report.seconds, "peak": before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--load", type=Path, help="the folder to load, in this process")
    options = parser.parse_args()
    if options.load is not None:
        load(options.load, options.layers)
        return
    rows = []
    for form in FORMS:
        folder = options.directory / f"quantised-{form}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            make(folder, form, options.layers)
            command = [sys.executable, __file__, "--load", str(folder), "--layers", str(options.layers)]
            runs = [json.loads(subprocess.check_output(command, text=True).splitlines()[-1]) for _ in range(3)]
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        best = min(runs, key=lambda run: run["seconds"])
        share = best["share"] / 2**30
        rows.append(
            {
                "layers": options.layers,
                "form": form,
                "files_gb": round(size / 1e9, 2),
                "share_gib": round(share, 2),
                "load_s": round(best["seconds"], 2),
                "peak_above_share_gib": round(best["peak"] / 2**30 - share, 2),
            }
        )
        print(rows[-1], flush=True)
    stamp = {"torch": torch.__version__.partition("+")[0], "threads": str(torch.get_num_threads())}
    append(RESULTS, COLUMNS, rows, **stamp)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s")
