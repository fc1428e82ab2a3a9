/* SPDX-License-Identifier: MIT
 *
 * The OpenCL ICD loader, opened at first use, as a table of the functions that clattn calls.
 * Only this room includes this header.
 */
#ifndef CLATTN_OPENCL_LOADER_H
#define CLATTN_OPENCL_LOADER_H

#define CL_TARGET_OPENCL_VERSION 300
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include <CL/cl.h>
#include <CL/cl_function_types.h>

#include "base/status.h"

/* Required functions, then others, which are NULL if the loader lacks them: those of OpenCL 2, and
   those that take over queues and buffers of other libraries. */
#define CA_CL_FUNCTIONS(X)                                                                         \
    X(clGetPlatformIDs)                                                                            \
    X(clGetPlatformInfo)                                                                           \
    X(clGetDeviceIDs)                                                                              \
    X(clGetDeviceInfo)                                                                             \
    X(clCreateContext)                                                                             \
    X(clReleaseContext)                                                                            \
    X(clCreateCommandQueue)                                                                        \
    X(clReleaseCommandQueue)                                                                       \
    X(clCreateProgramWithSource)                                                                   \
    X(clCreateProgramWithBinary)                                                                   \
    X(clBuildProgram)                                                                              \
    X(clGetProgramInfo)                                                                            \
    X(clGetProgramBuildInfo)                                                                       \
    X(clReleaseProgram)                                                                            \
    X(clCreateKernel)                                                                              \
    X(clReleaseKernel)                                                                             \
    X(clSetKernelArg)                                                                              \
    X(clGetKernelWorkGroupInfo)                                                                    \
    X(clCreateBuffer)                                                                              \
    X(clReleaseMemObject)                                                                          \
    X(clEnqueueReadBuffer)                                                                         \
    X(clEnqueueWriteBuffer)                                                                        \
    X(clEnqueueMapBuffer)                                                                          \
    X(clEnqueueUnmapMemObject)                                                                     \
    X(clEnqueueNDRangeKernel)                                                                      \
    X(clWaitForEvents)                                                                             \
    X(clGetEventInfo)                                                                              \
    X(clRetainEvent)                                                                               \
    X(clReleaseEvent)                                                                              \
    X(clFlush)                                                                                     \
    X(clFinish)

#define CA_CL_OPTIONAL_FUNCTIONS(X)                                                                \
    X(clSetKernelArgSVMPointer)                                                                    \
    X(clGetCommandQueueInfo)                                                                       \
    X(clGetMemObjectInfo)                                                                          \
    X(clRetainCommandQueue)                                                                        \
    X(clRetainContext)                                                                             \
    X(clRetainMemObject)

typedef struct {
    void *library;
#define CA_CL_MEMBER(name) name##_fn name;
    CA_CL_FUNCTIONS(CA_CL_MEMBER)
    CA_CL_OPTIONAL_FUNCTIONS(CA_CL_MEMBER)
#undef CA_CL_MEMBER
} ca_cl;

/* Open the `preload` libraries, whose symbols later ones see; skip those that fail. Then
   open the first of `candidates` that has every required function. Both lists end with
   NULL. CA_ERROR_DEVICE with all that was tried if there is none. */
ca_status ca_cl_open(ca_cl *cl, const char *const *preload, const char *const *candidates,
                     ca_error *error);

/* "CL_OUT_OF_RESOURCES" */
const char *ca_cl_error_name(cl_int code);

/* Returns CA_OK for CL_SUCCESS, CA_ERROR_MEMORY for the codes that mean memory, CA_ERROR_DEVICE
   for other codes. The message names call, code and device. */
ca_status ca_cl_check(cl_int code, const char *call, const char *device_name, ca_error *error);

/* The same for calls that create or launch a kernel: CA_ERROR_KERNEL for codes that say that the
   driver cannot do so with this kernel. */
ca_status ca_cl_check_kernel(cl_int code, const char *call, const char *device_name,
                             ca_error *error);

#endif
