#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>

#include "cli/bench/compare.hpp"
#include "cli/bench/plot.hpp"
#include "cli/common/html_report.hpp"

namespace clattn::cli {
namespace {

using Reports = std::vector<ComparedReport>;

// Okabe and Ito's colours, which colour-blind readers tell apart, lighter ones on dark ground;
// shapes say the same once more.
constexpr std::string_view kStyle = R"html(<style>
:root { --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #cc79a7; --s4: #b88600; --s5: #56606b; }
@media (prefers-color-scheme: dark) { :root { --s0: #56b4e9; --s1: #f28b4b; --s2: #35c79c;
  --s3: #e6a5c8; --s4: #f0e442; --s5: #b6bfc9; } }
svg { height: auto; max-width: 100%; } svg text.name { font: 12px ui-monospace, monospace; }
.axis { stroke: var(--dim); } .ahead { fill: var(--s0); color: var(--s0); }
.behind { fill: var(--s1); color: var(--s1); } .ahead, .behind { font-weight: 600; }
.scroll { overflow-x: auto; } td, th { white-space: nowrap; }
</style>
)html";
constexpr std::size_t kColors = 6;

/// A marker of a report: circle, square, triangle or diamond in its colour.
std::string marker(std::size_t report, double x, double y, std::string_view tip) {
  constexpr std::array<std::string_view, 4> kPaths = {
      "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "m-3.6 -3.6h7.2v7.2h-7.2z", "m0 -4.6l4.6 8h-9.2z",
      "m0 -5l5 5l-5 5l-5 -5z"};
  return fmt::format("<path d=\"M{:.1f} {:.1f}{}\" fill=\"var(--s{})\"><title>{}</title></path>\n",
                     x, y, kPaths[report % kPaths.size()], report % kColors, escape(tip));
}

/// A line a row name, on it a marker a report.
struct DotPlot {
  std::string_view title, axis;
  std::function<std::optional<double>(const ComparedRow&, const std::string& name)> value;
  bool logarithmic;
  double reference = 0;  ///< a line to hold the markers against; 0 = none
};

std::string draw(const Reports& reports, const DotPlot& plot) {
  std::vector<std::string> names;
  std::vector<double> values;
  std::size_t longest = 0;
  for (const std::string& name : all_names(reports)) {
    bool any = false;
    for (const ComparedReport& report : reports) {
      const auto row = report.rows.find(name);
      if (row == report.rows.end()) continue;
      if (const auto value = plot.value(row->second, name)) {
        values.push_back(*value);
        any = true;
      }
    }
    if (!any) continue;
    names.push_back(name);
    longest = std::max(longest, name.size());
  }
  if (names.empty()) return "";
  const double left = 7.4 * static_cast<double>(longest) + 16, width = std::max(1080.0, left + 480);
  const double line = std::max(18.0, 6.0 * static_cast<double>(reports.size()) + 10);
  const double bottom = 10 + line * static_cast<double>(names.size());
  if (plot.reference > 0) values.push_back(plot.reference);
  const Scale x = plot.logarithmic ? log_scale(values, left, width - 30)
                                   : Scale{0, std::max(100.0, *std::ranges::max_element(values)),
                                           left, width - 30, false};
  std::string content = columns(x, 10, bottom);
  if (plot.reference > 0) {
    content += fmt::format(
        "<line class=\"axis\" x1=\"{0:.1f}\" y1=\"10\" x2=\"{0:.1f}\" y2=\"{1:.1f}\"/>\n",
        x.place(plot.reference), bottom);
  }
  for (std::size_t n = 0; n < names.size(); ++n) {
    const double middle = 10 + line * (static_cast<double>(n) + 0.5);
    content += grid_line(left, middle, width - 30, middle);
    content += text(left - 10, middle + 4, "end", names[n], "class=\"name\"");
    for (std::size_t r = 0; r < reports.size(); ++r) {
      const auto row = reports[r].rows.find(names[n]);
      if (row == reports[r].rows.end()) continue;
      const auto value = plot.value(row->second, names[n]);
      if (!value) continue;
      const double shift = static_cast<double>(r) - static_cast<double>(reports.size() - 1) / 2;
      content +=
          marker(r, x.place(*value), middle + 6 * shift,
                 fmt::format("{}, {}: {:.4g} {}", names[n], reports[r].label, *value, plot.axis));
    }
  }
  content += text((left + width - 30) / 2, bottom + 36, "middle", plot.axis);
  return svg(width, bottom + 44, plot.title, content);
}

/// What a report's device reaches at so many operations a byte.
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
                  "operations per byte of keys and values, flop/byte");
  content += text(0, 0, "middle", "GFLOP/s", "transform=\"translate(20 236) rotate(-90)\"");
  return svg(kWidth, kHeight, "Roofline: each report under its own ceilings", content);
}

std::string legend(const Reports& reports) {
  std::string html =
      "<table><tr><th></th><th>report</th><th>device, driver</th><th>commit</th>"
      "<th>date</th><th class=\"n\">read</th><th class=\"n\">pages</th><th class=\"n\">copy</th>"
      "<th class=\"n\">multiply-add</th><th class=\"n\">x86 bf16</th><th class=\"n\">mma.sync</th>"
      "<th class=\"n\">wgmma</th></tr>\n";
  for (std::size_t r = 0; r < reports.size(); ++r) {
    const ComparedReport& report = reports[r];
    html += fmt::format(
        "<tr><td><svg viewBox=\"0 0 12 12\" "
        "style=\"width:12px;max-width:none\">{}</svg></td><td>{}</td><td>{}, "
        "{}</td><td>{}</td>"
        "<td>{}</td>",
        marker(r, 6, 6, report.label), escape(report.label), escape(report.device),
        escape(report.driver), escape(report.commit), escape(report.date));
    for (const auto& [name, value, always] : kCeilingNames) {
      const bool bytes = std::string_view(name).ends_with("gb_per_s");
      const double rate = report.ceilings.*value;
      html += rate > 0 ? fmt::format("<td class=\"n\">{:.{}f} {}</td>", rate, bytes ? 1 : 0,
                                     bytes ? "GB/s" : "GFLOP/s")
                       : "<td class=\"n\">-</td>";
    }
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

}  // namespace

std::string comparison_page(const std::vector<ComparedReport>& reports) {
  const ComparedReport& first = reports[0];
  const DotPlot share{"Share of the ceiling", "% of the report's own ceiling",
                      [](const ComparedRow& row, const std::string&) -> std::optional<double> {
                        if (!row.share) return std::nullopt;
                        return *row.share * 100;
                      },
                      false, 100};
  const DotPlot time{
      "Median time of a launch", "us (logarithmic)",
      [](const ComparedRow& row, const std::string&) { return std::optional(row.median_us); },
      true};
  const std::string base = "times as fast as " + first.label + " (logarithmic)";
  const DotPlot speed{
      "Speed", base,
      [&](const ComparedRow& row, const std::string& name) -> std::optional<double> {
        const auto found = first.rows.find(name);
        const bool comparable = found != first.rows.end() && &found->second != &row;
        return comparable ? std::optional(found->second.median_us / row.median_us) : std::nullopt;
      },
      true, 1};
  return html_head("clattn bench") + std::string(kStyle) + legend(reports) + lead_section(reports) +
         draw(reports, share) + (reports.size() > 1 ? draw(reports, speed) : "") +
         draw(reports, time) + draw_roofline(reports) +
         "<h2>Numbers</h2>\n<div class=\"scroll\"><pre>" + escape(comparison_table(reports)) +
         "</pre></div>\n</body></html>\n";
}

}  // namespace clattn::cli
