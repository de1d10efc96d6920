// SPDX-License-Identifier: MIT
#include "benchmark.h"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "comparison.h"
#include "element.h"
#include "equipment.h"
#include "errors.h"
#include "trace_files.h"

namespace perf {
namespace {

// Sets of buffers to rotate through: enough that a launch finds none of its inputs in a cache where memory
// allows it.
constexpr size_t kRotatedBytes = size_t{256} << 20;
constexpr size_t kMaxSets = 8;

constexpr double kHostTimeUs = 1e6;  // of launches

int number_of_sets(size_t bytes_per_set) {
  const size_t enough = kRotatedBytes / std::max<size_t>(bytes_per_set, 1) + 1;
  // Small ones stay in a cache anyway: three are enough for inputs that change from launch to launch.
  const size_t small = bytes_per_set < (size_t{4} << 20) ? 3 : kMaxSets;
  return static_cast<int>(std::clamp<size_t>(enough, 2, small));
}

// A communicator of this rank alone. Absent where the library cannot make one now, as when MK_ROOT_PORT pins a
// port that another rank of the machine holds.
class SoloCommunicator {
 public:
  explicit SoloCommunicator(const mk_comm_info_t& info) {
    mk_unique_id_t id;
    mk_comm_config_t config = MK_COMM_CONFIG_INIT;
    config.device = info.device;
    config.cuda_device = info.cuda_device;
    config.host_threads = info.host_threads;
    if (mk_get_unique_id(&id) != MK_SUCCESS || mk_comm_init(&comm_, &id, 1, 0, &config) != MK_SUCCESS)
      comm_ = nullptr;
  }
  ~SoloCommunicator() {
    if (comm_) mk_comm_finalize(comm_);
    if (comm_) mk_comm_destroy(comm_);
  }
  SoloCommunicator(const SoloCommunicator&) = delete;
  SoloCommunicator& operator=(const SoloCommunicator&) = delete;
  mk_comm_t get() const { return comm_; }

 private:
  mk_comm_t comm_ = nullptr;
};

class Benchmark {
 public:
  explicit Benchmark(const BenchmarkInput& input) : input_(input) {
    require(mk_comm_get_info(input.comm, &info_), "mk_comm_get_info", input.comm);
    traces_ = std::make_unique<TraceFiles>(input.options.trace_path, input.comm, info_, input.group);
    context_ = {input.comm,
                info_.rank,
                info_.nranks,
                &input.device,
                input.options.dtypes,
                input.options.b_layout,
                input.options.symmetric,
                input.options.accumulate};
  }

  BenchmarkOutput run(const std::vector<Selection>& work) {
    const std::vector<Selection> available = available_of(work);
    equipment_ = std::make_unique<Equipment>(context_, input_.group, input_.options, info_.num_nodes);
    size_t total = 0;
    for (const Selection& selection : available) total += selection.shapes.size();
    size_t done = 0;
    for (const Selection& selection : available) {
      for (const Shape& shape : selection.shapes) {
        show_progress(std::to_string(++done) + "/" + std::to_string(total) + " " + selection.op->name + " " +
                      shape.text());
        run_shape(*selection.op, shape);
      }
    }
    show_progress("");
    traces_->join();
    equipment_->disconnect();
    equipment_->describe(output_.machine);
    output_.notes = equipment_->notes();
    if (context_.symmetric) output_.notes.push_back("C of all-reduces is in symmetric memory");
    if (context_.accumulate) output_.notes.push_back("C is added to, by the baseline, too, where there is one");
    return std::move(output_);
  }

