// SPDX-License-Identifier: MIT
#include "gemm_launch.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "element.h"

namespace mk::test {
namespace {

constexpr int64_t kGuard = 32;  // elements behind the last row of an output

int64_t extent(const Matrix& matrix) {
  return matrix.rows == 0 || matrix.columns == 0 ? 0 : (matrix.rows - 1) * matrix.ld + matrix.columns;
}

// An input ends with its last element, so that the address sanitizer sees a read beyond it. An output has
// guard elements.
Matrix make_matrix(const GemmCase& gemm, mk_dtype_t dtype, int64_t rows, int64_t columns, bool output,
                   std::byte* place = nullptr, size_t place_bytes = 0) {
  Matrix matrix;
  matrix.dtype = dtype;
  matrix.rows = rows;
  matrix.columns = columns;
  matrix.ld = gemm.leading_dimension(columns, dtype);
  const int64_t elements = extent(matrix) == 0 ? 0 : extent(matrix) + (output ? kGuard : 0);
  const auto bytes = static_cast<size_t>(elements * element_size(dtype));
  if (elements == 0) return matrix;
  if (place == nullptr) {
    matrix.own.resize(bytes);
    matrix.data = matrix.own.data();
  } else {
    matrix.data = place;
    if (bytes > place_bytes) matrix.overflow = "the slot is too small for " + describe(gemm);
    if (bytes > place_bytes) matrix.own.resize(bytes), matrix.data = matrix.own.data();
  }
  for (int64_t at = 0; at < elements; ++at) write_bits(matrix.data, dtype, at, poison(dtype));
  return matrix;
}

void write_values(Matrix& matrix, const Values& values, bool transposed) {
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t column = 0; column < matrix.columns; ++column) {
      const double value = transposed ? values(column, row) : values(row, column);
      write_bits(matrix.data, matrix.dtype, row * matrix.ld + column, encode(value, matrix.dtype));
    }
  }
}

std::byte* gathered_place(const GemmCase& gemm, RankMemory* memory, int slot, int rank) {
  switch (gemm.gathered) {
    case Gathered::symmetric:
      return memory->symmetric(slot);
    case Gathered::symmetric_uneven:
      return memory->symmetric(slot) + (rank % 2) * 256;
    case Gathered::mixed:
      return rank % 2 == 0 ? memory->symmetric(slot) : nullptr;
    default:
      return nullptr;
  }
}

}  // namespace

bool RankMemory::allocate(RankSession& session, size_t slot_bytes) {
  slot_bytes_ = slot_bytes;
  void* pointer = nullptr;
  if (!session.ok(mk_mem_alloc(session.comm(), kSlots * slot_bytes, &pointer), "mk_mem_alloc")) return false;
  symmetric_ = static_cast<std::byte*>(pointer);
  registered_.resize(kSlots * slot_bytes);
  return session.ok(mk_mem_register(session.comm(), registered_.data(), registered_.size(), &handle_),
                    "mk_mem_register");
}

bool RankMemory::release(RankSession& session) {
  return session.ok(mk_mem_deregister(session.comm(), handle_), "mk_mem_deregister") &&
         session.ok(mk_mem_free(session.comm(), symmetric_), "mk_mem_free");
}

