#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oracle/oracle.hpp"
#include "robustness/run_case.hpp"

/// One attention case twice: as the files that the program reads and as the oracle sees it. Options
/// are set in both.
struct AttentionModel {
  struct Request {
    std::int32_t query_len, seq_len;
  };
  static constexpr std::int32_t kHeads = 4, kKvHeads = 2, kHeadSize = 16, kBlockSize = 4;

  /// A decoder's batch in f32 over a cache of pages in no order, or an encoder's without one.
  static AttentionModel paged(const std::vector<Request>& requests);
  static AttentionModel encoder(const std::string& attn_type, const std::vector<Request>& requests);

  /// More keys of case.json.
  void add(const std::string& json);
  void set_mask();  ///< at random, but every query sees its own position
  void set_per_head(const std::string& name, const std::vector<double>& values);
  /// What the case says of its requests beyond lengths, in its files and in the truth.
  void set_directions(const std::vector<oracle::Looks>& looks);
  void set_spans(const std::vector<oracle::Span>& spans);  ///< in the order of the requests
  void set_first_keys(const std::vector<std::int32_t>& first_keys);
  void set_keep_keys(const std::vector<std::int32_t>& keep_keys);
  /// Makes keys and values of pages NaN, in the files alone.
  void poison_keys(std::int32_t request, std::int32_t first, std::int32_t end);
  /// Gives all requests the first one's pages for their first `tokens`, and says so.
  void share_prefix(std::int32_t tokens);
  /// Values, and results, of an encoder have half of their elements; the truth holds zeros behind
  /// them.
  void halve_values();
  /// Stores the cache as 8-bit elements; factors of K, then of V, per KV head. The oracle reads
  /// them times their factors.
  void quantize(oracle::Element element, const std::string& dtype,
                const std::vector<double>& k_scale, const std::vector<double>& v_scale);
  /// Gives the newest token of every request as key and value, for the program to store. Call it
  /// behind quantize().
  void store_newest();

  CaseImage image;
  oracle::AttentionCase truth;
  std::int32_t num_tokens() const { return truth.query_start_loc.back(); }
  std::int32_t max_seq_len() const;

  // Of quantize(): the expected bytes of the caches, and how they came about.
  oracle::Element element = oracle::Element::kF32;
  std::vector<double> k_scale, v_scale;
  std::string expected_key_cache, expected_value_cache;

 private:
  void set_table();
};

/// Fails unless out and lse are what the oracle says.
void expect_truth(const AttentionModel& model, const RunCase& run);
