// SPDX-License-Identifier: MIT
#include "cublaslt_library.h"

#include "cuda_matrices.h"
#include "errors.h"

namespace perf {
namespace {

constexpr int kMaxProposals = 8;

}  // namespace

cudaDataType_t cuda_type(mk_dtype_t dtype) {
  switch (dtype) {
    case MK_DTYPE_FP32:
      return CUDA_R_32F;
    case MK_DTYPE_FP16:
      return CUDA_R_16F;
    default:
      return CUDA_R_16BF;
  }
}

CublasLtLibrary::CublasLtLibrary(const std::string& path)
    : library_(path, {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
  library_.find("cublasLtMatmul", matmul);
  library_.find("cublasLtMatmulAlgoGetHeuristic", algo_get_heuristic);
  library_.find("cublasLtMatmulDescCreate", desc_create);
  library_.find("cublasLtMatmulDescDestroy", desc_destroy);
  library_.find("cublasLtMatmulDescSetAttribute", desc_set_attribute);
  library_.find("cublasLtMatrixLayoutCreate", layout_create);
  library_.find("cublasLtMatrixLayoutDestroy", layout_destroy);
  library_.find("cublasLtMatmulPreferenceCreate", preference_create);
  library_.find("cublasLtMatmulPreferenceDestroy", preference_destroy);
  library_.find("cublasLtMatmulPreferenceSetAttribute", preference_set_attribute);
  library_.find("cublasLtCreate", create_);
  library_.find("cublasLtDestroy", destroy_);
  library_.find("cublasLtGetVersion", get_version_);
  library_.find_optional("cublasLtGetStatusName", get_status_name_);
  require(create_(&handle_), "cublasLtCreate");
  require_cuda(cudaMalloc(&workspace_, kWorkspaceBytes), "cudaMalloc of cublasLt's workspace");
}

CublasLtLibrary::~CublasLtLibrary() {
  cudaFree(workspace_);
  destroy_(handle_);
}

std::string CublasLtLibrary::version() const {
  const size_t version = get_version_();
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void CublasLtLibrary::require(cublasStatus_t status, const char* what) const {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const char* name = get_status_name_ ? get_status_name_(status) : "";
  throw RunError(std::string(what) + ": cuBLAS status " + std::to_string(static_cast<int>(status)) + " " +
                 name + "; --baseline none leaves it out");
}

// cublasLt reads matrices by columns: a row-major product C = A B is its C^T = B^T A^T, and C = dY^T X its
// C^T = X^T dY. So the first operand is B or X, and the second A or dY.
CublasLtProduct::CublasLtProduct(const CublasLtLibrary& library, const UnfusedShape& shape, mk_dtype_t c_dtype)
    : library_(library), is_wgrad_(shape.is_wgrad), accumulates_(shape.accumulate) {
  // A row-major [rows, columns], as it lies in memory.
  struct Matrix {
    int64_t rows, columns, ld;
    cublasOperation_t operation;
  };
  const auto plain = CUBLAS_OP_N, turned = CUBLAS_OP_T;
  const bool nk = shape.b_layout == MK_LAYOUT_NK;
  const int64_t m = shape.m, n = shape.n, k = shape.k;
  const Matrix first = is_wgrad_ ? Matrix{m, n, shape.lda, plain}
                       : nk      ? Matrix{n, k, shape.ldb, turned}
                                 : Matrix{k, n, shape.ldb, plain};
  const Matrix second = !is_wgrad_ ? Matrix{m, k, shape.lda, plain}
                        : nk       ? Matrix{k, m, shape.ldb, plain}
                                   : Matrix{m, k, shape.ldb, turned};
  const auto create = [&](cublasLtMatrixLayout_t* layout, cudaDataType_t type, const Matrix& matrix) {
    library.require(library.layout_create(layout, type, static_cast<uint64_t>(matrix.columns),
                                          static_cast<uint64_t>(matrix.rows), matrix.ld),
                    "cublasLtMatrixLayoutCreate");
  };
  const auto set_operation = [&](cublasLtMatmulDescAttributes_t attribute, const Matrix& matrix) {
    library.require(library.desc_set_attribute(product_, attribute, &matrix.operation, sizeof matrix.operation),
                    "cublasLtMatmulDescSetAttribute");
  };
  const cudaDataType_t input = cuda_type(shape.dtypes.dtype);
  cublasLtMatmulPreference_t preference = nullptr;
  int found = 0;
  try {
    library.require(library.desc_create(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set_operation(CUBLASLT_MATMUL_DESC_TRANSA, first);
    set_operation(CUBLASLT_MATMUL_DESC_TRANSB, second);
    create(&first_, input, first);
    create(&second_, input, second);
    create(&c_, cuda_type(c_dtype), {is_wgrad_ ? k : m, n, shape.ldc, plain});
    library.require(library.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
    const size_t workspace_bytes = CublasLtLibrary::kWorkspaceBytes;
    library.require(library.preference_set_attribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &workspace_bytes, sizeof workspace_bytes),
                    "cublasLtMatmulPreferenceSetAttribute");
    proposals_.resize(kMaxProposals);
    library.require(library.algo_get_heuristic(library.handle(), product_, first_, second_, c_, c_, preference,
                                               kMaxProposals, proposals_.data(), &found),
                    "cublasLtMatmulAlgoGetHeuristic");
    if (found == 0) throw RunError("cublasLtMatmulAlgoGetHeuristic: no algorithm for this product");
  } catch (...) {
    if (preference) library.preference_destroy(preference);
    destroy();
    throw;
  }
  library.preference_destroy(preference);
  proposals_.resize(static_cast<size_t>(found));
}

CublasLtProduct::~CublasLtProduct() { destroy(); }

void CublasLtProduct::destroy() {
  if (first_) library_.layout_destroy(first_);
  if (second_) library_.layout_destroy(second_);
  if (c_) library_.layout_destroy(c_);
  if (product_) library_.desc_destroy(product_);
}

cublasStatus_t CublasLtProduct::try_launch(int proposal, const void* a, const void* b, void* c,
                                           cudaStream_t stream) const {
  const float one = 1;
  const float of_c = accumulates_ ? 1 : 0;
  return library_.matmul(library_.handle(), product_, &one, is_wgrad_ ? a : b, first_, is_wgrad_ ? b : a,
                         second_, &of_c, c, c_, c, c_, &proposals_[static_cast<size_t>(proposal)].algo,
                         library_.workspace(), CublasLtLibrary::kWorkspaceBytes, stream);
}

void CublasLtProduct::launch(const void* a, const void* b, void* c, cudaStream_t stream) const {
  library_.require(try_launch(chosen_, a, b, c, stream), "cublasLtMatmul");
}

}  // namespace perf
