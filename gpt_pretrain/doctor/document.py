"""The doctor's answer as JSON values, for scripts.

`version` grows when a name changes its meaning or goes away; new names may come. A library in `facts` has either the
field `problem` and no other content than `is_missing` and `version`, or what was found of it.
"""

from dataclasses import asdict
from typing import Any

from gpt_pretrain.doctor.facts import Facts
from gpt_pretrain.doctor.verdict import Verdict

VERSION = 1


def doctor_document(facts: Facts, verdict: Verdict) -> dict[str, Any]:
    """Verdict, recipes, parts, findings and facts."""
    return {
        "version": VERSION,
        "trains": verdict.trains,
        "trains_in_fp8": verdict.trains_in_fp8,
        "exit_code": verdict.exit_code,
        "device": verdict.device,
        "recipes": dict(verdict.recipes),
        "parts": [asdict(part) for part in verdict.parts],
        "findings": [{**asdict(finding), "blocks": finding.blocks.value} for finding in verdict.findings],
        "facts": asdict(facts),
    }
