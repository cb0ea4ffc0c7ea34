#include "attention.hpp"

#include <algorithm>

namespace clattn::python {

namespace {

/// Rows of an array or list, without making a tensor of it once more. nullopt: device memory, which
/// does not say where a tensor ends, or nothing.
std::optional<std::int64_t> rows_of(nb::handle tensor) {
  if (!tensor.is_valid() || tensor.is_none()) return std::nullopt;
  if (nb::isinstance<Buffer>(tensor) || nb::isinstance<Tensor>(tensor)) return std::nullopt;
  if (nb::isinstance<nb::list>(tensor)) return static_cast<std::int64_t>(nb::len(tensor));
  if (nb::hasattr(tensor, "shape")) return nb::cast<std::int64_t>(tensor.attr("shape")[0]);
  const HostArray array = host_array(tensor, "tensor");
  return static_cast<std::int64_t>(array.shape(0));
}

/// A message of our own where the library could only speak of the buffer's bytes.
void check_rows(nb::handle tensor, std::int64_t rows, const char* name) {
  const std::optional<std::int64_t> given = rows_of(tensor);
  if (!given || *given >= rows) return;
  throw_invalid(std::string(name) + ": " + std::to_string(*given) + " rows, legal: at least " +
                std::to_string(rows) + ", those of the step's tokens");
}

void bind_reports(nb::module_& module) {
  nb::class_<Candidate>(module, "Candidate", "A backend or kernel that was considered.")
      .def_ro("role", &Candidate::role)
      .def_ro("name", &Candidate::name)
      .def_ro("chosen", &Candidate::chosen)
      .def_ro("reason", &Candidate::reason, "Why it was not chosen.");
  module.def(
      "format_candidates",
      [](const std::vector<Candidate>& candidates) { return to_string(candidates); },
      "candidates"_a, "A line for each, in columns.");
  nb::class_<KernelInfo>(module, "KernelInfo", "A kernel that a layer launches.")
      .def_ro("name", &KernelInfo::name)
      .def_ro("role", &KernelInfo::role)
      .def_ro("work_group_size", &KernelInfo::work_group_size)
      .def_ro("block_rows", &KernelInfo::block_rows)
      .def_ro("block_kv", &KernelInfo::block_kv)
      .def_ro("rounds_probabilities", &KernelInfo::rounds_probabilities)
      .def_ro("concurrent_groups", &KernelInfo::concurrent_groups)
      .def_ro("few_rows", &KernelInfo::few_rows);
  nb::class_<LaunchRecord>(module, "LaunchRecord", "A launch of a forward().")
      .def_prop_ro("kernel", [](const LaunchRecord& self) { return std::string(self.kernel); })
      .def_ro("tasks", &LaunchRecord::tasks)
      .def_ro("work_groups", &LaunchRecord::work_groups)
      .def_ro("work_group_size", &LaunchRecord::work_group_size)
      .def_ro("rounds_probabilities", &LaunchRecord::rounds_probabilities)
      .def_ro("multiplies_fp8", &LaunchRecord::multiplies_fp8)
      .def_ro("event", &LaunchRecord::event)
      .def_ro("beside_last", &LaunchRecord::beside_last);
}

Event forward(const Impl& self, const Queue& queue, nb::handle query, nb::handle output,
              const KVCache& cache, const AttentionMetadata& metadata, nb::handle key,
              nb::handle value, nb::handle lse, nb::handle custom_mask, nb::handle output_fp8,
              nb::handle output_scale, nb::handle launches) {
  return forward_with(
      *self.context, queue, self.impl->config(), &metadata,
      {query, key, value, output, lse, custom_mask, output_fp8, output_scale, launches},
      [&](const AttentionTensors& tensors, const ForwardOptions& options) {
        self.impl->forward(queue, tensors, cache, metadata, options);
      });
}

Event forward_encoder(const Impl& self, const Queue& queue, nb::handle query, nb::handle key,
                      nb::handle value, nb::handle output, const AttentionMetadata& metadata,
                      nb::handle lse, nb::handle custom_mask, nb::handle output_fp8,
                      nb::handle output_scale, nb::handle launches) {
  return forward_with(
      *self.context, queue, self.impl->config(), &metadata,
      {query, key, value, output, lse, custom_mask, output_fp8, output_scale, launches},
      [&](const AttentionTensors& tensors, const ForwardOptions& options) {
        self.impl->forward_encoder(queue, tensors, metadata, options);
      });
}

void bind_constants(nb::module_& module) {
  module.attr("MAX_WORKSPACE_BYTES") = kMaxWorkspaceBytes;
  module.attr("MOST_DECODE_ROWS") = kMostDecodeRows;
  nb::list families;
  for (const KernelFamily family : kKernelFamilies) families.append(std::string(to_string(family)));
  module.attr("KERNEL_FAMILIES") = nb::tuple(families);
}

void bind_impl(nb::module_& module) {
  nb::class_<Impl>(
      module, "AttentionImpl",
      "A layer's configuration, compiled. Immutable and thread-safe.\n\n"
      "Tensors are NumPy or DLPack arrays of the host, Buffers or Tensors. With arrays\n"
      "a call returns when its work is done; with device memory alone it returns after\n"
      "enqueueing, and the event says when it is done.")
      .def_prop_ro(
          "config", [](const Impl& self) -> const AttentionConfig& { return self.impl->config(); },
          nb::rv_policy::reference_internal)
      .def(
          "write_kv_cache",
          [](const Impl& self, const Queue& queue, nb::handle key, nb::handle value,
             const KVCache& cache, const AttentionMetadata& metadata) {
            const auto& config = self.impl->config();
            const Widths widths = widths_of(config);
            CallTensors tensors(*self.context, queue);
            const TensorRef keys = tensors.input(key, config.dtype, widths.key, "key");
            const TensorRef values = tensors.input(value, config.dtype, widths.value, "value");
            return tensors.run([&](Event* event) {
              self.impl->write_kv_cache(queue, keys, values, cache, metadata, event);
            });
          },
          "queue"_a, "key"_a.none(), "value"_a.none(), "cache"_a, "metadata"_a,
          "Stores the step's keys and values [num_actual_tokens, num_kv_heads, head_size] at the\n"
          "metadata's slots.")
      .def("forward", &forward, "queue"_a, "query"_a, "output"_a, "cache"_a, "metadata"_a,
           nb::kw_only(), "key"_a = nb::none(), "value"_a = nb::none(), "lse"_a = nb::none(),
           "custom_mask"_a = nb::none(), "output_fp8"_a = nb::none(), "output_scale"_a = nb::none(),
           "launches"_a = nb::none(),
           "output[t, h] = attention of query token t over its request's pages, both\n"
           "[num_actual_tokens, num_heads, head_size]. lse [num_actual_tokens, num_heads], f32:\n"
           "natural logarithms of the softmax denominators. custom_mask: uint8 or bool\n"
           "[num_actual_tokens, keys]. key and value, if given, are stored first, as by\n"
           "write_kv_cache; with host arrays this waits once, where two calls wait twice.\n"
           "output_fp8: uint8 of the output's shape, which gets e4m3 of output / output_scale, a\n"
           "number or f32 [1]; both are needed where the configuration says output_fp8. launches:\n"
           "a list that gets a LaunchRecord for each kernel.")
      .def("forward_encoder", &forward_encoder, "queue"_a, "query"_a, "key"_a, "value"_a,
           "output"_a, "metadata"_a, nb::kw_only(), "lse"_a = nb::none(),
           "custom_mask"_a = nb::none(), "output_fp8"_a = nb::none(), "output_scale"_a = nb::none(),
           "launches"_a = nb::none(),
           "For encoder types and cross attention without pages: attends to the given keys\n"
           "directly. Arguments as forward()'s.")
      .def(
          "warm_up",
          [](const Impl& self, const Queue& queue) {
            without_gil([&] { self.impl->warm_up(queue); });
          },
          "queue"_a,
          "Runs every kernel once over nothing, so that no request waits for a compiler.")
      .def("kernels", [](const Impl& self) { return self.impl->kernels(); })
      .def(
          "candidates", [](const Impl& self) { return self.impl->candidates(); },
          "Every kernel that was considered, and why it was not chosen.");
}

}  // namespace

Widths widths_of(const AttentionConfig& config) {
  const std::int64_t heads = config.num_heads, kv_heads = config.num_kv_heads;
  const std::int64_t output_size = config.output_head_size();
  Widths widths{.query = heads * config.head_size, .output = heads * output_size};
  widths.key = config.use_mla ? output_size : kv_heads * config.head_size;
  widths.value = config.use_mla ? config.rope_dim : kv_heads * output_size;
  return widths;
}

Event forward_with(const Context& context, const Queue& queue, const AttentionConfig& config,
                   const AttentionMetadata* metadata, const ForwardArguments& given,
                   const std::function<void(const AttentionTensors&, ForwardOptions)>& call) {
  const Widths widths = widths_of(config);
  CallTensors taken(context, queue);
  AttentionTensors tensors;
  tensors.query = taken.input(given.query, config.dtype, widths.query, "query");
  tensors.key = taken.input(given.key, config.dtype, widths.key, "key");
  tensors.value = taken.input(given.value, config.dtype, widths.value, "value");
  tensors.output = taken.output(given.output, config.dtype, widths.output, "output");
  tensors.lse = taken.dense_output(given.lse, DType::kF32, config.num_heads, "lse").buffer;
  const std::int64_t rows = metadata == nullptr
                                ? std::min<std::int64_t>(1, rows_of(given.query).value_or(0))
                                : metadata->num_actual_tokens();
  check_rows(given.query, rows, "query");
  check_rows(given.output, rows, "output");
  check_rows(given.lse, rows, "lse");
  check_rows(given.output_fp8, rows, "output_fp8");
  ForwardOptions options;
  const TensorRef mask = taken.mask(given.custom_mask);
  options.custom_mask = mask.buffer;
  options.custom_mask_stride = mask.token_stride;
  options.output_fp8 =
      taken.dense_output(given.output_fp8, DType::kFp8E4M3, widths.output, "output_fp8").buffer;
  options.output_scale = taken.scalar(given.output_scale, "output_scale").handle();
  options.num_rows = given.num_rows.value_or(rows_of(given.output).value_or(0));
  std::vector<LaunchRecord> launches;
  const bool wanted = given.launches.is_valid() && !given.launches.is_none();
  if (wanted) options.launches = &launches;
  Event event = taken.run([&](Event* done) {
    options.event = done;
    call(tensors, options);
  });
  if (wanted) {
    auto records = nb::cast<nb::list>(given.launches);
    for (const LaunchRecord& launch : launches) records.append(launch);
  }
  return event;
}

void bind_attention(nb::module_& module) {
  bind_reports(module);
  bind_constants(module);
  bind_impl(module);
}

}  // namespace clattn::python
