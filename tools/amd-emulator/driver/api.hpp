// The functions that the driver implements, each named as OpenCL's but for the prefix.
#pragma once
#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_0_APIS
#define CL_USE_DEPRECATED_OPENCL_1_1_APIS
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#define CL_USE_DEPRECATED_OPENCL_2_0_APIS
#define CL_USE_DEPRECATED_OPENCL_2_1_APIS
#define CL_USE_DEPRECATED_OPENCL_2_2_APIS
#include <CL/cl.h>
#include <CL/cl_ext.h>
#include <CL/cl_icd.h>

namespace amdemu {

#define AMDEMU_FUNCTION(NAME) decltype(::cl##NAME) NAME;
#include "driver/functions.inc"
#undef AMDEMU_FUNCTION

/// What objects begin with, for the loader.
cl_icd_dispatch* dispatch_table();

}  // namespace amdemu
