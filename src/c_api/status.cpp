#include <clattn/log.hpp>
#include <new>
#include <string>
#include <utility>

#include "c_api/handles.hpp"

namespace clattn::c_api {
namespace {

struct LastError {
  std::string text;
  cl_int cl_code = CL_SUCCESS;
};
thread_local LastError last_error;

ClattnResult keep(ClattnResult status, const char* text, cl_int cl_code = CL_SUCCESS) noexcept {
  last_error.cl_code = cl_code;
  try {
    last_error.text = text;
  } catch (const std::bad_alloc&) {
    last_error.text.clear();
  }
  return status;
}

constexpr ClattnResult status_of(ErrorCode code) {
  return static_cast<ClattnResult>(static_cast<int>(code) + 1);
}
static_assert(status_of(ErrorCode::kInvalidArgument) == CLATTN_ERROR_INVALID_ARGUMENT);
static_assert(status_of(ErrorCode::kUnsupported) == CLATTN_ERROR_UNSUPPORTED);
static_assert(status_of(ErrorCode::kOpenCL) == CLATTN_ERROR_OPENCL);
static_assert(status_of(ErrorCode::kIo) == CLATTN_ERROR_IO);
static_assert(status_of(ErrorCode::kOutOfBlocks) == CLATTN_ERROR_OUT_OF_BLOCKS);

}  // namespace

ClattnResult keep_error() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return keep(status_of(error.code()), error.what(), error.cl_code());
  } catch (const std::bad_alloc&) {
    return keep(CLATTN_ERROR_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& error) {
    return keep(CLATTN_ERROR_INTERNAL, error.what());
  } catch (...) {
    return keep(CLATTN_ERROR_INTERNAL, "an exception of unknown type");
  }
}

void copy_text(std::string_view source, char* text, std::size_t capacity, std::size_t* size) {
  detail::throw_invalid_if(text == nullptr && capacity > 0,
                           "text is null with a capacity of {}, legal: a buffer of that size",
                           capacity);
  if (size != nullptr) *size = source.size() + 1;
  if (capacity == 0) return;
  const std::size_t copied = source.copy(text, capacity - 1);
  text[copied] = '\0';
}

std::string lines(std::span<const std::string> texts) {
  std::string all;
  for (const std::string& text : texts) all += text + '\n';
  return all;
}

}  // namespace clattn::c_api

using clattn::c_api::last_error;

uint32_t clattn_abi_version() {
  return CLATTN_ABI_VERSION;
}

const char* clattn_version() {
  return CLATTN_VERSION;
}

const char* clattn_result_name(ClattnResult status) {
  static constexpr std::pair<ClattnResult, const char*> kNames[] = {
      {CLATTN_SUCCESS, "CLATTN_SUCCESS"},
      {CLATTN_ERROR_INVALID_ARGUMENT, "CLATTN_ERROR_INVALID_ARGUMENT"},
      {CLATTN_ERROR_UNSUPPORTED, "CLATTN_ERROR_UNSUPPORTED"},
      {CLATTN_ERROR_OPENCL, "CLATTN_ERROR_OPENCL"},
      {CLATTN_ERROR_IO, "CLATTN_ERROR_IO"},
      {CLATTN_ERROR_OUT_OF_BLOCKS, "CLATTN_ERROR_OUT_OF_BLOCKS"},
      {CLATTN_ERROR_OUT_OF_MEMORY, "CLATTN_ERROR_OUT_OF_MEMORY"},
      {CLATTN_ERROR_INTERNAL, "CLATTN_ERROR_INTERNAL"},
  };
  for (const auto& [known, name] : kNames) {
    if (known == status) return name;
  }
  return "unknown status";
}

const char* clattn_last_error() {
  return last_error.text.c_str();
}

cl_int clattn_last_cl_error() {
  return last_error.cl_code;
}

ClattnResult clattn_set_log(int32_t level, ClattnLogSink sink, void* user) {
  return clattn::c_api::guarded([&] {
    constexpr auto kHighest = static_cast<int32_t>(clattn::LogLevel::kTrace);
    clattn::detail::throw_invalid_if(level < 0 || level > kHighest, "level is {}, legal: 0 to {}",
                                     level, kHighest);
    clattn::LogSink to_sink;
    if (sink != nullptr) {
      to_sink = [sink, user](clattn::LogLevel of, std::string_view message) {
        sink(user, static_cast<int32_t>(of), std::string(message).c_str());
      };
    }
    clattn::set_log(static_cast<clattn::LogLevel>(level), std::move(to_sink));
  });
}
