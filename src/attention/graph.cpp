#include <clattn/graph.hpp>
#include <utility>

#include "base/error.hpp"
#include "opencl/recorder.hpp"

namespace clattn {

Graph::Graph(std::unique_ptr<detail::Recording> recording) noexcept
    : recording_(std::move(recording)) {}
Graph::Graph() noexcept = default;
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
Graph::~Graph() = default;

void Graph::replay(cl_command_queue queue, Event* event) const {
  if (recording_ == nullptr) detail::throw_invalid("graph: empty, legal: one from GraphCapture");
  recording_->replay(queue, event);
}

std::size_t Graph::num_launches() const noexcept {
  return recording_ == nullptr ? 0 : recording_->num_launches();
}

bool Graph::uses_command_buffer() const noexcept {
  return recording_ != nullptr && recording_->uses_command_buffer();
}

GraphCapture::GraphCapture(cl_command_queue queue)
    : recorder_(std::make_unique<detail::Recorder>(queue)) {}

GraphCapture::~GraphCapture() = default;

Graph GraphCapture::end() {
  if (recorder_ == nullptr) detail::throw_invalid("graph capture: ended already");
  const auto recorder = std::exchange(recorder_, nullptr);
  return Graph(recorder->finish());
}

AttentionState::AttentionState(std::shared_ptr<Context> context, const AttentionBackend& backend,
                               AttentionConfig config, BuilderOptions options)
    : context_(std::move(context)),
      backend_(&backend),
      config_(std::move(config)),
      options_(std::move(options)) {}

const AttentionMetadata& AttentionState::graph_capture_get_metadata_for_batch(
    cl_command_queue queue, std::int32_t batch_size) {
  if (batch_size < 1) detail::throw_invalid("batch_size is {}, legal: >= 1", batch_size);
  static constexpr std::int32_t kNoQueries[] = {0};
  CommonAttentionMetadata nothing;
  nothing.query_start_loc = kNoQueries;
  const auto found = builders_.find(batch_size);
  if (found != builders_.end()) return found->second->build(queue, nothing);
  BuilderOptions options = options_;
  options.graph_batch_size = batch_size;
  auto builder = backend_->make_builder(context_, config_, options);
  const AttentionMetadata& metadata = builder->build(queue, nothing);
  builders_.emplace(batch_size, std::move(builder));
  return metadata;
}

const AttentionMetadata& AttentionState::prepare_graph_input_buffers(
    cl_command_queue queue, std::int32_t batch_size, const CommonAttentionMetadata& batch) {
  const auto found = builders_.find(batch_size);
  if (found == builders_.end()) {
    detail::throw_invalid("batch_size {} was not captured; legal: a size that was", batch_size);
  }
  return found->second->build(queue, batch);
}

std::int32_t AttentionState::batch_size_for(const CommonAttentionMetadata& batch) const {
  for (std::int32_t r = 0; r < batch.num_reqs; ++r) {
    const auto i = static_cast<std::size_t>(r);
    if (batch.query_start_loc[i + 1] - batch.query_start_loc[i] > options_.decode_threshold) {
      return 0;
    }
  }
  const auto fits = builders_.lower_bound(batch.num_reqs);
  return fits == builders_.end() ? 0 : fits->first;
}

}  // namespace clattn
