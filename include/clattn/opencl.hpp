#pragma once

// The one way in which this library's headers reach OpenCL's: an application that targets another
// version says so before.
#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 300
#endif
#include <CL/cl.h>
