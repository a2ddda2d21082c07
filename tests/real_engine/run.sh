#!/usr/bin/env bash
# Two real vLLM engines, three replicas and HAProxy on this machine: see README.md beside this file.
#
# usage: tests/real_engine/run.sh [options of run.py, see `run.py --help`]
#   EXTRA_CLIENTS     client scripts, joined by ":", each run as `SCRIPT URL MODEL`
#   and what play.sh reads
exec "$(dirname "${BASH_SOURCE[0]}")/play.sh" run.py "$@"
