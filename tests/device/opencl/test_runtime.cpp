// The adopted queue is made as an application on any platform would make it.
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

#include "device/runtime_fixture.hpp"
#include "opencl/device/device_info.hpp"
#include "support/error_text.hpp"

namespace clattn::detail {
namespace test_runtime {

using test::error_text;
using testing::HasSubstr;

/// A kernel `entry` that writes `expression`, made by functions and macros of one name in all
/// files.
std::string probe_of(const std::string& entry, const std::string& expression) {
  return "#define CLA_RESULT(x) (" + expression + ")\n" +
         "int cla_result(int x) { return CLA_RESULT(x); }\n"
         "__kernel void clattn_" +
         entry + "(__global int* out, int x) { out[get_global_id(0)] = cla_result(x); }\n";
}

class RuntimeDevice : public RuntimeFixture {
 protected:
  /// Two kernels that may be built together: 5 + 3 and 5 * 4 for result_of().
  std::vector<KernelSource> write_probes() {
    write_kernel("sum.cl", probe_of("sum", "x + CLA_STEP"));
    write_kernel("product.cl", probe_of("product", "x * CLA_STEP"));
    options_.keep_all_binaries = false;
    return {{"sum.cl", "clattn_sum", "-DCLA_STEP=3"},
            {"product.cl", "clattn_product", "-DCLA_STEP=4"}};
  }
};
INSTANTIATE_TEST_SUITE_P(All, RuntimeDevice, testing::ValuesIn(list_devices()), device_suffix);

TEST_P(RuntimeDevice, CapabilityRecordIsSane) {
  const DeviceCapabilities record = make_runtime()->capabilities();
  EXPECT_FALSE(record.name.empty());
  EXPECT_FALSE(record.platform_name.empty());
  EXPECT_THAT(record.device_version, HasSubstr("OpenCL"));
  EXPECT_GE(record.compute_units, 1);
  EXPECT_GE(record.max_work_group_size, 1U);
  EXPECT_GE(record.max_alloc_bytes, 1U << 20U);
  EXPECT_GE(record.global_mem_bytes, record.max_alloc_bytes);
  EXPECT_GE(record.static_local_mem_bytes, 16U << 10U);  // the least that OpenCL 1.2 promises is 32
  EXPECT_GE(record.wave_size, record.inline_ptx ? 1 : 0);
  EXPECT_GE(record.float_vector_width, 1);
  EXPECT_LT(record.native_exp2_error, 1e-3F);  // the worst that was seen of a driver is 7e-5
  if (record.kind != DeviceKind::kGpu) {
    EXPECT_FALSE(record.inline_ptx);
  }
}

TEST_P(RuntimeDevice, ProgramsOfOneFileAndOptionsAreBuiltOnce) {
  const auto runtime = make_runtime();
  EXPECT_EQ(run_probe(*runtime), expected(100, 3));
  EXPECT_EQ(run_probe(*runtime, "clattn_probe_subtract"), expected(100, -3));
  EXPECT_EQ(runtime->build_counts().from_source, 1U);
  EXPECT_EQ(run_probe(*runtime, "clattn_probe_add", "-DCLA_STEP=5"), expected(100, 5));
  EXPECT_EQ(runtime->build_counts().from_source, 2U);
  EXPECT_EQ(runtime->build_counts().from_cache, 0U);
}

cl_int result_of(Runtime& runtime, const KernelSource& source, const std::string& bundle = {}) {
  const Queue queue = runtime.create_queue(QueueProfiling::kOff);
  const Buffer out = runtime.allocate(sizeof(cl_int));
  runtime.kernel(source, bundle)->acquire().arg(out.handle()).arg(cl_int{5}).enqueue(queue, 1, 1);
  cl_int result = 0;
  queue.read(out, std::as_writable_bytes(std::span(&result, 1)));
  return result;
}

/// So many kernels are one program on PoCL, elsewhere one each.
void expect_programs(const Runtime& runtime, std::size_t kernels) {
  const bool pocl = runtime.capabilities().platform_name == "Portable Computing Language";
  const BuildCounts counts = runtime.build_counts();
  EXPECT_EQ(counts.from_source + counts.from_cache, pocl ? 1U : kernels);
}

TEST_P(RuntimeDevice, ExpectedKernelsAreOneProgramWhereThatPays) {
  const std::vector<KernelSource> sources = write_probes();
  const auto runtime = make_runtime();
  const std::string bundle = runtime->expect(sources);
  EXPECT_EQ(runtime->expect(sources), bundle);
  EXPECT_EQ(result_of(*runtime, sources[0], bundle), 8);
  EXPECT_EQ(result_of(*runtime, sources[1], bundle), 20);
  expect_programs(*runtime, 2);
}

TEST_P(RuntimeDevice, KernelsOfOneFileAreBuiltTogether) {
  std::vector<KernelSource> sources = write_probes();
  sources.push_back(sources[0]);
  sources[2].options = "-DCLA_STEP=6";
  const auto runtime = make_runtime();
  const std::string bundle = runtime->expect(sources);
  EXPECT_EQ(result_of(*runtime, sources[2], bundle), 11);
  EXPECT_EQ(result_of(*runtime, sources[0], bundle), 8);
  EXPECT_EQ(result_of(*runtime, sources[1], bundle), 20);
  expect_programs(*runtime, 3);
}

TEST_P(RuntimeDevice, KernelsBuiltTogetherHaveTheDevicesMacros) {
  for (const char* name : {"CLA_NATIVE", "CLA_NATIVE_EXP2"}) {
    const std::string macro = name;
    write_kernel("macro.cl", "#ifndef " + macro + "\n#define " + macro + " 7\n#endif\n" +
                                 probe_of("macro", "x + " + macro));
    std::vector<KernelSource> sources = write_probes();
    sources.insert(sources.begin(), {"macro.cl", "clattn_macro", ""});
    const auto runtime = make_runtime();
    const int alone = result_of(*runtime, sources[0]);
    EXPECT_LT(alone, 5 + 7) << macro;
    EXPECT_EQ(result_of(*runtime, sources[0], runtime->expect(sources)), alone) << macro;
  }
}

// P7: a driver's cache knows a program by its source.
TEST_P(RuntimeDevice, P7_WhatIsBuiltTogetherDoesNotFollowFromWhatWasBuiltBefore) {
  const std::vector<KernelSource> sources = write_probes();
  const auto first = make_runtime(), second = make_runtime();
  EXPECT_EQ(result_of(*first, sources[0]), 8);
  const std::string bundle = first->expect(sources);
  EXPECT_EQ(bundle, second->expect(sources));
  EXPECT_EQ(result_of(*first, sources[0], bundle), 8);
  EXPECT_EQ(result_of(*first, sources[1], bundle), 20);
  const bool pocl = first->capabilities().platform_name == "Portable Computing Language";
  EXPECT_EQ(bundle.empty(), !pocl);
  EXPECT_EQ(first->build_counts().from_source + first->build_counts().from_cache, 2U);
}

TEST_P(RuntimeDevice, ARefusedKernelKeepsNoOthersApart) {
  std::vector<KernelSource> sources = write_probes();
  write_kernel("bad.cl", probe_of("bad", "undeclared_name"));
  sources.insert(sources.begin(), {"bad.cl", "clattn_bad", "-DCLA_STEP=5"});
  const auto runtime = make_runtime();
  EXPECT_THAT(error_text([&] { runtime->kernel(sources[0]); }, ErrorCode::kOpenCL),
              HasSubstr("bad.cl:"));
  const std::string bundle = runtime->expect(sources);
  EXPECT_EQ(result_of(*runtime, sources[1], bundle), 8);
  EXPECT_EQ(result_of(*runtime, sources[2], bundle), 20);
  const bool pocl = runtime->capabilities().platform_name == "Portable Computing Language";
  EXPECT_EQ(runtime->build_counts().from_source, pocl ? 1U : 2U);
}

TEST_P(RuntimeDevice, WhatCannotBeBuiltTogetherIsBuiltAlone) {
  write_kernel("sum.cl", probe_of("sum", "x + CLA_STEP"));
  write_kernel("bad.cl", probe_of("bad", "undeclared_name"));
  options_.keep_all_binaries = false;
  const auto runtime = make_runtime();
  const std::vector<KernelSource> sources = {{"sum.cl", "clattn_sum", "-DCLA_STEP=3"},
                                             {"bad.cl", "clattn_bad", "-DCLA_STEP=4"}};
  EXPECT_EQ(runtime->expect(sources), "");
  EXPECT_EQ(result_of(*runtime, sources[0]), 8);
  EXPECT_THAT(error_text([&] { runtime->kernel(sources[1]); }, ErrorCode::kOpenCL),
              HasSubstr("bad.cl:"));
  const std::vector<KernelSource> other = {
      {"sum.cl", "clattn_sum", "-DCLA_STEP=6 -cl-opt-disable"}};
  EXPECT_EQ(runtime->expect(other), "");
  EXPECT_EQ(runtime->build_counts().from_source + runtime->build_counts().from_cache, 1U);
  EXPECT_EQ(result_of(*runtime, other[0]), 11);
}

TEST_P(RuntimeDevice, BuildErrorNamesOurFileAndLine) {
  write_kernel("bad.cl", "\n#include \"lib/bad.clh\"\n__kernel void clattn_bad(void) {}\n");
  write_kernel("lib/bad.clh", "// one\n// two\nint broken(void) { return undeclared_name; }\n");
  const auto runtime = make_runtime();
  const std::string message = error_text(
      [&] {
        runtime->kernel({"bad.cl", "clattn_bad", "-DCLA_X=1"});
      },
      ErrorCode::kOpenCL);
  EXPECT_THAT(message, HasSubstr("building bad.cl with '-cl-std=CL1.2 -w" +
                                 device_macros(runtime->capabilities()) + " -DCLA_X=1' on "));
  EXPECT_THAT(message, HasSubstr("lib/bad.clh:3:"));
  EXPECT_THAT(message, HasSubstr("undeclared_name"));
}

TEST_P(RuntimeDevice, MissingFilesAndEntriesAreNamed) {
  const auto runtime = make_runtime();
  EXPECT_EQ(error_text(
                [&] {
                  runtime->kernel({"none.cl", "clattn_x", ""});
                },
                ErrorCode::kIo),
            "kernel file 'none.cl' not found");
  EXPECT_THAT(error_text(
                  [&] {
                    runtime->kernel({"probe.cl", "clattn_none", "-DCLA_STEP=1"});
                  },
                  ErrorCode::kOpenCL),
              HasSubstr("creating kernel 'clattn_none' failed: CL_INVALID_KERNEL_NAME (-46)"));
}

TEST_P(RuntimeDevice, EightThreadsShareAPool) {
  constexpr int kLaunches = 100;
  const auto runtime = make_runtime();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  threads.reserve(8);
  const std::uint64_t before = dispatch_count();
  for (cl_int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      const auto pool = runtime->kernel({"probe.cl", "clattn_probe_add", "-DCLA_STEP=2"});
      const Queue queue = runtime->create_queue(QueueProfiling::kOff);
      const Buffer out = runtime->allocate(kItems * sizeof(cl_int));
      std::vector<cl_int> result(kItems);
      for (cl_int i = 0; i < kLaunches; ++i) {
        const cl_int start = thread * 1000 + i;
        pool->acquire().arg(out.handle()).arg(start).enqueue(queue, 4, 8);
        queue.read(out, std::as_writable_bytes(std::span(result)));
        if (result != expected(start, 2)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(dispatch_count() - before, 8U * kLaunches);
  EXPECT_EQ(runtime->build_counts().from_source, 1U);
}

TEST_P(RuntimeDevice, LeasesReportWhatTheyRefuse) {
  const auto runtime = make_runtime();
  const auto pool = runtime->kernel({"probe.cl", "clattn_probe_add", "-DCLA_STEP=1"});
  EXPECT_GE(pool->work_group_size(), 1U);
  const Queue queue = runtime->create_queue(QueueProfiling::kOn);
  const Buffer out = runtime->allocate(kItems * sizeof(cl_int));
  KernelLease lease = pool->acquire();
  Event event;
  lease.arg(out.handle()).arg(cl_int{7}).enqueue(queue, 4, 8, &event);
  EXPECT_TRUE(event);
  EXPECT_LT(event.duration_ns(), 1000000000U);
  const std::uint64_t before = dispatch_count();
  lease.enqueue(queue, 0, 8, &event);
  EXPECT_FALSE(event);
  EXPECT_EQ(dispatch_count(), before);
  EXPECT_THAT(error_text([&] { lease.arg(out.handle()).arg(cl_int{7}).arg(cl_int{8}); },
                         ErrorCode::kOpenCL),
              HasSubstr("setting argument 2 of kernel 'clattn_probe_add' failed: "));
  const std::size_t too_many = runtime->capabilities().max_work_group_size * 2;
  EXPECT_THAT(error_text([&] { lease.enqueue(queue, 1, too_many); }, ErrorCode::kOpenCL),
              HasSubstr("groups of " + std::to_string(too_many) +
                        " of kernel 'clattn_probe_add' failed: CL_INVALID_WORK_"));
  EXPECT_THAT(error_text([&] { lease.enqueue(queue, std::size_t{1} << 62U, 8); }),
              HasSubstr("work-items of a launch"));
}

TEST_P(RuntimeDevice, AllocationsAreRefusedWithTheNumbers) {
  const auto runtime = make_runtime();
  const DeviceCapabilities& device = runtime->capabilities();
  const std::string asked = std::to_string(device.max_alloc_bytes + 1);
  EXPECT_EQ(
      error_text([&] { runtime->allocate(device.max_alloc_bytes + 1); }, ErrorCode::kUnsupported),
      "a buffer of " + asked + " bytes was asked for; " + device.name + " allows at most " +
          std::to_string(device.max_alloc_bytes) + " bytes in one buffer");
  const Buffer empty = runtime->allocate(0);
  EXPECT_TRUE(empty);
  EXPECT_EQ(empty.size_bytes(), 0U);
}

TEST_P(RuntimeDevice, CopiesStayInsideTheBuffer) {
  const auto runtime = make_runtime();
  const Queue queue = runtime->create_queue(QueueProfiling::kOff);
  const Buffer buffer = runtime->allocate(16);
  queue.fill(buffer, 0x01020304U, 0, 16);
  std::vector<std::uint32_t> words = {5, 6};
  queue.write(buffer, std::as_bytes(std::span(words)), 4);
  queue.fill(buffer, 0x99U, 12, 4);
  Event done;
  const std::uint32_t first = 8;
  queue.write_async(buffer, std::as_bytes(std::span(&first, 1)), 0, &done);
  done.wait();
  std::vector<std::uint32_t> all(4, 0xdeadbeefU);
  queue.read_async(buffer, std::as_writable_bytes(std::span(all)), 0, &done);
  done.wait();
  EXPECT_EQ(all, (std::vector<std::uint32_t>{8, 5, 6, 0x99}));
  const auto bytes = std::as_writable_bytes(std::span(words));
  EXPECT_EQ(error_text([&] { queue.write(buffer, bytes, 12); }),
            "write: bytes 12 to 20 are not inside a buffer of 16 bytes");
  EXPECT_EQ(error_text([&] { queue.read(buffer, bytes, 17); }),
            "read: bytes 17 to 25 are not inside a buffer of 16 bytes");
  EXPECT_EQ(error_text([&] { queue.read_async(buffer, bytes, 17, &done); }),
            "read: bytes 17 to 25 are not inside a buffer of 16 bytes");
  EXPECT_FALSE(done);
  EXPECT_EQ(error_text([&] { queue.fill(buffer, 0, 2, 4); }),
            "fill: offset 2 and size 4 must be multiples of 4");
}

// P1: what the application wrote before is there, and what the device writes is seen while mapped;
// CPUs work on the memory itself.
TEST_P(RuntimeDevice, P1_ABufferCanLieInTheApplicationsMemory) {
  const auto runtime = make_runtime();
  const Queue queue = runtime->create_queue(QueueProfiling::kOff);
  constexpr std::size_t kPage = 4096;
  alignas(kPage) static std::array<std::uint32_t, kPage / 4> words;
  words.fill(7);
  const Buffer shared = runtime->share(std::as_writable_bytes(std::span(words)));
  ASSERT_EQ(shared.size_bytes(), kPage);
  std::array<std::uint32_t, 2> got{};
  queue.read(shared, std::as_writable_bytes(std::span(got)), kPage - sizeof(got));
  EXPECT_EQ(got[1], 7U);
  queue.fill(shared, 9, 4, kPage - 4);
  {
    const clattn::HostView view = queue.map(shared, clattn::HostAccess::kReadWrite);
    EXPECT_EQ(view.bytes().data(), reinterpret_cast<std::byte*>(words.data()));
    EXPECT_EQ(words[0], 7U);
    EXPECT_EQ(words[1], 9U);
    EXPECT_EQ(words.back(), 9U);
    words[0] = 11;
  }
  queue.read(shared, std::as_writable_bytes(std::span(got)));
  EXPECT_EQ(got, (std::array<std::uint32_t, 2>{11, 9}));
  EXPECT_EQ(error_text([&] { static_cast<void>(runtime->share({})); }),
            "memory: 0 bytes, legal: at least 1");
}

TEST_P(RuntimeDevice, AViewEndsWithItsLastOwner) {
  const auto runtime = make_runtime();
  const Queue queue = runtime->create_queue(QueueProfiling::kOff);
  const Buffer buffer = runtime->allocate(8);
  clattn::HostView kept;
  EXPECT_TRUE(kept.bytes().empty());
  {
    clattn::HostView view = queue.map(buffer, clattn::HostAccess::kWrite);
    ASSERT_EQ(view.bytes().size(), 8U);
    std::ranges::fill(view.bytes(), std::byte{5});
    kept = std::move(view);
  }
  EXPECT_EQ(kept.bytes()[7], std::byte{5});
  kept = {};
  std::array<std::byte, 8> got{};
  queue.read(buffer, got);
  EXPECT_EQ(got[7], std::byte{5});
}

TEST_P(RuntimeDevice, SharedObjectsLiveAsLongAsTheirUsers) {
  const auto runtime = make_runtime();
  std::atomic<int> made{0};
  const auto make = [&] {
    ++made;
    return std::static_pointer_cast<void>(std::make_shared<int>(41));
  };
  std::vector<std::shared_ptr<void>> seen(8);
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (auto& slot : seen) {
    threads.emplace_back([&] { slot = runtime->shared_object("key", make); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& object : seen) EXPECT_EQ(object, seen.front());
  EXPECT_EQ(made, 1);
  EXPECT_NE(runtime->shared_object("other", make), seen.front());
  EXPECT_EQ(made, 2);
  seen.clear();
  runtime->shared_object("key", make);
  EXPECT_EQ(made, 3);
  EXPECT_THROW(runtime->shared_object("bad", []() -> std::shared_ptr<void> { throw 1; }), int);
  EXPECT_NE(runtime->shared_object("bad", make), nullptr);
}

TEST_P(RuntimeDevice, AnApplicationsObjectsAreAdopted) {
  const cl_device_id device = GetParam().id;
  cl_int status = CL_SUCCESS;
  cl_context context = clCreateContext(nullptr, 1, &device, nullptr, nullptr, &status);
  ASSERT_EQ(status, CL_SUCCESS);
  cl_command_queue queue = clCreateCommandQueue(context, device, 0, &status);
  ASSERT_EQ(status, CL_SUCCESS);
  cl_mem memory =
      clCreateBuffer(context, CL_MEM_READ_WRITE, kItems * sizeof(cl_int), nullptr, &status);
  ASSERT_EQ(status, CL_SUCCESS);
  const auto references = [&] {
    cl_uint count = 0;
    clGetContextInfo(context, CL_CONTEXT_REFERENCE_COUNT, sizeof(count), &count, nullptr);
    return count;
  };
  const cl_uint before = references();
  {
    const auto runtime = Runtime::adopt(context, device, options_);
    EXPECT_EQ(runtime->context(), context);
    const Queue adopted_queue = Queue::adopt(queue);
    const Buffer adopted = Buffer::adopt(memory);
    EXPECT_EQ(adopted.size_bytes(), kItems * sizeof(cl_int));
    const auto pool = runtime->kernel({"probe.cl", "clattn_probe_add", "-DCLA_STEP=9"});
    pool->acquire().arg(adopted.handle()).arg(cl_int{1}).enqueue(adopted_queue, 4, 8);
    std::vector<cl_int> result(kItems);
    adopted_queue.read(adopted, std::as_writable_bytes(std::span(result)));
    EXPECT_EQ(result, expected(1, 9));
  }
  EXPECT_EQ(references(), before);
  EXPECT_EQ(clReleaseMemObject(memory), CL_SUCCESS);
  EXPECT_EQ(clReleaseCommandQueue(queue), CL_SUCCESS);
  for (const Device& other : list_devices()) {
    if (other.id == device) continue;
    EXPECT_THAT(error_text([&] { Runtime::adopt(context, other.id, options_); }),
                HasSubstr("not one of the 1 devices of the adopted context"));
  }
  EXPECT_EQ(clReleaseContext(context), CL_SUCCESS);
  EXPECT_THROW(Runtime::adopt(nullptr, device, options_), Error);
  EXPECT_THROW(Queue::adopt(nullptr), Error);
  EXPECT_THROW(Buffer::adopt(nullptr), Error);
}

// The driver answers for all devices of a context at once: ours must be picked out. (PoCL 3.1 has
// no binary to give for any but the first, so either way to a program is right.)
TEST_P(RuntimeDevice, AContextOfSeveralDevicesServesOne) {
  std::vector<cl_device_id> devices;
  for (const Device& other : list_devices()) {
    if (other.platform == GetParam().platform) devices.push_back(other.id);
  }
  cl_int status = CL_SUCCESS;
  cl_context context = clCreateContext(nullptr, static_cast<cl_uint>(devices.size()),
                                       devices.data(), nullptr, nullptr, &status);
  ASSERT_EQ(status, CL_SUCCESS);
  for (int i = 0; i < 2; ++i) {
    const auto runtime = Runtime::adopt(context, GetParam().id, options_);
    EXPECT_EQ(run_probe(*runtime), expected(100, 3));
    const BuildCounts counts = runtime->build_counts();
    EXPECT_EQ(counts.from_source + counts.from_cache, 1U);
  }
  EXPECT_EQ(clReleaseContext(context), CL_SUCCESS);
}

TEST_P(RuntimeDevice, ContextIsTheSameThing) {
  const auto context = Context::create(GetParam());
  EXPECT_EQ(context->device(), GetParam().id);
  EXPECT_EQ(context->handle(), context->runtime().context());
  EXPECT_FALSE(context->capabilities().name.empty());
  const std::string selector =
      fmt::format("{}:{}", GetParam().platform_index, GetParam().device_index);
  EXPECT_EQ(select_device(selector).id, GetParam().id);
  Queue queue = context->create_queue(QueueProfiling::kOn);
  const Queue copy = queue;
  queue = Queue();
  const Buffer buffer = context->allocate(4);
  copy.fill(buffer, 17, 0, 4);
  std::uint32_t word = 0;
  copy.read(buffer, std::as_writable_bytes(std::span(&word, 1)));
  EXPECT_EQ(word, 17U);
  copy.flush();
  copy.finish();
}

}  // namespace test_runtime
}  // namespace clattn::detail
