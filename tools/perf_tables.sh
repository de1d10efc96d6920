#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Measures most of mk-perf's tables in docs/performance.md again, as far as this machine has the GPUs: a JSON file
# each.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/perf_tables.sh [--gpus N] [--only NAME]... [--seconds S] [--binaries DIR] [--out DIR] [--list]

  --gpus      ranks, one a GPU (default: the number of GPUs)
  --only      the tables whose names begin so, e.g. decode or two-nodes; may be repeated
  --seconds   begins no table after so many seconds (default: no limit)
  --binaries  a build folder, or one that holds mk-perf, libmkernel.so.0 and libsoftnic.so (default: build-cuda, build)
  --out       where NAME.json and NAME.log go (default: perf_tables)
  --list      prints the commands, and runs nothing
TEXT
}

gpus=
only=()
seconds=
binaries=
out=perf_tables
list=
while [ $# -gt 0 ]; do
  case $1 in
    --list) list=1; shift; continue ;;
    -h | --help) usage; exit 0 ;;
  esac
  [ $# -ge 2 ] || { usage >&2; exit 2; }
  case $1 in
    --gpus) gpus=$2 ;;
    --only) only+=("$2") ;;
    --seconds) seconds=$2 ;;
    --binaries) binaries=$2 ;;
    --out) out=$2 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift 2
done

if [ -z "$gpus" ]; then
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
  [ "$gpus" -gt 0 ] || { echo "perf_tables: no GPU found; say how many with --gpus, or --list the commands" >&2; exit 2; }
fi
case $gpus in
  '' | *[!0-9]* | 0) echo "perf_tables: --gpus: expected a number from 1 on, saw \"$gpus\"" >&2; exit 2 ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "$binaries" ]; then
  for candidate in "$root/build-cuda" "$root/build"; do
    if [ -x "$candidate/tools/mk-perf/mk-perf" ]; then
      binaries=$candidate
      break
    fi
  done
fi
binaries=${binaries:-build-cuda}
mk_perf=$binaries/tools/mk-perf/mk-perf
[ -x "$mk_perf" ] || mk_perf=$binaries/mk-perf
if [ -z "$list" ]; then
  [ -x "$mk_perf" ] || { echo "perf_tables: no mk-perf found; build with -Dcuda=enabled, or give --binaries DIR" >&2; exit 2; }
  mkdir -p "$out"
fi

export LD_LIBRARY_PATH="$binaries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# No multicast between GPUs, by anybody.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32

failed=0

