# syntax=docker/dockerfile:1
# gpt_pretrain on NVIDIA's PyTorch container, whose PyTorch, Transformer Engine and apex stay as they are.
#
#     docker build -t gpt_pretrain .
#     docker run --rm --gpus all --ipc=host gpt_pretrain                 # the doctor: what this machine can train
#
# docs/cluster.md says how to train with it, under Docker and under Slurm. Needs BuildKit (Docker 23 or newer).
ARG BASE=nvcr.io/nvidia/pytorch:26.07-py3
FROM ${BASE}

# The base's Python is the system's, and pip is meant to install beside what it has.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

# What is needed changes less often than the code: a layer of its own, and pip's downloads outside of the image.
# PIP_CONSTRAINT, where the base sets it, names pins of its own that reach into isolated builds, too; what has to stay
# is in base/constraints.txt.
# Of pyproject.toml's extras none is in the image unless it is asked for, by commas: --build-arg EXTRAS=flash,wandb.
# With flash more than attention hangs on it: Transformer Engine 2.15 to 2.18 do not load where it is installed and does
# not load itself.
ARG EXTRAS=""
WORKDIR /opt/gpt_pretrain
COPY pyproject.toml constraints.txt ./
COPY scripts/base_packages.py scripts/
RUN --mount=type=cache,target=/root/.cache/pip \
    python scripts/base_packages.py freeze base "${EXTRAS}" \
    && PIP_CONSTRAINT='' python -m pip install --constraint base/constraints.txt --requirement base/requirements.txt \
    && python scripts/base_packages.py check base

COPY README.md LICENSE ./
COPY conf conf
COPY gpt_pretrain gpt_pretrain
RUN --mount=type=cache,target=/root/.cache/pip \
    PIP_CONSTRAINT='' python -m pip install --no-deps . \
    && python scripts/base_packages.py check base

# Not root, by number: a host need not know the name. Runs write to the folder they are started in, kernels are cached in
# the home folder, and any user may: docker run --user "$(id -u):$(id -g)", Enroot and Apptainer bring users that the
# image does not know.
RUN useradd --create-home --uid 10001 gpt_pretrain \
    && chmod 1777 /home/gpt_pretrain \
    && install --directory --mode 1777 /runs
ENV HOME=/home/gpt_pretrain
WORKDIR /runs
USER 10001

# No GPU is there while an image is built. The doctor judges the libraries as if one were: the build ends here, with the
# reason, where Transformer Engine does not load or a run would not.
RUN python -m gpt_pretrain.doctor --assume-gpu h200

# The base's own entry point stays: it picks CUDA's compatibility libraries for older drivers, and runs what follows.
CMD ["python", "-m", "gpt_pretrain.doctor"]
