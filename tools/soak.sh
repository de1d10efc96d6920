#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# The long runs that CI has no time for; docs/testing.md records their results.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/soak.sh {all|fuzz|launches} [--runs N] [--launches N | --hours H] [--seed S] [--build-dir DIR]

  fuzz       N inputs (default 1000000) through every libFuzzer target, built by clang++ with the address sanitizer
  launches   N operator launches (default 100000), or H hours of them: random operators, shapes and layouts,
             several communicators at once, ranks that die or abort; each checked, a line a minute
  --seed     of both (default: the time, printed); the same seed gives the same inputs and shapes
TEXT
}

fail() {
  printf '%s\n' "soak: $*" >&2
  exit 1
}

action=${1:-}
[ $# -eq 0 ] || shift
runs=1000000
launches=100000
hours=
seed=$(($(date +%s) % 1000000007))
build_dir=build-soak
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || { usage >&2; exit 2; }
  case $1 in
    --runs) runs=$2 ;;
    --launches) launches=$2 ;;
    --hours) hours=$2 ;;
    --seed) seed=$2 ;;
    --build-dir) build_dir=$2 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift 2
done
case $action in
  all | fuzz | launches) ;;
  *) usage >&2; exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
meson=.venv/bin/meson
[ -x "$meson" ] || meson=meson
command -v "$meson" >/dev/null || fail "no meson: run tools/quickstart.sh deps --ci first."

# build FOLDER OPTION...
build() {
  local folder=$1
  shift
  [ -f "$folder/build.ninja" ] || "$meson" setup "$folder" -Dcuda=disabled "$@"
  "$meson" compile -C "$folder"
}

# One line for the table of docs/testing.md.
record() {
  printf '| %s | %s | %s, %s cores | %s | %s |\n' "$1" "$(git rev-parse --short=12 HEAD)" \
    "$(uname -m)" "$(nproc)" "$seed" "$2"
}

soak_fuzz() {
  local target name found=no began arguments
  command -v clang++-14 >/dev/null || fail "no clang++-14: run tools/quickstart.sh deps --ci first."
  CC=clang-14 CXX=clang++-14 build "$build_dir/fuzz" -Dfuzz=true
  for target in "$build_dir"/fuzz/test/fuzz/*_fuzz; do
    [ -x "$target" ] || continue
    found=yes
    began=$SECONDS
    name=${target##*/}
    mkdir -p "$build_dir/corpus/$name"
    arguments=(-runs="$runs" -seed="$seed" -max_len=4096 -timeout=10)
    [ ! -f "test/fuzz/${name%_fuzz}.dict" ] || arguments+=("-dict=test/fuzz/${name%_fuzz}.dict")
    "$target" "${arguments[@]}" "$build_dir/corpus/$name"
    results+=("$(record "$name, $runs inputs" "no finding, $((SECONDS - began)) s")")
  done
  [ "$found" = yes ] || fail "no fuzz target was built in $build_dir/fuzz/test/fuzz."
}

soak_launches() {
  local began=$SECONDS
  build "$build_dir/launches" -Dtests=enabled
  local amount=(--launches "$launches") what="$launches launches"
  if [ -n "$hours" ]; then
    amount=(--seconds $((hours * 3600)))
    what="$hours h of launches"
  fi
  "$build_dir/launches/test/multi_rank/soak" "${amount[@]}" --seed "$seed"
  results+=("$(record "$what" "all right, $((SECONDS - began)) s")")
}

echo "soak: seed $seed"
results=()
case $action in
  all | fuzz) soak_fuzz ;;&
  all | launches) soak_launches ;;
esac
printf '%s\n' "${results[@]}"
