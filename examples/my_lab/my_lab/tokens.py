"""A tokenizer: one token for each byte; `model.tokenizer.library=lab_bytes` chooses it."""

from gpt_pretrain import extend


@extend.tokenizer("lab_bytes")
def build(config: extend.Config):
    """256 bytes, and the token that ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer
