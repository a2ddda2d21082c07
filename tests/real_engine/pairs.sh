#!/usr/bin/env bash
# A real vLLM engine for prompts and one for answers, three replicas and HAProxy: see README.md beside this file.
#
# usage: tests/real_engine/pairs.sh [options of pairs.py, see `pairs.py --help`], with what play.sh reads
exec "$(dirname "${BASH_SOURCE[0]}")/play.sh" pairs.py "$@"
