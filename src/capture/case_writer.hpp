#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "npy/npy.hpp"

namespace clattn::detail {

/// A case directory in the making: ROOT/NNNN-OP once committed, nothing if not. Numbers are the
/// process's; they continue behind those that ROOT holds, and other processes may write there too.
/// Every failure throws kIo naming path and reason.
class CaseWriter {
 public:
  CaseWriter(std::filesystem::path root, std::string_view op);
  ~CaseWriter();
  CaseWriter(const CaseWriter&) = delete;
  CaseWriter& operator=(const CaseWriter&) = delete;

  /// Writes `name`.npy.
  void add(std::string_view name, const npy::NpyArray& array) const;
  /// Writes case.json and moves everything to its place, which it returns.
  std::filesystem::path commit(std::string_view case_json);

 private:
  std::filesystem::path root_, staging_;
  std::string op_;
  std::int64_t number_ = 0;
};

/// What the call of a case gave, under the names of `clattn run`: CASE/captured/NAME.npy. The case
/// stands before its call, so that it outlives a call that ends the process; this comes after it.
class CaseResults {
 public:
  explicit CaseResults(const std::filesystem::path& place);
  void add(std::string_view name, const npy::NpyArray& array) const;

 private:
  std::filesystem::path folder_;
};

}  // namespace clattn::detail
