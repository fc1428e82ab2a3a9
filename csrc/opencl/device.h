/* SPDX-License-Identifier: MIT
 *
 * The devices of this machine and what each can do. A ca_runtime is made at the first
 * call that needs a device and lives until the module goes; its devices live as long.
 * No OpenCL type crosses this header, so that op_* and py_* can include it.
 */
#ifndef CLATTN_CL_DEVICE_H
#define CLATTN_CL_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/tensor.h" /* ca_extent */

typedef struct ca_runtime ca_runtime;
typedef struct ca_device ca_device;

typedef enum {
    CA_DEVICE_GPU,
    CA_DEVICE_ACCELERATOR,
    CA_DEVICE_CPU,
} ca_device_type; /* in the order of preference */

/* How kernels reach host memory, best first. */
typedef enum {
    CA_MEMORY_SVM,      /* fine-grained system SVM: any host pointer, as it is */
    CA_MEMORY_HOST_PTR, /* CL_MEM_USE_HOST_PTR on a device that shares the memory */
    CA_MEMORY_COPY,     /* pooled device buffers, written and read */
} ca_memory_mode;

/* nvidia_capability from which on kernels have PTX: to shuffle, and for matrix units. */
#define CA_NVIDIA_SHUFFLES     70
#define CA_NVIDIA_MATRIX_UNITS 80

typedef struct {
    char name[128];
    char vendor[128];
    char platform[128];
    char version[128];        /* CL_DEVICE_VERSION */
    char driver_version[128]; /* CL_DRIVER_VERSION */
    char c_version[128];      /* CL_DEVICE_OPENCL_C_VERSION */
    ca_device_type type;
    int64_t compute_units;
    int64_t global_memory;      /* bytes */
    int64_t max_allocation;     /* bytes, of one buffer */
    int64_t local_memory;       /* bytes */
    int64_t cache;              /* bytes, of the last one, or of one before it */
    int64_t max_work_group;     /* work-items */
    int64_t max_parameter_size; /* bytes of kernel arguments */
    int64_t float_width;        /* native lanes of a float vector */
    int64_t sub_groups;         /* the sizes that a kernel may require, added up: each
                                   is a power of 2; they can shuffle. 0: there are
                                   none */
    int64_t nvidia_capability;  /* 80 for sm_80; 0: not NVIDIA's, or its driver takes
                                   no PTX: final when the device is prepared */
    bool float64;               /* cl_khr_fp64 */
    bool float16;               /* cl_khr_fp16; storage needs no extension */
    bool keeps_programs;        /* the driver caches built programs on disk itself */
    bool bfloat16_pairs;        /* see ca_device_find_pairs */
    ca_memory_mode memory;
} ca_device_info;

/* Open the loader (ca_cl_open's arguments), enumerate every platform's devices and
   sort them: by type as above, on CPUs those with CA_MEMORY_SVM first, else in the
   loader's order. No context is made yet.
   `cache_folder` (copied; NULL: no disk cache) is where built programs are kept.
   `memory_override` "svm", "host" or "copy" (NULL or "": the best the device has);
   a device that lacks the mode is passed over with that reason.
   CA_ERROR_DEVICE when there is no loader, no platform or no device. */
ca_status ca_runtime_open(const char *const *preload, const char *const *candidates,
                          const char *cache_folder, const char *memory_override,
                          ca_runtime **runtime, ca_error *error);

void ca_runtime_close(ca_runtime *runtime); /* NULL is fine */

/* CA_ERROR_DEVICE in a child forked after the runtime was opened: its drivers' threads
   are gone, so nothing may be called on it but the accessors below. */
ca_status ca_runtime_check_fork(const ca_runtime *runtime, ca_error *error);

int ca_runtime_device_count(const ca_runtime *runtime);
ca_device *ca_runtime_device(const ca_runtime *runtime, int index);

/* The first usable device; one that cannot build the probe kernel is passed over.
   CA_ERROR_DEVICE with each one's reason when none is usable. */
ca_status ca_runtime_default_device(ca_runtime *runtime, ca_device **device,
                                    ca_error *error);

/* The device that `words` name: "cpu", "gpu", "accelerator", one of these with ":1"
   for the second of its type, or a part of the platform's or device's name in any
   case. The first usable match. CA_ERROR_VALUE naming `what`, the words and the
   devices there are when nothing matches; CA_ERROR_DEVICE with the reason when the
   only matches are unusable. */
ca_status ca_runtime_find_device(ca_runtime *runtime, const char *words,
                                 const char *what, ca_device **device, ca_error *error);

const ca_device_info *ca_device_get_info(const ca_device *device);

/* True if one of the extents is larger than a buffer of the device may be. */
bool ca_exceeds_device(const ca_device_info *info, const ca_extent *extents, int count);

/* Make the context and the queue and run the probe kernel, once. What the probe says is
   final; a context or memory that could not be had is tried again at the next call.
   Thread-safe. CA_ERROR_DEVICE where the device is unusable, or in a forked child. */
ca_status ca_device_prepare(ca_device *device, ca_error *error);

/* Prepare the device and find out, once, whether kernels/support/bfloat16_pairs.clh runs on it;
   only then may info->bfloat16_pairs be read. Fails as ca_device_prepare does. */
ca_status ca_device_find_pairs(ca_device *device, ca_error *error);

#endif
