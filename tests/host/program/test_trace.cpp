#include <gtest/gtest.h>

#include <algorithm>
#include <clattn/error.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "program/replay/trace.hpp"

namespace {

using clattn::cli::read_trace;
using clattn::cli::Trace;

const std::string kHeader = "TIMESTAMP,ContextTokens,GeneratedTokens\n";

Trace read(const std::string& text, std::int64_t max_requests = 0) {
  std::istringstream input(text);
  return read_trace(input, "t", max_requests);
}

TEST(Trace, ReadsAzureLines) {
  const Trace trace = read(kHeader +
                           "2023-12-31 23:59:59.5000000,374,44\r\n"
                           "2024-01-01 00:00:00.7500000,396,0\r\n"
                           "\n"
                           "2024-03-01 00:00:00.5,7,1");
  ASSERT_EQ(trace.requests.size(), 3U);
  EXPECT_DOUBLE_EQ(trace.requests[0].arrival_s, 0.0);
  EXPECT_EQ(trace.requests[0].prompt_tokens, 374);
  EXPECT_EQ(trace.requests[0].output_tokens, 44);
  EXPECT_DOUBLE_EQ(trace.requests[1].arrival_s, 1.25);
  EXPECT_EQ(trace.requests[1].output_tokens, 1);
  // A leap year's 31 + 29 days after New Year, plus one second.
  EXPECT_DOUBLE_EQ(trace.requests[2].arrival_s, 60 * 86400 + 1);
  EXPECT_TRUE(trace.requests[2].hash_ids.empty());
}

TEST(Trace, ReadsMooncakeLines) {
  const Trace trace = read(
      "{\"timestamp\": 500, \"input_length\": 513, \"output_length\": 3, \"hash_ids\": [0, 9]}\n"
      "{\"timestamp\": 2000, \"input_length\": 512, \"output_length\": 1, \"hash_ids\": [7]}\n");
  ASSERT_EQ(trace.requests.size(), 2U);
  EXPECT_DOUBLE_EQ(trace.requests[1].arrival_s, 1.5);
  EXPECT_EQ(trace.requests[0].prompt_tokens, 513);
  EXPECT_EQ(trace.requests[0].hash_ids, (std::vector<std::int64_t>{0, 9}));
  EXPECT_EQ(trace.requests[1].hash_ids, (std::vector<std::int64_t>{7}));
}

TEST(Trace, KeepsTheFirstRequestsButChecksEveryLine) {
  const std::string text = kHeader + "2023-11-16 18:15:46.1,1,1\n2023-11-16 18:15:47.1,2,2\n";
  EXPECT_EQ(read(text, 1).requests.size(), 1U);
  EXPECT_THROW(read(text + "nonsense\n", 1), clattn::Error);
}

TEST(Trace, AcceptsTheLastDaysOfMonths) {
  EXPECT_EQ(read(kHeader + "2023-01-31 00:00:00,1,1\n"
                           "2023-04-30 00:00:00,1,1\n"
                           "2023-12-31 00:00:00,1,1\n"
                           "2024-02-29 00:00:00,1,1\n")
                .requests.size(),
            4U);
}

TEST(Trace, ReadsLinesOfAnyLegalLength) {
  for (const std::size_t padding : {std::size_t{900}, std::size_t{1 << 20}}) {
    for (std::size_t more = 0; more < 200; ++more) {
      const std::string line = "2023-11-16 18:15:46.1,5,5" + std::string(padding + more, ' ');
      ASSERT_EQ(read(kHeader + line + "\n" + line).requests.size(), 2U) << line.size();
      if (padding > 1000) break;
    }
  }
}

struct Malformed {
  const char* what;
  std::string text;
  std::string message;
};

TEST(Trace, NamesFileLineAndFault) {
  const std::string good = "2023-11-16 18:15:46.1,5,5\n";
  const std::string at = "2023-11-16 18:15:46.1,";
  const Malformed cases[] = {
      {"empty file", "", "t: holds no request"},
      {"header only", kHeader, "t: holds no request"},
      {"no header", good, "t:1: neither the Azure header"},
      {"two fields", kHeader + at + "5\n", "t:2: 2 fields, legal is 3"},
      {"four fields", kHeader + at + "5,5,5\n", "t:2: 4 fields, legal is 3"},
      {"negative length", kHeader + good + at + "-5,5\n",
       "t:3: ContextTokens is -5, legal is 1 to 10000000"},
      {"empty prompt", kHeader + at + "0,5\n", "t:2: ContextTokens is 0, legal is 1"},
      {"huge length", kHeader + at + "5,10000001\n",
       "t:2: GeneratedTokens is 10000001, legal is 0"},
      {"overflow", kHeader + at + "99999999999999999999,5\n",
       "t:2: ContextTokens is '9999999999999"},
      {"not a number", kHeader + at + "5,many\n", "t:2: GeneratedTokens is 'many'"},
      {"bad time", kHeader + "yesterday,5,5\n", "t:2: TIMESTAMP is 'yesterday'"},
      {"month 13", kHeader + "2023-13-16 18:15:46.1,5,5\n", "t:2: TIMESTAMP is '2023-13-16"},
      {"day 31 of February", kHeader + "2023-02-31 18:15:46.1,5,5\n",
       "t:2: TIMESTAMP is '2023-02-31"},
      {"no leap year", kHeader + "2023-02-29 18:15:46.1,5,5\n", "t:2: TIMESTAMP is '2023-02-29"},
      {"endless line", kHeader + good + std::string(17 << 20, '1') + "\n" + good,
       "t:3: longer than 16777216 bytes"},
      {"bare dot", kHeader + "2023-11-16 18:15:46.,5,5\n", "t:2: TIMESTAMP is '2023-11-16"},
      {"unsorted", kHeader + good + "2023-11-16 18:15:45.1,5,5\n", "t:3: arrives 1 s before"},
      {"broken json", "{\"timestamp\": 1,\n", "t:1: not a JSON object"},
      {"missing field", "{\"timestamp\": 1, \"input_length\": 5}\n",
       "t:1: field 'output_length' is missing"},
      {"missing time", "{\"input_length\": 5}\n", "t:1: field 'timestamp' is missing"},
      {"text time", "{\"timestamp\": \"1\"}\n", "t:1: timestamp is not a number"},
      {"fraction", "{\"timestamp\": 1, \"input_length\": 5.5, \"output_length\": 1}\n",
       "t:1: input_length is not an integer"},
      {"unsigned overflow",
       "{\"timestamp\": 1, \"input_length\": 18446744073709551615, \"output_length\": 1}\n",
       "t:1: input_length is not an integer of 64 bits"},
      {"too few ids",
       "{\"timestamp\": 1, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": [1]}\n",
       "t:1: hash_ids must list 2 ids"},
      {"text id",
       "{\"timestamp\": 1, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [\"a\"]}\n",
       "t:1: hash_ids holds something that is not an integer"},
      {"id beyond 64 bits",
       "{\"timestamp\": 1, \"input_length\": 5, \"output_length\": 1, "
       "\"hash_ids\": [18446744073709551615]}\n",
       "t:1: hash_ids holds something that is not an integer of 64 bits"},
      {"array line", "{\"timestamp\": 1, \"input_length\": 5, \"output_length\": 1}\n[1]\n",
       "t:2: not a JSON object"},
  };
  for (const Malformed& malformed : cases) {
    try {
      read(malformed.text);
      ADD_FAILURE() << malformed.what << ": accepted";
    } catch (const clattn::Error& error) {
      EXPECT_EQ(error.code(), clattn::ErrorCode::kInvalidArgument) << malformed.what;
      EXPECT_EQ(std::string(error.what()).substr(0, malformed.message.size()), malformed.message)
          << malformed.what;
    }
  }
}

