// SPDX-License-Identifier: MIT
// Stream capture through the C interface, one rank on a GPU: an unprepared call is refused and leaves
// communicator and capture usable; a prepared one is exactly one kernel node and replays with new inputs; a
// trace has what was launched while it was taken.
#include <cuda_runtime_api.h>

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "mkernel.h"

namespace {

int passed = 0;
int failed = 0;

void check(bool condition, const char* what) {
  condition ? ++passed : ++failed;
  if (!condition) std::printf("FAILED: %s (%s)\n", what, mk_get_last_error(nullptr));
}

constexpr int kM = 300, kN = 136, kK = 72;

// Integers that bf16 holds exactly, different for every `turn`.
float a_value(int turn, int i, int k) { return static_cast<float>((i * 3 + k * 5 + turn) % 5 - 2); }
float b_value(int k, int j) { return static_cast<float>((k * 7 + j * 2) % 3 - 1); }
uint16_t bf16(float value) {
  const union {
    float number;
    uint32_t bits;
  } word = {value};
  return static_cast<uint16_t>(word.bits >> 16);
}

bool upload_a(void* a, int turn) {
  std::vector<uint16_t> values(kM * kK);
  for (int i = 0; i < kM; ++i)
    for (int k = 0; k < kK; ++k) values[i * kK + k] = bf16(a_value(turn, i, k));
  return cudaMemcpy(a, values.data(), values.size() * 2, cudaMemcpyHostToDevice) == cudaSuccess;
}

bool right(const void* c, int turn) {
  std::vector<float> got(kM * kN);
  if (cudaMemcpy(got.data(), c, got.size() * 4, cudaMemcpyDeviceToHost) != cudaSuccess) return false;
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kN; ++j) {
      float sum = 0;
      for (int k = 0; k < kK; ++k) sum += a_value(turn, i, k) * b_value(k, j);
      if (got[i * kN + j] != sum) return false;
    }
  }
  return true;
}

// The trace of one launch, as mk_trace_stop writes it.
void check_trace(mk_comm_t comm, const mk_allgather_gemm_args_t& args, cudaStream_t stream) {
  char path[] = "/tmp/capture_test_trace_XXXXXX";
  const int file = mkstemp(path);
  check(file >= 0, "a file for the trace");
  close(file);
  check(mk_trace_start(comm, nullptr) == MK_SUCCESS, "mk_trace_start");
  check(mk_allgather_gemm(comm, &args, stream) == MK_SUCCESS, "a traced call");
  check(mk_trace_stop(comm, path) == MK_SUCCESS, "mk_trace_stop");
  std::ostringstream trace;
  trace << std::ifstream(path).rdbuf();
  for (const char* words : {"allgather_gemm", "m=300, n=136, k=72", "cta 0 load", "cta 0 compute 0"})
    check(trace.str().find(words) != std::string::npos, words);
  unlink(path);
}

}  // namespace

int main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return 77;
  mk_unique_id_t id;
  mk_comm_t comm = nullptr;
  mk_comm_config_t config = MK_COMM_CONFIG_INIT;
  config.device = MK_DEVICE_CUDA;
  check(mk_get_unique_id(&id) == MK_SUCCESS, "mk_get_unique_id");
  check(mk_comm_init(&comm, &id, 1, 0, &config) == MK_SUCCESS, "mk_comm_init");

  void *a, *b, *c;
  cudaStream_t stream;
  cudaMalloc(&a, kM * kK * 2);
  cudaMalloc(&b, kK * kN * 2);
  cudaMalloc(&c, kM * kN * 4);
  cudaStreamCreate(&stream);
  std::vector<uint16_t> b_values(kK * kN);
  for (int k = 0; k < kK; ++k)
    for (int j = 0; j < kN; ++j) b_values[k * kN + j] = bf16(b_value(k, j));
  cudaMemcpy(b, b_values.data(), b_values.size() * 2, cudaMemcpyHostToDevice);

  mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
  args.m = kM, args.n = kN, args.k = kK, args.out_dtype = MK_DTYPE_FP32;
  args.a = a, args.lda = kK, args.b = b, args.ldb = kN, args.c = c, args.ldc = kN;

  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess, "capture begins");
  check(mk_allgather_gemm(comm, &args, stream) == MK_ERROR_NOT_PREPARED,
        "an unprepared call under capture is refused");
  check(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "the capture is still valid");

  mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
  maxima.m = kM, maxima.n = kN, maxima.k = kK;
  check(mk_allgather_gemm_prepare(comm, &maxima) == MK_SUCCESS, "prepare");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
        "capture begins again");
  check(mk_allgather_gemm(comm, &args, stream) == MK_SUCCESS, "a prepared call under capture");
  check(cudaStreamEndCapture(stream, &graph) == cudaSuccess, "capture ends");
  size_t num_nodes = 0;
  check(cudaGraphGetNodes(graph, nullptr, &num_nodes) == cudaSuccess && num_nodes == 1, "one node");
  cudaGraphExec_t replay;
  check(cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess, "instantiate");
  for (int turn = 0; turn < 100; ++turn) {
    upload_a(a, turn);
    cudaMemset(c, 0xff, kM * kN * 4);  // NaN
    cudaGraphLaunch(replay, stream);
    check(cudaStreamSynchronize(stream) == cudaSuccess && right(c, turn), "a replay");
  }
  check_trace(comm, args, stream);
  check(mk_comm_synchronize(comm, stream) == MK_SUCCESS, "mk_comm_synchronize");
  check(mk_comm_finalize(comm) == MK_SUCCESS, "mk_comm_finalize");
  check(mk_comm_destroy(comm) == MK_SUCCESS, "mk_comm_destroy");
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
