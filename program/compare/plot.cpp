#include "program/compare/plot.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "program/common/html.hpp"

namespace clattn::cli {

double Scale::place(double value) const {
  const double share =
      logarithmic ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
  return from + share * (to - from);
}

std::vector<double> Scale::ticks() const {
  std::vector<double> result;
  if (!logarithmic) {
    const int step = high > 200 ? 50 : 20;
    for (int tick = static_cast<int>(low); tick <= static_cast<int>(high); tick += step) {
      result.push_back(tick);
    }
    return result;
  }
  const bool few = std::log10(high / low) < 3;
  for (int decade = static_cast<int>(std::floor(std::log10(low)));
       std::pow(10, decade) <= high * 1.0001; ++decade) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      const double tick = digit * std::pow(10, decade);
      if ((digit == 1 || few) && tick >= low * 0.9999 && tick <= high * 1.0001) {
        result.push_back(tick);
      }
    }
  }
  return result;
}

Scale log_scale(const std::vector<double>& values, double from, double to) {
  const auto [least, most] = std::ranges::minmax_element(values);
  const auto step = [](double value, bool up) {
    const double decade = std::pow(10, std::floor(std::log10(value)));
    double best = up ? 10 * decade : decade;
    for (const double digit : {2.0, 5.0}) {
      const double at = digit * decade;
      if (up ? at >= value && at < best : at <= value && at > best) best = at;
    }
    return up && decade >= value ? decade : best;
  };
  Scale scale{step(*least, false), step(*most, true), from, to};
  if (scale.high / scale.low < 4) {
    scale.low = step(scale.low / 1.5, false);
    scale.high = step(scale.high * 1.5, true);
  }
  return scale;
}

std::string grid_line(double x1, double y1, double x2, double y2) {
  return fmt::format(
      "<line class=\"grid\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", x1, y1,
      x2, y2);
}

std::string axis_line(double x, double bottom) {
  return fmt::format(
      "<line class=\"axis\" x1=\"{0:.1f}\" y1=\"10\" x2=\"{0:.1f}\" y2=\"{1:.1f}\"/>\n", x, bottom);
}

std::string text(double x, double y, std::string_view anchor, std::string_view content,
                 std::string_view more) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" {}>{}</text>\n", x, y,
                     anchor, more, escape(content));
}

std::string columns(const Scale& x, double top, double bottom) {
  std::string content;
  for (const double tick : x.ticks()) {
    content += grid_line(x.place(tick), top, x.place(tick), bottom);
    content += text(x.place(tick), bottom + 17, "middle", fmt::format("{:g}", tick));
  }
  return content;
}

std::string draw_figure(Figure figure) {
  return fill("plot.html", {{"title", escape(figure.title)},
                            {"meaning", escape(figure.meaning)},
                            {"width", fmt::format("{:.0f}", figure.width)},
                            {"height", fmt::format("{:.0f}", figure.height)},
                            {"content", std::move(figure.content)}});
}

}  // namespace clattn::cli
