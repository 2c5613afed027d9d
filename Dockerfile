# syntax=docker/dockerfile:1
# gpt_pretrain on NVIDIA's PyTorch container, with its PyTorch, Transformer Engine and apex unchanged.
#
#     docker build -t gpt_pretrain .
#     docker run --rm --gpus all --ipc=host gpt_pretrain                 # the doctor: what this machine can train
#
# docs/cluster.md shows how to train with it under Docker and Slurm. It needs BuildKit (Docker 23 or newer).
ARG BASE=nvcr.io/nvidia/pytorch:26.07-py3
FROM ${BASE}

# The base uses the system's Python, and pip installs beside its packages.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

# Requirements change less often than code, so they have their own layer; pip's downloads stay outside of the image.
# The base may set PIP_CONSTRAINT to its own pins, which would also reach into isolated builds; base/constraints.txt has
# the packages to keep.
# The image has no extras of pyproject.toml unless they are named: --build-arg EXTRAS=flash,wandb. Beware of flash: if
# it is installed but does not load, neither does Transformer Engine 2.15 to 2.18.
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

# Not root, and by number, since a host need not know the name. Runs write to the folder they start in and cache kernels
# in the home folder. Both are open to any user: docker run --user "$(id -u):$(id -g)", Enroot and Apptainer bring users
# that the image does not know.
RUN useradd --create-home --uid 10001 gpt_pretrain \
    && chmod 1777 /home/gpt_pretrain \
    && install --directory --mode 1777 /runs
ENV HOME=/home/gpt_pretrain
WORKDIR /runs
USER 10001

# There is no GPU while an image is built. The doctor assumes one and fails the build, with the reason, if Transformer
# Engine does not load or a run would not start.
RUN python -m gpt_pretrain.doctor --assume-gpu h200

# The base's entry point stays: it picks CUDA's compatibility libraries for older drivers, and runs this command.
CMD ["python", "-m", "gpt_pretrain.doctor"]
