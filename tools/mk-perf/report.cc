// SPDX-License-Identifier: MIT
#include "report.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "element.h"
#include "json_writer.h"

namespace perf {
namespace {

using Row = std::vector<std::string>;

constexpr const char* kAbsent = "\u2014";  // one column wide, three bytes long

template <typename... Values>
std::string formatted(const char* format, Values... values) {
  char text[96];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

std::string microseconds(const std::optional<double>& us) { return us ? formatted("%.1f", *us) : kAbsent; }

std::string check_text(const std::optional<CheckResult>& check) {
  if (!check) return kAbsent;
  std::string text = check->passed ? "ok" : "FAILED";
  text += check->exact ? ", exact" : ", not exact";
  text += formatted(", %.1e", check->relative_error);
  return check->whole ? text : text + " (sample)";
}

std::string whole(const std::optional<double>& value) { return value ? formatted("%.0f", *value) : kAbsent; }

std::string ratio(const std::optional<double>& above, const std::optional<double>& below) {
  return above && below ? formatted("%.2f", *above / *below) : kAbsent;
}

struct Column {
  const char* name;
  bool is_figure;    // aligned to the right
  bool is_optional;  // left out where no line has it
  std::string (*text)(const Result& result);
};

const std::vector<Column>& columns() {
  static const std::vector<Column> all = {
      {"operator", false, false, [](const Result& r) { return r.operator_name; }},
      {"device", false, false, [](const Result& r) { return r.device; }},
      {"ranks", true, false, [](const Result& r) { return std::to_string(r.ranks); }},
      {"nodes", true, false, [](const Result& r) { return std::to_string(r.nodes); }},
      {"shape", false, false, [](const Result& r) { return r.shape.text(); }},
      {"dtype", false, false, [](const Result& r) { return r.dtype; }},
      {"fused us", true, false, [](const Result& r) { return microseconds(r.fused.median_us); }},
      {"min us", true, false, [](const Result& r) { return microseconds(r.fused.min_us); }},
      {"max us", true, false, [](const Result& r) { return microseconds(r.fused.max_us); }},
      {"TFLOP/s a rank", true, false,
       [](const Result& r) { return formatted(r.tflops < 1 ? "%.4f" : "%.1f", r.tflops); }},
      {"baseline us", true, false, [](const Result& r) { return microseconds(r.baseline_us); }},
      {"speed-up", true, false, [](const Result& r) { return ratio(r.baseline_us, r.fused.median_us); }},
      {"unfused us", true, true, [](const Result& r) { return microseconds(r.unfused_us); }},
      {"x unfused", true, true, [](const Result& r) { return ratio(r.unfused_us, r.fused.median_us); }},
      {"gemm us", true, false, [](const Result& r) { return microseconds(r.gemm_us); }},
      {"alone us", true, true, [](const Result& r) { return microseconds(r.alone_us); }},
      {"cublas us", true, true, [](const Result& r) { return microseconds(r.cublas_us); }},
      {"collective us", true, false, [](const Result& r) { return microseconds(r.collective_us); }},
      {"moving us", true, true, [](const Result& r) { return microseconds(r.moving_us); }},
      {"link us", true, true, [](const Result& r) { return microseconds(r.link_us); }},
      {"network us", true, true, [](const Result& r) { return microseconds(r.network_us); }},
      {"roofline us", true, false, [](const Result& r) { return microseconds(r.roofline_us); }},
      {"x roofline", true, true, [](const Result& r) { return ratio(r.fused.median_us, r.roofline_us); }},
      {"host us", true, true, [](const Result& r) { return microseconds(r.host_us); }},
      {"SM MHz", true, true, [](const Result& r) { return whole(r.sm_mhz); }},
      {"W", true, true, [](const Result& r) { return whole(r.watts); }},
      {"check", false, false, [](const Result& r) { return check_text(r.check); }}};
  return all;
}

// Those with something to say.
std::vector<Column> columns_of(const std::vector<Result>& results) {
  std::vector<Column> chosen;
  std::copy_if(columns().begin(), columns().end(), std::back_inserter(chosen), [&](const Column& column) {
    return !column.is_optional || std::any_of(results.begin(), results.end(), [&](const Result& result) {
      return column.text(result) != kAbsent;
    });
  });
  return chosen;
}

// Characters, not bytes, of UTF-8.
size_t display_width(const std::string& text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xc0) != 0x80; }));
}

