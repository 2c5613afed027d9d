"""What follows from the facts: which recipes run here, and whether it trains at all.

Whether a recipe runs is decided by the rules that training itself asks (`rules.machine`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.recipes import RECIPES, Recipe, recipes_of
from gpt_pretrain.doctor.facts import Facts, Failure, Loaded, Torch
from gpt_pretrain.doctor.findings import Blocks, Finding, list_findings
from gpt_pretrain.rules.machine import recipe_variable_problems, why_no_recipe
from gpt_pretrain.run.platform import Found, Platform, compiler_problem, environment_fields, library_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The doctor's answer."""

    device: str
    """What would train: the GPUs, or the CPU."""
    recipes: Mapping[str, str | None]
    """FP8 recipe → what this machine lacks for it, None where it runs."""
    findings: tuple[Finding, ...]

    @property
    def trains(self) -> bool:
        """Whether `python -m gpt_pretrain` would train here."""
        return all(finding.blocks is not Blocks.training for finding in self.findings)

    @property
    def trains_in_fp8(self) -> bool:
        """Whether it would with at least one recipe of Transformer Engine, the engine of presets and experiments."""
        te = (recipe.preset for recipe in recipes_of(Fp8Backend.transformer_engine))
        return self.trains and any(self.recipes[preset] is None for preset in te)

    @property
    def exit_code(self) -> int:
        """0: trains, also in FP8; 3: trains, but not in FP8; 1: does not train."""
        if self.trains_in_fp8:
            return 0
        return 3 if self.trains else 1


def _found(library: Loaded | Failure) -> Found:
    if isinstance(library, Failure):
        return None, None if library.is_missing else library.problem
    return library.version, None


def platform_of(facts: Facts, torch: Torch) -> Platform:
    """The machine as training describes it."""
    variables = environment_fields(facts.environment)
    if not torch.gpus:
        # Without a GPU a run looks for none of the libraries.
        return Platform(cuda=False, num_gpus=0, device_name="CPU", compiler_problem=compiler_problem(), **variables)
    of_features = {name: _found(library) for name, library in facts.libraries.items()}
    parts: Mapping[str, Any] = facts.apex.parts if isinstance(facts.apex, Loaded) else {}
    return Platform(
        cuda=True,
        num_gpus=len(torch.gpus),
        device_name=torch.gpus[0].name,
        compute_capability=torch.gpus[0].compute_capability,
        torch_cuda=torch.cuda,
        **library_fields(_found(facts.transformer_engine), _found(facts.torchao), of_features),
        **variables,
        **parts,
    )


def _why_no_recipe(facts: Facts, platform: Platform, recipe: Recipe) -> str | None:
    lacking = why_no_recipe(platform, recipe)
    if lacking is not None:
        return f"needs {lacking}"
    library = facts.torchao if recipe.backend is Fp8Backend.torchao else facts.transformer_engine
    if not isinstance(library, Failure) and library.product_problem is not None:
        return f"a small FP8 layer fails: {library.product_problem}"
    return next(recipe_variable_problems(platform, recipe, attention=False), None)


def give_verdict(facts: Facts) -> Verdict:
    """Judges a machine."""
    findings = tuple(list_findings(facts))
    torch = facts.torch
    if isinstance(torch, Failure):
        recipes = dict.fromkeys((recipe.preset for recipe in RECIPES.values()), "needs PyTorch, which does not load")
        return Verdict(device="nothing", recipes=recipes, findings=findings)
    platform = platform_of(facts, torch)
    device = f"{platform.num_gpus} × {platform.device_name}" if platform.cuda else "the CPU: small models"
    return Verdict(
        device=f"an assumed {facts.assumed_gpu}" if facts.assumed_gpu is not None else device,
        recipes={recipe.preset: _why_no_recipe(facts, platform, recipe) for recipe in RECIPES.values()},
        findings=findings,
    )
