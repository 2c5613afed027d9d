"""Every comparison of the proof: what it holds against what, how near the two must be, why, and what it does.

A comparison stops a run only if arithmetic implies it: a healthy run cannot fail it, whatever its tensors hold. What is
merely usual warns, with the same facts. docs/fp8.md lists them all on the site.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One kind of comparison."""

    what: str
    """What is compared with what."""
    bound: str
    """How far apart the two may be, and why."""
    stops: bool
    """Whether a difference ends the run (arithmetic implies that there is none) or warns (it is unusual)."""


PRODUCTS = Comparison(
    what="formats of both operands of every product, with the plan",
    bound="equal",
    stops=True,
)
COUNTS = Comparison(
    what="number of products of each layer in the step, with the number of microbatches",
    bound="at least as many; an expert without tokens computes none",
    stops=True,
)
RECIPE = Comparison(
    what="fields of Transformer Engine's recipe objects, with the plan",
    bound="equal",
    stops=True,
)
STORAGE = Comparison(
    what="types in which layers store their weights, with the plan",
    bound="equal",
    stops=True,
)
ATTENTION = Comparison(
    what="formats of attention's arguments, with the plan",
    bound="equal",
    stops=True,
)
SHAPES = Comparison(
    what="types and shapes of codes and scales, with those of the values and the recipe's blocks",
    bound="equal",
    stops=True,
)
AMAX = Comparison(
    what="reported amax of a cast, with the largest magnitude of its values",
    bound="equal; 2^-18 of it after a norm computed in the cast's kernel (two fp32 sums in another order)",
    stops=True,
)
SCALE = Comparison(
    what="scale of a cast, with format maximum ÷ amax, rounded down to a power of two if the recipe says so",
    bound="2^-22 of it: an fp32 quotient, and the inverse that the product multiplies by",
    stops=True,
)
CODES = Comparison(
    what="codes of a cast, with round(value · scale)",
    bound="equal for some value within 2^-22 of the tensor's (2^-18 of its amax after a norm in the same kernel)",
    stops=True,
)
LARGEST_CODE = Comparison(
    what="largest code where the values are unknown, with round(amax · scale)",
    bound="no larger; equal if this pass raised the amax (row 0 of a history may hold a larger one of a validation)",
    stops=True,
)
DELAYED_STATE = Comparison(
    what="scales and histories of delayed scaling, with a replay of the step from its amaxes on all ranks",
    bound="histories equal; scales within 2^-22, an fp32 quotient",
    stops=True,
)
RANKS = Comparison(
    what="scales and histories on the ranks of an amax reduction group, with each other",
    bound="equal",
    stops=True,
)
RESUMED_STATE = Comparison(
    what="scales and histories at the first step after a resume, with those of the checkpoint, layer by layer",
    bound="equal SHA-256; checkpoints of earlier versions have none",
    stops=True,
)
STORED_WEIGHT = Comparison(
    what="codes of an FP8 weight after the optimizer's step, with round(master · scale)",
    bound="equal for some value within 2^-22; Transformer Engine first rounds the master to the weight's type",
    stops=True,
)
GATHERED_WEIGHT = Comparison(
    what="sharded weights that passes read, with the parts that their ranks keep", bound="the same bytes", stops=True
)
OUTPUT = Comparison(
    what="output that a layer passes on, with the result of its forward product",
    bound="equal",
    stops=True,
)
OPERANDS_OF_WGRAD = Comparison(
    what="operands of a weight gradient, with those of the same microbatch's forward product and dgrad",
    bound="equal codes; with scales of blocks or rows, codes of the same values",
    stops=True,
)
RESULT = Comparison(
    what="result of a product, with the product of its codes in fp64",
    bound="2^-8 of its norm (rounding to BF16), plus what sums may lose of their terms' magnitudes: K · 2^-24 in fp32; "
    "on tensor cores 33 · 2^-13 for each 32 terms (14 bits), of 128 terms in split products and of all in others",
    stops=True,
)
USUAL_RESULT = Comparison(
    what="the same on a GPU: how many times the product the result is, by least squares",
    bound="1 within 1e-2, what sums of coherent terms lose, and four standard errors (tests/test_fp8_results.py)",
    stops=False,
)
ROUNDING = Comparison(
    what="result of a product, with the products in which one operand is not rounded",
    bound="nearer to the product of its codes, where the two are further apart than the result's own rounding",
    stops=False,
)
CHANGED_VALUES = Comparison(
    what="different magnitudes of an operand's values, with what its codes stand for",
    bound="at least half differ (1 of 16 BF16 values fits E4M3), if there are 16 that are not all one number times a "
    "power of two",
    stops=False,
)
EMPTY_HISTORY = Comparison(
    what="empty amax histories, with those of the same kind of layer",
    bound="not empty where half or more are not and the tensor is not zero",
    stops=False,
)

COMPARISONS = (
    PRODUCTS,
    COUNTS,
    RECIPE,
    STORAGE,
    ATTENTION,
    SHAPES,
    AMAX,
    SCALE,
    CODES,
    LARGEST_CODE,
    DELAYED_STATE,
    RANKS,
    RESUMED_STATE,
    STORED_WEIGHT,
    GATHERED_WEIGHT,
    OUTPUT,
    OPERANDS_OF_WGRAD,
    RESULT,
    USUAL_RESULT,
    ROUNDING,
    CHANGED_VALUES,
    EMPTY_HISTORY,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One way in which a layer differs from what it should be."""

    comparison: Comparison
    module: str
    what: str
    planned: str
    live: str
    ranks: tuple[int, ...] = ()
    """The ranks that found it; empty until ranks have exchanged what they found."""
