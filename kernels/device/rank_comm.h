// SPDX-License-Identifier: MIT
// What a kernel of a communicator of several ranks shares with its peers, with its own other launches and with
// the host. Plain structs, the same on both sides.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/gemm_partials_layout.h"
#include "kernels/device/network_comm.h"
#include "kernels/protocol.h"

namespace mk {

// The roles and the things waited for, numbered for the report; cuda_rank.cc has their names.
enum class DeviceRole : uint32_t { copy = 0, entry, compute, reduce, gather, send, receive, NUM };
enum class DeviceObject : uint32_t {
  chunk = 0,
  partial,
  reduced_tile,
  entry,
  counts,
  row_block,
  put,
  command,
  NUM
};

// The first thing that went wrong in a launch.
struct DeviceError {
  uint32_t kind;  // DeviceErrorKind
  DeviceRole role;
  DeviceObject object;
  int32_t peer;  // the rank it concerns
  int32_t cta;   // that noticed
  uint64_t epoch;
  uint64_t index;
  uint64_t seen;
  uint64_t expected;
  EntryRecord own;                     // mismatch: what this rank called
  EntryRecord entry;                   // and the peer
  alignas(16) std::byte details[128];  // data: what the operator says of it
};
enum DeviceErrorKind : uint32_t {
  DEVICE_TIMEOUT = 1,
  DEVICE_MISMATCH = 2,
  DEVICE_OVERLAP = 3,
  DEVICE_DATA = 4
};

// A launch in the flight record, as the kernel writes it at its start, so that graph replays are in it. Times
// are the GPU's.
struct DeviceFlight {
  uint64_t epoch;
  uint32_t op;
  int64_t shape[4];
  uint64_t start_ns;
};

constexpr int NUM_FLIGHTS = 64;  // launch e at e % NUM_FLIGHTS

// What a CTA leaves behind as the last thing of a launch, in a place that no other one of that launch reads or
// writes: so none waits for another, and a launch has ended when it is in all places. A launch of fewer CTAs
// than places fills several with each.
struct CtaEnd {
  uint64_t epoch;
  uint64_t ticket;  // of the last launch that had one
};

// What is left of launches that have ended. In the GPU's memory, from which the host takes it when it is asked:
// a kernel that tells the host itself lasts a microsecond longer, until the bus has answered.
struct LaunchEnds {
  CtaEnd ctas[PartialsLayout::MAX_CTAS];
  uint64_t aborted_epoch;  // the first launch that the host has ended, with all after it; 0: none
  uint64_t end_ns[NUM_FLIGHTS];
  uint64_t failed_epochs[NUM_FLIGHTS];
};

// In pinned host memory, mapped on the device.
struct HostMailbox {
  alignas(128) uint32_t abort;   // the host: end
  alignas(128) uint32_t failed;  // the device: `error` is complete; the host puts it back to 0
  DeviceError error;
  alignas(128) uint64_t started;  // an epoch
  DeviceFlight flights[NUM_FLIGHTS];
  // The host's copies; no kernel's.
  LaunchEnds ends;
  uint64_t entries[2 * MAX_GPU_RANKS];  // epochs, of bank 0, then of bank 1
};

// Of a CTA that computes, at most.
constexpr int NUM_PUSH_WARPS = 2;
// Tiles that a CTA has finished and its push warps have yet to send; the largest is 128x256 of fp32.
constexpr int NUM_STAGED_TILES = 2;
constexpr size_t STAGING_BYTES = NUM_STAGED_TILES * 128 * 256 * 4;
// In front of it, for the flags of tiles cut along k, whose partial sums take its place: a PartialsLayout
// begins there.
constexpr size_t STAGING_FLAGS_BYTES = PartialsLayout::FLAGS_BYTES;

// What the CTAs of one launch count together. Launches take the two in turn, and each puts the next one's to 0,
// which the one before has used: at an end of its own it would have to wait until all others have left.
struct LaunchProgress {
  uint64_t fault;          // the complement of the number of a routing's first entry that is wrong; 0: none
  uint32_t failed;         // it has reported an error: waits end
  uint32_t gather_ticket;  // pieces handed out
  uint32_t push_ticket;
  uint32_t late_push_ticket;  // as push_ticket, of pieces that go later
  uint32_t tile_ticket;       // tiles handed out
  uint32_t num_counted;       // CTAs that have counted their part of a routing
  uint32_t num_routed;        // CTAs that have done their part of it
};

// In this rank's device memory, zero before the first launch.
struct LaunchState {
  LaunchEnds ends;
  uint64_t entered_epoch;      // the last launch that all ranks have entered
  uint64_t direct_epoch;       // the last whose outputs peers write to; set before entered_epoch
  uint64_t host_look_ns;       // when a wait last looked at the host's word
  uint32_t aborted;            // the host has called for the end, once and for all
  uint32_t num_inside;         // CTAs that have not left; a launch adds its own as it enters
  LaunchProgress progress[2];  // of a launch: the one of its bank
  // Arrivals of a chunk's pieces; the last to arrive raises the chunk's flag and puts the count back to 0.
  uint32_t counts[kFlagsPerBank];
  uint32_t num_near;  // see CtasInStep
};

struct TraceBuffer;

// A kernel's parameter.
struct RankComm {
  int rank;
  int nranks;
  RankOrder order;
  // Each rank's library memory as this device addresses it; null: of another node, which is never mapped.
  std::byte* memory[MAX_GPU_RANKS];
  size_t arena;  // the receive areas' offset in it, bank 0 before bank 1
  size_t bank_bytes;
  LaunchState* state;
  std::byte* partials;  // in device memory: STAGING_FLAGS_BYTES, zero between launches,
  std::byte* staging;   // and behind them STAGING_BYTES a CTA
  HostMailbox* mailbox;
  uint64_t wait_timeout_ns;
  EntryRecord entry;  // the epoch left to the kernel
  // Where each rank's output lies, as this device addresses it, if all have placed theirs as the entry says.
  std::byte* outputs[MAX_GPU_RANKS];
  int64_t flight_shape[4];
  TraceBuffer* trace;  // null: no trace is taken
  // Launches numbered as the host enqueues them: how it knows which have ended, without recording an event for
  // each. 0: captured, and comes any number of times.
  uint64_t ticket;
  NetworkComm network;  // of several nodes
};

}  // namespace mk
