// SPDX-License-Identifier: MIT
// Fills, poisons, scans and compares matrices in the memory of a GPU; all of it on the null stream, waited for.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda_matrices.h"
#include "element.h"

namespace perf {
namespace {

constexpr int NUM_CTAS = 1024;
constexpr int NUM_THREADS = 256;
constexpr int WARP_SIZE = 32;

// Scratch memory for what a kernel finds.
template <typename T>
class Finding {
 public:
  explicit Finding(const T& start) {
    require_cuda(cudaMalloc(&device_, sizeof(T)), "cudaMalloc");
    require_cuda(cudaMemcpy(device_, &start, sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Finding() { cudaFree(device_); }
  Finding(const Finding&) = delete;
  Finding& operator=(const Finding&) = delete;

  T* device() const { return device_; }
  T read(const char* what) const {
    T found;
    require_cuda(cudaGetLastError(), what);
    require_cuda(cudaMemcpy(&found, device_, sizeof(T), cudaMemcpyDeviceToHost), what);
    return found;
  }

 private:
  T* device_ = nullptr;
};

__device__ float load(const __nv_bfloat16* at) { return __bfloat162float(*at); }
__device__ float load(const __half* at) { return __half2float(*at); }
__device__ float load(const float* at) { return *at; }
__device__ void store(__nv_bfloat16* at, float value) { *at = __float2bfloat16_rn(value); }
__device__ void store(__half* at, float value) { *at = __float2half_rn(value); }
__device__ void store(float* at, float value) { *at = value; }

__device__ uint32_t bits_of(const __nv_bfloat16* at) { return *reinterpret_cast<const uint16_t*>(at); }
__device__ uint32_t bits_of(const __half* at) { return *reinterpret_cast<const uint16_t*>(at); }
__device__ uint32_t bits_of(const float* at) { return *reinterpret_cast<const uint32_t*>(at); }

template <typename Element>
__global__ void fill_kernel(DeviceMatrix matrix, InputMatrix input, int64_t row, int64_t col, bool transposed,
                            bool pads) {
  auto* elements = static_cast<Element*>(matrix.data);
  for (int64_t r = blockIdx.x; r < matrix.rows; r += gridDim.x) {
    for (int64_t c = threadIdx.x; c < (pads ? matrix.ld : matrix.cols); c += blockDim.x) {
      float value = 0;
      if (c < matrix.cols)
        value = transposed ? input.unrounded_value(row + c, col + r) : input.unrounded_value(row + r, col + c);
      store(elements + r * matrix.ld + c, value);
    }
  }
}

// A warp a row.
template <typename Element>
__global__ void fill_attention_kernel(Element* elements, AttentionInputs inputs, AttentionTensor tensor,
                                      AttentionPositions positions) {
  const int heads = inputs.heads_of(tensor);
  const int64_t own = positions.rows(), rows = inputs.batch * own * heads;
  for (int64_t at = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; at < rows;
       at += int64_t{gridDim.x} * blockDim.y) {
    const int64_t row = at / heads;
    const int head = static_cast<int>(at - row * heads);
    const int64_t b = row / own;
    const int64_t position = positions.of_row(row - b * own);
    for (int d = threadIdx.x; d < inputs.dim; d += blockDim.x)
      store(elements + at * inputs.dim + d, inputs.unrounded(tensor, b, position, head, d));
  }
}

template <typename Bits>
__global__ void poison_kernel(Bits* elements, int64_t count, Bits poison) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    elements[i] = poison;
  }
}

struct ScanState {
  unsigned long long first_bad;
  unsigned long long hash;
};

template <typename Element>
__global__ void scan_kernel(DeviceMatrix matrix, uint32_t poison, ScanState* state) {
  const auto* elements = static_cast<const Element*>(matrix.data);
  unsigned long long hash = 0;
  for (int64_t r = blockIdx.x; r < matrix.rows; r += gridDim.x) {
    // What follows the last row belongs to nobody.
    const int64_t row_end = r + 1 < matrix.rows ? matrix.ld : matrix.cols;
    for (int64_t c = threadIdx.x; c < row_end; c += blockDim.x) {
      const int64_t at = r * matrix.ld + c;
      const uint32_t bits = bits_of(elements + at);
      const bool good = c < matrix.cols ? isfinite(load(elements + at)) : bits == poison;
      if (!good) atomicMin(&state->first_bad, static_cast<unsigned long long>(at));
      if (c < matrix.cols) hash += index_hash(bits, static_cast<uint64_t>(r), static_cast<uint64_t>(c));
    }
  }
  // A sum, so that the order of the threads does not matter.
  atomicAdd(&state->hash, hash);
}

template <typename Element>
__global__ void difference_kernel(DeviceMatrix matrix, DeviceMatrix reference, MatrixDifference* sums) {
  const auto* elements = static_cast<const Element*>(matrix.data);
  const auto* expected = static_cast<const Element*>(reference.data);
  double squared_difference = 0;
  double squared_reference = 0;
  for (int64_t r = blockIdx.x; r < matrix.rows; r += gridDim.x) {
    for (int64_t c = threadIdx.x; c < matrix.cols; c += blockDim.x) {
      const double value = load(expected + r * reference.ld + c);
      const double difference = load(elements + r * matrix.ld + c) - value;
      squared_difference += difference * difference;
      squared_reference += value * value;
    }
  }
  atomicAdd(&sums->squared_difference, squared_difference);
  atomicAdd(&sums->squared_reference, squared_reference);
}

// Calls use(Element{}) with the type of a dtype's elements.
template <typename Use>
void with_element(mk_dtype_t dtype, const Use& use) {
  if (dtype == MK_DTYPE_FP32) return use(float{});
  if (dtype == MK_DTYPE_FP16) return use(__half{});
  use(__nv_bfloat16{});
}

void wait(const char* what) {
  require_cuda(cudaGetLastError(), what);
  require_cuda(cudaStreamSynchronize(nullptr), what);
}

void fill(const DeviceMatrix& matrix, const InputMatrix& input, int64_t row, int64_t col, bool transposed,
          bool pads) {
  if (!matrix.rows) return;
  with_element(matrix.dtype, [&](auto element) {
    fill_kernel<decltype(element)><<<NUM_CTAS, NUM_THREADS>>>(matrix, input, row, col, transposed, pads);
  });
  wait("filling an input matrix");
}

void fill_attention(void* data, const AttentionInputs& inputs, AttentionTensor tensor,
                    const AttentionPositions& positions) {
  if (!positions.rows()) return;
  with_element(inputs.dtype, [&](auto element) {
    fill_attention_kernel<<<NUM_CTAS, dim3(WARP_SIZE, NUM_THREADS / WARP_SIZE)>>>(
        static_cast<decltype(element)*>(data), inputs, tensor, positions);
  });
  wait("filling an input tensor");
}

uint32_t poison_bits(mk_dtype_t dtype) {
  uint32_t bits = 0;
  poison_elements(dtype, &bits, 1);
  return bits;
}

void poison(void* data, mk_dtype_t dtype, int64_t elements) {
  if (!elements) return;
  const uint32_t bits = poison_bits(dtype);
  if (dtype == MK_DTYPE_FP32) {
    poison_kernel<<<NUM_CTAS, NUM_THREADS>>>(static_cast<uint32_t*>(data), elements, bits);
  } else {
    poison_kernel<<<NUM_CTAS, NUM_THREADS>>>(static_cast<uint16_t*>(data), elements,
                                             static_cast<uint16_t>(bits));
  }
  wait("poisoning an output");
}

MatrixScan scan(const DeviceMatrix& matrix) {
  if (!matrix.rows) return {};
  const Finding<ScanState> found({~0ull, 0});
  with_element(matrix.dtype, [&](auto element) {
    scan_kernel<decltype(element)>
        <<<NUM_CTAS, NUM_THREADS>>>(matrix, poison_bits(matrix.dtype), found.device());
  });
  const ScanState state = found.read("scanning an output");
  return {state.first_bad == ~0ull ? -1 : static_cast<int64_t>(state.first_bad), state.hash};
}

MatrixDifference difference(const DeviceMatrix& matrix, const DeviceMatrix& reference) {
  if (!matrix.rows) return {};
  const Finding<MatrixDifference> found({0, 0});
  with_element(matrix.dtype, [&](auto element) {
    difference_kernel<decltype(element)><<<NUM_CTAS, NUM_THREADS>>>(matrix, reference, found.device());
  });
  return found.read("comparing two outputs");
}

}  // namespace

const MatrixOperations kCudaMatrices = {fill, fill_attention, poison, scan, difference};

}  // namespace perf