 private:
  // Those that the device has; that an operator named on the command line is absent is an error.
  std::vector<Selection> available_of(const std::vector<Selection>& work) const {
    std::vector<Selection> available;
    mk_status_t refusal = MK_SUCCESS;
    for (const Selection& selection : work) {
      const mk_status_t status = selection.op->availability(context_);
      const bool wanted_by_name = input_.options.operator_name != "all";
      if (status == MK_SUCCESS && !selection.op->make && wanted_by_name) {
        throw UsageError(std::string(selection.op->name) + ": this mk-perf cannot run it");
      }
      if (status == MK_SUCCESS && selection.op->make) available.push_back(selection);
      if (status != MK_SUCCESS && (wanted_by_name || status != MK_ERROR_UNSUPPORTED)) {
        require(status, selection.op->name, context_.comm);
      }
      if (status != MK_SUCCESS) refusal = status;
    }
    if (available.empty()) require(refusal, "all", context_.comm);
    return available;
  }

  void show_progress(const std::string& line) const {
    if (input_.show_progress) std::fprintf(stderr, "\r\033[K%s", line.c_str());
  }

  void synchronize() const {
    require(mk_comm_synchronize(context_.comm, context_.device->stream()), "mk_comm_synchronize",
            context_.comm);
  }

  void run_shape(const Operator& op, const Shape& shape) {
    Rotation fused = rotation_of(context_, op.make(context_, shape));
    Problem& problem = fused.problem();
    Check check;
    std::vector<uint64_t> hashes;
    if (input_.options.check) {
      check_pattern(problem, fused.num_sets(), Pattern::kIntegers, check);
      check_pattern(problem, fused.num_sets(), Pattern::kRandom, check);
      for (int set = 0; set < fused.num_sets(); ++set) hashes.push_back(problem.output_hash(set));
    } else {
      for (int set = 0; set < fused.num_sets(); ++set) problem.fill(set, Pattern::kRandom);
    }
    for (int set = 0; set < fused.num_sets(); ++set) problem.poison(set);

    std::optional<Rotation> alone = alone_of(op, problem);
    const Track track = {context_, input_.group, equipment_->gpus(), &equipment_->sensors()};
    std::optional<Rotation> moving = moving_of(op, shape);
    ShapeComparison comparison(track, *equipment_, fused, alone ? &*alone : nullptr,
                               moving ? &*moving : nullptr);
    if (const std::string how = comparison.baseline_description(); !how.empty())
      equipment_->note(std::string("baseline of ") + op.name + " " + shape.text() + ": " + how);
    const size_t first = output_.results.size();
    for (const Mode mode : input_.options.modes) {
      const Schedule schedule = {mode, input_.options.warmup, input_.options.iterations};
      output_.results.push_back(result_of(op, shape, problem, mode, comparison.measure_all(schedule)));
    }
    if (input_.options.check) check_same_bits(fused, hashes, check);
    traces_->record([&] { fused.launch(); }, [this] { synchronize(); });
    check_baseline(op, shape, comparison.baseline_error());
    const std::optional<double> host_us = host_time_us(fused, track, output_.results[first].fused.median_us);
    check_host_time(op, shape, host_us);
    std::optional<CheckResult> verdict;
    if (input_.options.check) verdict = agree(op, shape, check);
    for (size_t i = first; i < output_.results.size(); ++i) {
      output_.results[i].check = verdict;
      output_.results[i].host_us = host_us;
    }
  }

  // As many sets on every rank, whose shares may differ: a set is filled, and launched, by all of them
  // together.
  Rotation rotation_of(const Context& context, std::unique_ptr<Problem> problem) const {
    const double most_bytes = input_.group.maximum({static_cast<double>(problem->bytes_per_set())})[0];
    const int num_sets = number_of_sets(static_cast<size_t>(most_bytes));
    return Rotation(context.comm, std::move(problem), num_sets);
  }

