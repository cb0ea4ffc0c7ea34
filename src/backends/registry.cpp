#include "backends/registry.hpp"

#include <fmt/ranges.h>

#include <clattn/explain.hpp>
#include <clattn/plugin.hpp>
#include <map>
#include <mutex>

#include "base/environment.hpp"
#include "base/error.hpp"

namespace clattn {

namespace {

using detail::throw_invalid, detail::throw_invalid_if;

/// Entries that the process owns are never destroyed.
detail::RegistryEntry unowned(const AttentionBackend& backend) {
  return {&backend, [](const AttentionBackend*) {}};
}

/// The registered backends and the selector's remembered answers.
struct Registry {
  std::mutex mutex;  ///< of all that follows
  detail::RegistryEntries entries = {unowned(detail::flashinfer_backend()),
                                     unowned(detail::xformers_backend()),
                                     unowned(detail::mla_backend())};  // in priority order
  std::map<detail::RegistryQuery, detail::RegistryEntry> answers;
  std::uint64_t generation = 0;  ///< changes so far

  void changed() {
    ++generation;
    answers.clear();
  }
};

/// The process's, with the built-in backends; plugins of the environment are not loaded by this.
Registry& registry() {
  static auto& registry = *new Registry;  // never destroyed: neither are the plugins' libraries
  return registry;
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
  for (const std::string& path : detail::environment().plugins) {
    try {
      plugins.push_back(load_backend_plugin(path));
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("CLATTN_PLUGINS: {}", error.what()));
    }
  }
  loaded = new std::vector<BackendPlugin>(std::move(plugins));
}

}  // namespace

std::string detail::backend_names(const RegistryEntries& backends) {
  std::vector<std::string_view> names;
  for (const auto& backend : backends) names.push_back(backend->name());
  return fmt::format("{}", fmt::join(names, ", "));
}

void detail::remove_entry(const RegistryEntry& backend) noexcept {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  if (std::erase(all.entries, backend) > 0) all.changed();
}

detail::RegistryEntry detail::remembered_answer(const RegistryQuery& query,
                                                const std::function<RegistryEntry()>& choose) {
  Registry& all = registry();
  std::unique_lock lock(all.mutex);
  const auto known = all.answers.find(query);
  if (known != all.answers.end()) return known->second;
  const std::uint64_t generation = all.generation;
  lock.unlock();
  RegistryEntry chosen = choose();
  lock.lock();
  if (generation == all.generation) all.answers.emplace(query, chosen);
  return chosen;
}

std::vector<std::shared_ptr<const AttentionBackend>> list_attn_backends() {
  load_environment_plugins();
  const std::scoped_lock lock(registry().mutex);
  return registry().entries;
}

void register_backend(std::shared_ptr<const AttentionBackend> backend, std::size_t position) {
  if (backend == nullptr) throw_invalid("register_backend: null");
  const std::string_view name = backend->name();
  throw_invalid_if(
      name.empty() || name == "auto" || name == detail::kNoAttention,
      "register_backend: the name '{}' is reserved, legal: any but '', 'auto' and '{}'", name,
      detail::kNoAttention);
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  for (const auto& entry : all.entries) {
    throw_invalid_if(entry->name() == name,
                     "register_backend: a backend named '{}' is registered already", name);
  }
  const std::size_t last = all.entries.size();
  if (position == kLowestPriority) position = last;
  throw_invalid_if(position > last, "register_backend: position is {}, legal: 0 … {}", position,
                   last);
  all.entries.insert(all.entries.begin() + static_cast<std::ptrdiff_t>(position),
                     std::move(backend));
  all.changed();
}

std::shared_ptr<const AttentionBackend> unregister_backend(std::string_view name) {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  const auto found = std::ranges::find(all.entries, name, &AttentionBackend::name);
  throw_invalid_if(found == all.entries.end(),
                   "unregister_backend: no backend is named '{}'. Registered are: {}", name,
                   detail::backend_names(all.entries));
  auto removed = std::move(*found);
  all.entries.erase(found);
  all.changed();
  return removed;
}

void AttentionMetadata::throw_not_of(std::string_view wanted) const {
  throw_invalid("attn_metadata: made by {}, legal: metadata of {}",
                backend_.empty() ? "a builder of no backend" : backend_, wanted);
}

std::vector<Candidate> AttentionImpl::candidates() const {
  return {};
}

}  // namespace clattn
