// SPDX-License-Identifier: MIT
#include "report.h"

#include <algorithm>
#include <cstdio>

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

Row row_of(const Result& result) {
  return {result.operator_name,
          result.device,
          std::to_string(result.ranks),
          std::to_string(result.nodes),
          result.shape.text(),
          result.dtype,
          microseconds(result.fused.median_us),
          microseconds(result.fused.min_us),
          microseconds(result.fused.max_us),
          formatted(result.tflops < 1 ? "%.4f" : "%.1f", result.tflops),
          microseconds(result.baseline_us),
          result.baseline_us ? formatted("%.2f", *result.baseline_us / result.fused.median_us) : kAbsent,
          microseconds(result.gemm_us),
          microseconds(result.collective_us),
          microseconds(result.roofline_us),
          check_text(result.check)};
}

// Characters, not bytes, of UTF-8.
size_t display_width(const std::string& text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char byte) { return (static_cast<unsigned char>(byte) & 0xc0) != 0x80; }));
}

constexpr bool is_figure(size_t column) { return column == 2 || column == 3 || (column >= 6 && column <= 14); }

std::string laid_out(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const Row& row : rows) {
    for (size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], display_width(row[column]));
    }
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (size_t column = 0; column < row.size(); ++column) {
      const std::string padding(widths[column] - display_width(row[column]), ' ');
      line += (column ? "  " : "") + (is_figure(column) ? padding + row[column] : row[column] + padding);
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
  json.member("collective_us", result.collective_us).member("roofline_us", result.roofline_us);
  json.member("tflops", result.tflops);
  json.end_object();
}

}  // namespace

std::string dtypes_text(const Dtypes& dtypes) {
  const std::string input = dtype_name(dtypes.dtype);
  return dtypes.out_dtype == dtypes.dtype ? input : input + "->" + dtype_name(dtypes.out_dtype);
}

std::string table_text(const std::vector<Result>& results, const Schedule& schedule) {
  std::vector<Row> rows = {{"operator", "device", "ranks", "nodes", "shape", "dtype", "fused us", "min us",
                            "max us", "TFLOP/s a rank", "baseline us", "speed-up", "gemm us", "collective us",
                            "roofline us", "check"}};
  for (const Result& result : results) rows.push_back(row_of(result));
  std::string text = laid_out(rows);
  const bool isolated = schedule.mode == Mode::kIsolated;
  text += "\nfused: median of " + formatted("%d", schedule.iterations) +
          (isolated ? " isolated" : " back-to-back") + " launches" +
          (isolated ? "" : formatted(" in %zu loops", loops_of(schedule).size())) +
          ", each the slowest rank's time. " + kAbsent + ": not measured.\n";
  const bool sampled = std::any_of(results.begin(), results.end(),
                                   [](const Result& result) { return result.check && !result.check->whole; });
  if (sampled)
    text +=
        "check (sample): every element was written; seeded rows and columns were compared with the "
        "reference.\n";
  return text;
}

std::string json_text(const std::vector<Result>& results, const Machine& machine, const std::string& version) {
  JsonWriter json;
  json.begin_object().member("version", version);
  json.key("machine").begin_object();
  json.member("cpu", machine.cpu).member("cores", machine.cores).member("kernel", machine.kernel);
  json.member("gpu", machine.gpu).member("driver", machine.driver).member("clocks", machine.clocks);
  json.member("build", machine.build).member("compiler", machine.compiler);
  json.end_object();
  json.key("results").begin_array();
  for (const Result& result : results) write_result(json, result);
  json.end_array().end_object();
  return json.text();
}

}  // namespace perf
