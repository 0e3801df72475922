"""A model's tokenizer, for showing token ids as text. The only user of the package tokenizers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfs.errors import InvalidInput, KvfsError


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read `tokenizer.json` from a model's directory, or that file itself.

        Raises `InvalidInput` when it cannot be used.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise KvfsError("text needs the package tokenizers; pip install tokenizers") from error
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InvalidInput(str(file), "no such file; --tokenizer names its directory")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:
            raise InvalidInput(str(file), f"is no tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the model puts around a prompt."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included; unknown ids are left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
