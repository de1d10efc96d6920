#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs an example as a job of three processes: run_example.sh PROGRAM [ARGUMENT...]
# They are told who they are by the library's variables, and by those of torchrun; where their id is, by the first argument.
set -u
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
MASTER_ADDR=127.0.0.1
MASTER_PORT=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])') || exit 1
export MASTER_ADDR MASTER_PORT WORLD_SIZE=3 MK_NRANKS=3
program=$1
shift
case $program in *.py) python=${PYTHON:-python3} ;; *) python= ;; esac
for rank in 0 1 2; do
  # shellcheck disable=SC2086
  MK_RANK=$rank RANK=$rank LOCAL_RANK=$rank timeout "${EXAMPLE_SECONDS:-60}" $python "$program" "$scratch/id" "$@" \
    >"$scratch/out.$rank" 2>&1 &
done
wait
cat "$scratch"/out.*
for rank in 0 1 2; do
  grep -q "^rank $rank of 3: .* 0 wrong$" "$scratch/out.$rank" || exit 1
done
