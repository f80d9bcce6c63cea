#!/usr/bin/env bash
# What only a GPU can tell, in one run of at most eight minutes, with no network.
#
#   bench/on_gpu.sh [folder for the results] [--dry-run] [--only PART]... [--again]
#
# Needs python3 with torch, triton, numpy, pytest and the package's other dependencies; a part whose packages are missing says so and
# is left out. Each part has a time limit and a file of its own: run again, what is done is not repeated. --dry-run rehearses all of it
# on a CPU with small shapes.
set -uo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# the repository is the package: make it importable under its name without installing anything
importable=$(mktemp -d)
trap 'rm -rf "$importable"' EXIT
ln -s "$PWD" "$importable/octavo"
export PYTHONPATH="$importable${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

default=bench/results/on_gpu
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then results=$1; shift; else results=${OUT:-$default}; fi
case $results in /*) ;; *) [ "$results" = "$default" ] || results=$from/$results ;; esac
"${PYTHON:-python3}" -m octavo.bench.on_gpu "$results" "$@" &
trap 'kill -TERM $! 2>/dev/null' INT TERM # and the part that runs with it
wait $! || { code=$?; wait $! 2>/dev/null; exit $code; }
