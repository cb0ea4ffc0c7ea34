#include "opencl/runtime.hpp"

#include <algorithm>
#include <cstring>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "opencl/device/device_info.hpp"
#include "opencl/device/self_test.hpp"
#include "opencl/device/units.hpp"
#include "opencl/program/program.hpp"
#include "tuning/tuning_table.hpp"

namespace clattn::detail {
namespace {

/// What a program of a Runtime is known by.
constexpr std::size_t kKeyLines = 3;  // of program_key()
std::string program_key(const KernelSource& source) {
  return source.file + '\n' + source.unit + '\n' + source.options;
}

/// What a CPU device's name leaves out where the processor is a virtual machine's: whether it has
/// the instructions that self-tests look for.
std::string_view host_instructions() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0 && __builtin_cpu_supports("avx512vbmi") != 0
             ? "bf16"
             : "-";
#else
  return "-";
#endif
}

}  // namespace

RuntimeOptions default_runtime_options() {
  const Environment& variables = environment();
  return {.kernel_dir = variables.kernel_dir,
          .cache_dir = variables.cache_enabled ? variables.cache_dir : std::string{},
          .tuning_file = variables.tuning_enabled ? variables.tuning_file : std::string{}};
}

Runtime::Runtime(ContextHandle context, cl_device_id device, const RuntimeOptions& options)
    : context_(std::move(context)),
      device_(device),
      capabilities_(query_capabilities(device)),
      read_file_(kernel_file_reader(options.kernel_dir)),
      cache_(options.cache_dir),
      tuning_{std::make_shared<const TuningTable>(TuningTable::load(options.tuning_file))},
      // Asked for a binary, PoCL, which compiles on demand for the group size of a launch and keeps
      // a good cache of its own, compiles every kernel for any size at once. Measured with PoCL 3.1
      // on 2 cores, a program of 4 kernels: cold 100 ms to build without our cache and 700 with it;
      // warm 20 and 2.
      cache_binaries_(options.keep_all_binaries || !is_pocl(device)) {
  self_test();
}

/// The key of what was made from `text` under `options` on this device by this library.
CacheKey Runtime::key_of(std::string_view what, const std::string& text,
                         std::string_view options) const {
  return make_cache_key({what, text, options, capabilities_.name, capabilities_.driver_version,
                         capabilities_.device_version, capabilities_.platform_name,
                         capabilities_.platform_version, CLATTN_VERSION});
}

