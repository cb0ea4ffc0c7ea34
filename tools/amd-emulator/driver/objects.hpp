// OpenCL's objects as this driver keeps them.
#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver/api.hpp"
#include "machine/image.hpp"

namespace amdemu {

struct Object {
  cl_icd_dispatch* dispatch = dispatch_table();
  std::atomic<cl_uint> references{1};
};
template <class T>
cl_int retain(T* object, cl_int otherwise) {
  if (object == nullptr) return otherwise;
  object->references.fetch_add(1);
  return CL_SUCCESS;
}
/// Whether that was the last reference.
inline bool drop(Object& object) {
  return object.references.fetch_sub(1) == 1;
}

/// A command that waits: for a user event, or behind one that does.
struct Pending {
  std::vector<cl_event> waits;
  std::function<cl_int()> work;
  cl_event event;
};

}  // namespace amdemu

struct _cl_platform_id {
  cl_icd_dispatch* dispatch;
};
struct _cl_device_id {
  cl_icd_dispatch* dispatch;
  const amdemu::Chip* chip;
};
struct _cl_context : amdemu::Object {
  std::vector<cl_device_id> devices;
  std::vector<cl_context_properties> properties;
};
struct _cl_command_queue : amdemu::Object {
  cl_context context;
  cl_device_id device;
  cl_command_queue_properties properties;
  std::deque<amdemu::Pending> pending;
  bool busy = false;  // a thread runs one of its commands
};
struct _cl_mem : amdemu::Object {
  cl_context context = nullptr;
  cl_mem parent = nullptr;  // of a sub-buffer
  cl_mem_flags flags = 0;
  unsigned char* data = nullptr;
  void* host = nullptr;  // what the caller gave
  void* mapping = nullptr;
  std::size_t size = 0, mapping_size = 0, origin = 0;
  std::atomic<cl_uint> maps{0};
  std::vector<std::pair<void(CL_CALLBACK*)(cl_mem, void*), void*>> destructors;
};
struct _cl_program : amdemu::Object {
  cl_context context = nullptr;
  std::string source;
  struct Build {
    cl_build_status status = CL_BUILD_NONE;
    std::string options, log, binary;
    std::shared_ptr<amdemu::Image> image;
  };
  std::map<cl_device_id, Build> builds;
};
struct _cl_kernel : amdemu::Object {
  cl_program program = nullptr;
  std::string name;
  const amdemu::Kernel* shape = nullptr;  // of any of the devices: all have the same arguments
  struct Argument {
    std::vector<unsigned char> value;
    std::size_t local = 0;  // bytes of local memory
    bool set = false;
  };
  std::vector<Argument> arguments;
};
struct _cl_event : amdemu::Object {
  cl_context context = nullptr;
  cl_command_queue queue = nullptr;
  cl_command_type type = 0;
  cl_int status = CL_COMPLETE;
  cl_ulong begin = 0, end = 0;
  struct Callback {
    cl_int at;
    void(CL_CALLBACK* call)(cl_event, cl_int, void*);
    void* user;
  };
  std::vector<Callback> callbacks;
};
