// SPDX-License-Identifier: MIT
#include "lib/symmetric_heap.h"

#include <cstdint>
#include <random>
#include <vector>

#include "test/support/catch.h"

using mk::SymmetricHeap;

namespace {

constexpr size_t kUnit = SymmetricHeap::kAlignment;

// The same allocator as a table of units, each free or owned by the allocation that starts at unit owner[i].
class Model {
 public:
  void extend(size_t units) { owner_.resize(owner_.size() + units, kFree); }

  std::optional<size_t> allocate(size_t bytes) {
    const size_t units = (bytes + kUnit - 1) / kUnit;
    size_t run = 0;
    for (size_t unit = 0; unit < owner_.size(); ++unit) {
      run = owner_[unit] == kFree ? run + 1 : 0;
      if (run < units || units == 0) continue;
      const size_t first = unit + 1 - units;
      for (size_t taken = first; taken <= unit; ++taken) owner_[taken] = first;
      return first * kUnit;
    }
    return std::nullopt;
  }

  bool free(size_t offset) {
    const size_t first = offset / kUnit;
    if (offset % kUnit != 0 || first >= owner_.size() || owner_[first] != first) return false;
    for (size_t unit = first; unit < owner_.size() && owner_[unit] == first; ++unit) owner_[unit] = kFree;
    return true;
  }

  size_t bytes_in_use() const {
    size_t units = 0;
    for (const size_t owner : owner_) units += owner != kFree;
    return units * kUnit;
  }
  size_t size() const { return owner_.size() * kUnit; }

 private:
  static constexpr size_t kFree = SIZE_MAX;
  std::vector<size_t> owner_;
};

}  // namespace

TEST_CASE("the heap hands out aligned pieces, lowest first, and joins freed neighbours") {
  SymmetricHeap heap;
  CHECK_FALSE(heap.allocate(1));
  heap.extend(8 * kUnit);
  CHECK(heap.allocate(1) == 0u);
  CHECK(heap.allocate(kUnit + 1) == kUnit);
  CHECK(heap.allocate(kUnit) == 3 * kUnit);
  CHECK(heap.bytes_in_use() == 4 * kUnit);
  CHECK_FALSE(heap.allocate(0));
  CHECK_FALSE(heap.allocate(5 * kUnit));
  CHECK_FALSE(heap.allocate(SIZE_MAX));
  CHECK_FALSE(heap.free(2 * kUnit));
  CHECK_FALSE(heap.free(kUnit + 1));
  CHECK(heap.free(0));
  CHECK_FALSE(heap.free(0));
  CHECK(heap.free(kUnit));
  CHECK(heap.allocate(3 * kUnit) == 0u);
  heap.extend(4 * kUnit);
  CHECK(heap.allocate(8 * kUnit) == 4 * kUnit);
  CHECK(heap.bytes_in_use() == 12 * kUnit);
  CHECK(heap.size() == 12 * kUnit);
}

TEST_CASE("random calls give what the model gives") {
  for (unsigned seed = 1; seed <= 8; ++seed) {
    INFO("seed " << seed);
    std::mt19937 random(seed);
    SymmetricHeap heap;
    SymmetricHeap twin;
    Model model;
    std::vector<size_t> offsets;
    for (int step = 0; step < 5000; ++step) {
      const unsigned choice = random() % 100;
      if (choice < 1 && model.size() < 2000 * kUnit) {
        const size_t units = 1 + random() % 100;
        heap.extend(units * kUnit);
        twin.extend(units * kUnit);
        model.extend(units);
      } else if (choice < 52) {
        const size_t bytes = random() % (random() % 4 == 0 ? 40 * kUnit : 4 * kUnit);
        const auto expected = model.allocate(bytes);
        REQUIRE(heap.allocate(bytes) == expected);
        REQUIRE(twin.allocate(bytes) == expected);
        if (expected) offsets.push_back(*expected);
      } else {
        // Mostly something that is allocated, sometimes any unit.
        size_t offset = random() % (model.size() / kUnit + 1) * kUnit;
        if (!offsets.empty() && random() % 8 != 0) {
          const size_t index = random() % offsets.size();
          offset = offsets[index];
          offsets.erase(offsets.begin() + static_cast<std::ptrdiff_t>(index));
        }
        const bool expected = model.free(offset);
        REQUIRE(heap.free(offset) == expected);
        REQUIRE(twin.free(offset) == expected);
      }
      REQUIRE(heap.bytes_in_use() == model.bytes_in_use());
      REQUIRE(heap.size() == model.size());
    }
  }
}