  Result result_of(const Operator& op, const Shape& shape, const Problem& problem, Mode mode,
                   const Figures& figures) const {
    Result result;
    result.operator_name = op.name;
    result.device = input_.device.name;
    result.ranks = info_.nranks;
    result.nodes = info_.num_nodes;
    result.shape = shape;
    result.dtype = dtypes_text(context_.dtypes);
    result.mode = mode;
    result.fused = figures.fused;
    result.baseline_us = figures.baseline_us;
    if (op.alone_shape) {
      result.alone_us = figures.alone_us;
      if (info_.nranks > 1 && result.alone_us) *result.alone_us *= op.alone_shape(shape, info_.nranks).factor;
    } else {
      result.gemm_us = figures.alone_us;
    }
    result.cublas_us = figures.cublas_us;
    result.collective_us = figures.collective_us;
    result.unfused_us = figures.unfused_us;
    result.moving_us = figures.moving_us;
    const Traffic traffic = traffic_of(problem);
    if (traffic.link_bytes && equipment_->link())
      result.link_us = transfer_us(*traffic.link_bytes, equipment_->link()->best());
    if (traffic.network_bytes && equipment_->network())
      result.network_us = transfer_us(*traffic.network_bytes, *equipment_->network());
    std::optional<double> transfer = info_.num_nodes > 1 ? result.network_us : result.link_us;
    if (transfer && result.link_us) transfer = std::max(*transfer, *result.link_us);
    result.roofline_us =
        roofline_us(op.alone_shape ? result.alone_us : result.gemm_us, result.cublas_us, transfer);
    result.tflops = problem.flops() / figures.fused.median_us * 1e-6;
    result.sm_mhz = figures.readings.sm_mhz;
    result.watts = figures.readings.watts;
    return result;
  }

  // Of the busiest rank.
  struct Traffic {
    std::optional<double> link_bytes;
    std::optional<double> network_bytes;
  };

  // Between nodes what the library says that it sends: how the ranks share that is its affair.
  Traffic traffic_of(const Problem& problem) const {
    if (info_.num_nodes == 1) return {problem.link_bytes(), std::nullopt};
    const std::optional<mk_plan_t> plan = problem.plan();
    if (!plan) return {};
    const std::vector<double> bytes =
        input_.group.maximum({static_cast<double>(plan->link_bytes), static_cast<double>(plan->network_bytes)});
    return {bytes[0], bytes[1]};
  }

  // A thousand calls, but fewer of long ones: what the host does does not depend on the shape.
  std::optional<double> host_time_us(Rotation& fused, const Track& track, double launch_us) const {
    if (!input_.options.host_time) return std::nullopt;
    const int calls = static_cast<int>(std::clamp(kHostTimeUs / std::max(launch_us, 1.0), 20.0, 1000.0));
    return measure_host_us(fused.candidate(true), track, calls);
  }

  void check_host_time(const Operator& op, const Shape& shape, const std::optional<double>& host_us) {
    const int limit_us = input_.options.host_limit_us;
    if (!host_us || limit_us == 0 || *host_us <= limit_us) return;
    char text[128];
    std::snprintf(text, sizeof text, ": %.1f us of the host's time in a call, expected at most %d", *host_us,
                  limit_us);
    output_.problems.push_back("check failed: " + std::string(op.name) + " " + shape.text() + text);
    output_.all_passed = false;
  }

  // A wrong baseline is no baseline. Both results are rounded, and neither is further than its limit from the
  // exact one.
  void check_baseline(const Operator& op, const Shape& shape, const std::optional<double>& error) {
    if (!error) return;
    const Dtypes& dtypes = context_.dtypes;
    const double limit =
        2 * std::max(relative_error_limit(dtypes.out_dtype), relative_error_limit(dtypes.comm_dtype));
    const double worst = input_.group.maximum({*error})[0];
    if (worst <= limit) return;
    char text[128];
    std::snprintf(text, sizeof text, ": relative difference %.3e, expected at most %.0e", worst, limit);
    output_.problems.push_back(std::string("baseline and operator disagree: ") + op.name + " " + shape.text() +
                               text);
    output_.all_passed = false;
  }

