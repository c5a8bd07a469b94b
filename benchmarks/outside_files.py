"""Generation and proof of modeling files that are not part of transformers: the table of docs/own_architecture.md.

    pip download --no-deps xtuner==0.2.0 optimum-habana==1.21.2 -d wheels    # and einops, which InternLM2 imports
    python benchmarks/outside_files.py wheels --output rows.csv

The files were written for transformers 4. They are extracted from their wheels and adapted by `ADAPTATIONS`: names that 5.23 no
longer has are replaced by code that does what they did in their last release. The generated file is compared with this adapted
copy, at small sizes: in eager form, as a run computes, and on two ranks.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import transformers

import patchgen
from patchgen import pipeline
from patchgen.commands.checkpoints import register
from patchgen.errors import PatchgenError
from patchgen.runtime import registry
from patchgen.runtime.verify import media_ranks, verdict
from patchgen.runtime.verify.ranks import RankPool
from patchgen.runtime.verify.small_config import UPSTREAM_REFUSALS
from patchgen.runtime.verify.verify_model import verify_model
from patchgen.upstream import load, name_of

Edits = tuple[tuple[str, str], ...]

XTUNER, HABANA = "xtuner-0.2.0", "optimum_habana-1.21.2"
ADAPTATIONS: Edits = (
    (r"from \S+ import is_torch_fx_available\n", "def is_torch_fx_available():\n    return False\n\n"),
    (r"DynamicCache\.from_legacy_cache\(\w*\)", "DynamicCache()"),
    (r"next_decoder_cache\.to_legacy_cache\(\)\s+if use_legacy_cache else next_decoder_cache", "next_decoder_cache"),
    (r"get_usable_length\(kv_seq_len, self\.layer_idx\)", "get_seq_length(self.layer_idx)"),
    (r"get_usable_length\(seq_length\)", "get_seq_length()"),
    (r"self\.config\.rope_scaling is None", "'type' not in (self.config.rope_scaling or {})"),
    (r"self\.config\.rope_scaling is not None", "'type' in (self.config.rope_scaling or {})"),
    (r"if self\.rope_scaling is None:", "if 'type' not in (self.rope_scaling or {}):"),
    (
        r'_tied_weights_keys = \["lm_head\.weight"\]',
        '_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}',
    ),
    (
        r"_tied_weights_keys = \['lm_head\.weight'\]",
        '_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}',
    ),
    (
        r'_tied_weights_keys = \["output\.weight"\]',
        '_tied_weights_keys = {"output.weight": "model.tok_embeddings.weight"}',
    ),
    (
        r"_tied_weights_keys = \['output\.weight'\]",
        '_tied_weights_keys = {"output.weight": "model.tok_embeddings.weight"}',
    ),
    (r"from xtuner\.utils import load_state_dict_into_model\n", "load_state_dict_into_model = None\n"),
)
NO_SDPA = (r"_supports_sdpa = True", "_supports_sdpa = False")  # their dicts of attention classes have no "sdpa"
# Of DeepSeek-V2-Lite's checkpoint; the defaults build no experts.
RELEASED_CONFIG_VALUES: Edits = (
    (r"n_shared_experts=None", "n_shared_experts=2"),
    (r"n_routed_experts=None", "n_routed_experts=64"),
    (r"num_experts_per_tok=None", "num_experts_per_tok=6"),
    (r"n_group=None", "n_group=1"),
    (r"topk_group=None", "topk_group=1"),
    (r"first_k_dense_replace=0", "first_k_dense_replace=1"),
)
GAUDI: Edits = (
    (r"import habana_frameworks\.torch\.core as htcore\n", ""),
    (r"from habana_frameworks\S* import FusedSDPA\n", "FusedSDPA = None\n"),
    (r"from \.+utils import warn0\n", "warn0 = print\n"),
    (
        r"from \S+ import GaudiGenerationMixin\n",
        "from transformers.generation import GenerationMixin as GaudiGenerationMixin\n",
    ),
    (r"\n\s+htcore\.mark_step\(\)", ""),
    (r"(?s)try:\n\s+import flash_attn.*?except ImportError:\n\s+pass", "pass"),
)
DEFAULT_ROPE = """
def _default_rope(config, device=None, seq_len=None, **kwargs):
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float().to(device) / dim
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0


ROPE_INIT_FUNCTIONS.setdefault("default", _default_rope)
"""
# The config of a model whose decoder layer chooses one of two implementations of the same experts.
SINGLE_IMPLEMENTATION_CONFIG = '''"""The package's second, sharded implementation of the experts is edited out."""

