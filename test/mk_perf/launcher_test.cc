// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "errors.h"
#include "launcher.h"
#include "test/support/catch.h"

using namespace perf;
using namespace std::chrono_literals;

namespace {

std::optional<Launcher> detect(const std::map<std::string, std::string>& variables) {
  return detect_launcher([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

struct Folder {
  std::filesystem::path path;
  Folder() {
    char name[] = "/tmp/mk_perf_test_XXXXXX";
    if (!mkdtemp(name)) throw std::runtime_error("mkdtemp");
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

mk_unique_id_t id_of(unsigned char byte) {
  mk_unique_id_t id;
  std::memset(id.bytes, byte, sizeof id.bytes);
  return id;
}

bool same(const mk_unique_id_t& a, const mk_unique_id_t& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void age(const std::filesystem::path& path, std::chrono::seconds by) {
  std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() - by);
}

}  // namespace

TEST_CASE("each launcher's variables are understood") {
  CHECK(!detect({}));
  const auto plain = detect({{"MK_RANK", "1"}, {"MK_NRANKS", "2"}, {"RANK", "9"}, {"WORLD_SIZE", "10"}});
  REQUIRE(plain);
  CHECK(plain->name == "MK_RANK");
  CHECK(plain->rank == 1);
  CHECK(plain->nranks == 2);
  const auto mpi = detect({{"OMPI_COMM_WORLD_RANK", "3"},
                           {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"PMIX_NAMESPACE", "job-7"}});
  REQUIRE(mpi);
  CHECK(mpi->name == "Open MPI");
  CHECK(mpi->local_rank == 1);
  CHECK(mpi->job == "job-7.");
  const auto torchrun = detect({{"RANK", "0"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "0"}});
  REQUIRE(torchrun);
  CHECK(torchrun->name == "torchrun");
  // Under srun the step's size counts, not the job's.
  const auto slurm = detect(
      {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "16"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_JOB_ID", "42"}});
  REQUIRE(slurm);
  CHECK(slurm->nranks == 8);
  CHECK(slurm->job == "42.");
}

TEST_CASE("variables that make no sense are refused by name") {
  CHECK_THROWS_AS(detect({{"MK_RANK", "0"}}), UsageError);
  CHECK_THROWS_AS(detect({{"MK_NRANKS", "2"}}), UsageError);
  CHECK_THROWS_AS(detect({{"MK_RANK", "2"}, {"MK_NRANKS", "2"}}), UsageError);
  CHECK_THROWS_AS(detect({{"MK_RANK", "x"}, {"MK_NRANKS", "2"}}), UsageError);
  CHECK_THROWS_AS(detect({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), UsageError);
}

TEST_CASE("a unique id in hexadecimal") {
  std::string hex;
  for (int i = 0; i < 128; ++i) hex += i % 2 ? "aB" : "07";
  CHECK(parse_unique_id(hex).bytes[0] == 0x07);
  CHECK(parse_unique_id(hex).bytes[127] == 0xab);
  CHECK_THROWS_AS(parse_unique_id(hex.substr(2)), UsageError);
  CHECK_THROWS_AS(parse_unique_id(hex.replace(9, 1, "g")), UsageError);
}

TEST_CASE("an id written by rank 0 reaches the others, readable by the user only") {
  const Folder folder;
  const std::string path = folder.path / "id";
  std::thread writer([&] {
    std::this_thread::sleep_for(100ms);
    publish_id(path, "job", id_of(7));
  });
  CHECK(same(await_id(path, "job", 5s), id_of(7)));
  writer.join();
  struct stat status {};
  REQUIRE(stat(path.c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0600);
}

TEST_CASE("what an earlier job left is not taken for this one's id") {
  const Folder folder;
  const std::string path = folder.path / "id";
  SECTION("it names another job") {
    publish_id(path, "old", id_of(1));
    CHECK_THROWS_AS(await_id(path, "new", 300ms), RunError);
  }
  SECTION("it is old") {
    publish_id(path, "", id_of(1));
    age(path, 600s);
    CHECK_THROWS_AS(await_id(path, "", 300ms), RunError);
  }
  SECTION("it is recent, but rank 0 replaces it in time") {
    publish_id(path, "", id_of(1));
    age(path, 30s);
    std::thread writer([&] {
      std::this_thread::sleep_for(500ms);
      publish_id(path, "", id_of(2));
    });
    CHECK(same(await_id(path, "", 10s), id_of(2)));
    writer.join();
  }
  SECTION("it is not an id at all") {
    std::ofstream(path) << "hello";
    CHECK_THROWS_AS(await_id(path, "", 300ms), RunError);
  }
}

TEST_CASE("a rank that started after rank 0 takes the file that is there") {
  const Folder folder;
  const std::string path = folder.path / "id";
  publish_id(path, "", id_of(3));
  age(path, 10s);
  CHECK(same(await_id(path, "", 10s), id_of(3)));
}

TEST_CASE("waiting ends by its deadline with a sentence") {
  const Folder folder;
  const std::string path = folder.path / "none";
  try {
    await_id(path, "", 200ms);
    FAIL("no error");
  } catch (const RunError& error) {
    CHECK(std::string(error.what()).find("no such file appeared") != std::string::npos);
    CHECK(std::string(error.what()).find(path) != std::string::npos);
  }
}

TEST_CASE("a folder that is not there is bad usage") {
  CHECK_THROWS_AS(publish_id("/no/such/folder/id", "", id_of(1)), UsageError);
}
