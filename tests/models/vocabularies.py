"""Tiny tokenizers of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, a few merges, two special tokens, one plain added token outside the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    merges = [("h", "e"), ("Ġ", "he"), ("ð", "Ł")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_tokens(["→漢"])
    return fast


def sentencepiece_tokenizer(*stages: Any) -> PreTrainedTokenizerFast:
    """Pieces with ▁ for a space, and a token per byte for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "a", "b", "é", "▁▁", "▁b", "<0xZZ>"]
    vocab = {token: i for i, token in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "▁"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = stages[0] if len(stages) == 1 else decoders.Sequence(list(stages))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _spaces_and_bytes() -> list[Any]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte level": byte_level_tokenizer,
    "sentencepiece": lambda: sentencepiece_tokenizer(*_spaces_and_bytes(), decoders.Strip(" ", 1, 0)),
    "sentencepiece without strip": lambda: sentencepiece_tokenizer(*_spaces_and_bytes()),
    "metaspace": lambda: sentencepiece_tokenizer(decoders.Metaspace()),
    "metaspace never": lambda: sentencepiece_tokenizer(decoders.Metaspace(prepend_scheme="never")),
    "metaspace and bytes, not read": lambda: sentencepiece_tokenizer(decoders.ByteFallback(), decoders.Metaspace()),
    "wordpiece, not read": lambda: sentencepiece_tokenizer(decoders.WordPiece()),
}
