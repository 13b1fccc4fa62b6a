"""Text of this machine as tokens to train on: bytes, or words without a tokenizer's files.

The vocabulary is the text's commonest words; other words are spelled in bytes. GPT-2 splits text in the same way before
it merges bytes, so a vocabulary of its size needs no file of merges.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from gpt import STANDARD_LIBRARY, VOCABULARY, Shape, read_corpus
from torch import Tensor

PART = 1 << 16  # bytes of a part of the text; every tenth part is held out
KINDS = {".py", ".txt", ".md", ".rst"}

# Letters, digits or signs, with the blank before them; else blanks, of which the last one stays for the next word.
_WORD = re.compile(rb" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def commonest(text: bytes, vocabulary: int) -> list[bytes]:
    """List each token's bytes: the 256 bytes, then the commonest words of `text`, at most `vocabulary` in all."""
    counts = Counter(word for word in _WORD.findall(text) if len(word) > 1)
    return [bytes([byte]) for byte in range(256)] + [word for word, _ in counts.most_common(vocabulary - 256)]


def encode(text: bytes, spelled: list[bytes]) -> Tensor:
    """Return the tokens of `text` as int32, by the list of :func:`commonest`."""
    tokens, numbers = array("i"), {word: number for number, word in enumerate(spelled)}
    for word in _WORD.findall(text):
        number = numbers.get(word)
        if number is None:
            tokens.extend(word)  # a token for each byte
        else:
            tokens.append(number)
    return torch.frombuffer(tokens, dtype=torch.int32)


def files_of(*places: Path) -> list[Path]:
    """List the places that are files, and the text files of folders in name order, without site-packages."""
    files = []
    for place in places:
        inside = (path for path in sorted(place.rglob("*")) if path.suffix in KINDS and path.is_file())
        texts = [path for path in inside if "site-packages" not in path.relative_to(place).parts]
        files += [place] if place.is_file() else texts
    return files


class Text:
    """Training tokens and held-out tokens on a device, from at most `limit` bytes of text.

    `vocabulary`: 256 for bytes, or the most tokens there may be. `place`: a text file or a folder; None for the sources
    of Python's standard library, and of torch if tokens are words, which need more text. A ValueError says that the
    held-out tenth has no window of `context` tokens.
    """

    def __init__(self, vocabulary: int, context: int, limit: int, place: Path | None, device: torch.device):
        places = [place] if place else [STANDARD_LIBRARY, Path(torch.__file__).parent]
        corpus = read_corpus(limit, files_of(*places) if place or vocabulary > VOCABULARY else None)
        parts = list(enumerate(corpus.split(max(1, min(PART, len(corpus) // 10)))))
        halves = [torch.cat([part for at, part in parts if (at % 10 == 9) == held_out]) for held_out in (False, True)]
        self.bytes = [len(half) for half in halves]
        if vocabulary > VOCABULARY:
            texts = [half.numpy().tobytes() for half in halves]
            words = commonest(texts[0], vocabulary)  # of the training text alone
            halves = [encode(text, words) for text in texts]
        self.tokens = [len(half) for half in halves]
        if self.tokens[1] <= context:
            raise ValueError(f"{place or 'the text'}: {len(corpus)} bytes are too few for windows of {context} tokens")
        self.train, self.held = (half.to(device) for half in halves)


def batches(text: Tensor, shape: Shape, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets one ahead) of random windows, cut on the device, so that no step waits for a copy."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - shape.context, (count, shape.batch, 1), generator=generator).to(text.device)
    window = torch.arange(shape.context + 1, device=text.device)
    for start in starts:
        chunk = text[start + window].long()
        yield chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()
