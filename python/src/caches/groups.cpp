// From a model's layers to their caches and a step's metadata (attn_utils.hpp).

#include <clattn/attn_utils.hpp>

#include "layer.hpp"
#include "steps.hpp"

namespace clattn::python {

namespace {

/// All groups of a model: C++ takes them as one span.
struct Groups {
  std::vector<AttentionGroup> groups;

  explicit Groups(std::vector<AttentionGroup> made) : groups(std::move(made)) {}
  Groups(Groups&&) = default;
  Groups(const Groups&) = delete;
};

using Caches = std::vector<const KVCache*>;

std::vector<KVCache> copies_of(const Caches& caches) {
  std::vector<KVCache> copies;
  for (const KVCache* cache : caches) copies.push_back(*cache);
  return copies;
}

void bind_group(nb::module_& module) {
  using G = AttentionGroup;
  nb::class_<G>(module, "AttentionGroup", "The layers of one KV cache group.")
      .def_ro("kv_cache_group_id", &G::kv_cache_group_id,
              "Index in KVCacheConfig.groups: whose pages it reads.")
      .def_prop_ro("backend", [](const G& self) { return self.backend; })
      .def_ro("config", &G::config)
      .def_prop_ro(
          "builder", [](const G& self) { return self.builder.get(); },
          nb::rv_policy::reference_internal)
      .def_ro("spec", &G::spec)
      .def_ro("layer_names", &G::layer_names);
  nb::class_<Groups>(module, "AttentionGroups", "What init_attn_backend() makes: a sequence.")
      .def("__len__", [](const Groups& self) { return self.groups.size(); })
      .def(
          "__getitem__",
          [](Groups& self, std::size_t index) -> G& {
            if (index >= self.groups.size()) throw nb::index_error();
            return self.groups[index];
          },
          "index"_a, nb::rv_policy::reference_internal);
}

nb::dict build_all(const Queue& queue, nb::handle owner, const Batch& common,
                   const std::vector<const Pages*>& pages) {
  const auto& groups = nb::cast<const Groups&>(owner).groups;
  std::vector<GroupPages> views;
  for (const Pages* each : pages) views.push_back(each->pages);
  const auto built =
      without_gil([&] { return build_attn_metadata(queue, groups, common.view(), views); });
  nb::dict metadata;
  for (const auto& [name, one] : built) {
    if (one == nullptr) continue;
    const nb::object object = nb::cast(one, nb::rv_policy::reference);
    keep_alive(object, owner);
    metadata[nb::cast(name)] = object;
  }
  return metadata;
}

}  // namespace

void bind_groups(nb::module_& module) {
  bind_group(module);
  module.def(
      "get_attn_cg_support",
      [](const Groups& groups) {
        const AttentionCGSupportInfo info = get_attn_cg_support(groups.groups);
        return std::pair(std::string(graph_support_name(info.min_cg_support)),
                         std::string(info.min_cg_attn_backend));
      },
      "groups"_a,
      "What all groups of init_attn_backend() can record (AttentionBackend.graph_support), and "
      "the\n"
      "backend that allows least.");
  module.def("extract_layer_index", &extract_layer_index, "layer_name"_a,
             "The one integer between the dots of a layer's name.");
  module.def("get_kv_cache_spec", &get_kv_cache_spec, "layers"_a,
             "A KVCacheSpec by name for each layer of the registry that owns a cache.");
  module.def(
      "init_attn_backend",
      [](const KVCacheConfig& config, const LayerRegistry& layers,
         const std::shared_ptr<Context>& context, const BuilderOptions& options) {
        return without_gil([&] {
          return std::unique_ptr<Groups>(
              new Groups(init_attn_backend(config, layers, context, options)));
        });
      },
      "config"_a, "layers"_a, "context"_a, "options"_a = BuilderOptions(),
      "An AttentionGroup with its builder for each group of the configuration.");
  module.def(
      "select_common_block_size",
      [](std::int32_t block_size,
         const std::vector<std::shared_ptr<const AttentionBackend>>& backends) {
        return select_common_block_size(block_size, backends);
      },
      "block_size"_a, "backends"_a,
      "The tokens of a kernel's page that all backends read and that divides block_size.");
  module.def(
      "bind_kv_cache",
      [](const nb::dict& kv_caches, nb::handle registry) {
        std::map<std::string, KVCache> caches;
        for (const auto& [name, cache] : kv_caches) {
          caches.emplace(nb::cast<std::string>(name), nb::cast<const KVCache&>(cache));
          keep_alive(registry, cache);  // its arrays
        }
        const auto& layers = nb::cast<const LayerRegistry&>(registry);
        return copies_of(without_gil([&] { return bind_kv_cache(caches, layers); }));
      },
      "kv_caches"_a, "layers"_a,
      nb::sig("def bind_kv_cache(kv_caches: dict[str, KVCache], layers: "
              "LayerRegistry) -> list[KVCache]"),
      "Binds each cache to the layer of that name; gives them in the order of the layers.");
  module.def(
      "init_kv_cache",
      [](const KVCacheConfig& config, const LayerRegistry& layers, const Groups& groups,
         const Context& context, const Queue& queue, std::optional<std::string_view> layout) {
        StatesByLayer states;
        const std::optional<KVCacheLayout> parsed =
            layout ? std::optional(parse_kv_cache_layout(*layout)) : std::nullopt;
        const Caches caches = without_gil([&] {
          return init_kv_cache(config, layers, groups.groups, context, queue, parsed, &states);
        });
        return std::pair(copies_of(caches), std::move(states));
      },
      "config"_a, "layers"_a, "groups"_a, "context"_a, "queue"_a, "layout"_a = nb::none(),
      "Allocates the caches and binds them. Gives them in the order of the layers, and the\n"
      "StateViews of mamba groups by layer name.");
  module.def("build_attn_metadata", &build_all, "queue"_a, "groups"_a, "common"_a, "pages"_a,
             nb::sig("def build_attn_metadata(queue: Queue, groups: AttentionGroups, common: "
                     "CommonAttentionMetadata, pages: Sequence[GroupPages]) -> dict[str, "
                     "AttentionMetadata]"),
             "A step's metadata by layer name, valid until the next call: pages, one a group.");
}

}  // namespace clattn::python
