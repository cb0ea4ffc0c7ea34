#include "backends/registry.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <clattn/plugin.hpp>
#include <clattn/registry.hpp>

#include "base/environment.hpp"
#include "base/error.hpp"

namespace clattn {

namespace detail {

namespace {

/// Entries that the process owns are never destroyed.
Registry::Entry unowned(const AttentionBackend& backend) {
  return {&backend, [](const AttentionBackend*) {}};
}

/// Loads the plugins of CLATTN_PLUGINS once, for the rest of the process; after an error nothing
/// stays loaded and the next call tries again.
void load_environment_plugins() {
  static std::mutex mutex;
  // Never destroyed: code that static destructors may still call must stay loaded.
  static const std::vector<BackendPlugin>* loaded = nullptr;
  const std::scoped_lock lock(mutex);
  if (loaded != nullptr) return;
  std::vector<BackendPlugin> plugins;
  for (const std::string& path : environment().plugins) {
    try {
      plugins.push_back(load_backend_plugin(path));
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("CLATTN_PLUGINS: {}", error.what()));
    }
  }
  loaded = new std::vector<BackendPlugin>(std::move(plugins));
}

}  // namespace

std::string backend_names(const BackendList& backends) {
  std::vector<std::string_view> names;
  for (const AttentionBackend* backend : backends) names.push_back(backend->name());
  return fmt::format("{}", fmt::join(names, ", "));
}

Registry& Registry::instance() {
  static auto& registry = *new Registry;  // never destroyed: neither are the plugins' libraries
  return registry;
}

Registry::Registry() {
  entries_ = {
#define CLATTN_BACKEND(function) unowned(function()),
#include "backends/backend_list.inc"
#undef CLATTN_BACKEND
  };
}

BackendList Registry::snapshot() const {
  const std::scoped_lock lock(mutex_);
  return BackendList(entries_);
}

void Registry::changed() {
  ++generation_;
  answers_.clear();
}

void Registry::add(Entry backend, std::size_t position) {
  if (backend == nullptr) throw_invalid("register_backend: null");
  const std::string_view name = backend->name();
  throw_invalid_if(
      name.empty() || name == "auto" || name == kNoAttention,
      "register_backend: the name '{}' is reserved, legal: any but '', 'auto' and '{}'", name,
      kNoAttention);
  const std::scoped_lock lock(mutex_);
  for (const Entry& entry : entries_) {
    throw_invalid_if(entry->name() == name,
                     "register_backend: a backend named '{}' is registered already", name);
  }
  if (position == kLowestPriority) position = entries_.size();
  throw_invalid_if(position > entries_.size(), "register_backend: position is {}, legal: 0 … {}",
                   position, entries_.size());
  entries_.insert(entries_.begin() + static_cast<std::ptrdiff_t>(position), std::move(backend));
  changed();
}

Registry::Entry Registry::remove(std::string_view name) {
  const std::scoped_lock lock(mutex_);
  const auto found =
      std::ranges::find_if(entries_, [&](const Entry& entry) { return entry->name() == name; });
  throw_invalid_if(found == entries_.end(),
                   "unregister_backend: no backend is named '{}'. Registered are: {}", name,
                   backend_names(BackendList(entries_)));
  Entry removed = std::move(*found);
  entries_.erase(found);
  changed();
  return removed;
}

void Registry::remove_entry(const Entry& backend) noexcept {
  const std::scoped_lock lock(mutex_);
  if (std::erase(entries_, backend) > 0) changed();
}

Registry::Entry Registry::recall(const Query& query, std::uint64_t& generation) const {
  const std::scoped_lock lock(mutex_);
  generation = generation_;
  const auto found = answers_.find(query);
  return found == answers_.end() ? nullptr : found->second;
}

void Registry::remember(const Query& query, const Entry& backend, std::uint64_t generation) {
  const std::scoped_lock lock(mutex_);
  if (generation == generation_) answers_.emplace(query, backend);
}

}  // namespace detail

BackendList::BackendList(Entries entries) : entries_(std::move(entries)) {
  pointers_.reserve(entries_.size());
  for (const auto& entry : entries_) pointers_.push_back(entry.get());
}

BackendList list_attn_backends() {
  detail::load_environment_plugins();
  return detail::Registry::instance().snapshot();
}

void register_backend(std::shared_ptr<const AttentionBackend> backend, std::size_t position) {
  detail::Registry::instance().add(std::move(backend), position);
}

std::shared_ptr<const AttentionBackend> unregister_backend(std::string_view name) {
  return detail::Registry::instance().remove(name);
}

}  // namespace clattn
