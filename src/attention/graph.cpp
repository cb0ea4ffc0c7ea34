#include <algorithm>
#include <clattn/attention_backend.hpp>
#include <clattn/graph.hpp>

#include "base/error.hpp"
#include "kernels/step/paged_step.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

using detail::throw_invalid, detail::throw_invalid_if;

struct Graph::Recording {
  std::unique_ptr<const detail::Recording> launches;
};
struct GraphCapture::Recorder : detail::Recorder {
  using detail::Recorder::Recorder;
};

Graph::Graph(std::unique_ptr<Recording> recording) noexcept : recording_(std::move(recording)) {}
Graph::Graph() noexcept = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
Graph::~Graph() = default;

void Graph::replay(cl_command_queue queue, Event* event) const {
  if (recording_ == nullptr) throw_invalid("graph: empty, legal: one from GraphCapture");
  recording_->launches->replay(queue, event);
}

std::size_t Graph::num_launches() const noexcept {
  return recording_ == nullptr ? 0 : recording_->launches->num_launches();
}

bool Graph::uses_command_buffer() const noexcept {
  return recording_ != nullptr && recording_->launches->uses_command_buffer();
}

GraphCapture::GraphCapture(cl_command_queue queue, ReplayMode mode)
    : recorder_(std::make_unique<Recorder>(queue)), mode_(mode) {}

GraphCapture::~GraphCapture() = default;

Graph GraphCapture::end() {
  if (recorder_ == nullptr) throw_invalid("graph capture: ended already");
  const auto recorder = std::exchange(recorder_, nullptr);
  return Graph(std::make_unique<Graph::Recording>(Graph::Recording{recorder->finish(mode_)}));
}

AttentionState::AttentionState(std::shared_ptr<Context> context, const AttentionBackend& backend,
                               AttentionConfig config, BuilderOptions options)
    : AttentionState(
          [context = std::move(context), backend = backend.shared_from_this(),
           config = std::move(config)](const BuilderOptions& made) {
            return backend->make_builder(context, config, made);
          },
          std::move(options)) {}

AttentionState::AttentionState(MakeBuilder make_builder, BuilderOptions options)
    : make_builder_(std::move(make_builder)), options_(std::move(options)) {
  throw_invalid_if(options_.graph_batch_size != 0,
                   "graph_batch_size is {}, legal: 0: graph_capture() says it",
                   options_.graph_batch_size);
  if (options_.workspace == nullptr) options_.workspace = std::make_shared<AttentionWorkspace>();
}

AttentionState::CaptureScope AttentionState::graph_capture(std::int32_t max_batch_size) {
  if (*capturing_) throw_invalid("graph_capture: this state is capturing already");
  if (max_batch_size < 1) throw_invalid("max_batch_size is {}, legal: >= 1", max_batch_size);
  if (recorded_ == nullptr) {
    BuilderOptions options = options_;
    options.graph_batch_size = max_batch_size;
    recorded_ = make_builder_(options);
    max_batch_size_ = max_batch_size;
  } else if (max_batch_size > max_batch_size_) {
    throw_invalid("max_batch_size is {}, legal: 1 … {} (the first graph_capture's)", max_batch_size,
                  max_batch_size_);
  }
  return CaptureScope(capturing_);
}

void AttentionState::require_capturing(std::string_view call) const {
  if (!*capturing_) throw_invalid("{}: called outside of graph_capture(), legal: inside", call);
}

void AttentionState::require_captured(std::int32_t batch_size) const {
  if (captured_.contains(batch_size)) return;
  throw_invalid("batch_size {} was not captured; legal: a size that was", batch_size);
}

const AttentionMetadata& AttentionState::build(cl_command_queue queue, std::int32_t batch_size,
                                               CommonAttentionMetadata batch) {
  batch.graph_pad_size = batch_size;
  return recorded_->build(queue, batch);
}

const AttentionMetadata& AttentionState::graph_capture_get_metadata_for_batch(
    cl_command_queue queue, std::int32_t batch_size) {
  require_capturing("graph_capture_get_metadata_for_batch");
  throw_invalid_if(batch_size < 1 || batch_size > max_batch_size_,
                   "batch_size is {}, legal: 1 … {} (max_batch_size)", batch_size, max_batch_size_);
  static constexpr std::int32_t kNoQueries[] = {0};
  CommonAttentionMetadata nothing;
  nothing.query_start_loc = kNoQueries;
  const AttentionMetadata& metadata = build(queue, batch_size, nothing);
  captured_.insert(batch_size);
  return metadata;
}

AttentionState AttentionState::graph_clone(std::int32_t batch_size) const {
  require_capturing("graph_clone");
  require_captured(batch_size);
  AttentionState clone(make_builder_, options_);
  clone.max_batch_size_ = max_batch_size_;
  clone.recorded_ = recorded_;
  clone.captured_ = {batch_size};
  return clone;
}

GraphInputBuffers AttentionState::get_graph_input_buffers(const AttentionMetadata& metadata) {
  throw_invalid_if(metadata.step() == nullptr || !metadata.step()->recordable,
                   "attn_metadata: of a step that is not recorded; legal: of an AttentionState");
  return {Buffer::adopt(metadata.slot_mapping_buffer()),
          static_cast<std::int64_t>(metadata.slot_mapping().size())};
}

ForwardStep AttentionState::begin_forward(cl_command_queue queue,
                                          const CommonAttentionMetadata& batch) {
  if (*capturing_) throw_invalid("begin_forward: called inside of graph_capture(), legal: outside");
  const std::int32_t batch_size = batch_size_for(batch);
  if (batch_size > 0) return {&build(queue, batch_size, batch), batch_size};
  if (eager_ == nullptr) {
    BuilderOptions options = options_;
    options.graph_mixed = false;
    eager_ = make_builder_(options);
  }
  return {&eager_->build(queue, batch), 0};
}

const AttentionMetadata& AttentionState::prepare_graph_input_buffers(
    cl_command_queue queue, std::int32_t batch_size, const CommonAttentionMetadata& batch) {
  require_captured(batch_size);
  return build(queue, batch_size, batch);
}

std::int32_t AttentionState::batch_size_for(const CommonAttentionMetadata& batch) const {
  if (recorded_ == nullptr || !recorded_->can_run_in_graph(batch)) return 0;
  const std::int32_t needed =
      options_.graph_mixed ? std::max(detail::token_count(batch), batch.num_reqs) : batch.num_reqs;
  const auto fits = captured_.lower_bound(needed);
  return fits == captured_.end() ? 0 : *fits;
}

}  // namespace clattn
