#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs an example as a job of three processes: run_example.sh PROGRAM [ARGUMENT...]
# They are told who they are by the library's variables, and by those of torchrun; where their id is, by the first argument.
set -u
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
program=$1 python=
shift
case $program in
  *.py)
    python=${PYTHON:-python3}
    MASTER_PORT=$("$python" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])') || exit 1
    export MASTER_PORT MASTER_ADDR=127.0.0.1 WORLD_SIZE=3
    ;;
esac
export MK_NRANKS=3
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
