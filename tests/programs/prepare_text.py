"""Tokenizes a folder's text into a cache: CACHE PATTERN [SLOWNESS_S [MAX_FILE_BYTES]].

Prints `PREFIX`. SLOWNESS_S is slept at each piece of text, so that a test can interfere; MAX_FILE_BYTES is the size at
which the system refuses to grow a file, as a full disk would.
"""

import resource
import sys
import time
from pathlib import Path

from gpt_pretrain.config.choices import TokenizerLibrary
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import TokenizerConfig
from gpt_pretrain.data.cache import Progress
from gpt_pretrain.data.sources.text import FileSource
from gpt_pretrain.data.tokenizing import tokenize_source


class SlowSource(FileSource):
    slowness_s = 0.0

    def read_file(self, path):
        for piece in super().read_file(path):
            time.sleep(self.slowness_s)
            yield piece


def main(cache, pattern, slowness_s="0", max_file_bytes=None):
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(max_file_bytes), int(max_file_bytes)))
    source = SlowSource([pattern], "text")
    source.slowness_s = float(slowness_s)
    tokenizer = TokenizerConfig(library=TokenizerLibrary.bpe, model=None, vocab_size=300, eod_token=None)
    try:
        with Progress(show=True) as progress:
            prefix, _ = tokenize_source(source, tokenizer, Path(cache), progress, name="text")
    except UserError as error:
        sys.exit(f"UserError: {error}")
    print(prefix, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
