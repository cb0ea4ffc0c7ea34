#pragma once

#include <clattn/attention.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>

namespace clattn::detail {

// Each backend's file defines its function; the entry it returns lives as long as the process.
#define CLATTN_BACKEND(function) const AttentionBackend& function();
#include "backends/backend_list.inc"
#undef CLATTN_BACKEND

inline constexpr std::string_view kNoAttention = "NO_ATTENTION";

/// What attention-free models get; not in the list.
const AttentionBackend& attention_free_backend();

/// A backend, and the impl that it made.
struct FittingBackend {
  std::shared_ptr<const AttentionBackend> backend;
  std::shared_ptr<const AttentionImpl> impl;
};
/// get_attn_backend() for a layer on a context's device, judged by building too: where the kernels
/// of a chosen backend turn out not to fit (no tile builds, or all need more local or private
/// memory than there is) or the device's compiler refuses one (CL_BUILD_PROGRAM_FAILURE, which the
/// context then lists among its build failures), the next that takes the configuration serves. No
/// other takes the place of one that the environment forces. Throws what get_attn_backend() and
/// make_impl() throw.
FittingBackend get_fitting_backend(const std::shared_ptr<Context>& context,
                                   const AttentionConfig& config);

/// "FLASHINFER, XFORMERS"
std::string backend_names(const BackendList& backends);

/// "layout HDN not supported by XFORMERS: NHD is"
std::string unsupported_layout(const AttentionBackend& backend, KVCacheLayout layout);

/// The registered backends and the selector's remembered answers. Thread-safe.
class Registry {
 public:
  using Entry = std::shared_ptr<const AttentionBackend>;
  /// The arguments of vLLM's get_attn_backend that decide.
  using Query = std::tuple<std::int32_t, DType, std::optional<DType>, std::int32_t, bool, bool>;

  /// The process's, with the built-in backends; plugins of the environment are not loaded by this.
  static Registry& instance();

  BackendList snapshot() const;
  void add(Entry backend, std::size_t position);
  Entry remove(std::string_view name);
  /// Takes this very entry out, if it is there: another may have its name by now.
  void remove_entry(const Entry& backend) noexcept;

  /// A remembered answer, or null; and the number of changes so far, for remember().
  Entry recall(const Query& query, std::uint64_t& generation) const;
  /// Keeps an answer unless the registry has changed since `generation`.
  void remember(const Query& query, const Entry& backend, std::uint64_t generation);

 private:
  Registry();
  void changed();  // called under the lock
  mutable std::mutex mutex_;
  BackendList::Entries entries_;
  std::map<Query, Entry> answers_;
  std::uint64_t generation_ = 0;
};

}  // namespace clattn::detail
