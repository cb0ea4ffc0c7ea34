#include <clattn/context.hpp>

#include "opencl/runtime.hpp"

namespace clattn {

Context::Context(std::unique_ptr<detail::Runtime> runtime) : runtime_(std::move(runtime)) {}
Context::~Context() = default;

std::shared_ptr<Context> Context::create(std::string_view selector) {
  return create(select_device(selector));
}

std::shared_ptr<Context> Context::create(const Device& device) {
  return std::shared_ptr<Context>(new Context(detail::Runtime::create(device)));
}

std::shared_ptr<Context> Context::adopt(cl_context context, cl_device_id device) {
  return std::shared_ptr<Context>(new Context(detail::Runtime::adopt(context, device)));
}

cl_context Context::handle() const noexcept {
  return runtime_->context();
}
cl_device_id Context::device() const noexcept {
  return runtime_->device();
}
const DeviceCapabilities& Context::capabilities() const noexcept {
  return runtime_->capabilities();
}
std::vector<std::string> Context::build_failures() const {
  return runtime_->build_failures();
}
std::string Context::program_cache_problem() const {
  return runtime_->program_cache_problem();
}

Queue Context::create_queue(QueueProfiling profiling) const {
  return runtime_->create_queue(profiling);
}
Buffer Context::allocate(std::size_t size_bytes) const {
  return runtime_->allocate(size_bytes);
}
Buffer Context::share(std::span<std::byte> memory) const {
  return runtime_->share(memory);
}

}  // namespace clattn
