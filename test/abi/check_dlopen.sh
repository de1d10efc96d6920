#!/bin/sh
# SPDX-License-Identifier: MIT
# usage: check_dlopen.sh DLOPEN_TEST LIBRARY
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# The loader looks here first and gives up on an empty file: the machine's own ones, if any, are out of reach.
for name in libcuda.so.1 libcudart.so.12 libibverbs.so.1 libefa.so.1 libfabric.so.1 libnccl.so.2; do
  : >"$scratch/$name"
done
LD_LIBRARY_PATH=$scratch "$1" "$(realpath "$2")"
