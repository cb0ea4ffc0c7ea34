#pragma once

#include <clattn/opencl.hpp>

#include <clattn/types.hpp>
#include <stdexcept>
#include <string>

namespace CLATTN_API clattn {

/// What kind of failure an Error reports.
enum class ErrorCode {
  kInvalidArgument,  ///< the caller passed nonsense: the message names field, value and what is
                     ///< legal
  kUnsupported,  ///< legal, but this backend or device cannot do it: the message lists the reasons
  kOpenCL,       ///< the driver refused: cl_code() holds its code, the message its name
  kIo,           ///< a file could not be read or written: the message names it
  kOutOfBlocks,  ///< too few blocks of a KV cache are free: the message has the numbers. Nothing
                 ///< changed; it works once a request gives up its own
};

/// The only exception type that the library throws on purpose.
class Error : public std::runtime_error {
 public:
  /// `cl_code` belongs to kOpenCL alone.
  Error(ErrorCode code, const std::string& message, cl_int cl_code = CL_SUCCESS)
      : std::runtime_error(message), code_(code), cl_code_(cl_code) {}

  /// What kind of failure it is.
  ErrorCode code() const noexcept { return code_; }
  /// The OpenCL status behind a kOpenCL error, CL_SUCCESS otherwise.
  cl_int cl_code() const noexcept { return cl_code_; }

 private:
  ErrorCode code_;
  cl_int cl_code_;
};

}  // namespace clattn
