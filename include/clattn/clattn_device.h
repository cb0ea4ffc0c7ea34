#ifndef CLATTN_CLATTN_DEVICE_H
#define CLATTN_CLATTN_DEVICE_H

/* Devices, and more about contexts, queues and buffers, in C; clattn/clattn.h has what every
   program needs, and says what holds for all handles, structs and errors (clattn/device.hpp,
   clattn/context.hpp). */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

/* --- Devices ---------------------------------------------------------------------------------- */

/** A device as the driver lists it. */
typedef struct ClattnDeviceId {
  uint32_t struct_size;
  int32_t platform_index;  /**< "platform_index:device_index" is its selector */
  int32_t device_index;    /**< position among the platform's devices */
  cl_platform_id platform; /**< the handles belong to the driver */
  cl_device_id device;     /**< as platform */
} ClattnDeviceId;

/** How many devices all platforms have; may be 0. */
CLATTN_C_API ClattnResult clattn_device_count(size_t* count);
/** `index` in [0, count), in the drivers' order. */
CLATTN_C_API ClattnResult clattn_device_at(size_t index, ClattnDeviceId* device);

/** The device that a selector names (clattn_context_create()), without a context. */
CLATTN_C_API ClattnResult clattn_select_device(const char* selector, ClattnDeviceId* device);
/** What the driver says about the device of a context. */
typedef struct ClattnContextInfo {
  uint32_t struct_size;
  int32_t compute_units; /**< CL_DEVICE_MAX_COMPUTE_UNITS */
  cl_context
      context; /**< not retained for the caller; like all fields, valid while the context lives */
  cl_device_id device;        /**< the driver's handle */
  const char* name;           /**< CL_DEVICE_NAME */
  const char* vendor;         /**< CL_DEVICE_VENDOR */
  const char* driver_version; /**< CL_DRIVER_VERSION */
  const char* kind;           /**< "gpu", "cpu" or "other" */
  uint64_t global_mem_bytes;  /**< of all buffers together */
  uint64_t max_alloc_bytes;   /**< of one buffer */
} ClattnContextInfo;
/** Fills in `info`, whose struct_size is set. */
CLATTN_C_API ClattnResult clattn_context_info(const ClattnContext* context,
                                              ClattnContextInfo* info);

/** What makes this context slower than it could be, a line each: kernels that the driver failed to
   build, why compiled programs are not kept, lines of the tuning file that were left out. Text as
   in clattn_layer_explain(); empty = nothing. */
CLATTN_C_API ClattnResult clattn_context_problems(const ClattnContext* context, char* text,
                                                  size_t capacity, size_t* size);

/* --- Buffers ---------------------------------------------------------------------------------- */

/** A buffer over memory of the application, which must outlive it. The host reads and writes it by
   clattn_buffer_map() alone. */
CLATTN_C_API ClattnResult clattn_buffer_share(const ClattnContext* context, void* memory,
                                              size_t size_bytes, ClattnBuffer** buffer);
/** As clattn_buffer_write() without waiting: `source` stays alive and unchanged until `event` (or
   NULL) or a later synchronisation of the queue. */
CLATTN_C_API ClattnResult clattn_buffer_write_async(const ClattnBuffer* buffer,
                                                    const ClattnQueue* queue, size_t offset_bytes,
                                                    const void* source, size_t size_bytes,
                                                    ClattnEvent* event);
/** As clattn_buffer_write_async(), from the device. */
CLATTN_C_API ClattnResult clattn_buffer_read_async(const ClattnBuffer* buffer,
                                                   const ClattnQueue* queue, size_t offset_bytes,
                                                   void* destination, size_t size_bytes,
                                                   ClattnEvent* event);
/** Repeats a pattern of 4 bytes; offset and size are multiples of 4. Asynchronous. */
CLATTN_C_API ClattnResult clattn_buffer_fill(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                             uint32_t pattern, size_t offset_bytes,
                                             size_t size_bytes);

/** Memory that the host may use while the handle lives: a buffer's, or one that the device copies
   from and to fastest. Keeps what it was made from alive. */
typedef struct ClattnHostMemory ClattnHostMemory;
/** A whole buffer for the host, after the queue's earlier commands; blocks. `access`: "read",
   "write" (its content is undefined at first) or "read_write" (also NULL). `bytes` becomes its
   address. Destroying the handle gives the bytes to later commands of the queue; no kernel may use
   the buffer before. */
CLATTN_C_API ClattnResult clattn_buffer_map(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                            const char* access, ClattnHostMemory** memory,
                                            void** bytes);
/** Uninitialised pinned memory, for clattn_swap_blocks() and asynchronous copies. */
CLATTN_C_API ClattnResult clattn_pinned_memory_create(const ClattnContext* context,
                                                      size_t size_bytes, ClattnHostMemory** memory,
                                                      void** bytes);
CLATTN_C_API void clattn_host_memory_destroy(ClattnHostMemory* memory);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
