#include "bindings.hpp"

NB_MODULE(_clattn, module) {
  using namespace clattn::python;
  module.doc() = "Paged attention for every OpenCL device: the compiled part.";
  module.attr("__version__") = clattn::version();
  bind_errors(module);
  bind_log(module);
  bind_devices(module);
  bind_context(module);
  bind_config(module);
  bind_cache(module);
  bind_steps(module);
  bind_batches(module);
  bind_derived_batches(module);
  bind_block_pool(module);
  bind_attention(module);
  bind_functions(module);
  bind_backends(module);
  bind_specs(module);
  bind_layer(module);
  bind_groups(module);
  bind_packed(module);
  bind_latent(module);
  bind_cache_ops(module);
  bind_device_steps(module);
  bind_prepare_qkv(module);
  bind_recurrent(module);
  bind_gdn_attn(module);
  bind_cascade(module);
  bind_graph(module);
  bind_session(module);
  bind_tuning(module);
}
