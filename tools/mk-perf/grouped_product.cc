// SPDX-License-Identifier: MIT
#include "grouped_product.h"

#include <algorithm>

#include "element.h"

namespace perf {
namespace {

// Calls use(count, operands) for each expert that has rows, with the operands of its part.
template <typename Use>
void for_each_expert(const GroupedShape& shape, const GroupedOperands& whole, const Use& use) {
  const auto input_bytes = static_cast<int64_t>(element_bytes(shape.dtype));
  const auto output_bytes = static_cast<int64_t>(element_bytes(shape.c_dtype));
  const auto* a = static_cast<const char*>(whole.a);
  const auto* w = static_cast<const char*>(whole.w);
  auto* c = static_cast<char*>(whole.c);
  for (const int64_t count : shape.counts) {
    if (count > 0) use(count, GroupedOperands{a, w, c});
    a += count * shape.k * input_bytes;
    w += shape.k * shape.n * input_bytes;
    c += count * shape.n * output_bytes;
  }
}

}  // namespace

// cuBLAS reads matrices by columns: a row-major product C = A W is its C^T = W^T A^T, so that its first operand
// is W.
OneGroupedProduct::OneGroupedProduct(const CublasLibrary& library, const DeviceOperations& device,
                                     const GroupedShape& shape, const std::vector<GroupedOperands>& sets)
    : library_(library), shape_(shape) {
  for (const int64_t count : shape.counts) {
    if (count == 0) continue;
    m_.push_back(static_cast<int>(shape.n));
    n_.push_back(static_cast<int>(count));
    k_.push_back(static_cast<int>(shape.k));
  }
  operations_.assign(n_.size(), CUBLAS_OP_N);
  group_sizes_.assign(n_.size(), 1);
  ones_.assign(n_.size(), 1.0f);
  zeros_.assign(n_.size(), 0.0f);
  for (const GroupedOperands& set : sets) {
    std::vector<const void*> w;
    std::vector<const void*> a;
    std::vector<const void*> c;
    for_each_expert(shape, set, [&](int64_t, const GroupedOperands& part) {
      w.push_back(part.w);
      a.push_back(part.a);
      c.push_back(part.c);
    });
    w.insert(w.end(), a.begin(), a.end());
    w.insert(w.end(), c.begin(), c.end());
    pointers_.emplace_back(device, w.size() * sizeof(void*));
    pointers_.back().upload(w.data());
  }
}

std::string OneGroupedProduct::name() const {
  return "cublasGemmGroupedBatchedEx of cuBLAS " + library_.version();
}

cublasStatus_t OneGroupedProduct::try_launch(size_t set, cudaStream_t) const {
  const size_t groups = n_.size();
  if (groups == 0) return CUBLAS_STATUS_SUCCESS;
  auto* pointers = static_cast<void**>(pointers_[set].data());
  const cudaDataType_t input = cuda_type(shape_.dtype);
  return library_.gemm_grouped_batched_ex(
      library_.handle(), operations_.data(), operations_.data(), m_.data(), n_.data(), k_.data(), ones_.data(),
      pointers, input, m_.data(), pointers + groups, input, k_.data(), zeros_.data(), pointers + 2 * groups,
      cuda_type(shape_.c_dtype), m_.data(), static_cast<int>(groups), group_sizes_.data(), CUBLAS_COMPUTE_32F);
}

ExpertByExpert::ExpertByExpert(const CublasLtLibrary& library, const GroupedShape& shape,
                               const std::vector<GroupedOperands>& sets)
    : shape_(shape), sets_(sets) {
  for (const int64_t count : shape.counts) {
    if (count == 0 || products_.count(count)) continue;
    UnfusedShape product;
    product.m = count;
    product.n = product.ldb = product.ldc = shape.n;
    product.k = product.lda = shape.k;
    product.dtypes.dtype = shape.dtype;
    products_[count] = std::make_unique<CublasLtProduct>(library, product, shape.c_dtype);
  }
}

std::string ExpertByExpert::name() const { return "one cublasLtMatmul an expert"; }

cublasStatus_t ExpertByExpert::try_launch(size_t set, cudaStream_t stream) const {
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  for_each_expert(shape_, sets_[set], [&](int64_t count, const GroupedOperands& part) {
    // The heuristic's favourite.
    if (status == CUBLAS_STATUS_SUCCESS)
      status = products_.at(count)->try_launch(0, part.a, part.w, part.c, stream);
  });
  return status;
}

}  // namespace perf
