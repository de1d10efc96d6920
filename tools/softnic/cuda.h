// SPDX-License-Identifier: MIT
// GPU memory: recognised by the CUDA driver, shared between processes by it, copied by its copy engines. The
// driver is the one that the process has loaded already; a process without it has no GPU memory.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace softnic {

struct CudaDriver;

// What another process needs to map one allocation of a region. Travels in a packet.
struct CudaExport {
  enum class Kind : uint32_t { descriptor = 1, ipc = 2 };
  Kind kind{};
  int32_t fd = -1;    // descriptor: there; it travels beside the packet. -1: the driver gave none
  uint64_t base = 0;  // address there
  uint64_t bytes = 0;
  uint8_t handle[64]{};  // ipc
};
static_assert(sizeof(CudaExport) == 88);

// The exports of one region; owns the descriptors.
class CudaExports {
 public:
  // `share`: for other processes, else for another mapping in this one.
  CudaExports(uint64_t address, uint64_t bytes, bool share);
  ~CudaExports();
  CudaExports(const CudaExports&) = delete;
  CudaExports& operator=(const CudaExports&) = delete;

  const std::vector<CudaExport>& list() const { return list_; }

 private:
  std::vector<CudaExport> list_;
};

// Allocations of a peer's region, mapped here.
class CudaImports {
 public:
  CudaImports() = default;
  ~CudaImports();
  CudaImports(const CudaImports&) = delete;
  CudaImports& operator=(const CudaImports&) = delete;

  // False when the driver refuses. `is_own`: of this process; `descriptor`: of another one's memory, -1 if none
  // has come.
  bool add(const CudaExport& exported, bool is_own, int descriptor);
  bool empty() const { return mappings_.empty(); }
  // Memory that needs no mapping: this process's own, of the classic allocator.
  bool direct = false;

  // Where the peer's address is here, and for how many bytes from there on. Address 0: nowhere.
  std::pair<uint64_t, uint64_t> translate(uint64_t address) const;

 private:
  struct Mapping {
    CudaExport exported;
    uint64_t address;  // here
    bool is_own;
  };
  std::vector<Mapping> mappings_;
};

// The device that memory belongs to; -1: host memory.
int cuda_device_of(uint64_t address);
// Whether this process uses CUDA.
bool cuda_is_loaded();

// GPU memory has been registered, by any NIC of this process, and is no more. The latter waits, for a while,
// until the process's NICs have given up their mappings of what is registered with none of them any more, as
// the region's own NIC asks them to: its owner may unmap it then.
void gpu_memory_registered(uint64_t address, uint64_t bytes);
void gpu_memory_deregistered(uint64_t address, uint64_t bytes);

// One NIC's copies, asynchronous, in order for each device. Used by its worker.
class CudaCopier {
 public:
  CudaCopier() = default;
  ~CudaCopier();
  CudaCopier(const CudaCopier&) = delete;
  CudaCopier& operator=(const CudaCopier&) = delete;

  // Makes the device's context current for the calling thread.
  bool activate(int device) { return use(device) != nullptr; }
  // Starts a copy; `device` is that of one of the two ends. False: the driver refused.
  bool start(int device, uint64_t target, uint64_t source, uint64_t bytes);
  // A small copy, done on return.
  bool copy(int device, uint64_t target, uint64_t source, uint64_t bytes);
  // Lets `device` reach the memory of `other` without a detour, where the machine can.
  void befriend(int device, int other);
  // Marks of a device are numbered from 1. The number of the next one: it will be behind everything started so
  // far.
  uint64_t next_mark(int device) { return streams_[device].num_passed + streams_[device].events.size() + 1; }
  // Sets the next mark. False: the driver failed.
  bool mark(int device);
  enum class Progress { running, done, failed };
  // Of a mark that has been set.
  Progress passed(int device, uint64_t mark);
  // Waits for everything: before host memory that a copy reads is used again, and before a fence is answered.
  bool drain();

 private:
  struct Stream {
    void* context = nullptr;
    void* stream = nullptr;
    uint64_t num_passed = 0;
    bool failed = false;
    std::deque<void*> events;  // of marks that have not passed, oldest first
    std::vector<void*> idle_events;
    std::set<int> friends;
  };
  Stream* use(int device);

  std::map<int, Stream> streams_;
};

}  // namespace softnic
