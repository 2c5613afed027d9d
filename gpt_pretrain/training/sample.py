"""The text sample at the end of a run: what it may start from, and what the model makes of it."""

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.corpus import Corpus
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.user_buffers import without_user_buffers
from gpt_pretrain.training.generation import generate_tokens


def check_prompt(config: Config, corpus: Corpus) -> None:
    """The sample comes last: what it cannot start from is refused first.

    Raises:
        ConfigError: `sample.prompt` has no tokens, or leaves the model none to write.
    """
    if corpus.tokenizer is None or config.sample.max_new_tokens == 0:
        return
    num_tokens, limit = len(corpus.tokenizer.encode(config.sample.prompt)), config.model.encoder_seq_length
    if not 0 < num_tokens < limit:
        raise ConfigError(
            [
                f"sample.prompt={config.sample.prompt!r} is {num_tokens} tokens, and the model continues 1 to "
                f"{limit - 1} (model.encoder_seq_length={limit}); give another, or sample.max_new_tokens=0"
            ]
        )


def write_sample(config: Config, corpus: Corpus, model: Model) -> str | None:
    """What the model writes after `sample.prompt`, None where it shall not or has no text; every rank takes part."""
    sample, tokenizer = config.sample, corpus.tokenizer
    if tokenizer is None or sample.max_new_tokens == 0:
        return None
    with model.gathered_parameters(), without_user_buffers(model.gpt_chunks):
        tokens = generate_tokens(
            model.chunks,
            config.model,
            tokenizer.encode(sample.prompt),
            vocab_size=tokenizer.vocab_size,
            max_new_tokens=sample.max_new_tokens,
            temperature=sample.temperature,
            end_token=tokenizer.eod,
            seed=config.model.seed,
        )
    return tokenizer.decode(tokens)
