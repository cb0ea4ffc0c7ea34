#pragma once

#include <clattn/context.hpp>
#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model.hpp"

namespace engine {

/// A row-major matrix of f32 on the device.
struct Tensor {
  clattn::Buffer buffer = {};
  int rows = 0, cols = 0;
  cl_mem handle() const { return buffer.handle(); }
};

using DeviceWeights = std::map<std::string, Tensor>;

/// What a model computes beside attention, on a session's queue: products by CLBlast, the rest by
/// kernels.cl.
class Ops {
 public:
  Ops(std::shared_ptr<clattn::Context> context, clattn::Queue queue);
  ~Ops();
  Ops(const Ops&) = delete;
  Ops& operator=(const Ops&) = delete;

  Tensor allocate(int rows, int cols) const;
  DeviceWeights upload(const Weights& weights) const;
  clattn::Buffer upload(std::span<const int> values) const;
  std::vector<float> download(const Tensor& tensor) const;

  Tensor embed(const Tensor& table, std::span<const int> token_ids) const;
  Tensor rms_norm(const Tensor& x, const Tensor& weight) const;
  void rope(const Tensor& qkv, const clattn::Buffer& positions) const;
  Tensor silu_mul(const Tensor& gate_up) const;
  Tensor product(const Tensor& a, const Tensor& b) const;
  void add_product(const Tensor& a, const Tensor& b, const Tensor& sum) const;

 private:
  void multiply(const Tensor& a, const Tensor& b, const Tensor& c, float beta) const;
  template <typename... Args>
  void launch(const char* name, int work_items, const Args&... args) const;

  std::shared_ptr<clattn::Context> context_;
  clattn::Queue queue_;
  cl_program program_ = nullptr;
};

}  // namespace engine
