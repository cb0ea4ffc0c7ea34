#pragma once

#include <clattn/attention.hpp>
#include <clattn/types.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

namespace CLATTN_API clattn {

class AttentionBackend;  // attention_backend.hpp

/// A recorded step: the launches of every layer, enqueued again with the arguments that they were
/// bound to. It reads whatever its buffers hold at that time: new queries, new metadata in place
/// (AttentionState). It keeps the kernels and buffers that were bound alive and goes on using them:
/// a layer that is later bound to another cache has to be recorded anew. Immutable; replays on
/// different queues may run at once if nothing that they write, the state's workspace included, is
/// shared.
class Graph {
 public:
  Graph() noexcept;
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;
  ~Graph();

  /// Asynchronous; `event` completes with the last launch. Throws kInvalidArgument when empty, and
  /// unless the metadata that it was recorded with was last built for the same batch size (padded),
  /// naming both.
  void replay(cl_command_queue queue, Event* event = nullptr) const;
  /// Kernels that a replay runs; 0 when empty.
  std::size_t num_launches() const noexcept;
  /// Whether a replay is one cl_khr_command_buffer; else its launches are enqueued one by one.
  bool uses_command_buffer() const noexcept;

 private:
  friend class GraphCapture;
  struct Recording;
  explicit Graph(std::unique_ptr<Recording> recording) noexcept;
  std::unique_ptr<Recording> recording_;
};

/// What a replay hands to the driver.
enum class ReplayMode : std::uint8_t {
  kAuto,           ///< a command buffer where one costs the host less than its launches do
  kLaunchList,     ///< the launches, one by one
  kCommandBuffer,  ///< one cl_khr_command_buffer
};

/// Between construction and end(), launches that this thread makes on `queue` (write_kv_cache,
/// forward, cache operations) are recorded instead of run; their events stay empty. Copies, fills
/// and metadata builders are not recorded and must not use the queue meanwhile. Other threads and
/// queues are not affected. If it is destroyed without end(), nothing was recorded.
class GraphCapture {
 public:
  /// Throws kInvalidArgument if this thread is recording already.
  explicit GraphCapture(cl_command_queue queue, ReplayMode mode = ReplayMode::kAuto);
  ~GraphCapture();
  GraphCapture(const GraphCapture&) = delete;
  GraphCapture& operator=(const GraphCapture&) = delete;
  /// Throws kUnsupported where kCommandBuffer was asked for and the device takes none.
  Graph end();

 private:
  struct Recorder;
  std::unique_ptr<Recorder> recorder_;
  ReplayMode mode_;
};

/// What an engine's own kernels may write between prepare_graph_input_buffers() and the replay
/// (vLLM: get_graph_input_buffers). Lengths and block tables are not among them: they are in the
/// plan, which prepare_graph_input_buffers() alone writes. A recorded update_seq_lens() writes the
/// slots anew: where lengths come from the device, give it the slots.
struct GraphInputBuffers {
  Buffer slot_mapping = {};    ///< i64, from the buffer's start; slots outside the cache store
                               ///< nothing. Prepared with the batch's slots, padded with kPadSlotId
  std::int64_t num_slots = 0;  ///< batch_size * decode_threshold; with graph_mixed batch_size
};

/// How to run a step.
struct ForwardStep {
  const AttentionMetadata* metadata = nullptr;  ///< valid until the state's next call
  std::int32_t graph_batch_size = 0;  ///< replay this size's graph; 0 = launch the layers eagerly
};

/// vLLM's AttentionState: the metadata that recorded decode steps read, in persistent buffers that
/// all batch sizes share. One for each KV cache group: a graph may record layers of several, as a
/// model with windowed layers needs, or one with cross attention (attn_type encoder_decoder, whose
/// batches describe the encoder's keys and pages).
///
///     auto state = AttentionState(context, backend, config, options);
///     {
///       const auto capturing = state.graph_capture(8);
///       for (const std::int32_t size : {8, 4, 2, 1}) {
///         const auto& metadata = state.graph_capture_get_metadata_for_batch(queue, size);
///         GraphCapture capture(queue);
///         … write_kv_cache and forward of every layer with `metadata` …
///         graphs[size] = capture.end();
///       }
///     }
///     // every step:
///     const ForwardStep step = state.begin_forward(queue, batch);
///     if (step.graph_batch_size > 0) {
///       graphs[step.graph_batch_size].replay(queue);
///     } else {
///       … write_kv_cache and forward of every layer with *step.metadata …
///     }
///
/// Steps of a state, and of all that share its workspace, run in order on one queue. Not
/// thread-safe.
class AttentionState {
 public:
  /// Makes the group's builders.
  using MakeBuilder =
      std::function<std::unique_ptr<AttentionMetadataBuilder>(const BuilderOptions& options)>;

