#include "base/log.hpp"

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <mutex>

#include "base/environment.hpp"

namespace clattn {
namespace {

void print(LogLevel level, std::string_view message) {
  fmt::print(stderr, "clattn {}: {}\n", detail::kLogLevels.at(static_cast<std::size_t>(level)),
             message);
}

// One callback is all that an engine needs to feed its own log, so a logging library would only
// add a second set of levels, sinks and formats to it.
struct Log {
  std::atomic<LogLevel> level = detail::environment().log_level;
  std::mutex mutex;  // guards sink, and keeps messages apart
  LogSink sink = print;
};
Log& the_log() {
  static Log log;
  return log;
}

}  // namespace

void set_log(LogLevel level, LogSink sink) {
  Log& log = the_log();
  const std::scoped_lock lock(log.mutex);
  log.sink = sink ? std::move(sink) : print;
  log.level = level;
}

namespace detail {

bool logs(LogLevel level) {
  return level <= the_log().level.load(std::memory_order_relaxed);
}

void write_log(LogLevel level, std::string_view message) {
  Log& log = the_log();
  const std::scoped_lock lock(log.mutex);
  log.sink(level, message);
}

}  // namespace detail
}  // namespace clattn