GemmLaunch::GemmLaunch(RankSession& session, const GemmProblem& problem, RankMemory* memory, int slot)
    : session_(session), problem_(problem) {
  const GemmCase& gemm = problem.gemm;
  const int rank = session.rank();
  const auto r = static_cast<size_t>(rank);
  const int64_t n = gemm.n_of(rank);
  const int64_t b_rows = gemm.b_rows(rank);
  const int64_t b_columns = gemm.b_columns(rank);
  const bool transposed = gemm.b_layout == MK_LAYOUT_NK;
  a_ = make_matrix(gemm, gemm.dtype, problem.a[r].rows, gemm.a_columns(rank), false,
                   gemm.registered ? memory->registered(slot) : nullptr, memory ? memory->slot_bytes() : 0);
  b_ = make_matrix(gemm, gemm.dtype, transposed ? b_columns : b_rows, transposed ? b_rows : b_columns, false);
  c_ = make_matrix(gemm, gemm.out_dtype, problem.c[r].rows, n, true);
  bias_ = make_matrix(gemm, gemm.bias_dtype, 1, gemm.bias ? n : 0, false);
  if (gemm.gathered != Gathered::none) {
    gathered_ = make_matrix(gemm, gemm.dtype, gemm.m, gemm.a_columns(rank), true,
                            gathered_place(gemm, memory, slot, rank), memory ? memory->slot_bytes() - 256 : 0);
  }
  write_values(a_, problem.a[r], false);
  write_values(b_, problem.b[r], transposed);
  write_values(bias_, problem.bias[r], false);
  if (gemm.accumulate) write_values(c_, problem.c_before[r], false);
  for (const Matrix* matrix : {&a_, &gathered_}) {
    if (!matrix->overflow.empty()) session_.fail(matrix->overflow);
  }
}

template <class Arguments>
void GemmLaunch::fill(Arguments& args) const {
  const GemmCase& gemm = problem_.gemm;
  args.m = gemm.m;
  args.n = gemm.n_of(session_.rank());
  args.k = gemm.k_of(session_.rank());
  args.dtype = gemm.dtype;
  args.out_dtype = gemm.out_dtype;
  args.b_layout = gemm.b_layout;
  args.accumulate = gemm.accumulate ? 1 : 0;
  args.bias_dtype = gemm.bias_dtype;
  args.a = a_.data;
  args.lda = a_.ld;
  args.b = b_.data;
  args.ldb = b_.ld;
  args.c = c_.data;
  args.ldc = c_.ld;
  args.bias = bias_.data;
  args.tuning = &gemm.tuning;
}

// Calls function(entry points, arguments) of the launch's operator.
template <class Function>
mk_status_t GemmLaunch::with_arguments(Function function) const {
  if (problem_.gemm.op == MK_OPERATOR_GEMM_REDUCE_SCATTER) {
    mk_gemm_reduce_scatter_args_t args = MK_GEMM_REDUCE_SCATTER_ARGS_INIT;
    fill(args);
    args.comm_dtype = problem_.gemm.comm_dtype;
    return function(mk_gemm_reduce_scatter, mk_gemm_reduce_scatter_plan, args);
  }
  if (problem_.gemm.op == MK_OPERATOR_GEMM_ALLREDUCE) {
    mk_gemm_allreduce_args_t args = MK_GEMM_ALLREDUCE_ARGS_INIT;
    fill(args);
    args.comm_dtype = problem_.gemm.comm_dtype;
    return function(mk_gemm_allreduce, mk_gemm_allreduce_plan, args);
  }
  mk_allgather_gemm_args_t args = MK_ALLGATHER_GEMM_ARGS_INIT;
  fill(args);
  args.mode = problem_.gemm.mode();
  args.a_gathered = gathered_.data;
  args.lda_gathered = gathered_.ld;
  return function(mk_allgather_gemm, mk_allgather_gemm_plan, args);
}

mk_status_t GemmLaunch::try_enqueue() {
  return with_arguments(
      [this](auto launch, auto, const auto& args) { return launch(session_.comm(), &args, nullptr); });
}

mk_status_t GemmLaunch::plan(mk_plan_t* plan) {
  *plan = MK_PLAN_INIT;
  return with_arguments(
      [this, plan](auto, auto make_plan, const auto& args) { return make_plan(session_.comm(), &args, plan); });
}

mk_status_t GemmLaunch::try_prepare(mk_comm_t comm, const GemmCase& gemm, int nranks) {
  mk_gemm_maxima_t maxima = MK_GEMM_MAXIMA_INIT;
  maxima.m = gemm.m;
  maxima.n = gemm.n_of(nranks - 1);
  maxima.k = gemm.k_of(nranks - 1);
  maxima.dtype = gemm.dtype;
  maxima.out_dtype = gemm.out_dtype;
  maxima.comm_dtype = gemm.comm_dtype;
  maxima.mode = gemm.mode();
  maxima.tuning = &gemm.tuning;
  switch (gemm.op) {
    case MK_OPERATOR_GEMM_REDUCE_SCATTER:
      return mk_gemm_reduce_scatter_prepare(comm, &maxima);
    case MK_OPERATOR_GEMM_ALLREDUCE:
      return mk_gemm_allreduce_prepare(comm, &maxima);
    default:
      return mk_allgather_gemm_prepare(comm, &maxima);
  }
}

