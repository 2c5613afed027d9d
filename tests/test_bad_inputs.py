"""What users get wrong, and what they are told: exit code 2, `error: …` lines on stderr, no traceback, at once."""

# ruff: noqa: E501 -- a message stays on one line, so that it can be searched for.

import time

import pytest

from gpt_pretrain.commands.train import main
from tests.launching import REPOSITORY, run_ranks

MODELS = (
    "base, gpt2_124m, gpt2_1_5b, gpt2_355m, gpt3_175b, gpt3_1_3b, gpt3_6_7b, llama2_7b, llama3_70b, llama3_8b, "
    "mistral_7b, mixtral_8x7b, moe_small, qwen2_5_7b, tiny"
)
LAYOUT = "model.tensor_model_parallel_size=2 × model.pipeline_model_parallel_size=1 × model.context_parallel_size=1"

# Command line to the exact messages.
BAD_INPUTS = {
    "typo": (["model.hiden_size=256"], ["model.hiden_size is not a key; did you mean model.hidden_size?"]),
    "typo behind +": (["+trainer.max_step=5"], ["trainer.max_step is not a key; did you mean trainer.max_steps?"]),
    "typo behind ++": (["++modle.fp8=True"], ["modle.fp8 is not a key; did you mean model.fp8?"]),
    "deleted key": (
        ["~model.seed"],
        ["~model.seed: model.seed cannot be removed, every run needs it; set it with model.seed=…"],
    ),
    "deleted group": (
        ["~optimizer"],
        ["~optimizer removes keys that a run needs; choose another option instead: optimizer=…"],
    ),
    "key in the wrong place": (["optim.lr=1e-3"], ["optim.lr is not a key; did you mean model.optim.lr?"]),
    "name of another code": (
        ["model.parallelism.tp=2"],
        ["model.parallelism.tp is not a key; did you mean model.tensor_model_parallel_size?"],
    ),
    "key without its section": (
        ["micro_batch_size=4"],
        ["micro_batch_size is not a key or a group; did you mean model.micro_batch_size?"],
    ),
    "unknown group": (["paralelism=dp"], ["paralelism is not a key or a group; did you mean parallelism?"]),
    "unknown option": (
        ["model=llama3_8"],
        [f"model=llama3_8: model has no option 'llama3_8'; did you mean llama3_8b?; known: {MODELS}"],
    ),
    "group with plus signs": (
        ["++model=tiny"],
        ["++model=tiny: a group's option is chosen without plus signs: model=tiny"],
    ),
    "group with one plus sign": (
        ["+fp8=delayed"],
        ["+fp8=delayed: a group's option is chosen without plus signs: fp8=delayed"],
    ),
    "optional group with a plus sign": (
        ["+experiment=smoke"],
        ["+experiment=smoke: a group's option is chosen without plus signs: experiment=smoke"],
    ),
    # Nothing about model.fp8=false, which nobody chose.
    "unknown option, and what goes with it": (
        ["fp8=delay", "model.fp8_emulate=true"],
        [
            "fp8=delay: fp8 has no option 'delay'; did you mean delayed?; known: blockwise, delayed, mxfp8, none, tensorwise"
        ],
    ),
    "unknown option in a sweep, and what goes with it": (
        ["-m", "fp8=delay,none", "model.fp8_emulate=true"],
        [
            "fp8=delay,none: fp8 has no option 'delay'; did you mean delayed?; known: blockwise, delayed, mxfp8, none, tensorwise"
        ],
    ),
    "typo, and what goes with it": (
        ["++modle.fp8=true", "model.fp8_margin=1"],
        ["modle.fp8 is not a key; did you mean model.fp8?"],
    ),
    "spaces around =": (
        ["experiment", "=", "smoke", "model.seed=", "3", "model.fp8", "=true"],
        [
            "experiment = smoke: spaces around = split it in 3; write experiment=smoke",
            "model.seed= 3: spaces around = split it in 2; write model.seed=3",
            "model.fp8 =true: spaces around = split it in 2; write model.fp8=true",
        ],
    ),
    "no key": (["=smoke"], ["=smoke: there is no key before =; write key=value"]),
    "group without option": (["fp8=null"], ["fp8=null: Hydra takes no null for a group; choose one of its options"]),
    "not an integer": (["model.hidden_size=abc"], ["model.hidden_size='abc' is not an integer"]),
    "not a whole number": (["model.num_layers=2.5"], ["model.num_layers=2.5 is not an integer"]),
    "not a number": (["model.optim.lr=fast"], ["model.optim.lr='fast' is not a number"]),
    "infinite": (["model.optim.lr=inf"], ["model.optim.lr=inf is not finite"]),
    "not a boolean": (["model.bias=2"], ["model.bias=2 is neither true nor false"]),
    "a number for a boolean": (["model.fp8=1"], ["model.fp8=1 is neither true nor false; use true"]),
    "a word for a boolean": (
        ["model.bias=No", "model.transformer_engine=on"],
        [
            "model.bias='No' is neither true nor false; use false",
            "model.transformer_engine='on' is neither true nor false or null; use true",
        ],
    ),
    "a recipe for the switch": (
        ["model.fp8=delayed"],
        ["model.fp8='delayed' is neither true nor false; use fp8=delayed"],
    ),
    "not a list": (
        ["model.optim.betas=0.9"],
        ["model.optim.betas=0.9 is not a list; write model.optim.betas=[…] with numbers"],
    ),
    "wrong element": (
        ["model.optim.betas=[0.9,x]"],
        ["model.optim.betas=[0.9, 'x'] has an element that does not fit: [1]='x' is not a number"],
    ),
    "outside a choice": (
        ["trainer.precision=bf16-mixed"],
        ["trainer.precision='bf16-mixed' is not one of auto, fp32, bf16; did you mean bf16?"],
    ),
    "a boolean for a choice that may be null": (
        ["model.cuda_graph_impl=true"],
        ["model.cuda_graph_impl=true is not one of none, local or null"],
    ),
    "choice by its megatron name": (
        ["model.normalization=LayerNorm"],
        ["model.normalization='LayerNorm' is not one of layernorm, rmsnorm; did you mean layernorm?"],
    ),
    "null": (["model.hidden_size=null"], ["model.hidden_size=null may not be null; it takes: integer"]),
    "open values": (
        [
            "model=base",
            "model.hidden_size=8",
            "model.num_attention_heads=2",
            "model.vocab_size=300",
            "model.encoder_seq_length=8",
        ],
        [
            "model.num_layers has no value; choose a preset that sets it, or give model.num_layers=… (integer: Transformer layers.)"
        ],
    ),
    "value for a section": (["logging=3"], ["logging=3: logging has no option '3'; known: default, wandb"]),
    "several values": (
        ["model.seed=1,2"],
        [
            "model.seed=1,2 has several values; write model.seed=[…] for a list, quote a string, or sweep over them with -m"
        ],
    ),
    "no value": (
        ["model.fp8"],
        [
            "'model.fp8' is no override: missing EQUAL at '<EOF>'; write key=value, and quote a value with special characters: \"key='…'\""
        ],
    ),
    "special characters": (
        ["name=it's"],
        [
            '"name=it\'s" is no override: unexpected "\'" at character 8; write key=value, and quote a value with special characters: "key=\'…\'"'
        ],
    ),
    "FP8": (
        ["fp8=delayed", "model.hidden_size=120"],
        [
            "model.hidden_size=120: the weight of self_attention.linear_qkv is 240×120, and FP8 products take multiples of 16; use 112 or 128"
        ],
    ),
    "FP8 setting": (
        ["++model.fp8_margin=0"],
        ["model.fp8_margin=0 has no effect with model.fp8=false; use model.fp8=true, or leave it out (fp8=none)"],
    ),
    "too few processes": (
        ["parallelism=tp2"],
        [
            f"{LAYOUT} needs a multiple of 2 processes, and this run has 1; start it with torchrun --nproc-per-node 2 -m gpt_pretrain …, or choose a layout whose product divides 1"
        ],
    ),
    "heads over TP": (
        [
            "model.tensor_model_parallel_size=8",
            "model.num_attention_heads=12",
            "model.num_query_groups=12",
            "model.hidden_size=384",
        ],
        [
            "model.num_attention_heads=12 is not divisible by model.tensor_model_parallel_size=8; use model.num_attention_heads=8 or 16 with model.num_query_groups=8, or model.tensor_model_parallel_size=1",
            f"{LAYOUT.replace('=2', '=8', 1)} needs a multiple of 8 processes, and this run has 1; start it with torchrun --nproc-per-node 8 -m gpt_pretrain …, or choose a layout whose product divides 1",
        ],
    ),
    "batch": (
        ["model.global_batch_size=20"],
        [
            "model.global_batch_size=20 is not divisible by model.micro_batch_size=8 × 1 data-parallel ranks = 8; use 16 or 24"
        ],
    ),
    "devices": (
        ["trainer.devices=8"],
        [
            "trainer.devices=8, and the launcher started 1 on each node; start with torchrun --nproc-per-node 8 -m gpt_pretrain …, or leave trainer.devices out"
        ],
    ),
    "time": (
        ["trainer.max_time=2h"],
        [
            "trainer.max_time='2h' is not DD:HH:MM:SS; two hours and a half are trainer.max_time=\"00:02:30:00\" (in YAML in quotes)"
        ],
    ),
    "no files": (["data=text"], ["model.data.data_impl=text needs model.data.text_files=[…]"]),
    "nowhere to resume from": (
        ["checkpoint.resume=nowhere"],
        ["checkpoint.resume='nowhere' is neither auto nor never nor a directory that exists"],
    ),
    "run directory is a file": (["run_dir=pyproject.toml"], ["run_dir='pyproject.toml' is a file; name a directory"]),
    "Hydra's own key": (
        ["hydra.jobb.name=x"],
        ["Could not override 'hydra.jobb.name'.\n       Key 'jobb' not in 'HydraConf'"],
    ),
    "primary file": (
        ["--config-name", "confg"],
        [f"--config-name=confg: {REPOSITORY / 'conf'} has no such file; did you mean config?"],
    ),
    "path for a name": (
        ["--config-name", "conf/model/tiny.yaml"],
        [
            "--config-name=conf/model/tiny.yaml is a path, and takes a name; use --config-dir=conf/model --config-name=tiny"
        ],
    ),
    "folder": (["--config-dir", "nowhere"], ["--config-dir=nowhere: there is no such folder"]),
    "option": (["--multi-run"], ["--multi-run: there is no such option; did you mean --multirun?"]),
    "group behind dashes": (
        ["--experiment", "smoke"],
        ["--experiment: there is no such option; groups and keys stand without dashes: experiment=…"],
    ),
    "key behind dashes": (
        ["--model.seed=3"],
        ["--model.seed=3: there is no such option; groups and keys stand without dashes: model.seed=3"],
    ),
    "option that nobody is sent to": (["--experimental"], ["--experimental: there is no such option"]),
    "options that exclude each other": (["-m", "--cfg", "job"], ["--multirun and --cfg exclude each other; give one"]),
    "package": (
        ["--cfg", "job", "-p", "model.optm"],
        ["--package=model.optm is not in the configuration; did you mean model.optim?"],
    ),
    "several at once": (
        ["model.hiden_size=1", "model.bias=x", "fp8=non"],
        [
            "model.hiden_size is not a key; did you mean model.hidden_size?",
            "fp8=non: fp8 has no option 'non'; did you mean none?; known: blockwise, delayed, mxfp8, none, tensorwise",
            "model.bias='x' is neither true nor false",
        ],
    ),
}
AS_PROCESSES = ("typo behind ++", "unknown option", "heads over TP", "special characters", "several at once")


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_a_bad_input_is_told_and_nothing_starts(case, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    arguments, messages = BAD_INPUTS[case]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "".join(f"error: {message}\n" for message in messages)


@pytest.mark.parametrize("case", AS_PROCESSES)
def test_a_bad_input_ends_the_process_at_once(case):
    arguments, messages = BAD_INPUTS[case]
    start = time.monotonic()
    done = run_ranks(1, ["-m", "gpt_pretrain", *arguments])
    seconds = time.monotonic() - start
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "".join(f"error: {message}\n" for message in messages)
    assert seconds < 3


@pytest.mark.parametrize(
    "arguments", [["model.hiden_size=1"], ["--help"], ["--cfg", "job"], ["fp8=mxfp8", "model.fp8_margin=1"]]
)
def test_neither_gate_nor_help_imports_torch_or_megatron(arguments):
    program = (
        "import sys, gpt_pretrain.__main__ as entry\n"
        f"entry.main({arguments!r})\n"
        "sys.exit(any(module in sys.modules for module in ('torch', 'megatron', 'transformer_engine', 'numpy')))"
    )
    assert run_ranks(1, ["-c", program]).returncode == 0
