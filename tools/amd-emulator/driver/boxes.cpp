// Commands that move boxes: rows of a region that lie apart in memory.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "driver/commands.hpp"

namespace amdemu {
namespace {

/// One side of a move.
struct Side {
  std::size_t origin[3], row, slice;  // bytes from row to row, from slice to slice
  std::size_t at(std::size_t y, std::size_t z) const {
    return origin[0] + (origin[1] + y) * row + (origin[2] + z) * slice;
  }
};
/// A pitch of 0 stands for rows or slices without a gap.
Side make_side(const std::size_t* origin, const std::size_t* region, std::size_t row,
               std::size_t slice) {
  if (row == 0) row = region[0];
  if (slice == 0) slice = row * region[1];
  return {{origin[0], origin[1], origin[2]}, row, slice};
}

struct Box {
  Side from, to;
  std::size_t region[3];

  Box(Side a, Side b, const std::size_t* size) : from(a), to(b) { std::copy_n(size, 3, region); }
  bool fits(std::size_t from_size, std::size_t to_size) const {
    if (region[0] == 0 || region[1] == 0 || region[2] == 0) return false;
    const auto side_fits = [&](const Side& side, std::size_t size) {
      return side.row >= region[0] && side.at(region[1] - 1, region[2] - 1) + region[0] <= size;
    };
    return side_fits(from, from_size) && side_fits(to, to_size);
  }
  cl_int copy(const unsigned char* source, unsigned char* target) const {
    for (std::size_t z = 0; z < region[2]; ++z)
      for (std::size_t y = 0; y < region[1]; ++y)
        std::memmove(target + to.at(y, z), source + from.at(y, z), region[0]);
    return CL_SUCCESS;
  }
};

}  // namespace

cl_int CL_API_CALL EnqueueReadBufferRect(cl_command_queue queue, cl_mem memory, cl_bool blocking,
                                         const std::size_t* origin, const std::size_t* host_origin,
                                         const std::size_t* region, std::size_t row,
                                         std::size_t slice, std::size_t host_row,
                                         std::size_t host_slice, void* to, cl_uint count,
                                         const cl_event* list, cl_event* event) {
  if (memory == nullptr) return CL_INVALID_MEM_OBJECT;
  const Box box(make_side(origin, region, row, slice),
                make_side(host_origin, region, host_row, host_slice), region);
  if (to == nullptr || !box.fits(memory->size, SIZE_MAX)) return CL_INVALID_VALUE;
  return command(queue, CL_COMMAND_READ_BUFFER_RECT, blocking != CL_FALSE, {count, list, event},
                 [=, kept = keep({memory})] {
                   return box.copy(memory->data, static_cast<unsigned char*>(to));
                 });
}
cl_int CL_API_CALL EnqueueWriteBufferRect(cl_command_queue queue, cl_mem memory, cl_bool blocking,
                                          const std::size_t* origin, const std::size_t* host_origin,
                                          const std::size_t* region, std::size_t row,
                                          std::size_t slice, std::size_t host_row,
                                          std::size_t host_slice, const void* from, cl_uint count,
                                          const cl_event* list, cl_event* event) {
  if (memory == nullptr) return CL_INVALID_MEM_OBJECT;
  const Box box(make_side(host_origin, region, host_row, host_slice),
                make_side(origin, region, row, slice), region);
  if (from == nullptr || !box.fits(SIZE_MAX, memory->size)) return CL_INVALID_VALUE;
  return command(queue, CL_COMMAND_WRITE_BUFFER_RECT, blocking != CL_FALSE, {count, list, event},
                 [=, kept = keep({memory})] {
                   return box.copy(static_cast<const unsigned char*>(from), memory->data);
                 });
}
cl_int CL_API_CALL EnqueueCopyBufferRect(cl_command_queue queue, cl_mem from, cl_mem to,
                                         const std::size_t* from_origin,
                                         const std::size_t* to_origin, const std::size_t* region,
                                         std::size_t from_row, std::size_t from_slice,
                                         std::size_t to_row, std::size_t to_slice, cl_uint count,
                                         const cl_event* list, cl_event* event) {
  if (from == nullptr || to == nullptr) return CL_INVALID_MEM_OBJECT;
  const Box box(make_side(from_origin, region, from_row, from_slice),
                make_side(to_origin, region, to_row, to_slice), region);
  if (!box.fits(from->size, to->size)) return CL_INVALID_VALUE;
  return command(queue, CL_COMMAND_COPY_BUFFER_RECT, false, {count, list, event},
                 [=, kept = keep({from, to})] { return box.copy(from->data, to->data); });
}

}  // namespace amdemu
