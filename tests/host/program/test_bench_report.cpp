#include <gtest/gtest.h>

#include "program/bench/report.hpp"

namespace {

using clattn::cli::report_text;
using Json = nlohmann::ordered_json;

TEST(BenchReport, EachMemberAndEachRowIsALine) {
  const Json row = {{"name", "a\nb"}, {"requests", {{2, 1, 100}}}, {"kernels", {{{"name", "k"}}}}};
  const Json report = {
      {"format", "f"}, {"device", {{"name", "d"}, {"units", {1, 2}}}}, {"rows", {row, row}}};
  const std::string text = report_text(report);
  const std::string line = R"({"name":"a\nb","requests":[[2,1,100]],"kernels":[{"name":"k"}]})";
  EXPECT_EQ(text,
            "{\n\"format\": \"f\",\n\"device\": {\"name\":\"d\",\"units\":[1,2]},\n\"rows\": [\n" +
                line + ",\n" + line + "\n]\n}\n");
  EXPECT_EQ(Json::parse(text), report);
}

/// A device may call itself anything; a run may end before its first row.
TEST(BenchReport, IsJsonWhateverItHolds) {
  const Json report = {{"device", {{"name", "\xff"}}}, {"rows", Json::array()}, {"layout", "HND"}};
  EXPECT_EQ(report_text(report),
            "{\n\"device\": {\"name\":\"\xef\xbf\xbd\"},\n\"rows\": [],\n\"layout\": \"HND\"\n}\n");
}

}  // namespace
