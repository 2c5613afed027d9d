"""A process that tokenizes: it answers batches of text with token ids until its input ends.

`encoders.py` starts it by its path. It imports nothing of ours: torch and megatron-core would cost each process seconds
and hundreds of MiB. Messages are Python's `marshal`, which runs no code and which both ends share.
"""

import array
import marshal
import signal
import sys
from collections.abc import Sequence

from tokenizers import Tokenizer


def encode(tokenizer: Tokenizer, context: str, text: str) -> list[int]:
    """Token ids of a text that follows `context` in its document.

    The library tokenizes both, so that what it adds to the start of a text comes before the context, and the tokens of
    the context are dropped.
    """

    # One text at a time: the library's own batches take more time and memory.
    def ids(of: str) -> list[int]:
        return tokenizer.encode_batch_fast([of], add_special_tokens=False)[0].ids

    if not context:
        return ids(text)
    before, both = ids(context), ids(context + text)
    # They differ only where a word is longer than all that may come in one piece (`tokenizing.joined`).
    return both[len(before) :] if both[: len(before)] == before else ids(text)


def answer(
    tokenizer: Tokenizer, parts: Sequence[tuple[str, str, bool]], typecode: str, eod: int
) -> tuple[bytes, list[int]]:
    """Token ids of all parts (context, text, whether a document ends with it), and how many there are of each.

    `eod` follows each document, but no empty one.
    """
    tokens, counts = array.array(typecode), []
    for context, text, ends_document in parts:
        ids = encode(tokenizer, context, text)
        if ends_document and (ids or context):
            ids.append(eod)
        tokens.extend(ids)
        counts.append(len(ids))
    return tokens.tobytes(), counts


def main() -> None:
    """Reads the tokenizer and then batches from standard input; a `str` as an answer is an error."""
    # A launcher signals all processes of a job. Ours end with the one that started them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        content, typecode, eod = marshal.load(requests)
        tokenizer = Tokenizer.from_str(content)
        # Text that spells a special token is text.
        tokenizer.encode_special_tokens = True
        while True:
            parts = marshal.load(requests)
            try:
                found: str | tuple[bytes, list[int]] = answer(tokenizer, parts, typecode, eod)
            except Exception as error:  # the library raises plain Exception, e.g. without an unknown token
                found = f"{type(error).__name__}: {error}"
            marshal.dump(found, answers)
            answers.flush()
    except (EOFError, BrokenPipeError):
        # Nobody is left to read an answer; without this, Python would try to flush it.
        sys.stdout = None


if __name__ == "__main__":
    main()
