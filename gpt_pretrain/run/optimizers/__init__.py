"""The optimizers: a module each, which registers its properties as an extension does; its name is the optimizer's.

Rules, translation and plan read the properties. `megatron.optimizer` builds the optimizers.
"""

from gpt_pretrain.config.choices import OptimizerName
from gpt_pretrain.config.errors import one_of
from gpt_pretrain.extend.optimizers import Optimizer
from gpt_pretrain.extend.registry import BUILT_IN, import_modules, registered

import_modules(__name__)


def optimizer_of(name: OptimizerName) -> Optimizer:
    """The properties of an optimizer, the program's own or an extension's."""
    optimizer: Optimizer = next(each.value for each in registered("optimizer") if each.name == name.name)
    return optimizer


def names_with(column: str) -> str:
    """Names of the program's own optimizers whose field `column` is true, as messages offer them."""
    return one_of([each.name for each in BUILT_IN if each.kind == "optimizer" and getattr(each.value, column)])
