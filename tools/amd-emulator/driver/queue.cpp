// Command queues, and the commands that do nothing but take their turn.
#include "driver/answers.hpp"
#include "driver/commands.hpp"

namespace amdemu {

cl_command_queue CL_API_CALL CreateCommandQueue(cl_context context, cl_device_id device,
                                                cl_command_queue_properties properties,
                                                cl_int* status) {
  if (context == nullptr) return fail(CL_INVALID_CONTEXT, status);
  if (device == nullptr) return fail(CL_INVALID_DEVICE, status);
  auto* queue = new _cl_command_queue;
  queue->context = context, queue->device = device, queue->properties = properties;
  RetainContext(context);
  const std::lock_guard guard(order);
  queues.push_back(queue);
  return done(queue, status);
}
cl_command_queue CL_API_CALL CreateCommandQueueWithProperties(cl_context context,
                                                              cl_device_id device,
                                                              const cl_queue_properties* list,
                                                              cl_int* status) {
  cl_command_queue_properties properties = 0;
  for (; list != nullptr && *list != 0; list += 2) {
    if (list[0] == CL_QUEUE_PROPERTIES) properties = list[1];
  }
  return CreateCommandQueue(context, device, properties, status);
}
cl_int CL_API_CALL RetainCommandQueue(cl_command_queue queue) {
  return retain(queue, CL_INVALID_COMMAND_QUEUE);
}
cl_int CL_API_CALL ReleaseCommandQueue(cl_command_queue queue) {
  if (queue == nullptr) return CL_INVALID_COMMAND_QUEUE;
  if (!drop(*queue)) return CL_SUCCESS;
  {
    const std::lock_guard guard(order);
    std::erase(queues, queue);
  }
  ReleaseContext(queue->context);
  delete queue;
  return CL_SUCCESS;
}
cl_int CL_API_CALL GetCommandQueueInfo(cl_command_queue queue, cl_command_queue_info what,
                                       std::size_t given, void* value, std::size_t* needed) {
  if (queue == nullptr) return CL_INVALID_COMMAND_QUEUE;
  const Query answer{given, value, needed};
  switch (what) {
    case CL_QUEUE_CONTEXT:
      return answer.is(queue->context);
    case CL_QUEUE_DEVICE:
      return answer.is(queue->device);
    case CL_QUEUE_REFERENCE_COUNT:
      return answer.is<cl_uint>(queue->references);
    case CL_QUEUE_PROPERTIES:
      return answer.is(queue->properties);
    default:
      return CL_INVALID_VALUE;
  }
}
cl_int CL_API_CALL Flush(cl_command_queue queue) {
  return queue == nullptr ? CL_INVALID_COMMAND_QUEUE : CL_SUCCESS;
}
cl_int CL_API_CALL Finish(cl_command_queue queue) {
  if (queue == nullptr) return CL_INVALID_COMMAND_QUEUE;
  std::unique_lock guard(order);
  order_changed.wait(guard, [queue] { return queue->pending.empty() && !queue->busy; });
  return CL_SUCCESS;
}

namespace {
cl_int take_turn(cl_command_queue queue, cl_command_type type, const Events& events) {
  return command(queue, type, false, events, [] { return CL_SUCCESS; });
}
}  // namespace

cl_int CL_API_CALL EnqueueMigrateMemObjects(cl_command_queue queue, cl_uint, const cl_mem*,
                                            cl_mem_migration_flags, cl_uint count,
                                            const cl_event* list, cl_event* event) {
  return take_turn(queue, CL_COMMAND_MIGRATE_MEM_OBJECTS, {count, list, event});
}
cl_int CL_API_CALL EnqueueMarkerWithWaitList(cl_command_queue queue, cl_uint count,
                                             const cl_event* list, cl_event* event) {
  return take_turn(queue, CL_COMMAND_MARKER, {count, list, event});
}
cl_int CL_API_CALL EnqueueBarrierWithWaitList(cl_command_queue queue, cl_uint count,
                                              const cl_event* list, cl_event* event) {
  return take_turn(queue, CL_COMMAND_BARRIER, {count, list, event});
}
cl_int CL_API_CALL EnqueueMarker(cl_command_queue queue, cl_event* event) {
  return EnqueueMarkerWithWaitList(queue, 0, nullptr, event);
}
cl_int CL_API_CALL EnqueueBarrier(cl_command_queue queue) {
  return EnqueueBarrierWithWaitList(queue, 0, nullptr, nullptr);
}
cl_int CL_API_CALL EnqueueWaitForEvents(cl_command_queue queue, cl_uint count,
                                        const cl_event* list) {
  return EnqueueBarrierWithWaitList(queue, count, list, nullptr);
}

}  // namespace amdemu
