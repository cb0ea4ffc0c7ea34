#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "program/common/html.hpp"
#include "program/compare/compare.hpp"
#include "program/compare/plot.hpp"

namespace clattn::cli {
namespace {

/// Ratios of some rows; above 1 the first report is ahead.
struct Standing {
  std::vector<double> ratios;

  double mean() const {
    const double sum = std::accumulate(ratios.begin(), ratios.end(), 0.0,
                                       [](double logs, double r) { return logs + std::log(r); });
    return std::exp(sum / static_cast<double>(ratios.size()));
  }
  std::ptrdiff_t ahead() const {
    return std::ranges::count_if(ratios, [](double ratio) { return ratio > 1; });
  }
};

std::string_view side(double ratio) {
  return ratio < 1 ? "behind" : "ahead";
}

/// "model/suite/batch/..."
std::string suite_of(const std::string& name) {
  const std::size_t begin = name.find('/') + 1;
  return name.substr(begin, name.find('/', begin) - begin);
}

std::string cell(const Standing& standing) {
  if (standing.ratios.empty()) return R"(<td class="n">-</td>)";
  return fmt::format(R"(<td class="n"><span class="{}">{:.2f}</span> ({} of {})</td>)",
                     side(standing.mean()), standing.mean(), standing.ahead(),
                     standing.ratios.size());
}

/// A line a suite and one for all: the first report compared with the fastest and with each other.
std::string draw_standings(const std::vector<ComparedReport>& reports,
                           const std::vector<Lead>& leads) {
  std::vector<std::string> suites;
  for (const Lead& lead : leads) {
    if (std::ranges::find(suites, suite_of(lead.name)) == suites.end())
      suites.push_back(suite_of(lead.name));
  }
  suites.emplace_back("all");
  std::string html;
  for (const std::string& suite : suites) {
    std::vector<Standing> standings(reports.size());  // the first one: with the fastest
    for (const Lead& lead : leads) {
      if (suite != "all" && suite != suite_of(lead.name)) continue;
      standings[0].ratios.push_back(lead.ratio);
      for (std::size_t r = 1; r < reports.size(); ++r) {
        if (lead.ratios[r] > 0) standings[r].ratios.push_back(lead.ratios[r]);
      }
    }
    html += fmt::format("<tr><td>{}</td>", escape(suite));
    for (const Standing& standing : standings) html += cell(standing);
    html += "</tr>\n";
  }
  return html;
}

/// A bar a row from 1, the largest lead first.
std::string draw_bars(const std::vector<ComparedReport>& reports, std::vector<Lead> leads) {
  std::ranges::stable_sort(leads, std::ranges::greater(), &Lead::ratio);
  std::vector<double> values = {1};
  std::size_t longest = 0;
  for (const Lead& lead : leads) {
    values.push_back(lead.ratio);
    longest = std::max(longest, lead.name.size());
  }
  constexpr double kLine = 18, kLabel = 150;
  const double left = 7.4 * static_cast<double>(longest) + 16, width = std::max(1080.0, left + 640);
  const double bottom = 10 + kLine * static_cast<double>(leads.size());
  const Scale x = log_scale(values, left + kLabel, width - kLabel);
  std::string content = columns(x, 10, bottom);
  for (std::size_t n = 0; n < leads.size(); ++n) {
    const Lead& lead = leads[n];
    const double y = 10 + kLine * static_cast<double>(n), one = x.place(1);
    const double end = x.place(lead.ratio);
    content += text(left - 10, y + 13, "end", lead.name, R"(class="name")");
    content += fmt::format(
        "<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.0f}\"/>\n",
        side(lead.ratio), std::min(one, end), y + 3, std::max(std::abs(end - one), 1.0), kLine - 6);
    content += text(end + (lead.ratio < 1 ? -6 : 6), y + 13, lead.ratio < 1 ? "end" : "start",
                    fmt::format("{:.2f}{} {}", lead.ratio, lead.unsteady ? "~" : "",
                                reports[lead.fastest].label));
  }
  content += axis_line(x.place(1), bottom);
  content += text((x.from + x.to) / 2, bottom + 36, "middle",
                  "times as fast as the fastest other report (logarithmic)");
  return draw_figure(
      {.title = "Each row against the fastest other report",
       .meaning = fmt::format("How many times as fast {} is as the fastest other report of "
                              "the row, whose name is at the bar; blue: ahead, orange: "
                              "behind; ~: one of both times is unsteady.",
                              reports[0].label),
       .width = width,
       .height = bottom + 44,
       .content = std::move(content)});
}

}  // namespace

std::vector<Lead> leads(const std::vector<ComparedReport>& reports) {
  std::vector<Lead> result;
  for (const std::string& name : reports[0].names) {
    const ComparedRow& first = reports[0].rows.at(name);
    Lead lead{.name = name, .ratios = std::vector<double>(reports.size())};
    for (std::size_t r = 1; r < reports.size(); ++r) {
      const auto row = reports[r].rows.find(name);
      if (!first.correct || row == reports[r].rows.end() || !row->second.correct) continue;
      lead.ratios[r] = row->second.median_us / first.median_us;
      if (lead.fastest == 0 || lead.ratios[r] < lead.ratio) {
        lead.fastest = r;
        lead.ratio = lead.ratios[r];
        lead.unsteady = first.unsteady || row->second.unsteady;
      }
    }
    if (lead.fastest > 0) result.push_back(std::move(lead));
  }
  return result;
}

std::string lead_section(const std::vector<ComparedReport>& reports) {
  const std::vector<Lead> all = leads(reports);
  if (all.empty()) return "";
  Standing standing;
  for (const Lead& lead : all) standing.ratios.push_back(lead.ratio);
  std::string others;
  for (std::size_t r = 1; r < reports.size(); ++r)
    others += fmt::format(R"(<th class="n">{}</th>)", escape(reports[r].label));
  return fill("lead.html", {{"first", escape(reports[0].label)},
                            {"ahead", fmt::format("{}", standing.ahead())},
                            {"rows", fmt::format("{}", all.size())},
                            {"others", std::move(others)},
                            {"standings", draw_standings(reports, all)},
                            {"bars", draw_bars(reports, all)}});
}

}  // namespace clattn::cli
