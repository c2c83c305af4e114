#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The steps of `make setup`, one argument each, in this order:
#   system        what the machine must have; installed by apt if something is missing
#   venv          the virtual environment $VENV
#   requirements  requirements.lock, into it
#   test-requirements  requirements-test.lock, into it, and programs by apt, for `make test`
#   fuzz-requirements  requirements-fuzz.lock, into it, for `make fuzz`
#   package       liveshift itself, into it (plain install; meson's build folder is kept)
#   criu          a CRIU that works here, found or fetched into it
# Only what was found missing is touched. $PYTHON and $VENV may be set by the caller.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=$(realpath -m "${VENV:-.venv}")

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
[ -t 2 ] || say() { printf '%s\n' "$*" >&2; }
fail() {
    printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

new_enough() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; }

# The system's Python first: the training processes run as unprivileged users, who can't reach an
# interpreter below somebody's home directory.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} /usr/bin/python3 python3; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

missing_packages() {
    local python
    PATH=$PATH:/usr/sbin:/sbin
    # A name, the Debian package that has it.
    while read -r program package; do
        command -v "$program" >/dev/null || echo "$package"
    done <<'LIST'
gcc gcc
ip iproute2
tc iproute2
nft nftables
unshare util-linux
nsenter util-linux
setpriv util-linux
mount mount
LIST
    [ -e /usr/include/stdio.h ] || echo libc6-dev
    [ -e /usr/include/xxhash.h ] || echo libxxhash-dev
    python=$(find_python) || { echo python3 && python=/usr/bin/python3; }
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

missing_test_packages() {
    command -v valgrind >/dev/null || echo valgrind
    command -v systemd-analyze >/dev/null || echo systemd
    command -v mpirun >/dev/null || echo openmpi-bin
}

system() { install_by_apt missing_packages; }

# Its argument prints the packages that are missing, and nothing once they are installed.
install_by_apt() {
    local missing
    missing=$($1 | sort -u | tr '\n' ' ')
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null || fail "missing here, by Debian's names: $missing" \
        "install them with this system's own tools, then try again"
    [ "$(id -u)" = 0 ] || fail "missing here: $missing" \
        "run as root: apt-get install $missing"
    say "installing $missing"
    local log
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086 # a list of names
    if ! { apt-get update && apt-get install -y --no-install-recommends $missing; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        fail "apt could not install $missing" "see its messages above"
    fi
    rm -f "$log"
    missing=$($1 | sort -u | tr '\n' ' ')
    [ -z "$missing" ] || fail "still missing after apt installed them: $missing" \
        "Python 3.11 or newer is needed; name one by: make setup PYTHON=/path/to/python3"
}

venv() {
    local python
    python=$(find_python) || fail "no Python 3.11 or newer" "make setup PYTHON=/path/to/python3"
    say "making $VENV with $python ($("$python" -c 'import platform as p; print(p.python_version())'))"
    "$python" -m venv "$VENV"
    if [ "$(id -u)" = 0 ] && ! setpriv --reuid 65534 --regid 65534 --clear-groups \
        "$VENV/bin/python" -c '' 2>/dev/null; then
        say "note: other users can't run $VENV/bin/python; jobs of unprivileged users need that"
    fi
}

pip_install() {
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --root-user-action ignore \
        "$@"
}

requirements() {
    local torch
    torch=$(sed -n 's/^torch==//p' requirements.lock)
    say "installing requirements.lock (torch $torch and $(grep -c == requirements.lock) packages in all)"
    # A plain torch==X would also take a build with CUDA, which drags gigabytes along. The machine's
    # own pip configuration says where to look.
    local said
    if ! said=$(pip_install --constraint requirements.lock "torch==$torch+cpu" 2>&1); then
        case "$(uname -m) $said" in
            *"from versions: none"*) ;; # no index answers; pip says so below
            x86_64*) say "pip finds no CPU build of torch; the default one brings CUDA along," \
                "gigabytes. (Stop and set PIP_EXTRA_INDEX_URL to an index of CPU builds to avoid it.)" ;;
        esac
    fi
    pip_install --requirement requirements.lock
}

test-requirements() {
    # Other users run `make test-fast`, which leaves out the tests that need what is missing.
    [ "$(id -u)" != 0 ] || install_by_apt missing_test_packages
    say "installing requirements-test.lock (NVIDIA's NCCL and CUDA headers, 200 MB)"
    pip_install --no-deps --requirement requirements-test.lock
}

fuzz-requirements() {
    say "installing requirements-fuzz.lock (atheris, 35 MB)"
    pip_install --no-deps --only-binary :all: --requirement requirements-fuzz.lock ||
        say "pip found no atheris for this Python, so make fuzz changes inputs without guidance"
}

package() {
    say "building and installing liveshift"
    PATH="$VENV/bin:$PATH" pip_install --no-deps --no-build-isolation --force-reinstall --no-cache-dir \
        --config-settings build-dir=build/meson .
}

criu() {
    say "looking for a CRIU that works"
    "$VENV/bin/python" -m liveshift.criu_glue.fetch
}

[ $# -gt 0 ] || set -- system venv requirements package criu
for step; do
    case $step in
        system | venv | requirements | test-requirements | fuzz-requirements | package | criu) "$step" ;;
        *) fail "no such step: $step" "see the head of $0" ;;
    esac
done