std::string laid_out(const std::vector<Result>& results) {
  const std::vector<Column> columns = columns_of(results);
  std::vector<Row> rows(results.size() + 1);
  std::vector<size_t> widths;
  for (const Column& column : columns) {
    rows.front().push_back(column.name);
    for (size_t i = 0; i < results.size(); ++i) rows[i + 1].push_back(column.text(results[i]));
    widths.push_back(0);
    for (const Row& row : rows) widths.back() = std::max(widths.back(), display_width(row.back()));
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < columns.size(); ++i) {
      const std::string padding(widths[i] - display_width(row[i]), ' ');
      line += (i ? "  " : "") + (columns[i].is_figure ? padding + row[i] : row[i] + padding);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

void write_check(JsonWriter& json, const std::optional<CheckResult>& check) {
  json.key("check").begin_object();
  if (check) {
    json.member("passed", check->passed)
        .member("exact", check->exact)
        .member("relative_error", check->relative_error);
  } else {
    json.key("passed").null().key("exact").null().key("relative_error").null();
  }
  json.end_object();
}

void write_result(JsonWriter& json, const Result& result) {
  json.begin_object();
  json.member("operator", result.operator_name).member("device", result.device);
  json.member("ranks", result.ranks).member("nodes", result.nodes);
  json.key("shape").begin_object();
  for (const Shape::Entry& entry : result.shape.entries()) json.member(entry.first, entry.second);
  json.end_object();
  json.member("dtype", result.dtype).member("mode", mode_name(result.mode));
  write_check(json, result.check);
  json.key("fused_us").begin_object();
  json.member("median", result.fused.median_us)
      .member("min", result.fused.min_us)
      .member("max", result.fused.max_us);
  json.end_object();
  json.member("baseline_us", result.baseline_us).member("gemm_us", result.gemm_us);
  json.member("alone_us", result.alone_us);
  json.member("collective_us", result.collective_us).member("roofline_us", result.roofline_us);
  json.member("tflops", result.tflops);
  json.member("cublas_us", result.cublas_us).member("link_us", result.link_us);
  json.member("network_us", result.network_us);
  json.member("unfused_us", result.unfused_us).member("moving_us", result.moving_us);
  json.member("host_us", result.host_us);
  json.member("sm_mhz", result.sm_mhz).member("watts", result.watts);
  json.end_object();
}

void write_link(JsonWriter& json, const Machine& machine) {
  json.key("link");
  if (!machine.link) {
    json.null();
    return;
  }
  json.begin_object();
  json.member("ring_gb_per_s", machine.link->ring_gb_per_s)
      .member("all_peers_gb_per_s", machine.link->all_peers_gb_per_s)
      .member("valid", !is_slow_link(*machine.link, machine.nvlinks.value_or(0)));
  json.end_object();
}

}  // namespace

std::string dtypes_text(const Dtypes& dtypes) {
  const std::string input = dtype_name(dtypes.dtype);
  return dtypes.out_dtype == dtypes.dtype ? input : input + "->" + dtype_name(dtypes.out_dtype);
}

std::string table_text(const std::vector<Result>& all, const Schedule& schedule) {
  std::vector<Result> results;
  std::copy_if(all.begin(), all.end(), std::back_inserter(results),
               [&](const Result& result) { return result.mode == schedule.mode; });
  std::string text = laid_out(results);
  const bool isolated = schedule.mode == Mode::kIsolated;
  const bool on_gpus = !results.empty() && results.front().device == std::string("cuda");
  text += "\nfused: median of " + formatted("%d", schedule.iterations);
  if (isolated) {
    text += " isolated launches";
  } else if (on_gpus) {
    text += " loops of back-to-back launches";
  } else {
    text += formatted(" back-to-back launches in %zu loops", loops_of(schedule).size());
  }
  text += ", each the slowest rank's time. " + std::string(kAbsent) + ": not measured.\n";
  const bool sampled = std::any_of(results.begin(), results.end(),
                                   [](const Result& result) { return result.check && !result.check->whole; });
  if (sampled)
    text +=
        "check (sample): every element was written; seeded rows and columns were compared with the "
        "reference.\n";
  return text;
}

std::string notes_text(const Machine& machine, const std::vector<std::string>& notes) {
  std::string text;
  if (machine.link) {
    text += formatted("link, all ranks sending: %.0f GB/s to the next rank, %.0f to all others",
                      machine.link->ring_gb_per_s, machine.link->all_peers_gb_per_s);
    text += (machine.nvlinks ? formatted(" (%d NVLinks)", *machine.nvlinks) : "") + ".\n";
  }
  if (machine.network_gb_per_s)
    text += formatted("network, all ranks sending: %.1f GB/s a rank.\n", *machine.network_gb_per_s);
  if (machine.nccl && machine.cublaslt)
    text += "baseline: NCCL " + *machine.nccl + " and cublasLt " + *machine.cublaslt + " in one CUDA graph.\n";
  for (const std::string& note : notes) text += note + ".\n";
  return text;
}

std::string json_text(const std::vector<Result>& results, const Machine& machine, const std::string& version) {
  JsonWriter json;
  json.begin_object().member("version", version);
  json.key("machine").begin_object();
  json.member("cpu", machine.cpu).member("cores", machine.cores).member("kernel", machine.kernel);
  json.member("gpu", machine.gpu).member("driver", machine.driver).member("clocks", machine.clocks);
  json.member("build", machine.build).member("compiler", machine.compiler);
  json.member("nvlinks", machine.nvlinks);
  write_link(json, machine);
  json.member("network_gb_per_s", machine.network_gb_per_s);
  json.member("nccl", machine.nccl).member("cublaslt", machine.cublaslt);
  json.end_object();
  json.key("results").begin_array();
  for (const Result& result : results) write_result(json, result);
  json.end_array().end_object();
  return json.text();
}

}  // namespace perf
