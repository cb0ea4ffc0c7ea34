#include "bindings.hpp"

NB_MODULE(_clattn, module) {
  using namespace clattn::python;
  module.doc() = "Paged attention for every OpenCL device: the compiled part.";
  bind_errors(module);
  bind_log(module);
  bind_devices(module);
  bind_context(module);
  bind_config(module);
  bind_cache(module);
  bind_steps(module);
  bind_attention(module);
  bind_layer(module);
  bind_cache_ops(module);
  bind_session(module);
}
