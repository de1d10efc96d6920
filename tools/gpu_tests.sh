#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Runs the tests that need GPUs, one line each, the last line says how many passed and failed.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/gpu_tests.sh [--ranks N] [--quick] [--strict] [--binaries DIR] [--only NAME]... [--logs DIR]

  --ranks     ranks a job (default: the number of GPUs, at least 2; with fewer GPUs than ranks they share)
  --quick     fewer launches and smaller sizes: about two minutes in all
  --strict    times are asserted, too
  --binaries  a build folder, or a folder that holds the programs and libmkernel.so.0 (default: build-cuda, build)
  --only      run this program alone, e.g. operators_stress_test
  --logs      keep each program's output there
TEXT
}

ranks=
quick=
strict=
binaries=
logs=
only=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=--quick; shift; continue ;;
    --strict) strict=--strict; shift; continue ;;
    -h | --help) usage; exit 0 ;;
  esac
  [ $# -ge 2 ] || { usage >&2; exit 2; }
  case $1 in
    --ranks) ranks=$2 ;;
    --binaries) binaries=$2 ;;
    --only) only+=("$2") ;;
    --logs) logs=$2 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift 2
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "$binaries" ]; then
  for candidate in "$root/build-cuda" "$root/build"; do
    if [ -x "$candidate/test/gpu/operators_test" ]; then
      binaries=$candidate
      break
    fi
  done
fi
if [ -z "$binaries" ] || [ ! -d "$binaries" ]; then
  echo "gpu_tests: no programs found; build with meson setup build -Dcuda=enabled, or give --binaries DIR" >&2
  exit 2
fi
programs=$binaries
[ ! -d "$binaries/test/gpu" ] || programs=$binaries/test/gpu
if [ -z "$logs" ]; then
  logs=$(mktemp -d)
  trap 'rm -rf "$logs"' EXIT
fi
mkdir -p "$logs"

export LD_LIBRARY_PATH="$binaries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# The network between emulated nodes.
for library in "$binaries/tools/softnic/libsoftnic.so" "$binaries/libsoftnic.so"; do
  [ ! -e "$library" ] || export MK_VERBS_LIBRARY="${MK_VERBS_LIBRARY:-$library}"
done
# No multicast between GPUs, by anybody.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
# See set_environment() in test/gpu/operators_job.h.
export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32

passed=0
failed=0

is_wanted() {
  [ ${#only[@]} -gt 0 ] || return 0
  local name
  for name in "${only[@]}"; do
    [ "$name" != "$1" ] || return 0
  done
  return 1
}

# run SECONDS PROGRAM ARGUMENT...
run() {
  local limit=$1 name=$2
  shift 2
  is_wanted "$name" || return 0
  if [ ! -x "$programs/$name" ]; then
    # A folder that was carried to another machine may hold a few of them only.
    if [ "$programs" = "$binaries" ] && [ ${#only[@]} -eq 0 ]; then
      echo "$name: not in $programs, left out"
      return 0
    fi
    echo "$name: FAILED: not in $programs"
    failed=$((failed + 1))
    return 0
  fi
  local status=0 begin=$SECONDS log=$logs/$name.log
  timeout -k 10 "$limit" "$programs/$name" "$@" >"$log" 2>&1 </dev/null || status=$?
  local seconds=$((SECONDS - begin)) last
  last=$(tail -n 1 "$log")
  case $status in
    0)
      echo "$name: passed in $seconds s: $last"
      passed=$((passed + 1))
      return 0
      ;;
    77)
      echo "$name: $last"
      return 0
      ;;
    124 | 137) echo "$name: FAILED: did not end within $limit s" ;;
    *) echo "$name: FAILED in $seconds s with status $status: $last" ;;
  esac
  tail -n 20 "$log" | sed 's/^/    /'
  failed=$((failed + 1))
}

options=()
[ -z "$ranks" ] || options+=(--ranks "$ranks")
[ -z "$quick" ] || options+=("$quick")
[ -z "$strict" ] || options+=("$strict")
scale=$([ -n "$quick" ] && echo 1 || echo 2)

run 120 cuda_symmetric_memory_test
run 300 gemm_test
run 60 capture_test
run 60 trace_test
run 300 fifo_test ${quick:+"$quick"}
run 300 operators_test ${ranks:+"$ranks"}
run 300 operators_wgrad_test ${ranks:+"$ranks"}
run $((120 * scale)) operators_stress_test "${options[@]}"
run $((120 * scale)) operators_capture_test "${options[@]}"
run $((120 * scale)) operators_misuse_test "${options[@]}"
run $((120 * scale)) operators_beside_test "${options[@]}"
run $((150 * scale)) operators_moe_test "${options[@]}"
run $((200 * scale)) operators_large_test "${options[@]}"
run $((60 * scale)) operators_outputs_test "${options[@]}"
run $((200 * scale)) operators_fault_test "${options[@]}"
run $((120 * scale)) attention_test "${options[@]}"
run $((300 * scale)) attention_network_test "${options[@]}"
run $((300 * scale)) attention_packed_network_test "${options[@]}"
run $((400 * scale)) operators_network_test "${options[@]}"
run $((200 * scale)) operators_moe_network_test "${options[@]}"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
