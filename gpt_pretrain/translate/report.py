"""The report of a translation, for the terminal: every setting of the other program is in one of its lists."""

import textwrap
from collections.abc import Iterator

from gpt_pretrain.config.errors import visible, written
from gpt_pretrain.translate.experiment import Experiment
from gpt_pretrain.translate.translation import Setting, Translation

_WIDTH = 120


def _item(text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        visible(text), _WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
    )


def _becomes(key: str, setting: Setting) -> str:
    ours = f"{key}={written(setting.value)}"
    return ours if setting.origin.lstrip("+") == ours else f"{setting.origin} → {ours}"


def report_lines(translation: Translation, experiment: Experiment) -> Iterator[str]:
    """The lines of the report; those of a list follow its title."""
    yield f"{translation.program} → {translation.name}"
    groups = [f"{group}={option}" for group, option in experiment.choices.items()]
    given = {key: setting for key, setting in experiment.written.items() if setting.given}
    defaults = {key: setting for key, setting in experiment.written.items() if not setting.given}
    equal = [_becomes(key, setting) for key, setting in experiment.equal.items() if setting.given]
    unread = [f"{_becomes(key, setting)}: no effect with {why}" for key, (setting, why) in experiment.unread.items()]
    lists = (
        ("translated", [_becomes(key, setting) for key, setting in given.items()]),
        (f"{translation.program}'s defaults that differ from ours", [_becomes(*each) for each in defaults.items()]),
        (f"equal by {'these options and ' if groups else ''}our defaults{_in_brackets(groups)}", equal),
        ("not read in this run", unread),
        ("not needed here", [f"{setting}: {why}" for setting, why in translation.not_needed]),
        ("without counterpart", [each.text for each in translation.lost]),
        ("not known from there, and up to you", [f"{key}: {why}" for key, why in translation.up_to_you]),
        ("read with care", translation.notes),
    )
    for title, items in lists:
        if items:
            yield f"\n{title}:"
            for item in items:
                yield from _item(item)
    if experiment.problems:
        yield "\nour own check refuses the result:"
        for problem in experiment.problems:
            yield from _item(problem)
    else:
        yield "\nour own check accepts the result"


def _in_brackets(groups: list[str]) -> str:
    return f" ({', '.join(groups)})" if groups else ""
