"""Builds a random model of two kinds of layers, with a sliding window and without, beside another
model whose tokenizer it takes: `build_hybrid_model.py TOKENIZER_MODEL DIRECTORY`.
"""

import shutil
import sys
from pathlib import Path

WINDOW_TOKENS = 512


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, Gemma2Config

    source, directory = map(Path, sys.argv[1:3])
    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    for file in (*source.glob("token*"), *source.glob("chat*")):
        shutil.copy(file, directory)
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=8192,
        sliding_window=WINDOW_TOKENS,
        initializer_range=0.05,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory)


if __name__ == "__main__":
    main()
