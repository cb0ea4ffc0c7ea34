#pragma once

#include <clattn/attention.hpp>
#include <cstdint>
#include <map>
#include <memory>

namespace clattn {

namespace detail {
class Recorder;
class Recording;
}  // namespace detail

/// A recorded step: the launches of every layer, arguments bound, enqueued again at a fraction of
/// the host's cost. It reads whatever its buffers hold by then: new queries, new metadata in place
/// (AttentionState). All buffers that were bound must outlive it. Immutable; replays on different
/// queues may run at once where their outputs differ.
class Graph {
 public:
  Graph() noexcept;
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;
  ~Graph();

  /// Asynchronous; `event` completes with the last launch. Throws kInvalidArgument when empty.
  void replay(cl_command_queue queue, Event* event = nullptr) const;
  std::size_t num_launches() const noexcept;
  /// Whether a replay is one cl_khr_command_buffer; else its launches are enqueued one by one.
  bool uses_command_buffer() const noexcept;

 private:
  friend class GraphCapture;
  explicit Graph(std::unique_ptr<detail::Recording> recording) noexcept;
  std::unique_ptr<detail::Recording> recording_;
};

/// Between construction and end(), launches that this thread makes on `queue` (write_kv_cache,
/// forward, cache operations) are recorded instead of run; their events stay empty. Copies, fills
/// and metadata builders are not recorded and must not use the queue meanwhile. Other threads and
/// queues are not affected. Destroyed without end(): nothing was recorded.
class GraphCapture {
 public:
  explicit GraphCapture(cl_command_queue queue);
  ~GraphCapture();
  GraphCapture(const GraphCapture&) = delete;
  GraphCapture& operator=(const GraphCapture&) = delete;
  Graph end();

 private:
  std::unique_ptr<detail::Recorder> recorder_;
};

/// vLLM's AttentionState: the metadata that recorded decode steps read, one set of persistent
/// buffers per captured batch size.
///
///     auto state = AttentionState(context, backend, config, options);
///     const auto& metadata = state.graph_capture_get_metadata_for_batch(queue, 8);
///     GraphCapture capture(queue);
///     … write_kv_cache and forward of every layer with `metadata` …
///     Graph graph = capture.end();
///     // every step of up to 8 requests:
///     state.prepare_graph_input_buffers(queue, 8, batch);
///     graph.replay(queue);
///
/// Not thread-safe.
class AttentionState {
 public:
  /// A recorded step holds decodes of up to options.decode_threshold query tokens each.
  AttentionState(std::shared_ptr<Context> context, const AttentionBackend& backend,
                 AttentionConfig config, BuilderOptions options = {});

  /// The metadata to record a step of up to `batch_size` requests with: every launch is as large as
  /// any such step needs, whatever its lengths. Valid as long as the state; holds no request until
  /// the buffers are prepared.
  const AttentionMetadata& graph_capture_get_metadata_for_batch(cl_command_queue queue,
                                                                std::int32_t batch_size);
  /// Puts a step's metadata where the graphs of `batch_size` read it, by one non-blocking write.
  /// Rows past the batch's requests are padding: slots -1, nothing attended, outputs untouched.
  /// Throws kInvalidArgument if the batch does not fit or was never captured.
  const AttentionMetadata& prepare_graph_input_buffers(cl_command_queue queue,
                                                       std::int32_t batch_size,
                                                       const CommonAttentionMetadata& batch);
  /// The smallest captured batch size that this step can be replayed with; 0 = none: run it
  /// eagerly.
  std::int32_t batch_size_for(const CommonAttentionMetadata& batch) const;

 private:
  std::shared_ptr<Context> context_;
  const AttentionBackend* backend_;
  AttentionConfig config_;
  BuilderOptions options_;
  std::map<std::int32_t, std::unique_ptr<AttentionMetadataBuilder>> builders_;
};

}  // namespace clattn
