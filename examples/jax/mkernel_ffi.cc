// SPDX-License-Identifier: MIT
// Two GEMM operators of libmkernel as custom calls of XLA, for tensor_parallel.py, which says how it is built.
// A call only enqueues on a GPU, in XLA's own stream; on the host it returns when the result is there. The
// communicator comes as an attribute; sizes are those of the buffers.
#include <cstdint>
#include <string>
#include <utility>

#include "mkernel.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;
// What a call takes from the one before it and gives the next one, so that XLA sees their order. Nothing is in
// it.
using Turn = ffi::AnyBuffer;
using NextTurn = ffi::Result<ffi::AnyBuffer>;

mk_dtype_t dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::BF16:
      return MK_DTYPE_BF16;
    case ffi::F16:
      return MK_DTYPE_FP16;
    case ffi::F32:
      return MK_DTYPE_FP32;
    default:
      return MK_DTYPE_DEFAULT;
  }
}

ffi::Error result_of(mk_status_t status, int64_t comm) {
  if (status == MK_SUCCESS) return ffi::Error::Success();
  const char* const sentence = mk_get_last_error(reinterpret_cast<mk_comm_t>(comm));
  return ffi::Error::Internal(std::string(mk_status_string(status)) + ": " + sentence);
}

template <class Args>
void set_matrices(In a, In b, Out c, int64_t b_layout, Args* args) {
  args->dtype = dtype_of(a.element_type());
  args->out_dtype = dtype_of(c->element_type());
  args->b_layout = static_cast<mk_layout_t>(b_layout);
  args->a = a.untyped_data(), args->lda = a.dimensions()[1];
  args->b = b.untyped_data(), args->ldb = b.dimensions()[1];
  args->c = c->untyped_data(), args->ldc = c->dimensions()[1];
}

ffi::Error allgather_gemm(mk_stream_t stream, int64_t comm, int64_t mode, int64_t b_layout, In a, In b, Turn,
                          Out c, NextTurn) {
  mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
  args.mode = static_cast<mk_allgather_mode_t>(mode);
  const bool is_wgrad = args.mode == MK_ALLGATHER_WGRAD;
  args.m = is_wgrad ? b.dimensions()[0] : c->dimensions()[0];
  args.n = c->dimensions()[1];
  args.k = is_wgrad ? c->dimensions()[0] : a.dimensions()[1];
  set_matrices(a, b, c, b_layout, &args);
  return result_of(mk_allgather_gemm(reinterpret_cast<mk_comm_t>(comm), &args, stream), comm);
}

ffi::Error gemm_reduce_scatter(mk_stream_t stream, int64_t comm, int64_t b_layout, In a, In b, Turn, Out c,
                               NextTurn) {
  mk_gemm_reduce_scatter_args_t args = MK_GEMM_REDUCE_SCATTER_ARGS_INIT;
  args.m = a.dimensions()[0], args.n = c->dimensions()[1], args.k = a.dimensions()[1];
  set_matrices(a, b, c, b_layout, &args);
  return result_of(mk_gemm_reduce_scatter(reinterpret_cast<mk_comm_t>(comm), &args, stream), comm);
}

ffi::Error synchronized(const ffi::Error& enqueued, int64_t comm) {
  if (enqueued.failure()) return enqueued;
  return result_of(mk_comm_synchronize(reinterpret_cast<mk_comm_t>(comm), nullptr), comm);
}

ffi::Error allgather_gemm_on_host(int64_t comm, int64_t mode, int64_t b_layout, In a, In b, Turn turn, Out c,
                                  NextTurn next) {
  return synchronized(allgather_gemm(nullptr, comm, mode, b_layout, a, b, turn, c, next), comm);
}

ffi::Error gemm_reduce_scatter_on_host(int64_t comm, int64_t b_layout, In a, In b, Turn turn, Out c,
                                       NextTurn next) {
  return synchronized(gemm_reduce_scatter(nullptr, comm, b_layout, a, b, turn, c, next), comm);
}

auto on_stream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<mk_stream_t>>().Attr<int64_t>("comm"); }
auto on_host() { return ffi::Ffi::Bind().Attr<int64_t>("comm"); }

template <class Binding>
auto with_buffers(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(MkAllgatherGemmCuda, allgather_gemm,
                              with_buffers(on_stream().Attr<int64_t>("mode").Attr<int64_t>("b_layout")));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MkAllgatherGemmHost, allgather_gemm_on_host,
                              with_buffers(on_host().Attr<int64_t>("mode").Attr<int64_t>("b_layout")));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MkGemmReduceScatterCuda, gemm_reduce_scatter,
                              with_buffers(on_stream().Attr<int64_t>("b_layout")));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MkGemmReduceScatterHost, gemm_reduce_scatter_on_host,
                              with_buffers(on_host().Attr<int64_t>("b_layout")));
#pragma GCC visibility pop
