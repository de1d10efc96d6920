// SPDX-License-Identifier: MIT
// What of rc and srd needs no device: the choice of ports and GIDs, the cutting of puts, the bits of an
// immediate, the counting of arrivals, and a library that is not there.
#include <cstdlib>
#include <random>
#include <set>

#include "../support/catch.h"
#include "transport/rc/rc.h"
#include "transport/srd/srd.h"
#include "transport/verbs/arrivals.h"
#include "transport/verbs/gpu_check.h"
#include "transport/verbs/port_choice.h"
#include "transport/verbs/put_pieces.h"
#include "transport/verbs/work_id.h"

namespace mk::test {
namespace {

using namespace verbs;

DeviceFilter filter(const char* text) {
  auto parsed = DeviceFilter::parse(text);
  REQUIRE(parsed.ok());
  return parsed.take();
}

Gid ipv4(uint8_t last) {
  Gid gid{};
  gid[10] = gid[11] = 0xff;
  gid[12] = 10;
  gid[15] = last;
  return gid;
}

Gid ipv6(uint8_t first, uint8_t second) {
  Gid gid{};
  gid[0] = first;
  gid[1] = second;
  gid[15] = 1;
  return gid;
}

}  // namespace

TEST_CASE("MK_IB_HCA chooses devices and ports", "[verbs]") {
  CHECK(filter("").accepts("mlx5_0", 1));
  CHECK(filter("mlx5_1").accepts("mlx5_1", 2));
  CHECK(filter("mlx5_1").accepts("mlx5_10", 1));
  CHECK_FALSE(filter("mlx5_1").accepts("mlx5_0", 1));
  CHECK_FALSE(filter("=mlx5_1").accepts("mlx5_10", 1));
  CHECK(filter("=mlx5_1,rxe0").accepts("rxe0", 1));
  CHECK_FALSE(filter("^mlx5").accepts("mlx5_3", 1));
  CHECK(filter("^mlx5").accepts("rxe0", 1));
  CHECK(filter("^=mlx5_1").accepts("mlx5_10", 1));
  CHECK(filter("mlx5_1:2").accepts("mlx5_1", 2));
  CHECK_FALSE(filter("mlx5_1:2").accepts("mlx5_1", 1));
  for (const char* wrong : {":1", "mlx5_0:", "mlx5_0:zero", ",,", "mlx5_0:-1"}) {
    INFO(wrong);
    CHECK_FALSE(DeviceFilter::parse(wrong).ok());
  }
}

TEST_CASE("ports are chosen by PCIe distance, or dealt to the ranks of a node", "[verbs]") {
  const char* gpu = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0";
  CHECK(path_distance(gpu, gpu) == 0);
  CHECK(path_distance(gpu, "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.0") == 2);
  CHECK(path_distance(gpu, "/sys/devices/pci0000:00/0000:00:02.0/0000:04:00.0") == 5);
  CHECK(path_distance(gpu, "/sys/devices/pci0000:80/0000:80:02.0/0000:84:00.0") == 7);
  using Ports = std::vector<size_t>;
  CHECK(choose_ports(4, std::vector<int>{5, 2, 2, 7}, 0, 8, 8) == Ports{1, 2});
  CHECK(choose_ports(4, {}, 1, 2, 8) == Ports{1, 3});
  CHECK(choose_ports(2, {}, 5, 8, 8) == Ports{1});
  CHECK(choose_ports(3, {}, 0, 1, 2) == Ports{0, 1});
  CHECK(choose_ports(0, {}, 0, 1, 8).empty());
}

TEST_CASE("a GID of RoCE v2 over IPv4 is preferred, zeros do not count", "[verbs]") {
  const GidEntry local_v1{0, GidKind::roce_v1, ipv6(0xfe, 0x80)},
      local_v2{1, GidKind::roce_v2, ipv6(0xfe, 0x80)};
  const GidEntry ipv4_v1{2, GidKind::roce_v1, ipv4(1)}, ipv4_v2{3, GidKind::roce_v2, ipv4(1)};
  const GidEntry global_v2{4, GidKind::roce_v2, ipv6(0x20, 0x01)}, later{5, GidKind::roce_v2, ipv4(2)};
  const auto chosen = [](std::vector<GidEntry> entries) {
    const auto best = choose_gid(entries);
    return best ? best->index : -1;
  };
  CHECK(chosen({local_v1, local_v2, ipv4_v1, ipv4_v2, global_v2, later}) == 3);
  CHECK(chosen({local_v1, local_v2, ipv4_v1, global_v2}) == 4);
  CHECK(chosen({local_v1, local_v2, ipv4_v1}) == 1);
  CHECK(chosen({local_v1, ipv4_v1}) == 2);
  CHECK(chosen({local_v1}) == 0);
  CHECK(chosen({{0, GidKind::roce_v2, Gid{}}}) == -1);
  CHECK(text_of(ipv4(7)) == "10.0.0.7");
  CHECK(text_of(ipv6(0xfe, 0x80)) == "fe80::1");
}

TEST_CASE("stripes and pieces cover a put once, aligned in the target", "[verbs]") {
  std::mt19937_64 random(7);
  for (int n = 0; n < 2000; ++n) {
    const uint32_t bytes = static_cast<uint32_t>(random() >> (32 + random() % 32));
    const uint64_t target = random() % (uint64_t{3} << 30), source = random() % (uint64_t{3} << 30);
    const uint32_t links = 1 + static_cast<uint32_t>(random() % kMaxLinks);
    const uint64_t most = uint64_t{1} << (20 + random() % 12);
    const uint32_t stripes = num_stripes(bytes, links);
    REQUIRE((stripes >= 1 && stripes <= links));
    uint64_t covered = 0;
    for (uint32_t i = 0; i < stripes; ++i) {
      const Range range = stripe(target, bytes, stripes, i);
      REQUIRE(range.begin == covered);
      REQUIRE((range.end > range.begin || bytes == 0));
      if (i + 1 < stripes) REQUIRE((target + range.end) % kStripeAlignment == 0);
      covered = range.end;
      uint32_t pieces = 0;
      for (uint64_t at = range.begin; at < range.end; ++pieces) {
        const uint32_t piece = piece_bytes(source + at, target + at, range.end - at, most);
        REQUIRE((piece > 0 && piece <= most));
        REQUIRE((source + at) / kRegistrationBytes == (source + at + piece - 1) / kRegistrationBytes);
        REQUIRE((target + at) / kRegistrationBytes == (target + at + piece - 1) / kRegistrationBytes);
        at += piece;
      }
      REQUIRE(count_pieces(source, target, range, most) == std::max(pieces, 1u));
    }
    REQUIRE(covered == bytes);
  }
}

TEST_CASE("an immediate holds the largest of everything, and no two puts share one", "[verbs]") {
  std::set<uint32_t> seen;
  for (const uint32_t slot : {0u, 1u, kCreditsPerPeer - 1}) {
    for (const uint32_t signal : {0u, 1u, kNumSignals - 1}) {
      for (const uint32_t pieces : {1u, 2u, kMaxPieces}) {
        const uint32_t immediate = encode(PutImmediate{slot, signal, pieces});
        CHECK_FALSE(is_control(immediate));
        const PutImmediate back = decode_put(immediate);
        CHECK((back.slot == slot && back.signal == signal && back.pieces == pieces));
        seen.insert(immediate);
      }
    }
  }
  CHECK(seen.size() == 27);
  for (uint32_t group = 0; group < 8; ++group) {
    const uint32_t immediate = encode(acknowledge(group, 0x81));
    CHECK(is_control(immediate));
    const ControlImmediate back = decode_control(immediate);
    CHECK(back.kind == ControlKind::acknowledge);
    CHECK(acknowledged_slots(back) == (uint64_t{0x81} << (8 * group)));
  }
  CHECK(decode_control(encode(ControlImmediate{ControlKind::refused, 0})).kind == ControlKind::refused);
  const WorkId id = decode_work(encode(WorkId{WorkKind::receive, 0xffff, 255, 63, 0xffffff}));
  CHECK((id.kind == WorkKind::receive && id.peer == 0xffff && id.link == 255 && id.slot == 63));
  CHECK(id.count == 0xffffff);
}

TEST_CASE("arrivals are counted a slot at a time, in any order, for ever", "[verbs]") {
  Arrivals arrivals;
  std::mt19937_64 random(3);
  // Beyond 2^16 puts through one slot, each of up to the most pieces now and then.
  uint64_t published = 0;
  constexpr uint32_t kLaps = 70000;
  for (uint32_t lap = 0; lap < kLaps; ++lap) {
    const PutImmediate put{kCreditsPerPeer - 1, kNumSignals - 1, lap % 1000 == 0 ? kMaxPieces : 1 + lap % 3};
    for (uint32_t piece = 1; piece <= put.pieces; ++piece) {
      const auto last = arrivals.count(put);
      if (!last.ok() || last.value() != (piece == put.pieces)) FAIL("lap " << lap << ", piece " << piece);
      published += last.value();
    }
  }
  CHECK(published == kLaps);
  // Pieces of several slots, mixed.
  std::vector<PutImmediate> pieces;
  for (uint32_t slot = 0; slot < kCreditsPerPeer; ++slot) pieces.insert(pieces.end(), 5, {slot, slot * 7, 5});
  std::shuffle(pieces.begin(), pieces.end(), random);
  std::vector<int> left(kCreditsPerPeer, 5);
  for (const PutImmediate& piece : pieces) {
    const auto last = arrivals.count(piece);
    REQUIRE(last.ok());
    CHECK(last.value() == (--left[piece.slot] == 0));
  }
  // A sender that changes its mind.
  REQUIRE(arrivals.count({4, 9, 3}).ok());
  CHECK_FALSE(arrivals.count({4, 9, 2}).ok());
  CHECK_FALSE(arrivals.count({4, 8, 3}).ok());
  CHECK(arrivals.count({4, 9, 3}).ok());
}

TEST_CASE("a verbs library that is not there is a sentence", "[verbs]") {
  setenv("MK_VERBS_LIBRARY", "libno-such-verbs.so.7", 1);
  for (const Status& status : {rc::available(), srd::available()}) {
    CHECK(status.code() == MK_ERROR_UNSUPPORTED);
    CHECK(status.sentence().find("libno-such-verbs.so.7") != std::string::npos);
  }
  // A library, but not of verbs.
  setenv("MK_VERBS_LIBRARY", "libc.so.6", 1);
  CHECK(rc::available().sentence().find("ibv_get_device_list") != std::string::npos);
  unsetenv("MK_VERBS_LIBRARY");
}

TEST_CASE("what a GPU's memory lacks for RDMA is said with its cure", "[verbs]") {
  GpuReach reach;
  CHECK(judge(reach).problem.empty());
  reach.has_gpu = true;
  CHECK(judge(reach).problem.find("does not import dma-buf") != std::string::npos);
  CHECK(judge(reach).problem.find("modprobe nvidia-peermem") != std::string::npos);
  reach.nic_dma_buf = true;
  CHECK(judge(reach).problem.find("GPU's driver does not export") != std::string::npos);
  reach.library_dma_buf = reach.nic_dma_buf = false;
  CHECK(judge(reach).problem.find("ibv_reg_dmabuf_mr") != std::string::npos);
  reach.peer_memory = true;
  CHECK(judge(reach).text == "through nvidia_peermem");
  CHECK(judge(reach).problem.empty());
  reach = {true, true, true, true, true};
  CHECK(judge(reach).text == "through dma-buf");
  CHECK(judge(reach).problem.empty());
}

}  // namespace mk::test
