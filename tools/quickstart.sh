#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Sets everything up on Debian 12 or Ubuntu 24.04, builds, and runs mk-perf or the tests. See usage below.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/quickstart.sh {perf|test|deps} [--no-install] [--build-dir DIR] [--ci] [-D<meson option>=<value>...]

  perf          build, then run every operator that the machine has, checked against a reference and timed
  test          build, then run the tests
  deps          only install what building needs

  --no-install  install nothing; stop with a sentence when something is missing
  --build-dir   where to build (default: build)
  --ci          also install what .ci/run needs: clang 14, clang-format 14, iproute2, shellcheck, and QEMU with
                the tools of RDMA for a virtual machine
  -D...         handed to meson, for example -Db_sanitize=thread; CXX and CC choose the compiler

Installed are distribution packages, through apt-get, and meson in .venv of this checkout when there is no
meson 1.7 or newer. Nothing else is written outside the build folder.
TEXT
}

say() { printf '%s\n' "quickstart: $*"; }
fail() {
  printf '%s\n' "quickstart: $*" >&2
  exit 1
}

packages=(build-essential ninja-build pkg-config git python3 python3-venv
          libsodium-dev libfabric-dev libibverbs-dev catch2 libcxxopts-dev)
ci_packages=(clang-14 libclang-rt-14-dev clang-format-14 iproute2 shellcheck
             qemu-system-x86 busybox-static cpio ibverbs-utils ibverbs-providers perftest)

action=${1:-}
[ $# -eq 0 ] || shift
install=yes
ci=no
build_dir=build
meson_options=()
while [ $# -gt 0 ]; do
  case $1 in
    --no-install) install=no ;;
    --ci) ci=yes ;;
    --build-dir)
      [ $# -ge 2 ] || fail "--build-dir needs a folder."
      build_dir=$2
      shift
      ;;
    --build-dir=*) build_dir=${1#*=} ;;
    -D*=*) meson_options+=("$1") ;;
    -h | --help) action=help ;;
    *)
      usage >&2
      say "expected one of the arguments above, saw \"$1\"." >&2
      exit 2
      ;;
  esac
  shift
done
case $action in
  perf | test | deps) ;;
  help | -h | --help) usage; exit 0 ;;
  *) usage >&2; exit 2 ;;
esac
[ "$ci" = no ] || packages+=("${ci_packages[@]}")

