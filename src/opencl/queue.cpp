// clCreateCommandQueue is the one call that every platform has; the headers deprecate it after 1.2.
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <algorithm>
#include <array>
#include <utility>

#include "base/error.hpp"
#include "opencl/runtime.hpp"

namespace clattn {
namespace detail {
namespace {

void check_range(const Buffer& buffer, std::size_t offset, std::size_t size,
                 std::string_view what) {
  throw_invalid_if(offset > buffer.size_bytes() || size > buffer.size_bytes() - offset,
                   "{}: bytes {} to {} are not inside a buffer of {} bytes", what, offset,
                   offset + size, buffer.size_bytes());
}

/// `enqueue`: the driver's call, one for each direction.
template <typename Enqueue, typename Bytes>
void transfer(std::string_view what, std::string_view call, Enqueue enqueue, cl_command_queue queue,
              const Buffer& buffer, Bytes bytes, const Transfer& how) {
  NewEvent done(how.event);
  check_range(buffer, how.offset_bytes, bytes.size(), what);
  if (bytes.empty()) return;
  check(enqueue(queue, buffer.handle(), how.blocking, how.offset_bytes, bytes.size(), bytes.data(),
                0, nullptr, done.slot()),
        call);
}

void enqueue_read(cl_command_queue queue, const Buffer& buffer, std::span<std::byte> destination,
                  const Transfer& how) {
  transfer("read", "clEnqueueReadBuffer", clEnqueueReadBuffer, queue, buffer, destination, how);
}

bool is_out_of_order(cl_command_queue queue) {
  const auto properties = queue_value<cl_command_queue_properties>(queue, CL_QUEUE_PROPERTIES);
  return (properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE) != 0;
}

}  // namespace

Queue create_queue(cl_context context, cl_device_id device, QueueProfiling profiling) {
  const cl_command_queue_properties properties =
      profiling == QueueProfiling::kOn ? CL_QUEUE_PROFILING_ENABLE : 0;
  cl_int status = CL_SUCCESS;
  cl_command_queue queue = clCreateCommandQueue(context, device, properties, &status);
  check(status, "creating a command queue");
  return Queue::own(queue);
}

void enqueue_write(cl_command_queue queue, const Buffer& buffer, std::span<const std::byte> source,
                   const Transfer& how) {
  transfer("write", "clEnqueueWriteBuffer", clEnqueueWriteBuffer, queue, buffer, source, how);
}

void require_in_order(cl_command_queue queue) {
  if (is_out_of_order(queue))
    throw_invalid("queue: an out-of-order queue was given, legal: in-order queues");
}

void keep_order(cl_command_queue queue, const Event& event) {
  if (is_out_of_order(queue)) enqueue_wait(queue, event);
}

void enqueue_wait(cl_command_queue queue, const Event& event, Event* passed) {
  if (!event) return;
  const cl_event awaited = event.handle();
  cl_event reached = nullptr;
  check(clEnqueueBarrierWithWaitList(queue, 1, &awaited, passed == nullptr ? nullptr : &reached),
        "clEnqueueBarrierWithWaitList");
  if (passed != nullptr) passed->reset(reached);
}

void drain(cl_command_queue queue) noexcept {
  static_cast<void>(clFinish(queue));
}

Event flush_marked(cl_command_queue queue) {
  cl_event reached = nullptr;
  check(clEnqueueMarkerWithWaitList(queue, 0, nullptr, &reached), "clEnqueueMarkerWithWaitList");
  Event mark;
  mark.reset(reached);
  check(clFlush(queue), "clFlush");
  return mark;
}

}  // namespace detail

using detail::check;

Queue Queue::adopt(cl_command_queue queue) {
  if (queue == nullptr) detail::throw_invalid("queue: null");
  check(clRetainCommandQueue(queue), "clRetainCommandQueue");
  return own(queue);
}
Queue Queue::own(cl_command_queue queue) noexcept {
  Queue result;
  result.queue_ = queue;
  return result;
}

Queue::Queue(const Queue& other) : queue_(other.queue_) {
  if (queue_ != nullptr) check(clRetainCommandQueue(queue_), "clRetainCommandQueue");
}
Queue::Queue(Queue&& other) noexcept : queue_(std::exchange(other.queue_, nullptr)) {}
Queue& Queue::operator=(const Queue& other) {
  return *this = Queue(other);
}
Queue& Queue::operator=(Queue&& other) noexcept {
  std::swap(queue_, other.queue_);
  return *this;
}
Queue::~Queue() {
  if (queue_ != nullptr) clReleaseCommandQueue(queue_);
}

void Queue::flush() const {
  check(clFlush(queue_), "clFlush");
}
void Queue::finish() const {
  check(clFinish(queue_), "clFinish");
}

void Queue::write(const Buffer& destination, std::span<const std::byte> source,
                  std::size_t offset_bytes) const {
  detail::enqueue_write(queue_, destination, source, {offset_bytes, CL_TRUE});
}
void Queue::write_async(const Buffer& destination, std::span<const std::byte> source,
                        std::size_t offset_bytes, Event* event) const {
  detail::enqueue_write(queue_, destination, source, {offset_bytes, CL_FALSE, event});
}

void Queue::read(const Buffer& source, std::span<std::byte> destination,
                 std::size_t offset_bytes) const {
  detail::enqueue_read(queue_, source, destination, {offset_bytes, CL_TRUE});
}
void Queue::read_async(const Buffer& source, std::span<std::byte> destination,
                       std::size_t offset_bytes, Event* event) const {
  detail::enqueue_read(queue_, source, destination, {offset_bytes, CL_FALSE, event});
}

HostView Queue::map(const Buffer& buffer, HostAccess access) const {
  constexpr std::array<cl_map_flags, 3> kFlags = {CL_MAP_READ, CL_MAP_WRITE_INVALIDATE_REGION,
                                                  CL_MAP_READ | CL_MAP_WRITE};
  HostView view;
  view.queue_ = *this;
  view.buffer_ = buffer;
  if (buffer.size_bytes() == 0) return view;
  cl_int status = CL_SUCCESS;
  view.mapped_ = clEnqueueMapBuffer(queue_, buffer.handle(), CL_TRUE,
                                    kFlags.at(static_cast<std::size_t>(access)), 0,
                                    buffer.size_bytes(), 0, nullptr, nullptr, &status);
  check(status, "clEnqueueMapBuffer");
  return view;
}

HostView::HostView(HostView&& other) noexcept
    : queue_(std::move(other.queue_)),
      buffer_(std::move(other.buffer_)),
      mapped_(std::exchange(other.mapped_, nullptr)) {}
HostView& HostView::operator=(HostView&& other) noexcept {
  std::swap(queue_, other.queue_);
  std::swap(buffer_, other.buffer_);
  std::swap(mapped_, other.mapped_);
  return *this;
}
HostView::~HostView() {
  if (mapped_ != nullptr)
    clEnqueueUnmapMemObject(queue_, buffer_.handle(), mapped_, 0, nullptr, nullptr);
}

void Queue::fill(const Buffer& destination, std::uint32_t pattern, std::size_t offset_bytes,
                 std::size_t size_bytes) const {
  detail::throw_invalid_if(offset_bytes % sizeof(pattern) != 0 || size_bytes % sizeof(pattern) != 0,
                           "fill: offset {} and size {} must be multiples of {}", offset_bytes,
                           size_bytes, sizeof(pattern));
  detail::check_range(destination, offset_bytes, size_bytes, "fill");
  // In pieces: 8 GiB at once had not ended after 25 s on an H200 (driver 580.159); in pieces a
  // whole replay of two requests took 1.1 s.
  constexpr std::size_t kPiece = std::size_t{1} << 30;
  for (std::size_t done = 0; done < size_bytes; done += kPiece) {
    check(clEnqueueFillBuffer(queue_, destination.handle(), &pattern, sizeof(pattern),
                              offset_bytes + done, std::min(kPiece, size_bytes - done), 0, nullptr,
                              nullptr),
          "clEnqueueFillBuffer");
  }
}

}  // namespace clattn
