#!/bin/sh
# SPDX-License-Identifier: MIT
# Installs into a scratch folder, compiles the example at the end of mkernel.h against that installation as its
# comment says, and runs it with two ranks.
# usage: check_install.sh MESON BUILD_DIR PREFIX LIBDIR COMPILER...
set -eu
meson=$1
build_dir=$2
prefix=$3
libdir=$4
shift 4
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$meson" install -C "$build_dir" --no-rebuild --quiet --tags runtime,devel --destdir "$scratch/root"
installed=$scratch/root$prefix

export PKG_CONFIG_PATH="$installed/$libdir/pkgconfig"
export PKG_CONFIG_SYSROOT_DIR="$scratch/root"
# Also when the prefix is /usr, whose folders pkg-config leaves out otherwise.
export PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1 PKG_CONFIG_ALLOW_SYSTEM_LIBS=1
flags=$(pkg-config --cflags --libs mkernel)
echo "pkg-config --cflags --libs mkernel: $flags"
case $flags in
  *"$scratch"*"$scratch"*) ;;
  *) echo "expected the header's and the library's folder under $scratch"; exit 1 ;;
esac
# shellcheck disable=SC2086 # flags are words
"$@" -std=c99 -D_DEFAULT_SOURCE -Wall -Wextra -Werror -DMKERNEL_EXAMPLE -x c "$installed/include/mkernel.h" -x none \
  $flags -o "$scratch/example"

export LD_LIBRARY_PATH="$installed/$libdir"
export MK_NRANKS=2
MK_RANK=1 "$scratch/example" "$scratch/id" >"$scratch/out.1" &
rank_1=$!
status=0
MK_RANK=0 "$scratch/example" "$scratch/id" >"$scratch/out.0" || status=$?
wait "$rank_1" || status=$?
cat "$scratch/out.0" "$scratch/out.1"
[ "$status" -eq 0 ] || { echo "a rank exited with $status"; exit 1; }
[ "$(cat "$scratch/out.0" "$scratch/out.1")" = "rank 0 of 2: 0 wrong
rank 1 of 2: 0 wrong" ] || { echo "expected '0 wrong' of both ranks"; exit 1; }
