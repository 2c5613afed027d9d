"""`gpt_pretrain.translate` from Megatron-LM: values worked out by hand, and options that must not get lost."""

import shlex

import pytest
from omegaconf import OmegaConf

from gpt_pretrain.translate.formats import Given, translate_megatron_lm
from gpt_pretrain.translate.megatron_arguments import megatron_parser
from gpt_pretrain.translate.megatron_options import ROWS
from tests.translations import translate

# The least that Megatron-LM starts with.
SMALL = shlex.split(
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 4 --global-batch-size 64 --train-iters 1000 --lr 1e-4 --vocab-size 50257 --mock-data --bf16"
)


def test_llama3_8b_in_fp8(capsys):
    done = translate(capsys, "megatron_llama3_8b_fp8.sh")

    assert done.code == 0, done.report
    assert done.choices == {"model": "llama3_8b", "parallelism": "dp", "fp8": "delayed", "data": "mock"}
    assert done.keys == {
        "name": "megatron_llama3_8b_fp8",
        "model.rotary_base": 1000000,
        # Not given, and Megatron-LM's default.
        "model.normalization": "layernorm",
        "model.init_method_std": 0.0134,
        "model.global_batch_size": 128,
        "model.grad_reduce_in_fp32": False,
        "model.fp8_params": True,
        "model.cross_entropy_loss_fusion": True,
        "model.data.num_workers": 1,
        "model.optim.lr": 0.00015,
        "model.optim.decoupled_lr": 5e-4,
        # 3,906,252 × 8,192; 1,949,218,748 × 8,192; 1,953,125,000 // 128.
        "model.optim.sched.warmup_tokens": 32_000_016_384,
        "model.optim.sched.decay_tokens": 15_967_999_983_616,
        "model.optim.sched.min_lr": 1e-5,
        "trainer.devices": 8,
        "trainer.num_nodes": 1,
        "trainer.precision": "bf16",
        "trainer.max_steps": 15258789,
        "trainer.max_time": "00:03:55:00",
        "trainer.log_every_n_steps": 1,
        "trainer.val_check_interval": 100,
        "trainer.limit_val_batches": 32,
        "trainer.validate_at_start": False,
        "trainer.hang_timeout": 3600,
        "checkpoint.save_interval": 1000,
        "checkpoint.save_interval_minutes": None,
        "checkpoint.async_save": False,
    }
    lost = done.section("without counterpart")
    assert [line.split()[0].rstrip(":") for line in lost] == ["--apply-layernorm-1p", "--decoupled-min-lr"]
    # A reader of the file alone knows it, too.
    assert "#   --apply-layernorm-1p: " in done.text
    assert "  init_method_std: 0.0134  # --init-method-std 0.0134\n" in done.text


def test_llama3_8b_on_data_of_ones_own(capsys):
    given = ("--env", "2=tokenizer", "--env", "3=/data/web_text_document")
    done = translate(capsys, *given, "megatron_llama3_8b_fp8.sh", "--train-samples", "12800000")

    assert done.code == 0, done.report
    assert done.choices["data"] == "mmap"
    assert done.keys["model.data.data_prefix"] == ["/data/web_text_document"]
    assert done.keys["model.data.splits_string"] == "99,1,0"
    # Arguments count after the script's.
    assert done.keys["trainer.max_steps"] == 100_000
    assert any(line.strip().startswith("model.tokenizer.model: ") for line in done.section("not known from there"))


