#include <clattn/plugin.hpp>
#include <clattn/registry.hpp>
#include <clattn/tuning.hpp>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

struct ClattnPlugin : Holds<BackendPlugin, "plugin"> {};
CLATTN_DESTROYS(clattn_plugin_destroy, ClattnPlugin)

namespace {

/// Lines of a tuning file, with or without its first one; none may be wrong.
TuningText rows_of(const char* rows, const char* name) {
  const std::string first = format_tuning({});
  std::string text = &deref(rows, name);
  if (!text.starts_with(first)) text.insert(0, first);
  if (!text.ends_with('\n')) text += '\n';
  TuningText read = parse_tuning(text, name);
  if (!read.problems.empty()) detail::throw_invalid("{}", read.problems.front());
  return read;
}

}  // namespace

ClattnResult clattn_list_attn_backends(char* text, size_t capacity, size_t* size) {
  return give_text(text, capacity, size, [] {
    std::string all;
    for (const auto& backend : list_attn_backends()) all += std::string(backend->name()) + '\n';
    return all;
  });
}

ClattnResult clattn_unregister_backend(const char* name) {
  return guarded([&] { unregister_backend(&deref(name, "name")); });
}

ClattnResult clattn_plugin_load(const char* path, int32_t position, ClattnPlugin** plugin) {
  return make_handle(plugin, [&] {
    const std::string from = &deref(path, "path");
    detail::throw_invalid_if(position < -1, "position is {}, legal: >= -1", position);
    return load_backend_plugin(
        from, position == -1 ? kLowestPriority : static_cast<std::size_t>(position));
  });
}

ClattnResult clattn_tuning_path(char* text, size_t capacity, size_t* size) {
  return give_text(text, capacity, size, [] { return tuning_path(); });
}

ClattnResult clattn_set_tuning(ClattnContext* context, const char* rows) {
  return guarded([&] {
    Context& of = *held(context);
    const TuningText given = rows_of(rows, "rows");
    set_tuning(of, given.rows, given.costs);
  });
}

ClattnResult clattn_save_tuning(const char* path, const char* rows) {
  return guarded([&] {
    const std::string to = &deref(path, "path");
    const TuningText given = rows_of(rows, "rows");
    save_tuning(to, given.rows, given.costs);
  });
}

ClattnResult clattn_tuning_candidates(const ClattnContext* context, const char* key, char* text,
                                      size_t capacity, size_t* size) {
  return give_text(text, capacity, size, [&] {
    const Context& of = *held(context);
    const TuningText given = rows_of(key, "key");
    detail::throw_invalid_if(given.rows.size() != 1 || !given.costs.empty(),
                             "key: {} rows of kernels and {} of costs, legal: one of a kernel",
                             given.rows.size(), given.costs.size());
    std::string all;
    for (const TuningRow& row : tuning_candidates(of, given.rows[0])) all += format_tuning_row(row);
    return all;
  });
}

ClattnResult clattn_device_classes(const ClattnContext* context, char* text, size_t capacity,
                                   size_t* size) {
  return give_text(text, capacity, size,
                   [&] { return lines(device_classes(held(context)->capabilities())); });
}