void Runtime::self_test() {
  SelfTestTexts texts{.device = flatten_source("tile/selftest.cl", read_file_).text};
  if (capabilities_.kind == DeviceKind::kCpu) {
    if (why_no_x86_tiles().empty()) {
      texts.x86_tiles = flatten_source("tile/cpu/selftest_amx.cl", read_file_).text;
    } else {
      log(LogLevel::kInfo, "{}: no x86 tiles: {}", capabilities_.name, why_no_x86_tiles());
    }
  }
  std::string text = texts.device + texts.x86_tiles;
  for (const Unit* unit : matrix_units()) {
    text += texts.units.emplace_back(
        flatten_source(std::string(unit->self_test()), read_file_, unit->header).text);
    text += unit->compiler_options();
  }
  // Environment variables of some drivers change these two.
  const std::string limits = fmt::format("local={} group={} host={}", capabilities_.local_mem_bytes,
                                         capabilities_.max_work_group_size, host_instructions());
  const CacheKey key = key_of("self-test", text, limits);
  SelfTestResult result;
  const std::optional<std::string> remembered = cache_.load(key);
  if (remembered && remembered->size() == sizeof(result)) {
    std::memcpy(&result, remembered->data(), sizeof(result));
  } else {
    const SelfTestReport report = run_self_tests(context_.get(), device_, capabilities_, texts);
    result = report.result;
    if (report.conclusive)
      cache_.store(key, {reinterpret_cast<const char*>(&result), sizeof(result)});
  }
  capabilities_.static_local_mem_bytes = result.static_local_mem_bytes;
  capabilities_.inline_ptx = result.inline_ptx != 0;
  capabilities_.wave_size = result.wave_size;
  capabilities_.warpgroup_products = result.warpgroup_products != 0;
  capabilities_.fp8_conversions = result.fp8_conversions != 0;
  capabilities_.bf16_products = result.bf16_products != 0;
  capabilities_.x86_tiles = result.x86_tiles != 0;
  capabilities_.native_exp2_error = result.native_exp2_error;
  capabilities_.native_builtins = result.native_builtins != 0;
  capabilities_.x86_prefetch = result.x86_prefetch != 0;
  capabilities_.long_loops = result.long_loops != 0;
  capabilities_.struct_arguments = result.struct_arguments != 0;
  capabilities_.sub_groups_in_step = result.sub_groups_in_step;
  capabilities_.matrix_units = unit_names(result.right_matrix_units);
  capabilities_.wrong_matrix_units = unit_names(result.wrong_matrix_units);
  for (const std::string& unit : capabilities_.wrong_matrix_units)
    log(LogLevel::kInfo, "{}: {} computes wrong and is not used", capabilities_.name, unit);
  capabilities_.flushes_f16 = result.flushing_matrix_units != 0;  // a device has one unit of f16
  if (capabilities_.flushes_f16)
    log(LogLevel::kInfo, "{}: matrix products take subnormal f16 as 0", capabilities_.name);
  macros_ = device_macros(capabilities_);
}

std::shared_ptr<Runtime::Program> Runtime::build(const KernelSource& wanted) {
  const std::string options = fmt::format("{}{}{}{}", kBuildOptions, macros_,
                                          wanted.options.empty() ? "" : " ", wanted.options);
  const FlatSource source = flatten_source(wanted.file, read_file_, wanted.unit);
  const CacheKey key = key_of("program", source.text, options);
  if (const auto binary = cache_binaries_ ? cache_.load(key) : std::nullopt) {
    Compilation cached = load_program(context_.get(), device_, *binary, options);
    if (cached.program) {
      ++from_cache_;
      return std::make_shared<Program>(Program{std::move(cached.program), {}});
    }
  }
  Compilation built = compile_program(context_.get(), device_, source.text, options);
  if (built.status != CL_SUCCESS) {
    const Error error(ErrorCode::kOpenCL,
                      fmt::format("building {} with '{}' on {} failed: {} ({})\n{}", wanted.file,
                                  options, capabilities_.name, status_name(built.status),
                                  built.status, rewrite_build_log(built.log, source)),
                      built.status);
    if (!is_build_refusal(error)) throw error;
    return std::make_shared<Program>(Program{{}, error});
  }
  ++from_source_;
  const auto binary = cache_binaries_ ? program_binary(built.program.get(), device_) : std::nullopt;
  if (binary) cache_.store(key, *binary);
  return std::make_shared<Program>(Program{std::move(built.program), {}});
}

/// One program of several sources, without a handle where their options or the driver are against
/// it.
std::shared_ptr<Runtime::Program> Runtime::build_bundle(std::span<const KernelSource> sources) {
  std::vector<BundlePart> parts;
  for (const KernelSource& source : sources)
    parts.push_back({flatten_source(source.file, read_file_, source.unit).text,
                     fmt::format("{} {}", macros_, source.options)});
  const std::optional<std::string> text = bundle_sources(parts);
  if (!text) return std::make_shared<Program>();
  Compilation built = compile_program(context_.get(), device_, *text, std::string(kBuildOptions));
  if (built.status != CL_SUCCESS) return std::make_shared<Program>();
  ++from_source_;
  return std::make_shared<Program>(Program{std::move(built.program), {}});
}

