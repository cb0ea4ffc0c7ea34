#include <gtest/gtest.h>

#include <clattn/error.hpp>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "program/compare/compare.hpp"

namespace {

using clattn::cli::ComparedReport;
using clattn::cli::comparison_page;
using clattn::cli::parse_report;
using nlohmann::json;

json row(const char* name, double median_us) {
  return {{"name", name}, {"median_us", median_us},  {"correct", true},  {"bytes", 4e6},
          {"flops", 8e6}, {"share_of_ceiling", 0.5}, {"ceiling", "read"}};
}

json report(double factor) {
  return {{"format", "clattn-bench"},
          {"schema_version", 1},
          {"commit", "abc"},
          {"date", "2026-01-02T03:04:05Z"},
          {"device", {{"name", "<dev>"}, {"driver_version", "1"}, {"platform_version", "2"}}},
          {"ceilings",
           {{"read_gb_per_s", 100.0}, {"page_read_gb_per_s", 90.0}, {"fma_gflop_per_s", 1000.0}}},
          {"rows",
           {row("m/decode/q1", 100 * factor),
            row("m/prefill/q8", 50 * factor),
            {{"name", "m/cache/q1"}, {"skipped", "no room"}}}}};
}

TEST(Compare, TellsHowManyTimesAsFast) {
  json other = report(0.5);
  other["rows"].push_back(row("only/here", 7));
  other["rows"][1]["correct"] = false;
  const std::vector<ComparedReport> reports = {parse_report(report(1).dump(), "x/a.json"),
                                               parse_report(other.dump(), "b.json")};
  EXPECT_EQ(reports[0].label, "a");
  const std::string table = comparison_table(reports);
  EXPECT_NE(table.find("50.0 (2.00x)"), std::string::npos) << table;
  EXPECT_NE(table.find("25.0 WRONG (2.00x)"), std::string::npos) << table;
  EXPECT_NE(table.find("2.000x"), std::string::npos) << table;
  EXPECT_NE(table.find("only/here"), std::string::npos) << table;
  EXPECT_EQ(table.find("m/cache/q1"), std::string::npos) << table;
}

TEST(Compare, ThePageHoldsEveryPlotAndLoadsNothing) {
  const std::string page = comparison_page(
      {parse_report(report(1).dump(), "a.json"), parse_report(report(2).dump(), "b<.json")});
  for (const char* part :
       {"<title>clattn bench</title>", "32q1s4k is a batch", "Speed of the others beside a</h2>",
        "<h2>Median time of a launch</h2>", "<h2>Roofline", "Numbers", "% of the row's ceiling",
        "50 % of 100.0 GB/s (read)</title>", "time, us (logarithmic)", "flop/byte (logarithmic)",
        "rate, GFLOP/s (logarithmic)", "&lt;dev>", "b&lt;", "prefers-color-scheme: dark",
        "</html>"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  for (const char* foreign :
       {"http://", "https://", "<script", "<link", "@import", "nan", "inf\""}) {
    EXPECT_EQ(page.find(foreign), std::string::npos) << foreign;
  }
  EXPECT_FALSE(std::regex_search(page, std::regex("@[a-z]+@"))) << "a place is not filled";
  std::size_t markers = 0;
  for (std::size_t at = page.find("<path d="); at != std::string::npos;
       at = page.find("<path d=", at + 1)) {
    ++markers;
  }
  // Two rows of two reports in three plots, of one in that of speeds, and the legend's two.
  EXPECT_EQ(markers, 2U * 2 * 3 + 2 + 2);
}

TEST(Compare, TellsWhereTheFirstReportLeads) {
  json fast = report(0.5), slow = report(2);
  fast["rows"][1]["correct"] = false;  // the fastest, but WRONG
  slow["rows"].push_back(row("only/here", 7));
  slow["rows"][1]["unsteady"] = true;
  const std::vector<ComparedReport> reports = {parse_report(report(1).dump(), "a.json"),
                                               parse_report(fast.dump(), "fast.json"),
                                               parse_report(slow.dump(), "slow.json")};
  const std::vector<clattn::cli::Lead> leads = clattn::cli::leads(reports);
  ASSERT_EQ(leads.size(), 2U);
  EXPECT_EQ(leads[0].name, "m/decode/q1");
  EXPECT_EQ(leads[0].fastest, 1U);
  EXPECT_EQ(leads[0].ratio, 0.5);
  EXPECT_EQ(leads[0].ratios, (std::vector<double>{0, 0.5, 2}));
  EXPECT_EQ(leads[1].fastest, 2U);
  EXPECT_EQ(leads[1].ratio, 2);
  EXPECT_EQ(leads[1].ratios, (std::vector<double>{0, 0, 2}));

  const std::string page = comparison_page(reports);
  for (const char* part :
       {"<h2>a leads in 1 of 2 rows</h2>",
        R"(<td>decode</td><td class="n"><span class="behind">0.50</span> (0 of 1)</td>)",
        R"(<td>prefill</td><td class="n"><span class="ahead">2.00</span> (1 of 1)</td>)",
        R"(<td class="n">-</td>)",
        R"(<td>all</td><td class="n"><span class="ahead">1.00</span> (1 of 2)</td>)",
        "2.00~ slow</text>", "0.50 fast</text>"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  EXPECT_LT(page.find("2.00~ slow</text>"), page.find("0.50 fast</text>")) << "leads first";
  EXPECT_EQ(comparison_page({reports[0]}).find("leads in"), std::string::npos);
}

/// Reports from before the copy was measured are read as they are.
TEST(Compare, CeilingsThatAReportLacksAreLeftOut) {
  json newer = report(1);
  newer["ceilings"]["copy_gb_per_s"] = 77.0;
  newer["ceilings"]["wgmma_gflop_per_s"] = 5432.0;
  const ComparedReport without = parse_report(report(1).dump(), "a.json");
  EXPECT_EQ(without.ceilings.copy_gb_per_s, 0);
  EXPECT_EQ(without.ceilings.wgmma_gflop_per_s, 0);
  const ComparedReport with = parse_report(newer.dump(), "b.json");
  EXPECT_EQ(with.ceilings.copy_gb_per_s, 77);
  const std::string page = comparison_page({without, with});
  EXPECT_NE(page.find("50 % of 100.0 GB/s (read)"), std::string::npos);
  EXPECT_NE(page.find("77.0 GB/s"), std::string::npos);
  EXPECT_NE(page.find("5432 GFLOP/s"), std::string::npos);
  newer["ceilings"]["copy_gb_per_s"] = 0;
  EXPECT_THROW(parse_report(newer.dump(), "b.json"), clattn::Error);
}

TEST(Compare, BadReportsNameFileAndField) {
  struct Bad {
    const char* pointer;
    json value;
    const char* says;
  };
  const Bad rows[] = {
      {"/format", "other", "f.json: format: expected clattn-bench"},
      {"/schema_version", 2, "f.json: schema_version: expected 1, not 2"},
      {"/device", 5, "f.json: device.: expected an object"},
      {"/device/name", 5, "f.json: device.name: expected a text"},
      {"/ceilings/read_gb_per_s", 0,
       "f.json: ceilings.read_gb_per_s: expected a number from 1e-09 to 1e+15, not 0"},
      {"/rows", 5, "f.json: rows: expected a list"},
      {"/rows/0/median_us", "fast",
       "f.json: rows[0].median_us: expected a number from 1e-09 to 1e+15, not \"fast\""},
      {"/rows/0/median_us", 1e308, "f.json: rows[0].median_us: expected a number from"},
      {"/rows/0/median_us", json::array({json::array()}),
       "f.json: rows[0].median_us: expected a number from 1e-09 to 1e+15, not array"},
      {"/rows/0/correct", 1, "f.json: rows[0].correct: expected true or false"},
      {"/rows/1/name", "m/decode/q1", "f.json: rows[1].name: expected each name once"},
  };
  for (const Bad& bad : rows) {
    json document = report(1);
    document[json::json_pointer(bad.pointer)] = bad.value;
    try {
      parse_report(document.dump(), "f.json");
      ADD_FAILURE() << bad.says << ": was taken";
    } catch (const clattn::Error& error) {
      EXPECT_EQ(std::string(error.what()).find(bad.says), 0U) << error.what();
    }
  }
  json document = report(1);
  document["rows"][0].erase("median_us");
  EXPECT_THROW(parse_report(document.dump(), "f.json"), clattn::Error);
  EXPECT_THROW(parse_report("{", "f.json"), clattn::Error);
}

}  // namespace