def test_gpt3_175b(capsys):
    done = translate(capsys, "megatron_gpt3_175b.sh")

    # The script is started with the paths of the data.
    assert done.code == 3
    assert "model.data.data_prefix" in done.section("our own check refuses")[0]
    assert done.choices == {"model": "gpt3_175b", "data": "mmap"}
    assert done.keys["model.tensor_model_parallel_size"] == 8
    assert done.keys["model.pipeline_model_parallel_size"] == 16
    # 50,257 tokens padded to a multiple of 128 × TP 8: 51,200 rows.
    assert done.keys["model.make_vocab_size_divisible_by"] == 1024
    assert done.keys["model.optim.sched.warmup_steps"] == 430
    assert done.keys["model.optim.sched.decay_steps"] == 430_000
    assert (done.keys["model.hidden_dropout"], done.keys["model.attention_dropout"]) == (0.1, 0.1)
    assert done.keys["trainer.precision"] == "bf16"
    lost = " ".join(done.section("without counterpart"))
    assert "--fp16" in lost
    assert done.keys["model.rampup_batch_size"] == [16, 16, 5859375]
    assert "--rampup-batch-size" not in lost
    unknown = " ".join(done.section("not known from there"))
    assert "--data-path $4: only the environment knows 4; give --env 4=…" in unknown

    done = translate(capsys, "--env", "4=corpus_text_document", "megatron_gpt3_175b.sh")
    assert done.code == 0, done.report
    assert done.keys["model.data.data_prefix"] == ["corpus_text_document"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--global-batch-size 64 --rampup-batch-size 16 16 4800 --lr-warmup-samples 100 --lr-decay-samples 60000",
            {"model.rampup_batch_size": [16, 16, 4800], "warmup_tokens": 102_400, "decay_tokens": 61_440_000},
        ),
        (
            "--step-batch-size-schedule '0:16 1M:64' --lr-warmup-fraction 0.01 --lr-decay-style WSD "
            "--lr-wsd-decay-samples 10000",
            {
                "model.global_batch_size": 64,
                "model.step_batch_size_schedule": "0:16 1M:64",
                "warmup_tokens": 655_360,
                "wsd_decay_tokens": 10_240_000,
            },
        ),
    ],
)
def test_samples_of_a_run_whose_batch_grows_become_tokens(words, expected, capsys):
    small = SMALL[: SMALL.index("--global-batch-size")] + SMALL[SMALL.index("--lr") :]
    done = translate(capsys, *small, "--train-samples", "64000", *shlex.split(words))

    assert done.code == 0, done.report
    assert (done.keys["trainer.max_steps"], done.keys["trainer.max_tokens"]) == (None, 65_536_000)
    sched = {key.removeprefix("model.optim.sched."): value for key, value in done.keys.items()}
    assert {key: sched.get(key) for key in expected} == expected
    assert not [key for key in sched if key in ("warmup_steps", "decay_steps", "wsd_decay_steps")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # Steps of 64 samples and 1,024 tokens.
        ("--lr-decay-samples 64000 --lr-warmup-samples 6400", {"decay_steps": 1000, "warmup_steps": 100}),
        (
            "--lr-decay-samples 64001 --lr-warmup-samples 100",
            {"decay_tokens": 65_537_024, "warmup_tokens": 102_400},
        ),
        ("--lr-decay-samples 60000 --lr-warmup-fraction 0.01", {"decay_tokens": 61_440_000, "warmup_tokens": 614_400}),
        # All samples of the run, of which 36 make no step; 0.001 of them.
        ("--train-samples 64036 --lr-warmup-fraction 0.001", {"decay_tokens": 65_572_864, "warmup_tokens": 65_573}),
        (
            "--lr-decay-style WSD --lr-wsd-decay-samples 1000 --lr-warmup-samples 64",
            {"wsd_decay_tokens": 1_024_000, "warmup_steps": 1},
        ),
    ],
)
def test_phases_in_samples_become_tokens_where_they_end_within_a_step(words, expected, capsys):
    small = SMALL[: SMALL.index("--global-batch-size")] + SMALL[SMALL.index("--lr") :]
    done = translate(capsys, *small, "--global-batch-size", "64", "--train-samples", "64000", *shlex.split(words))

    assert done.code == 0, done.report
    assert done.keys["trainer.max_steps"] == 1000
    sched = {key.removeprefix("model.optim.sched."): value for key, value in done.keys.items()}
    lengths = {key: value for key, value in sched.items() if key.endswith(("_steps", "_tokens")) and "." not in key}
    assert {key: value for key, value in lengths.items() if value is not None} == expected


