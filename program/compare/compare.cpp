#include "program/compare/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "files/files.hpp"
#include "program/common/error.hpp"

namespace clattn::cli {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& path, const std::string& field,
                         const std::string& legal) {
  throw_invalid("{}: {}: expected {}", path, field, legal);
}

/// A value as an error shows it: nested ones may be of any depth.
std::string shown(const json& value) {
  return value.is_primitive() ? value.dump().substr(0, 60) : value.type_name();
}

/// Takes fields of an object and says which of which file is not what it should be.
class Fields {
 public:
  Fields(const json& object, std::string path, std::string prefix)
      : object_(object), path_(std::move(path)), prefix_(std::move(prefix)) {
    if (!object_.is_object()) refuse(path_, prefix_, "an object");
  }

  std::string text(const char* name) const {
    const json& value = at(name);
    if (!value.is_string()) refuse(path_, prefix_ + name, "a text");
    return value;
  }
  /// Bounded, so that sums, ratios and axes of such numbers stay numbers.
  double positive(const char* name, double most = 1e15) const {
    constexpr double kLeast = 1e-9;
    const json& value = at(name);
    if (!value.is_number() || !(value.get<double>() >= kLeast && value.get<double>() <= most)) {
      refuse(path_, prefix_ + name,
             fmt::format("a number from {:g} to {:g}, not {}", kLeast, most, shown(value)));
    }
    return value;
  }
  bool truth(const char* name) const {
    const json& value = at(name);
    if (!value.is_boolean()) refuse(path_, prefix_ + name, "true or false");
    return value;
  }
  bool has(const char* name) const { return object_.contains(name); }
  const json& at(const char* name) const {
    const auto found = object_.find(name);
    if (found == object_.end()) refuse(path_, prefix_ + name, "the field to be there");
    return *found;
  }

 private:
  const json& object_;
  std::string path_, prefix_;
};

ComparedRow parse_row(const Fields& fields) {
  ComparedRow row{.median_us = fields.positive("median_us"), .correct = fields.truth("correct")};
  if (fields.has("unsteady")) row.unsteady = fields.truth("unsteady");
  if (fields.has("bytes")) row.bytes = fields.positive("bytes");
  if (fields.has("flops") && fields.at("flops") != 0) row.flops = fields.positive("flops");
  if (fields.has("ceiling")) row.ceiling = fields.text("ceiling");
  if (fields.has("share_of_ceiling")) row.share = fields.positive("share_of_ceiling", 100);
  return row;
}

/// How many times faster than the first report; nothing where one of the two has no such row.
std::optional<double> speedup(const std::vector<ComparedReport>& reports, std::size_t index,
                              const std::string& name) {
  const auto base = reports[0].rows.find(name), row = reports[index].rows.find(name);
  if (base == reports[0].rows.end() || row == reports[index].rows.end()) return std::nullopt;
  return base->second.median_us / row->second.median_us;
}

}  // namespace

ComparedReport parse_report(const std::string& text, const std::string& path) {
  constexpr int kVersion = 1;
  const auto flat = [&](int depth, json::parse_event_t, const json&) {
    constexpr int kMostLevels = 16;  // bounds the parser's memory
    throw_invalid_if(depth > kMostLevels, "{}: nested deeper than {} levels", path, kMostLevels);
    return true;
  };
  const json document = json::parse(text, flat, false);
  if (document.is_discarded()) refuse(path, "text", "JSON as clattn bench --json writes it");
  const Fields fields(document, path, "");
  if (fields.text("format") != "clattn-bench") refuse(path, "format", "clattn-bench");
  if (fields.at("schema_version") != kVersion) {
    refuse(path, "schema_version",
           fmt::format("{}, not {}", kVersion, shown(fields.at("schema_version"))));
  }
  const Fields device(fields.at("device"), path, "device.");
  const Fields ceilings(fields.at("ceilings"), path, "ceilings.");
  ComparedReport report{.label = std::filesystem::path(path).stem().string(),
                        .device = device.text("name"),
                        .driver = device.text("driver_version"),
                        .platform = device.text("platform_version"),
                        .commit = fields.text("commit"),
                        .date = fields.text("date")};
  for (const auto& [name, value, always] : kCeilingNames)
    if (always || ceilings.has(name)) report.ceilings.*value = ceilings.positive(name);
  const json& rows = fields.at("rows");
  if (!rows.is_array()) refuse(path, "rows", "a list");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Fields row(rows[i], path, fmt::format("rows[{}].", i));
    if (row.has("skipped")) continue;
    const std::string name = row.text("name");
    if (!report.rows.emplace(name, parse_row(row)).second) {
      refuse(path, fmt::format("rows[{}].name", i), "each name once, not twice " + name);
    }
    report.names.push_back(name);
  }
  return report;
}

std::vector<ComparedReport> read_reports(const std::vector<std::string>& paths) {
  std::vector<ComparedReport> reports;
  std::set<std::string> labels;
  for (const std::string& path : paths) {
    reports.push_back(parse_report(files::read_file(path, std::size_t{16} << 20), path));
    // Equal names of files in several folders are told apart by their place.
    if (!labels.insert(reports.back().label).second) {
      reports.back().label += fmt::format(" ({})", reports.size());
    }
  }
  return reports;
}

std::vector<std::string> all_names(const std::vector<ComparedReport>& reports) {
  std::vector<std::string> names;
  std::set<std::string> known;
  for (const ComparedReport& report : reports) {
    for (const std::string& name : report.names) {
      if (known.insert(name).second) names.push_back(name);
    }
  }
  return names;
}

std::string comparison_table(const std::vector<ComparedReport>& reports) {
  constexpr int kColumn = 20;
  const std::vector<std::string> names = all_names(reports);
  std::size_t width = 24;
  for (const std::string& name : names) width = std::max(width, name.size());
  std::string table =
      fmt::format("median us (times as fast as {})\n{:{}}", reports[0].label, "", width);
  for (const ComparedReport& report : reports) {
    table += fmt::format(" {:>{}}", report.label.substr(0, kColumn), kColumn);
  }
  std::vector<double> logs(reports.size()), counts(reports.size());
  for (const std::string& name : names) {
    table += fmt::format("\n{:{}}", name, width);
    for (std::size_t i = 0; i < reports.size(); ++i) {
      const auto row = reports[i].rows.find(name);
      std::string cell = "-";
      if (row != reports[i].rows.end()) {
        const auto ratio = speedup(reports, i, name);
        cell = fmt::format("{:.1f}{}{}", row->second.median_us, row->second.correct ? "" : " WRONG",
                           i > 0 && ratio ? fmt::format(" ({:.2f}x)", *ratio) : "");
        if (ratio) {
          logs[i] += std::log(*ratio);
          ++counts[i];
        }
      }
      table += fmt::format(" {:>{}}", cell, kColumn);
    }
  }
  table += fmt::format("\n{:{}}", "geometric mean", width);
  for (std::size_t i = 0; i < reports.size(); ++i) {
    const std::string mean =
        counts[i] > 0 ? fmt::format("{:.3f}x", std::exp(logs[i] / counts[i])) : "-";
    table += fmt::format(" {:>{}}", mean, kColumn);
  }
  return table + "\n";
}

}  // namespace clattn::cli