TEST(Trace, MissingFileIsAnIoError) {
  for (const char* path : {"/nonexistent/trace.csv", "/"}) {
    try {
      clattn::cli::read_trace_file(path);
      ADD_FAILURE() << path << ": accepted";
    } catch (const clattn::Error& error) {
      EXPECT_EQ(error.code(), clattn::ErrorCode::kIo) << path;
    }
  }
}

double share_at_most(const std::vector<std::int32_t>& lengths, std::int32_t limit) {
  const auto count = std::ranges::count_if(lengths, [&](std::int32_t n) { return n <= limit; });
  return static_cast<double>(count) / static_cast<double>(lengths.size());
}

TEST(Trace, BuiltinProfileFollowsItsQuantiles) {
  const Trace trace = clattn::cli::make_builtin_trace(20000, 5.0, 7);
  std::vector<std::int32_t> prompts;
  std::vector<std::int32_t> outputs;
  for (const auto& request : trace.requests) {
    prompts.push_back(request.prompt_tokens);
    outputs.push_back(request.output_tokens);
  }
  const double shares[] = {0.10, 0.25, 0.50, 0.75, 0.90, 0.99};
  const std::int32_t context[] = {207, 396, 1020, 1189, 2735, 4142};
  const std::int32_t generated[] = {54, 85, 129, 395, 424, 601};
  for (int i = 0; i < 5; ++i) {
    EXPECT_NEAR(share_at_most(prompts, context[i]), shares[i], 0.015);
    EXPECT_NEAR(share_at_most(outputs, generated[i]), shares[i], 0.015);
  }
  EXPECT_EQ(*std::ranges::max_element(prompts), 4142);
  EXPECT_EQ(*std::ranges::max_element(outputs), 601);
  EXPECT_TRUE(
      std::ranges::is_sorted(trace.requests, {}, [](const auto& r) { return r.arrival_s; }));
  EXPECT_NEAR(trace.requests.back().arrival_s, 4000.0, 120.0);  // mean gap 1/5 s, sigma 28 s
}