std::unique_ptr<Runtime> Runtime::create(const Device& device, const RuntimeOptions& options) {
  if (device.id == nullptr) throw_invalid("device: null");
  const cl_context_properties properties[] = {
      CL_CONTEXT_PLATFORM, reinterpret_cast<cl_context_properties>(device.platform), 0};
  cl_int status = CL_SUCCESS;
  ContextHandle context(clCreateContext(properties, 1, &device.id, nullptr, nullptr, &status));
  check(status, "clCreateContext");
  return std::unique_ptr<Runtime>(new Runtime(std::move(context), device.id, options));
}

std::unique_ptr<Runtime> Runtime::adopt(cl_context context, cl_device_id device,
                                        const RuntimeOptions& options) {
  if (context == nullptr || device == nullptr) throw_invalid("context or device: null");
  std::size_t size = 0;
  check(clGetContextInfo(context, CL_CONTEXT_DEVICES, 0, nullptr, &size), "CL_CONTEXT_DEVICES");
  std::vector<cl_device_id> devices(size / sizeof(cl_device_id));
  check(clGetContextInfo(context, CL_CONTEXT_DEVICES, size, devices.data(), nullptr),
        "CL_CONTEXT_DEVICES");
  throw_invalid_if(std::ranges::find(devices, device) == devices.end(),
                   "device: not one of the {} devices of the adopted context", devices.size());
  check(clRetainContext(context), "clRetainContext");
  return std::unique_ptr<Runtime>(new Runtime(ContextHandle(context), device, options));
}

std::shared_ptr<KernelPool> Runtime::kernel(const KernelSource& source, const std::string& bundle) {
  const std::string own = program_key(source);
  const std::size_t at = bundle.find('\n' + own + '\n');
  const bool bundled = at != std::string::npos;
  const std::string& key = bundled ? bundle : own;
  const auto lines = std::ranges::count(std::string_view(bundle).substr(0, bundled ? at : 0), '\n');
  const std::string entry =
      bundled ? bundled_entry(source.entry, static_cast<std::size_t>(lines) / kKeyLines)
              : source.entry;
  return pools_.get(key + '\n' + entry, [&] {
    const auto program = programs_.get(key, [&] { return build(source); });
    if (program->refusal) throw Error(*program->refusal);
    return std::make_shared<KernelPool>(program->handle.get(), device_, entry);
  });
}

std::string Runtime::expect(std::span<const KernelSource> sources) {
  if (cache_binaries_) return {};  // single programs load fast from disk
  std::vector<KernelSource> wanted;
  std::string bundle = "\n", all = "\n";
  for (const KernelSource& source : sources) {
    const std::string key = program_key(source);
    all += key + '\n';
    const auto known = programs_.find(key);
    if (known && known->refusal) continue;
    wanted.push_back(source);
    bundle += key + '\n';
  }
  if (wanted.size() < 2) return {};
  // If these kernels failed to build together before, build them separately; the ones that were
  // refused are known since then.
  if (const auto tried = programs_.find(all); tried && !tried->handle) return {};
  const auto program = programs_.get(bundle, [&] { return build_bundle(wanted); });
  return program->handle ? bundle : std::string{};
}

RuntimeTuning Runtime::tuning() const {
  const std::scoped_lock lock(tuning_mutex_);
  return tuning_;
}

void Runtime::set_tuning(std::shared_ptr<const TuningTable> table) {
  const std::scoped_lock lock(tuning_mutex_);
  tuning_ = {std::move(table), tuning_.revision + 1};
}

Buffer Runtime::share(std::span<std::byte> memory) const {
  if (memory.empty()) throw_invalid("memory: 0 bytes, legal: at least 1");
  return allocate(memory.size(), CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, memory.data());
}