  void check_pattern(Problem& problem, int num_sets, Pattern pattern, Check& check) const {
    for (int set = 0; set < num_sets; ++set) problem.fill(set, pattern);
    for (int set = 0; set < num_sets; ++set) problem.run(set);
    synchronize();
    for (int set = 0; set < num_sets; ++set) problem.check(set, pattern, check);
  }

  // The timed launches had the inputs of the check; sets that none of them reached are run now, and where each
  // launch added to the last, all.
  void check_same_bits(Rotation& fused, const std::vector<uint64_t>& hashes, Check& check) const {
    while (fused.launches() < fused.num_sets()) fused.launch();
    synchronize();
    for (int set = 0; context_.accumulate && set < fused.num_sets(); ++set) {
      fused.problem().poison(set);
      fused.problem().run(set);
      synchronize();
    }
    for (int set = 0; set < fused.num_sets(); ++set) {
      if (fused.problem().output_hash(set) == hashes[static_cast<size_t>(set)]) continue;
      check.same_bits = false;
      if (check.problem.empty()) check.problem = "a repeated launch on the same inputs gave other bits";
    }
  }

  // The verdict of all ranks, the same on every one.
  CheckResult agree(const Operator& op, const Shape& shape, const Check& check) {
    // An infinite relative error stays comparable; a NaN never gets here.
    const std::vector<double> worst = input_.group.maximum(
        {check.passed() ? 0.0 : 1.0, check.exact ? 0.0 : 1.0, check.whole ? 0.0 : 1.0, check.relative_error});
    if (!check.passed()) {
      std::string problem = check.problem;
      if (problem.empty()) {
        char text[96];
        std::snprintf(text, sizeof text, "random inputs: relative error %.3e, expected at most %.0e",
                      check.relative_error, check.relative_error_limit);
        problem = text;
      }
      output_.problems.push_back(std::string("check failed: ") + op.name + " " + shape.text() + ": " + problem);
    }
    output_.all_passed = output_.all_passed && worst[0] == 0.0;
    return {worst[0] == 0.0, worst[1] == 0.0, worst[2] == 0.0, worst[3]};
  }

  // As much work on every rank by itself, all at once: the operator without its communication.
  std::optional<Rotation> alone_of(const Operator& op, const Problem& problem) {
    if (info_.nranks == 1 || !op.alone_comparable) return std::nullopt;
    if (!solo_) solo_ = std::make_unique<SoloCommunicator>(info_);
    if (input_.group.maximum({solo_->get() ? 0.0 : 1.0})[0] != 0.0) return std::nullopt;
    Context solo_context = context_;
    solo_context.comm = solo_->get();
    solo_context.rank = 0;
    solo_context.nranks = 1;
    std::optional<Rotation> alone = rotation_of(solo_context, problem.alone(solo_context));
    for (int set = 0; set < alone->num_sets(); ++set) alone->problem().fill(set, Pattern::kRandom);
    return alone;
  }

  // What moves the data of `shape` and next to nothing else.
  std::optional<Rotation> moving_of(const Operator& op, const Shape& shape) const {
    if (!input_.options.unfused || info_.nranks == 1 || !op.collective_shape) return std::nullopt;
    std::optional<Rotation> moving = rotation_of(context_, op.make(context_, op.collective_shape(shape)));
    for (int set = 0; set < moving->num_sets(); ++set) moving->problem().fill(set, Pattern::kRandom);
    return moving;
  }

  const BenchmarkInput& input_;
  mk_comm_info_t info_ = MK_COMM_INFO_INIT;
  Context context_;
  std::unique_ptr<SoloCommunicator> solo_;
  std::unique_ptr<TraceFiles> traces_;
  std::unique_ptr<Equipment> equipment_;
  BenchmarkOutput output_;
};

}  // namespace

BenchmarkOutput run_benchmark(const BenchmarkInput& input, const std::vector<Selection>& work) {
  return Benchmark(input).run(work);
}

}  // namespace perf
