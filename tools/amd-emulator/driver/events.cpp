// Events of commands and of users.
#include <algorithm>

#include "driver/answers.hpp"
#include "driver/commands.hpp"

namespace amdemu {

cl_int CL_API_CALL WaitForEvents(cl_uint count, const cl_event* list) {
  if (count == 0 || list == nullptr) return CL_INVALID_VALUE;
  if (std::find(list, list + count, nullptr) != list + count) return CL_INVALID_EVENT;
  std::unique_lock guard(order);
  bool failed = false;
  for (cl_uint n = 0; n < count; ++n) {
    order_changed.wait(guard, [event = list[n]] { return event->status <= CL_COMPLETE; });
    failed = failed || list[n]->status < 0;
  }
  return failed ? CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST : CL_SUCCESS;
}
cl_int CL_API_CALL RetainEvent(cl_event event) {
  return retain(event, CL_INVALID_EVENT);
}
cl_int CL_API_CALL ReleaseEvent(cl_event event) {
  if (event == nullptr) return CL_INVALID_EVENT;
  if (!drop(*event)) return CL_SUCCESS;
  if (event->queue != nullptr)
    ReleaseCommandQueue(event->queue);
  else
    ReleaseContext(event->context);  // of a user's event
  delete event;
  return CL_SUCCESS;
}
cl_int CL_API_CALL GetEventInfo(cl_event event, cl_event_info what, std::size_t given, void* value,
                                std::size_t* needed) {
  if (event == nullptr) return CL_INVALID_EVENT;
  const Query answer{given, value, needed};
  const std::lock_guard guard(order);
  switch (what) {
    case CL_EVENT_COMMAND_QUEUE:
      return answer.is(event->queue);
    case CL_EVENT_CONTEXT:
      return answer.is(event->context);
    case CL_EVENT_COMMAND_TYPE:
      return answer.is(event->type);
    case CL_EVENT_COMMAND_EXECUTION_STATUS:
      return answer.is(event->status);
    case CL_EVENT_REFERENCE_COUNT:
      return answer.is<cl_uint>(event->references);
    default:
      return CL_INVALID_VALUE;
  }
}
cl_int CL_API_CALL GetEventProfilingInfo(cl_event event, cl_profiling_info what, std::size_t given,
                                         void* value, std::size_t* needed) {
  if (event == nullptr) return CL_INVALID_EVENT;
  const Query answer{given, value, needed};
  const std::lock_guard guard(order);
  const bool profiled =
      event->queue != nullptr && (event->queue->properties & CL_QUEUE_PROFILING_ENABLE) != 0;
  if (!profiled || event->status != CL_COMPLETE) return CL_PROFILING_INFO_NOT_AVAILABLE;
  switch (what) {
    case CL_PROFILING_COMMAND_QUEUED:
    case CL_PROFILING_COMMAND_SUBMIT:
    case CL_PROFILING_COMMAND_START:
      return answer.is(event->begin);
    case CL_PROFILING_COMMAND_END:
    case CL_PROFILING_COMMAND_COMPLETE:
      return answer.is(event->end);
    default:
      return CL_INVALID_VALUE;
  }
}
cl_int CL_API_CALL SetEventCallback(cl_event event, cl_int at,
                                    void(CL_CALLBACK* call)(cl_event, cl_int, void*), void* user) {
  if (event == nullptr) return CL_INVALID_EVENT;
  if (call == nullptr || at < CL_COMPLETE || at > CL_SUBMITTED) return CL_INVALID_VALUE;
  cl_int status = 0;
  {
    const std::lock_guard guard(order);
    status = event->status;
    if (status > at) event->callbacks.push_back({at, call, user});
  }
  if (status <= at) call(event, status < 0 ? status : at, user);
  return CL_SUCCESS;
}
cl_event CL_API_CALL CreateUserEvent(cl_context context, cl_int* status) {
  if (context == nullptr) return fail(CL_INVALID_CONTEXT, status);
  auto* event = new _cl_event;
  event->context = context, event->type = CL_COMMAND_USER, event->status = CL_SUBMITTED;
  RetainContext(context);
  return done(event, status);
}
cl_int CL_API_CALL SetUserEventStatus(cl_event event, cl_int status) {
  if (event == nullptr || event->type != CL_COMMAND_USER) return CL_INVALID_EVENT;
  if (status > CL_COMPLETE) return CL_INVALID_VALUE;
  {
    const std::lock_guard guard(order);
    if (event->status <= CL_COMPLETE) return CL_INVALID_OPERATION;
  }
  RetainEvent(event);
  end_event(event, 0, status);
  run_pending();
  ReleaseEvent(event);
  return CL_SUCCESS;
}

}  // namespace amdemu
