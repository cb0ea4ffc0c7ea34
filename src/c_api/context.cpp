#include <clattn/device.hpp>

#include "c_api/handles.hpp"

using namespace clattn;         // NOLINT(google-build-using-namespace): the C API of it
using namespace clattn::c_api;  // NOLINT(google-build-using-namespace)

ClattnResult clattn_device_count(size_t* count) {
  return guarded([&] { deref(count, "count") = list_devices().size(); });
}

ClattnResult clattn_device_at(size_t index, ClattnDeviceId* device) {
  return guarded([&] {
    const std::vector<Device> devices = list_devices();
    detail::throw_invalid_if(index >= devices.size(), "index is {}, legal: < {} devices", index,
                             devices.size());
    const Device& found = devices[index];
    fill(device, {0, found.platform_index, found.device_index, found.platform, found.id}, "device");
  });
}

ClattnResult clattn_context_create(const char* selector, ClattnContext** context) {
  return make_handle(context, "context",
                     [&] { return ClattnContext{Context::create(text_or(selector, ""))}; });
}

ClattnResult clattn_context_adopt(cl_context handle, cl_device_id device, ClattnContext** context) {
  return make_handle(context, "context", [&] {
    return ClattnContext{Context::adopt(&deref(handle, "handle"), &deref(device, "device"))};
  });
}

void clattn_context_destroy(ClattnContext* context) {
  delete context;
}

ClattnResult clattn_context_info(const ClattnContext* context, ClattnContextInfo* info) {
  return guarded([&] {
    const Context& of = *deref(context, "context").context;
    const DeviceCapabilities& device = of.capabilities();
    fill(info,
         {.struct_size = 0,
          .compute_units = device.compute_units,
          .context = of.handle(),
          .device = of.device(),
          .name = device.name.c_str(),
          .vendor = device.vendor.c_str(),
          .driver_version = device.driver_version.c_str(),
          .kind = to_string(device.kind).data(),
          .global_mem_bytes = device.global_mem_bytes,
          .max_alloc_bytes = device.max_alloc_bytes},
         "info");
  });
}

ClattnResult clattn_queue_create(const ClattnContext* context, int32_t profiling,
                                 ClattnQueue** queue) {
  return make_handle(queue, "queue", [&] {
    return ClattnQueue{
        deref(context, "context")
            .context->create_queue(profiling != 0 ? QueueProfiling::kOn : QueueProfiling::kOff)};
  });
}

ClattnResult clattn_queue_adopt(cl_command_queue handle, ClattnQueue** queue) {
  return make_handle(queue, "queue",
                     [&] { return ClattnQueue{Queue::adopt(&deref(handle, "handle"))}; });
}

void clattn_queue_destroy(ClattnQueue* queue) {
  delete queue;
}

ClattnResult clattn_queue_handle(const ClattnQueue* queue, cl_command_queue* handle) {
  return guarded([&] { deref(handle, "handle") = deref(queue, "queue").queue; });
}

ClattnResult clattn_queue_flush(const ClattnQueue* queue) {
  return guarded([&] { deref(queue, "queue").queue.flush(); });
}

ClattnResult clattn_queue_finish(const ClattnQueue* queue) {
  return guarded([&] { deref(queue, "queue").queue.finish(); });
}

ClattnResult clattn_buffer_create(const ClattnContext* context, size_t size_bytes,
                                  ClattnBuffer** buffer) {
  return make_handle(buffer, "buffer", [&] {
    return ClattnBuffer{deref(context, "context").context->allocate(size_bytes)};
  });
}

ClattnResult clattn_buffer_adopt(cl_mem handle, ClattnBuffer** buffer) {
  return make_handle(buffer, "buffer",
                     [&] { return ClattnBuffer{Buffer::adopt(&deref(handle, "handle"))}; });
}

void clattn_buffer_destroy(ClattnBuffer* buffer) {
  delete buffer;
}

ClattnResult clattn_buffer_handle(const ClattnBuffer* buffer, cl_mem* handle) {
  return guarded([&] { deref(handle, "handle") = deref(buffer, "buffer").buffer.handle(); });
}

ClattnResult clattn_buffer_size(const ClattnBuffer* buffer, size_t* size_bytes) {
  return guarded(
      [&] { deref(size_bytes, "size_bytes") = deref(buffer, "buffer").buffer.size_bytes(); });
}

ClattnResult clattn_buffer_write(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                 size_t offset_bytes, const void* source, size_t size_bytes) {
  return guarded([&] {
    const auto bytes = elements(static_cast<const std::byte*>(source), size_bytes, "source");
    deref(queue, "queue").queue.write(deref(buffer, "buffer").buffer, bytes, offset_bytes);
  });
}

ClattnResult clattn_buffer_read(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                size_t offset_bytes, void* destination, size_t size_bytes) {
  return guarded([&] {
    const auto bytes = elements(static_cast<std::byte*>(destination), size_bytes, "destination");
    deref(queue, "queue").queue.read(deref(buffer, "buffer").buffer, bytes, offset_bytes);
  });
}

ClattnResult clattn_event_create(ClattnEvent** event) {
  return make_handle(event, "event", [] { return ClattnEvent{}; });
}

void clattn_event_destroy(ClattnEvent* event) {
  delete event;
}

ClattnResult clattn_event_handle(const ClattnEvent* event, cl_event* handle) {
  return guarded([&] { deref(handle, "handle") = deref(event, "event").event.handle(); });
}

ClattnResult clattn_event_wait(const ClattnEvent* event) {
  return guarded([&] { deref(event, "event").event.wait(); });
}

ClattnResult clattn_event_duration_ns(const ClattnEvent* event, uint64_t* duration_ns) {
  return guarded(
      [&] { deref(duration_ns, "duration_ns") = deref(event, "event").event.duration_ns(); });
}
