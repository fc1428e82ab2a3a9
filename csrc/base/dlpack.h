/* SPDX-License-Identifier: MIT
 *
 * The structs of DLPack 1. With them array libraries hand each other memory
 * (https://dmlc.github.io/dlpack/latest/c_api.html).
 */
#ifndef CLATTN_DLPACK_H
#define CLATTN_DLPACK_H

#include <stdint.h>

/* Types of devices, which say whose the memory is. */
enum {
    CA_DLPACK_CPU = 1,
    CA_DLPACK_CUDA_HOST = 3, /* the host's, pinned for CUDA */
    CA_DLPACK_OPENCL = 4,
    CA_DLPACK_ROCM_HOST = 11,
};

/* Kinds of elements. */
enum {
    CA_DLPACK_INT = 0,
    CA_DLPACK_UINT = 1,
    CA_DLPACK_FLOAT = 2,
    CA_DLPACK_BFLOAT = 4,
    CA_DLPACK_BOOL = 6,
};

/* Flags. */
#define CA_DLPACK_READ_ONLY UINT64_C(1)
#define CA_DLPACK_COPIED    UINT64_C(2)

typedef struct {
    int32_t type;
    int32_t id;
} ca_dlpack_device;

typedef struct {
    void *data;
    ca_dlpack_device device;
    int32_t ndim;
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: C-contiguous */
    uint64_t byte_offset;
} ca_dlpack_tensor;

/* In a capsule "dltensor". */
typedef struct ca_dlpack_managed {
    ca_dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct ca_dlpack_managed *self);
} ca_dlpack_managed;

/* In a capsule "dltensor_versioned". */
typedef struct ca_dlpack_versioned {
    uint32_t major;
    uint32_t minor;
    void *context;
    void (*deleter)(struct ca_dlpack_versioned *self);
    uint64_t flags;
    ca_dlpack_tensor tensor;
} ca_dlpack_versioned;

/* The same exchange without Python calls. The type of an array may have it as
   __dlpack_c_exchange_api__, a capsule "dlpack_exchange_api". Functions return 0, or -1
   with an exception. */
typedef struct {
    uint32_t major;
    uint32_t minor;
    void *earlier_version;
    void *allocate;
    int (*from_object)(void *object, ca_dlpack_versioned **taken);
    int (*to_object)(ca_dlpack_versioned *handed, void **object); /* owns `handed` */
    void *describe;
    void *current_stream;
} ca_dlpack_exchange;

#endif