from patchgen.model_configs import ModelConfig
from patchgen.passes.hand_edits import EditMethod

MATCH = """if moe_implementation == 'origin':
    block = {block}
elif moe_implementation == 'shard':
    block = {shard}
else:
    raise NotImplementedError"""
CODE = """if moe_implementation != 'origin':
    raise NotImplementedError
block = {block}"""
CONFIG = ModelConfig(
    model="{model}",
    edits=(
        EditMethod(
            target="{layer}.__init__",
            match=MATCH,
            code=CODE,
            where="instead",
            reason="removes the second, sharded implementation",
        ),
    ),
)
'''


@dataclass(frozen=True)
class OutsideFile:
    """A modeling file in a wheel: `edits` are further adaptations, each of which must be found.

    `patchgen_config` is the text of its config, which is written beside it.
    """

    name: str
    wheel: str
    folder: str
    edits: Edits = ()
    patchgen_config: str = ""


def single_implementation_config(model: str, layer: str, block: str, shard: str) -> str:
    return SINGLE_IMPLEMENTATION_CONFIG.format(model=model, layer=layer, block=block, shard=shard)


DEEPSEEK = "xtuner/model/transformers_models/deepseek_v2"
DEEPSEEK_CONFIG = single_implementation_config(
    "deepseek", "DeepseekV2DecoderLayer", "DeepseekV2MoE", "DeepseekV2MoEShard"
)
NO_AUXILIARY_LOSS = (r" +y = AddAuxiliaryLoss\.apply\(y, aux_loss\)\n", "")
MIXTRAL_CONFIG = single_implementation_config(
    "mixtral", "MixtralDecoderLayer", "MixtralSparseMoeBlock", "MixtralSparseShardMoeBlock"
)
FILES = (
    OutsideFile("DeepSeek-V2", XTUNER, DEEPSEEK, (*RELEASED_CONFIG_VALUES, NO_SDPA), DEEPSEEK_CONFIG),
    OutsideFile(
        "DeepSeek-V2, without auxiliary loss",
        XTUNER,
        DEEPSEEK,
        (*RELEASED_CONFIG_VALUES, NO_SDPA, NO_AUXILIARY_LOSS),
        DEEPSEEK_CONFIG,
    ),
    OutsideFile("Mixtral", XTUNER, "xtuner/model/transformers_models/mixtral", patchgen_config=MIXTRAL_CONFIG),
    OutsideFile("InternLM2", XTUNER, "xtuner/_lite/modelings/internlm2"),
    OutsideFile(
        "InternLM3",
        XTUNER,
        "xtuner/_lite/modelings/internlm3",
        (
            (r"import LossKwargs, ", "import TransformersKwargs as LossKwargs, "),
            (r"config\.pad_token_id", 'getattr(config, "pad_token_id", None)'),
            (r"\nclass InternLM3MLP", f"{DEFAULT_ROPE}\n\nclass InternLM3MLP"),
        ),
    ),
    OutsideFile("MiniCPM3", HABANA, "optimum/habana/transformers/models/minicpm", (*GAUDI, NO_SDPA)),
)
FIELDS = ("file", "from", "loss", "experts", "as a run computes", "on two ranks", "sequence parallel", "seconds")
SEAM = "causal_lm_loss seam"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--output", type=Path, default=Path("outside_files.csv"))
    parser.add_argument("--only", nargs="*", help="names of files")
    parser.add_argument("--alone", help="the name of one file; its row goes to stdout")
    options = parser.parse_args()
    if options.alone:
        (chosen,) = (candidate for candidate in FILES if candidate.name == options.alone)
        print(json.dumps(measure(chosen, options.wheels)))
        return
    rows = []
    with options.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for outside_file in FILES:
            if options.only and outside_file.name not in options.only:
                continue
            started = time.perf_counter()
            # One process per file: their modules share names.
            command = [sys.executable, __file__, str(options.wheels), "--alone", outside_file.name]
            completed = subprocess.run(command, capture_output=True, text=True)
            if completed.returncode:
                sys.exit(f"{outside_file.name}:\n{completed.stderr[-3000:]}")
            rows.append(
                json.loads(completed.stdout.splitlines()[-1]) | {"seconds": f"{time.perf_counter() - started:.0f}"}
            )
            writer.writerow(rows[-1])
            file.flush()
    for row in ({name: name for name in FIELDS}, dict.fromkeys(FIELDS, "---"), *rows):
        print("| " + " | ".join(row[name] for name in FIELDS) + " |")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"\n{date.today()}, patchgen {patchgen.__version__}, {versions}")


def write_adapted_copy(outside_file: OutsideFile, wheels: Path, root: Path) -> Path:
    """Writes the adapted copy; returns its folder."""
    (wheel,) = wheels.glob(f"{outside_file.wheel}-*.whl")
    (folder := root / "code").mkdir()
    edits = dict.fromkeys(outside_file.edits, 0)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = Path(name)
            if path.parent != Path(outside_file.folder) or not path.name.startswith(("modeling_", "configuration_")):
                continue
            text = archive.read(name).decode()
            for edit in (*ADAPTATIONS, *outside_file.edits):
                text, count = re.subn(edit[0], edit[1].replace("\\", r"\\"), text)
                edits |= {edit: edits[edit] + count} if edit in edits else {}
            (folder / path.name).write_text(text, encoding="utf-8")
    unused = [pattern for (pattern, _), count in edits.items() if not count]
    if unused:
        raise SystemExit(f"{outside_file.name} of {wheel.name} has none of {unused}: another release?")
    if outside_file.patchgen_config:
        (folder / f"patchgen_{name_of(folder)}.py").write_text(outside_file.patchgen_config, encoding="utf-8")
    return folder


def measure(outside_file: OutsideFile, wheels: Path) -> dict[str, str]:
    """The row of one file."""
    row = dict.fromkeys(FIELDS, "") | {"file": outside_file.name, "from": outside_file.wheel.replace("_", "-")}
    with tempfile.TemporaryDirectory() as root:
        folder = write_adapted_copy(outside_file, wheels, Path(root))
        try:
            generated = pipeline.generate(load(name_of(folder), source=folder))
        except PatchgenError as refusal:
            return row | {"loss": f"not generated: {first_line(refusal)}"}
        hits = {step.name: [hit.what for hit in step.outcome.hits] for step in generated.steps}
        row["loss"] = "seam" if SEAM in hits["fused_loss"] else "its own"
        # The pass writes "<expert class> x <number> as <class of stacks>" for a list of experts.
        has_experts = any(" as " in what for what in hits["stacked_experts"])
        row["experts"] = "stacked, fused, EP plan" if has_experts and hits["fused_experts"] else "none"
        (place := Path(root) / generated.model).mkdir()
        for name, text in generated.files.items():
            (place / name).write_text(text, encoding="utf-8")
        architecture = register(str(folder), root)
        assert architecture is not None, "`register` returns None only without a code folder"
        return row | prove(architecture.generated, has_experts=has_experts)


def prove(model: registry.GeneratedModel, *, has_experts: bool) -> dict[str, str]:
    """The proof in one process, and on two ranks."""
    try:
        proof = verify_model(model, variants=("base",), implementations=("torch", "chunked"))
    except UPSTREAM_REFUSALS as error:
        return {"as a run computes": f"the file itself does not run: {type(error).__name__}: {first_line(error)}"}
    outcome_of_proof, path = verdict.of(proof), proof.training
    outcome = outcome_of_proof.words.removesuffix(".")
    if outcome_of_proof.status == verdict.PROVEN and path is not None:
        outcome += f", {path.worst:.0e}" + (", documents in rows of their own" if path.separates_documents else "")
    pool = RankPool(2)
    try:
        results = media_ranks.verify_on_ranks(model, pool, sp=1, ep=2 if has_experts else 1, fsdp=True)
        sp_results = media_ranks.verify_on_ranks(model, pool, sp=2, fsdp=True, cases=("text", "packed"))
    finally:
        pool.close()
    return {
        "as a run computes": outcome,
        "on two ranks": on_ranks(results, "ep 2, FSDP" if has_experts else "FSDP"),
        "sequence parallel": on_ranks(sp_results, "sp 2, FSDP"),
    }


def on_ranks(results: Sequence[media_ranks.RankResult], layout: str) -> str:
    """The worst difference, or the first reason."""
    reason = next((result.reason for result in results if result.reason), "")
    if reason:
        message = reason.strip().splitlines()[-1].rpartition("Error: ")[2]
        return f"no: {message.partition(', and ')[0]}"
    return f"{layout}: {max(max(result.loss, result.gradient) for result in results):.0e} in {len(results)} cases"


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


if __name__ == "__main__":
    main()
