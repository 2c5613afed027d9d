"""Text from a checkpoint: the tokens that `transformers` generates from its export, whatever saved it."""

import shutil
from dataclasses import asdict, replace

import pytest
import torch
import transformers

from gpt_pretrain.checkpoint.saved_model import open_checkpoint
from gpt_pretrain.config.choices import CudaGraphImpl
from gpt_pretrain.export import main as export_main
from gpt_pretrain.generate import GenerateArguments, main
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.training.generation import continuations
from gpt_pretrain.training.loaded_model import inference_config, loaded_model
from tests.emulated_training import emulate
from tests.forked_runs import fork_ranks
from tests.saved_models import FAMILIES, save_model, saved_model, small_tokenizer

PROMPT = "def function("


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Path of a checkpoint of a run with a tokenizer."""
    with saved_model(tmp_path_factory.mktemp("run"), *FAMILIES["llama"], tokenizer=small_tokenizer()) as saved:
        return saved.path


def texts(path, **arguments):
    given = asdict(GenerateArguments(checkpoint=str(path), prompt=PROMPT, **arguments))
    # The command imports them before.
    del given["extensions"]
    return list(continuations(**given))


def greedy_by_transformers(hf, num_tokens):
    """The text of the likeliest tokens, computed by `transformers`."""
    tokenizer = small_tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype="auto").eval()
    tokens = torch.tensor([tokenizer.encode(PROMPT)])
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(tokens).logits[0, -1, : tokenizer.vocab_size]
        tokens = torch.cat([tokens, logits.argmax().view(1, 1)], dim=1)
        if tokens[0, -1] == tokenizer.eod:
            break
    return tokenizer.decode(tokens[0, len(tokenizer.encode(PROMPT)) :].tolist())


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_likeliest_text_is_that_of_transformers(family, tmp_path):
    with saved_model(tmp_path, *FAMILIES[family], tokenizer=small_tokenizer()) as saved:
        pass
    assert export_main([f"checkpoint={saved.path}", f"out={tmp_path / 'hf'}"]) == 0
    (text,) = texts(saved.path, temperature=0.0, max_new_tokens=12)
    assert len(text) > 4
    assert text == greedy_by_transformers(tmp_path / "hf", 12)


def test_layout_of_the_run_does_not_matter(tmp_path):
    """Saved by two ranks of TP and SP, read by one process."""
    layout = [*FAMILIES["llama"], "parallelism=tp2_sp"]
    done = fork_ranks(2, ["tests/programs/save_layout.py", str(tmp_path), "tokenizer", *layout], timeout_s=60)
    assert done.returncode == 0, done.stderr[-4000:]
    path = tmp_path / "checkpoints" / "step_00000001"
    assert export_main([f"checkpoint={path}", f"out={tmp_path / 'hf'}"]) == 0
    (text,) = texts(path, temperature=0.0, max_new_tokens=12)
    assert text == greedy_by_transformers(tmp_path / "hf", 12)


def test_experts_write_what_two_ranks_shared_out(tmp_path):
    """Saved by ranks with two experts each, read by one process that has all four."""
    experts = [*FAMILIES["llama"], "model.num_moe_experts=4", "model.init_method_std=0.2"]
    # The seed's weights do not depend on the layout.
    (tmp_path / "one").mkdir()
    save_model(tmp_path / "one", *experts, tokenizer=small_tokenizer())
    shared = [*experts, "parallelism=ep2", "model.global_batch_size=2"]
    done = fork_ranks(2, ["tests/programs/save_layout.py", str(tmp_path), "tokenizer", *shared], timeout_s=60)
    assert done.returncode == 0, done.stderr[-4000:]
    (text,) = texts(tmp_path / "checkpoints" / "step_00000001", temperature=0.0, max_new_tokens=12)
    assert texts(tmp_path / "one" / "checkpoints" / "step_00000001", temperature=0.0, max_new_tokens=12) == [text]
    assert len(text) > 4
    assert export_main([f"checkpoint={tmp_path / 'checkpoints' / 'step_00000001'}", f"out={tmp_path / 'hf'}"]) == 0
    assert text == greedy_by_transformers(tmp_path / "hf", 12)


def test_fp8_run_writes_in_bf16(tmp_path):
    fp8 = emulate("delayed", "model.vocab_size=384", "trainer.precision=bf16")
    with saved_model(tmp_path, *FAMILIES["llama"], *fp8, tokenizer=small_tokenizer()) as saved:
        pass
    assert export_main([f"checkpoint={saved.path}", f"out={tmp_path / 'hf'}"]) == 0
    (text,) = texts(saved.path, temperature=0.0, max_new_tokens=4)
    # In BF16 two libraries round differently: the first tokens are far apart enough.
    assert text[:1] == greedy_by_transformers(tmp_path / "hf", 4)[:1]


def test_what_a_runs_gpus_did_faster_is_not_asked_of_this_machine(llama):
    saved = open_checkpoint(llama)
    model = replace(
        saved.config.model,
        tensor_model_parallel_size=2,
        tp_comm_overlap=True,
        overlap_moe_expert_parallel_comm=True,
        compile=True,
        cuda_graph_impl=CudaGraphImpl.local,
    )
    trainer = replace(saved.config.trainer, deterministic=True)
    config = inference_config(replace(saved, config=replace(saved.config, model=model, trainer=trainer)))
    assert config == inference_config(saved)
    with loaded_model(saved, config, read_launch({})) as loaded:
        assert not loaded.transformer_config.tp_comm_overlap
        assert loaded.transformer_config.cuda_graph_impl == "none"


def test_draws_follow_the_seed(llama):
    first, second = texts(llama, temperature=1.5, max_new_tokens=12, num_samples=2, seed=5)
    assert first != second
    assert texts(llama, temperature=1.5, max_new_tokens=12, seed=6) == [second]
    assert texts(llama, temperature=1.5, max_new_tokens=12, seed=5) == [first]


def test_top_k_leaves_the_likeliest(llama):
    assert texts(llama, temperature=1.5, top_k=1, max_new_tokens=12) == texts(llama, temperature=0.0, max_new_tokens=12)
    drawn = {texts(llama, temperature=50.0, top_k=3, max_new_tokens=1, seed=seed)[0] for seed in range(12)}
    assert 1 < len(drawn) <= 3
    assert len({texts(llama, temperature=50.0, max_new_tokens=1, seed=seed)[0] for seed in range(12)}) > 3


def test_command_prints_the_prompt_and_what_follows(llama):
    arguments = [f"checkpoint={llama}", f"prompt={PROMPT}", "max_new_tokens=8", "temperature=0"]
    done = fork_ranks(1, ["-m", "gpt_pretrain.generate", *arguments], timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{PROMPT}{texts(llama, temperature=0.0, max_new_tokens=8)[0]}\n"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompt=a", "temperature=-1"], "temperature=-1.0 is negative; use 0 for the likeliest token, or more"),
        (["prompt=a", "top_k=0"], "top_k=0 is not positive; use 1 or more or null"),
        (["prompt=a", "max_new_tokens=0"], "max_new_tokens=0 is not positive; use 1 or more"),
        (
            ["prompt=a", "num_samples=2", "temperature=0"],
            "num_samples=2 would be the same text with temperature=0; use 1, or a temperature",
        ),
        (
            ["prompt="],
            "prompt='' is 0 tokens, and the model continues 1 to 31 (model.encoder_seq_length=32); give another",
        ),
        (["promt=a"], "promt is not a key of this command; did you mean prompt?"),
        (["prompt=a", "seed=one"], "seed=one is not an integer"),
    ],
)
def test_mistakes_are_told(arguments, message, llama, capsys):
    assert main([f"checkpoint={llama}", *arguments]) == 2
    assert f"error: {message}\n" in capsys.readouterr().err


def test_model_of_token_ids_has_no_text(tmp_path, capsys):
    with saved_model(tmp_path, *FAMILIES["llama"]) as saved:
        pass
    assert main([f"checkpoint={saved.path}", "prompt=a"]) == 2
    assert "is of a model without a tokenizer" in capsys.readouterr().err


def test_damaged_checkpoint_is_refused(llama, tmp_path, capsys):
    run = shutil.copytree(llama.parents[1], tmp_path / "run")
    shard = next((run / "checkpoints" / llama.name).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main([f"checkpoint={shard.parent}", "prompt=a"]) == 2
    assert "is truncated" in capsys.readouterr().err
