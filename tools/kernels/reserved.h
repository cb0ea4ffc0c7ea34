/* Words of OpenCL C 2.0 and later that some drivers keep from programs of OpenCL C 1.2, too:
   NVIDIA's takes none of these for a name. */
#pragma GCC poison pipe generic __generic __pipe uniform
