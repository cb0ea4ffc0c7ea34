// The pages that the program writes.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <string_view>

#include "program/common/built_in.hpp"
#include "program/common/html.hpp"
#include "program/replay/report.hpp"

namespace {

using clattn::cli::fill;
using nlohmann::ordered_json;

TEST(Html, PlacesAreFilledOnceAndOthersAreKept) {
  const std::string page = clattn::cli::html_page("a title", "<p>@title@ @media</p>");
  for (const char* part : {"<title>a title</title>", "<h1>a title</h1>", "<p>@title@ @media</p>",
                           "@media (prefers-color-scheme: dark)", "</html>"})
    EXPECT_NE(page.find(part), std::string::npos) << part << " in " << page;
  EXPECT_EQ(page.find("@style@"), std::string::npos);
  EXPECT_EQ(fill("lead.html").find("<h2>@first@ leads in @ahead@ of "), 0U) << "nothing fills them";
}

TEST(Html, TheReplaysPageHoldsItsReportAndLoadsNothing) {
  const std::string page = clattn::cli::to_html(
      ordered_json{{"trace", "</script><b> @script@ \xff"}, {"steps", 3}}, "a < b");
  EXPECT_NE(page.find("\\u003c/script>\\u003cb> @script@ \xEF\xBF\xBD"), std::string::npos) << page;
  for (const char* part : {"<title>clattn replay</title>", "A replay serves requests",
                           "data-value=\"ceilings.read_gb_per_s\"", "% of the ceiling",
                           "number of the step", "time, ms", "<pre>a &lt; b</pre>"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
  for (const char* foreign : {"https://", "<link", "@import", "src="})
    EXPECT_EQ(page.find(foreign), std::string::npos) << foreign;
}

TEST(Html, EveryFileIsBuiltIn) {
  for (const std::string_view name : {"page.html", "page.css", "plot.html", "lead.html",
                                      "compare.html", "compare.css", "replay.html", "replay.js"})
    EXPECT_FALSE(text_of(clattn::cli::page_files(), name).empty()) << name;
}

}  // namespace
