// SPDX-License-Identifier: MIT
#include "launcher.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <thread>

#include "errors.h"
#include "shape.h"

namespace perf {
namespace {

using Milliseconds = std::chrono::milliseconds;

// Variables of one launcher; nranks may have two, the first that is set counts.
struct Names {
  const char* launcher;
  const char* rank;
  const char* nranks;
  const char* nranks_else;
  const char* local_rank;
  std::array<const char*, 2> job;
};

// torchrun's run id and port are the same from run to run unless the user sets them, so they name no job.
// Slurm's batch script itself sees SLURM_NTASKS of the whole job; under srun SLURM_STEP_NUM_TASKS is the truth.
constexpr Names kLaunchers[] = {
    {"MK_RANK", "MK_RANK", "MK_NRANKS", nullptr, "MK_LOCAL_RANK", {"MK_JOB", nullptr}},
    {"Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     nullptr,
     "OMPI_COMM_WORLD_LOCAL_RANK",
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {"torchrun", "RANK", "WORLD_SIZE", nullptr, "LOCAL_RANK", {"TORCHELASTIC_RUN_ID", "MASTER_PORT"}},
    {"Slurm",
     "SLURM_PROCID",
     "SLURM_STEP_NUM_TASKS",
     "SLURM_NTASKS",
     "SLURM_LOCALID",
     {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
};

// A file older than this at the start of a rank cannot be of a job whose ranks still wait for each other.
constexpr std::time_t kStaleSeconds = 120;
// How long rank 0 may take to replace a file that is older than a rank.
constexpr Milliseconds kGrace{2000};
constexpr Milliseconds kPollInterval{20};

struct IdRecord {
  char magic[8];
  mk_unique_id_t id;
  char job[112];
};
static_assert(sizeof(IdRecord) == 248);
constexpr char kMagic[8] = {'m', 'k', '-', 'i', 'd', ' ', '1', '\n'};

std::string job_field(const std::string& job) { return job.substr(0, sizeof(IdRecord::job) - 1); }

struct Found {
  IdRecord record;
  std::time_t written;
};

std::optional<Found> read_record(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  Found found{};
  struct stat status {};
  const bool whole =
      read(fd, &found.record, sizeof found.record) == static_cast<ssize_t>(sizeof found.record) &&
      fstat(fd, &status) == 0 && std::memcmp(found.record.magic, kMagic, sizeof kMagic) == 0;
  close(fd);
  found.record.job[sizeof found.record.job - 1] = '\0';
  found.written = status.st_mtime;
  if (!whole) return std::nullopt;
  return found;
}

int hex_digit(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  if (digit >= 'A' && digit <= 'F') return digit - 'A' + 10;
  return -1;
}

[[noreturn]] void cannot(const char* what, const std::string& path) {
  throw UsageError("--id-file " + path + ": cannot " + what + ": " + std::strerror(errno));
}

}  // namespace

std::optional<Launcher> detect_launcher(const Environment& environment) {
  for (const Names& names : kLaunchers) {
    const char* rank = environment(names.rank);
    const char* nranks_name = names.nranks;
    const char* nranks = environment(nranks_name);
    if (!nranks && names.nranks_else) nranks = environment(nranks_name = names.nranks_else);
    if (!rank && !nranks) continue;
    if (!rank || !nranks) {
      throw UsageError(std::string("environment: ") + (rank ? names.rank : nranks_name) + " is set but " +
                       (rank ? nranks_name : names.rank) + " is not");
    }
    Launcher launcher;
    launcher.name = names.launcher;
    launcher.nranks = static_cast<int>(parse_integer(nranks, nranks_name, 1, 1 << 20));
    launcher.rank = static_cast<int>(parse_integer(rank, names.rank, 0, launcher.nranks - 1));
    const char* local_rank = environment(names.local_rank);
    launcher.local_rank =
        local_rank ? static_cast<int>(parse_integer(local_rank, names.local_rank, 0, INT_MAX)) : 0;
    for (const char* job : names.job) {
      if (job && environment(job)) launcher.job += std::string(environment(job)) + ".";
    }
    return launcher;
  }
  return std::nullopt;
}

mk_unique_id_t parse_unique_id(const std::string& hex) {
  mk_unique_id_t id{};
  bool well_formed = hex.size() == 2 * sizeof id.bytes;
  for (size_t index = 0; well_formed && index < sizeof id.bytes; ++index) {
    const int high = hex_digit(hex[2 * index]);
    const int low = hex_digit(hex[2 * index + 1]);
    well_formed = high >= 0 && low >= 0;
    id.bytes[index] = static_cast<unsigned char>(high * 16 + low);
  }
  if (!well_formed)
    throw UsageError("MK_UNIQUE_ID: expected 256 hexadecimal digits, the 128 bytes of mk_get_unique_id");
  return id;
}

void publish_id(const std::string& path, const std::string& job, const mk_unique_id_t& id) {
  if (unlink(path.c_str()) != 0 && errno != ENOENT) cannot("remove the one that is there", path);
  const std::string part = path + ".part";
  unlink(part.c_str());
  IdRecord record{};
  std::memcpy(record.magic, kMagic, sizeof kMagic);
  record.id = id;
  const std::string name = job_field(job);
  std::memcpy(record.job, name.c_str(), name.size());
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) cannot("write", part);
  const bool written =
      write(fd, &record, sizeof record) == static_cast<ssize_t>(sizeof record) && fsync(fd) == 0;
  if (close(fd) != 0 || !written) cannot("write", part);
  if (rename(part.c_str(), path.c_str()) != 0) cannot("put into place", path);
}

mk_unique_id_t await_id(const std::string& path, const std::string& job, Milliseconds deadline) {
  const auto start = std::chrono::steady_clock::now();
  const std::time_t started = std::time(nullptr);
  std::string obstacle = "no such file appeared";
  for (;;) {
    const auto waited = std::chrono::steady_clock::now() - start;
    if (const std::optional<Found> found = read_record(path)) {
      const bool named = !job.empty();
      if (found->record.job != job_field(job)) {
        obstacle = std::string("it belongs to another job (\"") + found->record.job + "\")";
      } else if (found->written + kStaleSeconds < started) {
        obstacle = "it was left by an earlier job";
      } else if (named || found->written >= started || waited > kGrace) {
        return found->record.id;
      }
    }
    if (waited > deadline) {
      throw RunError("waited " + std::to_string(deadline.count() / 1000) + " s for rank 0 to write --id-file " +
                     path + ": " + obstacle + ". Is the folder shared, and did rank 0 start?");
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace perf
