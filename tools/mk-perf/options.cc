// SPDX-License-Identifier: MIT
#include "options.h"

#include <algorithm>

// Values contain commas: no option is a list of comma-separated items.
#define CXXOPTS_VECTOR_DELIMITER '\n'
#include <cxxopts.hpp>

#include "element.h"
#include "errors.h"
#include "presets.h"

namespace perf {
namespace {

constexpr int kMaxLocalRanks = 256;

cxxopts::Options command_line() {
  std::string names;
  for (const Operator* known : all_operators()) names += std::string(known->name) + ", ";
  cxxopts::Options options(
      "mk-perf", "Measures and checks the operators of libmkernel: " + names + "or all that the device has.\n");
  const auto text = [](const char* fallback) { return cxxopts::value<std::string>()->default_value(fallback); };
  options.positional_help("<operator|all>").custom_help("[options]");
  options.add_options()("operator", "Positional; the text above lists them", text(""))(
      "device", "auto, host or cuda", text("auto"))(
      "g",
      "Ranks to start on this machine, one process each (default: the launcher's ranks; without a launcher one "
      "on each GPU, or 2 on the host)",
      cxxopts::value<std::string>(),
      "RANKS")("nodes", "Emulated nodes: consecutive ranks share memory, others talk through a transport",
               cxxopts::value<std::string>(),
               "N")("shape",
                    "Sizes, e.g. m=4096,n=1024,k=4096; may be repeated. GEMM operators: m n k (k the whole "
                    "inner dimension for "
                    "the all-gather, the local one otherwise; n the local columns). MoE: tokens (in all) "
                    "hidden inter experts "
                    "topk zipf. Attention: batch seq (in all) heads kv_heads dim causal zigzag "
                    "packed (sequences)",
                    cxxopts::value<std::vector<std::string>>(),
                    "k=v,...")("preset", "A list of shapes: " + preset_names(), cxxopts::value<std::string>(),
                               "NAME")("dtype", "Of the inputs: bf16 or fp16", text("bf16"))(
      "out-dtype", "Of the output: bf16, fp16 or fp32 (default: --dtype)", cxxopts::value<std::string>(),
      "TYPE")(
      "comm-dtype",
      "Of partial sums between ranks: bf16, fp16 or fp32 (default: the output's if 16-bit, else --dtype)",
      cxxopts::value<std::string>(),
      "TYPE")("check", "Compare with a float64 reference: integers exactly, random inputs within a tolerance")(
      "baseline",
      "nccl (NCCL + cublasLt, captured in a CUDA graph), none, or auto: nccl on GPUs where both libraries are",
      text("auto"))("nccl-library", "NCCL, where the loader does not find it", text(""), "PATH")(
      "cublaslt-library", "cublasLt, where the loader does not find it", text(""), "PATH")(
      "b-layout", "Of the GEMM operators' B: kn or nk", text("kn"))(
      "accumulate", "The GEMM operators add to the C that is there; with --out-dtype fp32 as gradients are")(
      "symmetric", "An all-reduce's C in symmetric memory (mk_mem_alloc), where peers write it directly")(
      "unfused",
      "The GEMM operators without the fusion too: our product alone and what moves the data, one after the "
      "other")("only", "Of a preset, the shapes with these values, e.g. m=16384; may be repeated",
               cxxopts::value<std::vector<std::string>>(), "k=v,...")(
      "iters", "Timed launches a shape; back to back on GPUs: timed loops of 3 to 20 launches", text("20"))(
      "warmup", "Launches before them", text("3"))(
      "mode", "isolated (meet, launch, wait), back-to-back (meet, launch many times, wait) or both",
      text("isolated"))("host-time", "The host's time in a call too: median of up to 1,000 on an idle stream")(
      "host-limit", "With --host-time, microseconds beyond which a shape has failed (0: none)", text("0"),
      "US")("json", "Write the results to this file too", text(""), "FILE")(
      "trace", "Launch each shape three times more and write what every rank did to this file, for Perfetto",
      text(""), "FILE")("id-file", "How ranks of a launcher find each other: a path on a folder that all share",
                        text(""), "FILE")(
      "check-network",
      "Instead of an operator: the ports and interfaces of every rank, the latency and bandwidth of every path "
      "between nodes (ranks of -g are nodes, unless --nodes says how many), and in words what is wrong")(
      "env", "Print the environment variables and the launcher found, and exit")(
      "version", "Print the version and exit")("h,help", "Print this and exit");
  options.parse_positional({"operator"});
  return options;
}

int integer(const cxxopts::ParseResult& parsed, const char* name, int low, int high) {
  const std::string option = std::string(name).size() == 1 ? "-" + std::string(name) : "--" + std::string(name);
  return static_cast<int>(parse_integer(parsed[name].as<std::string>(), option, low, high));
}

mk_device_t parse_device(const std::string& text) {
  if (text == "auto") return MK_DEVICE_AUTO;
  if (text == "host") return MK_DEVICE_HOST;
  if (text == "cuda") return MK_DEVICE_CUDA;
  throw UsageError("--device: expected auto, host or cuda, saw \"" + text + "\"");
}

std::vector<Mode> parse_modes(const std::string& text) {
  if (text == "isolated") return {Mode::kIsolated};
  if (text == "back-to-back") return {Mode::kBackToBack};
  if (text == "both") return {Mode::kIsolated, Mode::kBackToBack};
  throw UsageError("--mode: expected isolated, back-to-back or both, saw \"" + text + "\"");
}

mk_layout_t parse_layout(const std::string& text) {
  if (text == "kn") return MK_LAYOUT_KN;
  if (text == "nk") return MK_LAYOUT_NK;
  throw UsageError("--b-layout: expected kn or nk, saw \"" + text + "\"");
}

Dtypes parse_dtypes(const cxxopts::ParseResult& parsed) {
  Dtypes dtypes;
  dtypes.dtype = parse_dtype(parsed["dtype"].as<std::string>(), "--dtype", false);
  dtypes.out_dtype = dtypes.dtype;
  if (parsed.count("out-dtype"))
    dtypes.out_dtype = parse_dtype(parsed["out-dtype"].as<std::string>(), "--out-dtype", true);
  dtypes.comm_dtype = dtypes.out_dtype == MK_DTYPE_FP32 ? dtypes.dtype : dtypes.out_dtype;
  if (parsed.count("comm-dtype")) {
    dtypes.comm_dtype = parse_dtype(parsed["comm-dtype"].as<std::string>(), "--comm-dtype", true);
  }
  return dtypes;
}

Baseline parse_baseline(const std::string& text, mk_device_t device) {
  if (text == "auto") return Baseline::kAuto;
  if (text == "none") return Baseline::kNone;
  if (text != "nccl") throw UsageError("--baseline: expected nccl, none or auto, saw \"" + text + "\"");
  if (device == MK_DEVICE_HOST)
    throw UsageError("--baseline nccl: NCCL needs GPUs; leave it out with --device host");
  return Baseline::kNccl;
}

std::vector<Shape> parse_shapes(const cxxopts::ParseResult& parsed, const char* option) {
  std::vector<Shape> shapes;
  if (!parsed.count(option)) return shapes;
  for (const std::string& text : parsed[option].as<std::vector<std::string>>())
    shapes.push_back(parse_shape(text, "--" + std::string(option)));
  return shapes;
}

void parse_operator(const cxxopts::ParseResult& parsed, Options& options) {
  if (!parsed.unmatched().empty()) {
    throw UsageError("expected one operator, saw \"" + parsed.unmatched().front() + "\" after \"" +
                     parsed["operator"].as<std::string>() + "\"");
  }
  options.operator_name = parsed["operator"].as<std::string>();
  if (options.operator_name.empty())
    throw UsageError("which operator? Name one, or all; mk-perf --help lists them");
  if (options.operator_name == "all" || find_operator(options.operator_name)) return;
  std::string names;
  for (const Operator* known : all_operators()) names += std::string(known->name) + ", ";
  throw UsageError("unknown operator \"" + options.operator_name + "\"; expected one of " + names + "all");
}

Options interpret(const cxxopts::ParseResult& parsed) {
  Options options;
  options.help = parsed.count("help") > 0;
  options.version = parsed.count("version") > 0;
  options.env = parsed.count("env") > 0;
  if (options.help || options.version || options.env) return options;

  options.check_network = parsed.count("check-network") > 0;
  if (!options.check_network) {
    parse_operator(parsed, options);
  } else if (!parsed["operator"].as<std::string>().empty()) {
    throw UsageError("--check-network takes no operator");
  }
  options.device = parse_device(parsed["device"].as<std::string>());
  if (parsed.count("g")) options.local_ranks = integer(parsed, "g", 1, kMaxLocalRanks);
  if (parsed.count("nodes")) options.nodes = integer(parsed, "nodes", 1, 1 << 16);
  options.shapes = parse_shapes(parsed, "shape");
  options.only = parse_shapes(parsed, "only");
  if (parsed.count("preset")) {
    if (!options.shapes.empty()) throw UsageError("--preset and --shape: give one of them");
    options.preset = parsed["preset"].as<std::string>();
  }
  options.dtypes = parse_dtypes(parsed);
  options.check = parsed.count("check") > 0;
  options.baseline = parse_baseline(parsed["baseline"].as<std::string>(), options.device);
  options.nccl_path = parsed["nccl-library"].as<std::string>();
  options.cublaslt_path = parsed["cublaslt-library"].as<std::string>();
  options.b_layout = parse_layout(parsed["b-layout"].as<std::string>());
  options.accumulate = parsed.count("accumulate") > 0;
  if (const Operator* op = find_operator(options.operator_name);
      options.accumulate && op && !op->can_accumulate) {
    throw UsageError(
        "--accumulate: " + options.operator_name +
        " does not add to its output; allgather_gemm, allgather_gemm_wgrad, gemm_reduce_scatter and "
        "gemm_allreduce do");
  }
  options.symmetric = parsed.count("symmetric") > 0;
  options.unfused = parsed.count("unfused") > 0;
  options.host_time = parsed.count("host-time") > 0;
  options.host_limit_us = integer(parsed, "host-limit", 0, 1000000);
  if (options.host_limit_us > 0 && !options.host_time)
    throw UsageError("--host-limit: expected --host-time with it, whose figure it limits");
  options.iterations = integer(parsed, "iters", 1, 1000000);
  options.warmup = integer(parsed, "warmup", 0, 1000000);
  options.modes = parse_modes(parsed["mode"].as<std::string>());
  options.json_path = parsed["json"].as<std::string>();
  if (parsed.count("json") && options.json_path.empty()) throw UsageError("--json: expected a path, saw \"\"");
  options.trace_path = parsed["trace"].as<std::string>();
  if (parsed.count("trace") && options.trace_path.empty())
    throw UsageError("--trace: expected a path, saw \"\"");
  options.id_path = parsed["id-file"].as<std::string>();
  return options;
}

bool is_wanted(const Shape& shape, const std::vector<Shape>& only) {
  return only.empty() ||
         std::any_of(only.begin(), only.end(), [&](const Shape& values) { return agrees(shape, values); });
}

std::vector<Shape> shapes_of(const Options& options, const Operator& op, int nranks) {
  std::vector<Shape> shapes;
  const std::vector<Shape>& given = options.shapes;
  for (const Shape& shape : given.empty() ? preset_shapes(options.preset, op.name, nranks) : given) {
    // With "all" a shape is for the operators that know its keys.
    if (options.operator_name == "all" && !keys_belong(shape, op.keys)) continue;
    if (!is_wanted(shape, options.only)) continue;
    shapes.push_back(complete_shape(shape, op.keys, op.name));
    if (op.validate) op.validate(shapes.back(), nranks);
  }
  return shapes;
}

}  // namespace

const char* mode_name(Mode mode) { return mode == Mode::kIsolated ? "isolated" : "back-to-back"; }

Options parse_options(int argc, const char* const* argv) {
  try {
    return interpret(command_line().parse(argc, argv));
  } catch (const UsageError&) {
    throw;
  } catch (const std::exception& error) {
    throw UsageError(error.what());
  }
}

std::string help_text() { return command_line().help(); }

std::vector<Selection> select_work(const Options& options, int nranks) {
  std::vector<Selection> work;
  for (const Operator* op : all_operators()) {
    if (options.operator_name != "all" && options.operator_name != op->name) continue;
    Selection selection{op, shapes_of(options, *op, nranks)};
    if (!selection.shapes.empty()) work.push_back(std::move(selection));
  }
  if (work.empty() && !options.only.empty())
    throw UsageError("--only \"" + options.only.front().text() + "\": no shape has these values");
  if (work.empty() && !options.shapes.empty()) {
    throw UsageError("--shape \"" + options.shapes.front().text() + "\": no operator has these keys");
  }
  if (work.empty())
    throw UsageError("--preset " + options.preset + " has no shapes for " + options.operator_name);
  return work;
}

std::vector<int32_t> node_of_rank(const Options& options, int nranks) {
  std::vector<int32_t> nodes;
  if (!options.nodes) return nodes;
  if (nranks % *options.nodes) {
    throw UsageError("--nodes " + std::to_string(*options.nodes) + ": does not divide the " +
                     std::to_string(nranks) + " ranks; choose a number that does");
  }
  for (int rank = 0; rank < nranks; ++rank) nodes.push_back(rank / (nranks / *options.nodes));
  return nodes;
}

}  // namespace perf
