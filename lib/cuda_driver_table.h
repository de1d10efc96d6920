// SPDX-License-Identifier: MIT
// The driver's functions as a table of pointers, each of the version named: newer drivers keep giving that one.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "cuda_driver.h"

// X(name, CUDA version of the signature)
#define MK_CUDA_FUNCTIONS(X)               \
  X(cuInit, 2000)                          \
  X(cuDriverGetVersion, 2020)              \
  X(cuGetErrorName, 6000)                  \
  X(cuGetErrorString, 6000)                \
  X(cuDeviceGetCount, 2000)                \
  X(cuDeviceGet, 2000)                     \
  X(cuDeviceGetName, 2000)                 \
  X(cuDeviceGetPCIBusId, 4010)             \
  X(cuDeviceGetUuid, 11040)                \
  X(cuDeviceGetAttribute, 2000)            \
  X(cuDeviceTotalMem, 3020)                \
  X(cuDeviceCanAccessPeer, 4000)           \
  X(cuDevicePrimaryCtxRetain, 7000)        \
  X(cuDevicePrimaryCtxRelease, 11000)      \
  X(cuCtxGetCurrent, 4000)                 \
  X(cuCtxSetCurrent, 4000)                 \
  X(cuCtxGetDevice, 2000)                  \
  X(cuStreamCreate, 2000)                  \
  X(cuStreamDestroy, 4000)                 \
  X(cuStreamQuery, 2000)                   \
  X(cuStreamSynchronize, 2000)             \
  X(cuStreamIsCapturing, 10000)            \
  X(cuStreamGetCtx, 9020)                  \
  X(cuEventCreate, 2000)                   \
  X(cuEventDestroy, 4000)                  \
  X(cuEventRecord, 2000)                   \
  X(cuEventQuery, 2000)                    \
  X(cuMemGetInfo, 3020)                    \
  X(cuMemGetAddressRange, 3020)            \
  X(cuPointerGetAttribute, 4000)           \
  X(cuMemHostAlloc, 2020)                  \
  X(cuMemHostGetDevicePointer, 3020)       \
  X(cuMemFreeHost, 2000)                   \
  X(cuMemcpyHtoD, 3020)                    \
  X(cuMemcpyDtoH, 3020)                    \
  X(cuMemcpyDtoD, 3020)                    \
  X(cuMemcpyHtoDAsync, 3020)               \
  X(cuMemcpyDtoHAsync, 3020)               \
  X(cuMemcpyDtoDAsync, 3020)               \
  X(cuMemsetD8Async, 3020)                 \
  X(cuMemGetHandleForAddressRange, 11070)  \
  X(cuMemGetAllocationGranularity, 10020)  \
  X(cuMemAddressReserve, 10020)            \
  X(cuMemAddressFree, 10020)               \
  X(cuMemCreate, 10020)                    \
  X(cuMemRelease, 10020)                   \
  X(cuMemMap, 10020)                       \
  X(cuMemUnmap, 10020)                     \
  X(cuMemSetAccess, 10020)                 \
  X(cuMemExportToShareableHandle, 10020)   \
  X(cuMemImportFromShareableHandle, 10020) \
  X(cuTensorMapEncodeTiled, 12000)

namespace mk::cuda {

struct Driver {
#define MK_CUDA_MEMBER(name, version) PFN_##name##_v##version name;
  MK_CUDA_FUNCTIONS(MK_CUDA_MEMBER)
#undef MK_CUDA_MEMBER
};

// MK_ERROR_CUDA (MK_ERROR_OUT_OF_MEMORY for CUDA_ERROR_OUT_OF_MEMORY): `what` failed, the driver's name and
// words for it.
Status error(const Driver& driver, CUresult result, const std::string& what);

// Makes a context current on this thread and puts the former one back.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CUcontext context) : driver_(driver) {
    driver_.cuCtxGetCurrent(&former_);
    status_ = error(driver_, driver_.cuCtxSetCurrent(context), "cuCtxSetCurrent");
  }
  ~CurrentContext() { driver_.cuCtxSetCurrent(former_); }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  const Status& status() const { return status_; }

 private:
  const Driver& driver_;
  CUcontext former_ = nullptr;
  Status status_;
};

}  // namespace mk::cuda
