"""Two ranks train tiny models with and without the linear loss, in one layout after the other: FOLDER CASE…

A case is overrides, and "masked", with commas between. Rank r writes FOLDER/r.json: the differences of each case.
"""

import json
import sys
from pathlib import Path

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.emulated_training import TINY, lay_out_anew
from tests.linear_loss_training import compare_variants, differences

# Everything off and everything on; what each of the two does is told apart in one process.
ALL = ("plain", "linear accumulate")


def main() -> None:
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    install_cpu_device()
    launch = read_launch()
    configs = {
        case: load_config([*TINY, *(override for override in case.split(",") if override != "masked")])
        for case in cases
    }
    found = {}
    with process_groups(configs[cases[0]].model, launch, detect_platform()):
        for case, config in configs.items():
            lay_out_anew(config)
            found[case] = differences(compare_variants(config, ALL, masked="masked" in case))
    (folder / f"{launch.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
