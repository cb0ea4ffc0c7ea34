#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace clattn::cli {

// Parts of plots as SVG. Places are pixels from the upper left corner.

/// A range of values along a side of a plot.
struct Scale {
  double low = 0, high = 0;  ///< values
  double from = 0, to = 0;   ///< places
  bool logarithmic = true;

  double place(double value) const;
  /// 1, 2 and 5 of every decade where there are few, else whole decades; tenths of linear ones.
  std::vector<double> ticks() const;
};

/// The least range of whole decades or 1-2-5 steps around values, at least a factor of four.
Scale log_scale(const std::vector<double>& values, double from, double to);

std::string grid_line(double x1, double y1, double x2, double y2);
/// A vertical line from the top of a plot that others are held against.
std::string axis_line(double x, double bottom);
/// `anchor`: start, middle or end. `more`: further attributes.
std::string text(double x, double y, std::string_view anchor, std::string_view content,
                 std::string_view more = "");
/// The grid of a plot's x axis, and its numbers.
std::string columns(const Scale& x, double top, double bottom);
/// A plot as the page has it: under its title and what it shows.
struct Figure {
  std::string title, meaning;
  double width, height;
  std::string content;
};
std::string draw_figure(Figure figure);

}  // namespace clattn::cli
