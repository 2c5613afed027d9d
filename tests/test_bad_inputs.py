"""What users get wrong: exit code 2, and `error: …` lines that name the key, the value and the way out, at once."""

import pytest

from gpt_pretrain.__main__ import main
from tests.launching import REPOSITORY

# Command line to what each error names: what is wrong, then the way out.
BAD_INPUTS = {
    "typo": (["model.hiden_size=256"], [("model.hiden_size ", "model.hidden_size?")]),
    "typo behind ++": (["++modle.fp8=True"], [("modle.fp8 ", "model.fp8?")]),
    "deleted key": (["~model.seed"], [("~model.seed:", "model.seed=…")]),
    "deleted group": (["~optimizer"], [("~optimizer ", "optimizer=…")]),
    "unknown group": (["paralelism=dp"], [("paralelism ", "parallelism?")]),
    "unknown option": (["model=llama3_8"], [("model=llama3_8:", "llama3_8b?", "gpt2_124m", "mixtral_8x7b, ", "tiny")]),
    "group with plus signs": (["++model=tiny"], [("++model=tiny:", " model=tiny")]),
    # Nothing about model.fp8=false, which nobody chose.
    "unknown option, and what goes with it": (
        ["fp8=delay", "model.fp8_emulate=true"],
        [("fp8=delay:", "delayed?", "blockwise, delayed, mxfp8, none, tensorwise")],
    ),
    "unknown option in a sweep, and what goes with it": (
        ["-m", "fp8=delay,none", "model.fp8_emulate=true"],
        [("fp8=delay,none:", "'delay'", "delayed?", "blockwise, delayed, mxfp8, none, tensorwise")],
    ),
    "typo, and what goes with it": (["++modle.fp8=true", "model.fp8_margin=1"], [("modle.fp8 ", "model.fp8?")]),
    "spaces around =": (
        ["experiment", "=", "smoke"],
        [("'experiment' ", "experiment=value"), ("'smoke' ", "key=value"), ("=:", "key=value")],
    ),
    "no key": (["=smoke"], [("=smoke:", "key=value")]),
    "group without option": (["fp8=null"], [("fp8=null:",)]),
    "not an integer": (["model.hidden_size=abc"], [("model.hidden_size='abc' ", "integer")]),
    "infinite": (["model.optim.lr=inf"], [("model.optim.lr=inf ", "finite")]),
    "not a boolean": (["model.bias=2"], [("model.bias=2 ", "true", "false")]),
    "a recipe for the switch": (["model.fp8=delayed"], [("model.fp8='delayed' ", "use fp8=delayed")]),
    "Megatron's word for whole gradients": (
        ["model.data_parallel_sharding_strategy=no_shard"],
        [("model.data_parallel_sharding_strategy='no_shard' ", "optim_grads, optim_grads_params or null", "use null")],
    ),
    "Megatron's word for a distributed optimizer": (
        ["model.data_parallel_sharding_strategy=optim"],
        [("model.data_parallel_sharding_strategy='optim' ", "use parallelism=dp")],
    ),
    "a strategy that there is none of": (
        ["model.data_parallel_sharding_strategy=params"],
        [("model.data_parallel_sharding_strategy='params' ", "optim_grads_params?")],
    ),
    "a word for a number of groups": (
        ["model.num_distributed_optimizer_instances=two"],
        [("model.num_distributed_optimizer_instances='two' ", "integer")],
    ),
    "others' names of sharded runs": (["parallelism=zero3"], [("parallelism=zero3:", "use parallelism=fsdp;")]),
    "a sharded run without a number of groups": (
        ["parallelism=hsdp"],
        [("parallelism=hsdp:", "use parallelism=hsdp2", "model.num_distributed_optimizer_instances")],
    ),
    "not a list": (["model.optim.betas=0.9"], [("model.optim.betas=0.9 ", "model.optim.betas=[…]", "number")]),
    "outside a choice": (
        ["trainer.precision=bf16-mixed"],
        [("trainer.precision='bf16-mixed' ", "auto, fp32, bf16;", "bf16?")],
    ),
    "null": (["model.hidden_size=null"], [("model.hidden_size=null ", "integer")]),
    "a word for a recipe": (["fp8=True"], [("fp8=True:", "known: ", "delayed")]),
    "two options of a group": (["fp8=[delayed,none]"], [("fp8=[delayed,none]:", "fp8=OPTION")]),
    "another code's flag with a value": (
        ["--micro-batch-size=4"],
        [("--micro-batch-size=4:", "model.micro_batch_size=4")],
    ),
    "Megatron-LM's samples": (["--train-samples", "1000"], [("--train-samples:", "trainer.max_steps")]),
    "Megatron-LM's activation": (["--swiglu"], [("--swiglu:", "model.activation=swiglu")]),
    "Megatron-LM's command line": (
        ["--num-layers", "32", "--hidden-size=4096", "--swiglu", "--disable-bias-linear", "--bf16", "--lr", "3e-4"],
        [("--num-layers, --hidden-size, --swiglu and 3 more are Megatron-LM's", "python -m gpt_pretrain.translate ")],
    ),
    "torchtitan's command line": (
        ["--training.steps=10", "--training.local_batch_size", "2", "--parallelism.tensor_parallel_degree=2"],
        [("--training.local_batch_size", "torchtitan's", "python -m gpt_pretrain.translate --from torchtitan ")],
    ),
    "Megatron-LM's length": (["--seq-length=64"], [("--seq-length=64:", "model.encoder_seq_length=64")]),
    "value for a section": (["logging=3"], [("logging=3:", "default, mlflow, wandb")]),
    "several values": (["model.seed=1,2"], [("model.seed=1,2 ", "-m")]),
    "no value": (["model.fp8"], [("'model.fp8' ", "model.fp8=value")]),
    "another command": (["plan", "model=tiny"], [("'plan' ", "python -m gpt_pretrain.plan")]),
    "FP8 as a precision": (["trainer.precision=fp8"], [("trainer.precision='fp8' ", "use fp8=delayed")]),
    "nothing": (["", "model.seed=3"], [("'' ", "leave it out")]),
    "elements without quotes": (["benchmark.variants=[bf16,fp8=delayed]"], [("'benchmark.variants=", "=", "quote")]),
    "a section for its key": (["plan=h100"], [("plan='h100' ", "plan.gpu=h100?")]),
    "shares beyond any number": (
        [f"model.data.splits_string='{'9' * 400},1,1'"],
        [("model.data.splits_string ", '"900,50,50"')],
    ),
    "a weight beyond any number": (
        ["data=mmap", f"model.data.data_prefix=[{'9' * 400},a,1,b]"],
        [("model.data.data_prefix=", "leave that path out")],
    ),
    "Hydra's directory below a file": (
        ["hydra.run.dir=pyproject.toml/x"],
        [(" pyproject.toml/x", "hydra.run.dir=pyproject.toml/x")],
    ),
    "a sweep below a file": (
        ["-m", "model.seed=1,2", "hydra.sweep.dir=pyproject.toml/x", "run_dir=null"],
        [("pyproject.toml", "run_dir=")],
    ),
    "special characters": (["name=it's"], [('"name=it\'s" ', "\"key='…'\"")]),
    "heads over TP": (
        [
            "model.tensor_model_parallel_size=8",
            "model.num_attention_heads=12",
            "model.num_query_groups=12",
            "model.hidden_size=384",
        ],
        [
            (
                "model.num_attention_heads=12 ",
                "model.tensor_model_parallel_size=8;",
                "model.tensor_model_parallel_size=1",
            ),
            ("model.tensor_model_parallel_size=8 × ", " 8 processes", "torchrun --nproc-per-node 8 "),
        ],
    ),
    "a preset for eight GPUs without a launcher": (
        ["experiment=llama3_8b_8gpu", "trainer.precision=bf16"],
        [("trainer.devices=8,", "torchrun --nproc-per-node 8 ", "trainer.devices=null")],
    ),
    "a boolean for a word": (["checkpoint.resume=true"], [("checkpoint.resume=true ", "auto", "never")]),
    "Hydra's own key": (["hydra.jobb.name=x"], [("'hydra.jobb.name'", "\n       Key 'jobb' ")]),
    "primary file": (["--config-name", "confg"], [("--config-name=confg:", str(REPOSITORY / "conf"), "config?")]),
    "path for a name": (
        ["--config-name", "conf/model/tiny.yaml"],
        [("--config-name=conf/model/tiny.yaml:", "--config-dir=FOLDER --config-name=NAME")],
    ),
    "folder": (["--config-dir", "nowhere"], [("--config-dir=nowhere:",)]),
    "option": (["--multi-run"], [("--multi-run:", "--multirun?")]),
    "group behind dashes": (["--experiment", "smoke"], [("--experiment:", " experiment=…")]),
    "key behind dashes": (["--model.seed=3"], [("--model.seed=3:", " model.seed=3")]),
    "option that nobody is sent to": (["--experimental"], [("--experimental:",)]),
    "options that exclude each other": (["-m", "--cfg", "job"], [("--multirun and --cfg ",)]),
    "package": (["--cfg", "job", "-p", "model.optm"], [("--package=model.optm ", "model.optim?")]),
    "several at once": (
        ["model.hiden_size=1", "model.bias=x", "fp8=non"],
        [("model.hiden_size ", "model.hidden_size?"), ("fp8=non:", "none?"), ("model.bias='x' ", "true", "false")],
    ),
}


def assert_told(err, expected):
    assert err.startswith("error: ")
    errors = err.rstrip("\n").removeprefix("error: ").split("\nerror: ")
    assert len(errors) == len(expected), err
    for error, (wrong, *ways_out) in zip(errors, expected, strict=True):
        _, found, rest = f" {error}".partition(wrong)
        assert found, (wrong, error)
        for way_out in ways_out:
            assert way_out in rest, (way_out, error)
        assert "experimental" not in rest


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_a_bad_input_is_told_and_nothing_starts(case, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    arguments, expected = BAD_INPUTS[case]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert_told(err, expected)
