"""Translations of other programs' configurations, run in this process."""

import warnings
from pathlib import Path

from omegaconf import OmegaConf

from gpt_pretrain.config.keys import flatten
from gpt_pretrain.translate.__main__ import main

FOLDER = Path(__file__).parent / "other_programs"


class Translated:
    """What the command printed."""

    def __init__(self, code, text, report):
        self.code, self.text, self.report = code, text, report
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        defaults = content.pop("defaults", [])
        self.choices = {name.removeprefix("override /"): option for each in defaults for name, option in each.items()}
        self.keys = dict(flatten(content))

    def section(self, title):
        """The items of one list of the report, each in one line."""
        for part in self.report.rstrip().split("\n\n"):
            if part.split("\n")[0].startswith(title):
                return part.partition("\n")[2].replace("\n      ", " ").split("\n")
        return []


def translate(capsys, *words):
    """Runs the command; a word that is the name of a file in `other_programs` stands for its path."""
    given = [str(FOLDER / word) if (FOLDER / word).is_file() else word for word in words]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main(given)
    printed = capsys.readouterr()
    assert code in (0, 3), printed.err
    return Translated(code, printed.out, printed.err)
