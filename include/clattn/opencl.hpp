#pragma once

// All headers of this library include OpenCL's through this one. An application that targets
// another version defines the macro first.
#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 300
#endif
#include <CL/cl.h>
