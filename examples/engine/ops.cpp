#include "ops.hpp"

#include <clblast.h>

#include <fstream>
#include <iterator>
#include <stdexcept>

namespace engine {

namespace {

void check(cl_int status, const std::string& what) {
  if (status != CL_SUCCESS) throw std::runtime_error(what + " gave " + std::to_string(status));
}

}  // namespace

Ops::Ops(std::shared_ptr<clattn::Context> context, clattn::Queue queue)
    : context_(std::move(context)), queue_(std::move(queue)) {
  std::ifstream file(ENGINE_KERNELS);
  const std::string source{std::istreambuf_iterator<char>(file), {}};
  const char* text = source.c_str();
  cl_int status = CL_SUCCESS;
  program_ = clCreateProgramWithSource(context_->handle(), 1, &text, nullptr, &status);
  check(status, "clCreateProgramWithSource");
  const cl_device_id device = context_->device();
  check(clBuildProgram(program_, 1, &device, "", nullptr, nullptr), "clBuildProgram");
}

Ops::~Ops() {
  clReleaseProgram(program_);
}

template <typename... Args>
void Ops::launch(const char* name, int work_items, const Args&... args) const {
  cl_int status = CL_SUCCESS;
  const cl_kernel kernel = clCreateKernel(program_, name, &status);
  check(status, name);
  cl_uint next = 0;
  for (const cl_int set : {clSetKernelArg(kernel, next++, sizeof(args), &args)...})
    check(set, name);
  const auto size = static_cast<std::size_t>(work_items);
  status = clEnqueueNDRangeKernel(queue_, kernel, 1, nullptr, &size, nullptr, 0, nullptr, nullptr);
  clReleaseKernel(kernel);
  check(status, name);
}

Tensor Ops::allocate(int rows, int cols) const {
  return {context_->allocate(sizeof(float) * static_cast<std::size_t>(rows * cols)), rows, cols};
}

DeviceWeights Ops::upload(const Weights& weights) const {
  DeviceWeights tensors;
  for (const auto& [name, matrix] : weights) {
    tensors[name] = allocate(matrix.rows, matrix.cols);
    queue_.write(tensors[name].buffer, std::as_bytes(std::span(matrix.values)));
  }
  return tensors;
}

clattn::Buffer Ops::upload(std::span<const int> values) const {
  clattn::Buffer buffer = context_->allocate(values.size_bytes());
  queue_.write(buffer, std::as_bytes(values));
  return buffer;
}

std::vector<float> Ops::download(const Tensor& tensor) const {
  std::vector<float> values(static_cast<std::size_t>(tensor.rows * tensor.cols));
  queue_.read(tensor.buffer, std::as_writable_bytes(std::span(values)));
  return values;
}

Tensor Ops::embed(const Tensor& table, std::span<const int> token_ids) const {
  Tensor result = allocate(static_cast<int>(token_ids.size()), table.cols);
  const clattn::Buffer ids = upload(token_ids);
  launch("embed", result.rows * result.cols, result.handle(), table.handle(), ids.handle(),
         table.cols);
  return result;
}

Tensor Ops::rms_norm(const Tensor& x, const Tensor& weight) const {
  Tensor result = allocate(x.rows, x.cols);
  launch("rms_norm", x.rows, result.handle(), x.handle(), weight.handle(), x.cols, kNormEpsilon);
  return result;
}

void Ops::rope(const Tensor& qkv, const clattn::Buffer& positions) const {
  const int heads = kHeads + kKVHeads, head_size = kHeadSize;
  launch("rope", qkv.rows * heads * head_size / 2, qkv.handle(), positions.handle(), qkv.cols,
         heads, head_size, kRopeBase);
}

Tensor Ops::silu_mul(const Tensor& gate_up) const {
  Tensor result = allocate(gate_up.rows, gate_up.cols / 2);
  launch("silu_mul", result.rows * result.cols, result.handle(), gate_up.handle(), result.cols);
  return result;
}

Tensor Ops::product(const Tensor& a, const Tensor& b) const {
  Tensor result = allocate(a.rows, b.cols);
  multiply(a, b, result, 0);
  return result;
}

void Ops::add_product(const Tensor& a, const Tensor& b, const Tensor& sum) const {
  multiply(a, b, sum, 1);
}

/// c = a b + beta c
void Ops::multiply(const Tensor& a, const Tensor& b, const Tensor& c, float beta) const {
  const auto size = [](int value) { return static_cast<std::size_t>(value); };
  cl_command_queue queue = queue_;
  const auto status = clblast::Gemm<float>(
      clblast::Layout::kRowMajor, clblast::Transpose::kNo, clblast::Transpose::kNo, size(a.rows),
      size(b.cols), size(a.cols), 1, a.handle(), 0, size(a.cols), b.handle(), 0, size(b.cols), beta,
      c.handle(), 0, size(c.cols), &queue);
  check(static_cast<cl_int>(status), "CLBlast");
}

}  // namespace engine
