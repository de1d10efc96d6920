// SPDX-License-Identifier: MIT
// Which sanitizer a test is built with.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace mk::test {

#ifdef __SANITIZE_THREAD__
inline constexpr bool kThreadSanitizer = true;
#elif defined(__has_feature)
inline constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
#else
inline constexpr bool kThreadSanitizer = false;
#endif

// Everything, or, where it would take ten times as long, every third one.
template <class T>
std::vector<T> fewer_if_slow(std::vector<T> all) {
  if (!kThreadSanitizer) return all;
  std::vector<T> some;
  for (size_t index = 0; index < all.size(); index += 3) some.push_back(std::move(all[index]));
  return some;
}

}  // namespace mk::test
