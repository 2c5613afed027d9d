"""A step leaves the host free: between two records nothing in the loop waits for the GPU."""

import pytest
import torch

from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.training.setup import set_up
from gpt_pretrain.training.stop import StopRequest
from gpt_pretrain.training.trainer import Trainer
from gpt_pretrain.training.watchdog import Watchdog
from tests.emulated_training import RECOMPUTED
from tests.optimizer_states import LEAN, SMALLEST
from tests.platforms import spec_of

pytestmark = pytest.mark.gpu

SMALL = (
    "data=mock",
    "model.num_layers=2",
    "model.hidden_size=256",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=512",
    "model.vocab_size=512",
    "model.encoder_seq_length=128",
    "model.max_position_embeddings=128",
    "model.micro_batch_size=2",
    "model.global_batch_size=4",
    "trainer.max_steps=8",
    "trainer.log_every_n_steps=4",
    "trainer.limit_val_batches=0",
    "checkpoint.save_at_end=false",
)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["model=tiny"], id="llama"),
        pytest.param(["model=gpt2_124m"], id="gpt2"),
        pytest.param(["model=tiny", "parallelism=dp"], id="distributed optimizer"),
        pytest.param(["model=tiny", *LEAN, *SMALLEST], id="small states"),
        pytest.param(["model=tiny", "model.cuda_graph_impl=local"], id="graphs"),
        pytest.param(["model=tiny", *RECOMPUTED], id="full recompute"),
        pytest.param(["model=tiny", "model.activation=squared_relu"], id="squared relu"),
        pytest.param(["model=tiny", "model.activation=squared_relu", "model.cuda_graph_impl=local"], id="its graphs"),
        pytest.param(["model=tiny", "model.final_logit_softcapping=15"], id="capped logits"),
        pytest.param(["model=tiny", "model.data.num_workers=2"], id="workers"),
    ],
)
def test_between_two_records_nothing_waits_for_the_gpu(overrides, tmp_path, compose_config):
    """From the first record on (step 4) waiting is an error: the first to wait must be the second record (step 8)."""
    config = compose_config(*overrides, *SMALL)
    launch, platform = read_launch({}), detect_platform()
    records = []

    def log(record):
        records.append(record)
        torch.cuda.set_sync_debug_mode("error")

    with process_groups(config.model, launch, platform):
        setup = set_up(spec_of(config, platform), prepare_corpus(config, show_progress=False), tmp_path)
        watchdog = Watchdog(None, learning_steps=1, launch=launch, run_dir=tmp_path)
        trainer = Trainer(setup, log=log, watchdog=watchdog)
        try:
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation") as waited:
                trainer.train(StopRequest(None))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [record.step for record in records] == [4]
    assert (trainer.progress.step, waited.traceback[-1].name) == (8, "mean_loss"), waited.getrepr(style="short")