is_wanted() {
  [ ${#only[@]} -gt 0 ] || return 0
  local prefix
  for prefix in "${only[@]}"; do
    case $1 in "$prefix"*) return 0 ;; esac
  done
  return 1
}

# table NAME [VARIABLE=VALUE...] mk-perf|compare_attention|compare_packed_attention ARGUMENT...
table() {
  local name=$1 variables=()
  shift
  is_wanted "$name" || return 0
  while [[ $1 == *=* ]]; do
    variables+=("$1")
    shift
  done
  if [ -n "$list" ]; then
    echo "$name: ${variables[*]:+${variables[*]} }$*"
    return 0
  fi
  local program=("$mk_perf")
  [ "$1" = mk-perf ] || program=(python3 "$root/tools/$1.py")
  shift
  if [ -n "$seconds" ] && [ "$SECONDS" -ge "$seconds" ]; then
    echo "$name: not begun, $seconds s have passed"
    return 0
  fi
  local status=0 begin=$SECONDS
  env "${variables[@]}" timeout -k 10 600 "${program[@]}" "$@" --json "$out/$name.json" >"$out/$name.log" 2>&1 </dev/null || status=$?
  echo "$name: status $status after $((SECONDS - begin)) s"
  [ "$status" -eq 0 ] && return 0
  tail -n 3 "$out/$name.log" | sed 's/^/    /'
  failed=$((failed + 1))
}

# shapes SUFFIX VALUE...: a --shape for each, in $shapes.
shapes() {
  local suffix=$1 value
  shift
  shapes=()
  for value in "$@"; do shapes+=(--shape "$value$suffix"); done
}

attention=heads=16,kv_heads=16,dim=128

if [ "$gpus" -eq 1 ]; then
  shapes ",$attention" batch=4,seq={3072,6144,12288,24576} batch=4,seq={3072,6144,12288,24576},causal=1
  for operator in ring_attention ring_attention_backward; do
    table "${operator//_/-}" mk-perf "$operator" -g 1 --baseline none --iters 6 "${shapes[@]}"
  done
  if [ -n "$list" ] || python3 -c 'import torch' 2>/dev/null; then
    # beside_cudnn NAME OPERATOR ARGUMENT...: ours before and behind cuDNN, of the same shapes.
    beside_cudnn() {
      local name=$1 operator=$2 gradients=()
      shift 2
      [ "$operator" = ring_attention ] || gradients=(--gradients)
      table "$name-before" mk-perf "$operator" -g 1 --baseline none --iters 8 "$@"
      table "$name-cudnn" compare_attention -g 1 "${gradients[@]}" --iters 8 "$@"
      table "$name-behind" mk-perf "$operator" -g 1 --baseline none --iters 8 "$@"
    }
    # A shape at a time, or from short to long: a long one leaves a slower clock behind.
    for dim in 128 64; do
      for seq in 3072 6144 12288 24576; do
        for causal in 0 1; do
          shape=batch=4,seq=$seq,heads=16,kv_heads=16,dim=$dim,causal=$causal,zigzag=$causal
          beside_cudnn "beside-cudnn-$dim-$seq-$causal" ring_attention --shape "$shape"
        done
      done
      shapes ",heads=16,kv_heads=16,dim=$dim" batch=4,seq={3072,6144,12288,24576}{,",causal=1,zigzag=1"}
      beside_cudnn "gradients-beside-cudnn-$dim" ring_attention_backward "${shapes[@]}"
    done
    shapes ",$attention" batch=1,seq={256,512,1024,2048,4096} batch=1,seq={256,512,1024,2048,4096},causal=1,zigzag=1
    beside_cudnn short-beside-cudnn ring_attention "${shapes[@]}"
    beside_cudnn short-gradients-beside-cudnn ring_attention_backward "${shapes[@]}"
  else
    echo "beside-cudnn, gradients-beside-cudnn: left out, Python has no PyTorch here"
  fi
  shapes ",$attention" batch=1,seq={256,512,1024,2048} batch=1,seq={256,512,1024,2048},causal=1
  table short-backward mk-perf ring_attention_backward -g 1 --baseline none --iters 8 "${shapes[@]}"
  shapes ",$attention" batch=1,seq={24576,12288,8192},packed=8{,",causal=1"} batch=1,seq=24576,packed=2,causal=1 batch=1,seq=12288,packed=1{,",causal=1"} batch=1,seq={4096,8192},packed=16{,",causal=1"}
  packed=("${shapes[@]}")
  shapes ,heads=16,kv_heads=16,dim=64 batch=1,seq=24576,packed=8{,",causal=1"} batch=1,seq=4096,packed=16,causal=1
  packed+=("${shapes[@]}")
  # Few tiles.
  shapes ,heads=4,kv_heads=4,dim=128 batch=1,seq=8192,packed={2,4},causal=1 batch=1,seq=16384,packed=4
  packed_few=("${shapes[@]}")
  shapes ,heads=8,kv_heads=8,dim=128 batch=1,seq=8192,packed=4,causal=1
  packed_few+=("${shapes[@]}")
  for operator in ring_attention ring_attention_backward; do
    table "packed-${operator//_/-}" mk-perf "$operator" -g 1 --baseline none --iters 8 "${packed[@]}" "${packed_few[@]}"
    table "checked-packed-${operator//_/-}" mk-perf "$operator" -g 1 --baseline none --iters 1 --warmup 0 --check "${packed[@]}" "${packed_few[@]}"
  done
  if [ -n "$list" ] || python3 -c 'import torch' 2>/dev/null; then
    table packed-pytorch compare_packed_attention --iters 8 "${packed[@]}" "${packed_few[@]}"
    # Without those of few heads, of which PyTorch's met an illegal address (torch 2.11, cuDNN 9.19).
    table packed-pytorch-gradients compare_packed_attention --gradients --iters 8 "${packed[@]}"
  fi
  shapes ,hidden=7168,inter=2048,experts=128,topk=8 tokens={8,128,4096,16384}
  for operator in moe_dispatch_gemm moe_gemm_combine; do
    table "experts-${operator//_/-}" mk-perf "$operator" -g 1 --baseline none --check --iters 6 "${shapes[@]}"
  done
  [ "$failed" -eq 0 ]
  exit
fi

ranks=(-g "$gpus")
# Llama-3-70B's layers as four ranks share them, and for all-gathers also two, whatever the number of ranks.
shapes "" m={16,32,64,128,256,512,1024},n=2560,k=8192 m={16,64,128,256},n=5120,k=8192 m={16,64,128},n=28672,k=8192
table decode-allgather-gemm mk-perf allgather_gemm "${ranks[@]}" --mode both --check --iters 20 "${shapes[@]}"
# Of one to a few waves of tiles.
shapes "" m={16,128,256,512,1024,2048,4096,8192},n=5120,k=8192 m={512,1024,2048,4096},n=2560,k=8192 m={16,256,512},n=28672,k=8192 m={1024,2048},n=14336,k=8192 m=2048,n=1024,k=2048 m=4096,n=2048,k=4096 m=8192,n=4096,k=8192 m=16384,n=8192,k=16384 m=1024,n=4096,k=4096 m=1536,n=2048,k=7168
table waves-allgather-gemm mk-perf allgather_gemm "${ranks[@]}" --check --iters 10 "${shapes[@]}"
shapes "" m={64,512,1024,2048,4096,8192,16384},n=8192,k=3584 m=4096,n=8192,k={1024,14336} m={2048,4096},n=4096,k=4096 m=8192,n=2048,k=8192 m={1000,4096},n=1000,k=1000
table wgrad mk-perf allgather_gemm_wgrad "${ranks[@]}" --mode both --check --iters 10 "${shapes[@]}"
table accumulated-wgrad mk-perf allgather_gemm_wgrad "${ranks[@]}" --out-dtype fp32 --accumulate --mode both --check --iters 10 "${shapes[@]}"
shapes ,n=8192 m={16,32,64,128,256},k=2048 m={16,32,64,128,256},k=7168
for operator in gemm_reduce_scatter gemm_allreduce; do
  table "decode-${operator//_/-}" mk-perf "$operator" "${ranks[@]}" --mode both --check --iters 20 "${shapes[@]}"
done
shapes "" m={256,1024,2048},n=8192,k=4096 m={1024,2048},n=8192,k=2048 m=1024,n=8192,k=7168 m=4096,n=8192,k=3584 m=8192,n=8192,k=3072 m={768,1024},n=28672,k=2048
for operator in gemm_reduce_scatter gemm_allreduce; do
  table "waves-${operator//_/-}" mk-perf "$operator" "${ranks[@]}" --mode both --check --iters 10 "${shapes[@]}"
done
# Some hundred rows, of two ranks, mostly no multiples of a tile's.
shapes "" m={136,200,256,300,384,420,480,600,700},n={5120,8192,10240,14336,28672},k=8192
table hundred-rows-allgather-gemm mk-perf allgather_gemm "${ranks[@]}" --check --iters 10 "${shapes[@]}"
shapes "" m={136,200,256,300,350,420,480,600,700},n=8192,k={2048,4096,14336} \
  m={136,200,256,300,350,420,480,600,700},n={5120,16384},k=4096 m={200,300,600},n=4096,k=2048
for operator in gemm_reduce_scatter gemm_allreduce; do
  table "hundred-rows-${operator//_/-}" mk-perf "$operator" "${ranks[@]}" --check --iters 10 "${shapes[@]}"
done
for operator in allgather_gemm gemm_reduce_scatter gemm_allreduce; do
  table "square-${operator//_/-}" mk-perf "$operator" "${ranks[@]}" --preset square --mode both --check --iters 10
done
for operator in allgather_gemm gemm_allreduce; do
  table "llama-${operator//_/-}" mk-perf "$operator" "${ranks[@]}" --preset llama3-70b --iters 10
done
tokens=(--only tokens=8192 --only tokens=16384 --only tokens=32768)
shapes ,hidden=7168,inter=2048,experts=256,topk=8 tokens={16,256}
for operator in moe_dispatch_gemm moe_gemm_combine; do
  table "decode-${operator//_/-}" mk-perf "$operator" "${ranks[@]}" --check --iters 10 "${shapes[@]}"
  table "experts-${operator//_/-}" mk-perf "$operator" "${ranks[@]}" --preset deepseek-v3 "${tokens[@]}" --check --iters 8
done
sequences=(--only seq=12288 --only seq=24576)
table attention mk-perf ring_attention "${ranks[@]}" --preset ring-attention --only seq=6144 "${sequences[@]}" --check --iters 8
table attention-backward mk-perf ring_attention_backward "${ranks[@]}" --preset ring-attention "${sequences[@]}" --only seq=49152 --iters 4

# Between two emulated nodes, 400 Gb/s and 5 us, a NIC a GPU.
softnic=$binaries/tools/softnic/libsoftnic.so
[ -e "$softnic" ] || softnic=$binaries/libsoftnic.so
network=("MK_VERBS_LIBRARY=${MK_VERBS_LIBRARY:-$softnic}" MK_TRANSPORT=rc MK_SOFTNIC_NICS=1 MK_SOFTNIC_RATE_GBPS=400
  MK_SOFTNIC_LATENCY_US=5 MK_SOFTNIC_BUSY_US=100000)
if [ $((gpus % 2)) -eq 0 ]; then
  nodes=("${ranks[@]}" --nodes 2 --baseline none)
  for operator in allgather_gemm gemm_reduce_scatter gemm_allreduce; do
    table "two-nodes-${operator//_/-}" "${network[@]}" mk-perf "$operator" "${nodes[@]}" --preset square --only m=16384 --only m=32768 --unfused --iters 5
  done
  for operator in moe_dispatch_gemm moe_gemm_combine; do
    table "two-nodes-${operator//_/-}" "${network[@]}" mk-perf "$operator" "${nodes[@]}" --preset deepseek-v3 --only tokens=8192 --only tokens=16384 --check --iters 8
  done
  table two-nodes-attention "${network[@]}" mk-perf ring_attention "${nodes[@]}" --preset ring-attention "${sequences[@]}" --only seq=49152 --iters 4
  table two-nodes-attention-backward "${network[@]}" mk-perf ring_attention_backward "${nodes[@]}" --preset ring-attention "${sequences[@]}" --iters 3
fi
[ "$failed" -eq 0 ]
