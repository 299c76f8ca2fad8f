"""A tokenizer whose tokens are given byte strings, so that a test can cut a text wherever it likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from onekv.models.text import Text

# The alphabet of byte-level vocabularies, made anew: bytes without a glyph of their own are U+0100 and on.
_GLYPHLESS = [b for b in range(256) if not (0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE)]
GLYPHS = [chr(0x100 + _GLYPHLESS.index(b)) if b in _GLYPHLESS else chr(b) for b in range(256)]


def scripted_text(tokens: Sequence[bytes]) -> tuple[Text, list[int]]:
    """A byte-level tokenizer with a token per byte, "</s>" (id 256), and these tokens; and the ids of these."""
    names = ["".join(GLYPHS[b] for b in token) for token in tokens]
    vocab = {glyph: i for i, glyph in enumerate([*GLYPHS, "</s>"])}
    for name in names:
        vocab.setdefault(name, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return Text(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")), [vocab[name] for name in names]


@pytest.fixture(scope="session")
def scripted() -> Callable[[Sequence[bytes]], tuple[Text, list[int]]]:
    """Builds such a tokenizer."""
    return scripted_text