def test_mixtral_8x7b(capsys):
    done = translate(capsys, "megatron_mixtral_8x7b.sh")

    assert done.code == 0, done.report
    assert done.choices == {"model": "mixtral_8x7b", "parallelism": "dp", "data": "mmap"}
    assert done.keys["model.expert_model_parallel_size"] == 4
    assert done.keys["model.expert_tensor_parallel_size"] == 1
    # 32 layers / 2 stages / 8.
    assert done.keys["model.virtual_pipeline_model_parallel_size"] == 2
    assert done.keys["model.sequence_parallel"] is True
    assert done.keys["model.data.data_prefix"] == [0.7, "data/web_text_document", 0.3, "data/code_text_document"]
    assert done.keys["model.optim.betas"] == [0.9, 0.999]
    assert done.keys["trainer.limit_val_batches"] == 10
    # 32,000 is a multiple of 128 × 2.
    assert "model.make_vocab_size_divisible_by" not in done.keys
    assert done.keys["checkpoint.save_at_end"] is False
    assert "--moe-router-dtype" in " ".join(done.section("without counterpart"))
    assert "WANDB_API_KEY" in " ".join(done.section("read with care"))


def test_a_command_in_a_string_with_sharded_weights(capsys):
    done = translate(capsys, "megatron_slurm_fsdp.sbatch")

    assert done.code == 0, done.report
    assert done.choices == {"model": "llama2_7b", "parallelism": "fsdp", "fp8": "blockwise", "data": "mock"}
    assert (done.keys["trainer.devices"], done.keys["trainer.num_nodes"]) == (8, 2)
    sched = {key.rpartition(".")[2]: value for key, value in done.keys.items() if key.startswith("model.optim.sched.")}
    assert sched == {"name": "wsd", "warmup_steps": 100, "wsd_decay_steps": 200, "min_lr": 3e-5}
    assert done.keys["model.optim.weight_decay"] == 0.01
    assert done.keys["model.activations_checkpoint_granularity"] == "full"
    assert done.keys["model.gradient_accumulation_fusion"] is False
    assert done.keys["trainer.limit_val_batches"] == 0


def test_defaults_of_megatron_lm_that_differ_are_written_down(capsys):
    done = translate(capsys, *SMALL)

    assert done.code == 0, done.report
    assert done.choices["model"] == "gpt2_355m"
    assert done.keys["model.optim.weight_decay"] == 0.01
    assert done.keys["model.optim.betas"] == [0.9, 0.999]
    assert done.keys["model.optim.sched.name"] == "linear"
    assert (done.keys["model.optim.sched.warmup_steps"], done.keys["model.optim.sched.min_lr"]) == (0, 0.0)
    told = " ".join(done.section("Megatron-LM's defaults that differ from ours"))
    assert "--weight-decay 0.01 (Megatron-LM's default) → model.optim.weight_decay=0.01" in told
    # GPT-2's biases, LayerNorm, learned positions, tied embeddings and GELU's tanh form are its defaults.
    assert not {"model.normalization", "model.bias", "model.activation"} & done.keys.keys()