TEST(Trace, BuiltinProfileIsFixedByItsSeed) {
  const Trace one = clattn::cli::make_builtin_trace(20, 5.0, 1);
  const Trace again = clattn::cli::make_builtin_trace(20, 5.0, 1);
  const Trace other = clattn::cli::make_builtin_trace(20, 5.0, 2);
  int different = 0;
  for (std::size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(one.requests[i].prompt_tokens, again.requests[i].prompt_tokens);
    EXPECT_EQ(one.requests[i].arrival_s, again.requests[i].arrival_s);
    different += one.requests[i].prompt_tokens != other.requests[i].prompt_tokens ? 1 : 0;
  }
  EXPECT_GT(different, 10);
}

TEST(Trace, BuiltinPromptsBeginAlikeIfAsked) {
  const Trace trace = clattn::cli::make_builtin_trace(3, 5.0, 1, 128);
  EXPECT_DOUBLE_EQ(trace.hash_block_tokens, 128);
  for (std::int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(trace.requests[static_cast<std::size_t>(i)].hash_ids,
              (std::vector<std::int64_t>{0, i + 1}));
  }
}

// What is shared is a length, and said as such.
TEST(Trace, Q4_ASystemPromptIsScaledToWholeTokens) {
  Trace trace = clattn::cli::make_builtin_trace(3, 5.0, 1, 64);
  EXPECT_EQ(trace.system_prompt, 64);
  clattn::cli::scale_lengths(trace, 0.05);
  EXPECT_EQ(trace.system_prompt, 3);
  EXPECT_DOUBLE_EQ(trace.hash_block_tokens, 3);
}

TEST(Trace, ScalesLengthsAndHashBlocks) {
  Trace trace;
  trace.requests = {{0, 100, 10, {}}, {0, 3, 1, {}}};
  clattn::cli::scale_lengths(trace, 0.125);
  EXPECT_EQ(trace.requests[0].prompt_tokens, 13);  // 12.5 rounds away from zero
  EXPECT_EQ(trace.requests[0].output_tokens, 1);
  EXPECT_EQ(trace.requests[1].prompt_tokens, 1);
  EXPECT_DOUBLE_EQ(trace.hash_block_tokens, 64);
  EXPECT_THROW(clattn::cli::scale_lengths(trace, 1e9), clattn::Error);
}

}  // namespace
