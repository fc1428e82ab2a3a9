/* SPDX-License-Identifier: MIT */
#include "opencl/loader.h"

#include <stdbool.h>
#include <string.h>

#include "base/platform.h"
#include "base/strbuf.h"

/* dlsym gives a void *, which C11 does not convert to a function pointer. */
static bool
loader_symbol(void *library, const char *name, void *function, size_t size)
{
    void *symbol = ca_library_symbol(library, name);
    memcpy(function, &symbol, size);
    return symbol != NULL;
}

/* Fill the table. Returns the name of the first required function that is missing, or NULL. */
static const char *
loader_fill(ca_cl *cl)
{
    const char *missing = NULL;
#define CA_CL_LOAD(name)                                                                           \
    if (!loader_symbol(cl->library, #name, &cl->name, sizeof cl->name) && missing == NULL) {       \
        missing = #name;                                                                           \
    }
#define CA_CL_LOAD_OPTIONAL(name) loader_symbol(cl->library, #name, &cl->name, sizeof cl->name);
    CA_CL_FUNCTIONS(CA_CL_LOAD)
    CA_CL_OPTIONAL_FUNCTIONS(CA_CL_LOAD_OPTIONAL)
#undef CA_CL_LOAD
#undef CA_CL_LOAD_OPTIONAL
    return missing;
}

/* No library opened here is ever closed: drivers keep threads and exit handlers that
   run code in them until the process ends. */
ca_status
ca_cl_open(ca_cl *cl, const char *const *preload, const char *const *candidates, ca_error *error)
{
    ca_status status = CA_OK;
    ca_strbuf tried = {0};
    char reason[512];
    for (int i = 0; preload != NULL && preload[i] != NULL; i++) {
        ca_library_open(preload[i], true, reason, sizeof reason);
    }
    for (int i = 0; candidates != NULL && candidates[i] != NULL; i++) {
        *cl = (ca_cl){0};
        cl->library = ca_library_open(candidates[i], false, reason, sizeof reason);
        if (cl->library == NULL) {
            ca_strbuf_append(&tried, "; %s", reason);
            continue;
        }
        const char *missing = loader_fill(cl);
        if (missing == NULL) {
            goto done;
        }
        ca_strbuf_append(&tried, "; %s has no %s", candidates[i], missing);
    }
    *cl = (ca_cl){0};
    status = ca_error_set(error, CA_ERROR_DEVICE,
                          "no OpenCL loader could be opened%s; most drivers bring one, as does "
                          "Debian's ocl-icd-libopencl1",
                          ca_strbuf_text(&tried));
done:
    ca_strbuf_free(&tried);
    return status;
}

/* cl_ext.h defines this value, but includes headers that some packages lack. */
#define CA_CL_PLATFORM_NOT_FOUND_KHR (-1001)

#define CA_CL_CODE(name) {name, #name}

static const struct {
    cl_int code;
    const char *name;
} error_names[] = {
    CA_CL_CODE(CL_SUCCESS),
    CA_CL_CODE(CL_DEVICE_NOT_FOUND),
    CA_CL_CODE(CL_DEVICE_NOT_AVAILABLE),
    CA_CL_CODE(CL_COMPILER_NOT_AVAILABLE),
    CA_CL_CODE(CL_MEM_OBJECT_ALLOCATION_FAILURE),
    CA_CL_CODE(CL_OUT_OF_RESOURCES),
    CA_CL_CODE(CL_OUT_OF_HOST_MEMORY),
    CA_CL_CODE(CL_PROFILING_INFO_NOT_AVAILABLE),
    CA_CL_CODE(CL_MEM_COPY_OVERLAP),
    CA_CL_CODE(CL_IMAGE_FORMAT_MISMATCH),
    CA_CL_CODE(CL_IMAGE_FORMAT_NOT_SUPPORTED),
    CA_CL_CODE(CL_BUILD_PROGRAM_FAILURE),
    CA_CL_CODE(CL_MAP_FAILURE),
    CA_CL_CODE(CL_MISALIGNED_SUB_BUFFER_OFFSET),
    CA_CL_CODE(CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST),
    CA_CL_CODE(CL_COMPILE_PROGRAM_FAILURE),
    CA_CL_CODE(CL_LINKER_NOT_AVAILABLE),
    CA_CL_CODE(CL_LINK_PROGRAM_FAILURE),
    CA_CL_CODE(CL_DEVICE_PARTITION_FAILED),
    CA_CL_CODE(CL_KERNEL_ARG_INFO_NOT_AVAILABLE),
    CA_CL_CODE(CL_INVALID_VALUE),
    CA_CL_CODE(CL_INVALID_DEVICE_TYPE),
    CA_CL_CODE(CL_INVALID_PLATFORM),
    CA_CL_CODE(CL_INVALID_DEVICE),
    CA_CL_CODE(CL_INVALID_CONTEXT),
    CA_CL_CODE(CL_INVALID_QUEUE_PROPERTIES),
    CA_CL_CODE(CL_INVALID_COMMAND_QUEUE),
    CA_CL_CODE(CL_INVALID_HOST_PTR),
    CA_CL_CODE(CL_INVALID_MEM_OBJECT),
    CA_CL_CODE(CL_INVALID_IMAGE_FORMAT_DESCRIPTOR),
    CA_CL_CODE(CL_INVALID_IMAGE_SIZE),
    CA_CL_CODE(CL_INVALID_SAMPLER),
    CA_CL_CODE(CL_INVALID_BINARY),
    CA_CL_CODE(CL_INVALID_BUILD_OPTIONS),
    CA_CL_CODE(CL_INVALID_PROGRAM),
    CA_CL_CODE(CL_INVALID_PROGRAM_EXECUTABLE),
    CA_CL_CODE(CL_INVALID_KERNEL_NAME),
    CA_CL_CODE(CL_INVALID_KERNEL_DEFINITION),
    CA_CL_CODE(CL_INVALID_KERNEL),
    CA_CL_CODE(CL_INVALID_ARG_INDEX),
    CA_CL_CODE(CL_INVALID_ARG_VALUE),
    CA_CL_CODE(CL_INVALID_ARG_SIZE),
    CA_CL_CODE(CL_INVALID_KERNEL_ARGS),
    CA_CL_CODE(CL_INVALID_WORK_DIMENSION),
    CA_CL_CODE(CL_INVALID_WORK_GROUP_SIZE),
    CA_CL_CODE(CL_INVALID_WORK_ITEM_SIZE),
    CA_CL_CODE(CL_INVALID_GLOBAL_OFFSET),
    CA_CL_CODE(CL_INVALID_EVENT_WAIT_LIST),
    CA_CL_CODE(CL_INVALID_EVENT),
    CA_CL_CODE(CL_INVALID_OPERATION),
    CA_CL_CODE(CL_INVALID_GL_OBJECT),
    CA_CL_CODE(CL_INVALID_BUFFER_SIZE),
    CA_CL_CODE(CL_INVALID_MIP_LEVEL),
    CA_CL_CODE(CL_INVALID_GLOBAL_WORK_SIZE),
    CA_CL_CODE(CL_INVALID_PROPERTY),
    CA_CL_CODE(CL_INVALID_IMAGE_DESCRIPTOR),
    CA_CL_CODE(CL_INVALID_COMPILER_OPTIONS),
    CA_CL_CODE(CL_INVALID_LINKER_OPTIONS),
    CA_CL_CODE(CL_INVALID_DEVICE_PARTITION_COUNT),
    CA_CL_CODE(CL_INVALID_PIPE_SIZE),
    CA_CL_CODE(CL_INVALID_DEVICE_QUEUE),
    CA_CL_CODE(CL_INVALID_SPEC_ID),
    CA_CL_CODE(CL_MAX_SIZE_RESTRICTION_EXCEEDED),
    {CA_CL_PLATFORM_NOT_FOUND_KHR, "CL_PLATFORM_NOT_FOUND_KHR"},
};

#undef CA_CL_CODE

const char *
ca_cl_error_name(cl_int code)
{
    for (size_t i = 0; i < sizeof error_names / sizeof error_names[0]; i++) {
        if (error_names[i].code == code) {
            return error_names[i].name;
        }
    }
    return "an unknown OpenCL error";
}

ca_status
ca_cl_check(cl_int code, const char *call, const char *device_name, ca_error *error)
{
    if (code == CL_SUCCESS) {
        return CA_OK;
    }
    bool memory = code == CL_MEM_OBJECT_ALLOCATION_FAILURE || code == CL_OUT_OF_HOST_MEMORY ||
                  code == CL_INVALID_BUFFER_SIZE;
    return ca_error_set(error, memory ? CA_ERROR_MEMORY : CA_ERROR_DEVICE,
                        "%s gave %s (%d) on device '%s'", call, ca_cl_error_name(code), (int)code,
                        device_name);
}

ca_status
ca_cl_check_kernel(cl_int code, const char *call, const char *device_name, ca_error *error)
{
    static const cl_int codes[] = {
        CL_OUT_OF_RESOURCES,          CL_INVALID_PROGRAM_EXECUTABLE, CL_INVALID_KERNEL_NAME,
        CL_INVALID_KERNEL_DEFINITION, CL_INVALID_KERNEL_ARGS,        CL_INVALID_ARG_SIZE,
        CL_INVALID_WORK_GROUP_SIZE,   CL_INVALID_WORK_ITEM_SIZE,
    };
    ca_status status = ca_cl_check(code, call, device_name, error);
    for (size_t n = 0; n < sizeof codes / sizeof codes[0]; n++) {
        status = code == codes[n] ? CA_ERROR_KERNEL : status;
    }
    return status;
}
