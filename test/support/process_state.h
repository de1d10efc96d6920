// SPDX-License-Identifier: MIT
// What a process holds, for tests that nothing is left behind.
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <fstream>
#include <string>

namespace mk::test {

inline int count_entries(const char* directory) {
  int count = 0;
  if (DIR* listing = opendir(directory)) {
    while (const dirent* entry = readdir(listing)) count += entry->d_name[0] != '.';
    closedir(listing);
  }
  return count;
}

// The listing's own descriptor is counted, before and after alike.
inline int open_descriptors() { return count_entries("/proc/self/fd"); }
inline int running_threads() { return count_entries("/proc/self/task"); }
// A thread that was joined may be listed a moment longer.
inline bool running_threads_settle_at(int count) {
  for (int turn = 0; turn < 100 && running_threads() != count; ++turn) usleep(10000);
  return running_threads() == count;
}
// Until there have been as many for 0.3 s: threads of a communicator that is gone may still be ending, and hold
// descriptors.
inline void await_ending_threads() {
  int count = running_threads();
  for (int turn = 0, same = 0; turn < 300 && same < 30; ++turn) {
    usleep(10000);
    const int now = running_threads();
    same = now == count ? same + 1 : 0;
    count = now;
  }
}
inline int shared_memory_files() { return count_entries("/dev/shm"); }

// Lines of /proc/self/maps that contain `text`.
inline int mappings(const std::string& text) {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(text) != std::string::npos;
  return count;
}

// A sanitizer needs addresses and descriptors of its own, and sees errors that are none when it lacks them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kLimitsCanBeSet = false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kLimitsCanBeSet = false;
#else
inline constexpr bool kLimitsCanBeSet = true;
#endif
#else
inline constexpr bool kLimitsCanBeSet = true;
#endif

}  // namespace mk::test
