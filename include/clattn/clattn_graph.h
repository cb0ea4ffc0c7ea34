#ifndef CLATTN_CLATTN_GRAPH_H
#define CLATTN_CLATTN_GRAPH_H

/* Recorded steps in C. What a call does in full is described at the C++ classes
   (clattn/graph.hpp); clattn/clattn.h says what holds for all handles, structs and errors. A
   capture belongs to the thread that began it. States are for one thread at a time, and their steps
   run in order on one queue. Graphs may be used by several threads at once if they write nothing in
   common.

     clattn_graph_state_create(layer, &options, &state);                  once
     clattn_graph_state_begin_capture(state, 8);
     clattn_graph_state_capture_step(state, queue, 8, &step);             each batch size
     clattn_graph_capture_create(queue, NULL, &capture);
     ... clattn_layer_forward(layer, queue, &tensors, step) of every layer ...
     clattn_graph_capture_end(capture, &graph);
     clattn_graph_state_end_capture(state);

     clattn_graph_state_begin_step(state, queue, &batch, &step, &size);   every step
     size > 0: clattn_graph_replay(graph of that size, queue, NULL)
     else:     clattn_layer_forward(layer, queue, &tensors, step) of every layer */

#include <clattn/clattn.h>

/* NOLINTBEGIN(modernize-*,readability-identifier-naming): C */

#ifdef __cplusplus
extern "C" {
#endif

/** A recording of this thread's launches on one queue. */
typedef struct ClattnGraphCapture ClattnGraphCapture;
/** Launches that can be enqueued again. Keeps what they were bound to alive. */
typedef struct ClattnGraph ClattnGraph;

/** From this call until clattn_graph_capture_end(), this thread's forward and cache calls on
   `queue` are recorded, not run. Copies and steps are not recorded and must not use the queue.
   `mode`: "launch_list", "command_buffer", or "auto" (also NULL): the one that costs the host less.
   CLATTN_ERROR_INVALID_ARGUMENT: this thread is recording already. */
CLATTN_C_API ClattnResult clattn_graph_capture_create(const ClattnQueue* queue, const char* mode,
                                                      ClattnGraphCapture** capture);
/** Ends the recording, once, by the thread that began it. CLATTN_ERROR_UNSUPPORTED:
   "command_buffer" was asked for and the device takes none. */
CLATTN_C_API ClattnResult clattn_graph_capture_end(ClattnGraphCapture* capture,
                                                   ClattnGraph** graph);
/** To be called by the thread that began it. A recording that was not ended is dropped. */
CLATTN_C_API void clattn_graph_capture_destroy(ClattnGraphCapture* capture);

CLATTN_C_API void clattn_graph_destroy(ClattnGraph* graph);
/** Enqueues the launches again over what their buffers hold by then; `event`, unless NULL,
   completes with the last one. Several threads may replay graphs that write nothing in common. */
CLATTN_C_API ClattnResult clattn_graph_replay(const ClattnGraph* graph, const ClattnQueue* queue,
                                              ClattnEvent* event);

/** What was recorded. */
typedef struct ClattnGraphInfo {
  uint32_t struct_size;
  int32_t uses_command_buffer; /**< 1: a replay is one cl_khr_command_buffer */
  uint64_t num_launches;       /**< kernels that a replay runs */
} ClattnGraphInfo;
/** Fills in `info`, whose struct_size is set. */
CLATTN_C_API ClattnResult clattn_graph_info(const ClattnGraph* graph, ClattnGraphInfo* info);

/** clattn::AttentionState: the metadata that recorded steps read, in memory that all batch sizes
   share. One state serves all layers of the same configuration. */
typedef struct ClattnGraphState ClattnGraphState;

/** Requests of recorded steps have at most options->decode_threshold query tokens. `options` may be
   NULL. If it gives no num_blocks, the number of the cache that is bound to the layer is taken. */
CLATTN_C_API ClattnResult clattn_graph_state_create(const ClattnLayer* layer,
                                                    const ClattnStepOptions* options,
                                                    ClattnGraphState** state);
CLATTN_C_API void clattn_graph_state_destroy(ClattnGraphState* state);
/** Allocates memory for recorded steps of up to `max_batch_size` requests. Until
   clattn_graph_state_end_capture() sizes can be captured, and no step can begin. Later captures
   take no more requests than the first. CLATTN_ERROR_UNSUPPORTED: the layer's backend cannot be
   recorded. */
CLATTN_C_API ClattnResult clattn_graph_state_begin_capture(ClattnGraphState* state,
                                                           int32_t max_batch_size);
/** CLATTN_ERROR_INVALID_ARGUMENT: no capture has begun. */
CLATTN_C_API ClattnResult clattn_graph_state_end_capture(ClattnGraphState* state);
/** The step to record layers with for up to `batch_size` requests; it is the state's, valid until
   its next call. */
CLATTN_C_API ClattnResult clattn_graph_state_capture_step(ClattnGraphState* state,
                                                          const ClattnQueue* queue,
                                                          int32_t batch_size,
                                                          const ClattnStep** step);
/** Plans a step. `graph_batch_size` becomes the smallest captured size that can replay it, whose
   graph is then ready; 0 = launch the layers with `step`, which is the state's, valid until its
   next call. Tensors of a replayed step are those that were recorded: rows behind the batch's are
   padding. */
CLATTN_C_API ClattnResult clattn_graph_state_begin_step(ClattnGraphState* state,
                                                        const ClattnQueue* queue,
                                                        const ClattnBatchInfo* batch,
                                                        const ClattnStep** step,
                                                        int32_t* graph_batch_size);

/** The smallest captured size that can replay such a step; 0 = none: launch it eagerly. */
CLATTN_C_API ClattnResult clattn_graph_state_batch_size_for(const ClattnGraphState* state,
                                                            const ClattnBatchInfo* batch,
                                                            int32_t* graph_batch_size);
/** Puts the batch where the graphs of `batch_size` read it, whatever size would be chosen; `step`
   is the state's, valid until its next call. Until the next such call only graphs of that size may
   be replayed. CLATTN_ERROR_INVALID_ARGUMENT: the batch does not fit, or the size was not captured;
   graphs then replay the batch before. */
CLATTN_C_API ClattnResult clattn_graph_state_prepare(ClattnGraphState* state,
                                                     const ClattnQueue* queue, int32_t batch_size,
                                                     const ClattnBatchInfo* batch,
                                                     const ClattnStep** step);
/** A state of one captured size on the same memory, to be kept beside that size's graph; during a
   capture alone. */
CLATTN_C_API ClattnResult clattn_graph_state_clone(const ClattnGraphState* state,
                                                   int32_t batch_size, ClattnGraphState** clone);
/** What the application's own kernels may write between clattn_graph_state_prepare() and a replay:
   the slots of a recorded step, i64 [num_slots], batch_size * decode_threshold. `slot_mapping`
   becomes a handle to be destroyed. */
CLATTN_C_API ClattnResult clattn_graph_input_buffers(const ClattnStep* step,
                                                     ClattnBuffer** slot_mapping,
                                                     int64_t* num_slots);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif
