#include "driver/commands.hpp"

#include <algorithm>
#include <chrono>

namespace amdemu {

std::mutex order;
std::condition_variable order_changed;
std::vector<cl_command_queue> queues;

namespace {

bool is_open(cl_event event) {
  return event->status > CL_COMPLETE;
}
bool has_failed(cl_event event) {
  return event->status < 0;
}
constexpr cl_int kWaitFailed = CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST;

cl_event make_event(cl_command_queue queue, cl_command_type type, cl_ulong begin, cl_int status) {
  auto* event = new _cl_event;
  event->context = queue->context, event->queue = queue, event->type = type;
  event->begin = begin, event->end = now(), event->status = status;
  RetainCommandQueue(queue);
  return event;
}

/// A queue whose first command need not wait any more; the lock is held.
cl_command_queue next_ready() {
  for (cl_command_queue queue : queues) {
    if (queue->busy || queue->pending.empty()) continue;
    if (std::ranges::none_of(queue->pending.front().waits, is_open)) return queue;
  }
  return nullptr;
}

cl_int enqueue(cl_command_queue queue, cl_command_type type, bool blocking, const Events& events,
               std::function<cl_int()> work) {
  const std::vector<cl_event> waits(events.list, events.list + events.count);
  cl_event event = make_event(queue, type, now(), CL_QUEUED);
  for (cl_event each : waits) RetainEvent(each);
  queue->pending.push_back({waits, std::move(work), event});
  RetainEvent(event);  // one for this call
  order.unlock();
  run_pending();  // the queue may have become free meanwhile
  cl_int status = CL_SUCCESS;
  if (blocking) {
    std::unique_lock guard(order);
    order_changed.wait(guard, [&] { return !is_open(event); });
    status = event->status;
  }
  if (events.out != nullptr)
    *events.out = event;
  else
    ReleaseEvent(event);
  return status;
}

}  // namespace

cl_ulong now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<cl_ulong>(std::chrono::nanoseconds(time).count());
}

void end_event(cl_event event, cl_ulong begin, cl_int status) {
  std::vector<_cl_event::Callback> calls;
  {
    const std::lock_guard guard(order);
    event->status = status, event->end = now();
    if (begin != 0) event->begin = begin;
    calls.swap(event->callbacks);
  }
  order_changed.notify_all();
  for (const auto& each : calls) each.call(event, status < 0 ? status : each.at, each.user);
}

void run_pending() {
  std::unique_lock guard(order);
  while (cl_command_queue queue = next_ready()) {
    Pending command = std::move(queue->pending.front());
    queue->pending.pop_front();
    const bool failed = std::ranges::any_of(command.waits, has_failed);
    queue->busy = true;
    guard.unlock();
    const cl_ulong begin = now();
    const cl_int status = failed ? kWaitFailed : command.work();
    command.work = nullptr;
    guard.lock();
    queue->busy = false;
    guard.unlock();
    end_event(command.event, begin, status);
    for (cl_event event : command.waits) ReleaseEvent(event);
    ReleaseEvent(command.event);  // and perhaps the queue with it
    guard.lock();
  }
}

cl_int command(cl_command_queue queue, cl_command_type type, bool blocking, const Events& events,
               std::function<cl_int()> work) {
  if (queue == nullptr) return CL_INVALID_COMMAND_QUEUE;
  if ((events.count == 0) != (events.list == nullptr)) return CL_INVALID_EVENT_WAIT_LIST;
  const cl_event* const end = events.list + events.count;
  if (std::find(events.list, end, nullptr) != end) return CL_INVALID_EVENT_WAIT_LIST;
  std::unique_lock guard(order);
  if (queue->busy || !queue->pending.empty() || std::any_of(events.list, end, is_open)) {
    guard.release();  // enqueue unlocks
    return enqueue(queue, type, blocking, events, std::move(work));
  }
  const bool failed = std::any_of(events.list, end, has_failed);
  if (failed && blocking) return kWaitFailed;
  queue->busy = true;
  guard.unlock();
  const cl_ulong begin = now();
  const cl_int status = failed ? kWaitFailed : work();
  guard.lock();
  queue->busy = false;
  guard.unlock();
  order_changed.notify_all();
  if (events.out != nullptr && (status == CL_SUCCESS || failed))
    *events.out = make_event(queue, type, begin, status);
  run_pending();  // what other threads enqueued meanwhile
  return failed ? CL_SUCCESS : status;
}

Keep::Keep(std::vector<cl_mem> memory) : memory_(std::move(memory)) {
  for (cl_mem each : memory_) RetainMemObject(each);
}
Keep::~Keep() {
  for (cl_mem each : memory_) ReleaseMemObject(each);
}

}  // namespace amdemu
