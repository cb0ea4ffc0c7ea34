#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "program/common/html.hpp"
#include "program/compare/compare.hpp"
#include "program/compare/plot.hpp"

namespace clattn::cli {
namespace {

using Reports = std::vector<ComparedReport>;

constexpr std::size_t kColors = 6;

/// A marker of a report: circle, square, triangle or diamond in its colour.
std::string marker(std::size_t report, double x, double y, std::string_view tip) {
  constexpr std::array<std::string_view, 4> kPaths = {
      "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "m-3.6 -3.6h7.2v7.2h-7.2z", "m0 -4.6l4.6 8h-9.2z",
      "m0 -5l5 5l-5 5l-5 -5z"};
  return fmt::format("<path d=\"M{:.1f} {:.1f}{}\" fill=\"var(--s{})\"><title>{}</title></path>\n",
                     x, y, kPaths[report % kPaths.size()], report % kColors, escape(tip));
}

/// "3350.0 GB/s", of a ceiling by its name in reports.
std::string rate_text(std::string_view name, double rate) {
  return name.ends_with("gb_per_s") ? fmt::format("{:.1f} GB/s", rate)
                                    : fmt::format("{:.0f} GFLOP/s", rate);
}

/// "3350.0 GB/s (read)": what a row's share is a share of.
std::string ceiling_of(const ComparedReport& report, const ComparedRow& row) {
  for (const auto& [name, value, always] : kCeilingNames) {
    if (row.ceiling.empty() || !std::string_view(name).starts_with(row.ceiling + "_")) continue;
    const double rate = report.ceilings.*value;
    if (rate > 0) return fmt::format("{} ({})", rate_text(name, rate), row.ceiling);
  }
  return "its ceiling";
}

/// A line a row name, on it a marker a report.
struct DotPlot {
  std::string title, meaning, axis;
  std::function<std::optional<double>(const ComparedRow&, const std::string& name)> value;
  /// Of a marker's value.
  std::function<std::string(const ComparedReport&, const ComparedRow&)> unit;
  bool logarithmic = true;
  double reference = 0;  ///< a line to hold the markers against; 0 = none
};
struct Dot {
  std::size_t line, report;
  double value;
  std::string tip;
};

std::string draw(const Reports& reports, const DotPlot& plot) {
  std::vector<std::string> names;
  std::vector<Dot> dots;
  std::vector<double> values;
  std::size_t longest = 0;
  for (const std::string& name : all_names(reports)) {
    for (std::size_t r = 0; r < reports.size(); ++r) {
      const auto row = reports[r].rows.find(name);
      if (row == reports[r].rows.end()) continue;
      const auto value = plot.value(row->second, name);
      if (!value) continue;
      if (names.empty() || names.back() != name) names.push_back(name);
      values.push_back(*value);
      dots.push_back({names.size() - 1, r, *value,
                      fmt::format("{}, {}: {:.4g} {}", name, reports[r].label, *value,
                                  plot.unit(reports[r], row->second))});
    }
  }
  if (names.empty()) return "";
  for (const std::string& name : names) longest = std::max(longest, name.size());
  const double left = 7.4 * static_cast<double>(longest) + 16, width = std::max(1080.0, left + 480);
  const double line = std::max(18.0, 6.0 * static_cast<double>(reports.size()) + 10);
  const double bottom = 10 + line * static_cast<double>(names.size());
  if (plot.reference > 0) values.push_back(plot.reference);
  const Scale x = plot.logarithmic ? log_scale(values, left, width - 30)
                                   : Scale{0, std::max(100.0, *std::ranges::max_element(values)),
                                           left, width - 30, false};
  std::string content = columns(x, 10, bottom);
  if (plot.reference > 0) content += axis_line(x.place(plot.reference), bottom);
  const auto middle = [&](std::size_t n) { return 10 + line * (static_cast<double>(n) + 0.5); };
  for (std::size_t n = 0; n < names.size(); ++n) {
    content += grid_line(left, middle(n), width - 30, middle(n));
    content += text(left - 10, middle(n) + 4, "end", names[n], "class=\"name\"");
  }
  for (const Dot& dot : dots) {
    const double shift =
        static_cast<double>(dot.report) - static_cast<double>(reports.size() - 1) / 2;
    content += marker(dot.report, x.place(dot.value), middle(dot.line) + 6 * shift, dot.tip);
  }
  content += text((left + width - 30) / 2, bottom + 36, "middle", plot.axis);
  return draw_figure({plot.title, plot.meaning, width, bottom + 44, std::move(content)});
}

/// What a report's device reaches at this many operations a byte.
double roof(const ComparedReport& report, double intensity) {
  const Ceilings& of = report.ceilings;
  return std::min(of.read_gb_per_s * intensity,
                  std::max({of.fma_gflop_per_s, of.bf16_gflop_per_s, of.mma_gflop_per_s,
                            of.wgmma_gflop_per_s}));
}

std::string draw_roofline(const Reports& reports) {
  constexpr double kWidth = 1080, kHeight = 520, kLeft = 90, kBottom = 460;
  std::vector<double> intensities, rates;
  const auto points = [&](const auto& visit) {
    for (std::size_t r = 0; r < reports.size(); ++r) {
      for (const std::string& name : reports[r].names) {
        const ComparedRow& row = reports[r].rows.at(name);
        if (row.bytes > 0 && row.flops > 0) {
          visit(r, name, row.flops / row.bytes, row.flops * 1e-3 / row.median_us);
        }
      }
    }
  };
  points([&](std::size_t, const std::string&, double intensity, double rate) {
    intensities.push_back(intensity);
    rates.push_back(rate);
  });
  if (intensities.empty()) return "";
  for (const ComparedReport& report : reports) {
    rates.push_back(roof(report, 1e30));
    intensities.push_back(2 * roof(report, 1e30) / report.ceilings.read_gb_per_s);
  }
  const Scale x = log_scale(intensities, kLeft, kWidth - 20), y = log_scale(rates, kBottom, 12);
  std::string content = columns(x, 12, kBottom);
  for (const double tick : y.ticks()) {
    content += grid_line(kLeft, y.place(tick), kWidth - 20, y.place(tick));
    content += text(kLeft - 8, y.place(tick) + 4, "end", fmt::format("{:g}", tick));
  }
  for (std::size_t r = 0; r < reports.size(); ++r) {
    const double peak = roof(reports[r], 1e30), ridge = peak / reports[r].ceilings.read_gb_per_s;
    const double start = std::max(x.low, y.low / reports[r].ceilings.read_gb_per_s);
    content += fmt::format(
        "<path class=\"roof\" d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}L{:.1f} {:.1f}\" fill=\"none\" "
        "stroke=\"var(--s{})\" stroke-width=\"1.5\"><title>{}: {:.4g} GB/s, {:.4g} "
        "GFLOP/s</title></path>\n",
        x.place(start), y.place(roof(reports[r], start)), x.place(ridge), y.place(peak), x.to,
        y.place(peak), r % kColors, escape(reports[r].label), reports[r].ceilings.read_gb_per_s,
        peak);
  }
  points([&](std::size_t r, const std::string& name, double intensity, double rate) {
    content += marker(r, x.place(intensity), y.place(rate),
                      fmt::format("{}, {}: {:.4g} GFLOP/s at {:.3g} flop/byte", name,
                                  reports[r].label, rate, intensity));
  });
  content += text((kLeft + kWidth - 20) / 2, kBottom + 42, "middle",
                  "operations per byte to and from memory, flop/byte (logarithmic)");
  content += text(0, 0, "middle", "rate, GFLOP/s (logarithmic)",
                  "transform=\"translate(20 236) rotate(-90)\"");
  return draw_figure(
      {"Roofline: each report under its own ceilings",
       "Each marker is a row: how fast it computes, over how much it has to compute for a "
       "byte. The line of its colour is what the report's device can do: where it rises, "
       "at most what reading memory in a stream allows; where it is flat, its fastest "
       "arithmetic.",
       kWidth, kHeight, std::move(content)});
}

/// A row a report: its marker, where it comes from, and its ceilings.
std::string draw_reports(const Reports& reports) {
  std::string html;
  for (std::size_t r = 0; r < reports.size(); ++r) {
    const ComparedReport& report = reports[r];
    html += fmt::format(
        "<tr><td><svg viewBox=\"0 0 12 12\" style=\"width:12px;max-width:none\">{}</svg></td>"
        "<td>{}</td><td>{}, {}</td><td>{}</td><td>{}</td>",
        marker(r, 6, 6, report.label), escape(report.label), escape(report.device),
        escape(report.driver), escape(report.commit), escape(report.date));
    for (const auto& [name, value, always] : kCeilingNames) {
      const double rate = report.ceilings.*value;
      html += fmt::format("<td class=\"n\">{}</td>", rate > 0 ? rate_text(name, rate) : "-");
    }
    html += "</tr>\n";
  }
  return html;
}

std::string draw_shares(const Reports& reports) {
  return draw(reports,
              {.title = "What each row reaches of what its device can do",
               .meaning = "100 % is the row's ceiling: of the report's own device, the one that "
                          "takes longest for the bytes and operations that the row needs at least. "
                          "Point at a marker for the ceiling's value; a few % above it are its own "
                          "scatter. Rows whose data stays in a cache have no share.",
               .axis = "% of the row's ceiling on the report's own device",
               .value = [](const ComparedRow& row, const std::string&) -> std::optional<double> {
                 if (!row.share) return std::nullopt;
                 return *row.share * 100;
               },
               .unit = [](const auto& report,
                          const auto& row) { return "% of " + ceiling_of(report, row); },
               .logarithmic = false,
               .reference = 100});
}

/// Of the other reports compared with the first.
std::string draw_speeds(const Reports& reports) {
  if (reports.size() == 1) return "";
  const ComparedReport& first = reports[0];
  std::string base = "times as fast as " + first.label;
  return draw(
      reports,
      {.title = "Speed of the others beside " + first.label,
       .meaning = "How many times as fast each report is in the rows that " + first.label +
                  " has, too: its line is 1, and what is right of it is faster.",
       .axis = base + " (logarithmic)",
       .value = [&](const ComparedRow& row, const std::string& name) -> std::optional<double> {
         const auto found = first.rows.find(name);
         const bool comparable = found != first.rows.end() && &found->second != &row;
         return comparable ? std::optional(found->second.median_us / row.median_us) : std::nullopt;
       },
       .unit = [&](const auto&, const auto&) { return base; },
       .reference = 1});
}

std::string draw_times(const Reports& reports) {
  return draw(reports, {.title = "Median time of a launch",
                        .meaning = "How long a row's work takes, once: less is faster.",
                        .axis = "time, us (logarithmic)",
                        .value = [](const ComparedRow& row,
                                    const std::string&) { return std::optional(row.median_us); },
                        .unit = [](const auto&, const auto&) { return "us"; }});
}

}  // namespace

std::string comparison_page(const std::vector<ComparedReport>& reports) {
  return html_page("clattn bench",
                   fill("compare.html", {{"reports", draw_reports(reports)},
                                         {"plots", lead_section(reports) + draw_shares(reports) +
                                                       draw_speeds(reports) + draw_times(reports) +
                                                       draw_roofline(reports)},
                                         {"first", escape(reports[0].label)},
                                         {"table", escape(comparison_table(reports))}}),
                   "compare.css");
}

}  // namespace clattn::cli
