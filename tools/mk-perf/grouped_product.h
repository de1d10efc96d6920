// SPDX-License-Identifier: MIT
// The products of all experts of a rank by cuBLAS, in the two ways that there are.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cublas_library.h"
#include "cublaslt_library.h"
#include "device.h"

namespace perf {

// Row-major and packed: C[rows of e, n] = A[rows of e, k] * W[e, k, n] for experts e of counts[e] rows each.
struct GroupedShape {
  std::vector<int64_t> counts;
  int64_t n = 0;
  int64_t k = 0;
  mk_dtype_t dtype = MK_DTYPE_BF16;  // of A and W
  mk_dtype_t c_dtype = MK_DTYPE_BF16;
};

struct GroupedOperands {
  const void* a;
  const void* w;
  void* c;
};

class GroupedProduct {
 public:
  virtual ~GroupedProduct() = default;
  virtual std::string name() const = 0;
  virtual cublasStatus_t try_launch(size_t set, cudaStream_t stream) const = 0;
};

// One cublasGemmGroupedBatchedEx, on the library's own stream.
class OneGroupedProduct : public GroupedProduct {
 public:
  OneGroupedProduct(const CublasLibrary& library, const DeviceOperations& device, const GroupedShape& shape,
                    const std::vector<GroupedOperands>& sets);
  std::string name() const override;
  cublasStatus_t try_launch(size_t set, cudaStream_t stream) const override;

 private:
  const CublasLibrary& library_;
  GroupedShape shape_;
  // A group an expert that has rows. The arrays outlive a capture, which may read them again at each replay.
  std::vector<cublasOperation_t> operations_;
  std::vector<int> m_;
  std::vector<int> n_;
  std::vector<int> k_;
  std::vector<int> group_sizes_;
  std::vector<float> ones_;
  std::vector<float> zeros_;
  std::vector<DeviceBuffer> pointers_;  // a set: of W, of A, of C
};

// One cublasLtMatmul an expert.
class ExpertByExpert : public GroupedProduct {
 public:
  ExpertByExpert(const CublasLtLibrary& library, const GroupedShape& shape,
                 const std::vector<GroupedOperands>& sets);
  std::string name() const override;
  cublasStatus_t try_launch(size_t set, cudaStream_t stream) const override;

 private:
  GroupedShape shape_;
  std::vector<GroupedOperands> sets_;
  std::map<int64_t, std::unique_ptr<CublasLtProduct>> products_;  // by rows
};

}  // namespace perf
