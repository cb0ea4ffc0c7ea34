#pragma once

#include <clattn/types.hpp>
#include <cstdint>
#include <functional>
#include <string_view>

namespace CLATTN_API clattn {

/// How much is logged: a level includes those before it.
enum class LogLevel : std::uint8_t {
  kOff,
  kInfo,   ///< which kernels a layer's shape got, and what did not work; once each
  kDebug,  ///< why other kernels were not taken
  kTrace,  ///< every launch
};

/// Takes a message of one or more lines, without a newline at the end.
using LogSink = std::function<void(LogLevel level, std::string_view message)>;

/// Sends messages up to `level` to `sink`, or to standard error if it is null. Until the first
/// call, CLATTN_LOG sets the level for standard error; if it is unset, the library is quiet. The
/// sink is called by the thread whose call logs the message, one message at a time; it must not
/// throw or call the library. Thread-safe.
void set_log(LogLevel level, LogSink sink = nullptr);

}  // namespace clattn
