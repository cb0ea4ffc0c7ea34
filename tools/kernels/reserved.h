/* Words of OpenCL C 2.0 and later that some drivers also reserve in OpenCL C 1.2: NVIDIA's accepts
   none of these as a name. */
#pragma GCC poison pipe generic __generic __pipe uniform
