/// Calls of the public API with random arguments, while the driver fails at random: each returns or
/// throws clattn::Error, afterwards the library computes as before, and no OpenCL object is left.
///
///     clattn_random_calls [CALLS [SEED [ONE_IN [NAME]]]]
///
/// makes CALLS calls (20000), of which the driver's fail about once in ONE_IN (100; 0: never). What
/// a call does follows from SEED (1) and what the driver did before. NAME
/// restricts the run to calls whose names contain it ("three threads").

#include <fmt/format.h>
#include <unistd.h>

#include <clattn/error.hpp>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>

#include "random_calls/driver_faults.hpp"
#include "random_calls/world.hpp"

using namespace clattn;
using test::World;

/// What drivers leave is not the library's: read by the address sanitizer where it is linked.
extern "C" const char* __lsan_default_suppressions();  // NOLINT(bugprone-reserved-identifier)
extern "C" const char* __lsan_default_suppressions() {
  return "leak:libpocl\nleak:libLLVM\nleak:libOpenCL\n";
}

static std::int64_t current_call = 0;
static const char* current_name = "start";

// Names the call that ended the process.
static void report_signal(int signal) {
  const std::string text =
      fmt::format("signal {} in call {}: {}\n", signal, current_call, current_name);
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  std::_Exit(2);
}

// One step over known values, with builders and kernels that failures may have met: its bytes.
static std::vector<std::byte> known_step(World& world, test::Paged& layer) {
  const std::vector<std::int32_t> starts = {0, 1, 12}, lengths = {20, 11}, table = {1, 2, 3, 0};
  auto& queue = world.queue;
  queue.finish();
  const Buffer tensor = world.context->allocate(std::size_t{12} * 4 * 32 * 4);
  const Buffer output = world.context->allocate(tensor.size_bytes());
  queue.fill(tensor, 0x3C003C00, 0, tensor.size_bytes());
  queue.fill(layer.cache.buffer, 0, 0, layer.cache.buffer.size_bytes());
  if (layer.cache.scales) queue.fill(layer.cache.scales, 0x3F800000, 0, 8);
  layer.metadata =
      &layer.builder->build(queue, CommonAttentionMetadata::of(starts, lengths, table));
  layer.impl->write_kv_cache(queue, {tensor.handle()}, {tensor.handle()}, layer.cache,
                             *layer.metadata);
  layer.impl->forward(queue, {.query = {tensor.handle()}, .output = {output.handle()}}, layer.cache,
                      *layer.metadata);
  std::vector<std::byte> bytes(output.size_bytes() / (4 / element_size_bytes(layer.config.dtype)));
  queue.read(output, bytes);
  return bytes;
}

/// All calls by their weight, or those with a name.
class Drawer {
 public:
  explicit Drawer(std::string_view name) {
    for (const test::RandomCall& call : test::random_calls()) {
      const bool wanted = std::string_view(call.name).find(name) != std::string_view::npos;
      weights_.push_back(wanted ? call.weight : 0);
    }
    all_ = std::accumulate(weights_.begin(), weights_.end(), std::int64_t{0});
    if (all_ == 0) throw std::runtime_error("no call has this name");
  }
  std::size_t draw(test::Dice& dice) const {
    std::int64_t left = dice.below(all_);
    std::size_t drawn = 0;
    while ((left -= weights_[drawn]) >= 0) ++drawn;
    return drawn;
  }

 private:
  std::vector<std::int64_t> weights_;
  std::int64_t all_ = 0;
};

struct Counts {
  std::int64_t returned = 0;
  std::int64_t refused = 0;  ///< invalid or unsupported
  std::int64_t failed = 0;   ///< the driver's failure
};

static bool call_once(World& world, const Drawer& drawer, std::vector<Counts>& all) {
  const std::size_t drawn = drawer.draw(world.dice);
  const test::RandomCall& call = test::random_calls()[drawn];
  Counts& counts = all[drawn];
  current_name = call.name;
  try {
    call.run(world);
    ++counts.returned;
  } catch (const Error& error) {
    ++(error.code() == ErrorCode::kOpenCL ? counts.failed : counts.refused);
  } catch (const std::exception& other) {
    fmt::print(stderr, "call {}: {} threw what is no clattn::Error: {}\n", current_call, call.name,
               other.what());
    return false;
  }
  return true;
}

// Every layer's known step is what it was at first.
static bool computes_as_before(World& world) {
  for (test::Paged& layer : world.layers) {
    const auto bytes = known_step(world, layer);
    if (layer.known.empty()) layer.known = bytes;
    if (layer.known == bytes) continue;
    fmt::print(stderr, "call {}: a layer of {} computes other bytes than before\n", current_call,
               to_string(layer.config.dtype));
    return false;
  }
  return graphs_compute_as_before(world) && session_computes_as_before(world);
}

static bool run(std::int64_t calls, std::uint64_t seed, std::uint64_t one_in, const Drawer& drawer,
                std::vector<Counts>& counts) {
  constexpr std::int64_t kCallsBetweenChecks = 2000;
  test::driver::set_faults(0, seed);
  World world(seed);
  for (current_call = 0; current_call < calls; ++current_call) {
    if (current_call % kCallsBetweenChecks == 0) {
      test::driver::set_faults(0);
      current_name = "known step";
      if (!computes_as_before(world)) return false;
      test::driver::set_faults(one_in);
    }
    if (!call_once(world, drawer, counts)) return false;
  }
  test::driver::set_faults(0);
  current_name = "end";
  return computes_as_before(world);
}

static void print_counts(const std::vector<Counts>& counts) {
  const auto line = [](std::string_view name, const Counts& of) {
    fmt::print("{:<44}{:>10}{:>10}{:>10}\n", name, of.returned, of.refused, of.failed);
  };
  fmt::print("{:<44}{:>10}{:>10}{:>10}\n", "call", "returned", "refused", "failed");
  Counts all;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    line(test::random_calls()[i].name, counts[i]);
    all.returned += counts[i].returned;
    all.refused += counts[i].refused;
    all.failed += counts[i].failed;
  }
  line("all", all);
}

int main(int count, char** arguments) try {
  for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL}) {
    std::signal(signal, report_signal);
  }
  const auto argument = [&](int index, const char* standard) {
    return std::stoull(count > index ? arguments[index] : standard);
  };
  const std::uint64_t calls = argument(1, "20000");
  const std::uint64_t one_in = argument(3, "100");
  std::vector<Counts> counts(test::random_calls().size());
  const Drawer drawer(count > 4 ? arguments[4] : "");
  if (!run(static_cast<std::int64_t>(calls), argument(2, "1"), one_in, drawer, counts)) return 1;
  print_counts(counts);
  fmt::print("{} of the driver's {} calls failed\n", test::driver::num_faults(),
             test::driver::num_calls());
  if (const auto left = test::driver::num_references(); left != 0) {
    fmt::print(stderr, "{} references to OpenCL objects are left\n", left);
    return 1;
  }
  return 0;
} catch (const std::exception& error) {
  fmt::print(stderr, "{}\n", error.what());
  return 1;
}
