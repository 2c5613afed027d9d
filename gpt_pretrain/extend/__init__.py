"""What your own modules can add to a run, without a change here: see docs/bring_your_own.md.

`extensions=[my_lab.callbacks]` imports `my_lab.callbacks` before the configuration is composed; while it is imported,
it registers what it brings with the functions of this module:

    callback        code that runs at the start, after steps, validations and saves, and at the end
    sink            another place for metrics
    validation_task numbers of the model at each validation
    keys            keys of your own, in a group of your own
    optimizer       a name for model.optim.name
    data_source     a name for model.data.data_impl
    tokenizer       a name for model.tokenizer.library
    layer           a name for model.layer
    loss            a name for model.loss
    fp8_recipe      a name for model.fp8_recipe
    feature         a name in model.features

What is registered is checked, shown, stored and refused like the program's own. A name can be registered once. This
module imports neither torch nor megatron-core, and an extension must not do so while it is imported either: `--help`
and refusals answer before torch is loaded, and torch must find the environment that the run sets for it. Import them
inside your functions.
"""

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.data import DataSource, data_source, tokenizer
from gpt_pretrain.extend.keys import keys, own_keys
from gpt_pretrain.extend.model import feature, fp8_recipe, layer, loss
from gpt_pretrain.extend.optimizers import optimizer
from gpt_pretrain.extend.training import Callback, Evaluate, Run, Sink, callback, sink, validation_task

__all__ = [
    "Callback",
    "Config",
    "DataSource",
    "Evaluate",
    "Run",
    "Sink",
    "UserError",
    "callback",
    "data_source",
    "feature",
    "fp8_recipe",
    "keys",
    "layer",
    "loss",
    "optimizer",
    "own_keys",
    "sink",
    "tokenizer",
    "validation_task",
]
