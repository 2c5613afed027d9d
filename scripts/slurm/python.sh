# shellcheck shell=bash disable=SC2034  # the batch scripts that source this file use its variables
# Sets `python`, the job's interpreter, and `place`, the options with which srun reaches it, from the environment of the
# submission: CONTAINER_IMAGE and CONTAINER_MOUNTS, or VENV.

fail() {
    echo "error: $1" >&2
    exit 2
}

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    fail "$0 is a Slurm job: submit it with sbatch $0 …; docs/cluster.md has the commands without Slurm"
fi
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    python=(python)
    # Inside, the submitted checkout's code and relative paths count.
    place=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD"
        --container-mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
else
    python=("${VENV:-$PWD/.venv}/bin/python")
    place=()
    [[ -x ${python[0]} ]] || fail "${python[0]} is missing on $(hostname); make install in the checkout, or give VENV \
or CONTAINER_IMAGE"
fi

# Lines reach the log at once, and so does the stack of a segmentation fault.
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
# Left over from the submitting shell, these would look like a launcher's. The ranks find each other by srun's
# variables: at the first host of the job's list, and at a port that follows from the job's number.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
