"""Two ranks train tiny GPTs whose weights are stored in FP8, one layout after the other.

    FOLDER LAYOUT …

Rank r writes FOLDER/LAYOUT.r.pt: what `tests.stored_weights.observed` saw; under "without" the first loss of a run that
casts BF16 weights; under "spoilt" what the proof said where rank 1 does something wrong.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.fp8.proof import ProofError
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.emulated_training import TINY, build_training_of, lay_out_anew
from tests.sabotages import prove
from tests.stored_weights import NOT_STORED, SABOTAGES, STORED, observed


def main() -> None:
    folder, layouts = Path(sys.argv[1]), sys.argv[2:]
    install_cpu_device()
    launch = read_launch()
    configs = {layout: load_config([*TINY, *STORED, f"parallelism={layout}"]) for layout in layouts}
    with process_groups(configs[layouts[0]].model, launch, detect_platform()):
        for layout, config in configs.items():
            lay_out_anew(config)
            seen = observed(build_training_of(config))
            seen["without"] = build_training_of(load_config([*TINY, *NOT_STORED, f"parallelism={layout}"])).step()
            for name, sabotage in SABOTAGES.items() if layout == "dp" else ():
                training = build_training_of(config)
                training.step()
                with sabotage(training) if launch.rank == 1 else nullcontext():
                    try:
                        prove(training, step=2)
                        told = ""
                    except ProofError as error:
                        told = str(error)
                seen.setdefault("spoilt", {})[name] = told
            torch.save(seen, folder / f"{layout}.{launch.rank}.pt")


if __name__ == "__main__":
    main()
