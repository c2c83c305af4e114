#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# scripts/alone.sh NAME TARGET… -- COMMAND…
# Takes the lock of launcher/alone.py for NAME, makes the targets (setup), and becomes the command,
# which is handed the lock. So a second run in the same clone is refused before its setup could
# replace what the first one uses, or both could build one .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
LOCK=$(sed -n 's/^LOCK = Path("\(.*\)")$/\1/p' launcher/alone.py)

what=$1 targets=()
shift
while [ "$1" != -- ]; do
    targets+=("$1")
    shift
done
shift

prepare() { make --silent --no-print-directory "${targets[@]}" 9>&-; }

# Part of another run; or a machine whose util-linux setup has yet to install; or a user who may not
# write there, and can make no lab anyway.
if [ -n "${LIVESHIFT_WHOLE_RUN:-}" ] || ! command -v flock >/dev/null || ! : 2>/dev/null >>"$LOCK"; then
    prepare
    exec "$@"
fi
while :; do
    exec 9>>"$LOCK"
    if ! flock --nonblock 9; then
        holder=$(cat "$LOCK" 2>/dev/null || true)
        printf 'error: %s cannot start: %s runs on this machine\nhint: %s\n' "$what" \
            "${holder:-another whole run}" \
            "wait for its end, or interrupt it; both would disturb each other" >&2
        exit 5
    fi
    [ "$LOCK" -ef /proc/self/fd/9 ] && break # else its last holder has just removed it
done
trap 'rm -f "$LOCK"' EXIT # not when we become the command
printf '%s (process %s, in %s)' "$what" $$ "$PWD" >"$LOCK"
export LIVESHIFT_WHOLE_RUN="handed to $$"
prepare
exec "$@"
