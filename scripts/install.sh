#!/usr/bin/env bash
# Creates a virtual environment and installs this checkout into it, editable, with the versions of constraints.txt. With
# --check, only refuses one that another checkout is installed in: installing or removing it would break that checkout.
# The Makefile runs it. It uses uv if installed, else venv and pip; PYTHON=… names the interpreter. Their output goes to
# VENV/install.log; a failure shows its end.
set -euo pipefail

check_only=
if [[ ${1:-} == --check ]]; then
    check_only=yes
    shift
fi
venv=${1:?usage: scripts/install.sh [--check] VENV}
cd -P "$(dirname "$0")/.."
installing=$venv/.installing
installed=$venv/.installed
log=$venv/install.log
candidates=(python3.12 python3.13 python3.14 python3 python)

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

logged() {
    "$@" >>"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        fail "" "The installation failed; these are the last lines of $log. Mend the cause and run make install again."
    }
}

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# The checkout that is installed in the environment; nothing if none is, or it is gone.
find_owner() {
    local owner='' mark
    for mark in "$installing" "$installed"; do
        [[ ! -s $mark ]] || owner=$(<"$mark")
    done
    if [[ -z $owner && -x $venv/bin/python ]]; then
        # Environments of earlier versions do not say, but Python's metadata does.
        owner=$("$venv/bin/python" -I - 2>/dev/null <<'END' || true
import importlib.metadata, json, urllib.parse, urllib.request
text = importlib.metadata.distribution("gpt_pretrain").read_text("direct_url.json")
print(urllib.request.url2pathname(urllib.parse.urlparse(json.loads(text)["url"]).path))
END
        )
    fi
    if [[ -n $owner && -d $owner ]]; then
        (cd -P "$owner" && pwd)
    fi
}

owner=$(find_owner)
if [[ -n $owner && $owner != "$PWD" ]]; then
    fail "VENV=$venv belongs to the checkout $owner, and nothing was changed. Leave VENV out: make then creates .venv here." \
        "Or name another directory, or run make in $owner."
fi
if [[ -n $check_only ]]; then
    exit
fi

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        is_recent "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of version 3.12 or newer"
        echo "$PYTHON"
        return
    fi
    for candidate in "${candidates[@]}"; do
        if is_recent "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "No Python of version 3.12 or newer was found (tried: ${candidates[*]}). Install one, for example" \
        "    apt install python3.12 python3.12-venv    (Debian, Ubuntu)" \
        "    dnf install python3.12                    (Fedora, RHEL)" \
        "    brew install python@3.12                  (macOS)" \
        "or install uv, which brings its own, or name one: make install PYTHON=/path/to/python3.12"
}

create_venv() {
    if command -v uv >/dev/null; then
        logged uv venv "$venv" --allow-existing --python "${PYTHON:-$(<.python-version)}"
        return
    fi
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python lacks the modules venv and ensurepip; on Debian and Ubuntu: apt install python3.12-venv"
    logged "$python" -m venv "$venv"
}

# pip takes a package for installed once its metadata exists, even if it was killed before the last file. An interrupted
# installation therefore starts over.
if [[ -e $installing ]]; then
    echo "The last installation into $venv was interrupted; starting it over."
    rm -rf "$venv"
fi

mkdir -p "$venv"
: >"$log"
if [[ ! -e $venv/bin/python ]]; then
    pwd >"$installing"
    create_venv
elif ! is_recent "$venv/bin/python"; then
    fail "$venv/bin/python is not a Python of version 3.12 or newer; remove the environment: make clean"
elif [[ -e $installed ]]; then
    # An environment made elsewhere gets no mark and is never started over.
    rm "$installed"
    pwd >"$installing"
fi

echo "Installing into $venv: a few minutes the first time, PyTorch and its CUDA libraries are several GB."
echo "To watch it: tail -f $log"
if command -v uv >/dev/null; then
    logged uv pip install --python "$venv/bin/python" --constraint constraints.txt --editable '.[dev]'
else
    # An environment that uv made has no pip of its own.
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || logged "$venv/bin/python" -m ensurepip
    logged "$venv/bin/python" -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
fi
rm -f "$installing"
pwd >"$installed"
echo "Installed in $SECONDS s."