void GemmLaunch::reset_output() {
  for (int64_t at = 0; extent(c_) > 0 && at < extent(c_) + kGuard; ++at)
    write_bits(c_.data, c_.dtype, at, poison(c_.dtype));
  if (problem_.gemm.accumulate)
    write_values(c_, problem_.c_before[static_cast<size_t>(session_.rank())], false);
}

void GemmLaunch::verify() {
  const auto r = static_cast<size_t>(session_.rank());
  verify_matrix("C", c_, problem_.c[r], problem_.gemm.integers);
  if (problem_.gemm.gathered != Gathered::none) verify_matrix("gathered A", gathered_, problem_.gathered, true);
}

void GemmLaunch::verify_matrix(const char* name, const Matrix& matrix, const Values& expected, bool exact) {
  std::ostringstream text;
  int64_t wrong = 0;
  const auto note = [&](int64_t row, int64_t column, double seen, double wanted) {
    if (wrong++ == 0) text << name << "[" << row << "," << column << "] is " << seen << ", expected " << wanted;
  };
  double error = 0;
  double norm = 0;
  for (int64_t at = 0; extent(matrix) > 0 && at < extent(matrix) + kGuard; ++at) {
    const int64_t row = at / matrix.ld;
    const int64_t column = at % matrix.ld;
    const uint32_t bits = read_bits(matrix.data, matrix.dtype, at);
    const double seen = decode(bits, matrix.dtype);
    if (row >= matrix.rows || column >= matrix.columns) {
      if (bits != poison(matrix.dtype)) note(row, column, seen, std::nan(""));
      continue;
    }
    const double wanted = expected(row, column);
    if (exact && !(seen == wanted)) note(row, column, seen, wanted);
    error += (seen - wanted) * (seen - wanted);
    norm += wanted * wanted;
  }
  if (wrong > 0)
    session_.fail(describe(problem_.gemm) + ": " + text.str() + "; " + std::to_string(wrong) + " wrong");
  if (!exact && !(std::sqrt(error) <= problem_.gemm.tolerance() * std::sqrt(norm)))
    session_.fail(describe(problem_.gemm) + ": relative error " + std::to_string(std::sqrt(error / norm)));
}

std::string GemmLaunch::result_bits() const {
  std::string bits;
  for (int64_t row = 0; row < c_.rows; ++row) {
    bits.append(reinterpret_cast<const char*>(c_.data) + row * c_.ld * element_size(c_.dtype),
                static_cast<size_t>(c_.columns * element_size(c_.dtype)));
  }
  return bits;
}

bool run_launch(RankSession& session, const GemmProblem& problem, RankMemory* memory, bool prepare) {
  GemmLaunch launch(session, problem, memory);
  if (prepare && !launch.prepare()) return false;
  if (!launch.enqueue()) return false;
  if (!session.ok(mk_comm_synchronize(session.comm(), nullptr), "mk_comm_synchronize")) return false;
  launch.verify();
  return true;
}

std::deque<GemmProblem> make_problems(const std::vector<GemmCase>& cases, int nranks) {
  std::deque<GemmProblem> problems;
  for (const GemmCase& gemm : cases) problems.emplace_back(gemm, nranks);
  return problems;
}

void run_problems(RankSession& session, const std::deque<GemmProblem>& problems,
                  const std::function<bool(size_t number)>& prepare) {
  RankMemory memory;
  if (!memory.allocate(session, kSlotBytes)) return;
  for (size_t number = 0; number < problems.size(); ++number) {
    if (!run_launch(session, problems[number], &memory, prepare(number))) return;
  }
  memory.release(session);
}

}  // namespace mk::test
