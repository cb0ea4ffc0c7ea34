// Commands run on the thread that enqueues them, at once, unless one must wait for a user event (or
// for what waits for one): then it is kept and runs on the thread that ends the wait. Queues are in
// order.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "driver/api.hpp"
#include "driver/objects.hpp"

namespace amdemu {

/// Guards the status and callbacks of all events and the pending commands of all queues.
extern std::mutex order;
extern std::condition_variable order_changed;
extern std::vector<cl_command_queue> queues;  // all that live

/// The event parameters of an enqueue call.
struct Events {
  cl_uint count;
  const cl_event* list;
  cl_event* out;
};
/// `work` must own what it needs, for it may run later. Answers what work does if it ran at once.
cl_int command(cl_command_queue queue, cl_command_type type, bool blocking, const Events& events,
               std::function<cl_int()> work);

/// Sets the status and calls whom that concerns. The lock is free before and after.
void end_event(cl_event event, cl_ulong begin, cl_int status);
/// Runs what no longer waits, of every queue.
void run_pending();

/// Memory objects, retained until the command that uses them has gone.
class Keep {
 public:
  explicit Keep(std::vector<cl_mem> memory);
  ~Keep();
  Keep(const Keep&) = delete;
  Keep& operator=(const Keep&) = delete;

 private:
  std::vector<cl_mem> memory_;
};
inline std::shared_ptr<Keep> keep(std::vector<cl_mem> memory) {
  return std::make_shared<Keep>(std::move(memory));
}

/// Nanoseconds.
cl_ulong now();

}  // namespace amdemu
