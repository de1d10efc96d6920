#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Kills, aborts, stops and cut links at seeded random moments; docs/testing.md records the results of full runs.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/fault_campaign.sh [--faults N] [--cuts N] [--seed S] [--build-dir DIR]

  --faults   kills, aborts and stops of ranks (default 1000), about 0.6 s each
  --cuts     network links cut (default 40), about 2 s each; needs root
  --seed     of both (default: the time, printed)
TEXT
}

faults=1000
cuts=40
seed=$(($(date +%s) % 1000000007))
build_dir=build-soak
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || { usage >&2; exit 2; }
  case $1 in
    --faults) faults=$2 ;;
    --cuts) cuts=$2 ;;
    --seed) seed=$2 ;;
    --build-dir) build_dir=$2 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift 2
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
meson=.venv/bin/meson
[ -x "$meson" ] || meson=meson
if ! command -v "$meson" >/dev/null; then
  echo "fault_campaign: no meson: run tools/quickstart.sh deps --ci first." >&2
  exit 1
fi
folder=$build_dir/launches
[ -f "$folder/build.ninja" ] || "$meson" setup "$folder" -Dcuda=disabled -Dtests=enabled
"$meson" compile -C "$folder"

echo "fault_campaign: seed $seed, commit $(git rev-parse --short=12 HEAD), $(uname -m), $(nproc) cores"
status=0
"$folder/test/multi_rank/fault_campaign" --faults "$faults" --seed "$seed" || status=1
cut_status=0
"$folder/test/multi_rank/link_cut" --cuts "$cuts" --seed "$seed" || cut_status=$?
[ "$cut_status" -eq 77 ] || [ "$cut_status" -eq 0 ] || status=1
exit "$status"
