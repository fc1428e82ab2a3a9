/* SPDX-License-Identifier: MIT
 *
 * What a device can do, in plain numbers. No OpenCL type crosses this header, so that the
 * rooms above can include it.
 */
#ifndef CLATTN_OPENCL_INFO_H
#define CLATTN_OPENCL_INFO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ca_device ca_device;
typedef struct ca_tuning ca_tuning; /* opencl/tuning.h */

typedef enum {
    CA_DEVICE_GPU,
    CA_DEVICE_ACCELERATOR,
    CA_DEVICE_CPU,
} ca_device_type; /* in the order of preference */

/* How kernels reach host memory, best first. */
typedef enum {
    /* Fine-grained system SVM: a kernel takes any host pointer. CPUs, and GPUs that share
       the processor's page tables. */
    CA_MEMORY_SVM,
    /* A buffer over the array (CL_MEM_USE_HOST_PTR), on a device that shares the host's
       memory but takes no pointers. Other CPUs, and GPUs inside a processor. */
    CA_MEMORY_HOST_PTR,
    /* Copies to the device and back, for a device with memory of its own. */
    CA_MEMORY_COPY,
} ca_memory_mode;

/* What kernels use beyond OpenCL C 1.2, where a device has it. */
typedef enum {
    CA_WARP_SHUFFLES,
    CA_WARP_VOTES,
    CA_MATRIX_LOADS,
    CA_FLOAT16_MATRICES,
    CA_BFLOAT16_MATRICES,
    CA_ASYNC_COPIES,
    CA_FLOAT16_GROUPS,
    CA_BFLOAT16_GROUPS,
    CA_LARGE_LOCAL_MEMORY,
    CA_AMPLE_LOCAL_MEMORY,
    CA_GROUP_LOCAL_MEMORY,
    CA_MEMORY_IN_PLACE, /* by the best mode that its driver reports */
    CA_CAPABILITIES,
} ca_capability;

/* Bytes of local memory that a work-group may have on a device whose local memory is ample. NVIDIA's
   devices report less than the driver gives a work-group. */
#define CA_AMPLE_LOCAL_BYTES (96 << 10)

/* The same, of one work-group whose warps multiply together. */
#define CA_GROUP_LOCAL_BYTES (192 << 10)

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
    int64_t cache;              /* bytes of the last cache; some drivers report an earlier one */
    int64_t first_cache;        /* bytes of a core's own first cache; 0: unknown, or no CPU */
    int64_t second_cache;       /* and of its second cache */
    int64_t max_work_group;     /* work-items */
    int64_t max_parameter_size; /* bytes of kernel arguments */
    int64_t float_width;        /* native lanes of a float vector */
    /* The work-items of a group are lanes: GPUs, and CPUs whose compiler has no vectors of a
       work-item's own. Kernels for GPUs are the fast ones then. */
    bool items_are_lanes;
    /* The smallest size of sub-groups that a kernel may require. There a work-item has the most
       registers. 0: none, or the device is a CPU. */
    int64_t smallest_sub_group;
    int64_t registers; /* of 32 bits, that a work-item may keep without spills; see query.c */
    /* What kernels have as NVIDIA's PTX. Final when the device is prepared. */
    bool warp_shuffles;      /* work-items of a warp exchange numbers */
    bool float16_matrices;   /* a warp multiplies matrices of float16 */
    bool bfloat16_matrices;  /* of bfloat16 */
    bool group_matrices;     /* four warps multiply matrices of both types together, and a
                                work-group may have CA_GROUP_LOCAL_BYTES */
    bool ample_registers;    /* matrix code for two tiles of rows of head size 128 fits the
                             registers without spills */
    bool ample_local_memory; /* two work-groups of a compute unit have CA_AMPLE_LOCAL_BYTES each */
    int64_t nvidia_capability; /* 80 for sm_80; 0: none of these. For Device alone: kernels
                                  are chosen by the flags above */
    bool float64;              /* cl_khr_fp64 */
    bool float16;              /* cl_khr_fp16; storing halves needs no extension */
    bool keeps_programs;       /* the driver caches built programs on disk itself */
    bool optimises_slowly;     /* kernels with large work-groups take seconds to compile */
    bool optimises_later;      /* the driver optimises a kernel when the kernel first runs */
    bool is_known;             /* the driver has never ended a process: see opencl/apart.h */
    bool wakes_late;           /* a thread that waits for a command sleeps, and wakes up late */
    bool bfloat16_pairs;       /* it multiplies vectors of pairs; see ca_device_find_pairs */
    bool fast_pairs;           /* if it multiplies vectors of pairs, it is faster so than by fma */
    bool amx;                  /* it multiplies matrices of pairs; see ca_device_find_amx */
    ca_memory_mode memory;
    ca_tuning *tuning; /* the tuner's numbers; attention/knobs.h reads them */
} ca_device_info;

typedef struct {
    size_t allocated_bytes; /* in use */
    size_t allocated_blocks;
    size_t pooled_bytes; /* kept for later */
    size_t pooled_blocks;
    size_t peak_bytes; /* the most that was in use at once */
} ca_memory_stats;

/* A device remembers so many steps of launches, the last ones of all threads: see opencl/launched.h. */
#define CA_MAX_LAUNCHED 256

/* Builds from source by a driver's compiler. PoCL compiles a kernel when the kernel first runs, and
   that time does not count. */
typedef struct {
    int64_t programs; /* builds that succeeded */
    double seconds;   /* of all builds, those that the compiler refused too */
} ca_build_stats;

#endif
