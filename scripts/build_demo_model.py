"""Builds a small model that vLLM serves without any download: random weights, own tokenizer.

The text that it writes means nothing. What counts is that its prefill costs what a model of its
size costs, and that the same settings give the same bytes. Run it in an environment with torch,
transformers and tokenizers (`.envs/vllm`):

    .envs/vllm/bin/python scripts/build_demo_model.py DIRECTORY
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

SETTINGS_FILE = "demo-model.json"
RECIPE_VERSION = 1  # raise it when the same settings would give another model

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

STEMS = (
    "cache token block chunk prefix store load read write path file page disk node peer mount copy "
    "print check count trace merge split stage place order range layer model query value index "
    "batch queue frame route cost time form act port script view"
).split()
PREFIXES = ("", "re", "pre", "un", "over", "sub", "inter", "super")
SUFFIXES = ("", "s", "ed", "ing", "er", "able", "ment", "ness", "less", "ful")
JOINTS = "the a of in and to with for from by at as is was it that this on or but".split()


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides the model's bytes."""

    hidden: int = 1024
    inter: int = 3072
    layers: int = 8
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    vocab: int = 4096
    positions: int = 16384
    seed: int = 0


def sentences(count: int, seed: int = 0) -> Iterator[str]:
    """Yield `count` sentences of made-up English; equal arguments give equal text."""
    rng = random.Random(seed)
    words = [f"{p}{stem}{s}" for stem in STEMS for p in PREFIXES for s in SUFFIXES]
    for _ in range(count):
        spoken = [
            rng.choice(JOINTS) if rng.random() < 0.3 else rng.choice(words)
            for _ in range(rng.randint(6, 18))
        ]
        yield " ".join(spoken).capitalize() + "."


def is_built(directory: Path, settings: Settings) -> bool:
    """Say whether the directory already holds exactly this model."""
    try:
        return json.loads((directory / SETTINGS_FILE).read_text()) == _record(settings)
    except (OSError, json.JSONDecodeError):
        return False


def _record(settings: Settings) -> dict[str, int]:
    return {"recipe_version": RECIPE_VERSION, **asdict(settings)}


def build(directory: Path, settings: Settings) -> None:
    """Write the model beside its place, then put it there whole."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        staged = Path(scratch) / "model"
        staged.mkdir()
        _save_tokenizer(staged, settings)
        _save_weights(staged, settings)
        (staged / SETTINGS_FILE).write_text(json.dumps(_record(settings)) + "\n")
        if directory.exists():
            shutil.rmtree(directory)
        staged.rename(directory)


def _save_tokenizer(directory: Path, settings: Settings) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(20_000, settings.seed), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)


def _save_weights(directory: Path, settings: Settings) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(settings.seed)
    config = Qwen2Config(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.inter,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.positions,
        # Wide enough that the best next token stands clear of the second: outputs compare exactly.
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory)


def main() -> int:
    """Build what the command line asks for, unless it is there already."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", type=Path, help="where the model goes")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    arguments = vars(parser.parse_args())
    directory: Path = arguments.pop("directory")
    settings = Settings(**arguments)
    if is_built(directory, settings):
        print(f"{directory}: already built")
        return 0
    build(directory, settings)
    size_bytes = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory}: built, {size_bytes / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
