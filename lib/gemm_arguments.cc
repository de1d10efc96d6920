// SPDX-License-Identifier: MIT
#include "gemm_arguments.h"

#include "../kernels/protocol.h"
#include "argument_checks.h"

namespace mk {
namespace {

// Completes dtypes and checks what does not depend on buffers.
Status complete(GemmCall& call) {
  const auto or_else = [](mk_dtype_t given, mk_dtype_t otherwise) {
    return given == MK_DTYPE_DEFAULT ? otherwise : given;
  };
  call.dtype = or_else(call.dtype, MK_DTYPE_BF16);
  call.out_dtype = or_else(call.out_dtype, call.dtype);
  call.bias_dtype = or_else(call.bias_dtype, call.dtype);
  call.comm_dtype = or_else(call.comm_dtype, call.out_dtype == MK_DTYPE_FP32 ? call.dtype : call.out_dtype);
  if (call.op == MK_OPERATOR_ALLGATHER_GEMM) call.comm_dtype = call.dtype;
  MK_RETURN_IF_ERROR(check_dtype(call.op, "dtype", call.dtype, false));
  MK_RETURN_IF_ERROR(check_dtype(call.op, "out_dtype", call.out_dtype, true));
  MK_RETURN_IF_ERROR(check_dtype(call.op, "comm_dtype", call.comm_dtype, true));
  MK_RETURN_IF_ERROR(check_dtype(call.op, "bias_dtype", call.bias_dtype, true));
  MK_RETURN_IF_ERROR(check_size(call.op, "m", call.m));
  MK_RETURN_IF_ERROR(check_size(call.op, "n", call.n));
  MK_RETURN_IF_ERROR(check_size(call.op, "k", call.k));
  const bool wgrad = call.mode == MK_ALLGATHER_WGRAD;
  MK_RETURN_IF_ERROR(check_product(call.op, "a", call.m, wgrad ? call.n : call.k));
  MK_RETURN_IF_ERROR(check_product(call.op, "b", call.k, wgrad ? call.m : call.n));
  MK_RETURN_IF_ERROR(check_product(call.op, "c", wgrad ? call.k : call.m, call.n));
  if (call.b_layout != MK_LAYOUT_KN && call.b_layout != MK_LAYOUT_NK) {
    return invalid(call.op, format("b_layout: expected MK_LAYOUT_KN or MK_LAYOUT_NK, saw %d", call.b_layout));
  }
  return {};
}

Status read_accumulate(mk_operator_t op, int32_t accumulate, GemmCall& call) {
  if (accumulate < 0 || accumulate > 1)
    return invalid(op, format("accumulate: expected 0 or 1, saw %d", accumulate));
  call.accumulate = accumulate == 1;
  return {};
}

// The fields that the three argument structs have in common.
template <class Arguments>
Result<GemmCall> read_gemm(mk_operator_t op, const Arguments* from, Arguments& args) {
  MK_RETURN_IF_ERROR(read_struct_of(op, from, sizeof(Arguments), "args", args));
  GemmCall call;
  call.op = op;
  call.m = args.m;
  call.n = args.n;
  call.k = args.k;
  call.dtype = args.dtype;
  call.out_dtype = args.out_dtype;
  call.comm_dtype = MK_DTYPE_DEFAULT;
  call.bias_dtype = args.bias_dtype;
  call.b_layout = args.b_layout;
  call.a = args.a;
  call.lda = args.lda;
  call.b = args.b;
  call.ldb = args.ldb;
  call.c = args.c;
  call.ldc = args.ldc;
  call.bias = args.bias;
  MK_RETURN_IF_ERROR(read_accumulate(op, args.accumulate, call));
  MK_RETURN_IF_ERROR(read_tuning(op, args.tuning, call.tuning));
  return call;
}

template <class Arguments>
Result<GemmCall> read_reduction(mk_operator_t op, const Arguments* from) {
  Arguments args;
  Result<GemmCall> call = read_gemm(op, from, args);
  if (!call.ok()) return call;
  call->comm_dtype = args.comm_dtype;
  MK_RETURN_IF_ERROR(complete(call.value()));
  return call;
}

Status check_mode(mk_operator_t op, mk_allgather_mode_t mode) {
  if (mode == MK_ALLGATHER_FORWARD || (mode == MK_ALLGATHER_WGRAD && op == MK_OPERATOR_ALLGATHER_GEMM))
    return {};
  return invalid(
      op,
      format("mode: expected one of mk_allgather_mode_t (MK_ALLGATHER_FORWARD for a reduction), saw %d", mode));
}

}  // namespace

Result<GemmCall> to_call(const mk_allgather_gemm_args_t* from) {
  mk_allgather_gemm_args_t args;
  Result<GemmCall> call = read_gemm(MK_OPERATOR_ALLGATHER_GEMM, from, args);
  if (!call.ok()) return call;
  MK_RETURN_IF_ERROR(check_mode(call->op, args.mode));
  call->mode = args.mode;
  call->a_gathered = args.a_gathered;
  call->lda_gathered = args.lda_gathered;
  MK_RETURN_IF_ERROR(complete(call.value()));
  return call;
}

Result<GemmCall> to_call(const mk_gemm_reduce_scatter_args_t* args) {
  return read_reduction(MK_OPERATOR_GEMM_REDUCE_SCATTER, args);
}

Result<GemmCall> to_call(const mk_gemm_allreduce_args_t* args) {
  return read_reduction(MK_OPERATOR_GEMM_ALLREDUCE, args);
}

Result<GemmCall> to_call(mk_operator_t op, const mk_gemm_maxima_t* from) {
  mk_gemm_maxima_t maxima;
  MK_RETURN_IF_ERROR(read_struct_of(op, from, sizeof(mk_gemm_maxima_t), "maxima", maxima));
  MK_RETURN_IF_ERROR(check_mode(op, maxima.mode));
  GemmCall call;
  call.op = op;
  call.mode = maxima.mode;
  call.m = maxima.m;
  call.n = maxima.n;
  call.k = maxima.k;
  call.dtype = maxima.dtype;
  call.out_dtype = maxima.out_dtype;
  call.comm_dtype = maxima.comm_dtype;
  call.bias_dtype = MK_DTYPE_DEFAULT;
  MK_RETURN_IF_ERROR(read_tuning(op, maxima.tuning, call.tuning));
  MK_RETURN_IF_ERROR(complete(call));
  return call;
}

Status check_buffers(const GemmCall& call, int rank, int nranks) {
  const bool gathers = call.op == MK_OPERATOR_ALLGATHER_GEMM;
  const bool wgrad = call.mode == MK_ALLGATHER_WGRAD;
  const bool scatters = call.op == MK_OPERATOR_GEMM_REDUCE_SCATTER;
  const int64_t own_rows = rows_count(call.m, nranks, rank);
  const bool kn = call.b_layout == MK_LAYOUT_KN;
  // B as [rows, columns] in layout KN: [k, n], or dY[m, k] in mode WGRAD.
  const int64_t b_rows = wgrad ? call.m : call.k;
  const int64_t b_columns = wgrad ? call.k : call.n;
  const int64_t c_rows = wgrad ? call.k : scatters ? own_rows : call.m;
  const int64_t a_columns = wgrad ? call.n : call.k;
  const Matrix a{"a", call.a, gathers ? own_rows : call.m, a_columns, call.lda, 2};
  const Matrix b{"b", call.b, kn ? b_rows : b_columns, kn ? b_columns : b_rows, call.ldb, 2};
  const Matrix c{"c", call.c, c_rows, call.n, call.ldc, element_bytes(call.out_dtype)};
  const Matrix gathered{"a_gathered", call.a_gathered,   call.a_gathered ? call.m : 0,
                        a_columns,    call.lda_gathered, 2};
  const Matrix bias{"bias", call.bias, 1, call.n, call.n, element_bytes(call.bias_dtype)};
  if (wgrad && call.bias != nullptr) {
    return invalid(call.op,
                   format("bias: expected NULL in mode MK_ALLGATHER_WGRAD, saw %p; a weight's gradient "
                          "has none",
                          call.bias));
  }
  for (const Matrix& matrix : {a, b, c, gathered}) MK_RETURN_IF_ERROR(check_matrix(call.op, matrix));
  for (const Matrix& other : {a, b, bias, gathered}) MK_RETURN_IF_ERROR(check_apart(call.op, c, other));
  for (const Matrix& other : {a, b, bias}) MK_RETURN_IF_ERROR(check_apart(call.op, gathered, other));
  if (call.bias != nullptr && reinterpret_cast<uintptr_t>(call.bias) % element_bytes(call.bias_dtype) != 0) {
    return invalid(call.op, format("bias: expected a pointer aligned to its elements, saw %p", call.bias));
  }
  return {};
}

}  // namespace mk
