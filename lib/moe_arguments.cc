// SPDX-License-Identifier: MIT
#include "moe_arguments.h"

#include <array>

#include "../kernels/ops/moe_routing/record.h"
#include "argument_checks.h"
#include "struct_size.h"

namespace mk {
namespace {

constexpr int64_t kMaxRows = int64_t{1} << 31;  // tokens and rows have 32-bit numbers
constexpr int64_t kMaxExperts = 65536;
constexpr int64_t kMaxTopk = 16;
constexpr int kMaxNranks = 4096;

Status check_range(mk_operator_t op, const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid(op, format("%s: expected %lld to %lld, saw %lld", name, static_cast<long long>(low),
                            static_cast<long long>(high), static_cast<long long>(value)));
}

Status check_multiple_of_8(mk_operator_t op, const char* name, int64_t value) {
  if (value > 0 && value <= kMaxElements && value % 8 == 0) return {};
  return invalid(
      op, format("%s: expected a positive multiple of 8, saw %lld", name, static_cast<long long>(value)));
}

Status check_tokens(mk_operator_t op, int64_t tokens, int topk) {
  MK_RETURN_IF_ERROR(check_range(op, "tokens", tokens, 0, kMaxRows - 1));
  if (tokens * topk < kMaxRows) return {};
  return invalid(op, format("tokens: expected tokens * topk below 2^31, saw %lld * %d",
                            static_cast<long long>(tokens), topk));
}

// Completes dtypes and checks what does not depend on buffers.
Status complete(MoeCall& call) {
  if (call.dtype == MK_DTYPE_DEFAULT) call.dtype = MK_DTYPE_BF16;
  if (call.out_dtype == MK_DTYPE_DEFAULT) call.out_dtype = call.dtype;
  MK_RETURN_IF_ERROR(check_dtype(call.op, "dtype", call.dtype, false));
  MK_RETURN_IF_ERROR(check_dtype(call.op, "out_dtype", call.out_dtype, true));
  MK_RETURN_IF_ERROR(check_range(call.op, "experts", call.experts, 1, kMaxExperts));
  MK_RETURN_IF_ERROR(check_range(call.op, "topk", call.topk, 1, kMaxTopk));
  MK_RETURN_IF_ERROR(check_tokens(call.op, call.is_maxima ? call.max_tokens : call.tokens, call.topk));
  MK_RETURN_IF_ERROR(check_range(call.op, "capacity_rows", call.capacity_rows, 0, kMaxRows - 1));
  MK_RETURN_IF_ERROR(check_multiple_of_8(call.op, "hidden", call.hidden));
  MK_RETURN_IF_ERROR(check_multiple_of_8(call.op, "inter", call.inter));
  MK_RETURN_IF_ERROR(check_product(call.op, "x", call.tokens, call.hidden));
  MK_RETURN_IF_ERROR(check_product(call.op, "w of one expert", call.hidden, call.inter));
  MK_RETURN_IF_ERROR(check_product(call.op, "y", call.capacity_rows, call.inter));
  if (call.w_layout != MK_LAYOUT_KN && call.w_layout != MK_LAYOUT_NK) {
    return invalid(call.op, format("w_layout: expected MK_LAYOUT_KN or MK_LAYOUT_NK, saw %d", call.w_layout));
  }
  if (call.index_type != MK_INDEX_INT32 && call.index_type != MK_INDEX_INT64) {
    return invalid(call.op,
                   format("index_type: expected MK_INDEX_INT32 or MK_INDEX_INT64, saw %d", call.index_type));
  }
  return {};
}

// The fields that the two argument structs have in common.
template <class Arguments>
Result<MoeCall> read_moe(mk_operator_t op, const Arguments* from, Arguments& args) {
  MK_RETURN_IF_ERROR(read_struct_of(op, from, sizeof(Arguments), "args", args));
  MoeCall call;
  call.op = op;
  call.tokens = args.tokens;
  call.hidden = args.hidden;
  call.inter = args.inter;
  call.experts = args.experts;
  call.topk = args.topk;
  call.dtype = args.dtype;
  call.out_dtype = args.out_dtype;
  call.w_layout = args.w_layout;
  call.w = args.w;
  call.y = args.y;
  call.ldy = args.ldy;
  call.routing_bytes = args.routing_bytes;
  MK_RETURN_IF_ERROR(read_tuning(op, args.tuning, call.tuning));
  return call;
}

struct Pointer {
  const char* name;
  const void* data;
  int64_t elements;
  int element_bytes;
};

Status check_pointer(mk_operator_t op, const Pointer& pointer, bool needed) {
  if (pointer.elements == 0) return {};
  if (pointer.data == nullptr && needed) {
    return invalid(op, format("%s: expected a pointer to %lld elements, saw NULL", pointer.name,
                              static_cast<long long>(pointer.elements)));
  }
  if (reinterpret_cast<uintptr_t>(pointer.data) % static_cast<uintptr_t>(pointer.element_bytes) == 0) return {};
  return invalid(op,
                 format("%s: expected a pointer aligned to its elements, saw %p", pointer.name, pointer.data));
}

// Bytes that are a matrix of one row to the checks of overlap.
Matrix as_matrix(const char* name, const void* data, int64_t bytes) {
  return {name, data, 1, bytes, bytes, 1, nullptr};
}
Matrix as_matrix(const Pointer& pointer) {
  return as_matrix(pointer.name, pointer.data, pointer.data ? pointer.elements * pointer.element_bytes : 0);
}

Status check_record(const MoeCall& call, const moe::RecordLayout& layout) {
  if (call.routing == nullptr)
    return invalid(call.op, "routing: expected a pointer to a routing record, saw NULL");
  if (reinterpret_cast<uintptr_t>(call.routing) % 16 != 0) {
    return invalid(call.op, format("routing: expected a 16-byte aligned pointer, saw %p",
                                   static_cast<const void*>(call.routing)));
  }
  if (call.routing_bytes >= static_cast<size_t>(layout.bytes(0))) return {};
  return invalid(
      call.op,
      format("routing_bytes: expected at least %lld for %lld tokens (mk_moe_routing_bytes says what "
             "a record needs), saw %zu",
             static_cast<long long>(layout.bytes(0)), static_cast<long long>(call.tokens), call.routing_bytes));
}

}  // namespace

Result<MoeCall> to_call(const mk_moe_dispatch_gemm_args_t* from) {
  mk_moe_dispatch_gemm_args_t args;
  Result<MoeCall> call = read_moe(MK_OPERATOR_MOE_DISPATCH_GEMM, from, args);
  if (!call.ok()) return call;
  if (args.use_routing < 0 || args.use_routing > 1)
    return invalid(call->op, format("use_routing: expected 0 or 1, saw %d", args.use_routing));
  call->capacity_rows = args.capacity_rows;
  call->index_type = args.index_type;
  call->use_routing = args.use_routing == 1;
  call->x = args.x;
  call->ldx = args.ldx;
  call->topk_idx = args.topk_idx;
  call->routing = args.routing;
  call->dispatched_rows = args.dispatched_rows;
  call->ld_dispatched_rows = args.ld_dispatched_rows;
  call->factors = args.row_scale;
  MK_RETURN_IF_ERROR(complete(call.value()));
  return call;
}

Result<MoeCall> to_call(const mk_moe_gemm_combine_args_t* from) {
  mk_moe_gemm_combine_args_t args;
  Result<MoeCall> call = read_moe(MK_OPERATOR_MOE_GEMM_COMBINE, from, args);
  if (!call.ok()) return call;
  call->x = args.rows;
  call->ldx = args.ld_rows;
  call->routing = const_cast<mk_moe_routing_t*>(args.routing);  // a combine only reads it
  call->factors = args.topk_weights;
  MK_RETURN_IF_ERROR(complete(call.value()));
  return call;
}

Result<MoeCall> to_call(mk_operator_t op, const mk_moe_maxima_t* from) {
  mk_moe_maxima_t maxima;
  MK_RETURN_IF_ERROR(read_struct_of(op, from, sizeof(mk_moe_maxima_t), "maxima", maxima));
  MoeCall call;
  call.op = op;
  call.is_maxima = true;
  call.max_tokens = maxima.tokens;
  call.hidden = maxima.hidden;
  call.inter = maxima.inter;
  call.capacity_rows = maxima.capacity_rows;
  call.experts = maxima.experts;
  call.topk = maxima.topk;
  call.dtype = maxima.dtype;
  call.out_dtype = maxima.out_dtype;
  MK_RETURN_IF_ERROR(read_tuning(op, maxima.tuning, call.tuning));
  MK_RETURN_IF_ERROR(complete(call));
  return call;
}

Status check_buffers(const MoeCall& call, int rank, int nranks) {
  const bool dispatches = call.op == MK_OPERATOR_MOE_DISPATCH_GEMM;
  const int64_t local_experts = rows_count(call.experts, nranks, rank);
  const int64_t routed = call.tokens * call.topk;
  const int out_bytes = element_bytes(call.out_dtype);
  MK_RETURN_IF_ERROR(check_product(call.op, "w", local_experts, call.hidden * call.inter));
  const Matrix w{"w", call.w, 1, local_experts * call.hidden * call.inter, 0, 2, nullptr};
  const Matrix y{"y",
                 call.y,
                 dispatches ? call.capacity_rows : call.tokens,
                 dispatches ? call.inter : call.hidden,
                 call.ldy,
                 out_bytes,
                 nullptr};
  Matrix x{"x", call.x, call.tokens, call.hidden, call.ldx, 2, "ldx"};
  // A combine's rows are as many as its record says, which may not be written yet: where there is a pointer
  // they may be more than one, so that the leading dimension counts, and at least one, which no output
  // overlaps.
  const int64_t rows_at_least = call.x != nullptr ? 1 : 0;
  if (!dispatches) x = {"rows", call.x, 2 * rows_at_least, call.inter, call.ldx, 2, "ld_rows"};
  const Matrix dispatched{
      "dispatched_rows",   call.dispatched_rows,    call.dispatched_rows ? call.capacity_rows : 0,
      call.hidden,         call.ld_dispatched_rows, 2,
      "ld_dispatched_rows"};
  const Pointer index{"topk_idx", call.topk_idx, dispatches && !call.use_routing ? routed : 0,
                      call.index_type == MK_INDEX_INT64 ? 8 : 4};
  const Pointer factors{dispatches ? "row_scale" : "topk_weights", call.factors, routed, 4};
  for (const Matrix& matrix : {x, w, y, dispatched}) MK_RETURN_IF_ERROR(check_matrix(call.op, matrix));
  if (!dispatches) x.rows = rows_at_least;
  MK_RETURN_IF_ERROR(check_pointer(call.op, index, true));
  MK_RETURN_IF_ERROR(check_pointer(call.op, factors, !dispatches));
  MK_RETURN_IF_ERROR(check_record(call, {static_cast<int>(local_experts), call.topk, call.tokens}));
  const Matrix record = as_matrix("routing", call.routing, static_cast<int64_t>(call.routing_bytes));
  const std::array inputs{x, w, as_matrix(index), as_matrix(factors)};
  for (const Matrix& input : inputs) {
    MK_RETURN_IF_ERROR(check_apart(call.op, y, input));
    MK_RETURN_IF_ERROR(check_apart(call.op, dispatched, input));
    if (dispatches && !call.use_routing) MK_RETURN_IF_ERROR(check_apart(call.op, record, input));
  }
  for (const Matrix& output : {y, dispatched}) MK_RETURN_IF_ERROR(check_apart(call.op, output, record));
  return check_apart(call.op, y, dispatched);
}

Result<size_t> routing_bytes(const mk_moe_maxima_t* from, int nranks) {
  mk_moe_maxima_t maxima;
  MK_RETURN_IF_ERROR(read_struct(from, sizeof(mk_moe_maxima_t), "mk_moe_routing_bytes: maxima", maxima));
  const auto check = [](const char* name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return Status();
    return Status(
        MK_ERROR_INVALID_ARGUMENT,
        format("mk_moe_routing_bytes: %s: expected %lld to %lld, saw %lld", name, static_cast<long long>(low),
               static_cast<long long>(high), static_cast<long long>(value)));
  };
  MK_RETURN_IF_ERROR(check("nranks", nranks, 1, kMaxNranks));
  MK_RETURN_IF_ERROR(check("maxima.tokens", maxima.tokens, 0, kMaxRows - 1));
  MK_RETURN_IF_ERROR(check("maxima.experts", maxima.experts, 1, kMaxExperts));
  MK_RETURN_IF_ERROR(check("maxima.topk", maxima.topk, 1, kMaxTopk));
  MK_RETURN_IF_ERROR(check("maxima.capacity_rows", maxima.capacity_rows, 0, kMaxRows - 1));
  const int64_t worst = nranks * maxima.tokens * maxima.topk;
  const int64_t rows = maxima.capacity_rows > 0 ? maxima.capacity_rows : worst;
  MK_RETURN_IF_ERROR(check("rows a rank (set capacity_rows)", rows, 0, kMaxRows - 1));
  const moe::RecordLayout layout{static_cast<int>(ceil_div(maxima.experts, nranks)), maxima.topk,
                                 maxima.tokens};
  return static_cast<size_t>(round_up(layout.bytes(rows), 256));
}

}  // namespace mk
