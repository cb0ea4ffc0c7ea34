#ifndef CLATTN_CLATTN_CONTEXT_H
#define CLATTN_CLATTN_CONTEXT_H

/* Results, the log, contexts, queues, buffers and events in C; clattn/clattn.h says what
   holds for all of them. */

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 300
#endif
#include <CL/cl.h>
#include <clattn/version.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define CLATTN_C_API __attribute__((visibility("default")))
#else
#define CLATTN_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** This header's version, raised by incompatible changes; clattn_abi_version() is the library's. */
#define CLATTN_ABI_VERSION 1u
/** CLATTN_ABI_VERSION of the library. */
CLATTN_C_API uint32_t clattn_abi_version(void);
/** "0.1.0"; never freed. */
CLATTN_C_API const char* clattn_version(void);

/** How a call ended. */
typedef enum ClattnResult {
  CLATTN_SUCCESS = 0,
  CLATTN_ERROR_INVALID_ARGUMENT = 1, /**< the text names field, value and what is legal */
  CLATTN_ERROR_UNSUPPORTED = 2,      /**< legal, but not here: the text lists the reasons */
  CLATTN_ERROR_OPENCL = 3,           /**< the driver refused: clattn_last_cl_error() */
  CLATTN_ERROR_IO = 4,               /**< the text names the file */
  CLATTN_ERROR_OUT_OF_BLOCKS = 5,    /**< too few blocks of a KV cache are free */
  CLATTN_ERROR_OUT_OF_MEMORY = 100,  /**< the host's */
  CLATTN_ERROR_INTERNAL = 101        /**< a defect of the library or of a backend */
} ClattnResult;

/** "CLATTN_ERROR_UNSUPPORTED"; never freed. */
CLATTN_C_API const char* clattn_result_name(ClattnResult status);
/** Why this thread's last failed call failed; valid until its next one fails. */
CLATTN_C_API const char* clattn_last_error(void);
/** The OpenCL status behind it, CL_SUCCESS unless it was CLATTN_ERROR_OPENCL. */
CLATTN_C_API cl_int clattn_last_cl_error(void);

/** Levels: 0 off, 1 info, 2 debug, 3 trace (clattn/log.hpp). Called by the thread that has
   something to say, one message at a time, without a newline at its end; must not call the library.
 */
typedef void (*ClattnLogSink)(void* user, int32_t level, const char* message);
/** Sends messages up to `level` to `sink`, or to standard error if it is NULL. */
CLATTN_C_API ClattnResult clattn_set_log(int32_t level, ClattnLogSink sink, void* user);

/* --- Contexts ------------------------------------------------------------------------------- */

/** Everything slow and shared about one cl_context and device; keep it for as long as possible. */
typedef struct ClattnContext ClattnContext;

/** On the device of a selector: "gpu", "cpu", "P:D" or part of a name; NULL = the best one. */
CLATTN_C_API ClattnResult clattn_context_create(const char* selector, ClattnContext** context);
/** `device` must belong to `handle`. */
CLATTN_C_API ClattnResult clattn_context_adopt(cl_context handle, cl_device_id device,
                                               ClattnContext** context);
CLATTN_C_API void clattn_context_destroy(ClattnContext* context);

/* --- Queues, buffers, events ---------------------------------------------------------------- */

/** An in-order command queue. */
typedef struct ClattnQueue ClattnQueue;

/** `profiling` other than 0: events have durations. */
CLATTN_C_API ClattnResult clattn_queue_create(const ClattnContext* context, int32_t profiling,
                                              ClattnQueue** queue);
/** Takes a queue of the application, which must be in order. */
CLATTN_C_API ClattnResult clattn_queue_adopt(cl_command_queue handle, ClattnQueue** queue);
CLATTN_C_API void clattn_queue_destroy(ClattnQueue* queue);
/** The OpenCL queue; the reference stays this one's. */
CLATTN_C_API ClattnResult clattn_queue_handle(const ClattnQueue* queue, cl_command_queue* handle);
/** Hands what was enqueued to the device, without waiting. */
CLATTN_C_API ClattnResult clattn_queue_flush(const ClattnQueue* queue);
/** Blocks until everything that was enqueued has run. */
CLATTN_C_API ClattnResult clattn_queue_finish(const ClattnQueue* queue);

/** A buffer of device memory. */
typedef struct ClattnBuffer ClattnBuffer;

/** Uninitialised device memory. */
CLATTN_C_API ClattnResult clattn_buffer_create(const ClattnContext* context, size_t size_bytes,
                                               ClattnBuffer** buffer);
/** Takes memory of the application. */
CLATTN_C_API ClattnResult clattn_buffer_adopt(cl_mem handle, ClattnBuffer** buffer);
CLATTN_C_API void clattn_buffer_destroy(ClattnBuffer* buffer);
/** The OpenCL memory; the reference stays the buffer's. */
CLATTN_C_API ClattnResult clattn_buffer_handle(const ClattnBuffer* buffer, cl_mem* handle);
/** Its size in bytes. */
CLATTN_C_API ClattnResult clattn_buffer_size(const ClattnBuffer* buffer, size_t* size_bytes);
/** Copies from the host into the buffer's range; blocks. */
CLATTN_C_API ClattnResult clattn_buffer_write(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                              size_t offset_bytes, const void* source,
                                              size_t size_bytes);
/** As clattn_buffer_write(), from the device. */
CLATTN_C_API ClattnResult clattn_buffer_read(const ClattnBuffer* buffer, const ClattnQueue* queue,
                                             size_t offset_bytes, void* destination,
                                             size_t size_bytes);

/** Empty until a call that was given it has enqueued something. */
typedef struct ClattnEvent ClattnEvent;

/** An empty event. */
CLATTN_C_API ClattnResult clattn_event_create(ClattnEvent** event);
CLATTN_C_API void clattn_event_destroy(ClattnEvent* event);
/** NULL while empty; the reference stays the event's. */
CLATTN_C_API ClattnResult clattn_event_handle(const ClattnEvent* event, cl_event* handle);
/** Blocks; returns at once while empty. */
CLATTN_C_API ClattnResult clattn_event_wait(const ClattnEvent* event);
/** Device time of the last command, of queues with profiling. */
CLATTN_C_API ClattnResult clattn_event_duration_ns(const ClattnEvent* event, uint64_t* duration_ns);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