@pytest.mark.parametrize(
    ("words", "preset", "keys"),
    [
        # Megatron-LM's own default: the newest amax of a history of one.
        ("--fp8-format hybrid", "delayed", {"fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"}),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "tensorwise", {}),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8", {}),
        ("--fp8-format hybrid --fp8-recipe blockwise", "blockwise", {"fp8_hybrid": True}),
        (
            "--fp8-format e4m3 --fp8-amax-history-len 32 --fp8-amax-compute-algo max",
            "delayed",
            {"fp8_e4m3": True, "fp8_amax_history_len": 32},
        ),
    ],
)
def test_recipes_of_fp8(capsys, words, preset, keys):
    done = translate(capsys, *SMALL, *words.split())

    assert done.code == 0, done.report
    assert done.choices["fp8"] == preset
    found = {key.removeprefix("model."): value for key, value in done.keys.items() if key.startswith("model.fp8")}
    assert found == keys


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # int(4 · 1024 · 2 / 3 / 64) · 64
        ("--swiglu", {"ffn_hidden_size": 2688, "activation": "swiglu"}),
        ("--no-bias-gelu-fusion", {"activation": "gelu"}),
        ("--disable-bias-linear --add-qkv-bias", {"bias": False, "qkv_bias": True, "activation": "gelu"}),
        ("--group-query-attention --num-query-groups 4", {"num_query_groups": 4}),
        ("--use-rotary-position-embeddings --use-rope-scaling", {"rope_scaling_factor": 8.0}),
        ("--use-rotary-position-embeddings --no-rope-freq 4", {"no_rope_freq": 4}),
        ("--window-size 4095,0", {"window_size": [4095, 0]}),
        (
            "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 512",
            {
                "rope_scaling_factor": 4.0,
                "yarn_original_max_position_embeddings": 512,
                "position_embedding_type": "rope",
            },
        ),
        ("--window-size 7,0 --window-attn-skip-freq 3", {"window_attn_skip_freq": [1, 1, 0] * 8}),
        ("--window-size 7,0 --window-attn-skip-freq 1", {"window_size": "missing"}),
        ("--use-rotary-position-embeddings --no-rope-freq ([0]*1+[1]*1)*6", {"no_rope_freq": 2}),
        ("--recompute-activations", {"activations_checkpoint_granularity": "selective"}),
        ("--norm-epsilon 1e-6", {"layernorm_epsilon": 1e-6}),
        ("--layernorm-epsilon 1e-6", {"layernorm_epsilon": 1e-6}),
        ("--untie-embeddings-and-output-weights", {"share_embeddings_and_output_weights": False}),
        ("--fp8-hybrid --fp8-recipe tensorwise", {}),
        ("--use-precision-aware-optimizer --exp-avg-dtype fp8", {"optim.exp_avg_dtype": "fp8"}),
        ("--reset-position-ids --reset-attention-mask", {}),
        ("--tensor-model-parallel-size 2", {"make_vocab_size_divisible_by": 256}),
    ],
)
def test_options_of_the_model(capsys, words, expected):
    done = translate(capsys, *SMALL, *words.split())

    found = {key.removeprefix("model."): value for key, value in done.keys.items()}
    assert {name: found.get(name, "missing") for name in expected} == expected


def test_layers_that_are_not_here_make_another_model(capsys):
    done = translate(capsys, *SMALL, "--multi-latent-attention", "--fp32-residual-connection")

    assert done.code == 3
    (problem,) = done.section("our own check refuses")
    assert "--multi-latent-attention" in problem
    assert "--fp32-residual-connection" not in problem


def test_a_script_that_only_holds_options(capsys, tmp_path):
    path = tmp_path / "conf.sh"
    path.write_text(f'MODEL_ARGS=" \\\n {" ".join(SMALL)} \\\n --swiglu "\nexport X=1\n')
    done = translate(capsys, str(path))

    assert done.keys["model.activation"] == "swiglu"
    assert "MODEL_ARGS" in " ".join(done.section("read with care"))


def test_another_program_than_pretrain_gpt_is_told(capsys, tmp_path):
    path = tmp_path / "bert.sh"
    path.write_text(f"torchrun --nproc_per_node 1 pretrain_bert.py {' '.join(SMALL)}\n")

    assert "pretrain_bert.py" in " ".join(translate(capsys, str(path)).section("read with care"))


def some_value(action):
    """A value of an option that is not its default."""
    if action.nargs == 0:
        return []
    if action.choices:
        value = next(str(getattr(each, "name", each)) for each in action.choices if each != action.default)
    elif action.type in (int, float):
        value = "3"
    else:
        value = "x"
    return [value] * (action.nargs if isinstance(action.nargs, int) else 1)


OPTIONS = {action.dest: action for action in megatron_parser()._actions}


