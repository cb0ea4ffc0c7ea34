#include "robustness/run_case.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

RunCase::RunCase(const CaseImage& image, const std::string& options)
    : out_(scratch_.path() / "case" / "out") {
  image.write(scratch_.path() / "case");
  const ProgramResult result =
      run_program("run " + (scratch_.path() / "case").string() + " " + options);
  EXPECT_EQ(result.code, 0) << result.standard_error;
}

RunCase::RunCase(InPlace /*tag*/, const std::filesystem::path& directory)
    : out_(scratch_.path() / "out") {
  const ProgramResult result = run_program("run " + directory.string() + " --out " + out_.string());
  EXPECT_EQ(result.code, 0) << result.standard_error;
  if (result.code != 0 || !std::filesystem::exists(directory / "captured")) return;
  const auto info = nlohmann::json::parse(bytes("info.json"));
  for (const auto& [name, compared] : info.at("captured").items())
    EXPECT_EQ(compared.at("different"), 0) << name << " of " << directory;
}

std::string RunCase::text(const std::string& name) const {
  std::string text = bytes(name + ".json");
  std::erase_if(text, [](char c) { return c == ' ' || c == '\n'; });
  return text;
}

std::size_t RunCase::num_outputs() const {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(out_)) {
    count += entry.is_regular_file() ? 1U : 0U;
  }
  return count;
}
