"""Text of this machine as tokens to train on: bytes, or words that nobody has to bring a tokenizer for.

Words are the commonest of the text; what is no such word is spelled in bytes. GPT-2 splits a text alike before it
merges bytes: a vocabulary as large as its own needs no file of merges.
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

PART = 1 << 16  # bytes of text, of which every tenth part is held out
KINDS = {".py", ".txt", ".md", ".rst"}

# Letters, digits or signs, with the blank before them; else blanks, of which the last one stays for the next word.
_WORD = re.compile(rb" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def commonest(text: bytes, vocabulary: int) -> list[bytes]:
    """What each token spells: the 256 bytes, then words of `text`, the commonest first, `vocabulary` in all at most."""
    counted = Counter(word for word in _WORD.findall(text) if len(word) > 1)
    return [bytes([byte]) for byte in range(256)] + [word for word, _ in counted.most_common(vocabulary - 256)]


def encode(text: bytes, spelled: list[bytes]) -> Tensor:
    """Tokens of `text` as int32, by what :func:`commonest` returned."""
    tokens, numbers = array("i"), {word: number for number, word in enumerate(spelled)}
    for word in _WORD.findall(text):
        number = numbers.get(word)
        if number is None:
            tokens.extend(word)  # a token for each byte
        else:
            tokens.append(number)
    return torch.frombuffer(tokens, dtype=torch.int32)


def files_of(*places: Path) -> list[Path]:
    """The places that are files, and the text files of the folders in name order, without packages installed there."""
    found = []
    for place in places:
        inside = (path for path in sorted(place.rglob("*")) if path.suffix in KINDS and path.is_file())
        kept = [path for path in inside if "site-packages" not in path.relative_to(place).parts]
        found += [place] if place.is_file() else kept
    return found


class Text:
    """Tokens to train on and tokens that are held out, on a device.

    Args:
        vocabulary: 256 for bytes, or how many tokens there may be.
        limit: bytes that are read at most.
        place: a text file or a folder; None for the sources of Python's standard library, and of torch where tokens are
            words, which take more.
    Raises:
        ValueError: the held-out tenth holds no window of `context` tokens.
    """

    def __init__(self, vocabulary: int, context: int, limit: int, place: Path | None, device: torch.device):
        places = [place] if place else [STANDARD_LIBRARY, Path(torch.__file__).parent]
        all_of_it = read_corpus(limit, files_of(*places) if place or vocabulary > VOCABULARY else None)
        parts = list(enumerate(all_of_it.split(max(1, min(PART, len(all_of_it) // 10)))))
        halves = [torch.cat([part for at, part in parts if (at % 10 == 9) == held]) for held in (False, True)]
        self.bytes = [len(half) for half in halves]
        if vocabulary > VOCABULARY:
            written = [half.numpy().tobytes() for half in halves]
            spelled = commonest(written[0], vocabulary)
            halves = [encode(each, spelled) for each in written]
        self.tokens = [len(half) for half in halves]
        if self.tokens[1] <= context:
            raise ValueError(
                f"{place or 'the text'}: {len(all_of_it)} bytes are too few for windows of {context} tokens"
            )
        self.train, self.held = (half.to(device) for half in halves)


def batches(text: Tensor, shape: Shape, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows, drawn on the device, so that no step waits for a copy: tokens, and targets one ahead."""
    dice = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - shape.context, (count, shape.batch, 1), generator=dice).to(text.device)
    window = torch.arange(shape.context + 1, device=text.device)
    for start in starts:
        chunk = text[start + window].long()
        yield chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()
