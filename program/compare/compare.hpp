#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "program/ceilings/ceilings.hpp"

namespace clattn::cli {

/// What comparisons take from a row of a report; docs/benchmark.md documents the file's fields.
struct ComparedRow {
  double median_us = 0;
  bool correct = false, unsteady = false;
  double bytes = 0, flops = 0;    ///< 0 of host time
  std::optional<double> share{};  ///< of the ceiling
  std::string ceiling{};          ///< "read", ...; empty = the file names none
};

/// A report of `clattn bench --json`, and the peers of bench/compare_torch.py alike.
struct ComparedReport {
  std::string label;  ///< the file's name without folder and extension
  std::string device, driver, platform, commit, date;
  Ceilings ceilings{};                        ///< 0 = not in the file
  std::vector<std::string> names{};           ///< in the file's order, skipped rows left out
  std::map<std::string, ComparedRow> rows{};  ///< by name
};

/// Throws kInvalidArgument naming file, field and what is legal.
ComparedReport parse_report(const std::string& text, const std::string& path);
std::vector<ComparedReport> read_reports(const std::vector<std::string>& paths);

/// The names of all reports' rows, each once, in the order of their first mention.
std::vector<std::string> all_names(const std::vector<ComparedReport>& reports);

/// How a row of the first report compares with the others; above 1 the first is ahead.
struct Lead {
  std::string name;
  double ratio = 0;              ///< to the fastest other
  std::size_t fastest = 0;       ///< that report's index
  bool unsteady = false;         ///< one of both times is
  std::vector<double> ratios{};  ///< to each report; 0 = it has no such row
};
/// Of the first report's rows that another one has, in its order; rows that are WRONG do not count.
std::vector<Lead> leads(const std::vector<ComparedReport>& reports);

/// Median times and how many times faster than the first report the others are; the geometric mean
/// at the end.
std::string comparison_table(const std::vector<ComparedReport>& reports);

/// How often and by how much the first report leads, a line a suite, then a bar a row, as HTML;
/// empty if no other has a row of it.
std::string lead_section(const std::vector<ComparedReport>& reports);

/// One self-contained page: what was measured where, where the first report leads, share of the
/// ceiling, speed and roofline as inline SVG, and the numbers.
std::string comparison_page(const std::vector<ComparedReport>& reports);

}  // namespace clattn::cli