  /// A recorded step holds decodes of up to options.decode_threshold query tokens each. With
  /// options.graph_mixed it holds requests of any, and each size below (batch_size, max_batch_size,
  /// graph_batch_size) counts the query tokens of a step instead of its requests. Backends
  /// that cannot be recorded, or not with this attn_type, refuse at graph_capture(), by name.
  AttentionState(std::shared_ptr<Context> context, const AttentionBackend& backend,
                 AttentionConfig config, BuilderOptions options = {});
  /// The same for builders of any origin, such as make_mla_builder().
  explicit AttentionState(MakeBuilder make_builder, BuilderOptions options = {});

  /// Ends the capture that graph_capture() began.
  class CaptureScope {
   public:
    ~CaptureScope() { *capturing_ = false; }
    CaptureScope(const CaptureScope&) = delete;
    CaptureScope& operator=(const CaptureScope&) = delete;

   private:
    friend class AttentionState;
    explicit CaptureScope(std::shared_ptr<bool> capturing) : capturing_(std::move(capturing)) {
      *capturing_ = true;
    }
    std::shared_ptr<bool> capturing_;
  };
  /// Allocates memory for steps of up to `max_batch_size` requests. Sizes can be captured while the
  /// result lives. Throws kInvalidArgument while another one does, and for more requests than the
  /// first time: recorded launches are bound to that memory.
  [[nodiscard]] CaptureScope graph_capture(std::int32_t max_batch_size);

  /// The metadata to record a step of up to `batch_size` requests with: every launch is as large as
  /// any such step needs, whatever its lengths. Valid until the state's next call; holds no request
  /// until the buffers are prepared, as for a warm-up. Throws kInvalidArgument outside a capture.
  const AttentionMetadata& graph_capture_get_metadata_for_batch(cl_command_queue queue,
                                                                std::int32_t batch_size);
  /// A state of this size alone, on the same buffers, for the runner to keep beside the size's
  /// graph. Throws kInvalidArgument outside a capture, and for a size that was not captured.
  AttentionState graph_clone(std::int32_t batch_size) const;
  /// Throws kInvalidArgument unless the metadata is of a recorded step.
  static GraphInputBuffers get_graph_input_buffers(const AttentionMetadata& metadata);

  /// Plans a step: for the smallest captured size that can replay it, else to be launched eagerly.
  /// Throws kInvalidArgument inside a capture, and what AttentionMetadataBuilder::build() throws.
  ForwardStep begin_forward(cl_command_queue queue, const CommonAttentionMetadata& batch);
  /// Puts a step's metadata where the graphs of `batch_size` read it, by one non-blocking write.
  /// Rows past the batch's requests are padding: slots -1, nothing attended, outputs untouched
  /// (zeroed where Attention::forward() was recorded with num_rows). Until the next such call only
  /// graphs of `batch_size` may be replayed. Throws kInvalidArgument if the batch does not fit or
  /// the size was never captured; graphs then replay the batch before.
  const AttentionMetadata& prepare_graph_input_buffers(cl_command_queue queue,
                                                       std::int32_t batch_size,
                                                       const CommonAttentionMetadata& batch);
  /// The smallest captured batch size that this step can be replayed with; 0 = none: run it
  /// eagerly.
  std::int32_t batch_size_for(const CommonAttentionMetadata& batch) const;

 private:
  void require_capturing(std::string_view call) const;
  void require_captured(std::int32_t batch_size) const;
  const AttentionMetadata& build(cl_command_queue queue, std::int32_t batch_size,
                                 CommonAttentionMetadata batch);

  MakeBuilder make_builder_;
  BuilderOptions options_;
  std::int32_t max_batch_size_ = 0;
  std::shared_ptr<AttentionMetadataBuilder> recorded_;  ///< shared with clones
  std::shared_ptr<AttentionMetadataBuilder> eager_;     ///< null until a step needs it
  std::set<std::int32_t> captured_;
  std::shared_ptr<bool> capturing_ = std::make_shared<bool>(false);
};

}  // namespace clattn