# A relative --build-dir is the caller's, everything else is relative to the checkout.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case $build_dir in
  build) build_dir=$root/build ;;
  /*) ;;
  *) build_dir=$PWD/$build_dir ;;
esac
cd "$root"

# How to become root: nothing, sudo, or a sentence.
become_root() {
  if [ "$(id -u)" -eq 0 ]; then
    as_root=(env)
  elif ! command -v sudo >/dev/null; then
    fail "missing packages: $*. You are not root and there is no sudo: ask an administrator to install them, or, when" \
         "they are there in another form, use --no-install."
  elif sudo -n true 2>/dev/null || [ -t 0 ]; then
    as_root=(sudo)
  else
    fail "missing packages: $*. sudo asks for a password and there is no terminal to ask on: run this from a" \
         "terminal, or install them first."
  fi
}

install_packages() {
  local missing=() package
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    fail "this is not Debian or Ubuntu (no apt-get). Install a C++20 compiler, ninja, pkg-config, git, meson 1.7," \
      "libsodium, Catch2 and cxxopts (with headers) by your system's means, then use --no-install."
  fi
  for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    say "all ${#packages[@]} distribution packages are there."
    return
  fi
  become_root "${missing[*]}"
  say "installing with apt-get, system-wide: ${missing[*]}"
  "${as_root[@]}" apt-get update -q || fail "apt-get update failed: is the package mirror reachable?"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" ||
    fail "apt-get could not install ${missing[*]}; its message is above."
}

# With --no-install anything that serves will do, from wherever it came.
require_tools() {
  local missing=() tool
  for tool in "${CXX:-c++}" ninja pkg-config; do
    command -v "${tool%% *}" >/dev/null || missing+=("$tool")
  done
  if command -v pkg-config >/dev/null; then
    for tool in libsodium cxxopts catch2; do
      pkg-config --exists "$tool" || missing+=("$tool (headers and pkg-config file)")
    done
  fi
  [ ${#missing[@]} -eq 0 ] || fail "--no-install, and missing: $(printf '%s, ' "${missing[@]}" | sed 's/, $//')."
}

is_recent_meson() {
  local version
  version=$("$1" --version 2>/dev/null) || return 1
  [ "$(printf '%s\n' 1.7 "$version" | sort -V | head -n 1)" = 1.7 ]
}

# Sets `meson`. CI always takes the one in .venv, the way of a machine that has nothing.
find_meson() {
  if is_recent_meson .venv/bin/meson; then
    meson=$root/.venv/bin/meson
  elif [ "$ci" = no ] && is_recent_meson meson; then
    meson=meson
  elif [ "$install" = no ]; then
    fail "--no-install, and there is no meson 1.7 or newer: neither .venv/bin/meson nor on PATH."
  else
    say "installing meson with pip into $root/.venv (the distribution's is older than 1.7)"
    # The distribution's Python: python3-venv belongs to it, whatever python3 is first on PATH.
    /usr/bin/python3 -m venv .venv || fail "python3 -m venv .venv failed; its message is above."
    .venv/bin/python -m pip install -q --disable-pip-version-check 'meson>=1.7' ||
      fail "pip could not install meson; its message is above. Is the Python package index reachable?"
    meson=$root/.venv/bin/meson
  fi
}

# Sets `cuda`: the Hopper kernels take minutes to compile and serve only where there is a GPU.
find_cuda() {
  if ! command -v nvcc >/dev/null && [ -x /usr/local/cuda/bin/nvcc ]; then
    export PATH=$PATH:/usr/local/cuda/bin
  fi
  cuda=disabled
  if ! command -v nvcc >/dev/null; then
    say "no nvcc: building the host executor only."
  elif ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    say "nvcc but no GPU: building the host executor only (-Dcuda=enabled builds the Hopper kernels all the same)."
  else
    say "GPU and nvcc: building the Hopper kernels too; the first build takes several minutes."
    cuda=auto
  fi
}

build() {
  # Lines for backtraces and profiles; all that a debugger could want takes a third more time. -Dcpp_args=-g has it.
  local options=(--buildtype=debugoptimized -Dc_args=-g1 -Dcpp_args=-g1 "-Dcuda=$cuda" -Dtools=enabled
                 -Dtests=enabled "${meson_options[@]}")
  local target=()
  [ "$action" = test ] || target=(tools/mk-perf/mk-perf)
  local configuration
  configuration="$("$meson" --version) ${options[*]}"
  if [ ! -f "$build_dir/build.ninja" ]; then
    "$meson" setup "$build_dir" "${options[@]}" || fail "meson setup failed; its message is above."
  elif [ "$(cat "$build_dir/.quickstart" 2>/dev/null)" != "$configuration" ]; then
    "$meson" setup --reconfigure "$build_dir" "${options[@]}" || fail "meson setup failed; its message is above."
  fi
  printf '%s\n' "$configuration" >"$build_dir/.quickstart"
  say "building in $build_dir"
  # Not `meson compile TARGET`: that knows only the targets from before a change of meson.build.
  ninja -C "$build_dir" "${target[@]}" || fail "the build failed; the compiler's message is above."
}

if [ "$install" = yes ]; then install_packages; else require_tools; fi
find_meson
[ "$action" != deps ] || exit 0
find_cuda
build
case $action in
  perf) exec "$build_dir/tools/mk-perf/mk-perf" all --check ;;
  test) exec "$meson" test -C "$build_dir" --no-rebuild --print-errorlogs ;;
esac
