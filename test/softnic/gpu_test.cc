// SPDX-License-Identifier: MIT
// GPU memory at either end, with a driver that stands in for CUDA's (fake_cuda.h): which copies are asked for,
// when they count as done, and how memory of another process is mapped.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "../support/catch.h"
#include "child.h"
#include "fake_cuda.h"
#include "node.h"

namespace softnic_test {
namespace {

constexpr size_t kBytes = 300000;
constexpr int kHost = -1;

struct Place {
  int device;  // kHost: the node's own memory
  int by_handle;
};

// A node over memory of some kind, and how a CPU looks at that memory.
struct Holder {
  explicit Holder(Place place, size_t bytes = kBytes) {
    NodeOptions options;
    options.bytes = bytes;
    if (place.device != kHost)
      gpu = options.external = fake_cuda_allocate(place.device, bytes, place.by_handle);
    node = std::make_unique<Node>(options);
  }
  ~Holder() {
    node.reset();
    if (gpu != nullptr) fake_cuda_free(gpu);
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  std::byte* view() { return gpu != nullptr ? fake_cuda_shadow(gpu) : node->memory.data(); }
  void fill(int value) { std::memset(view(), value, kBytes); }
  bool holds(int value) {
    return std::all_of(view(), view() + kBytes,
                       [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }

  std::byte* gpu = nullptr;
  std::unique_ptr<Node> node;
};

constexpr Place kPlaces[] = {{kHost, 0}, {0, 0}, {0, 1}, {1, 0}, {1, 1}};

void exchange(Holder& from, Holder& to) {
  const Contact to_b = to.node->contact();
  REQUIRE(from.node->connect(to_b) == 0);
  REQUIRE(to.node->connect(from.node->contact()) == 0);
  for (int round = 1; round <= 3; ++round) {
    from.fill(round);
    REQUIRE(to.node->receive() == 0);
    REQUIRE(from.node->write(to_b, 0, kBytes, 1, 5) == 0);
    REQUIRE(to.node->wait().status == IBV_WC_SUCCESS);
    REQUIRE(to.holds(round));
    REQUIRE(from.node->wait().status == IBV_WC_SUCCESS);
  }
}

}  // namespace

TEST_CASE("every kind of memory to every other in one process") {
  for (const char* kind : {"ib", "efa"}) {
    const Environment environment{{"KIND", kind}};
    for (const Place& source : kPlaces) {
      for (const Place& target : kPlaces) {
        CAPTURE(source.device, source.by_handle, target.device, target.by_handle);
        Holder from(source), to(target);
        exchange(from, to);
      }
    }
  }
  CHECK(fake_cuda_violations() == 0);
}

TEST_CASE("every kind of memory to every other between processes") {
  const Environment environment{};
  for (const Place& source : kPlaces) {
    for (const Place& target : kPlaces) {
      CAPTURE(source.device, source.by_handle, target.device, target.by_handle);
      Child child([&](int socket) {
        Holder from(source);
        Contact peer;
        char go = 0;
        if (!give(socket, from.node->contact()) || !take(socket, peer) || from.node->connect(peer) != 0)
          return false;
        for (int round = 1; take(socket, go) && go == 'w'; ++round) {
          from.fill(round);
          if (from.node->write(peer, 0, kBytes, 1, 5) != 0 || from.node->wait().status != IBV_WC_SUCCESS)
            return false;
        }
        return true;
      });
      Holder to(target);
      Contact peer;
      REQUIRE(take(child.socket(), peer));
      REQUIRE(to.node->connect(peer) == 0);
      REQUIRE(give(child.socket(), to.node->contact()));
      for (int round = 1; round <= 2; ++round) {
        REQUIRE(to.node->receive() == 0);
        REQUIRE(give(child.socket(), 'w'));
        REQUIRE(to.node->wait().status == IBV_WC_SUCCESS);
        REQUIRE(to.holds(round));
      }
      REQUIRE(give(child.socket(), 'x'));
      CHECK(child.wait() == 0);
    }
  }
  CHECK(fake_cuda_violations() == 0);
}

TEST_CASE("GPU memory under adversity") {
  const Environment environment{{"SEED", "31"}, {"RATE_GBPS", "400"}, {"LATENCY_US", "5"}};
  for (const Place& source : kPlaces) {
    Holder from(source), to({1, 1});
    exchange(from, to);
  }
}

TEST_CASE("GPU memory may be freed as soon as it is deregistered") {
  const Environment environment{};
  for (int repetition = 0; repetition < 10; ++repetition) {
    Holder from({0, 1}), to({1, 1});
    const Contact to_b = to.node->contact();
    REQUIRE(from.node->connect(to_b) == 0);
    REQUIRE(to.node->connect(from.node->contact()) == 0);
    for (int count = 0; count < 4; ++count) REQUIRE(from.node->write(to_b, 0, kBytes) == 0);
    if (repetition % 2 == 0) from.node->destroy_qp();
    REQUIRE(ibv_dereg_mr(std::exchange(to.node->mr, nullptr)) == 0);
    to.fill(9);
    if (repetition % 2 != 0) from.node->destroy_qp();
    REQUIRE(to.holds(9));
  }
}

// At once: the owner may go on to unmap it himself, and drivers do not bear both at the same time.
TEST_CASE("what was mapped is unmapped when its owner has deregistered it") {
  const Environment environment{};
  for (int repetition = 0; repetition < 20; ++repetition) {
    Holder from({0, 1}), to({1, 1});
    const int before = fake_cuda_mappings();
    exchange(from, to);
    CHECK(fake_cuda_mappings() == before + 1);
    REQUIRE(ibv_dereg_mr(std::exchange(from.node->mr, nullptr)) == 0);
    CHECK(fake_cuda_mappings() == before);
  }
}

TEST_CASE("inline data and small reads with GPU memory") {
  const Environment environment{};
  Holder from({0, 1}), to({1, 1});
  const Contact to_b = to.node->contact();
  REQUIRE(from.node->connect(to_b) == 0);
  REQUIRE(to.node->connect(from.node->contact()) == 0);
  char data[] = "inline";
  ibv_sge segment{reinterpret_cast<uint64_t>(data), 6, 0};
  ibv_send_wr request{}, *bad = nullptr;
  request.sg_list = &segment;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
  request.wr.rdma.remote_addr = to_b.address;
  request.wr.rdma.rkey = to_b.rkey;
  REQUIRE(ibv_post_send(from.node->qp, &request, &bad) == 0);
  REQUIRE(from.node->wait().status == IBV_WC_SUCCESS);
  CHECK(std::memcmp(to.view(), "inline", 6) == 0);
  segment = {reinterpret_cast<uint64_t>(from.gpu), 6, from.node->mr->lkey};
  request.opcode = IBV_WR_RDMA_READ;
  request.send_flags = IBV_SEND_SIGNALED;
  REQUIRE(ibv_post_send(from.node->qp, &request, &bad) == 0);
  REQUIRE(from.node->wait().status == IBV_WC_SUCCESS);
  CHECK(std::memcmp(from.view(), "inline", 6) == 0);
}

TEST_CASE("dma-buf registration: the probe, and memory at its own address") {
  const Environment environment{};
  Holder holder({0, 1});
  const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  const uint64_t address = reinterpret_cast<uint64_t>(holder.gpu);
  CHECK(ibv_reg_dmabuf_mr(holder.node->pd, 0, kBytes, address, -1, access) == nullptr);
  CHECK(errno == EBADF);
  const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  REQUIRE(fd >= 0);
  ibv_mr* const region = ibv_reg_dmabuf_mr(holder.node->pd, 0, kBytes, address, fd, access);
  close(fd);
  REQUIRE(region != nullptr);
  CHECK(ibv_dereg_mr(region) == 0);
}

}  // namespace softnic_test
