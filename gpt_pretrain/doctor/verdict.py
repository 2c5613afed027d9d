"""What follows from the facts: which recipes run here, what each part of a run runs on, and whether it trains at all.

Whether a recipe runs is decided by the rules that training itself asks (`rules.machine`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.recipes import RECIPES, Recipe, recipes_of
from gpt_pretrain.doctor.facts import Apex, Facts, Failure, Loaded, Torch, TorchAO, TransformerEngine
from gpt_pretrain.doctor.findings import Blocks, Finding, list_findings
from gpt_pretrain.features.registry import FEATURES
from gpt_pretrain.rules.machine import recipe_variable_problems, why_no_recipe
from gpt_pretrain.run.platform import Found, Platform, compiler_problem, environment_fields, library_fields

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a run that several libraries could provide."""

    name: str
    here: str
    """What it runs on here."""
    order: str
    """What it would choose first, next and last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The doctor's answer."""

    device: str
    """What would train: the GPUs, or the CPU."""
    recipes: Mapping[str, str | None]
    """FP8 recipe → what this machine lacks for it, None where it runs."""
    parts: tuple[Part, ...]
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


def _found(library: TransformerEngine | Loaded | TorchAO | Failure) -> Found:
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
    parts: Mapping[str, Any] = facts.apex.parts if isinstance(facts.apex, Apex) else {}
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


def _part(name: str, order: str, *choices: tuple[bool, str]) -> Part:
    """A part with what it could run on, the best first, each with whether it is available."""
    return Part(name=name, here=next(what for is_available, what in choices if is_available), order=order)


def _parts(facts: Facts, platform: Platform) -> tuple[Part, ...]:
    te, has_te = facts.transformer_engine, platform.transformer_engine is not None
    scales_on_device = has_te and isinstance(te, TransformerEngine) and te.scales_on_device
    parts = (
        _part(
            "transformer layers",
            "Transformer Engine; megatron-core's local layers: only TorchAO's FP8 recipes, no context parallelism",
            (has_te, "Transformer Engine"),
            (True, "megatron-core's local layers"),
        ),
        _part(
            "attention",
            "Transformer Engine; PyTorch's fused kernels; separate operations, with apex's softmax where it is "
            "installed",
            (has_te, "Transformer Engine: cuDNN or flash-attn"),
            (platform.cuda, "PyTorch's fused kernels"),
            (True, "PyTorch, in separate operations"),
        ),
        _part(
            "layer norm",
            "Transformer Engine; apex, which has no RMSNorm; PyTorch",
            (has_te, "Transformer Engine"),
            (platform.apex_layer_norm, "apex"),
            (True, "PyTorch"),
        ),
        _part(
            "weight gradient sums",
            "Transformer Engine; apex (fused_weight_gradient_mlp_cuda); PyTorch",
            (has_te, "Transformer Engine, in the product"),
            (platform.apex_weight_gradient, "apex, in the product"),
            (platform.cuda, "PyTorch, in the product"),
            (True, "PyTorch, after the product"),
        ),
        _part(
            "gradient clipping",
            "Transformer Engine from multi_tensor_scale_tensor on; PyTorch",
            (scales_on_device, "Transformer Engine"),
            (True, "PyTorch's foreach kernels"),
        ),
        _part(
            "optimizer",
            "PyTorch: others cannot leave a bad step out",
            (platform.cuda, "PyTorch's fused Adam"),
            (True, "PyTorch's Adam"),
        ),
    )
    return tuple(_with_features(part, platform) for part in parts)


def _with_features(part: Part, platform: Platform) -> Part:
    """A part with the features that would be its first choice."""
    for feature in FEATURES:
        name, when = feature.doctor_part
        if name == part.name:
            choice = feature.doctor_choice(platform)
            here = part.here if choice is None else f"{choice}, else {part.here}"
            part = replace(part, here=here, order=f"{when}; {part.order}")
    return part


def give_verdict(facts: Facts) -> Verdict:
    """Judges a machine."""
    findings = tuple(list_findings(facts))
    torch = facts.torch
    if isinstance(torch, Failure):
        recipes = dict.fromkeys((recipe.preset for recipe in RECIPES.values()), "needs PyTorch, which does not load")
        return Verdict(device="nothing", recipes=recipes, parts=(), findings=findings)
    platform = platform_of(facts, torch)
    device = f"{platform.num_gpus} × {platform.device_name}" if platform.cuda else "the CPU: small models"
    return Verdict(
        device=f"an assumed {facts.assumed_gpu}" if facts.assumed_gpu is not None else device,
        recipes={recipe.preset: _why_no_recipe(facts, platform, recipe) for recipe in RECIPES.values()},
        parts=_parts(facts, platform),
        findings=findings,
    )


def doctor_document(facts: Facts, verdict: Verdict) -> dict[str, Any]:
    """The answer as JSON values, for scripts.

    `version` grows when a name changes its meaning or disappears; new names may appear. A library in `facts` is either
    a `Failure`, with the field `problem`, or what was found of it.
    """
    found = asdict(facts)
    return {
        "version": VERSION,
        "trains": verdict.trains,
        "trains_in_fp8": verdict.trains_in_fp8,
        "exit_code": verdict.exit_code,
        **asdict(verdict),
        "facts": {name: value for name, value in found.items() if name != "libraries"} | found["libraries"],
    }
