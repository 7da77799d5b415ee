"""Measure Hugging Face's Llama in a plain PyTorch loop, to compare with the GPU check.

    python benchmarks/gpu_peer.py --preset 8b --layers 6 --seq_len 8192

The model has the shape of weft's preset.  The loop has bfloat16 autocast, the fused AdamW, clipping
at 1.0, and two sequences per step, one at a time, as the stage "eager" of ``python -m
benchmarks.gpu_check``.  It needs transformers, and runs on one GPU, or on a CPU as a test of
itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weft.models import load_family
from weft.plan.devices import GIB, peak_flops
from weft.plan.model_config import resolve_model

SEQUENCES = 2  # per step


def build_model(preset: str, layers: int, device: torch.device) -> tuple[Any, Any]:
    """Return the configuration of weft's preset, and Hugging Face's model of that shape."""
    fields = {"num_layers": layers} if layers else {}
    model_config, errors = resolve_model("llama", preset, fields)
    assert model_config is not None, errors
    ours: Any = model_config
    with device:
        config = LlamaConfig(
            hidden_size=ours.dim,
            num_hidden_layers=ours.num_layers,
            num_attention_heads=ours.num_heads,
            num_key_value_heads=ours.num_kv_heads,
            intermediate_size=ours.ffn_dim,
            vocab_size=ours.vocab_size,
            max_position_embeddings=ours.max_seq_len,
            tie_word_embeddings=ours.tied_embeddings,
            attn_implementation="sdpa",
            use_cache=False,
        )
        return ours, LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="8b")
    parser.add_argument("--layers", type=int, default=0, help="default: those of the preset")
    parser.add_argument("--seq_len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10, help="measured steps, after two others")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    config, model = build_model(options.preset, options.layers, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for _ in range(2 + options.steps):
        shape = (SEQUENCES, options.seq_len)
        tokens_BT = torch.randint(0, config.vocab_size, shape, device=device)
        if on_gpu:
            torch.cuda.synchronize()
        start_time = time.perf_counter()
        for row in tokens_BT.split(1):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=row, labels=row).loss / SEQUENCES
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_time)
    rate = SEQUENCES * options.seq_len / statistics.median(seconds[2:])
    print(f"{rate:,.0f} tokens/s")
    if on_gpu:
        flops = rate * load_family("llama").flops_per_token(config, options.seq_len)
        if peak := peak_flops(torch.cuda.get_device_name(0)):
            print(f"MFU {flops / peak:.1%}")
        print(f"{torch.cuda.max_memory_reserved() / GIB:.1f} GiB reserved")


if __name__ == "__main__":
    main()