def test_every_row_is_an_option_of_the_wheel():
    # Those that end in a star are beginnings of names.
    assert {name for name in ROWS if not name.endswith("*")} - OPTIONS.keys() == set()


def test_no_option_is_dropped_silently():
    silent = []
    for action in OPTIONS.values():
        if action.type not in (None, int, float, str, bool):
            # Of their own forms; a test of the value is the parser's.
            continue
        words = [action.option_strings[0], *some_value(action)]
        translation = translate_megatron_lm(Given(files=(), words=[*SMALL, *words], environment={}))
        if not any(" ".join(words) in text for text in translation.texts()):
            silent.append(" ".join(words))
    assert silent == []
    assert len(OPTIONS) > 800


def test_what_is_wrong_is_told_by_option_and_value(capsys):
    from gpt_pretrain.translate.__main__ import main

    assert main([*SMALL, "--lr-decay-style", "steps"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "--lr-decay-style" in message
    assert "'steps'" in message


def test_the_yaml_is_what_the_loader_reads(capsys, tmp_path):
    from gpt_pretrain.config.source import Source
    from gpt_pretrain.rules.jobs import load_config

    done = translate(capsys, "megatron_slurm_fsdp.sbatch")
    place = tmp_path / "experiment" / "mine.yaml"
    place.parent.mkdir()
    place.write_text(done.text)
    config = load_config(["experiment=mine"], Source(config_dir=tmp_path))

    assert config.model.data_parallel_sharding_strategy.name == "optim_grads_params"
    assert config.model.fp8_recipe.name == "blockwise"
    assert OmegaConf.create(done.text).name == config.name
    # A later choice of FP8 finds no key in its way.
    assert load_config(["experiment=mine", "fp8=none"], Source(config_dir=tmp_path)).model.fp8 is False


@pytest.mark.parametrize("save", [[], ["--save", "checkpoints/mine"]])
def test_a_checkpoint_to_go_on_from_is_named_with_its_import(capsys, save):
    """Where Megatron-LM also saves, its run may resume or continue another's: both are told."""
    done = translate(capsys, *SMALL, "--load", "checkpoints/mine", *save)
    told = " ".join(done.text.replace("#", " ").split())
    assert "checkpoint.init_from" in told
    assert "python -m gpt_pretrain.import_megatron" in told
    if save:
        assert "path=checkpoints/mine out=start" in told


def test_the_import_of_a_checkpoint_has_the_number_of_tokens(capsys):
    """The checkpoint's rows are padded, and a run with the tokenizer's number would refuse it."""
    there = ("--load", "checkpoints/mine", "--save", "checkpoints/mine")
    done = translate(capsys, *SMALL, *there, "--vocab-size", "500")
    told = " ".join(done.text.replace("#", " ").split())
    assert "path=checkpoints/mine out=start 'overrides=[model.vocab_size=500]'" in told


def test_a_number_of_tokens_that_is_missing_is_asked_for_as_an_option(capsys):
    sizes = ("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4")
    done = translate(capsys, *sizes, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tok")
    assert "--vocab-size N" in done.text


@pytest.mark.parametrize(("first", "told"), [("0", True), ("5e-4", False)])
def test_rates_that_are_a_step_ahead_are_told(first, told):
    """A warmup of 4 steps from 5e-4 to 1e-3 begins a step earlier, at 3.75e-4; one from 0 cannot."""
    options = ("--train-iters", "20", "--lr", "1e-3", "--lr-warmup-iters", "4", "--lr-warmup-init", first)
    translation = translate_megatron_lm(Given(files=(), words=[*SMALL, *options], environment={}))
    assert any("one step ahead" in note for note in translation.notes) is told


def test_abbreviations_are_not_guessed():
    translation = translate_megatron_lm(Given(files=(), words=[*SMALL, "--hidden-dro", "0.3"], environment={}))
    assert [lost.setting for lost in translation.lost if "hidden-dro" in lost.setting] == ["--hidden-dro 0.3"]