Buffer Runtime::allocate(std::size_t size_bytes, cl_mem_flags flags, const void* content) const {
  const DeviceCapabilities& device = capabilities_;
  throw_unsupported_if(
      size_bytes > device.max_alloc_bytes,
      "a buffer of {} bytes was asked for; {} allows at most {} bytes in one buffer", size_bytes,
      device.name, device.max_alloc_bytes);
  cl_int status = CL_SUCCESS;
  // OpenCL has no empty buffers, callers have empty tensors.
  MemoryHandle memory(clCreateBuffer(context_.get(), flags,
                                     std::max<std::size_t>(size_bytes, content != nullptr ? 1 : 4),
                                     const_cast<void*>(content),  // NOLINT: OpenCL's signature
                                     &status));
  if (status != CL_SUCCESS) {
    check(status, fmt::format("allocating {} bytes on {} ({} bytes of memory)", size_bytes,
                              device.name, device.global_mem_bytes));
  }
  return Buffer::own(memory.release(), size_bytes);
}

void Runtime::note_build_failure(std::string_view kernel, std::string_view why) {
  const bool is_new = [&] {
    const std::scoped_lock lock(failures_mutex_);
    return failures_.emplace(kernel, why).second;
  }();
  if (is_new) log(LogLevel::kInfo, "{} is not used: {}", kernel, why);
}

std::vector<std::string> Runtime::build_failures() const {
  const std::scoped_lock lock(failures_mutex_);
  std::vector<std::string> sentences;
  sentences.reserve(failures_.size());
  for (const auto& [kernel, why] : failures_)
    sentences.push_back(fmt::format("{}: {}", kernel, why));
  return sentences;
}

}  // namespace clattn::detail

namespace clattn {
namespace {

/// The contexts that were made; those that are gone are dropped when the next one comes.
struct Made {
  std::mutex mutex;
  std::vector<std::weak_ptr<Context>> contexts;
};

Made& made() {
  static auto* const all = new Made;  // outlives contexts that are static themselves
  return *all;
}

std::shared_ptr<Context> registered(std::shared_ptr<Context> context) {
  const std::scoped_lock lock(made().mutex);
  std::erase_if(made().contexts, [](const auto& other) { return other.expired(); });
  made().contexts.push_back(context);
  return context;
}

}  // namespace

Context::~Context() = default;

std::shared_ptr<Context> Context::create(std::string_view selector) {
  return create(select_device(selector));
}

std::shared_ptr<Context> Context::create(const Device& device) {
  return registered(std::shared_ptr<Context>(new Context(detail::Runtime::create(device))));
}

std::shared_ptr<Context> Context::adopt(cl_context context, cl_device_id device) {
  return registered(std::shared_ptr<Context>(new Context(detail::Runtime::adopt(context, device))));
}

std::shared_ptr<Context> Context::of(cl_command_queue queue) {
  detail::throw_invalid_if(queue == nullptr, "queue: null");
  const auto context = detail::queue_value<cl_context>(queue, CL_QUEUE_CONTEXT);
  const auto device = detail::queue_value<cl_device_id>(queue, CL_QUEUE_DEVICE);
  {
    const std::scoped_lock lock(made().mutex);
    for (const std::weak_ptr<Context>& other : made().contexts) {
      std::shared_ptr<Context> alive = other.lock();
      if (alive != nullptr && alive->handle() == context && alive->device() == device) return alive;
    }
  }
  return adopt(context, device);
}

cl_context Context::handle() const noexcept {
  return runtime().context();
}
cl_device_id Context::device() const noexcept {
  return runtime().device();
}
const DeviceCapabilities& Context::capabilities() const noexcept {
  return runtime().capabilities();
}
std::vector<std::string> Context::build_failures() const {
  return runtime().build_failures();
}
std::string Context::program_cache_problem() const {
  return runtime().program_cache_problem();
}

Queue Context::create_queue(QueueProfiling profiling) const {
  return runtime().create_queue(profiling);
}
Buffer Context::allocate(std::size_t size_bytes) const {
  return runtime().allocate(size_bytes);
}
Buffer Context::share(std::span<std::byte> memory) const {
  return runtime().share(memory);
}

}  // namespace clattn
