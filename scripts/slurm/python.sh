# shellcheck shell=bash disable=SC2034  # what is set here is used by the batch scripts that read it
# Where the job's Python is, for the batch scripts beside this one: `python`, and `place`, the options by which srun gets
# there. From the environment in which the job was submitted: CONTAINER_IMAGE and CONTAINER_MOUNTS, or VENV.

fail() {
    echo "error: $1" >&2
    exit 2
}

if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    python=(python)
    # The checkout is what was submitted: its code counts, and its relative paths hold inside.
    place=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD"
        --container-mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
else
    python=("${VENV:-$PWD/.venv}/bin/python")
    place=()
    [[ -x ${python[0]} ]] || fail "${python[0]} is missing on $(hostname); make install in the checkout, or give VENV \
or CONTAINER_IMAGE"
fi

# A log has its lines when they are written, and the stack of a segmentation fault.
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
# Left over from the shell in which the job was submitted, these would be taken for a launcher's: the ranks find each
# other by srun's variables, at the first host of the job's list and a port that follows from the job's number.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
