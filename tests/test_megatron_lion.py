"""Lion's update is what its formula says.

Other layouts are in `test_checkpoint_resharding`, skipped updates in `test_training_guards`, resumes in
`test_checkpoint_load`, its memory in `test_plan_memory`.
"""

import pytest
import torch
from emerging_optimizers.scalar_optimizers import Lion

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.rules.jobs import load_config
from tests.emulated_training import emulated_training

RATE, DECAY = 3e-3, 0.1
LION = ("optimizer=lion", "trainer.gradient_clip_val=0")


def weights(training):
    return {name: weight.detach().double().clone() for name, weight in training.chunks[0].named_parameters()}


def decays(name):
    return "layernorm" not in name and not name.endswith("bias")


@pytest.mark.parametrize("layout", ["parallelism=single", "parallelism=dp"])
def test_four_steps_are_what_the_formula_says(layout):
    """In fp64, from the definition: sign and mean of the gradients of all steps so far, weighed by powers of a beta."""
    beta1, beta2 = 0.95, 0.98
    with emulated_training(*LION, layout) as training:
        seen = []
        for step in range(4):
            before, gradients = weights(training), training.gradients()
            training.step()
            after = weights(training)
            for name, gradient in gradients.items():
                mean = sum(
                    (1 - beta2) * beta2 ** (step - 1 - index) * past[name] for index, past in enumerate(seen)
                ) + torch.zeros_like(gradient)
                blend = beta1 * mean + (1 - beta1) * gradient
                update = before[name] * (1 - RATE * DECAY * decays(name)) - after[name]
                # Rounding may turn the sign of a sum that all but cancels.
                clear = (blend.abs() > 1e-5 * blend.abs().max()) | (blend == 0)
                assert clear.double().mean() > 0.99, name
                assert ((update - RATE * blend.sign()).abs() < 1e-3 * RATE)[clear].all(), name
            seen.append(gradients)


def test_updates_are_those_of_emerging_optimizers():
    with emulated_training(*LION) as training:
        own = dict(training.chunks[0].named_parameters())
        theirs = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in own.items()}
        groups = [
            {
                "params": [weight for name, weight in theirs.items() if decays(name) is does],
                "weight_decay": DECAY * does,
            }
            for does in (True, False)
        ]
        optimizer = Lion(groups, lr=RATE, betas=(0.95, 0.98))
        training.step_beside(optimizer, theirs, num_steps=3)
        for name, weight in theirs.items():
            # Blends that all but cancel may have another sign: then a weight is a step or two off.
            off = (weight - own[name]).abs() > 1e-3 * RATE
            assert off.double().mean() < 1e-3, name


@pytest.mark.parametrize("override", ["model.optim.betas=[0.5,0.98]", "model.optim.betas=[0.95,0.5]"])
def test_both_betas_reach_the_update(override):
    after = []
    for overrides in ((), (override,)):
        with emulated_training(*LION, *overrides) as training:
            for _ in range(3):
                training.step()
            after.append(weights(training))
    assert not all(torch.equal(weight, after[1][name]) for name, weight in after[0].items())


@pytest.mark.parametrize("name", ["normuon", "adaptive_muon", "soap"])
def test_optimizers_that_are_not_here_are_refused_with_the_reason(name):
    with pytest.raises(ConfigError) as refused:
        load_config([f"model.optim.name={name}"])
    (problem,) = refused.value.problems
    assert f"model.optim.name='{name}' is not here: " in problem
    assert "muon, lion, sgd" in problem
