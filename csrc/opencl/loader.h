/* SPDX-License-Identifier: MIT
 *
 * The OpenCL ICD loader, opened at first use, as a table of the functions clattn calls.
 * Only this room includes this header.
 */
#ifndef CLATTN_OPENCL_LOADER_H
#define CLATTN_OPENCL_LOADER_H

#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <CL/cl.h>
#include <CL/cl_icd.h>

#include "base/status.h"

/* One line per function. Those of OpenCL 2.0 and later may be missing in an old loader
   and are NULL then. */
#define CA_CL_FUNCTIONS(X)                                                             \
    X(clGetPlatformIDs)                                                                \
    X(clGetPlatformInfo)                                                               \
    X(clGetDeviceIDs)                                                                  \
    X(clGetDeviceInfo)                                                                 \
    X(clCreateContext)                                                                 \
    X(clReleaseContext)                                                                \
    X(clCreateCommandQueue)                                                            \
    X(clReleaseCommandQueue)                                                           \
    X(clCreateProgramWithSource)                                                       \
    X(clCreateProgramWithBinary)                                                       \
    X(clBuildProgram)                                                                  \
    X(clGetProgramInfo)                                                                \
    X(clGetProgramBuildInfo)                                                           \
    X(clReleaseProgram)                                                                \
    X(clCreateKernel)                                                                  \
    X(clReleaseKernel)                                                                 \
    X(clSetKernelArg)                                                                  \
    X(clGetKernelWorkGroupInfo)                                                        \
    X(clCreateBuffer)                                                                  \
    X(clReleaseMemObject)                                                              \
    X(clEnqueueReadBuffer)                                                             \
    X(clEnqueueWriteBuffer)                                                            \
    X(clEnqueueMapBuffer)                                                              \
    X(clEnqueueUnmapMemObject)                                                         \
    X(clEnqueueNDRangeKernel)                                                          \
    X(clWaitForEvents)                                                                 \
    X(clGetEventInfo)                                                                  \
    X(clRetainEvent)                                                                   \
    X(clReleaseEvent)                                                                  \
    X(clFlush)                                                                         \
    X(clFinish)

#define CA_CL_OPTIONAL_FUNCTIONS(X) X(clSetKernelArgSVMPointer)

typedef struct {
    void *library;
#define CA_CL_MEMBER(name) cl_api_##name name;
    CA_CL_FUNCTIONS(CA_CL_MEMBER)
    CA_CL_OPTIONAL_FUNCTIONS(CA_CL_MEMBER)
#undef CA_CL_MEMBER
} ca_cl;

/* Open `preload` libraries (NULL-ended, visible to what follows; those that fail are
   skipped), then the first of `candidates` (NULL-ended) that opens and has every
   required function. CA_ERROR_DEVICE with what was tried otherwise. */
ca_status ca_cl_open(ca_cl *cl, const char *const *preload,
                     const char *const *candidates, ca_error *error);

/* "CL_OUT_OF_RESOURCES" */
const char *ca_cl_error_name(cl_int code);

/* Turn a failed call into a status: CA_ERROR_MEMORY for the codes that mean memory,
   CA_ERROR_DEVICE otherwise; the message names call, code and device. */
ca_status ca_cl_error_set(ca_error *error, cl_int code, const char *call,
                          const char *device_name);

#endif
