#include <clattn/cache_ops.hpp>
#include <clattn/device.hpp>
#include <clattn/tuning.hpp>
#include <variant>

#include "base/names.hpp"
#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

CLATTN_DESTROYS(clattn_context_destroy, ClattnContext)
CLATTN_DESTROYS(clattn_queue_destroy, ClattnQueue)
CLATTN_DESTROYS(clattn_buffer_destroy, ClattnBuffer)
CLATTN_DESTROYS(clattn_event_destroy, ClattnEvent)

struct ClattnHostMemory : Holds<std::variant<HostView, PinnedMemory>, "memory"> {};
CLATTN_DESTROYS(clattn_host_memory_destroy, ClattnHostMemory)

namespace {

void give_device(const Device& found, ClattnDeviceId* device) {
  fill(device, "device", {0, found.platform_index, found.device_index, found.platform, found.id});
}

HostAccess access_of(const char* name) {
  constexpr detail::Named<HostAccess> kNames[] = {{HostAccess::kRead, "read"},
                                                  {HostAccess::kWrite, "write"},
                                                  {HostAccess::kReadWrite, "read_write"}};
  return detail::parse_named(kNames, text_or(name, "read_write"), "access");
}

/// Memory for the host; `bytes` becomes its address.
template <typename Make>
ClattnResult make_host_memory(ClattnHostMemory** memory, void** bytes, const Make& make) {
  return make_handle(memory, [&] {
    void*& address = deref(bytes, "bytes");
    auto made = make();
    address = made.bytes().data();
    return made;
  });
}

}  // namespace

ClattnResult clattn_device_count(size_t* count) {
  return give(count, "count", [] { return list_devices().size(); });
}

ClattnResult clattn_device_at(size_t index, ClattnDeviceId* device) {
  return guarded([&] {
    const std::vector<Device> devices = list_devices();
    detail::throw_invalid_if(index >= devices.size(), "index is {}, legal: < {} devices", index,
                             devices.size());
    give_device(devices[index], device);
  });
}

ClattnResult clattn_select_device(const char* selector, ClattnDeviceId* device) {
  return guarded([&] { give_device(select_device(text_or(selector, "")), device); });
}

ClattnResult clattn_context_create(const char* selector, ClattnContext** context) {
  return make_handle(context, [&] { return Context::create(text_or(selector, "")); });
}

ClattnResult clattn_context_adopt(cl_context handle, cl_device_id device, ClattnContext** context) {
  return make_handle(
      context, [&] { return Context::adopt(&deref(handle, "handle"), &deref(device, "device")); });
}

ClattnResult clattn_context_info(const ClattnContext* context, ClattnContextInfo* info) {
  return guarded([&] {
    const Context& of = *held(context);
    const DeviceCapabilities& device = of.capabilities();
    fill(info, "info",
         {.struct_size = 0,
          .compute_units = device.compute_units,
          .context = of.handle(),
          .device = of.device(),
          .name = device.name.c_str(),
          .vendor = device.vendor.c_str(),
          .driver_version = device.driver_version.c_str(),
          .kind = to_string(device.kind).data(),
          .global_mem_bytes = device.global_mem_bytes,
          .max_alloc_bytes = device.max_alloc_bytes});
  });
}

ClattnResult clattn_context_problems(const ClattnContext* context, char* text, size_t capacity,
                                     size_t* size) {
  return give_text(text, capacity, size, [&] {
    const Context& of = *held(context);
    const std::string cache = of.program_cache_problem();
    return lines(of.build_failures()) + (cache.empty() ? "" : cache + '\n') +
           lines(tuning_problems(of));
  });
}

ClattnResult clattn_queue_create(const ClattnContext* context, int32_t profiling,
                                 ClattnQueue** queue) {
  return make_handle(queue, [&] {
    return held(context)->create_queue(profiling != 0 ? QueueProfiling::kOn : QueueProfiling::kOff);
  });
}

ClattnResult clattn_queue_adopt(cl_command_queue handle, ClattnQueue** queue) {
  return make_handle(queue, [&] { return Queue::adopt(&deref(handle, "handle")); });
}

ClattnResult clattn_queue_handle(const ClattnQueue* queue, cl_command_queue* handle) {
  return give(handle, "handle", [&]() -> cl_command_queue { return held(queue); });
}

