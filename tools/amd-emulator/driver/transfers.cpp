// Commands that read, write, copy, fill and map ranges of buffers.
#include <bit>
#include <cstring>
#include <string>

#include "driver/answers.hpp"
#include "driver/commands.hpp"

namespace amdemu {
namespace {

bool inside(cl_mem memory, std::size_t offset, std::size_t size) {
  return offset <= memory->size && size <= memory->size - offset;
}

}  // namespace

cl_int CL_API_CALL EnqueueReadBuffer(cl_command_queue queue, cl_mem memory, cl_bool blocking,
                                     std::size_t offset, std::size_t size, void* to, cl_uint count,
                                     const cl_event* list, cl_event* event) {
  if (memory == nullptr) return CL_INVALID_MEM_OBJECT;
  if (!inside(memory, offset, size) || to == nullptr) return CL_INVALID_VALUE;
  return command(queue, CL_COMMAND_READ_BUFFER, blocking != CL_FALSE, {count, list, event},
                 [=, kept = keep({memory})] {
                   std::memmove(to, memory->data + offset, size);
                   return CL_SUCCESS;
                 });
}
cl_int CL_API_CALL EnqueueWriteBuffer(cl_command_queue queue, cl_mem memory, cl_bool blocking,
                                      std::size_t offset, std::size_t size, const void* from,
                                      cl_uint count, const cl_event* list, cl_event* event) {
  if (memory == nullptr) return CL_INVALID_MEM_OBJECT;
  if (!inside(memory, offset, size) || from == nullptr) return CL_INVALID_VALUE;
  return command(queue, CL_COMMAND_WRITE_BUFFER, blocking != CL_FALSE, {count, list, event},
                 [=, kept = keep({memory})] {
                   std::memmove(memory->data + offset, from, size);
                   return CL_SUCCESS;
                 });
}
cl_int CL_API_CALL EnqueueCopyBuffer(cl_command_queue queue, cl_mem from, cl_mem to,
                                     std::size_t from_offset, std::size_t to_offset,
                                     std::size_t size, cl_uint count, const cl_event* list,
                                     cl_event* event) {
  if (from == nullptr || to == nullptr) return CL_INVALID_MEM_OBJECT;
  if (size == 0 || !inside(from, from_offset, size) || !inside(to, to_offset, size))
    return CL_INVALID_VALUE;
  const unsigned char* a = from->data + from_offset;
  unsigned char* b = to->data + to_offset;
  if (a < b + size && b < a + size) return CL_MEM_COPY_OVERLAP;
  return command(queue, CL_COMMAND_COPY_BUFFER, false, {count, list, event},
                 [=, kept = keep({from, to})] {
                   std::memcpy(b, a, size);
                   return CL_SUCCESS;
                 });
}
cl_int CL_API_CALL EnqueueFillBuffer(cl_command_queue queue, cl_mem memory, const void* pattern,
                                     std::size_t pattern_size, std::size_t offset, std::size_t size,
                                     cl_uint count, const cl_event* list, cl_event* event) {
  if (memory == nullptr) return CL_INVALID_MEM_OBJECT;
  const bool has_pattern =
      pattern != nullptr && std::has_single_bit(pattern_size) && pattern_size <= 128;
  if (!has_pattern || !inside(memory, offset, size) || offset % pattern_size != 0 ||
      size % pattern_size != 0)
    return CL_INVALID_VALUE;
  std::string one(static_cast<const char*>(pattern), pattern_size);
  return command(queue, CL_COMMAND_FILL_BUFFER, false, {count, list, event},
                 [=, one = std::move(one), kept = keep({memory})] {
                   unsigned char* to = memory->data + offset;
                   for (std::size_t at = 0; at < size; at += one.size())
                     std::memcpy(to + at, one.data(), one.size());
                   return CL_SUCCESS;
                 });
}

void* CL_API_CALL EnqueueMapBuffer(cl_command_queue queue, cl_mem memory, cl_bool blocking,
                                   cl_map_flags, std::size_t offset, std::size_t size,
                                   cl_uint count, const cl_event* list, cl_event* event,
                                   cl_int* status) {
  if (memory == nullptr) return fail(CL_INVALID_MEM_OBJECT, status);
  if (!inside(memory, offset, size)) return fail(CL_INVALID_VALUE, status);
  const cl_int result =
      command(queue, CL_COMMAND_MAP_BUFFER, blocking != CL_FALSE, {count, list, event},
              [kept = keep({memory})] { return CL_SUCCESS; });
  if (result != CL_SUCCESS) return fail(result, status);
  ++memory->maps;
  return done(static_cast<void*>(memory->data + offset), status);
}
cl_int CL_API_CALL EnqueueUnmapMemObject(cl_command_queue queue, cl_mem memory, void* at,
                                         cl_uint count, const cl_event* list, cl_event* event) {
  if (memory == nullptr) return CL_INVALID_MEM_OBJECT;
  if (at < memory->data || at >= memory->data + memory->size || memory->maps == 0)
    return CL_INVALID_VALUE;
  return command(queue, CL_COMMAND_UNMAP_MEM_OBJECT, false, {count, list, event},
                 [memory, kept = keep({memory})] {
                   --memory->maps;
                   return CL_SUCCESS;
                 });
}

}  // namespace amdemu
