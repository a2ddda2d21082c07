#!/usr/bin/env bash
# Plays one of the programs beside it with real engines: what run.sh and pairs.sh share.
#
# usage: play.sh PROGRAM.py [its options]
#   REAL_ENGINE_DIR   what setup.sh filled               default: target/real-engine
#   OUT               logs and results                   default: target/real-engine-run/TIME
#   LIMIT_S           the whole run is ended after this  default: 2400
#   GRAPEVINE         the binary to run                  default: built with cargo
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
program=$1
shift
engine_dir=${REAL_ENGINE_DIR:-$project/target/real-engine}
out=${OUT:-$project/target/real-engine-run/$(date +%Y%m%d-%H%M%S)}

skip() {
    echo "skipped: $1"
    exit 0
}
[ -x "$engine_dir/venv/bin/vllm" ] || skip "no engine in $engine_dir; run tests/real_engine/setup.sh"
[ -f "$engine_dir/model/model.safetensors" ] || skip "no model in $engine_dir; run tests/real_engine/setup.sh"
[ -x "$engine_dir/clients-venv/bin/python" ] || skip "no clients in $engine_dir; run tests/real_engine/setup.sh"
command -v haproxy >/dev/null || skip "haproxy is not installed"

if [ -z "${GRAPEVINE:-}" ]; then
    cargo build --release --manifest-path "$project/Cargo.toml" --bin grapevine
    GRAPEVINE=$(cargo metadata --format-version 1 --no-deps --manifest-path "$project/Cargo.toml" |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')/release/grapevine
fi

mkdir -p "$out"
out=$(cd "$out" && pwd)
engine_dir=$(cd "$engine_dir" && pwd)

# The program ends what it started, and lists what still runs in $out/pids. This is for the case that it
# could not: each line is the id of a process group that it made.
run_pid=
finish() {
    if [ -n "$run_pid" ]; then
        kill -TERM "$run_pid" 2>/dev/null || true
        wait "$run_pid" 2>/dev/null || true
    fi
    while read -r group; do
        kill -KILL -- "-$group" 2>/dev/null || true
    done < <(cat "$out/pids" 2>/dev/null)
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

python3 -B -m unittest discover --quiet -s "$here"

timeout --kill-after=90 "${LIMIT_S:-2400}" python3 "$here/$program" \
    --engine-dir "$engine_dir" --replica-binary "$GRAPEVINE" --out "$out" "$@" &
run_pid=$!
code=0
wait "$run_pid" || code=$?
run_pid=
exit "$code"
