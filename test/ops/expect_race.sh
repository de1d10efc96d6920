#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# expect_race.sh PROGRAM: the thread sanitizer finds a data race in PROGRAM, and none in PROGRAM --acquire.
set -uo pipefail
program=$1

# The sanitizer's runtime of this age fails under some kernels' address space randomisation.
run() {
  if setarch -R true 2>/dev/null; then
    setarch -R "$program" "$@" 2>&1
  else
    "$program" "$@" 2>&1
  fi
}

export TSAN_OPTIONS=exitcode=66:halt_on_error=0
run --acquire || { echo "failed with the flags acquired"; exit 1; }
output=$(run)
status=$?
printf '%s\n' "$output" | head -n 40
[ "$status" -eq 66 ] || { echo "expected the sanitizer's exit code 66, saw $status"; exit 1; }
grep -q 'WARNING: ThreadSanitizer: data race' <<<"$output" || { echo "expected a report of a data race"; exit 1; }
