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

GraphCapture::GraphCapture(cl_command_queue queue, ReplayMode mode)
    : recorder_(std::make_unique<detail::Recorder>(queue)), mode_(mode) {}

GraphCapture::~GraphCapture() = default;

Graph GraphCapture::end() {
  if (recorder_ == nullptr) detail::throw_invalid("graph capture: ended already");
  const auto recorder = std::exchange(recorder_, nullptr);
  return Graph(recorder->finish(mode_));
}

}  // namespace clattn