ClattnResult clattn_queue_flush(const ClattnQueue* queue) {
  return guarded([&] { held(queue).flush(); });
}

ClattnResult clattn_queue_finish(const ClattnQueue* queue) {
  return guarded([&] { held(queue).finish(); });
}

ClattnResult clattn_buffer_create(const ClattnContext* context, size_t size_bytes,
                                  ClattnBuffer** buffer) {
  return make_handle(buffer, [&] { return held(context)->allocate(size_bytes); });
}

ClattnResult clattn_buffer_adopt(cl_mem handle, ClattnBuffer** buffer) {
  return make_handle(buffer, [&] { return Buffer::adopt(&deref(handle, "handle")); });
}

ClattnResult clattn_buffer_handle(const ClattnBuffer* buffer, cl_mem* handle) {
  return give(handle, "handle", [&] { return held(buffer).handle(); });
}

ClattnResult clattn_buffer_size(const ClattnBuffer* buffer, size_t* size_bytes) {
  return give(size_bytes, "size_bytes", [&] { return held(buffer).size_bytes(); });
}

ClattnResult clattn_buffer_write(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                 size_t offset_bytes, const void* source, size_t size_bytes) {
  return guarded([&] {
    const auto bytes = elements(static_cast<const std::byte*>(source), size_bytes, "source");
    held(queue).write(held(buffer), bytes, offset_bytes);
  });
}

ClattnResult clattn_buffer_read(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                size_t offset_bytes, void* destination, size_t size_bytes) {
  return guarded([&] {
    const auto bytes = elements(static_cast<std::byte*>(destination), size_bytes, "destination");
    held(queue).read(held(buffer), bytes, offset_bytes);
  });
}

ClattnResult clattn_buffer_share(const ClattnContext* context, void* memory, size_t size_bytes,
                                 ClattnBuffer** buffer) {
  return make_handle(buffer, [&] {
    return held(context)->share(elements(static_cast<std::byte*>(memory), size_bytes, "memory"));
  });
}

ClattnResult clattn_buffer_write_async(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                       size_t offset_bytes, const void* source, size_t size_bytes,
                                       ClattnEvent* event) {
  return guarded([&] {
    const auto bytes = elements(static_cast<const std::byte*>(source), size_bytes, "source");
    held(queue).write_async(held(buffer), bytes, offset_bytes, event_of(event));
  });
}

ClattnResult clattn_buffer_read_async(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                      size_t offset_bytes, void* destination, size_t size_bytes,
                                      ClattnEvent* event) {
  return guarded([&] {
    const auto bytes = elements(static_cast<std::byte*>(destination), size_bytes, "destination");
    held(queue).read_async(held(buffer), bytes, offset_bytes, event_of(event));
  });
}

ClattnResult clattn_buffer_fill(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                uint32_t pattern, size_t offset_bytes, size_t size_bytes) {
  return guarded([&] { held(queue).fill(held(buffer), pattern, offset_bytes, size_bytes); });
}

ClattnResult clattn_buffer_map(const ClattnBuffer* buffer, const ClattnQueue* queue,
                               const char* access, ClattnHostMemory** memory, void** bytes) {
  return make_host_memory(memory, bytes,
                          [&] { return held(queue).map(held(buffer), access_of(access)); });
}

ClattnResult clattn_pinned_memory_create(const ClattnContext* context, size_t size_bytes,
                                         ClattnHostMemory** memory, void** bytes) {
  return make_host_memory(memory, bytes, [&] { return PinnedMemory(*held(context), size_bytes); });
}

ClattnResult clattn_event_create(ClattnEvent** event) {
  return make_handle(event, [] { return Event(); });
}

ClattnResult clattn_event_handle(const ClattnEvent* event, cl_event* handle) {
  return give(handle, "handle", [&] { return held(event).handle(); });
}

ClattnResult clattn_event_wait(const ClattnEvent* event) {
  return guarded([&] { held(event).wait(); });
}

ClattnResult clattn_event_duration_ns(const ClattnEvent* event, uint64_t* duration_ns) {
  return give(duration_ns, "duration_ns", [&] { return held(event).duration_ns(); });
}
