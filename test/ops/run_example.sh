#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs an example as a job of three processes: run_example.sh PROGRAM
set -u
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for rank in 1 2; do
  MK_RANK=$rank MK_NRANKS=3 timeout 60 "$1" "$scratch/id" >"$scratch/out.$rank" 2>&1 &
done
MK_RANK=0 MK_NRANKS=3 timeout 60 "$1" "$scratch/id" >"$scratch/out.0" 2>&1
wait
cat "$scratch"/out.*
for rank in 0 1 2; do
  grep -q "^rank $rank of 3: .* 0 wrong$" "$scratch/out.$rank" || exit 1
done
